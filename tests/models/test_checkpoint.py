"""Checkpoints: what comes back, and files that are damaged, foreign or of another model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from jacsparse.models import (
    VGG11,
    LeNet5,
    build,
    load_checkpoint,
    load_weights,
    prune_weights,
    pruned_fraction,
    save_checkpoint,
)
from jacsparse.models.checkpoint import read_checkpoint
from torch import nn
from torch.nn.utils import prune


@pytest.fixture
def pruned() -> LeNet5:
    module = LeNet5(num_classes=7).eval()
    prune_weights(module, 0.9)
    return module


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def same(one: nn.Module, other: nn.Module) -> None:
    assert set(one.state_dict()) == set(other.state_dict())
    for key, value in one.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(one(x), other(x))


def rewritten(path: Path, **changes: Any) -> None:
    """The file with other metadata."""
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["jacsparse"])
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file(tensors, path, metadata={"jacsparse": json.dumps({**metadata, **changes})})


def test_round_trip(path: Path) -> None:
    module = build("vgg11", num_classes=5, dropout=0.25).eval()
    save_checkpoint(path, module, metadata={"note": "here"})
    loaded, metadata = load_checkpoint(path)
    same(module, loaded)
    assert not loaded.training
    assert metadata == {
        "note": "here",
        "format": 1,
        "model": "vgg11",
        "options": {"num_classes": 5, "in_channels": 3, "dropout": 0.25},
        "pruned": 0.0,
    }


def test_files_are_as_readable_as_any(path: Path) -> None:
    save_checkpoint(path, build("lenet5"))
    (path.parent / "other").touch()
    assert path.stat().st_mode == (path.parent / "other").stat().st_mode


def test_masks_come_back(path: Path, pruned: LeNet5) -> None:
    save_checkpoint(path, pruned)
    loaded, metadata = load_checkpoint(path)
    same(pruned, loaded)
    assert metadata["pruned"] == pruned_fraction(loaded) == pruned_fraction(pruned)
    torch.optim.SGD(loaded.parameters(), lr=0.1).zero_grad()
    assert prune.is_pruned(loaded)


def test_the_state_of_training_is_beside_the_weights(path: Path, pruned: LeNet5) -> None:
    momentum = torch.randn(5, 4).T
    save_checkpoint(path, pruned, state={"momentum": momentum})
    state = read_checkpoint(path).state
    assert list(state) == ["momentum"] and torch.equal(state["momentum"], momentum)
    same(load_checkpoint(path)[0], pruned)


@pytest.mark.parametrize("masked", [False, True])
def test_into_a_module(path: Path, pruned: LeNet5, masked: bool) -> None:
    save_checkpoint(path, pruned)
    module = LeNet5(num_classes=7)
    if masked:
        prune_weights(module, 0.5, "global")
    load_weights(module, path)
    same(pruned, module)


def test_into_a_module_that_gives_up_its_masks(path: Path) -> None:
    module, target = LeNet5(), LeNet5()
    save_checkpoint(path, module)
    prune_weights(target, 0.5)
    load_weights(target, path)
    same(module, target)


def test_into_float64(path: Path, pruned: LeNet5) -> None:
    save_checkpoint(path, pruned)
    module = LeNet5(num_classes=7).double()
    load_weights(module, path)
    assert torch.equal(module.features[0].weight.float(), pruned.features[0].weight)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            VGG11(num_classes=7),
            r"vgg11\(num_classes=7, in_channels=3, dropout=0.5\): features.0.weight is \(6, 3, 5, 5\)",
        ),
        (
            LeNet5(num_classes=8),
            r"lenet5\(num_classes=8, in_channels=3\): classifier.4.weight is \(7, 84\), not \(8, 84\)",
        ),
        (nn.Linear(2, 2), r"Linear: weight is missing, not \(2, 2\)"),
    ],
)
def test_another_architecture(path: Path, pruned: LeNet5, module: nn.Module, message: str) -> None:
    save_checkpoint(path, pruned)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(ValueError, match=rf"{path} holds lenet5\(num_classes=7, in_channels=3\), .* fit {message}"):
        load_weights(module, path)
    assert list(before) == list(module.state_dict())
    assert all(torch.equal(value, module.state_dict()[key]) for key, value in before.items())


def test_missing(path: Path) -> None:
    for load in (load_checkpoint, lambda path: load_weights(LeNet5(), path)):
        with pytest.raises(FileNotFoundError, match=rf"there is no checkpoint {path}; make one with jacsparse train"):
            load(path)


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.5, 0.999])
def test_truncated(path: Path, pruned: LeNet5, share: float) -> None:
    save_checkpoint(path, pruned)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(
        ValueError, match=rf"{path} cannot be read as a checkpoint .* damaged .* again with jacsparse train"
    ):
        load_checkpoint(path)


@pytest.mark.parametrize("content", [b"no checkpoint at all", struct.pack("<Q", 2**63) + b"{}", b"\x80\x04N."])
def test_no_safetensors(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read as a checkpoint"):
        load_checkpoint(path)


def test_not_of_this_library(path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=rf"{path} was not saved by jacsparse"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "its format is 2, this jacsparse reads 1"),
        ({"model": "alexnet"}, "model is 'alexnet'; expected one of bitstream, "),
        ({"options": {}}, "'num_classes'"),
        ({"options": {"num_classes": -1, "in_channels": 3}}, "num_classes is -1"),
        ({"pruned": None}, "cannot be used"),
    ],
)
def test_bad_metadata(path: Path, pruned: LeNet5, changes: dict[str, Any], message: str) -> None:
    save_checkpoint(path, pruned)
    rewritten(path, **changes)
    with pytest.raises(ValueError, match=rf"{path} has metadata that cannot be used .*{message}|{message}"):
        load_checkpoint(path)


def test_metadata_without_end(path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.zeros(2)}, path, metadata={"jacsparse": "[" * 100_000})
    with pytest.raises(ValueError, match=rf"{path} has metadata that cannot be used \(maximum recursion depth"):
        load_checkpoint(path)


def test_metadata_that_asks_for_memory(path: Path, pruned: LeNet5) -> None:
    save_checkpoint(path, pruned)
    rewritten(path, options={"num_classes": 10**12, "in_channels": 3})
    with pytest.raises(ValueError, match=r"classifier.4.weight is \(7, 84\), not \(1000000000000, 84\)"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features.0.weight_mask": None}, "features.0.weight is missing"),
        ({"features.0.weight_mask": torch.ones(2, dtype=torch.bool)}, "features.0.weight_mask is torch.bool"),
        ({"features.0.weight_mask": torch.full((6, 3, 5, 5), 0.5)}, "features.0.weight_mask is torch.float32"),
        ({"features.0.bias": torch.zeros(6, dtype=torch.int64)}, "features.0.bias is torch.int64, not floating"),
        ({"extra": torch.zeros(3)}, r"extra is \(3,\), not expected"),
    ],
)
def test_bad_tensors(path: Path, pruned: LeNet5, changes: dict[str, torch.Tensor | None], message: str) -> None:
    save_checkpoint(path, pruned)
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = {**safetensors.torch.load_file(path), **changes}
    safetensors.torch.save_file({key: value for key, value in tensors.items() if value is not None}, path, metadata)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path)


def test_only_built_in_models(path: Path) -> None:
    with pytest.raises(TypeError, match="the module is a Linear; checkpoints hold bitstream, irmas, lenet5, resnet"):
        save_checkpoint(path, nn.Linear(2, 2))


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "folder.safetensors").mkdir()
    for path, error, message in (
        (tmp_path / "absent" / "x.safetensors", FileNotFoundError, "there is no folder .*absent; make it: mkdir -p"),
        (tmp_path / "file" / "x.safetensors", NotADirectoryError, "file is a file, not a folder; choose another place"),
        (tmp_path / "file" / "in" / "x.safetensors", NotADirectoryError, "file is a file, not a folder"),
        (tmp_path / "folder.safetensors", IsADirectoryError, "it is a folder; add a file's name"),
    ):
        with pytest.raises(error, match=f"cannot write {path}: .*{message}"):
            save_checkpoint(path, LeNet5())


def test_a_failed_write_leaves_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("before", encoding="utf-8")

    def full(tensors: Any, name: Path, metadata: Any) -> None:
        name.write_text("half", encoding="utf-8")
        raise OSError("no space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(path, LeNet5())
    assert path.read_text(encoding="utf-8") == "before"
    assert list(path.parent.iterdir()) == [path]


# Files of another origin.


class Normalised(nn.Module):
    """With a counter, and a buffer that is called a mask but is none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.register_buffer("attention_mask", torch.ones(2, dtype=torch.bool))


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(value) if value.is_floating_point() else value
            for name, value in module.state_dict().items()}  # fmt: skip


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_weights_of_another_origin(suffix: str, tmp_path: Path) -> None:
    file, module = tmp_path / f"weights{suffix}", Normalised()
    state = state_of(module)
    safetensors.torch.save_file(state, file) if suffix == ".safetensors" else torch.save(state, file)
    assert load_weights(module, file) == {}
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("nested", [None, "state_dict", "model_state_dict", "model"])
def test_what_training_scripts_save(tmp_path: Path, nested: str | None, wrapper: str) -> None:
    file, module = tmp_path / "last.ckpt", Normalised()
    state = state_of(module)
    wrapped = {wrapper + name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
    torch.save(wrapped if nested is None else {"epoch": 3, nested: wrapped, "optimizer": {"lr": 0.1}}, file)
    load_weights(module, file)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def test_masks_of_another_origin(tmp_path: Path, pruned: LeNet5) -> None:
    """As torch.nn.utils.prune leaves them: floats."""
    file = tmp_path / "pruned.pt"
    torch.save(pruned.state_dict(), file)
    assert pruned.state_dict()["features.0.weight_mask"].is_floating_point()
    module = LeNet5(num_classes=7)
    load_weights(module, file)
    same(pruned, module)
    assert pruned_fraction(module) == pruned_fraction(pruned) > 0.8


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("executed",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (Evil(), "cannot be read as a state dict .* save the weights alone"),
        (nn.Linear(2, 2), "cannot be read as a state dict .* save the weights alone"),
        ({"weights": 3, "epoch": 1}, "holds weights, epoch; expected a state dict, by itself or under any name"),
        ([torch.zeros(2)], "holds list; expected a state dict"),
        ({}, "holds nothing; expected a state dict"),
        ({"weight": torch.zeros(2)}, r"does not fit LeNet5|lenet5"),
    ],
)
def test_no_state_dict(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "file.pt")
    with pytest.raises(ValueError, match=message):
        load_weights(LeNet5(), tmp_path / "file.pt")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_truncated_pytorch_file(tmp_path: Path, share: float) -> None:
    file, module = tmp_path / "file.pt", LeNet5()
    torch.save(module.state_dict(), file)
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match="cannot be read as a state dict"):
        load_weights(module, file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.zeros(3, 2).to_sparse()}, "holds weight, which is sparse"),
        ({"weight": torch.zeros(3, 2, device="meta")}, "holds weight, which is .* without values"),
        ({"weight_orig": torch.zeros(3, 2), "weight_mask": torch.ones(3, 2)}, "weight is there twice, as weight_orig"),
        ({"weight_mask": torch.ones(1, 1).expand(10**6, 10**6), "weight_orig": torch.zeros(3, 2), "weight": None},
         r"weight_mask is torch.float32 \(1000000, 1000000\), not a mask of weight"),
        ({"weight": None, "weight_mask": torch.ones(1, 1).expand(10**6, 10**6),
          "weight_orig": torch.ones(1, 1).expand(10**6, 10**6)}, r"weight is \(1000000, 1000000\), not \(3, 2\)"),
        ({"scale": None, "scale_orig": torch.ones(3), "scale_mask": torch.ones(3)}, "has a mask, but is no parameter"),
    ],
)  # fmt: skip
def test_tensors_that_are_no_weights(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    module = nn.Linear(2, 3)
    module.register_buffer("scale", torch.ones(3))
    state = {**module.state_dict(), **changes}
    torch.save({name: value for name, value in state.items() if value is not None}, tmp_path / "file.pt")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_weights(module, tmp_path / "file.pt")
    assert list(before) == list(module.state_dict())
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())


def test_no_advice_to_execute_a_file(tmp_path: Path) -> None:
    torch.save(Evil(), tmp_path / "file.pt")
    with pytest.raises(ValueError, match=r"\(UnpicklingError: _pytest.outcomes._Fail\); it is damaged, or") as caught:
        load_weights(LeNet5(), tmp_path / "file.pt")
    assert "weights_only" not in str(caught.value) and "\x1b" not in str(caught.value)


class Extra(nn.Linear):
    """With something in its state dict that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        raise AssertionError("it was given some")


def test_extra_state_is_left_alone(tmp_path: Path) -> None:
    file, module, other = tmp_path / "file.pt", Extra(2, 3), Extra(2, 3)
    torch.save(module.state_dict(), file)
    load_weights(other, file)
    assert torch.equal(module.weight, other.weight)


def test_a_part_that_is_called_as_a_wrapper_is(tmp_path: Path) -> None:
    module = nn.ModuleDict({"module": nn.Linear(2, 2)})
    torch.save(state_of(module), tmp_path / "file.pt")
    assert load_weights(module, tmp_path / "file.pt") == {}
