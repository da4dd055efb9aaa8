"""Systems with a Jacobian: by our factors, SciPy's and ``torch.linalg.solve``, and large ones by GMRES."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import scipy.sparse.linalg
import torch

import jacsparse

from ._context import Context
from ._experiment import Grid
from ._problems import reacting_fields
from ._rows import Group, Row

_OURS = "solve"
_DENSE, _SUPERLU = "torch.linalg.solve", "SciPy's splu, a sample at a time"
_GMRES = 'SciPy\'s GMRES with J.preconditioner("ilu")'


@dataclass(frozen=True)
class Solving(Grid):
    """Batches of small systems, tridiagonal ones, kept factors of grids and preconditioned GMRES, in float64."""

    #: Sizes and numbers of dense systems.
    batches: tuple[tuple[int, int], ...] = ((3, 1000), (8, 1000), (64, 1000))
    #: Sizes and numbers of tridiagonal systems.
    lines: tuple[tuple[int, int], ...] = ((1000, 256), (2048, 1))
    #: Points on a side of grids whose factors are kept.
    grids: tuple[int, ...] = (32, 64)
    #: Points on a side of grids with three fields, for GMRES.
    fields: tuple[int, ...] = (128, 256)
    #: The largest of these for sparse factors.
    most: int = 128

    name = "solving"
    title = "Systems with a sparse Jacobian"
    source = "SciPy's SuperLU and GMRES, and torch.linalg"
    single_thread = True

    def cases(self, context: Context) -> Iterable[Callable[[Context], list[Row]]]:
        yield from (partial(_batch, n, samples) for n, samples in self.batches)
        yield from (partial(_lines, n, samples) for n, samples in self.lines)
        yield from (partial(_kept, points) for points in self.grids)
        yield from (partial(_iterative, points, points <= self.most) for points in self.fields)

    def measure(self, case: Callable[[Context], list[Row]], context: Context) -> list[Row]:
        return case(context)


def _random(pattern: jacsparse.Pattern, samples: int, diagonal: float) -> jacsparse.SparseJacobian:
    """Drawn values in [-1, 1] and a diagonal."""
    values = torch.rand(pattern.nnz, samples, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    values[torch.from_numpy(pattern.rows == pattern.indices)] = diagonal
    return jacsparse.SparseJacobian(pattern, values)


def _line(points: int) -> scipy.sparse.dia_array:
    return scipy.sparse.diags_array(np.ones((3, points)), offsets=(-1, 0, 1), shape=(points, points))


def _batch(n: int, samples: int, context: Context) -> list[Row]:
    rows = Group(f"dense, {n} × {n}, {samples:,} samples")
    J = _random(jacsparse.Pattern((n, n), np.arange(n + 1) * n, np.tile(np.arange(n), n)), samples, float(n))
    matrices, b = J.values.T.reshape(samples, n, n).contiguous(), torch.ones(samples, n, dtype=torch.float64)
    ways = {_OURS: lambda: J.solve(b), _DENSE: lambda: torch.linalg.solve(matrices, b)}
    rows.in_turns(context, ways, role={_DENSE: "peer"}, note={_OURS: f"{J.factorize()}"})
    rows.compare(f"ours / {_DENSE}", _OURS, _DENSE, at=_OURS, at_most=1.5)
    return rows.rows()


def _lines(n: int, samples: int, context: Context) -> list[Row]:
    rows = Group(f"tridiagonal, {n} × {n}, " + (f"{samples:,} samples" if samples > 1 else "one sample"))
    J = _random(jacsparse.Pattern.from_scipy(_line(n)), samples, 3.0)
    matrices, b = [J.to_scipy(sample).tocsc() for sample in range(samples)], torch.ones(samples, n, dtype=torch.float64)

    def by_superlu() -> None:
        for matrix, side in zip(matrices, b.numpy(), strict=True):
            scipy.sparse.linalg.splu(matrix).solve(side)

    ways = {_OURS: lambda: J.solve(b), _SUPERLU: by_superlu}
    rows.in_turns(context, ways, role={_SUPERLU: "peer"}, note={_OURS: f"{J.factorize()}"})
    rows.compare(f"{_SUPERLU} / ours", _SUPERLU, _OURS, at_least=5.0 if samples > 16 else None)
    return rows.rows()


def _kept(points: int, context: Context) -> list[Row]:
    """A diffusion with five points: its factors, new values with a known pattern, and solutions with kept factors."""
    rows = Group(f"grid of {points} × {points} points")
    J = _random(jacsparse.Pattern.from_scipy(scipy.sparse.kronsum(_line(points), _line(points))), 1, 8.0)
    matrix, b = J.to_scipy().tocsc(), torch.ones(points**2, dtype=torch.float64)
    factors, kept = J.factorize(), scipy.sparse.linalg.splu(matrix)
    ways = {
        "solve with kept factors": lambda: factors.solve(b),
        "SuperLU's own solve": lambda: kept.solve(b.numpy()),
        "refactorize": lambda: factors.refactorize(J.values),
        "SciPy's splu": lambda: scipy.sparse.linalg.splu(matrix),
    }
    peers = dict.fromkeys(list(ways)[1::2], "peer")
    rows.in_turns(context, ways, role=peers, note={"refactorize": f"{factors}"})
    ours, theirs, again, new = ways
    rows.compare("ours / SuperLU's own", ours, theirs, at=ours, at_most=1.2)
    rows.compare("refactorize / splu", again, new, at=again, at_most=0.8)
    return rows.rows()


def _iterative(points: int, is_factored: bool, context: Context) -> list[Row]:
    rows = Group(f"{3 * points**2:,} unknowns: three fields, {points} × {points} points")
    # An implicit step of a fast reaction.
    change, start = reacting_fields(points, 1e4)
    J, right = jacsparse.jacobian(lambda u: u - 0.01 * change(u), start), change(start).flatten().numpy()
    matrix = J.to_scipy()
    notes: dict[str, str] = {}

    def gmres() -> None:
        residuals: list[float] = []
        options = {"rtol": 1e-8, "callback": residuals.append, "callback_type": "pr_norm"}
        _, failed = scipy.sparse.linalg.gmres(matrix, right, M=J.preconditioner("ilu"), **options)
        notes[_GMRES] = f"{len(residuals)} iterations{', without convergence' if failed else ''}"

    def direct() -> None:
        factors = scipy.sparse.linalg.splu(matrix.tocsc())
        factors.solve(right)
        notes[_SUPERLU] = f"{factors.nnz / matrix.nnz:.0f} times as many entries as the matrix"

    ways = {_GMRES: gmres, _SUPERLU: direct} if is_factored else {_GMRES: gmres}
    rows.in_turns(context, ways, role={_SUPERLU: "peer"}, note=notes)
    rows.compare("splu / GMRES", _SUPERLU, _GMRES)
    if not is_factored:
        rows.missing(_SUPERLU, "its factors take a minute and more than a gigabyte", role="peer")
    return rows.rows()
