"""Scans across ranks: their messages, training steps on two ranks, and the memory of pruned VGG-11's blocks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jacsparse.spgemm import matvec
from torch import nn

import jacsparse
from jacsparse.affine import DenseMaps, compose
from jacsparse.distributed import JACOBIANS, MATRICES, VECTORS, Ranks, RankScan, ranks_of
from jacsparse.figures import BLUE, GREEN, ORANGE
from jacsparse.recurrence import Dense, linear_recurrence
from jacsparse.schedule import EXCHANGES, exchanges
from jacsparse.simulation import AcrossRanks, Interconnect, Workload, counted_workload, measured_workload

from ._calls import one_thread, peak_memory
from ._context import Context, Timing
from ._environment import cores
from ._experiment import Experiment
from ._figures import Bars, Line, Panel, Picture
from ._ranks import Say, on_ranks
from ._rows import Comparison, Group, Row
from ._text import amount
from ._workloads import equal_layers, whole_pruned_vgg11

#: Bytes of the messages by which latency and bandwidth are measured.
_SMALL, _LARGE = 8, 2**25
#: The exchanges of blocks whose memory is measured.
_WAYS = ("gather", "scan")
#: Stages of pruned VGG-11 whose product is timed: two convolutions with a ReLU between them.
_BLOCK = slice(11, 14)


class _Messages(NamedTuple):
    """What one rank saw of scans of elements of so many bytes, by way: seconds; messages and bytes that it sent."""

    seconds: dict[tuple[str, int], list[float]]
    sent: dict[tuple[str, int], tuple[int, int]]
    interconnect: Interconnect


class _RankSteps(NamedTuple):
    """Seconds of training steps on two ranks, and the stages' costs in one process."""

    measured: list[float]
    workload: Workload
    interconnect: Interconnect


@dataclass(frozen=True)
class _CutRanks(AcrossRanks):
    """Ranks whose blocks are cut at these stages, the first ones of all ranks but the first."""

    cuts: tuple[int, ...] = ()

    def most(self, workload: Workload) -> int:
        return len(self.cuts) + 1

    def blocks(self, workload: Workload, workers: int) -> list[range]:
        ends = [0, *self.cuts[: workers - 1], len(workload)]
        return [range(begin, end) for begin, end in itertools.pairwise(ends)]


@dataclass(frozen=True)
class ScansAcrossRanks(Experiment):
    """Processes of one thread on this machine, connected by gloo."""

    #: Numbers of ranks, and bytes of elements, of scans without products.
    ranks: tuple[int, ...] = (2, 3, 4)
    sizes: tuple[int, ...] = (8, 2**14, 2**18, 2**22)
    #: Linear layers with a tanh each, their units and samples.
    layers: int = 8
    width: int = 1024
    batch: int = 128
    #: Steps, hidden units and samples of a GRU.
    time: int = 2000
    hidden: int = 20
    samples: int = 16
    #: Steps in each round; the fastest counts, since two ranks on two cores wait for whatever else runs there.
    steps: int = 30
    #: The first stages of all ranks but the first, of pruned VGG-11.
    cuts: tuple[tuple[int, ...], ...] = ((11, 13), (11, 13, 14), (11, 13, 14, 16), (8, 11, 14))
    side: int = 32

    name = "rank_scan"
    title = "Scans across ranks, beside predictions"
    source = "thesis, section 3.6; schedule.exchanges"

    def run(self, context: Context) -> list[Row]:
        with one_thread():
            rows = self._rates(context)
        for count in self.ranks:
            rows += self._messages(context.under(f"{count} ranks"), count)
        for label, task in (("chain", _chain_steps), ("GRU", _layer_steps)):
            rows.append(self._steps(context.under(label), label, task))
        for cuts in self.cuts:
            rows += self._blocks(context.under(f"vgg11, {len(cuts) + 1} ranks"), cuts)
        return rows

    def _rates(self, context: Context) -> list[Row]:
        """Multiply-adds per second of products with vectors and with matrices, by which ``auto`` chooses."""
        n, samples, time = self.hidden, self.samples, self.time
        a, b = torch.randn(time, samples, n, n) / n, torch.randn(time, samples, n)
        map_ = DenseMaps(torch.randn(1, samples, n, n), torch.randn(1, samples, n))
        model = _pruned()
        block, x = model[_BLOCK], model[: _BLOCK.start](torch.randn(1, 3, self.side, self.side)).detach()
        chain = jacsparse.chain(block, tuple(x.shape[1:]))
        jacobian = jacsparse.jacobian(block, x).T
        vector = torch.ones(jacobian.shape[1], 1)
        functions: dict[str, tuple[Callable[[], object], float, float]] = {
            "steps of dense matrices": (
                lambda: linear_recurrence(Dense(a), b, schedule="sequential"), time * samples * n**2, VECTORS
            ),
            "products of dense maps": (lambda: compose(map_, map_), samples * n**3, MATRICES),
            "vgg11: products with a vector": (
                lambda: matvec(jacobian.pattern, jacobian.values, vector), jacobian.pattern.nnz, VECTORS
            ),
            "vgg11: stages to one matrix": (
                lambda: jacsparse.jacobian(block, x), float(chain.order.cost), JACOBIANS
            ),
        }  # fmt: skip
        timings = context.times({label: function for label, (function, _, _) in functions.items()}, seconds=0.6)
        rows = Group("Rates of one thread")
        for label, (_, multiply_adds, constant) in functions.items():
            if timings[label].problem:
                rows.missing(label, timings[label].problem)
                continue
            rate = multiply_adds / min(timings[label].seconds)
            compared = Comparison("measured / constant", rate / constant)
            rows.value(label, rate, "multiply-adds per second", comparisons=(compared,))
        return rows.rows()

    def _messages(self, context: Context, count: int) -> list[Row]:
        """Messages, bytes and times of each way, beside what is predicted."""
        ranks = on_ranks(partial(_scans, sizes=self.sizes, rounds=context.rounds), count, context.say)
        rows = Group(f"{count} ranks on {cores()} cores: scans of elements without products")
        interconnect = ranks[0].interconnect
        if count == 2:
            rows.value("latency of a message", interconnect.latency, "time", "s", data={"ranks": count})
            rows.value("bandwidth of messages", interconnect.bandwidth, "bandwidth", "B/s")
        for size in self.sizes:
            least = min(min(ranks[0].seconds[way, size]) for way in EXCHANGES)
            for way in EXCHANGES:
                messages, nbytes = (sum(rank.sent[way, size][number] for rank in ranks) for number in range(2))
                predicted, times = sum(map(len, exchanges(count, way))), ranks[0].seconds[way, size]
                seconds, fastest = interconnect.scan_seconds(count, way, size), min(times)
                note = f"{messages} messages and {nbytes:,} B counted, {predicted} and {predicted * size:,} B predicted"
                compared = (
                    Comparison("messages / predicted", messages / predicted, at_least=1, at_most=1),
                    Comparison("bytes / predicted", nbytes / (predicted * size), at_least=1, at_most=1),
                    Comparison("fastest / predicted time", fastest / seconds),
                    Comparison("fastest / that of the fastest way", fastest / least),
                )
                label, timing = f"{way}, {amount(size, 'B')}", Timing(times, len(times))
                data = {"ranks": count, "way": way, "size": size, "predicted": seconds}
                rows.timed(label, timing, note=note, comparisons=compared, data=data)
        return rows.rows()

    def _steps(self, context: Context, label: str, task: Callable[..., _RankSteps | None]) -> Row:
        """Training steps on two ranks beside the simulated time."""
        (steps, _) = on_ranks(partial(task, experiment=self, rounds=context.rounds), 2, context.say)
        assert steps is not None
        load = steps.workload
        outcome, _ = _CutRanks(("linear",), (len(load) // 2,)).plan(load, steps.interconnect, 2)
        fastest = min(steps.measured)
        nearness = Comparison("simulated / fastest measured", outcome.seconds / fastest, at_least=0.8, at_most=1.2)
        passes, timing = load.forward + load.backward, Timing(steps.measured, len(steps.measured))
        note = f"simulated {amount(outcome.seconds, 's')}, of which passes in one process {amount(passes, 's')}"
        group, data = "A training step on two ranks of one thread", {"step": label, "simulated": outcome.seconds}
        row = Row.timed(f"{label}, {len(load)} stages", timing, group=group, note=note, data={**data, "passes": passes})
        return row.beside(nearness)

    def _blocks(self, context: Context, cuts: tuple[int, ...]) -> list[Row]:
        """The memory of blocks of pruned VGG-11, beside the planner's and section 3.6's."""
        count = len(cuts) + 1
        ranks = on_ranks(partial(_block, experiment=self, cuts=cuts), count, context.say)
        counted = counted_workload(_pruned(), torch.randn(1, 3, self.side, self.side), 1e10)
        # What a step needs beyond the weights and their gradients.
        load = replace(counted, stages=tuple(replace(stage, weights=0) for stage in counted.stages))
        # Section 3.6 without its constant: the entries of the largest Jacobian, for each matrix of a rank.
        published = max(len(load) / count, 1) * max(stage.factor.nnz for stage in load.stages[1:])
        rows = Group(f"vgg11, {count} ranks: stages cut at {', '.join(map(str, cuts))}")
        for way in _WAYS:
            outcome, _ = _CutRanks((way,), cuts).plan(load, Interconnect(), count)
            peak = max(rank[way] for rank in ranks)
            planned = Comparison("measured / planned", peak / outcome.memory)
            claimed = Comparison("measured / section 3.6", peak / (published * load.itemsize))
            note = f"by rank {', '.join(amount(rank[way] / 2**20, 'MiB') for rank in ranks)}"
            data = {"cuts": list(cuts), "published": published, "way": way, "planned": outcome.memory, "peak": peak}
            label = f"{way}: peak memory of the fullest rank"
            rows.value(label, peak / 2**20, "memory", "MiB", comparisons=(planned, claimed), note=note, data=data)
        return rows.rows()

    def picture(self, rows: Sequence[Row]) -> Picture:
        count, scans = max(self.ranks), []
        for way, colour in zip(EXCHANGES, (BLUE, ORANGE, GREEN), strict=True):
            of_way = [row for row in rows if row.data.get("way") == way and row.data.get("ranks") == count]
            sizes = [row.data["size"] for row in of_way]
            scans.append(Line(sizes, [row.fastest or 0.0 for row in of_way], way, colour, "o-"))
            scans.append(Line(sizes, [row.data["predicted"] for row in of_way], "", colour, ":"))
        scans.append(Line((), (), "predicted; linear as gather", style=":"))
        steps, blocks = ([row for row in rows if name in row.data] for name in ("step", "planned"))
        seconds: dict[str, list[float | None]] = {
            "passes in one process": [1e3 * row.data["passes"] for row in steps],
            "simulated, two ranks": [1e3 * row.data["simulated"] for row in steps],
            "measured, two ranks, fastest": [1e3 * (row.fastest or 0.0) for row in steps],
        }
        memory: dict[str, list[float | None]] = {
            "section 3.6: max(n/p, 1) of the largest factor": [row.data["published"] / 2**18 for row in blocks],
            "planned by entries": [row.data["planned"] / 2**20 for row in blocks],
            "measured, beyond weights": [row.data["peak"] / 2**20 for row in blocks],
        }
        cuts = ["\n".join([row.data["way"], *map(str, row.data["cuts"])]) for row in blocks]
        title, colours, text = f"Exclusive scan across {count} ranks on {cores()} cores", (GREEN, ORANGE, BLUE), "%.3g"
        by_label = Bars([row.label for row in steps], seconds, colours, text)
        places = "way, and stages at which ranks begin"
        settings = {"ymargin": 0.25}
        panels = [
            Panel(scans, title, "bytes of an element", "seconds, fastest", "xy", grid="y"),
            Panel([by_label], "A training step, forward and back", "", "milliseconds of a step", settings=settings),
            Panel(
                [Bars(cuts, memory, colours, text)], "Pruned VGG-11, a step", places, "MiB, the fullest rank", "y",
                settings=settings,
            ),
        ]  # fmt: skip
        return Picture(f"{self.title}: one thread a process, gloo", panels, (15.0, 4.6))


def _pruned() -> Any:
    return whole_pruned_vgg11().get_submodule("features")


def _together(ranks: Ranks, function: Callable[[], object]) -> float:
    """Seconds of the slowest rank, after all are there."""
    ranks.check("start of a measurement", {})
    begin = time.perf_counter()
    function()
    seconds = time.perf_counter() - begin
    return max(nanoseconds for (nanoseconds,) in ranks.check("end of a measurement", {}, int(1e9 * seconds))) / 1e9


class _Wire:
    """The connection between the first two ranks, by the fastest messages of a few bytes and of many."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._seconds = {_SMALL: math.inf, _LARGE: math.inf}
        self.measure()

    def measure(self) -> None:
        """Send messages, and keep half of the shortest time to and fro."""
        for size in self._seconds:
            x = torch.ones(size, dtype=torch.uint8)
            for _ in range(20 if size < 2**20 else 4):
                seconds = _together(self._ranks, partial(self._to_and_fro, x)) / 2
                self._seconds[size] = min(self._seconds[size], seconds)

    def _to_and_fro(self, x: torch.Tensor) -> None:
        ranks, first = self._ranks, self._ranks.rank == 0
        for sends in (first, not first) if ranks.rank < 2 else ():
            if sends:
                ranks.send(x, int(first), "message", 0)
                ranks.flush()
            else:
                ranks.expect(int(first), "message").wait(0)

    @property
    def interconnect(self) -> Interconnect:
        """Latency and bandwidth of the messages so far."""
        latency = self._seconds[_SMALL]
        return Interconnect(latency, _LARGE / max(self._seconds[_LARGE] - latency, 1e-9))


def _scans(say: Say, *, sizes: Sequence[int], rounds: int) -> _Messages:
    """Scans of each way and size, in turns; what adds is an addition, which takes little time."""
    ranks, sent = ranks_of(None), {}
    seconds: dict[tuple[str, int], list[float]] = {(way, size): [] for size in sizes for way in EXCHANGES}
    wire = _Wire(ranks)
    for number in range(rounds):
        for way, size in seconds:
            if not ranks.rank:
                say(f"{way}, {size} B: round {number + 1} of {rounds}")
            x = torch.ones(size // 4)
            for _ in range(10 if size < 2**20 else 3):
                scan = RankScan(ranks, torch.add, way, "scan")
                seconds[way, size].append(_together(ranks, partial(scan, x, x)))
            # Measurements send messages, too: those of a scan are counted without.
            messages, nbytes = ranks.sent_messages, ranks.sent_bytes
            RankScan(ranks, torch.add, way, "scan")(x, x)
            sent[way, size] = ranks.sent_messages - messages, ranks.sent_bytes - nbytes
        wire.measure()
    return _Messages(seconds, sent, wire.interconnect)


def _chain_steps(say: Say, *, experiment: ScansAcrossRanks, rounds: int) -> _RankSteps | None:
    layers, module = experiment.layers, equal_layers(experiment.layers, experiment.width)
    x = torch.randn(experiment.batch, experiment.width)
    part = (module[:layers], module[layers:])[dist.get_rank()]
    scan = jacsparse.nn.Scan(part, process_group=dist.group.WORLD)

    def step() -> None:
        scan(x).sum().backward()

    return _measured_steps(say, module, x, step, rounds, experiment.steps)


def _layer_steps(say: Say, *, experiment: ScansAcrossRanks, rounds: int) -> _RankSteps | None:
    torch.manual_seed(0)
    time, size = experiment.time, (8, experiment.hidden)
    x = torch.randn(time, experiment.samples, size[0])
    layer = jacsparse.nn.GRU(*size, process_group=dist.group.WORLD, exchange="linear", schedule="sequential")
    here = (x[: time // 2], x[time // 2 :])[dist.get_rank()]

    def step() -> None:
        layer(here)[0].sum().backward()
        gradients = [parameter.grad.flatten() for parameter in layer.parameters() if parameter.grad is not None]
        dist.all_reduce(torch.cat(gradients))

    return _measured_steps(say, jacsparse.nn.GRU(*size, schedule="sequential"), x, step, rounds, experiment.steps)


def _measured_steps(
    say: Say, module: nn.Module, x: torch.Tensor, step: Callable[[], None], rounds: int, steps: int
) -> _RankSteps | None:
    """Steps on all ranks and, in turn with them, the stages' passes on the first rank alone."""
    ranks, loads, measured = ranks_of(None), list[Workload](), list[float]()
    wire = _Wire(ranks)
    _together(ranks, step)
    for number in range(rounds):
        if not ranks.rank:
            say(f"round {number + 1} of {rounds}")
        measured += [_together(ranks, step) for _ in range(steps)]
        if not ranks.rank:
            loads.append(measured_workload(module, x, 0.05))
        wire.measure()
    return _RankSteps(measured, _fastest(loads), wire.interconnect) if loads else None


def _fastest(loads: Sequence[Workload]) -> Workload:
    """The workload with the shortest time of each pass."""
    names = ("forward", "errors", "gradients", "jacobian")
    stages = [
        replace(stages[0], **{name: min(getattr(stage, name) for stage in stages) for name in names})
        for stages in zip(*(load.stages for load in loads), strict=True)
    ]
    return replace(loads[0], stages=tuple(stages))


def _block(say: Say, *, experiment: ScansAcrossRanks, cuts: tuple[int, ...]) -> dict[str, int]:
    """The peak memory of a step on this rank by each way, after one that plans."""
    model, ranks = _pruned(), ranks_of(None)
    begin, end = ([0, *cuts][ranks.rank], [*cuts, len(model)][ranks.rank])
    part, x = model[begin:end], torch.randn(1, 3, experiment.side, experiment.side)
    peaks = {}
    for way in _WAYS:
        if not ranks.rank:
            say(way)
        scan = jacsparse.nn.Scan(part, process_group=dist.group.WORLD, exchange=way)

        def step(scan: nn.Module = scan) -> None:
            scan(x).sum().backward()

        step()
        peaks[way] = peak_memory(step)
    return peaks
