"""The tables of a FLOP report, as ``print`` and the command line show them, with a glossary of their words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..terminal import glossary, new_table, short
from .layer_flop import LayerFlop

if TYPE_CHECKING:
    from .report import FlopReport, FlopStep

#: The meaning of words and columns of every report.
_WORDS = {
    "FLOP": "a multiplication or an addition: a multiply-add is 2. Of one sample, backward but for the column forward",
    "L": "level: its steps do not wait for each other, except in the middle",
    "m×k×n": "sizes of the factors",
    "sparse": "share of zeros in the product",
    "FLOP of a step": "2 for each pair of stored entries that meets; a vector stores what a product reaches",
    "run": "FLOP that the scan executes: over the guaranteed structure, with full vectors",
    "*": "on the critical path: the largest step of each level, and every step of the middle",
    "<": "a product of two matrices that is less sparse than both",
    "dead": "in Algorithm 1 as printed: counted here, but in no sum, and not run",
    "activations": "gradients of what passes from one stage to the next, which schedules find in different orders",
    "input": "the gradient of the network's input, or of a recurrence's first state: one product more",
    "weights": "gradients of the weights, which no schedule changes",
    "dense": "what PyTorch executes: no zero is left out",
    "pruned": "over the guaranteed structure: without pruned weights and what is zero on any input; for a recurrence, "
    "products with each step's Jacobian, once that is made",
    "observed": "without what is zero on the given samples, as ReLU's and pooling's zeros; mean of the samples",
    "executed": "sum of the column run",
    "/ dense": "activations, as a multiple of back-propagation's dense ones; the other columns likewise",
}
#: Of the table of layers.
_LAYER_WORDS = {
    "layers": "a training step's products of matrices and convolutions: forward, for inputs (∇x), for weights (∇W)",
    "forward, ∇x, ∇W": "dense, with padding, as PyTorch's FlopCounterMode counts, but each group's gradient once",
    "their sparse": "2 for each entry of the Jacobian: without padding and pruned weights",
    "zero": "share of zeros among the weights that are multiplied by",
    "J": "the Jacobian: its entries, and its size as CSR with float32 values",
}
#: Of the choice of a schedule.
_CHOICE_WORDS = {
    "done first": "FLOP until the last step is done, each worker doing one at a time; counted as in the column run",
    "holds": "entries of matrices that the fullest worker holds at once, by the schedule that is done first",
}


def tables(report: FlopReport) -> Iterator[Any]:
    """Everything that a report shows, in order."""
    words = _WORDS
    yield _steps(report)
    yield totals(report)
    yield from _remarks(report)
    if report.choices:
        yield _choices(report)
        words = words | _CHOICE_WORDS
    if report.layers:
        yield _layers(report)
        words = words | _LAYER_WORDS
    yield glossary(words)


def structure_name(report: FlopReport) -> str:
    """The structure that a report counts, in words."""
    if not report.samples:
        return "guaranteed structure"
    return f"structure observed on {report.samples} sample{'s' if report.samples > 1 else ''}"


def _steps(report: FlopReport) -> Any:
    """A table with a line for each step."""
    table = new_table(f"{report.name}: {report.schedule}, {structure_name(report)}")
    for column in ("L", "phase", ""):
        table.add_column(column, no_wrap=True)
    # In a narrow terminal names and sizes are folded, so that no count loses its unit.
    table.add_column("product", overflow="fold")
    table.add_column("m×k×n", justify="right", overflow="fold")
    for column in ("sparse", "FLOP", "run", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for step in report.steps:
        table.add_row(*_cells(step), style="dim" if not step.live else "")
    if report.input_gradient is not None:
        table.add_section()
        table.add_row(*_cells(report.input_gradient))
    return table


def totals(report: FlopReport) -> Any:
    """A table of the FLOP of back-propagation and of the scan, counted in the same ways."""
    table = new_table("FLOP of one sample's backward pass")
    table.add_column("", overflow="fold")
    baselines = {each.structure: each for each in report.backpropagation}
    for column in ("activations", *(f"/ {name}" for name in baselines), "input", "weights"):
        table.add_column(column, justify="right", no_wrap=True)

    def row(name: str, activations: float, input_gradient: float | None, weights: float | None) -> None:
        shares = [_ratio(activations / each.activations) if each.activations else "" for each in baselines.values()]
        others = ["" if flop is None else f"{flop:,.0f}" for flop in (input_gradient, weights)]
        table.add_row(name, f"{activations:,.0f}", *shares, *others)

    for structure, each in baselines.items():
        row(f"back-propagation, {structure}", each.activations, each.input_gradient, each.weights)
    table.add_section()
    live, last = sum(step.live for step in report.steps), report.input_gradient
    baseline = baselines.get("pruned" if report.structure == "guaranteed" else report.structure)
    row(
        f"{report.schedule}, all {live} live steps of {len(report.steps)}",
        report.total,
        None if last is None else last.flop,
        None if baseline is None else baseline.weights,
    )
    row(f"{report.schedule}, critical path", report.critical_path, None, None)
    if report.executed is not None:
        row(f"{report.schedule}, executed", report.executed, None if last is None else last.executed, None)
    return table


def _remarks(report: FlopReport) -> Iterator[str]:
    """Sentences on the critical path and the thesis' own baseline, and on products that lose sparsity."""
    pruned, unpruned = report.baseline_total, math.fsum(step.unpruned for step in report.baseline if step.live)
    if pruned and unpruned:
        yield (
            f"The thesis' Figure 5.5 counts gradient operators by their Jacobians' entries: {unpruned:,.0f} in the "
            f"unpruned network, of which the critical path is {_ratio(report.critical_path / unpruned)}, and "
            f"{pruned:,.0f} in this one, of which it is {_ratio(report.critical_path / pruned)}."
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


def _layers(report: FlopReport) -> Any:
    """A table with a line for each module with weights, and one for their sum."""
    table = new_table("layers, one sample")
    table.add_column("layer", overflow="fold")
    for column in ("parameters", "zero", "forward", "sparse", "∇x", "sparse", "∇W", "sparse", "J nnz", "J MiB"):
        table.add_column(column, justify="right", no_wrap=True)
    # A module may run several operators, and each more than once.
    for path in dict.fromkeys(layer.path for layer in report.layers):
        table.add_row(path, *_layer_cells(_sum([layer for layer in report.layers if layer.path == path])))
    table.add_section()
    table.add_row("all", *_layer_cells(_sum(report.layers)))
    return table


def _sum(layers: Sequence[LayerFlop]) -> LayerFlop:
    """The sums of all counts; the path and the operator are those of the first layer."""
    names = [field.name for field in fields(LayerFlop) if field.name not in ("path", "operator")]
    return replace(layers[0], **{name: sum(getattr(layer, name) for layer in layers) for name in names})


def _layer_cells(layer: LayerFlop) -> tuple[str, ...]:
    dense = (layer.forward, layer.backward - layer.weight_gradient, layer.weight_gradient)
    sparse = (layer.forward_sparse, layer.backward_sparse - layer.weight_gradient_sparse, layer.weight_gradient_sparse)
    counts = (*chain(*zip(dense, sparse, strict=True)), layer.jacobian_nnz)
    size = f"{layer.jacobian_nbytes / 2**20:.1f}"
    return short(layer.parameters), f"{layer.sparsity:.3f}", *map(short, counts), size


def _cells(step: FlopStep) -> tuple[str, ...]:
    mark = "dead" if not step.live else ("*" if step.critical else "") + ("<" if step.loses_sparsity else "")
    return (
        str(step.level),
        step.phase,
        step.kind,
        f"{step.left}·{step.right}",
        f"{step.m}×{step.k}×{step.n}",
        f"{step.sparsity:.4f}",
        short(step.flop),
        short(step.executed) if step.live and step.executed is not None else "",
        mark,
    )


def _ratio(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"
