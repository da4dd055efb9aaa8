"""The kernels of products, run fiber by fiber on the CPU, against a dense product."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from jacsparse.patterns import Diagonal, Full, Pattern
from jacsparse.spgemm import METHODS, ProductPlan, matvec, plan_product, planned
from jacsparse.spgemm.products_cuda import LAUNCHES
from torch import nn

import jacsparse
from jacsparse.runtime import Launch, backend
from tests.cuda.harness import DEVICE, ON_GPU, emulated
from tests.helpers import by_products, random_pattern

BATCHES = [(1, 1), (3, 1), (1, 3), (33, 33), (1, 33), (2, 2)]
DTYPES = [torch.float32, torch.float64]


def values_of(pattern: Pattern, batch: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn((pattern.nnz, batch), dtype=dtype, generator=torch.Generator().manual_seed(seed))


def dense(pattern: Pattern, values: torch.Tensor, samples: int) -> np.ndarray:
    """``(samples, rows, columns)``."""
    wide = values.expand(-1, samples).double().cpu().numpy()
    return np.stack([pattern.to_scipy(wide[:, s].copy()).toarray() for s in range(samples)])


def check(a: Pattern, b: Pattern, method: str, batches: tuple[int, int], dtype: torch.dtype) -> None:
    plan = plan_product(a, b, method=method)
    left, right = (
        values_of(pattern, batch, dtype, seed).to(DEVICE)
        for seed, (pattern, batch) in enumerate(zip((a, b), batches, strict=True))
    )
    samples = max(batches)
    out = torch.full((plan.pattern.nnz, samples), float("nan"), dtype=dtype, device=DEVICE)
    with emulated():
        plan.multiply(left, right, out=out)
    expected = dense(a, left, samples) @ dense(b, right, samples)
    actual = dense(plan.pattern, out, samples)
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    assert np.abs(actual - expected).max(initial=0) <= 50 * torch.finfo(dtype).eps * scale


def test_slots_multiply_by_lists_of_pairs_where_they_fit(tmp_path: Path) -> None:
    a, b = random_pattern(7, 5, 0.4, 1), random_pattern(5, 9, 0.4, 2)
    plan, least = plan_product(a, b), plan_product(a, b, memory_limit=0)
    slots = plan_product(a, b, method="slots", memory_limit=0)
    assert [(each.method, each.device_method) for each in (plan, least, slots)] == [
        ("slots", "merge"), ("rowwise", "rowwise"), ("slots", "rowwise"),
    ]  # fmt: skip
    plan.save(tmp_path / "plan.npz")
    assert ProductPlan.load(tmp_path / "plan.npz").device_method == "merge"
    left, right = (values_of(pattern, 1, torch.float64, 0).to(DEVICE) for pattern in (a, b))
    with emulated():
        assert plan.multiply(left, right).equal(plan_product(a, b, method="merge").multiply(left, right))


def test_index_arrays_of_a_cpu_are_not_made_for_a_gpu() -> None:
    a, b = random_pattern(7, 5, 0.4, 1), random_pattern(5, 9, 0.4, 2)
    plan = plan_product(a, b, cache=False)
    values = [values_of(pattern, 1, torch.float64, 0) for pattern in (a, b)]
    with emulated():
        plan.multiply(*(each.to(DEVICE) for each in values))
    assert "indices" not in plan._method.__dict__
    plan.multiply(*values)
    assert sum(array.nbytes for array in (plan._method.work, plan._method.indices[-1])) == plan.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("method", ["merge", "rowwise"])
@pytest.mark.parametrize("shape", [(7, 5, 9), (1, 1, 1), (37, 3, 40), (4, 70, 5)])
def test_general_products(
    shape: tuple[int, int, int], method: str, batches: tuple[int, int], dtype: torch.dtype
) -> None:
    rows, inner, columns = shape
    check(random_pattern(rows, inner, 0.4, 1), random_pattern(inner, columns, 0.4, 2), method, batches, dtype)


@pytest.mark.parametrize("method", METHODS)
def test_a_bound_product_is_what_multiply_computes(method: str) -> None:
    selecting = jacsparse.chain(nn.MaxPool2d(2), (1, 4, 4)).stages[0].transposed_pattern
    b = {"scale": Pattern.of(Diagonal(16)), "dense": Pattern.of(Full(16, 3)), "select": selecting}
    a, b = random_pattern(9, 16, 0.4, 1), b.get(method, random_pattern(16, 5, 0.4, 2))
    plan = plan_product(a, b, method=method)
    for batches, dtype in itertools.product(((1, 1), (3, 3)), DTYPES):
        values = [values_of(each, n, dtype, 0).to(DEVICE) for each, n in zip((a, b), batches, strict=True)]
        if plan.selects_right:
            windows = selecting.T
            first = torch.from_numpy(windows.indices[windows.indptr[:-1]])
            values[1] = first.int()[:, None].repeat(1, batches[1]).to(DEVICE)
        out = torch.full((plan.pattern.nnz, max(batches)), float("nan"), dtype=dtype, device=DEVICE)
        with emulated():
            launch = plan.bind(DEVICE, dtype, batches)
            launch(*values, out)
            assert plan.multiply(*values).equal(out) and plan.bind(DEVICE, dtype, batches) is launch
        torch.testing.assert_close(out.cpu(), plan.multiply(*(each.cpu() for each in values)))


def test_a_plan_keeps_few_launches() -> None:
    a = random_pattern(5, 5, 0.5, 1)
    plan = plan_product(a, a)
    with emulated():
        for batch in range(1, 2 * LAUNCHES):
            plan.bind(DEVICE, torch.float32, (batch, 1))
        assert len(plan._launches) < LAUNCHES
        empty = plan_product(random_pattern(5, 5, 0.0, 1), a, method="merge")
        empty.bind(DEVICE)(torch.zeros(0, 1), torch.zeros(a.nnz, 1), torch.zeros(0, 1))


@pytest.mark.parametrize("method", ["merge", "rowwise", "scale", "dense"])
def test_what_is_bound_is_checked(method: str) -> None:
    b = {"scale": Pattern.of(Diagonal(5)), "dense": Pattern.of(Full(5, 3))}.get(method, random_pattern(5, 7, 0.5, 2))
    plan = plan_product(random_pattern(6, 5, 0.5, 1), b, method=method)
    with emulated():
        for dtype in (torch.float16, torch.int32):
            with pytest.raises(TypeError, match=f"dtype is {dtype}; expected torch.float32 or torch.float64"):
                plan.bind(DEVICE, dtype)
        for batches in ((2, 3), (-1, 1), (0, 2)):
            with pytest.raises(ValueError, match=f"the batches are {batches[0]} and {batches[1]}; they must agree"):
                plan.bind(DEVICE, batches=batches)
        # Products of no samples write nothing.
        for batches in ((0, 0), (0, 1), (1, 0)):
            values = [torch.zeros(each.nnz, n).to(DEVICE) for each, n in zip((plan.a, plan.b), batches, strict=True)]
            plan.bind(DEVICE, batches=batches)(*values, torch.zeros(plan.pattern.nnz, 0).to(DEVICE))
    if not ON_GPU:
        with pytest.raises(ValueError, match="device is cpu; expected a CUDA device"):
            plan.bind("cpu")


def test_winners_are_of_all_samples() -> None:
    selecting = jacsparse.chain(nn.MaxPool2d(2), (1, 4, 4)).stages[0].transposed_pattern
    left = plan_product(selecting, random_pattern(4, 5, 0.4, 1), method="select")
    right = plan_product(random_pattern(5, 16, 0.4, 1), selecting, method="select")
    with emulated():
        for plan, batches in ((left, (1, 3)), (right, (3, 1))):
            with pytest.raises(ValueError, match="that of the winners must be the larger one"):
                plan.bind(DEVICE, batches=batches)


def test_memory_of_negatives_is_not_written_to() -> None:
    """Its elements would be those of a copy."""
    a, b = random_pattern(6, 5, 0.5, 1), random_pattern(5, 7, 0.5, 2)
    plan = plan_product(a, b)
    values = [values_of(each, 1, torch.float32, 0) for each in (a, b)]
    out = torch._neg_view(torch.zeros(plan.pattern.nnz, 1))
    with pytest.raises(ValueError, match="out is a view of other numbers' negatives"):
        plan.multiply(*values, out=out)
    with emulated(), pytest.raises(ValueError, match="out is a view of other numbers' negatives"):
        plan.multiply(*(each.to(DEVICE) for each in values), out=out.to(DEVICE))


def test_full_factors_without_inner_size() -> None:
    plan = planned(Pattern.of(Full(3, 0)), Pattern.of(Full(0, 2)), Pattern.of(Full(3, 2)), "dense")
    for batch in (1, 2):
        empty = torch.zeros(0, batch)
        with emulated():
            on_device = plan.multiply(empty.to(DEVICE), empty.to(DEVICE))
        assert torch.equal(plan.multiply(empty, empty), torch.zeros(6, batch))
        assert torch.equal(on_device.cpu(), torch.zeros(6, batch))


#: Factors of products by lists of pairs, and whether lists are bytes.
LISTS = {
    "several tiles": (lambda: (random_pattern(90, 60, 0.06, 1), random_pattern(60, 70, 0.1, 2)), True),
    "rows that overlap": (lambda: (random_pattern(90, 60, 0.4, 1), random_pattern(60, 6, 0.7, 2)), True),
    "long lists": (lambda: (random_pattern(70, 240, 0.9, 1), random_pattern(240, 9, 0.9, 2)), True),
    "long lists of bytes": (lambda: (random_pattern(40, 60, 0.95, 1), random_pattern(60, 70, 0.95, 2)), True),
    "long rows of B": (lambda: (random_pattern(9, 20, 0.3, 1), random_pattern(20, 300, 0.95, 2)), False),
    "long rows of A": (lambda: (random_pattern(3, 400, 0.9, 1), random_pattern(400, 50, 0.02, 2)), False),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batches", [(1, 1), (1, 2), (3, 3), (5, 1), (1, 16), (17, 17), (31, 1), (32, 32), (1, 70)])
@pytest.mark.parametrize("name", LISTS)
def test_lists_of_pairs(name: str, batches: tuple[int, int], dtype: torch.dtype) -> None:
    make, is_narrow = LISTS[name]
    a, b = make()
    lists = plan_product(a, b, method="merge")._method.lists
    assert (lists.left.dtype == np.uint8) == is_narrow and (name != "several tiles" or len(lists.tiles) > 4)
    check(a, b, "merge", batches, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("shape", [(7, 5, 9), (1, 1, 1), (37, 3, 40), (4, 70, 5)])
def test_gradients(shape: tuple[int, int, int], batches: tuple[int, int], dtype: torch.dtype) -> None:
    rows, inner, columns = shape
    a, b = random_pattern(rows, inner, 0.4, 1), random_pattern(inner, columns, 0.4, 2)
    plan = plan_product(a, b)
    operands = [
        values_of(p, n, dtype, s).requires_grad_() for s, (p, n) in enumerate(zip((a, b), batches, strict=True))
    ]
    weight = values_of(plan.pattern, max(batches), dtype, 3)
    expected = torch.autograd.grad((plan.multiply(*operands) * weight).sum(), operands)
    moved = [operand.detach().to(DEVICE).requires_grad_() for operand in operands]
    with emulated():
        results = torch.autograd.grad((plan.multiply(*moved) * weight.to(DEVICE)).sum(), moved)
    for one, other in zip(results, expected, strict=True):
        assert torch.allclose(one.cpu(), other, rtol=1e-4 if dtype == torch.float32 else 1e-12, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batches", [(1, 1), (2, 1), (1, 33)])
@pytest.mark.parametrize("full", ["left", "right"])
def test_full_results_of_factors_with_empty_rows(full: str, batches: tuple[int, int], dtype: torch.dtype) -> None:
    a = random_pattern(6, 8, 0.1, 4) if full == "right" else Pattern.of(Full(6, 8))
    b = random_pattern(8, 7, 0.1, 5) if full == "left" else Pattern.of(Full(8, 7))
    plan = planned(a, b, Pattern.of(Full(6, 7)), "dense")
    operands = [values_of(pattern, n, dtype, 0) for pattern, n in zip((a, b), batches, strict=True)]
    expected = dense(a, operands[0], max(batches)) @ dense(b, operands[1], max(batches))
    on_cpu = plan.multiply(*operands)
    with emulated():
        on_device = plan.multiply(*(operand.to(DEVICE) for operand in operands))
    for actual in (on_cpu, on_device.cpu()):
        assert np.allclose(dense(plan.pattern, actual, max(batches)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("left", [True, False])
def test_diagonal_factors(left: bool, batches: tuple[int, int], dtype: torch.dtype) -> None:
    diagonal, other = Pattern.of(Diagonal(9)), random_pattern(9, 9, 0.5, 3)
    check(*((diagonal, other) if left else (other, diagonal)), "scale", batches, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("full", ["left", "right", "both"])
def test_full_factors(full: str, batches: tuple[int, int], dtype: torch.dtype) -> None:
    a = random_pattern(6, 8, 0.3, 4) if full == "right" else Pattern.of(Full(6, 8))
    b = random_pattern(8, 7, 0.3, 5) if full == "left" else Pattern.of(Full(8, 7))
    check(a, b, "dense", batches, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 3, 33])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
def test_selections(stride: int, left: bool, batch: int, dtype: torch.dtype) -> None:
    pool = nn.MaxPool2d(2, stride)
    chain = jacsparse.chain(pool, (2, 5, 5))
    selecting = chain.stages[0].transposed_pattern
    (record,) = chain.run(torch.randn(batch, 2, 5, 5, dtype=dtype))
    winners = record.winners()
    # One that no window has, too.
    winners[0, 0] = -1
    rows, windows = selecting.shape
    other = random_pattern(*((windows, 6) if left else (6, rows)), 0.4, 6)
    plan = plan_product(*((selecting, other) if left else (other, selecting)), method="select")
    values = values_of(other, 1 if stride == 1 else batch, dtype, 7)
    operands = (winners, values) if left else (values, winners)
    expected = plan.multiply(*operands)
    out = torch.full_like(expected, float("nan"), device=DEVICE)
    with emulated():
        plan.multiply(*(operand.to(DEVICE) for operand in operands), out=out)
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("shape", [(7, 50), (1, 1), (40, 2)])
def test_vectors(shape: tuple[int, int], batches: tuple[int, int], dtype: torch.dtype) -> None:
    pattern = random_pattern(*shape, 0.6, 8)
    values = values_of(pattern, batches[0], dtype, 9)
    x = torch.randn((shape[1], batches[1]), dtype=dtype)
    out = torch.full((shape[0], max(batches)), float("nan"), dtype=dtype, device=DEVICE)
    with emulated():
        matvec(pattern, values.to(DEVICE), x.to(DEVICE), out=out)
    torch.testing.assert_close(out.cpu(), matvec(pattern, values, x))


def test_rows_of_all_lengths() -> None:
    lengths = [0, 1, 300, 2000, 13_000]
    b = Pattern.of(Full(1, 13_000))
    b = Pattern(b.shape, np.array([0, 13_000]), np.arange(13_000))
    counts = np.array(lengths)
    columns = np.concatenate([np.arange(length) for length in lengths])
    b = Pattern((5, 13_000), np.append(0, np.cumsum(counts)), columns)
    a = Pattern((5, 5), np.arange(6), np.arange(5)[::-1].copy())
    for method in ("merge", "rowwise"):
        check(a, b, method, (1, 1), torch.float32)


def test_more_rows_than_a_grid_has_in_y() -> None:
    rows, ones = 2**16 + 1, np.arange(2**16 + 2)
    column = Pattern((rows, 2), ones, np.arange(rows) % 2)
    check(column, Pattern.of(Full(2, 1)), "dense", (1, 1), torch.float32)
    check(Pattern.of(Full(rows, 1)), Pattern((1, 1), np.array([0, 1]), np.array([0])), "dense", (1, 1), torch.float32)


def test_more_samples_than_a_grid_has_in_y() -> None:
    """Which take too long here: what is launched is looked at alone."""
    launches: list[Launch] = []

    class Device:
        on_device, launch = staticmethod(lambda _: True), staticmethod(launches.append)

        def record(self, launch: Launch) -> Callable[..., None]:
            return lambda *_: launches.append(launch)

    a, batch = random_pattern(3, 3, 1.0, 1), 2**21
    with backend(Device()):
        for method in ("merge", "rowwise"):
            plan_product(a, a, method=method).multiply(torch.zeros(9, 1), torch.zeros(9, batch))
        matvec(a, torch.zeros(9, 1), torch.zeros(3, batch))
        by_products(nn.ReLU(), torch.zeros(batch, 2))
    assert [launch.grid for launch in launches] == [(grid, 1, 1) for grid in (2**17, 2**16, 3 * 2**13, 2**16)]


def test_wide_indices() -> None:
    """64-bit ones: the other instances of every template."""
    a, b = random_pattern(5, 6, 0.5, 1), random_pattern(6, 7, 0.5, 2)
    long = random_pattern(2, 90, 0.9, 3)
    from jacsparse.spgemm import merge as _merge
    from jacsparse.spgemm import products_cuda as _cuda

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cuda, "_index", lambda *_: torch.int64)
        patch.setattr(_merge, "_places", lambda _: np.dtype(np.int64))
        for method in ("merge", "rowwise"):
            for batches in ((1, 1), (33, 1)):
                check(a, b, method, batches, torch.float64)
        check(long, long.T, "merge", (1, 3), torch.float32)
        check(Pattern.of(Diagonal(5)), a, "scale", (2, 1), torch.float32)
        check(Pattern.of(Full(3, 5)), a, "dense", (1, 1), torch.float32)
