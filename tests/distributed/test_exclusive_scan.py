"""Exclusive scans across ranks: against a loop, forward and back, and what happens where a rank fails."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from jacsparse.affine import DenseMaps
from jacsparse.distributed import RankError, Ranks, exclusive_scan, interconnect_of
from jacsparse.distributed.exclusive_scan import in_turns
from jacsparse.interconnect import Interconnect

from .launch import one_rank, run_ranks

MODULE = "tests.distributed.scan_ranks"
WEIGHT = torch.ones(2, requires_grad=True)


@pytest.mark.parametrize(("case", "count"), [("equal", 5), ("counted", 5), ("destroyed", 1)])
def test_scans_on_1_to_5_ranks(case: str, count: int) -> None:
    for ended in run_ranks(MODULE, case, count=count):
        assert ended.status == 0, ended.output


@pytest.mark.parametrize(
    ("rank", "targets", "sources", "calls"),
    [
        (0, [1], [1], ["send 1", "receive 1"]),
        (1, [0], [0], ["receive 0", "send 0"]),
        (2, [3, 4], [0, 1], ["send 3", "send 4", "receive 0", "receive 1"]),
        (2, [1, 3], [1, 3], ["send 3", "receive 1", "receive 3", "send 1"]),
    ],
)
def test_the_lower_of_two_ranks_sends_first(
    rank: int, targets: list[int], sources: list[int], calls: list[str]
) -> None:
    log: list[str] = []

    def receive(source: int) -> int:
        log.append(f"receive {source}")
        return source

    assert in_turns(rank, targets, sources, lambda target: log.append(f"send {target}"), receive) == sources
    assert log == calls


def test_the_first_failure_stays_the_cause() -> None:
    with one_rank() as group:
        ranks = Ranks(group)
        ranks._faults = dist.HashStore()
        with pytest.raises(ArithmeticError), ranks.during("forward pass"):
            raise ArithmeticError("made to fail")
        with pytest.raises(RankError), ranks.waiting_for(None, "backward pass"):
            raise RuntimeError("closed")
    assert json.loads(ranks._faults.get("0")) == [0, "ArithmeticError in the forward pass: made to fail"]


def test_ranks_that_call_differently_are_told_so() -> None:
    for ended in run_ranks(MODULE, "differ", count=2):
        for difference in (
            "element: 'Tensor of 1, torch.float64', and rank 1: 'Tensor of 1, torch.float32'",
            "element: 'tuple of 1, torch.float32', and rank 1: 'tuple of 2, torch.float32'",
            "gradients: True, and rank 1: False",
            "exchange: 'scan', and rank 1: 'gather'",
            "reverse: False, and rank 1: True",
        ):
            assert f"RankError: rank 0 has {difference}" in ended.output, ended.output
        for error in (
            "TypeError: process_group is a str; expected",
            "ValueError: this process is not part of process_group",
            "TypeError: a tensor of torch.complex64 with 1 axes cannot be sent",
            "ValueError: 9 tensors cannot be sent as one message",
        ):
            assert error in ended.output, ended.output


@pytest.mark.parametrize(("kind", "rank"), [("kill", 2), ("stop", 0), ("exception", 1)])
def test_all_other_ranks_end_and_name_the_one_that_failed(kind: str, rank: int) -> None:
    everybody = run_ranks(
        MODULE, "fault", kind, str(rank), count=4, seconds=60, stopped=rank if kind == "stop" else None
    )
    for number, ended in enumerate(everybody):
        if number == rank:
            continue
        assert ended.status == 1, ended.output
        assert f"rank {rank} has failed" in ended.output
        assert "exclusive scan" in ended.output
        assert kind != "exception" or "ArithmeticError in the exclusive scan: made to fail" in ended.output


@pytest.mark.parametrize(
    ("element", "options", "message"),
    [
        (3.0, {}, "an element of the scan is a float"),
        ((), {}, "an element of the scan is a tuple"),
        (torch.ones(1), {"exchange": "ring"}, "exchange is 'ring'"),
        (torch.ones(1), {}, "there is no process group"),
    ],
)
def test_wrong_arguments(element: object, options: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        exclusive_scan(element, torch.add, **options)


@pytest.mark.parametrize(
    ("combine", "initial", "message"),
    [
        (torch.add, torch.ones(2).double(), "initial is a Tensor of 1, torch.float64; expected what the element is"),
        (torch.add, (torch.ones(2),), "initial is a tuple of 1, torch.float32; expected"),
        (lambda earlier, later: (earlier, later), torch.ones(2), "combine returned a tuple of 2, torch.float32"),
        (lambda earlier, later: earlier.double(), torch.ones(2), "combine returned a Tensor of 1, torch.float64"),
        (lambda earlier, later: 3, torch.ones(2), "an element of the scan is an int"),
        (lambda earlier, later: earlier * WEIGHT, torch.ones(2), "combine reads a tensor that requires a gradient"),
    ],
)
def test_elements_and_combinations_of_other_kinds(combine: Any, initial: Any, message: str) -> None:
    with one_rank() as group, pytest.raises((TypeError, ValueError), match=message):
        exclusive_scan(torch.ones(2), combine, group, initial=initial)


def test_maps_without_matrices_and_offsets() -> None:
    with pytest.raises(ValueError, match="neither matrices nor offsets"):
        DenseMaps(None, None)


@pytest.mark.parametrize(
    ("backend", "expected"), [("gloo", Interconnect(2e-4, 1e9)), ("nccl", Interconnect(2e-5, 1e11))]
)
def test_what_messages_take(backend: str, expected: Interconnect, monkeypatch: pytest.MonkeyPatch) -> None:
    with one_rank() as group:
        ranks = Ranks(group)
        monkeypatch.setattr(dist, "get_backend", lambda group: backend)
        assert interconnect_of(ranks) == expected
