"""Activations in blocks as tensors: what code may do with them, and what leaves a model; against the dense model."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from jacsparse.sparse import sparsify
from jacsparse.sparse.blocks import BlockTensor
from jacsparse.sparse.layouts import enter, leave

from ..helpers import close
from .test_models_own_code import Between
from .test_sparsify import pruned

double = {"dtype": torch.float64}


def both(code: Callable[[torch.Tensor], Any], batch: int = 5) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A dense model with code between two layers, its sparse one, and an input."""
    model, x = pruned(Between(code), 0.5), torch.randn(batch, 3, 4, 5, **double)
    return model, sparsify(copy.deepcopy(model), x, measure=False), x


def gradients(model: nn.Module, x: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the input, of others and of the biases."""
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    weights = torch.linspace(-1, 1, y.numel(), **double).view(y.shape)
    biases = [each for name, each in model.named_parameters() if name.endswith("bias")]
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), [leaf, *others, *biases])]


@dataclass(frozen=True)
class Hidden:
    """An output that is no container."""

    last: torch.Tensor
    name: str = "hidden"


@dataclass
class Cache:
    """What a model fills while it runs."""

    layers: list[torch.Tensor] = field(default_factory=list)
    by_name: dict[str, Any] = field(default_factory=dict)


class Kept:
    """An object with attributes."""

    def __init__(self, first: torch.Tensor) -> None:
        self.first, self.itself = first, self


class Filling(Between):
    """Leaves activations in all kinds of places."""

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> Any:
        cache, y = Cache() if cache is None else cache, self.first(x)
        cache.layers += [y, y.relu()]
        cache.by_name["pair"] = (y, {"again": y})
        return Hidden(y * 2), Kept(y), [self.second(y)]


@pytest.mark.parametrize("training", [True, False])
def test_outputs_are_plain_tensors_wherever_they_are(training: bool) -> None:
    model, x = pruned(Filling(nn.Identity()), 0.5), torch.randn(5, 3, 4, 5, **double)
    results = []
    with torch.set_grad_enabled(training):
        for each in (sparsify(model, x, measure=False), model):
            cache = Cache()
            hidden, kept, (last,) = each(x, cache)
            y, named = cache.by_name["pair"]
            assert kept.first is cache.layers[0] is y and kept.itself is kept
            results.append([hidden.last, kept.first, last, *cache.layers, y, named["again"]])
    for ours, expected in zip(*results, strict=True):
        assert type(ours) is torch.Tensor and ours.requires_grad == training
        close(ours, expected, 1e-12)


def _pass_on(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.cos() + 1


def _hooked(y: torch.Tensor) -> torch.Tensor:
    y.register_hook(_pass_on)
    return y.relu() + 1 / (y * y + 0.1)


CODES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a hook that makes numbers of zeros": _hooked,
    "infinite at zero": lambda y: (y.abs().log() + 1 / y).clamp(-3, 3) * (y * y).rsqrt().clamp(max=9),
    "an excitation": lambda y: y * y.mean((2, 3), keepdim=True).sigmoid() + y.mean((2, 3))[:, :, None, None],
    "means": lambda y: nn.functional.avg_pool2d(y, (2, 5)) + nn.functional.adaptive_avg_pool2d(y, (2, 1)).sin(),
    "windows": lambda y: nn.functional.avg_pool2d(y, (2, 5)) * nn.functional.adaptive_avg_pool2d(y, (4, 1)).sum(),
    "three dimensions": lambda y: (y.flatten(2).softmax(-1) * y.view(len(y), 4, 20).tanh()).view_as(y),
    "halves": lambda y: torch.cat([torch.cat([y, y.sin()], dim=1)[:, 2:6], y], dim=1)[:, 1:5],
    "a clone in channels last": lambda y: y.clone(memory_format=torch.channels_last) + y.clone().mul_(2),
    "a view in place": lambda y: (y * 1).view(len(y), -1).relu_().view_as(y).sin() + y,
    "sums and products in place": lambda y: (y * 2).add_(y.relu()).mul_(y),
}


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("batch", [1, 5, 8, 9])
def test_values_and_gradients(name: str, batch: int) -> None:
    model, sparse, x = both(CODES[name], batch)
    for ours, expected in zip(gradients(sparse, x), gradients(model, x), strict=True):
        assert type(ours) is torch.Tensor
        close(ours, expected, 1e-10)


@pytest.mark.parametrize("join", [torch.add, torch.mul, torch.maximum, torch.Tensor.__rsub__, torch.atan2])
def test_gradients_of_tensors_beside_blocks_are_tensors(join: Callable[..., torch.Tensor]) -> None:
    leaf, scale = (torch.rand(shape, **double).requires_grad_() for shape in ((5, 4, 4, 5), (4, 1, 1)))
    model, sparse, x = both(lambda y: join(y, leaf) * scale + join(leaf, y))
    for ours, expected in zip(gradients(sparse, x, leaf, scale), gradients(model, x, leaf, scale), strict=True):
        assert type(ours) is torch.Tensor
        close(ours, expected, 1e-12)


def test_dropout_draws_what_it_draws_for_tensors() -> None:
    model, sparse, x = both(lambda y: nn.functional.dropout(y.relu(), 0.3) + y)
    results = []
    for each in (sparse, model):
        torch.manual_seed(1)
        results.append(gradients(each, x))
    for ours, expected in zip(*results, strict=True):
        close(ours, expected, 1e-12)


def test_saved_tensors_that_hooks_store_elsewhere() -> None:
    model, sparse, x = both(lambda y: y.relu())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone()[:], lambda x: x * 1):
        actual = gradients(sparse, x)
    for ours, expected in zip(actual, gradients(model, x), strict=True):
        close(ours, expected, 1e-12)


class TwiceByItsInput(torch.autograd.Function):
    """A straight-through estimator that saves its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 * x


def test_a_custom_function_after_a_write() -> None:
    def code(y: torch.Tensor) -> torch.Tensor:
        z = y * 3
        z.transpose(0, 1)[1].mul_(2)
        return TwiceByItsInput.apply(z) + TwiceByItsInput.apply(y)

    model, sparse, x = both(code)
    for ours, expected in zip(gradients(sparse, x), gradients(model, x), strict=True):
        close(ours, expected, 1e-12)


def test_copies_and_files() -> None:
    x = torch.randn(5, 3, 4, 2)
    blocks = enter(x, 4)
    assert torch.equal(copy.deepcopy(blocks), x) and repr(blocks) == repr(x)
    file = io.BytesIO()
    torch.save(blocks, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is torch.Tensor and torch.equal(loaded, x)
    assert blocks.tolist() == x.tolist() and isinstance(blocks, BlockTensor)


def test_memory_is_read_where_there_is_some() -> None:
    x = torch.randn(5, 3, 4, 2)
    blocks = enter(x, 4)
    pointer = blocks.data_ptr()
    assert pointer and pointer != x.data_ptr() and pointer == blocks[:].data_ptr()
    blocks.detach().numpy()[...] *= 2
    assert torch.equal(leave(blocks), 2 * x) and torch.equal(leave(enter(blocks, 4)), 2 * x)


def test_shapes_in_place() -> None:
    x = torch.randn(5, 3, 4, 2)
    blocks = enter(x, 4)
    assert blocks.transpose_(0, 1) is blocks and blocks.unsqueeze_(0).shape == (1, 3, 5, 4, 2)
    assert torch.equal(blocks + 0, x.transpose(0, 1)[None])


def test_other_data_is_refused() -> None:
    blocks = enter(torch.ones(2, 3, 4, 4), 2)
    with pytest.raises(TypeError, match="write to it by copy_"):
        blocks.data = torch.zeros(2, 3, 4, 4)


def test_an_activation_is_not_computed_from_later_weights() -> None:
    seen: list[torch.Tensor] = []
    model, sparse, x = both(lambda y: seen.append(y) or y.relu())
    close(sparse(x), model(x), 1e-12)
    _, in_blocks, dense = seen
    assert isinstance(in_blocks, BlockTensor) and type(dense) is torch.Tensor
    with torch.no_grad():
        sparse.model.first.values.mul_(2)
    with pytest.raises(RuntimeError, match="clone it in the forward pass"):
        in_blocks.sum()
