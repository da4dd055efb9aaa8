"""Elementwise operators: each output depends on the input at its own place, so the Jacobian is a diagonal.

Where the input is broadcast, each row has one entry, in the column that its place was broadcast from.

An operator that ATen tags as pointwise needs no rule of its own. With a formula for its values it has one, under
`add_rule` (a user's has functions, for `register_rule`): a subclass of `_DiagonalRule`, or of `PointwiseRule` where
several operands may depend on the input or are broadcast. `shared` says where it is linear, `reads` and `reads_of`
which of input and output its formula reads: others may have been overwritten. `Rule.values` says who asks for them:
where entries fold or are compressed, nobody, but for what is the same in each run. An operator that changes in steps is
one of `CONSTANT` instead. Elsewhere there may be more to say of it:

- `jacsparse.codegen.operations` lists what loops compute, of it and of the operator that its backward pass calls;
  PyTorch computes the others, with all that they read, before the loops. A function that no other operator calls needs
  an opcode in `jacsparse.codegen.kernels` too.
- `OF_NUMBERS` in `jacsparse.tracing.operators` has those whose number may be an integer or a float in later runs.
- `jacsparse.decompositions.backward_operators` is for what its backward pass calls, which Hessians are made of, where
  that has no rule; `jacsparse.jacobians.folding` knows which operators multiply by a number.
- `jacsparse.jacobians.products_with_vectors` is for tangents that differ from its backward pass, as at kinks.
"""

from __future__ import annotations

import numpy as np
import torch

from .engine import gradient_of
from .layout import Labels
from .pattern import Pattern
from .rules import POINTWISE, Call, Rule, Use, add_rule
from .strided import pattern_from_sources
from .structure import Diagonal, Identity
from .value_kernels import batch_last, positive


class _DiagonalRule(Rule):
    """The derivative at each place; for an operator without a formula here, one pass of its own `vjp` on ones."""

    reads: tuple[str, ...] = ()

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        # Operands are broadcast: axes are counted from the last one.
        rank = use.output.ndim
        return {name: tuple(range(rank - len(shape), rank)) for name, shape in use.shapes.items()}, tuple(range(rank))

    def elementwise(self, call: Call) -> bool:
        return True

    def check(self, call: Call) -> None:
        # Constants may differ between the samples.
        super().check(call.with_tensors(batched=frozenset()))

    def pattern(self, call: Call) -> Pattern:
        return Pattern.of(Diagonal(call.in_size))

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return batch_last(call.vjp(torch.ones_like(call.output)))


# Activations too: PyTorch's own backward takes the derivative from the input or the output, whichever it has saved.
add_rule("aten._prelu_kernel", "aten.hardswish", "aten.leaky_relu", "aten.log_sigmoid_forward")(_DiagonalRule)


@add_rule("aten.native_dropout", "aten.rrelu_with_noise")
class _RandomRule(_DiagonalRule):
    """Another call of the operator draws other numbers: only its own backward pass knows the derivative."""

    def elementwise(self, call: Call) -> bool:
        return False


#: Operands that enter the output unscaled; the second one is multiplied by ``alpha``.
_TERMS = {
    "aten._to_copy": ("self",),
    "aten.add": ("self", "other"),
    "aten.sub": ("self",),
    "aten.rsub": ("other",),
}


@add_rule(POINTWISE, "aten._to_copy")
class PointwiseRule(_DiagonalRule):
    """An operator that ATen tags as pointwise, or a copy; any number of operands are broadcast to one shape.

    A constant factor, and a constant exponent, leaves no entry where it is zero.
    """

    several = True
    prunes_variables = False

    def pruned_arguments(self, call: Call) -> list[str]:
        name = _FACTORS.get((call.operator, call.argument), "")
        return [name] if isinstance(call.arguments.get(name), torch.Tensor) else []

    def entries(self, call: Call) -> int:
        return call.out_size

    def pattern(self, call: Call) -> Pattern:
        if call.masks or call.in_size != call.out_size:
            places = np.broadcast_to(np.arange(call.in_size).reshape(call.in_shape), call.out_shape)
            for mask in call.masks.values():
                places = np.where(np.broadcast_to(mask.numpy(force=True), call.out_shape), places, -1)
            return pattern_from_sources(places, call.in_size)
        return Pattern.of(Identity(call.in_size) if self._is_one(call) else Diagonal(call.in_size))

    def _is_one(self, call: Call) -> bool:
        """Whether the derivative is one: that of a copy, and of a term of a sum that is not scaled."""
        terms = _TERMS.get(call.operator, ())
        return call.argument in terms and (call.argument == terms[0] or call.arguments.get("alpha", 1) == 1)

    def shared(self, call: Call) -> bool:
        # Linear in this operand: its derivative is a constant, or another operand.
        if call.operator in _TERMS or call.operator == "aten.neg":
            return True
        divides = call.operator == "aten.div" and call.argument == "other"
        return call.operator in ("aten.mul", "aten.div") and not divides and not call.batched

    def reads_of(self, call: Call) -> tuple[str, ...]:
        # Where the operand is broadcast, the operator runs once more.
        again = call.in_shape != call.out_shape and not self._is_one(call) and not self.shared(call)
        return ("input",) if again else self.reads

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        if self._is_one(call):
            return call.input.new_ones((pattern.nnz, 1))
        shared = self.shared(call)
        factor = call.arguments.get(_FACTORS.get((call.operator, call.argument), "")) if shared else None
        if isinstance(factor, torch.Tensor):
            # The other factor of a product is the derivative itself.
            factor = factor.detach().to(call.input.dtype).resolve_neg()
            values = batch_last(factor.expand(1, *call.out_shape))
        elif shared:
            values = batch_last(self._derivative(call, call.input.new_zeros((1, *call.in_shape))))
        elif call.in_shape == call.out_shape:
            values = super().values(call, pattern)
        else:
            values = batch_last(self._derivative(call, call.input))
        for mask in call.masks.values():
            values = values[mask.expand(call.out_shape).reshape(-1)]
        return values

    def _derivative(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        """The derivative at each place of the output, ``(batch, *out_shape)``."""
        rank = len(call.out_shape)
        operand = _aligned(x.detach(), rank).expand(len(x), *call.out_shape).contiguous().requires_grad_()
        # Looked up one by one: an argument that was overwritten since raises.
        arguments = {name: call[name] for name in call.arguments}
        for name in call.batched & arguments.keys():
            other = arguments[name]
            if len(other) != len(x):
                # A derivative that all samples share depends on no other operand.
                other = x.new_zeros((len(x), *other.shape[1:]))
            arguments[name] = _aligned(other, rank)
        with torch.enable_grad():
            y = call.function({**arguments, call.argument: operand})
        return gradient_of(y, operand, torch.ones_like(y))


#: By the operator and the differentiated operand, the other one, whose zeros are zeros of the derivative.
_FACTORS = {
    ("aten.mul", "self"): "other",
    ("aten.mul", "other"): "self",
    ("aten.pow", "self"): "exponent",
}


@add_rule("aten.where", "aten.masked_fill")
class _WhereRule(PointwiseRule):
    """``aten.where``: a constant condition leaves each branch an entry of one wherever it selects that branch."""

    prunes_variables = True

    def pruned_arguments(self, call: Call) -> list[str]:
        return ["condition" if call.operator == "aten.where" else "mask"]

    def as_weight(self, call: Call, name: str, value: torch.Tensor) -> torch.Tensor:
        return value.bool() if (call.argument == "self") == (name == "condition") else ~value.bool()

    def prunes(self, call: Call, mask: torch.Tensor) -> bool:
        return True

    def shared(self, call: Call) -> bool:
        return bool(call.masks)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return call.input.new_ones((pattern.nnz, 1)) if call.masks else super().values(call, pattern)


def _aligned(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """``(batch, *shape)`` with axes of size 1 behind the batch, as broadcasting to `rank` axes adds them."""
    return tensor.reshape(len(tensor), *[1] * (rank + 1 - tensor.ndim), *tensor.shape[1:])


@add_rule("aten.relu")
class _ReluRule(_DiagonalRule):
    """``aten.relu``: 1 where the output is positive (thesis, section 3.3: a possible zero elsewhere)."""

    reads = ("output",)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return positive(call.output)
