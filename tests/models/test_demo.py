"""The demo, with a smaller model and a shorter training; in the long form as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from jacsparse.models import TrainSettings, bitstreams, demo

PICTURES = ("flop.png", "vgg11.png", "vgg11.csv", "vgg11.safetensors", "gru-bp.png", "gru-scan.png", "gru-scan.csv")


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(out: Path, seed: int) -> TrainSettings:
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

    monkeypatch.setattr(demo, "vgg11_settings", settings)
    monkeypatch.setattr(
        demo,
        "_sound_settings",
        lambda out, seed: TrainSettings(task="irmas", out=out / "gru.safetensors", epochs=1, batch=8, lr=0.01),
    )
    monkeypatch.setattr(demo, "_sound_data", lambda: bitstreams(20, train=40, test=10))
    monkeypatch.setattr(demo, "_LEAST_HEARD", 0.0)


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("enough", [True, False])
def test_verdict(
    enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_LEAST_ACCURACY", 0.0 if enough else 1.0)
    monkeypatch.setattr(demo, "_MOST_LOST", 1.0)
    assert demo.main(["--out", str(tmp_path / "made" / "here")]) == (0 if enough else 1)
    shown = capsys.readouterr().out
    assert ("FAILED" in shown) is not enough
    for part in ("critical path", "scan's gradient", "losses by jacsparse", "passed", *PICTURES):
        assert part in shown
    for name in PICTURES:
        assert (tmp_path / "made" / "here" / name).stat().st_size


@pytest.mark.usefixtures("_quick")
def test_a_wrong_gradient_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_LEAST_ACCURACY", 0.0)
    monkeypatch.setattr(demo, "_MOST_LOST", 1.0)
    gradients = demo._gradients
    calls = []

    def wrong(*arguments: object) -> tuple[object, ...]:
        calls.append(arguments)
        return tuple(value * (1 + 1e-9 * (len(calls) - 1)) for value in gradients(*arguments))

    monkeypatch.setattr(demo, "_gradients", wrong)
    assert demo.main(["--out", str(tmp_path)]) == 1


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_made(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert demo.main(["--out", str(tmp_path / place)]) == 2
    assert f"error: cannot make the folder {tmp_path / place}" in capsys.readouterr().err


@pytest.mark.full
def test_as_it_is(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "jacsparse.models.demo", "--out", str(tmp_path)], check=True)
