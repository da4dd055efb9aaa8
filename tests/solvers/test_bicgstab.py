"""BiCGStab against the textbook's iteration on a dense matrix."""

from __future__ import annotations

import pytest
import torch

from jacsparse.solvers import BiCGStab, BlockBidiagonal
from jacsparse.solvers.expected_decay import expected_exponents
from tests.helpers import FLOAT

LAYERS, UNITS = 6, 3


def iterated(matrix: torch.Tensor, right: torch.Tensor, sizes: torch.Tensor, steps: int) -> torch.Tensor:
    """What van der Vorst's algorithm has after some steps from the right-hand side on, with weighted inner products."""
    generator = torch.Generator().manual_seed(0)
    shadow = torch.cat([torch.randn(UNITS, generator=generator, dtype=FLOAT) for _ in range(LAYERS + 1)])
    x, residual = right, right - matrix @ right
    direction = product = torch.zeros_like(right)
    last = alpha = omega = torch.ones((), dtype=FLOAT)
    for step in range(steps):
        projection = shadow @ (residual / sizes)
        beta = projection / last * alpha / omega if step else 0
        direction = residual + beta * (direction - omega * product)
        product = matrix @ direction
        alpha = projection / (shadow @ (product / sizes))
        half = residual - alpha * product
        stabiliser = matrix @ half
        omega = (stabiliser @ (half / sizes**2)) / (stabiliser @ (stabiliser / sizes**2))
        x, residual, last = x + alpha * direction + omega * half, half - omega * stabiliser, projection
    return x


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_iterates_are_the_textbook_s(steps: int) -> None:
    blocks = [torch.randn(UNITS, UNITS, dtype=FLOAT) for _ in range(LAYERS)]
    right = [torch.randn(1, UNITS, dtype=FLOAT) for _ in range(LAYERS + 1)]
    system = BlockBidiagonal(blocks, right)
    matrix = torch.eye((LAYERS + 1) * UNITS, dtype=FLOAT)
    for place, block in enumerate(blocks):
        rows = slice(place * UNITS, (place + 1) * UNITS)
        matrix[rows, rows.stop : rows.stop + UNITS] = -block
    exponents = expected_exponents(system, bits=4)
    sizes = torch.cat([exponents[node].double().exp2().expand(UNITS) for node in range(LAYERS + 1)])
    expected = iterated(matrix, torch.cat(right, 1)[0], sizes, steps)
    actual = torch.cat(list(BiCGStab(tolerance=1e-15, limit=steps).solve(system).values), 1)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8)
