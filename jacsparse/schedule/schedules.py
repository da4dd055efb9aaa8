"""A schedule: steps in an order, the values that they leave, and what they cost."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .cost import Complexity, simulate
from .figure import schedule_figure
from .running import by_level, run
from .steps import Step


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
    >>> from jacsparse.schedule import blelloch
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

    def __hash__(self) -> int:
        # All steps would take longer to hash than what caches keep of a schedule to find.
        return hash((self.name, self.n, len(self.steps)))

    @property
    def products(self) -> tuple[Step, ...]:
        """The steps that multiply, including dead ones."""
        return tuple(step for step in self.steps if step.kind != "move")

    @functools.cached_property
    def batches(self) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]:
        """The live products in batches that do not depend on each other: their kind, values, left and right factors."""
        return tuple(
            (kind, *zip(*((step.out, step.left, step.right) for step in members), strict=True))
            for steps in by_level(self.live_steps())
            for kind, members in itertools.groupby(steps, lambda step: step.kind)
        )

    @functools.cached_property
    def spans(self) -> dict[int, tuple[int, int]]:
        """The first and the last place of the array whose product each value is, by the value's number."""
        places = {place: (place, place) for place in range(self.n + 1)}
        return run(self.products, lambda _, left, right: (right[0], left[1]), values=places)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the products level by level, each over the places of the array that it takes in.

        A product of matrices is a bar, with a line where its factors meet. That of a matrix and a vector is a bar over
        the matrix, and a line from the gradient of the output through all that the vector has taken in before. Levels
        without products are left out; a level whose bars overlap takes several lines.

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

    def deferred(self, light: Collection[int]) -> tuple[Schedule, dict[int, tuple[Step, ...]]]:
        """The same gradients by products in which light matrices wait for a vector.

        A light matrix, such as a diagonal or a selection, costs a vector next to nothing, and a product of matrices a
        pass over all entries: ``(M D) v`` is taken as ``M (D v)``. A matrix of the schedule is then a sequence of
        matrices, of which at most one is not light. A step that multiplies two sequences multiplies these two, and what
        lies between them; where one sequence is all light, it multiplies nothing.

        Parameters
        ----------
        light : collection of int
            The values, from 1 to n, whose matrices are light.

        Returns
        -------
        schedule : Schedule
            Of the live products alone.
        products : dict of int to tuple of Step
            Which of them each live step of this schedule takes, by the step's value.

        Examples
        --------
        >>> from jacsparse.schedule import blelloch
        >>> schedule, products = blelloch(5).deferred({2})  # 9 = 7·6, where 7 = 3·2
        >>> [(value, [str(step) for step in steps]) for value, steps in products.items()]
        [(6, ['6 = 1·0']), (7, []), (9, ['12 = 2·6', '9 = 3·12']), (10, []), (11, ['11 = 4·9'])]
        >>> schedule.gradients
        (0, 6, 12, 9, 11)
        """
        following = itertools.count(1 + max((step.out for step in self.steps), default=self.n))
        #: The matrices whose product each value is, and the values of all products by their factors.
        sequences: dict[int, tuple[int, ...]] = {value: (value,) for value in range(self.n + 1)}
        values: dict[tuple[int, int], int] = {}
        products: dict[int, tuple[Step, ...]] = {}
        for step in self.live_steps():
            left, right = sequences[step.left], sequences[step.right]
            before: tuple[int, ...] = ()
            after: tuple[int, ...] = ()
            if step.kind == "mv":
                product, factors = right[0], left[::-1]
            else:
                at, to = (next((i for i, each in enumerate(s) if each not in light), None) for s in (left, right))
                if at is None or to is None:
                    products[step.out], sequences[step.out] = (), left + right
                    continue
                before, product, factors, after = left[:at], left[at], left[at + 1 :] + right[: to + 1], right[to + 1 :]
            steps = []
            for number, factor in enumerate(factors, 1):
                pair = (factor, product) if step.kind == "mv" else (product, factor)
                if pair not in values:
                    values[pair] = step.out if number == len(factors) else next(following)
                    steps.append(replace(step, out=values[pair], left=pair[0], right=pair[1]))
                product = values[pair]
            products[step.out], sequences[step.out] = tuple(steps), (*before, product, *after)
        gradients = tuple(sequences[value][0] for value in self.gradients)
        return Schedule(self.name, self.n, tuple(itertools.chain.from_iterable(products.values())), gradients), products

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
        >>> from jacsparse.schedule import blelloch, linear
        >>> blelloch(1023).complexity(2048).steps, linear(1023).complexity(2048).steps
        (18, 1022)
        >>> [blelloch(1023).complexity(workers).space for workers in (1, 32, 1024)]
        [1022, 48, 2]
        """
        steps = self.live_steps()
        time, most = simulate(steps, self.n, [1] * len(steps), workers, sizes)
        return Complexity(workers, int(time), len(steps), most)

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
        >>> from jacsparse.schedule import linear
        >>> linear(4).makespan([5.0, 1.0, 1.0], 2)
        7.0
        """
        steps = self.live_steps()
        if len(durations) != len(steps):
            raise ValueError(f"durations has {len(durations)} elements; the schedule has {len(steps)} live steps")
        wrong = next((duration for duration in durations if not duration >= 0), None)
        if wrong is not None:
            raise ValueError(f"durations has {wrong}; expected numbers that are not negative")
        return simulate(steps, self.n, durations, workers)[0]
