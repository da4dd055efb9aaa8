"""The command ``python -m benchmarks``."""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from jacsparse.recurrence import NODES, PRICES, Nodes, Prices
from jacsparse.runtime import check_writable

from ._calls import full_precision
from ._context import Context, device_problem
from ._environment import environment, hardware
from ._experiment import Experiment
from ._gpu_call import TOTAL, CallName, gpu_call, phases
from ._pages import ROOT, readme_with_figures
from ._papers import PAPERS, experiments_of
from ._prices import errors, fitted, observations, worst_choice
from ._registry import EXPERIMENTS
from ._report import write_report
from ._results import Result, read, result_path, write
from ._rows import Row, reason
from ._text import COLUMNS, cells

app = typer.Typer(
    name="benchmarks",
    help="Measure what the papers' tables and figures show, and how peers do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


#: Seconds on CUDA for one experiment, for all experiments, and for a function.
_EXPERIMENT, _ALL, _FUNCTION = 170.0, 530.0, 0.3


class DeviceName(StrEnum):
    """The device on which experiments run."""

    cpu = "cpu"
    cuda = "cuda"


class FigureFormat(StrEnum):
    """A format in which journals take figures."""

    pdf = "pdf"
    svg = "svg"


@app.command(name="list")
def list_() -> None:
    """Name the experiments, how long they take, their papers, and what each one reproduces."""
    papers = {paper: experiments_of(paper) for paper in PAPERS}
    table = Table("experiment", "minutes", "paper", "what", box=None, padding=(0, 2, 0, 0))
    for name, experiment in EXPERIMENTS.items():
        of = ", ".join(paper for paper, names in papers.items() if name in names)
        seconds = _stored_seconds(name)
        minutes = "" if seconds is None else "< 1" if seconds < 60 else f"{seconds / 60:.0f}"
        table.add_row(name, minutes, of, f"{experiment.title} ({experiment.source})")
    Console().print(table)
    typer.echo("Minutes on two cores, by stored results. `run paper:NAME` runs all of a paper; only in a checkout.")


@app.command()
def run(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...",
            help=f"Experiments, or all of a paper: {', '.join(f'paper:{paper}' for paper in (*PAPERS, 'all'))}; "
            "everything where none is named.",
        ),
    ] = None,
    device: Annotated[DeviceName, typer.Option(help="Where to run them.")] = DeviceName.cpu,
    threads: Annotated[
        int | None, typer.Option(min=1, help="For everything, peers included; PyTorch's number.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="cifar10:DIR, cifar100:DIR or irmas:DIR, for trainings as published."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("out/benchmarks"),
) -> None:
    """Run experiments, and write a JSON file for each."""
    try:
        experiments, place = _experiments(names or list(EXPERIMENTS)), hardware(device, environment())
        experiments = [experiment.on(data) for experiment in experiments] if data else experiments
        _check_folder(out, [result_path(out, experiment.name, place) for experiment in experiments])
    except (ValueError, OSError) as error:
        _fail(error)
    if threads is not None:
        torch.set_num_threads(threads)
    console, failed, end = Console(), False, time.monotonic() + _ALL
    if len(experiments) > 1:
        console.print(_estimate(experiments), markup=False, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for number, experiment in enumerate(experiments):
            task = progress.add_task(experiment.name)

            def say(line: str, task: Any = task, experiment: Experiment = experiment, number: int = number) -> None:
                place = f"{number + 1}/{len(experiments)}"
                progress.update(task, description=f"{place} {experiment.name}: {line}")

            context = Context(device.value, say=say)
            if device == "cuda":
                context.seconds, context.until = _FUNCTION, min(end, time.monotonic() + _EXPERIMENT)
            result, failure = _measured(experiment, context)
            progress.remove_task(task)
            if failure is not None:
                failed = True
                console.print("".join(traceback.format_exception(failure)), markup=False, highlight=False)
            console.print(f"{experiment.name}: {experiment.summary(result.rows)}", markup=False, highlight=False)
            console.print(_table(result.rows))
            console.print(str(write(result, out)), markup=False, highlight=False, soft_wrap=True)
    if useless := all(device_problem(device, experiment.devices) for experiment in experiments):
        typer.echo(f"benchmarks: nothing was measured on {device}; the tables say why", err=True)
    if failed or useless:
        raise typer.Exit(1)


@app.command(name="gpu-call")
def gpu_call_(
    call: Annotated[
        CallName,
        typer.Argument(
            metavar="CALL", help="tests: whether kernels are right; layers: recurrent ones; jacobians: and products."
        ),
    ] = CallName.layers,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("out/gpu-call"),
    seconds: Annotated[float, typer.Option(min=10, help="The most that all phases take together.")] = TOTAL,
) -> None:
    """Measure what ten minutes of a GPU can tell, in the order of what is most asked."""
    try:
        if (problem := device_problem("cuda", ("cuda",))) is not None:
            raise ValueError(problem)
        _check_folder(out, [out / "log.txt"])
    except (ValueError, OSError) as error:
        _fail(error)
    if not gpu_call(out, phases(call), total=seconds):
        raise typer.Exit(1)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where `run` wrote its results.")],
    also: Annotated[list[FigureFormat] | None, typer.Option(help="Formats of pictures beside PNG.")] = None,
) -> None:
    """Write a report with pictures from the results in a folder."""
    try:
        typer.echo(write_report(folder, EXPERIMENTS, also or ()))
    except (ValueError, OSError) as error:
        _fail(error)


@app.command()
def prices(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Results of recurrent layers on a GPU.")],
    nodes: Annotated[
        tuple[int, int, int, int],
        typer.Option(metavar=" ".join(Nodes._fields).upper(), help="What a pass consisted of when they were measured."),
    ] = NODES,
) -> None:
    """Fit the prices of a GPU, by which `auto` chooses, to measured passes."""
    try:
        of_a_pass = Nodes(*nodes)
        passes = observations(row for file in files for row in read(file).rows)
        refitted = fitted(passes, of_a_pass)
    except (ValueError, OSError) as error:
        _fail(error)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("microseconds")
    for title in ("known", "fitted"):
        table.add_column(title, justify="right")
    for name, known, fit in zip(Prices._fields, PRICES, refitted, strict=True):
        table.add_row(name, f"{known:.4g}", f"{fit:.4g}")
    for title, of in (("slowest way chosen", worst_choice), ("median error", errors)):
        table.add_row(title, *(f"{of(passes, of_a_pass, each):.3g}" for each in (PRICES, refitted)))
    console = Console()
    console.print(f"{len(passes)} passes of known ways", highlight=False)
    console.print(table)


@app.command()
def pages() -> None:
    """Write the README's table of figures anew from benchmarks/results."""
    readme = ROOT / "README.md"
    readme.write_text(readme_with_figures(readme.read_text(encoding="utf-8")), encoding="utf-8")
    Console().print(str(readme), highlight=False)


#: Results of earlier runs, by hardware.
_STORED = Path(__file__).parent / "results"


def _stored_seconds(name: str) -> float | None:
    """The longest of an experiment's stored runs on CPUs, in seconds."""
    return max((read(path).seconds for path in _STORED.glob(f"*/{name}.cpu.json")), default=None)


def _estimate(experiments: Sequence[Experiment]) -> str:
    """How long experiments take, by the times of stored runs on CPUs."""
    seconds = {
        experiment.name: time for experiment in experiments if (time := _stored_seconds(experiment.name)) is not None
    }
    unknown = [experiment.name for experiment in experiments if experiment.name not in seconds]
    longest = max(seconds, key=seconds.__getitem__, default="")
    parts = [f"{len(experiments)} experiments, about {sum(seconds.values()) / 60:,.0f} minutes on two cores"]
    if longest:
        parts.append(f"{seconds[longest] / 60:,.0f} of them {longest}")
    if unknown:
        parts.append(f"without {', '.join(unknown)}, which nobody has timed")
    return ", ".join(parts)


def _fail(error: Exception) -> NoReturn:
    """Print a user's error in one line, and exit with status 2."""
    typer.echo(f"benchmarks: {error}", err=True)
    raise typer.Exit(2)


def _experiments(names: Sequence[str]) -> list[Experiment]:
    papers = {name: experiments_of(name.removeprefix("paper:")) for name in names if name.startswith("paper:")}
    names = [each for name in names for each in papers.get(name, [name])]
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        raise ValueError(f"no experiment is named {unknown[0]!r}; known are {', '.join(EXPERIMENTS)}")
    return [EXPERIMENTS[name] for name in dict.fromkeys(names)]


def _check_folder(folder: Path, files: Sequence[Path]) -> None:
    """Make the folder; OSError if the folder or a file in it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out {folder} cannot be made: {error.strerror}; choose another folder") from error
    for file in files:
        check_writable(file)


def _measured(experiment: Experiment, context: Context) -> tuple[Result, Exception | None]:
    """The result of an experiment, and the error that ended it, which does not end the other experiments."""
    date, begin, machine = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter(), environment()
    problem = device_problem(context.device, experiment.devices)
    if problem is None and time.monotonic() > context.until:
        problem = "the time of all experiments was over"
    limits, failure = None, None
    if problem is None:
        try:
            if context.device == "cuda":
                full_precision()
            limits = context.limits
            rows = experiment.run(context)
        except Exception as error:
            problem = reason(error)
            # Where data need a package that is not installed, our own error says so, which names no module.
            failure = None if isinstance(error, ImportError) and error.name is None else error
    if problem is not None:
        rows = [Row.missing(experiment.title, problem)]
    seconds = time.perf_counter() - begin
    return Result(experiment.name, context.device, date, seconds, machine, limits, tuple(rows)), failure


def _table(rows: Sequence[Row]) -> Table:
    # A terminal is narrow; the report has all columns.
    shown = [COLUMNS.index(name) for name in ("what", "median", "floor", "compared")]
    table = Table(box=box.SIMPLE_HEAD)
    for place in shown:
        table.add_column(COLUMNS[place], justify="right" if COLUMNS[place] in ("median", "floor") else "left")
    for group, of_group in itertools.groupby(rows, lambda row: row.group):
        if group:
            table.add_section()
            table.add_row(Text(group, style="bold"))
        for texts in map(cells, of_group):
            table.add_row(*(Text(texts[place]) for place in shown))
    return table


if __name__ == "__main__":
    app()
