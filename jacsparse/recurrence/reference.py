"""Recurrences as plain loops, to compare everything else with."""

from __future__ import annotations

import torch


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
