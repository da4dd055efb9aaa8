"""Networks whose samples depend on each other, as by batch normalisation in training mode, by each way back."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jacsparse.models import build
from torch import nn
from torch.nn import functional

import jacsparse
from jacsparse import UnsupportedOperatorError, schedule
from jacsparse.nn import Leapfrog, Scan, Solve
from jacsparse.stages import chain_for_all
from tests.helpers import BOUND, FLOAT

FULL = os.environ.get("JACSPARSE_TESTS") == "full"

WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    **{name: lambda m, name=name: Scan(m, schedule=name) for name in ("linear", "blelloch", "blelloch:1")},
    **{name: lambda m, name=name: Scan(m, schedule=name) for name in ("chunked:2", "balanced:2")},
    "slices": lambda m: Scan(m, schedule="blelloch", memory_limit=4000),
    **{f"{k} threads": lambda m, k=k: Leapfrog(m, threads=k) for k in (1, 2, 3, 7)},
    **{name: lambda m, name=name: Solve(m, method=name) for name in ("substitution", "cyclic_reduction", "scan")},
}


class Centred(nn.Module):
    """Samples without their mean; the gradient goes on through a copy of it alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Weighed(nn.Module):
    """Weights from all samples, as within a batch in contrastive learning."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.flip(0).T / 4).softmax(0).T @ x


class Residual(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.inner(x))


class BatchFirst(nn.Module):
    """Statistics of samples that are not along the first axis."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.T[:, None, :].flatten(0, 1)[:, None]).squeeze(1).reshape(x.T.shape).T * 2


class Reflected(nn.Module):
    """An operator that has no rule."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.householder_product(x.view(-1, 3, 2), x[:, :2]).flatten(1).sin()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 6),
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "batch norm": lambda: nn.BatchNorm1d(6),
    "without statistics": lambda: nn.BatchNorm1d(6, affine=False, track_running_stats=False),
    "cumulative": lambda: nn.BatchNorm1d(6, momentum=None),
    "centred": Centred,
    "weighed": Weighed,
    "layer norm": lambda: nn.LayerNorm(6),
    "residual": lambda: Residual(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()),
    "residual without": lambda: Residual(nn.Linear(6, 6), nn.Tanh()),
    "first axis": BatchFirst,
    "a rule that is missing before": lambda: Residual(Reflected(), nn.BatchNorm1d(6)),
    "a rule that is missing behind": lambda: Residual(nn.BatchNorm1d(6), nn.Tanh(), Reflected()),
}


@dataclass
class Gradients:
    """What a training step leaves: gradients, and buffers."""

    gradients: list[torch.Tensor]
    buffers: list[torch.Tensor]


def trained(module: nn.Module, wrap: Callable[[nn.Module], nn.Module], x: torch.Tensor, steps: int = 2) -> Gradients:
    module = copy.deepcopy(module)
    wrapped, leaf = wrap(module), x.clone().requires_grad_()
    for _ in range(steps):
        y = wrapped(leaf)
        (y.sin() * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)).sum().backward()
    parameters = [p.grad for p in module.parameters() if p.grad is not None]
    assert leaf.grad is not None
    return Gradients([leaf.grad, *parameters], list(module.buffers()))


def assert_as_autograd(module: nn.Module, ways: Sequence[str], x: torch.Tensor) -> None:
    expected = trained(module, lambda m: m, x)
    scale = max(1.0, *(each.abs().max().item() for each in expected.gradients))
    for way in ways:
        actual = trained(module, WAYS[way], x)
        for one, other in zip(actual.gradients, expected.gradients, strict=True):
            assert (one - other).abs().max() <= BOUND * scale, way
        assert all(torch.equal(one, other) for one, other in zip(actual.buffers, expected.buffers, strict=True)), way


@settings(max_examples=300 if FULL else 12)
@given(
    st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=9),
    st.lists(st.sampled_from(sorted(WAYS)), min_size=2, max_size=2, unique=True),
    st.sampled_from([2, 3, 16]),
)
def test_drawn_networks(names: list[str], ways: list[str], batch: int) -> None:
    torch.manual_seed(len(names))
    module = nn.Sequential(*(LAYERS[name]() for name in names)).double()
    assert_as_autograd(module, ways, torch.randn(batch, 6, dtype=FLOAT))


def cnn() -> nn.Module:
    """Convolutions with batch normalisation, and stretches that are long enough for products of matrices."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4), nn.Tanh(),
        nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3),
    ).double()  # fmt: skip


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_a_convolutional_network(batch: int) -> None:
    assert_as_autograd(cnn(), sorted(WAYS), torch.randn(batch, 2, 6, 6, dtype=FLOAT))


def test_products_do_not_go_across() -> None:
    chain = chain_for_all(cnn(), torch.randn(4, 2, 6, 6, dtype=FLOAT), couples=True)
    assert "no matrix" in repr(chain)
    assert [chain.stages[number].path for number in chain.coupling] == ["1", "7"]
    assert repr(chain.stages[1]) == "<Stage 1: couples samples, (3, 6, 6) to (3, 6, 6)>"
    plan = schedule.resolve("blelloch", len(chain), chain)
    products = [step for step in plan.live_steps() if step.kind == "mm"]
    without = {len(chain) - number for number in chain.coupling}
    assert products and not any(without & {step.left, step.right} for step in products)
    with pytest.raises(ValueError, match=r"multiplies the matrix of a stage that couples samples, which has none"):
        schedule.resolve(schedule.blelloch(len(chain)), len(chain), chain)
    with pytest.raises(UnsupportedOperatorError, match=r"^1: aten.native_batch_norm couples the samples of a batch"):
        _ = chain.pattern


def test_residual_network_as_people_write_it() -> None:
    module, x = build("resnet8").train().double(), torch.randn(2, 3, 16, 16, dtype=FLOAT)
    assert_as_autograd(module, ["linear", "2 threads", "substitution"], x)


def test_one_sample_is_refused_as_by_pytorch() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    for wrap in (Scan(module, schedule="linear"), Leapfrog(module, threads=2), Solve(module)):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            wrap(torch.ones(1, 3, requires_grad=True))


def test_evaluation_mode_after_training_mode() -> None:
    """The chain of one is none of the other."""
    module = cnn()
    scan, x = Scan(module, schedule="blelloch"), torch.randn(3, 2, 6, 6, dtype=FLOAT)
    for training in (True, False, True):
        module.train(training)
        expected = trained(module, lambda m: m, x, steps=1)
        leaf = x.clone().requires_grad_()
        before = copy.deepcopy(module.state_dict())
        y = scan(leaf)
        g = torch.linspace(-1, 2, y.numel(), dtype=FLOAT).reshape(y.shape)
        (actual,) = torch.autograd.grad((y.sin() * g).sum(), leaf)
        assert torch.allclose(actual, expected.gradients[0], rtol=0, atol=1e-12)
        module.load_state_dict(before)


def test_tied_weights_on_both_sides() -> None:
    linear = nn.Linear(5, 5)
    module = nn.Sequential(linear, nn.Tanh(), nn.BatchNorm1d(5), linear, nn.Tanh(), linear, nn.Tanh(), linear).double()
    assert_as_autograd(module, sorted(WAYS), torch.randn(4, 5, dtype=FLOAT))


def test_operators_without_a_rule_are_taken_beside_normalisation_alone() -> None:
    x = torch.randn(4, 6, dtype=FLOAT)
    for inner in ([Reflected(), nn.BatchNorm1d(6)], [nn.BatchNorm1d(6), Reflected()]):
        assert_as_autograd(nn.Sequential(nn.Linear(6, 6), Residual(*inner), nn.Tanh()).double(), sorted(WAYS), x)
    # Where they are stages of their own, there is a remedy.
    for inner in ([Reflected()], [nn.BatchNorm1d(6), nn.Sequential(Residual(Reflected()))]):
        with pytest.raises(UnsupportedOperatorError, match=r"householder_product has no rule; register one with"):
            Scan(nn.Sequential(*inner).double(), schedule="linear")(x.clone().requires_grad_())


def test_jacobian_names_the_way() -> None:
    module, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double(), torch.randn(4, 3, dtype=FLOAT)
    with pytest.raises(UnsupportedOperatorError, match=r"1: batch normalisation in training mode .* by batched=False$"):
        jacsparse.jacobian(module, x)
    whole = jacsparse.jacobian(module, x, batched=False)
    expected = torch.autograd.functional.jacobian(module, x).reshape(12, 12)
    assert torch.allclose(whole.todense(), expected, rtol=0, atol=1e-12)
