"""What a run does that no replay of its graph repeats."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..patterns import UnsupportedOperatorError
from .traces import Trace, memory_of

aten = torch.ops.aten


def check_replays(trace: Trace, name: str) -> None:
    """Raise where a replay of a graph is not a run of the function.

    Raises
    ------
    UnsupportedOperatorError
        It names the operator, what it does, and what to do.
    """
    for operator, effect in _effects(trace):
        raise UnsupportedOperatorError(
            f"{name}: {operator} {effect}, so that no prepared program repeats the call; "
            f"{'write to a clone' if 'writes' in effect else 'call jacsparse.jacobian, which runs it each time'}"
        )


def _effects(trace: Trace) -> Iterator[tuple[str, str]]:
    graph, made = trace.graph, set[int]()
    varies = {0, *graph.captures}
    for node in graph.nodes:
        values = [value for _, value in node.tensors]
        for value in values:
            # A capture gets its number at its first use.
            if value in graph.captures and value >= node.begin[0] and _is_made(trace, value, made):
                yield "data", "gives a tensor of the run another name"
        if node.draws:
            yield node.name, "draws random numbers"
        shows = node.facts is not None and torch.Tag.data_dependent_output in node.overload.tags
        if shows and varies.intersection(values):
            yield node.name, "shows Python what a tensor holds"
        if node.writes_outside:
            yield node.name, "writes to a tensor from before the call"
        if varies.intersection(values):
            varies.update(node.results)
        before = {memory_of(trace.tensor(value)) for value in values}
        made |= {memory_of(trace.tensor(value)) for value in node.results} - before
    if trace.may_have_hooks:
        yield "register_hook", "changes gradients"


def _is_made(trace: Trace, value: int, made: set[int]) -> bool:
    tensor = trace.tensor(value)
    return tensor.layout == torch.strided and memory_of(tensor) in made
