"""Scans of pruned networks on a device, against autograd: masks decide their patterns, and no pass waits."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from jacsparse.models import prune_weights
from torch import nn
from torch.nn.utils import prune

from jacsparse import PreparedJacobian, backward, jacobian, prepare_jacobian, vjp
from jacsparse.nn import Scan
from jacsparse.stages import COSTS, forward_pass
from tests.cuda.harness import DEVICE, ON_GPU, emulated
from tests.cuda.test_compiled_jacobians import no_waits
from tests.helpers import FLOAT, autograd_jacobian, by_products, drawn

#: Roundings of some hundred operations.
BOUND = 300 * torch.finfo(FLOAT).eps
#: Channels of convolutions, before each of which images are halved where it says so.
CHANNELS = ((2, 4, False), (4, 4, True), (4, 6, True), (6, 6, False), (6, 5, True), (5, 5, False))


def network(seed: int = 0, share: float = 0.7) -> nn.Sequential:
    """A network as VGG, for images of 8 × 8, whose weights have masks."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after, halves in CHANNELS:
        layers += [nn.MaxPool2d(2)] if halves else []
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    layers += [nn.Flatten(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)]
    model = nn.Sequential(*layers).to(DEVICE, FLOAT)
    if share:
        prune_weights(model, share)
    return model


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield


def check(scan: Scan, waits: Callable[[], contextlib.AbstractContextManager[None]], batch: int = 2) -> None:
    """Compare a scan's gradients with autograd's, in a context."""
    x, seed = drawn(batch, 2, 8, 8).to(DEVICE).requires_grad_(), drawn(batch, 3, seed=1).to(DEVICE)
    inputs = [x, *scan.parameters()]
    with waits():
        actual = torch.autograd.grad(scan(x), inputs, seed)
    expected = torch.autograd.grad(scan.module(x), inputs, seed)
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).abs().max() <= BOUND * max(1e-2, other.abs().max().item())


def entries(scan: Scan) -> int:
    """Entries of the patterns that the last call read."""
    return sum(stage.pattern.nnz for stage in next(reversed(scan._scanners.values())).chain)


def masks_of(model: nn.Module) -> list[torch.Tensor]:
    return [mask for name, mask in model.named_buffers() if name.endswith("weight_mask")]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("schedule", ["linear", "blelloch:2", "blelloch"])
def test_no_pass_waits(schedule: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor after a step of an optimiser, which leaves the masks as they are."""
    model = network()
    scan, waits = Scan(model, schedule=schedule), lambda: no_waits(monkeypatch)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    with emulated():
        check(scan, nothing, batch)
        for _ in range(2):
            check(scan, waits, batch)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimiser.step()
        check(scan, waits, batch)


def test_products_are_multiplied() -> None:
    scan = Scan(network(), schedule="blelloch:2").scanner((2, 8, 8))
    assert {plan.device_method for plan in scan.plans.values()} == {"merge", "select", "scale"}


def test_another_mask_is_another_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    scan = Scan(model, schedule="blelloch:2")
    with emulated():
        check(scan, nothing)
        before = entries(scan)
        for mask in masks_of(model):
            mask[mask.shape[0] // 2] = 1
        check(scan, nothing)
        assert entries(scan) > before
        check(scan, lambda: no_waits(monkeypatch))


def test_weights_that_come_back_as_zeros_are_entries_at_once() -> None:
    """They train later, and the mask is not looked at then."""
    model = network()
    scan = Scan(model, schedule="blelloch:2")
    with emulated():
        check(scan, nothing)
        with torch.no_grad():
            for mask, weight in zip(masks_of(model), (p for p in model.parameters() if p.ndim > 1), strict=True):
                weight.mul_(mask)
                mask.fill_(1)
        check(scan, nothing)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        check(scan, nothing)


def test_pruned_again() -> None:
    """New buffers, with fewer ones."""
    model = network()
    scan = Scan(model, schedule="blelloch:2")
    with emulated():
        check(scan, nothing)
        for part in model.modules():
            if isinstance(part, (nn.Conv2d, nn.Linear)):
                prune.l1_unstructured(part, "weight", 0.5)
        check(scan, nothing)
        before = entries(scan)
        scan.reset()
        check(scan, nothing)
        assert entries(scan) < before


def test_networks_that_differ_by_their_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    scans = [Scan(network(seed), schedule="blelloch:2") for seed in (0, 1)]
    with emulated():
        for scan in scans:
            check(scan, nothing)
        for scan in scans:
            check(scan, lambda: no_waits(monkeypatch))


def without_masks() -> nn.Sequential:
    """A network whose weights are zeros that no mask holds."""
    model = network()
    for part in model.modules():
        if isinstance(part, (nn.Conv2d, nn.Linear)):
            prune.remove(part, "weight")
    return model


def test_zeros_without_masks_are_looked_up_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = lambda: no_waits(monkeypatch)  # noqa: E731
    counts = []
    for pruned in (None, False, True):
        model = without_masks()
        scan = Scan(model, schedule="blelloch:2", pruned=pruned)
        with emulated():
            check(scan, nothing)
            counts.append(entries(scan))
            if pruned:
                with pytest.raises(AssertionError, match="wait"):
                    check(scan, waits)
            else:
                check(scan, waits)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1)
            check(scan, nothing)
    assert counts[0] == counts[1] > counts[2]


@pytest.mark.skipif(ON_GPU, reason="it has the patterns of a CPU")
def test_a_cpu_looks_at_zeros_at_each_call() -> None:
    model = without_masks()
    scan, everything = Scan(model, schedule="blelloch:2"), Scan(model, schedule="blelloch:2", pruned=False)
    for each in (scan, everything):
        check(each, nothing)
    assert entries(scan) < entries(everything)
    with torch.no_grad():
        model[0].weight.add_(0.1)
    before = entries(scan)
    check(scan, nothing)
    assert entries(scan) > before


def test_pullbacks_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = network(), drawn(2, 2, 8, 8).to(DEVICE)
    with emulated():
        vjp(model, x, schedule="blelloch:2")[1](torch.ones(2, 3).to(x))
        with no_waits(monkeypatch):
            y, pullback = vjp(model, x, schedule="blelloch:2")
            (actual,) = pullback(torch.ones_like(y))
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(leaf).sum(), leaf)
    assert (actual - expected).abs().max() <= BOUND * expected.abs().max()


@contextlib.contextmanager
def no_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A context in which whatever copies an array to the device raises."""

    def copies(_: object) -> None:
        raise AssertionError("copies an array")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "from_numpy", copies)
        yield


def check_values(
    prepared: PreparedJacobian, x: torch.Tensor, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare a prepared Jacobian's values, for which nothing waits."""
    with no_waits(monkeypatch):
        actual = prepared.values(x)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("schedule", ["blelloch:2", "blelloch"])
def test_calls_find_what_was_copied_to_the_device(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of products with full matrices, whose plans are in no cache, and no longer than the module lives."""
    model, x = network(share=0.0), drawn(2, 2, 8, 8).to(DEVICE)
    prune_weights(model[:3], 0.7)
    gradient = torch.ones(2, 3).to(x)

    def call(module: nn.Module) -> None:
        vjp(module, x, schedule=schedule)[1](gradient)
        backward(module, x, gradient, schedule=schedule)

    with emulated():
        call(model)
        with no_copies(monkeypatch):
            call(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


class Running(nn.Module):
    """Sums of the elements so far, and softmax without some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(8, 8).to(DEVICE, FLOAT))
        self.mask[0, 3] = -torch.inf

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.cumsum(-1) + self.mask).softmax(-1)


@pytest.mark.parametrize(
    "module",
    [nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(3), nn.Upsample(scale_factor=2, mode="bilinear"), Running(), nn.Softmax(-1)],
    ids=lambda module: type(module).__name__,
)
def test_values_that_arguments_decide_are_copied_once(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """By products of whole scans, and by Jacobians, which may be written to."""
    model, x = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1).to(DEVICE, FLOAT), module), drawn(2, 2, 8, 8).to(DEVICE)
    scan, leaf = Scan(model, schedule="blelloch"), x.clone().requires_grad_()

    def call() -> list[torch.Tensor]:
        J = jacobian(model, x, batched=True)
        values = J.values.clone()
        J.values.zero_()
        return [values, *torch.autograd.grad(scan(leaf).square().sum(), leaf)]

    with emulated():
        expected = call()
        call()
        with no_copies(monkeypatch), no_waits(monkeypatch):
            actual = call()
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("training", [False, True])
def test_statistics_are_put_back_without_a_look(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).to(DEVICE, FLOAT).train(training)
    model[1].running_mean.fill_(0.5)
    x, before = drawn(2, 2, 4, 4).to(DEVICE), copy.deepcopy(model.state_dict())
    with emulated():
        for _ in range(2):
            jacobian(model, x, batched=False)
        versions = [buffer._version for buffer in model.buffers() if buffer.is_floating_point()]
        with no_waits(monkeypatch):
            jacobian(model, x, batched=False)
    assert versions == [buffer._version for buffer in model.buffers() if buffer.is_floating_point()]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


class Shuffled(nn.Module):
    """What moves elements by a buffer of indices."""

    def __init__(self, index: list[int]) -> None:
        super().__init__()
        self.register_buffer("index", torch.tensor(index).to(DEVICE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, self.index].sin() * x


def test_indices_are_compared_once_for_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where calls take turns."""
    modules = [Shuffled([2, 0, 1]), Shuffled([1, 1, 0])]
    scans, x = [Scan(module, schedule="blelloch") for module in modules], drawn(2, 3).to(DEVICE).requires_grad_()

    def compare(scan: Scan, waits: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        with waits():
            (actual,) = torch.autograd.grad(scan(x).sum(), x)
        (expected,) = torch.autograd.grad(scan.module(x).sum(), x)
        assert (actual - expected).abs().max() <= BOUND

    with emulated():
        for _ in range(2):
            for scan in scans:
                compare(scan, nothing)
        for scan in scans:
            compare(scan, lambda: no_waits(monkeypatch))
        modules[0].index[0] = 0
        for scan in scans:
            compare(scan, nothing)
        for scan in scans:
            compare(scan, lambda: no_waits(monkeypatch))


def test_many_indices_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(*(Shuffled([2, 0, 1]) for _ in range(70))), drawn(2, 3).to(DEVICE)
    with emulated():
        prepared = prepare_jacobian(model, x)
        check_values(prepared, x, prepared.values(x), monkeypatch)


def test_memory_that_is_put_into_a_mask_is_looked_at() -> None:
    """As ``mask.data = another`` does, which is no version of its own."""
    model = network()
    scan = Scan(model, schedule="blelloch:2")
    with emulated():
        check(scan, nothing)
        for mask in masks_of(model):
            mask.data = torch.ones_like(mask)
        check(scan, nothing)


def test_jacobians_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are not prepared, of a network with masks, by their products and by colours."""
    model, x = network(), drawn(2, 2, 8, 8).to(DEVICE)
    first, expected = model[:6], {}
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "products": first.forward,
        "colours": lambda u: u.sin() * u.roll(1, -1).exp(),
    }
    for name, f in functions.items():
        with emulated():
            for _ in range(2):
                expected[name] = jacobian(f, x, batched=True)
            with no_waits(monkeypatch):
                actual = jacobian(f, x, batched=True)
        assert torch.equal(actual.values, expected[name].values)
    x = x.cpu()
    for name, f in {**functions, "products": network()[:6].cpu()}.items():
        reference = jacobian(f, x, batched=True)
        assert expected[name].pattern == reference.pattern
        assert (expected[name].values.cpu() - reference.values).abs().max() <= BOUND


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("place", "number"), [(0, 0.0), (2999, 0.0), (7, torch.nan)])
def test_values_that_are_not_finite_are_told_by_a_later_call(
    place: int, number: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.ones(3000, dtype=dtype).to(DEVICE)
    f = lambda u: u.sqrt() * u.roll(1)  # noqa: E731
    with emulated(), caplog.at_level(logging.WARNING, "jacsparse"):
        jacobian(f, x)
        x[place] = number
        assert not jacobian(f, x).values.isfinite().all() and not caplog.records
        if ON_GPU:
            torch.cuda.synchronize()
        x[place] = 1
        assert jacobian(f, x).values.isfinite().all()
        assert "values that are not finite as products" in caplog.text
        caplog.clear()
        jacobian(f, x)
        assert not caplog.records


def test_costs_are_those_of_the_device() -> None:
    """A GPU takes fewer steps and, of seeds and matrices, what calls less of PyTorch."""
    x, model = drawn(2, 2, 8, 8), nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1, dtype=FLOAT) for _ in range(4)))
    here = forward_pass(model, x)[0]
    model, x = copy.deepcopy(model).to(DEVICE), x.to(DEVICE)
    with emulated():
        there = forward_pass(model, x)[0]
        values = by_products(model, x)
    assert here.costs is COSTS["cpu"] and there.costs is COSTS["cuda"]
    assert len(there.order.parts) <= len(here.order.parts)
    for order in (here.order, there.order):
        assert str(order).count("J") == 4
    for sample in range(2):
        expected = autograd_jacobian(model.cpu(), x[sample].cpu())
        assert (values.todense(sample if values.batch > 1 else 0).cpu() - expected).abs().max() <= BOUND


def test_prepared_jacobians_look_at_masks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each version of them, and raise where one lets in what the pattern leaves out."""
    model, x = network()[:6], drawn(2, 2, 8, 8).to(DEVICE)
    with emulated():
        prepared = prepare_jacobian(model, x)
        expected = prepared.values(x)
        check_values(prepared, x, expected, monkeypatch)
        for mask in masks_of(model):
            mask.copy_(mask.clone())
        assert torch.equal(prepared.values(x), expected)
        with no_waits(monkeypatch):
            prepared.values(x)
        masks_of(model)[0].fill_(1)
        with pytest.raises(RuntimeError, match=r"0.weight_mask and 0.weight_orig was zero where the pattern"):
            prepared.values(x)
