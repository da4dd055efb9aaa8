"""GMRES on the system scaled by its diagonal, with block rows of equal size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse.linalg
import torch

from .blocks import Vector, Work
from .expected_decay import expected_exponents, times_power
from .solver import Iterated, Iteration, relative_residual, swept
from .systems import BlockTriangular


@dataclass(frozen=True)
class GMRES(Iteration):
    """SciPy's GMRES on ``(I - N) u = D⁻¹ c`` with ``N = D⁻¹ A``, all samples as one system (Naumov, section 3.2).

    Parameters
    ----------
    tolerance, guess
        As `Iteration` takes them.
    limit : int, optional
        The most iterations, of one product each; by default four cycles of as many as the system has levels.
    restart : int, optional
        The vectors that a cycle stores, each as large as the solution; by default as many as the system has levels.

    Notes
    -----
    The polynomial ``(I - (I - N))^(l + 1)`` is zero for a system of depth l, of any number of samples, so that a whole
    cycle is exact but for rounding. Until its last iteration it stagnates: on a shift matrix the residual after k
    iterations is ``1 / √(k + 1)``. Shorter cycles do not settle, and so the paper's remark holds that GMRES is
    prohibitively expensive here in memory.

    Block rows are divided by their expected size (`expected_exponents`), and from the second cycle on by their size
    after the cycle before, since GMRES minimises one norm of all. Within a cycle, `Solution.history` has that norm, as
    a share of the cycle's first; at its end, the residual of block rows.

    In float32 the vectors of a long cycle are no longer orthogonal: with 256 dense layers some block rows do not
    settle, and in float64 they do.

    Examples
    --------
    >>> import torch
    >>> from jacsparse.solvers import BlockBidiagonal
    >>> system = BlockBidiagonal([0.5 * torch.eye(2)] * 3, [torch.ones(1, 2)] * 4)
    >>> solution = GMRES().solve(system)
    >>> solution.values[0].round(decimals=3).tolist(), solution.converged
    ([[1.875, 1.875]], True)
    """

    name = "gmres"
    restart: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.restart is not None and (type(self.restart) is not int or self.restart < 1):
            raise ValueError(f"restart is {self.restart!r}; expected a number of vectors of at least 1")

    def limit_of(self, system: BlockTriangular) -> int:
        return 4 * (system.depth + 1) if self.limit is None else self.limit

    def run(self, system: BlockTriangular, work: Work) -> Iterated:
        tolerance, limit = self.tolerance_of(system), self.limit_of(system)
        values = self.first(system, work)
        exponents = expected_exponents(system)
        history = list[float]()
        while True:
            after = swept(system, values, work)
            history[-1:] = [relative_residual(after, values)]
            left = limit - len(history) + 1
            if history[-1] <= tolerance or not np.isfinite(history[-1]) or left < 1:
                return values, history
            residual = {node: part - values[node] for node, part in after.items()}
            change, norms = _cycle(system, exponents, residual, min(left, self.restart or system.depth + 1), work)
            history += norms or history[-1:]
            values = {node: part + change[node] for node, part in values.items()}
            exponents = {node: _exponent(part, exponents[node]) for node, part in values.items()}


def _cycle(
    system: BlockTriangular, exponents: dict[int, torch.Tensor], residual: Vector, vectors: int, work: Work
) -> tuple[Vector, list[float]]:
    """The solution for a residual by one cycle, and the norms of its iterations."""
    scaled = {node: times_power(part, -exponents[node]) for node, part in residual.items()}
    # What SciPy takes for a breakdown is absolute.
    largest = max((float(part.abs().max()) for part in scaled.values() if part.numel()), default=0.0) or 1.0
    lengths = [part.numel() for part in scaled.values()]

    def flat(vector: Vector) -> np.ndarray:
        joint: np.ndarray = torch.cat([vector[node].flatten() for node in scaled]).cpu().numpy()
        return joint

    def parts(array: np.ndarray) -> Vector:
        pieces = torch.from_numpy(np.array(array)).to(residual[0]).split(lengths)
        return {node: piece.view(residual[node].shape) for node, piece in zip(scaled, pieces, strict=True)}

    def apply(array: np.ndarray) -> np.ndarray:
        vector, product = parts(array), dict[int, torch.Tensor]()
        with work.level():
            for node, columns in system.reads.items():
                blocks = [
                    (
                        system.off_diagonal.blocks[node, column],
                        times_power(vector[column], exponents[column] - exponents[node]),
                    )
                    for column in columns
                ]
                if blocks:
                    product[node] = work.apply(*blocks)
        with work.level():
            product = system.inverse.apply(product, work)
        return flat({node: part - product[node] if node in product else part for node, part in vector.items()})

    b, norms = flat(scaled) / largest, list[float]()
    operator = scipy.sparse.linalg.LinearOperator((len(b), len(b)), apply, dtype=b.dtype)
    # Where the system is solved sooner, its next vector is zero.
    with np.errstate(divide="ignore", invalid="ignore"):
        solution, _ = scipy.sparse.linalg.gmres(
            operator, b, rtol=0.0, atol=0.0, restart=vectors, maxiter=1, callback=norms.append, callback_type="pr_norm"
        )
    return {node: times_power(largest * part, exponents[node]) for node, part in parts(solution).items()}, norms


def _exponent(part: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The exponents of two of a block row's size; the expected ones where that is zero."""
    size = part.abs().double().amax(dim=0).log2() if len(part) else expected
    return torch.where(size.isfinite(), size, expected).round()
