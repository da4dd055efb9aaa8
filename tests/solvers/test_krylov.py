"""Krylov methods on drawn systems, against substitution and autograd, row by row."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jacsparse.patterns import Diagonal, Pattern
from torch import nn

from jacsparse import SparseJacobian
from jacsparse.solvers import GMRES, BiCGStab, BlockBidiagonal, Iteration, Jacobi, Solution, propagation, solve
from jacsparse.solvers.expected_decay import expected_exponents, times_power

KRYLOV: list[Iteration] = [BiCGStab(tolerance=1e-12), GMRES(tolerance=1e-12)]
#: Blocks of so many units: usual weights, one direction alone, large ones above the
#: diagonal, vanishing and growing ones.
BLOCKS: dict[str, Callable[[int], torch.Tensor]] = {
    "uniform": lambda n: (2 * torch.rand(n, n, dtype=torch.float64) - 1) / n**0.5,
    "rank one": lambda n: torch.randn(n, 1, dtype=torch.float64) * torch.randn(1, n, dtype=torch.float64) / n,
    "far from normal": lambda n: 3 * torch.randn(n, n, dtype=torch.float64).triu(),
    "tiny": lambda n: 1e-8 * torch.randn(n, n, dtype=torch.float64),
    "large": lambda n: 30 * torch.randn(n, n, dtype=torch.float64),
    "pruned": lambda n: torch.randn(n, n, dtype=torch.float64) * (torch.rand(n, n) < 0.2),
    "zero": lambda n: torch.zeros(n, n, dtype=torch.float64),
}


def drawn(
    kind: str, layers: int, units: int, batch: int, seed: int, *, everywhere: bool, upper: bool
) -> BlockBidiagonal:
    """A system with blocks of a kind, whose right-hand side is in one block row, or in all."""
    torch.manual_seed(seed)
    right = [torch.zeros(batch, units, dtype=torch.float64) for _ in range(layers + 1)]
    for part in right if everywhere else [right[-1 if upper else 0]]:
        part.normal_()
    derivatives = [
        SparseJacobian(
            Pattern.of(Diagonal(units)), 1 - torch.randn(units, batch, dtype=torch.float64).mul(0.5).tanh().square()
        )
        for _ in right
    ]
    return BlockBidiagonal(
        [BLOCKS[kind](units) for _ in range(layers)], right, inverse_diagonal=derivatives, upper=upper
    )


def rows_agree(system: BlockBidiagonal, method: Iteration, bound: float) -> Solution:
    """The solution, after a comparison of each block row with substitution's."""
    solution = method.solve(system)
    assert solution.converged, solution
    tiny = torch.finfo(torch.float64).tiny
    for ours, theirs in zip(solution.values, solve(system).values, strict=True):
        assert bool(((ours - theirs).abs().amax(dim=1) <= bound * theirs.abs().amax(dim=1).clamp(min=tiny)).all())
    return solution


@given(
    kind=st.sampled_from(sorted(BLOCKS)),
    layers=st.sampled_from([1, 2, 3, 5, 9]),
    units=st.integers(1, 6),
    batch=st.sampled_from([1, 3, 16]),
    everywhere=st.booleans(),
    upper=st.booleans(),
    method=st.sampled_from(KRYLOV),
    seed=st.integers(0, 2**31 - 1),
)
@settings(max_examples=30)
def test_each_block_row_settles(
    kind: str, layers: int, units: int, batch: int, everywhere: bool, upper: bool, method: Iteration, seed: int
) -> None:
    """Each row equals substitution's in relation to its own size, however small that is."""
    system = drawn(kind, layers, units, batch, seed, everywhere=everywhere, upper=upper)
    rows_agree(system, method, 1e-8 if kind in ("rank one", "far from normal", "pruned") else 1e-10)


@pytest.mark.parametrize("kind", ["uniform", "rank one", "far from normal", "tiny", "large"])
def test_deep_systems_settle_in_little_more_than_half_as_many_iterations(kind: str) -> None:
    layers = 60
    system = drawn(kind, layers, 8, 3, 0, everywhere=False, upper=True)
    solution = rows_agree(system, BiCGStab(), 1e-6)
    # No product with the matrix reaches further than one block row; tiny blocks end below float64's smallest number.
    reached = sum(bool(part.any()) for part in solution.values) - 1
    assert (reached == layers) == (kind != "tiny")
    assert reached / 2 <= solution.iterations <= layers / 2 + 12


@pytest.mark.parametrize("method", KRYLOV, ids=lambda method: method.name)
@pytest.mark.parametrize("batch", [1, 16])
def test_gradients_are_those_of_autograd(method: Iteration, batch: int) -> None:
    torch.manual_seed(0)
    widths = [6, *[8] * 14, 3]
    layers = [part for sizes in itertools.pairwise(widths) for part in (nn.Linear(*sizes), nn.Sigmoid())]
    module = nn.Sequential(*layers).double()
    x, gradient = (torch.randn(batch, size, dtype=torch.float64) for size in (6, 3))
    backward = propagation(module, x, gradient)
    ours = backward.gradients(method.solve(backward.system))
    leaf = x.clone().requires_grad_()
    theirs = torch.autograd.grad((module(leaf) * gradient).sum(), [leaf, *module.parameters()])
    for name, expected in zip(["input", *dict(module.named_parameters())], theirs, strict=True):
        assert float((ours[name] - expected).abs().max()) <= 1e-10 * float(expected.abs().max())


def test_samples_have_coefficients_of_their_own() -> None:
    """A sample's iterates do not depend on the samples beside it."""
    system = drawn("uniform", 9, 5, 4, 0, everywhere=False, upper=True)
    together = BiCGStab().solve(system)
    apart = [BiCGStab().solve(system.sample(number)) for number in range(system.batch)]
    assert together.converged and together.iterations == max(each.iterations for each in apart)
    for number, one in enumerate(together.values):
        other = torch.cat([each.values[number] for each in apart])
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def test_gmres_stagnates_until_the_polynomial_of_the_matrix_is_zero() -> None:
    """On a shift matrix the residual after k iterations is 1 / √(k + 1), and after l + 1 it is zero."""
    layers = 10
    right = [torch.zeros(1, 1, dtype=torch.float64)] * layers + [torch.ones(1, 1, dtype=torch.float64)]
    zeros = [torch.zeros(1, 1, dtype=torch.float64)] * (layers + 1)
    solution = GMRES(guess=zeros).solve(BlockBidiagonal([torch.ones(1, 1, dtype=torch.float64)] * layers, right))
    assert solution.converged and solution.iterations == layers + 1
    expected = [1 / (k + 1) ** 0.5 for k in range(1, layers + 1)]
    assert solution.history[1:-1] == pytest.approx(expected, rel=1e-9)
    assert not GMRES(restart=3, limit=40).solve(drawn("uniform", 20, 4, 1, 0, everywhere=False, upper=True)).converged


def test_expected_sizes_are_those_of_a_decaying_gradient() -> None:
    """In powers of two, near the solution's own over 1e-60, and without rounding where a block is a power of two."""
    system = drawn("tiny", 8, 6, 2, 0, everywhere=False, upper=True)
    exponents = expected_exponents(system)
    for node, part in enumerate(solve(system).values):
        assert bool((part.abs().amax(dim=1).log2() - exponents[node]).abs().max() < 12)
    halves = BlockBidiagonal([torch.eye(2) / 2] * 3, [torch.zeros(1, 2)] * 3 + [torch.ones(1, 2)])
    assert [int(expected_exponents(halves)[node]) for node in range(4)] == [-3, -2, -1, 0]
    assert [int(expected_exponents(halves, bits=3)[node]) for node in range(4)] == [6, 4, 2, 0]


def test_float32_below_its_smallest_number() -> None:
    """Gradients of the first layers are zero in float32, as autograd's are."""
    torch.manual_seed(0)
    blocks = [0.05 * torch.randn(4, 4) for _ in range(60)]
    right = [*[torch.zeros(2, 4)] * 60, torch.randn(2, 4)]
    system = BlockBidiagonal(blocks, right)
    expected = solve(system).values
    assert not expected[0].any()
    for method in (Jacobi(), BiCGStab(), GMRES()):
        solution = method.solve(system)
        assert solution.converged and not solution.values[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_two_beyond_the_range_of_a_dtype(dtype: torch.dtype) -> None:
    largest, smallest = [0.75 * 2.0**127, 2.0**-149, 0.0], [1.5, 1.0, 0.0]
    for numbers, exponents, expected in (
        (largest, [-127.0, 149.0, 1e6], [0.75, 1.0, 0.0]),
        (smallest, [-1e6, -149.0, -260.0], [0.0, 2.0**-149, 0.0]),
    ):
        scaled = times_power(torch.tensor(numbers, dtype=dtype), torch.tensor(exponents, dtype=torch.float64))
        assert scaled.tolist() == expected


def test_options_of_gmres() -> None:
    with pytest.raises(ValueError, match="restart is 0; expected a number of vectors of at least 1"):
        GMRES(restart=0)
