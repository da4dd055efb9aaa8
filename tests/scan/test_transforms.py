"""Transforms of torch.func around modules that go back by themselves: they work, or are refused in words."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call

from jacsparse.nn import Leapfrog, Scan, Solve
from tests.helpers import FLOAT

Wrap = Callable[[nn.Module], nn.Module]
WAYS: dict[str, Wrap] = {
    "Scan": functools.partial(Scan, schedule="linear"),
    "Scan, blelloch": functools.partial(Scan, schedule="blelloch"),
    "Solve": functools.partial(Solve, method="scan"),
    "Leapfrog": functools.partial(Leapfrog, threads=2),
}
WAY = pytest.mark.parametrize("way", WAYS)


def network(*, normalised: bool = False) -> nn.Module:
    torch.manual_seed(0)
    between = [nn.BatchNorm1d(5)] if normalised else []
    return nn.Sequential(nn.Linear(4, 5), *between, nn.Tanh(), nn.Linear(5, 4), nn.Tanh()).double()


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 12, dtype=FLOAT).reshape(3, 4)


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def loss(module: nn.Module, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = functional_call(module, parameters, (x,))
    return y.square().sum()


def in_forward_mode(module: nn.Module) -> None:
    with forward_ad.dual_level():
        module(forward_ad.make_dual(inputs(), inputs()))


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "grad": (lambda m: torch.func.grad(lambda x: m(x).sum())(inputs()), "grad, vjp or jacrev"),
    "of parameters": (lambda m: torch.func.grad(lambda p: loss(m, p, inputs()))(weights(m)), "grad, vjp or jacrev"),
    "vjp": (lambda m: torch.func.vjp(m, inputs()), "grad, vjp or jacrev"),
    "jacrev": (lambda m: torch.func.jacrev(m)(inputs()), "grad, vjp or jacrev"),
    "hessian": (lambda m: torch.func.hessian(lambda x: m(x).sum())(inputs()), "grad, vjp or jacrev"),
    "each sample": (
        lambda m: torch.vmap(torch.func.grad(lambda p, x: loss(m, p, x)), (None, 0))(weights(m), inputs()[:, None]),
        "grad, vjp or jacrev",
    ),
    "vmap": (lambda m: torch.vmap(lambda x: m(x[None]))(inputs()), "vmap"),
    "jvp": (lambda m: torch.func.jvp(m, (inputs(),), (inputs(),)), "jvp or jacfwd"),
    "jacfwd": (lambda m: torch.func.jacfwd(m)(inputs()), "(jvp or jacfwd|vmap)"),
    "functionalize": (lambda m: torch.func.functionalize(m)(inputs()), "functionalize"),
    "linearize": (lambda m: torch.func.linearize(m, inputs()), "differentiation in forward mode"),
    "forward mode": (in_forward_mode, "differentiation in forward mode"),
}


@WAY
@pytest.mark.parametrize("name", REFUSED)
def test_transforms_are_refused_by_name(way: str, name: str) -> None:
    transform, word = REFUSED[name]
    kind = way.partition(",")[0]
    for module in (network(), network(normalised=True)):
        with pytest.raises(TypeError, match=rf"^nn\.{kind} is called within .*{word}.*; call its \.module there, or"):
            transform(WAYS[way](module))
    # The way out.
    transform(WAYS[way](network()).module)  # type: ignore[arg-type]


@WAY
def test_an_ensemble_of_weights(way: str) -> None:
    """Stacked weights without gradients of their own go through a module's own forward pass."""
    results = []
    for module in (network(), WAYS[way](network())):
        stacked = {name: torch.stack([p, 2 * p]).requires_grad_() for name, p in weights(module).items()}
        outputs = torch.vmap(lambda each, module=module: functional_call(module, each, (inputs(),)))(stacked)
        results.append([outputs, *torch.autograd.grad(outputs.square().sum(), list(stacked.values()))])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@WAY
def test_other_parameters_by_autograd(way: str) -> None:
    results = []
    for module in (network(normalised=True), WAYS[way](network(normalised=True))):
        others = {name: (2 * p).requires_grad_() for name, p in weights(module).items()}
        results.append(torch.autograd.grad(loss(module, others, inputs()), list(others.values())))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@WAY
def test_functions_of_autograd(way: str) -> None:
    module, ours = network(normalised=True), WAYS[way](network(normalised=True))
    expected = torch.autograd.functional.jacobian(copy.deepcopy(module), inputs())
    assert torch.allclose(torch.autograd.functional.jacobian(ours, inputs()), expected, rtol=0, atol=1e-12)
    kind = way.partition(",")[0]
    with pytest.raises(RuntimeError, match=rf"create_graph=True asks for gradients of gradients, which nn\.{kind}"):
        torch.autograd.functional.hessian(lambda x: ours(x).sum(), inputs())


@WAY
@pytest.mark.parametrize("transform", [True, False])
def test_several_gradients_at_once(way: str, transform: bool) -> None:
    """Where autograd alone goes back, as by ``linear``, they work."""
    ours, x = WAYS[way](network()), inputs().requires_grad_()
    y, gradients = ours(x), torch.eye(12, dtype=FLOAT).reshape(12, 3, 4)
    expected = torch.autograd.functional.jacobian(network(), inputs()).reshape(12, 3, 4)

    def pulled(each: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(y, x, each, retain_graph=True)[0]

    try:
        if transform:
            actual = torch.vmap(pulled)(gradients)
        else:
            (actual,) = torch.autograd.grad(y, x, gradients, is_grads_batched=True)
    except RuntimeError as error:
        assert way != "Scan" and "vmap and is_grads_batched=True ask for several gradients at once" in str(error)
        actual = torch.stack([pulled(each) for each in gradients])
    assert torch.allclose(actual, expected, rtol=0, atol=1e-12)


def test_transforms_go_through_auto() -> None:
    module, x = network(), inputs()
    scan = Scan(module)
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        expected = transform(lambda x: module(x).sum())(x)
        torch.testing.assert_close(transform(lambda x: scan(x).sum())(x), expected)
