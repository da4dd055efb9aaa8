"""What a model's own code does to activations between sparse layers, against the dense model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from jacsparse.sparse import SparseConv2d, SparseModel, sparsify

from ..helpers import close
from .test_sparsify import pruned


class Between(nn.Module):
    """Two convolutions with code between them, whose first output that code may use again."""

    def __init__(self, code: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.code = code

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.code(self.first(x)))


class Doubled(torch.autograd.Function):
    """A custom function, whose way leads through PyTorch's C++."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def _set_a_channel(y: torch.Tensor) -> torch.Tensor:
    y[:, 1] = 0.5
    return y


def _write_to_a_view(y: torch.Tensor) -> torch.Tensor:
    y.transpose(0, 1)[2].mul_(3)
    return y + y


def _write_after_use(y: torch.Tensor) -> torch.Tensor:
    z = y * 2
    y.transpose(0, 1)[0].add_(1)
    return y * z


def _write_between_branches(y: torch.Tensor) -> torch.Tensor:
    positive = y.relu()
    y.add_(1)
    return positive * y.sigmoid()


def _write_by_a_mask(y: torch.Tensor) -> torch.Tensor:
    y.masked_fill_(y > 0.2, 0.1)
    return y.clamp(min=-0.1)


def _without_gradient(y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        gate = functional.relu(y)
    return functional.relu(y) * gate + y.detach()


def _frozen_then_used(y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = 1 + y.relu()
    return y / scale


def _hooked(y: torch.Tensor) -> torch.Tensor:
    if y.requires_grad:
        y.register_hook(lambda gradient: 3 * gradient)
    return y.tanh()


def _kept(y: torch.Tensor) -> torch.Tensor:
    if y.requires_grad:
        y.retain_grad()
    return y.tanh()


def _write_to_a_flat_view(y: torch.Tensor) -> torch.Tensor:
    y.flatten(1).mul_(2)
    return y


def _write_after_flattening(y: torch.Tensor) -> torch.Tensor:
    flat = y.flatten(1)
    y.mul_(2)
    return y + flat.view_as(y)


def _write_after_a_view(y: torch.Tensor) -> torch.Tensor:
    view = y.transpose(0, 1)
    y.mul_(3)
    return y + view.transpose(0, 1)


def _write_after_detaching(y: torch.Tensor) -> torch.Tensor:
    detached = y.detach()
    y.add_(1)
    return y * detached


def _read_without_gradient(y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        mean = y.mean()
    with torch.inference_mode():
        most = float(y.amax())
    y.flatten(1).mul_(2)
    return y * mean + most * y.mean()


def _begin_in_inference_mode(y: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        most = float((y * 2).amax())
    y.flatten(1).relu_()
    return y * most


def _write_without_gradient(y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y.mul_(2)
        y[:, 0] = 1
    return functional.relu(y)


def _write_to_its_data(y: torch.Tensor) -> torch.Tensor:
    y.data.mul_(2)
    y[:, 1].data.zero_()
    return y


def _write_by_numpy(y: torch.Tensor) -> torch.Tensor:
    y.detach().numpy()[...] *= 2
    return y


def _turn_in_place(y: torch.Tensor) -> torch.Tensor:
    y.unsqueeze_(0)
    return y[0]


def _detach_in_place(y: torch.Tensor) -> torch.Tensor:
    doubled = 2 * y
    y.detach_()
    return y + doubled


def _write_to_an_output(y: torch.Tensor) -> torch.Tensor:
    output = torch.empty_like(y)
    torch.add(y.detach(), y.detach(), out=output)
    with torch.no_grad():
        torch.mul(y, y, out=output)
    return output + y


def _hook_after_use(y: torch.Tensor) -> torch.Tensor:
    positive = y.relu()
    return positive + _hooked(y)


def _gradient_within(y: torch.Tensor) -> torch.Tensor:
    if not y.requires_grad:
        return y
    (gradient,) = torch.autograd.grad(y.square().sum(), y, create_graph=True)
    return gradient * y


def _transform_around(y: torch.Tensor) -> torch.Tensor:
    ones = torch.ones_like(y[:, :1])
    return torch.func.jvp(lambda x: (x * y).sin(), (ones,), (ones,))[1]


def _match(y: torch.Tensor) -> torch.Tensor:
    match y:
        case torch.Tensor():
            y = y * 2
    return y * 3 if issubclass(y.__class__, torch.Tensor) else y


@functools.singledispatch
def _by_class(y: object) -> object:
    return y


@_by_class.register(torch.Tensor)
def _by_class_of_tensors(y: torch.Tensor) -> torch.Tensor:
    return 2 * y


@torch.jit.script
def _scripted(y: torch.Tensor) -> torch.Tensor:
    return y.relu() * 2


def _ask_and_go_on_in_cpp(y: torch.Tensor) -> torch.Tensor:
    assert isinstance(y, torch.Tensor)
    return y * torch._C._functorch.is_batchedtensor(y) + torch.ops.aten.relu(y) + _scripted(y)


def _compare_objects(y: torch.Tensor) -> torch.Tensor:
    z = y.add_(1)
    numbers = {y: 2}
    assert z is y and y.contiguous() is y and y in numbers and y in [y]
    return z * numbers[y] * (1.0 in torch.ones_like(y))


CODES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a channel set": _set_a_channel,
    "a view written to": _write_to_a_view,
    "a view written to after use": _write_after_use,
    "written to between branches": _write_between_branches,
    "written to by masks": _write_by_a_mask,
    "all zero": lambda y: y.relu() + y.zero_(),
    "in place by position": lambda y: y * functional.leaky_relu(y, 0.1, True),
    "in place by name": lambda y: y * functional.hardswish(y, inplace=True),
    "without gradient": _without_gradient,
    "divided by": _frozen_then_used,
    "divided": lambda y: (1 + y.square()) / (2 + y.sigmoid()),
    "a hook": _hooked,
    "a gradient kept": _kept,
    "custom": Doubled.apply,
    "checkpoint": lambda y: checkpoint(lambda x: x.relu() * x, y, use_reentrant=False),
    "checkpoint, reentrant": lambda y: checkpoint(lambda x: x.relu() * x, y, use_reentrant=True),
    "named operands": lambda y: torch.add(input=y, other=torch.mul(other=y, input=y), alpha=2),
    "swapped operands": lambda y: torch.sub(other=y, input=y * 3),
    "clamped by tensors": lambda y: y.clamp(max=torch.full_like(y, 0.3)),
    "another dtype and back": lambda y: y.float().double() + y.to(torch.float64),
    "viewed as integers": lambda y: y * (y.detach().view(torch.int64) > 0),
    "remainders": lambda y: (y % 0.5) + (y.detach() // 0.5) + 2**y + y**2 + abs(y) + +y,
    "comparisons": lambda y: y * ((y > 0) | (y < -0.2)) + (y != 0) * (y == y),
    "means of windows": lambda y: functional.avg_pool2d(y, 3, 1, 1, False, False).relu(),
    "concatenated": lambda y: torch.cat([y[:, :2], y[:, 2:]], dim=1) + torch.cat((y, y), dim=0)[: len(y)],
    "its type": lambda y: y * 2 if y.is_floating_point() else y,
    "its device": lambda y: torch.zeros(y.shape, dtype=y.dtype, device=y.device) + y,
    "numbers of it": lambda y: y * float(y.detach().mean()) if y.abs().max().item() > 0 else y,
    "iterated": lambda y: torch.stack([each.relu() for each in y]),
    "a flat view written to": _write_to_a_flat_view,
    "written to after it was flattened": _write_after_flattening,
    "written to after a view": _write_after_a_view,
    "written to after it was detached": _write_after_detaching,
    "read without gradient": _read_without_gradient,
    "first read in inference mode": _begin_in_inference_mode,
    "written to without gradient": _write_without_gradient,
    "its data written to": _write_to_its_data,
    "written to by NumPy": _write_by_numpy,
    "another shape in place": _turn_in_place,
    "detached in place": _detach_in_place,
    "an output to write to": _write_to_an_output,
    "a hook after use": _hook_after_use,
    "a gradient within": _gradient_within,
    "a transform around": _transform_around,
    "a transform": torch.func.vmap(lambda y: 2 * y),
    "matched": _match,
    "dispatched": _by_class,
    "scripted": _ask_and_go_on_in_cpp,
    "compiled": torch.compile(lambda y: y.relu() * 2, backend="eager"),
    "compared": _compare_objects,
    "no dropout": lambda y: functional.dropout(y, 0.5, False).mul_(2) + y,
    "arrays beside it": lambda y: y + torch.from_numpy(np.ones(5) * y.detach().numpy()),
    "a tensor without a batch": lambda y: y * torch.arange(4, dtype=y.dtype)[:, None, None],
}  # fmt: skip


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize(("batch", "training"), [(1, True), (5, True), (8, False)])
def test_code_between_layers(name: str, batch: int, training: bool) -> None:
    model = pruned(Between(CODES[name]), 0.5)
    x = torch.randn(batch, 3, 4, 5, dtype=torch.float64)
    sparse = sparsify(copy.deepcopy(model), x, measure=False)
    assert len([each for each in sparse.modules() if isinstance(each, SparseConv2d)]) == 2
    for _ in range(2):
        if not training:
            with torch.no_grad():
                close(sparse(x), model(x), 1e-12)
            continue
        results = []
        for each in (sparse, model):
            at = x.clone().requires_grad_()
            y = each(at)
            (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
            results.append((y, at.grad, _gradient_of_weight(each)))
            each.zero_grad()
        for ours, expected in zip(*results, strict=True):
            close(ours, expected, 1e-12)


def _gradient_of_weight(model: nn.Module) -> torch.Tensor:
    first = model.model.first if isinstance(model, SparseModel) else model.first
    if not isinstance(first, SparseConv2d):
        return first.weight_orig.grad
    dense = torch.zeros(first.weight_shape, dtype=torch.float64)
    dense.view(-1)[first._structure.places] = first.values.grad
    return dense


class Counting(Between):
    """Code that changes what is outside of it."""

    def __init__(self) -> None:
        super().__init__(torch.func.vmap(lambda y: 2 * y))
        self.norm, self.calls = nn.BatchNorm2d(4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.norm(self.first(x)) * torch.rand(len(x), 1, 1, 1, dtype=x.dtype)
        return self.second(self.code(y))


def test_code_runs_once_in_each_call() -> None:
    model, x = pruned(Counting(), 0.5), torch.randn(3, 3, 4, 5, dtype=torch.float64)
    sparse, results = sparsify(model, x, measure=False), []
    for each in (sparse, model):
        torch.manual_seed(0)
        results.append([each(x), each(x), *(buffer.clone() for _, buffer in each.named_buffers() if buffer.ndim < 2)])
    assert sparse.model.calls == model.calls == 2
    for ours, expected in zip(*results, strict=True):
        close(ours, expected, 1e-12)


class Held(NamedTuple):
    """Neither a list nor a mapping that is looked into."""

    hidden: Callable[[], torch.Tensor]


class Opened(nn.Module):
    """Takes an activation that comes in no argument itself."""

    def forward(self, held: Held) -> torch.Tensor:
        return torch.func.vmap(lambda y: 2 * y)(held.hidden())


def test_an_activation_in_an_object() -> None:
    class Holding(Between):
        def __init__(self) -> None:
            super().__init__(lambda y: self.opened(Held(lambda: y)))
            self.opened = Opened()

    model, x = pruned(Holding(), 0.5), torch.randn(3, 3, 4, 5, dtype=torch.float64)
    close(sparsify(model, x, measure=False)(x), model(x), 1e-12)


@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_writes_after_a_layer_has_read(batch: int) -> None:
    class Writing(Between):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            x.zero_()
            z = self.second(y)
            y[:, 0] = 0
            return z + y

    model, x = pruned(Writing(lambda y: y), 0.5), torch.randn(batch, 3, 4, 5, dtype=torch.float64)
    close(sparsify(model, x.clone(), measure=False)(x.clone()), model(x), 1e-12)


def test_masks_change_while_a_graph_lives() -> None:
    layer = SparseConv2d(2, 3, 3, mask=torch.rand(3, 2, 3, 3) < 0.5, dtype=torch.float64)
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    before = layer(x).sum()
    layer.set_mask(torch.ones(3, 2, 3, 3, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()
    layer(x).sum().backward()
    assert layer.values.grad.shape == (54,)
