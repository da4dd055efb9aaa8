"""``python -m benchmarks gpu-call``, on a CUDA device that is made up: what it writes, and what ends a phase."""

from __future__ import annotations

import os
import pickle
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks import _calls, _gpu_call, layer_calls
from benchmarks._calls import GRAPH
from benchmarks._context import Context, Limits, Timing
from benchmarks._experiment import Experiment, Grid
from benchmarks._gpu_call import CallName, gpu_call, here, in_a_process, phases
from benchmarks._gpu_phases import Compiling, Ending, KernelTests, Measuring, Phase, Running, Versions
from benchmarks._pages import ROOT
from benchmarks._recurrent import RecurrentWorkload
from benchmarks._results import read
from benchmarks._rows import Row
from benchmarks.chunk_sweep import ChunkSweep
from benchmarks.gru_breakdown import GruBreakdown
from benchmarks.layer_calls import LayerCalls
from benchmarks.rnn_sensitivity import RnnSensitivity
from benchmarks.spgemm import Spgemm
from tests.benchmarks.made_up import Device, device
from tests.benchmarks.test_experiments import small_network
from tests.cuda.fibers import COMPILER
from tests.cuda.harness import emulated

#: Two tests of kernels, of which one fails; in a process without CuPy.
KERNEL_TESTS = """
import sys
import pytest
import torch
from jacsparse import patterns
from jacsparse.runtime import KERNEL_FILES

sys.modules["cupy"] = None
torch.cuda.is_current_stream_capturing = lambda: False

def launch(kind):
    device = torch.device("cuda", 0)
    KERNEL_FILES["values.cu"].launch(f"take<{kind}, int>", [1], [32], None, None, 3, None, device=device)

def test_float():
    launch("float")

def test_double():
    with pytest.raises(ImportError):
        launch("double")

@pytest.mark.skip
def test_nothing():
    pass
"""
#: Compiles as on a GPU, by a CuPy that is made up.
MADE_UP_COMPILER = """
from benchmarks import _compile_kernels
from benchmarks._made_up_gpu import made_up_gpu
with made_up_gpu():
    _compile_kernels.main()
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(Context, "limits", Limits(1e10, 1e11))
    monkeypatch.setattr(Context, "place", "cpu")
    monkeypatch.setattr(_calls, "_BLOCK", 1e-6)
    return device(monkeypatch)


def lines(folder: Path) -> list[str]:
    """The log's, without times."""
    return [line.partition(" s  ")[2] or line.strip() for line in (folder / "log.txt").read_text().splitlines()]


@pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels with")
def test_all_phases_on_a_made_up_device(gpu: Device, tmp_path: Path) -> None:
    """Kernels run on fibers; the device's tests are two others."""
    tests, folder = tmp_path / "test_kernels.py", tmp_path / "out"
    tests.write_text(KERNEL_TESTS)
    folder.mkdir()
    short: dict[str, Any] = {"function": 1e-9}
    exact = GruBreakdown(sets=(("L", 7, 2),), batches=(2,), schedules=("chunked",))
    sensitivity = RnnSensitivity(times=(5,), batches=(), others=(), scheduled=(5,), schedules=("relaxed:2",))
    planned = [
        Versions(name="versions", seconds=60),
        Compiling(name="compiling", seconds=60, processes=2, program=("-c", MADE_UP_COMPILER)),
        KernelTests(name="tests", seconds=60, files=(str(tests),), processes=1),
        Measuring(name="layers", seconds=60, experiment=LayerCalls(times=(4, 300), batch=2), **short),
        Measuring(name="exact scan", seconds=60, experiment=exact, **short),
        Measuring(
            name="products",
            seconds=60,
            experiment=Spgemm(build=small_network, input_shape=(2, 6, 6), factors=(0, 2), batch=3),
            **short,
        ),
        Measuring(name="chunks", seconds=60, experiment=ChunkSweep(times=(20,), chunks=(8, 32), batch=1), **short),
        Measuring(name="Figure 5.2", seconds=60, experiment=sensitivity, modes=("eager",), **short),
        Measuring(name="Figure 5.4", seconds=60, experiment=replace(exact, batches=(1, 2)), modes=("eager",), **short),
        Measuring(name="late", seconds=0.0, experiment=LayerCalls(), **short),
    ]
    assert {type(phase) for phase in planned} == {type(phase) for call in CallName for phase in phases(call)}
    with emulated():
        # A test failed.
        assert not gpu_call(folder, planned, start=here)
    experiments = ("chunk_sweep", "gru_breakdown", "layer_calls", "rnn_sensitivity", "spgemm")
    names = [*(f"{name}.made-up-h300.json" for name in experiments), "log.txt", "tests.txt"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    log = lines(folder)
    assert any("driver 1.2.3" in line for line in log) and any(line.startswith("python 3") for line in log)
    (compiled,) = (line for line in log if "are compiled, " in line)
    assert ", 0 are not, 0 were not come to" in compiled and int(compiled.partition(" ")[0]) > 30
    assert "tests: 1 passed, 1 failed, 1 skipped" in log
    assert "kernels whose tests failed: values.cu take<float, int>" in log
    assert [line for line in log if line.endswith(": uses kernels whose tests failed")] == [
        "products: uses kernels whose tests failed"
    ]
    assert "late: 20 of 20 cases are left out, its time is over" in log
    results = {name: read(folder / f"{name}.made-up-h300.json") for name in experiments}
    missing = [row for result in results.values() for row in result.rows if row.not_measured]
    assert {row.group for row in missing} <= {row.group for row in results["spgemm"].rows}
    assert all("take<float, int>" in row.note for row in results["spgemm"].rows)
    _check_layers(results["layer_calls"].rows)
    modes = {name: {row.data["mode"] for row in results[name].rows if "mode" in row.data} for name in experiments}
    assert modes["chunk_sweep"] == modes["layer_calls"] == {"eager", GRAPH} and modes["rnn_sensitivity"] == {"eager"}
    # Rows of the exact scan stay beside those of Figure 5.4, which has no graphs.
    groups = {(row.data["batch"], row.data["mode"]) for row in results["gru_breakdown"].rows if "mode" in row.data}
    assert groups == {(1, "eager"), (2, "eager"), (2, GRAPH)}
    assert {row.data["layer"] for row in results["chunk_sweep"].rows} == {
        *("jacsparse", "jacsparse sequential", "jacsparse relaxed:8", "torch.nn"),
    }


def _check_layers(rows: Sequence[Row]) -> None:
    by_label = {(row.group, row.label): row for row in rows}
    nothing = "backward pass, loss on the last state, a Function that computes nothing, eager"
    assert by_label["RNN, T = 10, B = 1, H = 20, 1 inputs a step", nothing].role == "reference"
    of_gru = "GRU, T = 300, B = 2, H = 20, 12 inputs a step"
    ours, peer, empty = (
        by_label[of_gru, label].median or 0.0
        for label in (
            "backward pass, loss on the last state, jacsparse, eager",
            "backward pass, loss on the last state, torch.nn, eager",
            nothing,
        )
    )
    ratios = {
        each.text: (each.ratio, each.at_least)
        for each in by_label[of_gru, "backward pass, loss on the last state, jacsparse, eager"].comparisons
    }
    assert ratios == {
        "torch.nn / jacsparse": (pytest.approx(peer / ours), None),
        "(torch.nn + nothing) / (jacsparse + nothing)": (pytest.approx((peer + empty) / (ours + empty)), None),
        "(torch.nn / 1.5 + nothing) / jacsparse": (pytest.approx((peer / 1.5 + empty) / ours), 1.0),
    }
    assert f"step, jacsparse, {GRAPH}" not in by_label and (of_gru, f"training step, jacsparse, {GRAPH}") in by_label


def test_targets_of_layers_and_stored_rows(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(self: RecurrentWorkload, context: Context, layers: Any) -> Any:
        return dict.fromkeys(layers, ""), {layer: {} for layer in layers}

    monkeypatch.setattr(RecurrentWorkload, "_checked", checked)
    monkeypatch.setattr(
        Context, "times", lambda self, functions, **_: {label: Timing([1e-3], 1) for label in functions}
    )
    monkeypatch.setattr(RecurrentWorkload, "nothing", lambda *_: (lambda: None, lambda: None))
    rows = LayerCalls().run(Context("cuda"))
    targets = {
        (row.data["kind"], row.data["time"], row.data["part"], row.data["mode"], each.text, each.at_least)
        for row in rows
        for each in row.comparisons
        if each.at_least is not None
    }
    passes = {100: "1", 300: "1.5", 1000: "3", 30_000: "20"}
    expected = {
        (kind, steps, part, "eager", f"(torch.nn / {bar} + nothing) / jacsparse", 1.0)
        for kind in ("RNN", "GRU")
        for part in ("forward", "backward")
        for steps, bar in passes.items()
    }
    expected |= {
        (kind, steps, "step", GRAPH, "torch.nn / jacsparse", bar)
        for kind in ("RNN", "GRU")
        for steps, bar in ((10_000, 30.0), (30_000, 60.0))
    }
    assert targets == expected
    # On other hardware than this.
    stored = layer_calls._stored("made-up-h300")
    group = "RNN, T = 1,000, B = 16, H = 20, 1 inputs a step"
    name, before = stored[group, "backward", "eager"]
    (row,) = (
        row
        for row in rows
        if row.group == group and row.label == "backward pass, loss on the last state, jacsparse, eager"
    )
    (ratio,) = (each.ratio for each in row.comparisons if each.text == f"{name} / jacsparse")
    assert name.startswith("nvidia-") and before.median is not None and ratio == pytest.approx(before.median / 1e-3)


def test_an_exact_scan_has_targets_as_a_graph(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    (phase,) = (phase for phase in phases(CallName.layers) if phase.name == "exact scan")
    assert isinstance(phase, Measuring) and isinstance(phase.experiment, GruBreakdown)
    (case,) = phase._cases(Context("cuda"))
    assert (case.workload.time, case.workload.batch, case.workload.features) == (1034, 64, 12)
    assert case.targets == {f"backward, {GRAPH}": {"chunked": (8.0, 13.45)}}


class Cases(Grid):
    """Three cases, of which the second fails."""

    name = "cases"
    title = "Three cases"
    source = "no paper"
    devices = ("cuda",)

    def cases(self, context: Context) -> Sequence[str]:
        return ("one", "two", "three")

    def measure(self, case: str, context: Context) -> list[Row]:
        if case == "two":
            raise ZeroDivisionError("of the second")
        return [Row.of_value(case, 1.0, "count")]


class Once(Experiment):
    """A single figure."""

    name = "once"
    title = "One figure"
    source = "no paper"

    def run(self, context: Context) -> list[Row]:
        return [Row.of_value("it", 1.0, "count")]


@dataclass(frozen=True, kw_only=True)
class Doing(Phase):
    """Calls a function."""

    function: Callable[[], object]

    def run(self, running: Running) -> Ending:
        self.function()
        return Ending()


def fail() -> None:
    raise ValueError("not well\nat all")


def vanish() -> None:
    os._exit(7)


def hang() -> None:
    time.sleep(600)


def measuring(experiment: Experiment, seconds: float = 60) -> Measuring:
    return Measuring(name=experiment.name, seconds=seconds, experiment=experiment)


def test_what_fails_ends_nothing_else(gpu: Device, tmp_path: Path) -> None:
    assert not gpu_call(
        tmp_path, [Doing(name="doing", seconds=9, function=fail), measuring(Cases()), measuring(Once())], start=here
    )
    log = lines(tmp_path)
    assert (
        "doing failed: ValueError: not well" in log and "cases, case 2 failed: ZeroDivisionError: of the second" in log
    )
    rows = read(tmp_path / "cases.made-up-h300.json").rows
    assert [row.label for row in rows] == ["one", "cases, case 2", "three"]
    assert rows[1].not_measured == "ZeroDivisionError: of the second"
    assert read(tmp_path / "once.made-up-h300.json").rows[0].median == 1.0
    assert gpu_call(tmp_path, [measuring(Once())], start=here)


def test_a_lost_device_is_taken_again_for_what_is_left(
    gpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    firsts, lost = [], iter([True, False, False])

    def synchronize() -> None:
        if next(lost):
            raise RuntimeError("CUDA error: an illegal memory access")

    def start(phase: Phase, running: Running) -> Ending:
        assert isinstance(phase, Measuring)
        firsts.append(phase.first)
        return here(phase, running)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert not gpu_call(tmp_path, [measuring(Cases())], start=start)
    assert firsts == [0, 1]
    assert any("the device is lost after case 1: RuntimeError: CUDA error" in line for line in lines(tmp_path))
    assert [row.label for row in read(tmp_path / "cases.made-up-h300.json").rows] == ["one", "cases, case 2", "three"]


def test_what_has_no_time_is_left_out(gpu: Device, tmp_path: Path) -> None:
    assert gpu_call(tmp_path, [measuring(Cases(), 0.0), measuring(Once())], total=7.0, start=here)
    assert not list(tmp_path.glob("*.json"))
    log = lines(tmp_path)
    assert "cases: 3 of 3 cases are left out, its time is over" in log and "once: left out, the time is over" in log


def test_processes_that_vanish_or_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpu_call, "_GRACE", 0.2)
    planned = [Doing(name="vanishing", seconds=60, function=vanish), Doing(name="hanging", seconds=0.2, function=hang)]
    begin = time.monotonic()
    assert not gpu_call(tmp_path, planned, start=in_a_process)
    assert time.monotonic() - begin < 60
    log = lines(tmp_path)
    assert "vanishing: its process ended with 7" in log
    assert "hanging: it did not end in time, and was ended" in log


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
def test_without_a_gpu(tmp_path: Path) -> None:
    answer = CliRunner().invoke(command.app, ["gpu-call", "--out", str(tmp_path / "new")])
    assert answer.exit_code == 2 and answer.stderr == "benchmarks: no CUDA device that PyTorch sees\n"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("well", "code"), [(True, 0), (False, 1)])
@pytest.mark.parametrize(
    ("words", "call", "seconds"),
    [((), CallName.layers, 530.0), (("tests", "--seconds", "400"), CallName.tests, 400.0)],
)
def test_the_command(
    words: Sequence[str],
    call: CallName,
    seconds: float,
    well: bool,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(command, "device_problem", lambda *_: None)
    monkeypatch.setattr(command, "gpu_call", lambda *arguments, total: asked.append((*arguments, total)) or well)
    answer = CliRunner().invoke(command.app, ["gpu-call", *words, "--out", str(tmp_path / "new")])
    assert answer.exit_code == code
    assert asked == [(tmp_path / "new", phases(call), seconds)] and (tmp_path / "new").is_dir()


def test_the_phases_fit_into_their_calls() -> None:
    for call in CallName:
        planned = phases(call)
        # Processes get them.
        assert [type(phase) for phase in pickle.loads(pickle.dumps(planned))] == [type(phase) for phase in planned]
        # All but the last two, which get what is left; and each with time enough to begin.
        assert sum(phase.seconds for phase in planned[:-2]) < _gpu_call.TOTAL <= 530
        files = [file for phase in planned if isinstance(phase, KernelTests) for file in phase.files]
        assert all((ROOT / file).exists() for file in files)


def test_make_runs_the_same_tests() -> None:
    command = subprocess.run(["make", "-n", "test-gpu"], cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    files = [file for phase in phases(CallName.tests) if isinstance(phase, KernelTests) for file in phase.files]
    assert {word for word in command.stdout.split() if word.startswith("tests/cuda/test_")} == set(files)
