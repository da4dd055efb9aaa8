"""torch.compile over what runs kernels of its own: as without it, and with the compiler loaded only then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from jacsparse.patterns import Pattern
from jacsparse.spgemm import matvec, plan_product

import jacsparse
from jacsparse.recurrence import Diagonal, linear_recurrence

PATTERN = Pattern((3, 3), [0, 2, 3, 4], [0, 2, 1, 0])
PLAN = plan_product(PATTERN, PATTERN, method="slots")
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "multiply": lambda x: 2 * PLAN.multiply(x[:4] + 1, x[:4]),
    "matvec": lambda x: 2 * matvec(PATTERN, x[:4] + 1, x[:3]),
    "linear_recurrence": lambda x: 2 * linear_recurrence(Diagonal(x.view(2, 1, 3) * 3), x.view(2, 1, 3)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_functions(name: str) -> None:
    torch._dynamo.reset()
    compiled, x = torch.compile(FUNCTIONS[name], backend="aot_eager"), torch.randn(6)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), FUNCTIONS[name](x))


def test_gradients_of_compiled_functions() -> None:
    function, gradients = FUNCTIONS["linear_recurrence"], []
    for run in (function, torch.compile(function, backend="aot_eager")):
        x = torch.arange(6.0).requires_grad_()
        gradients.append(torch.autograd.grad(run(x).square().sum(), x)[0])
    torch.testing.assert_close(*gradients)


def test_what_was_compiled_runs_as_it_is_written() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    def energy(x: torch.Tensor, c: float = 1.0) -> torch.Tensor:
        return c * (x[1:] ** 2 * x[:-1]).sum()

    x, compiled = torch.randn(4, dtype=torch.float64), torch.compile(energy, backend=backend)
    expected = torch.autograd.functional.hessian(energy, x)
    prepared = jacsparse.prepare_hessian(compiled, x)
    torch.testing.assert_close(prepared(x).todense(), expected)
    torch.testing.assert_close(jacsparse.hessian(compiled, x).todense(), expected)
    gradient = jacsparse.prepare_jacobian(compiled, x, 2.0)
    torch.testing.assert_close(gradient(x, 3.0).todense()[0], torch.func.grad(energy)(x, 3.0))
    assert prepared.check(x) < 1e-12
    assert gradient.check(x, 3.0) < 1e-12
    jacsparse.verify(torch.compile(torch.nn.Linear(4, 3), backend=backend), torch.randn(2, 4))
    assert not graphs
    compiled(x)
    assert graphs
