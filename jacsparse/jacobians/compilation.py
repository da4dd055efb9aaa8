"""Graphs as machine code by TorchInductor, without the checks that ``torch.compile`` makes before each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

#: A graph as a function of all its inputs.
Runner = Callable[[Sequence[torch.Tensor]], Any]


def runner(graph: fx.GraphModule, inputs: Sequence[torch.Tensor], compile: bool) -> Runner:
    """A function of all inputs of a graph.

    Compiled, it takes tensors of the forms of `inputs` alone, and the caller sees to that.
    """
    if not compile:
        return lambda inputs: graph.forward(*inputs)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    used = [place for place, node in enumerate(placeholders) if node.users]
    for node in placeholders:
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    call = _compiled(graph, [inputs[place] for place in used])
    return lambda inputs: call(*[inputs[place] for place in used])


def _compiled(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    # It loads the compiler, which takes long.
    import torch._inductor

    with torch.no_grad():
        return torch._inductor.compile(graph, [*inputs])
