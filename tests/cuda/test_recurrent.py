"""The kernels of recurrent cells, run fiber by fiber on the CPU, against torch.nn's layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import jacsparse
from tests.cuda.harness import DEVICE, emulated

KINDS: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "RNN": (jacsparse.nn.RNN, nn.RNN, {}),
    "RNN relu": (jacsparse.nn.RNN, nn.RNN, {"nonlinearity": "relu"}),
    "GRU": (jacsparse.nn.GRU, nn.GRU, {}),
    "LSTM": (jacsparse.nn.LSTM, nn.LSTM, {}),
}
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}


def check(
    kind: str, size: int, shape: tuple[int, int], dtype: torch.dtype, lengths: list[int] | None = None, **options: Any
) -> None:
    ours, theirs, more = KINDS[kind]
    reference = theirs(3, size, bidirectional=True, **more).to(dtype)
    layer = ours(3, size, bidirectional=True, **more, **options).to(dtype)
    layer.load_state_dict(reference.state_dict())
    x = torch.randn(*shape, 3, dtype=dtype)
    found = []
    for run in (layer.to(DEVICE), reference):
        leaf = x.to(next(run.parameters()).device).clone().requires_grad_()
        given = leaf if lengths is None else pack_padded_sequence(leaf, lengths)
        with emulated():
            output, last = run(given)
            shown = output if lengths is None else output.data
            states = torch.cat(last) if isinstance(last, tuple) else last
            weigh = torch.linspace(-1, 1, shown.numel(), dtype=dtype, device=shown.device).reshape(shown.shape)
            loss = (shown * weigh).sum() + states.square().sum()
            found.append([shown, states, *torch.autograd.grad(loss, [leaf, *run.parameters()])])
    for one, other in zip(*found, strict=True):
        largest = max(1e-30, other.abs().max().item())
        assert (one.cpu() - other).abs().max() <= TOLERANCE[dtype] * largest


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
        jacsparse.nn.GRU(3, 129).to(DEVICE)(torch.randn(2, 1, 3, device=DEVICE))


@pytest.mark.parametrize("schedule", ["linear", "chunked", "blelloch", "planned", "relaxed"])
@pytest.mark.parametrize("kind", KINDS)
def test_schedules(kind: str, schedule: str) -> None:
    check(kind, 5, (11, 3), torch.float64, schedule=schedule, chunk=4)
    check(kind, 5, (9, 3), torch.float64, [9, 6, 1], schedule=schedule, chunk=4)


@pytest.mark.parametrize("forward", ["parallel", "relaxed", "newton"])
@pytest.mark.parametrize("kind", KINDS)
def test_parallel_forward(kind: str, forward: str) -> None:
    check(kind, 5, (23, 2), torch.float64, forward=forward, chunk=4)
