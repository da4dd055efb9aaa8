"""What a layer is given, checked: options, tensors and packed sequences."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from ..runtime import a_type
from .sequences import check_dense
from .solvers import Choice, parse

_DTYPES = (torch.float32, torch.float64)


class ChosenSolvers(NamedTuple):
    """The solvers of a layer's states and of their gradients, and the options that ask for them."""

    options: tuple[object, object, object]
    forward: Choice
    backward: Choice

    @classmethod
    def of(cls, schedule: object, forward: object, chunk: object) -> ChosenSolvers:
        """Those of the options that `RNN` takes; TypeError or ValueError where one is none of them."""
        if not isinstance(chunk, int | np.integer) or isinstance(chunk, bool) or chunk < 1:
            raise ValueError(f"chunk is {chunk!r}; expected a number of steps of at least 1")
        length = int(chunk)
        return cls((schedule, forward, chunk), parse(forward, "states", length), parse(schedule, chunk=length))


def checked(name: str, value: object, like: torch.Tensor) -> torch.Tensor:
    """`value` where the layer can work on it, whose weights are like another tensor; under autocast of their dtype."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is {a_type(value)}; expected a torch.Tensor")
    if (
        value.is_cpu
        and like.is_cpu
        and value.dtype == like.dtype in _DTYPES
        and value.layout == torch.strided
        and not value.is_nested
    ):
        return value
    device = value.device
    if device != like.device or device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"{name} is on {value.device} and the weights are on {like.device}; both must be on the CPU or on "
            "one CUDA device: move them with .to()"
        )
    if value.dtype != like.dtype and torch.is_autocast_enabled(device.type) and value.is_floating_point():
        value = value.to(like.dtype)
    for what, dtype in ((f"{name} is", value.dtype), ("the weights are", like.dtype)):
        if dtype not in _DTYPES:
            raise TypeError(
                f"{what} {dtype}; layers take float32 and float64, input and weights alike: convert them by "
                ".float(), or bring back torch.nn's layers by jacsparse.nn.convert(model, to='torch')"
            )
    if value.dtype != like.dtype:
        raise TypeError(f"{name} is {value.dtype} and the weights are {like.dtype}; convert one of them")
    check_dense(name, value)
    return value


class Given(NamedTuple):
    """What a layer is given, and what it gives of it.

    Attributes
    ----------
    x : Tensor
        The input, ``(time, batch, features)`` or, where packed, as rows.
    steps, batch : int
        Of the longest sample, and samples.
    packed : PackedSequence or None
        The input, where it is packed.
    single : bool
        Whether it is a single sequence.
    batch_first : bool
        Whether samples are along the first axis of the input and of the output.
    """

    x: torch.Tensor
    steps: int
    batch: int
    packed: PackedSequence | None
    single: bool
    batch_first: bool

    @classmethod
    def of(cls, input: Any, weight: torch.Tensor, features: int, *, batch_first: bool, may_be_empty: bool) -> Given:
        """A layer's input; TypeError or ValueError where it does not fit weights like `weight`."""
        packed = input if isinstance(input, PackedSequence) else None
        x = checked("input", input if packed is None else input.data, weight)
        if packed is not None:
            if x.ndim != 2 or x.shape[1] != features:
                raise ValueError(f"input.data has shape {tuple(x.shape)}; expected (steps, {features})")
            return cls(x, *packed_size(packed.batch_sizes, len(x)), packed, False, batch_first)
        shape = x.shape
        if len(shape) not in (2, 3) or shape[-1] != features:
            expected = "batch, time" if batch_first else "time, batch"
            raise ValueError(
                f"input has shape {tuple(x.shape)}; expected ({expected}, {features}) or (time, {features}) for a "
                "single sequence"
            )
        single = len(shape) == 2
        if single:
            x = x.unsqueeze(1)
        elif batch_first:
            x = x.transpose(0, 1)
        time, batch, _ = x.shape
        if not time and not may_be_empty:
            raise ValueError(f"input has shape {tuple(shape)}: no steps; expected at least one")
        return cls(x, time, batch, None, single, batch_first)

    def states(self, hx: Any, places: int, kinds: int, size: int) -> list[torch.Tensor]:
        """First states of so many kinds, ``(layers · directions, batch, hidden)``, in the order of samples."""
        if hx is None:
            return [self.x.new_zeros(places, self.batch, size)] * kinds
        parts = hx if kinds > 1 else (hx,)
        if not isinstance(parts, (tuple, list)) or len(parts) != kinds:
            expected = "a pair of" if kinds == 2 else f"a tuple of {kinds}"
            raise TypeError(f"hx is {a_type(hx)}; expected {expected} tensors, one for each vector of the state")
        shape = (places, size) if self.single else (places, self.batch, size)
        states = []
        for number, part in enumerate(parts):
            name = f"hx[{number}]" if kinds > 1 else "hx"
            state = checked(name, part, self.x)
            if state.shape != shape:
                raise ValueError(f"{name} has shape {tuple(state.shape)}; expected {shape}")
            states.append(state.unsqueeze(1) if self.single else state)
        if self.packed is not None and self.packed.sorted_indices is not None:
            states = [part.index_select(1, self.packed.sorted_indices) for part in states]
        return states

    def results(self, x: torch.Tensor, states: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """Outputs and last states as the input was given: packed, of a single sequence, or the batch first."""
        output: Any = x
        if (packed := self.packed) is not None:
            output = PackedSequence(x, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
            if packed.unsorted_indices is not None:
                states = [part.index_select(1, packed.unsorted_indices) for part in states]
        elif self.single:
            output, states = x.squeeze(1), [part.squeeze(1) for part in states]
        elif self.batch_first:
            output = x.transpose(0, 1)
        return output, states[0] if len(states) == 1 else tuple(states)


def packed_size(batch_sizes: torch.Tensor, rows: int) -> tuple[int, int]:
    """The steps and the samples of a packed input."""
    if batch_sizes.dtype != torch.int64:
        raise TypeError(f"batch_sizes of the packed input are {batch_sizes.dtype}; expected torch.int64")
    sizes = batch_sizes.tolist()
    falling = all(one >= other for one, other in pairwise(sizes))
    if not sizes or min(sizes) < 1 or not falling or sum(sizes) != rows:
        raise ValueError(
            f"batch_sizes of the packed input are {sizes}, its data have {rows} steps; make it with "
            "torch.nn.utils.rnn.pack_padded_sequence"
        )
    return len(sizes), sizes[0]


@functools.cache
def recurrence_names(layers: int, bidirectional: bool) -> tuple[str, ...]:
    """What PyTorch's names of the weights end in, by layer and direction: ``l0``, ``l0_reverse`` and so on."""
    directions = ("", "_reverse") if bidirectional else ("",)
    return tuple([f"l{layer}{direction}" for layer in range(layers) for direction in directions])


def warm_states(warm: object, count: int) -> Sequence[torch.Tensor | None]:
    """The warm starts of `count` layers and directions, None where there is none."""
    if warm is None:
        return [None] * count
    if not isinstance(warm, list | tuple) or not all(isinstance(part, torch.Tensor | None) for part in warm):
        raise TypeError("warm is no list of tensors; pass `boundaries` of an earlier pass")
    if len(warm) != count:
        raise ValueError(f"warm has {len(warm)} entries; expected {count}: `boundaries` of an earlier pass")
    return warm
