"""Recurrent cells: the Jacobian of a step's state with respect to the state before it.

In all of them an element of the Jacobian is a sum, over the gates, of a factor of its row and an element of that gate's
recurrent weight, and on the diagonal something more. So its pattern is the union of the gates' weights and, but for the
plain RNN, the diagonal: with full weights full, with pruned ones as sparse as they are (thesis, equation 4.4, whose
last line gives the transposed Jacobian).

LSTM's state is ``h`` followed by ``c``; its Jacobian has four blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ._pattern import Pattern
from ._structure import Full

__all__ = ["RECURRENT_GATES", "state_jacobian_pattern", "state_jacobian_values"]

#: Recurrent weights of each kind of cell, by the modes of `torch.nn`.
RECURRENT_GATES = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 3, "LSTM": 4}


@dataclass(frozen=True)
class _Block:
    """A part of the Jacobian, ``H × H``.

    Attributes
    ----------
    row, column : int
        Which vector of the state, after the step and before it.
    gates : tuple of int
        Whose weights enter.
    diagonal : bool
        Whether there is something on the diagonal besides.
    """

    row: int
    column: int
    gates: tuple[int, ...]
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


def state_jacobian_pattern(mode: str, kept: np.ndarray) -> Pattern:
    """The pattern of a step's Jacobian, ``∂state_t/∂state_{t-1}``.

    Parameters
    ----------
    mode : {"RNN_TANH", "RNN_RELU", "GRU", "LSTM"}
        The kind of cell.
    kept : ndarray of bool, (gates · H, H)
        Which recurrent weights are not pruned.

    Returns
    -------
    Pattern
        ``(H, H)``; ``(2 H, 2 H)`` for LSTM.

    Raises
    ------
    ValueError
        Where the mode is unknown, or `kept` is not of its shape.

    Examples
    --------
    >>> state_jacobian_pattern("GRU", np.zeros((6, 2), dtype=bool)).indices
    array([0, 1], dtype=int32)
    """
    if mode not in _BLOCKS:
        raise ValueError(f"mode is {mode!r}; expected one of {', '.join(_BLOCKS)}")
    gates = RECURRENT_GATES[mode]
    if kept.ndim != 2 or kept.shape[0] != gates * kept.shape[1]:
        raise ValueError(f"kept has shape {kept.shape}; expected ({gates} · H, H), as weight_hh_l0 of {mode}")
    size = kept.shape[1]
    weights, parts = kept.reshape(gates, size, size), 2 if mode == "LSTM" else 1
    held = np.zeros((parts * size, parts * size), dtype=np.bool_)
    for block in _BLOCKS[mode]:
        part = held[_span(block.row, size), _span(block.column, size)]
        part |= weights[list(block.gates)].any(axis=0)
        if block.diagonal:
            np.fill_diagonal(part, True)
    if held.all():
        return Pattern.of(Full(*held.shape))
    rows, columns = np.nonzero(held)
    return Pattern(held.shape, np.append(0, np.cumsum(np.bincount(rows, minlength=len(held)))), columns)


def _span(part: int, size: int) -> slice:
    return slice(part * size, (part + 1) * size)


def state_jacobian_values(
    mode: str, weight: torch.Tensor, pattern: Pattern, state: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Values of the Jacobian of steps.

    Parameters
    ----------
    mode : str
        The kind of cell.
    weight : Tensor, (gates · H, H)
        The recurrent one.
    pattern : Pattern
        As `state_jacobian_pattern` gives it.
    state : mapping of str to Tensor, (..., H)
        What the steps computed: ``h`` for an RNN; ``r``, ``z``, ``n``, ``m`` (``W_n h + b_n``) and ``before``, the
        state before, for GRU; ``i``, ``f``, ``g``, ``o``, ``c`` and ``before``, the cell before, for LSTM.

    Returns
    -------
    Tensor, (nnz, ...)

    Notes
    -----
    GRU: thesis, equation 4.4.
    """
    size = weight.shape[1]
    weights = weight.reshape(-1, size, size)
    rows = torch.from_numpy(np.repeat(np.arange(pattern.shape[0]), np.diff(pattern.indptr)))
    columns = torch.from_numpy(pattern.indices.astype(np.int64))
    some = next(iter(state.values()))
    values = some.new_zeros((pattern.nnz, *some.shape[:-1]))
    for block in _BLOCKS[mode]:
        place = torch.nonzero((rows // size == block.row) & (columns // size == block.column)).flatten()
        row, column = rows[place] % size, columns[place] % size
        factors, diagonal = _factors(mode, block, state)
        for gate in block.gates:
            values[place] += (factors[gate][..., row] * weights[gate, row, column]).movedim(-1, 0)
        if diagonal is not None:
            on = row == column
            values[place[on]] += diagonal[..., row[on]].movedim(-1, 0)
    return values


def _factors(
    mode: str, block: _Block, state: Mapping[str, torch.Tensor]
) -> tuple[dict[int, torch.Tensor], torch.Tensor | None]:
    """The rows' factors of each gate's weight, and what is on the diagonal."""
    if mode == "RNN_TANH":
        return {0: 1 - state["h"].square()}, None
    if mode == "RNN_RELU":
        return {0: (~(state["h"] <= 0)).to(state["h"].dtype)}, None
    if mode == "GRU":
        r, z, n, m, before = (state[name] for name in ("r", "z", "n", "m", "before"))
        fresh = (1 - z) * (1 - n.square())
        return {0: fresh * m * r * (1 - r), 1: (before - n) * z * (1 - z), 2: fresh * r}, z
    i, f, g, o, c, before = (state[name] for name in ("i", "f", "g", "o", "c", "before"))
    shown = c.tanh()
    through = o * (1 - shown.square()) if block.row == 0 else torch.ones_like(o)
    if block.column == 1:
        return {}, through * f
    factors = {0: through * g * i * (1 - i), 1: through * before * f * (1 - f), 2: through * i * (1 - g.square())}
    if block.row == 0:
        factors[3] = shown * o * (1 - o)
    return factors, None
