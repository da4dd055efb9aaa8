"""Features that work alone, drawn two or three at a time: each case is right, or clearly refused.

``python -m tests.crossings.run --seed SEED --draws 1`` runs one case again.
"""

from __future__ import annotations

from collections import Counter

import pytest

from .draws import drawn, judged
from .features import FEATURES
from .subjects import SUBJECTS

PARTS, FULL_PARTS = 6, 80
PER_PART, FULL_PER_PART = 25, 250


@pytest.mark.parametrize(
    ("first", "count", "full"),
    [
        *((part * PER_PART, PER_PART, False) for part in range(PARTS)),
        *(
            pytest.param(part * FULL_PER_PART, FULL_PER_PART, True, marks=pytest.mark.full)
            for part in range(FULL_PARTS)
        ),
    ],
)
def test_crossings_are_right_or_clearly_refused(first: int, count: int, full: bool) -> None:
    verdicts = [judged(drawn(seed, full)) for seed in range(first, first + count)]
    faults = [f"{verdict.draw}: {verdict.kind}, {verdict.detail}" for verdict in verdicts if verdict.is_fault]
    assert not faults, "\n".join(faults)
    kinds = Counter(verdict.kind for verdict in verdicts)
    assert kinds["right"] > kinds["refused"], kinds


def test_draws_reach_all_features() -> None:
    draws = [drawn(seed) for seed in range(2000)]
    assert {draw.subject for draw in draws} == SUBJECTS.keys()
    assert {name for draw in draws for name in draw.features} == {n for n, each in FEATURES.items() if not each.slow}
