"""Affine recurrences by any schedule's products, against a plain loop; and layers that are solved so."""

from __future__ import annotations

import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import jacsparse
from jacsparse import Pattern, schedule
from jacsparse.affine import DenseMaps, DiagonalMaps, SparseMaps
from jacsparse.recurrence import Dense, Report, reference
from jacsparse.recurrence.tree_scan import scan_states
from jacsparse.schedule import Schedule
from tests.helpers import close

SCHEDULES = {
    "linear": schedule.linear,
    "blelloch": schedule.blelloch,
    "blelloch:0": lambda n: schedule.blelloch(n, 0),
    "blelloch:1": lambda n: schedule.blelloch(n, 1),
    "blelloch:2": lambda n: schedule.blelloch(n, 2),
    "chunked": lambda n: schedule.chunked(n, 3),
}


def sparse_matrices(steps: int, batch: int, n: int, seed: int) -> tuple[Pattern, torch.Tensor, torch.Tensor]:
    """A pattern, values ``(nnz, steps, batch)`` and the matrices in full, ``(steps, batch, n, n)``."""
    pattern = Pattern.from_scipy(scipy.sparse.random(n, n, 0.5, format="csr", random_state=seed))
    values = torch.randn(pattern.nnz, steps, batch, dtype=torch.float64)
    full = torch.zeros(steps, batch, n, n, dtype=torch.float64)
    full[:, :, pattern.rows.tolist(), pattern.indices.tolist()] = values.permute(1, 2, 0)
    return pattern, values, full


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 40), st.integers(0, 3), st.integers(1, 5), st.integers(0, 99))
@settings(max_examples=60)
def test_every_schedule_gives_the_states_of_a_loop(name: str, steps: int, batch: int, n: int, seed: int) -> None:
    torch.manual_seed(seed)
    plan = SCHEDULES[name](steps + 1)
    pattern, values, matrices = sparse_matrices(steps, batch, n, seed)
    offsets, state = torch.randn(steps, batch, n, dtype=torch.float64), torch.randn(batch, n, dtype=torch.float64)
    expected = torch.cat([state[None], reference.linear_recurrence(matrices, offsets, state)])
    close(scan_states(plan, DenseMaps(matrices.transpose(2, 3), offsets), state), expected, 1e-10)
    columns = SparseMaps(pattern, values, offsets.permute(2, 0, 1).contiguous())
    close(scan_states(plan, columns, state.T.contiguous()), expected.permute(2, 0, 1), 1e-10)
    diagonals = matrices.diagonal(dim1=2, dim2=3)
    expected = torch.cat([state[None], reference.linear_recurrence(torch.diag_embed(diagonals), offsets, state)])
    close(scan_states(plan, DiagonalMaps(diagonals, offsets), state), expected, 1e-10)


@pytest.mark.parametrize("steps", range(1, 12))
def test_all_steps_as_one_map(steps: int) -> None:
    torch.manual_seed(steps)
    pattern, values, matrices = sparse_matrices(steps, 2, 4, steps)
    offsets, state = torch.randn(steps, 2, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    expected = reference.linear_recurrence(matrices, offsets, state)[-1]
    close(DenseMaps(matrices.transpose(2, 3), offsets).composed().apply(state)[0], expected, 1e-10)
    columns = SparseMaps(pattern, values, offsets.permute(2, 0, 1).contiguous())
    close(columns.composed().apply(state.T[:, None].contiguous())[:, 0], expected.T, 1e-10)
    diagonals = matrices.diagonal(dim1=2, dim2=3)
    expected = reference.linear_recurrence(torch.diag_embed(diagonals), offsets, state)[-1]
    close(DiagonalMaps(diagonals, offsets).composed().apply(state)[0], expected, 1e-10)


@pytest.mark.parametrize(
    ("plan", "method"),
    [
        ("blelloch:2", "blelloch"),
        ("linear", "sequential"),
        (schedule.blelloch(31, 3), "blelloch"),
        (schedule.chunked(31, 4), "chunked"),
        (schedule.linear(31), "sequential"),
        (schedule.cyclic_reduction(31), "cyclic_reduction"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_layers_take_schedules_and_their_names(kind: str, plan: Schedule | str, method: str) -> None:
    reference_layer = getattr(nn, kind)(3, 4).double()
    layer = getattr(jacsparse.nn, kind).of(reference_layer, schedule=plan)
    x = torch.randn(30, 2, 3, dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad(each(x)[0].square().sum(), list(each.parameters())) for each in (layer, reference_layer)
    )
    for one, other in zip(ours, theirs, strict=True):
        close(one, other, 1e-10)
    report = layer.reports[1]
    assert report.methods == [method] and report.schedule is not None
    assert report.schedule.name == (plan if isinstance(plan, str) else plan.name)
    assert report.schedule.n == 31


def test_a_schedule_for_other_steps() -> None:
    layer = jacsparse.nn.GRU(3, 4, schedule=schedule.blelloch(30))
    with pytest.raises(ValueError, match="the schedule is for 30 stages, but 30 steps and a first state are 31; make"):
        layer(torch.randn(30, 2, 3))
    layer.schedule = schedule.linear(5)
    with pytest.raises(ValueError, match="the schedule is for 5 stages, but 30 steps"):
        layer(torch.randn(30, 2, 3))


def test_linear_recurrences_take_schedules() -> None:
    A, b = torch.randn(20, 2, 3, 3, dtype=torch.float64) / 2, torch.randn(20, 2, 3, dtype=torch.float64)
    reports: list[Report] = []
    for plan in ("blelloch:1", schedule.blelloch(21, 2)):
        states = jacsparse.linear_recurrence(Dense(A), b, schedule=plan, reports=reports)
        close(states, reference.linear_recurrence(A, b, b.new_zeros(2, 3)), 1e-10)
    assert [report.schedule and report.schedule.name for report in reports] == ["blelloch:1", "blelloch:2"]
