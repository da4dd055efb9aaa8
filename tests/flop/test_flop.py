"""The FLOP report against SciPy, step by step, and its totals by the design's definitions."""

from __future__ import annotations

import csv
import io
import json
import time
import tracemalloc
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from jacsparse.models import MODELS, build, prune_weights
from jacsparse.patterns import Pattern
from rich.console import Console
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

import jacsparse
from jacsparse import FlopReport, count_flop
from jacsparse.flop import CountEstimate, FlopStep, Page, counting, estimate, totals
from jacsparse.flop.network import Network
from jacsparse.flop.report import BackPropagation
from jacsparse.flop.subject import chain_subject
from jacsparse.schedule import Schedule, balanced, blelloch, linear
from jacsparse.terminal import text
from jacsparse.tracing import SAMPLES
from tests.drawn_networks import NETWORKS
from tests.example_models import kaiming, lenet, small, vgg_features


def scipy_matrices(module: nn.Module, shape: tuple[int, ...], x: torch.Tensor | None) -> list[scipy.sparse.csr_array]:
    """The transposed Jacobians' patterns as SciPy matrices of ones: guaranteed, or observed on one sample."""
    chain = jacsparse.chain(module, shape)
    if x is None:
        return [stage.transposed_pattern.to_scipy().astype(np.int64) for stage in chain]
    matrices = []
    # As often as it is counted: a batch of another size is rounded in another way, and ties break there.
    for record in chain.run(x.repeat(SAMPLES, *[1] * (x.ndim - 1))):
        matrix = record.transposed_jacobian(slice(0, 1)).to_scipy()
        if record.stage.name not in ("aten.convolution", "aten.addmm", "aten.native_batch_norm", "aten.avg_pool2d"):
            matrix.eliminate_zeros()
        matrices.append((matrix != 0).astype(np.int64))
    return matrices


def check_against_scipy(report: FlopReport, schedule: Schedule, matrices: list[scipy.sparse.csr_array]) -> None:
    """Every step's shape, FLOP and nnz, by products of matrices of ones: a product's sum is the pairs that meet."""
    n = schedule.n
    values = {n - stage: matrix for stage, matrix in enumerate(matrices)}
    values[0] = scipy.sparse.csr_array(np.ones((matrices[-1].shape[1], 1), dtype=np.int64))
    assert len(report.steps) == len(schedule.products)
    for step, counted in zip(schedule.products, report.steps, strict=True):
        left, right = values[step.left], values[step.right]
        product = left @ right
        assert (counted.m, counted.k, counted.n) == (*left.shape, right.shape[1])
        assert counted.flop == 2 * product.sum() and counted.nnz == product.nnz
        assert (counted.level, counted.phase, counted.kind, counted.live) == (
            step.level,
            step.phase,
            step.kind,
            step.live,
        )
        product.data[:] = 1
        values[step.out] = product
    last = values[n] @ values[schedule.gradients[-1]]
    assert report.input_gradient.flop == 2 * last.sum() and report.input_gradient.nnz == last.nnz


def random_chain(n: int) -> tuple[nn.Module, tuple[int, ...]]:
    """A chain of n stages over 2 × 4 × 4 samples, half of its weights zero."""
    generator = np.random.default_rng(n)
    layers: list[nn.Module] = []
    for _ in range(n):
        kind = generator.integers(4)
        layers.append([nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1), nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1)][kind])
    module = kaiming(nn.Sequential(*layers))
    with torch.no_grad():
        for part in module:
            if isinstance(part, nn.Conv2d):
                part.weight.mul_(torch.rand_like(part.weight) < 0.5)
    return module, (2, 4, 4)


#: The depths around powers of two, and of the networks of the papers; all others are for `make test-full`.
DEPTHS = (*range(1, 10), 15, 16, 17, 21, 31, 33, 40)


@pytest.mark.parametrize("n", [n if n in DEPTHS else pytest.param(n, marks=pytest.mark.full) for n in range(1, 41)])
def test_every_step_equals_scipy(n: int) -> None:
    module, shape = random_chain(n)
    x = torch.randn(1, *shape)
    guaranteed, observed = scipy_matrices(module, shape, None), scipy_matrices(module, shape, x)
    # More levels than there are change nothing.
    schedules = {schedule.steps: schedule for schedule in (linear(n), *(blelloch(n, levels) for levels in range(7)))}
    for schedule in schedules.values():
        check_against_scipy(count_flop(module, shape, schedule=schedule), schedule, guaranteed)
        check_against_scipy(
            count_flop(module, shape, schedule=schedule, structure="observed", inputs=x), schedule, observed
        )


def test_pruned_vgg_11_equals_scipy() -> None:
    module, x = vgg_features(), torch.randn(1, 3, 32, 32)
    schedule = blelloch(21, 2)
    report = count_flop(module, (3, 32, 32), structure="observed", inputs=x)
    assert len(report.steps) == 34 and sum(step.live for step in report.steps) == 33
    check_against_scipy(report, schedule, scipy_matrices(module, (3, 32, 32), x))
    # Figure 5.5: the critical path beside the gradient operators of the unpruned network, and of the pruned one.
    unpruned = sum(step.unpruned for step in report.baseline if step.live)
    assert 0.2 < report.critical_path / unpruned < 0.27 and 6.5 < report.critical_path / report.baseline_total < 8.5
    # Published (section 5.3): the guaranteed structure costs several times as much.
    assert 4 < count_flop(module, (3, 32, 32)).total / report.total < 12


def test_counts_are_averaged_over_samples() -> None:
    module, x = small(), torch.randn(3, 2, 9, 9)
    reports = [count_flop(module, (2, 9, 9), structure="observed", inputs=sample[None]) for sample in x]
    together = count_flop(module, (2, 9, 9), structure="observed", inputs=x)
    assert together.samples == 3 and together.structure == "observed"
    for number, step in enumerate(together.steps):
        assert step.flop == pytest.approx(np.mean([report.steps[number].flop for report in reports]), rel=1e-12)
        assert step.nnz == pytest.approx(np.mean([report.steps[number].nnz for report in reports]), rel=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "blelloch", "blelloch:1", "blelloch:2"])
def test_critical_path_and_totals(schedule: str) -> None:
    report = count_flop(lenet(), (3, 32, 32), schedule=schedule)
    levels = defaultdict(list)
    for step in report.steps:
        if step.live:
            levels[step.level, step.phase].append(step.flop)
    expected = sum(sum(flops) if phase == "middle" else max(flops) for (_, phase), flops in levels.items())
    assert report.critical_path == expected
    assert report.total == sum(step.flop for step in report.steps if step.live)
    assert not any(step.critical and not step.live for step in report.steps)


def test_baseline_counts_gradient_operators() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    report = count_flop(module, (1, 6, 6))
    results = {step.stage: (step.flop, step.m, step.n, step.live) for step in report.baseline}
    assert results == {
        "4": (2 * 8 * 3, 8, 3, True),
        "2": (32 + 8, 32, 8, True),
        "1": (32 + 32, 32, 32, True),
        "0": (2 * 16 * 9 * 2, 36, 32, False),
    }
    assert report.baseline_total == 2 * 8 * 3 + 40 + 64
    x = torch.randn(1, 1, 6, 6)
    observed = count_flop(module, (1, 6, 6), structure="observed", inputs=x)
    active = int((module[1](module[0](x)) > 0).sum())
    assert [step.flop for step in observed.baseline][1:3] == [40, 32 + active]


def test_baseline_of_the_unpruned_network() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    dense = count_flop(module, (1, 4, 4))
    prune.l1_unstructured(module[0], "weight", 0.5)
    prune.l1_unstructured(module[3], "weight", 0.5)
    pruned = count_flop(module, (1, 4, 4))
    assert [step.unpruned for step in pruned.baseline] == [step.flop for step in dense.baseline]
    assert [step.unpruned for step in dense.baseline] == [step.flop for step in dense.baseline]
    assert pruned.baseline_total == 2 * 48 + 64 and dense.baseline_total == 2 * 96 + 64


def rows_of(report: FlopReport) -> dict[str, BackPropagation]:
    return {each.structure: each for each in report.backpropagation}


SUBJECTS = {
    "lenet": (lenet, (3, 32, 32)),
    "small": (small, (2, 9, 9)),
    "chain": (lambda: random_chain(9)[0], (2, 4, 4)),
    "resnet8": (lambda: build("resnet8").eval(), (3, 32, 32)),
    "GRU": (lambda: pruned_layer(nn.GRU), (7, 3)),
    "RNN": (lambda: pruned_layer(nn.RNN, nonlinearity="relu"), (7, 3)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), (5, 8)),
    "flatten": (nn.Flatten, (3, 4)),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_linear_is_back_propagation(name: str) -> None:
    """Whatever is counted, a row of back-propagation and the schedule that is back-propagation are one number."""
    make, shape = SUBJECTS[name]
    module, x = make(), torch.randn(2, *shape)
    for structure, inputs, row in (("guaranteed", None, "pruned"), ("observed", x, "observed")):
        report = count_flop(module, shape, schedule="linear", structure=structure, inputs=inputs)
        actual = rows_of(report)
        assert list(actual) == ["dense", "pruned", "observed"][: 2 if inputs is None else 3]
        assert actual[row].activations == report.total == report.critical_path
        assert actual[row].input_gradient == (report.input_gradient.flop if report.input_gradient else 0)
    assert actual["observed"].activations <= actual["pruned"].activations


def test_dense_back_propagation_is_what_pytorch_executes() -> None:
    module = lenet()
    with FlopCounterMode(display=False) as forward:
        y = module(torch.randn(1, 3, 32, 32))
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    dense = rows_of(count_flop(module, (3, 32, 32)))["dense"]
    # The others read the gradient of what they gave, and write that of what they were given.
    sizes = ((4704, 4704), (4704, 1176), (1600, 1600), (1600, 400), (120, 120), (84, 84))
    assert dense.activations + dense.weights == backward.get_total_flops() + sum(map(sum, sizes))
    assert forward.get_total_flops() == dense.weights
    # Of the first convolution, whose input's gradient costs what its weights' does.
    assert dense.input_gradient == 2 * 4704 * 75


def test_gradients_of_weights_are_counted_where_gradient_and_input_meet() -> None:
    module = kaiming(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3, padding=1)))
    for layer in (module[0], module[2]):
        prune.l1_unstructured(layer, "weight", 0.5)
    x = torch.randn(1, 2, 6, 6) * (torch.rand(1, 2, 6, 6) < 0.5)
    actual = rows_of(count_flop(module, (2, 6, 6), structure="observed", inputs=x))

    def pairs(layer: nn.Conv2d, gradient: torch.Tensor, image: torch.Tensor) -> int:
        """Entries of the Jacobian, one by one, at elements of the gradient and of the input."""
        jacobian = torch.autograd.functional.jacobian(layer, image)[0, :, :, :, 0].flatten(3).flatten(0, 2)
        return int(((jacobian != 0) & gradient.flatten()[:, None] & (image != 0).flatten()).sum())

    y = module[1](module[0](x))
    last = pairs(module[2], torch.ones(72, dtype=torch.bool), y)
    ones = torch.ones(1, 2, 6, 6)
    reached = nn.functional.conv_transpose2d(ones, (module[2].weight != 0).float(), padding=1) > 0
    first = pairs(module[0], reached & (y > 0), x)
    assert actual["observed"].weights == 2 * (first + last)
    nnz = sum(jacsparse.jacobian_pattern(layer, (layer.in_channels, 6, 6)).nnz for layer in (module[0], module[2]))
    assert 2 * nnz >= actual["pruned"].weights > actual["observed"].weights
    assert actual["dense"].weights == 2 * (108 * 18 + 72 * 27)
    module[0].requires_grad_(False)
    frozen = rows_of(count_flop(module, (2, 6, 6), structure="observed", inputs=x))
    assert frozen["observed"].weights == 2 * last and frozen["dense"].weights == 2 * 72 * 27


def test_weights_of_recurrent_layers_are_not_observed() -> None:
    layer = pruned_layer(nn.GRU)
    actual = rows_of(count_flop(layer, (7, 3), structure="observed", inputs=torch.randn(2, 7, 3)))
    nonzero = int(layer.weight_hh_l0.count_nonzero()) + layer.weight_ih_l0.numel()
    assert actual["pruned"].weights == 2 * 7 * nonzero and actual["observed"].weights is None
    assert actual["dense"].weights == 2 * 7 * (layer.weight_hh_l0.numel() + layer.weight_ih_l0.numel())
    assert actual["dense"].activations == 2 * 6 * layer.weight_hh_l0.numel()


def test_a_report_prints_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a file: pytest's workers have a width of their own.
    monkeypatch.delenv("COLUMNS", raising=False)
    x = torch.randn(2, 3, 32, 32)
    report = count_flop(lenet(), (3, 32, 32), structure="observed", inputs=x, executed=True, workers=[2])
    shown = text(Page(report, steps=True, explain=True))
    words = " ".join(shown.split())
    assert "Sequential: blelloch:2, structure observed on 2 samples" in words and "\x1b" not in shown
    for row in report.backpropagation:
        assert f"back-propagation, {row.structure} {row.activations:,.0f} " in words
    assert f"blelloch:2, critical path {report.critical_path:,.0f} " in words
    assert f"blelloch:2, executed {report.executed:,.0f} " in words
    unpruned = sum(step.unpruned for step in report.baseline if step.live)
    assert f"{unpruned:,.0f} in the unpruned network and" in words
    assert f"The critical path takes {report.critical_path / unpruned:.3g} and" in words
    for word in ("a multiply-add is 2", "which schedule is done first", "FLOP of a training step", "∇x2"):
        assert word in words
    assert not any(line != line.rstrip() or len(line) > 160 for line in shown.splitlines())
    assert repr(report).startswith("<FlopReport of Sequential: blelloch:2, observed structure, 15 live steps, ")
    assert report._repr_html_().startswith("<pre>Sequential: none of 61,770 weights is zero.")
    plain = count_flop(nn.Flatten(), (3, 4))
    assert "nothing to prune" in str(plain) and "0 live steps" in text(Page(plain, steps=True))


def test_no_share_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    one = count_flop(nn.Linear(3, 2), (3,))
    assert "back-propagation, dense 0 12 12" in " ".join(text(Page(one, steps=True)).split())
    assert one.executed == 0 and count_flop(lenet(), (3, 32, 32), executed=False).executed is None


def test_the_figure_has_all_steps_and_both_baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr("jacsparse.flop.figure.save_figure", lambda figure, _: drawn.append(figure))
    x = torch.randn(1, 3, 32, 32)
    count_flop(vgg_features(), (3, 32, 32), structure="observed", inputs=x).plot("f.png")
    points = {dots.get_label(): len(dots.get_offsets()) for dots in drawn[0].axes[0].collections}
    assert sum(count for label, count in points.items() if label.startswith("scan")) == 34
    assert points["scan, matrix × matrix, dead: counted, not run"] == 1
    gradient_operators = [count for label, count in points.items() if "gradient operators" in label]
    assert gradient_operators == [21, 21] and "33 live steps of 34, 21 operators" in drawn[0].axes[0].get_title()
    names = list(drawn[0].axes[0].texts)
    assert {"0", "3", "6", "8", "11"} <= {each.get_text() for each in names}
    assert any("ᵀ·" in each.get_text() for each in names)
    boxes = [each.get_window_extent() for each in names]
    assert not any(box.overlaps(other) for place, box in enumerate(boxes) for other in boxes[:place])


def test_a_summary_has_its_warnings() -> None:
    model = lenet()
    assert text(count_flop(model, (3, 32, 32)).summary()).endswith("No warnings.")
    with torch.no_grad():
        next(part for part in model.modules() if isinstance(part, nn.Linear)).weight.zero_()
    report = count_flop(model, (3, 32, 32))
    shown = " ".join(text(report.summary()).split())
    assert (
        "see the warning" in shown and report.warnings and all(f"Warning: {each}" in shown for each in report.warnings)
    )
    assert report.to_dict()["summary"]["warnings"] == report.warnings


def test_executed_work() -> None:
    """The scan multiplies over the guaranteed structure and full vectors, but light matrices by vectors alone."""
    module, x = small(), torch.randn(2, 2, 9, 9)
    guaranteed = count_flop(module, (2, 9, 9), schedule="blelloch")
    observed = count_flop(module, (2, 9, 9), schedule="blelloch", structure="observed", inputs=x, executed=True)
    plain = count_flop(module, (2, 9, 9), schedule="blelloch", structure="observed", inputs=x)
    for sure, seen, unasked in zip(guaranteed.steps, observed.steps, plain.steps, strict=True):
        assert sure.executed == seen.executed and unasked.executed is None
        assert sure.executed == 0 if not sure.live else sure.kind == "mv" or sure.executed <= sure.flop
    plans = jacsparse.nn.Scan(module, schedule="blelloch").scanner((2, 9, 9)).plans
    live = [step.executed for step in guaranteed.steps if step.kind == "mm" and step.live]
    assert 0 in live and sum(live) == sum(plan.flop for plan in plans.values())


def test_reports_are_written(tmp_path: Path) -> None:
    report = count_flop(lenet(), (3, 32, 32))
    report.save_json(tmp_path / "r.json")
    loaded = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert loaded["total"] == report.total and len(loaded["steps"]) == len(report.steps)
    assert loaded["structure"] == "guaranteed"
    report.save_csv(tmp_path / "r.csv")
    rows = list(csv.DictReader((tmp_path / "r.csv").open(encoding="utf-8")))
    assert len(rows) == len(report.steps) + 1 and rows[-1]["phase"] == "input"
    assert float(rows[0]["flop"]) == report.steps[0].flop
    report.plot(tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_short_chains() -> None:
    assert count_flop(nn.Flatten(), (3, 4)).steps == ()
    one = count_flop(nn.Linear(3, 2), (3,))
    assert one.steps == () and one.input_gradient.flop == 12 and one.total == one.critical_path == 0
    balanced_report = count_flop(lenet(), (3, 32, 32), schedule=balanced(jacsparse.chain(lenet(), (3, 32, 32)), 2))
    assert balanced_report.total > 0


def test_bad_arguments() -> None:
    module = lenet()
    with pytest.raises(ValueError, match="structure is 'real'"):
        count_flop(module, (3, 32, 32), structure="real")
    with pytest.raises(ValueError, match="structure='observed' needs inputs"):
        count_flop(module, (3, 32, 32), structure="observed")
    with pytest.raises(ValueError, match="pass structure='observed'"):
        count_flop(module, (3, 32, 32), inputs=torch.zeros(1, 3, 32, 32))
    with pytest.raises(ValueError, match="inputs is an empty batch"):
        count_flop(module, (3, 32, 32), structure="observed", inputs=torch.zeros(0, 3, 32, 32))
    with pytest.raises(ValueError, match=r"inputs has shape \(1, 1, 32, 32\); expected \(batch, 3, 32, 32\)"):
        count_flop(module, (3, 32, 32), structure="observed", inputs=torch.zeros(1, 1, 32, 32))
    with pytest.raises(ValueError, match=r"^1: an input of shape \(3,\) does not fit CosineSim.*missing 1 required"):
        count_flop(nn.Sequential(nn.ReLU(), nn.CosineSimilarity()), (3,))


# Layers: what each costs, dense and pruned.


RECURRENT = {"bitstream": (1, 50), "irmas": (38, 30)}


@pytest.mark.parametrize("name", [*sorted(MODELS.keys() - RECURRENT.keys()), "squeezenet", "densenet121"])
def test_dense_totals_equal_pytorchs_counter(name: str) -> None:
    model = (NETWORKS[name][0]() if name in NETWORKS else build(name)).eval()
    x = torch.randn(1, 3, 32, 32)
    with FlopCounterMode(display=False) as forward:
        y = model(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    layers = count_flop(model, (3, 32, 32), schedule="linear").operators
    assert sum(layer.forward for layer in layers) == forward.get_total_flops()
    assert sum(layer.backward for layer in layers) == backward.get_total_flops()
    assert sum(layer.parameters for layer in layers) == sum(p.numel() for p in model.parameters())
    # Padding alone has no entries.
    assert all(0 <= layer.forward_sparse <= layer.forward for layer in layers)
    assert all(0 <= layer.backward_sparse <= layer.backward for layer in layers)


class Products(nn.Module):
    """Weights multiplied by in other ways than nn.Linear's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(4, 6))
        self.third, self.bias = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(x @ self.first)
        return torch.addmm(self.bias, torch.mm(y, self.second), self.third)


class Batches(nn.Module):
    """A weight for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.bias = nn.Parameter(torch.randn(3, 4, 5)), nn.Parameter(torch.randn(1, 1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(self.bias, x.transpose(0, 1), self.heads).transpose(0, 1).relu()


class Computed(nn.Module):
    """Weights that are made in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.weight = nn.Parameter(torch.randn(3, 2, 3)), nn.Parameter(torch.randn(24, 5))
        self.register_buffer("mask", (torch.arange(18).reshape(3, 2, 3) % 3 == 0).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.conv1d(x, self.kernel * self.mask, padding=1)
        return functional.linear(y.flatten(1).tanh(), (self.weight * 0.5).T)


OTHER_WEIGHTS = {"products": (Products, (8,)), "batches": (Batches, (3, 4)), "computed": (Computed, (2, 8))}


def counted(model: nn.Module, shape: tuple[int, ...]) -> tuple[int, int]:
    """FLOP forward and back, as PyTorch counts them."""
    with FlopCounterMode(display=False) as forward:
        y = model(torch.randn(1, *shape))
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", OTHER_WEIGHTS)
def test_dense_totals_of_other_weights_equal_pytorchs_counter(name: str, frozen: bool) -> None:
    kind, shape = OTHER_WEIGHTS[name]
    model = kind()
    next(model.parameters()).requires_grad_(not frozen)
    layers = count_flop(model, shape, schedule="linear").operators
    actual = (sum(layer.forward for layer in layers), sum(layer.backward for layer in layers))
    assert actual == counted(model, shape)
    assert sum(layer.parameters for layer in layers) == sum(p.numel() for p in model.parameters())


def test_a_weight_masked_in_the_forward_pass() -> None:
    convolution, *_ = count_flop(Computed(), (2, 8), schedule="linear").operators
    assert (convolution.parameters, convolution.nonzero, convolution.weights, convolution.zeros) == (18, 6, 18, 12)
    # Its first tap alone, which misses the first of eight places, between each of two channels and three.
    assert convolution.forward_sparse == 2 * 7 * 2 * 3


@pytest.mark.parametrize("pruned", [False, True])
def test_a_frozen_weight_with_a_bias_that_trains(pruned: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3))
    if pruned:
        prune.l1_unstructured(model[1], "weight", 0.5)
    else:
        nn.utils.parametrizations.weight_norm(model[1])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    layers = count_flop(model, (4,), schedule="linear").operators
    # Of the inputs alone, but for the first layer's.
    assert [layer.backward for layer in layers] == [0, 2 * 6 * 5, 2 * 5 * 3]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_pytorchs_counter_multiplies_by_groups(groups: int) -> None:
    model = nn.Conv2d(4, 8, 3, groups=groups)
    (layer,) = count_flop(model, (4, 6, 6), schedule="linear").operators
    assert (layer.forward, layer.backward * groups) == counted(model, (4, 6, 6))


@pytest.mark.parametrize(("name", "shape"), RECURRENT.items())
def test_dense_totals_of_recurrent_models_equal_pytorchs_counter(name: str, shape: tuple[int, int]) -> None:
    model = build(name)
    with FlopCounterMode(display=False) as forward:
        y = model(torch.randn(1, *shape))
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    (layer,) = count_flop(model.rnn, shape[::-1], schedule="linear").operators
    (head,) = count_flop(model.head, (20,), schedule="linear").operators
    assert layer.forward + head.forward == forward.get_total_flops()
    # Within the model the head's input has a gradient, too.
    of_state = 2 * model.head.weight.numel()
    assert layer.backward + head.backward + of_state == backward.get_total_flops()
    assert layer.parameters + head.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("frozen", ["", "weight_ih_l0", "weight_hh_l0", "all"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_dense_totals_of_recurrent_layers_equal_pytorchs_counter(kind: type[nn.RNNBase], frozen: str) -> None:
    layer = kind(3, 4)
    for parameter_name, parameter in layer.named_parameters():
        parameter.requires_grad_(frozen not in (parameter_name, "all"))
    # oneDNN's LSTM is one operator, which the counter does not know.
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as forward:
        out, _ = layer(torch.randn(7, 1, 3))
    with FlopCounterMode(display=False) as backward:
        if out.requires_grad:
            out.sum().backward()
    (actual,) = count_flop(layer, (7, 3), schedule="linear").operators
    assert (actual.forward, actual.backward) == (forward.get_total_flops(), backward.get_total_flops())


def test_layers_of_pruned_recurrent_layers() -> None:
    layer = pruned_layer(nn.GRU)
    (actual,) = count_flop(layer, (7, 3), schedule="linear").operators
    entering, nonzero = layer.weight_ih_l0.numel(), int(layer.weight_hh_l0.count_nonzero())
    assert actual.forward_sparse == 2 * 7 * (entering + nonzero)
    assert actual.backward_sparse == 2 * (7 * entering + 13 * nonzero)
    pattern = layer.weight_hh_l0.detach().unflatten(0, (3, 16)).any(dim=0) | torch.eye(16, dtype=torch.bool)
    assert actual.jacobian_nnz == 7 * int(pattern.sum())
    assert actual.path == "GRU" and actual.operator == "gru" and 0.5 < actual.sparsity < 0.9


def test_products_that_lose_sparsity() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(), nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(), nn.ReLU())
    steps = [step for step in count_flop(model, (1, 8, 8), schedule="blelloch").steps if step.kind == "mm"]
    chain = [stage.transposed_pattern for stage in jacsparse.chain(model, (1, 8, 8))]
    for step in steps:
        first, last = (
            int(number) for number in (step.left.strip("Jᵀ").split("-")[0], step.right.strip("Jᵀ").split("-")[-1])
        )
        span = chain[first - 1 : last]
        convolutions = sum(pattern.nnz > 64 for pattern in span)
        # Two convolutions reach further than one; ReLU's diagonal takes nothing away.
        assert step.loses_sparsity == (convolutions == 2 and "J1" in step.left)
        assert step.left_nnz > 0 and step.right_nnz > 0


def test_frozen_layers_have_no_backward() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 2))
    model[0].requires_grad_(False)
    with FlopCounterMode(display=False) as backward:
        model(torch.randn(1, 2, 8, 8)).sum().backward()
    layers = count_flop(model, (2, 8, 8), schedule="linear").operators
    assert [layer.path for layer in layers] == ["0", "2", "4"] and layers[0].backward == 0
    # The counter saw the forward pass, too.
    assert sum(layer.backward for layer in layers) == backward.get_total_flops() - sum(
        layer.forward for layer in layers
    )


def test_pruned_layers() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5))
    prune.random_unstructured(model[0], "weight", 0.5)
    convolution, linear_layer = count_flop(model, (2, 4, 4), schedule="linear").operators
    nnz = jacsparse.jacobian_pattern(model[0], (2, 4, 4)).nnz
    assert (convolution.parameters, convolution.nonzero, convolution.sparsity) == (54, 27, 0.5)
    # Padding is counted dense, but has no entries.
    assert (convolution.forward, convolution.forward_sparse) == (2 * 48 * 18, 2 * nnz)
    # Of its weights alone: nothing before it trains.
    assert (convolution.backward, convolution.backward_sparse) == (2 * 48 * 18, 2 * nnz)
    assert (convolution.weight_gradient, convolution.weight_gradient_sparse) == (2 * 48 * 18, 2 * nnz)
    assert (linear_layer.forward, linear_layer.backward, linear_layer.backward_sparse) == (480, 960, 960)
    assert (linear_layer.weight_gradient, linear_layer.weight_gradient_sparse) == (480, 480)
    assert convolution.jacobian_nnz == nnz and convolution.jacobian_nbytes == 8 * nnz + 4 * 33
    assert count_flop(model, (2, 4, 4)).to_dict()["layers"][0]["nonzero"] == 27


def test_sparsity_is_of_what_is_multiplied_by() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    nn.init.zeros_(model[0].bias)
    linear_layer, norm = count_flop(model, (4,), schedule="linear").operators
    assert (linear_layer.parameters, linear_layer.nonzero, linear_layer.sparsity) == (20, 16, 0.0)
    # Its bias is zero.
    assert (norm.parameters, norm.nonzero, norm.weights, norm.sparsity) == (8, 4, 0, 0.0)


# Recurrent layers: chains of their steps.


def pruned_layer(kind: type[nn.RNNBase], density: float = 0.1, **options: object) -> nn.RNNBase:
    torch.manual_seed(0)
    layer = kind(3, 16, **options)
    with torch.no_grad():
        layer.weight_hh_l0.mul_(torch.rand_like(layer.weight_hh_l0) < density)
    return layer


def state_jacobian(layer: nn.RNNBase, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Of a step, by autograd."""

    def step(state: torch.Tensor) -> torch.Tensor:
        if isinstance(layer, nn.LSTM):
            _, (h, c) = layer(x[None], (state[None, :16], state[None, 16:]))
            return torch.cat([h[0], c[0]])
        return layer(x[None], state[None])[1][0]

    return torch.autograd.functional.jacobian(step, state)


@pytest.mark.parametrize("schedule", ["linear", "blelloch", "blelloch:2"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_equal_scipy(kind: type[nn.RNNBase], schedule: str) -> None:
    layer, time = pruned_layer(kind), 9
    matrix = state_jacobian(layer, torch.randn(3), torch.randn(32 if kind is nn.LSTM else 16))
    transposed = scipy.sparse.csr_array((matrix.T != 0).numpy().astype(np.int64))
    report = jacsparse.count_flop(layer, (time, 3), schedule=schedule)
    plan = jacsparse.schedule.resolve(schedule, time)
    matrices = dict.fromkeys(range(1, time + 1), transposed)
    vectors = {0: np.ones(transposed.shape[1], dtype=np.int64)}
    for step, counted in zip(plan.products, report.steps, strict=True):
        left = matrices[step.left]
        if step.kind == "mm":
            right = matrices[step.right]
            pairs = int((left.sum(axis=0) * right.sum(axis=1)).sum())
            matrices[step.out] = scipy.sparse.csr_array(((left @ right) != 0).astype(np.int64))
            assert counted.nnz == matrices[step.out].nnz
        else:
            met = left @ vectors[step.right]
            pairs, vectors[step.out] = int(met.sum()), (met > 0).astype(np.int64)
        assert counted.flop == 2 * pairs
    assert len(report.baseline) == time
    assert all(step.flop == 2 * int((layer.weight_hh_l0 != 0).sum()) for step in report.baseline)


def test_recurrent_layers_observed() -> None:
    layer = pruned_layer(nn.RNN, nonlinearity="relu")
    x = torch.randn(2, 7, 3)
    guaranteed = jacsparse.count_flop(layer, (7, 3), schedule="linear")
    observed = jacsparse.count_flop(layer, (7, 3), schedule="linear", structure="observed", inputs=x)
    assert 0 < observed.total < guaranteed.total


class InModel(nn.Module):
    """A recurrent layer as a part, as ``layer``."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


#: Gates of each kind of layer.
RECURRENT = {nn.RNN: 1, nn.GRU: 3, nn.LSTM: 4}
STACKS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"num_layers": 3},
    {"bidirectional": True},
    {"num_layers": 2, "bidirectional": True},
    {"proj_size": 5},
    {"num_layers": 2, "proj_size": 5},
]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("options", STACKS, ids=str)
@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("time", [1, 5])
def test_recurrent_layers_count_alike_alone_and_in_a_model(
    kind: type[nn.RNNBase], options: dict[str, Any], time: int
) -> None:
    if "proj_size" in options and kind is not nn.LSTM:
        pytest.skip("projections are an LSTM's")
    layer = pruned_layer(kind, batch_first=True, **options)
    # By hand: a step of each direction multiplies its input and its state, of which the first is of zeros.
    gates, ways, layers = 16 * RECURRENT[kind], 1 + layer.bidirectional, layer.num_layers
    state = layer.proj_size or 16
    inputs = [3] + [ways * state] * (layers - 1)
    of_inputs = [ways * gates * into for into in inputs]
    of_states = layers * ways * (gates * state + layer.proj_size * 16)
    # Gradients of a step's state, and of the inputs of all layers but the first.
    of_first_state = layers * ways * gates * state
    forward = 2 * time * (sum(of_inputs) + of_states)
    backward = 2 * time * (sum(of_inputs[1:]) + of_states) - 2 * of_first_state
    alone, inside = (count_flop(each, (time, 3), schedule="linear") for each in (layer, InModel(layer)))
    for report in (alone, inside):
        layers_ = [each for each in report.layers if each["layer"] != "other operators"]
        quantities = ("dense_forward", "dense_input_gradient", "dense_weight_gradient")
        assert [sum(each[name] for each in layers_) for name in quantities] == [forward, backward, forward]
    for name in ("weights", "zeros", "pruned_step", "dense_step"):
        counts = [
            sum(each[name] for each in report.layers if each["layer"] != "other operators")
            for report in (alone, inside)
        ]
        assert counts[0] == counts[1], name


def test_recurrent_layers_as_pytorch_counts_them() -> None:
    model = InModel(nn.GRU(3, 16, 2, batch_first=True, bidirectional=True))
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 4, 3)).sum().backward()
    (layer,) = (each for each in count_flop(model, (4, 3), schedule="linear").layers if each["layer"] == "layer")
    assert layer["dense_step"] == counter.get_total_flops()


def test_stacks_are_observed_whichever_axis_is_first() -> None:
    x, layer = torch.randn(2, 5, 3), nn.GRU(3, 4, 2)
    first = nn.GRU(3, 4, 2, batch_first=True)
    first.load_state_dict(layer.state_dict())
    one, other, guaranteed = (
        count_flop(layer, structure="observed", inputs=x, schedule="linear"),
        count_flop(first, (5, 3), structure="observed", inputs=x, schedule="linear"),
        count_flop(layer, (5, 3), schedule="linear"),
    )
    assert one.total == other.total <= guaranteed.total and one.samples == 2 and not layer.batch_first
    single = count_flop(nn.GRU(3, 4), structure="observed", inputs=x, schedule="linear")
    assert single.samples == 2 and len(single.baseline) == 5


def test_recurrent_layers_take_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"input_shape is \(5, 4\); expected \(time, 3\)"):
        count_flop(nn.GRU(3, 4), (5, 4))
    with pytest.raises(ValueError, match=r"an input of shape \(5, 4\) does not fit GRU"):
        count_flop(nn.GRU(3, 4, 2), (5, 4))


class Packed(nn.Module):
    def __init__(self, layer: type[nn.RNNBase], reads: bool = False) -> None:
        super().__init__()
        self.layer, self.reads = layer(3, 4, batch_first=True), reads

    def forward(self, x: torch.Tensor, lengths: Any = None) -> torch.Tensor:
        if lengths is None:
            lengths = (x.abs().sum(2) >= 0).sum(1)
        if self.reads:
            lengths = lengths.tolist()
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM, jacsparse.nn.GRU])
@pytest.mark.parametrize("reads", [False, True], ids=["a tensor", "a list"])
def test_packed_sequences_are_refused_with_what_helps(layer: type[nn.RNNBase], reads: bool) -> None:
    model = Packed(layer, reads)
    expected = r"Packed packs sequences, whose lengths may differ; .* give its recurrent layer the padded sequences"
    with pytest.raises(jacsparse.UnsupportedOperatorError, match=expected):
        count_flop(model, (5, 3))
    with pytest.raises(jacsparse.UnsupportedOperatorError, match=expected):
        count_flop(model, inputs=[torch.randn(2, 5, 3), torch.tensor([5, 5])])


def test_packed_inputs_are_refused() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.randn(5, 3), torch.randn(2, 3)])
    with pytest.raises(TypeError, match=r"inputs is a PackedSequence; .*give a padded batch"):
        count_flop(nn.GRU(3, 4), inputs=packed)


class Product(nn.Linear):
    """A linear layer whose weight is the product of two parameters."""

    def __init__(self, into: int, inner: int, out: int) -> None:
        super().__init__(inner, out, bias=False)
        self.first = nn.Parameter(torch.randn(inner, into))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight @ self.first)


def test_products_of_weights_are_counted_once_for_a_sample() -> None:
    layer, others = count_flop(Product(5, 3, 4), (7, 5), schedule="linear").layers
    assert layer["dense_forward"] == 2 * (7 * 5 * 4 + 5 * 3 * 4)
    assert layer["dense_weight_gradient"] == 2 * (7 * 5 * 4 + 2 * 5 * 3 * 4)
    assert others["layer"] == "other operators" and not others["weights"] and layer["dense_input_gradient"] == 0


def test_pruned_recurrent_layers_count_the_weights_in_use() -> None:
    from torch.nn.utils import prune

    def total(layer: nn.Module, schedule: str = "linear") -> float:
        return count_flop(layer, (10, 8), schedule=schedule).total

    plain, masked, removed = nn.GRU(8, 8), nn.GRU(8, 8), nn.GRU(8, 8)
    for layer in (masked, removed):
        layer.load_state_dict(plain.state_dict())
        prune.l1_unstructured(layer, "weight_hh_l0", 0.9)
    prune.remove(removed, "weight_hh_l0")
    with torch.no_grad():
        plain.weight_hh_l0.copy_(removed.weight_hh_l0)
    assert total(plain) == total(masked) == total(removed) < total(nn.GRU(8, 8))
    other = nn.GRU(8, 8)
    prune.l1_unstructured(other, "weight_ih_l0", 0.9)
    assert total(other) == total(nn.GRU(8, 8))
    # Schedules that balance, too.
    assert total(plain, "auto") == total(plain) and total(plain, "balanced:2") > 0


# Which schedule for how many workers.


def test_one_worker_goes_linearly_and_many_split_what_pays() -> None:
    scales = nn.Sequential(*(nn.ReLU() for _ in range(40)))
    report = count_flop(scales, (50,), schedule="blelloch", workers=(1, 4))
    one, four = report.choices
    assert (one.workers, one.schedule, four.schedule) == (1, "linear", "blelloch")
    assert one.times["linear"] == one.work["linear"] == one.times["balanced:1"] == 39 * 100
    assert one.times["blelloch"] == one.work["blelloch"] == sum(s.flop for s in report.steps if s.live)
    assert four.times["blelloch"] < four.times["balanced:4"] < four.times["linear"] == 39 * 100
    assert one.reason == f"blelloch takes {one.times['blelloch'] / 3900:.3g} times as long"
    assert four.reason == (
        f"{four.times['blelloch'] / 3900:.3g} of linear's time, for {four.work['blelloch'] / 3900:.3g} times its work"
    )
    plain = report.to_dict()
    assert plain["choices"][1]["schedule"] == "blelloch" and plain["choices"][1]["reason"] == four.reason
    assert count_flop(scales, (50,)).choices == ()


def test_choices_of_observed_zeros_are_over_guaranteed_structure() -> None:
    x = torch.randn(2, 3, 32, 32)
    sure = count_flop(lenet(), (3, 32, 32), workers=[2])
    seen = count_flop(lenet(), (3, 32, 32), structure="observed", inputs=x, executed=False, workers=[2])
    assert sure.choices == seen.choices
    assert all(step.executed is None for step in seen.steps)


def test_numbers_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    scales = nn.Sequential(*(nn.ReLU() for _ in range(9)))
    two, three = count_flop(scales, (5,), schedule="balanced:3", workers=np.array([2, 3, 2])).choices
    assert (two.workers, three.workers) == (2, 3)
    assert list(two.times) == ["linear", "balanced:3", "balanced:2"] and list(three.times) == ["linear", "balanced:3"]
    # Before anything is counted.
    monkeypatch.setattr("jacsparse.flop.subject.traced", lambda *_: pytest.fail("the module was looked at"))
    with pytest.raises(ValueError, match=r"workers is \[2, 0\]; expected integers of at least 1"):
        count_flop(lenet(), (3, 32, 32), workers=[2, 0])
    for wrong in (4, [1.5], "4", np.array([0.5]), torch.ones(2)):
        with pytest.raises(TypeError, match=r"workers is .*; expected integers, as in"):
            count_flop(lenet(), (3, 32, 32), workers=wrong)


def test_choices_of_a_single_operator_and_of_steps() -> None:
    (choice,) = count_flop(nn.ReLU(), (3,), schedule="linear", workers=[2]).choices
    assert choice.schedule == "linear" and choice.reason == "nothing is done sooner, with less work"
    (choice,) = count_flop(nn.RNN(2, 3), (8, 2), schedule="linear", workers=[2]).choices
    assert choice.times["linear"] == 7 * 18


# How long counting takes.


def test_pairs_are_estimated_before_they_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[CountEstimate] = []

    def accept(estimate: CountEstimate) -> bool:
        told.append(estimate)
        return True

    first, second, third = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)
    report = count_flop(nn.Sequential(first, second, third, nn.ReLU()), (2, 9, 9), schedule="blelloch:1", accept=accept)
    (product,) = (step for step in report.steps if step.kind == "mm")
    assert (product.left, product.right, product.flop / 2) == ("J2ᵀ", "J3ᵀ", told.pop().pairs)
    # A product with ReLU's diagonal takes no time.
    module = nn.Sequential(first, second, nn.ReLU(), third)
    for schedule in ("blelloch:1", "linear"):
        count_flop(module, (2, 9, 9), schedule=schedule, accept=accept)
        assert told.pop().pairs == 0
    # Before any pattern of a product is made.
    residual = build("resnet8").eval()
    monkeypatch.setattr(counting.Counts, "_multiply", lambda *_: pytest.fail("it was counted first"))
    declined = count_flop(residual, (3, 16, 16), accept=lambda estimate: estimate.pairs == 0)
    assert declined.schedule == "linear" and declined.summary().scan is None


@pytest.mark.parametrize(
    ("name", "size", "fraction", "schedule"),
    [
        ("lenet5", 32, 0.0, "blelloch:2"),
        ("lenet5", 32, 0.5, "blelloch"),
        ("resnet8", 16, 0.9, "blelloch"),
        ("resnet8", 16, 0.0, "blelloch:1"),
        ("vgg11", 32, 0.97, "blelloch:2"),
    ],
)
def test_estimates_are_right_within_a_factor_of_two(
    name: str, size: int, fraction: float, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name).eval()
    if fraction:
        prune_weights(model, fraction)
    estimate, _ = estimated_and_counted(model, (3, size, size), schedule, monkeypatch)
    assert estimate.complete


def pairs_not_looked_at(step: FlopStep) -> float:
    """The pairs of a product with a diagonal or a full matrix, which are known without."""
    if step.left_nnz == step.m * step.k or (step.m == step.k and step.left_nnz == step.m):
        return step.right_nnz * (step.m if step.left_nnz == step.m * step.k else 1)
    if step.right_nnz == step.k * step.n or (step.k == step.n and step.right_nnz == step.n):
        return step.left_nnz * (step.n if step.right_nnz == step.k * step.n else 1)
    return 0.0


def estimated_and_counted(
    model: nn.Module, shape: tuple[int, ...], schedule: str, monkeypatch: pytest.MonkeyPatch, longest: float = 4.0
) -> tuple[CountEstimate, float]:
    """The estimate, compared with the pairs and the bytes of a count that is not long; and that one's seconds."""
    told, peaks, seconds = [], [], []
    run = counting.Counts.run

    def measured(self: counting.Counts, *args: object) -> counting.Counts:
        tracemalloc.start()
        begin = time.perf_counter()
        result = run(self, *args)
        seconds.append(time.perf_counter() - begin)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        return result

    def accept(estimate: CountEstimate) -> bool:
        told.append(estimate)
        return estimate.complete and estimate.seconds < longest

    with monkeypatch.context() as patch:
        patch.setattr(counting.Counts, "run", measured)
        report = count_flop(model, shape, schedule=schedule, accept=accept)
    pairs = sum(step.flop / 2 - pairs_not_looked_at(step) for step in report.steps if step.kind == "mm")
    (estimate,) = told
    if estimate.pairs and estimate.complete and estimate.seconds < longest:
        # So few pairs take no time, and below a mebibyte other objects count.
        assert 0.5 * pairs < estimate.pairs + 1e5 < 2 * (pairs + 1e5)
        assert 0.5 * peaks[0] < estimate.nbytes + 2**20 < 2 * (peaks[0] + 2**20)
    return estimate, seconds[0]


def test_totals_keep_their_names_at_80_columns() -> None:
    report = count_flop(lenet(), (3, 32, 32), structure="observed", inputs=torch.randn(1, 3, 32, 32), executed=True)
    console = Console(file=io.StringIO(), width=80)
    console.print(totals(report))
    page = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, page.splitlines())) <= 80 and "…" not in page
    for name in ("back-propagation, observed", "blelloch:2, critical path", "blelloch:2, executed", "live steps"):
        assert page.count(name) == 2


@pytest.mark.parametrize("budget", [-1.0, 1e4, 3e4])
def test_an_incomplete_estimate_is_a_lower_bound(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("resnet8").eval()
    prune_weights(model, 0.9)
    subject = chain_subject(Network(model, torch.randn(3, 3, 16, 16)))
    plan = blelloch(len(subject.factors), levels=2)
    whole, counted = estimate.estimate_count(plan, subject.factors), count_flop(model, (3, 16, 16), schedule=plan)
    assert whole.complete and 0.4 * counted.total < whole.flop < 2 * counted.total
    monkeypatch.setattr(estimate, "_BUDGET", budget)
    part = estimate.estimate_count(plan, subject.factors)
    assert not part.complete and part.is_long
    # The stages' own matrices are what is known at least.
    for figure in ("pairs", "nbytes", "work", "flop"):
        assert 0 < getattr(part, figure) <= getattr(whole, figure)
    assert part.flop < 2 * counted.total
    assert str(part) == "longer than can be estimated"


@pytest.mark.full
@pytest.mark.parametrize("fraction", [0.0, 0.9, 0.97])
@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize("name", ["lenet5", "resnet8", "resnet56", "resnet110", "vgg11", "bitstream", "irmas"])
def test_estimates_of_all_models(name: str, size: int, fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = build(name).eval()
    if fraction:
        prune_weights(model, fraction)
    if name in ("bitstream", "irmas"):
        model, shape = model.get_submodule("rnn"), (size, 1 if name == "bitstream" else 38)
    else:
        shape = (3, size, size)
        model = model.features if name in ("vgg11", "lenet5") else model
    for schedule in ("blelloch:2", "blelloch"):
        estimate, seconds = estimated_and_counted(model, shape, schedule, monkeypatch)
        # Seconds depend on the machine: they are shown, as by ``pytest -rP``.
        print(f"{name} {size} {fraction} {schedule}: {estimate.seconds:.2f} s, took {seconds:.2f} s; {estimate}")


@pytest.mark.parametrize("executed", [False, True])
def test_progress_is_told_after_each_product(executed: bool) -> None:
    x, told = torch.randn(3, 2, 9, 9), []
    count_flop(
        small(), (2, 9, 9), structure="observed", inputs=x, executed=executed, progress=lambda *now: told.append(now)
    )
    products = len(count_flop(small(), (2, 9, 9), progress=lambda *now: told.append(now)).steps)
    total = products * (3 + executed)
    assert told == [*((n, total) for n in range(1, total + 1)), *((n, products) for n in range(1, products + 1))]


def test_going_linearly_needs_no_index_of_any_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of large images would take gigabytes."""
    module = lenet()
    expected = count_flop(module, (3, 32, 32), schedule="linear").total
    monkeypatch.setattr(Pattern, "indices", property(lambda _: pytest.fail("indices were made")))
    assert count_flop(module, (3, 32, 32), schedule="linear").total == expected
