"""Compiled programs against the same programs as PyTorch calls and kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from jacsparse import SparseJacobian, prepare_jacobian
from jacsparse.jacobians import compilation, products
from jacsparse.jacobians.calls_of_terms import MOST
from tests.cuda.fibers import COMPILER
from tests.helpers import assert_equal, dense, drawn

from .test_prepared import FUNCTIONS, brusselator, heat

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++ that TorchInductor could use")


def uneven(x: torch.Tensor) -> torch.Tensor:
    """Rows of no term, a constant, and one to three terms."""
    rows = [x[:, :2] ** 2, x[:, 1:4].sin().cumsum(1), x[:, 2:] * 3.0, 0 * x[:, :1]]
    return torch.cat(rows, 1)


@needs_compiler
@pytest.mark.parametrize(
    ("f", "shape", "method", "dtype"),
    [
        # What the two cases for make test-full have, others have too.
        pytest.param(brusselator, (3, 2, 5, 4), "products", torch.float64, marks=pytest.mark.full),
        (brusselator, (1, 2, 3, 4), "products", torch.float32),
        (uneven, (2, 5), "products", torch.float64),
        pytest.param(heat, (2, 9), "compressed", torch.float64, marks=pytest.mark.full),
        (nn.Conv1d(2, 3, 3, dtype=torch.float64), (2, 2, 6), "compressed", torch.float64),
    ],
    ids=["brusselator", "one sample in float32", "uneven", "compressed", "shared"],
)
def test_equals_the_program(
    f: Callable[..., torch.Tensor], shape: tuple[int, ...], method: str, dtype: torch.dtype
) -> None:
    x = drawn(*shape).to(dtype)
    prepared, compiled = (prepare_jacobian(f, x, method=method, compile=flag, batched=True) for flag in (False, True))
    for shift in (0.0, 0.3):
        expected, actual = prepared.values(x + shift), compiled.values(x + shift)
        assert actual.shape == expected.shape
        assert actual.dtype == dtype
        # Roundings of a few dozen operators.
        assert (actual - expected).abs().amax() <= 1e2 * torch.finfo(dtype).eps * expected.abs().amax()


@needs_compiler
def test_takes_what_the_function_reads_now() -> None:
    scale = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    f = lambda x, step: (x * scale).sin() * step / 3.0  # noqa: E731
    compiled, x = prepare_jacobian(f, drawn(2, 3), 1.0, compile=True, batched=True), drawn(2, 3, seed=1)
    for step in (1.0, 2.5):
        scale *= step
        assert_equal(compiled(x, step), dense(f, x, step))


@pytest.mark.parametrize("most", [0, MOST])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_that_are_compiled_equal_autograd(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_compiled", lambda graph, inputs: graph.forward)
    monkeypatch.setattr(products, "MOST", most)
    f, shape = FUNCTIONS[name]
    compiled = prepare_jacobian(f, drawn(2, *shape), compile=True, batched=True)
    for seed in (1, 2):
        x = drawn(2, *shape, seed=seed)
        jacobian = compiled(x)
        values = jacobian.values.expand(-1, len(x))
        assert_equal(SparseJacobian(jacobian.pattern, values), dense(f, x))


@pytest.mark.parametrize("method", ["products", "compressed"])
def test_one_program_is_compiled(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def compiled(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(compilation, "_compiled", compiled)
    x = drawn(2, 7)
    assert_equal(prepare_jacobian(heat, drawn(2, 7), method=method, compile=True, batched=True)(x), dense(heat, x))
    assert len(graphs) == 1


def test_products_of_stages_are_not_compiled() -> None:
    network = nn.Sequential(nn.Linear(7, 7), nn.Softmax(1)).double()
    with pytest.raises(ValueError, match=r"Sequential: compile is True, and products of .* pass method='compressed'"):
        prepare_jacobian(network, drawn(2, 7), method="products", compile=True)
