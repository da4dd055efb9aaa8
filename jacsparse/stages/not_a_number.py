"""Entries that are not numbers as products of local derivatives, though autograd has numbers there.

Where a derivative is infinite, as that of a root at 0, its product with a zero is not a number. Backward passes of
ReLU, maxima, selections and moved elements do not multiply by their zeros: they leave the gradient out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..patterns import Pattern, row_colors


def has_nan(values: torch.Tensor) -> bool:
    """Whether an element is not a number."""
    # A sum takes one pass and no memory.
    return not bool(torch.isfinite(values.sum())) and bool(values.isnan().any())


def with_numbers(
    values: torch.Tensor, pattern: Pattern, batch: int, pull_back: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Values of a Jacobian, ``(nnz, batch)``, where backward passes compute those that are not numbers.

    Parameters
    ----------
    values : Tensor, (nnz, batch) or (nnz, 1)
        The values of products.
    pattern : Pattern
        The pattern of the Jacobian.
    batch : int
        The number of samples.
    pull_back : callable
        ``pull_back(gradient of output) -> gradient of input``, ``(batch, rows)`` to ``(batch, columns)``, by autograd.
        It is called for each colour of the rows that have such entries.
    """
    nan = values.isnan()
    entries = nan.any(1).nonzero()[:, 0]
    rows, columns = (torch.from_numpy(array[entries.cpu().numpy()]).long() for array in (pattern.rows, pattern.indices))
    colors = torch.from_numpy(row_colors(pattern))
    numbers = values.new_empty((len(entries), batch))
    for color in colors[rows].unique():
        chosen = (colors[rows] == color).nonzero()[:, 0]
        seed = values.new_zeros((batch, pattern.shape[0]))
        seed[:, rows[chosen]] = 1
        numbers[chosen] = pull_back(seed)[:, columns[chosen]].T.to(values)
    result = values.expand(-1, batch).clone()
    result[entries] = torch.where(nan[entries], numbers, result[entries])
    return result
