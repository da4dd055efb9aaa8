"""Sums and products of variables along runs of rows, and row by row."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jacsparse
from jacsparse.jacobians import passes
from jacsparse.jacobians.kernels import LONGEST
from jacsparse.jacobians.passes import FARTHEST, SHORTEST, Pass, in_turn, runs_of
from jacsparse.jacobians.terms import Step


def repeating(rng: np.random.Generator, rows: int, stride: int, products: bool, broken: float) -> Step:
    """A step whose rows repeat those `stride` before them, with factors at constant distances, but for some rows."""
    counts = np.resize(rng.integers(0, 4, stride), rows)
    counts[rng.random(rows) < broken] = rng.integers(0, 5)
    indptr = np.append(0, np.cumsum(counts)).astype(np.int32)
    row, term = np.repeat(np.arange(rows), counts), np.arange(indptr[-1]) - np.repeat(indptr[:-1], counts)
    place, number = row // stride, row % stride

    def of_place(low: int, high: int) -> np.ndarray:
        """A drawn number for each term of each of the rows that are repeated."""
        return rng.integers(low, high, (stride, 5))[number, term]

    def factor() -> np.ndarray:
        distance = of_place(-2, 3)
        return (2 * rows + of_place(0, max(1, rows)) + distance * place).astype(np.int32)

    coefficient = of_place(-3, 4).astype(np.float64)
    return Step(5 * rows, indptr, factor(), factor() if products else None, of_place(0, 2), coefficient)


def looped(step: Step, monomials: np.ndarray, variables: np.ndarray, constant: np.ndarray) -> np.ndarray:
    """The rows of a step, one term at a time."""
    out = constant.copy()
    for row in range(len(out)):
        for term in range(step.indptr[row], step.indptr[row + 1]):
            product = step.coefficient[term] * monomials[step.monomial[term]] * variables[step.left[term]]
            out[row] += product if step.right is None else product * variables[step.right[term]]
    return out


@given(
    seed=st.integers(0, 2**31),
    rows=st.sampled_from([0, 1, 17, 300, 1000, 2500]),
    stride=st.integers(1, FARTHEST + 2),
    products=st.booleans(),
    broken=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    batch=st.sampled_from([1, 3]),
)
def test_passes_equal_loops(seed: int, rows: int, stride: int, products: bool, broken: float, batch: int) -> None:
    """Rows that repeat with any stride and distances, negative ones too, and rows that do not."""
    rng = np.random.default_rng(seed)
    step = repeating(rng, rows, stride, products, broken)
    monomials, variables = rng.standard_normal(2), rng.standard_normal((5 * rows, batch))
    constant = rng.standard_normal(rows) if step.right is None else np.zeros(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "FEWEST", 0)
        prepared = Pass(step, batch)
    weight, out = step.coefficient * monomials[step.monomial], np.full((rows, batch), np.nan)
    if batch == 1:
        prepared.run(weight, variables[:, 0], out[:, 0], constant)
    else:
        prepared.run(weight, variables, out, constant[:, None])
    for sample in range(batch):
        expected = looped(step, monomials, variables[:, sample], constant)
        np.testing.assert_allclose(out[:, sample], expected, rtol=1e-13, atol=1e-12)


@given(seed=st.integers(0, 2**31), batch=st.sampled_from([1, 3]))
def test_small_steps_in_turn_equal_loops(seed: int, batch: int) -> None:
    """Steps of sums and of products that read those before them, as one, but for the last."""
    rng, steps, first = np.random.default_rng(seed), list[Step](), 20
    for products in (True, False, True, False):
        counts = rng.integers(0, 4, 15)
        indptr = np.append(0, np.cumsum(counts)).astype(np.int32)
        factors = [rng.integers(0, first, indptr[-1]).astype(np.int32) if each else None for each in (True, products)]
        coefficients = rng.integers(-3, 4, indptr[-1]).astype(np.float64)
        steps.append(Step(first, indptr, *factors, np.zeros(indptr[-1], np.int64), coefficients))
        first = steps[-1].stop
    assert len(in_turn(steps)) == 2
    variables = np.append(rng.standard_normal((20, batch)), np.full((first - 20, batch), np.nan), axis=0)
    computed = variables.copy()
    for step in steps:
        for sample in range(batch):
            rows = looped(step, np.ones(1), variables[:, sample], np.zeros(15))
            variables[step.first : step.stop, sample] = rows
    computed[steps[-1].first] = 1
    out = np.empty((15, batch))
    for step, results in zip(in_turn(steps), (computed[20 : steps[-1].first], out), strict=True):
        arrays = (computed[:, 0], results[:, 0]) if batch == 1 else (computed, results)
        Pass(step, batch).run(step.coefficient, *arrays, 0)
    np.testing.assert_allclose(out, variables[steps[-1].first :], rtol=1e-13, atol=1e-12)


def test_runs_hold_each_row_once() -> None:
    """A run is as long as it may be, no row is in two, and rows without terms are in none."""
    step = repeating(np.random.default_rng(0), 9000, 3, True, 0.001)
    runs = runs_of(step)
    inside = [start + runs.stride * np.arange(length) for start, length in zip(runs.start, runs.length, strict=True)]
    rows = np.concatenate([runs.others, *inside])
    assert np.array_equal(np.sort(rows), np.flatnonzero(np.diff(step.indptr)))
    assert runs.stride == 3 and runs.length.max() == LONGEST and runs.length.min() >= SHORTEST
    assert len(runs.others) < 0.1 * len(rows)


def test_indices_narrower_than_rows() -> None:
    """A step from outside may have indices of a type that cannot number its rows."""
    counts = np.zeros(1000, dtype=np.int64)
    counts[[5, 300, 999]] = 1
    indptr = np.append(0, np.cumsum(counts)).astype(np.int8)
    step = Step(3, indptr, np.arange(3, dtype=np.int8), None, np.zeros(3, dtype=np.int8), np.ones(3))
    out = np.full(1000, np.nan)
    Pass(step, 1).run(step.coefficient, np.array([1.0, 2.0, 3.0]), out, 0)
    assert np.array_equal(np.flatnonzero(out), [5, 300, 999]) and out.sum() == 6


def test_drawn_terms_have_no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where little repeats, everything goes row by row."""
    monkeypatch.setattr(passes, "FEWEST", 0)
    rng = np.random.default_rng(1)
    indptr = (2 * np.arange(5001)).astype(np.int32)
    left = rng.integers(0, 10_000, 10_000, dtype=np.int32)
    runs = runs_of(Step(10_000, indptr, left, None, np.zeros(10_000, dtype=np.int64), np.ones(10_000)))
    assert len(runs.start) == 0 and len(runs.others) == 5000


@pytest.mark.parametrize("shape", [(1, 40, 50), (1, 3000), (1, 7, 11, 13)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_grids_along_runs(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equations on grids of one to three dimensions, in planes and interleaved, equal autograd's Jacobian."""
    lengths: list[int] = []

    def noted(step: Step) -> passes.Runs:
        runs = runs_of(step)
        lengths.extend(runs.length)
        return runs

    monkeypatch.setattr(passes, "FEWEST", 0)
    monkeypatch.setattr(passes, "SHORTEST", 4)
    monkeypatch.setattr(passes, "runs_of", noted)
    # Those of prepared Jacobians of many terms, and of runs.
    monkeypatch.setattr("jacsparse.jacobians.products.INTERPRETED", -1)

    def f(u: torch.Tensor) -> torch.Tensor:
        out = u**3
        for axis in range(1, u.ndim):
            size = u.shape[axis]
            ahead, behind = u.narrow(axis, 1, size - 1), u.narrow(axis, 0, size - 1)
            flux = (1 + ahead * behind) * (ahead - behind)
            ends = torch.zeros_like(u.narrow(axis, 0, 1))
            out = out + torch.cat([flux, ends], axis) - torch.cat([ends, flux], axis)
        return torch.stack([out, out * u], -1)

    u = torch.rand(shape, dtype=dtype, generator=torch.Generator().manual_seed(0)) + 0.5
    J = jacsparse.prepare_jacobian(f, u, method="products", batched=True)(u)
    assert lengths
    v = torch.rand(shape, dtype=dtype)
    _, expected = torch.func.jvp(f, (u,), (v,))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(J.jvp(v).reshape(expected.shape), expected, rtol=tolerance, atol=tolerance)
