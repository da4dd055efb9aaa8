"""Recurrences as plain loops, to compare everything else with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from .cells import Cell


def linear_recurrence(A: torch.Tensor, b: torch.Tensor, h0: torch.Tensor, *, reverse: bool = False) -> torch.Tensor:
    """``h_t = A_t h_{t-1} + b_t`` step after step: ``(time, batch, n, n)``, ``(time, batch, n)`` and ``(batch, n)``.

    Examples
    --------
    >>> linear_recurrence(torch.full((3, 1, 1, 1), 0.5), torch.ones(3, 1, 1), torch.zeros(1, 1)).flatten().tolist()
    [1.0, 1.5, 1.75]
    """
    states, state = [], h0
    for step in range(len(b) - 1, -1, -1) if reverse else range(len(b)):
        state = (A[step] @ state.unsqueeze(-1)).squeeze(-1) + b[step]
        states.append(state)
    return torch.stack(states[::-1] if reverse else states)


def recurrent_layer(
    cell: Cell,
    x: torch.Tensor,
    initial: torch.Tensor,
    parameters: tuple[torch.Tensor | None, ...],
    *,
    reverse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer in one direction of time, step after step in PyTorch's operations.

    Parameters
    ----------
    cell : Cell
        What a step computes.
    x : Tensor, (time, batch, features)
        The input.
    initial : Tensor, (batch, states · size)
        The states before the first steps.
    parameters : tuple of Tensor or None
        The input's weight and the hidden one, and their biases.
    reverse : bool
        Whether the last step is the first.

    Returns
    -------
    output : Tensor, (time, batch, size)
    last : Tensor, (batch, states · size)
    """
    outputs, last = outputs_by_steps(cell, x, initial, parameters, reverse=reverse)
    return torch.stack(outputs), last


def outputs_by_steps(
    cell: Cell,
    x: torch.Tensor | Sequence[torch.Tensor],
    initial: torch.Tensor,
    parameters: Sequence[torch.Tensor | None],
    *,
    reverse: bool,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """As `recurrent_layer`, each step's output by itself; of several inputs, each has the first samples alone."""
    weight, hidden, bias, hidden_bias = parameters
    assert weight is not None and hidden is not None
    outputs, state, size = [], initial, hidden.shape[1]
    for step in range(len(x) - 1, -1, -1) if reverse else range(len(x)):
        count, whole = len(x[step]), state
        state = whole if count == len(whole) else whole[:count]
        input_projection = functional.linear(x[step], weight, bias)
        state = cell.step(input_projection, functional.linear(state[:, :size], hidden, hidden_bias), state)
        outputs.append(state[:, :size])
        if count < len(whole):
            state = torch.cat([state, whole[count:]])
    return outputs[::-1] if reverse else outputs, state
