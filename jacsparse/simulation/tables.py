"""The tables and the figure of a simulation."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..figures import BLUE, GREEN, ORANGE, PURPLE, SKY, new_figure, save_figure
from ..schedule import SURELY
from ..terminal import Fitted, glossary, layer_in_words, nbytes, percent, ratio, short, short_time

if TYPE_CHECKING:
    from .simulation import Simulation

#: The meaning of words and columns.
WORDS = {
    "stage": "what lies between two points that all data pass",
    "steps": "passes of stages, and products, that wait for each other; means in a pipeline, below 1 where "
    "messages limit it",
    "per step": "total / steps, with the messages that steps wait for",
    "total": "an iteration over a mini-batch, without the optimiser; passes are dense, as PyTorch's: where counted, "
    "the dense steps of flop, and the gradients of normalisations' weights",
    "memory": "the most bytes that one worker holds",
    "sent": "bytes of all messages of an iteration",
    "bp": "back-propagation on one worker",
    "bppsa": "parallel scan of gradients, without pruned entries; linear multiplies no matrices",
    "cyclic_reduction": "a scan of half as many levels and more work",
    "ranks": "processes with consecutive stages, in turn or by a scan",
    "gpipe": "micro-batches forward, then back; stages run forward twice",
    "1f1b": "PipeDream: mini-batches in a pipeline; gradients are late",
    "ddg": "delayed gradients: those of an earlier mini-batch",
    "leapfrog": "a worker computes the weights' gradients of every k-th layer",
}
#: Colours of methods in the figure.
_COLOURS = {
    "bp": "black", "bppsa": BLUE, "cyclic_reduction": SKY, "ranks": "#999999", "gpipe": ORANGE, "1f1b": PURPLE,
    "ddg": GREEN, "leapfrog": "#d55e00",
}  # fmt: skip


def tables(simulation: Simulation) -> Iterator[Any]:
    """Everything that a simulation shows, in order."""
    yield simulation.verdict
    yield from (f"Warning: {warning}" for warning in simulation.warnings)
    if simulation.note:
        yield simulation.note
    if simulation.rows:
        yield from _methods(simulation)
        yield _idle(simulation)
        yield from (f"{name} is not possible: {reason}." for name, reason in simulation.obstacles.items())
    yield from _choices(simulation)
    if simulation.predictions:
        yield _predictions(simulation)
    yield from _conclusions(simulation)
    yield ""
    shown = simulation.methods
    methods = {*WORDS} - {"stage", "steps", "per step", "total", "memory", "sent"}
    yield glossary({word: meaning for word, meaning in WORDS.items() if word not in methods or word in shown})


def verdict(simulation: Simulation) -> str:
    """Which method to take, by the number of workers, and whether products of matrices pay, in words."""
    if not simulation.rows:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in simulation.obstacles.items())
        return f"No method can train it. {reasons}."
    most = ""
    if simulation.gain_of_any is not None and simulation.gain_of_any != simulation.gain:
        _, number, times = simulation.gain_of_any
        most = f"; {ratio(times)} times faster at most, on {in_workers(number)}"
    sentences = [f"Fastest: {_changes(simulation.fastest)}{most}."]
    late = dict.fromkeys(name for _, name in simulation.fastest if not simulation.methods[name][0].exact)
    if late:
        sentences.append(f"The gradients of {' and '.join(late)} are late, those of earlier weights.")
    if late and simulation.fastest_exact and (simulation.gain is not None or "bp" not in simulation.methods):
        sentences.append(f"With the gradients of back-propagation: {_changes(simulation.fastest_exact)}.")
    if simulation.gain is not None:
        method, number, times = simulation.gain
        sentences.append(
            f"Exact gradients are at most {ratio(times)} times faster, by {method} on {in_workers(number)}."
        )
    elif "bp" in simulation.methods and any(row.exact and row.method != "bp" for row in simulation.rows):
        sentences.append("No way to exact gradients is faster than back-propagation on one worker.")
    if "bppsa" in simulation.methods and not simulation.note:
        alone = [row.seconds for row in simulation.methods["bppsa"] if row.choice == "linear"]
        base = min([*alone, *(row.seconds for row in simulation.methods.get("bp", ()))], default=math.inf)
        scans = [row for row in simulation.methods["bppsa"] if row.choice != "linear" and row.seconds < base * SURELY]
        sentences.append(
            f"The scan's products pay in bppsa from {in_workers(scans[0].workers)} on, by {scans[0].choice}."
            if scans
            else f"The scan's products never pay, up to {in_workers(max(simulation.workers))}."
        )
        if simulation.cut:
            sentences.append("A stage that no gradient passes costs a scan nothing: see the warning.")
    path, share = simulation.slowest
    if path and simulation.pipeline_bound is not None:
        sentences.append(
            f"The slowest stage, {layer_in_words(path)}, takes {percent(share)} of dense back-propagation: no "
            f"pipeline is more than {ratio(simulation.pipeline_bound)} times faster."
        )
    return " ".join(sentences)


def _changes(changes: Sequence[tuple[int, str]]) -> str:
    """The methods from each number of workers on."""
    (first, method), *others = ((workers, "back-propagation" if name == "bp" else name) for workers, name in changes)
    on = f"{method} on {in_workers(first)}"
    return ", ".join([on, *(f"{other} from {workers:,} on" for workers, other in others)])


def _methods(simulation: Simulation) -> Iterator[Any]:
    """What is simulated, and a table with a line for each method and number of workers."""
    yield (
        f"{simulation.name}: {_sizes(simulation)}, {simulation.costs}; "
        f"messages {short_time(simulation.latency)}, {short(simulation.bandwidth)}B/s"
    )
    lines, ends = [], []
    for name, rows in simulation.methods.items():
        lines += [
            (
                name if row is rows[0] else "",
                f"{row.workers:,}",
                f"{row.steps:,.0f}" if row.steps >= 10 else f"{row.steps:.3g}",
                short_time(row.step_seconds),
                short_time(row.seconds),
                nbytes(row.memory),
                nbytes(row.sent),
            )
            for row in rows
        ]
        ends.append(len(lines) - 1)
    columns = ("", "workers", "steps", "per step", "total", "memory", "sent")
    yield Fitted("", columns, lines, keys=2, sections=frozenset(ends))


def _sizes(simulation: Simulation) -> str:
    return f"{simulation.stages:,} stage{'s' if simulation.stages > 1 else ''}, batch {simulation.samples:,}"


def _idle(simulation: Simulation) -> str:
    by_most: dict[int, list[str]] = {}
    for name, most in simulation.most.items():
        by_most.setdefault(most, []).append(name)
    parts = [f"{most:,} ({', '.join(names)})" for most, names in sorted(by_most.items())]
    return f"Further workers are idle, beyond {'; '.join(parts)}."


def _choices(simulation: Simulation) -> Iterator[str]:
    """What methods have chosen, by the number of workers."""
    for name, rows in simulation.methods.items():
        changes = [next(group) for _, group in itertools.groupby(rows, key=lambda row: row.choice)]
        named = [row for row in changes if row.choice and row.choice != name]
        parts = [f"{row.choice} from {in_workers(row.workers)} on" for row in named]
        if parts:
            shared = ""
            if name == "bppsa" and any(row.choice == "linear" and row.workers > 1 for row in rows):
                shared = "; linear is no scan: workers share the weights' gradients, and no product of matrices runs"
            yield f"{name} runs {', '.join(parts)}{shared}."


def _predictions(simulation: Simulation) -> Any:
    """A table with a line for each formula."""
    lines = []
    for each in simulation.predictions:
        show = short_time if each.quantity == "seconds" else _short
        figures = (f"{each.workers:,}", show(each.published), show(each.simulated))
        lines.append((each.method, each.equation, each.quantity, *figures))
    title = "The papers' formulas without constants, and what is simulated, on the most workers"
    return Fitted(title, ("", "formula", "", "workers", "paper", "simulated"), lines, keys=3, left=frozenset([0, 1, 2]))


def _conclusions(simulation: Simulation) -> Iterator[str]:
    """Break-even points and fill-in, in words."""
    pays = simulation.pays
    if pays:
        parts = [f"{name} from {in_workers(workers)} on" for name, workers in pays.items() if workers is not None]
        never = [name for name, workers in pays.items() if workers is None]
        yield f"Faster than bp: {', '.join([*parts, *(f'{name} never' for name in never)])}."
    if simulation.largest_product:
        most = "at most " if simulation.bounded else ""
        yield (
            f"Fill-in: the largest product of a full scan has {most}{simulation.largest_product:,} entries, "
            f"{ratio(simulation.fill_in)} times the {simulation.largest_factor:,} of the largest Jacobian; the thesis "
            "(3.6) expects no more than 1."
        )
    each = simulation.break_even
    if each is not None:
        yield (
            f"The poster's break-even, C_BPPSA / C_Base < n / log2 n, {'holds' if each.holds else 'fails'} at n = "
            f"{each.n:,} stages: the left side, a scan's step by a stage's gradient, is {short_time(each.scan_step)} / "
            f"{short_time(each.base_step)} = {ratio(each.ratio)}. It holds from n = "
            f"{each.starts:,} on."
        )


def simulation_figure(simulation: Simulation, path: str | os.PathLike[str]) -> None:
    """Draw time and memory over the number of workers, a line for each method."""
    if not simulation.rows:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in simulation.obstacles.items())
        raise ValueError(f"there is nothing to draw into {path}: no method can train the model ({reasons})")
    figure, panels = new_figure(10.0, 4.4, columns=2)
    for name, rows in simulation.methods.items():
        workers, last = [row.workers for row in rows], max(simulation.workers)
        # The line of ddg is often the same as that of 1f1b.
        style = {"color": _COLOURS.get(name), "linewidth": 4.0 if name == "1f1b" else 1.6}
        for axes, values in zip(
            panels, ([row.seconds for row in rows], [row.memory / 2**20 for row in rows]), strict=True
        ):
            axes.plot(workers, values, marker="o", markersize=3, label=name, **style)
            axes.plot([workers[-1], last], [values[-1]] * 2, ":", **{**style, "linewidth": 1.0})
    for axes, label in zip(panels, ("seconds of an iteration", "MiB on the fullest worker"), strict=True):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("workers p")
        axes.set_ylabel(label)
        axes.grid(alpha=0.25)
    panels[0].legend(fontsize=8, frameon=False)
    names = f"{simulation.name}, {_sizes(simulation)}"
    figure.suptitle(f"{names}; {simulation.costs}. Dotted: further workers are idle", fontsize=9)
    save_figure(figure, path)


def in_workers(count: int) -> str:
    """A number of workers in words."""
    return f"{count:,} worker{'s' if count > 1 else ''}"


def _short(count: float) -> str:
    return short(count) if count >= 1000 else f"{count:.3g}"
