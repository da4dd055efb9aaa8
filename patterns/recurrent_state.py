"""Recurrent cells: the Jacobian of a step's state with respect to the state before it.

An element of the Jacobian is a sum over the gates: each adds a factor of the row times an element of the gate's
recurrent weight. A diagonal matrix is added, except for the plain RNN. So the pattern is the union of the gates'
weights and the diagonal: full with full weights, and as sparse as pruned ones (thesis, equation 4.4; its last line is
the transposed Jacobian).

LSTM's state is ``h`` followed by ``c``; its Jacobian has four blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import scipy.sparse
import torch

from .pattern import Pattern
from .structure import Full


class _Block(NamedTuple):
    """A block of the Jacobian, ``H × H``."""

    #: The vector of the state after the step, and the one before it.
    row: int
    column: int
    #: Gates whose weights are part of the sum.
    gates: tuple[int, ...]
    #: Whether a diagonal matrix is added.
    diagonal: bool


_BLOCKS = {
    "RNN_TANH": (_Block(0, 0, (0,), False),),
    "RNN_RELU": (_Block(0, 0, (0,), False),),
    "GRU": (_Block(0, 0, (0, 1, 2), True),),
    "LSTM": (
        _Block(0, 0, (0, 1, 2, 3), False),
        _Block(0, 1, (), True),
        _Block(1, 0, (0, 1, 2), False),
        _Block(1, 1, (), True),
    ),
}


def state_jacobian_pattern(mode: str, mask: np.ndarray) -> Pattern:
    """The pattern of a step's Jacobian, ``∂state_t/∂state_{t-1}``.

    Parameters
    ----------
    mode : {"RNN_TANH", "RNN_RELU", "GRU", "LSTM"}
        The kind of cell.
    mask : ndarray of bool, (gates · H, H)
        The recurrent weights that are not pruned.

    Returns
    -------
    Pattern
        ``(H, H)``; ``(2 H, 2 H)`` for LSTM.

    Raises
    ------
    ValueError
        Where the mode is unknown, or `mask` is not of its shape.

    Examples
    --------
    >>> state_jacobian_pattern("GRU", np.zeros((6, 2), dtype=bool)).indices
    array([0, 1], dtype=int32)
    """
    if mode not in _BLOCKS:
        raise ValueError(f"mode is {mode!r}; expected one of {', '.join(_BLOCKS)}")
    gates = _gates(mode)
    if mask.ndim != 2 or mask.shape[0] != gates * mask.shape[1]:
        raise ValueError(f"mask has shape {mask.shape}; expected ({gates} · H, H), as weight_hh_l0 of {mode}")
    size, parts = mask.shape[1], 2 if mode == "LSTM" else 1
    weights = mask.reshape(gates, size, size)
    # The axes are blocks of rows, rows of a block, blocks of columns, columns of a block.
    entries = np.zeros((parts, size, parts, size), dtype=np.bool_)
    for block in _BLOCKS[mode]:
        union = weights[list(block.gates)].any(axis=0)
        entries[block.row, :, block.column] = union | np.eye(size, dtype=np.bool_) if block.diagonal else union
    matrix = entries.reshape(parts * size, parts * size)
    return Pattern.of(Full(*matrix.shape)) if matrix.all() else Pattern.from_scipy(scipy.sparse.csr_array(matrix))


def state_jacobian_values(
    mode: str, weight: torch.Tensor, pattern: Pattern, state: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Values of the Jacobian of steps.

    Parameters
    ----------
    mode : str
        The kind of cell.
    weight : Tensor, (gates · H, H)
        The recurrent weight.
    pattern : Pattern
        The pattern from `state_jacobian_pattern`.
    state : mapping of str to Tensor, (..., H)
        Vectors of the steps: ``h`` for an RNN; ``r``, ``z``, ``n``, ``m`` (``W_n h + b_n``) and ``before``, the
        state before, for GRU; ``i``, ``f``, ``g``, ``o``, ``c`` and ``before``, the cell before, for LSTM.

    Returns
    -------
    Tensor, (nnz, ...)

    Notes
    -----
    GRU: thesis, equation 4.4.
    """
    size = weight.shape[1]
    weights = weight.reshape(_gates(mode), size, size)
    rows, columns = (torch.from_numpy(indices.astype(np.int64)) for indices in (pattern.rows, pattern.indices))
    vector = next(iter(state.values()))
    values = vector.new_zeros((pattern.nnz, *vector.shape[:-1]))
    for block in _BLOCKS[mode]:
        place = torch.nonzero((rows // max(1, size) == block.row) & (columns // max(1, size) == block.column)).flatten()
        row, column = rows[place] - block.row * size, columns[place] - block.column * size
        factors, diagonal = _factors(mode, block, state)
        for gate in block.gates:
            values[place] += (factors[gate][..., row] * weights[gate, row, column]).movedim(-1, 0)
        if diagonal is not None:
            on_diagonal = row == column
            values[place[on_diagonal]] += diagonal[..., row[on_diagonal]].movedim(-1, 0)
    return values


def _gates(mode: str) -> int:
    """Matrices of the recurrent weight."""
    return {"GRU": 3, "LSTM": 4}.get(mode, 1)


def _factors(
    mode: str, block: _Block, state: Mapping[str, torch.Tensor]
) -> tuple[dict[int, torch.Tensor], torch.Tensor | None]:
    """The rows' factor of each gate's weight, and the diagonal that is added."""
    if mode == "RNN_TANH":
        return {0: 1 - state["h"].square()}, None
    if mode == "RNN_RELU":
        return {0: (~(state["h"] <= 0)).to(state["h"].dtype)}, None
    if mode == "GRU":
        r, z, n, m, before = (state[name] for name in ("r", "z", "n", "m", "before"))
        of_n = (1 - z) * (1 - n.square())
        return {0: of_n * m * r * (1 - r), 1: (before - n) * z * (1 - z), 2: of_n * r}, z
    i, f, g, o, c, before = (state[name] for name in ("i", "f", "g", "o", "c", "before"))
    tanh_c = c.tanh()
    # The derivative of the row's vector, h or c, with respect to c.
    of_c = o * (1 - tanh_c.square()) if block.row == 0 else torch.ones_like(o)
    if block.column == 1:
        return {}, of_c * f
    factors = {0: of_c * g * i * (1 - i), 1: of_c * before * f * (1 - f), 2: of_c * i * (1 - g.square())}
    if block.row == 0:
        factors[3] = tanh_c * o * (1 - o)
    return factors, None
