"""What the pages show of the results: the papers item by item, and tables of figures beside their peers'.

Figures come from ``benchmarks/results/``, and what the papers print from ``tests/reference/``. Which are shown is
in ``measured.toml`` and in ``tests/reference/items.toml``.
"""

from __future__ import annotations

import csv
import shutil
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import typer

from jacsparse.cli import app

from ._experiment import Row
from ._registry import EXPERIMENTS
from ._report import read_all
from ._results import Result
from ._text import amount

__all__ = ["Item", "items", "machines", "readme_with_figures", "table", "write_pages"]

ROOT = Path(__file__).parent.parent
_RESULTS = ROOT / "benchmarks" / "results"
_REFERENCE = ROOT / "tests" / "reference"
_PAPERS = {
    "thesis": "S. Wang's thesis (2020), and BPPSA",
    "poster": "The poster of BPPSA",
    "Naumov": "Naumov: Parallel Complexity of Forward and Backward Propagation (2017)",
    "Saraiya": "Saraiya: Leapfrogging for parallelism in deep neural networks",
    "Huo et al.": "Huo et al.: Decoupled Parallel Backpropagation with Convergence Guarantee (2018)",
}
#: Between these lines of the README is the generated table.
_BEGIN, _END = "<!-- figures of benchmarks/results: python -m benchmarks pages -->", "<!-- end of figures -->"


@dataclass(frozen=True)
class Item:
    """An algorithm, a table or a figure of a paper."""

    paper: str
    item: str
    what: str
    published: str = ""
    reference: str = ""
    experiment: str = ""
    figures: list[dict[str, str]] = field(default_factory=list)
    tests: str = ""
    differs: str = ""
    missing: str = ""

    def status(self, results: Mapping[str, Mapping[str, Result]]) -> str:
        """What has become of the item, in a few words: "reproduced" only where a result has its figures."""
        if self.missing:
            return "not reproduced"
        if self.experiment:
            measured = any(self.ours(machine) for machine in results.values())
            done = "reproduced, with differences" if self.differs else "reproduced"
            return done if measured else "not measured"
        return "implemented, tested"

    def ours(self, results: Mapping[str, Result]) -> list[str]:
        """The figures of one machine, in words."""
        if self.experiment not in results:
            return []
        shown = []
        for figure in self.figures:
            row = _row(results[self.experiment], figure.get("group", ""), figure["label"])
            if row is not None and row.median is not None:
                shown.append(_figure(row, figure.get("ratio", "")))
        return shown


def items() -> list[Item]:
    """The items of all papers, in their order."""
    content = tomllib.loads((_REFERENCE / "items.toml").read_text(encoding="utf-8"))
    return [Item(**item) for item in content["item"]]


def machines() -> dict[str, dict[str, Result]]:
    """The results on CPUs, by machine and experiment."""
    found = {}
    for folder in sorted(_RESULTS.iterdir()):
        results = read_all(folder, EXPERIMENTS)
        found[folder.name] = {name: result for (name, hardware), result in results.items() if hardware == "cpu"}
    return found


def _row(result: Result, group: str, label: str) -> Row | None:
    """The first row whose group begins with `group`, and whose label, or what follows its colon, is `label`."""
    for row in result.rows:
        if row.group.startswith(group) and (fnmatchcase(row.label, label) or row.label.endswith(f": {label}")):
            return row
    return None


def _figure(row: Row, ratio: str) -> str:
    """A row's figure with its unit, or one of its ratios, and what was published for that."""
    name = f"{row.group}: {row.label}" if row.group else row.label
    if not ratio:
        quantity = "" if row.quantity == "time" else f" ({row.quantity})"
        return f"{name}{quantity}: {amount(row.median, row.unit)}{'; ' * bool(row.note)}{row.note}"
    comparison = next((each for each in row.comparisons if each.text == ratio), None)
    if comparison is None:
        return f"{name}: {amount(row.median, row.unit)}"
    published = f", published {amount(comparison.published, '')}" if comparison.published is not None else ""
    return f"{name}: {amount(row.median, row.unit)}; {ratio} {amount(comparison.ratio, '')}{published}"


def table(name: str) -> list[str]:
    """A table of `measured.toml`, in Markdown: each machine's figure beside its peers', and the ratio."""
    rows = tomllib.loads((ROOT / "benchmarks" / "measured.toml").read_text(encoding="utf-8"))["row"]
    results = machines()
    head = _line(("", *(_machine_name(machine) for machine in results.values())))
    shown = [row for row in rows if row["table"] == name]
    cells = ((row["what"], *(_cell(row, machine) for machine in results.values())) for row in shown)
    return [head, _line(["---"] * (1 + len(results))), *map(_line, cells)]


def _cell(row: Mapping[str, Any], results: Mapping[str, Result]) -> str:
    result = results.get(row["experiment"])
    ours = result and _row(result, row["group"], row["ours"])
    if not result or not ours or not ours.median:
        return "not measured"
    texts = [f"**{amount(ours.median, ours.unit)}**"]
    for name, label in row["peers"]:
        peer = _row(result, row["group"], label)
        if peer is not None and peer.median:
            texts.append(f"{name} {amount(peer.median, peer.unit)} (× {amount(peer.median / ours.median, '')})")
    return "; ".join(texts)


def _machine_name(results: Mapping[str, Result]) -> str:
    """The processor, and when it was measured."""
    machine = next(iter(results.values())).environment
    dates = sorted(result.date[:10] for result in results.values())
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return f"{str(machine['cpu']).replace('(R)', '')}, {machine['cores']} cores, {span}"


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(text.replace('|', '∣') for text in texts)} |"


def _item_lines(item: Item, results: Mapping[str, Mapping[str, Result]], pictures: Path) -> Iterator[str]:
    yield from ("", f"### {item.item}", "", f"{item.what}: **{item.status(results)}**.", "")
    yield f"- Published: {item.published or _reference(item.reference)}."
    for machine in results.values():
        figures = item.ours(machine)
        if figures:
            result = machine[item.experiment]
            version = str(result.environment["versions"]["jacsparse"]).partition(",")[0]
            yield f"- {_machine_name({item.experiment: result})}, jacsparse {version}:"
            yield from (f"    - {figure}" for figure in figures)
    if item.experiment:
        yield f"- Command: `python -m benchmarks run {item.experiment}`"
    if item.tests:
        yield f"- Tests: `{item.tests}`"
    if item.differs:
        yield f"- Other than in the paper: {item.differs}."
    if item.missing:
        yield f"- Why not: {item.missing}."
    for folder in results:
        # Only the first item of an experiment shows its picture.
        source, target = _RESULTS / folder / f"{item.experiment}.cpu.png", pictures / f"{item.experiment}.png"
        if source.exists() and not target.exists():
            shutil.copy(source, target)
            yield from ("", f"![{EXPERIMENTS[item.experiment].title}, {folder}](generated/{target.name})")


def _reference(name: str) -> str:
    """A table of what a paper prints, in words."""
    lines = (_REFERENCE / name).read_text(encoding="utf-8").splitlines()
    rows = csv.reader(line for line in lines if not line.startswith("#"))
    names, *values = rows
    return "; ".join(f"{row[0].replace('_', ' ')} {row[1]}" for row in values) + f" ({names[1]})"


def write_pages(folder: Path) -> None:
    """Write ``papers.md`` and the tables that other pages include into a copy of ``docs/``."""
    generated = folder / "generated"
    generated.mkdir(exist_ok=True)
    for name in ("reached", "jacobians", "recurrences", "scans"):
        (generated / f"{name}.md").write_text("\n".join(table(name)) + "\n", encoding="utf-8")
    (generated / "commands.md").write_text(_commands(), encoding="utf-8")
    results, everything = machines(), items()
    head = (folder / "papers.md").read_text(encoding="utf-8")
    lines = [head, _line(("item", "what", "status")), _line(["---"] * 3)]
    lines += [_line((f"{item.paper}, {item.item}", item.what, item.status(results))) for item in everything]
    for paper, title in _PAPERS.items():
        lines += ["", f"## {title}"]
        for item in everything:
            if item.paper == paper:
                lines += _item_lines(item, results, generated)
    (folder / "papers.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _commands() -> str:
    """The arguments and options of every command, in Markdown."""
    group: Any = typer.main.get_command(app)
    lines = []
    for name, command in sorted(group.commands.items()):
        lines += [f"## jacsparse {name}", "", f"{command.help}", ""]
        for parameter in command.params:
            words = " / ".join([*parameter.opts, *parameter.secondary_opts])
            named = words if parameter.param_type_name == "option" else parameter.metavar or words.upper()
            default = parameter.default
            shown = f" By default {default}." if isinstance(default, str | int | float) and default is not False else ""
            lines.append(f"- `{named}`: {parameter.help or ''}{shown}")
        lines.append("")
    return "\n".join(lines)


def readme_with_figures(text: str) -> str:
    """The README with its table of figures made anew from the results."""
    before, rest = text.split(_BEGIN)
    after = rest.split(_END)[1]
    return "\n".join([before + _BEGIN, *table("reached"), _END]) + after
