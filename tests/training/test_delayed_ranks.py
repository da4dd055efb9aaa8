"""Delayed gradients with a process for each module: the same numbers, and what happens where a rank fails."""

import pytest

from tests.distributed.launch import run_ranks

RANKS = "tests.training.delayed_ranks"


def test_both_engines_have_the_same_numbers_and_states():
    for rank in run_ranks(RANKS, "equal", count=5, seconds=300):
        assert rank.status == 0, rank.output


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("kill", "rank {rank} has failed: it did not answer rank"),
        ("stop", "rank {rank} has failed: it did not answer rank"),
        ("exception", "rank {rank} has failed: ArithmeticError in the forward pass of iteration 4: made to fail"),
    ],
)
def test_all_other_ranks_end_and_name_the_one_that_failed(kind, words, rank):
    ended = run_ranks(RANKS, "fault", kind, str(rank), count=3, seconds=60, stopped=rank if kind == "stop" else None)
    assert ended[rank].status != 0
    if kind == "exception":
        assert "ArithmeticError: made to fail" in ended[rank].output
    for other in {0, 1, 2} - {rank}:
        assert ended[other].status == 1
        assert f"RankError: {words.format(rank=rank)}" in ended[other].output
        assert "pass of iteration" in ended[other].output


def test_batches_of_different_sizes():
    ended = run_ranks(RANKS, "fault", "batch", "0", count=3, seconds=60)
    assert all(rank.status == 1 for rank in ended)
    assert "rank 0 sent torch.float64 of shape (2, 5) to rank 1, which expects" in ended[1].output


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("layers", "rank 0 has"),
        ("dtype", "rank 0 has layer 0: 'Linear: weight (5, 3) torch.float64"),
        ("modules", "rank 0 has lengths of modules"),
    ],
)
def test_ranks_that_differ(what, words):
    for rank in run_ranks(RANKS, "differ", what, count=3):
        assert rank.status == 1
        assert words in rank.output
        assert "and rank 1: " in rank.output
