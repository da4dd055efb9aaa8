"""Gradients by scan against autograd: every schedule, the input and every parameter."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jacsparse.models import build, load_weights, prune_weights
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import jacsparse
from jacsparse.flop import count_flop
from jacsparse.scan import Scanner
from jacsparse.scan.scanner import _Execution
from jacsparse.schedule import Schedule, blelloch
from jacsparse.stages import Chain, Record, chain_of
from jacsparse.tracing import Trace
from tests.example_models import kaiming, lenet, small, vgg_features
from tests.helpers import close

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def gradients(
    run: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, x: torch.Tensor, g: torch.Tensor
) -> list[torch.Tensor]:
    """Of the input and of every parameter that trains, as autograd sends them."""
    module.zero_grad()
    given_x = x.clone().requires_grad_()
    run(given_x).backward(g)
    assert given_x.grad is not None
    return [given_x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def compare(module: nn.Module, x: torch.Tensor, schedule: object, vanishing: bool = False, **options: object) -> None:
    with torch.no_grad():
        y = module(x)
    g = torch.randn_like(y)
    expected = gradients(module, module, x, g)
    scan = jacsparse.nn.Scan(module, schedule=schedule, **options)  # type: ignore[arg-type]
    results = gradients(scan, module, x, g)
    assert torch.equal(scan(x), y)
    assert len(results) == len(expected)
    for ours, reference in zip(results, expected, strict=True):
        assert vanishing or reference.abs().max() > 1e-6
        close(ours, reference, TOLERANCE[x.dtype])


@pytest.mark.parametrize(
    ("batch", "dtype"),
    [
        (1, torch.float64),
        pytest.param(16, torch.float32, marks=pytest.mark.full),
        pytest.param(1, torch.float32, marks=pytest.mark.full),
        pytest.param(16, torch.float64, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("schedule", ["linear", "blelloch:1", "blelloch:2", "chunked:1"])
def test_pruned_vgg_11(schedule: str, batch: int, dtype: torch.dtype) -> None:
    compare(vgg_features().to(dtype), torch.randn(batch, 3, 32, 32, dtype=dtype), schedule)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize(
    "schedule",
    [
        *("linear", "blelloch", "blelloch:1", "blelloch:2", "blelloch:3", "chunked:2", "balanced:3", "auto"),
        pytest.param(blelloch(11), id="algorithm 1"),
    ],
)
def test_lenet_5(schedule: Schedule | str, batch: int, dtype: torch.dtype) -> None:
    compare(lenet().to(dtype), torch.randn(batch, 3, 32, 32, dtype=dtype), schedule)


def test_a_schedule_of_ones_own_is_taken_as_it_stands() -> None:
    """By its name, all products of LeNet-5's matrices wait for a vector; where it is passed itself, none does."""
    whole = blelloch(11)
    products = {step.out for step in whole.live_steps() if step.kind == "mm"}
    for schedule, taken in (("blelloch", set()), (whole, products)):
        scanner = jacsparse.nn.Scan(lenet(), schedule=schedule).scanner((3, 32, 32))
        assert scanner.plans.keys() == taken
        report = count_flop(lenet(), (3, 32, 32), schedule=schedule)
        executed = sum(step.executed or 0 for step in report.steps if step.kind == "mm")
        assert executed == sum(plan.flop for plan in scanner.plans.values()) and bool(executed) == bool(taken)


@pytest.mark.parametrize("schedule", ["linear", "blelloch", "blelloch:1", "blelloch:2"])
@pytest.mark.parametrize("batch", [1, 2, 5, 33])
def test_small_network(schedule: str, batch: int) -> None:
    compare(small().double(), torch.randn(batch, 2, 9, 9, dtype=torch.float64), schedule)


@pytest.mark.parametrize(("limit", "size"), [(1, 1), (200_000, 4), (700_000, 16), (5_000_000, 37)])
def test_slices_of_a_batch(limit: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begins, run_slice = set(), _Execution._run_slice
    monkeypatch.setattr(
        _Execution,
        "_run_slice",
        lambda run, slices, samples, *rest: begins.add(samples.start) or run_slice(run, slices, samples, *rest),
    )
    compare(small().double(), torch.randn(37, 2, 9, 9, dtype=torch.float64), "blelloch", memory_limit=limit)
    # As many samples as fit, and a multiple of a vector's lanes.
    assert begins == set(range(0, 37, size))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="not Linux")
@pytest.mark.full
def test_memory_of_a_batch_of_16() -> None:
    """In slices, the whole process stays below 4 GB."""
    code = """
        import torch, jacsparse
        from pathlib import Path
        from tests.example_models import vgg_features
        # Other tests have the other cores.
        torch.set_num_threads(1)
        module, x = vgg_features(), torch.randn(16, 3, 32, 32)
        jacsparse.nn.Scan(module, schedule="blelloch:2")(x).sum().backward()
        # Not getrusage: its peak begins with that of the process that started this one.
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
        print(int(status["VmHWM"].split()[0]) * 1024)
    """
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, encoding="utf-8", check=True
    )
    assert int(output.stdout) < 4e9


@st.composite
def chains(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """Random chains of operators that fit each other."""
    channels, size = draw(st.integers(1, 3)), draw(st.integers(3, 7))
    shape = (channels, size, size)
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["conv", "relu", "max", "avg", "norm", "identity"]))
        if kind == "conv":
            out = draw(st.integers(1, 3))
            layers.append(nn.Conv2d(channels, out, 3, padding=1))
            channels = out
        elif kind == "norm":
            layers.append(nn.BatchNorm2d(channels).eval())
        else:
            layers.append(
                {"relu": nn.ReLU(), "max": nn.MaxPool2d(2, 1), "avg": nn.AvgPool2d(2, 1), "identity": nn.Identity()}[
                    kind
                ]
            )
            size -= kind in ("max", "avg")
        if size == 1:
            break
    if draw(st.booleans()):
        layers += [nn.Flatten(), nn.Linear(channels * size * size, draw(st.integers(1, 4)))]
    return kaiming(nn.Sequential(*layers)).double().eval(), shape


@given(chains(), st.sampled_from(["linear", "blelloch", "blelloch:1"]), st.integers(1, 4))
@settings(max_examples=60)
def test_drawn_chains(case: tuple[nn.Module, tuple[int, ...]], schedule: str, batch: int) -> None:
    module, shape = case
    compare(module, torch.randn(batch, *shape, dtype=torch.float64), schedule, vanishing=True)


SCHEDULES = pytest.mark.parametrize("schedule", ["linear", "blelloch"])


@SCHEDULES
def test_pruning_masks(schedule: str) -> None:
    module = lenet().double()
    for part in module.modules():
        if isinstance(part, (nn.Conv2d, nn.Linear)):
            prune.l1_unstructured(part, "weight", 0.6)
    compare(module, torch.randn(4, 3, 32, 32, dtype=torch.float64), schedule)


@SCHEDULES
def test_parametrisations(schedule: str) -> None:
    module = small().double()
    parametrizations.weight_norm(module[0])
    parametrizations.weight_norm(module[8])
    compare(module, torch.randn(4, 2, 9, 9, dtype=torch.float64), schedule)


@SCHEDULES
def test_frozen_parameters(schedule: str) -> None:
    module = lenet().double()
    module[0].requires_grad_(False)
    module[2][0].bias.requires_grad_(False)
    compare(module, torch.randn(4, 3, 32, 32, dtype=torch.float64), schedule)


def test_frozen_front_needs_no_gradient_there() -> None:
    module, x = nn.Sequential(*(nn.Linear(3, 3) for _ in range(11))), torch.randn(2, 3)
    module[:6].requires_grad_(False)
    scan = jacsparse.nn.Scan(module, schedule="blelloch")
    scan(x).sum().backward()
    (scanner,) = scan._scanners.values()
    (plan,) = scanner._executions.values()
    passes = [each for phase in plan.phases if isinstance(phase, tuple) for each in phase]
    (slices,) = (phase for phase in plan.phases if not isinstance(phase, tuple))
    assert {stage for each in passes for stage in each.stages} == set(range(6, 11))
    assert len(slices.steps) < len(scanner.schedule.live_steps()) - 5


def test_a_backward_pass_is_planned_once_for_the_gradients_that_are_wanted() -> None:
    module, x = small().double(), torch.randn(3, 2, 9, 9, dtype=torch.float64)
    scan = jacsparse.nn.Scan(module, schedule="blelloch")
    g = torch.randn_like(module(x))
    weight, plans = module[0].weight, []
    for trained in (True, True, False, True):
        weight.requires_grad_(trained)
        for ours, theirs in zip(gradients(scan, module, x, g), gradients(module, module, x, g), strict=True):
            close(ours, theirs, 1e-10)
        plans.append({plan for scanner in scan._scanners.values() for plan in scanner._executions.values()})
    assert plans[0] == plans[1] < plans[2] == plans[3] and len(plans[3]) == 2


def test_calls_for_a_module_share_its_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    chains: list[Chain] = []

    def counted(trace: Trace, **options: bool) -> Chain:
        chains.append(chain_of(trace, **options))
        return chains[-1]

    monkeypatch.setattr("jacsparse.stages.forward_passes.chain_of", counted)
    module, x = small().double(), torch.randn(3, 2, 9, 9, dtype=torch.float64)
    prune.l1_unstructured(module[0], "weight", amount=0.5)
    for _ in range(3):
        g = torch.randn_like(module(x))
        expected = gradients(module, module, x, g)[0]
        close(jacsparse.vjp(module, x)[1](g)[0], expected, 1e-10)
        close(jacsparse.backward(module, x, g), expected, 1e-10)
        close(jacsparse.leapfrog_backward(module, x, g, threads=2), expected, 1e-10)
        with torch.no_grad():
            module[0].weight_orig.mul_(2)
    assert len(chains) == 1


@SCHEDULES
def test_tensor_hooks_change_gradients_as_in_autograd(schedule: str) -> None:
    module = small().double()
    module[0].weight.register_hook(lambda gradient: gradient * 2)
    compare(module, torch.randn(3, 2, 9, 9, dtype=torch.float64), schedule)


@SCHEDULES
def test_forward_and_backward_hooks_are_called(schedule: str) -> None:
    module = small().double()
    x = torch.randn(3, 2, 9, 9, dtype=torch.float64)
    seen: dict[str, list[torch.Tensor]] = {"forward": [], "backward": []}
    module[5].register_forward_hook(lambda _m, _i, output: seen["forward"].append(output.detach().clone()))
    module[5].register_full_backward_hook(lambda _m, _i, output: seen["backward"].append(output[0].clone()))
    module(x).sum().backward()
    jacsparse.nn.Scan(module, schedule=schedule)(x).sum().backward()
    for kind in ("forward", "backward"):
        assert len(seen[kind]) == 2
        close(seen[kind][1], seen[kind][0], 1e-10)


@SCHEDULES
def test_hooks_that_change_values_are_part_of_the_forward_pass(schedule: str) -> None:
    module, x = small().double(), torch.randn(3, 2, 9, 9, dtype=torch.float64)
    module[2].register_forward_hook(lambda _m, _i, output: output * 2)
    module[5].register_forward_pre_hook(lambda _m, args: (args[0] + 1,))
    compare(module, x, schedule)


def test_backward_hooks_that_change_gradients_are_refused() -> None:
    module = small().double()
    module[5].register_full_backward_hook(lambda _m, inputs, _o: (inputs[0] * 2,))
    y = jacsparse.nn.Scan(module, schedule="blelloch")(torch.randn(2, 2, 9, 9, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="5: a backward hook changes the gradient"):
        y.sum().backward()


@SCHEDULES
def test_hooks_of_containers(schedule: str) -> None:
    module, x = lenet().double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    scan = jacsparse.nn.Scan(module, schedule=schedule)
    scan(x).sum().backward()
    module[0].register_forward_hook(lambda _m, _i, output: output.tanh())
    compare(module, x, schedule)
    for ours, reference in zip(
        gradients(scan, module, x, torch.ones(2, 10).double()),
        gradients(module, module, x, torch.ones(2, 10).double()),
        strict=True,
    ):
        close(ours, reference, 1e-10)


@SCHEDULES
def test_active_dropout_keeps_its_draw(schedule: str) -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3)).double()
    x, g = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    torch.manual_seed(3)
    expected = gradients(module, module, x, g)
    torch.manual_seed(3)
    results = gradients(jacsparse.nn.Scan(module, schedule=schedule, memory_limit=1), module, x, g)
    for ours, reference in zip(results, expected, strict=True):
        close(ours, reference, 1e-10)


@SCHEDULES
def test_a_module_used_twice(schedule: str) -> None:
    x = torch.randn(4, 5, dtype=torch.float64)
    shared = nn.Linear(5, 5)
    compare(nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(5, 2)).double(), x, schedule)
    # Two passes of autograd, between which matrices are multiplied, read one weight.
    between = [part for _ in range(5) for part in (nn.Linear(5, 5), nn.Tanh())]
    compare(nn.Sequential(shared, *between, shared).double(), x, schedule)


def test_training_steps_follow_autograd() -> None:
    """Weights move, plans stay: ten steps of two copies give the same losses."""
    losses: list[list[float]] = []
    for wrap in (lambda module: module, lambda module: jacsparse.nn.Scan(module, schedule="blelloch")):
        torch.manual_seed(1)
        module = small().double()
        run, optimiser = wrap(module), torch.optim.SGD(module.parameters(), lr=0.05)
        x, target = torch.randn(8, 2, 9, 9, dtype=torch.float64), torch.randint(3, (8,))
        losses.append([])
        for _ in range(10):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(run(x), target)
            loss.backward()
            optimiser.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0] and max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-12


def test_zero_weights_that_move_get_patterns_of_their_own() -> None:
    module = nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        module[1].weight[0, 0] = 0
    scan, x = jacsparse.nn.Scan(module, schedule="blelloch"), torch.randn(3, 4, dtype=torch.float64)
    for weight, nnz in ((0.0, 15), (1.0, 16), (0.5, 16)):
        with torch.no_grad():
            module[1].weight[0, 0] = weight
        g = torch.randn(3, 2, dtype=torch.float64)
        for ours, reference in zip(gradients(scan, module, x, g), gradients(module, module, x, g), strict=True):
            close(ours, reference, 1e-10)
        assert scan.scanner((4,)).chain.stages[1].pattern.nnz == nnz
    compare(module, x, "blelloch", pruned=False)


def test_a_chain_runs_with_weights_that_have_moved() -> None:
    module = nn.Linear(4, 4)
    with torch.no_grad():
        module.weight[0, 0] = 0
    stages = jacsparse.chain(module, (4,))
    assert stages.pattern.nnz == 15
    with torch.no_grad():
        module.weight[0, 0] = 1
    assert stages.run(torch.ones(2, 4))[0].transposed_jacobian().pattern.nnz == 16


def test_training_from_zero_weights() -> None:
    """A layer that starts at zero is common, and moves at the first step."""
    curves: list[list[float]] = []
    for wrap in (lambda module: module, lambda module: jacsparse.nn.Scan(module, schedule="blelloch")):
        torch.manual_seed(2)
        module = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2)).double()
        nn.init.zeros_(module[2].weight)
        run, optimiser, x = wrap(module), torch.optim.SGD(module.parameters(), lr=0.5), torch.randn(6, 5).double()
        curves.append([])
        for _ in range(4):
            optimiser.zero_grad()
            loss = run(x).square().sum()
            loss.backward()
            optimiser.step()
            curves[-1].append(loss.item())
    assert curves[0] == pytest.approx(curves[1], rel=1e-10)


CHANGES = {
    "layer": lambda module: module.__setitem__(10, nn.Linear(6, 7).double()),
    "padding": lambda module: setattr(module[0], "padding", (2, 2)),
    "in place": lambda module: setattr(module[1], "inplace", True),
    "dropout": lambda module: module.insert(1, nn.Dropout(0.5)),
}


def test_new_masks_make_new_patterns() -> None:
    module = lenet()
    scan, x = jacsparse.nn.Scan(module, schedule="blelloch"), torch.randn(2, 3, 32, 32)
    scan(x).sum().backward()
    dense = scan.scanner((3, 32, 32)).chain.stages[0].pattern.nnz
    prune.l1_unstructured(module[0][0], "weight", 0.5)
    scan(x).sum().backward()
    assert scan.scanner((3, 32, 32)).chain.stages[0].pattern.nnz < dense


def test_weights_changed_between_forward_and_backward_are_noticed() -> None:
    module = nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    y = jacsparse.nn.Scan(module, schedule="blelloch")(torch.randn(3, 4, requires_grad=True))
    with torch.no_grad():
        module[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
        y.sum().backward()


def test_no_grad_and_eval_run_the_module_itself() -> None:
    module = lenet()
    scan = jacsparse.nn.Scan(module, schedule="linear")
    with torch.no_grad():
        assert torch.equal(scan(torch.ones(1, 3, 32, 32)), module(torch.ones(1, 3, 32, 32)))
    assert not scan._scanners
    module.requires_grad_(False)
    assert not scan(torch.ones(1, 3, 32, 32)).requires_grad


def test_second_backward_and_accumulation() -> None:
    module, x = small().double(), torch.randn(2, 2, 9, 9, dtype=torch.float64, requires_grad=True)
    y = jacsparse.nn.Scan(module, schedule="blelloch")(x)
    y.sum().backward(retain_graph=True)
    assert x.grad is not None
    first = x.grad.clone()
    y.sum().backward()
    close(x.grad, 2 * first, 1e-15)


def test_gradients_of_gradients_are_refused() -> None:
    x = torch.randn(2, 2, 9, 9, requires_grad=True)
    y = jacsparse.nn.Scan(small(), schedule="blelloch")(x)
    with pytest.raises(RuntimeError, match="create_graph=True asks for gradients of gradients"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_empty_batch() -> None:
    for schedule in ("linear", "blelloch"):
        module, x = small(), torch.zeros(0, 2, 9, 9, requires_grad=True)
        jacsparse.nn.Scan(module, schedule=schedule)(x).sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in module.parameters())
        with torch.no_grad():
            x_gradient = jacsparse.backward(module, x, module(x), schedule=schedule)
        assert x_gradient.shape == x.shape


def test_chains_without_stages() -> None:
    for module in (nn.Flatten(), nn.Sequential(), nn.Dropout().eval()):
        x = torch.randn(2, 3, 4, requires_grad=True)
        jacsparse.nn.Scan(module, schedule="linear")(x).sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))
        y, pullback = jacsparse.vjp(module, x.detach())
        assert torch.equal(pullback(torch.full_like(y, 2))[0], torch.full((2, 3, 4), 2.0))


def test_vjp_is_torch_func_s() -> None:
    module, x = lenet().double(), torch.randn(3, 3, 32, 32, dtype=torch.float64)
    y, pullback = jacsparse.vjp(module, x, schedule="blelloch:2")
    expected_y, expected = torch.func.vjp(module, x)
    assert torch.equal(y, expected_y) and not y.requires_grad
    for _ in range(2):
        g = torch.randn_like(y)
        close(pullback(g)[0], expected(g)[0].detach(), 1e-10)
    with pytest.raises(ValueError, match=r"the gradient is torch\.float64 \(3, 4\) on cpu; expected that of"):
        pullback(g[:, :4])


def test_backward_accumulates_and_refuses_randomness() -> None:
    module, x = lenet().double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    g = torch.randn(2, 10, dtype=torch.float64)
    expected = gradients(module, module, x, g)
    module.zero_grad()
    for times in (1, 2):
        close(jacsparse.backward(module, x, g, schedule="blelloch"), expected[0], 1e-10)
        for parameter, reference in zip(module.parameters(), expected[1:], strict=True):
            close(parameter.grad, times * reference, 1e-10)
    with pytest.raises(ValueError, match=r"^1: backward runs the forward again"):
        jacsparse.backward(nn.Sequential(nn.ReLU(), nn.Dropout()), x, x)


@pytest.mark.parametrize("use", ["jacobian", "verify"])
def test_training_mode_is_refused_in_one_line(use: str) -> None:
    """Whatever is asked of a network of seven such layers."""
    module, x = build("resnet8").train(), torch.randn(2, 3, 16, 16)
    uses: dict[str, Callable[[], Any]] = {
        "jacobian": lambda: jacsparse.jacobian(module, x),
        "verify": lambda: jacsparse.verify(module, x),
    }
    with pytest.raises(jacsparse.UnsupportedOperatorError) as caught:
        uses[use]()
    assert str(caught.value) == (
        "stem.1: batch normalisation in training mode couples the samples of a batch; call .eval() on it first, or "
        "take the Jacobian of the whole batch by batched=False"
    )


def test_lazy_layers() -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Sequential(nn.LazyLinear(3)))

    message = "^1.0: LazyLinear has no weights before its first batch; run the module on one first$"
    for use in (
        lambda: jacsparse.count_flop(lazy(), (2, 4)),
        lambda: jacsparse.chain(lazy(), (2, 4)),
        lambda: jacsparse.jacobian_pattern(lazy(), (2, 4)),
        lambda: jacsparse.nn.Scan(lazy(), schedule="linear").scanner((2, 4)),
        lambda: prune_weights(lazy(), 0.5),
        lambda: load_weights(lazy(), "nowhere.safetensors"),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    with pytest.raises(ValueError, match=r"^LazyBatchNorm2d: LazyBatchNorm2d has no weights before its first batch"):
        jacsparse.chain(nn.LazyBatchNorm2d().eval(), (2, 4, 4))
    # A forward pass of the user's own is such a run.
    module = lazy()
    assert jacsparse.nn.Scan(module, schedule="linear")(torch.randn(2, 2, 4)).shape == (2, 3)
    assert jacsparse.count_flop(module, (2, 4)).input_gradient.flop == 2 * 3 * 8


def test_shapes_may_be_lists() -> None:
    scanner = jacsparse.nn.Scan(nn.Linear(3, 4), schedule="blelloch").scanner([3])
    assert scanner.chain.in_shape == (3,)


def test_graph_is_released() -> None:
    def alive() -> int:
        gc.collect()
        # isinstance would ask weak proxies whose object is gone, which other tests leave behind, and they raise.
        return sum(issubclass(type(thing), Record) for thing in gc.get_objects())

    module = lenet()
    scan = jacsparse.nn.Scan(module, schedule="blelloch")
    y = scan(torch.randn(2, 3, 32, 32))
    assert alive() == 11
    y.sum().backward(retain_graph=True)
    assert alive() == 11
    y.sum().backward()
    # Though y lives on, as a loss that is logged does.
    assert alive() == 0
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_few_shapes_are_remembered() -> None:
    scan = jacsparse.nn.Scan(nn.Conv2d(1, 1, 3), schedule="linear")
    for size in range(3, 20):
        scan(torch.ones(1, 1, size, size)).sum().backward()
    assert len(scan._scanners) == 8


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scan: pickle.loads(pickle.dumps(scan))])
def test_copies_have_plans_of_their_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    scan = jacsparse.nn.Scan(small(), schedule="blelloch")
    x = torch.randn(2, 2, 9, 9)
    scan(x).sum().backward()
    other = copied(scan)
    assert not other._scanners and torch.equal(other(x), scan(x))


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_model_are_seen(change: str) -> None:
    module, x = small().double(), torch.randn(3, 2, 9, 9, dtype=torch.float64)
    if change == "padding":
        module = module[:2]
    scan = jacsparse.nn.Scan(module, schedule="blelloch")
    scan(x).sum().backward()
    CHANGES[change](module)
    torch.manual_seed(5)
    g = torch.randn_like(module(x))
    torch.manual_seed(5)
    expected = gradients(module, module, x, g)
    torch.manual_seed(5)
    for ours, reference in zip(gradients(scan, module, x, g), expected, strict=True):
        close(ours, reference, 1e-10)


class DropConnect(nn.Module):
    """A parametrisation that draws."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * (torch.rand_like(weight) > 0.5)


@SCHEDULES
def test_weights_that_change_at_each_forward(schedule: str) -> None:
    module, x = small().double(), torch.randn(3, 2, 9, 9, dtype=torch.float64)
    parametrize.register_parametrization(module[0], "weight", DropConnect())
    parametrizations.spectral_norm(module[8])
    g = torch.randn(3, 3, dtype=torch.float64)
    twin = jacsparse.nn.Scan(module, schedule=schedule)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    for run in (module, twin):
        module.load_state_dict(state)
        torch.manual_seed(9)
        results = gradients(run, module, x, g), {name: value.clone() for name, value in module.state_dict().items()}
        expected = results if run is module else expected  # noqa: F821
    for ours, reference in zip(results[0], expected[0], strict=True):
        close(ours, reference, 1e-10)
    # What the forward pass changes, it changes once.
    assert all(torch.equal(results[1][name], expected[1][name]) for name in state)


def test_threads_share_a_module() -> None:
    module, x = lenet().double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    scan, g = jacsparse.nn.Scan(module, schedule="blelloch"), torch.randn(2, 10, dtype=torch.float64)
    before = dict(module.named_parameters())
    expected = gradients(module, module, x, g)

    def work(_: int) -> list[torch.Tensor]:
        return list(torch.autograd.grad(scan(x), list(before.values()), g))

    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(work, range(24)):
            for ours, reference in zip(results, expected[-len(before) :], strict=True):
                close(ours, reference, 1e-10)
    assert all(parameter is before[name] for name, parameter in module.named_parameters())


def test_buffers_changed_between_forward_and_backward_are_noticed() -> None:
    # The fifth lies between two convolutions whose product is formed, and no vector goes through it.
    layers = [nn.Conv2d(2, 2, 3, padding=1) if number % 2 else nn.BatchNorm2d(2) for number in range(9)]
    module = nn.Sequential(*layers).eval().requires_grad_(False)
    y = jacsparse.nn.Scan(module, schedule="blelloch")(torch.randn(2, 2, 5, 5, requires_grad=True))
    module[4].running_var.mul_(9)
    with pytest.raises(RuntimeError, match=r"4\.running_var was changed in place"):
        y.sum().backward()


def doubled(part: nn.Module, kind: str) -> Any:
    """A hook on `part` that doubles gradients."""
    if kind == "full":
        return part.register_full_backward_hook(lambda _m, inputs, _o: (inputs[0] * 2,))
    if kind == "pre":
        return part.register_full_backward_pre_hook(lambda _m, outputs: (outputs[0] * 2,))

    def on_the_output(_m: nn.Module, _i: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda g: g * 2)

    return part.register_forward_hook(on_the_output)


@pytest.mark.parametrize("kind", ["full", "pre", "tensor"])
@pytest.mark.parametrize("place", range(9))
def test_hooks_that_change_gradients_are_obeyed_or_refused(place: int, kind: str) -> None:
    module, x = small().double(), torch.randn(2, 2, 9, 9, dtype=torch.float64)
    # PyTorch itself refuses full backward hooks on what works in place.
    module[2].inplace = False
    doubled(module[place], kind)
    compare(module, x, "linear", vanishing=True)
    try:
        compare(module, x, "blelloch", vanishing=True)
    except RuntimeError as error:
        assert "a backward hook changes the gradient" in str(error)


def test_hooks_on_all_modules() -> None:
    module, x = small().double(), torch.randn(2, 2, 9, 9, dtype=torch.float64)
    # PyTorch itself refuses full backward hooks on what works in place.
    module[2].inplace = False
    everywhere = torch.nn.modules.module
    handle = everywhere.register_module_forward_hook(
        lambda part, _i, output: output * 2 if isinstance(part, nn.ReLU) else None
    )
    try:
        compare(module, x, "blelloch")
    finally:
        handle.remove()
    seen: list[nn.Module] = []
    handle = everywhere.register_module_full_backward_hook(lambda part, _i, _o: seen.append(part))
    try:
        compare(module, x, "blelloch")
    finally:
        handle.remove()


def test_hooks_are_given_the_module() -> None:
    module, seen = small(), []
    module[3].register_forward_hook(lambda part, args, output: seen.append(part))
    module[3].register_forward_hook(lambda part, args, options, output: seen.append(part), with_kwargs=True)
    module[3].register_forward_pre_hook(lambda part, args: seen.append(part))
    jacsparse.nn.Scan(module, schedule="linear")(torch.randn(1, 2, 9, 9, requires_grad=True))
    assert len(seen) == 3 and all(part is module[3] for part in seen)


def test_state_dict_and_repr() -> None:
    scan = jacsparse.nn.Scan(lenet(), schedule="blelloch:2")
    assert set(scan.state_dict()) == {f"module.{name}" for name in lenet().state_dict()}
    assert "schedule='blelloch:2'" in repr(scan)


BAD_INPUTS = {
    "integers": (
        torch.ones(1, 3, 32, 32, dtype=torch.int64),
        TypeError,
        "x is torch.int64; expected float32 or float64",
    ),
    "half": (torch.ones(1, 3, 32, 32).half(), TypeError, "x is torch.float16"),
    "complex": (torch.ones(1, 3, 32, 32, dtype=torch.complex64), TypeError, "x is torch.complex64"),
    "no batch": (torch.ones(7), ValueError, r"x has shape \(7,\); expected \(batch, \*sample\)"),
    "device": (torch.ones(1, 3, 32, 32, device="meta"), ValueError, "x is on meta"),
    "no tensor": ([1.0], TypeError, "x is a list; expected a torch.Tensor"),
    "channels": (torch.ones(1, 4, 32, 32), ValueError, r"0\.0: an input of shape \(4, 32, 32\) does not fit Conv2d"),
    "too small": (torch.ones(1, 3, 4, 4), ValueError, r"0\.[02]: an input of shape .* does not fit"),
    "sparse": (torch.ones(1, 3, 32, 32).to_sparse(), TypeError, "x has layout torch.sparse_coo"),
    "double": (torch.ones(1, 3, 32, 32).double(), TypeError, r"0\.0\.weight is torch.float32, its input torch.float64"),
    "zero size": (torch.ones(1, 3, 0, 32), ValueError, r"(input_shape is|an input of shape) \(3, 0, 32\)"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_inputs(case: str) -> None:
    x, error, message = BAD_INPUTS[case]
    for run in (
        jacsparse.nn.Scan(lenet(), schedule="linear"),
        lambda x: jacsparse.vjp(lenet(), x),
        lambda x: jacsparse.jacobian(lenet(), x),
    ):
        with pytest.raises(error, match=message):
            run(x)


def test_non_contiguous_and_nan_inputs() -> None:
    module = small().double()
    x = torch.randn(3, 9, 9, 2, dtype=torch.float64).permute(0, 3, 1, 2)
    compare(module, x, "blelloch")
    poisoned = x.clone()
    poisoned[1, 0, 3, 3] = float("nan")
    scan = jacsparse.nn.Scan(module, schedule="blelloch")
    clean, dirty = (gradients(scan, module, case, torch.ones(3, 3, dtype=torch.float64))[0] for case in (x, poisoned))
    assert torch.equal(clean[[0, 2]], dirty[[0, 2]]), "a NaN stays in its sample"


def test_bad_modules_and_limits() -> None:
    for run in (jacsparse.nn.Scan, lambda module: jacsparse.jacobian_pattern(module, (3,))):
        with pytest.raises(TypeError, match=r"(module|f) is a str; expected"):
            run("conv")
    with pytest.raises(ValueError, match=r"0\.0\.weight is on meta; this runs on CPUs and CUDA"):
        jacsparse.jacobian(lenet().to("meta"), torch.ones(1, 3, 32, 32))
    for limit in (-1, "1G"):
        with pytest.raises(ValueError, match="memory_limit is"):
            jacsparse.nn.Scan(lenet(), memory_limit=limit, schedule="linear")
    with pytest.raises(RuntimeError, match="inference_mode"), torch.inference_mode():
        jacsparse.vjp(lenet(), torch.ones(1, 3, 32, 32))
    _, pullback = jacsparse.vjp(nn.ReLU(), torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"the gradient is torch\.float32 .* on meta"):
        pullback(torch.ones(1, 3, device="meta"))


def test_bad_jacobians() -> None:
    J = jacsparse.jacobian(nn.ReLU(), torch.ones(3, 2))
    for values, error, message in (
        (J.values.long(), TypeError, "values has dtype torch.int64"),
        (J.values.to("meta"), ValueError, "values is on meta"),
        (J.values[:1], ValueError, "values has shape"),
    ):
        with pytest.raises(error, match=message):
            jacsparse.SparseJacobian(J.pattern, values)
    with pytest.raises(TypeError, match=r"values has dtype torch\.float16"):
        J.to(torch.float16)
    with pytest.raises(TypeError, match="sample is 'a'"):
        J.todense("a")  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="sample is 3; this Jacobian has 3"):
        J.todense(3)
    with pytest.raises(ValueError, match="this Jacobian has 0 samples"):
        jacsparse.jacobian(nn.ReLU(), torch.ones(0, 2)).todense()
    assert jacsparse.jacobian(nn.Flatten(), torch.zeros(0, 2, 9, 9)).shape == (162, 162)


def test_bad_schedule_is_named_at_the_call() -> None:
    for name in ("fast", "balanced:0", "chunked:0", "blelloch:-1", "blelloch:²"):
        with pytest.raises(ValueError, match=f"schedule is '{name}'"):
            jacsparse.nn.Scan(lenet(), schedule=name)
    assert Scanner(jacsparse.chain(lenet(), (3, 32, 32)), "blelloch:2").schedule.name == "blelloch:2"


@pytest.mark.parametrize("schedule", ["linear", "blelloch", "blelloch:1", "chunked:2", "chunked:3"])
@pytest.mark.parametrize(
    "write",
    [
        lambda y: y[:, :1].mul_(2).sin(),
        lambda y: nn.functional.relu6(y[:, :1], inplace=True),
        lambda y: y.view(-1, 2, 3).sin_().cos().sinh(),
        lambda y: y.reshape(-1, 2, 3).transpose(1, 2)[:, 1:].sigmoid_().sin(),
    ],
)
def test_writes_through_views(write: Callable[[torch.Tensor], torch.Tensor], schedule: str) -> None:
    class Written(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return write(x.cos().sin().sinh())

    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    module = Written()
    y, expected = jacsparse.nn.Scan(module, schedule=schedule)(x), module(x)
    g = torch.randn_like(expected)
    (actual,), (gradient,) = (torch.autograd.grad(each, x, g) for each in (y, expected))
    assert (actual - gradient).abs().max() <= 1e-12


def test_what_follows_may_change_the_output_in_place() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh())
    x = torch.randn(2, 1, 5, 5, requires_grad=True)
    (expected,) = torch.autograd.grad(torch.relu(module(x)).sum(), x)
    (actual,) = torch.autograd.grad(
        nn.Sequential(jacsparse.nn.Scan(module, schedule="linear"), nn.ReLU(inplace=True))(x).sum(), x
    )
    assert torch.allclose(actual, expected, atol=1e-6)


def test_a_scan_is_a_module_like_any_other() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh()).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    actual, expected = (
        jacsparse.jacobian(jacsparse.nn.Scan(module, schedule="linear"), x),
        jacsparse.jacobian(module, x),
    )
    assert torch.equal(actual.todense(1), expected.todense(1))


def test_records_go_without_the_garbage_collector() -> None:
    scan = jacsparse.nn.Scan(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), schedule="blelloch")
    x = torch.randn(7, 4)
    scan(x).sum().backward()

    def tensors() -> int:
        # Not isinstance: proxies ask what they stand for, which may be gone.
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = tensors()
        for _ in range(3):
            scan(x).sum().backward()
        assert tensors() == before
    finally:
        gc.enable()


class Doubled(nn.Module):
    """Works in another dtype than its input's, in part."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second, self.dtype = nn.Linear(8, 8), nn.Linear(8, 4).to(dtype), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)).to(self.dtype)).sin()


class Widened(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


MIXED_DTYPES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5)), (8,), 2**-8),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 2), nn.GELU()
        ).eval(),
        (2, 8, 8),
        2**-8,
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (4, 8), 2**-8),
    "float64": (lambda: Doubled(torch.float64), (8,), 2**-23),
    "float16": (lambda: Doubled(torch.float16), (8,), 2**-11),
    "float64 from then on": (
        lambda: nn.Sequential(Widened(), *(nn.Linear(8, 8).double() for _ in range(5))),
        (8,),
        2**-23,
    ),
}


@pytest.mark.parametrize("name", MIXED_DTYPES)
def test_other_dtypes_within(name: str) -> None:
    torch.manual_seed(0)
    make, shape, rounding = MIXED_DTYPES[name]
    module, x = make(), torch.randn(3, *shape, requires_grad=True)
    # Each of at most eight operators rounds once.
    tolerance = 8 * rounding

    def within() -> torch.autocast:
        return torch.autocast("cpu", enabled=not isinstance(module, Doubled))

    with within():
        y, actual = module(x), jacsparse.jacobian(module, x.detach())
        assert not jacsparse.verify(module, x.detach()).failed
    assert actual.values.dtype == x.dtype
    rows = [torch.autograd.grad(each.sum(), x, retain_graph=True)[0] for each in y.flatten(1).unbind(1)]
    expected = torch.stack(rows, 1).flatten(2)
    for number, expected_of_sample in enumerate(expected):
        assert (actual.todense(number) - expected_of_sample).abs().max() <= tolerance * expected.abs().max()
    gradient = torch.randn_like(y)
    expected_gradients = torch.autograd.grad(y, [x, *module.parameters()], gradient)
    for schedule in ("linear", "blelloch", "blelloch:1"):
        with within():
            z = jacsparse.nn.Scan(module, schedule=schedule)(x)
        assert z.dtype == y.dtype and torch.equal(y, z)
        for one, other in zip(
            torch.autograd.grad(z, [x, *module.parameters()], gradient), expected_gradients, strict=True
        ):
            assert one.dtype == other.dtype
            limit = 0.0 if schedule == "linear" else tolerance * other.abs().max()
            assert (one - other).abs().max() <= limit


@pytest.mark.parametrize("schedule", ["auto", "blelloch:2"])
def test_pullbacks_of_no_samples(schedule: str) -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    y, pullback = jacsparse.vjp(module, torch.empty(0, 2, 4, 4), schedule=schedule)
    (gradient,) = pullback(torch.empty(0, 2))
    assert y.shape == (0, 2) and gradient.shape == (0, 2, 4, 4)
