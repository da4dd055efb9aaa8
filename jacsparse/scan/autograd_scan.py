"""A scan as the backward pass of an autograd node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..stages import Run
from .scanner import Scanner


def scanned(scanner: Scanner, run: Run, x: torch.Tensor) -> torch.Tensor:
    """The output of a forward pass as one node of autograd's graph, whose backward pass is the scan.

    The run lives as long as the tensors that autograd saves: until the backward pass, unless the graph is retained.
    """

    def unpack(run: Run) -> torch.Tensor:
        handle = torch.empty(0)
        handle.run = run  # type: ignore[attr-defined]
        return handle

    # Only externals that stages read: autograd would call the hooks of the others too.
    places = sorted(set().union(*(record.externals for record in run.records)))
    externals = [run.recording.externals[place] for place in places]
    with torch.autograd.graph.saved_tensors_hooks(lambda _: run, unpack):
        output: torch.Tensor = _Scanned.apply(scanner, places, run.recording.output.detach(), x, *externals)
    return output


class _Scanned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scanner: Scanner,
        places: Sequence[int],
        output: torch.Tensor,
        x: torch.Tensor,
        *externals: torch.Tensor,
    ) -> torch.Tensor:
        ctx.scanner, ctx.places = scanner, places
        # The hooks of `scanned` save the run instead of this tensor.
        ctx.save_for_backward(x.new_empty(0))
        # A copy, because later operators may overwrite it, and the last stage may need the output.
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True asks for gradients of gradients, which nn.Scan does not give; "
                "call the module without Scan for those"
            )
        (handle,) = ctx.saved_tensors
        for_input = ctx.needs_input_grad[3]
        needed = [place for place, wants in zip(ctx.places, ctx.needs_input_grad[4:], strict=True) if wants]
        x_gradient, external_gradients = ctx.scanner.pull_back(
            handle.run.records, gradient, needed, for_input=for_input
        )
        return (None, None, None, x_gradient, *(external_gradients.get(place) for place in ctx.places))
