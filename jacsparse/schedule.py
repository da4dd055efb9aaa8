"""Schedules: which products back-propagation takes, and in which order.

The gradient of a loss with respect to every stage's output is an exclusive scan (thesis, section 3.1) of

    a = [∇x_n, J_nᵀ, J_{n-1}ᵀ, ..., J_1ᵀ]        with  A ⋄ B = B A,

where ``J_i = ∂x_i/∂x_{i-1}``. A schedule is a way to evaluate that scan: a list of steps in static single assignment,
grouped in levels of independent ones. The scan runs the very steps that the FLOP report counts.

Values are numbered: 0 to n are the elements of `a`, the rest are results of steps. A step's ``left`` and ``right`` are
in the order of the matrix product, ``out = left · right``: `left` is the factor closer to the network's input.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ._chain import Chain
    from ._flop import Subject

__all__ = ["Complexity", "Schedule", "Step", "balanced", "blelloch", "chunked", "linear", "parse", "resolve"]

#: The identity: never a matrix, and no value.
IDENTITY = -1

Kind = Literal["mm", "mv", "move"]
Phase = Literal["up", "middle", "down"]


@dataclass(frozen=True)
class Step:
    """One product, or one movement of data.

    Attributes
    ----------
    out : int
        The value it makes.
    left, right : int
        The factors; for a ``move``, `right` is what moves and `left` the identity, -1.
    kind : {"mm", "mv", "move"}
        Matrix times matrix, matrix times vector, or no product at all.
    level : int
        Steps of one level do not depend on each other, but for the linear middle, which is one level.
    phase : {"up", "middle", "down"}
        Of the scan.
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


@dataclass(frozen=True)
class Complexity:
    """What a schedule costs on `workers` workers, in steps of unit time (thesis, section 3.6).

    Attributes
    ----------
    workers : int
        How many run at once.
    steps : int
        Step complexity: units of time until the last step is done.
    work : int
        Work complexity: all steps together.
    space : int
        The most matrices that any worker holds at once.
    """

    workers: int
    steps: int
    work: int
    space: int


@dataclass(frozen=True)
class Schedule:
    """Steps that turn ``[∇x_n, J_nᵀ, ..., J_1ᵀ]`` into ``[∇x_n, ..., ∇x_1]``, for a chain of `n` stages.

    Attributes
    ----------
    name : str
        What it was made as.
    n : int
        Stages.
    steps : tuple of Step
        In an order in which each step's factors are made before it.
    gradients : tuple of int
        The values that hold ``∇x_n, ..., ∇x_1``.

    Examples
    --------
    >>> schedule = blelloch(3)
    >>> [(step.out, step.left, step.right, step.kind) for step in schedule.steps if step.live and step.kind != "move"]
    [(4, 1, 0, 'mv'), (6, 2, 4, 'mv')]
    >>> schedule.gradients
    (0, 4, 6)
    """

    name: str
    n: int
    steps: tuple[Step, ...]
    gradients: tuple[int, ...]

    @property
    def products(self) -> tuple[Step, ...]:
        """The steps that multiply, dead ones included."""
        return tuple(step for step in self.steps if step.kind != "move")

    def live_steps(self, wanted: Iterable[int] | None = None) -> tuple[Step, ...]:
        """The steps that multiply and on which a value of `wanted` depends; by default, all gradients."""
        needed = set(self.gradients if wanted is None else wanted)
        live = []
        for step in reversed(self.products):
            if step.out in needed:
                live.append(step)
                needed.update((step.left, step.right))
        return tuple(reversed(live))

    def complexity(self, workers: int, sizes: Mapping[int, int] | None = None) -> Complexity:
        """Run the live steps on `workers` workers, each step taking one unit of time.

        Free workers take, in the schedule's order, steps whose factors are there. The chain's matrices lie on the
        workers in equal shares, in the chain's order. A step is done where the larger of its matrices lies or, if that
        worker is busy, the other; if both are, by the free worker that holds least. Its product takes room there from
        its start to its last use.

        Parameters
        ----------
        workers : int
            How many run at once.
        sizes : mapping of int to int, optional
            By value, the entries of each matrix that a live step reads or makes; 1 each where left out.

        Raises
        ------
        ValueError
            Where there is no worker, or a matrix without a size.

        Examples
        --------
        >>> blelloch(1023).complexity(2048).steps, linear(1023).complexity(2048).steps
        (18, 1022)
        >>> [blelloch(1023).complexity(workers).space for workers in (1, 32, 1024)]
        [1022, 48, 2]
        """
        steps = self.live_steps()
        time, space = self._run(steps, [1] * len(steps), workers, sizes)
        return Complexity(workers, int(time), len(steps), space)

    def makespan(self, durations: Sequence[float], workers: int) -> float:
        """When the last live step is done, where each takes as long as is said: `complexity` with steps of any length.

        Parameters
        ----------
        durations : sequence of float
            Of `live_steps`, in any unit.
        workers : int
            How many run at once.

        Raises
        ------
        ValueError
            Where there is no worker, or not one duration for each live step, or one is negative or no number.

        Examples
        --------
        >>> linear(4).makespan([5.0, 1.0, 1.0], 2)
        7.0
        """
        steps = self.live_steps()
        if len(durations) != len(steps):
            raise ValueError(f"durations has {len(durations)} elements; the schedule has {len(steps)} live steps")
        wrong = next((duration for duration in durations if not duration >= 0), None)
        if wrong is not None:
            raise ValueError(f"durations has {wrong}; expected numbers that are not negative")
        return self._run(steps, durations, workers)[0]

    def _run(
        self, steps: Sequence[Step], durations: Sequence[float], workers: int, sizes: Mapping[int, int] | None = None
    ) -> tuple[float, int]:
        """When the last step is done, and what the fullest worker held, as `complexity` says."""
        # No more have anything to do.
        free = set(range(min(_natural("workers", workers, 1), max(self.n, len(steps), 1))))
        stores = _Stores(steps, self.n, len(free), sizes)
        made = {step.out for step in steps}
        users: dict[int, list[int]] = {}
        missing = []
        for number, step in enumerate(steps):
            waits_for = [factor for factor in (step.left, step.right) if factor in made]
            missing.append(len(waits_for))
            for factor in waits_for:
                users.setdefault(factor, []).append(number)
        ready = [number for number, count in enumerate(missing) if count == 0]
        running: list[tuple[float, int, int]] = []
        time = 0.0
        while ready or running:
            while ready and free:
                number = heapq.heappop(ready)
                worker = stores.start(steps[number], free)
                free.remove(worker)
                heapq.heappush(running, (time + durations[number], number, worker))
            stores.note()
            time = running[0][0]
            while running and running[0][0] == time:
                _, number, worker = heapq.heappop(running)
                stores.finish(steps[number])
                free.add(worker)
                for user in users.get(steps[number].out, ()):
                    missing[user] -= 1
                    if missing[user] == 0:
                        heapq.heappush(ready, user)
        return time, stores.most


class _Stores:
    """Which worker holds which matrix while a schedule runs, and how much the fullest one held.

    Attributes
    ----------
    most : int
        What that was.
    """

    def __init__(self, steps: Sequence[Step], n: int, workers: int, sizes: Mapping[int, int] | None) -> None:
        self.most = 0
        self._sizes = sizes and {value: _natural(f"sizes[{value}]", size, 0) for value, size in sizes.items()}
        self._uses = Counter(factor for step in steps for factor in (step.left, step.right))
        self._places: dict[int, int] = {}
        self._held = [0] * workers
        self._changed: set[int] = set()
        chain = [value for value in range(1, n + 1) if value in self._uses]
        total, before = sum(map(self._size, chain)), 0
        for value in chain:
            size = self._size(value)
            # In the share of all matrices in which its middle lies.
            self._keep(value, min((2 * before + size) * workers // max(2 * total, 1), workers - 1))
            before += size
        self.note()

    def start(self, step: Step, free: Collection[int]) -> int:
        """Choose the worker that is to do a step, and make room for the product there."""
        factors = [factor for factor in (step.left, step.right) if self._places.get(factor, -1) in free]
        if factors:
            worker = self._places[max(factors, key=self._size)]
        else:
            worker = min(free, key=lambda worker: (self._held[worker], worker))
        if step.kind == "mm":
            self._keep(step.out, worker)
        return worker

    def finish(self, step: Step) -> None:
        """Give up what nothing else needs."""
        for factor in (step.left, step.right):
            self._uses[factor] -= 1
            if self._uses[factor] == 0 and factor in self._places:
                self._held[self._places.pop(factor)] -= self._size(factor)

    def note(self) -> None:
        """Look at how much is held now."""
        self.most = max([self.most, *(self._held[worker] for worker in self._changed)])
        self._changed.clear()

    def _keep(self, value: int, worker: int) -> None:
        self._places[value] = worker
        self._held[worker] += self._size(value)
        self._changed.add(worker)

    def _size(self, value: int) -> int:
        if self._sizes is None:
            return 1
        if value not in self._sizes:
            raise ValueError(
                f"sizes has no entry for matrix {value}; expected one for each that a live step reads or makes"
            )
        return self._sizes[value]


def _natural(name: str, value: int, least: int) -> int:
    """`value` as an int; ValueError where it is none of at least `least`."""
    try:
        number = index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; expected an integer of at least {least}")
    return number


class _Recorder:
    """Runs an algorithm on names of values, and writes down what it does.

    ``a[i]`` holds the name of the value that an algorithm keeps at place ``i``.
    """

    def __init__(self, n: int) -> None:
        self.n = n = _natural("n", n, 0)
        self.a = list(range(n + 1))
        self.vectors = {0}
        self.steps: list[Step] = []
        self.following = n + 1

    def multiply(self, left: int, right: int, level: int, phase: Phase) -> int:
        """The value ``left · right``."""
        if IDENTITY in (left, right):
            moved = right if left == IDENTITY else left
            self.steps.append(Step(moved, IDENTITY, moved, "move", level, phase))
            return moved
        out, self.following = self.following, self.following + 1
        kind: Kind = "mm"
        if right in self.vectors:
            self.vectors.add(out)
            kind = "mv"
        self.steps.append(Step(out, left, right, kind, level, phase))
        return out

    def finish(self, name: str) -> Schedule:
        """The schedule, whose result is ``[I, ∇x_n, ..., ∇x_1]`` in `a`, with its dead steps marked."""
        schedule = Schedule(name, self.n, tuple(self.steps), tuple(self.a[1:]) if self.n else ())
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
    record = _Recorder(n)
    gradient, result = record.a[0], [IDENTITY, record.a[0]][: n + 1]
    for i in range(1, n):
        gradient = record.multiply(record.a[i], gradient, 0, "middle")
        result.append(gradient)
    record.a = result
    return record.finish("linear")


def blelloch(n: int, levels: int | None = None) -> Schedule:
    """The modified Blelloch scan: Algorithm 1 of the thesis, section 3.2.

    Its name tells how many levels it has: ``blelloch(21, 99)`` is ``blelloch:4``.

    Parameters
    ----------
    n : int
        Stages.
    levels : int, optional
        Levels of the up-sweep; between the sweeps the scan goes linearly over what they leave (section 5.3). All of
        them where left out or more than there are.

    Notes
    -----
    Algorithm 1 as printed also reduces into ``a[n]``, which ``a[n] ← I`` then overwrites: those steps are here, marked
    as dead. In the down-sweep ``a[r] ← a[l] ⋄ a[r]`` reads ``a[r]`` as it was before ``a[l] ← a[r]``.

    Examples
    --------
    >>> schedule = blelloch(21, levels=2)
    >>> len(schedule.products), len(schedule.live_steps())
    (34, 33)
    """
    if levels is not None:
        levels = _natural("levels", levels, 0)
    record = _Recorder(n)
    a = record.a
    all_levels = max(0, math.ceil(math.log2(n + 1)) - 1)
    depth = all_levels if levels is None else min(levels, all_levels)
    for d in range(depth):
        for i in range(0, n - 2**d + 1, 2 ** (d + 1)):
            l, r = i + 2**d - 1, min(i + 2 ** (d + 1) - 1, n)  # noqa: E741  (the names of Algorithm 1)
            a[r] = record.multiply(a[r], a[l], d, "up")
    _linear_middle(record, 2**depth, depth)
    for d in range(depth - 1, -1, -1):
        for i in range(0, n - 2**d + 1, 2 ** (d + 1)):
            l, r = i + 2**d - 1, min(i + 2 ** (d + 1) - 1, n)  # noqa: E741
            a[l], a[r] = a[r], record.multiply(a[l], a[r], 2 * depth - d, "down")
    return record.finish("blelloch" if levels is None else f"blelloch:{depth}")


def _linear_middle(record: _Recorder, block: int, level: int) -> None:
    """Exclusive scan over the last places of blocks, one after the other; ``a[n]`` takes what comes after them all."""
    a = record.a
    ends = range(block - 1, record.n, block)
    before = IDENTITY
    for end in ends:
        reduced, a[end] = a[end], before
        before = reduced if before == IDENTITY else record.multiply(reduced, before, level, "middle")
    if record.n:
        a[record.n] = before
    else:
        a[0] = IDENTITY


def balanced(chain: Chain | Subject, workers: int) -> Schedule:
    """A schedule of short predicted time for `workers` workers, over blocks of the chain of unequal length.

    Each worker but the first reduces a block of stages to one matrix; the gradient goes through the blocks one after
    the other; then each worker takes it through its block. Where no such split is faster than going linearly, and
    with one worker, the schedule is linear. Splits are searched stage by stage, each block being added to the split by
    which the gradient gets there first: the best of these, not of all splits that there are.

    Parameters
    ----------
    chain : Chain
        Its patterns give the cost of each product, in flop; or what `count_flop` counts.
    workers : int
        How many run at once.

    Raises
    ------
    ValueError
        Where there is no worker.
    """
    from ._balance import boundaries

    workers = _natural("workers", workers, 1)
    if not hasattr(chain, "factors"):
        raise TypeError(f"chain is a {type(chain).__name__}; make one with jacsparse.chain(module, input_shape)")
    if workers == 1:
        # There is nothing to weigh, so no pattern is made.
        return blocked(len(chain), [0], "balanced:1")
    factors = chain.factors
    return blocked(len(factors), boundaries(factors, workers), f"balanced:{workers}")


def chunked(n: int, length: int) -> Schedule:
    """Blocks of `length` matrices, each reduced to one side by side; as `balanced`, but for the boundaries.

    This is how a recurrence goes through chunks of its steps, which all cost the same.

    Raises
    ------
    ValueError
        Where a block would be empty.

    Examples
    --------
    >>> chunked(1025, 128).complexity(8).steps
    262
    """
    length = _natural("length", length, 1)
    return blocked(n, [0, *range(length + 1, n, length)], f"chunked:{length}")


def blocked(n: int, boundaries: Sequence[int], name: str) -> Schedule:
    """Blocks of the places of `a` that begin at `boundaries` (at 0 the one with the gradient), reduced side by side."""
    if len(boundaries) < 2:
        return replace(linear(n), name=name)
    record = _Recorder(n)
    blocks = list(zip(boundaries, [*boundaries[1:], n], strict=True))
    longest = max(stop - begin for begin, stop in blocks)
    # result[j + 1] = a[j] · result[j]
    result = [IDENTITY, record.a[0]] + [IDENTITY] * (n - 1)
    reduced = {}
    for begin, stop in blocks[:-1]:
        product = record.a[begin]
        for place in range(begin + 1, stop):
            product = record.multiply(record.a[place], product, place - begin - 1, "up")
            if begin == 0:
                result[place + 1] = product
        reduced[begin] = product
    for begin, stop in blocks[1:-1]:
        result[stop] = record.multiply(reduced[begin], result[begin], longest, "middle")
    for number, (begin, stop) in enumerate(blocks[1:], start=1):
        last = number == len(blocks) - 1
        for place in range(begin, stop if last else stop - 1):
            result[place + 1] = record.multiply(record.a[place], result[place], longest + 1 + place - begin, "down")
    record.a = result
    return record.finish(name)


def resolve(schedule: Schedule | str, n: int, chain: Chain | Subject | None = None) -> Schedule:
    """The schedule that a ``schedule=`` argument means, for a chain of `n` stages.

    Parameters
    ----------
    schedule : Schedule or str
        A schedule, or ``linear``, ``blelloch``, ``blelloch:LEVELS``, ``chunked:LENGTH``, ``balanced:WORKERS`` or
        ``auto``. That is ``linear``: each step already uses a whole device, and one worker does nothing sooner than
        by the least work.
    n : int
        Stages.
    chain : Chain, optional
        What ``balanced`` balances.

    Raises
    ------
    TypeError
        Where it is neither a schedule nor a name.
    ValueError
        Where the name is unknown, or the schedule is for another number of stages.
    """
    name, number = parse(schedule)
    if isinstance(schedule, Schedule):
        if schedule.n != n:
            raise ValueError(f"the schedule is for {schedule.n} stages, but the chain has {n}; make one with n={n}")
        return schedule
    if name in ("linear", "auto"):
        return linear(n)
    if name == "blelloch":
        return blelloch(n, number)
    if name == "chunked":
        assert number is not None
        return chunked(n, number)
    if chain is None:
        raise ValueError(f"schedule is {schedule!r}, which balances a chain; pass the chain")
    assert number is not None
    return balanced(chain, number)


def parse(schedule: Schedule | str) -> tuple[str, int | None]:
    """A ``schedule=`` argument as its name and number, checked before there is a chain.

    Raises
    ------
    TypeError, ValueError
        As `resolve`.

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
