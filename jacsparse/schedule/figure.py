"""The figure of a schedule: which places of the scan's array each product covers, level by level."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ..figures import BLUE, ORANGE, new_figure, save_figure
from .running import by_level

_LOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "mm": ("matrix × matrix", {"facecolor": BLUE, "edgecolor": "black"}),
    "mv": ("matrix × vector", {"facecolor": ORANGE, "edgecolor": "black", "hatch": "////"}),
    "dead": ("dead: no gradient depends on it", {"facecolor": "none", "edgecolor": "gray", "linestyle": "--"}),
}


def schedule_figure(schedule: Any, path: str | os.PathLike[str]) -> None:
    """Draw the products of a `jacsparse.schedule.Schedule`, as `Schedule.plot` says."""
    levels = list(by_level(schedule.products))
    lanes = [(label, lane) for steps in levels for label, lane in _lanes(steps, schedule.spans)]
    width, height = max(6.5, min(8.0, 1.8 + 0.55 * schedule.n)), max(2.6, min(14.0, 1.7 + 0.42 * len(lanes)))
    figure, axes = new_figure(width, height)
    shown = {}
    for row, (_, steps) in enumerate(lanes):
        for step in steps:
            look = step.kind if step.live else "dead"
            shown[look] = _bar(axes, row, schedule.spans, step, look)
    axes.set_yticks(range(len(lanes)), [label for label, _ in lanes])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(-0.6, schedule.n + 0.6)
    # Names of all places are legible up to some twenty at a column's width; beyond, every k-th.
    ticks = range(0, schedule.n + 1, -(-schedule.n // 14))
    axes.set_xticks(ticks, ["∇x$_{n}$" if place == 0 else f"J$_{{{schedule.n + 1 - place}}}^T$" for place in ticks])
    axes.set_xlabel("places of the array: gradient of the output, transposed Jacobians")
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    depth = sum(any(step.live for step in steps) for steps in levels)
    products = f"{len(schedule.live_steps())} products in {depth} rounds"
    axes.set_title(f"{schedule.name}, {schedule.n} stages: {products}", fontsize=10)
    handles = [shown[look] for look in _LOOKS if look in shown]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    save_figure(figure, path)


def _lanes(steps: list[Any], spans: dict[int, tuple[int, int]]) -> Iterator[tuple[str, list[Any]]]:
    """The products of a level in lines of bars that do not overlap; the first line has the level's name."""
    lanes: list[tuple[int, list[Any]]] = []
    label = "middle" if steps[0].phase == "middle" else f"{steps[0].phase}, level {steps[0].level}"
    for step in sorted(steps, key=lambda step: _extent(step, spans)):
        first, last = _extent(step, spans)
        number = next((number for number, (end, _) in enumerate(lanes) if end < first), len(lanes))
        lanes[number : number + 1] = [(last, [*(lanes[number][1] if number < len(lanes) else []), step])]
    for number, (_, members) in enumerate(lanes):
        yield (label if number == 0 else ""), members


def _extent(step: Any, spans: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """The first and the last place of a product's bar."""
    first = spans[step.left if step.kind == "mv" else step.right][0]
    return first, spans[step.left][1]


def _bar(axes: Any, row: int, spans: dict[int, tuple[int, int]], step: Any, look: str) -> Any:
    """A bar over the matrices that a product takes in; what a vector has taken in before is a line that leads to it."""
    from matplotlib.patches import Rectangle

    first, last = _extent(step, spans)
    label, style = _LOOKS[look]
    bar = Rectangle((first - 0.42, row - 0.28), last - first + 0.84, 0.56, label=label, linewidth=1, **style)
    axes.add_patch(bar)
    if step.kind == "mv":
        start = {"marker": "o", "markersize": 3, "markevery": [0]}
        axes.plot([0, first - 0.42], [row, row], color="black", linewidth=1, zorder=0.9, **start)
    else:
        joint = spans[step.left][0] - 0.5
        axes.plot([joint, joint], [row - 0.28, row + 0.28], color="white" if step.live else "gray", linewidth=1.5)
    return bar
