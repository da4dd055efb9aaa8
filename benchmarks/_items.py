"""An item of a paper: what is printed, which row of which experiment stands beside it, and how far it is reproduced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ._results import Result
from ._rows import Row
from ._text import amount, ratio_text

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

    def shown(self, results: Sequence[Result]) -> tuple[Result, Row, float] | None:
        """The figure with its row, in the newest result of the paper's device, or else of another; None without."""
        for result in sorted(results, key=lambda each: (each.device == self.figure.device, each.date), reverse=True):
            if result.experiment == self.figure.experiment and (found := self.figure.of(result.rows)) is not None:
                return result, *found
        return None

    def status(self, results: Sequence[Result]) -> str:
        """What has become of it: "reproduced" only where a result has it."""
        if self.shown(results) is None:
            return "not measured"
        words = {"whole": "reproduced", "in small": "reproduced in small", "otherwise": "comes out otherwise"}
        return words[self.state]

    def how_far(self, results: Sequence[Result]) -> str:
        """Its state, and what differs from the paper in the result that is shown."""
        shown, differs = self.shown(results), [self.why] if self.why else []
        if shown is not None and self.figure.device == "cuda":
            differs.insert(0, "another GPU" if shown[0].device == "cuda" else ON_A_CPU)
        return ": ".join(filter(None, (self.state, "; ".join(differs))))

    def lines(self, results: Sequence[Result]) -> Iterator[str]:
        """The item in Markdown: the published figure, ours, what ran, and how."""
        yield from ("", f"### {self.place}: {self.what}", "", f"- Published: {self.published}")
        if (shown := self.shown(results)) is None:
            yield "- Here: not measured yet"
        else:
            result, row, figure = shown
            unit = self.unit or ("" if self.figure.comparison or self.figure.entry else row.unit)
            ratio = "" if self.value is None else f", {ratio_text(figure / self.value)} times the published"
            yield f"- Here: **{amount(figure, unit)}**{ratio}; {self.status(results)}"
            machine = f"{result.environment.get('cpu')}, {result.environment.get('cores')} core(s)"
            if result.device == "cuda":
                machine = str((result.environment.get("gpu") or {}).get("name"))
            parts = (row.group, row.label, str(row.data.get("ran", "")), f"{machine}, {result.date[:10]}")
            yield f"- What ran: {'; '.join(filter(None, parts))}"
        yield f"- Command: `python -m benchmarks run {self.figure.experiment}`"
        if (how_far := self.how_far(results)) != self.state:
            yield f"- How far: {how_far}"
