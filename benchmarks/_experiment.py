"""What an experiment is, and what it gives: rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

if TYPE_CHECKING:
    from ._context import Context, Timing

__all__ = ["Comparison", "Experiment", "Row", "compare"]

Role = Literal["ours", "peer", "reference"]


@dataclass(frozen=True)
class Comparison:
    """A ratio of two figures of one run, and what it should be.

    Attributes
    ----------
    text : str
        What is divided by what, as in ``SciPy / slots``.
    ratio : float
        Of the medians.
    fastest : float or None
        Of the fastest runs: what is left of it on a machine that others use too.
    at_least, at_most : float or None
        The target.
    published : float or None
        What the papers print.
    """

    text: str
    ratio: float
    fastest: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    published: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the ratio meets its target; None where it has none."""
        if self.at_least is None and self.at_most is None:
            return None
        return (self.at_least is None or self.ratio >= self.at_least) and (
            self.at_most is None or self.ratio <= self.at_most
        )


@dataclass(frozen=True)
class Row:
    """One figure, or why there is none.

    Attributes
    ----------
    label : str
        What was measured.
    group : str
        The heading under which it stands.
    role : {"ours", "peer", "reference"}
        Whose figure it is; a reference is neither, as the time to copy as many bytes.
    quantity, unit : str
        As in ``time`` and ``s``.
    median, lower, upper, fastest : float or None
        Of the runs: the median, the quartiles and the smallest.
    runs : int
        How many there were; 1 where the figure is no time and does not vary.
    floor : float or None
        What the hardware allows at best: bytes over copy bandwidth, or flop over peak, whichever is longer.
    comparisons : tuple of Comparison
        With other rows of the same run.
    note : str
        What a reader has to know beside the figure.
    not_measured : str
        Why there is no figure.
    data : dict
        What the experiment's picture is drawn from, besides: plain values, for JSON.
    """

    label: str
    group: str = ""
    role: Role = "ours"
    quantity: str = "time"
    unit: str = "s"
    median: float | None = None
    lower: float | None = None
    upper: float | None = None
    fastest: float | None = None
    runs: int = 0
    floor: float | None = None
    comparisons: tuple[Comparison, ...] = ()
    note: str = ""
    not_measured: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def timed(cls, label: str, timing: Timing, *, per: float = 1, **rest: Any) -> Self:
        """A row of times, each divided by `per`: by the samples that one run handles, say; or why there are none."""
        if timing.problem:
            return cls.missing(label, timing.problem, **rest)
        lower, median, upper = (float(time) for time in np.quantile(timing.seconds, (0.25, 0.5, 0.75)) / per)
        fastest = min(timing.seconds) / per
        return cls(label=label, median=median, lower=lower, upper=upper, fastest=fastest, runs=timing.runs, **rest)

    @classmethod
    def of_value(cls, label: str, value: float, quantity: str, unit: str = "", **rest: Any) -> Self:
        """A row of a figure that is no time."""
        return cls(label=label, quantity=quantity, unit=unit, median=float(value), runs=1, **rest)

    @classmethod
    def missing(cls, label: str, reason: str, **rest: Any) -> Self:
        """A row that was not measured."""
        return cls(label=label, not_measured=reason, **rest)


def compare(text: str, numerator: Row, denominator: Row, **targets: float) -> tuple[Comparison, ...]:
    """The ratio of two rows' medians.

    No comparison where one of them was not measured, or is a difference of times that may as well be none.
    """
    if numerator.median is None or not denominator.median:
        return ()
    if min(row.lower if row.lower is not None else 0 for row in (numerator, denominator)) < 0:
        return ()
    fastest = None
    if numerator.fastest and denominator.fastest and min(numerator.fastest, denominator.fastest) > 0:
        fastest = numerator.fastest / denominator.fastest
    return (Comparison(text, numerator.median / denominator.median, fastest, **targets),)


class Experiment(ABC):
    """One table or figure of a paper, or one comparison with peers.

    Attributes
    ----------
    name : str
        As the command line takes it.
    title : str
        What is measured, in a line.
    source : str
        Which table or figure it reproduces.
    devices : tuple of str
        Where it can run.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    @abstractmethod
    def run(self, context: Context) -> list[Row]:
        """Measure."""

    @abstractmethod
    def figure(self, rows: Sequence[Row], path: Path) -> None:
        """Draw what was measured, into a PNG file."""

    def summary(self, rows: Sequence[Row]) -> str:
        """One line: how much was measured, and how many targets were met."""
        missing = sum(bool(row.not_measured) for row in rows)
        if missing == len(rows):
            return f"not measured: {'; '.join(dict.fromkeys(row.not_measured for row in rows))}"
        targets = [met for row in rows for comparison in row.comparisons if (met := comparison.met) is not None]
        parts = [f"{len(rows) - missing} figures"]
        if missing:
            parts.append(f"{missing} not measured")
        if targets:
            parts.append(f"{sum(targets)} of {len(targets)} targets met")
        return ", ".join(parts)
