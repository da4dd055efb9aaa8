"""LU factors of banded matrices with partial pivoting: LAPACK's for a sample alone, and a kernel for many.

Rows and columns are ordered alike by reverse Cuthill–McKee, where that narrows the band, which extends `lower` places
below the diagonal and `upper` above. Exchanges of rows widen the part above to ``lower + upper``. For many samples, a
kernel takes `LANES` of them together, of which each has pivots of its own: element ``(i, j)`` of its samples is at
``[i, j - i + lower]`` of a block's rows. The operations are those of LAPACK's ``gbtf2`` and ``gbtrs``.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse.csgraph
import torch
from scipy.linalg import get_lapack_funcs

from ..codegen import Variable, emitted
from ..patterns import Full, Pattern
from ..runtime import frozen, kernel, run_rows
from .factors import FactorPlan, Factors, singular

#: Samples that the kernel factors together.
LANES = 16


@emitted()
def _eliminate(e, rows, at, step, below, right, chosen, at_chosen):
    """Choose the pivots of a column, exchange rows, and subtract multiples of the pivots' rows from those below.

    The column's diagonal is at `at`; the element below is `step` further, and `right` elements follow it in its row.
    """
    lanes = LANES
    best, place = Variable(e.apply("fabs", rows[at, lanes])), Variable(e.value(0.0, rows.element).spread(lanes))
    with e.each(1, below + 1) as i:
        size = e.apply("fabs", rows[at + i * step, lanes])
        larger = size > best.value
        best.value = e.select(larger, size, best.value)
        place.value = e.select(larger, i.to(rows.element).spread(lanes), place.value)
    chosen[at_chosen] = place.value
    with e.each(1, below + 1) as i:
        exchanged = place.value.equals(i.to(rows.element).spread(lanes))
        with e.when(exchanged.any()), e.each(0, right + 1) as d:
            upper, lower = at + d * lanes, at + i * step + d * lanes
            one, other = rows[upper, lanes], rows[lower, lanes]
            rows[upper] = e.select(exchanged, other, one)
            rows[lower] = e.select(exchanged, one, other)
    inverse = 1.0 / rows[at, lanes]
    with e.each(1, below + 1) as i:
        row = at + i * step
        multiple = rows[row, lanes] * inverse
        rows[row] = multiple
        with e.each(1, right + 1) as d:
            rows[row + d * lanes] = rows[row + d * lanes, lanes] - multiple * rows[at + d * lanes, lanes]


@kernel
def _factor(first, last, values, places, lower, upper, matrices, pivots, failed):
    batch, n, width = values.shape[1], matrices.shape[1], matrices.shape[2]
    for block in range(first, last):
        rows, chosen, begin = matrices[block].reshape(-1), pivots[block].reshape(-1), block * LANES
        samples = min(LANES, batch - begin)
        rows[:] = 0
        for entry in range(len(places)):
            at = places[entry] * LANES
            for lane in range(samples):
                rows[at + lane] = values[entry, begin + lane]
        for lane in range(samples, LANES):
            for row in range(n):
                rows[(row * width + lower) * LANES + lane] = 1
        for j in range(n):
            at, below, right = (j * width + lower) * LANES, min(lower, n - 1 - j), min(lower + upper, n - 1 - j)
            _eliminate(rows, at, (width - 1) * LANES, below, right, chosen, j * LANES)
            for lane in range(LANES):
                failed[begin + lane] |= rows[at + lane] == 0


@kernel
def _solve(first, last, matrices, pivots, lower, upper, transposed, order, b, x):
    batch, n, columns, width = b.shape[0], b.shape[1], b.shape[2], matrices.shape[2]
    y, total = np.zeros((n, LANES), b.dtype), np.empty(LANES, b.dtype)
    for task in range(first, last):
        block, column = task // columns, task % columns
        rows, begin = matrices[block].reshape(n * width, LANES), block * LANES
        samples = min(LANES, batch - begin)
        for i in range(n):
            for lane in range(samples):
                y[i, lane] = b[begin + lane, order[i], column]
        if transposed:
            for j in range(n):
                total[:] = y[j]
                for d in range(1, min(lower + upper, j) + 1):
                    for lane in range(LANES):
                        total[lane] -= rows[(j - d) * width + lower + d, lane] * y[j - d, lane]
                for lane in range(LANES):
                    y[j, lane] = total[lane] / rows[j * width + lower, lane]
        for step in range(n):
            j = n - 1 - step if transposed else step
            chosen, at = pivots[block, j], j * width + lower
            if transposed:
                for i in range(1, min(lower, n - 1 - j) + 1):
                    for lane in range(LANES):
                        y[j, lane] -= rows[at + i * (width - 1), lane] * y[j + i, lane]
            for lane in range(LANES):
                p = j + int(chosen[lane])
                y[j, lane], y[p, lane] = y[p, lane], y[j, lane]
            if not transposed:
                for i in range(1, min(lower, n - 1 - j) + 1):
                    for lane in range(LANES):
                        y[j + i, lane] -= rows[at + i * (width - 1), lane] * y[j, lane]
        if not transposed:
            for j in range(n - 1, -1, -1):
                total[:] = y[j]
                for d in range(1, min(lower + upper, n - 1 - j) + 1):
                    for lane in range(LANES):
                        total[lane] -= rows[j * width + lower + d, lane] * y[j + d, lane]
                for lane in range(LANES):
                    y[j, lane] = total[lane] / rows[j * width + lower, lane]
        for i in range(n):
            for lane in range(samples):
                x[begin + lane, order[i], column] = y[i, lane]


class _LaneFactors(Factors):
    """Factors by the kernel."""

    def __init__(self, plan: Banded, values: torch.Tensor) -> None:
        n, self._samples, self._plan = plan.patterns[0].shape[0], values.shape[1], plan
        blocks, dtype = -(-self._samples // LANES), values.numpy().dtype
        self._matrices = np.empty((blocks, n, plan.width, LANES), dtype)
        self._pivots, failed = np.empty((blocks, n, LANES), dtype), np.zeros(blocks * LANES, bool)
        band = plan.lower, plan.upper
        # A block's work is that of one row of a vector of lanes.
        work = np.arange(blocks + 1) * n * (1 + plan.lower) * plan.width
        places = (values.numpy(), plan.by_rows)
        run_rows(_factor, work, *places, *band, self._matrices, self._pivots, failed, lanes=LANES)
        if failed.any():
            raise singular(int(failed.argmax()))

    def solve(self, b: torch.Tensor, transposed: bool) -> torch.Tensor:
        plan, x, columns = self._plan, torch.empty_like(b), b.shape[2]
        work = np.arange(len(self._matrices) * columns + 1) * self._matrices.shape[1] * plan.width
        band = plan.lower, plan.upper, transposed
        factors = self._matrices, self._pivots
        run_rows(_solve, work, *factors, *band, plan.order, b.numpy(), x.numpy(), lanes=LANES)
        return x

    def logdet(self) -> torch.Tensor:
        logs = np.log(np.abs(self._matrices[:, :, self._plan.lower])).sum(1)
        return torch.from_numpy(logs.reshape(-1)[: self._samples])


class _LapackFactors(Factors):
    """Factors by LAPACK, one sample after the other."""

    def __init__(self, plan: Banded, values: torch.Tensor) -> None:
        self._plan, n = plan, plan.patterns[0].shape[0]
        bands = np.zeros((values.shape[1], n * plan.width), values.numpy().dtype)
        bands[:, plan.by_columns] = values.numpy().T
        factor, self._substitute = get_lapack_funcs(("gbtrf", "gbtrs"), (bands,))
        self._factors = []
        for sample, band in enumerate(bands):
            lu, pivots, info = factor(band.reshape(n, plan.width).T, plan.lower, plan.upper, overwrite_ab=True)
            if info:
                raise singular(sample)
            self._factors.append((lu, pivots))

    def solve(self, b: torch.Tensor, transposed: bool) -> torch.Tensor:
        plan, x = self._plan, np.empty_like(b.numpy())
        for sample, (lu, pivots) in enumerate(self._factors):
            sides = b[sample].numpy()[plan.order]
            x[sample, plan.order] = self._substitute(lu, plan.lower, plan.upper, sides, pivots, trans=int(transposed))[
                0
            ]
        return torch.from_numpy(x)

    def logdet(self) -> torch.Tensor:
        at = self._plan.lower + self._plan.upper
        return torch.tensor([np.log(np.abs(lu[at])).sum() for lu, _ in self._factors])


class Banded(FactorPlan):
    """LU factors within a band."""

    name = "banded"

    def __init__(self, pattern: Pattern) -> None:
        self.patterns, n = (pattern,), pattern.shape[0]
        rows, columns = pattern.rows.astype(np.int64), pattern.indices.astype(np.int64)
        bands = []
        for order in _orders(pattern):
            places = np.empty(n, np.int64)
            places[order] = np.arange(n)
            i, j = places[rows], places[columns]
            bands.append((max((i - j).max(initial=0), 0), max((j - i).max(initial=0), 0), order, i, j))
        self.lower, self.upper, order, i, j = min(bands, key=lambda band: band[0] * (band[0] + band[1]))
        self.lower, self.upper = int(self.lower), int(self.upper)
        self.width = 2 * self.lower + self.upper + 1
        self.order = frozen(order)
        self.by_rows = frozen(i * self.width + j - i + self.lower)
        self.by_columns = frozen(j * self.width + i - j + self.lower + self.upper)
        self.nbytes = self.order.nbytes + self.by_rows.nbytes + self.by_columns.nbytes
        left = np.arange(n)
        self._work = int((np.minimum(left, self.lower) * np.minimum(left, self.lower + self.upper)).sum())

    def cost(self, samples: int, solutions: int) -> float:
        return min(self._lapack_cost(samples, solutions), self._lane_cost(samples, solutions))

    def _lapack_cost(self, samples: int, solutions: int = 1) -> float:
        n = len(self.order)
        return 5 + samples * (14 + 0.06 * n + 8e-5 * self._work + solutions * (2 + 0.00033 * n * self.width))

    def _lane_cost(self, samples: int, solutions: int = 1) -> float:
        n = len(self.order)
        each = 0.006 * n + 0.0007 * self._work + solutions * n * (0.005 + 0.0005 * self.width)
        return 20 + -(-samples // LANES) * LANES * each

    def factors(self, values: torch.Tensor) -> Factors:
        samples = values.shape[1]
        return (_LaneFactors if self._lane_cost(samples) < self._lapack_cost(samples) else _LapackFactors)(self, values)

    def __str__(self) -> str:
        return f"banded ({self.lower} below and {self.upper} above the diagonal)"


def _orders(pattern: Pattern) -> list[np.ndarray]:
    """Orders of rows and columns: as they are, and reverse Cuthill–McKee."""
    natural = np.arange(pattern.shape[0])
    if isinstance(pattern.structure, Full) or not pattern.nnz:
        return [natural]
    graph = pattern.to_scipy(np.ones(pattern.nnz, np.int8))
    symmetric = scipy.sparse.csr_array(graph + graph.T)
    return [natural, scipy.sparse.csgraph.reverse_cuthill_mckee(symmetric, symmetric_mode=True)]
