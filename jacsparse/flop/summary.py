"""What a FLOP report comes to: a training step's FLOP, whether a scan pays, and what is wrong with the network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..terminal import (
    EXAMPLES,
    first_names,
    layer_in_words,
    listed,
    nbytes,
    new_table,
    not_numbers,
    percent,
    ratio,
    short,
    text,
)
from .layer_flop import StepFlop

if TYPE_CHECKING:
    from .report import FlopReport

#: How rows are called, by structure.
_NAMES = {
    "dense": "dense, as PyTorch runs it",
    "pruned": "without pruned weights",
    "observed": "and without the data's zeros",
}
#: Characters of the names of layers with their shares in a sentence, at most.
_CHARACTERS = 60


@dataclass(frozen=True)
class TrainingStep:
    """The FLOP of a training step on one sample, by forward pass and gradients.

    Attributes
    ----------
    structure : {"dense", "pruned", "observed"}
        Which zeros are left out: none, pruned weights and padding, or also those of the given samples.
    forward, input_gradient, weight_gradient, step : float
        FLOP of the forward pass, of the gradients of the layers' inputs, of those of weights, and of all three.
    of_dense : float
        The step as a share of the dense one.
    """

    structure: str
    forward: float
    input_gradient: float
    weight_gradient: float
    step: float
    of_dense: float


@dataclass(frozen=True)
class ScanCosts:
    """What back-propagation by parallel scan takes, beside back-propagation of the same structure.

    Attributes
    ----------
    schedule : str
        The schedule's name.
    work, critical_path : float
        FLOP of all its products, and of those that wait for each other.
    work_ratio, critical_ratio, dense_ratio : float
        Both as multiples of back-propagation without the same zeros, and `work` as one of dense back-propagation.
    pays_from : int or None
        Workers from which on it is done before back-propagation on one; None where no number of workers is enough.
    """

    schedule: str
    work: float
    critical_path: float
    work_ratio: float
    critical_ratio: float
    dense_ratio: float
    pays_from: int | None

    def __str__(self) -> str:
        pays = "never pays" if self.pays_from is None else f"pays from {self.pays_from:,} workers on"
        path = f"{ratio(self.critical_ratio)} times along its critical path"
        if self.pays_from is None:
            waits = ", but too many of its products wait for each other"
            path += waits if self.critical_ratio < 1 else ", which no number of workers shortens"
        dense = (
            f" (but {ratio(self.dense_ratio)} times the dense one's)" if self.dense_ratio < 1 < self.work_ratio else ""
        )
        return (
            f"A scan ({self.schedule}) {pays}: for inputs' gradients it takes {ratio(self.work_ratio)} times the FLOP "
            f"of back-propagation that skips the same zeros{dense}, and {path}."
        )


@dataclass(frozen=True, repr=False)
class FlopSummary:
    """The first page of a report. ``print`` shows it in words.

    Attributes
    ----------
    name : str
        What was counted.
    weights, zeros : int
        Elements of the weights that layers multiply by, and those that are zero.
    steps : tuple of TrainingStep
        A training step with each structure.
    sparsest, densest, largest : tuple of (str, float)
        The layers with the largest and smallest shares of zeros, and those with the largest shares of the FLOP of the
        last of `steps`.
    scan : ScanCosts or None
        The scan that was counted.
    counted : str
        Which inputs and which entry of the output were counted, in words.
    note : str
        Why no scan was counted, in words.
    without_weights, without_gradient : tuple of str
        The layers of whose weights none is left, and other layers whose weights no gradient reaches.
    weight_nbytes, pruned_nbytes, jacobian_nbytes : int
        Bytes of all parameters as float32, of those that are not zero as CSR, and of the layers' Jacobians, as CSR.
    warnings : tuple of str
        What is wrong with the network, as `FlopReport.warnings` has it.
    """

    name: str
    weights: int
    zeros: int
    steps: tuple[TrainingStep, ...]
    sparsest: tuple[tuple[str, float], ...]
    densest: tuple[tuple[str, float], ...]
    largest: tuple[tuple[str, float], ...]
    scan: ScanCosts | None
    counted: str
    note: str
    without_weights: tuple[str, ...]
    without_gradient: tuple[str, ...]
    weight_nbytes: int
    pruned_nbytes: int
    jacobian_nbytes: int
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        return text(self)

    __repr__ = __str__

    @property
    def sparsity(self) -> float:
        """Share of the weights that is zero."""
        return self.zeros / self.weights if self.weights else 0.0

    @property
    def times_fewer(self) -> float | None:
        """The FLOP of a dense step, as a multiple of those without pruned weights; None where no weight is pruned."""
        pruned = self.steps[1]
        return 1 / pruned.of_dense if self.zeros and pruned.step else None

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values, for JSON."""
        return {**asdict(self), "sparsity": self.sparsity, "times_fewer": self.times_fewer}

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield from self.figures()
        yield from shown_warnings(self.warnings)

    def figures(self) -> Iterator[Any]:
        """What is printed ahead of the warnings."""
        if not self.weights:
            yield f"{self.name}: nothing in it multiplies by weights, so there is nothing to prune."
        elif self.zeros:
            yield f"{self.name}: {percent(self.sparsity)} of {self.weights:,} weights are zero."
        else:
            yield f"{self.name}: none of {self.weights:,} weights is zero."
        if self.counted:
            yield self.counted
        yield _steps(self.steps)
        yield from self.sentences()

    def sentences(self) -> Iterator[str]:
        """What the figures come to."""
        if self.zeros and self.zeros == self.weights:
            yield "No weight is left: the output is the same for every input, and no weight has a gradient."
        elif self.times_fewer is not None:
            gain = f"Kernels that skip pruned weights have {ratio(self.times_fewer)} times fewer FLOP to do"
            if self.without_weights:
                yield f"{gain}, but part of the network is cut off: see the warning. Dense kernels gain nothing."
            else:
                yield f"{gain}. Dense kernels, as PyTorch's, gain nothing."
        elif self.weights:
            yield "No weight is pruned: dense kernels, as PyTorch's, are the faster ones."
            if self.steps[1].step < self.steps[0].step:
                yield "The rest of the dense FLOP is for padding, and for what no gradient reaches."
        if self.densest and self.zeros:
            if self.densest[0][1] > self.sparsest[0][1] - 0.0005:
                yield f"Pruned: {percent(self.sparsest[0][1])} of every layer."
            else:
                yield f"Sparsest: {_named(self.sparsest)}. Densest: {_named(self.densest)}."
        if self.largest:
            which = {"pruned": "without pruned weights", "observed": "without the data's zeros"}[
                self.steps[-1].structure
            ]
            yield f"Most of the step {which}: {_named(self.largest)}."
        if self.scan is not None:
            yield str(self.scan)
        elif self.note:
            yield self.note
        elif self.without_weights and not self.steps[1].input_gradient:
            yield "Scan: not compared, as no gradient passes between layers."
        sparse = f" ({nbytes(self.pruned_nbytes)} as CSR)" if self.zeros else ""
        yield (
            f"Memory: weights {nbytes(self.weight_nbytes)}{sparse}, Jacobians of layers {nbytes(self.jacobian_nbytes)}."
        )


def _named(layers: Sequence[tuple[str, float]]) -> str:
    names = [f"{layer_in_words(name)} ({percent(share)})" for name, share in layers]
    return ", ".join(first_names(names, _CHARACTERS))


def _steps(steps: Sequence[TrainingStep]) -> Any:
    table = new_table("")
    table.show_edge = False
    table.add_column("FLOP of a training step\non one sample", overflow="fold")
    for column in ("forward", "inputs'\ngradients", "weights'\ngradients", "step", "of dense"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in steps:
        counts = (each.forward, each.input_gradient, each.weight_gradient, each.step)
        table.add_row(_NAMES[each.structure], *map(short, map(round, counts)), percent(each.of_dense))
    return table


def summary_of(report: FlopReport) -> FlopSummary:
    """The summary of a report."""
    layers = report.layers
    steps = list[TrainingStep]()
    for structure in _NAMES:
        if structure != "observed" or any("observed_step" in layer for layer in layers):
            sums = [
                sum(layer[f"{structure}_{quantity}"] for layer in layers) for quantity in (*StepFlop._fields, "step")
            ]
            dense = steps[0].step if steps else sums[-1]
            steps.append(TrainingStep(structure, sums[0], sums[1], sums[2], sums[3], sums[3] / dense if dense else 1.0))
    weighted = [(layer["layer"], layer["sparsity"]) for layer in layers if layer["weights"]]
    by_share = sorted(weighted, key=lambda pair: pair[1])
    last = steps[-1]
    shares = [(layer["layer"], layer[f"{last.structure}_step"] / max(1.0, last.step)) for layer in layers]
    largest = sorted((pair for pair in shares if pair[1]), key=lambda pair: -pair[1])[:EXAMPLES]
    parameters, nonzero = (sum(layer[name] for layer in layers) for name in ("parameters", "nonzero"))
    return FlopSummary(
        report.name,
        sum(layer["weights"] for layer in layers),
        sum(layer["zeros"] for layer in layers),
        tuple(steps),
        tuple(by_share[: -EXAMPLES - 1 : -1]),
        tuple(by_share[:EXAMPLES]),
        tuple(largest),
        _scan_costs(report),
        report.counted,
        report.note,
        *_cut_off(report),
        4 * parameters,
        8 * nonzero,
        sum(layer["jacobian_nbytes"] for layer in layers),
        report.warnings,
    )


def shown_warnings(warnings: Sequence[str]) -> list[str]:
    """Lines of warnings, or the one that says that there are none."""
    return [f"Warning: {warning}" for warning in warnings] or ["No warnings."]


def _scan_costs(report: FlopReport) -> ScanCosts | None:
    """What the scan takes; None where the schedule multiplies no matrices."""
    baselines = {each.structure: each.activations for each in report.backpropagation}
    sparse = baselines.get("pruned" if report.structure == "guaranteed" else report.structure)
    if not sparse or not baselines["dense"] or all(step.kind == "mv" for step in report.steps):
        return None
    work, critical = report.total, report.critical_path
    ratios = (work / sparse, critical / sparse, work / baselines["dense"])
    return ScanCosts(report.schedule, work, critical, *ratios, report.pays_from)


def _cut_off(report: FlopReport) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The layers without a weight, and the others whose weights no gradient reaches."""
    empty = [layer["layer"] for layer in report.layers if layer["weights"] and layer["zeros"] == layer["weights"]]
    trained = [layer for layer in report.layers if layer["dense_weight_gradient"]]
    cut = [layer["layer"] for layer in trained if not layer["pruned_weight_gradient"] and layer["layer"] not in empty]
    return tuple(empty), tuple(cut)


def warnings_of(report: FlopReport, brief: bool = False) -> tuple[str, ...]:
    """What is wrong with a network, each with the names of the layers; with `brief`, of the first and how many more."""
    layers = [layer for layer in report.layers if layer["weights"]]

    def named(names: Sequence[str]) -> str:
        return listed(names, first_names(names) if brief else names)

    found = []
    empty, cut = (list(map(layer_in_words, paths)) for paths in _cut_off(report))
    gradients = any(layer["pruned_weight_gradient"] for layer in report.layers)
    parts = [f"no weight is left in {named(empty)}"] if empty else []
    parts += [f"no gradient reaches {named(cut) if gradients else 'any layer'}"] if cut else []
    if parts:
        parts += ["the output does not change with the input"] if report.constant else []
        end = (
            ". Prune fewer weights, or the same share of each layer."
            if empty
            else ": all weights on the way are pruned."
        )
        sentence = "; ".join(parts) + end
        found.append(sentence[0].upper() + sentence[1:])
    pruned = any(layer["zeros"] for layer in layers)
    words = [(layer_in_words(layer["layer"]), layer) for layer in layers]
    dense = [f"{name} ({percent(layer['sparsity'])})" for name, layer in words if layer["sparsity"] <= 0.5]
    if pruned and dense:
        found.append(
            f"At most half is pruned of {named(dense)}: dense kernels may be faster there; jacsparse bench measures."
        )
    unmasked = [f"{name} ({layer['unmasked_zeros']:,})" for name, layer in words if layer["unmasked_zeros"]]
    if unmasked:
        found.append(
            f"Zero weights without a mask are in {named(unmasked)}: a training step fills them; keep them by "
            "torch.nn.utils.prune."
        )
    if report.nan_weights:
        found.append(not_numbers(report.nan_weights, brief))
    return tuple(found)
