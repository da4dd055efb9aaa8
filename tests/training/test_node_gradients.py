"""Gradients by nodes of autograd's graph, and by copies of them, against autograd's engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from jacsparse.stages import forward_pass, pull_back
from jacsparse.training.node_gradients import pull_back_by_copies, pull_back_by_nodes
from tests.patterns.operators import OPERATORS
from tests.patterns.test_operators import fits


@pytest.mark.parametrize("name", sorted(OPERATORS))
@given(data=st.data(), seed=st.integers(0, 2**31 - 1))
@settings(max_examples=4, deadline=None)
def test_stages_of_each_operator(name: str, data: st.DataObject, seed: int) -> None:
    module, shape = data.draw(OPERATORS[name])
    assume(fits(module, shape, 3))
    torch.manual_seed(seed)
    _, run = forward_pass(module, torch.randn(3, *shape, dtype=torch.float64))
    for record in run.records:
        gradient, places = torch.randn_like(record.output), sorted(record.externals)
        (expected,), of_externals = pull_back([record], gradient, [record], places, ())
        by_nodes, by_nodes_of_externals = pull_back_by_nodes(record, gradient, places)
        torch.testing.assert_close(by_nodes, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
        assert by_nodes_of_externals.keys() == of_externals.keys()
        for place, reference in of_externals.items():
            torch.testing.assert_close(by_nodes_of_externals[place], reference, rtol=1e-12, atol=1e-12, equal_nan=True)
        if not any(operation.random for operation in record.stage.operations):
            by_copies = pull_back_by_copies(record, gradient)
            torch.testing.assert_close(by_copies, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


class SolvedByInverse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(16 * torch.eye(2, dtype=x.dtype) + x[..., :2]) @ x[..., 2:]


def test_copies_of_a_decomposed_call_have_its_elements() -> None:
    """The operators that have the derivative of an inverse compute its negative."""
    _, run = forward_pass(SolvedByInverse(), torch.randn(3, 2, 3, dtype=torch.float64))
    for record in run.records:
        gradient = torch.randn_like(record.output)
        (expected,), _ = pull_back([record], gradient, [record], (), ())
        torch.testing.assert_close(pull_back_by_copies(record, gradient), expected, rtol=1e-12, atol=1e-12)


class Mixed(nn.Module):
    """Layers of several dtypes, with conversions between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4, dtype=torch.float64), nn.Linear(4, 2, dtype=torch.float64)
        self.between = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(x).relu().float()).tanh().double()).half()


@pytest.mark.parametrize("pull", [pull_back_by_copies, lambda *arguments: pull_back_by_nodes(*arguments, ())[0]])
def test_gradients_have_the_dtypes_of_what_they_belong_to(pull: Callable[..., torch.Tensor]) -> None:
    module, x = Mixed(), torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    _, run = forward_pass(module, x.detach())
    gradient = torch.randn_like(run.trace.output)
    (expected,) = torch.autograd.grad(module(x), x, gradient)
    for record in reversed(run.records):
        assert gradient.dtype == record.output.dtype
        gradient = pull(record, gradient)
    assert torch.equal(gradient, expected)
