"""The kernels of linear recurrences, run fiber by fiber on the CPU, against the CPU's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from jacsparse.patterns import Full, Pattern

import jacsparse
from jacsparse.recurrence import Dense, Diagonal, Scaled, Sparse
from jacsparse.recurrence import recurrences_cuda as _cuda
from tests.cuda.harness import DEVICE, emulated
from tests.helpers import random_pattern, reflections, uniform

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-11}


def matrices(
    form: str, time: int, batch: int, size: int, dtype: torch.dtype, scale: float
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """What makes matrices of a form, and tensors for it: products of many neither vanish nor grow beyond bounds."""
    if form == "dense":
        return Dense, [scale * torch.randn(time, batch, size, size, dtype=dtype) / size**0.5]
    if form == "diagonal":
        return Diagonal, [scale * torch.rand(time, batch, size, dtype=dtype)]
    if form == "scaled":
        weight = scale * torch.randn(size, size, dtype=dtype) / size**0.5
        return Scaled, [weight, torch.rand(time, batch, size, dtype=dtype)]
    pattern = random_pattern(size, size, 0.4, 5)
    values = scale * torch.randn(time, pattern.nnz, batch, dtype=dtype) / size**0.5
    return lambda tensor: Sparse(pattern, tensor), [values]


def check(
    form: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    schedule: str,
    *,
    shared: bool = False,
    reverse: bool = False,
    scale: float = 1.0,
) -> list[Any]:
    time, batch, size = shape
    make, tensors = matrices(form, time, 1 if shared else batch, size, dtype, scale)
    inputs = [*tensors, torch.randn(time, batch, size, dtype=dtype), torch.randn(batch, size, dtype=dtype)]
    weigh, reports = torch.randn(time, batch, size, dtype=dtype), []

    def solved(device: torch.device, schedule: str, reports: list[Any] | None) -> list[torch.Tensor]:
        leaves = [tensor.detach().to(device).clone().requires_grad_() for tensor in inputs]
        *tensors_of_A, added, start = leaves
        told = {"reverse": reverse, "schedule": schedule, "reports": reports}
        h = jacsparse.linear_recurrence(make(*tensors_of_A), added, start, **told)
        return [h, *torch.autograd.grad((h * weigh.to(device)).sum(), leaves)]

    with emulated():
        results = solved(DEVICE, schedule, reports)
    for one, other in zip(results, solved(torch.device("cpu"), "linear", None), strict=True):
        largest = max(1e-30, other.abs().max().item()) if other.numel() else 1.0
        assert not other.numel() or (one.cpu() - other).abs().max() <= TOLERANCE[dtype] * largest
    return [report.read() for report in reports]


FORMS = ("dense", "diagonal", "scaled", "sparse")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 20, 32, 33, 70])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, size: int, dtype: torch.dtype) -> None:
    check(form, (5, 3, size), dtype, "linear")
    check(form, (7, 2, size), dtype, "chunked:3", shared=True, reverse=True)


@pytest.mark.parametrize("schedule", ["linear", "chunked:4", "blelloch", "relaxed:4", "auto"])
@pytest.mark.parametrize("form", FORMS)
def test_schedules(form: str, schedule: str) -> None:
    for shape, shared, reverse in (((11, 3, 5), False, False), ((9, 33, 4), True, True), ((1, 1, 2), False, True)):
        check(form, shape, torch.float64, schedule, shared=shared, reverse=reverse)


@pytest.mark.parametrize("form", ["dense", "scaled"])
@pytest.mark.parametrize("size", [128, 129, 300])
def test_large_states(form: str, size: int) -> None:
    check(form, (3, 1, size), torch.float32, "chunked:2" if size < 300 else "linear")


def test_nothing() -> None:
    for shape in ((0, 2, 3), (4, 0, 3), (4, 2, 0)):
        check("diagonal", shape, torch.float32, "chunked:2")


def test_guesses_that_do_not_settle_are_finished_step_after_step() -> None:
    settled, _ = check("diagonal", (40, 3, 6), torch.float64, "relaxed:10", scale=0.02)
    assert settled.methods == ["relaxed"] and settled.fallback_steps == 0 and settled.sweeps == 2
    assert settled.defects[-1] <= 8 * torch.finfo(torch.float64).eps
    late, back = check("scaled", (40, 3, 6), torch.float64, "relaxed:4", scale=4.0)
    for report in (late, back):
        assert report.methods == ["relaxed", "sequential"] and len(report.defects) == report.sweeps == 4
        # The first chunks, one for each sweep, are right whatever the others are.
        assert report.fallback_samples == 3 and 0 < report.fallback_steps <= 3 * (40 - 4 * 4)


@pytest.mark.parametrize("form", ["diagonal", "scaled", "sparse"])
def test_matrices_that_overflow(form: str) -> None:
    make, tensors = matrices(form, 60, 2, 4, torch.float32, 1.0)
    # What begins from zero stays zero, whatever the matrices grow to.
    tensors[-1] = torch.full_like(tensors[-1], 1e18)
    b = torch.zeros(60, 2, 4)
    reports: list[Any] = []
    with emulated():
        moved = [tensor.to(DEVICE) for tensor in tensors]
        h = jacsparse.linear_recurrence(make(*moved), b.to(DEVICE), schedule="chunked:20", reports=reports)
    assert torch.equal(h.cpu(), torch.zeros(60, 2, 4))
    report = reports[0].read()
    assert report.methods == ["chunked", "sequential"] and report.fallback_steps == 60 * report.fallback_samples == 120


@pytest.mark.parametrize("form", ["dense", "diagonal", "scaled", "sparse"])
def test_what_equal_steps_round_does_not_add_up(form: str) -> None:
    """A state has the roundings of a chunk's steps, of n + 2 operations each, and of the state where it begins."""
    time, n, rng = 10_000, 5, np.random.default_rng(0)
    matrix = torch.from_numpy(reflections(n, 1, rng)).float()
    make: Callable[[torch.dtype], Any] = {
        "dense": lambda dtype: Dense(matrix.to(DEVICE, dtype).expand(time, 1, n, n)),
        "diagonal": lambda dtype: Diagonal(torch.full((time, 1, n), 1 - 2.0**-8 / 3).to(DEVICE, dtype)),
        "scaled": lambda dtype: Scaled(
            (matrix / 0.8).to(DEVICE, dtype), torch.full((time, 1, n), 0.8).to(DEVICE, dtype)
        ),
        "sparse": lambda dtype: Sparse(
            Pattern.of(Full(n, n)), matrix.to(DEVICE, dtype).reshape(1, -1, 1).expand(time, -1, 1)
        ),
    }[form]
    b = uniform(rng, time, 1, n)
    with emulated():
        expected, actual = (
            jacsparse.linear_recurrence(make(dtype), b.to(DEVICE, dtype), schedule=schedule).cpu().double()
            for dtype, schedule in ((torch.float64, "linear"), (torch.float32, "chunked:3"))
        )
    error = ((actual - expected).abs().amax(dim=2) / expected.abs().amax(dim=2)).max()
    assert error <= (3 + 1) * (n + 2) * n**0.5 * torch.finfo(torch.float32).eps / 2


def test_states_that_are_too_large() -> None:
    size = _cuda.WIDEST + 1
    with emulated(), pytest.raises(ValueError, match=f"n is {size}; on CUDA devices states have at most {size - 1}"):
        jacsparse.linear_recurrence(
            Scaled(torch.zeros(size, size, device=DEVICE), torch.zeros(2, 1, size, device=DEVICE)),
            torch.zeros(2, 1, size, device=DEVICE),
        )
