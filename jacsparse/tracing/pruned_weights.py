"""Pruned weights: which elements a pattern omits, and whether they still are zero."""

from __future__ import annotations

import torch

from ..patterns import any_nonzero_at
from .operators import operator_name
from .recording import Recording

#: The most elements of a weight whose omitted elements are always read one by one.
SMALL = 4096


class PrunedWeight:
    """Which elements of a weight a pattern omits.

    An element is omitted where a pruning mask is zero; without a mask, where the element is exactly zero.

    Parameters
    ----------
    name : str
        Name of the argument.
    weight : Tensor
        The weight as the module computes it.
    mask : Tensor or None
        The pruning mask, of the weight's shape: zero where an element is pruned.
    """

    def __init__(self, name: str, weight: torch.Tensor, mask: torch.Tensor | None) -> None:
        self.name = name
        #: Whether it holds numbers that may be filled later, and not the truth values of a selection.
        self.floating = weight.is_floating_point()
        self.mask = (weight != 0).detach()
        # A mask that is zero where the weight is not was written to after its use.
        if mask is not None and not bool((self.mask & (mask == 0)).any()):
            self.mask = (mask != 0).detach()
        omitted = ~_in_memory_order(self.mask, like=weight)
        places = omitted.nonzero().reshape(-1)
        # A few elements are read one by one, many of them in one pass over all.
        self._few = 16 * len(places) < len(omitted) or len(omitted) < SMALL
        self._omitted = places if self._few else omitted

    def holds(self, weight: torch.Tensor) -> bool:
        """Whether all omitted elements are zero in this weight."""
        elements = _in_memory_order(weight.detach(), like=weight)
        if self._few:
            return not elements.index_select(0, self._omitted).any()
        return not any_nonzero_at(elements, self._omitted)


def _in_memory_order(tensor: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """The elements as a vector; where `like` is a transposed matrix, in the order that needs no copy."""
    if like.ndim == 2 and not like.is_contiguous() and like.T.is_contiguous():
        tensor = tensor.T
    return tensor.reshape(-1)


def mask_of(recording: Recording, weight: torch.Tensor) -> torch.Tensor | None:
    """The mask of zeros and ones that this run multiplied a weight by, as pruning does; None where there is none.

    The product may have been reshaped afterwards.
    """
    constant = recording.constants.get(id(weight))
    if constant is None or constant.overload is None:
        return None
    name, arguments = operator_name(constant.overload), constant.arguments
    if name in _VIEWS:
        viewed = arguments.get("self")
        mask = None if viewed is None else mask_of(recording, viewed)
        return None if mask is None else constant.overload(*(mask if a is viewed else a for a in arguments.values()))
    if name != "aten.mul":
        return None
    for mask_name, factor_name in (("self", "other"), ("other", "self")):
        mask, factor = arguments.get(mask_name), arguments.get(factor_name)
        if isinstance(mask, torch.Tensor) and isinstance(factor, torch.Tensor) and _is_mask(recording, mask):
            return mask.detach().expand(weight.shape)
    return None


_VIEWS = frozenset(
    f"aten.{name}"
    for name in ["t", "transpose", "permute", "view", "unsqueeze", "squeeze", "expand", "detach", "alias"]
)


def _is_mask(recording: Recording, mask: torch.Tensor) -> bool:
    return not mask.requires_grad and not recording.drawn(mask) and bool(((mask == 0) | (mask == 1)).all())
