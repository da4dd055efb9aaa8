"""Recurrent classifiers that several experiments time: ours and PyTorch's, from the same weights."""

from __future__ import annotations

import contextlib
import functools
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

import torch
from jacsparse.models import BitstreamRNN, InstrumentGRU, SequenceClassifier
from torch import nn
from torch.nn import functional

from jacsparse import nn as scanned

from ._calls import MODES, Call, in_mode, labelled, one_thread
from ._context import Context, Limits, Timing
from ._empty_function import empty_passes
from ._experiment import Grid
from ._rows import Group, Row, reason, values_of, where


@dataclass(frozen=True)
class Layer:
    """A layer that is timed, ours or PyTorch's, and how it solves its recurrences."""

    name: str
    #: The schedule of the gradients, as ``jacsparse.nn`` takes it; empty for PyTorch's layer.
    schedule: str = ""
    #: The way in which the states are computed.
    forward: str = "auto"

    @classmethod
    def by(cls, schedule: str) -> Layer:
        """Our layer, with gradients by a schedule."""
        return cls(f"jacsparse {schedule}", schedule)

    @property
    def family(self) -> str:
        """How the states are computed or, if step by step, the gradients, without the length of chunks."""
        return self.schedule.partition(":")[0] if self.forward in ("auto", "sequential") else self.forward


OURS, PEER = Layer("jacsparse", "auto"), Layer("torch.nn")
#: The number of gates of each layer's cell.
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
#: The schedules that work on many steps at once: a scan over chunks, one over single steps, and repeated guesses.
SCANS = ("chunked", "blelloch", "relaxed")

#: How a layer solved its recurrences, ``forward`` and ``backward``; empty for PyTorch's.
Solution: TypeAlias = dict[str, str]
#: Times by part, mode and layer.
Timings: TypeAlias = "Mapping[tuple[str, str, Layer], Timing]"


class _InstrumentLSTM(SequenceClassifier):
    layer = nn.LSTM


_CLASSIFIERS = {"RNN": BitstreamRNN, "GRU": InstrumentGRU, "LSTM": _InstrumentLSTM}


@dataclass(frozen=True)
class RecurrentWorkload:
    """A classifier of the thesis, or one with an LSTM, on random sequences: float32, with a loss on the last state."""

    #: The layer: RNN, GRU or LSTM.
    kind: str
    #: The number of steps.
    time: int
    #: Samples per batch.
    batch: int
    #: Elements of a step's input, and of the state.
    features: int
    hidden: int = 20

    @property
    def name(self) -> str:
        """The workload's sizes, for headings."""
        return f"{self.kind}, T = {self.time:,}, B = {self.batch}, H = {self.hidden}, {self.features} inputs a step"

    def function(self, layer: Layer, part: str, device: str) -> Call:
        """The function of a part of training, one of `_PARTS`, with a layer."""
        model, x, labels = self._classifier(layer, device)
        return _PARTS[part](model, x, labels)

    def nothing(self, device: str) -> tuple[Call, Call]:
        """A forward and a backward pass of a Function with the layer's inputs and outputs, which computes nothing."""
        model, x, _ = self._classifier(PEER, device)
        return empty_passes(model.rnn, x.permute(2, 0, 1).contiguous())

    def _classifier(self, layer: Layer, device: str) -> tuple[SequenceClassifier, torch.Tensor, torch.Tensor]:
        """The classifier with a layer, its inputs and its labels; the numbers are the same for all layers."""
        torch.manual_seed(0)
        model = _CLASSIFIERS[self.kind](10, self.features, self.hidden)
        x, labels = torch.randn(self.batch, self.features, self.time), torch.randint(10, (self.batch,))
        # The move lets PyTorch's layer join its weights in memory, for cuDNN.
        model = model.to(device)
        if layer.schedule:
            kind: Any = getattr(scanned, self.kind)
            model.rnn = kind.of(model.rnn, schedule=layer.schedule, forward=layer.forward)
        return model, x.to(device), labels.to(device)

    def _checked(self, context: Context, layers: Sequence[Layer]) -> tuple[dict[Layer, str], dict[Layer, Solution]]:
        """For each layer, the problem with its gradients, or an empty text, and how it solved its recurrences."""
        problems, solutions = dict.fromkeys(layers, ""), {layer: Solution() for layer in layers}
        expected: dict[str, torch.Tensor] = {}

        def check(layer: Layer) -> None:
            model, x, labels = self._classifier(layer, context.place)
            names, weights = zip(*model.named_parameters(), strict=True)
            gradients = dict(zip(names, torch.autograd.grad(_loss(model, x, labels), weights), strict=True))
            if layer == PEER:
                expected.update(gradients)
            _compare(gradients, expected)
            solutions[layer].update(map(_solution, getattr(model.rnn, "reports", ())))

        for layer in sorted(layers, key=lambda layer: layer != PEER):
            try:
                context.first_run(f"{layer.name}, gradients", functools.partial(check, layer))
            except Exception as error:
                problems[layer] = reason(error)
        return problems, solutions

    def floor(self, part: str, limits: Limits) -> float | None:
        """The least seconds of a part: it reads or writes each input and each value that is saved for a step once.

        Its products are those with the weights, forward, and those with the recurrent weights and for the gradients of
        all weights, backward; it neglects that steps wait for one another. A backward pass from the last state has no
        floor: it ends where the gradient has vanished. So a training step counts its forward pass only.
        """
        gates = GATES[self.kind]
        # A cell saves the state and, for a GRU, r, z, n and W_n h, for an LSTM i, f, g, o and c.
        saved = {"RNN": 1, "GRU": 5, "LSTM": 6}[self.kind]
        steps = self.time * self.batch
        nbytes = 4 * steps * (self.features + saved * self.hidden)
        forward = 2 * steps * gates * self.hidden * (self.features + self.hidden)
        backward = forward + 2 * steps * gates * self.hidden**2
        if part == "backward":
            return None
        if part == "backward of all":
            return limits.floor(nbytes + 4 * steps * self.hidden, backward)
        return limits.floor(nbytes, forward)


@dataclass(frozen=True)
class RecurrentCase:
    """A workload with what is timed of it, and what its rows say."""

    workload: RecurrentWorkload
    #: Parts whose functions take turns, and the layers.
    turns: Sequence[tuple[Sequence[str], Sequence[Layer]]]
    #: The labels of our rows and of PyTorch's by part; a part without is timed to be subtracted.
    labels: Mapping[str, tuple[str, str]]
    #: The rows' data, which also have the part, the mode and the layer.
    data: Mapping[str, Any]
    #: The rows' heading, or the workload's name.
    group: str = ""
    #: By part, or part and mode as a label has them, and by family: how many times as fast as PyTorch's the fastest
    #: layer should be.
    targets: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    #: A layer of ours that others are compared with, too.
    base: Layer | None = None
    #: Whether one thread alone runs it; limits, and so floors, are those of all threads.
    single_thread: bool = False
    #: Some of the device's modes; all where it is empty.
    modes: Sequence[str] = ()

    def label(self, part: str, mode: str, layer: Layer) -> str:
        """The label of a row."""
        text = self.labels.get(part, (part, part))[layer == PEER]
        return labelled(f"{text}, {layer.name}", mode)


class RecurrentGrid(Grid):
    """Parts of training with recurrent layers, ours against PyTorch's, in all modes."""

    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    @abstractmethod
    def cases(self, context: Context) -> Iterable[RecurrentCase]:
        """The cases; on CUDA those with targets come first, as time may run out."""

    def measure(self, case: RecurrentCase, context: Context) -> list[Row]:
        """Rows of each part, and of times by subtraction."""
        rows = Group(case.group or case.workload.name)
        for parts, layers in case.turns:
            with one_thread() if case.single_thread else contextlib.nullcontext():
                timings, solutions = self._timed(case, context.under(rows.name), parts, layers)
            for (part, mode, layer), timing in timings.items():
                if part in case.labels:
                    label, solution = case.label(part, mode, layer), solutions[layer]
                    data = {"part": part, "mode": mode, "layer": layer.name, "ran": _ran(layer, solution)}
                    rows.timed(label, timing, role="peer" if layer == PEER else "ours", data={**case.data, **data})
                    if layer != PEER:
                        floor = None if case.single_thread else case.workload.floor(part, context.limits)
                        note = "; ".join(text for name, text in solution.items() if part in (name, "step"))
                        rows.add(replace(rows[label], floor=floor, note=note))
            for part, mode in dict.fromkeys((part, mode) for part, mode, _ in timings):
                _compare_layers(rows, case, part, mode, layers)
            if "rest" in parts:
                self.add_differences(rows, case, timings)
        return rows.rows()

    def _timed(
        self, case: RecurrentCase, context: Context, parts: Sequence[str], layers: Sequence[Layer]
    ) -> tuple[Timings, Mapping[Layer, Solution]]:
        """The timings of parts, for which the layers take turns, and how each layer solved its recurrences.

        A layer is not timed if its gradients differ from those of PyTorch.
        """
        problems, solutions = case.workload._checked(context, layers)
        keys = list(itertools.product(parts, case.modes or MODES[context.device], layers))
        by_label = context.times(
            {
                case.label(part, mode, layer): in_mode(
                    functools.partial(case.workload.function, layer, part, context.place), mode
                )
                for part, mode, layer in keys
                if not problems[layer]
            }
        )
        return {key: by_label.get(case.label(*key), Timing([], 0, problems[key[2]])) for key in keys}, solutions

    def add_differences(self, rows: Group, case: RecurrentCase, timings: Timings) -> None:
        """Add times less the median of a step without its backward pass, as the thesis takes them."""


def _compare_layers(rows: Group, case: RecurrentCase, part: str, mode: str, layers: Sequence[Layer]) -> None:
    """Add the ratios of PyTorch's time of a part to ours; the fastest layer of each family has the targets."""
    ours = {layer: case.label(part, mode, layer) for layer in layers if layer != PEER}
    families = [[label for each, label in ours.items() if each.family == layer.family] for layer in ours]
    fastest = {row.label for labels in families if (row := rows.fastest(labels))}
    wanted = {**case.targets.get(part, {}), **case.targets.get(labelled(part, mode), {})}
    for layer, label in ours.items():
        targets = wanted.get(layer.family) if label in fastest else None
        for at_least in targets or (None,):
            rows.compare(f"{PEER.name} / {layer.name}", case.label(part, mode, PEER), label, at_least=at_least)
        if case.base not in (None, layer):
            rows.compare(f"{case.base.name} / {layer.name}", ours[case.base], label)


def _ran(layer: Layer, solution: Solution) -> str:
    """The library and how the layer computed the gradients, as pictures name it: ``jacsparse, sequential``."""
    way = solution.get("backward", "").partition(",")[0].removeprefix("backward ")
    return f"{layer.name.split()[0]}, {way}" if way else layer.name


def shown(rows: Sequence[Row]) -> list[Row]:
    """The rows that a picture shows: those of graphs if all were captured, else those of single calls."""
    timed = [row for row in rows if "part" in row.data]
    modes = values_of(timed, "mode")
    for mode in reversed(modes):
        of_mode = where(timed, mode=mode)
        if mode == modes[0] or all(row.median is not None for row in of_mode):
            return [row for row in of_mode if row.median is not None]
    return []


def _solution(report: Any) -> tuple[str, str]:
    """The recurrence of a layer's report, and how it was solved."""
    sweeps = f", {report.sweeps} sweeps" if report.sweeps > 1 else ""
    return report.recurrence, f"{report.recurrence} {', then '.join(report.methods)}{sweeps}"


def _loss(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), labels)


def _compare(gradients: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Raise RuntimeError if gradients differ."""
    if not expected:
        raise RuntimeError("torch.nn's layer failed, and there is nothing to compare with")
    for name, gradient in gradients.items():
        difference, largest = (gradient - expected[name]).abs().max().item(), expected[name].abs().max().item()
        if not difference <= 1e-3 * largest:
            raise RuntimeError(f"the gradients of {name} differ by {difference:.2g}; the largest is {largest:.2g}")


def _forward(model: SequenceClassifier, x: torch.Tensor, labels: torch.Tensor) -> Call:
    steps = x.permute(2, 0, 1).contiguous()
    return lambda: model.rnn(steps)


def _backward(model: SequenceClassifier, x: torch.Tensor, labels: torch.Tensor, *, of_all: bool = False) -> Call:
    output, last = model.rnn(x.permute(2, 0, 1).contiguous())
    result = output if of_all else last[0] if isinstance(last, tuple) else last
    weights, gradient = list(model.rnn.parameters()), torch.ones_like(result)
    return lambda: torch.autograd.grad(result, weights, gradient, retain_graph=True)


def _step(model: SequenceClassifier, x: torch.Tensor, labels: torch.Tensor) -> Call:
    optimizer = _optimizer(model, x)

    def step() -> None:
        optimizer.zero_grad()
        _loss(model, x, labels).backward()
        optimizer.step()

    return step


def _rest(model: SequenceClassifier, x: torch.Tensor, labels: torch.Tensor) -> Call:
    optimizer = _optimizer(model, x)
    _loss(model, x, labels).backward()

    def step_without_backward() -> None:
        _loss(model, x, labels)
        optimizer.step()

    return step_without_backward


def _optimizer(model: nn.Module, x: torch.Tensor) -> torch.optim.Optimizer:
    """An optimizer that leaves the weights as they are; on CUDA its state is there, as graphs require."""
    return torch.optim.Adam(model.parameters(), lr=0.0, capturable=x.is_cuda)


#: Functions that make the parts of training from a model, inputs and labels. "forward" and the backward passes are of
#: the recurrent layer alone: "backward" goes from a gradient of the last state to those of the weights, over a graph
#: that stays; "backward of all" starts from gradients of all states, which do not vanish. "step" is a training step of
#: the whole classifier: forward, backward and Adam; "rest" is one without its backward pass.
_PARTS: dict[str, Callable[[SequenceClassifier, torch.Tensor, torch.Tensor], Call]] = {
    "forward": _forward,
    "backward": _backward,
    "backward of all": functools.partial(_backward, of_all=True),
    "step": _step,
    "rest": _rest,
}
