"""Entries that are infinite, or no numbers, as products of local derivatives: autograd may have numbers there.

Where a derivative is infinite, as that of a root at 0, its product with a zero is not a number. Backward passes of
ReLU, maxima, selections and moved elements do not multiply by their zeros: they leave the gradient out. And where a
derivative overflows, as that of a logarithm at 1e-310, backward passes divide a gradient that may be small.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable

import numpy as np
import torch

from ..patterns import Pattern, note_infinite, row_colors
from ..runtime import host_flag, on_device

_LOGGER = logging.getLogger("jacsparse")

#: Elements up to which NumPy's product takes one thread; its call takes a third of the time of PyTorch's.
_FEW = 10_000


def all_finite(values: torch.Tensor) -> bool:
    """Whether all elements of a tensor of float32 or float64, without gradients, are finite numbers.

    A device, which is not waited for, is believed: a later call tells where one is not.
    """
    if on_device(values):
        tell_of_infinite_values(values.device)
        note_infinite(values)
        return True
    # A sum of squares takes one pass and no memory. Only where it overflows, another pass tells.
    if values.numel() <= _FEW:
        array = values.numpy()
        return math.isfinite(np.vdot(array, array)) or bool(np.isfinite(array).all())
    flat = values.reshape(-1)
    return math.isfinite(torch.dot(flat, flat).item()) or bool(torch.isfinite(values).all())


def tell_of_infinite_values(device: torch.device) -> None:
    """Log a warning where values of an earlier call on a device were not finite."""
    flag = _flag(device)
    if flag[0]:
        flag[0] = 0
        _LOGGER.warning(
            "%s: an earlier call of a Jacobian had values that are not finite as products of local derivatives; "
            "autograd may have numbers there: compare with a call on the CPU, or a prepared Jacobian by its `check`",
            device,
        )


@functools.cache
def _flag(device: torch.device) -> np.ndarray:
    return host_flag(device).numpy()


def with_backward_passes(
    values: torch.Tensor, pattern: Pattern, batch: int, pull_back: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Values of a Jacobian, ``(nnz, batch)``, of which backward passes compute those that are not finite.

    By autograd, ``pull_back`` takes gradients of the output, ``(batch, rows)``, to the input's, ``(batch, columns)``.
    It is called for each colour of the rows that have such entries.
    """
    infinite = ~torch.isfinite(values)
    entries = infinite.any(1).nonzero()[:, 0]
    places = entries.cpu().numpy()
    rows, columns = (torch.from_numpy(array[places]).long() for array in (pattern.rows, pattern.indices))
    colors = torch.from_numpy(row_colors(pattern)[pattern.rows[places]])
    computed = values.new_empty((len(entries), batch))
    for color in colors.unique():
        chosen = (colors == color).nonzero()[:, 0]
        seed = values.new_zeros((batch, pattern.shape[0]))
        seed[:, rows[chosen]] = 1
        computed[chosen] = pull_back(seed)[:, columns[chosen]].T.to(values)
    result = values.expand(-1, batch).clone()
    result[entries] = torch.where(infinite[entries], computed, result[entries])
    return result
