"""Pruned weights: which elements a pattern omits, and whether they still are zero.

Factors and masks are weights too: of a factor the zeros are omitted, of a mask of scores what is minus infinity. They
decide a pattern only where they are no arguments, have no gradient and were not drawn (`Rule.prunes_variables`). What
is omitted is a part of the chain, which each run looks at, and no part of a graph's key.
"""

from __future__ import annotations

from typing import Any

import torch

from ..patterns import any_nonzero_at
from .comparisons import Comparisons
from .graph import Graph, Value
from .traces import Trace

#: Weights of fewer elements are those whose omitted elements are always read one by one.
SMALL = 4096


class PrunedWeight:
    """Which elements of a weight a pattern omits, by the name of the argument and the weight as the module computes it.

    An element is omitted where a pruning mask of the weight's shape is zero; without a mask, where it is exactly zero.
    `source` is the value of the mask, or of what is a weight itself, where that is a tensor from elsewhere; where
    that is a parameter, `trains`.
    """

    def __init__(
        self,
        name: str,
        weight: torch.Tensor,
        mask: torch.Tensor | None,
        source: int | None = None,
        *,
        trains: bool = False,
    ) -> None:
        self.name, self.comparisons = name, Comparisons()
        #: Whether it holds numbers that may be filled later, and not the truth values of a selection.
        self.floating = weight.is_floating_point()
        self.mask = self._truths = (weight != 0).detach()
        #: Whether a mask keeps the omitted elements at zero. One that does not was written to after its use.
        left = None if mask is None else (mask != 0).detach()
        self.masked = left is not None and not bool((self.mask > left).any())
        if left is not None and self.masked:
            self.mask = left
        #: What alone decides which elements it omits; None where the weight itself does.
        self.source = None if trains and self.floating and not self.masked else source
        count = self.mask.numel() - int(self.mask.count_nonzero())
        #: Whether it omits anything.
        self.omits = count > 0
        # A few elements are read one by one, many of them in one pass over all.
        self._few = 16 * count < self.mask.numel() or self.mask.numel() < SMALL
        omitted = ~_in_memory_order(self.mask, like=weight) if self.omits else self.mask.new_empty(0)
        self._omitted = omitted.nonzero().reshape(-1) if self._few else omitted

    def holds(self, weight: torch.Tensor) -> bool:
        """Whether all omitted elements are zero in this weight; truth values are to be the same."""
        if not self.floating:
            return torch.equal(weight != 0, self._truths)
        elements = _in_memory_order(weight.detach(), like=weight)
        if self._few:
            return not elements.index_select(0, self._omitted).any()
        return not any_nonzero_at(elements, self._omitted)

    def is_within(self, other: PrunedWeight) -> bool:
        """Whether another one omits all elements that this one does; truth values are to be the same."""
        if not self.floating:
            return torch.equal(self.mask, other.mask)
        return not bool((other.mask & ~self.mask).any())


def _in_memory_order(tensor: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """The elements as a vector; where `like` is a transposed matrix, in the order that needs no copy."""
    if like.ndim == 2 and not like.is_contiguous() and like.T.is_contiguous():
        tensor = tensor.T
    return tensor.reshape(-1)


def mask_of(trace: Trace, value: int) -> tuple[int, torch.Tensor] | None:
    """The mask of zeros and ones that this run multiplied a weight by, as pruning does; None where there is none.

    It is a value and its elements, in the weight's shape: the product may have been reshaped afterwards.
    """
    node = trace.graph.infos[value].maker
    if node is None:
        return None
    if node.name in _VIEWS:
        found = mask_of(trace, node.arguments["self"].number)
        if found is None:
            return None
        arguments = {name: trace.read(argument) for name, argument in node.arguments.items()}
        return found[0], node.computed(arguments | {"self": found[1]})[0]
    if node.name != "aten.mul":
        return None
    for argument in ("self", "other"):
        mask, other = (node.arguments[name] for name in (argument, "other" if argument == "self" else "self"))
        if type(mask) is Value and type(other) is Value and _is_mask(trace, mask.number):
            return mask.number, trace.elements(mask.number).detach().expand(trace.tensor(value).shape)
    return None


def excluded_by(graph: Graph, value: int) -> tuple[int, Any] | None:
    """The constant that makes elements of scores minus infinity, and what it fills them with; None without one.

    It is a term, which is minus infinity itself, or the mask of ``masked_fill``.
    """
    node = graph.infos[value].maker
    if node is None or node.name not in ("aten.add", "aten.masked_fill"):
        return None
    fills = node.name == "aten.masked_fill"
    if fills and type(node.arguments["value"]) is Value:
        return None
    for name in ["mask"] if fills else ["self", "other"] if node.arguments.get("alpha", 1) == 1 else []:
        constant = node.arguments[name]
        if type(constant) is Value and not graph.infos[constant.number].dependent:
            return constant.number, node.arguments["value"] if fills else None
    return None


_VIEWS = frozenset(
    f"aten.{name}" for name in ["t", "transpose", "permute", "view", "unsqueeze", "squeeze", "expand", "alias"]
)


def _is_mask(trace: Trace, value: int) -> bool:
    mask = trace.elements(value)
    return not mask.requires_grad and not trace.graph.infos[value].drawn and bool(((mask != 0) == mask).all())
