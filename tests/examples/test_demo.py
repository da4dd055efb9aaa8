"""The demo, with a smaller model and a shorter training; in the long form as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jacsparse.models import TrainSettings, bitstreams
from torch import nn

from examples import demo

PICTURES = ("flop.png", "vgg11.png", "vgg11.csv", "vgg11.safetensors", "gru-bp.png", "gru-scan.png", "gru-scan.csv")


def quick(out: Path, seed: int) -> TrainSettings:
    return TrainSettings(
        task="lenet5",
        out=out / "vgg11.safetensors",
        epochs=1,
        batch=256,
        lr=0.01,
        prune=0.97,
        retrain_epochs=1,
        seed=seed,
    )


def test_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sounds, folder = demo.sounds, tmp_path / "made" / "here"
    monkeypatch.setattr(demo, "vgg11_settings", quick)
    monkeypatch.setattr(
        demo,
        "gru_settings",
        lambda out, seed: TrainSettings(task="irmas", out=out / "gru.safetensors", epochs=1, batch=8, lr=0.01),
    )
    monkeypatch.setattr(demo, "sounds", lambda settings: sounds(settings, bitstreams(20, train=40, test=10)))
    # A training this short classifies nothing.
    assert demo.main(["--out", str(folder)]) == 1
    shown = capsys.readouterr().out
    for part in ("critical path", "scan's gradient", "losses by jacsparse", "passed", "FAILED", *PICTURES):
        assert part in shown
    for name in PICTURES:
        assert (folder / name).stat().st_size
    monkeypatch.setattr(demo, "images", lambda settings, picture: [demo.Check("one", "1", "1")])
    monkeypatch.setattr(demo, "sounds", lambda settings: [demo.Check("another", "2")])
    assert demo.main(["--out", str(folder)]) == 0


def test_a_wrong_gradient_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, factors = demo.gradients, iter((1 + 1e-9, 1.0))

    def wrong(runner: nn.Module, model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        factor = next(factors)
        return tuple(factor * each for each in gradients(runner, model, x))

    monkeypatch.setattr(demo, "gradients", wrong)
    checks = demo.images(quick(tmp_path, 0), tmp_path / "flop.png")
    (check,) = [check for check in checks if check.name.startswith("scan's gradient")]
    assert not check.passed
    assert demo.largest_difference([torch.zeros(2), torch.ones(2)], [torch.zeros(2), torch.full((2,), 2.0)]) == 0.5


@pytest.mark.full
def test_as_it_is(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "examples.demo", "--out", str(tmp_path)], check=True)
