"""Writes in place, as an operator of our own."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

#: Size, stride and offset of a tensor: where its elements are in memory.
Extent = tuple[torch.Size, tuple[int, ...], int]


@dataclass(frozen=True)
class Overwrite:
    """An operator: a tensor after a write to another tensor, ``written``, that may share memory with it."""

    view: Extent
    written: Extent

    name = "jacsparse.overwrite"

    @functools.cached_property
    def sources(self) -> torch.Tensor:
        """The place in the written tensor of each element; -1 for an element outside it."""
        return _sources(self.view, self.written)

    @property
    def meets(self) -> bool:
        """Whether the two tensors have an element in common."""
        return _meets(self.view, self.written)

    def __call__(self, tensor: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        places = self.sources.to(tensor.device)
        if not written.numel():
            return tensor.clone()
        return torch.where(places < 0, tensor, written.flatten()[places.clamp_min(0)])


def _sources(view: Extent, written: Extent) -> torch.Tensor:
    memory = np.full(1 + max(_last_place(*view), _last_place(*written)), -1)

    def part(size: torch.Size, stride: tuple[int, ...], offset: int) -> np.ndarray:
        strides = [step * memory.itemsize for step in stride]
        return np.lib.stride_tricks.as_strided(memory[offset:], size, strides)

    # By NumPy, so that no call is seen where calls are collected.
    part(*written)[...] = np.arange(written[0].numel()).reshape(written[0])
    return torch.from_numpy(part(*view).copy())


@functools.lru_cache(maxsize=1024)
def _meets(view: Extent, written: Extent) -> bool:
    if not view[0].numel() or not written[0].numel():
        return False
    (first, last), (begin, end) = ((extent[2], _last_place(*extent)) for extent in (view, written))
    # Two tensors whose ranges overlap may still share no element, as two columns of a matrix.
    return first <= end and begin <= last and (view == written or bool((_sources(view, written) >= 0).any()))


def extent_of(tensor: torch.Tensor) -> Extent:
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())


def _last_place(size: torch.Size, stride: tuple[int, ...], offset: int) -> int:
    """The last place in memory of a strided tensor."""
    return offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True) if n)
