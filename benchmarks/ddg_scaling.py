"""The time of an iteration by delayed gradients over the number of modules: Table 1 and Figure 6."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jacsparse.models import build
from torch import nn

from jacsparse.figures import BLUE, GREEN, ORANGE, SKY
from jacsparse.training import Backpropagation, DelayedGradients

from ._context import Context, Timing
from ._environment import cores
from ._experiment import Grid
from ._figures import Bars, Panel, Picture
from ._ranks import Say, on_ranks
from ._rows import Group, Row, compare, where
from ._text import amount

_PEER = "back-propagation, one process"
#: The share of the forward pass in an iteration of back-propagation (section 5.3).
_FORWARD = 0.32
#: Figures of an iteration's time.
_PUBLISHED, _PREDICTED = "published, T_F + T_B / K", "predicted, T_F + largest T_B"
_SIMULATED, _MEASURED = "simulated", "measured"


@dataclass
class _ModuleSeconds:
    """Seconds of each iteration, and of the forward and the backward passes of each module that a process trains."""

    iterations: list[float]
    forward: Sequence[list[float]]
    backward: Sequence[list[float]]


@dataclass(frozen=True)
class DdgScaling(Grid):
    """A ResNet of the paper on random images, by SGD, in a process of one thread for each module."""

    network: str = "resnet56"
    modules: tuple[int, ...] = (2, 3, 4)
    #: The network of Figure 6, which is cut in two.
    deeper: str | None = "resnet110"
    #: Images of an iteration, and their height and width.
    batch: int = 32
    side: int = 32
    #: Iterations of a turn: back-propagation and each number of modules take turns.
    iterations: int = 8
    #: The most processes; by default the number of cores.
    most: int | None = None

    name = "ddg_scaling"
    title = "Delayed gradients: an iteration over the number of modules"
    source = "Huo et al., 2018, Table 1 and Figure 6 (published on GPUs; here one thread for each module)"

    def cases(self, context: Context) -> Iterable[DdgScaling]:
        """The experiment for each network alone."""
        yield self
        if self.deeper:
            yield replace(self, network=self.deeper, modules=(2,))

    def measure(self, case: DdgScaling, context: Context) -> list[Row]:
        processes = min(max(case.modules), self.most or cores())
        task = partial(_measure, experiment=case, rounds=context.rounds)
        ranks = on_ranks(task, processes, context.under(case.network).say)
        (forward,), (backward,) = (_medians([ranks[0][1]], passes) for passes in ("forward", "backward"))
        share, rows = forward / (forward + backward), Group(case.group(1))
        note = f"the forward pass takes {share:.0%} of both passes, published {_FORWARD:.0%}; {cores()} core(s)"
        data = {"network": case.network, "modules": 1, "forward": share}
        peer = rows.timed(_PEER, _timing(ranks[0][1]), role="peer", note=note, data=data)
        of_modules = {modules: [rank[modules] for rank in ranks if modules in rank] for modules in case.modules}
        return [peer, *(row for modules, each in of_modules.items() for row in case.rows(modules, each, peer))]

    def group(self, modules: int) -> str:
        """The heading of rows of a number of modules."""
        return f"K = {modules}: {self.network}, batch {self.batch} of {self.side} × {self.side}, one thread a process"

    def rows(self, modules: int, ranks: Sequence[_ModuleSeconds], peer: Row) -> list[Row]:
        """Rows of a number of modules, from the seconds of the processes that trained them."""
        forward, backward = (_medians(ranks, passes) for passes in ("forward", "backward"))
        published, predicted = _FORWARD + (1 - _FORWARD) / modules, sum(forward) + max(backward)
        # No module waits for the end of an iteration: in the long run one takes as long as the slowest module.
        simulated = max(map(sum, zip(forward, backward, strict=True)))
        place = f"modules timed in {len(ranks)} process(es) of one thread, on {cores()} core(s)"
        passes = f"{place}: forward {_listed(forward)}, backward {_listed(backward)}"
        rows, data = Group(self.group(modules)), {"network": self.network, "modules": modules}
        if len(ranks) < modules:
            reason = f"{modules} modules need as many cores, and {cores()} core(s) run {len(ranks)} process(es)"
            rows.missing(_MEASURED, reason)
        else:
            rows.timed(_MEASURED, _timing(ranks[-1]), note=place, data={**data, "kind": _MEASURED})
        for kind, value in ((_PREDICTED, predicted), (_SIMULATED, simulated)):
            more = {**data, "kind": kind}
            rows.value(kind, value, "predicted time", "s", role="reference", note=passes, data=more)
        for row in rows.rows():
            ratios = compare("back-propagation / delayed gradients", peer, row, published=1 / published)
            rows.add(row.beside(*ratios))
        rows.compare("measured / simulated", _MEASURED, _SIMULATED, at=_MEASURED, at_least=0.85, at_most=1.15)
        quantity, note, more = "share of back-propagation's time", f"T_F = {_FORWARD}", {**data, "kind": _PUBLISHED}
        rows.value(_PUBLISHED, published, quantity, role="reference", note=note, data=more)
        return rows.rows()

    def picture(self, rows: Sequence[Row]) -> Picture:
        peers = {row.data["network"]: row for row in rows if row.label == _PEER}
        drawn, peer = [row for row in rows if "kind" in row.data and row.median], peers[self.network]
        cuts = list(dict.fromkeys((row.data["network"], row.data["modules"]) for row in drawn))
        unsplit = "back-propagation; pale: its forward pass"
        heights: dict[str, list[float | None]] = {unsplit: [1.0, *[None] * len(cuts)]}
        for kind in (_PUBLISHED, _PREDICTED, _SIMULATED, _MEASURED):
            shares = dict[tuple[str, int], float]()
            for row in where(drawn, kind=kind):
                network, modules = row.data["network"], row.data["modules"]
                whole = peers[network].median if row.unit == "s" else 1.0
                shares[network, modules] = (row.median or 0.0) / (whole or 1.0)
            heights[kind] = [None, *map(shares.get, cuts)]
        names = [f"{network}\nK = {modules}" for network, modules in ((self.network, 1), *cuts)]
        colours, pale = ("#888888", GREEN, ORANGE, SKY, BLUE), {unsplit: [peer.data["forward"]]}
        panel = Panel(
            [Bars(names, heights, colours, "%.2f", pale)], y="time of an iteration / back-propagation's", grid="y"
        )
        return Picture(f"{self.title}\n{peer.group.partition(': ')[2]}; {peer.note}", [panel], (9.0, 4.2), legend=3)


class _Stopwatch:
    """Notes the seconds of a module's forward passes, and of its backward passes with their updates.

    It runs while the module works, so that waiting for other processes does not count.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.forward: list[float] = []
        self.backward: list[float] = []
        module.register_forward_pre_hook(self._start)
        module.register_forward_hook(self._after_forward)
        optimizer.register_step_post_hook(self._after_update)

    def _start(self, *_: Any) -> None:
        self._since = time.perf_counter()

    def _after_forward(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        self.forward.append(time.perf_counter() - self._since)
        # The gradient of its output is where a module's backward pass begins.
        output.register_hook(self._start)

    def _after_update(self, *_: Any) -> None:
        self.backward.append(time.perf_counter() - self._since)


class _TimedTraining:
    """A training in this process: of all modules, or of the one of its rank in a group."""

    def __init__(self, network: str, modules: int, group: dist.ProcessGroup | None) -> None:
        torch.manual_seed(0)
        model, optimizer = build(network).train(), partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=5e-4)
        self.trainer: Backpropagation | DelayedGradients = Backpropagation(model, optimizer=optimizer)
        parts: Sequence[nn.Module] = [model]
        if modules > 1:
            self.trainer = DelayedGradients(model, modules=modules, optimizer=optimizer, process_group=group)
            here = slice(None) if group is None else slice(dist.get_rank(group), dist.get_rank(group) + 1)
            parts = self.trainer.partition[here]
        watches = [_Stopwatch(*pair) for pair in zip(parts, self.trainer.optimizers, strict=True)]
        self.seconds = _ModuleSeconds([], *zip(*((watch.forward, watch.backward) for watch in watches), strict=True))

    def turn(self, x: torch.Tensor, y: torch.Tensor, iterations: int) -> None:
        """Train, and note the seconds of all iterations but the first, for which other processes are not yet busy."""
        ends = []
        for _ in range(iterations + 1):
            self.trainer.step(x, y)
            ends.append(time.perf_counter())
        self.seconds.iterations += [end - begin for begin, end in itertools.pairwise(ends)]

    def forget(self) -> None:
        """Forget the seconds so far."""
        for times in (self.seconds.iterations, *self.seconds.forward, *self.seconds.backward):
            times.clear()


def _measure(say: Say, *, experiment: DdgScaling, rounds: int) -> dict[int, _ModuleSeconds]:
    """The seconds of this process by number of modules; 1 is back-propagation.

    Where there are more modules than processes, the first process trains all of them.
    """
    rank, processes = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(experiment.batch, 3, experiment.side, experiment.side)
    y = torch.randint(10, (experiment.batch,))
    trainings: dict[int, _TimedTraining | None] = {}
    for modules in (1, *experiment.modules):
        apart = 1 < modules <= processes
        # Every process takes part in making a group, its members or not.
        group = dist.new_group(list(range(modules))) if apart else None
        takes_part = rank < modules if apart else rank == 0
        trainings[modules] = _TimedTraining(experiment.network, modules, group) if takes_part else None
    for number in range(rounds + 1):
        for modules, training in trainings.items():
            if rank == 0:
                say(f"{modules} module(s): round {number} of {rounds}")
            dist.barrier()
            if training is None:
                continue
            # Before the first round come iterations without gradients.
            training.turn(x, y, experiment.iterations if number else modules)
            if number == 0:
                training.forget()
    return {modules: training.seconds for modules, training in trainings.items() if training is not None}


def _timing(seconds: _ModuleSeconds) -> Timing:
    return Timing(seconds.iterations, len(seconds.iterations))


def _medians(ranks: Sequence[_ModuleSeconds], passes: str) -> list[float]:
    """The median seconds of each module's passes, ``forward`` or ``backward``."""
    return [statistics.median(times) for rank in ranks for times in getattr(rank, passes)]


def _listed(seconds: Sequence[float]) -> str:
    return " + ".join(amount(time, "s") for time in seconds)
