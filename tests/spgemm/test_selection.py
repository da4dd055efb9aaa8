"""Rows, columns and elements of sparse Jacobians, compared with NumPy's and SciPy's indexing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jacsparse.patterns import Full, Pattern
from torch.autograd import gradcheck, gradgradcheck

from jacsparse import SparseJacobian, jacobian
from tests.spgemm.test_sparse_jacobian import BATCHES, PATTERNS, dense, jacobian_of


@st.composite
def axis_keys(draw: st.DrawFn, size: int) -> Any:
    """What selects along an axis: no integer alone, which has NumPy leave the axis out."""
    number = st.integers(-size - 2, size + 2)
    places = st.lists(st.integers(-size, size - 1), max_size=9) if size else st.just([])
    kind = draw(st.sampled_from(["slice", "all", "list", "array", "tensor", "mask", "small"]))
    if kind == "slice":
        bound = st.one_of(st.none(), number)
        return slice(draw(bound), draw(bound), draw(st.sampled_from([None, 1, 2, -1, -3])))
    if kind == "mask":
        mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        return draw(st.sampled_from([np.array(mask, bool), torch.tensor(mask, dtype=torch.bool)]))
    chosen = draw(places)
    made: dict[str, Callable[[list[int]], Any]] = {
        "list": list,
        "array": lambda numbers: np.array(numbers, np.int64),
        "small": lambda numbers: np.array(numbers, np.int8),
        "tensor": lambda numbers: torch.tensor(numbers, dtype=torch.int64),
    }
    return made[kind](chosen) if kind in made else slice(None)


def of_numpy(key: Any) -> Any:
    """A key that NumPy takes, also an empty one."""
    if isinstance(key, slice):
        return key
    array = np.asarray(key)
    return array if array.dtype == bool else array.astype(np.int64)


@st.composite
def cases(draw: st.DrawFn) -> tuple[SparseJacobian, Any, Any]:
    m, n = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    J = jacobian_of(PATTERNS[draw(st.sampled_from(sorted(PATTERNS)))](m, n), draw(BATCHES))
    return J, draw(axis_keys(J.shape[0])), draw(axis_keys(J.shape[1]))


@given(cases())
def test_rows_and_columns(case: tuple[SparseJacobian, Any, Any]) -> None:
    J, rows, columns = case
    A, stored = dense(J).numpy(), J.pattern.to_scipy().toarray()
    i, j = of_numpy(rows), of_numpy(columns)
    chosen: list[tuple[SparseJacobian, Any]] = [
        (J[rows], np.s_[i]),
        (J[:, columns], np.s_[:, j]),
        (J[rows, :], np.s_[i]),
    ]
    if isinstance(rows, slice) or isinstance(columns, slice):
        chosen.append((J[rows, columns], np.s_[i, j]))
    for part, key in chosen:
        expected = A[:, *key] if isinstance(key, tuple) else A[:, key]
        assert np.array_equal(dense(part).numpy(), expected)
        assert np.array_equal(part.pattern.to_scipy().toarray(), stored[key]), "entries are those of the matrix"
        assert part.pattern == Pattern(part.shape, part.pattern.indptr, part.pattern.indices), "in order and valid"


@given(cases(), st.data())
def test_elements_at_pairs(case: tuple[SparseJacobian, Any, Any], data: st.DataObject) -> None:
    J = case[0]
    m, n = J.shape
    shape = data.draw(st.sampled_from([(), (0,), (4,), (2, 3), (1, 1, 2)])) if m and n else (0,)
    count = math.prod(shape)

    def numbers(size: int) -> np.ndarray:
        number = st.integers(-size, size - 1) if count else st.nothing()
        return np.array(data.draw(st.lists(number, min_size=count, max_size=count)), np.int64).reshape(shape)

    rows, columns = numbers(m), numbers(n)
    expected = np.moveaxis(dense(J).numpy()[:, rows, columns], 0, -1)
    assert np.array_equal(J[rows, columns].numpy(), expected)
    assert np.array_equal(J[torch.from_numpy(rows), columns].numpy(), expected)
    i, j = rows.reshape(-1), columns.reshape(-1)
    both = J[np.ix_(i, j)]
    assert np.array_equal(dense(both).numpy(), dense(J).numpy()[:, i][:, :, j]), "each row with each column"
    if count:
        # Pairs are broadcast.
        assert np.array_equal(J[i, int(j[0])].numpy(), dense(J).numpy()[:, i, j[0]].T)
    if J.batch:
        assert np.array_equal(both.to_scipy(0).toarray(), J.to_scipy(0)[i][:, j].toarray()), "as SciPy does"


def test_one_row_and_one_column_stay_matrices() -> None:
    J = jacobian(lambda x: (x[:, 1:] * x[:, :-1]).flatten(), torch.arange(1.0, 9.0).reshape(2, 4))
    assert J[3].shape == (1, 8) and J[:, -1].shape == (6, 1) and J[2:4, 3].shape == (2, 1)
    # Shapes of arguments and outputs stay where all of their elements do.
    assert J.in_shape == (2, 4) and J[1:].in_shape == (2, 4) and J[1:].out_shape is None
    assert J[:, 1:].in_shape is None and J[:, 1:].out_shape == (6,)
    assert torch.equal(J[1:].jvp(torch.ones(2, 4)), J.jvp(torch.ones(2, 4))[1:])
    assert [row.nnz for row in J] == [2] * 6
    full = SparseJacobian(Pattern.of(Full(3, 4)), torch.arange(12.0)[:, None])
    assert isinstance(full[1:, [2, 0]].pattern.structure, Full)
    assert not full.pattern.T.has_indices and full[2, 3].tolist() == [11.0]


def test_a_zero_hides_nothing() -> None:
    """No element is multiplied: what is not there is zero beside infinities too."""
    J = SparseJacobian(Pattern((2, 2), [0, 1, 2], [0, 1]), torch.tensor([[torch.inf], [torch.nan]]))
    assert J[[0, 0], [1, 0]].flatten().tolist() == [0.0, torch.inf]
    assert J.diagonal()[0].item() == torch.inf and J[0].todense().tolist() == [[torch.inf, 0.0]]


def test_gradients() -> None:
    pattern = PATTERNS["csr"](5, 4)
    values = torch.rand(pattern.nnz, 2, dtype=torch.float64, requires_grad=True)
    for part in (
        lambda v: SparseJacobian(pattern, v)[[3, 0, 3]].values,
        lambda v: SparseJacobian(pattern, v)[1:, [2, 2, 0]].values ** 2,
        lambda v: SparseJacobian(pattern, v)[[0, 0, 4], [1, 1, 3]] ** 2,
        lambda v: SparseJacobian(pattern, v).diagonal() ** 2,
        lambda v: SparseJacobian(pattern, v).norm(),
        lambda v: SparseJacobian(pattern, v).norm(1),
        lambda v: SparseJacobian(pattern, v).norm(float("inf")),
    ):
        assert gradcheck(part, (values,)) and gradgradcheck(part, (values,))


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        (3, IndexError, "the index of rows has 3; this matrix has 3 rows"),
        ((0, -5), IndexError, "the index of columns has -5; this matrix has 4 columns"),
        ((0, 1, 2), IndexError, r"the index has 3 parts; expected J\[rows\] or J\[rows, columns\]"),
        (([0, 1], [0, 1, 2]), IndexError, r"shape \(2,\) and the columns \(3,\), which are no pairs.*np.ix_"),
        ([[0, 1]], IndexError, r"the index of rows has shape \(1, 2\); expected one axis"),
        (1.5, TypeError, "the index of rows is 1.5; expected a slice, integers or 3 truth values"),
        ((slice(None), [True, False]), TypeError, "the index of columns is .*; expected .* or 4 truth values"),
        (None, TypeError, "the index of rows is None"),
        (Ellipsis, TypeError, "the index of rows is Ellipsis"),
        ("a", TypeError, "the index of rows is 'a'"),
        (torch.ones(2), TypeError, r"the index of rows is tensor\(\[1., 1.\]\)"),
    ],
)
def test_wrong_indices(key: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        jacobian_of(PATTERNS["csr"](3, 4), 2)[key]


@settings(max_examples=100)
@given(cases())
def test_norms(case: tuple[SparseJacobian, Any, Any]) -> None:
    J = case[0]
    A = dense(J).abs()
    rows, columns = (torch.cat([A.sum(axis), torch.zeros(J.batch, 1).double()], 1).amax(1) for axis in (2, 1))
    for order, expected in (("fro", A.square().sum((1, 2)).sqrt()), (1, columns), (float("inf"), rows)):
        torch.testing.assert_close(J.norm(order), expected, rtol=1e-14, atol=0)


@settings(max_examples=100)
@given(cases())
def test_arrays_of_numpy(case: tuple[SparseJacobian, Any, Any]) -> None:
    J = case[0]
    for v in (np.random.default_rng(0).random((J.shape[1], J.batch)), np.ones(J.shape[1]) / 3):
        product = J @ v
        assert isinstance(product, np.ndarray)
        assert np.array_equal(product, (J @ torch.from_numpy(v)).numpy())
    if J.batch == 1:
        array = np.asarray(J)
        assert array.dtype == np.float64 and np.array_equal(array, dense(J)[0].numpy())
        assert np.array(J, dtype=np.float32).dtype == np.float32
        for convert in (torch.as_tensor, torch.tensor, torch.asarray):
            assert torch.equal(convert(J), J.todense())
        assert np.array_equal(np.from_dlpack(J), array)
    else:
        with pytest.raises(ValueError, match=rf"{J.batch} samples, and a tensor one matrix: take J.todense\(sample\)"):
            torch.as_tensor(J)
        with pytest.raises(ValueError, match=rf"{J.batch} samples, and an array one: np.asarray\(J.todense\(sample\)"):
            np.asarray(J)


def test_arrays_of_what_has_gradients() -> None:
    J = SparseJacobian.identity(3).to(torch.float64)
    J = SparseJacobian(J.pattern.scaled(), J.values.clone().requires_grad_())
    assert np.array_equal(np.asarray(J), np.eye(3)) and isinstance(J @ np.ones(3), np.ndarray)
    with pytest.raises(ValueError, match=r"this Jacobian is part of autograd, which a copy leaves: take J.todense\(\)"):
        torch.as_tensor(J)
    for call in (lambda v: J.__class__(J.pattern, v) @ np.ones(3), lambda v: np.asarray(J.__class__(J.pattern, v))):
        with pytest.raises(TypeError, match=r"the Jacobian is within a transform of torch\.func"):
            torch.vmap(call)(torch.ones(2, 3, 1).double())
    for v, error, message in (
        (np.ones(3, np.float32), TypeError, "values is float64 and x is float32; convert one of them"),
        (np.ones(3, int), TypeError, "x has dtype int64; expected float32 or float64"),
        (np.ones(2), ValueError, r"x has shape \(2,\); expected \(3, batch\)"),
    ):
        with pytest.raises(error, match=message):
            J @ v
    with pytest.raises(ValueError, match="a Jacobian is no array in memory"):
        J.__array__(copy=False)
    with pytest.raises(TypeError, match="unsupported operand"):
        np.ones(3) @ J  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"order is 2; expected .* scipy.sparse.linalg.svds\(J.to_scipy\(sample\)\)"):
        J.norm(2)
    with pytest.raises(TypeError, match=r"values has dtype torch.bfloat16; .*: convert it with .float\(\)"):
        J.to(torch.bfloat16)
