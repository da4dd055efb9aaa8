"""What a matrix with a known pattern offers to who solves systems with it."""

from __future__ import annotations

from typing import Any

import torch
from scipy.sparse.linalg import LinearOperator

from .factorization import Factorization, factorize, solve
from .preconditioner import preconditioner
from .sparse_matrix import SparseMatrix


class Solvable(SparseMatrix):
    """A sparse matrix with the methods that solve systems with it."""

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        """``x`` with ``J x = b`` in each sample: ``factorize().solve(b)``.

        Parameters
        ----------
        b : Tensor
            The right-hand sides, with the dtype and device of the values:

            ======================  ==============================================  ==================
            shape                   one sample, or values that all samples share    several samples
            ======================  ==============================================  ==================
            ``(n,)``                one right-hand side                             refused
            ``(n, k)``              `k` right-hand sides, as ``J @ B`` has them     refused
            ``(batch, n)``          one for each sample                             one for each
            ``(batch, n, k)``       `k` for each sample                             `k` for each
            ======================  ==============================================  ==================

            In the place of ``n`` alone may be the shape of one sample, as of a grid. ``(n, n)`` is ambiguous where the
            Jacobian has one sample, and refused: ``b[None]`` has columns, and ``b[:, :, None]`` samples.

        Returns
        -------
        Tensor
            The solutions, in the shape of `b`.

        Raises
        ------
        TypeError, ValueError
            Where the Jacobian is not square or not on the CPU, `b` does not fit, or a sample is exactly singular or not
            finite; the message names the sample. A matrix that is nearly singular raises nothing, and its solution is
            as inaccurate as its condition number is large.

        Notes
        -----
        Where the values or `b` require grad, the solution is part of autograd, to any order: the adjoint system is
        solved with the same factors. `Factorization` says how they are made. ``J.T.solve(b)`` solves with the
        transposed Jacobian.

        Examples
        --------
        >>> import torch, jacsparse
        >>> pattern = jacsparse.Pattern((2, 2), [0, 1, 3], [0, 0, 1])
        >>> J = jacsparse.SparseJacobian(pattern, torch.tensor([[2.0], [1.0], [4.0]]))
        >>> J.solve(torch.tensor([[2.0, 9.0], [4.0, 2.0], [6.0, 3.0]])).tolist()
        [[1.0, 2.0], [2.0, 0.0], [3.0, 0.0]]
        """
        return solve(self.pattern, self.values, b)

    def factorize(self, method: str = "auto") -> Factorization:
        """The factors of each sample, for many solutions; `Factorization` has the methods and examples.

        Raises
        ------
        ValueError
            As `solve`.
        """
        return factorize(self.pattern, self.values, method)

    def preconditioner(
        self, kind: str, sample: int | None = None, *, block_size: int | None = None, **options: Any
    ) -> LinearOperator:
        """An approximate inverse of one sample's Jacobian, as `M` of SciPy's iterative solvers.

        Parameters
        ----------
        kind : str
            ``"jacobi"`` divides by the diagonal; ``"block_jacobi"`` solves with the blocks of `block_size` rows along
            it; ``"ilu"`` with incomplete LU factors, as `scipy.sparse.linalg.spilu` makes them.

            The first two are of use where blocks along the diagonal outweigh the rest of their rows, as in time steps
            that are short for diffusion between points. Where a block is nearly singular, as of a reaction that grows,
            hundreds of iterations are needed, and SciPy's ``gmres`` stagnates, for it restarts after 20: take
            ``"ilu"``, or pass it ``restart=200``.
        sample : int, optional
            The sample; optional where there is only one.
        block_size : int, optional
            The size of blocks; the last one may be smaller.
        **options
            Those of ``spilu``, as ``drop_tol`` and ``fill_factor``. Without ``permc_spec``, ``diag_pivot_thresh`` and
            ``options``, a pattern that is at least half symmetric, with a diagonal, is factored in the order of minimum
            degree, which takes less than half the time and memory of ``spilu``'s own.

        Examples
        --------
        >>> import numpy, torch, jacsparse
        >>> pattern = jacsparse.Pattern((2, 2), [0, 1, 3], [0, 0, 1])
        >>> J = jacsparse.SparseJacobian(pattern, torch.tensor([[2.0], [1.0], [4.0]]))
        >>> J.preconditioner("jacobi") @ numpy.ones(2, numpy.float32)
        array([0.5 , 0.25], dtype=float32)
        """
        return preconditioner(self.pattern, self.to_scipy(sample), kind, block_size, options)
