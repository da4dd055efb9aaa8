"""The approximate forward pass of the paper against PyTorch's, by each solver."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from benchmarks._approximate_forward import TanhNetwork
from jacsparse.solvers import CyclicReduction, Hybrid, Jacobi, PrefixScan, Substitution, TriangularSolver

METHODS = (Substitution(), CyclicReduction(), CyclicReduction(nested=True), Hybrid(), Jacobi())


def layers() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    parts = [part for sizes in ((4, 6), (6, 5), (5, 3)) for part in (nn.Linear(*sizes), nn.Tanh())]
    return nn.Sequential(*parts).double(), torch.randn(7, 4).double()


def recurrent(depth: int = 2, steps: int = 5) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.RNN(2, 3, depth).double(), torch.randn(steps, 4, 2).double()


def near(module: nn.Module) -> nn.Module:
    """The network after a small step."""
    after = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in after.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return after


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize(("depth", "steps"), [(1, 1), (1, 9), (3, 2), (2, 5)])
def test_with_its_own_scales_the_pass_is_the_network_s(method: TriangularSolver, depth: int, steps: int) -> None:
    module, x = recurrent(depth, steps)
    network = TanhNetwork.of(module, x)
    torch.testing.assert_close(network.states()[-1], module(x)[0].detach(), rtol=0, atol=1e-14)
    assert network.errors(network.scales(network.states()), method)[0] < 1e-7


def test_layers_are_one_step() -> None:
    module, x = layers()
    network = TanhNetwork.of(module, x)
    torch.testing.assert_close(network.states()[-1][0], module(x).detach(), rtol=0, atol=1e-14)
    scales = network.scales(network.states())
    assert network.errors(scales, PrefixScan())[0] < 1e-12
    errors = TanhNetwork.of(near(module), x).errors(scales, CyclicReduction(), iterations=4)
    # Each iteration makes one more layer exact.
    assert errors == sorted(errors, reverse=True) and 1e-6 < errors[0] < 0.1 and errors[3] < 1e-12 < errors[2]


def test_each_iteration_makes_one_more_layer_or_step_exact() -> None:
    module, x = recurrent()
    before = TanhNetwork.of(module, x)
    scales = before.scales(before.states())
    errors = TanhNetwork.of(near(module), x).errors(scales, Hybrid(tolerance=1e-13), iterations=7)
    assert 1e-6 < errors[0] < 0.1 and errors[-1] < 1e-13
