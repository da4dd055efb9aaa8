"""Rows: the figures of experiments, and their ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from ._calls import peak_memory

if TYPE_CHECKING:
    from ._context import Context, Timing

Role = Literal["ours", "peer", "reference"]


@dataclass(frozen=True)
class Comparison:
    """A ratio of two figures of one run, and its target."""

    #: The figures that are divided, such as ``SciPy / slots``.
    text: str
    #: The ratio of the medians.
    ratio: float
    #: The ratio of the fastest runs, which other users of the machine change less.
    fastest: float | None = None
    #: The target.
    at_least: float | None = None
    at_most: float | None = None
    #: The ratio that the papers print.
    published: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the ratio meets its target, or None if it has no target."""
        if self.at_least is None and self.at_most is None:
            return None
        return (self.at_least is None or self.ratio >= self.at_least) and (
            self.at_most is None or self.ratio <= self.at_most
        )


@dataclass(frozen=True)
class Row:
    """One figure, or the reason why there is none."""

    #: What was measured.
    label: str
    #: The heading above the row.
    group: str = ""
    #: The owner of the figure; a reference belongs to nobody, such as the time to copy as many bytes.
    role: Role = "ours"
    quantity: str = "time"
    unit: str = "s"
    #: The median, the quartiles and the smallest of the runs.
    median: float | None = None
    lower: float | None = None
    upper: float | None = None
    fastest: float | None = None
    #: The number of runs; 1 for a figure that is no time and does not vary.
    runs: int = 0
    #: The least time that the hardware allows: bytes over copy bandwidth or flop over peak, whichever is longer.
    floor: float | None = None
    #: Comparisons with other rows of the same run.
    comparisons: tuple[Comparison, ...] = ()
    #: What a reader must know besides the figure.
    note: str = ""
    #: The reason why there is no figure.
    not_measured: str = ""
    #: Plain values from which the experiment's picture is drawn, for JSON.
    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def timed(cls, label: str, timing: Timing, *, per: float = 1, **fields: Any) -> Self:
        """A row of times, each divided by `per`, such as the samples of one run; or of the timing's problem."""
        if timing.problem:
            return cls.missing(label, timing.problem, **fields)
        lower, median, upper = (float(time) for time in np.quantile(timing.seconds, (0.25, 0.5, 0.75)) / per)
        fastest = min(timing.seconds) / per
        return cls(label=label, median=median, lower=lower, upper=upper, fastest=fastest, runs=timing.runs, **fields)

    @classmethod
    def of_value(cls, label: str, value: float, quantity: str, unit: str = "", **fields: Any) -> Self:
        """A row of a figure that is no time."""
        return cls(label=label, quantity=quantity, unit=unit, median=float(value), runs=1, **fields)

    @classmethod
    def missing(cls, label: str, reason: str, **fields: Any) -> Self:
        """A row without a figure."""
        return cls(label=label, not_measured=reason, **fields)

    def beside(self, *comparisons: Comparison) -> Row:
        """The row with more comparisons."""
        return replace(self, comparisons=(*self.comparisons, *comparisons))


def compare(text: str, numerator: Row, denominator: Row, **targets: float | None) -> tuple[Comparison, ...]:
    """The ratio of two rows' medians; empty if one was not measured, or is a difference of times that may be zero."""
    if numerator.median is None or not denominator.median:
        return ()
    if min(row.lower if row.lower is not None else 0 for row in (numerator, denominator)) < 0:
        return ()
    fastest = None
    if numerator.fastest and denominator.fastest and min(numerator.fastest, denominator.fastest) > 0:
        fastest = numerator.fastest / denominator.fastest
    return (Comparison(text, numerator.median / denominator.median, fastest, **targets),)


def reason(error: BaseException) -> str:
    """The first line of an error, as the reason why something was not measured."""
    line = str(error).strip().partition("\n")[0]
    return line if isinstance(error, ImportError) else f"{type(error).__name__}: {line}"


class Group:
    """Rows under one heading, by label, and the ratios between them."""

    def __init__(self, name: str, **fields: Any) -> None:
        """Make no rows; `fields` are those that all rows have."""
        self.name = name
        self._fields: dict[str, Any] = {"group": name, **fields}
        self._rows: dict[str, Row] = {}

    def timed(self, label: str, timing: Timing, *, per: float = 1, **fields: Any) -> Row:
        """Add a row of times, as `Row.timed` makes it."""
        return self.add(Row.timed(label, timing, per=per, **{**self._fields, **fields}))

    def value(self, label: str, value: float, quantity: str, unit: str = "", **fields: Any) -> Row:
        """Add a row of a figure that is no time."""
        return self.add(Row.of_value(label, value, quantity, unit, **{**self._fields, **fields}))

    def missing(self, label: str, reason: str, **fields: Any) -> Row:
        """Add a row without a figure."""
        return self.add(Row.missing(label, reason, **{**self._fields, **fields}))

    def in_turns(
        self,
        context: Context,
        functions: Mapping[str, Callable[[], object]],
        *,
        seconds: float | None = None,
        pause: float = 0.0,
        **fields: Any,
    ) -> dict[str, Timing]:
        """Add a row of times for each function, which take turns; return the timings.

        A field that is a dict has the rows' own by label, and is read when all are timed; any other is all rows'.
        """
        timings = context.under(self.name).times(functions, seconds=seconds, pause=pause)
        by_label = {name: field for name, field in fields.items() if isinstance(field, dict)}
        common = {name: field for name, field in fields.items() if name not in by_label}
        for label, timing in timings.items():
            of_row = {name: field[label] for name, field in by_label.items() if label in field}
            self.timed(label, timing, **common, **of_row)
        return timings

    def memory(
        self, label: str, function: Callable[[], object], *, runs: int = 3, quantity: str = "memory", **fields: Any
    ) -> Row:
        """Add a row of the memory that a function needs at its peak, the least of several runs."""
        try:
            nbytes = min(peak_memory(function) for _ in range(runs))
        except (OSError, AttributeError) as error:
            return self.missing(label, reason(error), **fields)
        return self.value(label, nbytes / 2**20, quantity, "MiB", **fields)

    def add(self, row: Row) -> Row:
        """Add a row, or put it in the place of that with its label."""
        self._rows[row.label] = row
        return row

    def beside(self, label: str, text: str, ratio: float, **targets: float | None) -> None:
        """Add a ratio to a row."""
        self.add(self._rows[label].beside(Comparison(text, ratio, **targets)))

    def compare(self, text: str, numerator: str, denominator: str, *, at: str = "", **targets: float | None) -> None:
        """Add the ratio of two rows, where both are there, to the denominator, or to the row that `at` names."""
        if numerator in self._rows and denominator in self._rows:
            row = self._rows[at or denominator]
            self.add(row.beside(*compare(text, self._rows[numerator], self._rows[denominator], **targets)))

    def fastest(self, labels: Iterable[str]) -> Row | None:
        """The row of least median among some, or None where none was measured."""
        measured = [row for label in labels if (row := self._rows.get(label)) and row.median is not None]
        return min(measured, key=lambda row: row.median or 0.0, default=None)

    def rows(self) -> list[Row]:
        """All rows, in the order in which they were added."""
        return [*self._rows.values()]

    def __getitem__(self, label: str) -> Row:
        return self._rows[label]

    def __contains__(self, label: str) -> bool:
        return label in self._rows


def where(rows: Iterable[Row], **data: Any) -> list[Row]:
    """The rows whose data have these entries."""
    return [row for row in rows if data.items() <= row.data.items()]


def values_of(rows: Iterable[Row], name: str) -> list[Any]:
    """The different values of an entry of the rows' data, in their order."""
    return list(dict.fromkeys(row.data[name] for row in rows if name in row.data))
