"""Rules: what a pattern and its values are for one operator, and the registry that finds them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ._pattern import Pattern
from ._values import gathered

__all__ = ["Call", "Rule", "UnsupportedOperatorError", "add_rule", "rule_for"]


class UnsupportedOperatorError(NotImplementedError):
    """An operator, or a use of one, for which there is no pattern."""


@dataclass(frozen=True)
class Call:
    """One operator applied to one tensor: what a rule sees.

    Attributes
    ----------
    operator : str
        The ATen operator, as in ``aten.conv2d``.
    arguments : dict
        Its arguments by their names in ATen's schema, but for the differentiated tensor.
    in_shape, out_shape : tuple of int
        Without the batch axis.
    path : str
        Where in the model: for messages.
    kept : dict
        For weights of which some are pruned: which are kept, bool, by the argument's name.
    input, output : Tensor or None
        ``(batch, *shape)``; None while only shapes are known.
    node : Any
        Autograd's node of the output, which has what the forward pass saved; None where there is none.
    vjp : callable or None
        ``vjp(gradient of output) -> gradient of input``, both ``(batch, *shape)``.
    """

    operator: str
    arguments: dict[str, Any]
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    path: str = ""
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    input: torch.Tensor | None = None
    output: torch.Tensor | None = None
    node: Any = None
    vjp: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def in_size(self) -> int:
        """Elements of one sample of the input."""
        return math.prod(self.in_shape)

    def unsupported(self, what: str, remedy: str) -> UnsupportedOperatorError:
        """An error that names the operator's path, what is not supported and what to do."""
        return UnsupportedOperatorError(f"{self.path or self.operator}: {what}; {remedy}")


class Rule(ABC):
    """Pattern and values of one operator's Jacobian ``J[i, j] = ∂y_i/∂x_j``, flattened in C order without the batch."""

    #: Names of the arguments whose pruned elements are left out of the pattern.
    weights: tuple[str, ...] = ()
    #: Whether all samples share their values, which then do not depend on the input.
    shared: bool = False

    def check(self, call: Call) -> None:
        """Raise UnsupportedOperatorError where this use of the operator has no Jacobian for each sample."""
        return

    @abstractmethod
    def pattern(self, call: Call) -> Pattern:
        """The pattern of `J`, from shapes and, where weights are pruned, from those."""

    @abstractmethod
    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        """Values of `J` on its pattern, ``(nnz, batch)``, or ``(nnz, 1)`` where all samples share them."""

    def transposed_values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        """Values of ``J.T`` on its pattern, of the same shape as `values`."""
        return gathered(self.values(call, pattern.T), pattern.T.transposition)

    def selection(self, call: Call) -> torch.Tensor | None:
        """For an operator that selects, the one column that each row keeps: int32, ``(rows of J, batch)``."""
        return None


_RULES: dict[str, Rule] = {}

RuleType = TypeVar("RuleType", bound=type[Rule])


def add_rule(*operators: str) -> Callable[[RuleType], RuleType]:
    """Class decorator: the rule of these ATen operators."""

    def add(rule: RuleType) -> RuleType:
        for operator in operators:
            _RULES[operator] = rule()
        return rule

    return add


def rule_for(call: Call) -> Rule:
    """The rule of a call's operator.

    Raises
    ------
    UnsupportedOperatorError
        Where the operator has none.
    """
    rule = _RULES.get(call.operator)
    if rule is None:
        raise call.unsupported(f"operator {call.operator} has no rule", "register one with jacsparse.register_rule")
    return rule
