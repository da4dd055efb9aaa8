"""Sums of matrices over the union of their patterns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from jacsparse.patterns import Csr, Full, Pattern

import jacsparse
from tests.helpers import random_pattern


@pytest.mark.parametrize("batch", [1, 3])
def test_sums_of_patterns(batch: int) -> None:
    matrices = [random_pattern(6, 7, density, seed) for seed, density in enumerate((0.2, 0.4, 0.0))]
    plan = jacsparse.plan_sum(matrices)
    values = [torch.randn(matrix.nnz, batch, dtype=torch.float64) for matrix in matrices]
    expected = sum(
        torch.from_numpy(matrix.to_scipy(each[:, -1].numpy()).toarray())
        for matrix, each in zip(matrices, values, strict=True)
    )
    actual = torch.from_numpy(plan.pattern.to_scipy(plan.add(values)[:, -1].numpy()).toarray())
    assert torch.equal(actual, expected) and "3 terms" in repr(plan)
    shared = plan.add([values[0], values[1][:, :1].contiguous(), values[2]])
    assert shared.shape == (plan.pattern.nnz, batch)
    assert isinstance(jacsparse.plan_sum([matrices[0], Pattern.of(Full(6, 7))]).pattern.structure, Full)
    assert isinstance(plan.pattern.structure, Csr)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda plan: jacsparse.plan_sum([]), ValueError, "terms is empty"),
        (lambda plan: jacsparse.plan_sum([3]), TypeError, r"terms\[0\] is an int"),
        (
            lambda plan: jacsparse.plan_sum([Pattern.of(Full(1, 2)), Pattern.of(Full(2, 1))]),
            ValueError,
            "they must agree",
        ),
        (lambda plan: plan.add([np.ones(2)]), ValueError, "values holds 1 arrays for 2 terms"),
        (lambda plan: plan.add([np.ones(2), np.ones(3)]), ValueError, r"values\[1\] has shape \(3,\)"),
        (lambda plan: plan.add([np.ones(2), np.ones(2, dtype=np.float32)]), TypeError, r"values\[1\] is float32"),
        (lambda plan: plan.add([np.ones((2, 2)), np.ones((2, 3))]), ValueError, "a batch of 2"),
    ],
)
def test_bad_sums(call: Callable[[object], object], error: type[Exception], message: str) -> None:
    plan = jacsparse.plan_sum([Pattern.of(Full(1, 2)), Pattern.of(Full(1, 2))])
    with pytest.raises(error, match=message):
        call(plan)
