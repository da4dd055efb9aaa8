"""Pruned weights: which elements a pattern leaves out, and whether they still are zero."""

from __future__ import annotations

import torch

from .patterns._values import any_nonzero_at
from .tracing import Recording, operator_name

__all__ = ["Kept", "mask_of"]


class Kept:
    """Which elements of a weight a pattern keeps, and whether that still holds.

    An element is left out where a pruning mask says so; without a mask, where it is exactly zero.

    Parameters
    ----------
    name : str
        The argument's.
    weight : Tensor
        As the module computes it.
    mask : Tensor or None
        Pruning's, of the weight's shape: zero where an element is pruned.
    """

    def __init__(self, name: str, weight: torch.Tensor, mask: torch.Tensor | None) -> None:
        self.name = name
        self.mask = (weight != 0).detach()
        if mask is not None and not bool((self.mask & (mask == 0)).any()):
            # Else it was written to after it was used.
            self.mask = (mask != 0).detach()
        left_out = ~_in_memory_order(self.mask, like=weight)
        places = left_out.nonzero().reshape(-1)
        # Few are looked at one by one, many in one pass over all.
        self._few = 16 * len(places) < len(left_out)
        self._left_out = places if self._few else left_out

    def holds(self, weight: torch.Tensor) -> bool:
        """Whether all elements that were left out are zero in this weight."""
        elements = _in_memory_order(weight.detach(), like=weight)
        if self._few:
            return not elements.index_select(0, self._left_out).any()
        return not any_nonzero_at(elements, self._left_out)


def _in_memory_order(tensor: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """A matrix's elements, flat: of a transposed one those of what it is the transpose of, which need no copy."""
    if like.ndim == 2 and not like.is_contiguous() and like.T.is_contiguous():
        tensor = tensor.T
    return tensor.reshape(-1)


def mask_of(recording: Recording, weight: torch.Tensor) -> torch.Tensor | None:
    """The mask by which a weight was multiplied in this run, as pruning does; None where there is none.

    The mask holds zeros and ones, and so does all that it is broadcast to; reshaping after the product is followed.
    """
    constant = recording.constants.get(id(weight))
    if constant is None or constant.overload is None:
        return None
    name, arguments = operator_name(constant.overload), constant.arguments
    if name in _VIEWS:
        inner = arguments.get("self")
        mask = None if inner is None else mask_of(recording, inner)
        return None if mask is None else constant.overload(*(mask if a is inner else a for a in arguments.values()))
    if name != "aten.mul":
        return None
    for one, other in (("self", "other"), ("other", "self")):
        mask, factor = arguments.get(one), arguments.get(other)
        if isinstance(mask, torch.Tensor) and isinstance(factor, torch.Tensor) and _is_mask(recording, mask):
            return mask.detach().expand(weight.shape)
    return None


_VIEWS = frozenset(
    f"aten.{name}"
    for name in ["t", "transpose", "permute", "view", "unsqueeze", "squeeze", "expand", "detach", "alias"]
)


def _is_mask(recording: Recording, mask: torch.Tensor) -> bool:
    return not mask.requires_grad and not recording.drawn(mask) and bool(((mask == 0) | (mask == 1)).all())
