"""The recurrent tasks: their data, their models, and training both ways."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import safetensors
import torch
from jacsparse.models import BitstreamRNN, Progress, bitstreams, default_settings, load_checkpoint, load_data, train
from torch import nn

import jacsparse


def test_bits_are_ones_as_often_as_their_class_says() -> None:
    data = bitstreams(400, train=4000, test=100)
    assert data.train_inputs.shape == (4000, 1, 400) and data.train_inputs.dtype == torch.uint8
    for label in range(10):
        chosen = data.train_inputs[data.train_labels == label].double()
        # Within five standard deviations (equation 4.1).
        chance = 0.05 + 0.1 * label
        assert 380 <= len(chosen) <= 420
        assert abs(chosen.mean() - chance) < 5 * (chance * (1 - chance) / chosen.numel()) ** 0.5
    assert torch.equal(bitstreams(20, train=30, test=3).train_inputs, bitstreams(20, train=30, test=3).train_inputs)
    assert not torch.equal(
        bitstreams(20, train=30, test=3).train_inputs, bitstreams(20, train=30, test=3, seed=1).train_inputs
    )


def test_the_thesis_settings() -> None:
    settings = default_settings("bitstream")
    assert (settings.epochs, settings.batch, settings.optimizer, settings.lr) == (50, 16, "adam", 3e-5)
    assert settings.data == "bitstream:1000"
    model = BitstreamRNN()
    assert isinstance(model.rnn, nn.RNN) and model.rnn.hidden_size == 20 and model.head.in_features == 20


@pytest.mark.parametrize("length", ["", ":", ":0", ":-3", ":many", ":²"])
def test_bad_lengths(length: str) -> None:
    with pytest.raises(ValueError, match=r"data is .*; expected digits, .*bitstream:STEPS"):
        load_data(f"bitstream{length}")


@pytest.mark.parametrize("schedule", ["auto", "chunked", "relaxed"])
def test_both_ways_give_the_same_curve(schedule: str) -> None:
    data = bitstreams(150, train=64, test=20)
    settings = dataclasses.replace(default_settings("bitstream"), epochs=3, lr=1e-3)
    curves = [
        train(dataclasses.replace(settings, backward=backward, schedule=schedule), data=data)
        for backward in ("bp", "scan")
    ]
    losses = [[point.train_loss for point in result.points] for result in curves]
    assert len(losses[0]) == 12 and max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-5
    assert isinstance(curves[1].model.rnn, jacsparse.nn.RNN)


def test_a_checkpoint_of_a_scan_is_an_ordinary_model(tmp_path: Path) -> None:
    data, out = bitstreams(60, train=48, test=20), tmp_path / "bits.safetensors"
    settings = dataclasses.replace(
        default_settings("bitstream"), backward="scan", epochs=2, lr=1e-2, out=out, plot=False, data="bitstream:60"
    )
    whole = train(settings, data=data)
    model, metadata = load_checkpoint(out)
    assert isinstance(model, BitstreamRNN) and type(model.rnn) is nn.RNN and metadata["model"] == "bitstream"
    x = data.test_inputs.float()
    assert torch.allclose(model(x), whole.model(x), atol=1e-5)
    with safetensors.safe_open(out, "pt") as file:
        assert json.loads(file.metadata()["jacsparse"])["options"]["hidden_size"] == 20


@pytest.mark.parametrize("backward", ["bp", "scan"])
def test_a_training_that_is_broken_off_is_resumed(backward: str, tmp_path: Path) -> None:
    data = bitstreams(60, train=48, test=20)
    settings = dataclasses.replace(
        default_settings("bitstream"), backward=backward, epochs=3, lr=1e-2, plot=False, data="bitstream:60"
    )
    whole = train(settings, data=data)
    parts = dataclasses.replace(settings, out=tmp_path / "bits.safetensors")

    def stop(progress: Progress) -> None:
        if progress.epoch == 2 and progress.iteration == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(parts, data=data, progress=stop)
    resumed = train(parts, data=data, resume=True)
    assert [point.train_loss for point in resumed.points] == [point.train_loss for point in whole.points]
    assert resumed.accuracy == whole.accuracy


@pytest.mark.parametrize(("task", "spec"), [("bitstream", "digits"), ("irmas", "digits"), ("lenet5", "bitstream:20")])
def test_data_of_the_other_kind_are_refused(task: str, spec: str) -> None:
    with pytest.raises(ValueError, match=f"{task} is trained on .*; choose "):
        train(dataclasses.replace(default_settings(task), data=spec))


def test_a_schedule_of_the_other_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule is 'balanced:2'; expected one of auto"):
        dataclasses.replace(default_settings("bitstream"), schedule="balanced:2")
    with pytest.raises(ValueError, match="schedule is 'relaxed'"):
        dataclasses.replace(default_settings("lenet5"), schedule="relaxed")


def test_layers_of_torch_become_ours_with_their_own_parameters() -> None:
    theirs = nn.GRU(3, 4, 2, bidirectional=True, batch_first=True)
    ours = jacsparse.nn.GRU.of(theirs, schedule="chunked")
    assert all(a is b for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    x = torch.randn(2, 5, 3)
    assert torch.allclose(ours(x)[0], theirs(x)[0], atol=1e-6) and ours.schedule == "chunked"
    with pytest.raises(TypeError, match=r"layer is a GRU; expected a torch\.nn\.RNN"):
        jacsparse.nn.RNN.of(theirs)
