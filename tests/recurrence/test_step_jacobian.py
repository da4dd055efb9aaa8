"""Recurrent cells: pattern and values of a step's Jacobian against autograd, equation 4.4 term by term."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import jacsparse
from jacsparse import Pattern, UnsupportedOperatorError
from jacsparse.recurrence import CELLS, Cell, Recurrent, Saved, Sequences, StepJacobian, Terms, Weights

from .test_cells_and_solvers import MGU, Leaky, MinimalGatedCell


def drawn(cell: Cell, size: int, density: float = 1.0) -> Weights:
    rows = cell.gates * size
    input, hidden, *biases = (
        torch.randn(rows, *columns, dtype=torch.float64) / (size + 1) for columns in ([3], [size], [], [])
    )
    return Weights(input, hidden * (torch.rand_like(hidden) < density), *biases)


def by_steps(cell: Cell, weights: Weights, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The states of samples after one step of each."""
    input_projection = functional.linear(x, weights.input, weights.bias)
    return cell.step(
        input_projection, functional.linear(state[:, : weights.size], weights.hidden, weights.hidden_bias), state
    )


def values(jacobian: StepJacobian, x: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Of one step of each sample, ``(nnz, batch)``."""
    cell, batch, size = jacobian.cell, len(x), jacobian.weights.size
    saved = Saved(x.new_empty(batch, size), x.new_empty(batch, cell.saved_vectors * size), states)
    return jacobian.values(Sequences.equal(1, batch), 1, x, saved)


@pytest.mark.parametrize("cell", [*CELLS.values(), MGU.cell, Leaky.cell], ids=lambda cell: cell.mode)
@given(size=st.integers(1, 9), batch=st.integers(0, 3), density=st.sampled_from([0.0, 0.2, 0.6, 1.0]))
@settings(max_examples=30)
def test_equals_autograd(cell: Cell, size: int, batch: int, density: float) -> None:
    weights = drawn(cell, size, density)
    jacobian = StepJacobian(cell, weights)
    states, x = (torch.randn(batch, width, dtype=torch.float64) for width in (cell.states * size, 3))
    actual = values(jacobian, x, states)
    assert actual.shape == (jacobian.pattern.nnz, batch)
    for sample in range(batch):
        step = partial(by_steps, cell, weights, x[[sample]])
        expected = torch.autograd.functional.jacobian(step, states[[sample]])[0, :, 0]
        matrix = torch.from_numpy(jacobian.pattern.to_scipy(actual[:, sample].numpy()).toarray())
        assert (matrix - expected).abs().max() <= 1e-12 * max(1, expected.abs().max())


def test_gru_is_the_union_of_its_weights_and_the_diagonal() -> None:
    mask = torch.rand(21, 7) < 0.15
    union = mask.reshape(3, 7, 7).any(dim=0).numpy() | np.eye(7, dtype=bool)
    weights = Weights(torch.zeros(21, 3), mask.double())
    assert np.array_equal(StepJacobian(CELLS["GRU"], weights).pattern.to_scipy().toarray(), union)
    full = Pattern.from_scipy(scipy.sparse.csr_array(np.ones((7, 7))))
    assert StepJacobian(CELLS["GRU"], Weights(torch.zeros(21, 3), torch.ones(21, 7))).pattern == full


def test_equation_4_4_term_by_term() -> None:
    """J₁…J₁₁ of the thesis, each against autograd, and their sum, which is the transposed Jacobian."""
    weights, size = drawn(CELLS["GRU"], 5), 5
    W_r, W_z, W_n = weights.hidden.split(size)
    h, x = torch.randn(5, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    input_projection = (x @ weights.input.T + weights.bias).split(size)
    biases = weights.hidden_bias.split(size)
    jacobian = torch.autograd.functional.jacobian
    R, Z = input_projection[0] + h @ W_r.T + biases[0], input_projection[1] + h @ W_z.T + biases[1]
    r, z, M = R.sigmoid(), Z.sigmoid(), h @ W_n.T + biases[2]
    N = input_projection[2] + r * M
    n = N.tanh()
    terms = {
        "J1": (lambda h: input_projection[0] + h @ W_r.T, h, W_r.T),
        "j2": (torch.sigmoid, R, torch.diag(r * (1 - r))),
        "j3": (lambda r: input_projection[2] + r * M, r, torch.diag(M)),
        "J4": (lambda h: h @ W_n.T, h, W_n.T),
        "j5": (lambda M: input_projection[2] + r * M, M, torch.diag(r)),
        "j6": (torch.tanh, N, torch.diag(1 - n * n)),
        "j7": (lambda n: (1 - z) * n + z * h, n, torch.diag(1 - z)),
        "J8": (lambda h: h @ W_z.T, h, W_z.T),
        "j9": (torch.sigmoid, Z, torch.diag(z * (1 - z))),
        "j10": (lambda z: (1 - z) * n + z * h, z, torch.diag(h - n)),
        "J11": (lambda h: (1 - z) * n + z * h, h, torch.diag(z)),
    }
    for name, (function, at, expected) in terms.items():
        assert torch.allclose(jacobian(function, at).T, expected, rtol=1e-13, atol=1e-15), name
    total = (W_r.T * (r * (1 - r) * M) + W_n.T * r) * ((1 - n * n) * (1 - z)) + W_z.T * (z * (1 - z) * (h - n))
    total += torch.diag(z)
    actual = values(StepJacobian(CELLS["GRU"], weights), x[None], h[None]).reshape(5, 5)
    assert torch.allclose(actual.T, total, rtol=1e-12)


@pytest.mark.parametrize("mode", ["RNN_TANH", "GRU", "LSTM"])
def test_a_cell_of_no_elements(mode: str) -> None:
    jacobian = StepJacobian(CELLS[mode], drawn(CELLS[mode], 0))
    assert jacobian.pattern.shape == (0, 0)
    assert values(jacobian, torch.zeros(5, 3), torch.zeros(5, 0)).shape == (0, 5)


@pytest.mark.parametrize("kind", [MGU, Leaky])
def test_cells_of_ones_own_have_planned_products_and_counts(kind: type[Recurrent]) -> None:
    layer = kind(3, 8, bidirectional=True, dtype=torch.float64, schedule="planned")
    with torch.no_grad():
        for name in ("weight_hh_l0", "weight_hh_l0_reverse"):
            getattr(layer, name).mul_(torch.rand(layer.cell.gates * 8, 8) < 0.2)
    x, parameters = torch.randn(20, 2, 3, dtype=torch.float64), [*layer.parameters()]
    gradients = {}
    for layer.schedule in ("sequential", "planned"):
        output, _ = layer(x)
        gradients[layer.schedule] = torch.autograd.grad(output.square().sum(), parameters)
    assert layer.reports[-1].methods == ["planned"]
    for actual, expected in zip(gradients["planned"], gradients["sequential"], strict=True):
        assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-11)
    single = kind(3, 8)
    guaranteed = jacsparse.count_flop(single, (9, 3), schedule="linear")
    observed = jacsparse.count_flop(
        single, (9, 3), schedule="linear", structure="observed", inputs=torch.randn(2, 9, 3)
    )
    jacobian = StepJacobian(single.cell, Weights(single.weight_ih_l0.detach(), single.weight_hh_l0.detach()))
    assert [step.flop for step in guaranteed.steps] == [2 * jacobian.pattern.nnz] * 8
    # The state before the first step is zero.
    assert 0 < observed.total <= guaranteed.total


def test_bad_cells() -> None:
    class Unknown(MinimalGatedCell):
        terms = ()

    class Incomplete(MinimalGatedCell):
        terms = (Terms(gates=(0,), states=(0,)),)

    layer = type("Layer", (Recurrent,), {"cell": Unknown()})(3, 4, schedule="planned")
    with pytest.raises(ValueError, match="cell MGU is not known; list its `terms`, or use the schedule blelloch"):
        layer(torch.randn(5, 1, 3))[0].sum().backward()
    with pytest.raises(UnsupportedOperatorError, match="pattern of the cell MGU is not known"):
        jacsparse.count_flop(layer, (5, 3))
    layer = type("Layer", (Recurrent,), {"cell": Incomplete()})(3, 4, schedule="planned")
    with pytest.raises(ValueError, match="vector 0 of the state of the cell MGU depends on gate 1, which its `terms`"):
        layer(torch.randn(5, 1, 3))[0].sum().backward()
