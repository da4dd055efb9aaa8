"""The Jacobian of a cell's step by the state before it.

Gates are products with the recurrent weights; all else that a step computes stays at one place of the state. So an
element of the Jacobian is a sum over the gates: each adds a factor of the row times an element of the gate's recurrent
weight. Most cells add diagonal matrices. The pattern is the union of the gates' weights and the diagonals: full with
full weights, and as sparse as pruned ones (thesis, equation 4.4; its last line is the transposed Jacobian).
"""

from __future__ import annotations

import functools

import numpy as np
import scipy.sparse
import torch
from torch.nn import functional

from ...patterns import Full, Pattern
from ..sequences import Sequences, index
from .cell import Cell, Saved, Weights


class StepJacobian:
    """The Jacobians of a cell's steps, ``∂state_t/∂state_{t-1}``, which have one pattern.

    Parameters
    ----------
    cell : Cell
        The cell.
    weights : Weights
        The layer's; recurrent weights that are zero are left out.

    Raises
    ------
    ValueError
        Where the cell has no `terms`.

    Examples
    --------
    >>> from jacsparse.recurrence import CELLS
    >>> StepJacobian(CELLS["GRU"], Weights(torch.zeros(6, 3), torch.zeros(6, 2))).pattern.indices
    array([0, 1], dtype=int32)
    """

    def __init__(self, cell: Cell, weights: Weights) -> None:
        if not cell.terms:
            raise ValueError(
                f"the pattern of a step's Jacobian of the cell {cell.mode} is not known; list its `terms`, or use the "
                "schedule blelloch"
            )
        self.cell, self.weights = cell, weights

    @functools.cached_property
    def pattern(self) -> Pattern:
        """``(states · size, states · size)``."""
        cell, size = self.cell, self.weights.size
        gates = (self.weights.hidden != 0).cpu().numpy().reshape(cell.gates, size, size)
        # The axes are vectors of the state after, rows of each, vectors of the state before, columns of each.
        entries = np.zeros((cell.states, size, cell.states, size), dtype=np.bool_)
        for vector, terms in enumerate(cell.terms):
            entries[vector, :, 0] = gates[list(terms.gates)].any(axis=0)
            for before in terms.states:
                entries[vector, :, before] |= np.eye(size, dtype=np.bool_)
        matrix = entries.reshape(cell.states * size, cell.states * size)
        return Pattern.of(Full(*matrix.shape)) if matrix.all() else Pattern.from_scipy(scipy.sparse.csr_array(matrix))

    def values(self, sequences: Sequences, direction: int, x: torch.Tensor, saved: Saved) -> torch.Tensor:
        """Values of the Jacobians of a forward pass, ``(nnz, rows)``, in the weights' dtype.

        Parameters
        ----------
        sequences : Sequences
            Which rows are whose.
        direction : int
            1, or -1 where the steps run from each sample's end.
        x : Tensor, (rows, features)
            The layer's input.
        saved : Saved
            The states.

        Raises
        ------
        ValueError
            Where the cell's `terms` leave out what a step depends on.
        """
        cell, weights, size = self.cell, self.weights, self.weights.size
        before = cell.states_before(saved, sequences, direction).to(weights.hidden.dtype)
        input_projection = functional.linear(x.to(before.dtype), weights.input, weights.bias)
        recurrent_projection = functional.linear(before[:, :size], weights.hidden, weights.hidden_bias)
        gates = weights.hidden.reshape(cell.gates, size, size)
        rows, columns = (index(entries.astype(np.int64), x) for entries in (self.pattern.rows, self.pattern.indices))
        values = before.new_zeros(self.pattern.nnz, len(before))
        for vector, coefficients in enumerate(cell.coefficients(input_projection, recurrent_projection, before)):
            factors, diagonals = (
                part.reshape(len(part), count, size)
                for part, count in zip(coefficients, (cell.gates, cell.states), strict=True)
            )
            terms = cell.terms[vector]
            self._check(vector, terms.gates, "gate", factors)
            self._check(vector, terms.states, "vector of the state before", diagonals)
            here = rows // max(1, size) == vector
            at = torch.nonzero(here & (columns < size)).flatten()
            row, column = rows[at] - vector * size, columns[at]
            for gate in terms.gates:
                values[at] += (factors[:, gate, row] * gates[gate, row, column]).T
            for state in terms.states:
                at = torch.nonzero(here & (columns - state * size == rows - vector * size)).flatten()
                values[at] += diagonals[:, state].T
        return values

    def _check(self, vector: int, listed: tuple[int, ...], kind: str, derivatives: torch.Tensor) -> None:
        for number in set(range(derivatives.shape[1])) - set(listed):
            if derivatives[:, number].any():
                raise ValueError(
                    f"vector {vector} of the state of the cell {self.cell.mode} depends on {kind} {number}, which its "
                    "`terms` do not list; add it"
                )
