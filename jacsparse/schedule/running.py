"""Schedules run: one loop over products, whatever their values are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any


def run(
    steps: Sequence[Any],
    multiply: Callable[[Any, Any, Any], Any],
    apply: Callable[[Any, Any, Any], Any] | None = None,
    element: Callable[[int], Any] | None = None,
    *,
    values: dict[int, Any] | None = None,
    kept: Collection[int] | None = None,
) -> dict[int, Any]:
    """All values, once products are computed one after the other, in any algebra: of numbers, patterns or seconds.

    Parameters
    ----------
    steps : sequence of Step
        The products, or others with `out`, `left`, `right` and `kind`; each comes after those that compute its factors.
    multiply, apply : callable
        ``multiply(step, left, right)``: the product of two matrices; and of a matrix and a vector, by default the same.
    element : callable, optional
        Gives a value that no step computes, when one first reads it.
    values : dict of int to object, optional
        Values that are there before, by their numbers; the others are added to it.
    kept : collection of int, optional
        The values that stay after their last use; by default, all.

    Examples
    --------
    >>> from jacsparse.schedule import blelloch
    >>> schedule, names = blelloch(4), {0: "g", 1: "A", 2: "B", 3: "C"}
    >>> values = run(schedule.live_steps(), lambda step, left, right: f"({left} {right})", values=names)
    >>> [values[value] for value in schedule.gradients]
    ['g', '(A g)', '(B (A g))', '((C B) (A g))']
    """
    values, apply, last = {} if values is None else values, apply or multiply, dict[int, int]()
    if kept is not None:
        last = {factor: number for number, step in enumerate(steps) for factor in (step.left, step.right)}
    for number, step in enumerate(steps):
        left, right = step.left, step.right
        for factor in (left, right):
            if element is not None and factor not in values:
                values[factor] = element(factor)
        values[step.out] = (apply if step.kind == "mv" else multiply)(step, values[left], values[right])
        for factor in (left, right):
            if kept is not None and last[factor] == number and factor not in kept:
                values.pop(factor, None)
    return values


def by_level(steps: Iterable[Any]) -> Iterator[list[Any]]:
    """Products that do not depend on each other, together: those of a level, and each of the linear middle."""
    ordered = sorted(steps, key=lambda step: step.level)
    for (_, phase), group in itertools.groupby(ordered, lambda step: (step.level, step.phase)):
        members = list(group)
        yield from ([step] for step in members) if phase == "middle" else [members]
