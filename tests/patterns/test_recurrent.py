"""Recurrent cells: pattern and values of a step's Jacobian against autograd, equation 4.4 term by term."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jacsparse.patterns import state_jacobian_pattern, state_jacobian_values
from torch import nn

from jacsparse import Pattern

MODES = {"RNN_TANH": nn.RNN, "RNN_RELU": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}


def step(
    mode: str, cell: nn.Module, x: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The state after a step, written down from the equations, and what it computed."""
    size = cell.hidden_size
    entered = x @ cell.weight_ih_l0.T + cell.bias_ih_l0
    h = state[..., :size]
    recurrent = h @ cell.weight_hh_l0.T + cell.bias_hh_l0
    if mode.startswith("RNN"):
        total = entered + recurrent
        after = torch.tanh(total) if mode == "RNN_TANH" else torch.relu(total)
        return after, {"h": after}
    parts = [part for both in zip(entered.split(size, -1), recurrent.split(size, -1), strict=True) for part in both]
    if mode == "GRU":
        r, z = torch.sigmoid(parts[0] + parts[1]), torch.sigmoid(parts[2] + parts[3])
        n = torch.tanh(parts[4] + r * parts[5])
        return (1 - z) * n + z * h, {"r": r, "z": z, "n": n, "m": parts[5], "before": h}
    i, f, o = (torch.sigmoid(parts[k] + parts[k + 1]) for k in (0, 2, 6))
    g, before = torch.tanh(parts[4] + parts[5]), state[..., size:]
    c = f * before + i * g
    return torch.cat([o * c.tanh(), c], -1), {"i": i, "f": f, "g": g, "o": o, "c": c, "before": before}


def after_step(mode: str, cell: nn.Module, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return step(mode, cell, x, state)[0]


def pruned_cell(mode: str, size: int, density: float) -> nn.Module:
    cell = MODES[mode](3, size, **({"nonlinearity": "relu"} if mode == "RNN_RELU" else {})).double()
    with torch.no_grad():
        cell.weight_hh_l0.mul_(torch.rand_like(cell.weight_hh_l0) < density)
    return cell


@pytest.mark.parametrize("mode", MODES)
@given(size=st.integers(1, 9), batch=st.integers(0, 3), density=st.sampled_from([0.0, 0.2, 0.6, 1.0]))
@settings(max_examples=40)
def test_equals_autograd(mode: str, size: int, batch: int, density: float) -> None:
    cell = pruned_cell(mode, size, density)
    width = size * (2 if mode == "LSTM" else 1)
    state, x = torch.randn(batch, width, dtype=torch.float64), torch.randn(batch, 3, dtype=torch.float64)
    after, computed = step(mode, cell, x, state)
    pattern = state_jacobian_pattern(mode, cell.weight_hh_l0.detach().numpy() != 0)
    values = state_jacobian_values(
        mode, cell.weight_hh_l0.detach(), pattern, {k: v.detach() for k, v in computed.items()}
    )
    assert values.shape == (pattern.nnz, batch) and after.shape == state.shape
    for sample in range(batch):
        expected = torch.autograd.functional.jacobian(partial(after_step, mode, cell, x[sample]), state[sample])
        actual = torch.from_numpy(pattern.to_scipy(values[:, sample].numpy()).toarray())
        assert (actual - expected).abs().max() <= 1e-12 * max(1, expected.abs().max())


def test_gru_is_the_union_of_its_weights_and_the_diagonal() -> None:
    rng = np.random.default_rng(0)
    mask = rng.random((21, 7)) < 0.15
    union = mask.reshape(3, 7, 7).any(axis=0) | np.eye(7, dtype=bool)
    assert np.array_equal(state_jacobian_pattern("GRU", mask).to_scipy().toarray(), union)
    full = Pattern.from_scipy(scipy.sparse.csr_array(np.ones((7, 7))))
    assert state_jacobian_pattern("GRU", np.ones((21, 7), dtype=bool)) == full


def test_equation_4_4_term_by_term() -> None:
    """J₁…J₁₁ of the thesis, each against autograd, and their sum, which is the transposed Jacobian."""
    cell, size = pruned_cell("GRU", 5, 1.0), 5
    W_r, W_z, W_n = cell.weight_hh_l0.detach().split(size)
    h, x = torch.randn(5, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    entered = (x @ cell.weight_ih_l0.T + cell.bias_ih_l0).detach().split(size)
    biases = cell.bias_hh_l0.detach().split(size)
    jacobian = torch.autograd.functional.jacobian
    R, Z = entered[0] + h @ W_r.T + biases[0], entered[1] + h @ W_z.T + biases[1]
    r, z, M = R.sigmoid(), Z.sigmoid(), h @ W_n.T + biases[2]
    N = entered[2] + r * M
    n = N.tanh()
    terms = {
        "J1": (lambda h: entered[0] + h @ W_r.T, h, W_r.T),
        "j2": (torch.sigmoid, R, torch.diag(r * (1 - r))),
        "j3": (lambda r: entered[2] + r * M, r, torch.diag(M)),
        "J4": (lambda h: h @ W_n.T, h, W_n.T),
        "j5": (lambda M: entered[2] + r * M, M, torch.diag(r)),
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
    pattern = state_jacobian_pattern("GRU", np.ones((15, 5), dtype=bool))
    state = {"r": r, "z": z, "n": n, "m": M, "before": h}
    values = state_jacobian_values("GRU", cell.weight_hh_l0.detach(), pattern, state).reshape(5, 5)
    assert torch.allclose(values.T, total, rtol=1e-13)


@pytest.mark.parametrize("mode", ["RNN_TANH", "GRU", "LSTM"])
def test_a_cell_of_no_elements(mode: str) -> None:
    pattern = state_jacobian_pattern(mode, np.ones((0, 0), dtype=bool))
    state = {name: torch.zeros(5, 0) for name in ("h", "r", "z", "n", "m", "before", "i", "f", "g", "o", "c")}
    assert pattern.shape == (0, 0)
    assert state_jacobian_values(mode, torch.zeros(0, 0), pattern, state).shape == (0, 5)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="mode is 'TCN'; expected one of RNN_TANH"):
        state_jacobian_pattern("TCN", np.ones((2, 2), dtype=bool))
    with pytest.raises(ValueError, match=r"mask has shape \(4, 2\); expected \(3 · H, H\)"):
        state_jacobian_pattern("GRU", np.ones((4, 2), dtype=bool))
