"""A report of a folder of results, in Markdown, with a picture for each experiment."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ._experiment import Experiment
from ._papers import ITEMS, PAPERS
from ._results import Result, read, result_path
from ._rows import Row
from ._text import COLUMNS, amount, cells, table_head, table_line


def read_all(folder: Path, experiments: Mapping[str, Experiment]) -> dict[tuple[str, str], Result]:
    """The results in a folder, by experiment and hardware.

    Raises
    ------
    FileNotFoundError
        If the folder does not exist, or has no result.
    ValueError
        If a result is damaged, or its file has the name of another experiment or other hardware.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder; make one with: python -m benchmarks run --out {folder}")
    results = {}
    for name in experiments:
        for path in sorted(folder.glob(f"{name}.*.json")):
            result = read(path)
            if path != result_path(folder, result.experiment, result.hardware):
                raise ValueError(
                    f"{path} holds the result of {result.experiment} on {result.hardware}; rename or delete it"
                )
            results[name, result.hardware] = result
    if not results:
        raise FileNotFoundError(f"{folder} holds no result; make some with: python -m benchmarks run --out {folder}")
    return results


def write_report(folder: Path, experiments: Mapping[str, Experiment], also: Iterable[str] = ()) -> Path:
    """Write ``report.md`` and pictures, as PNG and `also`, into a folder of results; it raises as `read_all` does."""
    results = read_all(folder, experiments)
    lines = ["# Benchmarks", "", *_overview(experiments, results)]
    lines += _papers([*results.values()])
    for (name, _), result in results.items():
        lines += _section(experiments[name], result, folder, also)
    path = folder / "report.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _overview(experiments: Mapping[str, Experiment], results: Mapping[tuple[str, str], Result]) -> Iterable[str]:
    yield from table_head(("experiment", "reproduces", "on", "result"))
    for name, experiment in experiments.items():
        by_hardware = {place: result for (other, place), result in results.items() if other == name}
        if not by_hardware:
            yield table_line((name, experiment.source, "", f"not measured: run `python -m benchmarks run {name}`"))
        for place, result in by_hardware.items():
            yield table_line((name, experiment.source, place, experiment.summary(result.rows)))
    yield ""
    yield (
        "Each figure is the median of its runs; ratios are of medians, and in brackets of the fastest runs: what is "
        "left of them on a machine that others use too. Floor: bytes over copy bandwidth, or flop over peak, both "
        "measured in the same run."
    )


def _papers(results: Sequence[Result]) -> Iterable[str]:
    """The items of each paper, each with the newest figure of these results."""
    yield (
        "\nBelow, each paper item by item. On the papers' own data, and as long as published, run "
        "`lenet_convergence`, `flop_analysis` and `ddg_convergence` with `--data cifar10:DIR`, and "
        "`recurrent_convergence` with `--data irmas:DIR`."
    )
    for paper, title in PAPERS.items():
        yield from ("", f"## Item by item: {title}")
        yield from (line for item in ITEMS if item.paper == paper for line in item.lines(results))


def _section(experiment: Experiment, result: Result, folder: Path, also: Iterable[str]) -> Iterable[str]:
    place = "" if result.hardware == "cpu" else f", {result.hardware}"
    yield from ("", f"## {experiment.title}{place}", "", f"{experiment.source}. {_circumstances(result)}")
    if any(not row.not_measured for row in result.rows):
        yield from ("", _picture(experiment, result, folder, also))
    yield from _tables(result.rows)


def _picture(experiment: Experiment, result: Result, folder: Path, also: Iterable[str]) -> str:
    path = result_path(folder, result.experiment, result.hardware).with_suffix(".png")
    try:
        for suffix in (".png", *(f".{name}" for name in also)):
            experiment.figure(result.rows, path.with_suffix(suffix))
    except ImportError as error:
        return f"No picture: {error}."
    return f"![{experiment.title}]({path.name})"


def _circumstances(result: Result) -> str:
    machine = result.environment
    parts = [f"{machine.get('cpu')}, {machine.get('cores')} core(s), {machine.get('threads')} thread(s)"]
    parts.append(
        f"{machine.get('memory_gib')} GiB, {', '.join(machine.get('vector_units') or ()) or 'no vector units'}"
    )
    if result.device == "cuda" and machine.get("gpu"):
        parts.append(_gpu(machine["gpu"]))
    versions = machine.get("versions") or {}
    parts.append(", ".join(f"{name} {version}" for name, version in versions.items()))
    parts.append(f"run {result.date} in {amount(result.seconds, 's')}, load average before it {machine.get('load')}")
    limits = result.limits
    if limits is not None:
        bandwidth, peak = limits.copy_bandwidth / 1e9, limits.peak_flop / 1e9
        parts.append(f"copy bandwidth {bandwidth:,.1f} GB/s, peak {peak:,.0f} GFLOP/s")
    return "; ".join(parts) + "."


def _gpu(gpu: Mapping[str, Any]) -> str:
    texts = {
        "multiprocessors": "{} multiprocessors",
        "clock": "at most {}",
        "memory_gib": "{} GiB",
        "driver": "driver {}",
        "cuda": "CUDA {}",
        "cudnn": "cuDNN {}",
    }
    parts = [text.format(gpu[name]) for name, text in texts.items() if gpu.get(name)]
    return ", ".join([str(gpu.get("name")), *parts])


def _tables(rows: Sequence[Row]) -> Iterable[str]:
    for group, of_group in itertools.groupby(rows, lambda row: row.group):
        yield from ("", f"### {group}") if group else ()
        yield from ("", *table_head(COLUMNS), *(table_line(cells(row)) for row in of_group))
