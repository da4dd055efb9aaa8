"""The poster's break-even, beside its definition."""

from __future__ import annotations

import math

import pytest

from benchmarks.simulation import _break_even


@pytest.mark.parametrize("ratio", [0.5, 1.8, 1.9, 1.95, 2.0, 2.5, 7.0, 31.0, 100.0])
def test_from_the_break_even_on_the_inequality_holds(ratio: float) -> None:
    holds = {n: ratio < n / math.log2(n) for n in range(2, 2000)}
    assert _break_even(ratio) == max((n + 1 for n, each in holds.items() if not each), default=2)
