"""Activations with the samples of a block last: ``(blocks, channels, rows, columns, lanes)``.

A vector register holds one position of all samples of a block. Where a batch does not fill its last block, that
block's other lanes hold zeros going in, and are dropped going out.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def to_blocks(x: torch.Tensor, lanes: int) -> torch.Tensor:
    """``(batch, channels, rows, columns)`` as blocks of as many samples.

    Examples
    --------
    >>> to_blocks(torch.ones(5, 3, 2, 2), 4).shape
    torch.Size([2, 3, 2, 2, 4])
    """
    batch, *shape = x.shape
    missing = -batch % lanes
    if missing:
        x = functional.pad(x, (0,) * (2 * len(shape)) + (0, missing))
    return x.unflatten(0, ((batch + missing) // lanes, lanes)).movedim(1, -1).contiguous()


def from_blocks(x: torch.Tensor, batch: int) -> torch.Tensor:
    """Blocks as ``(batch, channels, rows, columns)``, contiguous."""
    return x.movedim(-1, 1).flatten(0, 1)[:batch].contiguous()
