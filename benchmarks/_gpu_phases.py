"""Phases of a call of a GPU, in which something is measured or tested until the phase's time is over."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from jacsparse.runtime import KERNEL_FILES, backend

from ._calls import MODES, full_precision
from ._context import Context
from ._environment import cores, environment, hardware
from ._experiment import Experiment, Grid
from ._noted_launches import TEST_LOG, Instance, NotingBackend
from ._pages import ROOT
from ._recurrent import PEER, RecurrentCase, RecurrentWorkload
from ._results import Result, read, result_path, write
from ._rows import Group, Row, reason
from ._text import cells
from .layer_calls import LayerCalls, add_nothing

#: Pytest's processes, which share the device.
_TEST_PROCESSES = 8
#: Files of kernels whose instances for float32 and indices of 32 bits are compiled for products.
_PRODUCTS = ("products.cu", "values.cu")


class Notebook:
    """A folder's results, each written as soon as it is measured, and its log.

    Parameters
    ----------
    folder : Path
        The folder.
    begin : float
        When the call began, by ``time.monotonic``.
    """

    def __init__(self, folder: Path, begin: float) -> None:
        self.folder, self.begin = folder, begin

    def say(self, line: str, *more: str) -> None:
        """Print a line, and write it into the log with others that are not printed."""
        line = f"{time.monotonic() - self.begin:6.1f} s  {line}"
        print(line, flush=True)
        with (self.folder / "log.txt").open("a", encoding="utf-8") as file:
            file.write("\n".join((line, *(f"          {each}" for each in more), "")))

    @functools.cached_property
    def _machine(self) -> dict[str, Any]:
        return environment()

    def add(self, experiment: Experiment, rows: Sequence[Row], context: Context, seconds: float) -> None:
        """Add rows to an experiment's result; those with the group and the label of earlier rows take their places."""
        machine, place = self._machine, context.device
        path = result_path(self.folder, experiment.name, hardware(place, machine))
        before = read(path) if path.exists() else None
        by_label = {(row.group, row.label): row for row in (*(before.rows if before else ()), *rows)}
        seconds += before.seconds if before else 0.0
        date = datetime.now(UTC).isoformat(timespec="seconds")
        result = Result(experiment.name, place, date, seconds, machine, context.limits, tuple(by_label.values()))
        write(result, self.folder)
        texts = [f"{row.label}: {' '.join(filter(None, cells(row)[1:]))}" for row in rows]
        self.say(f"{rows[0].group or experiment.name}: {experiment.summary(rows)}" if rows else experiment.name, *texts)


@dataclass
class Running:
    """What a phase needs beside its own settings."""

    notebook: Notebook
    #: The end of the phase, by ``time.monotonic``, and when its process is ended at the latest.
    until: float
    end: float
    #: The phases that follow.
    later: Sequence[Phase]
    #: Names of kernels' instances whose tests failed.
    suspects: Sequence[str] = ()

    def say(self, line: str, *more: str) -> None:
        """As of a notebook."""
        self.notebook.say(line, *more)

    @property
    def seconds(self) -> float:
        """What is left of the phase."""
        return max(0.0, self.until - time.monotonic())

    def context(self, seconds: float) -> Context:
        """The context of measurements on the device, with so many seconds for a function."""
        full_precision()
        return Context("cuda", seconds=seconds, until=self.until)


@dataclass(frozen=True)
class Ending:
    """What a phase tells the call."""

    failed: bool = False
    suspects: Sequence[str] = ()
    #: The phase from where it lost the device.
    rest: Phase | None = None


@dataclass(frozen=True, kw_only=True)
class Phase(ABC):
    """A part of the call."""

    name: str
    #: The most that it may take.
    seconds: float

    @abstractmethod
    def run(self, running: Running) -> Ending:
        """Do it, until the call's end of the phase."""

    def instances(self) -> set[Instance]:
        """The instances of kernels that it launches, as far as they are known beforehand."""
        return set()


@dataclass(frozen=True, kw_only=True)
class Versions(Phase):
    """Says what is installed, and measures what a Function that computes nothing takes."""

    def run(self, running: Running) -> Ending:
        machine = environment()
        for part in ("gpu", "versions"):
            running.say(", ".join(f"{name} {value}" for name, value in (machine[part] or {}).items() if value))
        context, begin = running.context(0.3), time.monotonic()
        workload = RecurrentWorkload("RNN", 10, 1, 1)
        rows = Group(workload.name)
        add_nothing(rows, workload, MODES[context.device][0], context)
        running.notebook.add(LayerCalls(), rows.rows(), context, time.monotonic() - begin)
        return Ending()


@dataclass(frozen=True, kw_only=True)
class Compiling(Phase):
    """Compiles the kernels of later phases, in processes side by side; CuPy keeps them on disk."""

    processes: int = 16
    #: What Python is to run in each process.
    program: Sequence[str] = ("-m", f"{__package__}._compile_kernels")

    def run(self, running: Running) -> Ending:
        instances = sorted(set().union(*(phase.instances() for phase in running.later)))
        running.say(f"{len(instances)} instances of kernels are compiled")
        count = max(1, min(self.processes, cores(), len(instances)))
        command = [sys.executable, *self.program]
        with tempfile.TemporaryDirectory() as folder:
            compiled, workers = [], []
            for number in range(count):
                output = Path(folder, f"{number}")
                with output.open("w", encoding="utf-8") as file:
                    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": file, "stderr": subprocess.STDOUT}
                    workers.append(subprocess.Popen(command, encoding="utf-8", cwd=ROOT, **options))
                assert workers[-1].stdin is not None
                workers[-1].stdin.write(json.dumps(instances[number::count]))
                workers[-1].stdin.close()
            for worker in workers:
                _end(worker, running.seconds)
            for number in range(count):
                compiled += list(_lines(Path(folder, f"{number}")))
        problems = [f"{each['name']}: {each['problem']}" for each in compiled if each["problem"]]
        slowest = max(compiled, key=lambda each: each["seconds"], default={"name": "none", "seconds": 0.0})
        missing = len(instances) - len(compiled)
        running.say(
            f"{len(compiled) - len(problems)} are compiled, {len(problems)} are not, {missing} were not come to; the "
            f"slowest: {slowest['name']}, {slowest['seconds']:.1f} s",
            *(f"{each['name']}: {each['seconds']:.1f} s" for each in compiled),
        )
        for problem in problems[:5]:
            running.say(problem)
        return Ending(failed=bool(problems))


def _end(process: subprocess.Popen[str], seconds: float) -> None:
    """Wait for a process, and end it where it takes longer."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of JSON in a file, of which the last may be cut off."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.startswith("{") and line.endswith("}"):
            yield json.loads(line)


@dataclass(frozen=True, kw_only=True)
class KernelTests(Phase):
    """Runs the GPU's tests, and names the kernels of those that fail."""

    files: Sequence[str]
    processes: int = _TEST_PROCESSES

    def run(self, running: Running) -> Ending:
        files = [file for file in self.files if (ROOT / file).exists()]
        command = [sys.executable, "-m", "pytest", "-c", "tests/cuda/pytest.ini", "--rootdir=.", "-p"]
        command += [f"{__package__}._gpu_test_log", *files]
        if self.processes > 1 and importlib.util.find_spec("xdist"):
            command += ["-n", str(self.processes)]
        with tempfile.TemporaryDirectory() as folder:
            log, variables = Path(folder, "tests"), {"JACSPARSE_TESTS": "gpu", TEST_LOG: str(Path(folder, "tests"))}
            with (running.notebook.folder / f"{self.name}.txt").open("w", encoding="utf-8") as file:
                options: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "cwd": ROOT}
                process = subprocess.Popen(command, encoding="utf-8", env={**os.environ, **variables}, **options)
                _end(process, running.seconds)
            tests = list(_lines(log))
        by_outcome = {
            name: [each for each in tests if each["outcome"] == name] for name in ("passed", "failed", "skipped")
        }
        counts = ", ".join(f"{len(some)} {name}" for name, some in by_outcome.items())
        running.say(
            f"{self.name}: {counts}"
            + ("" if process.returncode in (0, 1) else f"; pytest ended with {process.returncode}")
        )
        good, bad = (
            {name for each in by_outcome[outcome] for name in each["instances"]} for outcome in ("passed", "failed")
        )
        # Kernels that only failing tests launch, or all of theirs.
        suspects = sorted(bad - good or bad)
        for each in by_outcome["failed"]:
            running.say(f"failed: {each['test']}", *each["instances"])
        if suspects:
            running.say(f"kernels whose tests failed: {', '.join(suspects)}")
        for phase in running.later:
            if {each.text for each in phase.instances()} & set(suspects) if suspects else ():
                running.say(f"{phase.name}: uses kernels whose tests failed")
        return Ending(failed=bool(by_outcome["failed"]), suspects=suspects)


@dataclass(frozen=True, kw_only=True)
class Measuring(Phase):
    """Measures an experiment, case by case."""

    experiment: Experiment
    #: Seconds for each function; modes, all where it is empty; and the number of the first case.
    function: float = 0.3
    modes: Sequence[str] = ()
    first: int = 0

    def run(self, running: Running) -> Ending:
        context, failed = running.context(self.function), False
        note = ""
        if used := {each.text for each in self.instances()} & set(running.suspects) if running.suspects else set():
            note = f"uses kernels whose tests failed: {', '.join(sorted(used))}"
        # Once the device is lost, they cannot be measured.
        _ = context.limits
        measures = self._measures(context)
        for number, measure in enumerate(measures[self.first :], self.first):
            if not running.seconds:
                running.say(
                    f"{self.name}: {len(measures) - number} of {len(measures)} cases are left out, its time is over"
                )
                break
            begin = time.monotonic()
            try:
                rows = list(measure())
            except Exception as error:
                failed, rows = True, [Row.missing(f"{self.name}, case {number + 1}", reason(error))]
                running.say(
                    f"{self.name}, case {number + 1} failed: {reason(error)}", *traceback.format_exc().splitlines()
                )
            rows = [replace(row, note="; ".join(filter(None, (row.note, note)))) for row in rows]
            problem = _device_is_lost()
            running.notebook.add(self.experiment, rows, context, time.monotonic() - begin)
            if problem:
                running.say(f"{self.name}: the device is lost after case {number + 1}: {problem}")
                return Ending(True, rest=replace(self, first=number + 1))
        return Ending(failed)

    def _measures(self, context: Context) -> list[Callable[[], Sequence[Row]]]:
        """What measures each case."""
        experiment = self.experiment
        if not isinstance(experiment, Grid):
            return [lambda: experiment.run(context)]
        return [lambda case=case: experiment.measure(case, context) for case in self._cases(context)]  # type: ignore[misc]

    def _cases(self, context: Context) -> Iterator[Any]:
        assert isinstance(self.experiment, Grid)
        for case in self.experiment.cases(context):
            yield replace(case, modes=self.modes) if self.modes else case

    def instances(self) -> set[Instance]:
        if not isinstance(self.experiment, Grid):
            return {
                Instance(file, name)
                for file in _PRODUCTS
                for name in KERNEL_FILES[file].instances
                if "double" not in name and "long long" not in name
            }
        noting = NotingBackend()
        with backend(noting):
            for call in _calls_of(self._cases(Context("cuda"))):
                # Nothing is computed here: what goes by computed numbers may fail.
                try:
                    call()
                except Exception:
                    continue
        return {each for each in noting.noted if each.file}


def _calls_of(cases: Iterator[RecurrentCase]) -> list[Callable[[], object]]:
    """The different calls of our layers in some cases, on the CPU."""
    keys = {
        (case.workload, part, layer): None
        for case in cases
        for parts, layers in case.turns
        for part in parts
        for layer in layers
        # A step is both passes.
        if layer != PEER and part not in ("step", "rest")
    }
    return [
        lambda workload=workload, part=part, layer=layer: workload.function(layer, part, "cpu")()  # type: ignore[misc]
        for workload, part, layer in keys
    ]


def _device_is_lost() -> str:
    """Why the device takes no more work from this process, or an empty text."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return reason(error)
    return ""
