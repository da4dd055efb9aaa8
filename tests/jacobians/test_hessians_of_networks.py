"""Hessians of networks' losses by the input and by the parameters, against PyTorch's or differences of gradients."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from jacsparse import hessian, prepare_hessian
from tests.helpers import FLOAT, drawn

from .drawn_hessians import differences, reference
from .test_drawn_hessians import assert_close

FULL = os.environ.get("JACSPARSE_TESTS") == "full"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention(x, x, x, need_weights=False)[0]
        return self.out(self.norm(x + y).mean(1))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.second, self.out = nn.Conv2d(2, 2, 3, padding=1, groups=2), nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.silu(self.norm(self.first(x)))
        return self.out(functional.adaptive_avg_pool2d(y + self.second(y), 1).flatten(1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm and max-pooling": (
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3))
        ),
        (2, 1, 6, 4),
    ),
    "overlapping windows": (
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(3, 1, 1), nn.Conv2d(2, 2, 2)),
            *(nn.Tanh(), nn.AdaptiveMaxPool2d((1, 2)), nn.Flatten(), nn.Linear(4, 3)),
        ),
        (1, 1, 6, 5),
    ),
    "one dimension": (
        lambda: nn.Sequential(
            *(nn.Conv1d(2, 3, 2), nn.GroupNorm(3, 3), nn.SiLU(), nn.MaxPool1d(2, 1), nn.Flatten(), nn.Linear(6, 3))
        ),
        (1, 2, 4),
    ),
    "three dimensions": (
        lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.ELU(), nn.MaxPool3d(2), nn.Flatten(), nn.Linear(2, 3)),
        (1, 1, 3, 3, 3),
    ),
    "transposed": (
        lambda: nn.Sequential(
            *(nn.ConvTranspose2d(1, 2, 2, stride=2, output_padding=1), nn.Softplus(), nn.MaxPool2d(2)),
            *(nn.Conv2d(2, 1, 2), nn.Flatten(), nn.Linear(1, 3)),
        ),
        (1, 1, 2, 2),
    ),
    "upsampled": (
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 2, 2), nn.Sigmoid(), nn.Upsample(scale_factor=1.5, mode="bilinear"), nn.AvgPool2d(2, 1)),
            *(nn.Flatten(), nn.Linear(8, 2)),
        ),
        (1, 1, 3, 3),
    ),
    "residual": (Residual, (1, 1, 4, 4)),
    "attention": (Attention, (1, 3, 4)),
    "encoder": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(2, 1, 3, dropout=0.0, batch_first=True), nn.Flatten(), nn.Linear(6, 2)
        ),
        (1, 3, 2),
    ),
}
SOME = ("overlapping windows", "one dimension", "transposed", "attention")
#: By PyTorch's fused kernels, which it does not differentiate twice.
FUSED = ("attention", "encoder")
LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cross entropy": lambda y: functional.cross_entropy(y, torch.arange(len(y)) % y.shape[1]),
    "mse": lambda y: functional.mse_loss(y, torch.linspace(0, 1, y.numel(), dtype=y.dtype).reshape(y.shape)),
}


def network_of(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    network = build().eval().to(FLOAT)
    for buffer_name, buffer in network.named_buffers():
        if buffer_name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
        elif buffer_name.endswith("running_mean"):
            buffer.normal_()
    return network, shape


@pytest.mark.parametrize("loss", LOSSES if FULL else ["cross entropy"])
@pytest.mark.parametrize("name", NETWORKS)
def test_by_the_input(name: str, loss: str) -> None:
    network, shape = network_of(name)
    f = lambda x: LOSSES[loss](network(x))  # noqa: E731
    x, y = torch.randn(shape, dtype=FLOAT), -torch.randn(shape, dtype=FLOAT)
    flat = lambda x: f(x.reshape(shape))[None]  # noqa: E731
    expected, then = (expected_of(name, flat, each.reshape(1, -1)) for each in (x, y))
    tolerance = 1e-5 if name in FUSED else 1e-9
    assert_close(hessian(f, x), expected, tolerance)
    assert_close(hessian(f, y), then, tolerance)
    prepared = prepare_hessian(f, x)
    # Other elements win.
    assert_close(prepared(y), then, tolerance)


@pytest.mark.parametrize("loss", LOSSES if FULL else ["mse"])
@pytest.mark.parametrize("name", NETWORKS if FULL else SOME)
def test_by_the_parameters(name: str, loss: str) -> None:
    network, shape = network_of(name)
    parameters = {key: value.detach() for key, value in network.named_parameters()}
    x = torch.randn(shape, dtype=FLOAT)

    def f(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return LOSSES[loss](functional_call(network, parameters, (x,)))

    def split(flat: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = flat.reshape(-1).split([value.numel() for value in parameters.values()])
        return {key: part.reshape(parameters[key].shape) for key, part in zip(parameters, parts, strict=True)}

    flat = torch.cat([value.reshape(-1) for value in parameters.values()])[None]
    other = 1.3 * flat + 0.1 * torch.randn_like(flat)
    whole = lambda flat: f(split(flat), x)[None]  # noqa: E731
    tolerance = 1e-5 if name in FUSED else 1e-9
    assert_close(hessian(f, parameters, x), expected_of(name, whole, flat), tolerance)
    if FULL or name in ("overlapping windows", "attention"):
        prepared = prepare_hessian(f, parameters, x)
        assert_close(prepared(split(other), x), expected_of(name, whole, other), tolerance)


def expected_of(name: str, f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return differences(f, x) if name in FUSED else reference(f, x)


def test_attention_is_as_before_for_other_calls() -> None:
    """Several threads take Hessians at once, and one of them fails: PyTorch's switch is one for all."""
    switches = (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled)
    before, x = [switch() for switch in switches], drawn(12)

    def attention(x: torch.Tensor) -> torch.Tensor:
        q = x.reshape(1, 1, 4, 3)
        return functional.scaled_dot_product_attention(q, q, q).square().sum()

    def failing(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(hessian, f, x) for f in (attention, failing) * 8]
    first, *others = [result.result().todense() for result in results[::2]]
    assert all(torch.equal(first, other) for other in others)
    assert all(isinstance(result.exception(), ZeroDivisionError) for result in results[1::2])
    assert [switch() for switch in switches] == before
