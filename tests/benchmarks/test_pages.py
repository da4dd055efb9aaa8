"""The papers item by item, and tables of figures: each is of a result file, and nothing is said without one."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from benchmarks._pages import Item, items, machines, readme_with_figures, table
from benchmarks._registry import EXPERIMENTS
from benchmarks._results import Result

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Result]]:
    return machines()


def test_the_papers_items() -> None:
    """The thesis' ten, the poster's, Naumov's three, leapfrogging's two and delayed gradients' seven."""
    counts = {"thesis": 10, "poster": 1, "Naumov": 3, "Saraiya": 2, "Huo et al.": 7}
    everything = items()
    assert {item.paper for item in everything} == set(counts)
    for paper, least in counts.items():
        assert len({item.item for item in everything if item.paper == paper}) >= least


@pytest.mark.parametrize("item", items(), ids=lambda item: f"{item.paper}, {item.item}")
def test_each_item(item: Item, results: dict[str, dict[str, Result]]) -> None:
    status = item.status(results)
    assert item.published or (ROOT / "tests" / "reference" / item.reference).is_file()
    assert not item.tests or (ROOT / item.tests).is_file()
    if item.missing:
        assert status == "not reproduced" and not item.experiment
    elif item.experiment:
        # Each figure is in one of the results: a row that is called otherwise is no figure.
        assert item.experiment in EXPERIMENTS
        most = max(len(item.ours(machine)) for machine in results.values())
        assert most == len(item.figures) > 0 and status.startswith("reproduced")
    else:
        assert item.tests and status == "implemented, tested"


def test_nothing_is_reproduced_without_a_result() -> None:
    assert not any("reproduced" in item.status({}) for item in items() if not item.missing)


def test_each_row_of_a_table_is_measured() -> None:
    rows = tomllib.loads((ROOT / "benchmarks" / "measured.toml").read_text(encoding="utf-8"))["row"]
    for name in sorted({row["table"] for row in rows}):
        _, _, *lines = table(name)
        assert lines and all("**" in line for line in lines)
        # Somewhere each peer of a row is beside it.
        for line, row in zip(lines, [row for row in rows if row["table"] == name], strict=True):
            assert all(f"{peer} " in line for peer, _ in row["peers"]), line


def test_the_readme_has_the_newest_figures() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme_with_figures(text) == text, "run `python -m benchmarks pages`"
    assert len(text.splitlines()) <= 150
