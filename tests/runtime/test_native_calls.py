"""Kernels that threads call without Python: with all kinds of arguments, at once, and where they fail."""

from __future__ import annotations

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import pytest
import torch

from jacsparse.runtime import KernelRun, KernelSequence, flushing, run_rows
from jacsparse.runtime.native_calls import native_call

ROWS = 5000
WORK = np.arange(ROWS + 1) * 1000

njit = functools.partial(numba.njit, nogil=True, error_model="numpy")


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@njit
def _all_kinds(first, last, line, strided, table, turned, empty, masked, count, small, flag, one, double, out):
    for row in range(first, last):
        total = line[row] + strided[row] + double * small + one + len(empty) + table.shape[0] + turned[2, row % 4]
        for column in range(count):
            total += table[row % 3, column]
        out[row] = -total if flag and masked[row] else total


def arguments() -> list[Any]:
    draw = np.random.default_rng(0)
    line = draw.normal(size=ROWS)
    line.setflags(write=False)
    strided, table = draw.normal(size=(ROWS, 2))[:, 1], draw.normal(size=(3, 7))
    turned, empty, masked = draw.normal(size=(4, 3)).T, np.zeros((0, 3), np.float32), draw.random(ROWS) < 0.5
    return [line, strided, table, turned, empty, masked, 7, np.uint16(3), True, np.float32(0.1), 2.5]


@pytest.mark.parametrize("negative", [False, True])
def test_all_kinds_of_arguments(negative: bool) -> None:
    args, expected, actual = arguments(), np.empty(ROWS), np.full(ROWS, np.nan)
    args[6], args[8] = (-1, False) if negative else (7, True)
    _all_kinds(0, ROWS, *args, expected)
    assert native_call(_all_kinds, [*args, actual]) is not None
    run_rows(_all_kinds, WORK, *args, actual)
    np.testing.assert_array_equal(actual, expected)


def test_kinds_are_told_apart() -> None:
    @njit
    def doubled(first, last, x, y):
        for row in range(first, last):
            y[row] = 2 * x[row]

    for x in (
        np.arange(ROWS),
        np.arange(ROWS, dtype=np.float32),
        np.arange(2.0 * ROWS)[::2],
        np.arange(1.0 * ROWS)[::-1],
    ):
        for y in (np.zeros(ROWS), np.zeros((ROWS, 3))[:, 2]):
            run_rows(doubled, WORK, x, y)
            np.testing.assert_array_equal(y, 2 * x)


def test_each_row_once() -> None:
    @njit
    def count(first, last, y):
        for row in range(first, last):
            y[row] += 1

    for rows in (2, 3, 7, 1000):
        y = np.zeros(rows)
        for _ in range(50):
            run_rows(count, np.arange(rows + 1) * 100_000, y)
        assert (y == 50).all()


def test_many_callers_at_once() -> None:
    args = arguments()
    expected = np.empty(ROWS)
    _all_kinds(0, ROWS, *args, expected)

    def call(_: int) -> bool:
        actual = np.empty(ROWS)
        for _ in range(20):
            run_rows(_all_kinds, WORK, *args, actual)
        return np.array_equal(actual, expected)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(16)))


def test_results_below_the_smallest_number_are_flushed() -> None:
    @njit
    def halved(first, last, x, y):
        for row in range(first, last):
            y[row] = x[row] / 2

    x, y = np.full(ROWS, np.finfo(np.float64).tiny), np.zeros(ROWS)
    run_rows(halved, WORK, x, y)
    assert (y == x / 2).all() and y[0] > 0
    run_rows(flushing(halved), WORK, x, y)
    assert not y.any() or flushing(halved) is halved
    # The mode is that of before again, on each thread.
    run_rows(halved, WORK, x, y)
    assert (y == x / 2).all()


def test_memory_that_cannot_be_had() -> None:
    @njit
    def greedy(first, last, size, y):
        for row in range(first, last):
            y[row] = len(np.empty(size))

    y = np.zeros(ROWS)
    run_rows(greedy, WORK, 5, y)
    assert (y == 5).all()
    with pytest.raises(MemoryError, match="greedy: "):
        run_rows(greedy, WORK, 2**60, y)


def test_tuples() -> None:
    @njit
    def of_tuples(first, last, pair, numbers, y):
        for row in range(first, last):
            y[row] = pair[0][row] + pair[1][0] * numbers[0] - numbers[1]

    x, y = np.arange(2.0 * ROWS)[::2], np.zeros(ROWS)
    args = [(x, (1.5, np.float32(3))), (4, 7), y]
    assert native_call(of_tuples, args) is not None
    run_rows(of_tuples, WORK, *args)
    np.testing.assert_array_equal(y, x + 1.5 * 4 - 7)


def test_what_only_python_can_call() -> None:
    @njit
    def of_a_complex_number(first, last, number, y):
        for row in range(first, last):
            y[row] = number.real

    def plain(first: int, last: int, y: np.ndarray) -> None:
        y[first:last] = 3

    y = np.zeros(ROWS)
    assert native_call(of_a_complex_number, [1j, y]) is None and native_call(plain, [y]) is None
    run_rows(of_a_complex_number, WORK, 2 + 1j, y)
    assert (y == 2).all()
    run_rows(plain, WORK, y)
    assert (y == 3).all()


def test_kernels_in_sequence_wait_for_each_other() -> None:
    @njit
    def shifted(first, last, x, y):
        for row in range(first, last):
            y[row] = 2 * x[len(x) - 1 - row] + row

    arrays = [np.arange(1.0 * ROWS), *(np.zeros(ROWS) for _ in range(6))]
    sequence = KernelSequence([KernelRun(shifted, WORK, each) for each in itertools.pairwise(arrays)])
    for threads in (3, 1, 2):
        torch.set_num_threads(threads)
        arrays[0] += 1
        expected = arrays[0].copy()
        sequence()
        for _ in range(6):
            expected = 2 * expected[::-1] + np.arange(ROWS)
        np.testing.assert_array_equal(arrays[-1], expected)


def test_a_sequence_of_light_kernels_and_of_functions_in_python() -> None:
    @njit
    def doubled(first, last, x):
        x[first:last] *= 2

    def in_python(first: int, last: int, x: np.ndarray) -> None:
        x[first:last] += 1

    light, mixed = np.ones(4), np.ones(ROWS)
    KernelSequence([KernelRun(doubled, 4, (light,)), KernelRun(doubled, 4, (light,))])()
    KernelSequence([KernelRun(doubled, WORK, (mixed,)), KernelRun(in_python, WORK, (mixed,))])()
    KernelSequence([])()
    assert light.tolist() == [4.0] * 4
    assert (mixed == 3).all()


def test_memory_refused_within_a_sequence() -> None:
    @njit
    def greedy(first, last, count, y):
        y[first:last] = np.empty(count)[:1]

    @njit
    def plain(first, last, y):
        y[first:last] = 1

    y, z = np.zeros(ROWS), np.zeros(ROWS)
    failing = KernelSequence([KernelRun(greedy, WORK, (2**60, y)), KernelRun(plain, WORK, (z,))])
    for _ in range(2):
        with pytest.raises(MemoryError, match="greedy: there is no memory left"):
            failing()
