"""Gradients of a Jacobian's values against PyTorch's double backward pass and central differences, in float64."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import jacsparse
from jacsparse import UnsupportedOperatorError, hessian, jacobian, prepare_hessian, prepare_jacobian
from jacsparse.jacobians.differentiable import _WeightedSum
from tests.helpers import BOUND, FLOAT, assert_equal, dense, drawn
from tests.patterns.operators import OPERATORS
from tests.patterns.test_operators import fits

from .test_fuzz import PLAIN, SIZE, Graph

FULL = os.environ.get("JACSPARSE_TESTS") == "full"
#: Of each operator; and functions of one to three operators, in as many tests as may run side by side.
DRAWS = 50 if FULL else 1
FUNCTIONS, PARTS = (3000, 12) if FULL else (80, 4)

Function = Callable[[torch.Tensor], torch.Tensor]


def parameters_of(f: Function) -> list[torch.Tensor]:
    return [p for p in f.parameters() if p.requires_grad] if isinstance(f, nn.Module) else []


def gradients(total: torch.Tensor, wanted: list[torch.Tensor]) -> list[torch.Tensor]:
    if not total.requires_grad:
        return [torch.zeros_like(tensor) for tensor in wanted]
    return list(torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True))


def by_autograd(f: Function, x: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of ``Σ weights · J`` over the samples, by rows of J that backward passes give."""
    x = x.detach().clone().requires_grad_()
    y = f(x * 1)
    y = y.reshape(len(x), -1)
    total = x.new_zeros(())
    for row in range(y.shape[1] if y.requires_grad else 0):
        (rows,) = torch.autograd.grad(y[:, row].sum(), x, create_graph=True, materialize_grads=True)
        total = total + (rows.flatten(1) * weights[:, row]).sum()
    return gradients(total, [x, *parameters_of(f)])


def weighted_sum(f: Function, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    values = jacobian(f, x, create_graph=True, batched=True)
    of_entries = weights[:, values.pattern.rows.copy(), values.pattern.indices.copy()].T
    return (values.values.expand(-1, len(x)) * of_entries).sum()


def check(f: Function, x: torch.Tensor, *, smooth: bool | None) -> None:
    """All that is asked of values with gradients; central differences only where the function is smooth at x.

    Where `smooth` is None, gradients that are no numbers by autograd are not compared.
    """
    generator = torch.Generator().manual_seed(3)
    with_graph = jacobian(f, x, create_graph=True, batched=True)
    plain = jacobian(f, x, batched=True)
    if with_graph.pattern != plain.pattern:
        # Zeros that training may fill.
        plain = jacobian(f, x, pruned=False)
    assert with_graph.pattern == plain.pattern
    # Some derivatives are small differences of numbers around one.
    scale = max(1.0, plain.values.nan_to_num(0, 0, 0).abs().amax().item() if plain.values.numel() else 0.0)
    assert torch.allclose(with_graph.values, plain.values, rtol=BOUND, atol=BOUND * scale, equal_nan=True)
    weights = torch.randn((len(x), *plain.shape), generator=generator, dtype=FLOAT)
    leaf = x.detach().clone().requires_grad_()
    try:
        expected = by_autograd(f, x, weights)
    except (RuntimeError, NotImplementedError) as error:
        assert "derivative for" in str(error) or "Double backward" in str(error)
        with pytest.raises(RuntimeError, match=r"derivative for|Double backward"):
            gradients(weighted_sum(f, leaf, weights), [leaf])
        return
    actual = gradients(weighted_sum(f, leaf, weights), [leaf, *parameters_of(f)])
    # PyTorch's second derivative of logcumsumexp is no number where a gradient is zero.
    for one, other in zip(actual, expected, strict=True):
        if smooth is None and not torch.isfinite(other).all():
            continue
        limit = 1e-10 * max(1.0, float(other.nan_to_num(0, 0, 0).abs().amax()) if other.numel() else 0.0)
        assert torch.allclose(one, other, rtol=1e-9, atol=limit, equal_nan=True)
    if smooth:
        direction, step = torch.randn(x.shape, generator=generator, dtype=FLOAT), 1e-5
        ends = [weighted_sum(f, x + sign * step * direction, weights).item() for sign in (1, -1)]
        difference = (ends[0] - ends[1]) / (2 * step)
        # Second differences of the values, which grow with their third derivatives.
        limit = 1e-5 * max(1.0, abs(difference), float(expected[0].abs().amax()))
        assert abs(float((actual[0] * direction).sum()) - difference) <= limit


@pytest.mark.parametrize("operator", OPERATORS)
@settings(max_examples=DRAWS)
@given(data=st.data())
def test_of_each_operator(operator: str, data: st.DataObject) -> None:
    module, shape = data.draw(OPERATORS[operator])
    batch, seed = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 2**31 - 1))
    assume(fits(module, shape, batch))
    x = torch.randn((batch, *shape), dtype=FLOAT, generator=torch.Generator().manual_seed(seed))
    # Rounded, so that ties, kinks and zeros occur.
    check(lambda t: module(t * 1), x.round() if seed % 2 else x, smooth=False)


#: Steps that stop derivatives, which differences do not see.
DETACHED = {"detach", "data", "no gradient", "straight-through", "through detached"}


class Few(Graph):
    """Up to three operators, none of them random or foreign."""

    def __init__(self, seed: int) -> None:
        generator = random.Random(seed)
        torch.manual_seed(seed)
        super().__init__(generator)
        names = generator.choices([name for name in PLAIN if name != "branch"], k=generator.randint(1, 3))
        self.steps = [(name, *(generator.randrange(place + 1) for _ in range(2))) for place, name in enumerate(names)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.roll(1, 1)


@pytest.mark.parametrize("part", range(PARTS))
def test_of_drawn_functions(part: int) -> None:
    for seed in range(part, FUNCTIONS, PARTS):
        graph = Few(seed)
        x = torch.randn(random.Random(seed).randint(1, 3), SIZE, dtype=FLOAT)
        names = {name for name, *_ in graph.steps}
        try:
            check(graph, x, smooth=None if "logcumsumexp" in names else DETACHED.isdisjoint(names))
        except UnsupportedOperatorError as error:
            assert "mixes the samples" in str(error)
        except AssertionError as error:
            raise AssertionError(f"Few({seed}): {graph}") from error


NORMS: dict[str, Function] = {
    "layer norm": lambda x: functional.layer_norm(x, x.shape[1:]),
    "affine layer norm": nn.LayerNorm([4], dtype=FLOAT),
    "group norm": lambda x: functional.group_norm(x, 2),
    "instance norm": lambda x: functional.instance_norm(x[:, None])[:, 0],
}


@pytest.mark.parametrize("name", NORMS)
def test_of_normalisations(name: str) -> None:
    check(NORMS[name], drawn(3, 4), smooth=True)


def test_of_statistics_of_the_batch() -> None:
    norm, x = nn.BatchNorm1d(3, dtype=FLOAT), drawn(4, 3).requires_grad_()
    state = {name: value.clone() for name, value in norm.state_dict().items()}
    jacobian_of = lambda x, w, b: jacobian(norm, x, batched=False, create_graph=True).values  # noqa: E731
    assert torch.autograd.gradcheck(jacobian_of, (x, norm.weight, norm.bias))
    assert all(torch.equal(value, state[name]) for name, value in norm.state_dict().items())


@pytest.mark.parametrize(
    "f",
    [
        lambda x: functional.layer_norm(x, (4,)).pow(3).sum(),
        lambda x: x.logcumsumexp(0).sin().sum(),
    ],
)
def test_third_derivatives_that_are_wrong_in_pytorch(f: Function) -> None:
    x = drawn(4).requires_grad_()
    with pytest.raises(UnsupportedOperatorError, match=r"PyTorch's third derivative .* write it with other operators"):
        hessian(f, x, create_graph=True)
    with pytest.raises(UnsupportedOperatorError, match=r"PyTorch's third derivative .* write it with other operators"):
        prepare_hessian(f, x, create_graph=True)
    g = lambda x: functional.layer_norm(x, (4,))  # noqa: E731
    total = jacobian(g, x, batched=False, create_graph=True).values.square().sum()
    with pytest.raises(UnsupportedOperatorError, match="gradients of gradients"):
        torch.autograd.grad(total, x, create_graph=True)


class Counting(nn.Module):
    """A product with the number of its calls, which it counts before it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones((), dtype=FLOAT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x**3 * self.calls


def test_of_functions_that_write() -> None:
    x = drawn(3).requires_grad_()
    for _ in range(3):
        written = jacobian(lambda a: a.mul_(2).sin(), x, batched=False, create_graph=True)
        assert (written.values[:, 0] - 2 * (2 * x).cos()).abs().amax() <= BOUND
        b = torch.ones(3, dtype=FLOAT)
        product = jacobian(lambda a, b: b.add_(a) * a, x, b, batched=False, create_graph=True)
        assert (product.values[:, 0] - (1 + 2 * x)).abs().amax() <= BOUND
        assert (torch.autograd.grad(product.values.sum(), x)[0] - 2).abs().amax() <= BOUND
        # As one call would have it.
        assert (b - (1 + x)).abs().amax() <= BOUND
        module = Counting()
        counted = jacobian(module, x, batched=False, create_graph=True)
        assert (counted.values[:, 0] - 6 * x**2).abs().amax() <= 4 * BOUND
        assert (torch.autograd.grad(counted.values.sum(), x)[0] - 12 * x).abs().amax() <= 8 * BOUND
        assert module.calls == 1


@pytest.mark.parametrize("create_graph", [False, True])
def test_hessians_of_functions_that_write(create_graph: bool) -> None:
    x, module = drawn(3), Counting()
    for _ in range(3):
        b = torch.ones(3, dtype=FLOAT)
        actual = hessian(lambda a, b: (b.add_(a) * a * a).sum(), x, b, create_graph=create_graph)
        assert (actual.todense() - torch.diag(2 + 6 * x)).abs().amax() <= 8 * BOUND
        assert (b - (1 + x)).abs().amax() <= BOUND
        actual = hessian(nn.Sequential(module, Sum()), x, create_graph=create_graph, batched=False)
        assert (actual.todense() - torch.diag(12 * x)).abs().amax() <= 8 * BOUND
        # A module that is no part of the function counts each call, of which there is one.
        captured = Counting()
        actual = hessian(lambda x: captured(x).sum(), x, create_graph=create_graph)  # noqa: B023
        assert captured.calls == 2
        assert (actual.todense() - torch.diag(12 * x)).abs().amax() <= 8 * BOUND
    if create_graph:
        y = x.requires_grad_()
        values = hessian(nn.Sequential(module, Sum()), y, create_graph=True, batched=False).values
        assert (torch.autograd.grad(values.sum(), y)[0] - 12).abs().amax() <= 8 * BOUND


class Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


def test_of_tensors_that_one_was_computed_from_the_other() -> None:
    # No gradient passes twice.
    theta = drawn(4).requires_grad_()
    other = theta.exp()
    x = theta * 1.5
    f = lambda x: (x * other).sin() * theta  # noqa: E731
    values = jacobian(f, x, batched=False, create_graph=True).values
    expected = torch.diag(torch.autograd.functional.jacobian(f, x, create_graph=True))
    for wanted in (theta, x, other):
        actual, reference = (
            torch.autograd.grad(each.square().sum(), wanted, retain_graph=True)[0] for each in (values, expected)
        )
        assert (actual - reference).abs().amax() <= 1e-10 * reference.abs().amax()


@pytest.mark.parametrize("computed", [False, True])
def test_of_functions_that_read_their_argument_from_elsewhere_too(computed: bool) -> None:
    leaf, weight, weights = drawn(2, 3).requires_grad_(), drawn(3, 3), drawn(2, 3, 3)
    x = leaf * 1.5 if computed else leaf
    f = lambda a: ((a @ weight) * x.sin() + 0.5).pow(3)  # noqa: E731
    a = x * 1
    pulled = [f(a).sum(0), torch.autograd.grad(f(a).sum(), a, create_graph=True)[0].sum(0)]
    ours = [
        jacobian(f, x, create_graph=True, batched=True),
        hessian(lambda a: f(a).sum(-1), x, batched=True, create_graph=True),
    ]
    for actual, y in zip(ours, pulled, strict=True):
        rows = torch.stack([torch.autograd.grad(row, a, create_graph=True)[0] for row in y], 1)
        total = sum((actual.todense(n) * weights[n]).sum() for n in range(2))
        for wanted in {leaf, x}:
            (result,) = torch.autograd.grad(total, wanted, retain_graph=True)
            (expected,) = torch.autograd.grad((rows * weights).sum(), wanted, retain_graph=True)
            assert (result - expected).abs().amax() <= 64 * BOUND * expected.abs().amax()


def test_zeros_that_training_may_fill_have_gradients() -> None:
    x, A, C = drawn(6), torch.zeros(6, 2, dtype=FLOAT, requires_grad=True), drawn(2, 6)
    f = lambda x, A: x + x @ (A @ C)  # noqa: E731
    J = jacobian(f, x, A, batched=False, create_graph=True)
    expected = torch.autograd.functional.jacobian(lambda x: f(x, A), x, create_graph=True)
    weights = drawn(6, 6)
    actual, reference = (torch.autograd.grad((each * weights).sum(), A)[0] for each in (J.todense(), expected))
    assert (actual - reference).abs().amax() <= BOUND * reference.abs().amax()
    layer = nn.Linear(6, 3, dtype=FLOAT)
    nn.init.zeros_(layer.weight)
    J, weight = jacobian(layer, x[None], create_graph=True), layer.weight
    assert torch.equal(torch.autograd.grad(J.todense(0).sum(), weight)[0], torch.ones(3, 6, dtype=FLOAT))
    # Those that a mask prunes stay zero, and those without a gradient.
    prune.custom_from_mask(layer, "weight", torch.eye(3, 6))
    J = jacobian(layer, x[None], create_graph=True)
    assert J.pattern.nnz == 3
    assert torch.equal(torch.autograd.grad(J.values.sum(), layer.weight_orig)[0], torch.eye(3, 6, dtype=FLOAT))
    layer.requires_grad_(False)
    assert jacobian(layer, x[None], create_graph=True).pattern.nnz == 3


@pytest.mark.parametrize("around", ["nothing", "mutations", "on the CPU", "checkpoint"])
def test_weights_written_to_before_the_backward_pass_are_refused(around: str) -> None:
    module, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), drawn(2, 3).requires_grad_()
    contexts = {
        "mutations": torch.autograd.graph.allow_mutation_on_saved_tensors,
        "on the CPU": torch.autograd.graph.save_on_cpu,
    }
    values = lambda x: jacobian(module, x, create_graph=True).values  # noqa: E731
    with contexts.get(around, contextlib.nullcontext)():
        total = (checkpoint(values, x, use_reentrant=False) if around == "checkpoint" else values(x)).square().sum()
        with torch.no_grad():
            module[2].weight.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()


def test_kinks_have_the_values_of_calls_without_a_graph() -> None:
    for f in (nn.PReLU(dtype=FLOAT), torch.sinc, functional.relu, torch.abs, lambda x: x.clamp(0, 1), functional.elu):
        for x in (torch.zeros(1, 3, dtype=FLOAT), torch.ones(1, 3, dtype=FLOAT)):
            plain, with_graph = jacobian(f, x, batched=True), jacobian(f, x, create_graph=True, batched=True)
            assert torch.equal(plain.values, with_graph.values.detach())


def test_within_a_checkpoint() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()
    x = drawn(2, 4).requires_grad_()

    def values(x: torch.Tensor) -> torch.Tensor:
        return jacobian(network, x, create_graph=True).values

    for _ in range(3):
        wanted = [x, *network.parameters()]
        expected = torch.autograd.grad(values(x).square().sum(), wanted, materialize_grads=True, allow_unused=True)
        checkpointed = torch.utils.checkpoint.checkpoint(values, x, use_reentrant=False)
        actual = torch.autograd.grad(checkpointed.square().sum(), wanted, materialize_grads=True, allow_unused=True)
        assert all(map(torch.equal, actual, expected))


def test_prepared_of_some_of_the_tensors_that_had_gradients() -> None:
    x, t = drawn(4).requires_grad_(), drawn(4, seed=1)
    expected = by_autograd(lambda x: (x * t).sin(), x[None], torch.ones(1, 4, 4, dtype=FLOAT))[0][0]
    prepared = prepare_jacobian(lambda x, t: (x * t).sin(), x, t, create_graph=True)
    for other in (t, t.clone().requires_grad_()):
        (actual,) = torch.autograd.grad(prepared(x, other).values.sum(), x)
        assert (actual - expected).abs().amax() <= BOUND
    layer = nn.Linear(4, 4, dtype=FLOAT)
    prepared = prepare_jacobian(lambda x: layer(x).sin(), x, create_graph=True)
    layer.weight.requires_grad_(False)
    of_bias, of_x = torch.autograd.grad(prepared(x).values.sum(), [layer.bias, x])
    x = x.detach()
    layer.weight.requires_grad_()
    expected = torch.autograd.grad(jacobian(lambda x: layer(x).sin(), x, create_graph=True).values.sum(), layer.bias)[0]
    assert (of_bias - expected).abs().amax() <= BOUND and of_x.shape == x.shape


def test_prepared_without_anything_that_has_a_gradient() -> None:
    x = drawn(3)
    for f, args in ((lambda x, c: (c * x**2).sin(), (x,)), (lambda x, c: (c * x[0] ** 2).sin(), ((x,),))):
        prepared = prepare_jacobian(f, *args, 2.0, create_graph=True)
        assert not prepared.values(*args, 3.0).requires_grad
        values = prepared.values(*args, torch.tensor(3.0, dtype=FLOAT).requires_grad_())
        assert values.requires_grad


@pytest.mark.parametrize("method", ["products", "compressed"])
def test_prepared_of_a_tensor_that_is_read_in_two_places(method: str) -> None:
    x, w = drawn(3), drawn(3, seed=1).requires_grad_()
    prepared = prepare_jacobian(lambda x, a, b: (x * a).sin() * b, x, x, x, create_graph=True, method=method)
    (actual,) = torch.autograd.grad(prepared.values(x, w, w).sum(), w)
    (expected,) = torch.autograd.grad(((x * w).cos() * w * w).sum(), w)
    assert (actual - expected).abs().amax() <= BOUND


@pytest.mark.parametrize("prepared", [False, True])
def test_gradients_of_gradients_by_parameters(prepared: bool) -> None:
    """The weights of the values depend on the values, and so on what gradients go to."""
    module, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double(), drawn(2, 4).requires_grad_()
    tensors = [x, *module.parameters()]
    values = prepare_jacobian(module, x, create_graph=True) if prepared else None
    results = []
    for mine in (False, True):
        if not mine:
            inner = x * 1
            y = module(inner)
            rows = [torch.autograd.grad(y[:, row].sum(), inner, create_graph=True)[0] for row in range(3)]
            total = torch.stack(rows).pow(3).sum()
        else:
            total = (jacobian(module, x, create_graph=True) if values is None else values(x)).values.pow(3).sum()
        first = torch.autograd.grad(total, tensors, create_graph=True)
        second = torch.autograd.grad(sum(each.sin().sum() for each in first), tensors)
        results.append([*first, *second])
    for expected, actual in zip(*results, strict=True):
        assert (actual - expected).abs().amax() <= BOUND * max(1.0, expected.abs().amax().item())


def test_without_gradients_of_inputs() -> None:
    weight = drawn(4).requires_grad_()
    values: Any = jacobian(lambda x: weight * x**2, drawn(4), batched=False, create_graph=True).values
    assert (torch.autograd.grad(values.sum(), weight)[0] - 2 * drawn(4)).abs().amax() <= BOUND
    values = jacsparse.jacobian(lambda x: x**2, drawn(3), batched=False, create_graph=True).values
    assert values.requires_grad


def test_weights_that_change_before_the_backward_pass() -> None:
    """Also where a buffer, as a mask of pruning, lets hooks save what gradients need."""
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    for masked in (False, True):
        if masked:
            prune.custom_from_mask(network[0], "weight", torch.tensor([[1.0, 0, 1]] * 3))
        values = jacobian(network, drawn(2, 3), create_graph=True).values
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(values.sum(), list(network.parameters()), allow_unused=True)


def test_hessians_of_functions_that_write_to_what_they_are_differentiated_by() -> None:
    weight, x = drawn(4, 3), drawn(4, seed=1)
    f = lambda x: (x.mul_(1.5) @ weight).pow(3).sum()  # noqa: E731
    expected = torch.autograd.functional.hessian(lambda x: f(x.clone()), x)
    for actual in (
        hessian(f, x),
        hessian(f, x),
        *(prepare_hessian(f, x, method=m)(x) for m in ("products", "compressed")),
    ):
        assert (actual.todense() - expected).abs().amax() <= BOUND * expected.abs().amax()


def test_infinite_derivatives_before_the_call() -> None:
    """No gradient of a tensor from before the call is multiplied by what goes on from it."""
    b = torch.tensor([0.0, 4.0], dtype=FLOAT).requires_grad_()
    a = b.sqrt()
    f = lambda x: x**2 * a + x * b  # noqa: E731
    expected = torch.diag(torch.autograd.functional.jacobian(f, drawn(2), create_graph=True))
    actual = jacobian(f, drawn(2), batched=False, create_graph=True).values[:, 0]
    gradients_of = [torch.autograd.grad(each.sum(), b, retain_graph=True)[0] for each in (actual, expected)]
    assert torch.allclose(*gradients_of)


def test_backward_passes_of_other_threads() -> None:
    b = drawn(4).requires_grad_()
    a = b.sin().cos()
    expected = torch.autograd.grad(a.sum(), b, retain_graph=True)[0]
    scan = jacsparse.nn.Scan(Affine(a, b), schedule="linear")
    wrong, stop = [], threading.Event()

    def others() -> None:
        while not stop.is_set():
            if not torch.equal(torch.autograd.grad(a.sum(), b, retain_graph=True)[0], expected):
                wrong.append(1)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        for _ in range(50):
            scan(drawn(2, 4)).sum().backward(retain_graph=True)
            values = jacobian(lambda x: x**2 * a + b, drawn(4), batched=False, create_graph=True).values
            torch.autograd.grad(values.sum(), b, retain_graph=True)
    finally:
        stop.set()
        thread.join()
    assert not wrong


class Affine(nn.Module):
    """A product and a sum with tensors that are no parameters."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.tensors = a, b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.tensors
        return x.tanh() * a + b


def test_hooks_of_tensors_that_a_function_reads() -> None:
    parameter, calls = drawn(3, 3).requires_grad_(), []
    parameter.register_hook(lambda gradient: calls.append(1) or 2 * gradient)
    f = lambda x: (x @ parameter).tanh()  # noqa: E731
    x = drawn(2, 3)
    expected = torch.autograd.grad(by_rows(f, x), parameter)[0]
    calls.clear()
    total = jacobian(f, x, create_graph=True, batched=True).values.sum()
    actual = torch.autograd.grad(total, parameter)[0]
    assert len(calls) == 1
    assert (actual - expected).abs().amax() <= BOUND * expected.abs().amax()


def by_rows(f: Function, x: torch.Tensor) -> torch.Tensor:
    """The sum of a Jacobian's elements, by backward passes."""
    x = x.clone().requires_grad_()
    y = f(x)
    rows = [torch.autograd.grad(y[:, row].sum(), x, create_graph=True)[0].sum() for row in range(y.shape[1])]
    return torch.stack(rows).sum()


def test_large_weights_of_results_in_half_precision() -> None:
    x = drawn(1, 3).float().requires_grad_()
    values = jacobian(lambda x: x.exp().half(), x, create_graph=True, batched=True).values
    (gradient,) = torch.autograd.grad((values * 1e5).sum(), x)
    assert torch.allclose(gradient, 1e5 * x.exp(), rtol=2e-3)


def test_within_no_grad_and_without_samples() -> None:
    x, linear = drawn(3).requires_grad_(), nn.Linear(3, 2).double()
    with torch.no_grad():
        values = jacobian(torch.sin, x, batched=False, create_graph=True).values
    assert (torch.autograd.grad(values.sum(), x)[0] + x.sin()).abs().amax() <= BOUND
    values = jacobian(linear, drawn(0, 3), create_graph=True).values
    assert (torch.autograd.grad(values.sum(), linear.weight)[0] == 1).all()
    values = jacobian(lambda x: linear(x).sin(), drawn(0, 3), create_graph=True, batched=True).values
    assert values.shape == (6, 0) and not torch.autograd.grad(values.sum(), linear.weight)[0].any()


def test_a_function_runs_once_in_each_call() -> None:
    calls = []

    def f(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin()

    for number in range(1, 6):
        jacobian(f, drawn(3).requires_grad_(), batched=False, create_graph=True)
        assert len(calls) == number


def test_a_run_ends_with_its_backward_pass() -> None:
    ends = []

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().exp()
        ends.append(weakref.ref(y))
        return y * x

    result = jacobian(f, drawn(3).requires_grad_(), batched=False, create_graph=True)
    loss = result.values.sum()
    assert ends[-1]() is not None
    loss.backward()
    gc.collect()
    assert ends[-1]() is None
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("hessian", [False, True])
def test_steps_that_follow_each_other(prepared: bool, hessian: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass takes each step once, whatever tensors all of them read."""
    linear, steps = nn.Linear(4, 4, dtype=FLOAT), 9
    f = (lambda u: linear(u).tanh().square().sum()) if hessian else (lambda u: linear(u).tanh())
    of, prepare = (jacsparse.hessian, prepare_hessian) if hessian else (jacsparse.jacobian, prepare_jacobian)
    keywords = {"create_graph": True, ("gradient" if hessian else "value"): True}
    call = prepare(f, drawn(4), **keywords) if prepared else functools.partial(of, f, **keywords)

    def ours(u: torch.Tensor) -> torch.Tensor:
        for _ in range(steps):
            J, y = call(u)
            u = u + (torch.eye(4, dtype=FLOAT) - 0.3 * J.todense()).inverse() @ (0.1 * y)
        return u

    def expected(u: torch.Tensor) -> torch.Tensor:
        g = torch.func.grad(f) if hessian else f
        for _ in range(steps):
            u = u + (torch.eye(4, dtype=FLOAT) - 0.3 * torch.func.jacrev(g)(u)).inverse() @ (0.1 * g(u))
        return u

    products, of_product = list[None](), _WeightedSum._of_product

    def counted(*args: Any) -> Any:
        products.append(None)
        return of_product(*args)

    monkeypatch.setattr(_WeightedSum, "_of_product", counted)
    u = drawn(4).requires_grad_()
    inputs = [u, *linear.parameters()]
    actual = torch.autograd.grad(ours(u).sum(), inputs)
    assert len(products) == 4 * steps
    for gradient, each in zip(actual, torch.autograd.grad(expected(u).sum(), inputs), strict=True):
        assert torch.allclose(gradient, each, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_solutions_have_gradients_of_any_order(prepared: bool, trained: bool) -> None:
    k, w = drawn(3).abs() + 1, drawn(3, seed=1)
    k.requires_grad_(trained)
    f = lambda u: k * u**3 + u.roll(1) * u  # noqa: E731
    call = prepare_jacobian(f, drawn(3), create_graph=True) if prepared else functools.partial(jacsparse.jacobian, f)
    u = drawn(3, seed=2).requires_grad_()
    inputs = [u, k] if trained else [u]
    J = call(u) if prepared else call(u, create_graph=True)
    expected = torch.linalg.solve(torch.func.jacrev(f)(u), w)
    actual = J.solve(w)
    for _ in range(3):
        gradients = torch.autograd.grad(actual.sin().sum(), inputs, create_graph=True)
        of_dense = torch.autograd.grad(expected.sin().sum(), inputs, create_graph=True)
        for gradient, each in zip(gradients, of_dense, strict=True):
            assert torch.allclose(gradient, each, rtol=1e-9, atol=1e-9 * float(each.detach().abs().max()))
        actual, expected = torch.cat(gradients), torch.cat(of_dense)


@pytest.mark.parametrize("prepared", [False, True])
def test_gradients_of_gradients_of_what_is_returned_beside(prepared: bool) -> None:
    weight = drawn(3).requires_grad_()

    def f(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        y = (x * weight).sin()
        return y * x, {"inner": y, "weights": weight.exp(), "count": 3, "place": y.argmax()}

    keywords: dict[str, Any] = {"create_graph": True, "value": True, "has_aux": True}
    call = (
        prepare_jacobian(f, drawn(3), **keywords) if prepared else functools.partial(jacsparse.jacobian, f, **keywords)
    )
    x = drawn(3, seed=1).requires_grad_()
    J, y, aux = call(x)
    expected, expected_aux = f(x)
    assert aux["count"] == 3 and aux["place"] == expected_aux["place"]
    mixed = (y * aux["inner"] * aux["weights"]).sum() + (J.values * aux["inner"][:, None]).sum()
    diagonal = torch.func.jacrev(lambda x: f(x)[0])(x).diagonal()
    reference = (expected * expected_aux["inner"] * expected_aux["weights"] + diagonal * expected_aux["inner"]).sum()
    for _ in range(3):
        gradients = torch.autograd.grad(mixed, [x, weight], create_graph=True)
        of_reference = torch.autograd.grad(reference, [x, weight], create_graph=True)
        for gradient, each in zip(gradients, of_reference, strict=True):
            assert torch.allclose(gradient, each, rtol=1e-10, atol=1e-10)
        mixed, reference = (torch.cat(each).cos().sum() for each in (gradients, of_reference))


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("leaf", [False, True])
def test_hooks_see_gradients_of_what_is_returned_beside_once(prepared: bool, leaf: bool) -> None:
    weight, seen = drawn(3).requires_grad_(), list[torch.Tensor]()
    read = weight if leaf else weight * 1
    if not leaf:
        read.retain_grad()
    f = lambda x: x**2 * read  # noqa: E731
    call = (
        prepare_jacobian(f, drawn(3), create_graph=True, value=True)
        if prepared
        else functools.partial(jacsparse.jacobian, f, create_graph=True, value=True)
    )
    x = drawn(3, seed=1).requires_grad_()
    _, y = call(x)
    handle = read.register_hook(lambda gradient: (seen.append(gradient), 2 * gradient)[1])
    several = list[Any]()
    torch.autograd.graph.register_multi_grad_hook((weight,), several.append)
    y.sum().backward()
    assert len(seen) == 1 == len(several)
    assert torch.allclose(weight.grad, 2 * x.detach() ** 2, rtol=1e-14)
    if not leaf:
        assert torch.allclose(read.grad, 2 * x.detach() ** 2, rtol=1e-14)
    assert torch.allclose(x.grad, (2 * x * read).detach(), rtol=1e-14)
    handle.remove()


def test_retained_gradients_are_counted_once() -> None:
    base, x = drawn(3).requires_grad_(), drawn(3, seed=1)
    w = 2 * base
    w.retain_grad()

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * w).tanh().sin()

    f = lambda x, w: x * x * w.exp()  # noqa: E731
    prepared = prepare_jacobian(f, x, w, create_graph=True)
    scanned = nn.Sequential(Scaled())
    expected_values = torch.autograd.functional.jacobian(lambda x: f(x, w), x, create_graph=True).diagonal()[:, None]
    for result, expected in (
        (jacobian(lambda x: f(x, w), x, create_graph=True).values, expected_values),
        (prepared(x, w).values, expected_values),
        (jacsparse.nn.Scan(scanned, schedule="linear")(x[None]), scanned(x[None])),
    ):
        gradients = []
        for each in (result, expected):
            base.grad = w.grad = None
            each.square().sum().backward(retain_graph=True)
            gradients.append((base.grad, w.grad))
        for actual, wanted in zip(*gradients, strict=True):
            assert torch.allclose(actual, wanted, rtol=1e-12)
    _, y = jacobian(lambda x: f(x, w), x, create_graph=True, value=True)
    with pytest.raises(UnsupportedOperatorError, match="a hook, or retain_grad, of a tensor that a function reads"):
        torch.autograd.grad(y.sum(), base, create_graph=True)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_that_require_a_gradient(layout: torch.layout) -> None:
    matrix = torch.eye(3, dtype=FLOAT).to_sparse(layout=layout).requires_grad_()
    f = lambda x: torch.sparse.mm(matrix, x[:, None])[:, 0].sin()  # noqa: E731
    for call in (jacobian, prepare_jacobian):
        result = call(f, drawn(3))
        assert_equal(result(drawn(3)) if call is prepare_jacobian else result, dense(f, drawn(3), batched=False))
        with pytest.raises(UnsupportedOperatorError, match=r"a sparse tensor of shape .* requires a gradient, and"):
            call(f, drawn(3), create_graph=True)


def test_within_transforms_and_with_tangents() -> None:
    x, w = drawn(3).requires_grad_(), drawn(3, seed=1).requires_grad_()
    f = lambda x, w: (x * w).sin() * w  # noqa: E731
    prepared = prepare_jacobian(f, x, w, create_graph=True)
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda w: jacobian(f, x, w, create_graph=True).values,
        lambda w: jacobian(lambda x: f(x, w), x, create_graph=True).values,
        lambda w: prepared(x, w).values,
        lambda w: prepared.values(x, w),
    ]
    for call in calls:
        with pytest.raises(UnsupportedOperatorError, match="is_grads_batched=True ask for several gradients at once"):
            torch.autograd.functional.jacobian(call, w, vectorize=True)
        for transform in (
            torch.func.grad(lambda w, call=call: call(w).sum()),
            torch.func.vmap(call),
            lambda w, call=call: torch.func.jvp(call, (w,), (torch.ones_like(w),)),
        ):
            with pytest.raises(TypeError, match=r"the call is within a transform of torch\.func, .* itself there"):
                transform(w)
        with forward_ad.dual_level():
            assert call(w).shape[0] == 3
            with pytest.raises(TypeError, match="a tensor has a tangent of forward mode"):
                call(forward_ad.make_dual(w, torch.ones_like(w)))
