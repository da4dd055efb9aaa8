"""Functions of matrices: determinants, factorisations, exponentials and pseudoinverses.

Each result of a matrix depends on all of its elements. Values are those of the operators' own derivatives, whose
backward passes are products and solutions of linear systems.
"""

from __future__ import annotations

import math

import numpy as np
import scipy.sparse

from .blocks import block_pattern, equal_rows
from .layout import Labels
from .pattern import Pattern
from .rules import Call, Rule, Use, add_rule


@add_rule(
    *("aten._linalg_det", "aten._linalg_slogdet", "aten.linalg_matrix_exp", "aten.linalg_pinv"),
    *("aten._linalg_eigh", "aten._linalg_svd", "aten.linalg_lu_factor_ex", "aten.linalg_qr"),
)
class _MatrixFunctionRule(Rule):
    """A function of each matrix, ``(..., rows, columns)``, by itself."""

    several = True
    all_results = True

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        ((name, shape),) = ((name, use.arguments[name].shape) for name in use.layouts)
        lead = tuple(range(len(shape) - 2))
        mixed = tuple(("mixed", axis) for axis in range(len(lead), use.output.ndim))
        return {name: (*lead, "row", "column")}, (*lead, *mixed)

    def pattern(self, call: Call) -> Pattern:
        *lead, rows, columns = call.in_shape
        count = math.prod(lead)
        return block_pattern(count, call.out_size // max(1, count), rows * columns)


@add_rule("aten.linalg_cholesky_ex")
class _CholeskyRule(_MatrixFunctionRule):
    """The triangular factor of a symmetric matrix: each element depends on those above it and to the left of it."""

    def pattern(self, call: Call) -> Pattern:
        *lead, size, _ = call.in_shape
        row, column = np.indices((size, size)).reshape(2, -1)
        low, high = np.minimum(row, column), np.maximum(row, column)
        inside = row <= column if call["upper"] else row >= column
        # PyTorch's derivative is by both elements of a pair, of which the operator reads one.
        block = inside[:, None] & (high[None] <= high[:, None]) & (low[None] <= low[:, None])
        copies = scipy.sparse.eye_array(math.prod(lead))
        return Pattern.from_scipy(scipy.sparse.kron(copies, scipy.sparse.csr_array(block), format="csr"))


@add_rule("aten.linalg_lu_solve")
class _FactorSolveRule(Rule):
    """The solution of a linear system by the factors of its matrix: each column of it, or each row, by itself."""

    several = True
    reads = ()

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        lead = tuple(range(use.output.ndim - 2))
        right, out = ("row", "line"), ("mixed", "line")
        if not use.arguments["left"]:
            right, out = right[::-1], out[::-1]
        labels = {"LU": (*lead, "row", "column"), "pivots": (*lead, "row"), "B": (*lead, *right)}
        return {name: axes[len(axes) - use.rank(name) :] for name, axes in labels.items()}, (*lead, *out)

    def pattern(self, call: Call) -> Pattern:
        *lead, rows, columns = call.out_shape
        count = math.prod(lead)
        if list(call.in_shape[:-2]) != lead:
            return self._broadcast(call)
        if call.argument == "LU":
            return block_pattern(count, rows * columns, math.prod(call.in_shape[-2:]))
        if call["left"]:
            return block_pattern(count, rows, rows, columns)
        return block_pattern(count * rows, columns, columns)

    def _broadcast(self, call: Call) -> Pattern:
        """The pattern where several systems have one matrix, or one right side."""
        places = np.arange(call.in_size).reshape(call.in_shape)
        if call.argument == "LU":
            terms = places.reshape(*call.in_shape[:-2], 1, 1, -1)
        elif call["left"]:
            terms = places.swapaxes(-1, -2)[..., None, :, :]
        else:
            terms = places[..., :, None, :]
        return equal_rows(np.broadcast_to(terms, (*call.out_shape, terms.shape[-1])), call.in_size)
