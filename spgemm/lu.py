"""Square systems by sparse LU factors: SciPy's SuperLU, on the CPU.

SuperLU factors compressed columns, and the CSR arrays of `J` are the columns of Jᵀ. So it factors Jᵀ, and solves with
`J` by the transposed factors. The order of its columns, which are the rows of `J`, decides how many entries the factors
have. It is found from the pattern alone, so that all samples and later calls share it, in one of two ways:

- COLAMD limits the entries whatever the pivots are.
- Minimum degree of Jᵀ + J supposes pivots on the diagonal, and then leaves 2 to 50 times fewer entries in implicit
  steps of discretised equations, in normal equations and in networks. It is taken for symmetric patterns whose
  diagonal, after scaling, is not small; an element of the diagonal is then the pivot unless another is 10 times larger.
  UMFPACK calls this its symmetric strategy (T. A. Davis, ACM Transactions on Mathematical Software 30, 2004, pages 165
  to 195). SuperLU's own symmetric mode goes with it: without that, its supernodes follow the columns of J Jᵀ, and the
  factors of a network have three times as many entries.

Rows and columns are exchanged alike, so that the diagonal stays one.

Other factors were measured, by the wheels of KVXOPT, and are no dependency: to factor again a network of 20,000
unknowns, a grid of 16,384 and normal equations of 23,671, KLU takes 1.1 to 2.9 times as long as SuperLU, UMFPACK 0.8 to
15 times, and CHOLMOD 0.3 times, of the normal equations alone. scikit-sparse and scikit-umfpack have no wheels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
import torch
from scipy.sparse.linalg import SuperLU, spilu, splu

from ..patterns import Pattern
from ..runtime import frozen
from .factors import FactorPlan, Factors, singular
from .plan_cache import PLAN_CACHE

#: An element of the diagonal is a pivot where it is at least this share of the largest in its column.
_LEAST_PIVOT = 0.1
#: SuperLU's options for pivots on the diagonal.
SYMMETRIC: dict[str, Any] = {
    "permc_spec": "MMD_AT_PLUS_A",
    "diag_pivot_thresh": _LEAST_PIVOT,
    "options": {"SymmetricMode": True},
}


class Ordering:
    """The rows of a square pattern in the order of their elimination; SuperLU tells it after an incomplete elimination.

    Attributes
    ----------
    patterns : tuple of Pattern
        The pattern alone, (n, n).
    rows : ndarray of int, (n,)
        The rows in their order.

    Parameters
    ----------
    pattern : Pattern
        That of a square Jacobian.
    symmetric : bool
        Whether pivots are expected on the diagonal of a symmetric pattern.
    """

    def __init__(self, pattern: Pattern, symmetric: bool) -> None:
        self.patterns, size = (pattern,), pattern.shape[0]
        options = SYMMETRIC if symmetric else {"permc_spec": "COLAMD"}
        # The order is the pattern's. Of a diagonal that is larger than all else, the incomplete factors are diagonal.
        diagonal = scipy.sparse.eye_array(size, format="csc")
        columns = _columns(np.full(pattern.nnz, 0.5 / max(1, size)), pattern.indices, pattern.indptr) + diagonal
        self.rows = frozen(np.argsort(spilu(columns, drop_tol=1.0, fill_factor=1.0, **options).perm_c))
        self._options = {**options, "permc_spec": "NATURAL"}
        ordered = pattern.to_scipy(np.arange(pattern.nnz))[self.rows][:, self.rows]
        ordered.sort_indices()
        self._places, self._indices, self._indptr = map(frozen, (ordered.data, ordered.indices, ordered.indptr))

    @property
    def nbytes(self) -> int:
        """Bytes of the index arrays, without those of the pattern."""
        return sum(array.nbytes for array in (self.rows, self._places, self._indices, self._indptr))

    def factors(self, values: np.ndarray) -> SuperLU:
        """The factors of the transposed matrix with these values ``(nnz,)``, its rows and columns in this order."""
        columns = _columns(values[self._places], self._indices, self._indptr)
        return splu(columns, **self._options)


def _columns(*arrays: np.ndarray) -> scipy.sparse.csc_array:
    size = len(arrays[2]) - 1
    return scipy.sparse.csc_array(arrays, shape=(size, size))


def _symmetric_diagonal(pattern: Pattern) -> np.ndarray | None:
    """The place of each element of the diagonal; None where one is no entry, or the pattern is not symmetric."""
    diagonal = np.flatnonzero(pattern.rows == pattern.indices)
    return diagonal if len(diagonal) == pattern.shape[0] and pattern == pattern.T else None


def _scaled(pattern: Pattern, diagonal: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Powers of 2 for rows and columns, after which any element of the diagonal may be the first pivot; scaled values.

    They bring the diagonal to [0.5, 2) without rounding. None where no scale does it.
    """
    if not values[diagonal].all():
        return None
    exponents = np.frexp(values[diagonal])[1] // 2
    scale = np.ldexp(np.ones_like(values, shape=exponents.shape), -exponents)
    scaled = values * np.repeat(scale, np.diff(pattern.indptr))
    scaled *= scale[pattern.indices]
    # Not so where one is NaN.
    return (scale, scaled) if max(scaled.max(initial=0), -scaled.min(initial=0)) <= 0.5 / _LEAST_PIVOT else None


class _SparseFactors(Factors):
    """The LU factors of each sample; `diagonal` are the places of the diagonal in a symmetric pattern."""

    def __init__(self, pattern: Pattern, diagonal: np.ndarray | None, values: np.ndarray) -> None:
        self._samples = [_Sample(pattern, diagonal, each, number) for number, each in enumerate(values)]

    def solve(self, b: torch.Tensor, transposed: bool) -> torch.Tensor:
        x = torch.empty_like(b)
        for sample, each in enumerate(self._samples):
            x[sample] = torch.from_numpy(each.solve(b[sample].numpy(), transposed))
        return x

    def logdet(self) -> torch.Tensor:
        return torch.tensor([each.logdet() for each in self._samples])


class _Sample:
    """The LU factors of one sample."""

    def __init__(self, pattern: Pattern, diagonal: np.ndarray | None, values: np.ndarray, sample: int) -> None:
        self._scale: np.ndarray | None = None
        scaled = None if diagonal is None else _scaled(pattern, diagonal, values)
        symmetric = scaled is not None
        if scaled is not None:
            self._scale, values = scaled
        ordering = PLAN_CACHE.get(("elimination", pattern.digest, symmetric), lambda: Ordering(pattern, symmetric))
        try:
            self._rows, self._factors = ordering.rows, ordering.factors(values)
        except RuntimeError as error:
            raise singular(sample, str(error)) from error

    def solve(self, b: np.ndarray, transposed: bool) -> np.ndarray:
        """``x`` with ``J x = b``, or ``Jᵀ x = b``, for each column of `b` ``(n, columns)``."""
        if self._scale is None:
            return self._solve(b, transposed)
        scale = self._scale[:, None]
        return scale * self._solve(scale * b, transposed)

    def _solve(self, b: np.ndarray, transposed: bool) -> np.ndarray:
        x = np.empty_like(b)
        x[self._rows] = self._factors.solve(b[self._rows], trans="N" if transposed else "T")
        return x

    def logdet(self) -> np.floating:
        logs = np.log(np.abs(self._factors.U.diagonal())).sum()
        return logs if self._scale is None else logs - 2 * np.log(self._scale).sum()  # type: ignore[no-any-return]


class SparseLU(FactorPlan):
    """Sparse LU factors by SciPy's SuperLU, one sample after the other on one thread."""

    name = "superlu"

    def __init__(self, pattern: Pattern) -> None:
        self.patterns, self._diagonal = (pattern,), _symmetric_diagonal(pattern)
        self.nbytes = 0 if self._diagonal is None else self._diagonal.nbytes

    def cost(self, samples: int, solutions: int) -> float:
        # Measured on grids; factors of patterns that fill in take longer.
        return 10 + samples * (30 + 3 * solutions + self.patterns[0].nnz * (0.19 + 0.0055 * solutions))

    def factors(self, values: torch.Tensor) -> Factors:
        return _SparseFactors(self.patterns[0], self._diagonal, np.ascontiguousarray(values.numpy().T))
