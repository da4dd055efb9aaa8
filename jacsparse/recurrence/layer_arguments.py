"""Checks of what a layer is given: options, tensors and packed sequences."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

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
            raise TypeError(f"{what} {dtype}; layers take float32 and float64, input and weights alike")
    if value.dtype != like.dtype:
        raise TypeError(f"{name} is {value.dtype} and the weights are {like.dtype}; convert one of them")
    check_dense(name, value)
    return value


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
