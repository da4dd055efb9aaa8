"""BiCGStab on the system scaled by its diagonal, with coefficients for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .blocks import Vector, Work
from .expected_decay import expected_exponents, times_power
from .solver import Iterated, Iteration, relative_residuals, swept
from .systems import BlockTriangular

#: Powers of two by which inner products weigh a block row more than those that depend on it.
_BITS = 4


@dataclass(frozen=True)
class BiCGStab(Iteration):
    """Van der Vorst's BiCGStab on ``(I - N) u = D⁻¹ c`` with ``N = D⁻¹ A`` (Naumov, equations 38 to 41).

    Parameters
    ----------
    tolerance, guess
        As `Iteration` takes them.
    limit : int, optional
        The most iterations, of two products with the matrix each; by default as of `Iteration`.
    seed : int
        Of the shadow residual, which is random. The first residual in its place, as is usual, breaks down at once
        where the right-hand side is in one block alone, as in back-propagation: the second residual has none of the
        first one's block rows, and is orthogonal to it.

    Notes
    -----
    Section 3.3 names block Krylov methods for the samples of a mini-batch. Samples differ in their diagonals, so that
    the block of residuals has a Krylov space for each sample, and its matrices of coefficients are diagonal: one
    product for all samples, and coefficients of their own.

    Section 3.2 expects that eigenvalues which are all one make for fast convergence. The matrix is far from normal, and
    they do not: what one block row passes on reaches the row l blocks away after l products, so that no method that
    multiplies by the matrix settles all rows with fewer, whereas Jacobi's l always do. Inner products therefore weigh
    each row by its expected size (`expected_exponents`), and 16 times more than those that depend on it. The iteration
    then takes little more than l / 2 iterations, of two products each. With rows of equal weight it stagnates, as on a
    shift matrix.

    The residual is the iteration's own; once it is small, that of `Solution` is computed, and where this is not, the
    iteration begins again from there.

    Examples
    --------
    >>> import torch
    >>> from jacsparse.solvers import BlockBidiagonal
    >>> system = BlockBidiagonal([0.5 * torch.eye(2)] * 3, [torch.ones(1, 2)] * 4)
    >>> solution = BiCGStab().solve(system)
    >>> solution.values[0].round(decimals=3).tolist(), solution.converged
    ([[1.875, 1.875]], True)
    """

    name = "bicgstab"
    seed: int = 0

    def run(self, system: BlockTriangular, work: Work) -> Iterated:
        tolerance, limit = self.tolerance_of(system), self.limit_of(system)
        values = self.first(system, work)
        inner = _InnerProducts(system)
        shadow = self._shadow(system)
        history = list[float]()
        while True:
            after = swept(system, values, work)
            residual = {node: part - values[node] for node, part in after.items()}
            unsettled = relative_residuals(after, values) > tolerance
            # The last of a cycle's own residuals gives way to what was computed of its values.
            history[-1:] = [float(relative_residuals(after, values).max()) if system.batch else 0.0]
            if len(history) > limit or not bool(unsettled.any()):
                return values, history
            cycle = _Cycle(system, inner, shadow, values, residual)
            while len(history) <= limit and bool(unsettled.any()):
                cycle.step(unsettled, work)
                residuals = cycle.residuals()
                unsettled &= residuals > tolerance
                history.append(float(residuals.max()))
            values = cycle.values

    def _shadow(self, system: BlockTriangular) -> Vector:
        """Random numbers, the same ones for each sample."""
        generator, like = torch.Generator().manual_seed(self.seed), system.right[0]
        return {
            node: torch.randn(size, 1, generator=generator, dtype=like.dtype).to(like.device)
            for node, size in enumerate(system.sizes)
        }


class _Floating(NamedTuple):
    """Numbers for each sample with exponents of their own, because weights may be beyond the range of floats."""

    mantissa: torch.Tensor
    exponent: torch.Tensor

    def over(self, other: _Floating) -> torch.Tensor:
        """The quotient, or 0 where it is not finite: a breakdown."""
        quotient = self.mantissa / other.mantissa * torch.exp2(self.exponent - other.exponent)
        return torch.where(quotient.isfinite(), quotient, 0.0)


class _InnerProducts:
    """Inner products in which each block row counts as a multiple of its expected size."""

    def __init__(self, system: BlockTriangular) -> None:
        exponents = expected_exponents(system, bits=_BITS)
        groups: dict[int, list[int]] = {}
        for node, size in enumerate(system.sizes):
            groups.setdefault(size, []).append(node)
        # Rows of one length are stacked.
        self._groups = [nodes for size, nodes in groups.items() if size]
        self._sizes = [torch.stack([exponents[node].expand(system.batch) for node in nodes]) for nodes in self._groups]

    def of(self, x: Vector, y: Vector, order: int) -> _Floating:
        """``Σ x_k · y_k / size_k^order`` of each sample."""
        terms, powers = list[torch.Tensor](), list[torch.Tensor]()
        for nodes, sizes in zip(self._groups, self._sizes, strict=True):
            left, right = (torch.stack([vector[node] for node in nodes]).double() for vector in (x, y))
            # Squares of small gradients would vanish.
            scales = [
                part.abs().amax(dim=1, keepdim=True).log2().nan_to_num(neginf=0.0).floor() for part in (left, right)
            ]
            terms.append((times_power(left, -scales[0]) * times_power(right, -scales[1])).sum(dim=1))
            powers.append((scales[0] + scales[1]).squeeze(1) - order * sizes)
        products, power = torch.cat(terms), torch.cat(powers)
        largest = torch.where(products == 0, -torch.inf, power).amax(dim=0)
        largest = torch.where(largest.isfinite(), largest, 0.0)
        return _Floating((products * torch.exp2((power - largest).clamp(max=0))).sum(dim=0), largest)


class _Cycle:
    """The iteration from a guess and its residual on."""

    def __init__(
        self, system: BlockTriangular, inner: _InnerProducts, shadow: Vector, values: Vector, residual: Vector
    ) -> None:
        self.values, self._residual = values, residual
        self._system, self._inner, self._shadow = system, inner, shadow
        self._direction = self._product = {node: torch.zeros_like(part) for node, part in residual.items()}
        self._last: _Floating | None = None
        self._alpha = self._omega = torch.ones(1)

    def step(self, active: torch.Tensor, work: Work) -> None:
        """One iteration of the active samples."""
        projection = self._inner.of(self._shadow, self._residual, 1)
        beta = torch.zeros(1, dtype=torch.float64, device=active.device)
        if self._last is not None:
            beta = projection.over(self._last) * (self._alpha / self._omega).nan_to_num(0.0, 0.0, 0.0)
        direction = _sum(self._residual, (beta, _sum(self._direction, (-self._omega, self._product))))
        product = self._times(direction, work)
        alpha = projection.over(self._inner.of(self._shadow, product, 1)) * active
        half = _sum(self._residual, (-alpha, product))
        stabiliser = self._times(half, work)
        omega = self._inner.of(stabiliser, half, 2).over(self._inner.of(stabiliser, stabiliser, 2)) * active
        self.values = _sum(self.values, (alpha, direction), (omega, half))
        self._residual = _sum(half, (-omega, stabiliser))
        self._direction, self._product, self._last = direction, product, projection
        self._alpha, self._omega = alpha, omega

    def residuals(self) -> torch.Tensor:
        """The largest relative residual of each sample, as the iteration has it."""
        return relative_residuals(_sum(self._residual, (torch.ones(1), self.values)), self.values)

    def _times(self, vector: Vector, work: Work) -> Vector:
        """``(I - N) x`` with ``N = D⁻¹ A``."""
        with work.level():
            product = self._system.off_diagonal.apply(vector, work)
        with work.level():
            product = self._system.inverse.apply(product, work)
        return {node: part - product[node] if node in product else part for node, part in vector.items()}


def _sum(first: Vector, *terms: tuple[torch.Tensor, Vector]) -> Vector:
    """A vector and multiples of others, with a factor for each sample."""
    total = dict(first)
    for factor, vector in terms:
        factor = factor.to(next(iter(vector.values())))
        for node, part in vector.items():
            total[node] = torch.addcmul(total[node], factor, part)
    return total
