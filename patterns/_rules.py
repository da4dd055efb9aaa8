"""Rules: what a pattern and its values are for one operator, and the registry that finds them."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from ._coloring import compressed_values
from ._layout import WHOLE, Labels, Layout, layouts_by_labels
from ._pattern import Pattern
from ._strided import Strided
from ._structure import Diagonal
from ._values import gathered

__all__ = [
    "CONSTANT",
    "POINTWISE",
    "Call",
    "Placement",
    "Rule",
    "UnsupportedOperatorError",
    "Use",
    "add_rule",
    "has_rule",
    "is_pointwise",
    "overloads_of",
    "rule_for",
    "rule_of",
]


class UnsupportedOperatorError(NotImplementedError):
    """An operator, or a use of one, for which there is no pattern."""


@dataclass(frozen=True, eq=False)
class Sources:
    """Which element of the operand each element of an output is, -1 where it is none of them.

    Attributes
    ----------
    rows : int
        As many as samples, or one where it is the same for all.
    size : int
        Elements of one sample of the output.
    identity : bool
        Whether each element is that of its own place.
    make : callable or None
        The places, ``(rows, size)``; None where each is its own.
    strided : Strided or None
        The same, where the places lie in steps.
    samples : slice
        Those that are worked on.
    """

    rows: int
    size: int
    identity: bool = False
    make: Callable[[], np.ndarray] | None = None
    strided: Strided | None = None
    samples: slice = field(default_factory=lambda: slice(None))

    def array(self) -> np.ndarray:
        """The places, ``(rows, size)``; where they differ, those of `samples` alone."""
        places = np.arange(self.size).reshape(1, -1) if self.make is None else self.make()
        return places if self.rows == 1 else places[self.samples]


@dataclass(frozen=True)
class Call:
    """One operator applied to one tensor: what a rule sees.

    Attributes
    ----------
    operator : str
        The ATen operator, as in ``aten.conv2d``.
    arguments : dict
        Its arguments by their names in ATen's schema, but for the differentiated tensor. While only shapes are known,
        tensors of floating-point numbers are on the meta device, and a number that is neither 0 nor 1 is NaN.
    in_shape, out_shape : tuple of int
        Of the differentiated tensor and of the output for a batch of one: the axis of the batch is there, of size 1,
        wherever it is, or of size `k` where each sample is a batch of `k` to the operator.
    argument : str
        Name of the differentiated argument.
    path, source : str
        Where in the model, and in its code, as in `` at net.py, line 7``: for messages.
    kept : dict
        For weights of which some are pruned: which are kept, bool, by the argument's name.
    input, output : Tensor or None
        ``(batch, *shape)``; None while only shapes are known.
    batched : frozenset of str
        The arguments that have a batch: they are ``(batch, *shape)`` too, where `input` is given.
    dependent : frozenset of str
        The arguments that depend on the input, with a derivative or without.
    sources : Sources or None
        For an operator that moves elements: where each comes from.
    node : callable or None
        ``node()``: autograd's node of the output, which has what the forward pass saved, or None.
    vjp, vjps : callable or None
        ``vjp(gradient of output) -> gradient of input``, both ``(batch, *shape)``; of many, ``(many, batch, *shape)``.
    jvp : callable or None
        ``jvp(tangent of input) -> tangent of output``, both ``(batch, *shape)``.
    function : callable or None
        ``function(arguments) -> output``: the operator on other arguments, the differentiated one among them.
    """

    operator: str
    arguments: Mapping[str, Any]
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    path: str = ""
    source: str = ""
    argument: str = "input"
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    input: torch.Tensor | None = None
    output: torch.Tensor | None = None
    batched: frozenset[str] = frozenset()
    dependent: frozenset[str] = frozenset()
    sources: Sources | None = field(default=None, repr=False)
    node: Callable[[], Any] | None = None
    vjp: Callable[[torch.Tensor], torch.Tensor] | None = None
    vjps: Callable[[torch.Tensor], torch.Tensor] | None = None
    jvp: Callable[[torch.Tensor], torch.Tensor] | None = None
    function: Callable[[dict[str, Any]], torch.Tensor] | None = None

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def in_size(self) -> int:
        """Elements of one sample of the input."""
        return math.prod(self.in_shape)

    @property
    def out_size(self) -> int:
        """Elements of one sample of the output."""
        return math.prod(self.out_shape)

    def with_tensors(self, **fields: Any) -> Call:
        """The same call at the numbers of one run: as `dataclasses.replace`, which takes longer than all else here."""
        other = object.__new__(Call)
        vars(other).update(vars(self), **fields)
        return other

    def unsupported(self, what: str, remedy: str) -> UnsupportedOperatorError:
        """An error that names the operator's path, what is not supported, what to do and the line of code."""
        return UnsupportedOperatorError(f"{self.path or self.operator}: {what}; {remedy}{self.source}")


@dataclass(frozen=True)
class Use:
    """One run of an operator on a whole batch, from which a rule tells where the samples are.

    Attributes
    ----------
    operator : str
        The ATen operator.
    arguments : dict
        Its arguments by name, defaults included.
    layouts : dict of str to Layout
        Of the arguments through which a derivative passes.
    output : Tensor
        What it gave.
    batch : int
        Samples.
    evaluate : callable
        ``evaluate(arguments) -> output``.
    """

    operator: str
    arguments: dict[str, Any]
    layouts: dict[str, Layout]
    output: torch.Tensor
    batch: int
    evaluate: Callable[[dict[str, Any]], torch.Tensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all arguments that are tensors."""
        return {name: tuple(v.shape) for name, v in self.arguments.items() if isinstance(v, torch.Tensor)}

    def rank(self, name: str) -> int:
        """Axes of an argument; 0 where it is None."""
        value = self.arguments.get(name)
        return value.ndim if isinstance(value, torch.Tensor) else 0


@dataclass(frozen=True)
class Placement:
    """Where the samples are in an operator's arguments and in its output.

    Attributes
    ----------
    layouts : dict of str to Layout
        Of the arguments that have samples, dependent on the input or not.
    output : Layout
        Of the output.
    sources : dict of str to Sources
        For an operator that moves elements, by operand: `Call.sources`.
    """

    layouts: dict[str, Layout]
    output: Layout
    sources: dict[str, Sources] = field(default_factory=dict)


class Rule(ABC):
    """Pattern and values of one operator's Jacobian ``J[i, j] = ∂y_i/∂x_j``, flattened in C order without the batch."""

    #: Names of the arguments whose pruned elements are left out of the pattern.
    weights: tuple[str, ...] = ()
    #: Whether other operands than the first, or several, may depend on the sample.
    several: bool = False
    #: Whether they are of each of an operator's results, where it gives several, and not of the first alone.
    all_results: bool = False
    #: Whether values are made of the differentiated operand's elements, "input", or of the result's, "output".
    reads: tuple[str, ...] = ("input", "output")
    #: Whether the pattern depends on what indices and masks hold.
    reads_contents: bool = False
    #: Whether it depends on arguments that are floating-point numbers, in another way than by whether they are 0 or 1.
    reads_numbers: bool = False
    #: Whether its products take one multiply-add for each entry of the Jacobian, padding aside.
    entrywise: bool = True

    def check(self, call: Call) -> None:
        """Raise UnsupportedOperatorError where this use of the operator has no Jacobian for each sample."""
        first = call.argument in ("input", "self", "tensor")
        others = call.dependent | (call.batched if first else {call.argument})
        if others and not self.several:
            raise call.unsupported(
                f"{', '.join(sorted(others))} of {call.operator} depends on the input",
                "its rule takes it as a constant",
            )

    def shared(self, call: Call) -> bool:
        """Whether all samples share their values, which then do not depend on the input."""
        return False

    def multiply_adds(self, call: Call) -> int:
        """Multiply-adds of the operator's forward pass for one sample, nothing pruned: of products of matrices alone.

        Counted as ``torch.utils.flop_counter`` does: with a convolution's padding, without biases.
        """
        return 0

    def backward_multiply_adds(self, call: Call, operands: int, weights: bool, forward: int) -> int:
        """Multiply-adds of the gradients of so many operands, and of the weights; the forward pass takes `forward`."""
        return forward * (operands + weights)

    def placement(self, use: Use) -> Placement:
        """Where the samples are in the operator's arguments and output, shown from its arguments alone.

        Raises
        ------
        MixedSamplesError
            Where an output may depend on another sample.
        """
        if use.batch == 1:
            return Placement(dict(use.layouts), WHOLE)
        labels, out_labels = self.labels(use)
        return Placement(*layouts_by_labels(use.shapes, labels, out_labels, use.layouts))

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        """A label for each axis of the arguments, and of the output: what runs along an axis of both has one label."""
        raise NotImplementedError

    def pruned_arguments(self, call: Call) -> list[str]:
        """The arguments, weights all, whose zeros the pattern may leave out."""
        return [name for name in self.weights if call.arguments.get(name) is not None]

    def prunes(self, call: Call, mask: torch.Tensor) -> bool:
        """Whether leaving out the entries of pruned weights pays; the mask tells which are not pruned."""
        return True

    @abstractmethod
    def pattern(self, call: Call) -> Pattern:
        """The pattern of `J`, from shapes and, where weights are pruned, from those."""

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        """Values of `J` on its pattern, ``(nnz, batch)``, or ``(nnz, 1)`` where all samples share them.

        Where a rule has no formula: by the operator's own derivative, a pass for each colour of the pattern.
        """
        return compressed_values(pattern, call)

    def transposed_values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        """Values of ``J.T`` on its pattern, of the same shape as `values`."""
        if isinstance(pattern.structure, Diagonal):
            return self.values(call, pattern)
        return gathered(self.values(call, pattern.T), pattern.T.transposition)

    def transposed_parts(self, call: Call, pattern: Pattern, bounds: Sequence[int]) -> Iterator[torch.Tensor] | None:
        """Values of the rows of ``J.T`` from each bound to the next one, for a matrix that is too large as a whole.

        None where a rule makes no fewer than all.
        """
        return None

    def pull_back(self, call: Call, pattern: Pattern, gradients: torch.Tensor) -> torch.Tensor:
        """``Jᵀ g`` of many gradients, ``(columns, batch, *out_shape)``, each of as many elements as the operand has.

        Not asked for where the pattern is a diagonal. Where a rule has nothing faster: by the operator's own backward,
        all columns at once.
        """
        if call.vjps is None:
            # Of an operator that may draw, what was drawn is in one graph: a column at a time.
            assert call.vjp is not None
            return torch.stack([call.vjp(gradient) for gradient in gradients])
        return call.vjps(gradients)

    def selection(self, call: Call) -> torch.Tensor | None:
        """For an operator that selects, the one column that each row keeps: int32, ``(rows of J, batch)``."""
        return None


_RULES: dict[str, Rule] = {}

#: Operators whose output changes in steps: the derivative is zero wherever there is one.
CONSTANT = frozenset(f"aten.{name}" for name in ("ceil", "floor", "heaviside", "round", "sgn", "sign", "trunc"))

#: The name by which the rule of all operators that ATen tags as pointwise is registered.
POINTWISE = "pointwise"

RuleType = TypeVar("RuleType", bound=type[Rule])


def add_rule(*operators: str) -> Callable[[RuleType], RuleType]:
    """Class decorator: the rule of these ATen operators."""

    def add(rule: RuleType) -> RuleType:
        for operator in operators:
            _RULES[operator] = rule()
        return rule

    return add


def has_rule(operator: str) -> bool:
    """Whether an operator, as in ``aten.exp``, has a rule."""
    return operator in _RULES or is_pointwise(operator)


def rule_for(call: Call) -> Rule:
    """The rule of a call's operator.

    Raises
    ------
    UnsupportedOperatorError
        Where the operator has none.
    """
    rule = rule_of(call.operator)
    if rule is None:
        raise call.unsupported(f"operator {call.operator} has no rule", "register one with jacsparse.register_rule")
    return rule


def rule_of(operator: str) -> Rule | None:
    """The rule of an operator whatever its overload; None where it has none."""
    return _RULES.get(operator) or (_RULES[POINTWISE] if is_pointwise(operator) else None)


@functools.cache
def is_pointwise(operator: str) -> bool:
    """Whether ATen tags the operator, as in ``aten.exp``, as one whose outputs depend on their own places alone."""
    return any(torch.Tag.pointwise in overload.tags for overload in overloads_of(operator))


def overloads_of(operator: str) -> list[Any]:
    """All of an operator's, as ``torch.ops.aten.add.Tensor`` is one of ``aten.add``; none where there is no such."""
    namespace, _, name = operator.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
