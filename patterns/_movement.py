"""Operators that move data: each output is one element of the input, or none of them.

Where each output comes from is asked of the operator itself, once: it is given the elements' own numbers, from 1 on,
and zeros. What answers the same to both holds nothing of the input.
"""

from __future__ import annotations

import numpy as np
import torch

from ._pattern import Pattern
from ._rules import Call, Rule, add_rule
from ._structure import Csr, Identity

__all__: list[str] = []


def _numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """The elements' numbers from 1 on: as floats, which every operator takes, and exact."""
    count = int(np.prod(shape))
    return torch.arange(1, count + 1, dtype=torch.float64).reshape(shape)


_NAMES = (
    "_unsafe_view adjoint alias atleast_1d atleast_2d atleast_3d broadcast_to cat channel_shuffle chunk clone "
    "column_stack constant_pad_nd contiguous diag_embed diagonal dstack expand expand_as flip fliplr flipud gather "
    "hstack im2col index index_copy index_fill index_put index_select mH mT moveaxis movedim narrow pad permute "
    "pixel_shuffle pixel_unshuffle positive reflection_pad1d reflection_pad2d reflection_pad3d repeat "
    "repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape roll rot90 scatter select "
    "select_scatter slice slice_scatter split split_with_sizes squeeze stack swapaxes swapdims t tensor_split tile "
    "transpose tril triu unbind unfold unsqueeze view view_as vstack"
)


@add_rule(*(f"aten.{name}" for name in _NAMES.split()))
class _MovementRule(Rule):
    """One, where an output is an element of the input."""

    several = True

    def check(self, call: Call) -> None:
        chosen = [n for n in sorted(call.dependent) if not call[n].is_floating_point()]
        if chosen:
            raise call.unsupported(
                f"{', '.join(chosen)} of {call.operator} depends on the input: which elements are taken is known only "
                "when it runs",
                "take them by a product with zeros and ones, or by torch.where",
            )
        for name in ("accumulate", "reduce"):
            if call.arguments.get(name):
                raise call.unsupported(
                    f"{call.operator} with {name}={call[name]}", "add a tensor of zeros with the values put in"
                )

    def shared(self, call: Call) -> bool:
        return True

    def pattern(self, call: Call) -> Pattern:
        assert call.apply is not None
        moved = call.apply(_numbered(call.in_shape))
        nothing = call.apply(torch.zeros(call.in_shape, dtype=torch.float64))
        constant = (moved == nothing) | (moved.isnan() & nothing.isnan())
        sources = moved.masked_fill(constant, 0).reshape(-1).to(torch.int64).numpy(force=True) - 1
        return _picking(sources, call.in_size)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert call.input is not None
        return call.input.new_ones((pattern.nnz, 1))

    transposed_values = values


def _picking(sources: np.ndarray, columns: int) -> Pattern:
    if len(sources) == columns and bool((sources == np.arange(columns)).all()):
        return Pattern.of(Identity(columns))
    return Pattern.of(Csr.picking(sources, columns))


@add_rule("aten.col2im", "aten.index_add", "aten.scatter_add")
class _AddedRule(_MovementRule):
    """Each element is added to one output, or to none: the one whose gradient it is given."""

    def check(self, call: Call) -> None:
        super().check(call)
        if call.arguments.get("alpha", 1) != 1:
            raise call.unsupported(f"{call.operator} with alpha={call['alpha']}", "multiply what is added by it before")

    def pattern(self, call: Call) -> Pattern:
        assert call.apply is not None
        with torch.enable_grad():
            x = torch.zeros(call.in_shape, dtype=torch.float64, requires_grad=True)
            y = call.apply(x)
        (given,) = torch.autograd.grad(y, x, _numbered(call.out_shape).to(y.device), materialize_grads=True)
        return _picking(given.reshape(-1).to(torch.int64).numpy(force=True) - 1, call.out_size).T
