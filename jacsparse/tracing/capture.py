"""Captures a run of a function: the ATen calls that it makes below autograd, and their tensors.

The run is left as it is. Its record has no writes: a tensor on a storage that was written to is the value that it holds
when it is read (`storages`), and a write is a call that returns what it wrote.

Values are numbered in the order in which they come up: the input is 0, then come the results of calls and, at their
first use, the tensors from elsewhere. All that follows from a run's calls alone follows from its `key`: runs that make
the same calls on tensors of the same forms have the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.nn.modules._functions import BackwardHookFunction

from ..patterns import UnsupportedOperatorError
from ..runtime import DispatchMode
from .graph import Form, Value, captured_form, form_of, tensors_in, with_written
from .operators import Facts, facts_of, named_tensors, with_memory, written_tensors
from .overwrite import extent_of
from .storages import OUTSIDE, Contents, Pieces, WrittenStorage, numbered
from .traces import memory_of

aten = torch.ops.aten


@dataclass(eq=False, slots=True)
class CapturedCall:
    """A call of a run."""

    #: An OpOverload, a `Gather`, a `Rewrite` or a `FunctionCall`.
    overload: Any
    #: With a `Value` in the place of each tensor.
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: The operands through which a derivative passes.
    active: frozenset[int]
    #: The values of what it returns, and then of what else it writes to.
    results: range
    #: Whether it writes to its arguments.
    writes: bool = False


@dataclass(frozen=True, eq=False)
class Gather:
    """An operator: a tensor of elements of others."""

    pieces: Pieces

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The elements of tensors, one for each of `Pieces.values`."""
        _, which, places = self.pieces
        where = torch.from_numpy(places).to(tensors[0].device)
        if len(tensors) == 1:
            return tensors[0].reshape(-1)[where]
        sizes = torch.tensor([0, *(each.numel() for each in tensors[:-1])], device="cpu").cumsum(0)
        begins = sizes[torch.from_numpy(which)].to(where.device)
        return torch.cat([each.reshape(-1) for each in tensors])[begins + where]


@dataclass(frozen=True, eq=False)
class Rewrite:
    """An operator: the elements of one tensor, with the derivative of another one.

    That is a tensor which was written to where autograd does not look.
    """

    def __call__(self, elements: torch.Tensor, derivative: torch.Tensor) -> torch.Tensor:
        return derivative + (elements - derivative).detach()


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """A ``torch.autograd.Function`` in a run: what it returned, and autograd's node, which has its backward pass."""

    node: Any
    output: int
    result: torch.Tensor


@dataclass(eq=False)
class CapturedRun:
    """What a function did at an input."""

    calls: list[CapturedCall] = field(default_factory=list)
    #: By value, as the run left them: they may have been overwritten.
    tensors: list[torch.Tensor] = field(default_factory=list)
    #: The elements of values that were overwritten, and that no call computes again.
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    #: The forms of tensors from elsewhere, by value, and whether they need gradients.
    captures: dict[int, tuple[Form, bool]] = field(default_factory=dict)
    #: Where autograd computes the gradients of values that calls used.
    gradient_edges: dict[int, GradientEdge] = field(default_factory=dict)
    key: tuple[Hashable, ...] = ()
    output: int = -1
    #: Whether a derivative passes through the output.
    active: bool = False


def capture(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> CapturedRun:
    """A run of a function at a copy of an input."""
    with torch.enable_grad():
        # No leaf, so that the function may write to it.
        copy = x.detach().requires_grad_().clone()
        recorder = _Recorder(copy)
        with recorder:
            output = function(copy)
        return recorder.finished(output)


class _Recorder(DispatchMode):
    """Records calls while it is active."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.run = CapturedRun()
        #: Of tensors by their ids, which live as long as the run; and of tensors that are no values themselves.
        self.numbers: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []
        #: By value, whether it depends on the input, and whether a derivative passes through it.
        self.dependent: list[bool] = []
        self.active: list[bool] = []
        self.key: list[Hashable] = [form_of(x), torch.get_default_dtype()]
        self._storages: dict[int, WrittenStorage] = {}
        #: By a tensor's id, how many of the writes to its storage its value has.
        self._known: dict[int, int] = {}
        #: By storage, the values on it; and of how many values that is known.
        self._values_on: dict[int, list[int]] = {}
        self._placed = 0
        #: Values that no call computes again.
        self._irreplaceable = {self.bind(x, dependent=True, active=True)}
        self._functions: dict[tuple[Any, int], int] = {}
        # Of the call that is recorded: its operands, and the class of autograd's node of each.
        self._operands: list[int] = []
        self._kinds: list[type | None] = []

    def __torch_dispatch__(self, overload: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Written for speed: with small operators this is most of what a run costs.
        kwargs = kwargs or {}
        if overload is _DETACH and id(args[0]) in self.numbers:
            # Autograd calls it on the tensors that it saves.
            return self._same_elements(_DETACH(args[0]), args[0])
        if args and type(args[0]) in _OF_PROFILER:
            return overload(*args, **kwargs)
        overload = with_memory(overload)
        facts = facts_of(overload)
        if facts.viewed is not None and not facts.written and self._storages:
            viewed = dict(named_tensors(facts, args, kwargs)).get(facts.viewed)
            if viewed is not None and memory_of(viewed) in self._storages:
                result = overload(*args, **kwargs)
                views = tensors_in(result)
                if all(_are_alike(view, viewed) for view in views):
                    # Where they are read, they are what the storage holds then.
                    self.alive += views
                    return result
                return self._record(overload, facts, args, kwargs, lambda: result)
        if facts.reshapes:
            self._look_at(args[0])
            # Its value has its shape of now.
            number = self.numbers.pop(id(args[0]), None)
            if number is not None:
                self.run.tensors[number] = args[0].detach()
            self._known.pop(id(args[0]), None)
            return overload(*args, **kwargs)
        if overload is aten.copy_.default and _replaces(*args):
            return self._replaced(*args)
        return self._record(overload, facts, args, kwargs)

    def finished(self, output: torch.Tensor) -> CapturedRun:
        """The run, after the function has returned its output."""
        run = self.run
        run.output = self.read(output)
        run.active = self._kinds.pop() not in _NO_GRADIENT and self.active[run.output]
        run.key = (*self.key, run.output, run.active)
        return run

    # Values.

    def bind(self, tensor: torch.Tensor, *, dependent: bool, active: bool) -> int:
        """Take a tensor for a new value."""
        number = len(self.run.tensors)
        self.run.tensors.append(tensor)
        self.dependent.append(dependent)
        self.active.append(active)
        self.numbers[id(tensor)] = number
        storage = self._storages.get(memory_of(tensor)) if self._storages else None
        if storage is not None:
            self._known[id(tensor)] = storage.writes
        return number

    def read(self, tensor: torch.Tensor) -> int:
        """The value that a tensor holds now, an operand of the call that is recorded."""
        number = self.numbers.get(id(tensor))
        if self._storages:
            number = self._current(tensor, number)
        elif number is None:
            number = self._from_elsewhere(tensor)
        kind: type | None = None
        seen = torch.is_grad_enabled()
        # A look at the node of a view that was made under ``no_grad`` may be an error.
        if tensor.requires_grad and (seen or not tensor._is_view()):
            node = tensor.grad_fn
            kind = type(node) if seen else None
            if node is not None:
                if seen and isinstance(node, BackwardCFunction):
                    number = self._of_function(tensor, node, number)
                if number not in self.run.gradient_edges:
                    self.run.gradient_edges[number] = GradientEdge(node, tensor.output_nr)
        self._kinds.append(kind)
        self._operands.append(number)
        return number

    def _from_elsewhere(self, tensor: torch.Tensor) -> int:
        """The value of a tensor that no call has made."""
        self._place_values()
        memory = memory_of(tensor)
        if memory and any(value not in self.run.captures for value in self._values_on.get(memory, ())):
            # Another name of what a call has made, as ``.data`` gives.
            self._look_at(tensor)
            return self._current(tensor, None)
        return self._captured(tensor, tensor)

    def _captured(self, tensor: torch.Tensor, elements: torch.Tensor) -> int:
        """A new value from elsewhere, which has these elements."""
        form = captured_form(tensor)
        self.key.append(form)
        number = self.bind(tensor, dependent=False, active=False)
        if elements is not tensor:
            self.run.copies[number] = elements
        self.run.captures[number] = form
        self._irreplaceable.add(number)
        return number

    def _same_elements(self, result: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Give a tensor the value of another one."""
        self.numbers[id(result)] = self.numbers[id(tensor)]
        if id(tensor) in self._known:
            self._known[id(result)] = self._known[id(tensor)]
        self.alive.append(result)
        return result

    # Storages that are written to.

    def _place_values(self) -> None:
        """Note on which storages the values are."""
        for value in range(self._placed, len(self.run.tensors)):
            self._values_on.setdefault(memory_of(self.run.tensors[value]), []).append(value)
        self._placed = len(self.run.tensors)

    def _look_at(self, tensor: torch.Tensor) -> WrittenStorage | None:
        """The storage of a tensor, from now on known element by element; None for a sparse one."""
        memory = memory_of(tensor)
        if not memory:
            return None
        storage = self._storages.get(memory)
        if storage is None:
            storage = self._storages[memory] = WrittenStorage(len(self._storages), tensor)
            self._place_values()
            # The last values of whole tensors are enough: others are views of these.
            for value in self._values_on.get(memory, ()):
                known = self.run.tensors[value]
                if known._base is None and known.element_size() == storage.itemsize:
                    storage.begin(known, value)
        return storage

    def _current(self, tensor: torch.Tensor, number: int | None) -> int:
        """The value that a tensor holds now, of which it may have had another one."""
        storage = self._storages.get(memory_of(tensor))
        if storage is None:
            return self._from_elsewhere(tensor) if number is None else number
        if number is not None and self._known.get(id(tensor), 0) == storage.writes:
            return number
        if tensor.element_size() != storage.itemsize or tensor.is_conj() or tensor.is_neg():
            raise UnsupportedOperatorError("a tensor is written to as numbers of another kind; compute new ones")
        number = self._held(tensor, storage.contents)
        if tensor.requires_grad and tensor.grad_fn is not None and torch.is_grad_enabled():
            derivative = self._held(tensor, storage.derivatives(tensor))
            if derivative != number:
                number = self._append(Rewrite(), (number, derivative), [tensor], frozenset([derivative]))[0]
        self.numbers[id(tensor)], self._known[id(tensor)] = number, storage.writes
        self.alive.append(tensor)
        return number

    def _held(self, tensor: torch.Tensor, contents: Contents) -> int:
        """The value that has a tensor's elements, by what its storage holds."""
        pieces = contents.read(extent_of(tensor))
        if isinstance(pieces, int):
            return pieces
        if len(pieces.values) == 1 and self._is_whole(pieces, tensor.shape):
            return pieces.values[0]
        values = list(pieces.values)
        if OUTSIDE in values:
            # What no value had is as it was before the run.
            place = values.index(OUTSIDE)
            values[place] = self._captured(tensor, tensor.detach().clone())
            pieces.places[pieces.which == place] = numbered(tensor.shape)[pieces.which == place]
        active = frozenset(value for value in values if self.active[value])
        return self._append(Gather(pieces._replace(values=values)), values, [tensor], active)[0]

    def _is_whole(self, pieces: Pieces, shape: torch.Size) -> bool:
        """Whether a tensor of a shape has all elements of one value in their order."""
        (value,) = pieces.values
        known = self.run.tensors[value] if value != OUTSIDE else None
        return known is not None and known.shape == shape and bool((pieces.places == numbered(shape)).all())

    def _preserve(self, tensor: torch.Tensor) -> None:
        """Copy what a write is about to change, and what no call computes again."""
        self._place_values()
        for value in self._values_on.pop(memory_of(tensor), ()):
            if value in self._irreplaceable and value not in self.run.copies:
                self.run.copies[value] = self.run.tensors[value].detach().clone()

    def _write(self, tensor: torch.Tensor, value: int, *, seen: bool) -> None:
        """Take a value for what a tensor was overwritten with."""
        storage = self._storages[memory_of(tensor)]
        storage.write(tensor, value, seen=seen)
        self.numbers[id(tensor)], self._known[id(tensor)] = value, storage.writes
        # Views of a written storage are no calls, and a value may lie at several places.
        self.key.append((storage.number, value, extent_of(tensor), seen, storage.family(tensor)))

    def _replaced(self, tensor: torch.Tensor, other: torch.Tensor, *_: Any) -> torch.Tensor:
        """Copy a tensor onto another one, which then is the same value."""
        self._operands, self._kinds, seen = [], [], torch.is_grad_enabled()
        value = self.read(other)
        if seen and self.active[value] and self._kinds[0] in _NO_GRADIENT:
            # It has the elements alone.
            (value,) = self._append(aten.alias.default, (value,), [other], frozenset())
        self._look_at(tensor)
        self._preserve(tensor)
        aten.copy_.default(tensor, other)
        self._write(tensor, value, seen=seen)
        self.alive.append(tensor)
        return tensor

    # Calls.

    def _record(
        self, overload: Any, facts: Facts, args: Any, kwargs: dict[str, Any], run: Callable[[], Any] | None = None
    ) -> Any:
        """Run a call and record it."""
        self._operands, self._kinds = [], []
        references, keys = zip(*map(self._referred, args), strict=True) if args else ((), ())
        named = {name: self._referred(value) for name, value in kwargs.items()}
        operands, kinds, seen = self._operands, tuple(self._kinds), torch.is_grad_enabled()
        depends = not facts.of_shape and any(self.dependent[value] for value in operands)
        active = frozenset(
            value
            for value, kind in zip(operands, kinds, strict=True)
            if kind not in _NO_GRADIENT and self.active[value]
        )
        active = active if seen and depends else frozenset()
        written = written_tensors(facts, args, kwargs) if facts.written else []
        for tensor in written:
            self._look_at(tensor)
            self._preserve(tensor)
        result = overload(*args, **kwargs) if run is None else run()
        results = with_written(result, written)
        first = len(self.run.tensors)
        for tensor in results:
            number = self.bind(tensor, dependent=depends, active=bool(active))
            if any(tensor is each for each in written):
                self._write(tensor, number, seen=seen)
        if facts.fresh or facts.random:
            self._irreplaceable.update(range(first, len(self.run.tensors)))
        of_names = {name: reference for name, (reference, _) in named.items()}
        numbers = range(first, len(self.run.tensors))
        self.run.calls.append(CapturedCall(overload, references, of_names, active, numbers, bool(written)))
        of_keys = tuple([(name, key) for name, (_, key) in named.items()])
        sizes = tuple([tensor.shape for tensor in results]) if facts.dynamic else len(results)
        self.key.append((id(overload), seen, keys, of_keys, kinds, sizes))
        return result

    def _append(
        self, operator: Any, operands: Sequence[int], results: list[torch.Tensor], active: frozenset[int]
    ) -> range:
        """Record a call that the run did not make."""
        first, dependent = len(self.run.tensors), any(self.dependent[value] for value in operands)
        for tensor in results:
            self.bind(tensor, dependent=dependent, active=bool(active))
        numbers = range(first, len(self.run.tensors))
        self.run.calls.append(CapturedCall(operator, tuple(map(Value, operands)), {}, active, numbers))
        kind = type(operator.node) if isinstance(operator, FunctionCall) else type(operator)
        self.key.append((id(kind), tuple(operands), tuple(sorted(active)), *map(extent_of, results)))
        return numbers

    def _referred(self, value: Any) -> tuple[Any, Hashable]:
        """An argument with references in the place of tensors; and what a key has of it."""
        kind = type(value)
        if kind is int or value is None or kind is str:
            return value, value
        if isinstance(value, torch.Tensor):
            reference = Value(self.read(value))
            return reference, reference
        if kind in (list, tuple):
            parts = [self._referred(part) for part in value]
            return kind(part for part, _ in parts), tuple([key for _, key in parts])
        # Numbers that are equal may be of several types, and zeros have signs.
        return value, ((kind, repr(value)) if kind in (bool, float, complex) else value)

    # Functions that have backward passes of their own.

    def _of_function(self, tensor: torch.Tensor, node: Any, number: int) -> int:
        """The value of what a ``torch.autograd.Function`` returned, whose elements are those of another value."""
        if issubclass(type(node)._forward_cls, BackwardHookFunction):  # type: ignore[attr-defined]
            # Of a module's hooks: it returns what it is given.
            before = self._behind(*node.next_functions[tensor.output_nr])
            return number if before is None else before
        place = node, tensor.output_nr
        if place not in self._functions:
            operands = [self._behind(*edge) for edge in node.next_functions]
            known = [value for value in operands if value is not None]
            active = frozenset(value for value in known if self.active[value])
            result = tensor.detach()
            if memory_of(tensor) in self._storages:
                result = result.clone()
            operator = FunctionCall(node, tensor.output_nr, result)
            (self._functions[place],) = self._append(operator, known, [tensor], active)
        self.numbers[id(tensor)] = self._functions[place]
        return self._functions[place]

    def _behind(self, node: Any, output: int) -> int | None:
        """The value whose gradient a node computes; None where that is nobody's."""
        if node is None:
            return None
        if hasattr(node, "variable"):
            number = self.numbers.get(id(node.variable))
            return self._from_elsewhere(node.variable) if number is None else number
        for value, edge in self.run.gradient_edges.items():
            if edge.node is node and edge.output_nr == output:
                return value
        for tensor in (*self.run.tensors, *self.alive):
            if tensor.grad_fn is node and tensor.output_nr == output:
                return self.numbers[id(tensor)]
        raise UnsupportedOperatorError(f"{node.name()} is computed by no operator that was seen")


def _replaces(tensor: torch.Tensor, other: Any, *_: Any) -> bool:
    """Whether a copy makes a tensor another one of its form, of which only the elements count."""
    return (
        isinstance(other, torch.Tensor)
        and tensor.layout == other.layout == torch.strided
        and (tensor.shape, tensor.dtype, tensor.device) == (other.shape, other.dtype, other.device)
        and not (tensor.is_conj() or tensor.is_neg() or other.is_conj() or other.is_neg())
    )


def _are_alike(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a view has elements of a tensor as they are."""
    return (
        view.layout == torch.strided
        and view.dtype == tensor.dtype
        and view.is_conj() == tensor.is_conj()
        and view.is_neg() == tensor.is_neg()
    )


_DETACH = aten.detach.default
#: Of a tensor without a gradient, and of a leaf.
_NO_GRADIENT = (None, type(None))
#: What the profiler's calls begin with, which work on no tensor.
_OF_PROFILER = (str, torch.ScriptObject)
