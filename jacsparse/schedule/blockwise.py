"""Schedules over blocks of a chain: what workers reduce side by side, and what stages without a matrix keep apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from .scans import Builder, linear
from .schedules import Schedule
from .steps import IDENTITY, Step, natural


class Cuttable(Protocol):
    """A sequence of matrices that can be cut into blocks, such as a `jacsparse.Chain`."""

    def __len__(self) -> int: ...

    @property
    def coupling(self) -> Sequence[int]:
        """The stages, from 0, that couple samples: they have products with vectors, and no matrix."""

    def boundaries(self, workers: int, first: int = 0, stop: int | None = None) -> list[int]:
        """The places of the array of the stages from `first` to `stop` at which blocks begin, for `workers` workers."""


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
    workers = natural("workers", workers, 1)
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
    length = natural("length", length, 1)
    return blocked(n, [0, *range(length + 1, n, length)], f"chunked:{length}")


def blocked(n: int, boundaries: Sequence[int], name: str) -> Schedule:
    """The schedule of `balanced` with blocks that begin at the places `boundaries` of `a`; the first of them is 0."""
    if len(boundaries) < 2:
        return replace(linear(n), name=name)
    builder = Builder(n)
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
    >>> from jacsparse.schedule import blelloch
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
