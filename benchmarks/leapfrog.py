"""Leapfrogging over depth and width, measured beside its predicted times."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import jacsparse
from jacsparse.training import check_threads

from ._calls import one_thread
from ._context import Context
from ._environment import cores
from ._experiment import Grid
from ._figures import COLOURS, Line, Panel, Picture, Straight
from ._rows import Group, Row, where
from ._workloads import equal_layers

_PEER = "back-propagation, one thread"
_ALL_CORES = "back-propagation, all cores"
#: Predictions of the time, and their lines in the figure.
_PREDICTIONS: dict[str, tuple[str, dict[str, float]]] = {
    # Timelines of many layers lie on equation 10, which is wide and pale below them.
    "equation 10": ("-", {"linewidth": 5.0, "alpha": 0.3}),
    "critical path of Algorithm 1": (":", {}),
    "simulated timelines": ("-", {}),
}


class _Seconds(NamedTuple):
    """Seconds of a layer's equations 2, 5 and 7."""

    forward: float
    errors: float
    gradients: float


def leapfrog_saving(forward: float, errors: float, gradients: float, threads: int) -> float:
    """The share of a pass, forward and back, that the paper says leapfrogging saves (equation 10).

    It leaves out what no worker shares: the prologue of Algorithm 1, and the layers that k does not divide.

    Parameters
    ----------
    forward, errors, gradients : float
        Seconds of a layer's equations 2, 5 and 7: f1, f2 and f3.
    threads : int
        The number k of threads.

    Examples
    --------
    >>> round(leapfrog_saving(1, 1, 1, threads=8), 3)
    0.292
    >>> leapfrog_saving(0, 0, 1, threads=8)                             # of the gradients' time alone
    0.875
    """
    return (1 - 1 / check_threads(threads)) * gradients / (forward + errors + gradients)


def leapfrog_critical_path(layers: int, threads: int) -> int:
    """The number of layers whose gradients Algorithm 1 computes one after another.

    These are k - 1 layers of the parent's prologue, and then each k-th one of the others: shortest near k = √layers.

    Parameters
    ----------
    layers : int
        Layers whose gradients are computed. As printed, the algorithm does so for the layers 2 to L - 1 of L.
    threads : int
        The number k of threads.

    Examples
    --------
    >>> round(1 - leapfrog_critical_path(16 - 2, threads=8) / (16 - 2), 2)       # of f3, where equation 10 says 0.88
    0.43
    >>> [leapfrog_critical_path(256, threads) for threads in (4, 8, 16, 32, 64)]
    [67, 39, 31, 39, 67]
    """
    prologue = min(layers, check_threads(threads) - 1)
    return prologue + -(-(layers - prologue) // threads)


def leapfrog_seconds(errors: float, gradients: float, layers: int, threads: int) -> float:
    """Seconds of `jacsparse.leapfrog_backward` on equal layers, each worker with a core of its own.

    A worker takes the errors back to its last layer, and that of the first layer through all of them.

    Examples
    --------
    >>> leapfrog_seconds(1.0, 1.0, 16, threads=8)                       # of 32; the recursion of errors is not shared
    18.0
    """
    workers = (range(worker, layers, check_threads(threads)) for worker in range(min(threads, layers)))
    return max((part[-1] + 1) * errors + len(part) * gradients for part in workers)


@dataclass(frozen=True)
class LeapfrogTimes(Grid):
    """Networks of equal layers with sigmoids, as the paper has them."""

    depths: tuple[int, ...] = (4, 16, 64)
    widths: tuple[int, ...] = (128, 512, 1024)
    batch: int = 256
    #: The most threads; by default the number of cores.
    most: int | None = None

    name = "leapfrog"
    title = "Leapfrogging: a pass forward and back"
    source = "Saraiya, equations 8 to 10: the paper has no measurements of its own"

    def cases(self, context: Context) -> Iterable[tuple[int, int]]:
        return itertools.product(self.widths, self.depths)

    def measure(self, case: tuple[int, int], context: Context) -> list[Row]:
        (width, depth), counts = case, range(1, (self.most or cores()) + 1)
        group = f"{depth} layers of {width} units, batch {self.batch}"
        module, x, gradient = _network(depth, width, self.batch)
        everything = {_ALL_CORES: partial(_step, module, module, x, gradient)}
        timings = context.under(group).times(everything)
        steps = {
            _label(k): partial(_step, jacsparse.nn.Leapfrog(module, threads=k), module, x, gradient) for k in counts
        }
        parts = _parts(module, x, gradient)
        with one_thread():
            timings |= context.under(group).times({_PEER: everything[_ALL_CORES], **steps, **parts})
        problems = [timings[name].problem for name in parts if timings[name].problem]
        if problems:
            return [Row.missing(label, problems[0], group=group) for label in (_PEER, *steps)]
        forward, errors, both = (statistics.median(timings[name].seconds) / depth for name in parts)
        seconds = _Seconds(forward, errors, max(0.0, both - errors))
        rows = Group(group)
        data = {"depth": depth, "width": width}
        for k in counts:
            rows.timed(_label(k), timings[_label(k)], data={**data, "threads": k})
        rows.timed(_PEER, timings[_PEER], role="peer", data=data)
        for k in counts:
            rows.compare(f"{_PEER} / leapfrog", _PEER, _label(k))
        rows.timed(_ALL_CORES, timings[_ALL_CORES], role="peer")
        for k in sorted({*counts, *(2**power for power in range(depth.bit_length())), depth}):
            _add_predictions(rows, seconds, k, depth, data)
        return rows.rows()

    def picture(self, rows: Sequence[Row]) -> Picture:
        panels = [self._panel(where(rows, width=width), width) for width in self.widths]
        title = f"{self.title}, batch {self.batch}, against back-propagation on one thread"
        return Picture(title, panels, (max(8.0, 3.6 * len(self.widths) + 1), 4.2), legend=4)

    def _panel(self, rows: Sequence[Row], width: int) -> Panel:
        parts: list[Any] = [Straight(0)]
        for depth, colour in zip(self.depths, COLOURS, strict=False):
            of_depth = [row for row in where(rows, depth=depth) if row.median is not None]
            parts.append(Line((), (), f"{depth} layers", colour))
            for prediction, (style, options) in _PREDICTIONS.items():
                points = [(row.data["threads"], row.data["saving"]) for row in where(of_depth, prediction=prediction)]
                parts.append(Line.through(points, "", colour, style, **options))
            peer = next((row.median for row in of_depth if row.label == _PEER), None)
            measured = [row for row in of_depth if row.label.startswith("leapfrog")]
            if peer is not None:
                shares = [(row.data["threads"], 1 - (row.median or 0.0) / peer) for row in measured]
                parts.append(Line.through(shares, "", colour, "o", markersize=6))
        parts += [Line((), (), name, style=style, options=options) for name, (style, options) in _PREDICTIONS.items()]
        parts.append(Line((), (), "measured", style="o"))
        label = "share of the pass that is saved"
        return Panel(parts, f"{width:,} units", "threads k", label, "2", grid="")


def _label(threads: int) -> str:
    return f"leapfrog, k = {threads}"


def _add_predictions(rows: Group, seconds: _Seconds, threads: int, depth: int, data: dict[str, Any]) -> None:
    """Add the times of a pass, forward and back, by each prediction."""
    forward, errors, gradients = seconds
    whole = depth * sum(seconds)
    times = (
        whole * (1 - leapfrog_saving(*seconds, threads)),
        depth * (forward + errors) + leapfrog_critical_path(depth, threads) * gradients,
        depth * forward + leapfrog_seconds(errors, gradients, depth, threads),
    )
    for prediction, time in zip(_PREDICTIONS, times, strict=True):
        saving, label = 1 - time / whole, f"{prediction}, k = {threads}"
        more = {**data, "threads": threads, "prediction": prediction, "saving": saving}
        rows.value(label, time, "predicted time", "s", role="reference", note=f"{saving:.0%} saved", data=more)


def _network(depth: int, width: int, batch: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    module = equal_layers(depth, width, nn.Sigmoid)
    # With weights as PyTorch draws them, errors vanish through 64 sigmoids; some processors take ten times as long with
    # numbers that small.
    for name, parameter in module.named_parameters():
        if name.endswith("weight"):
            nn.init.normal_(parameter, std=4 / math.sqrt(width))
    return module, torch.randn(batch, width), torch.randn(batch, width)


def _step(runner: nn.Module, module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> None:
    """One pass forward and back."""
    module.zero_grad()
    runner(x.detach().requires_grad_()).backward(gradient)


def _parts(module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """The forward pass, the recursion of errors alone, and both it and the gradients of weights, by PyTorch."""
    leaf = x.detach().requires_grad_()
    output = module(leaf)
    back = partial(torch.autograd.grad, output, grad_outputs=gradient, retain_graph=True)
    return {
        "forward": lambda: module(leaf),
        "errors": lambda: back(inputs=[leaf]),
        "errors and gradients": lambda: back(inputs=[leaf, *module.parameters()]),
    }
