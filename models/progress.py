"""The progress of a training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Progress:
    """A report of `train` after an iteration, and once more after the test that ends an epoch.

    Attributes
    ----------
    phase : {"train", "retrain"}
        Whether this is training before or after pruning.
    epoch, epochs : int
        The phase's current epoch, from 1, and their number.
    iteration, iterations : int
        The epoch's current iteration, from 1, and their number.
    loss : float
        The loss of the iteration's batch.
    model : Module
        The model as it is now; at the end of an epoch `evaluate` can tell more about it.
    accuracy : float or None
        The accuracy on the test images at the end of an epoch; else None.
    """

    phase: str
    epoch: int
    epochs: int
    iteration: int
    iterations: int
    loss: float
    model: nn.Module
    accuracy: float | None = None


@contextlib.contextmanager
def progress_bar(console: Any = None) -> Iterator[Callable[[Progress], None]]:
    """A context with a progress bar for each phase; it yields the function that takes each `Progress`.

    Parameters
    ----------
    console : rich.console.Console, optional
        The console of the bars; standard error by default.

    Examples
    --------
    >>> from jacsparse.models import default_settings, train
    >>> with progress_bar() as progress:  # doctest: +SKIP
    ...     result = train(default_settings("lenet5"), progress=progress)
    """
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    description, figures = TextColumn("{task.description}"), TextColumn("{task.fields[figures]}")
    columns = (description, BarColumn(), figures, TimeRemainingColumn(), TextColumn("left"))
    tasks: dict[str, Any] = {}
    accuracy: dict[str, str] = {}
    bars = Bars(*columns, console=console or Console(stderr=True))

    def show(progress: Progress) -> None:
        phase = progress.phase
        if phase not in tasks:
            tasks[phase] = bars.add_task(phase, total=progress.epochs * progress.iterations, figures="")
            bars.start()
        if progress.accuracy is not None:
            accuracy[phase] = f", test {progress.accuracy:.1%}"
        bars.update(
            tasks[phase],
            completed=(progress.epoch - 1) * progress.iterations + progress.iteration,
            description=f"{phase:>7}, epoch {progress.epoch}/{progress.epochs}",
            figures=f"loss {progress.loss:.3f}{accuracy.get(phase, '')}",
        )

    try:
        yield show
    finally:
        # Bars without a task are an empty line.
        if tasks:
            bars.stop()
