"""Schedules run: one loop over products, whatever their values are."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from .steps import Step


class Algebra(ABC):
    """What the values of a schedule are, and what their products are: numbers, patterns, counts or seconds."""

    def element(self, value: int) -> Any:
        """A value that no step computes, when a step first reads it."""
        raise KeyError(value)

    @abstractmethod
    def multiply(self, step: Any, left: Any, right: Any) -> Any:
        """The product of two matrices."""

    def apply(self, step: Any, left: Any, right: Any) -> Any:
        """The product of a matrix and a vector, which by default is a matrix like others."""
        return self.multiply(step, left, right)


def run(
    steps: Sequence[Any], algebra: Algebra, values: dict[int, Any] | None = None, kept: Collection[int] | None = None
) -> dict[int, Any]:
    """Compute products, one after the other.

    Parameters
    ----------
    steps : sequence of Step
        The products, or others with `out`, `left`, `right` and `kind`; each comes after those that compute its factors.
    algebra : Algebra
        What computes them.
    values : dict of int to object, optional
        Values that are there before, by their numbers; the others are added to it.
    kept : collection of int, optional
        The values that stay after their last use; by default, all.

    Returns
    -------
    dict of int to object
        `values`, or a new dict.

    Examples
    --------
    >>> from jacsparse.schedule import blelloch
    >>> class Names(Algebra):
    ...     def element(self, value):
    ...         return f"J{value}" if value else "g"
    ...     def multiply(self, step, left, right):
    ...         return f"({left} {right})"
    >>> schedule = blelloch(4)
    >>> values = run(schedule.live_steps(), Names(), kept=schedule.gradients)
    >>> [values[value] for value in schedule.gradients[1:]]
    ['(J1 g)', '(J2 (J1 g))', '((J3 J2) (J1 g))']
    """
    values, last = {} if values is None else values, dict[int, int]()
    if kept is not None:
        last = {factor: number for number, step in enumerate(steps) for factor in (step.left, step.right)}
    for number, step in enumerate(steps):
        left, right = step.left, step.right
        if left not in values:
            values[left] = algebra.element(left)
        if right not in values:
            values[right] = algebra.element(right)
        compute = algebra.apply if step.kind == "mv" else algebra.multiply
        values[step.out] = compute(step, values[left], values[right])
        if kept is not None:
            for factor in (left, right):
                if last[factor] == number and factor not in kept:
                    values.pop(factor, None)
    return values


def by_level(steps: Iterable[Step]) -> Iterator[list[Step]]:
    """Products that do not depend on each other, together: those of a level, and each of the linear middle."""
    ordered = sorted(steps, key=lambda step: step.level)
    for (_, phase), group in itertools.groupby(ordered, lambda step: (step.level, step.phase)):
        members = list(group)
        yield from ([step] for step in members) if phase == "middle" else [members]
