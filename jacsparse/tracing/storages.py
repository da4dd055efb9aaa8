"""The memory that a run writes to: which value each element of it holds.

A write replaces elements of a storage, and every tensor on it sees that. A record of a run has no writes: where a
tensor on a written storage is read, it is the value that was written there last, if that has all of the tensor's
elements in their order, or else gathered from those that have some.

What autograd does not see, as under ``no_grad`` or through ``detach()`` and ``.data``, changes elements and leaves
derivatives as they were: from then on a storage knows both apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

#: Size, stride and offset of a tensor: where its elements are in memory.
Extent = tuple[torch.Size, tuple[int, ...], int]

#: For an element that no value of the run has.
OUTSIDE = -1


class Pieces(NamedTuple):
    """The elements of a tensor on a written storage.

    Attributes
    ----------
    values : list of int
        The values that have some of them, each once; `OUTSIDE` for those that no value has.
    which : ndarray of int, the tensor's shape
        The place in `values` of the one that has each element.
    places : ndarray of int, the tensor's shape
        The element's place in it, in C order.
    """

    values: list[int]
    which: np.ndarray
    places: np.ndarray


class Contents:
    """Which value each element of a storage holds, and which of that value's elements it is."""

    def __init__(self, size: int) -> None:
        self._size = size
        #: The last writes, which `_owners` and `_places` have not yet.
        self._writes: list[tuple[Extent, int]] = []
        self._last: tuple[Extent, int] | None = None
        self._owners: np.ndarray | None = None
        self._places: np.ndarray | None = None

    def copy(self) -> Contents:
        """The same contents, to be written to apart."""
        other = Contents(self._size)
        other._writes, other._last = list(self._writes), self._last
        if self._owners is not None and self._places is not None:
            other._owners, other._places = self._owners.copy(), self._places.copy()
        return other

    def write(self, extent: Extent, value: int) -> None:
        """Let the elements of a tensor be those of a value."""
        self._last = extent, value
        self._writes.append(self._last)

    def read(self, extent: Extent) -> int | Pieces:
        """The value whose elements a tensor has, or the pieces that it has of several."""
        if self._last is not None and self._last[0] == extent:
            return self._last[1]
        owners, places = self._arrays()
        which, at = _viewed(owners, extent), _viewed(places, extent)
        values, inverse = np.unique(which, return_inverse=True)
        return Pieces(values.tolist() or [OUTSIDE], inverse.reshape(which.shape), at.copy())

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        if self._owners is None or self._places is None:
            self._owners, self._places = np.full(self._size, OUTSIDE), np.zeros(self._size, np.int64)
        for extent, value in self._writes:
            _viewed(self._owners, extent)[...] = value
            _viewed(self._places, extent)[...] = numbered(extent[0])
        self._writes = []
        return self._owners, self._places


def extent_of(tensor: torch.Tensor) -> Extent:
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())


def memory_of(tensor: torch.Tensor) -> int:
    """The memory that a tensor lies in; 0 for a sparse tensor, which has several."""
    return 0 if tensor.layout != torch.strided else tensor.untyped_storage()._cdata


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor may lie in one place, as after `unfold` and `expand`; not those of a sparse one."""
    if tensor.layout != torch.strided:
        return False
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= reach:
            return True
        reach += step * (size - 1)
    return False


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that autograd knows `tensor` as a view of; `tensor` itself where it is no view."""
    return tensor._base if tensor._base is not None else tensor


def numbered(shape: torch.Size) -> np.ndarray:
    """The places of a tensor's elements in C order, in its shape."""
    return np.arange(shape.numel()).reshape(shape)


def _viewed(array: np.ndarray, extent: Extent) -> np.ndarray:
    """The elements of a vector that lie where a tensor's do."""
    size, stride, offset = extent
    return np.lib.stride_tricks.as_strided(array[offset:], size, [step * array.itemsize for step in stride])


class WrittenStorage:
    """A storage that a run writes to, or looks at under another name.

    Parameters
    ----------
    number : int
        Which one of a run's it is.
    tensor : Tensor
        A tensor on it: all are of its dtype.
    """

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self.number = number
        self.dtype = tensor.dtype
        self._size = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.contents = Contents(self._size)
        #: How often it was written to.
        self.writes = 0
        #: The numbers of families of tensors, each of views of one tensor to autograd; those of the last write.
        self._families: dict[int, int] = {}
        self._last: int | None = None
        #: What derivatives go by, by families of tensors, once these are others than the contents.
        self._derivatives: dict[int, Contents] = {}
        self._before: Contents | None = None

    def begin(self, tensor: torch.Tensor, value: int) -> None:
        """Let a tensor's elements be those of a value, before any write."""
        self._last = self.family(tensor)
        self.contents.write(extent_of(tensor), value)

    def write(self, tensor: torch.Tensor, value: int, *, seen: bool) -> None:
        """Let a tensor's elements be those of a value; autograd saw the write, or not."""
        family, extent = self.family(tensor), extent_of(tensor)
        self.writes += 1
        if self._before is None and (not seen or self._last not in (None, family)):
            self._before = self.contents.copy()
        self._last = family
        self.contents.write(extent, value)
        if self._before is not None and seen:
            if family not in self._derivatives:
                # What was detached has no derivative where it is not written to.
                has_gradient = base_of(tensor).requires_grad
                self._derivatives[family] = self._before.copy() if has_gradient else Contents(self._size)
            self._derivatives[family].write(extent, value)

    def derivatives(self, tensor: torch.Tensor) -> Contents:
        """What the derivative of a tensor goes by."""
        if self._before is None:
            return self.contents
        return self._derivatives.get(self.family(tensor), self._before)

    def has_elements_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's elements are the storage's, and no parts, conjugates or negatives of these."""
        is_changed = tensor.is_conj() or tensor.is_neg()
        return tensor.layout == torch.strided and tensor.dtype == self.dtype and not is_changed

    def family(self, tensor: torch.Tensor) -> int:
        """The number of the tensors that autograd takes for views of the same one."""
        return self._families.setdefault(base_of(tensor)._cdata, len(self._families))


@dataclass(eq=False)
class Storages:
    """The storages that a run writes to, or looks at under another name."""

    #: The run's values.
    _tensors: Sequence[torch.Tensor]
    _storages: dict[int, WrittenStorage] = field(default_factory=dict)
    #: By a tensor's id, how many of the writes to its storage its value has.
    _known: dict[int, int] = field(default_factory=dict)
    #: By storage, the values on it; and of how many values that is known.
    _values_on: dict[int, list[int]] = field(default_factory=dict)
    _placed: int = 0
    #: Whether there are any.
    written: bool = False

    def get(self, tensor: torch.Tensor) -> WrittenStorage | None:
        """The storage of a tensor, if it is one of these."""
        return self._storages.get(memory_of(tensor))

    def values_on(self, tensor: torch.Tensor) -> list[int]:
        """The values on a tensor's storage that nobody has overwritten."""
        for value in range(self._placed, len(self._tensors)):
            self._values_on.setdefault(memory_of(self._tensors[value]), []).append(value)
        self._placed = len(self._tensors)
        return self._values_on.get(memory_of(tensor), [])

    def overwrite(self, tensor: torch.Tensor) -> list[int]:
        """The values on a tensor's storage, which it is about to overwrite."""
        values = self.values_on(tensor)
        self._values_on.pop(memory_of(tensor), None)
        return values

    def look_at(self, tensor: torch.Tensor) -> WrittenStorage | None:
        """The storage of a tensor, from now on known element by element; None for a sparse one."""
        memory = memory_of(tensor)
        if not memory or memory in self._storages:
            return self._storages.get(memory)
        self.written = True
        storage = self._storages[memory] = WrittenStorage(len(self._storages), tensor)
        # The last values of whole tensors are enough: others are views of these.
        for value in self.values_on(tensor):
            known = self._tensors[value]
            if known._base is None and known.dtype == storage.dtype:
                storage.begin(known, value)
        return storage

    def note(self, tensor: torch.Tensor) -> None:
        """Note that a tensor's value is what it holds now."""
        storage = self.get(tensor)
        if storage is not None:
            self._known[id(tensor)] = storage.writes

    def note_as(self, result: torch.Tensor, tensor: torch.Tensor) -> None:
        """Note that a tensor's value is that of another one."""
        if id(tensor) in self._known:
            self._known[id(result)] = self._known[id(tensor)]

    def forget(self, tensor: torch.Tensor) -> None:
        """Note that a tensor has no value any more."""
        self._known.pop(id(tensor), None)

    def is_noted(self, tensor: torch.Tensor, storage: WrittenStorage) -> bool:
        """Whether a tensor's value has all writes to its storage."""
        return self._known.get(id(tensor), 0) == storage.writes


def replaces(tensor: torch.Tensor, other: Any) -> bool:
    """Whether a copy makes a tensor another one of its form, of which only the elements count."""
    return (
        isinstance(other, torch.Tensor)
        and tensor.layout == other.layout == torch.strided
        and (tensor.shape, tensor.dtype, tensor.device) == (other.shape, other.dtype, other.device)
        and not (tensor.is_conj() or tensor.is_neg() or other.is_conj() or other.is_neg())
    )
