"""The exchange of a chain's stages that is predicted to take the least time, in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from jacsparse.scan import Scanner
from jacsparse.scan.stage_ranks import RankedScanner
from jacsparse.stages import forward_pass


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        # Of vectors 0.1 s on each rank, and of matrices 5 ms, or 0.35 s.
        ([(10**8, 10**6, 10**3)] * 4, "gather"),
        ([(10**8, 7 * 10**7, 10**3)] * 4, "linear"),
        # The first and the last rank multiply no matrices.
        ([(10**8, 10**9, 10**3), *[(10**8, 10**6, 10**3)] * 2, (10**8, 10**9, 10**3)], "gather"),
        # 3 messages of 0.1 GB.
        ([(10**8, 10**6, 10**8)] * 4, "linear"),
        ([(10**8, 10**6, 10**3)] * 2, "linear"),
    ],
)
def test_exchange_of_stages(costs: list[tuple[int, int, int]], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)), torch.ones(5, 4)
    chain, run = forward_pass(module, x)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    told: list[tuple[int, ...]] = []

    def check(phase: str, facts: object, *numbers: int) -> list[tuple[int, int, int]]:
        told.append(numbers)
        return costs

    ranks: Any = SimpleNamespace(size=len(costs), rank=0, group=None, check=check)
    scanner = RankedScanner("auto", ranks, Scanner(chain), run, for_x=True)
    assert scanner._way() == expected
    # This rank's: vectors go through 12 + 3 + 6 elements of matrices; the product of all stages has 8.
    assert told == ([(5 * 21, int(5 * chain.order.cost), 5 * 8 * 4)] if len(costs) > 2 else [])
