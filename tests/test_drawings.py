"""The drawings of schedules, patterns, plans and chains show all of their parts."""

from __future__ import annotations

import html
import itertools
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import torch
from jacsparse.patterns import Diagonal, Full, Pattern, picture
from matplotlib import pyplot
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle
from torch import nn

import jacsparse
from jacsparse.schedule import Schedule, blelloch, chunked, cyclic_reduction, linear
from tests.helpers import random_pattern

matplotlib.use("Agg")


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


def test_a_pattern_on_axes_and_in_a_notebook(tmp_path: Path) -> None:
    pattern = jacsparse.jacobian_pattern(nn.Conv2d(1, 2, 3), (1, 6, 7))
    figure, (one, other) = pyplot.subplots(1, 2)
    assert pattern.plot(ax=one, title="pattern") is one
    assert one.get_title() == f"pattern: 40 × 42, {pattern.nnz} entries" and not other.images
    assert np.array_equal(~np.asarray(one.images[0].get_array(), bool), pattern.to_scipy().toarray())
    pattern.plot(tmp_path / "both.png", ax=other)
    assert (tmp_path / "both.png").stat().st_size > 1000
    shown = pattern.plot()
    assert shown.figure.number in pyplot.get_fignums() and shown.figure is not figure
    pyplot.close("all")
    # Cells of large patterns are never narrower than pixels.
    large = Pattern.of(Diagonal(100_000)).plot(ax=pyplot.figure(figsize=(3, 2)).subplots())
    assert (
        np.less(large.images[0].get_array().shape, (200, 300)).all()
        and not np.asarray(large.images[0].get_array()).all(1).any()
    )
    pyplot.close("all")


@pytest.mark.parametrize("shape", [(5, 7), (1, 1000), (0, 3), (300, 200)])
def test_pictures_in_notebooks(shape: tuple[int, int]) -> None:
    pattern = random_pattern(*shape, 0.3, 0)
    for thing in (pattern, jacsparse.SparseJacobian(pattern, torch.ones(pattern.nnz, 2))):
        text = thing._repr_html_()
        assert text.startswith(f"<code>{html.escape(repr(thing))}</code>")
        svg = ElementTree.fromstring(text.partition("<br>")[2])
        columns, rows = map(int, svg.attrib["viewBox"].split()[2:])
        drawn = np.zeros((rows, columns), bool)
        for start, row, end in re.findall(r"M(\d+) (\d+)\.5H(\d+)", svg[0].attrib["d"]):
            drawn[int(row), int(start) : int(end)] = True
        assert np.array_equal(drawn, picture(pattern, (100, 100)))
        assert max(int(svg.attrib["width"]), int(svg.attrib["height"])) <= 200


def test_magnitudes() -> None:
    pattern = jacsparse.Pattern((3, 3), [0, 2, 4, 6], [0, 1, 1, 2, 0, 2])
    values = torch.tensor([[1.0, 2.0], [-1e3, 2.0], [0.0, 2.0], [torch.nan, 2.0], [-torch.inf, 2.0], [1e-30, 2.0]])
    J, axes = jacsparse.SparseJacobian(pattern, values), pyplot.figure().subplots()
    with pytest.raises(ValueError, match="this Jacobian has 2 samples; say which one"):
        J.plot(ax=axes)
    J.plot(ax=axes, sample=0)
    (image,) = axes.images
    colors = image.cmap(image.norm(image.get_array()))
    red, grey, white = map(to_rgba, ("red", "0.8", "white"))
    assert [tuple(colors[place]) for place in ((1, 2), (2, 0), (1, 1), (2, 2), (0, 2))] == [red, red, grey, grey, white]
    assert image.norm.vmin == 1.0 and image.norm.vmax == 1e3
    assert axes.figure.axes[1].get_ylabel() == "magnitude, grey: zero, red: not finite"
    # All magnitudes alike, and none; full ones of many entries in a cell.
    J.plot(ax=pyplot.figure().subplots(), sample=1)
    jacsparse.SparseJacobian(Pattern.of(Full(0, 3)), torch.ones(0, 1)).plot(ax=pyplot.figure().subplots())
    full = torch.arange(1.0, 600 * 500 + 1)[:, None]
    axes = jacsparse.SparseJacobian(Pattern.of(Full(600, 500)), full).plot(ax=pyplot.figure(figsize=(2, 2)).subplots())
    cells = axes.images[0].get_array()
    assert max(cells.shape) < 200 and cells.max() == full.max() and not np.ma.getmaskarray(cells).any()
    assert axes.figure.axes[1].get_ylabel() == "magnitude"
    pyplot.close("all")


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
