"""Elements of scans across ranks, as messages carry them."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..affine import AffineMaps, SparseMaps
from ..patterns import Pattern
from ..runtime import a_type
from .ranks import Ranks


def tensors_of(element: Any) -> list[torch.Tensor]:
    """The tensors of an element: of a tensor, of a tuple or list of tensors, or of affine maps.

    Raises
    ------
    TypeError
        Where it is anything else.
    """
    if isinstance(element, torch.Tensor):
        return [element]
    if isinstance(element, AffineMaps):
        return list(element.tensors)
    if isinstance(element, tuple | list) and element and all(isinstance(part, torch.Tensor) for part in element):
        return list(element)
    raise TypeError(
        f"an element of the scan is {a_type(element)}; expected a tensor, a tuple or list of them, or affine "
        "maps of jacsparse.affine"
    )


def with_tensors(element: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """An element of the same form with other tensors."""
    if isinstance(element, torch.Tensor):
        return tensors[0]
    if isinstance(element, AffineMaps):
        rest = iter(tensors)
        matrices, offsets = (None if part is None else next(rest) for part in (element.matrices, element.offsets))
        return element.like(matrices, offsets)
    # A named tuple takes its elements one by one.
    return element._make(tensors) if hasattr(element, "_make") else type(element)(tensors)


def kind_of(element: Any) -> str:
    """What all ranks' elements have to have in common, in words."""
    dtypes = [str(tensor.dtype) for tensor in tensors_of(element)]
    # A parameter is a tensor, and affine maps may lack one of theirs.
    name = "Tensor" if isinstance(element, torch.Tensor) else type(element).__name__
    number = "" if isinstance(element, AffineMaps) else f" of {len(dtypes)}"
    return f"{name}{number}, {', '.join(dict.fromkeys(dtypes))}"


#: The patterns that were last sent to each rank, and received from it.
_patterns: weakref.WeakKeyDictionary[Ranks, tuple[dict[int, Pattern], dict[int, Pattern]]]
_patterns = weakref.WeakKeyDictionary()


class ElementMessages:
    """Messages with elements; a sparse pattern goes only with the first of those that have it, one after another."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._sent, self._received = _patterns.setdefault(ranks, ({}, {}))

    def send(self, element: Any, to: int, phase: str, number: int) -> None:
        """Send an element, and go on."""
        tensors = tensors_of(element)
        if not isinstance(element, AffineMaps):
            return self.ranks.send(tensors, to, phase, number)
        if isinstance(element, SparseMaps) and self._sent.get(to) != element.pattern:
            self._sent[to] = element.pattern
            tensors.append(torch.frombuffer(bytearray(pickle.dumps(element.pattern)), dtype=torch.uint8))
        # The number says which parts there are.
        parts = (element.matrices is not None) + 2 * (element.offsets is not None)
        return self.ranks.send(tensors, to, phase, number, parts)

    def receive(self, like: Any, source: int, phase: str, number: int) -> Any:
        """An element of the form of another one, and on its device."""
        received, parts = self.ranks.expect(source, phase).message(number)
        tensors = [tensor.to(tensors_of(like)[0].device) for tensor in received]
        if not isinstance(like, AffineMaps):
            return with_tensors(like, tensors)
        matrices, offsets = (tensors.pop(0) if parts & bit else None for bit in (1, 2))
        if not isinstance(like, SparseMaps):
            return like.like(matrices, offsets)
        if tensors:
            self._received[source] = pickle.loads(tensors[0].cpu().numpy().tobytes())
        return SparseMaps(self._received[source], matrices, offsets)
