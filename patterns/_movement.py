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
    "alias clone contiguous positive view view_as _unsafe_view reshape unsqueeze squeeze permute transpose movedim "
    "moveaxis swapaxes swapdims mT adjoint atleast_1d atleast_2d atleast_3d hstack vstack dstack column_stack fliplr "
    "flip roll rot90 expand expand_as broadcast_to repeat repeat_interleave tile slice select narrow index "
    "index_select gather diagonal unfold cat stack split split_with_sizes chunk unbind tensor_split slice_scatter "
    "select_scatter index_put tril triu diag_embed pad constant_pad_nd reflection_pad1d reflection_pad2d "
    "reflection_pad3d replication_pad1d replication_pad2d replication_pad3d pixel_shuffle pixel_unshuffle "
    "channel_shuffle im2col"
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
        if call.arguments.get("accumulate"):
            raise call.unsupported(
                f"{call.operator} with accumulate=True", "add a tensor of zeros with the values put in"
            )

    def shared(self, call: Call) -> bool:
        return True

    def pattern(self, call: Call) -> Pattern:
        assert call.apply is not None
        moved = call.apply(_numbered(call.in_shape))
        nothing = call.apply(torch.zeros(call.in_shape, dtype=torch.float64))
        constant = (moved == nothing) | (moved.isnan() & nothing.isnan())
        sources = moved.masked_fill(constant, 0).reshape(-1).to(torch.int64).numpy(force=True) - 1
        columns = call.in_size
        if len(sources) == columns and bool((sources == np.arange(columns)).all()):
            return Pattern.of(Identity(columns))
        return Pattern.of(Csr.picking(sources, columns))

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert call.input is not None
        return call.input.new_ones((pattern.nnz, 1))

    transposed_values = values


@add_rule("aten.col2im")
class _FoldRule(_MovementRule):
    """``aten.col2im``: each element of a column is added to one pixel, the one that `im2col` would take it from."""

    def pattern(self, call: Call) -> Pattern:
        images, channels, *sizes = call.out_shape
        arguments = (call[name] for name in ("kernel_size", "dilation", "padding", "stride"))
        pixels = _numbered((1, images * channels, *sizes))
        targets = torch.ops.aten.im2col(pixels, *arguments).reshape(-1).to(torch.int64).numpy() - 1
        return Pattern.of(Csr.picking(targets, call.out_size)).T
