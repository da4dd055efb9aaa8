"""Schedules: which products back-propagation computes, and in which order.

The gradients of a loss with respect to every stage's output are an exclusive scan (thesis, section 3.1) of

    a = [∇x_n, J_nᵀ, J_{n-1}ᵀ, ..., J_1ᵀ]        with  A ⋄ B = B A,

where ``J_i = ∂x_i/∂x_{i-1}``. A schedule is one way to evaluate that scan: a list of steps in static single assignment,
grouped in levels of independent steps. The scan runs the same steps that the FLOP report counts.

Values are numbered: 0 to n are the elements of `a`, and larger numbers are results of steps. A step's ``left`` and
``right`` are in the order of the matrix product, ``out = left · right``: `left` is closer to the network's input.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import index
from typing import Literal, NamedTuple, Protocol

from .schedule_figure import schedule_figure

__all__ = [
    "Assignment",
    "Complexity",
    "Message",
    "Schedule",
    "Step",
    "balanced",
    "blelloch",
    "chunked",
    "cyclic_reduction",
    "exchanges",
    "linear",
    "parse",
    "resolve",
]

#: The schedule of the papers' analysis, which is counted by default. What executes schedules takes ``auto`` instead:
#: plain back-propagation, the baseline of each count.
COUNTED = "blelloch:2"
#: The number of the identity, which is never stored.
IDENTITY = -1


class Cuttable(Protocol):
    """A sequence of matrices that can be cut into blocks, such as a `jacsparse.Chain`."""

    def __len__(self) -> int: ...

    @property
    def coupling(self) -> Sequence[int]:
        """The stages, from 0, that couple samples: they have products with vectors, and no matrix."""

    def boundaries(self, workers: int, first: int = 0, stop: int | None = None) -> list[int]:
        """The places of the array of the stages from `first` to `stop` at which blocks begin, for `workers` workers."""


Kind = Literal["mm", "mv", "move"]
Phase = Literal["up", "middle", "down"]


@dataclass(frozen=True)
class Step:
    """One product, or one move of a value.

    Attributes
    ----------
    out : int
        The value that the step computes.
    left, right : int
        The factors; for a ``move``, `right` is the value that moves and `left` is the identity, -1.
    kind : {"mm", "mv", "move"}
        Matrix times matrix, matrix times vector, or no product at all.
    level : int
        Steps of one level do not depend on each other, except in the linear middle, which is one level.
    phase : {"up", "middle", "down"}
        The phase of the scan.
    live : bool
        Whether any gradient depends on the result.
    """

    out: int
    left: int
    right: int
    kind: Kind
    level: int
    phase: Phase
    live: bool = True

    def __str__(self) -> str:
        value = f"{self.right}" if self.kind == "move" else f"{self.left}·{self.right}"
        return f"{self.out} = {value}" if self.live else f"({self.out} = {value})"


@dataclass(frozen=True)
class Complexity:
    """The cost of a schedule in steps of unit time (thesis, section 3.6).

    Attributes
    ----------
    workers : int
        The number of workers, each of which runs one step at a time.
    steps : int
        Step complexity: units of time until the last step is done.
    work : int
        Work complexity: the number of steps.
    space : int
        The most matrices that one worker holds at once, or their entries if sizes were passed.
    """

    workers: int
    steps: int
    work: int
    space: int


@dataclass(frozen=True)
class Assignment:
    """Where the matrices of a chain lie, and which worker runs which step.

    Attributes
    ----------
    homes : tuple of int
        The worker at which the matrix of each place 1 to n of the scan's array lies at first.
    steps : tuple of (Step, int)
        The live steps and their workers, in the order in which the steps start.
    """

    homes: tuple[int, ...]
    steps: tuple[tuple[Step, int], ...]


@dataclass(frozen=True)
class Schedule:
    """Steps that turn ``[∇x_n, J_nᵀ, ..., J_1ᵀ]`` into ``[∇x_n, ..., ∇x_1]``, for a chain of `n` stages.

    Attributes
    ----------
    name : str
        The schedule's name, such as ``blelloch:2``.
    n : int
        The number of stages.
    steps : tuple of Step
        The steps; each comes after the steps that compute its factors.
    gradients : tuple of int
        The values that hold ``∇x_n, ..., ∇x_1``.

    Examples
    --------
    >>> schedule = blelloch(3)
    >>> [(step.out, step.left, step.right, step.kind) for step in schedule.steps if step.live and step.kind != "move"]
    [(4, 1, 0, 'mv'), (6, 2, 4, 'mv')]
    >>> schedule.gradients
    (0, 4, 6)
    >>> print(schedule)                                 # dead steps in parentheses
    blelloch over 3 stages, 3 products, gradients in (0, 4, 6)
      level 0, up: 4 = 1·0, (5 = 3·2)
      level 2, down: 0 = 0, 6 = 2·4
    """

    name: str
    n: int
    steps: tuple[Step, ...]
    gradients: tuple[int, ...]

    def __str__(self) -> str:
        lines = [f"{self.name} over {self.n} stages, {len(self.products)} products, gradients in {self.gradients}"]
        for (level, phase), steps in itertools.groupby(self.steps, lambda step: (step.level, step.phase)):
            lines.append(f"  level {level}, {phase}: {', '.join(map(str, steps))}")
        return "\n".join(lines)

    @property
    def products(self) -> tuple[Step, ...]:
        """The steps that multiply, including dead ones."""
        return tuple(step for step in self.steps if step.kind != "move")

    @functools.cached_property
    def batches(self) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]:
        """The live products in batches that do not depend on each other: their kind, values, left and right factors."""
        batches = []
        for (_, phase, kind), steps in itertools.groupby(self.live_steps(), lambda s: (s.level, s.phase, s.kind)):
            members = list(steps)
            size = 1 if phase == "middle" else len(members)
            for begin in range(0, len(members), size):
                part = members[begin : begin + size]
                batches.append((kind, *zip(*((step.out, step.left, step.right) for step in part), strict=True)))
        return tuple(batches)

    @functools.cached_property
    def spans(self) -> dict[int, tuple[int, int]]:
        """The first and the last place of the array whose product each value is, by the value's number."""
        spans = {place: (place, place) for place in range(self.n + 1)}
        for step in self.products:
            spans[step.out] = (spans[step.right][0], spans[step.left][1])
        return spans

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the products level by level, each over the places of the array that it takes in.

        A product of matrices is a bar, with a line where its factors meet. That of a matrix and a vector is a bar over
        the matrix, and a line from the gradient of the output through all that the vector has taken in before.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        schedule_figure(self, path)

    def live_steps(self, wanted: Iterable[int] | None = None) -> tuple[Step, ...]:
        """The products on which a value of `wanted` depends; by default, on which any gradient depends."""
        needed = set(self.gradients if wanted is None else wanted)
        live = []
        for step in reversed(self.products):
            if step.out in needed:
                live.append(step)
                needed.update((step.left, step.right))
        return tuple(reversed(live))

    def complexity(self, workers: int, sizes: Mapping[int, int] | None = None) -> Complexity:
        """Run the live steps on `workers` workers, each step taking one unit of time.

        Free workers start the steps whose factors are computed, in the schedule's order. At first the workers hold
        equal shares of the chain's matrices, in the chain's order. A step runs on the worker that holds the larger of
        its matrices or, if that one is busy, on the worker that holds the other; if both are busy, on the free worker
        that holds least. That worker stores the product from the step's start to the product's last use.

        Parameters
        ----------
        workers : int
            The number of workers.
        sizes : mapping of int to int, optional
            The entries of each matrix that a live step reads or computes, by value; by default, 1 each.

        Raises
        ------
        ValueError
            If there is no worker, or a matrix has no size.

        Examples
        --------
        >>> blelloch(1023).complexity(2048).steps, linear(1023).complexity(2048).steps
        (18, 1022)
        >>> [blelloch(1023).complexity(workers).space for workers in (1, 32, 1024)]
        [1022, 48, 2]
        """
        steps = self.live_steps()
        time, memory, _ = self._simulate(steps, [1] * len(steps), workers, sizes)
        return Complexity(workers, int(time), len(steps), memory.most)

    def makespan(self, durations: Sequence[float], workers: int) -> float:
        """The time at which the last live step is done, for steps of any durations on workers as in `complexity`.

        Parameters
        ----------
        durations : sequence of float
            The duration of each of `live_steps`, in any unit.
        workers : int
            The number of workers.

        Raises
        ------
        ValueError
            If there is no worker, the number of durations is not that of live steps, or one is negative or NaN.

        Examples
        --------
        >>> linear(4).makespan([5.0, 1.0, 1.0], 2)
        7.0
        """
        return self._simulate(self._timed_steps(durations), durations, workers)[0]

    def assignment(
        self, durations: Sequence[float], workers: int, sizes: Mapping[int, int] | None = None
    ) -> Assignment:
        """Where the steps run, for steps of any durations on workers as in `complexity`.

        Parameters
        ----------
        durations : sequence of float
            The duration of each of `live_steps`, in any unit.
        workers : int
            The number of workers.
        sizes : mapping of int to int, optional
            The entries of each matrix, as in `complexity`.

        Raises
        ------
        ValueError
            As `makespan` and `complexity`.

        Examples
        --------
        >>> assignment = blelloch(4).assignment([1.0] * 4, 2)
        >>> assignment.homes, [(step.left, step.right, worker) for step, worker in assignment.steps]
        ((0, 1, 1, 1), [(1, 0, 0), (3, 2, 1), (6, 5, 1), (2, 5, 0)])
        """
        steps = self._timed_steps(durations)
        _, memory, starts = self._simulate(steps, durations, workers, sizes)
        homes = [memory.homes.get(place, 0) for place in range(1, self.n)]
        # No step reads the last matrix, which leads to the input: it lies beside its neighbour.
        homes += (homes[-1:] or [0])[: self.n]
        return Assignment(tuple(homes), tuple((steps[number], worker) for number, worker in starts))

    def _timed_steps(self, durations: Sequence[float]) -> tuple[Step, ...]:
        """The live steps; ValueError where `durations` are not theirs."""
        steps = self.live_steps()
        if len(durations) != len(steps):
            raise ValueError(f"durations has {len(durations)} elements; the schedule has {len(steps)} live steps")
        wrong = next((duration for duration in durations if not duration >= 0), None)
        if wrong is not None:
            raise ValueError(f"durations has {wrong}; expected numbers that are not negative")
        return steps

    def _simulate(
        self, steps: Sequence[Step], durations: Sequence[float], workers: int, sizes: Mapping[int, int] | None = None
    ) -> tuple[float, _WorkerMemory, list[tuple[int, int]]]:
        """The time at which the last step is done, the workers' memory, and each step that starts and its worker."""
        # Further workers would have nothing to do.
        free = set(range(min(_natural("workers", workers, 1), max(self.n, len(steps), 1))))
        memory = _WorkerMemory(steps, self.n, len(free), sizes)
        results = {step.out for step in steps}
        users: dict[int, list[int]] = defaultdict(list)
        missing = []
        for number, step in enumerate(steps):
            factors = [factor for factor in (step.left, step.right) if factor in results]
            missing.append(len(factors))
            for factor in factors:
                users[factor].append(number)
        ready = [number for number, count in enumerate(missing) if count == 0]
        running: list[tuple[float, int, int]] = []
        starts: list[tuple[int, int]] = []
        time = 0.0
        while ready or running:
            while ready and free:
                number = heapq.heappop(ready)
                worker = memory.start(steps[number], free)
                free.remove(worker)
                starts.append((number, worker))
                heapq.heappush(running, (time + durations[number], number, worker))
            time = running[0][0]
            while running and running[0][0] == time:
                _, number, worker = heapq.heappop(running)
                memory.finish(steps[number])
                free.add(worker)
                for user in users[steps[number].out]:
                    missing[user] -= 1
                    if missing[user] == 0:
                        heapq.heappush(ready, user)
        return time, memory, starts


class _WorkerMemory:
    """Which worker holds which matrix while a schedule runs; `most` is the most that one of them has held at once."""

    def __init__(self, steps: Sequence[Step], n: int, workers: int, sizes: Mapping[int, int] | None) -> None:
        self.most = 0
        self._sizes = sizes and {value: _natural(f"sizes[{value}]", size, 0) for value, size in sizes.items()}
        self._uses = Counter(factor for step in steps for factor in (step.left, step.right))
        self._worker_of: dict[int, int] = {}
        self._totals = [0] * workers
        chain = [value for value in range(1, n + 1) if value in self._uses]
        total, before = sum(map(self._size, chain)), 0
        for value in chain:
            size = self._size(value)
            # A matrix lies in the worker's share that contains the matrix' middle.
            self._store(value, min((2 * before + size) * workers // max(2 * total, 1), workers - 1))
            before += size
        #: Where the chain's matrices lie at first.
        self.homes = dict(self._worker_of)

    def start(self, step: Step, free: Collection[int]) -> int:
        """Choose a free worker for a step, and store the step's product there."""
        factors = [factor for factor in (step.left, step.right) if self._worker_of.get(factor, -1) in free]
        if factors:
            worker = self._worker_of[max(factors, key=self._size)]
        else:
            worker = min(free, key=lambda worker: (self._totals[worker], worker))
        if step.kind == "mm":
            self._store(step.out, worker)
        return worker

    def finish(self, step: Step) -> None:
        """Remove the step's factors that no later step uses."""
        for factor in (step.left, step.right):
            self._uses[factor] -= 1
            if self._uses[factor] == 0 and factor in self._worker_of:
                self._totals[self._worker_of.pop(factor)] -= self._size(factor)

    def _store(self, value: int, worker: int) -> None:
        self._worker_of[value] = worker
        self._totals[worker] += self._size(value)
        self.most = max(self.most, self._totals[worker])

    def _size(self, value: int) -> int:
        if self._sizes is None:
            return 1
        if value not in self._sizes:
            raise ValueError(
                f"sizes has no entry for matrix {value}; expected one for each that a live step reads or makes"
            )
        return self._sizes[value]


def _natural(name: str, value: int, least: int) -> int:
    """`value` as an int; ValueError if it is no integer of at least `least`."""
    try:
        number = index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; expected an integer of at least {least}")
    return number


class _Builder:
    """Records the steps of an algorithm; ``a[i]`` is the number of the value at place ``i`` of the scan's array."""

    def __init__(self, n: int) -> None:
        self.n = n = _natural("n", n, 0)
        self.a = list(range(n + 1))
        self.vectors = {0}
        self.steps: list[Step] = []
        self.next_value = n + 1

    def multiply(self, left: int, right: int, level: int, phase: Phase) -> int:
        """Record the product ``left · right``, and return its number."""
        if IDENTITY in (left, right):
            moved = right if left == IDENTITY else left
            self.steps.append(Step(moved, IDENTITY, moved, "move", level, phase))
            return moved
        out, self.next_value = self.next_value, self.next_value + 1
        kind: Kind = "mm"
        if right in self.vectors:
            self.vectors.add(out)
            kind = "mv"
        self.steps.append(Step(out, left, right, kind, level, phase))
        return out

    def finish(self, name: str) -> Schedule:
        """The schedule with its dead steps marked, once `a` is ``[I, ∇x_n, ..., ∇x_1]``."""
        schedule = Schedule(name, self.n, tuple(self.steps), tuple(self.a[1:]))
        live = {step.out for step in schedule.live_steps()}
        steps = tuple(step if step.kind == "move" else replace(step, live=step.out in live) for step in self.steps)
        return replace(schedule, steps=steps)


def linear(n: int) -> Schedule:
    """Back-propagation itself: ``∇x_{i-1} = J_iᵀ ∇x_i``, one matrix-vector product after the other (equation 2.3).

    Examples
    --------
    >>> len(linear(21).products)
    20
    """
    builder = _Builder(n)
    gradients = [builder.a[0]]
    for i in range(1, n):
        gradients.append(builder.multiply(builder.a[i], gradients[-1], 0, "middle"))
    builder.a = [IDENTITY, *gradients][: n + 1]
    return builder.finish("linear")


def blelloch(n: int, levels: int | None = None) -> Schedule:
    """The modified Blelloch scan: Algorithm 1 of the thesis, section 3.2.

    The schedule's name tells how many levels it has: ``blelloch(21, 99)`` is ``blelloch:4``.

    Parameters
    ----------
    n : int
        The number of stages.
    levels : int, optional
        The most levels of the up-sweep; by default, all. Between the sweeps, a linear scan goes over the results of
        the up-sweep (section 5.3).

    Notes
    -----
    Algorithm 1 as printed also reduces into ``a[n]``, which ``a[n] ← I`` then overwrites: the schedule has those steps,
    marked as dead. In the down-sweep ``a[r] ← a[l] ⋄ a[r]`` reads ``a[r]`` as it was before ``a[l] ← a[r]``.

    Examples
    --------
    >>> schedule = blelloch(21, levels=2)
    >>> len(schedule.products), len(schedule.live_steps())
    (34, 33)
    """
    if levels is not None:
        levels = _natural("levels", levels, 0)
    builder = _Builder(n)
    a = builder.a
    all_levels = max(0, math.ceil(math.log2(n + 1)) - 1)
    depth = all_levels if levels is None else min(levels, all_levels)

    def places(d: int) -> list[tuple[int, int]]:
        """The places l and r of Algorithm 1 at level d."""
        return [(i + 2**d - 1, min(i + 2 ** (d + 1) - 1, n)) for i in range(0, n - 2**d + 1, 2 ** (d + 1))]

    for d in range(depth):
        for l, r in places(d):  # noqa: E741  (the names of Algorithm 1)
            a[r] = builder.multiply(a[r], a[l], d, "up")
    # The linear middle: an exclusive scan over the last places of the blocks that the up-sweep has reduced.
    before = IDENTITY
    for end in range(2**depth - 1, n, 2**depth):
        block, a[end] = a[end], before
        before = block if before == IDENTITY else builder.multiply(block, before, depth, "middle")
    a[n] = before
    for d in range(depth - 1, -1, -1):
        for l, r in places(d):  # noqa: E741
            a[l], a[r] = a[r], builder.multiply(a[l], a[r], 2 * depth - d, "down")
    return builder.finish("blelloch" if levels is None else f"blelloch:{depth}")


def balanced(chain: Cuttable, workers: int) -> Schedule:
    """A schedule of short predicted time for `workers` workers, over blocks of the chain of unequal length.

    Each worker except the first reduces a block of stages to one matrix; the gradient goes through these matrices one
    after the other; then each worker takes the gradient through the stages of its block. The schedule is linear for one
    worker, and if no split into blocks is faster. The search goes stage by stage, and extends only the split by which
    the gradient reaches the stage first; so the result may not be the best of all splits.

    Parameters
    ----------
    chain : Chain
        The chain, whose patterns give the cost of each product, in multiply-adds.
    workers : int
        The number of workers.

    Raises
    ------
    TypeError
        If `chain` is no chain.
    ValueError
        If there is no worker.
    """
    workers = _natural("workers", workers, 1)
    if not hasattr(chain, "boundaries"):
        raise TypeError(f"chain is a {type(chain).__name__}; make one with jacsparse.chain(module, input_shape)")

    def part(first: int, stop: int) -> Schedule:
        # One worker needs no pattern.
        begins = [0] if workers == 1 else chain.boundaries(workers, first, stop)
        return blocked(stop - first, begins, f"balanced:{workers}")

    return between(len(chain), chain.coupling, part)


def chunked(n: int, length: int) -> Schedule:
    """The schedule of `balanced` with blocks of `length` matrices, for recurrences, whose steps all cost the same.

    Raises
    ------
    ValueError
        If a block would be empty.

    Examples
    --------
    >>> chunked(1025, 128).complexity(8).steps
    262
    """
    length = _natural("length", length, 1)
    return blocked(n, [0, *range(length + 1, n, length)], f"chunked:{length}")


def cyclic_reduction(n: int) -> Schedule:
    """Parallel cyclic reduction (Naumov, equations 30 and 31): every gradient in ⌈log2 n⌉ levels, at Θ(n log n) work.

    At each level every place takes in what lies a stride before it, and the stride doubles: the scan of Hillis and
    Steele. It has half of the levels of `blelloch`, and more work than the Θ(n) of that (equation 3.4 of the thesis),
    as `exchanges` has across ranks.

    Examples
    --------
    >>> schedule = cyclic_reduction(1024)
    >>> schedule.complexity(1024).steps, schedule.complexity(1024).work
    (10, 9217)
    """
    builder = _Builder(n)
    a, stride, level = builder.a, 1, 0
    while stride < n:
        # From the end, so that each product reads what the level before has computed.
        for place in range(n - 1, stride - 1, -1):
            a[place] = builder.multiply(a[place], a[place - stride], level, "up")
        stride, level = 2 * stride, level + 1
    builder.a = [IDENTITY, *a[:n]]
    return builder.finish("cyclic_reduction")


def blocked(n: int, boundaries: Sequence[int], name: str) -> Schedule:
    """The schedule of `balanced` with blocks that begin at the places `boundaries` of `a`; the first of them is 0."""
    if len(boundaries) < 2:
        return replace(linear(n), name=name)
    builder = _Builder(n)
    blocks = list(pairwise([*boundaries, n]))
    longest = max(stop - begin for begin, stop in blocks)
    # result[j + 1] = a[j] · result[j]
    result = [IDENTITY, builder.a[0]] + [IDENTITY] * (n - 1)
    reduced = {}
    for begin, stop in blocks[:-1]:
        product = builder.a[begin]
        for place in range(begin + 1, stop):
            product = builder.multiply(builder.a[place], product, place - begin - 1, "up")
            if begin == 0:
                result[place + 1] = product
        reduced[begin] = product
    for begin, stop in blocks[1:-1]:
        result[stop] = builder.multiply(reduced[begin], result[begin], longest, "middle")
    for begin, stop in blocks[1:]:
        # The middle has computed result[stop], except for the last block.
        for place in range(begin, stop if stop == n else stop - 1):
            result[place + 1] = builder.multiply(builder.a[place], result[place], longest + 1 + place - begin, "down")
    builder.a = result
    return builder.finish(name)


def between(n: int, coupling: Sequence[int], part: Callable[[int, int], Schedule]) -> Schedule:
    """A schedule for a chain in which some stages have no matrix: others between them, one after the other.

    Parameters
    ----------
    n : int
        The number of stages.
    coupling : sequence of int
        Those without a matrix, from 0, in order. They take the gradient from the stages behind them to those before.
    part : callable
        ``part(first, stop)``: the schedule for the stages from `first` on and before `stop`.

    Examples
    --------
    >>> schedule = between(7, [3], lambda first, stop: blelloch(stop - first))
    >>> [(step.left, step.right) for step in schedule.live_steps() if step.kind == "mm"]
    []
    >>> len(schedule.gradients)
    7
    """
    if not coupling:
        return part(0, n)
    steps, gradients = list[Step](), list[int]()
    level, gradient, free, stop = 0, 0, n + 1, n
    named = linear(0)

    def through(stage: int) -> int:
        """The gradient of a stage's input."""
        nonlocal level, free
        steps.append(Step(free, n - stage, gradients[-1], "mv", level, "middle"))
        level, free = level + 1, free + 1
        return free - 1

    for stage in (*reversed(coupling), -1):
        first = stage + 1
        if first < stop:
            schedule = part(first, stop)
            # The places of these stages, and values of their own.
            moved = {IDENTITY: IDENTITY, 0: gradient} | {place: n - stop + place for place in range(1, schedule.n + 1)}
            for step in schedule.steps:
                if step.out not in moved:
                    moved[step.out], free = free, free + 1
                out, left, right = (moved[value] for value in (step.out, step.left, step.right))
                steps.append(replace(step, out=out, left=left, right=right, level=level + step.level))
            gradients += [moved[value] for value in schedule.gradients]
            level, named = 1 + max((step.level for step in steps), default=-1), max(named, schedule, key=lambda s: s.n)
            gradient = through(first) if stage >= 0 else gradient
        if stage >= 0:
            gradients.append(gradient)
            gradient = through(stage) if stage else gradient
        stop = stage
    # Names may depend on the number of stages.
    return Schedule(named.name, n, tuple(steps), tuple(gradients))


class Message(NamedTuple):
    """What a rank sends to another in a round of `exchanges`: the product of its block.

    Attributes
    ----------
    source, target : int
        The ranks.
    joined : bool
        Whether the target multiplies its block by that of the source; else no later message needs its block.
    """

    source: int
    target: int
    joined: bool


#: The ways of `exchanges`.
EXCHANGES = ("linear", "gather", "scan")


def check_exchange(exchange: str) -> str:
    """The name of an exchange, ``auto`` or one of `EXCHANGES`; ValueError where it is none."""
    if exchange not in ("auto", *EXCHANGES):
        raise ValueError(f"exchange is {exchange!r}; expected one of auto, {', '.join(EXCHANGES)}")
    return exchange


def exchanges(ranks: int, way: str = "scan") -> tuple[tuple[Message, ...], ...]:
    """The rounds of messages of an exclusive scan across ranks that hold one element each.

    Each rank holds two values: the product of its block, at first of its element alone, and that of all elements before
    its own in the block, at first none. A message from a lower rank extends what comes before; with it, or with that of
    a higher rank, the target may join its block.

    Parameters
    ----------
    ranks : int
        Their number p.
    way : {"scan", "gather", "linear"}
        ``scan``: ⌈log2 p⌉ rounds, in which ranks whose numbers differ in one bit exchange the products of their blocks.
        Messages and products that nothing depends on are left out; Θ(p log p) products remain, more than the Θ(p) of a
        Blelloch scan (equation 3.4 of the thesis), which has twice as many rounds. ``gather``: one round, in which each
        rank sends its element to all higher ones. ``linear``: p - 1 rounds, from rank to rank.

    Returns
    -------
    tuple of tuple of Message
        The messages of each round, by source and target.

    Raises
    ------
    ValueError
        If there is no rank, or no such way.

    Examples
    --------
    >>> [[(source, target) for source, target, _ in messages] for messages in exchanges(4)]
    [[(0, 1), (1, 0), (2, 3)], [(0, 2), (1, 3)]]
    """
    ranks = _natural("ranks", ranks, 1)
    if way not in EXCHANGES:
        raise ValueError(f"way is {way!r}; expected one of {', '.join(EXCHANGES)}")
    if way == "linear":
        return tuple((Message(rank, rank + 1, rank + 2 < ranks),) for rank in range(ranks - 1))
    if way == "gather":
        messages = [Message(source, target, False) for source, target in itertools.combinations(range(ranks), 2)]
        return (tuple(messages),) if messages else ()
    rounds, needed = [], set[int]()
    for k in reversed(range((ranks - 1).bit_length())):
        pairs = ((target ^ 1 << k, target) for target in range(ranks))
        messages = [
            Message(source, target, target in needed)
            for source, target in pairs
            if source < ranks and (source < target or target in needed)
        ]
        needed.update(message.source for message in messages)
        rounds.append(tuple(sorted(messages)))
    return tuple(reversed(rounds))


def resolve(schedule: Schedule | str, n: int, chain: Cuttable | None = None) -> Schedule:
    """The schedule that a ``schedule=`` argument means, for a chain of `n` stages.

    Parameters
    ----------
    schedule : Schedule or str
        A schedule, or ``linear``, ``blelloch``, ``blelloch:LEVELS``, ``chunked:LENGTH``, ``balanced:WORKERS`` or
        ``auto``. ``auto`` is ``linear``: each step already uses the whole device, so that the schedule of the least
        work is the fastest.
    n : int
        The number of stages.
    chain : Chain, optional
        The chain that ``balanced`` cuts into blocks. No matrices are multiplied across its stages that couple samples.

    Raises
    ------
    TypeError
        If `schedule` is neither a schedule nor a name.
    ValueError
        If the name is unknown, or the schedule is for another number of stages, or multiplies what has no matrix.
    """
    name, number = parse(schedule)
    coupling = () if chain is None else chain.coupling
    if isinstance(schedule, Schedule):
        if schedule.n != n:
            raise ValueError(f"the schedule is for {schedule.n} stages, but the chain has {n}; make one with n={n}")
        without = {n - stage for stage in coupling}
        step = next((s for s in schedule.live_steps() if s.kind == "mm" and without & {s.left, s.right}), None)
        if step is not None:
            raise ValueError(
                f"the schedule's step {step} multiplies the matrix of a stage that couples samples, which has none; "
                "pass a name such as 'blelloch:2', by which no product goes across those stages"
            )
        return schedule
    if name in ("linear", "auto"):
        return linear(n)
    if name == "blelloch":
        return between(n, coupling, lambda first, stop: blelloch(stop - first, number))
    assert number is not None
    if name == "chunked":
        length = number
        return between(n, coupling, lambda first, stop: chunked(stop - first, length))
    if chain is None:
        raise ValueError(f"schedule is {schedule!r}, which balances a chain; pass the chain")
    return balanced(chain, number)


def parse(schedule: Schedule | str) -> tuple[str, int | None]:
    """The name and the number that a ``schedule=`` argument consists of; this check needs no chain.

    Raises
    ------
    TypeError, ValueError
        If `schedule` is neither a schedule nor one of the names of `resolve`.

    Examples
    --------
    >>> parse("blelloch:2")
    ('blelloch', 2)
    """
    if isinstance(schedule, Schedule):
        return schedule.name, None
    if not isinstance(schedule, str):
        raise TypeError(f"schedule is a {type(schedule).__name__}; expected a Schedule or a name such as 'blelloch:2'")
    name, colon, argument = schedule.partition(":")
    plain = not colon and name in ("linear", "blelloch", "auto")
    numbered = name in ("blelloch", "balanced", "chunked") and argument.isascii() and argument.isdecimal()
    if not plain and not (numbered and int(argument) >= (name != "blelloch")):
        raise ValueError(
            f"schedule is {schedule!r}; expected linear, blelloch, blelloch:LEVELS, chunked:LENGTH, "
            "balanced:WORKERS, auto, or a Schedule"
        )
    return name, int(argument) if colon else None
