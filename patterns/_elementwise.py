"""Elementwise operators: each output depends on the input at its own place, so the Jacobian is a diagonal.

Where the input is broadcast, a row has its one entry in the column that its place was broadcast from.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ._layout import Labels
from ._pattern import Pattern
from ._rules import POINTWISE, Call, Rule, Use, add_rule
from ._strided import picking
from ._structure import Diagonal, Identity
from ._values import batch_last, positive

__all__ = ["broadcast", "broadcast_labels"]


def broadcast_labels(use: Use) -> tuple[dict[str, Labels], Labels]:
    """Labels of operands that are broadcast to the output's shape: axes are counted from the last one."""
    rank = use.output.ndim
    return {name: tuple(range(rank - len(shape), rank)) for name, shape in use.shapes.items()}, tuple(range(rank))


def broadcast(in_shape: tuple[int, ...], out_shape: tuple[int, ...]) -> Pattern:
    """The pattern of an elementwise operator from a shape that is broadcast to another."""
    size = int(np.prod(in_shape))
    if size == int(np.prod(out_shape)):
        return Pattern.of(Diagonal(size))
    return picking(np.broadcast_to(np.arange(size).reshape(in_shape), out_shape), size)


class _DiagonalRule(Rule):
    """The derivative at each place; for an operator without a formula here, one pass of its own `vjp` on ones."""

    reads: tuple[str, ...] = ()

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        return broadcast_labels(use)

    def check(self, call: Call) -> None:
        # What is constant may be another for each sample.
        super().check(replace(call, batched=frozenset()))

    def pattern(self, call: Call) -> Pattern:
        return Pattern.of(Diagonal(call.in_size))

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert call.output is not None and call.vjp is not None
        return batch_last(call.vjp(torch.ones_like(call.output)))


# Activations too: PyTorch's own backward takes the derivative from the input or the output, whichever it kept.
add_rule(
    *("aten._prelu_kernel", "aten.hardswish", "aten.leaky_relu", "aten.log_sigmoid_forward", "aten.native_dropout"),
    "aten.rrelu_with_noise",
)(_DiagonalRule)


@add_rule(POINTWISE)
class _PointwiseRule(_DiagonalRule):
    """What ATen tags as pointwise, of any number of operands that are broadcast to one shape."""

    several = True

    def pattern(self, call: Call) -> Pattern:
        if call.in_size == call.out_size and self._passes(call):
            return Pattern.of(Identity(call.in_size))
        return broadcast(call.in_shape, call.out_shape)

    def _passes(self, call: Call) -> bool:
        """Whether the derivative is one: of a term that is not scaled."""
        term = {"aten.add": ("self", "other"), "aten.sub": ("self",), "aten.rsub": ("other",)}.get(call.operator, ())
        return call.argument in term and (call.argument == term[0] or call.arguments.get("alpha", 1) == 1)

    def shared(self, call: Call) -> bool:
        # Linear in this operand: its derivative is a constant, or another operand.
        if call.operator in ("aten.add", "aten.sub", "aten.rsub", "aten.neg"):
            return True
        divides = call.operator == "aten.div" and call.argument == "other"
        return call.operator in ("aten.mul", "aten.div") and not divides and not call.batched

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert call.input is not None
        if self._passes(call):
            return call.input.new_ones((pattern.nnz, 1))
        if self.shared(call):
            return batch_last(self._derivative(call, call.input.new_zeros((1, *call.in_shape))))
        if call.in_shape == call.out_shape:
            return super().values(call, pattern)
        return batch_last(self._derivative(call, call.input))

    def _derivative(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        """The derivative at each place of the output, ``(batch, *out_shape)``."""
        assert call.function is not None
        rank = len(call.out_shape)
        own = _aligned(x.detach(), rank).expand(len(x), *call.out_shape).contiguous().requires_grad_()
        # One by one: what was overwritten since raises.
        others = {name: call[name] for name in call.arguments}
        for name in call.batched & others.keys():
            # What all samples share depends on no other operand.
            value = others[name] if len(x) == len(others[name]) else x.new_zeros((len(x), *others[name].shape[1:]))
            others[name] = _aligned(value, rank)
        with torch.enable_grad():
            y = call.function({**others, call.argument: own})
        (derivative,) = torch.autograd.grad(y, own, torch.ones_like(y), materialize_grads=True)
        return derivative


def _aligned(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """``(batch, *shape)`` with axes of size 1 behind the batch, as broadcasting to so many axes adds them."""
    return tensor.reshape(len(tensor), *[1] * (rank + 1 - tensor.ndim), *tensor.shape[1:])


@add_rule("aten.relu")
class _ReluRule(_DiagonalRule):
    """``aten.relu``: 1 where the output is positive (thesis, section 3.3: a possible zero elsewhere)."""

    reads = ("output",)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert call.output is not None
        return positive(call.output)


@add_rule("aten._to_copy")
class _IdentityRule(_DiagonalRule):
    """A copy in another memory format."""

    def shared(self, call: Call) -> bool:
        return True

    def pattern(self, call: Call) -> Pattern:
        return Pattern.of(Identity(call.in_size))

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert call.input is not None
        return call.input.new_ones((pattern.nnz, 1))
