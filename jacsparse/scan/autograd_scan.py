"""A scan as the backward pass of an autograd node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

import torch

from ..runtime import is_batched
from ..stages import Record, Run
from ..tracing import saved_handle, saves_objects, without_saving_hooks


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
    that autograd saves: until the backward pass, unless the graph is retained. Within ``torch.utils.checkpoint`` it
    ends with the forward pass, and the backward pass takes the run that is made anew.
    """
    # Only externals that stages read: autograd would call the hooks of the others too.
    places = sorted(set().union(*(record.externals for record in run.records)))
    externals = [run.trace.externals[place] for place in places]
    value = run.trace.output.detach() if output is None else output
    # Hooks that store tensors elsewhere, as `save_on_cpu`, would lose the run.
    with contextlib.nullcontext() if saves_objects() else without_saving_hooks():
        result: torch.Tensor = _Scanned.apply(puller, places, run, value, x, *externals)
    return result


class _Scanned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        puller: Puller,
        places: Sequence[int],
        run: Run,
        output: torch.Tensor,
        x: torch.Tensor,
        *externals: torch.Tensor,
    ) -> torch.Tensor:
        ctx.puller = puller
        # Autograd saves tensors alone: the run is an attribute of one.
        ctx.save_for_backward(saved_handle((run, places)))
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
        run, places = handle.content
        for_input = ctx.needs_input_grad[4]
        needed = [place for place, wants in zip(places, ctx.needs_input_grad[5:], strict=True) if wants]
        try:
            with without_saving_hooks():
                of_input, of_externals = ctx.puller.pull_back(run.records, gradient, needed, for_input=for_input)
        except RuntimeError as error:
            if not is_batched(gradient):
                raise
            # Autograd alone goes back with several gradients at once.
            raise RuntimeError(
                "torch.vmap and is_grads_batched=True ask for several gradients at once, which this "
                f"{ctx.puller.module} does not give; take one after the other, as vectorize=False does, or call its "
                ".module"
            ) from error
        return (None, None, None, None, of_input, *map(of_externals.get, places))
