"""States that go from chunk to chunk, in one level and in two, against a loop in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import jacsparse
from jacsparse.recurrence import boundaries_cuda
from jacsparse.recurrence.boundaries_cuda import Boundaries, group_length, unfinished
from jacsparse.recurrence.sequences import Chunks, Sequences
from jacsparse.recurrence.solvers.chunked import device_chunk
from tests.cuda.harness import DEVICE, emulated
from tests.cuda.test_recurrent import check

#: Lengths of samples; chunks have two steps.
LENGTHS = {"equal": (14, 14, 14), "packed": (27, 14, 3, 1), "one sample": (13,), "one chunk": (2, 1)}


def chunks_of(lengths: tuple[int, ...], *, backward: bool) -> Chunks:
    sizes = (np.array(lengths)[None] > np.arange(max(lengths))[:, None]).sum(axis=1)
    return Sequences.packed(torch.from_numpy(sizes)).cut(1, 2, backward=backward)


def random_maps(chunks: Chunks, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What chunks do, as matrices with offsets below, and the samples' first states; in float64."""
    maps = torch.randn(len(chunks.runs), size + 1, size, dtype=torch.float64) / size**0.5
    return maps, torch.randn(chunks.sequences.batch, size, dtype=torch.float64)


def loop(chunks: Chunks, maps: torch.Tensor, initial_state: torch.Tensor) -> torch.Tensor:
    """The first states of all chunks."""
    starts = torch.empty(len(maps), maps.shape[2], dtype=torch.float64)
    for sample, state in enumerate(initial_state):
        for run in chunks.table[: chunks.counts[sample], sample].tolist():
            starts[run] = state
            state = state @ maps[run, :-1] + maps[run, -1]
    return starts


@pytest.fixture(params=[1, 2, 3, 5, 100])
def groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The chunks of a group."""
    length: int = request.param
    monkeypatch.setattr(boundaries_cuda, "group_length", lambda places, size: min(places, length))
    return length


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 20, 33, 70])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_states_between_chunks(lengths: tuple[int, ...], size: int, dtype: torch.dtype, groups: int) -> None:
    chunks = chunks_of(lengths, backward=groups % 2 == 0)
    maps, initial_state = random_maps(chunks, size)
    # Sums of n + 1 products, one after the other from chunk to chunk.
    tolerance = 4 * (size + 1) * max(chunks.counts) * torch.finfo(dtype).eps
    expected = loop(chunks, maps, initial_state)
    start = expected + 1e-3 * torch.randn_like(expected)
    start[chunks.table[0].tolist()] = initial_state
    ends = (start.unsqueeze(1) @ maps[:, :-1]).squeeze(1) + maps[:, -1]
    with emulated():
        boundaries = Boundaries(chunks, maps.to(DEVICE, dtype))
        wide, same = (boundaries.reached(initial_state.to(DEVICE, dtype), each) for each in (torch.float64, dtype))
        corrected = boundaries.corrected(start.to(DEVICE), ends.to(DEVICE))
    largest = expected.abs().amax()
    for actual in (wide, same, corrected):
        assert (actual.cpu().double() - expected).abs().amax() <= tolerance * largest
    # All rounding but the last one is of moves, which are a thousandth of the states.
    assert (corrected.cpu().double() - expected).abs().amax() <= (1e-2 * tolerance + torch.finfo(dtype).eps) * largest


def test_samples_whose_guesses_do_not_fit_are_solved(groups: int) -> None:
    chunks = chunks_of((14, 9, 5), backward=False)
    maps, initial_state = random_maps(chunks, 5)
    defects = torch.tensor([1.0, 0.0, float("nan")], dtype=torch.float64)
    with emulated():
        boundaries = Boundaries(chunks, maps.to(DEVICE))
        starts = boundaries.reached(initial_state.to(DEVICE), torch.float64, defects.to(DEVICE))
    solved = torch.from_numpy(chunks.runs.sample != 1)
    torch.testing.assert_close(starts.cpu()[solved], loop(chunks, maps, initial_state)[solved], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrong", [float("inf"), -float("inf"), float("nan")])
def test_only_samples_without_finite_states_are_left(wrong: float) -> None:
    chunks = chunks_of((27, 14, 3, 1), backward=True)
    start, ends = torch.randn(2, len(chunks.runs), 70)
    edge = torch.randn(4, 70)
    for sample, place in ((0, 13), (2, 1), (3, 0)):
        start[chunks.table[place, sample], 69 - sample] = wrong
    with emulated():
        runs, rest = unfinished(chunks, start.to(DEVICE), ends.to(DEVICE), edge.to(DEVICE))
    assert runs.steps.tolist() == [27, 0, 3, 1] and runs.begin.tolist() == [0, 0, 0, 0]
    expected = edge.clone()
    expected[1] = ends[chunks.last[1]]
    assert torch.equal(rest.cpu(), expected)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("lengths", [None, [31, 17, 1]])
def test_layers_in_two_levels(kind: str, lengths: list[int] | None) -> None:
    assert group_length(31, 5) < 31
    check(kind, 5, (31, 3), torch.float64, lengths, schedule="chunked:1", forward="newton", chunk=1)


def test_a_sample_that_overflows_harms_no_other() -> None:
    """The products of a sample's matrices overflow in groups, and those of another one are what they are alone."""
    time, size = 60, 4
    d = torch.full((time, 3, size), 0.5)
    d[:, 1] = 1e18
    weight = torch.eye(size).roll(1, 0)
    b = torch.randn(time, 3, size)
    b[:, 1] = 0
    reports: list[jacsparse.recurrence.Report] = []
    with emulated():
        A = jacsparse.recurrence.Scaled(weight.to(DEVICE), d.to(DEVICE))
        h = jacsparse.linear_recurrence(A, b.to(DEVICE), schedule="chunked:2", reports=reports).cpu()
        alone = jacsparse.linear_recurrence(A, b.to(DEVICE), schedule="linear").cpu()
    assert group_length(30, size) < 30
    assert not h[:, 1].any()
    torch.testing.assert_close(h, alone, rtol=1e-5, atol=1e-6)
    report = reports[0].read()
    assert (report.methods, report.fallback_samples, report.fallback_steps) == (["chunked", "sequential"], 1, time)


def test_groups_pay_where_there_are_many_chunks() -> None:
    for size, places in itertools.product((1, 20, 64, 128), (2, 10, 50, 500, 5000)):
        length = group_length(places, size)
        assert length == places or (length - 1) * 1.2 < places**0.5
    assert group_length(5000, 129) == 5000


@pytest.mark.parametrize("size", [1, 20, 64, 128, 300])
def test_longer_sequences_have_longer_chunks(size: int) -> None:
    chunks = [device_chunk(time, size) for time in (1000, 10_000, 100_000, 1_000_000)]
    assert chunks == sorted(chunks) and chunks[0] >= 16
