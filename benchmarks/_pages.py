"""What the pages show of the results: the papers item by item, and tables of figures beside their peers'.

Figures come from ``benchmarks/results/``. Which are shown is in ``_papers.py`` and in ``measured.toml``; items of the
papers that are no figures are in ``tests/reference/items.toml``.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import typer

from jacsparse.cli import app

from ._items import Item
from ._papers import ITEMS, PAPERS
from ._registry import EXPERIMENTS
from ._report import read_all
from ._results import Result
from ._rows import Row
from ._text import amount, table_head, table_line

ROOT = Path(__file__).parent.parent
_RESULTS = ROOT / "benchmarks" / "results"
_REFERENCE = ROOT / "tests" / "reference"
#: Between these lines of the README is the generated table.
_BEGIN, _END = "<!-- figures of benchmarks/results: python -m benchmarks pages -->", "<!-- end of figures -->"


@dataclass(frozen=True)
class FigurelessItem:
    """An item of a paper that is no figure: what tests hold, or what is not reproduced."""

    paper: str
    place: str
    what: str
    tests: str = ""
    differs: str = ""
    missing: str = ""

    def status(self, results: Sequence[Result]) -> str:
        """What has become of it, whatever was measured."""
        return "not reproduced" if self.missing else "implemented, tested"

    def lines(self, results: Sequence[Result]) -> Iterator[str]:
        """The item in Markdown."""
        what = f"{self.what[0].upper()}{self.what[1:]}"
        yield from ("", f"### {self.place}", "", f"{what}: **{self.status(results)}**.", "")
        tests = self.tests and f"`{self.tests}`"
        for name, text in (("Tests", tests), ("Differs", self.differs), ("Why", self.missing)):
            if text:
                yield f"- {name}: {text}"


def figureless_items() -> list[FigurelessItem]:
    """The items of ``tests/reference/items.toml``."""
    content = tomllib.loads((_REFERENCE / "items.toml").read_text(encoding="utf-8"))
    return [FigurelessItem(**item) for item in content["item"]]


def machines(device: str | None = None) -> dict[str, dict[str, Result]]:
    """The results by machine and experiment; those on ``cpu`` or ``cuda`` alone, where one is named."""
    by_folder = {
        folder.name: {
            name: result
            for (name, _), result in read_all(folder, EXPERIMENTS).items()
            if device in (None, result.device)
        }
        for folder in sorted(_RESULTS.iterdir())
    }
    return {machine: results for machine, results in by_folder.items() if results}


def _row(result: Result, group: str, label: str) -> Row | None:
    """The fastest row of a label, or with it behind a colon, in the first group whose name begins with `group`."""
    rows = [
        row
        for row in result.rows
        if row.group.startswith(group) and (fnmatchcase(row.label, label) or row.label.endswith(f": {label}"))
    ]
    return min(
        (row for row in rows if row.group == rows[0].group), key=lambda row: row.median or math.inf, default=None
    )


def table(name: str) -> list[str]:
    """A table of `measured.toml`, in Markdown: each machine's figure beside its peers', and the ratio."""
    rows = tomllib.loads((ROOT / "benchmarks" / "measured.toml").read_text(encoding="utf-8"))["row"]
    results = machines("cuda" if name == "gpu" else "cpu")
    head = table_head(("", *(_machine_name(machine) for machine in results.values())))
    shown = [row for row in rows if row["table"] == name]
    cells = ((row["what"], *(_cell(row, machine) for machine in results.values())) for row in shown)
    return [*head, *map(table_line, cells)]


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
    first = next(iter(results.values()))
    machine = first.environment
    dates = sorted(result.date[:10] for result in results.values())
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    if first.device == "cuda":
        return f"{machine['gpu']['name']}, {span}"
    return f"{str(machine['cpu']).replace('(R)', '')}, {machine['cores']} cores, {span}"


def _picture_lines(item: Item, results: Sequence[Result], pictures: Path) -> Iterator[str]:
    """A picture of the result that an item's text is of, where it is not on the page yet."""
    shown = item.shown(results)
    if shown is None:
        return
    result, machine = shown[0], _machine_name({"": shown[0]})
    target = pictures / f"{result.experiment}-{re.sub('[^a-z0-9]+', '-', machine.lower())}.png"
    if not target.exists():
        experiment = EXPERIMENTS[result.experiment]
        experiment.figure(result.rows, target)
        caption = f"{experiment.title}, on {machine}"
        yield from ("", f"![{caption}](generated/{target.name})", "", f"*{caption}.*")


def write_pages(folder: Path) -> None:
    """Write ``papers.md`` and the tables that other pages include into a copy of ``docs/``."""
    generated = folder / "generated"
    generated.mkdir(exist_ok=True)
    for name in ("reached", "jacobians", "systems", "programs", "recurrences", "scans", "pruning", "rivals", "gpu"):
        (generated / f"{name}.md").write_text("\n".join(table(name)) + "\n", encoding="utf-8")
    (generated / "commands.md").write_text(_commands(), encoding="utf-8")
    results = [result for machine in machines().values() for result in machine.values()]
    lines = [(folder / "papers.md").read_text(encoding="utf-8"), *table_head(("item", "what", "status"))]
    items: list[Item | FigurelessItem] = [*ITEMS, *figureless_items()]
    for paper in PAPERS:
        of_paper = [item for item in items if item.paper == paper]
        lines += [table_line((f"{paper}, {item.place}", item.what, item.status(results))) for item in of_paper]
    for paper, title in PAPERS.items():
        lines += ["", f"## {title}"]
        for item in [item for item in items if item.paper == paper]:
            lines += item.lines(results)
            lines += _picture_lines(item, results, generated) if isinstance(item, Item) else ()
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
