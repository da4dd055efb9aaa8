"""Operators, and facts about them that hold for every call: ATen's, and those that a record has in the place of writes.

A record has no writes. What a tensor on a storage that was written to has of several values, it takes by a `Gather`;
where autograd did not see a write, by a `Rewrite`. A `FunctionCall` is what a ``torch.autograd.Function`` returned, and
its derivative that of a `BackwardPass`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..decompositions import WEIGHTED, decomposition
from ..patterns import CONSTANT, RULES, Rule, rule_of


@dataclass(frozen=True, eq=False)
class Gather:
    """An operator: a tensor of elements of others.

    Attributes
    ----------
    which : ndarray of int
        For each element, which one of the tensors has it.
    places : ndarray of int, the same shape
        Its place there, in C order.
    """

    which: np.ndarray
    places: np.ndarray

    name = "jacsparse.gather"

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        elements, places = tensors[0].reshape(-1), self.places
        if len(tensors) > 1:
            elements = torch.cat([each.reshape(-1) for each in tensors])
            places = np.cumsum([0, *(each.numel() for each in tensors[:-1])])[self.which] + places
        # Its derivative takes a quarter of the time of that of an index of several axes.
        return elements.index_select(0, torch.from_numpy(places.reshape(-1)).to(elements.device)).view(places.shape)


@dataclass(frozen=True, eq=False)
class Rewrite:
    """An operator: the elements of one tensor, with the derivative of another one.

    That is a tensor which was written to where autograd does not look.
    """

    name = "jacsparse.rewrite"

    def __call__(self, elements: torch.Tensor, derivative: torch.Tensor) -> torch.Tensor:
        return _Rewritten.apply(elements, derivative) if derivative.requires_grad else elements.detach()  # type: ignore[no-any-return]


class _Rewritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, elements: torch.Tensor, derivative: torch.Tensor) -> torch.Tensor:
        return elements.view_as(elements)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient


@dataclass(frozen=True, eq=False)
class FunctionCall(Rewrite):
    """An operator: what a ``torch.autograd.Function`` returned, with the derivative of its `BackwardPass`."""

    function: type

    name = "jacsparse.function"


@dataclass(frozen=True)
class BackwardPass:
    """An operator: the products of a Function's Jacobians with its operands, summed.

    Its arguments are what the Function returned, the gradients that its backward pass took in the run, what that
    computed of these, the operands whose gradients they are, and what else it read for that. Other operators take its
    place where the derivative passes through it.

    Attributes
    ----------
    output : int
        Which one of the Function's results it is of.
    gradients, results : int
        How many of the arguments these are.
    problem : str
        Why no operators take its place, and the remedy.
    """

    #: For messages: what it computes, the run's calls tell.
    function: type = field(compare=False)
    output: int
    gradients: int = 0
    results: int = 0
    problem: str = ""

    name = "jacsparse.backward_pass"

    def __call__(self, elements: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return elements.detach()


@dataclass(frozen=True, eq=False, slots=True)
class Facts:
    """Properties of an operator that its schema, its tags and its rule tell before any call."""

    #: As in ``aten.add``.
    name: str
    rule: Rule | None
    #: The parameters, in order; and those that the operator writes to.
    names: tuple[str, ...]
    written: tuple[str, ...]
    #: The rule under its own name; None also where its rule is that of all pointwise operators.
    rule_by_name: Rule | None = None
    #: The parameter that its results are views of; None where they are none.
    viewed: str | None = None
    #: Whether it may draw random numbers.
    random: bool = False
    #: Whether it shows Python the elements of a tensor, or returns a tensor whose shape depends on them.
    reads: bool = False
    #: Whether the shape of its result depends on the elements of a tensor.
    dynamic: bool = False
    #: Whether its result depends on the operand's shape alone, not on its elements.
    of_shape: bool = False
    #: Whether it changes the shape of its operand in place.
    reshapes: bool = False
    #: A decomposition into other operators, ours or PyTorch's, where there is no rule.
    parts: Callable[..., Any] | None = None
    #: Other operators that compute its results where its weights, constants to its rule, depend on the input.
    weighted: Callable[..., Any] | None = None
    #: Whether one of its arguments, `other`, is a factor or a term.
    of_numbers: bool = False
    #: Whether no call computes its results again: it draws, or returns memory that holds anything.
    keeps: bool = False
    #: Whether its result is memory that holds anything.
    fresh: bool = False
    #: Whether its rule reads the elements of indices and masks.
    contents: bool = False
    #: Whether what is made of a call that depends on the input holds for its numbers alone: its pattern may depend on
    #: them, or other operators take its place, with these numbers.
    bakes: bool = True
    #: The operator itself, if it is an overload of ATen's; and what it calls, in a Python call less.
    overload: Any = None
    kernel: Callable[..., Any] | None = None
    #: Whether some calls of it are recorded in other ways than those of other operators.
    special: bool = False


#: Those of the operators that are no overloads of ATen's.
_OURS: dict[type, Facts] = {}

# By the operator's ``id``, since its hash is slow; facts hold the operator, so that no other one gets that.
_FACTS: dict[int, Facts] = {}


def facts_of(overload: Any) -> Facts:
    facts = _FACTS.get(id(overload))
    # A rule may have been registered since, or one that was may be gone.
    if facts is None or RULES.get(facts.name) is not facts.rule_by_name:
        facts = _OURS.get(type(overload))
        if facts is None:
            facts = _FACTS[id(overload)] = _new_facts(overload)
    return facts


def _new_facts(overload: Any) -> Facts:
    parameters, tags, name = overload._schema.arguments, overload.tags, operator_name(overload)
    rule, random, parts = rule_of(name), torch.Tag.nondeterministic_seeded in tags, None
    # The parts of a random operator would draw other numbers.
    if rule is None and name not in CONSTANT and not random:
        parts = decomposition(overload)
    contents, weighted = rule is not None and rule.reads_contents, WEIGHTED.get(overload)
    return Facts(
        name=name,
        rule=rule,
        rule_by_name=RULES.get(name),
        names=tuple(parameter.name for parameter in parameters),
        written=tuple(parameter.name for parameter in parameters if is_written(parameter)),
        viewed=next((p.name for p in parameters if p.alias_info is not None and not is_written(p)), None),
        random=random,
        reads=torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags,
        dynamic=torch.Tag.dynamic_output_shape in tags,
        of_shape=name in _OF_SHAPE,
        reshapes=torch.Tag.inplace_view in tags,
        parts=parts,
        weighted=weighted,
        of_numbers=overload in OF_NUMBERS,
        keeps=random or name in _FRESH,
        fresh=name in _FRESH,
        contents=contents,
        bakes=rule is None or rule.reads_numbers or contents or weighted is not None,
        overload=overload,
        kernel=overload._op,
        special=torch.Tag.inplace_view in tags or overload in _SPECIAL or name.startswith(PROFILER),
    )


def shows(overload: Any, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether a call that may read elements, or whose sizes depend on some, shows those of operands of these dtypes.

    It does not where a constant mask selects them.
    """
    name = operator_name(overload)
    if name == "aten.index":
        # Elements are selected by a mask or by numbers, and as many as there are numbers.
        return torch.bool in dtypes or torch.uint8 in dtypes
    by_mask = name in ("aten.masked_select", "aten.repeat_interleave")
    return not by_mask or not all(kind.is_floating_point for kind in dtypes)


def draws(overload: Any, arguments: dict[str, Any]) -> bool:
    """Whether a call of an operator that may draw random numbers does so: its switches are on."""
    names = {parameter.name for parameter in overload._schema.arguments}
    values = {**defaults_of(overload), **arguments}
    return all(values.get(name) for name in names & {"train", "training", "p", "dropout_p"})


def defaults_of(overload: Any) -> Mapping[str, Any]:
    """The parameters of an operator that have defaults, with these."""
    return {} if type(overload) in _OURS else _defaults_of(overload)


@functools.cache
def _defaults_of(overload: Any) -> Mapping[str, Any]:
    return {p.name: p.default_value for p in overload._schema.arguments if p.has_default_value()}


#: The running statistics that normalisations update in training, and their schemas do not say so.
RUNNING = ("running_mean", "running_var")


def is_written(parameter: Any) -> bool:
    """Whether an operator writes to a parameter."""
    return parameter.alias_info is not None and parameter.alias_info.is_write


def is_lazily_changed(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are conjugates or negatives of what is in its memory."""
    return tensor.is_conj() or tensor.is_neg()


def operator_name(overload: Any) -> str:
    """The name of an operator, as in ``aten.add``; ``aten.add_``, which writes in place, has the same one."""
    # Of these, which know places of elements, no cache keeps any.
    return overload.name if type(overload) in _OURS else _name_of(overload)


@functools.cache
def _name_of(overload: Any) -> str:
    name = overload._schema.name.replace("::", ".")
    return name.removesuffix("_") if any(map(is_written, overload._schema.arguments)) else name


_FRESH = {f"aten.{name}" for name in ("empty", "empty_like", "empty_permuted", "empty_strided")} | {
    *("aten.new_empty", "aten.new_empty_strided"),
}
_OF_SHAPE = {
    *(f"aten.{name}_like" for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")),
    *(f"aten.new_{name}" for name in ("empty", "empty_strided", "full", "ones", "zeros")),
    # Forward-mode derivatives of writes begin with it.
    "aten._new_zeros_with_same_feature_meta",
}

aten = torch.ops.aten
#: Makes zeros without memory, with which forward-mode derivatives begin. ``aten.zeros`` takes its place: products with
#: such call nothing that a mode sees, and scaling one within a mode ends the process, in torch 2.13.
WITHOUT_MEMORY = aten._efficientzerotensor.default
#: The namespace of the profiler's calls, which work on no tensor.
PROFILER = "profiler."
_SPECIAL = frozenset((WITHOUT_MEMORY, aten.detach.default, aten.copy_.default))
#: Operators whose number may be another in each run: a factor or a term.
OF_NUMBERS = frozenset(
    (
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
        *(aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.rsub.Scalar),
    )
)


def named_tensors(facts: Facts, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among a call's arguments by name; those of lists have names of their own."""
    for name, value in (*zip(facts.names, args, strict=False), *kwargs.items()):
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}.{n}", part) for n, part in enumerate(value) if isinstance(part, torch.Tensor))


def written_tensors(facts: Facts, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The dense arguments that a call writes to."""
    tensors = named_tensors(facts, args, kwargs)
    return [t for name, t in tensors if name.partition(".")[0] in facts.written and t.layout == torch.strided]


def number_types(facts: Facts, name: str, args: Sequence[Any]) -> tuple[type, ...]:
    """What a number among the arguments of a call may be in other runs; empty where it is none that may change."""
    first = args[0]
    is_float = isinstance(first, torch.Tensor) and first.is_floating_point()
    for each in args[is_float:]:
        if type(each) is complex or (isinstance(each, torch.Tensor) and each.is_complex()):
            # Operators on the parts take the place of the call, with these numbers.
            return ()
    if facts.of_numbers and name == "other":
        return _NUMBERS if is_float else _INTEGERS
    return _FLOATS


_NUMBERS, _INTEGERS, _FLOATS = (int, float), (int,), (float,)


def operand_names(overload: Any, count: int) -> tuple[str, ...]:
    """The names of the arguments of an operator that is no overload of ATen's."""
    return ("elements", "derivative") if isinstance(overload, Rewrite) else tuple(f"tensors.{n}" for n in range(count))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that a value is, or that it holds in lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, (list, tuple)) else []


def with_written(result: Any, written: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that a call returned, and then the others that it wrote to."""
    returned = tensors_in(result)
    return [*returned, *(tensor for tensor in written if not any(tensor is each for each in returned))]


for _kind in (Gather, Rewrite, FunctionCall, BackwardPass):
    _rule = rule_of(_kind.name)
    _OURS[_kind] = Facts(_kind.name, _rule, (), (), contents=_rule is not None and _rule.reads_contents)
