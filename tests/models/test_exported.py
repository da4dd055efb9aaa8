"""Exported programs as models: what they compute, and programs that cannot be taken."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from jacsparse.models import LeNet5, load_exported, prune_weights
from torch import nn

import jacsparse


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x)
        return (self.head(y) + y[:, :2]).flatten(1)


def exported(file: Path, *, any_batch: bool = True) -> nn.Module:
    module = Branched().eval()
    shapes = ({0: torch.export.Dim("batch", max=1024)},) if any_batch else None
    program = torch.export.export(module, (torch.randn(2, 3, 6, 5),), dynamic_shapes=shapes, strict=False)
    torch.export.save(program, file)
    return module


def test_an_exported_program(tmp_path: Path) -> None:
    module = exported(tmp_path / "net.pt2")
    loaded = load_exported(tmp_path / "net.pt2")
    assert loaded.input_shape == (3, 6, 5)
    x = torch.randn(3, 3, 6, 5)
    assert torch.equal(loaded(x), module(x))
    assert jacsparse.jacobian(loaded, x).pattern == jacsparse.jacobian(module, x).pattern
    assert jacsparse.verify(loaded.double(), x.double()).checks[0].path == "stem.0"
    assert {*loaded.state_dict()} == {*module.state_dict()}
    # Its parts are the ones that run.
    loaded.get_submodule("stem.0").weight.data.zero_()
    assert not torch.equal(loaded(x.double()), module.double()(x.double()))


def test_an_exported_program_of_a_pruned_network(tmp_path: Path) -> None:
    pruned = LeNet5(num_classes=7).eval()
    prune_weights(pruned, 0.9)
    file, x = tmp_path / "lenet.pt2", torch.randn(2, 3, 32, 32)
    shapes = ({0: torch.export.Dim("batch", max=1024)},)
    with warnings.catch_warnings():
        # Of weights that pruning's hooks assign.
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(pruned, (x,), dynamic_shapes=shapes, strict=False), file)
    loaded = load_exported(file)
    assert jacsparse.jacobian(loaded, x).pattern == jacsparse.jacobian(pruned, x).pattern
    actual, expected = (jacsparse.count_flop(module, (3, 32, 32)) for module in (loaded, pruned))
    assert actual.layers == expected.layers


def test_an_exported_program_of_no_known_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(torch.export, "unflatten", refuse)
    module, x = exported(tmp_path / "net.pt2"), torch.randn(3, 3, 6, 5)
    loaded = load_exported(tmp_path / "net.pt2").eval()
    assert torch.equal(loaded(x), module(x))
    assert torch.equal(jacsparse.jacobian(loaded, x).values, jacsparse.jacobian(module, x).values)


def test_exported_programs_that_cannot_be_taken(tmp_path: Path) -> None:
    file = tmp_path / "net.pt2"
    with pytest.raises(FileNotFoundError, match="there is no exported program"):
        load_exported(file)
    exported(file, any_batch=False)
    with pytest.raises(ValueError, match=r"net.pt2: .* takes an input of \('2', '3', '6', '5'\); expected any batch"):
        load_exported(file)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"cannot be loaded as an exported program .* export it again"):
        load_exported(file)

    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    torch.export.save(torch.export.export(Two(), (torch.zeros(2), torch.zeros(2))), file)
    with pytest.raises(ValueError, match="takes 2 inputs; expected one tensor"):
        load_exported(file)

    shapes = {"input": {0: torch.export.Dim("batch")}}
    named = torch.export.export(nn.ReLU(), (), {"input": torch.zeros(2, 3)}, dynamic_shapes=shapes)
    torch.export.save(named, file)
    with pytest.raises(ValueError, match="takes its input by name, or among others in a list; expected one tensor"):
        load_exported(file)

    torch.export.save(torch.export.export(nn.ReLU(), (torch.tensor(1.0),)), file)
    with pytest.raises(ValueError, match=r"takes an input of \(\); expected any batch"):
        load_exported(file)
