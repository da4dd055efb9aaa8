"""CIFAR-10 and CIFAR-100 from the files of their binary versions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .dataset import Dataset

_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class _RecordLayout:
    """The files of one data set, and the folder that its archive unpacks to."""

    archive: str
    folder: str
    # The files of training and of test images, and how many each has.
    train: dict[str, int]
    test: dict[str, int]
    # The bytes before an image's pixels: the meaning of each, and its number of values. The last is the class.
    labels: tuple[tuple[str, int], ...]

    @property
    def files(self) -> dict[str, int]:
        """All files, those of the training images first."""
        return {**self.train, **self.test}

    @property
    def record_size(self) -> int:
        """Bytes of an image with its labels."""
        return len(self.labels) + _PIXELS


_LAYOUTS = {
    "cifar10": _RecordLayout(
        archive="cifar-10-binary.tar.gz",
        folder="cifar-10-batches-bin",
        train={f"data_batch_{number}.bin": 10_000 for number in range(1, 6)},
        test={"test_batch.bin": 10_000},
        labels=(("label", 10),),
    ),
    "cifar100": _RecordLayout(
        archive="cifar-100-binary.tar.gz",
        folder="cifar-100-binary",
        train={"train.bin": 50_000},
        test={"test.bin": 10_000},
        labels=(("coarse label", 20), ("fine label", 100)),
    ),
}


def load_cifar(name: str, folder: Path) -> Dataset:
    """CIFAR-10 or CIFAR-100, from the folder of the files or the one in which the archive was unpacked."""
    layout = _LAYOUTS[name]
    folder = _folder_of_files(name, layout, folder)
    for file in layout.files:
        _check_size(folder / file, layout)
    train_images, train_labels = _read(folder, layout.train, layout)
    test_images, test_labels = _read(folder, layout.test, layout)
    mean, std = _moments(train_images)
    return Dataset(
        _normalised(train_images, mean, std),
        torch.from_numpy(train_labels),
        _normalised(test_images, mean, std),
        torch.from_numpy(test_labels),
        classes=layout.labels[-1][1],
        source=name,
        mean=tuple(mean.tolist()),
        std=tuple(std.tolist()),
        mirrors=True,
    )


def _folder_of_files(name: str, layout: _RecordLayout, folder: Path) -> Path:
    """The folder itself, or the one in it that the archive unpacks to."""
    remedy = (
        f"download the binary version, {layout.archive}, from {_PAGE}, unpack it with tar -xzf {layout.archive} and "
        f"pass {name}:DIR, the folder {layout.folder} that it makes or the one around it"
    )
    for place in (folder, folder / layout.folder):
        missing = [file for file in layout.files if not (place / file).is_file()]
        if not missing:
            return place
        if len(missing) < len(layout.files):
            raise FileNotFoundError(f"{place} has no {', '.join(missing)}; {remedy}")
    what = "has no" if folder.is_dir() else "is no folder with"
    raise FileNotFoundError(f"{folder} {what} {', '.join(layout.files)}; {remedy}")


def _check_size(path: Path, layout: _RecordLayout) -> None:
    size, expected = path.stat().st_size, layout.files[path.name] * layout.record_size
    if size != expected:
        raise ValueError(
            f"{path} has {size:,} bytes; expected {expected:,}, {layout.files[path.name]:,} records of "
            f"{layout.record_size}: it is damaged or of another version; unpack {layout.archive} from {_PAGE} again"
        )


def _read(folder: Path, files: Iterable[str], layout: _RecordLayout) -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8, ``(n, 3, 32, 32)``, and their classes, int64."""
    records = np.concatenate([_records(folder / file, layout) for file in files])
    labels = len(layout.labels)
    return records[:, labels:].reshape(-1, 3, 32, 32), records[:, labels - 1].astype(np.int64)


def _records(path: Path, layout: _RecordLayout) -> np.ndarray:
    """The records of a file, whose labels are checked: uint8, ``(n, record_size)``."""
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, layout.record_size)
    for column, (what, classes) in enumerate(layout.labels):
        wrong = np.flatnonzero(records[:, column] >= classes)
        if len(wrong):
            raise ValueError(
                f"{path}: record {wrong[0]} has {what} {records[wrong[0], column]}; expected 0 to {classes - 1}: "
                f"the file is damaged; unpack {layout.archive} from {_PAGE} again"
            )
    return records


def _moments(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel, of pixels in [0, 1], from their histograms."""
    brightness = np.arange(256) / 255
    counts = np.stack([np.bincount(images[:, channel].ravel(), minlength=256) for channel in range(3)])
    mean = counts @ brightness / counts.sum(axis=1)
    variance = counts @ brightness**2 / counts.sum(axis=1) - mean**2
    # A channel of one brightness is not divided.
    return mean, np.where(variance > 1e-12, np.sqrt(np.maximum(variance, 0)), 1.0)


def _normalised(images: np.ndarray, mean: np.ndarray, std: np.ndarray) -> torch.Tensor:
    shift, scale = (torch.from_numpy(values).float().reshape(1, 3, 1, 1) for values in (mean, std))
    return torch.from_numpy(images).float().div_(255).sub_(shift).div_(scale)
