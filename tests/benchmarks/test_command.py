"""``python -m benchmarks``: list, run and report, on an experiment that takes no time."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from benchmarks import __main__ as command
from benchmarks._context import Context, Limits
from benchmarks._environment import environment
from benchmarks._experiment import Experiment
from benchmarks._registry import EXPERIMENTS
from benchmarks._results import read
from benchmarks._rows import Comparison, Row, compare
from benchmarks._text import amount, cells
from tests.benchmarks.made_up import device

FIRST_PICTURE_BYTES = b"\x89PNG"
RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").iterdir())


class Dummy(Experiment):
    name = "dummy"
    title = "Adding ones"
    source = "no paper"

    def run(self, context: Context) -> list[Row]:
        ones = torch.ones(10)
        actual = context.times({"add": lambda: ones + ones, "multiply": lambda: ones * ones}, seconds=0.01)
        slow = Row.timed("multiply", actual["multiply"], group="ones", role="peer")
        fast = Row.timed("add", actual["add"], group="ones", floor=context.limits.floor(80))
        fast = replace(fast, comparisons=compare("multiply / add", slow, fast, at_least=1e-9))
        return [fast, slow, Row.missing("a peer | of ours", "pip install peer", group="ones")]


@pytest.fixture(autouse=True, scope="module")
def _only_dummy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Context, "limits", Limits(1e10, 1e11))
        patch.setattr(command, "EXPERIMENTS", {"dummy": Dummy()})
        yield


def call(*args: object) -> Result:
    return CliRunner().invoke(command.app, list(map(str, args)))


@pytest.fixture(scope="module")
def result_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("results")
    assert call("run", "dummy", "--out", folder).exit_code == 0
    return (folder / "dummy.cpu.json").read_text(encoding="utf-8")


@pytest.fixture
def measured(tmp_path: Path, result_text: str) -> Path:
    path = tmp_path / "dummy.cpu.json"
    path.write_text(result_text, encoding="utf-8")
    return path


def test_data_of_an_experiment_that_takes_none(tmp_path: Path) -> None:
    answer = call("run", "dummy", "--data", "cifar10:here", "--out", tmp_path)
    assert answer.exit_code == 2
    assert answer.stderr == "benchmarks: dummy takes no other data than its own; run it without --data cifar10:here\n"


def test_list_names_each_experiment() -> None:
    answer = call("list")
    assert answer.exit_code == 0
    assert "dummy" in answer.output and "no paper" in answer.output


def test_run_writes_one_file_and_says_what_was_measured(tmp_path: Path) -> None:
    answer = call("run", "--out", tmp_path / "new" / "folder")
    assert answer.exit_code == 0, answer.output
    assert "2 figures, 1 not measured, 1 of 1 targets met" in answer.output
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["dummy.cpu.json"]


def test_result_holds_figures_hardware_and_versions_but_no_host(measured: Path) -> None:
    text = measured.read_text(encoding="utf-8")
    content = json.loads(text)
    assert content["format"] == 1 and content["experiment"] == "dummy" and content["device"] == "cpu"
    row = content["rows"][0]
    assert row["lower"] <= row["median"] <= row["upper"] and row["fastest"] <= row["median"] and row["runs"] > 1
    assert row["comparisons"][0]["at_least"] == 1e-9
    assert content["rows"][2]["not_measured"] == "pip install peer" and content["rows"][2]["median"] is None
    assert {"cpu", "cores", "threads", "memory_gib", "vector_units", "gpu", "versions"} <= set(content["environment"])
    assert {"python", "jacsparse", "torch", "numpy", "numba", "scipy"} <= set(content["environment"]["versions"])
    assert content["limits"] == {"copy_bandwidth": 1e10, "peak_flop": 1e11}
    assert str(Path.home()) not in text and str(measured.parent) not in text
    assert platform.node() not in text or platform.node() in platform.machine()


def test_result_reads_back_as_it_was_written(measured: Path) -> None:
    result = read(measured)
    assert [row.label for row in result.rows] == ["add", "multiply", "a peer | of ours"]
    assert isinstance(result.rows[0].comparisons[0], Comparison) and result.rows[0].comparisons[0].met


def test_report_shows_figures_and_what_was_not_measured(measured: Path) -> None:
    for _ in range(2):
        answer = call("report", measured.parent)
        assert answer.exit_code == 0, answer.output
    text = (measured.parent / "report.md").read_text(encoding="utf-8")
    assert "| a peer ∣ of ours | not measured |" in text and "pip install peer" in text
    assert "![Adding ones](dummy.cpu.png)" in text and "copy bandwidth 10.0 GB/s" in text
    assert (measured.parent / "dummy.cpu.png").read_bytes()[:4] == FIRST_PICTURE_BYTES


@pytest.mark.parametrize(
    "folder",
    # More pictures than this take a quarter of a minute.
    [
        pytest.param(folder, id=folder.name, marks=pytest.mark.full if len([*folder.glob("*.json")]) > 10 else ())
        for folder in RESULTS
    ],
)
def test_report_of_the_results_that_are_kept_here(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "EXPERIMENTS", EXPERIMENTS)
    for file in folder.glob("*.json"):
        shutil.copy(file, tmp_path)
    answer = call("report", tmp_path)
    assert answer.exit_code == 0, answer.output
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    assert drawn and drawn <= {path.stem for path in tmp_path.glob("*.json")}


def test_report_draws_formats_that_journals_take(measured: Path) -> None:
    assert call("report", measured.parent, "--also", "svg", "--also", "pdf").exit_code == 0
    assert (measured.parent / "dummy.cpu.svg").read_bytes().startswith(b"<?xml")
    assert (measured.parent / "dummy.cpu.pdf").read_bytes().startswith(b"%PDF")


def test_report_names_experiments_that_were_not_run(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Dummy):
        name = "other"

    monkeypatch.setattr(command, "EXPERIMENTS", {"dummy": Dummy(), "other": Other()})
    assert call("report", measured.parent).exit_code == 0
    assert "not measured: run `python -m benchmarks run other`" in (measured.parent / "report.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
def test_cuda_without_a_device_is_not_measured(tmp_path: Path) -> None:
    answer = call("run", "dummy", "--device", "cuda", "--out", tmp_path)
    assert answer.exit_code == 1 and "nothing was measured" in answer.output
    assert "no CUDA device that PyTorch sees" in answer.output
    (row,) = read(tmp_path / "dummy.cuda.json").rows
    assert row.not_measured == "no CUDA device that PyTorch sees" and row.median is None
    assert call("report", tmp_path).exit_code == 0
    assert "no CUDA device that PyTorch sees" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_a_device_that_an_experiment_does_not_run_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch)
    assert call("run", "dummy", "--device", "cuda", "--out", tmp_path).exit_code == 1
    assert read(tmp_path / "dummy.made-up-h300.json").rows[0].not_measured == "this experiment runs on cpu only"


def test_a_device_without_cupy_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch)
    monkeypatch.setattr(Dummy, "devices", ("cpu", "cuda"))
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert call("run", "dummy", "--device", "cuda", "--out", tmp_path).exit_code == 1
    (row,) = read(tmp_path / "dummy.made-up-h300.json").rows
    assert "kernels need CuPy: pip install 'jacsparse[gpu" in row.not_measured


def test_results_on_a_gpu_are_named_by_it_and_say_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch)
    monkeypatch.setattr(Dummy, "devices", ("cpu", "cuda"))
    monkeypatch.setattr(command, "device_problem", lambda *_: None)
    for name in ("cuda", "cpu"):
        assert call("run", "dummy", "--device", name, "--out", tmp_path).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dummy.cpu.json", "dummy.made-up-h300.json"]
    result = read(tmp_path / "dummy.made-up-h300.json")
    assert (result.device, result.hardware, read(tmp_path / "dummy.cpu.json").hardware) == (
        "cuda",
        "made-up-h300",
        "cpu",
    )
    gpu = result.environment["gpu"]
    assert (gpu["name"], gpu["multiprocessors"], gpu["memory_gib"], gpu["driver"]) == ("Made Up H300", 7, 3.0, "1.2.3")
    assert call("report", tmp_path).exit_code == 0
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "## Adding ones, made-up-h300" in text and "![Adding ones](dummy.made-up-h300.png)" in text
    assert "Made Up H300, 7 multiprocessors, at most 1980 MHz, 3.0 GiB, driver 1.2.3" in text
    assert text.count("Made Up H300") == 1 and "## Adding ones\n" in text


def test_experiments_for_which_no_time_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch)
    monkeypatch.setattr(Dummy, "devices", ("cpu", "cuda"))
    monkeypatch.setattr(command, "device_problem", lambda *_: None)
    monkeypatch.setattr(command, "_ALL", 0.0)
    assert call("run", "dummy", "--device", "cuda", "--out", tmp_path).exit_code == 0
    (row,) = read(tmp_path / "dummy.made-up-h300.json").rows
    assert row.not_measured == "the time of all experiments was over"


def test_what_the_driver_does_not_say_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch, smi="1.2.3, [N/A], 3201 MHz")
    gpu = environment()["gpu"]
    assert (gpu["name"], gpu["driver"], gpu["clock"], gpu["memory_clock"]) == (
        "Made Up H300",
        "1.2.3",
        None,
        "3201 MHz",
    )
    device(monkeypatch, smi="No devices were found")
    assert environment()["gpu"]["driver"] is None

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert environment()["gpu"]["driver"] is None


@pytest.mark.parametrize(
    ("error", "code"),
    [(ImportError("needs a package"), 0), (ImportError("cannot import name 'x'", name="jacsparse.nn"), 1)],
)
def test_a_package_that_is_not_installed_is_no_failure(
    error: ImportError, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lacking(Dummy):
        def run(self, context: Context) -> list[Row]:
            raise error

    monkeypatch.setattr(command, "EXPERIMENTS", {"dummy": Lacking()})
    assert call("run", "--out", tmp_path).exit_code == code
    assert [row.not_measured for row in read(tmp_path / "dummy.cpu.json").rows] == [str(error)]


def test_an_experiment_that_fails_does_not_take_the_others_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Dummy):
        name = "broken"

        def run(self, context: Context) -> list[Row]:
            raise RuntimeError("it broke\nin the middle")

    monkeypatch.setattr(command, "EXPERIMENTS", {"broken": Broken(), "dummy": Dummy()})
    answer = call("run", "--out", tmp_path)
    assert answer.exit_code == 1 and "in run" in answer.output
    assert [row.not_measured for row in read(tmp_path / "broken.cpu.json").rows] == ["RuntimeError: it broke"]
    assert read(tmp_path / "dummy.cpu.json").rows[0].median is not None


def test_unknown_name_is_told_the_known_ones(tmp_path: Path) -> None:
    answer = call("run", "dummy", "nonsense", "--out", tmp_path)
    assert answer.exit_code == 2
    assert "'nonsense'" in answer.output and "known are dummy" in answer.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("args", [("--device", "tpu"), ("--threads", "0"), ("--threads", "many")])
def test_malformed_options_are_refused(tmp_path: Path, args: tuple[str, ...]) -> None:
    assert call("run", "dummy", *args, "--out", tmp_path).exit_code == 2


def test_a_place_that_cannot_be_written_is_noticed_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dummy, "run", lambda *_: pytest.fail("it ran"))
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "results" / "dummy.cpu.json").mkdir(parents=True)
    for out in (file, file / "below", tmp_path / "results"):
        answer = call("run", "dummy", "--out", out)
        assert answer.exit_code == 2 and str(out) in answer.output.replace("\n", ""), answer.output


def test_threads_reach_experiment_and_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    assert call("run", "dummy", "--threads", "3", "--out", tmp_path).exit_code == 0
    assert seen[0] == 3


@pytest.mark.parametrize("folder", ["missing", "."])
def test_report_without_results_says_how_to_make_some(tmp_path: Path, folder: str) -> None:
    answer = call("report", tmp_path / folder)
    assert answer.exit_code == 2 and "python -m benchmarks run" in answer.output


def _edited(edit: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        content = json.loads(text)
        edit(content)
        return json.dumps(content)

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "[" * 10_000,
        lambda text: '"\\ud800',
        _edited(lambda content: content.update(format=2)),
        _edited(lambda content: content.pop("rows")),
        _edited(lambda content: content.update(rows={})),
        _edited(lambda content: content.update(rows=[3])),
        _edited(lambda content: content.update(more=1)),
        _edited(lambda content: content.update(seconds="long")),
        _edited(lambda content: content.update(environment=None)),
        _edited(lambda content: content.update(limits={"copy_bandwidth": 1.0})),
        _edited(lambda content: content["rows"][0].update(median=float("nan"))),
        _edited(lambda content: content["rows"][0].update(median=None)),
        _edited(lambda content: content["rows"][0].update(role="friend")),
        _edited(lambda content: content["rows"][0].update(runs=True)),
        _edited(lambda content: content["rows"][0].pop("label")),
        _edited(lambda content: content["rows"][0].update(comparisons=[{"text": "a"}])),
        _edited(lambda content: content["rows"][2].update(not_measured="")),
    ],
)
def test_report_names_the_damaged_file(measured: Path, damage: Callable[[str], str]) -> None:
    measured.write_text(damage(measured.read_text(encoding="utf-8")), encoding="utf-8")
    answer = call("report", measured.parent)
    assert answer.exit_code == 2
    assert measured.name in answer.output.replace("\n", "") and "run the experiment again" in answer.output
    assert not (measured.parent / "report.md").exists()


def test_report_refuses_a_file_that_is_another_experiments(measured: Path) -> None:
    measured.write_text(measured.read_text(encoding="utf-8").replace('"dummy"', '"other"'), encoding="utf-8")
    answer = call("report", measured.parent)
    assert answer.exit_code == 2 and "other on cpu" in answer.output


def test_bytes_that_are_no_text_are_a_damaged_file(measured: Path) -> None:
    measured.write_bytes(b"\xff\xfe\x00")
    assert call("report", measured.parent).exit_code == 2


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (2.5, "s", "2.5 s"),
        (0.0123, "s", "12.3 ms"),
        (4.56e-6, "s", "4.56 µs"),
        (3e-10, "s", "0.3 ns"),
        (None, "s", ""),
        (1234567, "", "1,234,567"),
        (0.5, "loss", "0.5 loss"),
        (1.234e-7, "loss", "1.23e-07 loss"),
    ],
)
def test_amounts(value: float | None, unit: str, text: str) -> None:
    assert amount(value, unit) == text


def test_comparison_says_target_and_what_is_published() -> None:
    comparison = Comparison("a / b", 9.5, 11.0, at_least=10.0, published=8300.0)
    text = cells(Row.of_value("x", 1.0, "count", comparisons=(comparison,)))[-1]
    assert text == "a / b: 9.5 (fastest 11, target ≥ 10: missed, published 8,300)"
    assert Comparison("c", 1.0).met is None
    assert Comparison("c", 1.0, at_most=1.0).met
