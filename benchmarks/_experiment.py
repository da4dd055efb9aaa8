"""Experiments, which return rows."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ._calls import one_thread
from ._figures import Picture, times_picture
from ._rows import Row

if TYPE_CHECKING:
    from ._context import Context


class Experiment(ABC):
    """One table or figure of a paper, or one comparison with peers."""

    #: The experiment's name on the command line.
    name: ClassVar[str]
    #: What is measured, in one line.
    title: ClassVar[str]
    #: The table or figure that the experiment reproduces.
    source: ClassVar[str]
    #: The devices on which it can run.
    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    @abstractmethod
    def run(self, context: Context) -> list[Row]:
        """Measure, and return the rows; ImportError where data need a package that is not installed."""

    def picture(self, rows: Sequence[Row]) -> Picture:
        """What is drawn of the rows: without more words, their times as bars."""
        return times_picture(rows, self.title)

    def figure(self, rows: Sequence[Row], path: Path) -> None:
        """Draw the rows into a PNG file; ImportError without matplotlib."""
        self.picture(rows).save(path)

    def on(self, data: str) -> Experiment:
        """The same experiment on other data, as `load_data` takes them; ValueError where it has data of its own."""
        raise ValueError(f"{self.name} takes no other data than its own; run it without --data {data}")

    def summary(self, rows: Sequence[Row]) -> str:
        """One line with the numbers of figures and of met targets."""
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


class Grid(Experiment):
    """An experiment that measures each of its cases by itself."""

    #: Whether everything runs on one thread of PyTorch's, which its limits are measured on, too.
    single_thread: ClassVar[bool] = False

    @abstractmethod
    def cases(self, context: Context) -> Iterable[Any]:
        """The settings, in the order in which they are measured."""

    @abstractmethod
    def measure(self, case: Any, context: Context) -> Iterable[Row]:
        """Measure one of the settings, and return its rows."""

    def run(self, context: Context) -> list[Row]:
        """Measure all cases, and return their rows."""
        context = replace(context) if self.single_thread else context
        with one_thread() if self.single_thread else contextlib.nullcontext():
            return [row for case in self.cases(context) for row in self.measure(case, context)]
