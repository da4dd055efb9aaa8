"""Which passes of layers are left to PyTorch's own kernels, because those are faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .recurrences_cuda import LARGEST
from .reports import Report


class _Range(NamedTuple):
    """Where our kernels are faster than PyTorch's: from so many steps on, in states of at most so many elements.

    PyTorch's kernels have less overhead per call, and faster products of large matrices.

    Attributes
    ----------
    steps, size : int
        The fewest steps, and the most elements of one state.
    all_states : int
        The most elements of the states of a batch.
    """

    steps: int
    size: int
    all_states: int


class _Ranges(NamedTuple):
    """Of passes without gradients, and of those with their backward passes."""

    inference: tuple[_Range, ...]
    training: tuple[_Range, ...]


#: Measured on one thread and on two of an Intel Xeon, in float32 and float64: round numbers, within which no measured
#: pass was slower than PyTorch's. Beyond them ours may still be faster, by many threads, for long sequences or where a
#: gradient vanishes.
_OURS = {
    "GRU": _Ranges(
        (_Range(32, 32, 8192), _Range(32, 128, 2048)),
        (_Range(32, 32, 16_384), _Range(32, 64, 8192), _Range(32, 256, 4096)),
    ),
    "LSTM": _Ranges((_Range(32, 32, 4096), _Range(64, 128, 1024)), (_Range(32, 32, 8192), _Range(32, 256, 2048))),
    **dict.fromkeys(
        ("RNN_TANH", "RNN_RELU"),
        _Ranges(
            (_Range(64, 128, 1024), _Range(256, 128, 2048)),
            (_Range(32, 256, 2048), _Range(64, 128, 8192), _Range(64, 256, 4096), _Range(64, 512, 512)),
        ),
    ),
}
#: oneDNN, which PyTorch has for float32, computes all steps by one operator.
_OURS_FLOAT32 = {**_OURS, "LSTM": _Ranges((), (_Range(512, 32, 1024),))}


def ours_are_faster(mode: str, dtype: torch.dtype, steps: int, batch: int, size: int, *, trains: bool) -> bool:
    """Whether our kernels take a pass on the CPU faster than PyTorch's, as far as was measured."""
    ranges = (_OURS_FLOAT32 if dtype == torch.float32 else _OURS)[mode]
    for least, most, all_states in ranges.training if trains else ranges.inference:
        if steps >= least and size <= most and size * batch <= all_states:
            return True
    return False


#: PyTorch's operators, by a layer's `mode`.
OPERATORS: dict[str, Callable[..., Sequence[torch.Tensor]]] = {mode: getattr(torch, mode.lower()) for mode in _OURS}


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
