"""The paper's estimates of work and time beside the multiply-adds that are counted."""

from __future__ import annotations

import math

import pytest

from benchmarks.triangular_costs import _WHAT, _point


@pytest.mark.parametrize(("l", "n", "r"), [(3, 4, 1), (5, 7, 3), (15, 6, 1), (15, 6, 4), (101, 5, 2)])
def test_estimates_of_the_paper(l: int, n: int, r: int) -> None:  # noqa: E741
    point = _point(l, n, r)
    paper, counted = ({number: point[what][place] for number, what in _WHAT.items()} for place in range(2))
    # The products of a pass through a layer, and its activation.
    a_pass = (n**2 + n) * r
    assert paper[42] == counted[42] == l * a_pass
    assert paper[43] == (l - 1) * (n**3 + n**2 + a_pass)
    assert paper[44] == n**3 + n**2 + (l - 1) / 2 * a_pass
    assert paper[45] == pytest.approx(n**3 * math.log2(l) + n**2 * r)
    # Four iterations of Jacobi's method, of which it needs l at most, and the last one's residual; the first guess.
    passes = min(l, 4) + 1
    assert paper[46] == passes * paper[42] and counted[46] - paper[46] == l * n * r
    assert paper[47] == passes * a_pass and counted[47] - paper[47] == pytest.approx(n * r)
    # The products of weights count for each sample; scaled blocks, and right-hand sides of each, come to them.
    products = (r - 1) * (l - 1) * n**3
    assert counted[43] - paper[43] == products + (2 * l - 1) * n**2 * r - (l - 1) * n**2 + n * r
    strides = [2**level for level in range(math.ceil(math.log2(l + 1)))]
    products = r * n**3 * sum(max(0, l + 1 - 2 * stride) for stride in strides) / l
    others = r * sum(2 * (l + 1 - stride) * n**2 + (l + 1) * n for stride in strides) / l + r * n
    assert products <= counted[45] <= products + others
