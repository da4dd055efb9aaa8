"""Elementwise operators: each output depends on the input at its own place, so the Jacobian is a diagonal."""

from __future__ import annotations

import torch

from ._pattern import Pattern
from ._rules import Call, Rule, add_rule
from ._structure import Diagonal, Identity
from ._values import batch_last, positive

__all__: list[str] = []


class _DiagonalRule(Rule):
    """The derivative at each place; for an operator without a formula here, one pass of its own `vjp` on ones."""

    def pattern(self, call: Call) -> Pattern:
        return Pattern.of(Diagonal(call.in_size))

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert call.output is not None and call.vjp is not None
        return batch_last(call.vjp(torch.ones_like(call.output)))

    def transposed_values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return self.values(call, pattern)


# Activations too: PyTorch's own backward takes the derivative from the input or the output, whichever it kept.
add_rule(
    "aten.alpha_dropout",
    "aten.dropout",
    "aten.feature_alpha_dropout",
    "aten.feature_dropout",
    "aten.celu",
    "aten.elu",
    "aten.gelu",
    "aten.hardshrink",
    "aten.hardsigmoid",
    "aten.hardswish",
    "aten.hardtanh",
    "aten.leaky_relu",
    "aten.log_sigmoid",
    "aten.mish",
    "aten.prelu",
    "aten.relu6",
    "aten.rrelu",
    "aten.selu",
    "aten.sigmoid",
    "aten.silu",
    "aten.softplus",
    "aten.softshrink",
    "aten.softsign",
    "aten.tanh",
    "aten.tanhshrink",
    "aten.threshold",
)(_DiagonalRule)


@add_rule("aten.relu")
class _ReluRule(_DiagonalRule):
    """``aten.relu``: 1 where the output is positive (thesis, section 3.3: a possible zero elsewhere)."""

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert call.output is not None
        return positive(call.output)


@add_rule("aten.batch_norm")
class _BatchNormRule(_DiagonalRule):
    """``aten.batch_norm`` in eval mode: a scale for each channel."""

    shared = True

    def check(self, call: Call) -> None:
        if call["training"]:
            raise call.unsupported(
                "batch normalisation in training mode couples the samples of a batch", "call .eval() on it first"
            )

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        scale = torch.rsqrt(call["running_var"] + call["eps"])
        if call["weight"] is not None:
            scale = scale * call["weight"].detach()
        positions = call.in_size // max(1, call.in_shape[0])
        return scale.repeat_interleave(positions).reshape(-1, 1)


@add_rule("aten.identity", "aten.flatten", "aten.unflatten")
class _IdentityRule(_DiagonalRule):
    """Operators that only give their input another shape."""

    shared = True

    def pattern(self, call: Call) -> Pattern:
        return Pattern.of(Identity(call.in_size))

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert call.input is not None
        return call.input.new_ones((pattern.nnz, 1))
