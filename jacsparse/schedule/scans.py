"""Schedules of scans whose places are all alike: step after step, Blelloch's, and cyclic reduction."""

from __future__ import annotations

import math
from dataclasses import replace

from .schedules import Schedule
from .steps import IDENTITY, Kind, Phase, Step, natural


class Builder:
    """Records the steps of an algorithm; ``a[i]`` is the number of the value at place ``i`` of the scan's array."""

    def __init__(self, n: int) -> None:
        self.n = n = natural("n", n, 0)
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
    builder = Builder(n)
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
        levels = natural("levels", levels, 0)
    builder = Builder(n)
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
    builder = Builder(n)
    a, stride, level = builder.a, 1, 0
    while stride < n:
        # From the end, so that each product reads what the level before has computed.
        for place in range(n - 1, stride - 1, -1):
            a[place] = builder.multiply(a[place], a[place - stride], level, "up")
        stride, level = 2 * stride, level + 1
    builder.a = [IDENTITY, *a[:n]]
    return builder.finish("cyclic_reduction")
