"""Pictures of results: panels of lines, rules, bars and cells, which say what is drawn and not how."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jacsparse.figures import BLUE, GREEN, ORANGE, PURPLE, SKY, new_figure, save_figure

from ._rows import Row
from ._text import amount

#: Colours of lines and bars, in this order.
COLOURS = (ORANGE, BLUE, GREEN, SKY, PURPLE)
_ROLES = {"ours": (BLUE, "jacsparse"), "peer": (ORANGE, "peer"), "reference": (GREEN, "reference")}


class Drawn(Protocol):
    """A part of a panel."""

    def draw(self, axes: Any) -> None:
        """Draw it on matplotlib's axes."""


@dataclass(frozen=True)
class Line:
    """A line through points, or their markers, with a vertical bar at each where they are spread."""

    x: Sequence[float]
    y: Sequence[float]
    label: str = ""
    colour: str = "black"
    #: matplotlib's format, as ``o-``, or a pair of dashes' offset and lengths.
    style: Any = "-"
    #: The lower and the upper ends of the bars.
    spread: tuple[Sequence[float], Sequence[float]] | None = None
    #: What else matplotlib's ``plot`` takes.
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def through(
        cls, points: Sequence[tuple[Any, ...]], label: str = "", colour: str = "black", style: Any = "-", **options: Any
    ) -> Line:
        """A line through pairs, or quadruples with the ends of their spread, in the order of the first numbers."""
        x, y, *spread = zip(*sorted(points), strict=True) if points else ((), ())
        return cls(x, y, label, colour, style, spread=(spread[0], spread[1]) if spread else None, options=options)

    def draw(self, axes: Any) -> None:
        """Draw line and bars."""
        dashes = not isinstance(self.style, str)
        options = {"linewidth": 1.3, "markersize": 4, **({"linestyle": self.style} if dashes else {}), **self.options}
        axes.plot(
            self.x, self.y, *(() if dashes else (self.style,)), color=self.colour, label=self.label or None, **options
        )
        if self.spread is not None:
            axes.vlines(self.x, *self.spread, color=self.colour, linewidth=1)


@dataclass(frozen=True)
class Straight:
    """A horizontal or a vertical line across a panel."""

    y: float | None = None
    x: float | None = None
    label: str = ""
    colour: str = "black"
    style: str = "-"

    def draw(self, axes: Any) -> None:
        """Draw it."""
        for draw, place in ((axes.axhline, self.y), (axes.axvline, self.x)):
            if place is not None:
                draw(place, color=self.colour, linestyle=self.style, linewidth=1, label=self.label or None)


@dataclass(frozen=True)
class Bars:
    """Bars of several series side by side at each name, with their figures; None has no bar."""

    names: Sequence[str]
    heights: Mapping[str, Sequence[float | None]]
    colours: Sequence[str] = COLOURS
    #: A format of the heights, or the texts above the bars, by series.
    texts: str | Mapping[str, Sequence[str]] = ""
    #: Heights up to which bars are pale, by series.
    pale: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    #: Whether bars lie.
    lying: bool = False

    def draw(self, axes: Any) -> None:
        """Draw all series."""
        width, draw = 0.8 / max(1, len(self.heights)), axes.barh if self.lying else axes.bar
        for number, ((label, heights), colour) in enumerate(zip(self.heights.items(), self.colours, strict=False)):
            known = [place for place, height in enumerate(heights) if height is not None]
            at = [place + (number - (len(self.heights) - 1) / 2) * width for place in known]
            bars = draw(at, [heights[place] for place in known], 0.95 * width, color=colour, label=label)
            if label in self.pale:
                draw(at, [self.pale[label][place] for place in known], 0.95 * width, color="white", alpha=0.55)
            if isinstance(self.texts, str) and self.texts:
                axes.bar_label(bars, fmt=self.texts, fontsize=7, padding=2)
            elif self.texts:
                highest = 0.86 * axes.get_ylim()[1] if not axes.get_autoscaley_on() else math.inf
                for x, place in zip(at, known, strict=True):
                    height = min(heights[place] or 0.0, highest)
                    axes.text(
                        x, height, f" {self.texts[label][place]}", ha="center", va="bottom", rotation=90, fontsize=7
                    )
        axis = axes.yaxis if self.lying else axes.xaxis
        axis.set_ticks(range(len(self.names)), self.names, fontsize=8)
        if self.lying:
            axes.set_ylim(len(self.names) - 0.4, -0.6)


@dataclass(frozen=True)
class Cells:
    """A table of coloured cells with texts."""

    lines: Sequence[str]
    columns: Sequence[str]
    #: Text, colour and whether the text is bold, by line and column.
    cells: Mapping[tuple[int, int], tuple[str, Any, bool]]

    def draw(self, axes: Any) -> None:
        """Draw the cells, the first line at the top."""
        from matplotlib.colors import to_rgb
        from matplotlib.patches import Rectangle

        for (line, column), (text, colour, bold) in self.cells.items():
            axes.add_patch(Rectangle((column - 0.5, line - 0.5), 1, 1, facecolor=colour, edgecolor="white"))
            style = {
                "fontweight": "bold" if bold else "normal",
                "color": "white" if sum(to_rgb(colour)) < 1.2 else "black",
            }
            axes.text(column, line, text, ha="center", va="center", fontsize=6, **style)
        axes.set(xlim=(-0.5, len(self.columns) - 0.5), ylim=(len(self.lines) - 0.5, -0.5))
        axes.set_xticks(range(len(self.columns)), self.columns, fontsize=7)
        axes.set_yticks(range(len(self.lines)), self.lines, fontsize=7)


@dataclass(frozen=True)
class _Times:
    """Times as lying bars under headings, with quartiles and the hardware's floor."""

    rows: Sequence[Row]

    def draw(self, axes: Any) -> None:
        groups = itertools.groupby(self.rows, lambda row: row.group)
        lines: list[Row | str] = [line for group, rows in groups for line in (group, *rows)]
        for place, line in enumerate(lines):
            if isinstance(line, Row):
                self._bar(axes, place, line)
        axes.set_yticks(
            range(len(lines)), [line.label if isinstance(line, Row) else line for line in lines], fontsize=8
        )
        for tick, line in zip(axes.get_yticklabels(), lines, strict=True):
            tick.set_fontweight("normal" if isinstance(line, Row) else "bold")
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(lines) - 0.3, -0.7)
        # The figures at the bars' ends need space.
        axes.margins(x=0.12)

    def _bar(self, axes: Any, place: int, row: Row) -> None:
        colour, name = _ROLES[row.role]
        median = row.median or 0.0
        axes.barh(place, median, height=0.7, color=colour, label=name)
        if row.lower is not None and row.upper is not None:
            axes.plot([row.lower, row.upper], [place, place], color="black", linewidth=1)
        if row.floor:
            axes.plot(row.floor, place, "|", color="black", markersize=10, markeredgewidth=2, label="floor")
        axes.annotate(
            amount(median, "s"), (max(median, row.upper or 0.0), place), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=7,
        )  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """Parts on common axes."""

    parts: Sequence[Drawn]
    title: str = ""
    x: str = ""
    y: str = ""
    #: The axes that are logarithmic: ``x``, or ``2`` for powers of two, and ``y``, or ``±`` for both signs.
    log: str = ""
    #: Where the legend is, as matplotlib takes it, or ``below``; none where it is empty.
    legend: str = "best"
    grid: str = "both"
    #: Font size of title and labels.
    size: float = 9
    #: What else matplotlib's ``Axes.set`` takes.
    settings: Mapping[str, Any] = field(default_factory=dict)

    def draw(self, axes: Any, *, legend: bool) -> dict[str, Any]:
        """Draw the parts; what a legend shows, by label."""
        # Bars are cut off at the limits.
        axes.set(**{name: ends for name, ends in self.settings.items() if name.endswith("lim") and None not in ends})
        for part in self.parts:
            part.draw(axes)
        axes.set_xlabel(self.x, fontsize=self.size)
        axes.set_ylabel(self.y, fontsize=self.size)
        axes.set_title(self.title, fontsize=self.size, loc="left" if len(self.title) > 60 else "center")
        if "2" in self.log or "x" in self.log:
            axes.set_xscale("log", base=2 if "2" in self.log else 10)
        if "y" in self.log:
            axes.set_yscale("log")
        if "±" in self.log:
            axes.set_yscale("symlog", linthresh=1e-4)
        axes.set(**self.settings)
        if self.grid:
            axes.grid(axis=self.grid, alpha=0.25)
        handles, labels = axes.get_legend_handles_labels()
        shown = dict(zip(labels, handles, strict=True))
        if legend and self.legend and shown:
            place: dict[str, Any] = {"loc": self.legend}
            if self.legend == "below":
                place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18)}
            axes.legend(shown.values(), shown.keys(), fontsize=7.5, frameon=False, **place)
        return shown


@dataclass(frozen=True)
class Picture:
    """Panels in rows, under a title."""

    title: str
    panels: Sequence[Panel]
    #: Width and height in inches.
    size: tuple[float, float] = (10.0, 4.2)
    #: Panels side by side; all where it is 0.
    columns: int = 0
    #: Columns of one legend for all panels, below them; where it is 0 each panel has its own.
    legend: int = 0

    def save(self, path: Path) -> None:
        """Draw it into a file."""
        columns = self.columns or max(1, len(self.panels))
        rows = max(1, math.ceil(len(self.panels) / columns))
        figure, _ = new_figure(*self.size, rows=rows, columns=columns)
        shown: dict[str, Any] = {}
        for axes, panel in zip(figure.axes, self.panels, strict=False):
            shown = {**panel.draw(axes, legend=not self.legend), **shown}
        for axes in figure.axes[len(self.panels) :]:
            axes.axis("off")
        if self.legend and shown:
            place = {"loc": "outside lower center", "ncols": self.legend, "handlelength": 3}
            figure.legend(shown.values(), shown.keys(), fontsize=8, frameon=False, **place)
        # The title is centred on the figure, not on the axes: labels may take half of the width.
        figure.suptitle(self.title, fontsize=10)
        save_figure(figure, path)


def times_picture(rows: Sequence[Row], title: str) -> Picture:
    """Times as bars over a logarithmic axis, in groups, with quartiles and the hardware's floor."""
    timed = [row for row in rows if row.median is not None and row.unit == "s"]
    lines = len(timed) + len({row.group for row in timed})
    label = "seconds: median, quartiles, and the hardware's floor"
    panel = Panel([_Times(timed)], x=label, log="x", grid="x")
    return Picture(title, [panel], (8.0, 1.0 + 0.24 * max(4, lines)), legend=4)
