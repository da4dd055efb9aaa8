"""Bitstreams to classify: the thesis' synthetic task (section 4.1)."""

from __future__ import annotations

import torch

from .dataset import Dataset

_CLASSES = 10


def bitstreams(time: int = 1000, *, train: int = 32_000, test: int = 1_600, seed: int = 0) -> Dataset:
    """Streams of bits that are one with probability ``0.05 + 0.1 · class`` (equation 4.1).

    Parameters
    ----------
    time : int
        Bits per stream.
    train, test : int
        Streams to train on, by default as many as in the thesis, and to test with. All classes have equal numbers of
        streams, up to a remainder.
    seed : int
        Seed of the bits.

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
    # In parts, since the random numbers take four times as much memory as the bits.
    for begin in range(0, len(bits), 1024):
        part = slice(begin, begin + 1024)
        chances = 0.05 + 0.1 * labels[part].float()
        bits[part] = torch.rand((len(chances), 1, time), generator=generator) < chances[:, None, None]
    parts = (bits[:train], labels[:train], bits[train:], labels[train:])
    return Dataset(*parts, classes=_CLASSES, source=f"bitstream:{time}", mean=(), std=())
