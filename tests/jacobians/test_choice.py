"""Which way to the values is chosen, by costs that depend on no machine; benchmarks show that it pays."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st
from jacsparse.models import prune_weights
from jacsparse.patterns import Full, Pattern
from torch import nn

import jacsparse
from jacsparse import prepare_jacobian
from jacsparse.jacobians import colorings
from jacsparse.jacobians.choice import _cost_of_colors
from jacsparse.jacobians.colorings import coloring, least_cost, row_coloring, star_coloring
from jacsparse.jacobians.compressed import Compressed
from jacsparse.jacobians.evaluator import Evaluator
from jacsparse.jacobians.products import ChainProducts, FoldedProducts, GroupedProducts
from jacsparse.stages import Accumulation
from jacsparse.tracing import calls_of, name_of
from tests.helpers import assert_equal, dense, drawn

from .test_grouped_products import autoencoder


def perceptron(*sizes: int) -> nn.Module:
    layers = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def convolutions(*channels: int) -> nn.Module:
    pairs = itertools.pairwise(channels)
    layers = [part for pair in pairs for part in (nn.Conv2d(*pair, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).double()


@pytest.mark.parametrize(
    ("network", "shape", "options", "expected"),
    [
        (perceptron(4, 4, 4), (16, 4), {}, FoldedProducts),
        (perceptron(16, 16, 16, 16, 16), (1024, 16), {}, Compressed),
        (perceptron(64, 64, 32), (256, 64), {"method": "products"}, ChainProducts),
        # A convolution's Jacobian is the same for all samples.
        (convolutions(1, 4, 2), (256, 1, 8, 8), {}, ChainProducts),
        (autoencoder(torch.float64), (17, 1, 16, 16), {}, GroupedProducts),
        (autoencoder(torch.float64), (17, 1, 16, 16), {"compile": True}, GroupedProducts),
    ],
)
def test_way(network: nn.Module, shape: tuple[int, ...], options: dict[str, Any], expected: type[Evaluator]) -> None:
    prepared = prepare_jacobian(network, drawn(*shape), **options)
    assert isinstance(prepared._first.evaluator, expected)


def test_work_counts_what_samples_share_once() -> None:
    accumulation, shapes = Accumulation((2, 4)), [(2, 3), (3, 5), (5, 4)]
    # A full matrix of all samples' own, between two that they share.
    a, b, c = (accumulation.leaf(name, Pattern.of(Full(*shape))) for name, shape in zip("abc", shapes, strict=True))
    accumulation.result = accumulation.multiply(a, accumulation.multiply(b, c))
    of_one = 2 * 3 + 3 * 5 + 5 * 4 + 3 * 4 + 2 * 4 + 3 * 5 + 5 * 4 + 2 * 3 + 3 * 4
    assert accumulation.work(1, "ac".__contains__) == (of_one, 3 * 5 * 4 + 2 * 3 * 4)
    # The values of a, b, c, b c and a b c, and those that the two products read.
    of_five = 2 * 3 + 5 * (3 * 5) + 5 * 4 + 5 * (3 * 4) + 5 * (2 * 4) + 5 * (3 * 5) + 5 * 4 + 2 * 3 + 5 * (3 * 4)
    assert accumulation.work(5, "ac".__contains__) == (of_five, 5 * (3 * 5 * 4 + 2 * 3 * 4))
    assert accumulation.work(5, "abc".__contains__) == accumulation.work(1, "".__contains__)


def test_transpositions_of_transpositions_are_left_out() -> None:
    calls = calls_of(lambda x, y: [x.t().t() @ y.t()], [drawn(3, 4), drawn(5, 4)])
    assert [step.target for step in calls.steps].count(torch.ops.aten.t.default) == 1


def test_operators_have_their_names() -> None:
    assert name_of(torch.ops.aten.sin) == "aten.sin" and name_of(torch.ops.aten.sin.default) == "aten.sin.default"


def leapfrog(z: torch.Tensor, steps: int) -> torch.Tensor:
    q, p = z.chunk(2)
    for _ in range(steps):
        p = p - 0.05 * q.sin()
        q = q + 0.1 * p
        p = p - 0.05 * q.sin()
    return torch.cat([q, p])


def diffusion(u: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        u = u + 0.1 * (u.roll(1) - 2 * u + u.roll(-1)) + 0.01 * u * u
    return u


def predator_and_prey(z: torch.Tensor, steps: int) -> torch.Tensor:
    x, y = z
    for _ in range(steps):
        x, y = x + 0.1 * (x - x * y), y + 0.1 * (x * y - y)
    return torch.stack([x, y])


def mean_of_all_steps(u: torch.Tensor, steps: int) -> torch.Tensor:
    states = []
    for _ in range(steps):
        u = u.sin() + 0.05 * u.roll(1)
        states.append(u)
    return torch.stack(states).mean(0)


def shifted(u: torch.Tensor, steps: int) -> torch.Tensor:
    x = y = u
    for _ in range(steps):
        x = y.sin() + 0.5 * x
        y = torch.cat([x[1:], y[:1]])
    return y


LOOPS = [(leapfrog, 6), (diffusion, 7), (predator_and_prey, 2), (mean_of_all_steps, 7), (shifted, 5)]


@pytest.mark.parametrize(("f", "size"), LOOPS)
def test_loops_over_time_fold_into_work_for_each_step(f: Callable[..., torch.Tensor], size: int) -> None:
    """Local derivatives that several products use are summed before: else each step would sum those of all before."""
    x, flop = drawn(size), list[int]()
    for steps in (5, 10, 20, 40):
        of_steps = functools.partial(f, steps=steps)
        prepared = prepare_jacobian(of_steps, x)
        assert_equal(prepared(x / 2), dense(of_steps, x / 2, batched=False))
        printed_flop = re.search(r"local derivatives.*about ([\d,]+) flop", repr(prepared))
        assert printed_flop is not None
        flop.append(int(printed_flop[1].replace(",", "")))
    # After the first steps, whose rows have fewer entries, each takes the same: twice as many, and not four times.
    assert flop[3] - flop[2] <= 2.5 * (flop[2] - flop[1])


#: Edges of a graph with 12 nodes; and observations of 12 points by 4 cameras.
EDGES = torch.randint(0, 12, (2, 40), generator=torch.Generator().manual_seed(0))
OBSERVATIONS = EDGES // torch.tensor([[3], [1]])


def graph_laplacian(u: torch.Tensor) -> torch.Tensor:
    i, j = EDGES
    flow = (1 + (u[j] - u[i]) ** 2) * (u[j] - u[i])
    return torch.zeros_like(u).index_add(0, i, flow).index_add(0, j, -flow) + u.sin()


def bundle_adjustment(x: torch.Tensor) -> torch.Tensor:
    """Reprojections: points are turned by a vector's angle, moved, divided by depth and distorted."""
    camera, point = x[:36].reshape(4, 9)[OBSERVATIONS[0]], x[36:].reshape(12, 3)[OBSERVATIONS[1]]
    turn = camera[:, :3]
    angle = turn.square().sum(1, keepdim=True).sqrt()
    axis = turn / angle
    along = axis * (axis * point).sum(1, keepdim=True) * (1 - angle.cos())
    seen = point * angle.cos() + torch.linalg.cross(axis, point) * angle.sin() + along + camera[:, 3:6]
    seen = seen[:, :2] / (3 + seen[:, 2:])
    distance = seen.square().sum(1, keepdim=True)
    return (camera[:, 6:7] * (1 + camera[:, 7:8] * distance + camera[:, 8:] * distance**2) * seen).reshape(-1)


def finite_elements(u: torch.Tensor) -> torch.Tensor:
    nodes = torch.arange(len(u) - 2)[:, None] + torch.arange(3)
    gradients = torch.linspace(-1, 2, 18 * len(nodes), dtype=u.dtype).reshape(-1, 3, 6)
    strain = torch.einsum("eni,en->ei", gradients, u[nodes])
    stress = strain * (1 + strain.square().sum(1, keepdim=True)).sqrt()
    forces = torch.einsum("eni,ei->en", gradients, stress)
    return torch.zeros_like(u).index_add(0, nodes.reshape(-1), forces.reshape(-1))


def kernel_by_pairs(x: torch.Tensor) -> torch.Tensor:
    points = x.reshape(-1, 2)
    return torch.exp(-(points[:, None] - points).square().sum(-1)).sum(1)


@pytest.mark.parametrize(
    ("f", "size"), [(graph_laplacian, 12), (bundle_adjustment, 72), (finite_elements, 9), (kernel_by_pairs, 10)]
)
def test_compiled_ways_of_unstructured_functions(f: Callable[[torch.Tensor], torch.Tensor], size: int) -> None:
    x = drawn(size)
    prepared = prepare_jacobian(f, x + 0.1, compile=True)
    assert_equal(prepared(x), dense(f, x, batched=False))
    assert "compiled: nothing" not in repr(prepared)


@pytest.mark.parametrize(
    ("network", "shape", "compiled"),
    [
        (perceptron(4, 4, 4), (16, 4), r"all but \d+ calls of PyTorch's"),
        (convolutions(1, 4, 2), (256, 1, 8, 8), "nothing, since products of operators' matrices cannot be compiled"),
        (autoencoder(torch.float64), (17, 1, 16, 16), "nothing, since its kernel is machine code as it is"),
        (nn.ConstantPad1d(1, 0.0), (2, 3), "nothing, since its values are constants"),
        (nn.Sequential(nn.Tanh(), nn.ReLU()), (2, 3), "the whole call"),
    ],
)
def test_what_is_compiled_is_told(network: nn.Module, shape: tuple[int, ...], compiled: str) -> None:
    x = drawn(*shape)
    text = repr(prepare_jacobian(network, x, compile=True))
    assert re.search(rf"\n  compiled: {compiled}\n", text), text
    assert "compiled" not in repr(prepare_jacobian(network, x))


def test_a_method_that_is_asked_for_compiles_or_says_why_not() -> None:
    network, x = perceptron(64, 64, 32), drawn(256, 64)
    with pytest.raises(ValueError, match=r"compile is True, and products of operators' .* pass method='compressed'"):
        prepare_jacobian(network, x, method="products", compile=True)


def test_what_pytorch_reads_is_no_loop() -> None:
    def cost(f: Callable[[torch.Tensor], torch.Tensor], *, compile: bool) -> float:
        function = prepare_jacobian(f, drawn(6))._first.traced.function
        return _cost_of_colors(function, coloring(function.pattern), compile=compile)

    # What is computed of a sorted tensor is a loop; what PyTorch sorts is PyTorch's.
    of_sorted, sorted_last = lambda x: x.sort()[0].sin().exp(), lambda x: x.sin().exp().sort()[0]
    assert cost(of_sorted, compile=True) < cost(sorted_last, compile=True) < cost(sorted_last, compile=False)


@given(st.integers(0, 12), st.integers(0, 12), st.sampled_from([0.05, 0.3, 0.9]), st.integers(0, 99))
def test_no_colouring_costs_less_than_the_least(rows: int, columns: int, density: float, seed: int) -> None:
    matrix = scipy.sparse.random(rows, columns, density, "csr", rng=seed)
    pattern = Pattern(matrix.shape, matrix.indptr, matrix.indices)
    assert least_cost(pattern) <= min(coloring(pattern).cost, row_coloring(pattern).cost)
    square = scipy.sparse.random(rows, rows, density, "csr", rng=seed)
    square = (square + square.T).tocsr()
    symmetric = Pattern(square.shape, square.indptr, square.indices)
    assert least_cost(symmetric) <= star_coloring(symmetric).cost


def test_what_no_colouring_could_pay_for_is_not_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    def coloured(pattern: Pattern, count: int) -> None:
        raise AssertionError("coloured")

    monkeypatch.setattr(colorings, "_apart", coloured)
    network, x = convolutions(64, 128, 128), drawn(1, 64, 4, 4)
    prune_weights(network, 0.97)
    assert_equal(jacsparse.jacobian(network, x), dense(network, x))
