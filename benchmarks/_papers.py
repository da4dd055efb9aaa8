"""The papers, item by item: what each prints, and which row of which experiment stands beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ._experiment import Row
from ._results import Result
from ._text import amount, ratio_text

__all__ = ["ITEMS", "PAPERS", "Figure", "Item", "experiments_of", "item_cells", "shown_figure"]

PAPERS = {
    "thesis": "Wang (2020): back-propagation by parallel scan (BPPSA), the thesis and its poster",
    "naumov": "Naumov (2017): parallel complexity of forward and backward propagation",
    "leapfrogging": "Saraiya (2018): leapfrogging for parallelism in deep neural networks",
    "ddg": "Huo et al. (2018): decoupled parallel backpropagation (delayed gradients, DDG)",
}

#: How an item is shown here: as the paper has it; with less data, fewer steps or on another device; not at all.
State = Literal["whole", "in small", "not here"]


@dataclass(frozen=True)
class Figure:
    """Where a figure stands among an experiment's rows; of several rows, the largest or the smallest is taken."""

    experiment: str
    #: What the row's group and its label begin with.
    group: str = ""
    label: str = ""
    #: The comparison whose ratio is the figure, or the entry of the row's data; without both, it is the row's median.
    comparison: str = ""
    entry: str = ""
    #: What the row's data hold, each with its value.
    data: Mapping[str, Any] = field(default_factory=dict)
    smallest: bool = False
    #: What the figure is multiplied by, so that it has the unit of the paper's.
    times: float = 1.0

    def of(self, rows: Iterable[Row]) -> tuple[Row, float] | None:
        """The row and its figure; None where there is none."""
        found = [
            (row, self.times * value)
            for row in rows
            if row.group.startswith(self.group)
            and row.label.startswith(self.label)
            and all(row.data.get(name) == value for name, value in self.data.items())
            and (value := self._value(row)) is not None
        ]
        pick = min if self.smallest else max
        return pick(found, key=lambda pair: pair[1], default=None)

    def _value(self, row: Row) -> float | None:
        if self.entry:
            return row.data.get(self.entry)
        if not self.comparison:
            return row.median
        return next((each.ratio for each in row.comparisons if each.text == self.comparison), None)


@dataclass(frozen=True)
class Item:
    """An algorithm, equation, table or figure of a paper, with one of its published values."""

    paper: str
    #: Where it stands in the paper.
    place: str
    #: What the value is of.
    what: str
    #: As printed, with its device where it is a time.
    published: str
    figure: Figure
    #: The printed value as a number, where there is one to divide by.
    value: float | None = None
    unit: str = ""
    state: State = "whole"
    #: What differs from the paper, or why it is not here.
    why: str = ""

    @property
    def command(self) -> str:
        """The command that makes the figure."""
        return f"python -m benchmarks run {self.figure.experiment}"


_GPU = "a CPU of two cores for the paper's GPUs"
_DIGITS = "scikit-learn's digits for CIFAR-10"

ITEMS: tuple[Item, ...] = (
    # The thesis and its poster.
    Item(
        "thesis", "section 2.2", "GPipe: activations that a worker holds, over n/p + p", "Θ(n/p + p)",
        Figure("simulation", "Sections 2.2 and 3.6", "gpipe", "counted / (n/p + p)"), 1.0,
    ),
    Item(
        "thesis", "section 3.3", "VGG-11's first convolution, its Jacobian as a full matrix", "768 MB (MiB)",
        Figure("jacobian_generation", "convolution", "memory of the full matrix"), 768.0, "MiB",
    ),
    Item(
        "thesis", "section 3.3", "the same in CSR, values alone", "6.5 MB (MiB)",
        Figure("jacobian_generation", "convolution", "memory of the values"), 6.5, "MiB",
    ),
    *(
        Item(
            "thesis", f"Table 3.1, {name}", "sparsity of guaranteed zeros", f"{sparsity}",
            Figure("jacobian_generation", group, "sparsity"), sparsity,
        )
        for name, group, sparsity in (
            ("convolution", "convolution", 0.99157), ("ReLU", "ReLU", 0.99998), ("max-pooling", "max-pooling", 0.99994),
        )
    ),
    *(
        Item(
            "thesis", f"Table 3.1, {name}", "times as fast as autograd, column by column", f"{speed:,.0f}, on a CPU",
            Figure("jacobian_generation", group, "values, kernel alone", "stacked / kernel"), speed,
            why="values alone: the pattern is made once",
        )
        for name, group, speed in (
            ("convolution", "convolution", 8.3e3), ("ReLU", "ReLU", 1.2e6), ("max-pooling", "max-pooling", 1.5e5),
        )
    ),
    Item(
        "thesis", "Algorithms 2 to 4", "our Jacobian, pattern included: times as fast as the printed algorithms",
        "no value",
        Figure("jacobian_generation", "convolution", "pattern and values", "Algorithms 2 to 4 / from nothing"),
        why="the printed algorithms in NumPy, with their misprints mended",
    ),
    Item(
        "thesis", "Algorithm 1, Figure 3.4", "LeNet-5 by scan: largest difference of the losses, float64",
        "curves overlap",
        Figure("lenet_convergence", "float64", "largest difference of the losses, scan"), None, "", "in small", _DIGITS,
    ),
    Item(
        "thesis", "Figure 3.4", "the same in float32", "curves overlap",
        Figure("lenet_convergence", "float32", "largest difference of the losses, scan"),
        None, "", "in small", f"{_DIGITS}; another order of the samples alone moves losses as far, by rounding",
    ),
    Item(
        "thesis", "equation 3.3", "steps of a scan of 4,096 stages on as many workers, over log2 n", "Θ(log n)",
        Figure("simulation", "Section 3.6", "blelloch, n = 4,096", times=1 / 12),
    ),
    Item(
        "thesis", "equation 3.4", "steps of all workers, over n", "Θ(n)",
        Figure("simulation", "Section 3.6", "blelloch, n = 4,096", "all steps / n"),
    ),
    Item(
        "thesis", "section 3.6", "Jacobians that a worker of a scan holds, over max(n/p, 1)", "Θ(max(n/p, 1))",
        Figure("simulation", "Sections 2.2 and 3.6", "blelloch", "held / max(n/p, 1)"), 1.0,
        why="the largest of 1 to 4,096 workers",
    ),
    Item(
        "thesis", "Figure 5.1", "RNN, T = 1,000, B = 16: an iteration, times as fast as by torch.nn", "2.17, RTX 2070",
        Figure("recurrent_convergence", "RNN", "iteration by jacsparse",
               "back-propagation / jacsparse, linear: step after step"),
        2.17, "", "in small", f"fewer iterations, {_GPU}; step after step, no scan",
    ),
    *(
        Item(
            "thesis", "Figure 5.2", f"RNN: backward pass by {name}, loss on {loss}, times as fast as torch.nn's",
            "at most 8.8, RTX 2080 Ti",
            Figure("rnn_sensitivity", "RNN", label, f"torch.nn / {layer}"),
            8.8, "", "in small", _GPU,
        )
        for loss, label in (("the last state", "backward pass, loss on the last state"),
                            ("every step", "backward pass, loss on every step"))
        for name, layer in (("a scan over chunks", "jacsparse chunked"), ("a scan over steps", "jacsparse blelloch"),
                            ("auto: step after step", "jacsparse"))
    ),
    Item(
        "thesis", "Figure 5.2", "RNN: training step, times as fast as torch.nn's", "at most 2.75, RTX 2080 Ti",
        Figure("rnn_sensitivity", "RNN", "training step", "torch.nn / jacsparse"), 2.75, "", "in small",
        f"{_GPU}; step after step, no scan",
    ),
    Item(
        "thesis", "Figure 5.3", "GRU on instruments: largest difference of the losses", "curves of one shape",
        Figure("recurrent_convergence", "GRU", "largest difference of the losses, jacsparse"), None, "", "in small",
        "made-up tones for IRMAS, fewer iterations; step after step, no scan",
    ),
    *(
        Item(
            "thesis", "Figure 5.4", f"GRU: backward pass by {name}, times as fast as torch.nn's",
            "at most 13.45, GPU",
            Figure("gru_breakdown", "set", "backward", f"torch.nn / {layer}"), 13.45, "", "in small", _GPU,
        )
        for name, layer in (("a scan over chunks", "jacsparse chunked"), ("a scan over steps", "jacsparse blelloch"),
                            ("auto: step after step", "jacsparse"))
    ),
    Item(
        "thesis", "Figure 5.4", "GRU: training step, times as fast as torch.nn's", "at most 2.11, GPU",
        Figure("gru_breakdown", "set", "step", "torch.nn / jacsparse"), 2.11, "", "in small",
        f"{_GPU}; step after step, no scan",
    ),
    Item(
        "thesis", "section 5.3, Figure 5.5", "pruned VGG-11: critical path of the scan over back-propagation, FLOP",
        "similar, by eye; the figure's baseline is the unpruned network's",
        Figure("flop_analysis", "What was counted", "blelloch:2, observed", "critical path / back-propagation"),
        None, "", "in small", f"{_DIGITS} as training data",
    ),
    Item(
        "thesis", "section 4.3", "pruned VGG-11, 97 %: test accuracy after retraining", "88.9 %",
        Figure("flop_analysis", "The network", "test samples right, retrained", times=100), 88.9, "%", "in small",
        _DIGITS,
    ),
    Item(
        "thesis", "poster", "RNN of 16 units: n from which a scan on n workers is faster",
        "C_BPPSA / C_Base < Θ(n / log n)",
        Figure("simulation", "Poster", "16 hidden units"),
    ),
    # Naumov, who has no measurements.
    *(
        Item(
            "naumov", f"section 3.3, {equation}", f"64 layers of 16 units: substitution, times as fast as by {name}",
            "no measurement",
            Figure("triangular_solvers", "64 layers of 16 units, dense, batch 16", name, f"substitution / {name}"),
            why="on two cores, where substitution is the fastest; the others are for more workers than stages",
        )
        for equation, name in (("equation 14", "scan"), ("equations 30 and 31", "cyclic_reduction"))
    ),
    Item(
        "naumov", "equation 13", "approximate forward pass after a step of SGD: largest error after 3 iterations",
        "no measurement", Figure("triangular_solvers", "Approximate forward pass", "3 iterations"),
    ),
    Item(
        "naumov", "section 4", "levels of cyclic reduction of 1,024 stages on as many workers", "⌈log2 n⌉ = 10",
        Figure("simulation", "Section 3.6", "cyclic_reduction, n = 1,024"), 10.0,
    ),
    # Leapfrogging, which has no measurements; its equations take the times of the passes from ours.
    *(
        Item(
            "leapfrogging", place, f"64 layers of 1,024 units, {threads} threads: share of a pass that is saved",
            "(1 - 1/k) f3 / f",
            Figure("leapfrog", "64 layers of 1024 units", f"{label}, k = {threads}", entry="saving"),
            why=why,
        )
        for threads in (2, 64)
        for place, label, why in (
            ("equation 10", "equation 10", "the equation as printed, with measured f3 / f"),
            ("Algorithm 1", "critical path of Algorithm 1",
             "the first thread's k - 1 layers, which equation 10 neglects, count: k = ⌈1/ε⌉ saves less and less"),
        )
    ),
    Item(
        "leapfrogging", "Algorithm 1", "64 layers of 1,024 units, 2 threads: times as fast as on one thread, measured",
        "no measurement",
        Figure("leapfrog", "64 layers of 1024 units", "leapfrog, k = 2", "back-propagation, one thread / leapfrog"),
        why="threads of one process share caches and memory",
    ),
    # Delayed gradients.
    *(
        Item(
            "ddg", f"Table 1, Figure 6, K = {modules}", "iteration, times as fast as back-propagation",
            f"{1 / share:.3g} = 1 / (0.32 + 0.68 / {modules}), Titan X", Figure("ddg_scaling", f"K = {modules}:", label,
            "back-propagation / delayed gradients"), 1 / share, "", "in small", why,
        )
        for modules, share, label, why in (
            (2, 0.32 + 0.68 / 2, "measured", f"ResNet-56; {_GPU}"),
            (3, 0.32 + 0.68 / 3, "simulated", "ResNet-56; simulated from measured modules: two cores run two"),
            (4, 0.32 + 0.68 / 4, "simulated", "ResNet-56; simulated from measured modules: two cores run two"),
        )
    ),
    *(
        Item(
            "ddg", f"Figure {number}", f"ResNet-8, K = {modules}: best accuracy by DDG over back-propagation's", "≈ 1",
            Figure("ddg_convergence", f"ResNet-8, K = {modules}", "delayed gradients", "accuracy / back-propagation's",
                   smallest=True), 1.0, "", "in small", _DIGITS,
        )
        for number, modules in ((3, 2), (4, 3), (4, 4), (4, 5))
    ),
    Item(
        "ddg", "Figures 5 and 7", "ResNet-56, K = 2: an epoch, times as fast as by back-propagation", "curves alone",
        Figure("ddg_convergence", "resnet56, K = 2", "epoch by delayed gradients", "back-propagation / DDG"), None, "",
        "in small", f"{_DIGITS}; ResNet-56 alone",
    ),
    Item(
        "ddg", "Table 3", "ResNet-56, K = 2: best accuracy by DDG over back-propagation's", "93.11 / 93.12 %",
        Figure("ddg_convergence", "resnet56, K = 2", "delayed gradients", "accuracy / back-propagation's"),
        93.11 / 93.12, "", "in small", _DIGITS,
    ),
    *(
        Item(
            "ddg", "Lemma 1", f"least squares, K = {modules}: share of iterations at which its inequality holds", "all",
            Figure("ddg_theory", f"K = {modules}", "Lemma 1", "holds / iterations", smallest=True), 1.0,
            why="means over 400 runs for expectations",
        )
        for modules in (1, 4)
    ),
    *(
        Item(
            "ddg", f"Theorem {number}", f"least squares, K = {modules}: bound over what it bounds", "at least 1",
            Figure("ddg_theory", f"K = {modules}", f"Theorem {number}: bound", "bound / measured"),
            why="loose by M, which is a largest value where means count, and by K⁴ M, as if all delays added up",
        )
        for number in (1, 2)
        for modules in (1, 4)
    ),
    Item(
        "ddg", "Corollary 1", "Σ γ_t² of decreasing steps, T = 10,000, over its limit π² γ_0² / 6", "finite",
        Figure("ddg_theory", "Corollaries", "Σ γ_t² / γ_0², T = 10,000", "sum / (π² / 6)"), 1.0,
    ),
    Item(
        "ddg", "Corollary 2", "mean of squared gradients at an iteration drawn by γ_t, T = 10,000", "0 in the limit",
        Figure("ddg_theory", "Corollaries", "mean of squared gradients at an iteration drawn by γ_t, T = 10,000"),
    ),
)  # fmt: skip


def experiments_of(paper: str) -> list[str]:
    """The experiments that make a paper's figures; ``all`` is every paper.

    Raises
    ------
    ValueError
        Where no paper has that name.
    """
    if paper != "all" and paper not in PAPERS:
        raise ValueError(f"no paper is named {paper!r}; known are {', '.join((*PAPERS, 'all'))}")
    return list(dict.fromkeys(item.figure.experiment for item in ITEMS if paper in ("all", item.paper)))


def shown_figure(item: Item, results: Sequence[Result]) -> tuple[Result, Row, float] | None:
    """An item's figure in the newest of some results that has it, with its row; None where no result has it."""
    for result in sorted(results, key=lambda each: each.date, reverse=True):
        if result.experiment == item.figure.experiment and (found := item.figure.of(result.rows)) is not None:
            return result, *found
    return None


#: The columns of an item's texts.
COLUMNS = ("item", "published", "here", "here / published", "what ran", "how far", "command")


def item_cells(item: Item, results: Sequence[Result]) -> tuple[str, ...]:
    """The texts of an item, one for each of `COLUMNS`."""
    shown, how_far = shown_figure(item, results), f"{item.state}: {item.why}" if item.why else item.state
    place = f"{item.place}: {item.what}"
    if shown is None:
        return place, item.published, "not measured yet", "", "", how_far, f"`{item.command}`"
    result, row, figure = shown
    ratio = "" if item.value is None else ratio_text(figure / item.value)
    unit = item.unit or ("" if item.figure.comparison or item.figure.entry else row.unit)
    machine = f"{result.environment.get('cpu')}, {result.environment.get('cores')} core(s), {result.date[:10]}"
    ran = "; ".join(part for part in (row.group, row.label, str(row.data.get("ran", "")), machine) if part)
    return place, item.published, amount(figure, unit), ratio, ran, how_far, f"`{item.command}`"
