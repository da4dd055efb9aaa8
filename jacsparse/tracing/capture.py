"""Captures a run of a function: the ATen calls that it makes below autograd, and their tensors.

The run is left as it is. Its record has no writes: a tensor on a storage that was written to is the value that it holds
when it is read (`storages`), and a write is a call that returns what it wrote.

Values are numbered in the order in which they come up: the input is 0, then come the results of calls and, at their
first use, the tensors from elsewhere. All that follows from a run's calls alone follows from its `key`: runs that make
the same calls on tensors of the same forms have the same one. A number that only scales or is added is no part of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from ..patterns import UnsupportedOperatorError, holds_numbers
from ..runtime import DispatchMode, a_type, without_compiling
from .autograd_nodes import (
    NO_CONTEXT,
    OF_ERRORS,
    innermost_hooks,
    is_of_function,
    leads_to,
    next_node,
    node_of,
    recording_derivatives,
    saves_by_hooks,
)
from .callers import Callers, Unreadable, hooks_so_far, place
from .functions import RecordedBackward, value_of_function
from .graph import Lines, Scalar, form_of
from .masks import PUTS, Masks
from .modules import name_of, tensors_of, without_autocast
from .operators import (
    PROFILER,
    WITHOUT_MEMORY,
    Facts,
    facts_of,
    is_lazily_changed,
    named_tensors,
    shows,
    tensors_in,
    with_written,
    written_tensors,
)
from .storages import Storages, memory_of, replaces
from .traces import (
    ACTIVE,
    DEPENDENT,
    DIFFERENTIABLE,
    OF_CAPTURES,
    OF_ELEMENTS,
    CapturedCall,
    CapturedRun,
    exactly,
    free_numbers,
)
from .writes import begin_write, current, end_write, replaced, reshaped

aten = torch.ops.aten


def capture(
    function: Callable[..., Any],
    x: torch.Tensor,
    arguments: Sequence[Any] = (),
    *,
    readable: bool = True,
    hidden: Sequence[torch.Tensor] = (),
    beside: Callable[[], Sequence[torch.Tensor]] = tuple,
    lines: Lines = (),
) -> CapturedRun:
    """A run of a function at a copy of an input, as `traced` says; `lines` are those of `Recorder`."""
    callers = Callers(function)
    try:
        with without_compiling, torch.set_grad_enabled(True):
            # No leaf, so that the function may write to it.
            copy = x.detach().requires_grad_().clone()
            recorder = Recorder(callers, readable=readable, lines=lines)
            recorder.begin(copy)
            with callers, DispatchMode(recorder.call), NO_CONTEXT if readable else Unreadable(recorder, hidden):
                output = function(copy, *arguments)
            return recorder.finished(output, beside())
    except (UnsupportedOperatorError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
        raise callers.in_users_words(x, error) from error


class Recorder:
    """Records calls, in a `DispatchMode` of its `call`.

    Parameters
    ----------
    callers : Callers
        Whose calls they are.
    readable : bool
        Whether Python may read elements of what depends on the input, as for a branch.
    in_parts : bool
        Whether the calls are the parts of a call, below autograd: a derivative passes wherever one may.
    lines : sequence of (OpOverload, str)
        The operators that an earlier run of the function called, and the lines of its code that did, which are those of
        this run, too: to look for one takes a tenth of the time of a call.
    """

    def __init__(self, callers: Callers, *, readable: bool = True, in_parts: bool = False, lines: Lines = ()) -> None:
        self.callers, self.readable, self.in_parts, self._lines = callers, readable, in_parts, lines
        self.run = CapturedRun(hooks=hooks_so_far())
        callers.calls = self.run.calls
        #: Of tensors by their ids, which live as long as the run; and of tensors that are no values themselves.
        self.numbers: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []
        #: As in the run.
        self.flags = self.run.flags
        self.key: list[Hashable] = [torch.get_default_dtype()]
        #: The first call that is refused: the run goes on, since what it raises itself comes first.
        self.problem: Exception | None = None
        self.storages = Storages(self.run.tensors)
        self.masks = Masks(self.run)
        #: Values that no call computes again.
        self.irreplaceable: set[int] = set()
        #: By autograd's node of a Function, what its backward pass computes; by the output too, the value that has the
        #: derivative, and those of the result by the values that have its elements.
        self.backward_passes: dict[Any, RecordedBackward] = {}
        self.functions: dict[tuple[Any, int], tuple[int, dict[int, int]]] = {}
        #: Values of views that no memory tells, as of what a Function returned.
        self._known_views: set[int] = set()
        #: The ids of the function's parameters and buffers, whose memory no call of the run has made.
        self._own: set[int] | None = None
        #: Tensors without a gradient, by their ids, whose values others have that may have one.
        self._detached: set[int] = set()
        #: Copies of lazy conjugates and negatives, by their ids: PyTorch makes some below autograd, for an operator.
        self._resolved: set[int] = set()
        # Of the call that is recorded: its operands, and the class of autograd's node of each.
        self._operands: list[int] = []
        self.kinds: list[type | None] = []
        self._flags = 0
        self._sequence = -1
        #: The numbers of autograd's nodes of views on written storages: it may make one anew within a call.
        self._nodes_of_views: set[int] = set()
        self._apart = False
        #: Whether a module that was called has backward hooks.
        self.has_hooks = self._saved_by_hooks = False

    def begin(self, x: torch.Tensor, flags: int = DEPENDENT | ACTIVE | DIFFERENTIABLE) -> int:
        """Take a tensor for a value that no call of the run makes, as its input."""
        self.key.append(form_of(x))
        number = self.bind(x, flags)
        self.irreplaceable.add(number)
        if x.grad_fn is not None:
            self.run.gradient_edges[number] = x.grad_fn, x.output_nr
        return number

    def call(self, overload: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a call of an operator, and record it."""
        # Written for speed: with small operators this is most of what a run costs.
        # Before a look at the node of a view makes that anew.
        self._sequence = next_node() - 1
        if innermost_hooks(False) is not None:
            self._saved_by_hooks = self._saved_by_hooks or saves_by_hooks()
        facts, self.callers.call = facts_of(overload), (overload, args)
        if facts.special:
            if overload is _DETACH and id(args[0]) in self.numbers:
                # Autograd calls it on the tensors that it saves.
                return self.alias(_DETACH(args[0]), args[0])
            if overload is _COPY and replaces(*args[:2]):
                return replaced(self, *args)
            if facts.name.startswith(PROFILER):
                return overload(*args, **kwargs)
            if overload is WITHOUT_MEMORY:
                facts = facts_of(_ZEROS)
            elif facts.reshapes:
                return reshaped(self, overload, *args, **kwargs)
        if facts.viewed is not None and not facts.written and self.storages.written:
            viewed = dict(named_tensors(facts, args, kwargs)).get(facts.viewed)
            storage = None if viewed is None else self.storages.get(viewed)
            if viewed is not None and storage is not None:
                result = overload(*args, **kwargs)
                views, number = tensors_in(result), self.numbers.get(id(viewed))
                is_known = number in self._known_views or is_of_function(viewed)
                if not is_known and all(map(storage.has_elements_of, views)):
                    # Where they are read, they are what the storage holds then.
                    self.alive += views
                    self.masks.leave([] if overload is aten.view.default else [number])
                    return result
                self._record(facts, args, kwargs, lambda: result)
                self._known_views.update([self.numbers[id(view)] for view in views])
                return result
        return self._record(facts, args, kwargs)

    def finished(self, output: Any, beside: Sequence[torch.Tensor] = ()) -> CapturedRun:
        """The run, after the function has returned its output, and other tensors beside it."""
        run = self.run
        if not isinstance(output, torch.Tensor):
            raise UnsupportedOperatorError(
                f"{name_of(self.callers.function)}: its output is {a_type(output)}; wrap it in a module that returns "
                "one tensor"
            )
        run.output, *run.beside = self.values_of([output, *beside])
        run.active = self.kinds[0] not in (None, _NONE) and bool(self.flags[run.output] & ACTIVE)
        if self.masks.selected:
            sizes, error = self.masks.finish([run.output, *run.beside])
            self.key += sizes
            self.problem = self.problem or error
        if self.problem is not None:
            raise self.problem
        run.saved_by_hooks = self._saved_by_hooks
        if self.has_hooks:
            run.hooked_spans = self.callers.spans
        run.key = (*self.key, run.output, run.active, *run.hooked_spans)
        return run

    # Values.

    def bind(self, tensor: torch.Tensor, flags: int) -> int:
        """Take a tensor for a new value."""
        number = len(self.run.tensors)
        self.run.tensors.append(tensor)
        self.flags.append(flags)
        self.numbers[id(tensor)] = number
        if self.storages.written:
            self.storages.note(tensor)
        return number

    def alias(self, result: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Give a tensor without a gradient the value of another one, which has the same elements."""
        self.numbers[id(result)] = self.numbers[id(tensor)]
        self.storages.note_as(result, tensor)
        self._detached.add(id(result))
        self.alive.append(result)
        return result

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """A context, while a call is recorded, for others that come before it, whose results are constants to it.

        Python may not read what depends on the input there.
        """
        state = self._operands, self.kinds, self._flags, self._sequence
        outer = self.in_parts, self.readable, self._apart
        self.in_parts, self.readable, self._apart = True, False, True
        try:
            device, mode = self.run.tensors[0].device, DispatchMode(self.call)
            with recording_derivatives(), torch.no_grad(), without_autocast(device), mode:
                yield
        finally:
            self._operands, self.kinds, self._flags, self._sequence = state
            self.in_parts, self.readable, self._apart = outer

    def depends_on_input(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor depends on the input."""
        return bool(self._flags_of(tensor) & DEPENDENT)

    def may_vary(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may have other elements in another call."""
        return bool(self._flags_of(tensor) & OF_ELEMENTS)

    def _flags_of(self, tensor: torch.Tensor) -> int:
        number = self.numbers.get(id(tensor))
        if self.storages.written:
            number = current(self, tensor, number)
        return OF_CAPTURES if number is None else self.flags[number]

    def values_of(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """The values that tensors hold after all calls."""
        self._operands, self.kinds = [], []
        return list(map(self.read, tensors))

    def read(self, tensor: torch.Tensor) -> int:
        """The value that a tensor holds now, an operand of the call that is recorded."""
        number = self.numbers.get(id(tensor))
        if self.storages.written:
            number = current(self, tensor, number)
        elif number is None:
            number = self.from_elsewhere(tensor)
        kind: type | None = None
        if self.in_parts:
            passes = self.flags[number] & DIFFERENTIABLE and not self._apart and id(tensor) not in self._detached
            kind = Recorder if passes and holds_numbers(tensor) else None
        elif tensor.requires_grad:
            node = node_of(tensor)
            kind = type(node)
            if node is not None:
                if self.storages.written and tensor._base is not None:
                    self._nodes_of_views.add(node._sequence_nr())
                if kind.__base__ is BackwardCFunction:
                    if (value := value_of_function(self, tensor, node, number)) is not None:
                        # Which Function it is, its calls tell.
                        number, kind = value, BackwardCFunction
                elif kind is OF_ERRORS:
                    # Else it would be taken for a constant, as PyTorch's Hessians do.
                    what = "a backward pass that is marked with once_differentiable is differentiated"
                    self.refuse(what, "leave the mark out where it is made of operators with derivatives")
                # Another tensor with the same elements may be a view of this one.
                edges = self.run.gradient_edges
                if number not in edges and self.run.tensors[number] is tensor:
                    edges[number] = node, tensor.output_nr
        elif id(tensor) in self._resolved:
            kind = Recorder
        flags = self.flags[number]
        self._flags |= flags & OF_ELEMENTS if kind is None else flags & ~ACTIVE if kind is _NONE else flags
        self.kinds.append(kind)
        self._operands.append(number)
        return number

    def value_of(self, tensor: torch.Tensor) -> int:
        """The value of a tensor that a call has made, which is no operand here."""
        number, node = current(self, tensor, self.numbers.get(id(tensor))), node_of(tensor)
        value = value_of_function(self, tensor, node, number) if isinstance(node, BackwardCFunction) else None
        return number if value is None else value

    def from_elsewhere(self, tensor: torch.Tensor) -> int:
        """The value of a tensor that no call has made."""
        if self._own is None:
            function = self.callers.function
            self._own = set(map(id, tensors_of(function))) if isinstance(function, nn.Module) else set()
        values = () if id(tensor) in self._own or not memory_of(tensor) else self.storages.values_on(tensor)
        if any(value not in self.run.captures for value in values):
            # Another name of what a call has made, as ``.data`` gives.
            self.storages.look_at(tensor)
            return current(self, tensor, None)
        return self.captured(tensor)

    def captured(self, tensor: torch.Tensor) -> int:
        """A new value from elsewhere."""
        start = self.run.gradient_edges.get(0)
        if tensor.grad_fn is not None and start is not None and leads_to(tensor.grad_fn, {start[0]}):
            what, remedy = "what another thread computes of the input", "compute it in the thread that calls"
            if "DifferentiableGraph" in tensor.grad_fn.name():
                what, remedy = "what torch.jit has compiled", "call the function that it was compiled from"
            self.refuse(f"{what} is no call of this run", remedy)
        form = form_of(tensor), tensor.requires_grad
        self.key.append(form)
        number = self.bind(tensor, OF_CAPTURES | DIFFERENTIABLE * tensor.requires_grad)
        self.run.captures[number] = form
        self.irreplaceable.add(number)
        return number

    # Calls.

    def _record(self, facts: Facts, args: Any, kwargs: dict[str, Any], run: Callable[[], Any] | None = None) -> Any:
        """Run a call and record it."""
        overload: Any = facts.overload
        self._operands, self.kinds, self._flags = [], [], 0
        operands, kinds = self._operands, self.kinds
        keys: list[Hashable] = []
        numbers: list[int] = []
        of_numbers = facts.of_numbers
        for value in (*args, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if isinstance(value, torch.Tensor):
                self.read(value)
                value = _OPERAND
            elif kind is float or (kind is int and of_numbers):
                numbers.append(len(keys))
            elif kind not in _LITERALS:
                value = self._key_of(value)
            keys.append(value)
        seen, flags = self.in_parts or torch.is_grad_enabled(), self._flags
        depends = flags & DEPENDENT and not facts.of_shape
        if not depends:
            flags &= DIFFERENTIABLE | OF_CAPTURES
        selection = None
        if depends and facts.reads:
            if facts.dynamic and not self.in_parts:
                selection = self.masks.selection(overload, args, self._operands)
            if selection is None and not self.readable:
                self._check_reads(overload)
        scalars: tuple[tuple[str, Scalar], ...] = ()
        if numbers:
            if self.in_parts or (depends and facts.bakes):
                for place_ in numbers:
                    keys[place_] = exactly(keys[place_])
            else:
                scalars = free_numbers(facts, args, kwargs, keys, numbers, self.run.scalars)
        written = written_tensors(facts, args, kwargs) if facts.written else ()
        of_masks: Collection[int] = ()
        if written and self.masks.selected:
            of_masks = {id(tensor) for tensor in written if self.numbers.get(id(tensor)) in self.masks.selected}
        for tensor in written:
            begin_write(self, tensor, facts.name, seen)
        result = facts.kernel(*args, **kwargs) if run is None else run()  # type: ignore[misc]
        first, path = len(self.run.tensors), self.callers.path
        if type(result) is torch.Tensor and not written:
            results, count = [result], 1
            self.bind(result, flags)
        else:
            results = with_written(result, written)
            count = len(results)
            for tensor in results:
                number = self.bind(tensor, flags)
                if any(tensor is each for each in written):
                    end_write(self, tensor, number, seen=seen, sized=id(tensor) not in of_masks)
        if overload is _CLONE and seen and is_lazily_changed(args[0]):
            self._resolved.add(id(result))
        if facts.keeps:
            self.irreplaceable.update(range(first, first + count))
        sizes = tuple([tensor.shape for tensor in results]) if facts.dynamic and selection is None else count
        self.key += (id(overload), seen, *kwargs, *keys, *operands, *kinds, sizes, path)
        while self._sequence in self._nodes_of_views:
            self._sequence -= 1
        calls, lines = self.run.calls, self._lines
        before, line = lines[len(calls)] if len(calls) < len(lines) else _NO_LINE
        captured = tuple.__new__(CapturedCall, (
            overload, args, kwargs, operands, tuple(kinds), scalars, seen, first, count, bool(written), self._sequence,
            path, line if before is overload else place(),
        ))  # fmt: skip
        calls.append(captured)
        if selection is not None:
            self.masks.begin(captured, selection, None if self.readable else self.callers.read_error(overload))
        elif (self.masks.selected or facts.name in PUTS) and self.masks.follow(captured, facts) and not self.readable:
            self.problem = self.problem or self.callers.read_error(torch.ops.aten.nonzero.default)
        return result

    def _key_of(self, value: Any) -> Hashable:
        """What a key has of a part of an argument; tensors are operands."""
        kind = type(value)
        if kind in _LITERALS:
            return value  # type: ignore[no-any-return]
        if isinstance(value, torch.Tensor):
            self.read(value)
            return _OPERAND
        if kind is list or kind is tuple:
            return tuple([self._key_of(part) for part in value])
        return exactly(value) if kind in (bool, float, complex) else value  # type: ignore[no-any-return]

    def _check_reads(self, overload: Any) -> None:
        """Raise where a call shows elements that depend on the input, or its sizes do."""
        tensors = [self.run.tensors[value] for value in self._operands if self.flags[value] & DEPENDENT]
        if shows(overload, [tensor.dtype for tensor in tensors]):
            raise self.callers.read_error(overload)

    def refuse(self, what: str, remedy: str) -> None:
        """Set the error that the run ends with, unless one is set."""
        self.problem = self.problem or self.callers.unsupported(what, remedy)


_CLONE, _COPY, _DETACH, _ZEROS = aten.clone.default, aten.copy_.default, aten.detach.default, aten.zeros.default
_NO_LINE = None, ""
#: The class of a leaf's node.
_NONE = type(None)
#: What a key has in the place of a tensor.
_OPERAND = ...
#: Arguments that are what a key has of them.
_LITERALS = frozenset((int, str, _NONE))
