"""Training recurrent classifiers by back-propagation and by scan from one seed: Figures 5.1 and 5.3."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jacsparse.models import BitstreamRNN, Dataset, InstrumentGRU, SequenceClassifier, default_settings, load_data

from ._context import Context
from ._curves import REORDERED, Curve, curve_rows, train_side_by_side
from ._experiment import Grid
from ._figures import COLOURS, Line, Panel, Picture
from ._recurrent import SCANS
from ._rows import Row
from ._text import amount
from ._workloads import published_iterations

_BATCH = 16


@dataclass(frozen=True)
class Task:
    """One training."""

    name: str
    data: Callable[[], Dataset]
    model: type[SequenceClassifier]
    #: Adam's learning rate. The thesis' 3e-5, and the 1e-5 of its scripts for the RNN, are lower: here the loss falls
    #: within minutes. The scripts' 3e-4 for the GRU is a tenth of the rate here.
    learning_rate: float
    #: The number of steps; as many as in the thesis where it is None.
    iterations: int | None
    #: The share of its first value to which the loss should fall.
    falls_to: float
    #: How many times as fast the thesis trained by scan, on a GPU.
    published: float | None = None


_TASKS = (
    Task("RNN on bitstreams", lambda: load_data("bitstream:1000"), BitstreamRNN, 3e-4, 600, 0.9, 2.17),
    Task("GRU on instrument-like tones", lambda: load_data("tones"), InstrumentGRU, 3e-3, 300, 0.5),
)


#: The schedules of the gradients by label, in the order in which curves are drawn.
_SCHEDULES = {
    "jacsparse, sequential: step after step": "sequential", **{f"jacsparse, scan {scan}": scan for scan in SCANS}
}  # fmt: skip


@dataclass(frozen=True)
class RecurrentConvergence(Grid):
    """Losses of trainings over time, in float32, by PyTorch's layer and by ours with each schedule."""

    tasks: tuple[Task, ...] = _TASKS

    name = "recurrent_convergence"
    title = "Training recurrent classifiers by torch.nn's layers and by ours"
    source = (
        "thesis, Figures 5.1 and 5.3: fewer iterations of larger steps, and made-up tones; with --data as long as in "
        "the thesis, on IRMAS"
    )
    devices = ("cpu", "cuda")

    def on(self, data: str) -> RecurrentConvergence:
        if not data.startswith("irmas:"):
            return super().on(data)  # type: ignore[return-value]
        rate = default_settings("irmas").lr
        task = Task("GRU on IRMAS", functools.partial(load_data, data), InstrumentGRU, rate, None, 1.0)
        return replace(self, tasks=(task,))

    def cases(self, context: Context) -> Iterable[Task]:
        return self.tasks

    def measure(self, case: Task, context: Context) -> list[Row]:
        data = case.data()
        iterations = case.iterations or published_iterations("irmas", data)
        settings = f"batch {_BATCH}, Adam, learning rate {case.learning_rate:g}"
        group = f"{case.name}: {iterations:,} iterations, {settings}"
        curves = train_side_by_side(
            functools.partial(case.model, data.classes, data.train_inputs.shape[1]),
            {label: functools.partial(_scanned, schedule=schedule) for label, schedule in _SCHEDULES.items()},
            functools.partial(torch.optim.Adam, lr=case.learning_rate),
            data,
            iterations,
            batch=_BATCH,
            device=context.place,
            say=context.under(case.name).say,
        )
        # The thesis' scan is a Blelloch scan.
        published = {} if case.published is None else {"jacsparse, scan blelloch": case.published}
        options = {"tolerance": 1e-3, "falls_to": case.falls_to}
        return curve_rows(curves, name=case.name, group=group, published=published, **options)

    def picture(self, rows: Sequence[Row]) -> Picture:
        panels = []
        for row in (row for row in rows if row.data):
            curves = {label: Curve(**curve) for label, curve in row.data["curves"].items() if label != REORDERED}
            lines = [
                _line(curve, label, colour) for (label, curve), colour in zip(curves.items(), COLOURS, strict=False)
            ]
            title, label = row.group.replace(": ", "\n", 1), "seconds of training after the first iteration"
            panels.append(Panel(lines, title, label, "loss, mean of 20 iterations", "x", legend="below", size=8))
        return Picture(self.title, panels, (10.0, 5.2))


def _scanned(model: SequenceClassifier, schedule: str) -> SequenceClassifier:
    return model.scan(schedule)


def _line(curve: Curve, label: str, colour: str) -> Line:
    # The first iteration compiles and plans.
    later = torch.tensor(curve.seconds[1:] or curve.seconds)
    losses = torch.tensor(curve.train[-len(later) :])
    window = min(20, len(later))
    means, seconds = losses.unfold(0, window, 1).mean(1), later.cumsum(0)[window - 1 :]
    median = amount(later.median().item(), "s")
    return Line(seconds.tolist(), means.tolist(), f"{label}: {median} an iteration", colour)
