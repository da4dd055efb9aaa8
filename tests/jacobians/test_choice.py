"""Which way to the values is chosen, by costs that depend on no machine; benchmarks show that it pays."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jacsparse.patterns import Full, Pattern
from torch import nn

from jacsparse import prepare_jacobian
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
    assert accumulation.work(1, "ac".__contains__) == (accumulation.moved, 3 * 5 * 4 + 2 * 3 * 4)
    # The values of a, b, c, b c and a b c, and those that the two products read.
    of_five = 2 * 3 + 5 * (3 * 5) + 5 * 4 + 5 * (3 * 4) + 5 * (2 * 4) + 5 * (3 * 5) + 5 * 4 + 2 * 3 + 5 * (3 * 4)
    assert accumulation.work(5, "ac".__contains__) == (of_five, 5 * (3 * 5 * 4 + 2 * 3 * 4))
    assert accumulation.work(5, "abc".__contains__) == accumulation.work(1, "".__contains__)


def test_transpositions_of_transpositions_are_left_out() -> None:
    graph = calls_of(lambda x, y: x.t().t() @ y.t(), [drawn(3, 4), drawn(5, 4)])
    assert [node.target for node in graph.graph.nodes].count(torch.ops.aten.t.default) == 1


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
