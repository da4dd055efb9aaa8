"""Leapfrogging against autograd, and its predicted times against the paper's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.flop_counter import FlopCounterMode

import jacsparse
from jacsparse.stages import Record, chain
from jacsparse.training import leapfrog
from jacsparse.training.node_gradients import pull_back_by_nodes, pull_back_input
from tests.example_models import lenet, small
from tests.helpers import close


def feed_forward(layers: int, features: int = 5) -> nn.Sequential:
    torch.manual_seed(layers)
    return nn.Sequential(
        *[part for _ in range(layers) for part in (nn.Linear(features, features), nn.Sigmoid())]
    ).double()


class Residual(nn.Module):
    def __init__(self, channels: int, inplace: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.activation = nn.LeakyReLU(0.3, inplace=inplace)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(x + self.second(self.activation(self.first(x)).tanh()))


def pruned() -> nn.Module:
    module = feed_forward(6)
    for layer in module[::2]:
        prune.random_unstructured(layer, "weight", 0.6)
    return module


def frozen() -> nn.Module:
    module = feed_forward(6)
    for layer in (module[0], module[6]):
        layer.requires_grad_(False)
    module[4].bias.requires_grad_(False)
    return module


def twice() -> nn.Module:
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 5), layer, nn.Tanh(), layer)


def parametrised() -> nn.Module:
    return nn.Sequential(*[parametrizations.weight_norm(nn.Linear(5, 5)) for _ in range(3)])


class Gate(nn.Module):
    """An operator whose argument is a parameter's function, and some that overwrite what autograd needs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * self.scale.exp()).mul_(2).tanh_() + x
        y = nn.functional.silu(y, inplace=True)
        return y.mul_((x * self.scale).sigmoid()).add_(x)


class Constant(nn.Module):
    """Its derivative is zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(1e3, 2e3)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 7, 0.0, batch_first=True)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions, ReLU, max-pooling": (lenet, (3, 32, 32)),
    "normalisation, in place, dilation": (small, (2, 9, 9)),
    "residual blocks": (lambda: nn.Sequential(*[Residual(3, False) for _ in range(4)]), (3, 5, 4)),
    "residual blocks in place": (lambda: nn.Sequential(*[Residual(2, True) for _ in range(3)]), (2, 3, 5)),
    "pruned": (pruned, (5,)),
    "frozen": (frozen, (5,)),
    "a layer used twice": (twice, (5,)),
    "parametrised": (parametrised, (5,)),
    "gates": (lambda: nn.Sequential(Gate(), nn.Linear(5, 5), nn.LayerNorm(5), Gate(), nn.PReLU(5)), (5,)),
    "attention": (lambda: nn.Sequential(*[encoder() for _ in range(3)]), (4, 6)),
    "a single layer": (lambda: nn.Linear(5, 2), (5,)),
    "no parameters": (lambda: nn.Sequential(nn.Tanh(), nn.Flatten()), (2, 3)),
    "no stages": (nn.Flatten, (2, 3)),
    "a vanishing gradient": (lambda: nn.Sequential(nn.Linear(5, 5), Constant(), nn.Linear(5, 2)), (5,)),
}  # fmt: skip


def gradients(module: nn.Module, backward: Callable[[], torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of the input and of all parameters."""
    module.zero_grad()
    return [backward(), *(parameter.grad for parameter in module.parameters())]


def check(module: nn.Module, x: torch.Tensor, threads: int) -> None:
    """The gradients by leapfrogging are autograd's."""
    gradient = torch.randn_like(module(x).detach())

    def by_autograd() -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        module(leaf).backward(gradient)
        assert leaf.grad is not None
        return leaf.grad

    def leapfrogging() -> torch.Tensor:
        return jacsparse.leapfrog_backward(module, x, gradient, threads=threads)

    for ours, reference in zip(gradients(module, leapfrogging), gradients(module, by_autograd), strict=True):
        assert (ours is None) == (reference is None)
        if ours is not None and reference is not None:
            close(ours, reference, 1e-12)


@pytest.mark.parametrize("layers", range(1, 21))
def test_gradients_are_autograd_s(layers: int) -> None:
    for threads in range(1, 9):
        check(feed_forward(layers), torch.randn(3, 5, dtype=torch.float64), threads)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("name", MODULES)
def test_any_chain(name: str, threads: int) -> None:
    torch.manual_seed(0)
    build, shape = MODULES[name]
    module = build().double()
    for batch in (0, 1, 4):
        check(module, torch.randn(batch, *shape, dtype=torch.float64), threads)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_float32_on_one_thread_has_autograd_s_bits(threads: int) -> None:
    module, x = lenet(), torch.randn(4, 3, 32, 32)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runners = (module, jacsparse.nn.Leapfrog(module, threads=threads))
        computed = [gradients(module, lambda run=run: step(run, x)) for run in runners]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*computed, strict=True))


def step(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A pass forward and back; the gradient of the input."""
    leaf = x.clone().requires_grad_()
    module(leaf).square().sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("layers", range(1, 21))
def test_each_layer_has_one_worker(layers: int) -> None:
    for threads in range(1, 25):
        parts = leapfrog.shares(range(layers), layers, threads)
        assert len(parts) == min(layers, threads)
        assert sorted(layer for part, _ in parts for layer in part) == list(range(layers))
        assert all(depth == part[-1] + 1 for part, depth in parts) and max(depth for _, depth in parts) == layers


def test_workers_have_one_thread_each_and_meet_each_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, int]] = []

    def noted(record: Record, gradient: torch.Tensor, externals: Sequence[int]) -> Any:
        calls.append((record.stage.path, threading.get_ident(), torch.get_num_threads()))
        time.sleep(0.01)
        return pull_back_by_nodes(record, gradient, externals)

    monkeypatch.setattr(leapfrog, "pull_back_by_nodes", noted)
    check(feed_forward(7), torch.randn(3, 5, dtype=torch.float64), 3)
    paths, workers, counts = zip(*calls, strict=True)
    assert sorted(paths, key=int) == [str(2 * layer) for layer in range(7)]
    assert len(set(workers)) == 3 and set(counts) == {1}


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Linear(5, 5), (5,)),
        (lambda: nn.Conv2d(2, 3, 3), (2, 6, 6)),
        (lambda: Residual(2, True), (2, 6, 6)),
    ],
)
def test_the_recursion_of_errors_alone_omits_the_gradients_of_weights(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    record = chain(build(), shape).run(torch.randn(3, *shape))[0]
    gradient, places = torch.randn_like(record.output), sorted(record.externals)
    with FlopCounterMode(display=False) as both:
        expected, _ = pull_back_by_nodes(record, gradient, places)
    with FlopCounterMode(display=False) as alone:
        assert torch.equal(pull_back_input(record, gradient), expected)
    assert both.get_total_flops() == 2 * alone.get_total_flops() > 0


class Scaled(nn.Module):
    """Two layers, and an operator whose backward pass fails where its scale was overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh() * self.scale)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_nothing_is_accumulated_where_a_worker_fails(threads: int) -> None:
    module, x = Scaled(), torch.randn(2, 5)
    before = torch.get_num_threads()
    y = jacsparse.nn.Leapfrog(module, threads=threads)(x)
    with torch.no_grad():
        module.scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.get_num_threads() == before
    jacsparse.leapfrog_backward(module, x, torch.ones(2, 5), threads=threads)
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_gradients_accumulate_and_the_module_is_part_of_autograd() -> None:
    module, x = feed_forward(5), torch.randn(3, 5, dtype=torch.float64)
    runner = jacsparse.nn.Leapfrog(module, threads=2)
    expected = [2 * gradient for gradient in gradients(module, lambda: step(module, x))]
    computed = gradients(module, lambda: step(runner, x) + step(runner, x))
    for ours, reference in zip(computed, expected, strict=True):
        close(ours, reference, 1e-12)
    assert "threads=2" in repr(runner) and runner.state_dict().keys() == {f"module.{n}" for n in module.state_dict()}


def test_dropout_has_the_draw_of_the_forward_pass() -> None:
    module, x = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 5), nn.Tanh()), torch.randn(3, 5)
    expected, computed = (
        (torch.manual_seed(0), gradients(module, lambda run=run: step(run, x)))[1]
        for run in (module, jacsparse.nn.Leapfrog(module, threads=2))
    )
    for ours, reference in zip(computed, expected, strict=True):
        close(ours, reference, 1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.autocast("cpu", dtype=torch.bfloat16)])
def test_modes_of_the_caller(mode: Callable[[], Any]) -> None:
    module, x = feed_forward(4).float(), torch.randn(3, 5)
    with mode():
        output = module(x)
    expected = gradients(module, lambda: step_under(mode, module, x, torch.ones_like(output)))

    def leapfrogging() -> torch.Tensor:
        with mode():
            return jacsparse.leapfrog_backward(module, x, torch.ones_like(output), threads=2)

    for ours, reference in zip(gradients(module, leapfrogging), expected, strict=True):
        close(ours, reference, 1e-5)


def step_under(mode: Callable[[], Any], module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    with mode(), torch.enable_grad():
        y = module(leaf)
    y.backward(gradient)
    assert leaf.grad is not None
    return leaf.grad


def test_concurrent_callers_and_their_threads() -> None:
    before = torch.get_num_threads()
    cases = [(feed_forward(layers), torch.randn(3, 5, dtype=torch.float64), layers) for layers in range(2, 8)]
    with ThreadPoolExecutor(3, initializer=torch.get_num_threads) as pool:
        for future in [pool.submit(check, *case) for case in cases]:
            future.result()
    counts = []
    newcomer = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    newcomer.start()
    newcomer.join()
    assert counts == [before] == [torch.get_num_threads()]


@pytest.mark.parametrize("threads", [0, -1, 2.0, True, "2", None])
def test_bad_threads(threads: Any) -> None:
    with pytest.raises(ValueError, match=r"threads is .*; expected an integer of at least 1, such as"):
        jacsparse.leapfrog_backward(nn.Linear(2, 2), torch.ones(1, 2), torch.ones(1, 2), threads=threads)
    with pytest.raises(ValueError, match="threads is"):
        jacsparse.nn.Leapfrog(nn.Linear(2, 2), threads=threads)


def test_what_backward_refuses_is_refused() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"^1: backward runs the forward again"):
        jacsparse.leapfrog_backward(nn.Sequential(nn.ReLU(), nn.Dropout()), x, x, threads=2)
    with pytest.raises(ValueError, match="expected that of the output"):
        jacsparse.leapfrog_backward(nn.Linear(3, 2), x, x, threads=2)
    with pytest.raises(TypeError, match="x is a list"):
        jacsparse.leapfrog_backward(nn.Linear(3, 2), [1.0], x, threads=2)  # type: ignore[arg-type]
    hooked = nn.Sequential(nn.Linear(3, 3))
    hooked[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(jacsparse.UnsupportedOperatorError, match="a backward hook"):
        jacsparse.leapfrog_backward(hooked, x, x, threads=2)
