"""What to train on: digits that need no download, CIFAR and IRMAS from files, bitstreams and tones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

__all__ = ["DATA", "Dataset", "load_data", "split_spec"]

#: Names of data sets, and what follows each after a colon.
DATA = {"digits": None, "cifar10": "DIR", "cifar100": "DIR", "bitstream": "STEPS", "irmas": "DIR", "tones": None}


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images of 3 × 32 × 32, or sequences, and their labels.

    Attributes
    ----------
    train_inputs, test_inputs : Tensor, (n, 3, 32, 32) or (n, features, time)
        float32; each channel of the training images has mean 0 and standard deviation 1. Bits are uint8.
    train_labels, test_labels : Tensor, (n,)
        int64, from 0.
    classes : int
        How many.
    source : str
        The data set's name.
    mean, std : tuple of float
        Of the training images' channels, in units of their brightest value, before they were normalised; empty where
        nothing was.
    mirrors : bool
        Whether an image's mirror image is one of the same class.
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


def load_data(spec: str = "digits", *, features: str = "S", skip_damaged: bool = False) -> Dataset:
    """Load a data set.

    Parameters
    ----------
    spec : str
        ``digits``: scikit-learn's 1797 handwritten digits of 8 × 8, resized; every run has the same 360 to test.
        ``cifar10:DIR``, ``cifar100:DIR``: the binary version, unpacked in that folder, from
        https://www.cs.toronto.edu/~kriz/cifar.html; CIFAR-100 with its fine labels.
        ``bitstream:STEPS``: random bits, as `bitstreams` draws them.
        ``irmas:DIR``: IRMAS' training data, unpacked in that folder, as `load_irmas` reads them; ``tones``: a small
        made-up set in their place.
    features : {"S", "M", "L"}
        Row of the thesis' Table 4.2, for sounds.
    skip_damaged : bool
        Whether sounds that cannot be used are left out.

    Raises
    ------
    ValueError
        Where there is no such data set, or its files are damaged.
    FileNotFoundError
        Where files are missing; the message says which, and where they are to be had.
    ImportError
        Where the digits are asked for and scikit-learn is not installed, or sounds and librosa is not.

    Examples
    --------
    >>> load_data("digits")
    <Dataset digits: 1,437 images to train on, 360 to test, 10 classes>
    """
    name, rest = split_spec(spec)
    if name == "digits":
        return _digits()
    if name == "bitstream":
        from ._bitstream import bitstreams

        return bitstreams(int(rest))
    if name == "tones":
        from ._tones import tones

        return tones(features)
    if name == "irmas":
        from ._irmas import load_irmas

        return load_irmas(Path(rest).expanduser(), features, skip_damaged=skip_damaged)
    from ._cifar import load_cifar

    return load_cifar(name, Path(rest).expanduser())


def split_spec(spec: str) -> tuple[str, str]:
    """Name of a data set, and what follows it.

    Raises
    ------
    ValueError
        Where there is no such data set, or what follows is missing, too much or no number.

    Examples
    --------
    >>> split_spec("bitstream:1000")
    ('bitstream', '1000')
    """
    name, colon, rest = spec.partition(":") if isinstance(spec, str) else ("", "", "")
    fits = bool(rest) if DATA.get(name) else not colon
    if DATA.get(name) == "STEPS":
        fits = rest.isascii() and rest.isdecimal() and int(rest) > 0
    if name not in DATA or not fits:
        known = [f"{name}:{more}" if more else name for name, more in DATA.items()]
        raise ValueError(f"data is {spec!r}; expected {', '.join(known[:-1])} or {known[-1]}")
    return name, rest


def _digits() -> Dataset:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install 'jacsparse[data]'") from error
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
    images = functional.interpolate(images, size=(32, 32), mode="bilinear", align_corners=False)
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels, train = images[order], labels[order], len(labels) * 4 // 5
    mean, std = images[:train].mean(), images[:train].std()
    images = ((images - mean) / std).repeat(1, 3, 1, 1)
    return Dataset(
        images[:train],
        labels[:train],
        images[train:],
        labels[train:],
        classes=10,
        source="digits",
        mean=(mean.item(),) * 3,
        std=(std.item(),) * 3,
    )
