"""How far a training is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Progress", "progress_bar"]


@dataclass(frozen=True)
class Progress:
    """What `train` tells after each iteration, and once more after the test that ends an epoch.

    Attributes
    ----------
    phase : {"train", "retrain"}
        Before or after pruning.
    epoch, epochs : int
        Of the phase, from 1.
    iteration, iterations : int
        Of the epoch, from 1.
    loss : float
        Of the iteration's batch.
    accuracy : float or None
        On the test images; None but at the end of an epoch.
    """

    phase: str
    epoch: int
    epochs: int
    iteration: int
    iterations: int
    loss: float
    accuracy: float | None = None


@contextlib.contextmanager
def progress_bar(console: Any = None) -> Iterator[Callable[[Progress], None]]:
    """A bar for each phase, on a rich console, that of standard error where none is given.

    Examples
    --------
    >>> from jacsparse.models import default_settings, train
    >>> with progress_bar() as progress:  # doctest: +SKIP
    ...     result = train(default_settings("lenet5"), progress=progress)
    """
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, Any] = {}
    accuracy: dict[str, str] = {}
    with Bars(*columns, console=console or Console(stderr=True)) as bars:

        def show(progress: Progress) -> None:
            phase = progress.phase
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=progress.epochs * progress.iterations, figures="")
            if progress.accuracy is not None:
                accuracy[phase] = f", test {progress.accuracy:.1%}"
            bars.update(
                tasks[phase],
                completed=(progress.epoch - 1) * progress.iterations + progress.iteration,
                description=f"{phase:>7}, epoch {progress.epoch}/{progress.epochs}",
                figures=f"loss {progress.loss:.3f}{accuracy.get(phase, '')}",
            )

        yield show
