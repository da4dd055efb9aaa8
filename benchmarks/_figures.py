"""The picture that several experiments share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jacsparse.figures import BLUE, GREEN, ORANGE, new_figure, save_figure

from ._experiment import Row
from ._text import amount

__all__ = ["bars"]

_COLOURS = {"ours": BLUE, "peer": ORANGE, "reference": GREEN}
_NAMES = {"ours": "jacsparse", "peer": "peer", "reference": "reference"}


def bars(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw times as bars over a logarithmic axis, in groups, with quartiles and the hardware's floor."""
    timed = [row for row in rows if row.median is not None and row.unit == "s"]
    lines = _lines(timed)
    figure, axes = new_figure(8.0, 1.0 + 0.24 * max(4, len(lines)))
    for place, line in enumerate(lines):
        if isinstance(line, Row):
            _bar(axes, place, line)
    axes.set_yticks(range(len(lines)), [line.label if isinstance(line, Row) else line for line in lines], fontsize=8)
    for tick, line in zip(axes.get_yticklabels(), lines, strict=True):
        tick.set_fontweight("normal" if isinstance(line, Row) else "bold")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(lines) - 0.3, -0.7)
    axes.set(xscale="log", xlabel="seconds: median, quartiles, and the hardware's floor")
    # The figures at the bars' ends need space.
    axes.margins(x=0.12)
    axes.grid(axis="x", alpha=0.25)
    # The title is centred on the figure, not on the axes: labels take half of the width.
    figure.suptitle(title, fontsize=10)
    _legend(figure, {row.role for row in timed}, any(row.floor for row in timed))
    save_figure(figure, path)


def _lines(rows: Sequence[Row]) -> list[Row | str]:
    """The rows, with a heading above each group."""
    lines: list[Row | str] = []
    group = None
    for row in rows:
        if row.group != group:
            lines.append(row.group)
            group = row.group
        lines.append(row)
    return lines


def _bar(axes: Any, place: int, row: Row) -> None:
    assert row.median is not None
    axes.barh(place, row.median, height=0.7, color=_COLOURS[row.role])
    if row.lower is not None and row.upper is not None:
        axes.plot([row.lower, row.upper], [place, place], color="black", linewidth=1)
    if row.floor:
        axes.plot([row.floor, row.floor], [place - 0.4, place + 0.4], color="black", linewidth=2)
    end = max(row.median, row.upper or 0.0)
    axes.annotate(
        amount(row.median, "s"), (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7
    )


def _legend(figure: Any, roles: set[str], floors: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=_COLOURS[role], label=_NAMES[role]) for role in _COLOURS if role in roles]
    if floors:
        handles.append(Line2D([], [], color="black", linewidth=2, marker="|", linestyle="none", label="floor"))
    if handles:
        figure.legend(handles=handles, fontsize=8, frameon=False, loc="outside lower center", ncols=len(handles))
