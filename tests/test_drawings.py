"""The drawings of schedules, patterns, plans and chains show all of their parts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from matplotlib.patches import Rectangle
from torch import nn

import jacsparse
from jacsparse.schedule import Schedule, blelloch, chunked, cyclic_reduction, linear


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    drawn: list[Any] = []
    for module in ("schedule.figure", "stages.chain_figure", "patterns.drawing"):
        monkeypatch.setattr(f"jacsparse.{module}.save_figure", lambda figure, path: drawn.append(figure))
    return drawn


@pytest.mark.parametrize("schedule", [linear(6), blelloch(8), blelloch(21, 2), cyclic_reduction(9), chunked(12, 4)])
def test_each_product_is_one_bar(schedule: Schedule, figures: list[Any]) -> None:
    schedule.plot("schedule.png")
    (axes,) = figures[0].axes
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert len(bars) == len(schedule.products)
    assert sum("dead" in bar.get_label() for bar in bars) == len(schedule.products) - len(schedule.live_steps())
    by_row: dict[float, list[tuple[float, float]]] = {}
    for bar in bars:
        by_row.setdefault(bar.get_y(), []).append((bar.get_x(), bar.get_x() + bar.get_width()))
    for row in by_row.values():
        row.sort()
        assert all(before[1] < after[0] for before, after in itertools.pairwise(row)), "bars overlap"


def test_spans_of_gradients_begin_at_the_output() -> None:
    for schedule in (linear(9), blelloch(9), cyclic_reduction(9), chunked(9, 2)):
        assert [schedule.spans[value] for value in schedule.gradients] == [(0, place) for place in range(9)]


def test_rounds_in_the_title(figures: list[Any]) -> None:
    for schedule, rounds in ((blelloch(16), 7), (cyclic_reduction(16), 4), (linear(5), 4), (chunked(12, 4), 8)):
        schedule.plot("schedule.png")
        # Some of a round's products could be begun earlier.
        assert schedule.complexity(64).steps <= rounds
        assert figures[-1].axes[0].get_title().endswith(f"products in {rounds} rounds")


def test_a_schedule_without_products(tmp_path: Path) -> None:
    linear(1).plot(tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").stat().st_size > 1000


def test_patterns_side_by_side(figures: list[Any]) -> None:
    pooling, convolution = nn.MaxPool2d(2), nn.Conv2d(3, 4, 3, padding=1)
    a = jacsparse.jacobian_pattern(pooling, (4, 8, 8))
    b = jacsparse.jacobian_pattern(convolution, (3, 8, 8))
    plan = jacsparse.plan_product(a, b)
    plan.plot("plan.png")
    assert [axes.get_title().partition(":")[0] for axes in figures[0].axes] == ["A", "B", "C"]
    b.plot("pattern.png")
    (axes,) = figures[1].axes
    assert axes.get_title() == f"256 × 192, {b.nnz:,} entries"
    assert (~axes.images[0].get_array()).sum() == b.nnz, "a cell is a position"


def test_stages_of_a_chain(figures: list[Any]) -> None:
    class Residual(nn.Module):
        def forward(self, x: Any) -> Any:
            return x + x.tanh()

    chain = jacsparse.chain(nn.Sequential(nn.Conv2d(3, 4, 3), Residual(), nn.Flatten(), nn.Linear(144, 2)), (3, 8, 8))
    chain.plot("chain.png")
    (axes,) = figures[0].axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(labels) == len(chain) and labels[0] == "0, convolution → 4 × 6 × 6"
    assert [bar.get_width() for bar in axes.patches[1::2]] == [stage.pattern.nnz for stage in chain.stages]


def test_operators_that_paths_name_are_named_once(figures: list[Any]) -> None:
    class Twice(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.tanh().tanh()

    jacsparse.chain(Twice(), (3,)).plot("chain.png")
    assert [label.get_text() for label in figures[0].axes[0].get_yticklabels()] == ["Twice, tanh → 3", "Twice:tanh → 3"]


def test_figures_in_folders_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cannot write .*absent/x\.png: there is no folder .*; make it"):
        blelloch(4).plot(tmp_path / "absent" / "x.png")
