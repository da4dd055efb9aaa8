"""Products group by group of rows with the same columns, against dense products."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.sparse
import torch
from jacsparse.patterns import Full, Pattern
from jacsparse.spgemm import RowGroups


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("seed", range(20))
def test_products_are_those_of_dense_matrices(seed: int, dtype: type, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _compare(np.random.default_rng(seed), dtype)
    finally:
        torch.set_num_threads(before)


def _compare(rng: np.random.Generator, dtype: type) -> None:
    sizes, batch = rng.integers(1, 9, rng.integers(2, 6)), int(rng.integers(1, 20))
    factors = [
        scipy.sparse.csr_array(rng.normal(size=shape) * (rng.random(shape) < 0.4))
        for shape in itertools.pairwise(sizes)
    ]
    # Rows with the same columns, which may be empty.
    factors[0] = factors[0][np.repeat(np.arange(sizes[0]), rng.integers(1, 4, sizes[0]))]
    widths = [factors[0].shape[0], *(factor.shape[1] for factor in factors)]
    begins, count = list[int | None](), 0
    for width in widths:
        begins.append(count if rng.random() < 0.6 else None)
        count += 0 if begins[-1] is None else width
    firsts = np.cumsum([0, *(factor.nnz for factor in factors)])
    groups = RowGroups([Pattern.from_scipy(factor) for factor in factors])
    elements = [first + np.arange(factor.nnz) for first, factor in zip(firsts, factors, strict=False)]
    product = groups.plan(elements, begins, batch)
    values = np.concatenate([factor.data for factor in factors]).astype(dtype)
    scales, out = rng.normal(size=(count, product.padded)).astype(dtype), np.empty((groups.pattern.nnz, batch), dtype)
    product.multiply(values, scales, out)
    for sample in range(batch):
        expected = np.eye(widths[0])
        for matrix, begin, width in zip([expected, *factors], begins, widths, strict=True):
            expected = expected @ (matrix if isinstance(matrix, np.ndarray) else matrix.toarray())
            expected = expected if begin is None else expected * scales[begin : begin + width, sample]
        actual = groups.pattern.to_scipy(out[:, sample]).toarray()
        bound = 1e3 * np.finfo(dtype).eps * max(1.0, np.abs(expected).max(initial=0))
        assert np.abs(actual - expected).max(initial=0) <= bound


def test_more_terms_than_allowed_are_refused() -> None:
    full = Pattern.from_scipy(scipy.sparse.csr_array(np.ones((3, 3))))
    with pytest.raises(ValueError, match="terms"):
        RowGroups([full, full], most=5)


def test_groups_that_no_cache_holds_are_refused() -> None:
    full = Pattern.of(Full(400, 400))
    with pytest.raises(ValueError, match="a group of rows takes 1,280,000 bytes"):
        RowGroups([full]).plan([np.arange(400 * 400)], [None, None], 1)
