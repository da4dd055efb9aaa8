"""The prices of ``auto``: fitted to stored rows, by which it finds the fastest ways among these."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks._prices import Observation, errors, fitted, observations, worst_choice
from benchmarks._results import read
from jacsparse.recurrence import PRICES, Nodes, Prices, RecurrenceSize

#: Of a pass by each method when the rows were stored.
OLD = Nodes(sequential=9, relaxed=24, chunked=30, walk_levels=1)
STORED = Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia-h200"


def old_chunk(time: int, batch: int) -> int:
    """The steps of a chunk that ``auto`` chose when the rows were stored, for 20 elements on 132 multiprocessors."""
    return max(64, min(512, 1 << (-(-time * batch // (132 * 16)) - 1).bit_length()))


@pytest.fixture(scope="module")
def passes() -> list[Observation]:
    names = ("rnn_sensitivity", "parallel_forward", "gru_breakdown")
    rows = [row for name in names for row in read(STORED / f"{name}.nvidia-h200.json").rows]
    return observations(rows, old_chunk)


def test_the_fastest_stored_ways_are_found(passes: list[Observation]) -> None:
    assert len(passes) > 90 and len({each.case for each in passes}) > 20
    assert worst_choice(passes, OLD, PRICES) <= 1.15


def test_prices_are_those_of_the_stored_rows(passes: list[Observation]) -> None:
    actual = fitted(passes, OLD)
    assert worst_choice(passes, OLD, actual) <= 1.15 and errors(passes, OLD, actual) < 0.3
    for name in ("node", "step", "gate", "walk", "compose"):
        assert getattr(actual, name) == pytest.approx(getattr(PRICES, name), rel=0.05), name
    assert actual.place == pytest.approx(PRICES.place, rel=0.3)


def test_prices_of_made_up_rows() -> None:
    """What rows cost by the model itself is what is fitted."""
    prices, drawn = Prices(3.0, 5.0, 0.1, 0.05, 0.7, 0.25, 0.5, 0.9), random.Random(0)
    rows = []
    for method in ("sequential", "relaxed", "chunked"):
        for _ in range(40):
            time, gates = drawn.choice([300, 1000, 5000, 20_000]), drawn.choice([1, 3, 4])
            chunk = time if method == "sequential" else drawn.choice([32, 64, 100, 200])
            work = RecurrenceSize(time, drawn.choice([1, 4, 16, 64]), 20, gates, 132)
            microseconds = work.microseconds(method, chunk, OLD, prices, captured=True)
            rows.append(Observation((f"{time} steps", "forward"), work, method, chunk, microseconds, True))
    actual = fitted(rows, OLD)
    for name in ("node", "step", "gate", "walk", "compose"):
        assert getattr(actual, name) == pytest.approx(getattr(prices, name), rel=1e-6), name
    assert worst_choice(rows, OLD, actual) == 1.0


def test_the_command() -> None:
    files = [str(STORED / f"{name}.nvidia-h200.json") for name in ("rnn_sensitivity", "parallel_forward")]
    result = CliRunner().invoke(app, ["prices", *files, "--nodes", "9", "24", "30", "1"])
    assert result.exit_code == 0, result.output
    for word in (*Prices._fields, "known", "fitted", "slowest way chosen", "median error"):
        assert word in result.output
    result = CliRunner().invoke(app, ["prices", str(STORED / "spgemm.nvidia-h200.json")])
    assert result.exit_code == 2 and "rnn_sensitivity" in result.stderr
    result = CliRunner().invoke(app, ["prices", "nowhere.json"])
    assert result.exit_code == 2 and "nowhere.json" in result.stderr
