"""Delayed gradients with a process for each module: the same numbers, and what happens where a rank fails."""

import os
import subprocess
import sys

import pytest
import torch
from jacsparse.models import load_checkpoint

from tests.distributed.launch import ROOT, run_ranks

from .delayed_ranks import LENET

RANKS = "tests.training.delayed_ranks"


def test_both_engines_have_the_same_numbers_and_states():
    for rank in run_ranks(RANKS, "equal", count=5, seconds=300):
        assert rank.status == 0, rank.output


FAULTS = {
    "kill": "rank {rank} has failed: it did not answer rank",
    "stop": "rank {rank} has failed: it did not answer rank",
    "exception": "rank {rank} has failed: ArithmeticError in the forward pass of iteration 4: made to fail",
}
#: Ranks that are killed or stopped are noticed as in exclusive scans, whose tests have both.
SHORT = {("exception", 0)}


@pytest.mark.parametrize(
    ("kind", "rank"),
    [
        pytest.param(kind, rank, marks=[] if (kind, rank) in SHORT else pytest.mark.full)
        for kind in FAULTS
        for rank in range(3)
    ],
)
def test_all_other_ranks_end_and_name_the_one_that_failed(kind, rank):
    ended = run_ranks(RANKS, "fault", kind, str(rank), count=3, seconds=60, stopped=rank if kind == "stop" else None)
    assert ended[rank].status != 0
    if kind == "exception":
        assert "ArithmeticError: made to fail" in ended[rank].output
    for other in {0, 1, 2} - {rank}:
        assert ended[other].status == 1
        assert f"RankError: {FAULTS[kind].format(rank=rank)}" in ended[other].output
        assert "pass of iteration" in ended[other].output


def test_different_batches():
    ended = run_ranks(RANKS, "fault", "batch", "0", count=3, seconds=60)
    assert all(rank.status == 1 for rank in ended)
    assert "rank 0 and rank 1 have different batches at iteration 4; pass the same ones to all" in ended[1].output
    assert "rank 1 has failed: RankError in the forward pass of iteration 4" in ended[2].output


@pytest.mark.parametrize(
    ("rank", "phase"),
    [
        (0, "forward pass of iteration 4"),
        pytest.param(1, "backward pass of iteration 4", marks=pytest.mark.full),
    ],
)
def test_a_call_that_the_others_do_not_make(rank, phase):
    ended = run_ranks(RANKS, "fault", "more", str(rank), count=2, seconds=60)
    assert f"rank {1 - rank} has failed: it did not answer rank {rank} in the exchange" in ended[rank].output
    assert f"rank {rank} has failed: it did not answer rank {1 - rank} in the {phase}" in ended[1 - rank].output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_begin(rank):
    ended = run_ranks(RANKS, "absent", str(rank), count=2, seconds=60)
    assert f"rank {rank} has failed: it did not answer rank {1 - rank} in the start" in ended[1 - rank].output


def test_without_a_store_messages_are_as_few():
    for rank in run_ranks(RANKS, "store_of_the_first", count=3, seconds=60)[1:]:
        assert "has failed: it did not answer rank" in rank.output
        assert rank.output.count("[c10d]") <= 1


def test_a_loss_that_is_not_finite(tmp_path):
    """The last rank alone has the loss."""
    first, last = run_ranks(RANKS, "train_lenet", str(tmp_path / "out.safetensors"), "--lr", "1e30", count=2)
    assert "\njacsparse: the loss is nan in train epoch 1" in last.output
    assert "jacsparse: rank 1 has failed: FloatingPointError in the training: the loss is nan in" in first.output


def test_ranks_that_differ():
    for rank in run_ranks(RANKS, "differ", count=3):
        assert rank.status == 0, rank.output
        words = [line for line in rank.output.splitlines() if line.startswith("RankError")]
        assert len(words) == 3
        assert words[0].startswith("RankError: rank 0 has layer 11: 'Linear(")
        assert words[1].startswith("RankError: rank 0 has layer 0: 'Linear(") and "torch.float64" in words[1]
        assert words[2].startswith("RankError: rank 0 has lengths of modules: [")


def test_the_first_rank_cuts_by_measured_cost():
    for rank in run_ranks(RANKS, "measured", count=2):
        assert rank.status == 0, rank.output


def test_as_many_ranks_as_modules():
    (rank,) = run_ranks(RANKS, "alone", count=1)
    assert "ValueError: there are 3 modules, and the process group has 1 ranks" in rank.output


@pytest.mark.full
def test_trained_by_torchrun_as_in_one_process(tmp_path):
    one, two = (str(tmp_path / f"{name}.safetensors") for name in ("one", "two"))
    (alone,) = run_ranks(RANKS, "train_lenet", one, count=1)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "jacsparse", "train", *LENET.split(), "--out", two],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, encoding="utf-8", timeout=300,
    )  # fmt: skip
    assert alone.status == 0, alone.output
    assert done.returncode == 0, done.stderr
    # One process of all speaks.
    assert done.stdout.count("\ntrained: ") + done.stdout.startswith("trained: ") == 1
    first, second = (load_checkpoint(path)[0].state_dict() for path in (one, two))
    assert all(torch.equal(first[name], second[name]) for name in first)
