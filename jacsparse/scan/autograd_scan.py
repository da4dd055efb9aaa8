"""A scan as the backward pass of an autograd node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

import torch

from ..stages import Record, Run


class Puller(Protocol):
    """What pulls gradients back through the records of a chain, as `Scanner` does."""

    #: The module that it is for, as messages name it.
    module: ClassVar[str]

    def pull_back(
        self, records: Sequence[Record], gradient: torch.Tensor, externals: Iterable[int], *, for_input: bool
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Gradients of the chain's input and of externals, for a gradient of its output."""


def scanned(puller: Puller, run: Run, x: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
    """The output of a forward pass as one node of autograd's graph, whose backward pass is the scan.

    Its output is that of the run or, of a chain that goes on elsewhere, `output`. The run lives as long as the tensors
    that autograd saves: until the backward pass, unless the graph is retained.
    """

    def unpack(run: Run) -> torch.Tensor:
        handle = torch.empty(0)
        handle.run = run  # type: ignore[attr-defined]
        return handle

    # Only externals that stages read: autograd would call the hooks of the others too.
    places = sorted(set().union(*(record.externals for record in run.records)))
    externals = [run.recording.externals[place] for place in places]
    value = run.recording.output.detach() if output is None else output
    with torch.autograd.graph.saved_tensors_hooks(lambda _: run, unpack):
        result: torch.Tensor = _Scanned.apply(puller, places, value, x, *externals)
    return result


class _Scanned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        puller: Puller,
        places: Sequence[int],
        output: torch.Tensor,
        x: torch.Tensor,
        *externals: torch.Tensor,
    ) -> torch.Tensor:
        ctx.puller, ctx.places = puller, places
        # The hooks of `scanned` save the run instead of this tensor.
        ctx.save_for_backward(x.new_empty(0))
        # A copy, because later operators may overwrite it, and the last stage may need the output.
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True asks for gradients of gradients, which {ctx.puller.module} does not give; "
                "call the module inside it for those"
            )
        (handle,) = ctx.saved_tensors
        for_input = ctx.needs_input_grad[3]
        needed = [place for place, wants in zip(ctx.places, ctx.needs_input_grad[4:], strict=True) if wants]
        x_gradient, external_gradients = ctx.puller.pull_back(handle.run.records, gradient, needed, for_input=for_input)
        return (None, None, None, x_gradient, *(external_gradients.get(place) for place in ctx.places))
