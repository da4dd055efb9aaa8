"""Estimates of what counting takes, where they are exact."""

from __future__ import annotations

from jacsparse.spgemm import multiply_adds

from jacsparse.flop import estimate_count
from jacsparse.schedule import blelloch
from tests.helpers import random_pattern


def test_products_of_two_steps_of_a_sequence_are_estimated_once() -> None:
    step = random_pattern(40, 40, 0.1, 1)
    assert estimate_count(blelloch(8, levels=1), [step] * 8).pairs == multiply_adds(step, step)
