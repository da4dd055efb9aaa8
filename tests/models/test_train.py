"""Training: settings, curves, resuming, both ways of back-propagating, and outputs that are checked first."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from jacsparse.models import (
    Dataset,
    LeNet5,
    Progress,
    TrainSettings,
    default_settings,
    evaluate,
    load_checkpoint,
    load_data,
    progress_bar,
    prunable,
    prune_weights,
    pruned_fraction,
    save_checkpoint,
    train,
)
from jacsparse.models import training as _train
from jacsparse.models.curves import Point, from_tensor, plot_curves, save_csv, to_tensor
from jacsparse.models.nested_state import from_tensors, to_tensors
from rich.console import Console

from jacsparse import figures


@pytest.fixture(scope="module")
def data() -> Dataset:
    """Few of the digits."""
    whole = load_data("digits")
    return dataclasses.replace(
        whole,
        train_inputs=whole.train_inputs[:40],
        train_labels=whole.train_labels[:40],
        test_inputs=whole.test_inputs[:20],
        test_labels=whole.test_labels[:20],
    )


@pytest.fixture
def settings(tmp_path: Path) -> TrainSettings:
    return TrainSettings(
        task="lenet5",
        out=tmp_path / "lenet5.safetensors",
        epochs=2,
        batch=16,
        lr=0.01,
        prune=0.9,
        retrain_epochs=2,
        plot=False,
    )


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(value, other[key]) for key, value in one.items())


def curve(points: list[Point]) -> list[tuple[object, ...]]:
    """All but the times, with NaN as None."""
    rows = [dataclasses.astuple(dataclasses.replace(point, seconds=0.0)) for point in points]
    return [tuple(None if value != value else value for value in row) for row in rows]


def test_the_thesis_settings() -> None:
    lenet, vgg = default_settings("lenet5"), default_settings("vgg11")
    assert (lenet.batch, lenet.optimizer, lenet.lr, lenet.momentum, lenet.prune) == (256, "sgd", 0.001, 0.9, 0.0)
    assert (vgg.epochs, vgg.prune, vgg.scope, vgg.retrain_epochs) == (100, 0.97, "layer", 100)


def test_training_learns(settings: TrainSettings) -> None:
    settings = dataclasses.replace(settings, out=None, optimizer="adam", lr=2e-3, batch=32, prune=0.0, retrain_epochs=0)
    result = train(settings)
    assert result.accuracy["trained"] > 0.8
    assert result.points[-1].train_loss < 0.7 * result.points[0].train_loss
    assert not result.model.training


def test_pruning_and_retraining(settings: TrainSettings, data: Dataset) -> None:
    result = train(settings, data=data)
    assert list(result.accuracy) == ["trained", "pruned", "retrained"]
    assert pruned_fraction(result.model) == pytest.approx(0.9, abs=1e-3)
    for _, part in prunable(result.model):
        assert int((part.weight == 0).sum()) == round(0.9 * part.weight.numel())
    assert [(point.phase, point.epoch) for point in result.points[::3]] == [
        ("train", 1), ("train", 2), ("retrain", 1), ("retrain", 2),
    ]  # fmt: skip
    assert [point.iteration for point in result.points] == list(range(1, 13))
    seconds = [point.seconds for point in result.points]
    assert seconds == sorted(seconds)


def test_without_retraining(settings: TrainSettings, data: Dataset) -> None:
    settings = dataclasses.replace(settings, retrain_epochs=0)
    result = train(settings, data=data)
    assert list(result.accuracy) == ["trained", "pruned"]
    loaded, metadata = load_checkpoint(settings.out)
    assert equal(state(result.model), state(loaded))
    assert metadata["accuracy"] == result.accuracy
    again = train(settings, data=data, resume=True)
    assert equal(state(result.model), state(again.model))


def test_files(settings: TrainSettings, data: Dataset) -> None:
    settings = dataclasses.replace(settings, plot=True)
    result = train(settings, data=data)
    loaded, metadata = load_checkpoint(settings.out)
    assert equal(state(result.model), state(loaded))
    assert (metadata["source"], metadata["classes"], metadata["epoch"]) == ("digits", 10, 4)
    assert metadata["mean"] == pytest.approx(data.mean)
    rows = list(csv.DictReader(settings.outputs[1].open(encoding="utf-8")))
    assert list(rows[0]) == [
        "phase", "epoch", "iteration", "seconds", "train_loss", "test_loss", "test_accuracy",
    ]  # fmt: skip
    assert [float(row["train_loss"]) for row in rows] == [point.train_loss for point in result.points]
    assert [bool(row["test_accuracy"]) for row in rows] == [False, False, True] * 4
    assert settings.outputs[2].read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in Path(settings.out).parent.iterdir()) == sorted(
        path.name for path in settings.outputs
    )


def test_the_seed_decides(settings: TrainSettings, data: Dataset) -> None:
    settings = dataclasses.replace(settings, out=None, augment=True)
    one, two = (train(settings, data=data) for _ in range(2))
    assert curve(one.points) == curve(two.points)
    assert equal(state(one.model), state(two.model))
    other = train(dataclasses.replace(settings, seed=1), data=data)
    assert curve(one.points) != curve(other.points)


def test_the_callers_random_state_is_left_alone(settings: TrainSettings, data: Dataset) -> None:
    before = torch.get_rng_state()
    train(settings, data=data)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("done", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_resumed_as_if_never_broken_off(settings: TrainSettings, data: Dataset, done: int, optimizer: str) -> None:
    changes: dict[str, Any] = {"augment": True, "decay": "cosine", "weight_decay": 1e-3, "retrain_lr": 0.02}
    settings = dataclasses.replace(settings, optimizer=optimizer, **changes)
    whole = train(dataclasses.replace(settings, out=None), data=data)

    def break_off(progress: Progress) -> None:
        # In the middle of the epoch that follows.
        before = 0 if progress.phase == "train" else 2
        if before + progress.epoch == done + 1 and progress.iteration == 2:
            raise KeyboardInterrupt

    if done < 4:
        with pytest.raises(KeyboardInterrupt):
            train(settings, data=data, progress=break_off)
    else:
        train(settings, data=data)
    resumed = train(settings, data=data, resume=True)
    assert curve(resumed.points) == curve(whole.points)
    assert equal(state(resumed.model), state(whole.model))
    assert resumed.accuracy == whole.accuracy
    assert len(settings.outputs[1].read_text(encoding="utf-8").splitlines()) == 13


def test_engines_retrain_alike(settings: TrainSettings, data: Dataset) -> None:
    dense = train(dataclasses.replace(settings, out=None), data=data)
    settings = dataclasses.replace(settings, engine="sparse")
    sparse = train(settings, data=data)
    losses = [torch.tensor([point.train_loss for point in result.points]) for result in (sparse, dense)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    assert set(state(sparse.model)) == set(state(dense.model)) and sparse.accuracy == dense.accuracy
    loaded, _ = load_checkpoint(settings.out)
    assert equal(state(loaded), state(sparse.model))

    def break_off(progress: Progress) -> None:
        if progress.phase == "retrain" and progress.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(settings, data=data, progress=break_off)
    resumed = train(settings, data=data, resume=True)
    assert curve(resumed.points) == curve(sparse.points) and equal(state(resumed.model), state(sparse.model))


def test_dropout_is_resumed_too(settings: TrainSettings, data: Dataset) -> None:
    few = dataclasses.replace(data, train_inputs=data.train_inputs[:4], train_labels=data.train_labels[:4])
    settings = dataclasses.replace(settings, task="vgg11", batch=4, prune=0.0, retrain_epochs=0)
    whole = train(dataclasses.replace(settings, out=None), data=few)

    def break_off(progress: Progress) -> None:
        if progress.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(settings, data=few, progress=break_off)
    assert curve(train(settings, data=few, resume=True).points) == curve(whole.points)


@pytest.mark.parametrize(
    "changes", [{"backward": "scan", "schedule": "linear"}, {"backward": "leapfrog", "threads": 2}]
)
def test_batch_normalisation_by_other_backward_passes(data: Dataset, changes: dict[str, Any]) -> None:
    settings = dataclasses.replace(default_settings("resnet8"), epochs=1, batch=20)
    losses = [
        [point.train_loss for point in train(each, data=data).points]
        for each in (settings, dataclasses.replace(settings, **changes))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"backward": "scan", "schedule": "blelloch"},
        {"backward": "scan", "schedule": "linear"},
        {"backward": "leapfrog", "threads": 2},
    ],
)
def test_other_backward_passes_give_the_same_curves(
    settings: TrainSettings, data: Dataset, changes: dict[str, Any]
) -> None:
    settings = dataclasses.replace(settings, out=None, epochs=1, retrain_epochs=1)
    bp = train(settings, data=data)
    ours = train(dataclasses.replace(settings, **changes), data=data)
    assert [p.train_loss for p in ours.points] == pytest.approx([p.train_loss for p in bp.points], rel=1e-4)
    assert [p.train_loss for p in ours.points] != pytest.approx([p.train_loss for p in ours.points][:1] * 6, rel=1e-4)
    for actual, expected in zip(ours.model.parameters(), bp.model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def test_progress(settings: TrainSettings, data: Dataset) -> None:
    seen: list[Progress] = []
    result = train(settings, data=data, progress=seen.append)
    assert len(seen) == 12 + 4
    assert [event.loss for event in seen if event.accuracy is None] == [point.train_loss for point in result.points]
    last, accuracy = result.points[-1].train_loss, result.accuracy["retrained"]
    assert seen[-1] == Progress("retrain", 2, 2, 3, 3, last, result.model, accuracy)


def test_progress_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with progress_bar(console) as progress:
        progress(Progress("train", 2, 2, 3, 3, 0.5, torch.nn.Identity()))
        progress(Progress("train", 2, 2, 3, 3, 0.5, torch.nn.Identity(), 0.875))
    shown = console.file.getvalue()
    for part in ("train, epoch 2/2", "loss 0.500", "test 87.5%"):
        assert part in shown
    for terminal in (False, True):
        console = Console(file=io.StringIO(), force_terminal=terminal)
        with pytest.raises(ValueError, match="too early"), progress_bar(console):
            raise ValueError("too early")
        assert not console.file.getvalue()


def test_augmentation_shifts_and_mirrors() -> None:
    images = torch.zeros(64, 1, 32, 32)
    images[:, :, 10, 10] = 1.0
    places = {tuple(place.tolist()) for place in _train._augmented(images, False).nonzero()[:, 2:]}
    assert all(6 <= row <= 14 and 6 <= column <= 14 for row, column in places)
    assert len(places) > 20
    mirrored = {column for _, column in (tuple(p.tolist()) for p in _train._augmented(images, True).nonzero()[:, 2:])}
    assert any(column <= 14 for column in mirrored)
    assert any(17 <= column <= 25 for column in mirrored)


def test_learning_rates_along_a_cosine(settings: TrainSettings, data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step = _train._Run._step

    def seen(run: Any, chosen: torch.Tensor) -> float:
        rates.append(run.trainer.optimizers[0].param_groups[0]["lr"])
        return step(run, chosen)

    monkeypatch.setattr(_train._Run, "_step", seen)
    train(dataclasses.replace(settings, out=None, decay="cosine", retrain_lr=0.1), data=data)
    cosine = [0.5 * (1 + math.cos(math.pi * number / 6)) for number in range(6)]
    assert rates == pytest.approx([0.01 * part for part in cosine] + [0.1 * part for part in cosine])


def test_evaluation_leaves_modes_as_they_are() -> None:
    model = LeNet5()
    model.features.eval()
    evaluate(model, torch.randn(300, 3, 32, 32), torch.zeros(300, dtype=torch.int64))
    assert model.training
    assert not model.features.training


def test_curves_as_tensors_and_pictures(tmp_path: Path) -> None:
    points = [Point("train", 1, 1, 0.5, 2.0), Point("retrain", 1, 2, 1.0, 1.5, 1.25, 0.5)]
    assert curve(from_tensor(to_tensor(points))) == curve(points)
    assert from_tensor(to_tensor([])) == []
    save_csv(points, tmp_path / "curve.csv")
    lines = (tmp_path / "curve.csv").read_text(encoding="utf-8").splitlines()
    assert lines[1:] == ["train,1,1,0.5,2.0,,", "retrain,1,2,1.0,1.5,1.25,0.5"]
    plot_curves(points, tmp_path / "curve.png", "two points")
    assert (tmp_path / "curve.png").stat().st_size > 1000


@pytest.mark.parametrize("loss", [2.3, 0.0])
def test_a_flat_curve_is_not_on_the_frame(loss: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    save = figures.save_figure

    def noting(figure: Any, path: Path) -> None:
        limits.extend(axes.get_ylim() for axes in figure.axes)
        save(figure, path)

    monkeypatch.setattr(figures, "save_figure", noting)
    plot_curves([Point("train", 1, 1, 0.5, loss), Point("train", 1, 2, 1.0, loss)], tmp_path / "curve.png", "flat")
    assert len(limits) == 2 and all(low <= loss < high for low, high in limits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "vgg16"}, "task is 'vgg16'; expected one of bitstream, "),
        (
            {"data": "mnist"},
            "data is 'mnist'; expected digits, cifar10:DIR, ",
        ),
        ({"backward": "forward"}, "backward is 'forward'; expected one of bp, ddg, leapfrog, scan"),
        ({"backward": "leapfrog"}, "backward is 'leapfrog'; set threads, as in 2"),
        ({"backward": "leapfrog", "threads": 0}, "threads is 0; expected an integer"),
        ({"threads": 2}, "threads is 2, but backward is 'bp'; set backward to 'leapfrog'"),
        ({"backward": "leapfrog", "threads": 2, "task": "irmas"}, "irmas has a single recurrent layer"),
        ({"schedule": "brent"}, "schedule"),
        ({"optimizer": "lion"}, "optimizer is 'lion'"),
        ({"decay": "step"}, "decay is 'step'"),
        ({"scope": "channel"}, "scope is 'channel'"),
        ({"engine": "csr"}, "engine is 'csr'; expected one of dense, sparse"),
        ({"engine": "sparse", "backward": "scan"}, "engine is 'sparse', but backward is 'scan'"),
        ({"epochs": 0}, "epochs is 0; expected an integer of at least 1"),
        ({"batch": 2.5}, "batch is 2.5"),
        ({"retrain_epochs": -1}, "retrain_epochs is -1; expected an integer of at least 0"),
        ({"seed": -1}, "seed is -1"),
        ({"lr": 0.0}, r"lr is 0.0; expected a number in \(0, inf\)"),
        ({"retrain_lr": float("nan")}, "retrain_lr is nan"),
        ({"momentum": 1.0}, r"momentum is 1.0; expected a number in \[0, 1\)"),
        ({"weight_decay": -1e-4}, "weight_decay is -0.0001"),
        ({"prune": 1.0}, r"the fraction to prune is 1.0; expected a number in \[0, 1\)"),
        ({"prune": 97}, "the fraction to prune is 97"),
        ({"prune": 0.0}, "retrain_epochs is 2, but nothing is pruned; set prune"),
        ({"out": "model.pt"}, "out is 'model.pt'; expected a file that ends in .safetensors"),
    ],
)
def test_bad_settings(settings: TrainSettings, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(settings, **changes)


def test_unknown_task() -> None:
    with pytest.raises(ValueError, match="task is 'resnet20'; expected one of bitstream, "):
        default_settings("resnet20")


@pytest.mark.parametrize("place", ["absent/x.safetensors", "file/x.safetensors", "folder.safetensors"])
def test_outputs_are_checked_first(
    settings: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "folder.safetensors").mkdir()
    monkeypatch.setattr(_train, "load_data", lambda _: pytest.fail("data were loaded"))
    with pytest.raises(OSError, match=f"cannot write {tmp_path / place}"):
        train(dataclasses.replace(settings, out=tmp_path / place))


def test_pictures_are_checked_first(settings: TrainSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_train, "load_data", lambda _: pytest.fail("data were loaded"))
    settings = dataclasses.replace(settings, plot=True)
    settings.outputs[2].mkdir()
    with pytest.raises(IsADirectoryError, match=r"lenet5.png: it is a folder"):
        train(settings)
    settings.outputs[2].rmdir()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'jacsparse\[plot\]'"):
        train(settings)


def test_missing_data(settings: TrainSettings, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cifar-10-binary\.tar\.gz"):
        train(dataclasses.replace(settings, data=f"cifar10:{tmp_path}"))


def test_a_loss_that_is_not_finite(settings: TrainSettings, data: Dataset) -> None:
    with pytest.raises(
        FloatingPointError, match=r"the loss is \w+ in train epoch \d, iteration \d; lower the learning rate"
    ):
        train(dataclasses.replace(settings, lr=1e12), data=data)


def test_nothing_to_resume(settings: TrainSettings, data: Dataset) -> None:
    with pytest.raises(FileNotFoundError, match=r"lenet5.safetensors to resume; train without resume first"):
        train(settings, data=data, resume=True)
    with pytest.raises(ValueError, match="out is None"):
        train(dataclasses.replace(settings, out=None), data=data, resume=True)
    save_checkpoint(settings.out, LeNet5())
    with pytest.raises(ValueError, match=r"holds lenet5\(num_classes=10, in_channels=3\), but no training to resume"):
        train(settings, data=data, resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.5, "seed": 3}, "trained with lr 0.01, not 0.5, seed 0, not 3; resume with the same settings"),
        ({"task": "vgg11"}, r"is of lenet5\(.*\) trained with task 'lenet5', not 'vgg11'"),
    ],
)
def test_resumed_with_other_settings(
    settings: TrainSettings, data: Dataset, changes: dict[str, Any], message: str
) -> None:
    train(settings, data=data)
    with pytest.raises(ValueError, match=message):
        train(dataclasses.replace(settings, **changes), data=data, resume=True)


def as_earlier_versions_wrote_it(settings: TrainSettings, changes: dict[str, torch.Tensor | None]) -> None:
    """Put the state of the training into the checkpoint, with changes."""
    tensors = safetensors.torch.load_file(settings.training_state)
    prefix = "training/trainer/"
    trainer = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    file = io.BytesIO()
    torch.save(from_tensors(trainer), file)
    tensors["training/trainer"] = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    write(settings.out, {**tensors, **changes}, metadata_of(settings.training_state))
    settings.training_state.unlink()


def metadata_of(path: Path | str | None) -> dict[str, str]:
    with safetensors.safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata()
        return metadata


def write(path: Path | str | None, tensors: dict[str, torch.Tensor | None], metadata: dict[str, str]) -> None:
    safetensors.torch.save_file({key: value for key, value in tensors.items() if value is not None}, path, metadata)


def _written(state: dict[str, Any]) -> torch.Tensor:
    """A trainer's state as checkpoints of earlier versions have it."""
    for optimizer in state["optimizers"]:
        optimizer["param_groups"] = torch.optim.SGD(LeNet5().parameters(), lr=0.1).state_dict()["param_groups"]
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


@pytest.mark.parametrize(
    "changes",
    [
        {"training/points": None},
        {"training/points": torch.zeros(3)},
        {"training/random": torch.zeros(7, dtype=torch.uint8)},
        {"training/random": torch.zeros(7)},
        {"training/trainer": torch.zeros(7, dtype=torch.uint8)},
        {"training/trainer": None},
        {"training/trainer": _written({"optimizers": []})},
        {"training/trainer": _written({"optimizers": [{"state": {0: {"momentum_buffer": torch.zeros(7)}}}]})},
    ],
)
def test_damaged_training_state(
    settings: TrainSettings, data: Dataset, changes: dict[str, torch.Tensor | None]
) -> None:
    train(settings, data=data)
    as_earlier_versions_wrote_it(settings, changes)
    with pytest.raises(
        ValueError, match=r"lenet5.safetensors cannot be resumed .* damaged: train again without resume"
    ):
        train(settings, data=data, resume=True)


def _tree(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    "changes",
    [
        {"training/points": None},
        {"training/random": torch.zeros(7)},
        {"training/trainer/0": None},
        {"training/trainer/0": torch.zeros(7)},
        {"training/trainer/tree": None},
        {"training/trainer/tree": torch.zeros(7)},
        {"training/trainer/tree": torch.zeros(7, dtype=torch.uint8)},
        {"training/trainer/tree": _tree({"dict": [["optimizers", {"list": []}]]})},
        {"training/trainer/tree": _tree({"dict": [["optimizers", {"set": []}]]})},
        {"training/trainer/tree": _tree({"dict": [["optimizers", {"list": [{"dict": [["state", None]]}]}]]})},
        {"training/trainer/tree": _tree({"dict": [[{"list": []}, 1]]})},
        {"training/trainer/tree": _tree({})},
        {"training/trainer/tree": _tree(None)},
    ],
)
def test_damaged_state_beside_the_checkpoint(
    settings: TrainSettings, data: Dataset, changes: dict[str, torch.Tensor | None]
) -> None:
    train(settings, data=data)
    path = settings.training_state
    write(path, {**safetensors.torch.load_file(path), **changes}, metadata_of(path))
    with pytest.raises(ValueError, match=r"lenet5.training cannot be resumed .* damaged: train again without resume"):
        train(settings, data=data, resume=True)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"lenet5.training cannot be read as a checkpoint"):
        train(settings, data=data, resume=True)


def test_nested_states() -> None:
    state = {"a": [1, 2.5, True, None, "x", (), []], 3: (math.inf, {"tensor": {}}), (1, "b"): {"dict": [0.1]}}
    tensors = to_tensors({"plain": state, "none": torch.zeros(0), "bits": torch.ones(2, dtype=torch.bool)})
    again = from_tensors(tensors)
    assert again.pop("bits").tolist() == [True, True] and again.pop("none").shape == (0,)
    assert repr(again) == repr({"plain": state})
    with pytest.raises(TypeError, match=r"a state has a set; expected tensors, numbers, strings and containers"):
        to_tensors([{1, 2}])


@pytest.mark.parametrize("prune", [0.0, 0.9])
def test_the_checkpoint_has_the_weights_alone(settings: TrainSettings, data: Dataset, prune: float) -> None:
    trained = train(dataclasses.replace(settings, prune=prune, retrain_epochs=int(prune > 0)), data=data).model
    weights, model = safetensors.torch.load_file(settings.out), LeNet5()
    if prune:
        prune_weights(model, 0.5)
    model.load_state_dict(weights)
    assert sorted(weights) == sorted(trained.state_dict()) and equal(state(model), state(trained))


@pytest.mark.parametrize("done", [1, 3])
def test_checkpoints_of_earlier_versions_are_resumed(settings: TrainSettings, data: Dataset, done: int) -> None:
    whole = train(dataclasses.replace(settings, out=None), data=data)
    break_off_after(settings, data, done)
    as_earlier_versions_wrote_it(settings, {})
    resumed = train(settings, data=data, resume=True)
    assert curve(resumed.points) == curve(whole.points)
    assert equal(state(resumed.model), state(whole.model))
    # Its state has a file of its own now.
    assert not any(name.startswith("training/") for name in safetensors.torch.load_file(settings.out))
    assert curve(train(settings, data=data, resume=True).points) == curve(whole.points)


def break_off_after(settings: TrainSettings, data: Dataset, done: int) -> None:
    """Train until some epochs are done, and an iteration of the next one."""

    def stop(progress: Progress) -> None:
        before = 0 if progress.phase == "train" else 2
        if before + progress.epoch == done + 1 and progress.iteration == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(settings, data=data, progress=stop)


@pytest.mark.parametrize("failing", ["lenet5.training", "lenet5.safetensors", "lenet5.csv"])
@pytest.mark.parametrize("done", [0, 1, 3])
def test_broken_off_between_files(
    settings: TrainSettings, data: Dataset, monkeypatch: pytest.MonkeyPatch, failing: str, done: int
) -> None:
    whole = train(dataclasses.replace(settings, out=None), data=data)
    saved: list[str] = []

    def broken(save: Any, place: int) -> Any:
        def saving(*arguments: Any, **options: Any) -> None:
            name = Path(arguments[place]).name
            if name == failing and saved.count(name) == done:
                raise KeyboardInterrupt
            saved.append(name)
            save(*arguments, **options)

        return saving

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(_train, "save_checkpoint", broken(_train.save_checkpoint, 0))
        patched.setattr(_train, "save_csv", broken(_train.save_csv, 1))
        train(settings, data=data)
    if done == 0 and failing == "lenet5.training":
        with pytest.raises(FileNotFoundError, match=r"lenet5.safetensors to resume; train without resume first"):
            train(settings, data=data, resume=True)
        return
    resumed = train(settings, data=data, resume=True)
    assert curve(resumed.points) == curve(whole.points)
    loaded, metadata = load_checkpoint(settings.out)
    assert equal(state(loaded), state(whole.model)) and metadata["accuracy"] == whole.accuracy
    assert len(settings.outputs[1].read_text().splitlines()) == 13


def test_weights_without_their_training(settings: TrainSettings, data: Dataset) -> None:
    train(settings, data=data)
    settings.training_state.unlink()
    with pytest.raises(ValueError, match=r"no training to resume, and there is no .*lenet5.training, which would have"):
        train(settings, data=data, resume=True)


def test_resumed_with_other_classes(settings: TrainSettings, data: Dataset) -> None:
    train(settings, data=data)
    with pytest.raises(ValueError, match="but the data have 100 classes and 3 channels; resume with the data"):
        train(settings, data=dataclasses.replace(data, classes=100), resume=True)
