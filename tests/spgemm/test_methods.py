"""Every method of planned products against SciPy and a plain loop, parametrised over the family."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jacsparse.patterns import Convolution, Diagonal, Full, Identity, Pooling, Sliding
from jacsparse.spgemm import METHODS, Method, Product, matvec, meeting, multiply_adds, product_meeting, product_pattern
from jacsparse.spgemm import plan as _plan
from jacsparse.spgemm import plan_cache as _cache
from jacsparse.spgemm.dense import LISTED

import jacsparse
from jacsparse import Pattern, ProductPlan, plan_product
from tests.helpers import random_pattern

BATCHES = st.sampled_from([(1, 1), (1, 3), (3, 1), (5, 5), (16, 1), (1, 37), (21, 21)])
dtypes = st.sampled_from([np.float32, np.float64])


@st.composite
def factors(draw: st.DrawFn) -> tuple[Pattern, Pattern]:
    """Two patterns that fit, of any structure and any density."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    m, k, n = (draw(st.integers(0, 9)) for _ in range(3))

    def factor(rows: int, columns: int) -> Pattern:
        kinds = ["csr", "csr", "full"] + (["diagonal", "identity"] if rows == columns else [])
        kind = draw(st.sampled_from(kinds + (["one entry a row"] if columns else [])))
        if kind == "one entry a row":
            return Pattern((rows, columns), np.arange(rows + 1), rng.integers(0, columns, rows))
        if kind == "csr":
            return random_pattern(rows, columns, draw(st.sampled_from([0.0, 0.2, 0.6, 1.0])), rng)
        return Pattern.of({"full": Full(rows, columns), "diagonal": Diagonal(rows), "identity": Identity(rows)}[kind])

    square = draw(st.booleans())
    return factor(m, m if square else k), factor(m if square else k, n)


def values_of(rng: np.random.Generator, pattern: Pattern, batch: int, dtype: type) -> np.ndarray:
    return rng.standard_normal((pattern.nnz, batch)).astype(dtype)


def looped(a: Pattern, b: Pattern, a_values: np.ndarray, b_values: np.ndarray, c: Pattern) -> np.ndarray:
    """The product one multiply-add at a time, in float64, in the order of the entries."""
    batch = max(a_values.shape[1], b_values.shape[1])
    wide = [np.broadcast_to(values.astype(np.float64), (len(values), batch)) for values in (a_values, b_values)]
    sums = {}
    for row in range(a.shape[0]):
        for p in range(a.indptr[row], a.indptr[row + 1]):
            for q in range(b.indptr[a.indices[p]], b.indptr[a.indices[p] + 1]):
                place = (row, int(b.indices[q]))
                sums[place] = sums.get(place, 0.0) + wide[0][p] * wide[1][q]
    rows = np.repeat(np.arange(c.shape[0]), np.diff(c.indptr))
    assert set(sums) == {(int(row), int(column)) for row, column in zip(rows, c.indices, strict=True)}
    return np.array([sums[int(row), int(column)] for row, column in zip(rows, c.indices, strict=True)]).reshape(
        c.nnz, batch
    )


def check_method(method: str, a: Pattern, b: Pattern, batches: tuple[int, int], dtype: type, seed: int) -> None:
    """Compare a method with the loop, where it applies."""
    rng = np.random.default_rng(seed)
    try:
        plan = plan_product(a, b, method=method)
    except ValueError as error:
        assert "does not apply" in str(error)
        return
    assert plan.method == method or method == "auto"
    a_values, b_values = values_of(rng, a, batches[0], dtype), values_of(rng, b, batches[1], dtype)
    expected = looped(a, b, a_values, b_values, plan.pattern)
    product = plan.multiply(a_values, b_values)
    assert product.dtype == dtype and product.shape == expected.shape
    scale = np.abs(expected).max(initial=1.0)
    assert np.abs(product - expected).max(initial=0.0) <= (1e-5 if dtype == np.float32 else 1e-13) * scale
    out = np.full_like(product, np.nan)
    assert plan.multiply(a_values, b_values, out=out) is out and np.array_equal(out, product)


@pytest.mark.parametrize("method", [*sorted(METHODS), "auto"])
@given(pair=factors(), batches=BATCHES, dtype=dtypes, seed=st.integers(0, 2**31))
@settings(max_examples=100)
def test_method_equals_loop(
    method: str, pair: tuple[Pattern, Pattern], batches: tuple[int, int], dtype: type, seed: int
) -> None:
    check_method(method, *pair, batches, dtype, seed)


#: Rows of A, columns of A, columns of B, and the densities of both.
LISTS = {
    "several tiles": (90, 60, 70, 0.06, 0.1),
    "tiles that end with rows": (90, 60, 6, 0.6, 0.7),
    "long rows of A": (7, 400, 50, 0.9, 0.02),
    "long rows of B": (9, 20, 600, 0.3, 0.9),
    "empty rows": (300, 60, 70, 0.005, 0.1),
}


@pytest.mark.parametrize("batches", [(1, 1), (1, 5), (3, 3)])
@pytest.mark.parametrize("name", LISTS)
def test_lists_of_pairs_are_added_in_the_order_of_slots(name: str, batches: tuple[int, int]) -> None:
    rows, inner, columns, left, right = LISTS[name]
    a, b = random_pattern(rows, inner, left, 1), random_pattern(inner, columns, right, 2)
    plan, rng = plan_product(a, b, method="merge"), np.random.default_rng(0)
    values = [values_of(rng, each, batch, np.float64) for each, batch in zip((a, b), batches, strict=True)]
    assert np.array_equal(plan.multiply(*values), plan_product(a, b, method="slots").multiply(*values))
    lists = plan._method.lists
    assert (lists.left.dtype == np.uint8) == ("long" not in name) and lists.starts.nbytes <= 4 * plan.pattern.nnz
    assert plan.nbytes >= sum(each.nbytes for each in lists)
    assert np.diff(lists.tiles[:, 0]).max() <= 256 and lists.tiles[:-1, 3].max() <= 256


class ByScipy(Method):
    """A new method: SciPy's products of CSR matrices, a sample at a time."""

    name = "scipy"

    @classmethod
    def index_nbytes(cls, product: Product) -> int:
        return 0

    def __init__(self, product: Product) -> None:
        self.product = product

    def multiply(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        left, right, pattern = self.product.a, self.product.b, self.product.c
        for sample in range(c.shape[1]):
            one, other = (values[:, sample if values.shape[1] > 1 else 0] for values in (a, b))
            dense = (left.to_scipy(one) @ right.to_scipy(other)).toarray()
            c[:, sample] = dense[pattern.rows, pattern.indices]


@given(pair=factors(), batches=BATCHES, dtype=dtypes, seed=st.integers(0, 2**31))
@settings(max_examples=50)
def test_new_method(pair: tuple[Pattern, Pattern], batches: tuple[int, int], dtype: type, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, ByScipy.name, ByScipy)
        check_method("scipy", *pair, batches, dtype, seed)


def test_new_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, ByScipy.name, ByScipy)
    eye = Pattern((2, 2), [0, 1, 2], [0, 1])
    plan = plan_product(eye, eye, method="scipy", cache=False)
    with pytest.raises(ValueError, match="the method scipy has no kernels for CUDA devices; plan with another method"):
        plan.bind("cpu")
    assert plan_product(eye, eye, cache=False).method != "scipy"
    with pytest.raises(ValueError, match="scipy"):
        plan_product(eye, eye, method="none")


@given(factors())
def test_symbolic_phase_equals_scipy(pair: tuple[Pattern, Pattern]) -> None:
    a, b = pair
    left, right = a.to_scipy().astype(np.int64), b.to_scipy().astype(np.int64)
    expected = left @ right
    product = product_pattern(a, b)
    assert product == Pattern.from_scipy(expected)
    assert multiply_adds(a, b) == int(expected.sum())
    assert plan_product(a, b).flop == 2 * int(expected.sum())
    occupied = np.random.default_rng(0).random(b.shape[1]) < 0.5
    pairs = product.to_scipy().astype(np.int64) @ occupied.astype(np.int64)
    assert meeting(product, occupied).tolist() == pairs.tolist()
    nnz, met = product_meeting(a, b, occupied)
    assert nnz == product.nnz and met.tolist() == pairs.tolist()


@given(st.sampled_from([1, 2]), st.integers(0, 2), st.integers(0, 2), st.booleans(), st.integers(0, 2**31))
def test_what_meets_a_convolution_is_counted_without_its_indices(
    groups: int, dilation: int, axes: int, transposed: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    windows = (Sliding(7, 3, 2, 1, 0, 1 + dilation), Sliding(5, 3, 1, 2, 1))[:axes]
    mask = rng.random((4, 6 // groups, 3**axes)) < rng.choice([0.0, 0.3, 1.0])
    structure = Convolution(4, 6, groups, windows, np.packbits(mask).tobytes())
    pattern, again = (Pattern.of(structure.T if transposed else structure) for _ in range(2))
    occupied = rng.random(pattern.shape[1]) < 0.5
    pairs = meeting(pattern, occupied)
    assert not pattern.has_indices
    expected = again.to_scipy().astype(np.int64) @ occupied.astype(np.int64)
    assert again.has_indices and pairs.tolist() == expected.tolist()


@given(factors(), BATCHES, dtypes, st.integers(0, 2**31))
def test_matvec_equals_dense(pair: tuple[Pattern, Pattern], batches: tuple[int, int], dtype: type, seed: int) -> None:
    pattern, rng = pair[0], np.random.default_rng(seed)
    values, x = (
        values_of(rng, pattern, batches[0], dtype),
        rng.standard_normal((pattern.shape[1], batches[1])).astype(dtype),
    )
    batch = max(batches)
    dense = np.stack([pattern.to_scipy(values[:, s if batches[0] > 1 else 0]).toarray() for s in range(batch)], axis=2)
    expected = np.einsum("mnb,nb->mb", dense.astype(np.float64), np.broadcast_to(x, (len(x), batch)))
    actual = matvec(pattern, values, x)
    assert actual.dtype == dtype and actual.shape == expected.shape
    assert np.allclose(
        actual, expected, rtol=0, atol=(1e-5 if dtype == np.float32 else 1e-13) * np.abs(expected).max(initial=1)
    )


@pytest.mark.parametrize("shared", ["values", "x", ""])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_vectors_have_the_same_bits_alone_and_in_any_batch(dtype: type, shared: str) -> None:
    rng = np.random.default_rng(0)
    pattern = random_pattern(120, 90, 0.2, rng)
    values, x = (
        rng.standard_normal((rows, 1 if name == shared else 17)).astype(dtype)
        for name, rows in (("values", pattern.nnz), ("x", 90))
    )
    alone = [matvec(pattern, *(part[:, sample % part.shape[1]].copy() for part in (values, x))) for sample in range(17)]
    for batch in range(2, 18):
        products = matvec(pattern, values[:, :batch].copy(), x[:, :batch].copy())
        assert np.array_equal(products, np.stack(alone[:batch], axis=1))


def pooling_factors(left: bool, overlap: bool) -> tuple[Pattern, Pattern]:
    """The transposed Jacobian of a max-pooling, and a factor on its other side."""
    window = Sliding(6, 3, 2, 1, 1) if overlap else Sliding(6, 2, 2)
    selecting = Pattern.of(Pooling(2, (window, window), selects=True).T)
    rng = np.random.default_rng(0)
    if left:
        return selecting, random_pattern(selecting.shape[1], 11, 0.3, rng)
    return random_pattern(13, selecting.shape[0], 0.3, rng), selecting


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("batch", "other"), [(1, 1), (4, 1), (4, 4), (19, 1)])
def test_selection_equals_one_hot_values(left: bool, overlap: bool, batch: int, other: int) -> None:
    a, b = pooling_factors(left, overlap)
    selecting, ordinary = (a, b) if left else (b, a)
    rng = np.random.default_rng(1)
    windows = selecting.T
    # For each window one of its positions.
    offset = rng.integers(0, np.diff(windows.indptr)[:, None], (windows.shape[0], batch))
    winners = windows.indices[windows.indptr[:-1][:, None] + offset].astype(np.int32)
    one_hot = np.stack(
        [
            scipy.sparse.csr_array((np.ones(len(w)), (w, np.arange(len(w)))), shape=selecting.shape).toarray()
            for w in winners.T
        ],
        axis=2,
    )
    rows = np.repeat(np.arange(selecting.shape[0]), np.diff(selecting.indptr))
    selecting_values = one_hot[rows, selecting.indices]
    values = rng.standard_normal((ordinary.nnz, other))
    expected = plan_product(a, b, method="slots").multiply(
        *((selecting_values, values) if left else (values, selecting_values))
    )
    assert plan_product(a, b).method == "slots"
    plan = plan_product(a, b, winners=True)
    assert plan.method == "select"
    actual = plan.multiply(*((winners, values) if left else (values, winners)))
    assert np.array_equal(actual, expected)
    with pytest.raises(TypeError, match="expected int32: the method select takes winners; for ordinary values, plan"):
        plan.multiply(*((selecting_values, values) if left else (values, selecting_values)))


def test_a_scaled_selection_is_no_selection() -> None:
    selecting, _ = pooling_factors(True, False)
    plan = plan_product(Pattern.of(Diagonal(selecting.shape[0])), selecting)
    assert (
        plan.pattern == selecting
        and plan_product(plan.pattern, Pattern.of(Full(selecting.shape[1], 2))).method == "dense"
    )


def test_auto_keeps_to_the_memory_limit() -> None:
    rng = np.random.default_rng(0)
    a, b = random_pattern(40, 40, 0.3, rng), random_pattern(40, 40, 0.3, rng)
    slots = plan_product(a, b)
    assert slots.method == "slots" and slots.nbytes == slots.flop // 2 + 8 * 41
    limited = plan_product(a, b, memory_limit=slots.nbytes - 1)
    assert limited.method == "rowwise" and limited.nbytes == 8 * 41
    values = values_of(rng, a, 3, np.float64), values_of(rng, b, 3, np.float64)
    assert np.array_equal(slots.multiply(*values), limited.multiply(*values))


def test_full_products_stay_full_and_their_indices_unmade() -> None:
    a, b = Pattern.of(Full(300, 200)), Pattern.of(Full(200, 100))
    plan = plan_product(a, b)
    assert plan.method == "dense" and isinstance(plan.pattern.structure, Full) and "_csr" not in plan.pattern.__dict__
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((300 * 200, 1)), rng.standard_normal((200 * 100, 1))
    plan.multiply(x, y)
    assert "_csr" not in a.__dict__ and "_csr" not in b.__dict__


@given(factors())
def test_diagonal_factors_keep_the_structure(pair: tuple[Pattern, Pattern]) -> None:
    pattern = pair[0]
    scaled = product_pattern(Pattern.of(Diagonal(pattern.shape[0])), pattern)
    assert scaled == pattern
    assert type(scaled.structure) is (Diagonal if isinstance(pattern.structure, Identity) else type(pattern.structure))
    assert product_pattern(Pattern.of(Identity(pattern.shape[0])), pattern) is pattern


def big_product() -> tuple[ProductPlan, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    a, b = random_pattern(700, 500, 0.05, rng), random_pattern(500, 600, 0.05, rng)
    return plan_product(a, b), values_of(rng, a, 5, np.float32), values_of(rng, b, 5, np.float32)


def test_bits_do_not_depend_on_threads_batch_or_method() -> None:
    plan, a_values, b_values = big_product()
    expected = plan.multiply(a_values, b_values)
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            again = plan_product(plan.a, plan.b)
            assert again.pattern == plan.pattern
            assert np.array_equal(again.multiply(a_values, b_values), expected)
            for method in ("rowwise", "merge"):
                assert np.array_equal(
                    plan_product(plan.a, plan.b, method=method).multiply(a_values, b_values), expected
                )
    finally:
        torch.set_num_threads(1)
    for sample in range(5):
        alone = plan.multiply(a_values[:, sample].copy(), b_values[:, sample].copy())
        assert alone.shape == (plan.pattern.nnz,) and np.array_equal(alone, expected[:, sample])


def test_eight_threads_at_once() -> None:
    plan, a_values, b_values = big_product()
    expected = plan.multiply(a_values, b_values)
    # Its index arrays are missing until the first of the threads' products.
    fresh = plan_product(plan.a, plan.b, cache=False)
    results: list[np.ndarray] = []

    def work() -> None:
        results.append(fresh.multiply(a_values, b_values))
        results.extend(plan_product(plan.a, plan.b).multiply(a_values, b_values) for _ in range(5))

    torch.set_num_threads(2)
    try:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(1)
    assert len(results) == 48 and all(np.array_equal(result, expected) for result in results)


def test_a_guaranteed_zero_stays_zero_and_a_possible_one_does_not() -> None:
    a = Pattern((1, 2), [0, 1], [0])
    b = Pattern((2, 2), [0, 1, 2], [0, 1])
    plan = plan_product(a, b, method="slots")
    assert plan.pattern.indices.tolist() == [0]
    assert np.isnan(plan.multiply(np.array([0.0]), np.array([np.inf, np.inf]))).tolist() == [True]


def test_tensors_in_tensors_out() -> None:
    plan, a_values, b_values = big_product()
    actual = plan.multiply(torch.from_numpy(a_values), torch.from_numpy(b_values))
    assert isinstance(actual, torch.Tensor) and np.array_equal(actual.numpy(), plan.multiply(a_values, b_values))
    strided = torch.from_numpy(a_values.T.copy()).T
    assert torch.equal(plan.multiply(strided, torch.from_numpy(b_values)), actual)
    flipped = a_values[::-1].copy()[::-1]
    assert np.array_equal(plan.multiply(flipped, b_values), actual.numpy())


def test_empty_batch() -> None:
    plan, a_values, b_values = big_product()
    assert plan.multiply(a_values[:, :0], b_values[:, :0]).shape == (plan.pattern.nnz, 0)
    assert matvec(plan.a, a_values[:, :0], np.zeros((500, 0), np.float32)).shape == (700, 0)


def test_files_keep_the_plan(tmp_path: Path) -> None:
    plan, a_values, b_values = big_product()
    plan.save(tmp_path / "plan.npz")
    loaded = ProductPlan.load(tmp_path / "plan.npz")
    assert loaded.method == plan.method and loaded.pattern == plan.pattern and loaded.flop == plan.flop
    assert np.array_equal(loaded.multiply(a_values, b_values), plan.multiply(a_values, b_values))
    with pytest.raises(ValueError, match="holds a product plan, not a pattern"):
        Pattern.load(tmp_path / "plan.npz")
    content = (tmp_path / "plan.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"cut\.npz cannot be read as a product plan"):
        ProductPlan.load(tmp_path / "cut.npz")
    with pytest.raises(FileNotFoundError):
        ProductPlan.load(tmp_path / "none.npz")


def test_bad_plans() -> None:
    a, b = Pattern.of(Diagonal(3)), Pattern.of(Full(4, 2))
    with pytest.raises(ValueError, match="a is 3 × 3 and b is 4 × 2"):
        plan_product(a, b)
    with pytest.raises(ValueError, match="method is 'fast'; expected auto or one of"):
        plan_product(a, a, method="fast")
    with pytest.raises(ValueError, match="method 'dense' does not apply: neither factor is full"):
        plan_product(a, a, method="dense")
    with pytest.raises(ValueError, match="method 'select' does not apply"):
        plan_product(a, a, method="select")
    with pytest.raises(TypeError, match="b is a csr_array; expected a Pattern"):
        plan_product(a, a.to_scipy())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory_limit is -1"):
        plan_product(a, a, memory_limit=-1)
    with pytest.raises(ValueError, match="memory_limit is '1G'"):
        plan_product(a, a, memory_limit="1G")  # type: ignore[arg-type]


VALUES = np.ones((3, 2), dtype=np.float32)
BAD_VALUES = {
    "dtype": (VALUES.astype(int), VALUES, TypeError, "a_values has dtype int64; expected float32 or float64"),
    "half": (torch.ones(3, 2).half(), torch.ones(3, 2), TypeError, "a_values has dtype torch.float16"),
    "mixed dtypes": (VALUES, VALUES.astype(float), TypeError, "a_values is float32 and b_values is float64"),
    "rows": (VALUES[:2], VALUES, ValueError, r"a_values has shape \(2, 2\); expected \(3, batch\)"),
    "dimensions": (VALUES[None], VALUES, ValueError, "a_values has shape"),
    "batches": (VALUES, np.ones((3, 5), np.float32), ValueError, "a_values has a batch of 2 and b_values one of 5"),
    "list": ([1.0, 2.0, 3.0], VALUES, TypeError, "a_values is a list; expected a NumPy array or a PyTorch tensor"),
    "mixed kinds": (VALUES, torch.ones(3, 2), TypeError, "the operands mix NumPy arrays and PyTorch tensors"),
    "device": (torch.ones(3, 2, device="meta"), torch.ones(3, 2), ValueError, "a_values is on meta"),
    "float8": (
        torch.ones(3, 2).to(torch.float8_e4m3fn),
        torch.ones(3, 2),
        TypeError,
        "a_values has dtype torch.float8_e4m3fn; convert it to float32 or float64",
    ),
    "bfloat16": (torch.ones(3, 2).bfloat16(), torch.ones(3, 2), TypeError, "a_values has dtype torch.bfloat16"),
    "masked": (np.ma.masked_less(VALUES, 0), VALUES, TypeError, "a_values is a masked array"),
    "sparse": (torch.ones(3, 2).to_sparse(), torch.ones(3, 2), TypeError, "a_values has layout"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_bad_values(case: str) -> None:
    a_values, b_values, error, message = BAD_VALUES[case]
    plan = plan_product(Pattern.of(Diagonal(3)), Pattern.of(Diagonal(3)))
    with pytest.raises(error, match=message):
        plan.multiply(a_values, b_values)


def test_bad_out() -> None:
    plan = plan_product(Pattern.of(Diagonal(3)), Pattern.of(Diagonal(3)))
    for out in (np.zeros((3, 1), np.float32), np.zeros((3, 2)), np.zeros((2, 3), np.float32).T):
        with pytest.raises(ValueError, match="out has shape"):
            plan.multiply(VALUES, VALUES, out=out)
    with pytest.raises(TypeError, match="out is a Tensor, but the operands are not"):
        plan.multiply(VALUES, VALUES, out=torch.zeros(3, 2))
    with pytest.raises(TypeError, match="out is a list"):
        plan.multiply(VALUES, VALUES, out=[0.0] * 6)
    values = torch.from_numpy(VALUES)
    with pytest.raises(ValueError, match="out requires grad"):
        plan.multiply(values, values, out=torch.zeros(3, 2, requires_grad=True))
    with pytest.raises(ValueError, match="out is on meta"):
        plan.multiply(values, values, out=torch.zeros(3, 2, device="meta"))
    mine = VALUES.copy()
    with pytest.raises(ValueError, match="out overlaps an operand"):
        plan.multiply(mine, VALUES, out=mine)


def test_public_names() -> None:
    assert jacsparse.plan_product is plan_product and jacsparse.ProductPlan is ProductPlan


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("left", [True, False])
def test_a_diagonal_scales_a_full_matrix_without_its_indices(left: bool, batch: int) -> None:
    full, rng = Pattern.of(Full(7, 5)), np.random.default_rng(0)
    diagonal = Pattern.of(Diagonal(7 if left else 5))
    plan = plan_product(diagonal, full) if left else plan_product(full, diagonal)
    d, values = rng.standard_normal((diagonal.nnz, batch)), rng.standard_normal((35, 1))
    actual = plan.multiply(d, values) if left else plan.multiply(values, d)
    expected = (d[:, None] if left else d[None]) * values.reshape(7, 5, 1)
    assert plan.method == "scale" and "_csr" not in full.__dict__
    assert np.array_equal(actual, expected.reshape(35, batch))


def test_wide_products_take_time_for_their_entries_alone() -> None:
    # A bitmap of all columns for each row would be 2.5 GB to look through.
    n = 200_000
    a, b = (Pattern((n, n), np.arange(n + 1), np.random.default_rng(seed).permutation(n)) for seed in (0, 1))
    assert np.array_equal(product_pattern(a, b).indices, b.indices[a.indices])


def test_huge_full_factors_are_counted_exactly() -> None:
    side = Pattern.of(Full(2**22, 2**22))
    assert multiply_adds(side, side) == 2**66


def test_occupied_must_fit() -> None:
    pattern = Pattern((1, 3), [0, 3], [0, 1, 2])
    with pytest.raises(ValueError, match=r"occupied has shape \(1,\), dtype bool; expected \(3,\)"):
        meeting(pattern, np.ones(1, dtype=bool))
    with pytest.raises(ValueError, match="occupied has shape"):
        product_meeting(pattern, Pattern.of(Diagonal(3)), np.ones(9, dtype=bool))


# Plans that were used before.


def test_equal_patterns_share_a_plan() -> None:
    a, b = random_pattern(6, 8, 0.4, 1), random_pattern(8, 7, 0.4, 2)
    plan = plan_product(a, b)
    again = Pattern((6, 8), a.indptr, a.indices)
    assert plan_product(again, b) is plan
    assert plan_product(a, b, cache=False) is not plan
    others = [plan_product(b.T, a.T), plan_product(a, b, method="rowwise"), plan_product(a, b, memory_limit=0)]
    assert len({id(plan), *map(id, others)}) == 4


def test_the_plans_used_last_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(random_pattern(6, 8, 0.5, seed), random_pattern(8, 7, 0.5, 9)) for seed in range(4)]
    plans = [plan_product(a, b, cache=False) for a, b in pairs]
    size = max(plan.nbytes + sum(p.index_nbytes for p in (plan.a, plan.b, plan.pattern)) for plan in plans)
    occupied = _cache.PlanCache(3 * size)
    monkeypatch.setattr(_plan, "PLAN_CACHE", occupied)
    first, second, third = (plan_product(*pair) for pair in pairs[:3])
    assert plan_product(*pairs[0]) is first
    plan_product(*pairs[3])
    assert occupied.nbytes <= occupied.limit
    assert plan_product(*pairs[0]) is first and plan_product(*pairs[2]) is third
    assert plan_product(*pairs[1]) is not second
    monkeypatch.setattr(_plan, "PLAN_CACHE", _cache.PlanCache(10))
    assert plan_product(*pairs[0]) is not plan_product(*pairs[0])
    occupied.clear()
    assert (len(occupied), occupied.nbytes) == (0, 0)


def test_threads_may_plan_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "PLAN_CACHE", _cache.PlanCache(3000))
    pairs = [(random_pattern(6, 8, 0.5, seed), random_pattern(8, 7, 0.5, 9)) for seed in range(6)]
    expected = [plan_product(a, b, cache=False).pattern for a, b in pairs]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda number: plan_product(*pairs[number % 6]), range(600)))
    assert all(plan.pattern == expected[number % 6] for number, plan in enumerate(results))
    assert 0 < _plan.PLAN_CACHE.nbytes <= 3000


# Full results, and zeros of a factor that need not be looked at.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_left_out_zeros_change_no_bit(dtype: torch.dtype) -> None:
    left = random_pattern(30, 40, 0.3, 1)
    full = Pattern.of(Full(40, 50))
    plan = jacsparse.plan_product(left, full, method="dense")
    a, b = torch.randn(left.nnz, dtype=dtype), torch.randn(40 * 50, dtype=dtype)
    a[::3], b.view(40, 50)[::2] = 0, 0
    sums = torch.zeros(30, 50, dtype=dtype)
    for row in range(30):
        for entry in range(left.indptr[row], left.indptr[row + 1]):
            sums[row] += a[entry] * b.view(40, 50)[left.indices[entry]]
    assert torch.equal(plan.multiply(a, b), sums[left.structure.row_counts() > 0].flatten())
    # Zero times infinity is no number, whichever factor is infinite.
    b[0] = a[int(np.flatnonzero(left.indices == 2)[0])] = math.inf
    actual, lanes = plan.multiply(a, b), plan.multiply(a[:, None].expand(-1, 4), b[:, None].expand(-1, 4))
    assert torch.equal(actual.nan_to_num(7.0), lanes[:, 0].nan_to_num(7.0)) and bool(actual.isnan().any())


@pytest.mark.parametrize("columns", [1, 9, 130])
def test_rows_of_any_length_times_a_full_matrix(columns: int) -> None:
    """Rows that are listed together, alone, or that are longer than the list."""
    counts = [0, 1, LISTED, 1, LISTED - 1, LISTED + 5, 0, *[300] * 20, 2 * LISTED, 0]
    indices = np.concatenate([np.arange(count) * 4096 // max(1, count) for count in counts])
    left = Pattern((len(counts), 4096), np.cumsum([0, *counts]), indices)
    a, b = torch.randn(left.nnz, dtype=torch.float64), torch.randn(4096 * columns, dtype=torch.float64)
    a[::2] = 0
    plan = jacsparse.plan_product(left, Pattern.of(Full(4096, columns)))
    expected = torch.from_numpy(left.to_scipy(a.numpy()) @ b.view(4096, columns).numpy())
    actual = plan.multiply(a, b).reshape(-1, columns)
    torch.testing.assert_close(actual, expected[left.structure.row_counts() > 0], rtol=1e-12, atol=1e-12)
