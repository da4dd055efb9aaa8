"""Estimated counts of products, before any product is planned."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jacsparse.patterns import Blocks, Convolution, Diagonal, Full, Pattern, Pooling, Sliding
from jacsparse.spgemm import KEYS, counts, fresh_keys, product_pattern
from jacsparse.spgemm.estimate import least

from tests.helpers import random_pattern


@given(st.lists(st.tuples(st.integers(5, 60), st.floats(0.02, 0.5)), min_size=2, max_size=4), st.integers(0, 2**31))
@settings(max_examples=40)
def test_estimated_counts_are_near_the_true_ones(sizes: list[tuple[int, float]], seed: int) -> None:
    torch.manual_seed(seed)
    patterns = [random_pattern(a, b, density, seed + a) for (a, density), (b, _) in pairwise(sizes)]
    product = patterns[0]
    for pattern in patterns[1:]:
        product = product_pattern(product, pattern)
    estimates = []
    for draw in range(24):
        keys = fresh_keys(product.shape[1], draw)
        for pattern in reversed(patterns):
            keys = least(pattern, keys)
        estimates.append(counts(keys, np.array([product.shape[1]]))[:, 0])
    actual, true = np.mean(estimates, axis=0), product.structure.row_counts()
    assert ((actual == 0) == (true == 0)).all()
    # The share of a row's error that is left after as many draws, five times over.
    assert (np.abs(actual - true) <= 1 + 5 * true / math.sqrt(24 * (KEYS - 2))).all()


STRUCTURES = {
    "full": Full(5, 7),
    "blocks": Blocks(3, 4, 2, 5),
    "empty": Blocks(2, 3, 0, 4),
    "diagonal": Diagonal(6),
    "linear": Convolution(6, 4, 1, ()),
    "convolution": Convolution(6, 4, 1, (Sliding(7, 3, stride=2, before=1, after=1), Sliding(5, 2, dilation=2))),
    "grouped": Convolution(6, 4, 2, (Sliding(7, 3, before=4, after=0),)),
    "pruned": Convolution(2, 2, 1, (Sliding(5, 3),), np.packbits([1, 0, 0] * 4).tobytes()),
    "pooling": Pooling(3, (Sliding(6, 2, stride=2), Sliding(5, 3)), selects=True),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", STRUCTURES)
def test_least_keys_of_a_structure_are_those_of_its_entries(name: str, transposed: bool) -> None:
    pattern = Pattern.of(STRUCTURES[name].T if transposed else STRUCTURES[name])
    keys = fresh_keys(pattern.shape[1], 3)
    expected = np.full((pattern.shape[0], KEYS), np.inf, dtype=np.float32)
    np.minimum.at(expected, pattern.rows, keys[pattern.indices])
    assert np.array_equal(least(pattern, keys), expected)


def test_a_convolution_with_few_pruned_weights_has_the_keys_of_an_unpruned_one() -> None:
    unpruned = Convolution(4, 4, 1, (Sliding(9, 3),))
    keys = fresh_keys(unpruned.shape[1], 3)
    for pruned, alike in ((3, True), (6, False)):
        masked = replace(unpruned, mask_bits=np.packbits(np.arange(48) % (48 // pruned) > 0).tobytes())
        assert np.array_equal(least(Pattern.of(masked), keys), least(Pattern.of(unpruned), keys)) == alike


def test_packed_rows_give_the_same_pattern() -> None:
    rng = np.random.default_rng(0)
    for rows, inner, columns, density in ((7, 9, 64, 0.5), (5, 3, 130, 0.9), (40, 30, 70, 0.2), (3, 4, 1, 1.0)):
        left, right = (
            random_pattern(rows, inner, 0.4, 1),
            random_pattern(inner, columns, density, rng),
        )
        expected = Pattern.from_scipy(left.to_scipy().astype(int) @ right.to_scipy().astype(int))
        assert product_pattern(left, right) == expected
