"""The approximate forward pass of recurrent networks against PyTorch's, by each solver."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from jacsparse.solvers import (
    GMRES,
    SOLVERS,
    BiCGStab,
    CyclicReduction,
    Hybrid,
    Jacobi,
    Richardson,
    Substitution,
    TriangularSolver,
    approximate_forward,
    forward_scales,
)

METHODS: list[TriangularSolver] = [
    Substitution(),
    CyclicReduction(),
    CyclicReduction(nested=True),
    Hybrid(tolerance=1e-13),
    Jacobi(tolerance=1e-13),
    Richardson(tolerance=1e-13, omega=0.9, limit=400),
    BiCGStab(tolerance=1e-13),
    GMRES(tolerance=1e-13),
]


def network(layers: int, *, seed: int = 0, relu: bool = False, bias: bool = True, batch_first: bool = False) -> nn.RNN:
    torch.manual_seed(seed)
    nonlinearity = "relu" if relu else "tanh"
    return nn.RNN(2, 3, layers, nonlinearity=nonlinearity, bias=bias, batch_first=batch_first).double()


def near(module: nn.RNN) -> nn.RNN:
    """The network after a small step."""
    after = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in after.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return after


@given(
    layers=st.integers(1, 3),
    steps=st.sampled_from([1, 2, 5, 9]),
    batch=st.sampled_from([1, 3]),
    relu=st.booleans(),
    bias=st.booleans(),
    batch_first=st.booleans(),
    first=st.booleans(),
    method=st.sampled_from(METHODS),
    seed=st.integers(0, 2**31 - 1),
)
@settings(max_examples=30)
def test_with_its_own_scales_the_pass_is_the_network_s(
    layers: int,
    steps: int,
    batch: int,
    relu: bool,
    bias: bool,
    batch_first: bool,
    first: bool,
    method: TriangularSolver,
    seed: int,
) -> None:
    module = network(layers, seed=seed, relu=relu, bias=bias, batch_first=batch_first)
    x = torch.randn(*((batch, steps) if batch_first else (steps, batch)), 2, dtype=torch.float64)
    hx = torch.randn(layers, batch, 3, dtype=torch.float64) if first else None
    forward = approximate_forward(module, x, forward_scales(module, x, hx=hx), method=method, hx=hx)
    expected = module(x, hx)[0].detach()
    assert forward.errors[0] < 1e-10
    assert float((forward.output - expected).abs().max()) <= 1e-10 * float(expected.abs().max())


def test_each_iteration_makes_one_more_layer_or_step_exact() -> None:
    layers, steps = 2, 5
    module = network(layers)
    x = torch.randn(steps, 4, 2, dtype=torch.float64)
    scales = forward_scales(module, x)
    assert [tuple(scale.shape) for scale in scales] == [(steps, 4, 3)] * layers
    after = near(module)
    forward = approximate_forward(after, x, scales, iterations=layers + steps, method="hybrid")
    assert 1e-6 < forward.errors[0] < 0.1 and forward.errors[-1] < 1e-14
    # Layer k at step s has its own scales from iteration k + s on.
    short = approximate_forward(after, x, scales, iterations=4).output
    exact = (short - after(x)[0].detach()).abs().flatten(1).amax(dim=1) < 1e-14
    assert exact.tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_every_solver_of_layers_solves_recurrent_networks_too(name: str) -> None:
    module, x = network(2), torch.randn(6, 2, 2, dtype=torch.float64)
    prune.random_unstructured(module, "weight_hh_l1", 0.7)
    scales = forward_scales(module, x)
    if name == "scan":
        with pytest.raises(ValueError, match="scan does not apply: a scan goes along one chain"):
            approximate_forward(module, x, scales, method=name)
    else:
        assert approximate_forward(module, x, scales, method=name).errors[0] < 1e-7


def test_what_is_refused() -> None:
    module, x = network(2), torch.randn(5, 3, 2, dtype=torch.float64)
    scales = forward_scales(module, x)
    with pytest.raises(TypeError, match=r"layer is a GRU; expected a torch\.nn\.RNN.* states are products with gates"):
        forward_scales(nn.GRU(2, 3), x)
    with pytest.raises(TypeError, match="hx is of an RNN, and the module is a Linear"):
        forward_scales(nn.Linear(2, 3), torch.ones(4, 2), hx=torch.ones(1))
    with pytest.raises(ValueError, match=r"hx is torch\.float64 \(3, 3\) on cpu; expected torch\.float64 \(2, 3, 3\)"):
        forward_scales(module, x, hx=torch.ones(3, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"scales\[0\] is torch\.float64 \(5, 3, 3\); expected .* \(4, 3, 3\)"):
        approximate_forward(module, x[:4], scales)
    with pytest.raises(ValueError, match="there are 1 scales for 2 layers"):
        approximate_forward(module, x, scales[:1])
