"""Loops: steps of a run that make the same calls, each from the state that the step before it has left.

A loop over steps, ``h = cell(x[:, t], h)``, passes by no value that alone carries everything: each step reads the input
again. It is cut at sets of values instead. The calls of a run are compared by what they do; where they repeat, they are
cut once in each period, where the fewest elements are live. What a step reads besides its state is a side input, and
what later calls read of it a side output, whose gradient enters the step as an addend. So the recurrence of gradients
is affine, ``g[t - 1] = Jᵀ[t] g[t] + b[t]``, where the state may be several tensors.

Of three steps of ``h = tanh(x[:, t] + h @ W)`` a graph has these values, of which the input is 0, the first state 1 and
the weight 2:

=====  ===========  =====  ===  ====
step   ``x[:, t]``  h @ W  sum  tanh
=====  ===========  =====  ===  ====
1      3            4      5    6
2      7            8      9    10
3      11           12     13   14
=====  ===========  =====  ===  ====

Values of a `Loop` have the numbers of the last step. So `inputs` are those of 11, 10 and 2, ``(3, 7, 11)``,
``(1, 6, 10)`` and ``(2, 2, 2)``: the second one is the state, ``Slot(before=10, after=14, ...)``, the third one the
weight, which is `shared`. `outputs` are ``{14: (None, None, 14)}`` where the last state alone is read. Pieces, as
``x[:, t]``, are no part of a step, so that `calls` are those of 12, 13 and 14.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..patterns import Layout
from ..tracing import BackwardPass, FunctionCall, Node, Operation, Scalar, Trace, Value, shows
from .stage import Stage

#: The fewest steps that are a loop: fewer are cheaper as one stage.
FEWEST = 8
#: The most periods that are tried.
_CANDIDATES = 16


class Slot(NamedTuple):
    """A part of a loop's state: its values before and after the last step, where samples are, elements of a sample."""

    before: int
    after: int
    layout: Layout
    size: int


@dataclass(frozen=True, eq=False)
class Loop:
    """The steps of a loop; values have the numbers that they have in the last step.

    Attributes
    ----------
    path : str
        The module that makes most of the calls.
    count : int
        The number of steps.
    calls : sequence of Node
        The last step's calls from which its state and side outputs are computed, in order.
    state : sequence of Slot
        What a step takes over from the step before it, and leaves.
    inputs : mapping of int to tuple of int
        By value, what each step reads in its place: the state and the shared values too.
    shared : collection of int
        The values that all steps read.
    outputs : mapping of int to tuple of (int or None)
        By value, what of each step later calls read; None where they do not.
    numbers : mapping of int to tuple of int
        By place, the places of the numbers that each step reads.
    differentiable : collection of int
        The inputs and shared values that have a gradient.
    """

    path: str
    count: int
    calls: Sequence[Node]
    state: Sequence[Slot]
    inputs: Mapping[int, tuple[int, ...]]
    shared: Collection[int]
    outputs: Mapping[int, tuple[int | None, ...]]
    numbers: Mapping[int, tuple[int, ...]]
    differentiable: Collection[int]

    @functools.cached_property
    def ends(self) -> list[int]:
        """The values at which autograd takes gradients from the loop, or to it: its outputs, and what it reads."""
        states = {slot.before for slot in self.state}
        read = [column[:1] if value in states else column for value, column in self.inputs.items()]
        passing = zip(self.inputs, read, strict=True)
        values = [column for value, column in passing if value in self.differentiable]
        return [each for column in (*values, *self.outputs.values()) for each in column if each is not None]

    @property
    def sizes(self) -> list[int]:
        """The elements of each part of the state, for a sample."""
        return [slot.size for slot in self.state]

    @property
    def size(self) -> int:
        """The elements of the state, for a sample."""
        return sum(self.sizes)

    def matrix_bytes(self, x: torch.Tensor) -> int:
        """The bytes that a step's matrices take for a batch, and once more where they are put in order."""
        return 2 * len(x) * self.size**2 * x.element_size()


class LoopRegion(NamedTuple):
    """The stages from `first` to `stop` of a chain, in which the gradient passes loops, in order."""

    first: int
    stop: int
    loops: list[Loop]


class UncutLoopError(Exception):
    """A loop is not cut into steps; its argument says why."""


def loop_regions(trace: Trace, stages: Sequence[Stage]) -> tuple[list[LoopRegion], list[str]]:
    """The parts of a chain that are loops, in order, and why other loops in it are none."""
    calls = [node for node in trace.graph.nodes if node.seen and any(node.differentiable)]
    at = {operation.node.place: number for number, stage in enumerate(stages) for operation in stage.operations}
    finder = _Finder(trace, calls, stages)
    regions: list[LoopRegion] = []
    waiting = [(0, len(calls))] if len(calls) > max(len(stages), FEWEST) else []
    while waiting:
        begin, stop = waiting.pop()
        repetition = finder.repetition(begin, stop)
        if repetition is None:
            continue
        waiting += [(begin, repetition.begin), (repetition.stop, stop)]
        numbers = [at[node.place] for node in calls[repetition.begin : repetition.stop] if node.place in at]
        # A loop whose steps are stages is a chain already.
        if not numbers or max(numbers) - min(numbers) + 1 >= (repetition.stop - repetition.begin) // repetition.period:
            continue
        loop = finder.loop(repetition)
        if loop is not None:
            regions.append(LoopRegion(min(numbers), max(numbers) + 1, [loop]))
    merged: list[LoopRegion] = []
    for region in sorted(regions, key=lambda each: each.loops[0].calls[0].place):
        if merged and region.first < merged[-1].stop:
            last = merged.pop()
            region = LoopRegion(last.first, max(last.stop, region.stop), last.loops + region.loops)
        merged.append(region)
    return merged, finder.refusals


class _Repetition(NamedTuple):
    """Calls from `begin` to `stop` that repeat themselves."""

    begin: int
    stop: int
    period: int


class _Finder:
    """Finds the loops among the calls of a run that have a derivative."""

    def __init__(self, trace: Trace, calls: Sequence[Node], stages: Sequence[Stage]) -> None:
        self._trace, self._calls = trace, calls
        self._operations = {each.value: each for stage in stages for each in stage.operations}
        self.refusals: list[str] = []
        reads = Counter(value for node in calls for _, value in node.tensors if value in trace.graph.captures)
        # Mostly weights: a step is not alike which has others.
        self._constants = {value for value, count in reads.items() if count >= FEWEST}
        names = [(node.name, *(value for _, value in node.tensors if value in self._constants)) for node in calls]
        #: What each call does; and with which shapes and arguments.
        self._names = _numbered(names)
        self._keys = _numbered([*zip(names, map(self._form, calls), strict=True)])

    def _form(self, node: Node) -> Hashable:
        """How a call does it, but for the places of pieces, and for numbers that scale or are added."""
        moves, overload = node.facts.viewed is not None and not node.writes, node.overload
        literals = tuple(
            (name, None if type(value) in (Value, Scalar) or (moves and type(value) is int) else repr(value))
            for name, value in node.arguments.items()
        )
        forms = tuple((tensor.shape, tensor.dtype) for tensor in map(self._trace.tensor, node.results))
        places = getattr(overload, "places", None)
        return literals, forms, node.differentiable, None if places is None else places.tobytes()

    def repetition(self, begin: int, stop: int) -> _Repetition | None:
        """The longest repetition among some calls, of at least `FEWEST` periods; None where there is none."""
        repetition = _longest_repetition(self._keys[begin:stop])
        if repetition is None:
            self._explain(begin, stop)
            return None
        return _Repetition(repetition.begin + begin, repetition.stop + begin, repetition.period)

    def _explain(self, begin: int, stop: int) -> None:
        """Note why calls that repeat themselves but for their shapes are no loop."""
        repetition = _longest_repetition(self._names[begin:stop])
        if repetition is None:
            return
        first = begin + repetition.begin
        calls = self._calls[first : begin + repetition.stop]
        # Layers that are alike have weights of their own.
        if not any(value in self._constants for node in calls for _, value in node.tensors):
            return
        keys = self._keys[first : begin + repetition.stop]
        place = first + int(np.flatnonzero(keys[repetition.period :] != keys[: -repetition.period])[-1])
        one, other = self._calls[place], self._calls[place + repetition.period]
        shapes = [tuple(self._trace.tensor(node.results[0]).shape) for node in (one, other)]
        self.refusals.append(
            f"{one.path}: a loop whose steps are not alike: {one.name} gives {shapes[0]} in one step and {shapes[1]} "
            f"in the next{one.source}; a state has to keep its size, and no step may read all earlier ones"
            if shapes[0] != shapes[1]
            else f"{one.path}: a loop whose steps are not alike: {one.name} has other arguments from step to "
            f"step{one.source}"
        )

    def loop(self, repetition: _Repetition) -> Loop | None:
        """The loop that repeated calls are; None where it has no state, or cannot be cut."""
        first = self._cut(repetition)
        while True:
            count = (repetition.stop - first) // repetition.period
            stop = first + count * repetition.period
            steps = [self._calls[at : at + repetition.period] for at in range(first, stop, repetition.period)]
            try:
                loop = _Steps(self._trace, steps, self._outside(first, stop)).loop(self._operations)
            except UncutLoopError as error:
                node = steps[-1][0]
                self.refusals.append(f"{node.path}: a loop of {count} steps{node.source}: {error}")
                return None
            others = 0 if loop is None else self._steps_with_other_shapes(loop)
            if not others:
                return loop
            # Autograd goes back through those steps; the loop starts after them.
            first += others * repetition.period

    def _steps_with_other_shapes(self, loop: Loop) -> int:
        """The first steps up to the last one that reads a tensor of another shape than the last step's.

        A first state without a batch axis is one, where the others are of samples.
        """
        shapes = [[self._trace.tensor(each).shape for each in column] for column in loop.inputs.values()]
        return max((step + 1 for each in shapes for step, shape in enumerate(each) if shape != each[-1]), default=0)

    def _outside(self, first: int, stop: int) -> set[int]:
        """The values whose gradients calls before and after some compute."""
        others = (*self._calls[:first], *self._calls[stop:])
        return {value for node in others for value in _operands(node)} | {self._trace.graph.output}

    def _cut(self, repetition: _Repetition) -> int:
        """The first call after which the fewest elements are live that the steps compute."""
        places = range(repetition.begin, repetition.stop)
        first = {value: at for at in places for value in self._calls[at].results}
        last = {value: at for at in places for value in _operands(self._calls[at]) if value in first}
        live = np.zeros(repetition.stop - repetition.begin + 1, dtype=np.int64)
        for value, at in last.items():
            size = self._trace.tensor(value).numel()
            live[first[value] + 1 - repetition.begin] += size
            live[at + 1 - repetition.begin] -= size
        live = np.cumsum(live)
        middle = len(live) // repetition.period // 2 * repetition.period
        return repetition.begin + int(np.argmin(live[middle : middle + repetition.period]))


def _operands(node: Node) -> list[int]:
    """The tensors by which a call has a derivative."""
    return [value for (_, value), passes in zip(node.tensors, node.differentiable, strict=True) if passes]


def _numbered(keys: Sequence[Hashable]) -> np.ndarray:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _longest_repetition(keys: np.ndarray) -> _Repetition | None:
    """The longest run of keys that repeat themselves at least `FEWEST` times, by their shortest period."""
    last: dict[int, int] = {}
    gaps = Counter[int]()
    for place, key in enumerate(keys.tolist()):
        gaps[place - last.get(key, place)] += 1
        last[key] = place
    del gaps[0]
    best: _Repetition | None = None
    for period in sorted(period for period, _ in gaps.most_common(_CANDIDATES)):
        same = np.concatenate([[False], keys[period:] == keys[:-period], [False]])
        ends = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2)
        if not len(ends):
            continue
        begin, stop = ends[np.argmax(ends[:, 1] - ends[:, 0])]
        length = stop - begin + period
        # Steps of a longer loop may be loops themselves.
        if length >= FEWEST * period and (best is None or length > 1.5 * (best.stop - best.begin)):
            best = _Repetition(int(begin), int(stop) + period, period)
    return best


class _Steps:
    """Steps of the same calls, as a loop is made of them."""

    def __init__(self, trace: Trace, steps: Sequence[Sequence[Node]], outside: set[int]) -> None:
        self._trace, self._steps, self._outside = trace, steps, outside
        self._last, self._count = steps[-1], len(steps)
        #: By value, which call of which step has which result.
        self._makers = {
            value: (step, place, number)
            for step, calls in enumerate(steps)
            for place, node in enumerate(calls)
            for number, value in enumerate(node.results)
        }
        # Pieces of side inputs, which have another place in each step, are read where they are.
        self._pieces = {place for place in range(len(self._last)) if self._varies(place)}
        #: By call and result, the values before each step, by how many steps ago they were computed.
        self._states: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}
        # What the loop has under these names.
        self._inputs, self._outputs = dict[int, tuple[int, ...]](), dict[int, tuple[int | None, ...]]()
        self._numbers, self._shared, self._differentiable = dict[int, tuple[int, ...]](), set[int](), set[int]()

    def _varies(self, place: int) -> bool:
        """Whether a call has other literal arguments from step to step."""
        arguments = [[each for each in calls[place].arguments.values() if type(each) is int] for calls in self._steps]
        return any(each != arguments[0] for each in arguments)

    def _column(self, place: int, number: int) -> tuple[int, ...]:
        """The value that each step computes by a call."""
        return tuple([calls[place].results[number] for calls in self._steps])

    def loop(self, operations: dict[int, Operation]) -> Loop | None:
        """The loop that the steps are; None where nothing is taken over.

        UncutLoopError is raised where they are none that can be run again all at once.
        """
        calls = [self._last[place] for place in sorted(self._needed())]
        if not self._states:
            return None
        self._check_pieces()
        for node in calls:
            self._check(node, operations)
        state = [slot for result, of_age in self._states.items() for slot in self._slots(*result, of_age, operations)]
        ((path, _),) = Counter(node.path for node in calls).most_common(1)
        sides = self._inputs, self._shared, self._outputs, self._numbers, self._differentiable
        return Loop(path, self._count, calls, state, *sides)

    def _needed(self) -> set[int]:
        """The calls from which side outputs, and the state for them, are computed; notes what they read."""
        waiting = []
        for place, node in enumerate(self._last):
            for number, value in enumerate(node.results):
                column = self._column(place, number)
                if place not in self._pieces and not self._outside.isdisjoint(column):
                    self._outputs[value] = tuple(each if each in self._outside else None for each in column)
                    waiting.append(place)
        needed: set[int] = set()
        while waiting:
            place = waiting.pop()
            if place in needed:
                continue
            needed.add(place)
            arguments = [list(calls[place].tensors) for calls in self._steps]
            for at, passes in enumerate(self._last[place].differentiable):
                behind = self._read(tuple([each[at][1] for each in arguments]), place, passes=passes)
                waiting += [] if behind is None else [behind]
            for name, argument in self._last[place].arguments.items():
                if type(argument) is Scalar:
                    self._numbers[argument.place] = tuple(calls[place].arguments[name].place for calls in self._steps)
        return needed

    def _read(self, column: tuple[int, ...], place: int, *, passes: bool) -> int | None:
        """Note what the steps read as an argument of a call; return the call that computes it in a step, if any."""
        value = column[-1]
        maker = self._makers.get(value)
        if maker is not None and maker[1] in self._pieces:
            maker = None
        if maker is not None and maker[0] == self._count - 1:
            if any(self._makers.get(each) != (step, *maker[1:]) for step, each in enumerate(column)):
                raise UncutLoopError("its steps combine their values in different ways")
            return maker[1]
        if self._inputs.setdefault(value, column) != column:
            raise UncutLoopError("a tensor that is one in the last step is several in others")
        if passes:
            self._differentiable.add(value)
        if len(set(column)) == 1:
            self._shared.add(value)
            return None
        if maker is None or not passes:
            if passes and any(each in self._makers and self._makers[each][1] not in self._pieces for each in column):
                raise UncutLoopError("its steps take over different states")
            return None
        age = self._count - 1 - maker[0]
        for step, each in enumerate(column):
            expected = (step - age, *maker[1:]) if step >= age else None
            if self._makers.get(each) != expected:
                raise UncutLoopError("its steps take over different states")
        self._states.setdefault(maker[1:], {})[age] = column
        return maker[1]

    def _check_pieces(self) -> None:
        """Raise where a piece in another place in each step is one of the state."""
        depends: set[int] = set()
        for node in self._last:
            makers = [self._makers.get(value) for value in _operands(node)]
            if any(
                value in depends or (at is not None and at[0] < self._count - 1 and at[1] not in self._pieces)
                for value, at in zip(_operands(node), makers, strict=True)
            ):
                depends.update(node.results)
        for place in self._pieces:
            node = self._last[place]
            if not depends.isdisjoint(node.results):
                raise UncutLoopError(f"{node.name} has another place of the state in each step{node.source}")

    def _check(self, node: Node, operations: dict[int, Operation]) -> None:
        """Raise where a call cannot be run again for all steps at once."""
        if isinstance(node.overload, (FunctionCall, BackwardPass)):
            raise UncutLoopError(f"{node.overload.function.__name__} has a backward pass of its own{node.source}")
        if node.by_parts:
            raise UncutLoopError(f"{node.name} has a derivative of other operators{node.source}")
        if node.facts.random and node.draws:
            raise UncutLoopError(f"{node.name} draws random numbers{node.source}")
        dtypes = [self._trace.tensor(value).dtype for _, value in node.tensors]
        if node.facts.reads and shows(node.overload, dtypes):
            raise UncutLoopError(f"{node.name} gives as many elements as a mask says{node.source}")
        for value in node.results:
            if value in operations and operations[value].couples:
                raise UncutLoopError(f"{node.name} couples the samples of a batch{node.source}")

    def _slots(
        self, place: int, number: int, of_age: dict[int, tuple[int, ...]], operations: dict[int, Operation]
    ) -> list[Slot]:
        """What steps take over of a result; of several steps ago, through the states between."""
        column, oldest = self._column(place, number), max(of_age)
        operation = operations.get(column[-1])
        layout = None if operation is None else operation.layout
        if layout is None:
            raise UncutLoopError("its state does not depend on the input")
        first, size = of_age[oldest][:oldest], self._trace.tensor(column[-1]).numel() // len(self._trace.input)
        after, slots = column[-1], list[Slot]()
        for age in range(1, oldest + 1):
            # Before a step, this was computed so many steps ago; first of all, before the loop.
            values = tuple([column[at - age] if at >= age else first[at + oldest - age] for at in range(self._count)])
            if of_age.get(age, values) != values:
                raise UncutLoopError("its first states are not those of steps before")
            self._inputs[values[-1]] = values
            self._differentiable.add(values[-1])
            slots.append(Slot(values[-1], after, layout, size))
            after = values[-1]
        return slots
