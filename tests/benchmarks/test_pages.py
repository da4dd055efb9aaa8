"""The papers item by item, and tables of figures: each is of a result file, and nothing is said without one."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from benchmarks._items import Item
from benchmarks._pages import FigurelessItem, figureless_items, machines, readme_with_figures, table
from benchmarks._papers import ITEMS, PAPERS
from benchmarks._results import Result

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def results() -> list[Result]:
    """All results that are kept here, read once."""
    return [result for machine in machines().values() for result in machine.values()]


def test_the_papers_items() -> None:
    """The thesis' and the poster's fifteen, nine of Naumov, leapfrogging's two and delayed gradients' seven."""
    for paper, least in {"thesis": 15, "naumov": 9, "leapfrogging": 2, "ddg": 7}.items():
        places = {item.place for item in ITEMS if item.paper == paper}
        assert len(places | {item.place for item in figureless_items() if item.paper == paper}) >= least


@pytest.mark.parametrize("item", figureless_items(), ids=lambda item: f"{item.paper}-{item.place}")
def test_each_item_without_a_figure(item: FigurelessItem) -> None:
    assert item.paper in PAPERS and bool(item.tests) != bool(item.missing)
    assert not item.tests or (ROOT / item.tests).is_file()


def test_nothing_is_reproduced_without_a_result(results: list[Result]) -> None:
    assert {item.status([]) for item in ITEMS} == {"not measured"}
    known = {"reproduced", "reproduced in small", "comes out otherwise", "not measured"}
    assert {item.status(results) for item in ITEMS} <= known


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: f"{item.paper}-{item.place}-{item.what}")
def test_an_item_of_other_data_or_another_device_is_in_small(item: Item, results: list[Result]) -> None:
    how_far = item.how_far(results)
    words = ("RTX", "Titan", "Threadripper", "GPU", "CIFAR", "digits", "IRMAS", "ResNet")
    if any(word in " ".join((item.what, item.published, item.why)) for word in words):
        assert item.state == "in small" and how_far != item.state
    assert item.state == "whole" or how_far != item.state


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
