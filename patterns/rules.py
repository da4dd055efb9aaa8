"""Rules: the pattern and the values of one operator's Jacobian, and the registry of all rules."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from .coloring import compressed_values
from .layout import WHOLE, Labels, Layout, layouts_by_labels
from .pattern import Pattern
from .strided import Strided
from .structure import Diagonal
from .value_kernels import gathered


class UnsupportedOperatorError(NotImplementedError):
    """An operator, or a use of one, for which there is no pattern."""


@dataclass(frozen=True, eq=False)
class Sources:
    """For each element of an output, the place of the operand's element that it is; -1 where it is none of them.

    For an operator that adds elements to others, it is the other way round: for each element of the operand, the place
    of the output's element to which it is added.

    Attributes
    ----------
    rows : int
        Number of samples, or one where the places are the same for all.
    size : int
        Places of one sample.
    places : ndarray or None
        The places, ``(rows, size)``, where they do not lie in steps.
    strided : Strided or None
        The places as a structure, where they lie in steps. Without both, each element is at its own place.
    samples : slice
        The samples whose places `array` returns.
    """

    rows: int
    size: int
    places: np.ndarray | None = field(default=None, repr=False)
    strided: Strided | None = None
    samples: slice = field(default_factory=lambda: slice(None))

    def array(self) -> np.ndarray:
        """The places, ``(rows, size)``; where they differ between the samples, those of `samples` alone."""
        if self.places is None:
            places = np.arange(self.size) if self.strided is None else self.strided.sources()
            return places.reshape(1, -1)
        return self.places if self.rows == 1 else self.places[self.samples]


@dataclass(frozen=True)
class Call:
    """One operator and its arguments, as the rule of one of its operands sees them.

    Attributes
    ----------
    operator : str
        The ATen operator, as in ``aten.convolution``.
    arguments : dict
        Its arguments by their names in ATen's schema, without the differentiated tensor. While only shapes are known,
        tensors are on the meta device, but for indices and masks that the rule reads, and a float that is neither 0 nor
        1 is NaN, unless the rule reads numbers, as a registered one does.
    in_shape, out_shape : tuple of int
        Shapes of the differentiated tensor and of the output for a batch of one. They include the axis of the batch,
        of size 1, or of size `k` where each sample is a batch of `k` to the operator.
    argument : str
        Name of the differentiated argument.
    path, source : str
        The operator's path in the model, and its place in the code, as in `` at net.py, line 7``: for messages.
    masks : dict
        A bool tensor for each weight that is pruned in part, by the argument's name: False where it is pruned.
    input, output : Tensor or None
        The differentiated tensor and the output, ``(batch, *shape)``; None while only shapes are known.
    batched : frozenset of str
        The arguments that have a batch: where `input` is not None, they are ``(batch, *shape)`` too.
    dependent : frozenset of str
        The arguments that depend on the input, with a derivative or without.
    sources : Sources or None
        For an operator that moves elements: the place from which each element of the output comes.
    node : callable or None
        ``node()``: autograd's node of the output, with the tensors that the forward pass saved, or None.
    vjp, vjps : callable or None
        ``vjp(gradient of output) -> gradient of input``, both ``(batch, *shape)``; `vjps` takes and returns many
        gradients, ``(many, batch, *shape)``.
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
    masks: dict[str, torch.Tensor] = field(default_factory=dict)
    input: torch.Tensor = None  # type: ignore[assignment]
    output: torch.Tensor = None  # type: ignore[assignment]
    batched: frozenset[str] = frozenset()
    dependent: frozenset[str] = frozenset()
    sources: Sources | None = field(default=None, repr=False)
    node: Callable[[], Any] | None = field(default=None, repr=False)
    vjp: Callable[[torch.Tensor], torch.Tensor] = field(default=None, repr=False)  # type: ignore[assignment]
    vjps: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, repr=False)
    jvp: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, repr=False)
    function: Callable[[dict[str, Any]], torch.Tensor] = field(default=None, repr=False)  # type: ignore[assignment]

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

    @functools.cached_property
    def pattern(self) -> Pattern:
        """The pattern of the Jacobian, ``(out_size, in_size)``, by the operator's rule."""
        pattern, expected = rule_for(self).pattern(self), (self.out_size, self.in_size)
        if pattern.shape != expected:
            raise ValueError(
                f"{self.path}: the rule of {self.operator} gave a pattern of shape {pattern.shape}; expected {expected}"
            )
        return pattern

    def with_tensors(self, **fields: Any) -> Call:
        """The same call with other fields: `dataclasses.replace`, but much faster."""
        call = object.__new__(Call)
        vars(call).update(vars(self), **fields)
        return call

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
        Layouts of the arguments through which a derivative passes.
    output : Tensor
        Its output.
    batch : int
        Number of samples.
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
        """Shapes of all arguments that are tensors."""
        return {name: tuple(v.shape) for name, v in self.arguments.items() if isinstance(v, torch.Tensor)}

    def rank(self, name: str) -> int:
        """Number of axes of an argument; 0 where it is no tensor."""
        value = self.arguments.get(name)
        return value.ndim if isinstance(value, torch.Tensor) else 0


@dataclass(frozen=True)
class Placement:
    """Where the samples are in an operator's arguments and in its output."""

    #: Layouts of the arguments that have samples, dependent on the input or not.
    layouts: dict[str, Layout]
    output: Layout
    #: For an operator that moves elements: `Call.sources` of each operand.
    sources: dict[str, Sources] = field(default_factory=dict)


#: A pattern leaves out zeros of weights where it has at most _FEW entries, or at least this share of them is zero.
_FEW, _SHARE = 2**16, 0.25
#: The most entries that are listed one by one to leave some of them out: 256 MiB of indices.
_MOST_LISTED = 2**26


class Rule(ABC):
    """Pattern and values of one operator's Jacobian ``J[i, j] = ∂y_i/∂x_j``, flattened in C order without the batch."""

    #: Names of the arguments whose pruned elements the pattern leaves out.
    weights: tuple[str, ...] = ()
    #: Whether zeros of weights that train, and of arguments of a call, are left out too. Each call looks whether they
    #: still are zero, and plans anew where they are not.
    prunes_variables: bool = True
    #: Whether other operands than the first, or several at once, may depend on the sample.
    several: bool = False
    #: Whether the Jacobian by an operand in a list of tensors is the same whatever the others are.
    operands_apart: bool = False
    #: Whether a pattern that leaves out pruned elements lists its entries, and is no structure.
    lists_entries: bool = False
    #: Whether the rule is for each result of an operator with several results, not for the first alone.
    all_results: bool = False
    #: The tensors that `values` reads: the differentiated operand, "input", and the result, "output".
    reads: tuple[str, ...] = ("input", "output")
    #: Whether the pattern depends on the elements of indices and masks.
    reads_contents: bool = False
    #: Whether the pattern depends on floating-point arguments by more than whether they are 0 or 1.
    reads_numbers: bool = False
    #: Whether `placement` may depend on the elements of any tensor.
    places_by_elements: bool = False
    #: Whether the operator takes one multiply-add for each entry of the Jacobian, padding aside.
    entrywise: bool = True
    #: Whether a user registered `values`, which may be others than those of PyTorch's derivative.
    has_registered_values: bool = False

    def of_argument(self, argument: str) -> Rule:
        """The rule of the Jacobian with respect to an argument."""
        return self

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

    def factor(self, call: Call) -> float | None:
        """The value of all entries where it is the same in each run; None where it may not be."""
        return None

    def reads_of(self, call: Call) -> tuple[str, ...]:
        """Those of `reads` that the values of this use are computed from."""
        return self.reads

    def elementwise(self, call: Call) -> bool:
        """Whether each output depends on the operand at its own place alone, once operands are broadcast."""
        return False

    def multiply_adds(self, call: Call) -> int:
        """Multiply-adds of the matrix products in the operator's forward pass for one sample, without pruning.

        As in ``torch.utils.flop_counter``, a convolution's padding counts and biases do not.
        """
        return 0

    def backward_multiply_adds(self, call: Call, operands: int, weights: bool, forward: int) -> int:
        """Multiply-adds of the gradients of `operands` operands and of the weights, from those of the forward pass."""
        return forward * (operands + weights)

    def placement(self, use: Use) -> Placement:
        """Where the samples are in the operator's arguments and output.

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
        """A label for each axis of the arguments and of the output; axes that run together have one label."""
        raise NotImplementedError

    def pruned_arguments(self, call: Call) -> list[str]:
        """The weights whose zeros the pattern may leave out."""
        return [name for name in self.weights if call.arguments.get(name) is not None]

    def as_weight(self, call: Call, name: str, value: torch.Tensor) -> torch.Tensor:
        """An argument that `pruned_arguments` names, as a weight whose zeros the pattern may leave out."""
        return value

    def entries(self, call: Call) -> int:
        """The entries of the pattern without pruned weights, of which a few are left out wherever there are zeros."""
        return 0

    def prunes(self, call: Call, mask: torch.Tensor) -> bool:
        """Whether it pays to leave out the entries of pruned weights; the mask is False where they are pruned.

        Masks of scores leave nothing out where the indices of the others would take more than 256 MiB.
        """
        # A product without zeros needs no indices.
        entries = self.entries(call)
        if self.lists_entries and entries > _MOST_LISTED:
            return False
        return entries <= _FEW or int(mask.count_nonzero()) <= (1 - _SHARE) * mask.numel()

    @abstractmethod
    def pattern(self, call: Call) -> Pattern:
        """The pattern of `J`, from shapes and from the masks of pruned weights."""

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        """Values of `J` on its pattern, ``(nnz, batch)``, or ``(nnz, 1)`` where all samples share them.

        They have to be those of PyTorch's derivative, unless a user registered them. Wherever a chain is multiplied,
        they are asked for: in the first calls of ``jacobian``, in later and prepared ones of networks, in scans and in
        ``verify``. Folded entries take them where they are the same in each run, grouped products for matrices that all
        samples share, and PyTorch's derivative elsewhere; products with vectors take none of them. Where entries may be
        elements of a weight, they are asked for with other weights too, to see which.

        A rule without a formula takes the operator's own derivative, in a pass for each colour of the pattern.
        """
        return compressed_values(pattern, call)

    def transposed_values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        """Values of ``J.T`` on its pattern, of the same shape as `values`."""
        if isinstance(pattern.structure, Diagonal):
            return self.values(call, pattern)
        return gathered(self.values(call, pattern.T), pattern.T.transposition)

    def pull_back(self, call: Call, pattern: Pattern, gradients: torch.Tensor) -> torch.Tensor:
        """``Jᵀ g`` for many gradients ``(columns, batch, *out_shape)``: for each column the operand's elements.

        It is not called where the pattern is a diagonal. A rule without a faster way takes the operator's own backward.
        """
        structure = pattern.structure
        if isinstance(structure, Strided) and self.shared(call):
            values = self.transposed_values(call, pattern.T) if structure.transposed else self.values(call, pattern)
            pulled = structure.adjoint_product(values, gradients.reshape(-1, pattern.shape[0]))
            if pulled is not None:
                return pulled.reshape(*gradients.shape[:2], *call.in_shape)
        if call.vjps is None:
            # The operator draws at random, and the one graph of its run takes one column at a time.
            return torch.stack([call.vjp(gradient) for gradient in gradients])
        return call.vjps(gradients)

    def selection(self, call: Call) -> torch.Tensor | None:
        """For an operator that selects, the column of each row's only entry: int32, ``(rows of J, batch)``."""
        return None


RULES: dict[str, Rule] = {}

#: Operators whose output changes in steps: the derivative is zero wherever it exists.
CONSTANT = frozenset(f"aten.{name}" for name in ("ceil", "floor", "heaviside", "round", "sgn", "sign", "trunc"))

#: The registered name for all operators that ATen tags as pointwise.
POINTWISE = "pointwise"

RuleType = TypeVar("RuleType", bound=type[Rule])


def add_rule(*operators: str) -> Callable[[RuleType], RuleType]:
    """Class decorator: the rule of these ATen operators."""

    def add(rule: RuleType) -> RuleType:
        for operator in operators:
            RULES[operator] = rule()
        return rule

    return add


#: What is told of operators without a rule, of which nobody registers one.
_REMEDIES = {
    "aten._pack_padded_sequence": (
        "give its recurrent layer the padded sequences, (batch, time, features), of one length"
    )
}


def rule_for(call: Call) -> Rule:
    """The rule of a call's operator.

    Raises
    ------
    UnsupportedOperatorError
        Where the operator has none.
    """
    rule = rule_of(call.operator)
    if rule is None:
        raise call.unsupported(f"operator {call.operator} has no rule", remedy_for(call.operator))
    return rule.of_argument(call.argument)


def remedy_for(operator: str) -> str:
    """What to do where an operator has no rule."""
    return _REMEDIES.get(operator, "register one with jacsparse.register_rule")


def rule_of(operator: str) -> Rule | None:
    """The rule of an operator, as in ``aten.exp``, or None."""
    return RULES.get(operator) or (RULES[POINTWISE] if is_pointwise(operator) else None)


@functools.cache
def is_pointwise(operator: str) -> bool:
    """Whether ATen tags the operator, as in ``aten.exp``, as one that works on each place by itself."""
    return any(torch.Tag.pointwise in overload.tags for overload in overloads_of(operator))


def overloads_of(operator: str) -> list[Any]:
    """All overloads of an operator, as ``torch.ops.aten.add.Tensor`` of ``aten.add``; empty for an unknown one."""
    namespace, _, name = operator.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
