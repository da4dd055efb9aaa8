"""Data: the digits, and CIFAR's files, right, damaged and missing."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from jacsparse.models import Dataset, load_data
from jacsparse.models import cifar10 as _cifar

RECORDS = 20


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of CIFAR with few records."""
    layouts = {
        name: dataclasses.replace(
            layout, train=dict.fromkeys(layout.train, RECORDS), test=dict.fromkeys(layout.test, RECORDS)
        )
        for name, layout in _cifar._LAYOUTS.items()
    }
    monkeypatch.setattr(_cifar, "_LAYOUTS", layouts)


def written(name: str, folder: Path) -> dict[str, np.ndarray]:
    """Random records, written to the folder, by file."""
    layout = _cifar._LAYOUTS[name]
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    files = {}
    for file in (*layout.train, *layout.test):
        labels = [random.integers(0, classes, (RECORDS, 1)) for _, classes in layout.labels]
        pixels = random.integers(0, 256, (RECORDS, 3 * 32 * 32))
        files[file] = np.concatenate([*labels, pixels], axis=1).astype(np.uint8)
        files[file].tofile(folder / file)
    return files


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("below", [False, True])
@pytest.mark.usefixtures("small")
def test_cifar(name: str, below: bool, tmp_path: Path) -> None:
    layout = _cifar._LAYOUTS[name]
    files = written(name, tmp_path / layout.folder if below else tmp_path)
    data = load_data(f"{name}:{tmp_path}")
    train = np.concatenate([files[file] for file in layout.train])
    (test,) = (files[file] for file in layout.test)
    assert data.train_labels.tolist() == train[:, len(layout.labels) - 1].tolist()
    assert data.test_labels.tolist() == test[:, len(layout.labels) - 1].tolist()
    assert (data.classes, data.source, data.mirrors) == (layout.labels[-1][1], name, True)
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (data.mean, data.std))
    for images, records in ((data.train_inputs, train), (data.test_inputs, test)):
        pixels = records[:, len(layout.labels) :].reshape(-1, 3, 32, 32)
        restored = ((images * std + mean) * 255).round()
        assert torch.equal(restored.to(torch.uint8), torch.from_numpy(pixels))
    check_normalised(data)


def check_normalised(data: Dataset) -> None:
    for images, labels in ((data.train_inputs, data.train_labels), (data.test_inputs, data.test_labels)):
        assert images.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert images.shape == (len(labels), 3, 32, 32)
    torch.testing.assert_close(data.train_inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(data.train_inputs.std((0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)


@pytest.mark.usefixtures("small")
def test_an_even_channel_is_not_divided_by_zero(tmp_path: Path) -> None:
    layout = _cifar._LAYOUTS["cifar10"]
    for file in (*layout.train, *layout.test):
        np.zeros((RECORDS, layout.record_size), np.uint8).tofile(tmp_path / file)
    assert bool((load_data(f"cifar10:{tmp_path}").train_inputs == 0).all())


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_nothing_there(name: str, tmp_path: Path) -> None:
    layout = _cifar._LAYOUTS[name]
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(FileNotFoundError) as caught:
            load_data(f"{name}:{folder}")
        for part in (
            str(folder),
            *layout.train,
            *layout.test,
            layout.archive,
            "https://www.cs.toronto.edu/~kriz/cifar.html",
        ):
            assert part in str(caught.value)


@pytest.mark.usefixtures("small")
def test_one_file_missing(tmp_path: Path) -> None:
    written("cifar10", tmp_path / "cifar-10-batches-bin")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"cifar-10-batches-bin has no data_batch_3.bin; download the binary version"
    ):
        load_data(f"cifar10:{tmp_path}")


@pytest.mark.parametrize("size", [0, 20 * 3073 - 1, 19 * 3073, 20 * 3074])
@pytest.mark.usefixtures("small")
def test_wrong_size(size: int, tmp_path: Path) -> None:
    written("cifar10", tmp_path)
    with (tmp_path / "test_batch.bin").open("r+b") as file:
        file.truncate(size)
    with pytest.raises(
        ValueError, match=rf"test_batch.bin has {size:,} bytes; expected 61,460, 20 records of 3073: it is"
    ):
        load_data(f"cifar10:{tmp_path}")


def test_published_sizes(tmp_path: Path) -> None:
    for name, file, size in (("cifar10", "data_batch_1.bin", "30,730,000"), ("cifar100", "train.bin", "153,700,000")):
        layout = _cifar._LAYOUTS[name]
        for part in (*layout.train, *layout.test):
            (tmp_path / part).touch()
        with pytest.raises(ValueError, match=rf"{file} has 0 bytes; expected {size}"):
            load_data(f"{name}:{tmp_path}")


@pytest.mark.parametrize(
    ("name", "file", "column", "value", "message"),
    [
        ("cifar10", "data_batch_2.bin", 0, 10, "record 7 has label 10; expected 0 to 9"),
        ("cifar100", "train.bin", 0, 20, "record 7 has coarse label 20; expected 0 to 19"),
        ("cifar100", "test.bin", 1, 255, "record 7 has fine label 255; expected 0 to 99"),
    ],
)
@pytest.mark.usefixtures("small")
def test_wrong_label(name: str, file: str, column: int, value: int, message: str, tmp_path: Path) -> None:
    records = written(name, tmp_path)[file]
    records[7, column] = value
    records.tofile(tmp_path / file)
    with pytest.raises(ValueError, match=rf"{file}: {message}: the file is damaged"):
        load_data(f"{name}:{tmp_path}")


@pytest.mark.parametrize("spec", ["mnist", "", "cifar10", "cifar10:", "digits:/tmp", "CIFAR10:/tmp", None, 10])
def test_unknown_data(spec: str) -> None:
    with pytest.raises(ValueError, match=r"data is .*; expected digits, .*, irmas:DIR, tones or file:PATH"):
        load_data(spec)


def test_digits() -> None:
    data, again = load_data(), load_data("digits")
    check_normalised(data)
    assert (len(data.train_labels), len(data.test_labels), data.classes, data.mirrors) == (1437, 360, 10, False)
    assert torch.equal(data.test_inputs, again.test_inputs)
    assert set(data.train_labels.tolist()) == set(data.test_labels.tolist()) == set(range(10))
    assert torch.equal(data.train_inputs[:, 0], data.train_inputs[:, 2])


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'jacsparse\[data\]'"):
        load_data("digits")
