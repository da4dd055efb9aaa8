"""What all solvers share: a system goes in, a solution with its history comes out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import ClassVar

import torch

from ..runtime import a_type
from ..schedule import Schedule
from .blocks import Vector, Work, add
from .systems import BlockTriangular

#: What an iterative solver came to, and the residual of its guess and after each iteration.
Iterated = tuple[Vector, list[float]]


@dataclass(frozen=True, eq=False)
class Solution:
    """What a solver came to.

    Attributes
    ----------
    method : str
        The solver.
    values : list of Tensor, each (batch, n)
        The solution of each block row.
    work : Work
        The tasks that were run, level by level.
    iterations : int
        Of an iterative solver; 0 of a direct one.
    residual : float or None
        Of an iterative solver, ``‖u' - u‖ / ‖u'‖`` in the maximum norm, where ``u' = D⁻¹ (c + A u)``: the largest of
        all block rows and samples, so that small gradients count as much as large ones.
    converged : bool
        Whether the residual is at most the tolerance; of a direct solver, whether all values are finite.
    history : list of float
        The residual of the guess, and after each iteration.
    """

    method: str
    values: list[torch.Tensor]
    work: Work
    iterations: int = 0
    residual: float | None = None
    converged: bool = True
    history: list[float] = field(default_factory=list)

    def __repr__(self) -> str:
        state = "converged" if self.converged else "not converged"
        if self.residual is not None:
            state = f"{self.iterations} iterations, residual {self.residual:.1e}, {state}"
        return f"<Solution by {self.method}: {state}>"


class TriangularSolver(ABC):
    """A way of solving block triangular systems.

    Attributes
    ----------
    name : str
        Its name in ``method=``.
    direct : bool
        Whether it is exact, up to rounding, after a known number of steps.
    """

    name: ClassVar[str]
    direct: ClassVar[bool] = True

    @abstractmethod
    def run(self, system: BlockTriangular, work: Work) -> Vector | Iterated:
        """The solution, of an iterative solver with its history; the tasks that led to it are added to `work`."""

    def obstacle(self, system: BlockTriangular) -> str | None:
        """Why this solver cannot solve a system; None where it can."""
        return None

    def chain_schedule(self, system: BlockTriangular) -> Schedule | None:
        """The schedule of the products of matrices that it makes along a chain; None where there is none."""
        return None

    def check(self, system: BlockTriangular) -> None:
        """Raise ValueError where the solver, with its options, does not apply to a system."""
        obstacle = self.obstacle(system)
        if obstacle:
            raise ValueError(f"{self.name} does not apply: {obstacle}")

    def solve(self, system: BlockTriangular) -> Solution:
        """Solve a system.

        Raises
        ------
        ValueError
            Where the solver does not apply to it.
        """
        self.check(system)
        work = Work()
        with torch.no_grad():
            result = self.run(system, work)
        values, history = result if isinstance(result, tuple) else (result, [])
        # Copies, because a part may be the right-hand side itself.
        parts = [values[node].T.clone(memory_format=torch.contiguous_format) for node in sorted(values)]
        if isinstance(self, Iteration):
            converged = history[-1] <= self.tolerance_of(system)
            return Solution(self.name, parts, work, len(history) - 1, history[-1], converged, history)
        finite = all(part.is_meta or bool(part.isfinite().all()) for part in parts)
        return Solution(self.name, parts, work, converged=finite)


@dataclass(frozen=True)
class Iteration(TriangularSolver):
    """A solver that improves a guess until its residual is small: the base class of the iterative ones.

    Parameters
    ----------
    tolerance : float, optional
        The residual to reach, below 1; by default 1e-8 in float64 and 7.6e-6 in float32.
    limit : int, optional
        The most iterations; by default one more than the system's depth, after which Jacobi's method is exact, and 50
        at least.
    guess : list or tuple of Tensor, each (batch, n), optional
        Where to begin; ``D⁻¹ c`` where left out. Solvers that differ in their guess alone are equal.

    Raises
    ------
    TypeError, ValueError
        Where an option is of another type or range; in `solve`, where the guess does not fit the system, or the
        tolerance is below the precision of its dtype.
    """

    direct: ClassVar[bool] = False
    tolerance: float | None = None
    limit: int | None = None
    # Tensors cannot be compared or hashed by their elements.
    guess: Sequence[torch.Tensor] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.tolerance is not None and (
            not isinstance(self.tolerance, Real) or isinstance(self.tolerance, bool) or not 0 < self.tolerance < 1
        ):
            raise ValueError(f"tolerance is {self.tolerance!r}; expected a number above 0 and below 1")
        if self.limit is not None and (type(self.limit) is not int or self.limit < 1):
            raise ValueError(f"limit is {self.limit!r}; expected a number of iterations of at least 1")
        if self.guess is None:
            return
        if not isinstance(self.guess, list | tuple):
            raise TypeError(f"guess is {a_type(self.guess)}; expected a list with a tensor for each block row")
        for node, part in enumerate(self.guess):
            if not isinstance(part, torch.Tensor):
                raise TypeError(f"guess[{node}] is {a_type(part)}; expected a torch.Tensor, (batch, n)")

    def check(self, system: BlockTriangular) -> None:
        super().check(system)
        self.tolerance_of(system)
        if self.guess is None:
            return
        if len(self.guess) != len(system.sizes):
            raise ValueError(f"guess has {len(self.guess)} parts; expected {len(system.sizes)}, one for each block row")
        like = system.right[0]
        for node, (part, size) in enumerate(zip(self.guess, system.sizes, strict=True)):
            if (tuple(part.shape), part.dtype, part.device) != ((system.batch, size), like.dtype, like.device):
                raise ValueError(
                    f"guess[{node}] is {part.dtype} {tuple(part.shape)} on {part.device}; expected {like.dtype} "
                    f"({system.batch}, {size}) on {like.device}, as the right-hand side of that block row"
                )

    def tolerance_of(self, system: BlockTriangular) -> float:
        """The tolerance for a system's dtype; ValueError where it is below the machine's precision."""
        eps = torch.finfo(system.right[0].dtype).eps
        tolerance = max(1e-8, 64 * eps) if self.tolerance is None else self.tolerance
        if tolerance < eps:
            raise ValueError(
                f"tolerance is {tolerance!r}; expected a number of at least {eps:.1e}, the precision of "
                f"{system.right[0].dtype}"
            )
        return float(tolerance)

    def limit_of(self, system: BlockTriangular) -> int:
        """The most iterations for a system."""
        return max(50, system.depth + 1) if self.limit is None else self.limit

    def first(self, system: BlockTriangular, work: Work) -> Vector:
        """The first guess."""
        if self.guess is None:
            return scaled_right(system, work)
        return {node: part.detach().T.contiguous() for node, part in enumerate(self.guess)}

    def iterate(
        self, system: BlockTriangular, values: Vector, sweep: Callable[[Vector], Vector], omega: float = 1.0
    ) -> Iterated:
        """Replace values by what a sweep makes of them until the residual is small; `omega` relaxes each change."""
        tolerance, limit, history = self.tolerance_of(system), self.limit_of(system), list[float]()
        while True:
            after = sweep(values)
            history.append(relative_residual(after, values))
            if history[-1] <= tolerance or len(history) > limit:
                return values, history
            if omega != 1:
                after = {node: values[node] + omega * (part - values[node]) for node, part in after.items()}
            values = after


def scaled_right(system: BlockTriangular, work: Work) -> Vector:
    """``D⁻¹ c``."""
    with work.level():
        return system.inverse.apply(system.right, work)


def swept(system: BlockTriangular, values: Vector, work: Work) -> Vector:
    """``D⁻¹ (c + A u)``: all block rows at once, each from the others' values."""
    with work.level():
        totals = add(system.off_diagonal.apply(values, work), system.right)
    with work.level():
        return system.inverse.apply(totals, work)


def relative_residual(after: Vector, before: Vector) -> float:
    """The largest of `relative_residuals`."""
    residuals = relative_residuals(after, before)
    return float(residuals.max()) if residuals.numel() else 0.0


def relative_residuals(after: Vector, before: Vector) -> torch.Tensor:
    """Of each sample, the largest change of a block row as a fraction of its largest element; NaN counts as infinite.

    Rows below the smallest normal number count as that: their own digits are few.
    """
    largest = next(iter(after.values())).new_zeros(next(iter(after.values())).shape[1])
    for node, part in after.items():
        if part.numel():
            change, size = (part - before[node]).abs().amax(dim=0), part.abs().amax(dim=0)
            ratio = change / size.clamp(min=torch.finfo(size.dtype).tiny)
            largest = torch.maximum(largest, ratio.nan_to_num(nan=math.inf))
    return largest
