"""Which passes of layers are left to PyTorch's own kernels, because those are faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from .once_differentiable import LayerOnce
from .recurrences_cuda import LARGEST
from .reports import Report

#: Where our kernels are faster than PyTorch's, which have less overhead per call, and faster products of large
#: matrices: the fewest steps, the most elements of one state, and the most of the states of a batch. First of passes
#: without gradients, then of those with their backward passes. Measured on one thread and on two of an Intel Xeon, in
#: float32 and float64: round numbers, within which no measured pass was slower than PyTorch's. Beyond them ours may
#: still be faster, by many threads, for long sequences or where a gradient vanishes.
_OURS = {
    "GRU": (
        ((32, 32, 8192), (32, 128, 2048)),
        ((32, 32, 16_384), (32, 64, 8192), (32, 256, 4096)),
    ),
    "LSTM": (((32, 32, 4096), (64, 128, 1024)), ((32, 32, 8192), (32, 256, 2048))),
    **dict.fromkeys(
        ("RNN_TANH", "RNN_RELU"),
        (
            ((64, 128, 1024), (256, 128, 2048)),
            ((32, 256, 2048), (64, 128, 8192), (64, 256, 4096), (64, 512, 512)),
        ),
    ),
}
#: Steps whose operators take PyTorch as long as a call of ours takes beside its steps, without gradients and with them.
#: Operators and lines of Python take about as much of each other on any processor: 7 to 13 steps of a GRU, 4 to 8 with
#: gradients, 8 to 28 of an RNN, and 9 to 20 with them, on that Xeon and on an AMD EPYC.
_EVEN = {"GRU": (12, 8), **dict.fromkeys(("RNN_TANH", "RNN_RELU"), (28, 20))}
#: oneDNN, which PyTorch has for float32, computes all steps by one operator.
_OURS_FLOAT32 = {**_OURS, "LSTM": ((), ((512, 32, 1024),))}

#: Passes of fewer steps are left to PyTorch within transforms of ``torch.func``.
FEW = 32


def ours_are_faster(mode: str, dtype: torch.dtype, steps: int, batch: int, size: int, *, trains: bool) -> bool:
    """Whether our kernels take a pass on the CPU faster than PyTorch's, as far as was measured.

    Our products may take longer than PyTorch's, by as much as its operators take. Of fewer steps than were measured, a
    call leaves less of that for the products of each, and so for the states of a batch: nothing at `_EVEN` steps.
    """
    ranges = (_OURS_FLOAT32 if dtype == torch.float32 else _OURS)[mode][trains]
    shortest, even = min((least for least, _, _ in ranges), default=0), _EVEN.get(mode, (math.inf, math.inf))[trains]
    share = 1.0
    if even < steps < shortest:
        share, steps = (1 - even / steps) / (1 - even / shortest), shortest
    for least, most, all_states in ranges:
        if steps >= least and size <= most and size * batch <= share * all_states:
            return True
    return False


#: PyTorch's operators, by a layer's `mode`.
OPERATORS: dict[str, Callable[..., Sequence[torch.Tensor]]] = {mode: getattr(torch, mode.lower()) for mode in _OURS}


def by_torch(mode: str, x: torch.Tensor, packed: PackedSequence | None, hx: Any, options: tuple[Any, ...]) -> Any:
    """Outputs and last states by PyTorch's operator, which is called as `torch.nn`'s layers do.

    Raises
    ------
    NotImplementedError
        Within a transform of ``torch.func`` that the operator has no rule for; it names the way out.
    """
    try:
        if packed is None:
            return OPERATORS[mode](x, hx, *options, False)
        return OPERATORS[mode](x, packed.batch_sizes, hx, *options)
    except RuntimeError as error:
        if "Batching rule not implemented" in str(error):
            raise NotImplementedError(LayerOnce.no_batching) from error
        if "forward AD with mkldnn" in str(error):
            raise NotImplementedError(
                "PyTorch's LSTM in float32 has no derivative in forward mode, which torch.func.jvp, jacfwd and hessian "
                "take; call them within torch.backends.mkldnn.flags(enabled=False)"
            ) from error
        raise


class LeftToTorch(NamedTuple):
    """A pass of some layers that PyTorch's kernels computed: its sizes, whether it trains, and whether on a device."""

    layers: Sequence[str]
    steps: int
    batch: int
    size: int
    trains: bool
    on_device: bool

    @property
    def boundaries(self) -> list[torch.Tensor | None]:
        """None for each layer and direction."""
        return [None] * len(self.layers)

    @property
    def reports(self) -> list[Report]:
        """By the layer's name and way."""
        states = f"{self.size} elements in a state"
        reason = (
            f"{states}, where kernels for CUDA devices have at most {LARGEST}"
            if self.on_device
            else f"{self.batch} samples of {self.steps} steps, {states}: PyTorch's kernels are usually as fast there, "
            "or faster"
        )
        return [
            Report(way, self.steps, name, ["torch.nn"], self.steps, 1, reason=reason)
            for name in self.layers
            for way in (("forward", "backward") if self.trains else ("forward",))
        ]
