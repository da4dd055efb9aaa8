"""What solvers count: levels, multiply-adds of an element and stored entries."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from jacsparse.solvers import (
    SOLVERS,
    BlockBidiagonal,
    BlockTriangular,
    CyclicReduction,
    Hybrid,
    Jacobi,
    PrefixScan,
    Substitution,
    propagation,
    solve,
)

EYE, ONES = torch.eye(2), torch.ones(1, 2)


def recurrent(layers: int, steps: int) -> BlockTriangular:
    torch.manual_seed(0)
    x, gradient = (torch.randn(steps, 1, size, dtype=torch.float64) for size in (2, 3))
    return propagation(nn.RNN(2, 3, layers).double(), x, gradient).system


@pytest.mark.parametrize(
    ("layers", "steps"),
    [
        *itertools.product((1, 2, 3, 4), (1, 2, 3, 5, 8, 17, 33)),
        (2, 65),
        pytest.param(4, 65, marks=pytest.mark.full),
    ],
)
def test_levels_of_reduction_by_layers_and_steps(layers: int, steps: int) -> None:
    system = recurrent(layers, steps).on_meta()
    flat, nested = (CyclicReduction(nested=nested).solve(system).work for nested in (False, True))
    assert flat.steps == math.ceil(math.log2(layers + steps))
    assert nested.steps == math.ceil(math.log2(layers + 1)) + math.ceil(math.log2(steps))
    assert Substitution().solve(system).work.steps == layers + steps - 1
    # Why nested reduction is not the default.
    assert flat.steps <= nested.steps and flat.entries <= nested.entries
    assert flat.multiply_adds <= nested.multiply_adds or steps == 2


def test_a_counted_solution_has_the_levels_of_the_real_one() -> None:
    system = recurrent(2, 5)
    for method in (Substitution(), CyclicReduction(), CyclicReduction(nested=True), Jacobi(limit=3), Hybrid(limit=3)):
        solution = method.solve(system)
        assert solution.work.levels
        if method.direct:
            assert method.solve(system.on_meta()).work.levels == solution.work.levels


def test_products_into_one_element_follow_each_other() -> None:
    """A row of several blocks takes as long as all of them."""
    blocks = {(0, column): torch.ones(2, 2) for column in (1, 2, 3)}
    system = BlockTriangular(blocks, [ONES] * 4)
    for name in ("substitution", "cyclic_reduction"):
        work = solve(system, method=name).work
        assert work.steps == 1 and work.multiply_adds == 12
        assert [level.longest for level in work.levels if level.tasks] == [6]
        assert work.time(1) == 12 and work.time(2**20) == 6


@pytest.mark.parametrize(
    ("diagonal", "steps"),
    # Of three layers: D⁻¹ once, or once beside each block.
    [
        (torch.tensor([[1.0, 2.0]]), {"substitution": 3, "scan": 3, "cyclic_reduction": 2, "jacobi": 4}),
        (2 * EYE[None], {"substitution": 7, "scan": 4, "cyclic_reduction": 3, "jacobi": 9}),
    ],
    ids=["diagonal", "matrices"],
)
def test_products_that_depend_on_each_other_are_levels(diagonal: torch.Tensor, steps: dict[str, int]) -> None:
    system = BlockBidiagonal([torch.full((2, 2), 0.1)] * 3, [ONES] * 4, inverse_diagonal=[diagonal] * 4)
    assert {name: solve(system, method=name).work.steps for name in steps} == steps


@pytest.mark.parametrize("schedule", ["linear", "blelloch", "blelloch:1", "chunked:2"])
def test_chains_of_one_system_are_scanned_side_by_side(schedule: str) -> None:
    def chains(*starts: int) -> BlockTriangular:
        blocks = {(start + k, start + k + 1): EYE for start in starts for k in range(5)}
        return BlockTriangular(blocks, [ONES] * (6 * len(starts)))

    one, two = (PrefixScan(schedule).solve(system) for system in (chains(0), chains(0, 6)))
    assert two.work.steps == one.work.steps
    assert two.work.multiply_adds == 2 * one.work.multiply_adds and two.work.entries == 2 * one.work.entries
    assert all(map(torch.equal, two.values, one.values * 2))


@pytest.mark.parametrize(("length", "steps"), [(1, 63), (3, 25), (8, 21)])
def test_blocks_of_a_chunked_scan_are_reduced_side_by_side(length: int, steps: int) -> None:
    system = BlockBidiagonal([EYE] * 63, [ONES] * 64)
    assert PrefixScan(f"chunked:{length}").solve(system).work.steps == steps


def test_entries_are_of_computed_blocks_that_are_read_later() -> None:
    """Four layers of 2 × 2: the same rule for all solvers."""
    plain = BlockBidiagonal([EYE] * 4, [ONES] * 5)
    scaled = BlockBidiagonal([EYE] * 4, [ONES] * 5, inverse_diagonal=[ONES] * 5)
    stored = {
        name: (solve(plain, name).work.entries, solve(scaled, name).work.entries)
        for name in SOLVERS
        if name != "hybrid"
    }
    assert stored.pop("cyclic_reduction") == (3 * 4, 3 * 4)
    # After the first level: one product of two maps, and two maps that no level has read yet.
    assert stored.pop("scan") == (4, 4 + 2 * 4)
    assert set(stored.values()) == {(0, 0)}
