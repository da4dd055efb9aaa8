"""Tapes: the ATen calls of a function, which run again on other tensors and numbers without the function.

A tape is recorded below autograd and refers to tensors by slots. The tensors and the numbers that the calls read from
elsewhere are inputs of the tape: arguments, parameters, buffers, what a closure holds, factors and terms of sums. To
follow a tape is to run the function and to compare its calls with the tape's; where they agree, this collects what the
function reads now. So a tape that was followed computes what the function computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ..patterns import UnsupportedOperatorError
from .arithmetic import Arithmetic, NotFollowedError
from .graph import Form, form_of, tensors_in
from .operators import OF_NUMBERS, cross, draws, is_written, operator_name, with_memory
from .sparse_products import Elements, indices_of, is_sparse, operator_on_elements
from .traces import base_of, memory_of, observing

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor on a tape."""

    place: int


@dataclass(frozen=True, slots=True)
class Number:
    """The place of a number among the numbers that a tape reads."""

    place: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """A call of an ATen operator: its arguments, tensors and numbers by their places, and the slots of its results."""

    overload: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]
    #: Whether autograd saw the call: where it did not, no derivative passes.
    seen: bool
    #: Where the results are in what it returns, if that is a list or a tuple: backward operators leave some out.
    places: tuple[int, ...] = (0,)


class Reads(NamedTuple):
    """What a function reads besides its argument in one run: tensors from elsewhere, and numbers."""

    externals: list[torch.Tensor]
    numbers: tuple[float, ...]
    #: Those of the run's results that were asked for.
    results: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class Contents:
    """The elements of an index or a mask, or the indices of a sparse tensor, which patterns may depend on."""

    copy: torch.Tensor

    @classmethod
    def of(cls, value: torch.Tensor) -> Contents:
        """Those of a tensor now."""
        return cls((indices_of(value) if is_sparse(value) else value.detach()).clone())

    def equal(self, value: torch.Tensor) -> bool:
        """Whether a tensor of the same form has these elements."""
        # Writes through NumPy or ``.data`` do not change a tensor's version.
        return torch.equal(indices_of(value) if is_sparse(value) else value, self.copy)


@dataclass(eq=False)
class Tape:
    """The calls of a function of one tensor, whose slot is 0."""

    instructions: list[Instruction] = field(default_factory=list)
    #: The forms of the tensors that the calls read from elsewhere, by slot.
    forms: dict[int, Form] = field(default_factory=dict)
    #: The elements of those that are indices or masks, and the indices of those that are sparse.
    contents: dict[int, Contents] = field(default_factory=dict)
    #: The dtype in which the operator of each number works.
    dtypes: list[torch.dtype] = field(default_factory=list)
    #: The slot of the output; None where it is no tensor of the tape.
    output: int | None = None
    #: Slots whose ``aten.detach`` passes derivatives: autograd detaches the results that it saves, and undoes it later;
    #: a tensor without derivatives has none to stop.
    saved: set[int] = field(default_factory=set)
    #: Slots of results that autograd did not see computed and that have a derivative, by a ``torch.autograd.Function``
    #: or by a later write.
    attached: set[int] = field(default_factory=set)
    #: What the calls do that no replay repeats, by the operator's name: they draw, show elements, write elsewhere.
    effects: dict[str, str] = field(default_factory=dict)

    @property
    def inputs(self) -> list[int]:
        """The slot of each of the tensors that stand for the externals: a sparse matrix is three of them."""
        return [slot for slot, form in self.forms.items() for _ in range(1 if form[2] == torch.strided else 3)]

    def run(self, x: torch.Tensor, externals: Sequence[torch.Tensor], numbers: Sequence[Any]) -> torch.Tensor:
        """The output for another tensor, other externals and numbers, which may be tensors without axes.

        Each sparse external is given by the rows, columns and values of its elements.
        """
        tensors: dict[int, Any] = {0: x}
        rest = iter(externals)
        for slot, (shape, _, layout, *_) in self.forms.items():
            tensors[slot] = next(rest)
            if layout != torch.strided:
                tensors[slot] = Elements(tensors[slot], next(rest), next(rest), tuple(shape))

        def argument(value: Any) -> Any:
            if type(value) is Slot:
                return tensors[value.place]
            if type(value) is Number:
                return numbers[value.place]
            return [argument(part) for part in value] if type(value) is list else value

        for instruction in self.instructions:
            overload = instruction.overload
            args = [argument(value) for value in instruction.args]
            kwargs = {name: argument(value) for name, value in instruction.kwargs.items()}
            if overload is aten.rsub.Scalar:
                # Numbers may be tensors here, of which this takes none.
                overload, kwargs = aten.rsub.Tensor, dict(zip(["alpha"], args[2:], strict=False)) | kwargs
                args = args[:2]
            if not instruction.seen:
                constant = {p.name: not is_written(p) for p in overload._schema.arguments}
                args = [_detached(value) if c else value for value, c in zip(args, constant.values(), strict=False)]
                kwargs = {name: _detached(value) if constant[name] else value for name, value in kwargs.items()}
            if any(map(is_sparse, args)):
                call = operator_on_elements(overload, args)
            elif overload is aten.linalg_cross.default:
                # By operators whose derivatives are elementwise.
                call = cross
            else:
                call = overload
            passes = overload is aten.detach.default and instruction.results[0] in self.saved
            result = args[0] if passes else call(*args, **kwargs)
            several = isinstance(result, (list, tuple)) and not isinstance(result, Elements)
            # Without gradients an operator may leave out what it saves for a backward pass.
            results = [result[place] for place in instruction.places] if several else [result]
            tensors.update(zip(instruction.results, results, strict=False))
        assert self.output is not None
        return tensors[self.output]


def _detached(value: Any) -> Any:
    """An argument, or a list of arguments, through which no derivative passes."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return [_detached(part) for part in value] if type(value) is list else value


def recorded_tape(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> tuple[Tape, Reads]:
    """The tape of a function's run on a tensor, and what the run read."""
    taping, hooks = Taping([x]), RemovableHandle.next_id
    with torch.enable_grad(), observing(), taping:
        output = function(x)
    taping.tape.output = taping.slots.get(id(output))
    unseen = (slot for call in taping.tape.instructions if not call.seen for slot in call.results)
    taping.tape.attached = {slot for slot in unseen if taping.alive[slot].grad_fn is not None}
    if hooks != RemovableHandle.next_id:
        taping.tape.effects["register_hook"] = "changes gradients"
    return taping.tape, Reads(taping.externals, tuple(taping.numbers))


def followed(
    tape: Tape, function: Callable[[torch.Tensor], Any], x: torch.Tensor, slots: Sequence[int] = ()
) -> Reads | None:
    """What a function reads now, and the results in these slots; None where its calls are not the tape's."""
    try:
        return _followed(_Following(tape, x), function, x, slots)
    except _OtherCallsError:
        return None


def numbers_followed(
    tape: Tape, function: Callable[[torch.Tensor], Any], x: torch.Tensor, arithmetic: Arithmetic
) -> Reads | None:
    """As `followed`, of a function that takes the numbers of an arithmetic, which learns which of them the tape reads.

    None also where the function does not take such numbers, or where other arguments of calls depend on them.
    """
    try:
        reads = _followed(_FollowingNumbers(tape, x, arithmetic), function, x, ())
    except (_OtherCallsError, NotFollowedError, Exception):
        return None
    finally:
        arithmetic.running = False
    return None if arithmetic.refused else reads


def _followed(
    following: _Following, function: Callable[[torch.Tensor], Any], x: torch.Tensor, slots: Sequence[int]
) -> Reads | None:
    tape, hooks = following.tape, RemovableHandle.next_id
    with torch.enable_grad(), observing(), following:
        output = function(x)
    if (
        hooks != RemovableHandle.next_id
        or following.count != len(tape.instructions)
        or following.slots.get(id(output)) != tape.output
        or {slot for slot, tensor in following.unseen if tensor.grad_fn is not None} != tape.attached
    ):
        return None
    return Reads([following.externals[slot] for slot in tape.forms], tuple(following.numbers), following.results(slots))


class Taping(TorchDispatchMode):
    """Records a tape while it is active; its first slots are the inputs'."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.tape = Tape()
        self.slots = {id(x): slot for slot, x in enumerate(inputs)}
        self.externals: list[torch.Tensor] = []
        self.numbers: list[float] = []
        # By slot: no other tensor gets the id of one that is alive.
        self.alive: list[torch.Tensor] = list(inputs)
        # The slot that ``aten.detach`` was called on, by that of its result, until a call uses that.
        self.detached: dict[int, int] = {}
        # The memories that hold the same in each run: calls of constants alone fill them.
        self.constant: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and PyTorch's wrapper against compilation is slow.
        return False

    def __torch_dispatch__(self, overload: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        overload, kwargs = with_memory(overload), kwargs or {}
        parameters = overload._schema.arguments
        args_of_tape = tuple(self.argument(overload, p, value) for p, value in zip(parameters, args, strict=False))
        by_name = {parameter.name: parameter for parameter in parameters}
        kwargs_of_tape = {name: self.argument(overload, by_name[name], value) for name, value in kwargs.items()}
        self.note_effects(overload, args_of_tape, kwargs_of_tape)
        result = overload(*args, **kwargs)
        results = tuple(self.slot_of(tensor) for tensor in tensors_in(result))
        self.note_constant(overload, args_of_tape, kwargs_of_tape, results)
        if overload is aten.detach.default:
            self.detached[results[0]] = args_of_tape[0].place
            if not args[0].requires_grad:
                # PyTorch detaches what torch.zeros makes, into which a function may write what has derivatives.
                self.tape.saved.add(results[0])
        seen = torch.is_grad_enabled()
        parts = enumerate(result if isinstance(result, (list, tuple)) else [result])
        places = tuple(place for place, part in parts if isinstance(part, torch.Tensor))
        self.tape.instructions.append(Instruction(overload, args_of_tape, kwargs_of_tape, results, seen, places))
        new = len(self.numbers) - len(self.tape.dtypes)
        self.tape.dtypes.extend([tensors_in(result)[0].dtype] * new if new else [])
        return result

    def slot_of(self, tensor: torch.Tensor) -> int:
        """The slot of a tensor, a new one where it has none."""
        if id(tensor) not in self.slots:
            self.slots[id(tensor)] = len(self.alive)
            self.alive.append(tensor)
        return self.slots[id(tensor)]

    def argument(self, overload: Any, parameter: Any, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = id(value) in self.slots
            slot = self.slot_of(value)
            if not known:
                self.take(slot, value)
            source = self.detached.pop(slot, None)
            if source is not None and value.grad_fn is not None:
                self.tape.saved |= {source, slot}
            return Slot(slot)
        if isinstance(value, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in value):
            return [self.argument(overload, parameter, part) for part in value]
        if is_number(overload, parameter.name, value):
            self.numbers.append(value)
            return Number(len(self.numbers) - 1)
        return tuple(value) if isinstance(value, list) else value

    def take(self, slot: int, value: torch.Tensor) -> None:
        """Add a tensor from elsewhere to the tape."""
        tape, outside = self.tape, self._memories(self.tape.forms)
        made_here = self._memories(range(slot)) - outside
        if value.layout == torch.strided and value.untyped_storage()._cdata in made_here:
            tape.effects["data"] = "gives a tensor of the run another name"
        tape.forms[slot] = form_of(value)
        self.externals.append(value)
        if not value.is_floating_point() or is_sparse(value):
            tape.contents[slot] = Contents.of(value)

    def note_effects(self, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Record what the call does besides computing its results."""
        name, effects, parameters = operator_name(overload), self.tape.effects, overload._schema.arguments
        arguments = {p.name: value for p, value in zip(parameters, args, strict=False)} | kwargs
        if torch.Tag.nondeterministic_seeded in overload.tags:
            if draws(overload, arguments):
                effects[name] = "draws random numbers"
        elif torch.Tag.data_dependent_output in overload.tags and not self.is_constant(arguments.values()):
            effects[name] = "shows Python what a tensor holds"
        for parameter in filter(is_written, parameters):
            value = arguments.get(parameter.name)
            for slot in value if isinstance(value, list) else [value]:
                if isinstance(slot, Slot):
                    self.note_write(overload, slot.place)

    def note_constant(
        self, overload: Any, args: Sequence[Any], kwargs: dict[str, Any], results: tuple[int, ...]
    ) -> None:
        """Record whether what a call makes, and what it writes to, holds the same in each run."""
        values = (*args, *kwargs.values())
        if torch.Tag.nondeterministic_seeded not in overload.tags and self.is_constant(values):
            self.constant |= self._memories(results)
        elif self.constant:
            touched = {*results, *(_slots_in(values) if mutates(overload) else ())}
            self.constant -= self._memories(touched)

    def is_constant(self, values: Iterable[Any]) -> bool:
        """Whether arguments are the same in each run."""
        values = list(values)
        return not any(type(value) is Number for value in values) and all(
            memory_of(self.alive[slot]) in self.constant for slot in _slots_in(values)
        )

    def note_write(self, overload: Any, slot: int) -> None:
        """Record a write that no replay repeats: to a tensor from elsewhere, or one that autograd does not see."""
        name, written = operator_name(overload), self.alive[slot]
        # These change a shape and no elements.
        shapes = torch.Tag.inplace_view in overload.tags
        for place, tensor in enumerate(self.alive):
            if memory_of(tensor) != memory_of(written):
                continue
            seen = torch.is_grad_enabled() and base_of(tensor) is base_of(written)
            if place == 0 or place in self.tape.forms:
                self.tape.effects[name] = "writes to a tensor from before the call"
            elif tensor.requires_grad and not seen and not shapes:
                self.tape.effects.setdefault(name, "changes a tensor unseen by autograd")

    def written(self) -> set[int]:
        """The slots of the tensors in whose memory a call writes."""
        calls = [call for call in self.tape.instructions if mutates(call.overload)]
        memories = self._memories(slot for call in calls for slot in call.results)
        return {slot for slot in range(len(self.alive)) if self._memories([slot]) & memories}

    def _memories(self, slots: Iterable[int]) -> set[int]:
        """The memories that the tensors of slots lie in."""
        tensors = (self.alive[slot] for slot in slots)
        return {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout == torch.strided}


def _slots_in(values: Iterable[Any]) -> set[int]:
    """The slots among arguments, and in lists of them."""
    parts = [part for value in values for part in (value if type(value) is list else (value,))]
    return {part.place for part in parts if type(part) is Slot}


class _OtherCallsError(BaseException):
    """A function made another call than its tape has; no handler of the function's catches it."""


class _Following(TorchDispatchMode):
    """Compares calls with a tape's, and collects the externals and the numbers; written for speed."""

    def __init__(self, tape: Tape, x: torch.Tensor) -> None:
        super().__init__()
        self.tape, self.instructions = tape, tape.instructions
        self.count = 0
        self.slots = {id(x): 0}
        self.externals: dict[int, torch.Tensor] = {}
        self.numbers: list[float] = []
        self.alive: list[Any] = []
        # Results that autograd did not see computed, with their slots.
        self.unseen: list[tuple[int, torch.Tensor]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, overload: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.count == len(self.instructions):
            raise _OtherCallsError
        instruction = self.instructions[self.count]
        self.count += 1
        if overload is not instruction.overload:
            overload = with_memory(overload)
        same = overload is instruction.overload and len(args) == len(instruction.args)
        if not same or torch.is_grad_enabled() is not instruction.seen:
            raise _OtherCallsError
        slots = self.slots
        for expected, value in zip(instruction.args, args, strict=True):
            if type(expected) is not Slot or slots.get(id(value)) != expected.place:
                self.compare(expected, value)
        if not kwargs:
            kwargs = {}
        if kwargs.keys() != instruction.kwargs.keys():
            raise _OtherCallsError
        for name, value in kwargs.items():
            self.compare(instruction.kwargs[name], value)
        result = overload(*args, **kwargs)
        self.alive.append(result)
        if isinstance(result, torch.Tensor):
            self.slots[id(result)] = instruction.results[0]
        else:
            for slot, tensor in zip(instruction.results, tensors_in(result), strict=True):
                self.slots[id(tensor)] = slot
        if not instruction.seen:
            self.unseen += zip(instruction.results, tensors_in(result), strict=True)
        return result

    def results(self, slots: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """The results of the run in these slots."""
        if not slots:
            return ()
        results = {self.slots[id(tensor)]: tensor for result in self.alive for tensor in tensors_in(result)}
        return tuple([results[slot] for slot in slots])

    def compare(self, expected: Any, value: Any) -> None:
        """Raise where an argument is not the tape's; collect it where it is an external or a number."""
        kind = type(expected)
        if kind is Slot:
            slot = self.slots.get(id(value))
            if slot is None:
                self.take(expected.place, value)
            elif slot != expected.place:
                raise _OtherCallsError
        elif kind is Number:
            floats = self.tape.dtypes[expected.place].is_floating_point
            if type(value) is not int and not (floats and type(value) is float):
                raise _OtherCallsError
            self.numbers.append(value)
        elif kind is list:
            if not isinstance(value, (list, tuple)) or len(value) != len(expected):
                raise _OtherCallsError
            for part, other in zip(expected, value, strict=True):
                self.compare(part, other)
        elif (tuple(value) if type(value) is list else value) != expected:
            raise _OtherCallsError
        elif kind in (bool, float) and str(value) != str(expected):
            # A bool equals a number, and 0.0 equals -0.0.
            raise _OtherCallsError

    def take(self, place: int, value: Any) -> None:
        """Collect an external of the tape's form, with its elements where patterns depend on them."""
        # A slot that is taken already has another tensor.
        if (
            place in self.externals
            or not isinstance(value, torch.Tensor)
            or form_of(value) != self.tape.forms.get(place)
        ):
            raise _OtherCallsError
        if place in self.tape.contents and not self.tape.contents[place].equal(value):
            raise _OtherCallsError
        self.slots[id(value)] = place
        self.externals[place] = value
        self.alive.append(value)


class _FollowingNumbers(_Following):
    """Also notes which numbers of the tape are those of an arithmetic."""

    def __init__(self, tape: Tape, x: torch.Tensor, arithmetic: Arithmetic) -> None:
        super().__init__(tape, x)
        self.arithmetic = arithmetic

    def compare(self, expected: Any, value: Any) -> None:
        passed = type(expected) is Number and self.arithmetic.take(expected.place, value)
        if self.arithmetic.passed is not None and not passed and type(expected) is not list and _has_number(value):
            # It may depend on the number that was passed.
            raise _OtherCallsError
        super().compare(expected, value)


def _has_number(value: Any) -> bool:
    return any(map(_has_number, value)) if isinstance(value, (list, tuple)) else isinstance(value, float)


def same_number(one: Any, other: Any) -> bool:
    """Whether two numbers are equal, of one type, zeros with their signs: the inverses of 0.0 and -0.0 differ."""
    return type(one) is type(other) and one == other and (one != 0 or str(one) == str(other))


def same_numbers(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether all of two tuples' numbers are equal, zeros with their signs."""
    return some == others and (0 not in some or all(map(same_number, some, others)))


@functools.cache
def mutates(overload: Any) -> bool:
    """Whether an operator writes to an argument."""
    return any(is_written(parameter) for parameter in overload._schema.arguments)


def is_number(overload: Any, name: str, value: Any) -> bool:
    """Whether an argument is a number that may be another at each run."""
    return type(value) in (int, float) and name == "other" and overload in OF_NUMBERS


def check_replays(tape: Tape, name: str) -> None:
    """Raise where a replay of the tape is not a run of the function.

    Raises
    ------
    UnsupportedOperatorError
        It names the operator, what it does, and what to do.
    """
    for operator, effect in tape.effects.items():
        raise UnsupportedOperatorError(
            f"{name}: {operator} {effect}, so that no prepared program repeats the call; "
            f"{'write to a clone' if 'writes' in effect else 'call jacsparse.jacobian, which runs it each time'}"
        )
