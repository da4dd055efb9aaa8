"""Inputs and labels to train and test on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images of 3 × 32 × 32, or sequences, and their labels.

    Attributes
    ----------
    train_inputs, test_inputs : Tensor, (n, 3, 32, 32) or (n, features, time)
        Inputs, float32; each channel of the training images has mean 0 and standard deviation 1. Bits are uint8.
    train_labels, test_labels : Tensor, (n,)
        Labels, int64, from 0.
    classes : int
        Number of classes.
    source : str
        Name of the data set.
    mean, std : tuple of float
        Mean and standard deviation of the training images' channels before normalisation, in units of the brightest
        value; empty where the inputs are not normalised.
    mirrors : bool
        Whether the mirror image of an image belongs to the same class.
    """

    train_inputs: torch.Tensor
    train_labels: torch.Tensor
    test_inputs: torch.Tensor
    test_labels: torch.Tensor
    classes: int
    source: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mirrors: bool = False

    def __repr__(self) -> str:
        kind = "images" if self.train_inputs.ndim == 4 else "sequences"
        sizes = f"{len(self.train_labels):,} {kind} to train on, {len(self.test_labels):,} to test"
        return f"<Dataset {self.source}: {sizes}, {self.classes} classes>"
