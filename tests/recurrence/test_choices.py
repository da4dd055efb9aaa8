"""What is chosen for a recurrence and told of it, by numbers worked out once: no result shows a worse choice."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import jacsparse
from jacsparse.affine import DenseMaps
from jacsparse.recurrence import CELLS, NODES, PRICES, Cell, Sequences
from jacsparse.recurrence.across_ranks import SequencePart
from jacsparse.recurrence.reports import Pending
from jacsparse.recurrence.solvers import choose
from jacsparse.recurrence.solvers.choice import (
    LONGEST,
    SHORTEST,
    RecurrenceSize,
    choose_on_device,
    choose_small,
    way_in_chunks,
)


@pytest.mark.parametrize("cell", CELLS.values(), ids=lambda cell: cell.mode)
def test_limits_are_reached_and_not_passed(cell: Cell) -> None:
    torch.manual_seed(0)
    rows, size = 50, 4
    edge, far = 3 * torch.randn(rows, cell.states * size), 20 * torch.randn(rows, cell.states * size)
    state = edge
    for _ in range(4):
        state = cell.step(9 * torch.randn(rows, cell.gates * size), 9 * torch.randn(rows, cell.gates * size), state)
        assert torch.equal(cell.limit(state, edge), state)
    bound = edge.abs().amax(dim=1, keepdim=True).clamp(min=1) if cell.mode == "GRU" else torch.ones(rows, 1)
    h, others = far.split([size, far.shape[1] - size], dim=1)
    expected = h.relu() if cell.mode == "RNN_RELU" else torch.maximum(torch.minimum(h, bound), -bound)
    assert torch.equal(cell.limit(far, edge), torch.cat([expected, others], dim=1))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_warm_start_without_numbers_is_a_cold_one(value: float) -> None:
    torch.manual_seed(0)
    layer, x = jacsparse.nn.GRU(3, 8, chunk=16, forward="relaxed"), torch.randn(200, 2, 3)
    expected, cold = layer(x)[0], layer.reports[0]
    (boundaries,) = layer.boundaries
    assert layer(x, warm=[torch.full_like(boundaries, value)])[0].equal(expected)
    assert layer.reports[0] == cold and cold.methods == ["relaxed"]
    # The numbers that there are help.
    layer(x, warm=[boundaries.index_fill(1, torch.tensor([0]), value)])
    assert layer.reports[0].methods == ["relaxed"] and layer.reports[0].defects[0] < cold.defects[0]


@pytest.mark.parametrize(
    ("work", "options", "expected"),
    [
        (RecurrenceSize(809, 16, 20, 1, 132), {}, ("sequential", 66)),
        (RecurrenceSize(810, 16, 20, 1, 132), {}, ("relaxed", 66)),
        # Steps of three gates take longer.
        (RecurrenceSize(465, 16, 20, 3, 132), {}, ("sequential", 64)),
        (RecurrenceSize(466, 16, 20, 3, 132), {}, ("relaxed", 64)),
        (RecurrenceSize(100_000, 16, 20, 1, 132), {}, ("relaxed", 512)),
        (RecurrenceSize(11_250, 500, 20, 1, 132), {}, ("sequential", 512)),
        (RecurrenceSize(11_251, 500, 20, 1, 132), {}, ("relaxed", 512)),
        # Samples alone fill the device.
        (RecurrenceSize(400_000, 700, 20, 1, 132), {}, ("sequential", 512)),
        (RecurrenceSize(400_000, 300, 64, 1, 132), {}, ("sequential", 512)),
        (RecurrenceSize(603, 16, 20, 1, 132), {"guesses": False}, ("sequential", 16)),
        (RecurrenceSize(604, 16, 20, 1, 132), {"guesses": False}, ("chunked", 16)),
        (RecurrenceSize(384, 16, 20, 1, 132), {"guesses": False, "diagonal": True}, ("sequential", 64)),
        (RecurrenceSize(385, 16, 20, 1, 132), {"guesses": False, "diagonal": True}, ("chunked", 64)),
    ],
)
def test_what_auto_is_on_a_device(work: RecurrenceSize, options: dict[str, bool], expected: tuple[str, int]) -> None:
    """From the first length on at which chunks are predicted to be faster."""
    choice = choose_on_device(work, **options)
    assert choice[:2] == expected
    sizes = f"{work.batch} samples of {work.time} steps and {work.size} elements on 132 multiprocessors"
    assert choice.reason.startswith(f"{sizes}, predicted: {choice.name} ")


@pytest.mark.parametrize(
    ("time", "batch", "expected"),
    [
        (1, 1, ("sequential", 1, False)),
        (189, 16, ("sequential", 189, False)),
        (190, 16, ("relaxed", 64, False)),
        (2048, 16, ("relaxed", 256, False)),
        (2049, 16, ("relaxed", 64, True)),
        (30_000, 16, ("relaxed", 455, True)),
        (30_000, 1, ("relaxed", 178, True)),
        (2048, 2000, ("sequential", 2048, False)),
        (50_000, 2000, ("sequential", 50_000, False)),
    ],
)
def test_what_auto_is_for_small_states(time: int, batch: int, expected: tuple[Any, ...]) -> None:
    way = choose_small(RecurrenceSize(time, batch, 20, 1, 132), 8)
    assert (way.name, way.chunk, way.swept) == expected and f"132 multiprocessors, predicted: {way.name} " in way.reason


@pytest.mark.parametrize(
    ("time", "chunk", "expected"),
    [
        (100, 100, ("sequential", 100, False)),
        (100, 200, ("sequential", 100, False)),
        (100, 99, ("relaxed", 99, False)),
        (800, 100, ("relaxed", 100, False)),
        (801, 100, ("relaxed", 100, True)),
    ],
)
def test_chunks_that_were_asked_for(time: int, chunk: int, expected: tuple[Any, ...]) -> None:
    way = way_in_chunks(time, chunk, 8)
    assert (way.name, way.chunk, way.swept) == expected


def test_the_chunk_takes_the_least_time_of_all() -> None:
    work = RecurrenceSize(40_000, 4, 20, 3, 132)
    for method in ("relaxed", "chunked", "diagonal"):
        chunk = work.chunk(method, PRICES)
        times = [
            work.microseconds(method, each, NODES, PRICES, captured=True) for each in (chunk // 2, chunk, 2 * chunk)
        ]
        assert SHORTEST < chunk < LONGEST and min(times) == times[1]


@pytest.mark.parametrize(
    ("time", "batch", "expected", "reason"),
    [
        (64, 4, "relaxed", "the samples alone leave some idle"),
        (63, 4, "sequential", "fewer than 4 chunks of 16 steps"),
        (64, 24, "relaxed", "the samples alone leave some idle"),
        (64, 25, "sequential", "too few are idle to pay for a second sweep"),
        (64, 64, "sequential", "too few are idle to pay for a second sweep"),
        (64, 65, "sequential", "too few are idle to pay for a second sweep"),
        (640, 130, "sequential", "too few are idle to pay for a second sweep"),
    ],
)
def test_what_auto_is_on_a_host(
    time: int, batch: int, expected: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 16 workers, which samples alone leave idle; in chunks of 16 steps."""
    for module in ("solvers.choice", "sequences"):
        monkeypatch.setattr(f"jacsparse.recurrence.{module}.thread_count", lambda: 16)
    choice = choose(Sequences.equal(time, batch), 8, torch.empty(0), 16, guesses=True)
    assert (choice.name, choice.chunk) == (expected, 16)
    assert choice.reason == f"{batch} samples of {time} steps on 16 workers: {reason}"


def test_what_a_device_says_of_guesses() -> None:
    nan = math.nan
    defects = torch.tensor([[1.0, 0.5, nan], [0.1, 1e-9, nan], [1e-9, 0.0, nan], [0.0, 0.0, nan]])
    read = Pending(("relaxed",), torch.tensor([0, 0, 70]), defects, None, captured=False).read()
    assert read["methods"] == ["relaxed", "sequential"]
    assert (read["fallback_samples"], read["fallback_steps"], read["sweeps"]) == (1, 70, 3)
    assert read["defects"] == pytest.approx([1.0, 0.1, 1e-9])
    read = Pending(("newton",), torch.zeros(2, dtype=torch.int64), defects[:2, :2], None, captured=False).read()
    assert (read["methods"], read["sweeps"]) == (["newton"], 2)


@pytest.mark.parametrize("schedule", ["blelloch:1", "planned"])
def test_trees_over_a_few_samples_at_a_time(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = jacsparse.nn.GRU(3, 4, schedule=schedule, dtype=torch.float64), torch.randn(9, 5, 3).double()
    expected = torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters()))
    samples, split = [], jacsparse.affine.AffineMaps.split
    monkeypatch.setattr("jacsparse.recurrence.solvers.tree._ELEMENTS", 2 * 9 * 4 * 4)
    monkeypatch.setattr(DenseMaps, "split", lambda maps, size: samples.append(size) or split(maps, size))
    gradients = torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters()))
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert samples == ([2] if schedule == "blelloch:1" else [])


@pytest.mark.parametrize(
    ("lengths", "batch", "size", "diagonal", "expected"),
    [
        # Two ranks have nothing to do at the same time; three have, and nothing to combine.
        ([10_000] * 2, 16, 64, True, "linear"),
        ([10_000] * 3, 16, 64, True, "gather"),
        ([10_000] * 8, 16, 64, True, "scan"),
        # Maps are longer messages than states, but there are fewer of them in a row.
        ([1] * 3, 1, 64, True, "linear"),
        ([1] * 8, 1, 64, True, "scan"),
        # A step's matrix takes 64 / 4 times as long as a step.
        ([10_000] * 16, 16, 64, False, "linear"),
        ([10_000] * 20, 16, 64, False, "scan"),
        # One rank has them all.
        ([80_000] + [0] * 7, 16, 64, True, "linear"),
    ],
)
def test_exchange_of_sequences(
    lengths: list[int], batch: int, size: int, diagonal: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP; the exchange of the least predicted time."""
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    problem: Any = SimpleNamespace(
        initial_state=torch.zeros(batch, size), recurrence=SimpleNamespace(diagonal=diagonal)
    )
    ranks: Any = SimpleNamespace(size=len(lengths), group=None)
    assert SequencePart(ranks, lengths, "auto", differentiated=True)._way(problem) == expected
    assert SequencePart(ranks, lengths, "gather", differentiated=True)._way(problem) == "gather"
