"""An item of a paper: what is printed, and which row of which experiment stands beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ._experiment import Row
from ._results import Result
from ._text import amount, ratio_text

__all__ = ["COLUMNS", "ON_A_CPU", "Figure", "Item", "item_cells", "shown_figure"]

#: What differs where a paper's times are of a GPU and ours are not.
ON_A_CPU = "a CPU of two cores for the paper's GPUs"

#: How an item is shown here: as the paper has it; with less data, fewer steps or on another device; or as the paper has
#: it, and what is printed does not hold.
State = Literal["whole", "in small", "otherwise"]


@dataclass(frozen=True)
class Figure:
    """Where a figure stands among an experiment's rows; of several rows, the largest or the smallest is taken."""

    experiment: str
    #: What the row's group and its label begin with.
    group: str = ""
    label: str = ""
    #: The comparison whose ratio is the figure, or the entry of the row's data; without both, it is the row's median.
    comparison: str = ""
    entry: str = ""
    #: What the row's data hold, each with its value.
    data: Mapping[str, Any] = field(default_factory=dict)
    smallest: bool = False
    #: What the figure is multiplied by, so that it has the unit of the paper's.
    times: float = 1.0
    #: The paper's device: a result of this one is shown where there is one, else a result of the other.
    device: str = "cpu"

    def of(self, rows: Iterable[Row]) -> tuple[Row, float] | None:
        """The row and its figure; None where there is none."""
        figures = [
            (row, self.times * value)
            for row in rows
            if row.group.startswith(self.group)
            and row.label.startswith(self.label)
            and all(row.data.get(name) == value for name, value in self.data.items())
            and (value := self._value(row)) is not None
        ]
        pick = min if self.smallest else max
        return pick(figures, key=lambda pair: pair[1], default=None)

    def _value(self, row: Row) -> float | None:
        if self.entry:
            return row.data.get(self.entry)
        if not self.comparison:
            return row.median
        return next((each.ratio for each in row.comparisons if each.text == self.comparison), None)


@dataclass(frozen=True)
class Item:
    """An algorithm, equation, table or figure of a paper, with one of its published values."""

    paper: str
    #: Where it stands in the paper.
    place: str
    #: What the value is of.
    what: str
    #: As printed, with its device where it is a time.
    published: str
    figure: Figure
    #: The printed value as a number, where there is one to divide by.
    value: float | None = None
    unit: str = ""
    state: State = "whole"
    #: What differs from the paper.
    why: str = ""

    @property
    def command(self) -> str:
        """The command that makes the figure."""
        return f"python -m benchmarks run {self.figure.experiment}"


def shown_figure(item: Item, results: Sequence[Result]) -> tuple[Result, Row, float] | None:
    """An item's figure with its row, in the newest result of the paper's device, or else of another; None without."""
    for result in sorted(results, key=lambda each: (each.device == item.figure.device, each.date), reverse=True):
        if result.experiment == item.figure.experiment and (found := item.figure.of(result.rows)) is not None:
            return result, *found
    return None


#: The columns of an item's texts.
COLUMNS = ("item", "published", "here", "here / published", "what ran", "how far", "command")


def item_cells(item: Item, results: Sequence[Result]) -> tuple[str, ...]:
    """The texts of an item, one for each of `COLUMNS`."""
    shown, place = shown_figure(item, results), f"{item.place}: {item.what}"
    how_far = _how_far(item, None if shown is None else shown[0])
    if shown is None:
        return place, item.published, "not measured yet", "", "", how_far, f"`{item.command}`"
    result, row, figure = shown
    ratio = "" if item.value is None else ratio_text(figure / item.value)
    unit = item.unit or ("" if item.figure.comparison or item.figure.entry else row.unit)
    machine = f"{result.environment.get('cpu')}, {result.environment.get('cores')} core(s)"
    if result.device == "cuda":
        machine = str((result.environment.get("gpu") or {}).get("name"))
    parts = (row.group, row.label, str(row.data.get("ran", "")), f"{machine}, {result.date[:10]}")
    ran = "; ".join(filter(None, parts))
    return place, item.published, amount(figure, unit), ratio, ran, how_far, f"`{item.command}`"


def _how_far(item: Item, result: Result | None) -> str:
    """An item's state, and what differs from the paper in a result."""
    differs = [item.why] if item.why else []
    if result is not None and item.figure.device == "cuda":
        differs.insert(0, "another GPU" if result.device == "cuda" else ON_A_CPU)
    return ": ".join(filter(None, (item.state, "; ".join(differs))))
