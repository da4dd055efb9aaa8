"""The tables of a FLOP report, as ``print`` and the command line show them, with a glossary of their words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..terminal import Fitted, glossary, new_table, percent, ratio, short
from .layers import OTHERS
from .summary import shown_warnings, warnings_of

if TYPE_CHECKING:
    from .report import FlopReport, FlopStep

#: The meaning of words of the table of steps, and of totals.
_WORDS = {
    "FLOP": "2 for each pair of stored entries that meets; a vector stores what a product reaches",
    "L": "level: its steps do not wait for each other, except in the middle",
    "product": "J2-3ᵀ: the transposed Jacobian of stages 2 to 3; ∇x2: the gradient by the output of stage 2",
    "stages": "the modules of the first and the last stage of the first factor",
    "m×k×n": "sizes of the factors",
    "sparse": "share of zeros in the product",
    "run": "FLOP that the scan executes: without zeros on any input, with full vectors; diagonals and selections wait "
    "for a vector",
    "*": "on the critical path: the largest step of each level, and every step of the middle",
    "<": "a product of two matrices that is less sparse than both",
    "dead": "in Algorithm 1 as printed: counted here, but in no sum, and not run",
    "activations": "gradients of what passes from stage to stage: without zeros, 2 for each entry of a Jacobian that "
    "meets one of the gradient, also of ReLU and pooling, which the first page counts by elements read and written",
    "input": "the gradient of the network's input, or of a recurrence's first state: one product more",
    "weights": "gradients of the weights, which no schedule changes",
    "dense": "what PyTorch executes: no zero is left out",
    "pruned": "without pruned weights and what is zero on any input; of a recurrence, with each step's Jacobian made",
    "observed": "without what is zero on the given samples, as ReLU's and pooling's zeros; mean of the samples",
    "executed": "sum of the column run",
    "/ dense": "activations, as a multiple of back-propagation's dense ones; the other columns likewise",
}
#: Of the first page.
_LAYER_WORDS = {
    "FLOP": "a multiplication or an addition; a multiply-add is 2",
    "step": "forward and both gradients, without the title's zeros",
    "of dense": "share of what PyTorch executes, with padding and all zeros",
    "zero": "share of zeros among the weights that a layer multiplies by",
    "inputs' gradients": "of what passes between layers, not of the network's input",
    "Jacobian": "entries not always zero; MiB of CSR with its row pointers",
    OTHERS: "a FLOP per element read or written: ReLU, pooling, BatchNorm",
}
#: Of the choice of a schedule.
_CHOICE_WORDS = {
    "done first": "FLOP until the last step is done, each worker doing one at a time; of full vectors",
    "holds": "entries of matrices that the fullest worker holds at once, by the schedule that is done first",
}
#: The columns of the table of layers.
_LAYER_COLUMNS = (
    "layer", "weights", "zero", "step", "of dense", "forward", "inputs'\ngradients", "weights'\ngradients",
    "Jacobian\nentries", "Jacobian\nMiB", "dense\nstep",
)  # fmt: skip
#: Columns by which layers can be sorted.
SORTS = {"layer": "layer", "weights": "weights", "zero": "sparsity", "step": "", "jacobian": "jacobian_nnz"}


@dataclass(frozen=True)
class Page:
    """A report as it is shown: its first page and, if asked for, the steps of the schedule.

    Attributes
    ----------
    report : FlopReport
        What is shown.
    steps : bool
        Whether the schedule's steps and totals follow.
    explain : bool
        Whether all words are explained, and not only those of the tables, and warnings name all layers.
    sort : str or None
        A name in `SORTS` by which layers are sorted; None for the network's order.
    top : int or None
        How many layers are shown; None for all.
    """

    report: FlopReport
    steps: bool = False
    explain: bool = False
    sort: str | None = None
    top: int | None = None

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        report = self.report
        yield from report.summary().figures()
        warnings = warnings_of(report, brief=not self.explain)
        yield from shown_warnings(warnings)
        words = dict[str, str]()
        if warnings != report.warnings:
            words["and ... more"] = "--explain names all layers in warnings, as do report.warnings and JSON"
        if report.layers:
            yield ""
            yield _layers(report, self.sort, self.top)
            names = {layer["layer"] for layer in report.layers}
            words |= {word: each for word, each in _LAYER_WORDS.items() if word != OTHERS or OTHERS in names}
        if report.choices:
            yield _choices(report)
            words |= _CHOICE_WORDS
        if self.steps:
            yield _steps(report)
            yield totals(report)
            yield from _remarks(report)
            words |= {word: each for word, each in _WORDS.items() if word not in words}
        if self.explain:
            words = _LAYER_WORDS | _CHOICE_WORDS | _WORDS | words
        yield glossary(words)


def structure_name(report: FlopReport) -> str:
    """The structure that a report counts, in words."""
    if not report.samples:
        return "guaranteed structure"
    return f"structure observed on {report.samples} sample{'s' if report.samples > 1 else ''}"


def _steps(report: FlopReport) -> Any:
    """A table with a line for each step."""
    steps = [*report.steps, *([] if report.input_gradient is None else [report.input_gradient])]
    stages = [each.stage or each.operator for each in reversed(report.baseline)]
    return Fitted(
        f"{report.name}: {report.schedule}, {structure_name(report)}",
        ("L", "phase", "", "product", "FLOP", "run", "sparse", "", "m×k×n", "stages"),
        [_cells(step, stages) for step in steps],
        keys=4,
        left=frozenset([0, 1, 2, 3, 7, 9]),
        sections=frozenset([len(report.steps) - 1]),
        faint=frozenset(number for number, step in enumerate(steps) if not step.live),
    )


def totals(report: FlopReport) -> Any:
    """A table of the FLOP of back-propagation and of the scan, counted in the same ways."""
    baselines, rows = {each.structure: each for each in report.backpropagation}, list[tuple[str, ...]]()

    def row(name: str, activations: float, input_gradient: float | None, weights: float | None) -> None:
        shares = [ratio(activations / each.activations) if each.activations else "" for each in baselines.values()]
        others = ["" if flop is None else f"{flop:,.0f}" for flop in (input_gradient, weights)]
        rows.append((name, f"{activations:,.0f}", *shares, *others))

    for structure, each in baselines.items():
        row(f"back-propagation, {structure}", each.activations, each.input_gradient, each.weights)
    live, last = sum(step.live for step in report.steps), report.input_gradient
    baseline = baselines.get("pruned" if report.structure == "guaranteed" else report.structure)
    row(
        f"{report.schedule}, {live} live steps",
        report.total,
        None if last is None else last.flop,
        None if baseline is None else baseline.weights,
    )
    row(f"{report.schedule}, critical path", report.critical_path, None, None)
    if report.executed is not None:
        row(f"{report.schedule}, executed", report.executed, None if last is None else last.executed, None)
    return Fitted(
        "FLOP of one sample's backward pass",
        ("", "activations", *(f"/ {name}" for name in baselines), "input", "weights"),
        rows,
        sections=frozenset([len(baselines) - 1]),
    )


def _remarks(report: FlopReport) -> Iterator[str]:
    """Sentences on the critical path and the thesis' own baseline, and on products that lose sparsity."""
    pruned, unpruned = report.baseline_total, math.fsum(step.unpruned for step in report.baseline if step.live)
    if pruned and unpruned:
        yield (
            f"The thesis' Figure 5.5 counts gradient operators by their Jacobians' entries: {unpruned:,.0f} in the "
            f"unpruned network and {pruned:,.0f} in this one. The critical path takes "
            f"{ratio(report.critical_path / unpruned)} and {ratio(report.critical_path / pruned)} times as many."
        )
    activations = {each.structure: each.activations for each in report.backpropagation}
    if activations.get("pruned", 0.0) > activations.get("dense", math.inf):
        yield (
            "Gradients of activations take more FLOP pruned than dense: the pruned count has 2 for each entry of "
            "a Jacobian of pooling or ReLU, and the dense one 1 for each element that they read or write."
        )
    if report.executed is not None and report.executed < report.total:
        yield (
            f"As it runs, the scan takes {report.executed:,.0f} FLOP in place of {report.total:,.0f}: diagonals and "
            "selections wait for a vector, so that matrices are not multiplied by them."
        )
    denser = [step for step in report.steps if step.live and step.loses_sparsity]
    if denser:
        worst = min(denser, key=lambda step: step.sparsity)
        products = sum(step.live and step.kind == "mm" for step in report.steps)
        yield (
            f"{len(denser)} of {products} products of matrices are less sparse than both factors, the least sparse of "
            f"them {worst.left}·{worst.right}: {worst.sparsity:.4f}."
        )
    yield ""


def _choices(report: FlopReport) -> Any:
    """A table with a line for each number of workers."""
    table = new_table("which schedule is done first")
    names = list(dict.fromkeys(("linear", report.schedule)))
    for column in ("workers", *names, "balanced"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("first")
    table.add_column("holds", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for choice in report.choices:
        times = [short(choice.times[name]) for name in (*names, f"balanced:{choice.workers}")]
        space = short(choice.space[choice.schedule])
        table.add_row(str(choice.workers), *times, choice.schedule, space, choice.reason)
    return table


def _layers(report: FlopReport, sort: str | None, top: int | None) -> Any:
    """A table with a line for each layer, one for other operators, and one for their sum."""
    last = "observed" if "observed_step" in report.layers[0] else "pruned"
    layers = list(report.layers)
    if sort is not None:
        column = SORTS[sort] or f"{last}_step"
        layers.sort(key=lambda layer: layer[column], reverse=column != "layer")
    shown = layers[:top]
    numbers = [column for column in layers[0] if column not in ("layer", "sparsity")]
    total = {column: sum(layer[column] for layer in layers) for column in numbers}
    total |= {"layer": "all", "sparsity": total["zeros"] / total["weights"] if total["weights"] else 0.0}
    left_out = f", {len(shown)} of {len(layers)}" if len(shown) < len(layers) else ""
    zeros = "pruned weights" if last == "pruned" else "pruned weights and the data's zeros"
    return Fitted(
        f"Layers{left_out}: FLOP of a training step without {zeros}",
        _LAYER_COLUMNS,
        [_layer_cells(layer, last) for layer in [*shown, total]],
        sections=frozenset([len(shown) - 1]),
    )


@dataclass(frozen=True)
class SideBySide:
    """Two reports of one model with other weights, layer by layer.

    Attributes
    ----------
    before, after : FlopReport
        The reports; `after` has the layers of `before`.
    names : tuple of str
        What the two are called.
    """

    before: FlopReport
    after: FlopReport
    names: tuple[str, str]

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        steps = [report.summary().steps[-1] for report in (self.before, self.after)]
        zeros = [report.summary().sparsity for report in (self.before, self.after)]
        yield f"A is {self.names[0]}, B is {self.names[1]}."
        yield (
            f"B's training step takes {_share(steps[1].step, steps[0].step)} of A's FLOP without zeros: "
            f"{short(round(steps[1].step))} in place of {short(round(steps[0].step))}, with {percent(zeros[1])} of the "
            f"weights zero in place of {percent(zeros[0])}."
        )
        warnings = zip(warnings_of(self.after, brief=True), self.after.warnings, strict=True)
        yield from (f"Warning: {brief}" for brief, whole in warnings if whole not in self.before.warnings)
        column = f"{steps[1].structure}_step"
        pairs = list(zip(self.before.layers, self.after.layers, strict=True))
        rows = [
            (a["layer"], *(percent(each["sparsity"]) if each["weights"] else "" for each in (a, b)),
             *(short(round(each[column])) for each in (a, b)), _share(b[column], a[column]))
            for a, b in pairs
        ]  # fmt: skip
        total = ("all", *map(percent, zeros), *(short(round(step.step)) for step in steps))
        yield Fitted(
            "Layers: FLOP of a training step without zeros",
            ("layer", "zero, A", "zero, B", "step, A", "step, B", "B / A"),
            [*rows, (*total, _share(steps[1].step, steps[0].step))],
            sections=frozenset([len(rows) - 1]),
        )


def _share(part: float, whole: float) -> str:
    return percent(part / whole) if whole else ""


def _layer_cells(layer: Mapping[str, Any], structure: str) -> tuple[str, ...]:
    dense = layer["dense_step"]
    return (
        layer["layer"],
        short(layer["weights"]) if layer["weights"] else "",
        percent(layer["sparsity"]) if layer["weights"] else "",
        short(round(layer[f"{structure}_step"])),
        percent(layer[f"{structure}_step"] / dense) if dense else "",
        *(short(round(layer[f"{structure}_{name}"])) for name in ("forward", "input_gradient", "weight_gradient")),
        *((short(layer["jacobian_nnz"]), f"{layer['jacobian_nbytes'] / 2**20:.1f}") if layer["weights"] else ("", "")),
        short(round(dense)),
    )


def _cells(step: FlopStep, stages: Sequence[str]) -> tuple[str, ...]:
    mark = "dead" if not step.live else ("*" if step.critical else "") + ("<" if step.loses_sparsity else "")
    spanned = [stages[int(number) - 1] for number in re.findall(r"[0-9]+", step.left)]
    return (
        str(step.level),
        step.phase,
        step.kind,
        f"{step.left}·{step.right}",
        short(round(step.flop)),
        short(step.executed) if step.live and step.executed is not None else "",
        f"{step.sparsity:.4f}",
        mark,
        f"{step.m}×{step.k}×{step.n}",
        " to ".join(spanned) + (", couples samples" if step.couples else ""),
    )
