"""BiCGStab on the system scaled by its diagonal."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import numpy as np
import scipy.sparse.linalg
import torch

from .blocks import Vector, Work
from .solver import Iterated, Iteration, relative_residual, scaled_right, swept
from .systems import BlockTriangular


@dataclass(frozen=True)
class BiCGStab(Iteration):
    """SciPy's BiCGStab on ``(I - N) u = D⁻¹ c`` with ``N = D⁻¹ A`` (Naumov, equations 38 to 41).

    It begins at random numbers. From zero it breaks down at once where the right-hand side is in one block alone, as in
    back-propagation: the second residual has none of the first one's blocks, and is orthogonal to it.

    Parameters
    ----------
    tolerance, limit, guess
        As `Iteration` takes them.
    together : bool
        Whether all samples are one system, with one operator for all; else each is solved by itself.
    seed : int
        Of the random numbers.

    Notes
    -----
    Section 3.3 names block Krylov methods for the samples of a mini-batch; samples side by side in one operator share
    each pass over its patterns and shared values. Block rows that are smaller than the rounding of the largest one do
    not settle: it then stops at its limit.

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
    together: bool = True
    seed: int = 0

    def run(self, system: BlockTriangular, work: Work) -> Iterated:
        if not self.together and system.batch > 1:
            return self._sample_by_sample(system, work)
        tolerance, limit = self.tolerance_of(system), self.limit_of(system)
        right = scaled_right(system, work)
        if not system.depth:
            # The first residual would be an eigenvector, at which SciPy breaks down.
            return Iterated(right, [0.0], tolerance)
        return _solved(system, right, self._guess(system, right, work), tolerance, limit, work)

    def _sample_by_sample(self, system: BlockTriangular, work: Work) -> Iterated:
        works, parts = [Work() for _ in range(system.batch)], []
        for number, apart in enumerate(works):
            guess = None if self.guess is None else [part[number : number + 1] for part in self.guess]
            parts.append(replace(self, together=True, guess=guess).run(system.sample(number), apart))
        work.add_side_by_side(works)
        values = {node: torch.cat([part.values[node] for part in parts], dim=1) for node in system.right}
        longest = max(len(part.history) for part in parts)
        histories = [[*part.history, *[part.history[-1]] * (longest - len(part.history))] for part in parts]
        return Iterated(values, [max(each) for each in zip(*histories, strict=True)], parts[0].tolerance)

    def _guess(self, system: BlockTriangular, right: Vector, work: Work) -> Vector:
        if self.guess is not None:
            return self.first(system, work)
        generator, size = torch.Generator().manual_seed(self.seed), sum(system.sizes)
        largest = torch.stack([part.abs().amax(dim=0) for part in right.values() if len(part)]).amax(dim=0)
        return {
            node: torch.randn(part.shape, generator=generator, dtype=part.dtype).to(part.device) * (largest / size**0.5)
            for node, part in right.items()
        }


class _EndedError(Exception):
    """Ends SciPy's iteration once all block rows have settled, or it has broken down; it is no error."""


def _solved(
    system: BlockTriangular, right: Vector, guess: Vector, tolerance: float, limit: int, work: Work
) -> Iterated:
    """``(I - N) u = D⁻¹ c``, each sample divided by its largest element: SciPy's test for a breakdown is absolute."""
    nodes, like = sorted(right), next(iter(right.values()))
    lengths = [right[node].numel() for node in nodes]
    scale = torch.stack([part.abs().amax(dim=0) for part in right.values() if len(part)]).amax(dim=0)
    scale = torch.where(scale == 0, 1, scale)

    def flat(vector: Vector) -> np.ndarray:
        joint: np.ndarray = torch.cat([vector[node].flatten() for node in nodes]).cpu().numpy()
        return joint

    def parts(array: np.ndarray) -> Vector:
        pieces = torch.from_numpy(np.array(array)).to(like).split(lengths)
        return {node: piece.view(right[node].shape) for node, piece in zip(nodes, pieces, strict=True)}

    def apply(array: np.ndarray) -> np.ndarray:
        vector = parts(array)
        with work.level():
            product = system.off_diagonal.apply(vector, work)
        with work.level():
            product = system.inverse.apply(product, work)
        return flat({node: vector[node] - product[node] if node in product else vector[node] for node in nodes})

    def residual(array: np.ndarray) -> float:
        before = {node: part * scale for node, part in parts(array).items()}
        return relative_residual(swept(system, before, Work()), before)

    b, start = (flat({node: part / scale for node, part in vector.items()}) for vector in (right, guess))
    latest, history = [start], [residual(start)]

    def note(x: np.ndarray) -> None:
        if not np.isfinite(x).all():
            # Where it breaks down, SciPy divides by zero; the iterate before is the last one.
            raise _EndedError
        latest[0] = np.array(x)
        history.append(residual(x))
        if history[-1] <= tolerance:
            raise _EndedError

    operator = scipy.sparse.linalg.LinearOperator((len(b), len(b)), apply, dtype=b.dtype)
    with contextlib.suppress(_EndedError), np.errstate(divide="ignore", invalid="ignore"):
        # The tolerance is one of each block row, which SciPy's, of the whole, is not.
        scipy.sparse.linalg.bicgstab(operator, b, x0=start, rtol=0.0, atol=0.0, maxiter=limit, callback=note)
    return Iterated({node: part * scale for node, part in parts(latest[0]).items()}, history, tolerance)
