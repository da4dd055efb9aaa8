"""Schedules that are executed level by level on a device, against a loop in float64; and the nodes of exact scans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import jacsparse
from benchmarks._made_up_gpu import _NO_KERNELS, _Operators
from jacsparse import schedule as schedules
from jacsparse.recurrence import Dense, Diagonal, Scaled, reference
from jacsparse.recurrence.layer_recurrences import LayerPass
from jacsparse.recurrence.levels_cuda import levels_of, scan_starts, widened
from jacsparse.recurrence.solvers import tree
from jacsparse.runtime import backend
from jacsparse.schedule import Schedule
from tests.cuda.harness import DEVICE, ON_GPU, Fibers, emulated
from tests.cuda.test_boundaries import LENGTHS, chunks_of
from tests.cuda.test_recurrent import check

SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "linear": schedules.linear,
    "blelloch": schedules.blelloch,
    "blelloch:1": lambda n: schedules.blelloch(n, 1),
    "cyclic reduction": schedules.cyclic_reduction,
}


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-11) -> None:
    assert (actual.cpu().double() - expected).abs().amax() <= tolerance * expected.abs().amax()


@pytest.mark.parametrize("size", [1, 20, 33, 70])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_states_before_steps(name: str, lengths: tuple[int, ...], size: int) -> None:
    chunks = chunks_of(lengths, backward=False).sequences.cut(1, 1)
    steps = len(chunks.runs)
    matrices = torch.randn(steps, size, size, dtype=torch.float64) / size**0.5
    offsets, first = (torch.randn(count, size, dtype=torch.float64) for count in (steps, len(lengths)))
    plan, diagonals = SCHEDULES[name](max(lengths) + 1), matrices.diagonal(dim1=1, dim2=2)
    forms = {
        "dense": (torch.cat([matrices, offsets.unsqueeze(1)], 1), matrices.mT),
        "diagonal": (torch.stack([diagonals, offsets], 1), torch.diag_embed(diagonals)),
    }
    for maps, full in forms.values():
        for most in (1, 2**25):
            with emulated():
                starts = scan_starts(plan, chunks, maps.to(DEVICE), first.to(DEVICE), most).cpu()
            for sample, length in enumerate(lengths):
                runs = chunks.table[:length, sample].tolist()
                states = reference.linear_recurrence(full[runs][:, None], offsets[runs][:, None], first[sample][None])
                close(starts[runs], torch.cat([first[sample][None], states[:-1, 0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("size", [1, 33])
def test_layers(kind: str, size: int, dtype: torch.dtype) -> None:
    check(kind, size, (6, 3), dtype, schedule="blelloch")
    check(kind, size, (5, 3), dtype, [5, 2, 1], schedule=schedules.blelloch(6, 1))


def test_samples_that_are_solved_after_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_ELEMENTS", 2 * 11 * 5 * 6)
    check("RNN", 5, (11, 7), torch.float64, schedule="blelloch")


def test_large_matrices() -> None:
    A, b = torch.randn(4, 1, 130, 130) / 12, torch.randn(4, 2, 130)
    with emulated():
        h = jacsparse.linear_recurrence(Dense(A.to(DEVICE)), b.to(DEVICE), schedule="blelloch")
    close(
        h, reference.linear_recurrence(A.double().expand(-1, 2, -1, -1), b.double(), torch.zeros(2, 130).double()), 1e-5
    )


def test_what_equal_steps_round_does_not_add_up() -> None:
    """The maps of steps are in float64: a state has the roundings of one step, and of the state before it."""
    time, n, eps = 2000, 3, torch.finfo(torch.float32).eps
    angle = torch.tensor(0.3)
    weight = torch.eye(n)
    weight[:2, :2] = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).reshape(2, 2)
    d, b = torch.full((time, 1, n), 1 - 2.0**-10), torch.rand(time, 1, n)
    with emulated():
        A = Scaled(weight.to(DEVICE), d.to(DEVICE))
        actual = jacsparse.linear_recurrence(A, b.to(DEVICE), schedule="blelloch")
    full = (weight.double() * d.double()[0, 0])[None, None].expand(time, 1, -1, -1)
    expected = reference.linear_recurrence(full, b.double(), torch.zeros(1, n, dtype=torch.float64))
    assert (actual.cpu() - expected).abs().amax() <= 2 * (n + 2) * eps * expected.abs().amax()


def test_a_sample_that_overflows_harms_no_other() -> None:
    """Products of 16 steps and more overflow, of a state that stays zero."""
    d = torch.full((60, 3, 4), 0.5)
    d[:, 1] = 1e25
    b, reports = torch.randn(60, 3, 4), list[Any]()
    b[:, 1] = 0
    for form in (Diagonal, lambda d: Dense(torch.diag_embed(d))):
        with emulated():
            h = jacsparse.linear_recurrence(form(d.to(DEVICE)), b.to(DEVICE), schedule="blelloch", reports=reports)
        assert not h[:, 1].any()
        close(
            h, reference.linear_recurrence(torch.diag_embed(d.double()), b.double(), torch.zeros(3, 4).double()), 1e-6
        )
        report = reports.pop().read()
        assert report.methods == ["blelloch", "sequential"] and report.fallback_samples == 1


def test_copies_in_float64() -> None:
    arrays = [torch.randn(3, 5), None, torch.randn(1000), torch.empty(3, 0), torch.randn(7, 2)]
    with emulated():
        copies = widened(*(each if each is None else each.to(DEVICE) for each in arrays))
    for each, copy in zip(arrays, copies, strict=True):
        assert copy is None if each is None else torch.equal(copy.cpu(), each.to(copy.dtype))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_level_has_what_it_reads(name: str) -> None:
    levels = levels_of(SCHEDULES[name](23))
    made, reached = set[int](), {0}
    for first, matrices, states in levels.levels:
        of_matrices, of_states = (
            levels.steps[first:][:matrices].tolist(),
            levels.steps[first + matrices :][:states].tolist(),
        )
        # Maps of steps have negative numbers, and a state that is copied is no product.
        later = [step[1] for step in (*of_matrices, *of_states) if step[0] >= 0]
        assert {number for number in (*later, *(step[2] for step in of_matrices)) if number >= 0} <= made
        assert {step[2] for step in of_states} <= reached
        made.update(step[0] for step in of_matrices)
        reached.update(step[0] + 1 for step in of_states)
    assert (len(made), len(reached)) == (levels.matrices, levels.states + 1)


class _Counting(Fibers):
    """Counts launches."""

    launches = 0

    def launch(self, launch: Any) -> None:
        self.launches += 1
        super().launch(launch)


def nodes_of_gradients(kind: str, schedule: str, time: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The nodes of a layer's recurrence of gradients, as a graph has them."""
    layer, counted = getattr(jacsparse.nn, kind)(4, 4, schedule=schedule, forward="sequential"), list[int]()
    counting, solve = _Counting(), LayerPass.solve_backward

    def count(*arguments: Any) -> Any:
        before = counting.launches
        with _Operators() as operators:
            result = solve(*arguments)
        kernels = sum(number for name, number in operators.counts.items() if name not in _NO_KERNELS)
        counted.append(counting.launches - before + kernels)
        return result

    monkeypatch.setattr(LayerPass, "solve_backward", count)
    with backend(counting):
        loss = layer(torch.randn(time, 2, 4).requires_grad_())[0].sum()
        # The first time arrays are copied to the device.
        for _ in range(2):
            loss.backward(retain_graph=True)
    return counted[-1]


@pytest.mark.skipif(ON_GPU, reason="counts launches of the harness")
@pytest.mark.parametrize("kind", ["RNN", "GRU"])
@pytest.mark.parametrize("time", [2, 45, 64])
def test_a_level_is_a_node(kind: str, time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = schedules.blelloch(time + 1).complexity(4 * time).steps
    assert nodes_of_gradients(kind, "blelloch", time, monkeypatch) <= levels + 6


@pytest.mark.skipif(ON_GPU, reason="counts launches of the harness")
@pytest.mark.parametrize("kind", ["RNN", "GRU"])
@pytest.mark.parametrize(("schedule", "most"), [("chunked:8", 7), ("chunked:1", 9)])
def test_nodes_of_chunks(kind: str, schedule: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nodes_of_gradients(kind, schedule, 40, monkeypatch) == most
