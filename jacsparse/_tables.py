"""A FLOP report as tables, as ``print`` and the command line show it, each with a glossary under it."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._flop import FlopReport, FlopStep, LayerFlop

__all__ = ["console", "tables", "text", "totals"]

#: Columns of a line where nobody says how wide it is: in a file or a pipe.
_WIDTH = 160

#: What words and columns mean: of every report, of the steps, the totals, the layers and the choice of a schedule.
_FLOP = {
    "FLOP": "a multiplication or an addition: a multiply-add is 2. Of one sample, backward but for the column forward"
}
_OF_STEPS = {
    "L": "level: its steps do not wait for each other, but for those of the middle",
    "m×k×n": "sizes of the factors",
    "sparse": "share of zeros in the product",
    "FLOP of a step": "2 for each pair of stored entries that meets; a vector stores what a product reaches",
    "run": "FLOP that the scan executes: over the guaranteed structure, with full vectors",
    "*": "on the critical path: the largest step of each level, and every step of the middle",
    "<": "a product of two matrices that is less sparse than both",
    "dead": "in Algorithm 1 as printed: counted here, but in no sum, and not run",
}
_OF_TOTALS = {
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
_OF_LAYERS = {
    "layers": "a training step's products of matrices and convolutions: forward, for inputs (∇x), for weights (∇W)",
    "forward, ∇x, ∇W": "dense, with padding, as PyTorch's FlopCounterMode counts, but each group's gradient once",
    "their sparse": "2 for each entry of the Jacobian: without padding and pruned weights",
    "zero": "share of zeros among the weights that are multiplied by",
    "J": "the Jacobian: its entries, and its size as CSR with float32 values",
}
_OF_CHOICES = {
    "done first": "FLOP until the last step is done, each worker doing one at a time; counted as in the column run",
    "holds": "entries of matrices that the fullest worker holds at once, by the schedule that is done first",
}


def console() -> Any:
    """Where names are printed as they are, and what is no terminal has wide lines."""
    from rich.console import Console

    made = Console(markup=False, emoji=False, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _WIDTH
    return made


def text(report: FlopReport) -> str:
    """The tables of a report without colours, as wide as the terminal."""
    from rich.console import Console

    plain = Console(file=io.StringIO(), width=console().width, markup=False, emoji=False, highlight=False)
    plain.print(report)
    return "\n".join(line.rstrip() for line in plain.file.getvalue().splitlines())  # type: ignore[attr-defined]


def tables(report: FlopReport) -> Iterator[Any]:
    """What a report shows, in order."""
    words = {**_FLOP, **_OF_STEPS, **_OF_TOTALS}
    yield _steps(report)
    yield totals(report)
    yield from _remarks(report)
    if report.choices:
        yield _choices(report)
        words |= _OF_CHOICES
    if report.layers:
        yield _layers(report)
        words |= _OF_LAYERS
    yield _glossary(words)


def _table(title: str) -> Any:
    from rich import box
    from rich.table import Table

    return Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _glossary(words: Mapping[str, str]) -> Any:
    """A line for each word."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for word, meaning in words.items():
        table.add_row(word, meaning, style="dim")
    return table


def _steps(report: FlopReport) -> Any:
    """A line for each step."""
    structure = "guaranteed structure"
    if report.samples:
        structure = f"structure observed on {report.samples} sample{'s' if report.samples > 1 else ''}"
    table = _table(f"{report.name}: {report.schedule}, {structure}")
    for column in ("L", "phase", ""):
        table.add_column(column, no_wrap=True)
    # Where the terminal is narrow, names and sizes are folded, and no count loses its unit.
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
    """Back-propagation and the scan, each counted in the same way."""
    table = _table("FLOP of one sample's backward pass")
    table.add_column("", overflow="fold")
    own = {each.structure: each for each in report.backpropagation}
    for column in ("activations", *(f"/ {name}" for name in own), "input", "weights"):
        table.add_column(column, justify="right", no_wrap=True)

    def row(name: str, activations: float, first: float | None = None, weights: float | None = None) -> None:
        shares = [_ratio(activations / each.activations) if each.activations else "" for each in own.values()]
        others = ["" if flop is None else f"{flop:,.0f}" for flop in (first, weights)]
        table.add_row(name, f"{activations:,.0f}", *shares, *others)

    for each in report.backpropagation:
        row(f"back-propagation, {each.structure}", each.activations, each.input_gradient, each.weights)
    table.add_section()
    live, last = sum(step.live for step in report.steps), report.input_gradient
    counted = own.get("pruned" if report.structure == "guaranteed" else report.structure)
    row(
        f"{report.schedule}, all {live} live steps of {len(report.steps)}",
        report.total,
        None if last is None else last.flop,
        None if counted is None else counted.weights,
    )
    row(f"{report.schedule}, critical path", report.critical_path)
    if report.executed is not None:
        row(f"{report.schedule}, executed", report.executed, None if last is None else last.executed)
    return table


def _remarks(report: FlopReport) -> Iterator[str]:
    """Sentences: the critical path beside the thesis' own baseline, and which products lose sparsity."""
    pruned, unpruned = report.baseline_total, math.fsum(step.unpruned for step in report.baseline if step.live)
    if pruned and unpruned:
        yield (
            f"The thesis' Figure 5.5 counts gradient operators by their Jacobians' entries: {unpruned:,.0f} in the "
            f"unpruned network, of which the critical path is {_ratio(report.critical_path / unpruned)}, and "
            f"{pruned:,.0f} in this one, of which it is {_ratio(report.critical_path / pruned)}."
        )
    lost = [step for step in report.steps if step.live and step.loses_sparsity]
    if lost:
        worst = min(lost, key=lambda step: step.sparsity)
        products = sum(step.live and step.kind == "mm" for step in report.steps)
        yield (
            f"{len(lost)} of {products} products of matrices are less sparse than both factors, the least sparse of "
            f"them {worst.left}·{worst.right}: {worst.sparsity:.4f}."
        )
    yield ""


def _choices(report: FlopReport) -> Any:
    """A line for each number of workers."""
    table = _table("which schedule is done first")
    others = list(dict.fromkeys(("linear", report.schedule)))
    for column in ("workers", *others, "balanced"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("first")
    table.add_column("holds", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for choice in report.choices:
        balanced = choice.times[f"balanced:{choice.workers}"]
        times = [_short(time) for time in (*(choice.times[name] for name in others), balanced)]
        table.add_row(
            str(choice.workers), *times, choice.schedule, _short(choice.space[choice.schedule]), choice.reason
        )
    return table


_SUMMED = (
    *("parameters", "nonzero", "weights", "zeros", "forward", "forward_sparse", "backward", "backward_sparse"),
    *("weight_gradient", "weight_gradient_sparse", "jacobian_nnz", "jacobian_nbytes"),
)


def _layers(report: FlopReport) -> Any:
    """A line for each module with weights, and their sums."""
    table = _table("layers, one sample")
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
    return replace(layers[0], **{name: sum(getattr(layer, name) for layer in layers) for name in _SUMMED})


def _layer_cells(layer: LayerFlop) -> tuple[str, ...]:
    counts = (
        *(layer.forward, layer.forward_sparse),
        *(layer.backward - layer.weight_gradient, layer.backward_sparse - layer.weight_gradient_sparse),
        *(layer.weight_gradient, layer.weight_gradient_sparse, layer.jacobian_nnz),
    )
    return (
        _short(layer.parameters),
        f"{layer.sparsity:.3f}",
        *map(_short, counts),
        f"{layer.jacobian_nbytes / 2**20:.1f}",
    )


def _cells(step: FlopStep) -> tuple[str, ...]:
    mark = "dead" if not step.live else ("*" if step.critical else "") + ("<" if step.loses_sparsity else "")
    return (
        str(step.level),
        step.phase,
        step.kind,
        f"{step.left}·{step.right}",
        f"{step.m}×{step.k}×{step.n}",
        f"{step.sparsity:.4f}",
        _short(step.flop),
        _short(step.executed) if step.live and step.executed is not None else "",
        mark,
    )


def _ratio(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def _short(count: float) -> str:
    """A count in three digits, for a table; files have all of them.

    Examples
    --------
    >>> _short(326_301_528), _short(999_600), _short(4096.0), _short(12.5)
    ('326 M', '1.00 M', '4.10 k', '12.5')
    """
    for scale, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= 0.9995 * scale:
            return f"{count / scale:#.3g}".removesuffix(".") + unit
    return f"{count:g}"
