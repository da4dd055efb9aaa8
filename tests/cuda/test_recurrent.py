"""The kernels of recurrent cells, run fiber by fiber on the CPU, against torch.nn's layers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import jacsparse
from jacsparse.recurrence.layer_autograd import _outer
from tests.cuda.harness import DEVICE, emulated

KINDS: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "RNN": (jacsparse.nn.RNN, nn.RNN, {}),
    "RNN relu": (jacsparse.nn.RNN, nn.RNN, {"nonlinearity": "relu"}),
    "GRU": (jacsparse.nn.GRU, nn.GRU, {}),
    "LSTM": (jacsparse.nn.LSTM, nn.LSTM, {}),
}
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}


def gradients(
    layer: Any, x: torch.Tensor, lengths: list[int] | None, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Outputs, last states, and the gradients of a loss of both: by the input, and by each weight."""
    leaf = x.to(next(layer.parameters()).device).clone().requires_grad_()
    with emulated():
        output, last = layer(leaf if lengths is None else pack_padded_sequence(leaf, lengths))
        outputs = output if lengths is None else output.data
        states = torch.cat(last) if isinstance(last, tuple) else last
        return [outputs, states, *torch.autograd.grad(loss(outputs, states), [leaf, *layer.parameters()])]


def check(
    kind: str,
    size: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    lengths: list[int] | None = None,
    scale: float = 1.0,
    **options: Any,
) -> list[Any]:
    """Compares outputs, last states and all gradients with `torch.nn`'s in float64; the reports of how they were found.

    Its sums over long sequences in float32 are further from these than the tolerance.
    """
    ours, theirs, more = KINDS[kind]
    reference = theirs(3, size, bidirectional=True, **more).to(dtype)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.mul_(scale if "weight_hh" in name else 1)
    layer = ours(3, size, bidirectional=True, **more, **options).to(dtype)
    layer.load_state_dict(reference.state_dict())
    x = torch.randn(*shape, 3, dtype=dtype)

    def loss(outputs: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        weights = torch.linspace(-1, 1, outputs.numel(), dtype=dtype, device=outputs.device).to(outputs.dtype)
        return (outputs * weights.reshape(outputs.shape)).sum() + states.square().sum()

    results = gradients(layer.to(DEVICE), x, lengths, loss), gradients(reference.double(), x.double(), lengths, loss)
    for one, other in zip(*results, strict=True):
        largest = max(1e-30, other.abs().max().item())
        assert (one.cpu() - other).abs().max() <= TOLERANCE[dtype] * largest
    reports: list[Any] = layer.reports
    return reports


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 20, 32, 33, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_lengths(kind: str, size: int, dtype: torch.dtype) -> None:
    check(kind, size, (7, 3), dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_packed(kind: str) -> None:
    check(kind, 5, (9, 4), torch.float64, [9, 7, 7, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_and_one_sample(kind: str) -> None:
    check(kind, 20, (1, 1), torch.float32)


def test_states_that_are_too_large() -> None:
    with emulated(), pytest.raises(ValueError, match="hidden_size is 129; on CUDA devices states have at most 128"):
        jacsparse.nn.GRU(3, 129, schedule="sequential").to(DEVICE)(torch.randn(2, 1, 3, device=DEVICE))
    layer = jacsparse.nn.GRU(3, 129).to(DEVICE)
    with emulated():
        layer(torch.randn(2, 1, 3, device=DEVICE))[0].sum().backward()
    assert [report.methods for report in layer.reports] == [["torch.nn"], ["torch.nn"]]


@pytest.mark.parametrize("lengths", [None, [200, 131, 7]])
@pytest.mark.parametrize("size", [5, 40])
@pytest.mark.parametrize("schedule", ["sequential", "chunked", "relaxed"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_vanish(kind: str, schedule: str, size: int, lengths: list[int] | None) -> None:
    """Of a loss on last states: once the gradient is zero, so are those of the gates, in memory that held something."""
    # With other numbers all elements of a small state may be dead at the last step.
    torch.manual_seed(0)
    ours, theirs, more = KINDS[kind]
    reference, x = theirs(3, size, **more), torch.randn(200, 3, 3)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.mul_(0.02 if "weight_hh" in name else 1)
            # Gates that forget soon: GRU's z, LSTM's f.
            if "bias" in name and kind in ("GRU", "LSTM"):
                parameter[size : 2 * size] -= 3
    layer = ours(3, size, schedule=schedule, chunk=50, **more)
    layer.load_state_dict(reference.state_dict())
    results, expected = (
        gradients(run, x, lengths, lambda _, states: states.sum())[2:] for run in (layer.to(DEVICE), reference)
    )
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-6 * other.abs().max().item())
    of_input = results[0].cpu()
    assert not of_input[:60, 0].any() and of_input[-1 if lengths is None else lengths[0] - 1, 0].any()


def test_a_nan_is_seen_though_gradients_vanish() -> None:
    layer = jacsparse.nn.RNN(3, 5, schedule="sequential").to(DEVICE)
    x = torch.randn(100, 2, 3)
    x[3, 1] = float("nan")
    leaf = x.to(DEVICE).requires_grad_()
    with emulated():
        gradient = torch.autograd.grad(layer(leaf)[1].sum(), leaf)[0].cpu()
    assert gradient[-1, 1].isnan().any() and not gradient[:, 0].isnan().any()


@pytest.mark.parametrize("schedule", ["sequential", "chunked", "blelloch", "planned", "relaxed"])
@pytest.mark.parametrize("kind", KINDS)
def test_schedules(kind: str, schedule: str) -> None:
    check(kind, 5, (11, 3), torch.float64, schedule=schedule, chunk=4)
    check(kind, 5, (9, 3), torch.float64, [9, 6, 1], schedule=schedule, chunk=4)


@pytest.mark.parametrize("forward", ["parallel", "relaxed", "newton"])
@pytest.mark.parametrize("kind", KINDS)
def test_parallel_forward(kind: str, forward: str) -> None:
    check(kind, 5, (23, 2), torch.float64, forward=forward, chunk=4)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 4, 20, 32, 33, 64, 70, 128])
@pytest.mark.parametrize("kind", ["RNN", "GRU"])
def test_transfer_matrices(kind: str, size: int, dtype: torch.dtype) -> None:
    check(kind, size, (5, 1), dtype, schedule="chunked", chunk=2)
    check(kind, size, (5, 2), dtype, [5, 2], schedule="chunked", chunk=3)


def test_transfer_matrices_of_large_states_by_unit_vectors() -> None:
    check("LSTM", 70, (3, 1), torch.float64, schedule="chunked", chunk=2)


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_that_settle(kind: str) -> None:
    reports = check(kind, 5, (60, 2), torch.float32, [60, 31], 0.05, schedule="relaxed", forward="parallel", chunk=15)
    assert len(reports) == 4
    for report in reports:
        assert report.methods[0] == "relaxed" and report.sweeps == len(report.defects) <= 4
        assert report.defects[-1] <= 8 * torch.finfo(torch.float32).eps or report.fallback_steps > 0
    assert any(report.fallback_steps == 0 for report in reports)


@pytest.mark.parametrize("forward", ["parallel", "relaxed", "newton"])
@pytest.mark.parametrize("kind", KINDS)
def test_guesses_in_vain(kind: str, forward: str) -> None:
    reports = check(kind, 5, (40, 3), torch.float64, [40, 17, 3], 3.0, schedule="relaxed:3", forward=forward, chunk=3)
    assert any("sequential" in report.methods and report.fallback_steps > 0 for report in reports)


@pytest.mark.parametrize("forward", ["parallel", "newton"])
def test_a_sample_that_is_no_number_harms_no_other(forward: str) -> None:
    layer = jacsparse.nn.GRU(3, 5, forward=forward, schedule="relaxed", chunk=4).double().to(DEVICE)
    sequential = jacsparse.nn.GRU(3, 5, schedule="sequential").double().to(DEVICE)
    sequential.load_state_dict(layer.state_dict())
    x = torch.randn(30, 3, 3, dtype=torch.float64).to(DEVICE)
    x[7, 1] = float("nan")
    with emulated():
        actual, expected = (run(x.clone().requires_grad_())[0] for run in (layer, sequential))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert actual[8:, 1].isnan().all() and not actual[:, [0, 2]].isnan().any()


def test_auto_guesses_where_samples_are_few_and_long() -> None:
    # A weight's gradient is a sum of 1,300 terms of both signs, and off by up to 1,300 eps of their absolute values.
    # These are 8e-5 of them in float32: more than the tolerance allows where the sum is smaller than they are. In
    # float64 it would have to be 600 times smaller in all elements; random signs make it some 36 times smaller.
    reports = check("RNN", 5, (1300, 1), torch.float64)
    assert [report.methods[0] for report in reports if report.recurrence == "backward"] == ["relaxed", "relaxed"]
    assert all("multiprocessors" in report.reason for report in reports if report.recurrence == "backward")


@pytest.mark.parametrize("rows", [1, 2047, 2048, 5003])
def test_products_of_many_rows(rows: int) -> None:
    left, right = (torch.randn(rows, 2 * size, dtype=torch.float64).to(DEVICE)[:, :size] for size in (5, 7))
    with emulated():
        actual = _outer(left, right)
    torch.testing.assert_close(actual, left.T @ right, rtol=1e-12, atol=1e-10)


def test_reports_can_be_copied_and_kept() -> None:
    layer = jacsparse.nn.GRU(3, 5, forward="parallel", schedule="relaxed", chunk=4).to(DEVICE)
    with emulated():
        layer(torch.randn(30, 2, 3).to(DEVICE))[0].sum().backward()
    others = copy.deepcopy(layer).reports, pickle.loads(pickle.dumps(layer)).reports
    assert layer._pass.reports[0].pending is None
    for other in others:
        assert other == layer.reports and all(report.sweeps == len(report.defects) > 0 for report in other)


@pytest.mark.parametrize("forward", ["parallel", "newton"])
def test_no_samples(forward: str) -> None:
    layer = jacsparse.nn.RNN(3, 5, forward=forward, schedule="relaxed", chunk=4).to(DEVICE)
    with emulated():
        layer(torch.randn(30, 0, 3).to(DEVICE))[0].sum().backward()
    assert all(report.fallback_samples == 0 for report in layer.reports)
