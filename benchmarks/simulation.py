"""Ways of parallel training on up to a million workers, as `jacsparse simulate` predicts them, beside the papers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jacsparse.figures import BLUE, GREEN, ORANGE
from jacsparse.schedule import blelloch, cyclic_reduction
from jacsparse.simulation import GPipe, Interconnect, Workload, counted_workload, plan

from ._context import Context
from ._experiment import Experiment
from ._figures import COLOURS, Drawn, Line, Panel, Picture
from ._rows import Comparison, Group, Row
from ._text import amount
from ._workloads import equal_layers

_SPACE = "Sections 2.2 and 3.6: what a worker holds"
_FORMULAS = "The papers' formulas without constants, on the most workers"


@dataclass(frozen=True)
class SimulatedTraining(Experiment):
    """A deep network and a long sequence, in FLOP; the orders of section 3.6; and the poster's break-even."""

    #: Layers of the network, each with a tanh, and their units; steps of the sequence, and its hidden units.
    layers: int = 128
    width: int = 64
    time: int = 512
    hidden: int = 20
    #: Samples of the mini-batch.
    batch: int = 128
    #: FLOP per second of a worker, seconds and bytes per second of its messages: a GPU's, within a machine.
    rate: float = 1e12
    latency: float = 2e-6
    bandwidth: float = 1e11
    #: Numbers of workers, stages of scans, and hidden units whose break-even is sought.
    workers: tuple[int, ...] = tuple(2**power for power in range(21))
    depths: tuple[int, ...] = (16, 64, 256, 1024, 4096)
    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)

    name = "simulation"
    title = "Ways of parallel training, simulated"
    source = (
        "thesis, section 3.6 (equations 3.3 and 3.4), and poster; Huang et al.; Narayanan et al.; Huo et al.; Saraiya"
    )

    def run(self, context: Context) -> list[Row]:
        chain = counted_workload(equal_layers(self.layers, self.width), torch.randn(self.batch, self.width), self.rate)
        sequence = counted_workload(nn.RNN(1, self.hidden), torch.randn(self.time, self.batch, 1), self.rate)
        workloads = {
            f"{self.layers} layers of {self.width} units": chain,
            f"RNN, {self.time} steps of {self.hidden} units": sequence,
        }
        rows = []
        for label, workload in workloads.items():
            rows += self._methods(context, label, workload)
        return [*rows, *self._orders(), *self._spaces(chain), *self._break_even()]

    def _methods(self, context: Context, network: str, workload: Workload) -> list[Row]:
        """The shortest time of each method with any number of workers, and Huo's formula beside it."""
        simulation = plan(
            workload, Interconnect(self.latency, self.bandwidth), self.workers, progress=context.under(network).say
        )
        rows = Group(f"{network}, batch {self.batch}")
        for method, figures in simulation.methods.items():
            best = min(figures, key=lambda each: each.seconds)
            data: dict[str, Any] = {"network": network, "method": method}
            data |= {name: [getattr(each, name) for each in figures] for name in ("workers", "seconds", "memory")}
            memory, sent = best.memory / 2**20, best.sent / 2**20
            note = f"on {best.workers:,} workers, {memory:.3g} MiB on the fullest, {sent:.3g} MiB sent"
            rows.value(method, best.seconds, "shortest time", "s", note=note, data=data)
        formulas = Group(f"{_FORMULAS}: {network}, batch {self.batch}")
        if "ddg" in simulation.methods:
            last = simulation.methods["ddg"][-1]
            published = workload.forward + workload.backward / len(workload.blocks(last.workers))
            label, compared = f"ddg, Huo, Table 1: seconds, p = {len(workload):,}", last.seconds / published
            note, ratio = f"by the paper {amount(published, 's')}", Comparison("simulated / paper", compared)
            formulas.value(label, last.seconds, "seconds", "s", note=note, comparisons=(ratio,))
        return [*rows.rows(), *formulas.rows()]

    def _orders(self) -> list[Row]:
        rows = Group("Section 3.6")
        for schedule, n in itertools.product((blelloch, cyclic_reduction), self.depths):
            workers = [2**power for power in range(n.bit_length())]
            counted = [schedule(n).complexity(p) for p in workers]
            steps, work, name = [each.steps for each in counted], counted[0].work, schedule.__name__
            data = {"schedule": name, "n": n, "workers": workers, "steps": steps, "work": work}
            note, compared = f"{work:,} steps of all workers", (Comparison("all steps / n", work / n),)
            label = f"{name}, n = {n:,}"
            rows.value(label, steps[-1], "steps on n workers", note=note, data=data, comparisons=compared)
        return rows.rows()

    def _spaces(self, chain: Workload) -> list[Row]:
        """What one worker holds: of a scan, matrices; of GPipe with a micro-batch for each worker, activations."""
        rows, n = Group(_SPACE), max(self.depths)
        for workers in (4**power for power in range((n.bit_length() + 1) // 2)):
            held, claim = blelloch(n).complexity(workers).space, max(n / workers, 1)
            ratio = Comparison("held / max(n/p, 1)", held / claim)
            rows.value(f"blelloch, n = {n:,}, p = {workers:,}", held, "matrices", comparisons=(ratio,))
        gpipe, n = GPipe(), len(chain)
        for workers in (4**power for power in range((min(n, self.batch).bit_length() + 1) // 2)):
            outcome, _ = gpipe.plan(chain, Interconnect(self.latency, self.bandwidth), workers)
            blocks = chain.blocks(workers)
            weights, claim = max(2 * chain.weights(block) for block in blocks), n / len(blocks) + len(blocks)
            # The mean results of a stage for a micro-batch, as many as blocks.
            unit = sum(stage.stored for stage in chain.stages) / n / len(blocks)
            activations, label = (outcome.memory - weights) / unit, f"gpipe, n = {n:,}, p = {workers:,}"
            ratio = Comparison("counted / (n/p + p)", activations / claim)
            rows.value(label, activations, "results of a stage", comparisons=(ratio,))
        return rows.rows()

    def _break_even(self) -> list[Row]:
        """Where a full scan on n workers is faster than back-propagation, by the poster and by its makespan."""
        rows, most = Group("Poster"), 2**14
        for width in self.widths:
            step = counted_workload(nn.RNN(1, width), torch.randn(2, self.batch, 1), self.rate)
            scans = ((2**power, *_scan_and_base(step, 2**power)) for power in range(2, most.bit_length()))
            simulated = next((n for n, scan, base in scans if scan < base), None)
            ratio = _ratio(step, max(self.depths))
            poster = _break_even(ratio)
            note = f"C_BPPSA / C_Base = {ratio:.3g}; by the schedule {simulated or f'more than {most:,}'}"
            data = {"width": width, "ratio": ratio, "poster": poster, "simulated": simulated}
            rows.value(f"{width} hidden units", poster, "break-even n", note=note, data=data)
        return rows.rows()

    def picture(self, rows: Sequence[Row]) -> Picture:
        methods, panels = dict.fromkeys(row.data["method"] for row in rows if "method" in row.data), []
        colours = dict(zip(methods, ("black", *COLOURS, "#999999", "#d55e00"), strict=False))
        for network in dict.fromkeys(row.data["network"] for row in rows if "network" in row.data):
            lines = [row.data for row in rows if row.data.get("network") == network]
            time, memory = (
                self._lines(lines, name, unit, colours) for name, unit in (("seconds", 1), ("memory", 2**20))
            )
            seconds, nbytes = "seconds of an iteration", "MiB on the fullest worker"
            panels += [
                Panel(time, f"{network}: time", "workers p", seconds, "2y"),
                Panel(memory, f"{network}: memory", "workers p", nbytes, "2y", legend=""),
            ]
        shown = self.depths[::2]
        panels.insert(2, _orders_panel([row.data for row in rows if row.data.get("n") in shown]))
        panels.append(_break_even_panel([row.data for row in rows if "poster" in row.data]))
        title = (
            f"{self.title}: batch {self.batch}, {self.rate:.0e} FLOP/s, messages {self.latency:.0e} s and "
            f"{self.bandwidth:.0e} B/s. Dotted: further workers are idle"
        )
        return Picture(title, panels, (14.0, 8.0), columns=3)

    def _lines(
        self, lines: Sequence[dict[str, Any]], name: str, unit: float, colours: Mapping[str, str]
    ) -> list[Drawn]:
        """A column of each method over workers."""
        parts: list[Drawn] = []
        for line in lines:
            workers, values, colour = line["workers"], [value / unit for value in line[name]], colours[line["method"]]
            # The line of ddg is often the same as that of 1f1b.
            options = {"linewidth": 4.0 if line["method"] == "1f1b" else 1.6, "markersize": 3}
            parts.append(Line(workers, values, line["method"], colour, "o-", options=options))
            parts.append(Line([workers[-1], self.workers[-1]], [values[-1]] * 2, "", colour, ":"))
        return parts


def _ratio(step: Workload, n: int) -> float:
    """C_BPPSA / C_Base of a sequence of n steps on n workers, with free messages."""
    scan, base = _scan_and_base(step, n)
    return scan / blelloch(n).complexity(n).steps / (base / (n - 1))


def _break_even(ratio: float) -> int:
    """The least n from which on the poster's ``C_BPPSA / C_Base < n / log2 n`` holds."""
    # n / log2 n is least at 3, and grows from there.
    n = 2 if ratio < 3 / math.log2(3) else 4
    while n > 2 and n / math.log2(n) <= ratio:
        n += 1
    return n


def _scan_and_base(sequence: Workload, n: int) -> tuple[float, float]:
    """Seconds of a full scan over n steps on n workers with free messages, and of back-propagation's errors."""
    schedule, errors, matrix = blelloch(n), sequence.stages[-1].errors, sequence.stages[-1].matrix
    # Matrices of steps are full, and so are their products.
    product, pairs = sequence.product(matrix, matrix)
    matrices = sequence.product_seconds(pairs, shared=False)
    vectors = sequence.vector_seconds(sequence.nbytes(product.nnz, shared=False))
    durations = [
        matrices if step.kind == "mm" else errors if step.left <= n else vectors for step in schedule.live_steps()
    ]
    return schedule.makespan(durations, n), errors * (n - 1)


def _orders_panel(lines: Sequence[dict[str, Any]]) -> Panel:
    """Steps over workers by schedule and n, beside equation 3.3; and the steps of all workers in the legend."""
    n, parts = max(line["n"] for line in lines), list[Drawn]()
    work = {line["schedule"]: line["work"] for line in lines if line["n"] == n}
    labels = {
        "blelloch": f"Blelloch scan: {work['blelloch'] / n:.3g} n steps of all workers (3.4)",
        "cyclic_reduction": f"cyclic reduction: {work['cyclic_reduction'] / n / math.log2(n):.2g} n log2 n",
    }
    for line in lines:
        workers, scan = line["workers"], line["schedule"] == "blelloch"
        look = (BLUE, "-") if scan else (ORANGE, "--")
        parts.append(Line(workers, line["steps"], labels[line["schedule"]], *look))
        if scan:
            orders = [line["n"] / p + math.log2(p) for p in workers]
            parts.append(Line(workers, orders, "n/p + log2 p (3.3); lines end at n workers", style=":"))
    return Panel(parts, "Equations 3.3 and 3.4", "workers p", "steps on the critical path", "2y")


def _break_even_panel(lines: Sequence[dict[str, Any]]) -> Panel:
    columns = (
        ("poster", "poster: C < n / log2 n", BLUE, "o-"),
        ("simulated", "schedule, powers of two", GREEN, "s--"),
        ("ratio", "C_BPPSA / C_Base", "black", ":"),
    )
    parts = [
        Line.through([(line["width"], line[name]) for line in lines if line[name]], *look) for name, *look in columns
    ]
    title = "Break-even: a scan on n workers is faster above"
    return Panel(parts, title, "hidden units of an RNN", "steps n", "2y")
