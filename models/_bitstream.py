"""Bitstreams to classify: the thesis' synthetic task (section 4.1)."""

from __future__ import annotations

import torch

from ._data import Dataset

__all__ = ["bitstreams"]

#: Samples of the thesis, and how many more to test with.
TRAIN, TEST = 32_000, 1_600
_CLASSES = 10


def bitstreams(time: int = 1000, *, train: int = TRAIN, test: int = TEST, seed: int = 0) -> Dataset:
    """Streams of bits, each of which is one with probability ``0.05 + 0.1 · class`` (equation 4.1).

    Parameters
    ----------
    time : int
        Bits of a stream.
    train, test : int
        Streams, as many of each class as of any other, but for a remainder.
    seed : int
        Of the bits.

    Returns
    -------
    Dataset
        Inputs of shape ``(n, 1, time)``, uint8.

    Examples
    --------
    >>> data = bitstreams(100, train=1000, test=10)
    >>> data.train_inputs.shape, round(data.train_inputs[data.train_labels == 3].double().mean().item(), 2)
    (torch.Size([1000, 1, 100]), 0.35)
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(train + test) % _CLASSES
    labels = labels[torch.randperm(len(labels), generator=generator)]
    bits = torch.empty((train + test, 1, time), dtype=torch.uint8)
    # Some at a time: the random numbers take four times as much memory as the bits.
    for begin in range(0, len(bits), 1024):
        part = slice(begin, begin + 1024)
        chances = 0.05 + 0.1 * labels[part].float()
        bits[part] = torch.rand((len(chances), 1, time), generator=generator) < chances[:, None, None]
    return Dataset(
        bits[:train],
        labels[:train],
        bits[train:],
        labels[train:],
        classes=_CLASSES,
        source=f"bitstream:{time}",
        mean=(),
        std=(),
    )
