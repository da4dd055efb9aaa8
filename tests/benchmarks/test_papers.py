"""The papers' items: each has a row of an experiment, and names what ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks._items import Figure, Item
from benchmarks._papers import ITEMS, PAPERS, experiments_of
from benchmarks._registry import EXPERIMENTS
from benchmarks._results import Result, read
from benchmarks._rows import Row

RESULTS = [read(path) for path in sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*/*.json"))]


def result(rows: list[Row], date: str = "2026-01-01") -> Result:
    environment = {"cpu": "a processor", "cores": 2}
    return Result("spgemm", "cpu", date, 1.0, environment, None, tuple(rows))


def item(figure: Figure, value: float | None = None) -> Item:
    return Item("thesis", "Table 1", "speed", "8", figure, value)


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: f"{item.paper}-{item.place}-{item.what}")
def test_each_item_has_a_figure_in_the_stored_results(item: Item) -> None:
    assert item.paper in PAPERS and item.figure.experiment in EXPERIMENTS
    assert item.shown(RESULTS) is not None


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: f"{result.experiment}-{result.date}")
def test_no_row_is_called_a_scan_that_went_step_after_step(result: Result) -> None:
    for row in result.rows:
        if any(way in row.note for way in ("backward linear", "backward sequential")):
            assert "BPPSA" not in row.label and "scan" not in row.label, row.label


def test_items_of_every_paper() -> None:
    assert {item.paper for item in ITEMS} == set(PAPERS)
    assert "jacobian_generation" in experiments_of("thesis") and "ddg_scaling" not in experiments_of("thesis")
    assert set(experiments_of("all")) == {name for paper in PAPERS for name in experiments_of(paper)}
    with pytest.raises(ValueError, match="no paper is named 'thesi'; known are thesis, naumov"):
        experiments_of("thesi")


def test_the_newest_result_and_its_largest_figure_are_shown() -> None:
    rows = [Row.of_value(f"speed {n}", float(n), "ratio", data={"kind": "fast"}) for n in (1, 3, 2)]
    figure = Figure("spgemm", label="speed", data={"kind": "fast"})
    results = [result(rows), result(rows[:1], "2026-02-01"), result([], "2026-03-01")]
    lines = [*item(figure, 2.0).lines(results)]
    assert lines[:3] == ["", "### Table 1: speed", ""]
    assert lines[3:] == [
        "- Published: 8",
        "- Here: **1**, 0.5 times the published; reproduced",
        "- What ran: speed 1; a processor, 2 core(s), 2026-02-01",
        "- Command: `python -m benchmarks run spgemm`",
    ]
    assert figure.of(rows) == (rows[1], 3.0)
    assert Figure("spgemm", label="speed", smallest=True, times=10).of(rows) == (rows[0], 10.0)
    assert Figure("spgemm", comparison="a / b").of(rows) is None
    assert "- Here: not measured yet" in [*item(Figure("spgemm", group="other")).lines(results)]
