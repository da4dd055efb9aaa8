"""Experiments on CIFAR-10 and IRMAS: the commands that the report names, on made-up files in the data sets' formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from jacsparse.models import default_settings, write_tones
from typer.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks import _workloads
from benchmarks._context import Context, Limits
from benchmarks._results import read
from tests.models.test_data import small, written

__all__ = ["small"]


@pytest.fixture(autouse=True)
def _one_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACSPARSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(Context, "limits", Limits(1e10, 1e11))
    monkeypatch.setattr(
        _workloads, "default_settings", lambda task: replace(default_settings(task), epochs=1, retrain_epochs=0)
    )


def groups_of(name: str, data: str, out: Path) -> list[str]:
    """The groups of the rows of one experiment."""
    answer = CliRunner().invoke(command.app, ["run", name, "--data", data, "--out", str(out)])
    assert answer.exit_code == 0, answer.output
    rows = read(out / f"{name}.cpu.json").rows
    assert not [row.not_measured for row in rows if row.role == "ours" and row.not_measured]
    return list(dict.fromkeys(row.group for row in rows))


@pytest.mark.usefixtures("small")
def test_lenet_trains_as_long_as_published_on_cifar(tmp_path: Path) -> None:
    written("cifar10", tmp_path)
    first, second = groups_of("lenet_convergence", f"cifar10:{tmp_path}", tmp_path / "out")
    assert first.startswith("float32: 1 iterations on cifar10, batch 256") and second.startswith("float64")


@pytest.mark.full
@pytest.mark.usefixtures("small")
def test_flop_of_a_network_trained_on_cifar(tmp_path: Path) -> None:
    written("cifar10", tmp_path)
    assert "What was counted" in groups_of("flop_analysis", f"cifar10:{tmp_path}", tmp_path / "out")


def test_a_gru_trains_as_long_as_published_on_irmas(tmp_path: Path) -> None:
    write_tones(tmp_path / "IRMAS-TrainingData", recordings=1, excerpts=1)
    (group,) = groups_of("recurrent_convergence", f"irmas:{tmp_path}", tmp_path / "out")
    assert group == "GRU on IRMAS: 1 iterations, batch 16, Adam, learning rate 3e-05"
    answer = CliRunner().invoke(command.app, ["run", "recurrent_convergence", "--data", f"cifar10:{tmp_path}"])
    assert answer.exit_code == 2 and "takes no other data than its own" in answer.stderr
