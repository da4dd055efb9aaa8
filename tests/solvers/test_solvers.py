"""Triangular solvers against substitution by hand, autograd and the paper's own statements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

import jacsparse
from jacsparse import solvers
from jacsparse.solvers import (
    SOLVERS,
    BiCGStab,
    BlockBidiagonal,
    BlockTriangular,
    CyclicReduction,
    Hybrid,
    Jacobi,
    PrefixScan,
    Richardson,
    Substitution,
    TriangularSolver,
    propagation,
    solve,
)
from jacsparse.solvers.propagation import RecurrentPropagation
from tests.solvers.appendix import explicit_reduction

ACTIVATIONS = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "relu": nn.ReLU}
DIRECT: list[TriangularSolver] = [
    Substitution(),
    PrefixScan("blelloch"),
    PrefixScan("blelloch:2"),
    PrefixScan("linear"),
    CyclicReduction(),
    CyclicReduction(depth=1),
    CyclicReduction(depth=0),
]
seeds = st.integers(0, 2**31 - 1)


def close(left: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-10) -> None:
    assert left.shape == right.shape
    scale = float(right.abs().max()) if right.numel() else 0.0
    assert float((left - right).abs().max() if right.numel() else 0.0) <= tolerance * max(1.0, scale)


def feed_forward(widths: list[int], activation: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for features, units in itertools.pairwise(widths):
        layers += [nn.Linear(features, units), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers).double()


def by_autograd(module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    leaf = x.clone().requires_grad_()
    output = module(leaf)
    output = output[0] if isinstance(output, tuple) else output
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad((output * gradient).sum(), [leaf, *parameters.values()])
    return dict(zip(["input", *parameters], gradients, strict=True))


def check(method: TriangularSolver, module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> solvers.Solution:
    """The gradients by a solver are autograd's."""
    backward = propagation(module, x, gradient)
    solution = method.solve(backward.system)
    computed = backward.gradients(solution)
    for name, expected in by_autograd(module, x, gradient).items():
        close(computed[name], expected)
    for ours, theirs in zip(solution.values, solve(backward.system).values, strict=True):
        close(ours, theirs)
    return solution


@given(
    widths=st.lists(st.integers(1, 7), min_size=2, max_size=34),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    batch=st.sampled_from([1, 8]),
    method=st.sampled_from(DIRECT),
    seed=seeds,
)
@settings(max_examples=60)
def test_direct_solvers_equal_autograd(
    widths: list[int], activation: str, batch: int, method: TriangularSolver, seed: int
) -> None:
    module = feed_forward(widths, activation, seed)
    rng = torch.Generator().manual_seed(seed)
    x, gradient = (torch.randn(batch, size, generator=rng, dtype=torch.float64) for size in (widths[0], widths[-1]))
    check(method, module, x, gradient)


@given(
    layers=st.integers(1, 4),
    steps=st.sampled_from([1, 2, 3, 5, 8, 17, 65]),
    batch=st.sampled_from([1, 3]),
    relu=st.booleans(),
    method=st.sampled_from([Substitution(), CyclicReduction(nested=True), CyclicReduction(), CyclicReduction(depth=2)]),
    seed=seeds,
)
@settings(max_examples=25)
def test_direct_solvers_equal_autograd_on_recurrent_networks(
    layers: int, steps: int, batch: int, relu: bool, method: TriangularSolver, seed: int
) -> None:
    if isinstance(method, CyclicReduction) and not method.nested:
        steps = min(steps, 9)
    torch.manual_seed(seed)
    module = nn.RNN(2, 3, layers, nonlinearity="relu" if relu else "tanh").double()
    x, gradient = (torch.randn(steps, batch, size, dtype=torch.float64) for size in (2, 3))
    check(method, module, x, gradient)


def test_last_states_and_first_ones_of_a_recurrent_network() -> None:
    torch.manual_seed(0)
    module = nn.RNN(2, 3, 2, batch_first=True).double()
    x, hx = torch.randn(4, 6, 2, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64).requires_grad_()
    output, last = module(x, hx)
    of_output, of_last = torch.randn_like(output), torch.randn_like(last)
    backward = propagation(module, x, of_output, last=of_last, hx=hx)
    computed = backward.gradients(solve(backward.system, method="cyclic_reduction"))
    parameters = dict(module.named_parameters())
    expected = torch.autograd.grad([output, last], [hx, *parameters.values()], [of_output, of_last])
    for name, gradient in zip(["hx", *parameters], expected, strict=True):
        close(computed[name], gradient)


def _tie(layer: nn.RNN) -> None:
    layer.weight_hh_l1 = layer.weight_hh_l0


def _prune(layer: nn.RNN) -> None:
    prune.random_unstructured(layer, "weight_hh_l0", 0.7)
    prune.random_unstructured(layer, "weight_ih_l1", 0.3)


def _parametrise(layer: nn.RNN) -> None:
    nn.utils.parametrizations.weight_norm(layer, "weight_hh_l1")


def _freeze(layer: nn.RNN) -> None:
    layer.weight_hh_l0.requires_grad_(False)
    layer.bias_ih_l1.requires_grad_(False)


@pytest.mark.parametrize("change", [_tie, _prune, _parametrise, _freeze])
def test_weights_of_a_recurrent_network_that_are_not_plain_parameters(change: Callable[[nn.RNN], None]) -> None:
    """Gradients are those of the parameters, by the names of ``named_parameters``."""
    torch.manual_seed(0)
    module = nn.RNN(2, 3, 2).double()
    change(module)
    x, gradient = (torch.randn(5, 2, size, dtype=torch.float64) for size in (2, 3))
    backward = propagation(module, x, gradient)
    computed = backward.gradients(solve(backward.system, method="cyclic_reduction"))
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    expected = torch.autograd.grad((module(x)[0] * gradient).sum(), trained.values())
    assert set(computed) == {"input", "hx", *trained}
    for name, theirs in zip(trained, expected, strict=True):
        close(computed[name], theirs)


@pytest.mark.parametrize("graph", [False, True])
def test_an_output_that_does_not_depend_on_the_input(graph: bool) -> None:
    class Detached(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.detach())

    module = Detached(3, 2)
    backward = propagation(module, torch.randn(4, 3), torch.ones(4, 2), graph=graph)
    computed = backward.gradients(solve(backward.system))
    assert not computed["input"].any() and computed["bias"].tolist() == [4.0, 4.0]


def test_a_solution_is_shown_in_one_line() -> None:
    system = BlockBidiagonal([torch.eye(2)] * 3, [torch.ones(1, 2)] * 4)
    assert repr(solve(system)) == "<Solution by substitution: converged>"
    shown = repr(solve(system, method="jacobi", limit=1))
    assert shown == "<Solution by jacobi: 1 iterations, residual 3.3e-01, not converged>"


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("method", DIRECT, ids=str)
def test_convolutions_and_pruned_weights(method: TriangularSolver, batch: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.PReLU(),
        nn.Linear(6, 3),
    )
    module = module.double().eval()
    prune.l1_unstructured(module[7], "weight", 0.8)
    prune.l1_unstructured(module[3], "weight", 0.5)
    x = torch.randn(batch, 2, 8, 8, dtype=torch.float64)
    check(method, module, x, torch.randn(batch, 3, dtype=torch.float64))


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 8, 31, 33])
def test_levels_of_cyclic_reduction(layers: int) -> None:
    system = BlockBidiagonal([torch.eye(2)] * layers, [torch.ones(1, 2)] * (layers + 1))
    solution = CyclicReduction().solve(system)
    assert solution.work.steps == math.ceil(math.log2(layers + 1))
    assert solution.values[0].tolist() == [[layers + 1.0] * 2]
    assert Substitution().solve(system).work.steps == layers
    counted = CyclicReduction().solve(system.on_meta())
    assert counted.work.levels == solution.work.levels


def test_memory_of_reduced_blocks_is_that_of_each_sample() -> None:
    """Section 4.1 claims twice the memory of the sequential pass; with different diagonals it grows by the batch."""
    widths = [6] * 10
    for batch in (1, 8):
        module = feed_forward(widths, "tanh", 0)
        x, gradient = (torch.randn(batch, 6, dtype=torch.float64) for _ in range(2))
        system = propagation(module, x, gradient).system
        stored = CyclicReduction().solve(system).work.entries
        assert stored == batch * 8 * 36
        assert (stored <= system.off_diagonal.entries) == (batch == 1)


@pytest.mark.parametrize("layers", [1, 4, 9])
def test_jacobi_is_exact_after_as_many_iterations_as_layers(layers: int) -> None:
    module = feed_forward([5] * (layers + 1), "tanh", 3)
    x, gradient = (torch.randn(2, 5, dtype=torch.float64) for _ in range(2))
    system = propagation(module, x, gradient).system
    expected = solve(system).values
    solution = Jacobi(tolerance=1e-15).solve(system)
    assert solution.iterations <= layers and solution.converged
    for ours, theirs in zip(solution.values, expected, strict=True):
        close(ours, theirs, 1e-13)
    guess = [torch.randn(2, size, dtype=torch.float64) for size in system.sizes]
    solution = Jacobi(tolerance=1e-15, guess=guess).solve(system)
    assert solution.iterations <= layers + 1 and solution.converged
    same = Richardson(tolerance=1e-15, guess=guess).solve(system)
    assert same.history == solution.history
    assert all(map(torch.equal, same.values, solution.values))


@pytest.mark.parametrize(
    "method",
    [Jacobi(), Richardson(omega=0.9, limit=400), BiCGStab(limit=400)],
    ids=str,
)
def test_iterative_solvers_reach_their_tolerance(method: TriangularSolver) -> None:
    module = feed_forward([6, 5, 4, 6, 5, 3], "tanh", 1)
    x, gradient = (torch.randn(4, size, dtype=torch.float64) for size in (6, 3))
    backward = propagation(module, x, gradient)
    solution = method.solve(backward.system)
    assert solution.converged and solution.residual is not None and solution.residual <= 1e-8
    assert len(solution.history) == solution.iterations + 1
    computed = backward.gradients(solution)
    for name, expected in by_autograd(module, x, gradient).items():
        close(computed[name], expected, 1e-6)


@pytest.mark.parametrize("name", [name for name, solver in SOLVERS.items() if not solver.direct and name != "hybrid"])
def test_a_limit_is_reported(name: str) -> None:
    module = feed_forward([5] * 12, "tanh", 1)
    x, gradient = (torch.randn(2, 5, dtype=torch.float64) for _ in range(2))
    solution = solve(propagation(module, x, gradient).system, method=name, limit=2, tolerance=1e-12)
    assert not solution.converged and solution.residual is not None and solution.residual > 1e-12
    assert solution.iterations <= 3


def test_bicgstab_settles_from_any_guess() -> None:
    module = feed_forward([5] * 6, "tanh", 1)
    x, gradient = (torch.randn(2, 5, dtype=torch.float64) for _ in range(2))
    system = propagation(module, x, gradient).system
    for scale in (0.0, 1.0):
        guess = [scale * torch.randn(2, size, dtype=torch.float64) for size in system.sizes]
        assert BiCGStab(guess=guess).solve(system).converged
    assert BiCGStab().solve(system).converged


def test_small_gradients_count_as_much_as_large_ones() -> None:
    """Gradients that vanish towards the input are not settled before they have got there."""
    torch.manual_seed(0)
    module = nn.Sequential(*[part for _ in range(30) for part in (nn.Linear(8, 8), nn.Sigmoid())]).double()
    x, gradient = torch.randn(2, 8, dtype=torch.float64), torch.randn(2, 8, dtype=torch.float64)
    backward = propagation(module, x, gradient)
    expected = solve(backward.system).values
    assert float(expected[0].abs().max()) < 1e-12
    solution = Jacobi().solve(backward.system)
    assert solution.converged and solution.iterations == 30
    for ours, theirs in zip(solution.values, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=0)
    early = Jacobi(limit=20).solve(backward.system)
    assert not early.converged and early.residual == 1


@pytest.mark.parametrize("scale", [1e-8, 1e-20, 1e8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_solvers_do_not_depend_on_the_scale(scale: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    x, gradient = torch.randn(2, 4, dtype=dtype), torch.randn(2, 3, dtype=dtype)
    gradient[1] *= 1e-3
    system = propagation(module, x, scale * gradient).system
    expected = solve(system).values
    for name in ("jacobi", "richardson", "bicgstab"):
        solution = solve(system, method=name, limit=400, tolerance=1e-4)
        assert solution.converged, name
        for ours, theirs in zip(solution.values, expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3 * float(theirs.abs().max())), name


def test_an_identity_with_other_values_is_a_diagonal() -> None:
    block = jacsparse.SparseJacobian(jacsparse.jacobian_pattern(nn.Flatten(), (2,)), torch.full((2, 1), 3.0))
    system = BlockBidiagonal([block, block], [torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2)])
    assert solve(system).values[0].tolist() == [[9.0, 9.0]]


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("width", [0, 1])
def test_empty_batches_and_layers(batch: int, width: int) -> None:
    blocks, right = [torch.ones(2, width), torch.ones(width, 2)], [torch.ones(batch, n) for n in (2, width, 2)]
    for name in ("substitution", "scan", "cyclic_reduction", "jacobi"):
        values = solve(BlockBidiagonal(blocks, right), method=name).values
        assert values[0].shape == (batch, 2) and bool((values[0] == 1 + 3 * width).all())
    x = torch.randn(batch, 2, 3, requires_grad=True)
    jacsparse.nn.Solve(nn.Flatten())(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


def test_recurrent_networks_that_are_refused() -> None:
    layer, x, g = nn.RNN(3, 4, 2), torch.randn(5, 2, 3), torch.randn(5, 2, 4)
    with pytest.raises(ValueError, match=r"last is torch.float32 \(2, 4\) on cpu; expected torch.float32 \(2, 2, 4\)"):
        propagation(layer, x, g, last=torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"x has shape \(5, 3\); expected a padded batch, \(time, batch, 3\)"):
        propagation(layer, x[:, 0], g)
    with pytest.raises(ValueError, match=r"gradient is torch.float64 \(5, 2, 4\) on cpu; expected torch.float32"):
        propagation(layer, x, g.double())
    for module in (layer, nn.Linear(3, 4)):
        with pytest.raises(TypeError, match=r"gradient is a NoneType; expected a torch.Tensor of shape \(5, 2, 4\)"):
            propagation(module, x, None)
    layer.register_forward_hook(lambda module, inputs, output: (2 * output[0], output[1]))
    with pytest.raises(TypeError, match="layer has hooks or a forward pass of its own"):
        propagation(layer, x, g)


def test_what_is_not_finite() -> None:
    """A direct solver says so; and gradients that are infinite pass, as autograd's do."""
    growing = torch.diag(torch.tensor([4.0, 0.9]))
    right = [torch.zeros(1, 2)] * 128 + [torch.tensor([[0.0, 1.0]])]
    system = BlockBidiagonal([growing] * 128, right)
    assert solve(system).converged and not solve(system, method="cyclic_reduction").converged
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    y = jacsparse.nn.Solve(module)(torch.randn(2, 3))
    y.backward(torch.full_like(y, math.inf))
    assert not module[0].weight.grad.isfinite().all()


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_hybrid_is_exact_after_as_many_iterations_as_steps(steps: int) -> None:
    torch.manual_seed(0)
    module = nn.RNN(3, 4, 3).double()
    x, gradient = (torch.randn(steps, 2, size, dtype=torch.float64) for size in (3, 4))
    backward = propagation(module, x, gradient)
    solution = Hybrid(tolerance=1e-14).solve(backward.system)
    assert solution.converged and solution.iterations <= steps
    computed = backward.gradients(solution)
    for name, expected in by_autograd(module, x, gradient).items():
        close(computed[name], expected)
    with pytest.raises(ValueError, match="hybrid does not apply: the system has no groups"):
        solve(BlockBidiagonal([torch.eye(2)], [torch.ones(1, 2)] * 2), method="hybrid")


def test_residual_connections_are_solved_level_by_level() -> None:
    """A node may depend on several others: substitution and reduction go along the graph."""
    rng = torch.Generator().manual_seed(0)
    edges = [(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (2, 4), (4, 5), (1, 5)]
    blocks = {edge: torch.randn(3, 3, generator=rng, dtype=torch.float64) for edge in edges}
    right = [torch.randn(2, 3, generator=rng, dtype=torch.float64) for _ in range(6)]
    scales = [torch.rand(2, 3, generator=rng, dtype=torch.float64) for _ in range(6)]
    system = BlockTriangular(blocks, right, inverse_diagonal=scales)
    assert system.depth == 5
    for sample in range(2):
        dense = torch.zeros(18, 18, dtype=torch.float64)
        for (row, column), block in blocks.items():
            dense[3 * row : 3 * row + 3, 3 * column : 3 * column + 3] = block
        scale = torch.cat([part[sample] for part in scales])
        c = torch.cat([part[sample] for part in right])
        expected = torch.linalg.solve(torch.eye(18, dtype=torch.float64) - scale[:, None] * dense, scale * c)
        for name in ("substitution", "cyclic_reduction", "jacobi"):
            values = torch.cat([part[sample] for part in solve(system, method=name).values])
            close(values, expected, 1e-9)
    with pytest.raises(ValueError, match="scan does not apply: a scan goes along one chain"):
        solve(system, method="scan")


class Residual(nn.Module):
    """A residual block, whose input is read three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + x + self.second(torch.tanh(self.first(x))))


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("method", ["substitution", "cyclic_reduction", "jacobi"])
def test_residual_networks(method: str, graph: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 2, 3), Residual(), Residual(), nn.Flatten(), nn.Linear(32, 3)).double()
    x, gradient = torch.randn(3, 1, 6, 6, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    backward = propagation(module, x, gradient, graph=graph)
    assert backward.system.is_bidiagonal != graph
    computed = backward.gradients(solve(backward.system, method=method))
    for name, expected in by_autograd(module, x, gradient).items():
        close(computed[name], expected, 1e-7)


@pytest.mark.parametrize("upper", [True, False])
@pytest.mark.parametrize("layers", [2, 3, 4, 5])
def test_matrices_of_the_appendix(layers: int, upper: bool) -> None:
    """Equations 30 and 31: two systems apart, with the blocks and right-hand sides of the paper."""
    rng = torch.Generator().manual_seed(layers)
    weights = [torch.randn(3, 3, generator=rng, dtype=torch.float64) for _ in range(layers)]
    scales = [torch.rand(1, 3, generator=rng, dtype=torch.float64) + 0.5 for _ in range(layers + 1)]
    right = [torch.randn(1, 3, generator=rng, dtype=torch.float64) for _ in range(layers + 1)]
    system = BlockBidiagonal(weights, right, inverse_diagonal=scales, upper=upper)
    reduction = explicit_reduction(system)
    places = {node: place for place, node in enumerate(reduction.order)}

    def block(row: int, column: int) -> torch.Tensor:
        rows, columns = (slice(3 * places[node], 3 * places[node] + 3) for node in (row, column))
        return reduction.reduced[rows, columns]

    for row in range(layers + 1):
        for column in range(layers + 1):
            expected = torch.zeros(3, 3, dtype=torch.float64)
            if row == column:
                expected = torch.diag(1 / scales[row][0])
            elif upper and column == row + 2:
                expected = -weights[row] @ torch.diag(scales[row + 1][0]) @ weights[row + 1]
            elif not upper and row == column + 2:
                expected = -weights[row - 1] @ torch.diag(scales[row - 1][0]) @ weights[row - 2]
            close(block(row, column), expected)
    # Each half is a system of its own.
    parities = [node % 2 for node in reduction.order]
    assert sum(a != b for a, b in itertools.pairwise(parities)) == 1
    c = torch.cat([part[0] for part in right])
    permuted = torch.linalg.solve(reduction.reduced, reduction.scaling @ c)
    values = torch.cat([part[0] for part in solve(system).values])
    close(reduction.permutation @ permuted, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matrices_of_a_module(dtype: torch.dtype) -> None:
    """The appendix' matrices of a module's own system solve it, for each sample."""
    module = feed_forward([3, 4, 2], "tanh", 0).to(dtype)
    system = propagation(module, torch.randn(2, 3, dtype=dtype), torch.randn(2, 2, dtype=dtype)).system
    expected = solve(system).values
    for sample in range(2):
        reduction = explicit_reduction(system, sample)
        c = torch.cat([part[:, sample] for part in system.right.values()])
        permuted = torch.linalg.solve(reduction.reduced, reduction.scaling @ c)
        assert permuted.dtype == dtype
        # A backward error of n eps, times a condition number of these matrices.
        tolerance = 9 * torch.finfo(dtype).eps * float(torch.linalg.cond(reduction.reduced))
        close(reduction.permutation @ permuted, torch.cat([part[sample] for part in expected]), tolerance)
    assert explicit_reduction(system).order == [1, 0, 2]
    with pytest.raises(ValueError, match="sample is 2; expected one of 0 to 1"):
        explicit_reduction(system, 2)


def test_matrices_that_do_not_exist() -> None:
    module = feed_forward([3, 4, 2], "relu", 0)
    system = propagation(module, torch.zeros(1, 3).double(), torch.ones(1, 2).double()).system
    with pytest.raises(ValueError, match="diagonal block 1 is singular in sample 0, as where f' = 0"):
        explicit_reduction(system)
    with pytest.raises(ValueError, match="of 3 block rows, 1 blocks, batch 1> is no chain in the order of its nodes"):
        explicit_reduction(BlockTriangular({(0, 2): torch.eye(2)}, [torch.ones(1, 2)] * 3))


@pytest.mark.parametrize("widths", [[1, 1], [1, 1, 1, 1], [3, 1, 1, 2]])
def test_layers_of_one_unit_are_block_rows(widths: list[int]) -> None:
    module = feed_forward(widths, "tanh", 0)
    x = torch.randn(2, widths[0], dtype=torch.float64)
    gradient = torch.randn(2, widths[-1], dtype=torch.float64)
    backward = propagation(module, x, gradient)
    assert backward.system.sizes == tuple(widths)
    leaf = x.clone().requires_grad_()
    output = module(leaf)
    expected = torch.autograd.grad(output, [leaf, *module.parameters()], gradient)
    for name in ("substitution", "scan", "cyclic_reduction"):
        found = backward.gradients(solve(backward.system, method=name))
        for key, value in zip(("input", *dict(module.named_parameters())), expected, strict=True):
            close(found[key], value)


def test_counted_work_is_what_the_paper_leaves_out() -> None:
    """Sequential work is equation 42's; reduction's is r times the paper's products from the second level on."""
    layers, units = 15, 4
    for samples in (1, 6):
        module = feed_forward([units] * (layers + 1), "tanh", 0)
        x, gradient = (torch.randn(samples, units, dtype=torch.float64) for _ in range(2))
        system = propagation(module, x, gradient).system
        counted = Substitution().solve(system).work
        assert sum(map(sum, (level.tasks for level in counted.levels))) == layers * units**2 * samples
        tasks = [sum(level.tasks) for level in CyclicReduction().solve(system).work.levels]
        products = [(layers - 2**level + 1) - 2**level for level in range(4)]
        expected = [
            max(0, count) * units**3 * samples + (layers - 2**level + 1) * units**2 * samples
            for level, count in enumerate(products)
        ]
        assert tasks[:4] == expected


def test_solve_is_a_module() -> None:
    torch.manual_seed(0)
    module = feed_forward([4, 6, 5, 3], "tanh", 0)
    x = torch.randn(5, 4, dtype=torch.float64)
    gradient = torch.randn(5, 3, dtype=torch.float64)
    expected = by_autograd(module, x, gradient)
    for method in ("substitution", "scan", "cyclic_reduction", "jacobi", "bicgstab"):
        solving = jacsparse.nn.Solve(module, method=method)
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        y = solving(leaf)
        assert torch.equal(y, module(x))
        (y * gradient).sum().backward()
        assert leaf.grad is not None
        close(leaf.grad, expected["input"], 1e-6)
        for name, parameter in module.named_parameters():
            close(parameter.grad, expected[name], 1e-6)
        assert method in repr(solving)
    limited = jacsparse.nn.Solve(module, method="jacobi", limit=1)
    with pytest.warns(RuntimeWarning, match="jacobi stopped after 1 iterations"):
        limited(x).sum().backward()
    with pytest.raises(ValueError, match="method is 'gauss'; expected one of substitution, scan"):
        jacsparse.nn.Solve(module, method="gauss")
    with pytest.raises(TypeError, match=r"the method scan does not take \['limit'\]"):
        jacsparse.nn.Solve(module, method="scan", limit=3)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Hybrid(), "hybrid does not apply: the system has no groups"),
        (CyclicReduction(nested=True), "nested reduction needs a system with groups"),
        (PrefixScan(jacsparse.schedule.linear(3)), r"for 3 stages, and the system has chains of \[4\] block rows"),
        (Jacobi(tolerance=1e-20), "tolerance is 1e-20; expected a number of at least"),
        (Jacobi(guess=[torch.ones(5, 4)] * 4), r"guess\[0\] is torch.float32 \(5, 4\) on cpu; expected torch.float64"),
    ],
    ids=str,
)
def test_what_does_not_apply_is_told_in_the_forward_pass(method: TriangularSolver, message: str) -> None:
    solving = jacsparse.nn.Solve(feed_forward([4, 6, 5, 3], "tanh", 0), method=method)
    x = torch.randn(5, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        solving(x)
    with torch.no_grad():
        assert solving(x).shape == (5, 3)


def test_messages_of_solve_name_it() -> None:
    module = feed_forward([4, 6], "tanh", 0)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(
        RuntimeError, match=r"gradients of gradients, which nn\.Solve does not give; call the module in"
    ):
        torch.autograd.grad(jacsparse.nn.Solve(module)(x).sum(), x, create_graph=True)
    module[0].register_full_backward_hook(lambda module, entering, leaving: None)
    with pytest.raises(jacsparse.UnsupportedOperatorError, match="0: a backward hook, of a module"):
        jacsparse.nn.Solve(module)(x)
    for layer in (nn.RNN(2, 3), nn.GRU(2, 3), jacsparse.nn.LSTM(2, 3)):
        with pytest.raises(TypeError, match=f"module is an? {type(layer).__name__}, whose output is several tensors"):
            jacsparse.nn.Solve(layer)


def test_bad_systems() -> None:
    eye, ones = torch.eye(2), torch.ones(1, 2)
    with pytest.raises(ValueError, match="off_diagonal is empty; a system of no layers"):
        BlockBidiagonal([], [ones])
    with pytest.raises(ValueError, match="right has 3 parts; expected 2"):
        BlockBidiagonal([eye], [ones] * 3)
    with pytest.raises(ValueError, match=r"off_diagonal\[0, 1\] is 3 × 2; expected 2 × 2"):
        BlockBidiagonal([torch.ones(3, 2)], [ones] * 2)
    with pytest.raises(ValueError, match=r"off_diagonal\[0, 1\] has elements that are not finite"):
        BlockBidiagonal([eye / 0], [ones] * 2)
    with pytest.raises(ValueError, match=r"right\[1\] has elements that are not finite"):
        BlockBidiagonal([eye], [ones, ones * math.nan])
    with pytest.raises(ValueError, match=r"diagonal\[1\] is singular: a zero on its diagonal"):
        BlockBidiagonal([eye], [ones] * 2, diagonal=[None, torch.tensor([1.0, 0.0])])
    with pytest.raises(ValueError, match=r"diagonal\[0\] is singular"):
        BlockBidiagonal([eye], [ones] * 2, diagonal=[torch.ones(1, 2, 2), None])
    with pytest.raises(ValueError, match="both given"):
        BlockBidiagonal([eye], [ones] * 2, diagonal=[None] * 2, inverse_diagonal=[None] * 2)
    with pytest.raises(TypeError, match=r"off_diagonal\[0, 1\] is a list; expected a SparseJacobian or a torch.Tensor"):
        BlockBidiagonal([[1.0]], [ones] * 2)
    with pytest.raises(TypeError, match=r"right\[0\] is torch.int64; expected float32 or float64"):
        BlockBidiagonal([eye], [torch.ones(1, 2, dtype=torch.int64)] * 2)
    with pytest.raises(TypeError, match=r"off_diagonal\[0, 1\] is torch.float64; expected torch.float32"):
        BlockBidiagonal([eye.double()], [ones] * 2)
    with pytest.raises(ValueError, match=r"off_diagonal\[0, 1\] has 3 samples; the right-hand sides have 1"):
        BlockBidiagonal([eye.expand(3, 2, 2)], [ones] * 2)
    with pytest.raises(ValueError, match=r"diagonal\[0\] has shape \(2, 2\), which is a matrix or a diagonal for each"):
        BlockBidiagonal([eye], [torch.ones(2, 2)] * 2, diagonal=[eye, None])
    with pytest.raises(ValueError, match=r"inverse_diagonal\[0\] has shape \(2, 2\), which is a matrix or a diagonal"):
        BlockBidiagonal([eye], [torch.ones(2, 2)] * 2, inverse_diagonal=[eye, None])
    with pytest.raises(ValueError, match=r"right\[0\] has 2 samples, and another part 3"):
        BlockBidiagonal([eye], [torch.ones(2, 2), torch.ones(3, 2)])
    with pytest.raises(TypeError, match=r"diagonal\[0\] is torch.int64"):
        BlockBidiagonal([eye], [ones] * 2, diagonal=[torch.ones(2, dtype=torch.int64), None])
    with pytest.raises(ValueError, match="depend on each other in a circle"):
        BlockTriangular({(0, 1): eye, (1, 0): eye}, [ones] * 2)
    for groups, message in [
        ([[1]], "groups have node 0 0 times; expected each of 0 to 1 once"),
        ([[1, 0], [1]], "groups have node 1 2 times"),
        ([[1, 0], [2]], "groups have node 2 1 times; expected each of 0 to 1 once"),
        ([[0], [1]], r"groups have node 0 before node 1, which it depends on by off_diagonal\[0, 1\]"),
        ([[0, 1]], "groups have node 0 before node 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            BlockTriangular({(0, 1): eye}, [ones] * 2, groups=groups)
    with pytest.raises(TypeError, match="system is a Tensor"):
        solve(eye)
    with pytest.raises(ValueError, match="method is 'gauss'; expected one of substitution"):
        solve(BlockBidiagonal([eye], [ones] * 2), method="gauss")


def test_bad_options() -> None:
    system = BlockBidiagonal([torch.eye(2)], [torch.ones(1, 2)] * 2)
    with pytest.raises(ValueError, match=r"tolerance is 1e-20; expected a number of at least 1.2e-07"):
        solve(system, method="jacobi", tolerance=1e-20)
    for tolerance in (0.0, 1.0, -1.0, math.nan, math.inf, "small", True):
        with pytest.raises(ValueError, match=f"tolerance is {tolerance!r}; expected a number above 0 and below 1"):
            Jacobi(tolerance=tolerance)
    with pytest.raises(ValueError, match="limit is 0; expected a number of iterations"):
        solve(system, method="jacobi", limit=0)
    with pytest.raises(ValueError, match=r"omega is 2\.5; expected a number between 0 and 2"):
        solve(system, method="richardson", omega=2.5)
    with pytest.raises(ValueError, match="depth is -1"):
        solve(system, method="cyclic_reduction", depth=-1)
    with pytest.raises(ValueError, match="nested reduction needs a system with groups"):
        solve(system, method="cyclic_reduction", nested=True)
    with pytest.raises(
        ValueError, match=r"guess\[0\] is torch.float32 \(2, 2\) on cpu; expected torch.float32 \(1, 2\)"
    ):
        solve(system, method="jacobi", guess=[torch.ones(2, 2), torch.ones(1, 2)])
    with pytest.raises(ValueError, match=r"guess\[1\] is torch.float64 \(1, 2\) on cpu; expected torch.float32"):
        solve(system, method="jacobi", guess=(torch.ones(1, 2), torch.ones(1, 2).double()))
    with pytest.raises(TypeError, match=r"^guess is a Tensor; expected a list with a tensor for each block row"):
        solve(system, method="jacobi", guess=torch.ones(2, 1, 2))
    with pytest.raises(TypeError, match=r"^guess\[0\] is a list; expected a torch\.Tensor"):
        Hybrid(guess=[[1.0]])
    with pytest.raises(
        ValueError, match=r"its schedule is for 3 stages, and the system has chains of \[2\] block rows"
    ):
        PrefixScan(jacsparse.schedule.linear(3)).solve(system)
    with pytest.raises(ValueError, match="schedule is 'balanced:2', which weighs a module's stages"):
        PrefixScan("balanced:2")
    with pytest.raises(ValueError, match="guess has 1 parts; expected 2"):
        solve(system, method="jacobi", guess=[torch.ones(1, 2)])
    with pytest.raises(TypeError, match=r"layer is a GRU; expected a torch\.nn\.RNN"):
        RecurrentPropagation(nn.GRU(2, 3), torch.ones(4, 1, 2), torch.ones(4, 1, 3))
    with pytest.raises(ValueError, match="bidirectional or drops out"):
        propagation(nn.RNN(2, 3, bidirectional=True), torch.ones(4, 1, 2), torch.ones(4, 1, 6))
    with pytest.raises(ValueError, match="graph=True is for modules of operators"):
        propagation(nn.RNN(2, 3), torch.ones(4, 1, 2), torch.ones(4, 1, 3), graph=True)
    with pytest.raises(TypeError, match="last and hx are of an RNN, and the module is a Linear"):
        propagation(nn.Linear(2, 3), torch.ones(4, 2), torch.ones(4, 3), hx=torch.ones(1))
    with pytest.raises(ValueError, match=r"gradient is torch.float32 \(4, 2\) on cpu; expected torch.float32 \(4, 3\)"):
        propagation(nn.Linear(2, 3), torch.ones(4, 2), torch.ones(4, 2))
    with pytest.raises(ValueError, match="Identity has no stages"):
        propagation(nn.Identity(), torch.ones(4, 2), torch.ones(4, 2))


def test_solvers_with_a_guess_are_compared_and_hashed() -> None:
    guess = [torch.ones(1, 2)] * 2
    assert Jacobi(guess=guess) == Jacobi(guess=[2 * part for part in guess]) != Jacobi(guess=guess, limit=3)
    assert hash(Hybrid(guess=guess)) == hash(Hybrid()) and repr(Jacobi(guess=guess)) == repr(Jacobi())


def test_the_error_decreases_by_the_largest_sum_of_a_row() -> None:
    half = BlockBidiagonal([torch.full((2, 2), 0.2)] * 3, [torch.ones(1, 2)] * 4)
    solution = Jacobi(tolerance=1e-6).solve(half)
    assert all(after <= 0.41 * before for before, after in zip(solution.history, solution.history[1:], strict=False))


def test_numbers_on_numpy_are_not_taken() -> None:
    with pytest.raises(TypeError, match=r"right\[0\] is an ndarray"):
        BlockBidiagonal([torch.eye(2)], [np.ones((1, 2))] * 2)
