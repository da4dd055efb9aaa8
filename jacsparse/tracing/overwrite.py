"""Writes in place, as an operator of our own."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace

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
        memory = np.full(1 + max(_last_place(*self.view), _last_place(*self.written)), -1)

        def part(size: torch.Size, stride: tuple[int, ...], offset: int) -> np.ndarray:
            strides = [step * memory.itemsize for step in stride]
            return np.lib.stride_tricks.as_strided(memory[offset:], size, strides)

        # By NumPy, so that no call is seen where calls are collected.
        part(*self.written)[...] = np.arange(self.written[0].numel()).reshape(self.written[0])
        return torch.from_numpy(part(*self.view).copy())

    @property
    def meets(self) -> bool:
        """Whether the two tensors have an element in common."""
        return _meet(self.view, self.written)

    def __call__(self, tensor: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        places = self.sources.to(tensor.device)
        if not written.numel():
            return tensor.clone()
        return torch.where(places < 0, tensor, written.flatten()[places.clamp_min(0)])


@functools.lru_cache(maxsize=1024)
def _meet(some: Extent, other: Extent) -> bool:
    return np.shares_memory(_without_elements(*some), _without_elements(*other))


def _without_elements(size: torch.Size, stride: tuple[int, ...], offset: int) -> np.ndarray:
    """An array that lies as a tensor of bytes would at address 1, where nobody may read it."""
    interface = {"version": 3, "typestr": "|u1", "shape": size, "strides": stride, "data": (1 + offset, True)}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def extent_of(tensor: torch.Tensor) -> Extent:
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())


def _last_place(size: torch.Size, stride: tuple[int, ...], offset: int) -> int:
    """The last place in memory of a strided tensor."""
    return offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True) if n)
