"""Colourings of rows: computed once, and kept on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st
from jacsparse.patterns import Pattern
from jacsparse.patterns import coloring as _coloring
from torch import nn

from tests.helpers import by_products, random_pattern


def test_colours_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACSPARSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JACSPARSE_CACHE_MIB", "1")
    monkeypatch.setattr("jacsparse.runtime.disk_cache.SLOW", 0.0)
    monkeypatch.setattr("jacsparse.runtime.disk_cache.READ", 1e12)
    pattern = random_pattern(30, 40, 0.1, 1)
    colors = _coloring.row_colors(pattern)
    monkeypatch.setattr(_coloring, "_greedy_colors", lambda _: pytest.fail("coloured again"))
    again = Pattern((30, 40), pattern.indptr, pattern.indices)
    assert np.array_equal(_coloring.row_colors(again), colors)


def test_colours_are_found_once_for_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    greedy = _coloring._greedy_colors
    monkeypatch.setattr(_coloring, "_greedy_colors", lambda pattern: calls.append(pattern) or greedy(pattern))
    monkeypatch.setenv("JACSPARSE_CACHE_MIB", "0")
    module = Products()
    for _ in range(3):
        by_products(module, torch.randn(2, 5))
    # Of rows, and of columns.
    assert 0 < len(calls) <= 2


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 60), st.integers(0, 99))
def test_greedy_colours_whatever_columns_are_alike(rows: int, columns: int, alike: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    matrix = np.tile(generator.random((rows, columns)) < 0.5, alike)[:, generator.permutation(columns * alike)]
    expected: list[int] = []
    for row in matrix:
        taken = {color for color, other in zip(expected, matrix, strict=False) if (row & other).any()}
        expected.append(min(set(range(rows)) - taken))
    for many in (0, 10**9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_coloring, "MANY", many)
            assert _coloring._greedy_colors(Pattern.from_scipy(scipy.sparse.csr_array(matrix))).tolist() == expected


class Products(nn.Module):
    """An operator without a formula for its values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumprod(1)
