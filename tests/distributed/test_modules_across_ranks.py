"""Recurrent layers and chains whose steps or stages are on several ranks, against one process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from jacsparse.models import default_settings, train
from jacsparse.patterns import UnsupportedOperatorError

import jacsparse
from jacsparse.recurrence import Diagonal, linear_recurrence
from tests.helpers import names_hooks

from .launch import ROOT, one_rank, run_ranks

RECURRENT, STAGES = "tests.distributed.recurrent_ranks", "tests.distributed.stage_ranks"
COUPLED = "tests.distributed.coupled_ranks"


@pytest.mark.parametrize(
    ("module", "case", "count"),
    [
        (RECURRENT, "equal", 3),
        pytest.param(RECURRENT, "equal", 5, marks=pytest.mark.full),
        (RECURRENT, "linear", 3),
        pytest.param(RECURRENT, "linear", 5, marks=pytest.mark.full),
        (RECURRENT, "empty", 3),
        (RECURRENT, "beyond_range", 3),
        (RECURRENT, "data_parallel", 4),
        (RECURRENT, "losses", 3),
        (STAGES, "equal", 3),
        pytest.param(STAGES, "equal", 5, marks=pytest.mark.full),
        pytest.param(STAGES, "checkpointed", 5, marks=names_hooks),
        pytest.param(STAGES, "vgg 3", 3, marks=pytest.mark.full),
        pytest.param(STAGES, "vgg 1 2 4 5", 5, marks=pytest.mark.full),
        (STAGES, "data_parallel", 4),
        (COUPLED, "drawn_networks 4", 3),
        pytest.param(COUPLED, "drawn_networks 100", 3, marks=pytest.mark.full),
    ],
)
def test_equal_to_one_process(module: str, case: str, count: int) -> None:
    for ended in run_ranks(module, *case.split(), count=count, seconds=300):
        assert ended.status == 0, ended.output


@pytest.mark.parametrize(
    ("module", "differences"),
    [
        (
            RECURRENT,
            [
                "RankError: rank 0 has hidden_size: 5, and rank 1: 6",
                "RankError: rank 0 has schedule: 'linear', and rank 1: 'chunked'",
                "RankError: rank 0 has dtype: 'torch.float32', and rank 1: 'torch.float64'",
                "RankError: rank 0 has batch: 2, and rank 1: 1",
                "RankError: rank 0 has frozen weights: [], and rank 1: ['weight_ih_l0', 'weight_hh_l0', 'bias_ih_l0', ",
                "ValueError: input has no steps on any of the 2 ranks",
            ],
        ),
        (
            STAGES,
            [
                "RankError: rank 0 has x: '(2, 4) torch.float32', and rank 1: '(3, 4) torch.float32'",
                "RankError: rank 0 has gradient of x: False, and rank 1: True",
                "RankError: rank 0 has exchange: 'linear', and rank 1: 'scan'",
                "RankError: rank 0 has x: '(2, 4) torch.float32', and rank 1: '(2, 3) torch.float32'",
            ],
        ),
    ],
)
def test_ranks_that_call_differently_are_told_so(module: str, differences: list[str]) -> None:
    for ended in run_ranks(module, "differ", count=2):
        assert ended.status == 0, ended.output
        assert all(difference in ended.output for difference in differences), ended.output


FAULTS = [
    (RECURRENT, ("kill", 0)),
    (STAGES, ("kill", 1)),
    *(pytest.param(RECURRENT, fault, marks=pytest.mark.full) for fault in (("stop", 1), ("exception", 2))),
]


@pytest.mark.parametrize(("module", "fault"), FAULTS)
def test_all_other_ranks_end_and_name_the_one_that_failed(module: str, fault: tuple[str, int]) -> None:
    kind, rank = fault
    stopped = rank if kind == "stop" else None
    for number, ended in enumerate(run_ranks(module, "fault", kind, str(rank), count=3, seconds=60, stopped=stopped)):
        if number != rank:
            assert ended.status == 1, ended.output
            assert f"rank {rank} has failed" in ended.output
            assert " pass" in ended.output


def test_what_is_no_process_group() -> None:
    for make in (
        lambda group: jacsparse.nn.GRU(3, 4, process_group=group),
        lambda group: jacsparse.nn.Scan(torch.nn.ReLU(), process_group=group),
    ):
        with pytest.raises(TypeError, match="process_group is a str; expected a"):
            make("gloo")
    assert pickle.loads(pickle.dumps(jacsparse.nn.GRU(3, 4))).hidden_size == 4


@pytest.mark.parametrize(
    "call",
    [
        lambda: jacsparse.nn.GRU(3, 4, exchange="ring"),
        lambda: jacsparse.nn.Scan(torch.nn.ReLU(), exchange="ring", schedule="linear"),
        lambda: jacsparse.backward(torch.nn.ReLU(), torch.ones(1, 2), torch.ones(1, 2), exchange="ring"),
        lambda: linear_recurrence(Diagonal(torch.ones(2, 1, 1)), torch.ones(2, 1, 1), exchange="ring"),
    ],
)
def test_an_exchange_is_checked_without_a_group(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="exchange is 'ring'; expected one of auto, linear, gather, scan"):
        call()


def test_compiled_and_recorded() -> None:
    module, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    with one_rank() as group:
        scan = jacsparse.nn.Scan(module, process_group=group)
        y = torch.compile(torch.nn.Sequential(scan, torch.nn.Tanh()), backend="eager")(x)
        y.sum().backward()
        torch.testing.assert_close(y, module(x).tanh())
        assert module.weight.grad is not None
        with pytest.raises(UnsupportedOperatorError, match="a Scan across ranks cannot be recorded or exported"):
            jacsparse.jacobian(scan, x)


def test_bad_arguments_of_sums_of_gradients() -> None:
    layer = torch.nn.Linear(2, 2)
    for arguments, loss, message in [
        ((layer, None), "mean", "loss is 'mean'; expected 'each' for losses of their own, or 'same' for one that all"),
        (([layer], None), "each", "module has a Linear; expected an nn.Module, or its parameters"),
        ((layer, None), "each", "process_group is a NoneType; expected a torch.distributed.ProcessGroup"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            jacsparse.distributed.sum_gradients(*arguments, loss=loss)
    with one_rank() as group:
        jacsparse.distributed.sum_gradients(layer, group, loss="same")
        assert layer.weight.grad is None


@pytest.mark.full
def test_bitstream_trained_by_torchrun(tmp_path: Path) -> None:
    path = str(tmp_path / "two.safetensors")
    options = "--backward scan --data bitstream:30 --batch 3200 --epochs 1"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [*torchrun, "jacsparse", "train", "bitstream", *options.split(), "--out", path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    losses = np.loadtxt(path.replace("safetensors", "csv"), delimiter=",", skiprows=1, usecols=4)
    settings = replace(default_settings("bitstream"), backward="scan", data="bitstream:30", batch=3200, epochs=1)
    expected = [point.train_loss for point in train(settings).points]
    # Ten steps in float32, whose sums are of other orders.
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


def test_chains_are_trained_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="backward of lenet5 is 'scan', and there are 2 processes"):
        train(replace(default_settings("lenet5"), backward="scan"))
