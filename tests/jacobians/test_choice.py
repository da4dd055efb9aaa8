"""Which way to the values is chosen, by costs that depend on no machine; benchmarks show that it pays."""

from __future__ import annotations

import itertools
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
from tests.helpers import drawn

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
