"""Ways of parallel training on up to a million workers, as `jacsparse simulate` predicts them, beside the papers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jacsparse.schedule import blelloch, cyclic_reduction
from jacsparse.simulation import GPipe, Interconnect, Workload, break_even, counted_workload, draw_methods, plan

from ._context import Context
from ._experiment import Comparison, Experiment, Row
from ._text import amount

__all__ = ["SimulatedTraining"]

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
        torch.manual_seed(0)
        parts = [part for _ in range(self.layers) for part in (nn.Linear(self.width, self.width), nn.Tanh())]
        chain = counted_workload(nn.Sequential(*parts), torch.randn(self.batch, self.width), self.rate)
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
        """The shortest time of each method with any number of workers, and figures beside the papers' formulas."""
        simulation = plan(
            workload, Interconnect(self.latency, self.bandwidth), self.workers, progress=context.under(network).say
        )
        rows = []
        for method, figures in simulation.methods.items():
            best = min(figures, key=lambda each: each.seconds)
            data: dict[str, Any] = {"network": network, "method": method}
            data |= {name: [getattr(each, name) for each in figures] for name in ("workers", "seconds", "memory")}
            memory, sent = best.memory / 2**20, best.sent / 2**20
            note = f"on {best.workers:,} workers, {memory:.3g} MiB on the fullest, {sent:.3g} MiB sent"
            rows.append(
                Row.of_value(
                    method,
                    best.seconds,
                    "shortest time",
                    "s",
                    group=f"{network}, batch {self.batch}",
                    note=note,
                    data=data,
                )
            )
        for each in simulation.predictions:
            unit = {"unit": "s"} if each.quantity == "seconds" else {}
            rows.append(
                Row.of_value(
                    f"{each.method}, {each.equation}: {each.quantity}, p = {each.workers:,}",
                    each.simulated,
                    each.quantity,
                    **unit,
                    group=f"{_FORMULAS}: {network}, batch {self.batch}",
                    note=f"by the paper {amount(each.published, unit.get('unit', ''))}",
                    comparisons=(Comparison("simulated / paper", each.simulated / each.published),),
                )
            )
        return rows

    def _orders(self) -> list[Row]:
        rows = []
        for schedule in (blelloch, cyclic_reduction):
            for n in self.depths:
                scan = schedule(n)
                workers = [2**power for power in range(n.bit_length())]
                counted = [scan.complexity(p) for p in workers]
                steps = [each.steps for each in counted]
                data = {
                    "schedule": schedule.__name__, "n": n, "workers": workers, "steps": steps, "work": counted[0].work
                }  # fmt: skip
                note = f"{counted[0].work:,} steps of all workers"
                rows.append(
                    Row.of_value(
                        f"{schedule.__name__}, n = {n:,}",
                        counted[-1].steps,
                        "steps on n workers",
                        group="Section 3.6",
                        note=note,
                        data=data,
                        comparisons=(Comparison("all steps / n", counted[0].work / n),),
                    )
                )
        return rows

    def _spaces(self, chain: Workload) -> list[Row]:
        """What one worker holds: of a scan, matrices; of GPipe with a micro-batch for each worker, activations."""
        rows, n = [], max(self.depths)
        for workers in (4**power for power in range((n.bit_length() + 1) // 2)):
            held, claim = blelloch(n).complexity(workers).space, max(n / workers, 1)
            ratio = Comparison("held / max(n/p, 1)", held / claim)
            label = f"blelloch, n = {n:,}, p = {workers:,}"
            rows.append(Row.of_value(label, held, "matrices", group=_SPACE, comparisons=(ratio,)))
        gpipe, n = GPipe(), len(chain)
        for workers in (4**power for power in range((min(n, self.batch).bit_length() + 1) // 2)):
            outcome, _ = gpipe.plan(chain, Interconnect(self.latency, self.bandwidth), workers)
            (printed,) = gpipe.predictions(chain, workers, outcome)
            ratio = Comparison("counted / (n/p + p)", printed.simulated / printed.published)
            activations = (n / workers + workers) * ratio.ratio
            label = f"gpipe, n = {n:,}, p = {workers:,}"
            rows.append(Row.of_value(label, activations, "results of a stage", group=_SPACE, comparisons=(ratio,)))
        return rows

    def _break_even(self) -> list[Row]:
        """Where a full scan on n workers is faster than back-propagation, by the poster and by its makespan."""
        rows = []
        for width in self.widths:
            step = counted_workload(nn.RNN(1, width), torch.randn(2, self.batch, 1), self.rate)
            most = 2**14
            scans = ((2**power, *_scan_and_base(step, 2**power)) for power in range(2, most.bit_length()))
            simulated = next((n for n, scan, base in scans if scan < base), None)
            ratio = _ratio(step, max(self.depths))
            data = {"width": width, "ratio": ratio, "poster": break_even(ratio), "simulated": simulated}
            note = f"C_BPPSA / C_Base = {ratio:.3g}; by the schedule {simulated or f'more than {most:,}'}"
            rows.append(
                Row.of_value(
                    f"{width} hidden units", break_even(ratio), "break-even n", group="Poster", note=note, data=data
                )
            )
        return rows

    def figure(self, rows: Sequence[Row], path: Path) -> None:
        from jacsparse.figures import new_figure, save_figure

        figure, panels = new_figure(14.0, 8.0, rows=2, columns=3)
        networks = dict.fromkeys(row.data["network"] for row in rows if "network" in row.data)
        for (time, memory, _), network in zip(panels, networks, strict=True):
            lines = {row.data["method"]: row.data for row in rows if row.data.get("network") == network}
            draw_methods(lines, self.workers[-1], (time, memory))
            time.set_title(f"{network}: time", fontsize=9)
            memory.set_title(f"{network}: memory", fontsize=9)
        shown = self.depths[::2]
        _draw_orders(panels[0][2], [row.data for row in rows if row.data.get("n") in shown])
        _draw_break_even(panels[1][2], [row.data for row in rows if "poster" in row.data])
        figure.suptitle(
            f"{self.title}: batch {self.batch}, {self.rate:.0e} FLOP/s, messages {self.latency:.0e} s and "
            f"{self.bandwidth:.0e} B/s. Dotted: further workers are idle",
            fontsize=10,
        )
        save_figure(figure, path)


def _ratio(step: Workload, n: int) -> float:
    """C_BPPSA / C_Base of a sequence of n steps on n workers, with free messages."""
    scan, base = _scan_and_base(step, n)
    return scan / blelloch(n).complexity(n).steps / (base / (n - 1))


def _scan_and_base(step: Workload, n: int) -> tuple[float, float]:
    """Seconds of a full scan over n steps on n workers with free messages, and of back-propagation's errors."""
    workload, schedule = step.repeated(n), blelloch(n)
    base = math.fsum(stage.errors for stage in workload.stages)
    return schedule.makespan(workload.scan(schedule).seconds, n), base


def _draw_orders(axes: Any, lines: Sequence[dict[str, Any]]) -> None:
    """Steps over workers by schedule and n, beside equation 3.3; and the steps of all workers in the legend."""
    from jacsparse.figures import BLUE, ORANGE

    for line in lines:
        scan = line["schedule"] == "blelloch"
        axes.plot(line["workers"], line["steps"], "-" if scan else "--", color=BLUE if scan else ORANGE, linewidth=1.4)
        if scan:
            n, workers = line["n"], line["workers"]
            axes.plot(workers, [n / p + math.log2(p) for p in workers], ":", color="black", linewidth=1.0)
            place = (workers[-1], line["steps"][-1])
            axes.annotate(f"n = {n:,}", place, xytext=(0, 5), textcoords="offset points", fontsize=7, ha="center")
    largest = max(line["n"] for line in lines)
    work = {line["schedule"]: line["work"] for line in lines if line["n"] == largest}
    axes.plot(
        [], [], "-", color=BLUE, label=f"Blelloch scan: {work['blelloch'] / largest:.3g} n steps of all workers (3.4)"
    )
    axes.plot(
        [], [], "--", color=ORANGE,
        label=f"cyclic reduction: {work['cyclic_reduction'] / largest / math.log2(largest):.2g} n log2 n",
    )  # fmt: skip
    axes.plot([], [], ":", color="black", label="n/p + log2 p (3.3)")
    axes.set(xscale="log", yscale="log", xlabel="workers p", ylabel="steps on the critical path")
    axes.set_xscale("log", base=2)
    axes.set_title("Equations 3.3 and 3.4", fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7, frameon=False)


def _draw_break_even(axes: Any, lines: Sequence[dict[str, Any]]) -> None:
    from jacsparse.figures import BLUE, GREEN

    widths = [line["width"] for line in lines]
    axes.plot(
        widths, [line["poster"] for line in lines], "o-", color=BLUE, markersize=4, label="poster: C < n / log2 n"
    )
    points = [(line["width"], line["simulated"]) for line in lines if line["simulated"]]
    if points:
        axes.plot(*zip(*points, strict=True), "s--", color=GREEN, markersize=4, label="schedule, powers of two")
    axes.plot(widths, [line["ratio"] for line in lines], ":", color="black", label="C_BPPSA / C_Base")
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="hidden units of an RNN", ylabel="steps n")
    axes.set_title("Break-even: a scan on n workers is faster above", fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7, frameon=False)
