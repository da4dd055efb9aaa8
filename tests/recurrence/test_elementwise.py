"""The elementwise part of a cell: what is derived of `Cell.step`, and what no kernel can be printed of."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from jacsparse.recurrence import CELLS, Cell
from jacsparse.recurrence.cells.elementwise import ElementwiseStep, NotElementwiseError

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def cell_of(step: Step, gates: int = 1, states: int = 1) -> Cell:
    class Stepping(Cell):
        mode = "OWN"

        def step(
            self, input_projection: torch.Tensor, recurrent_projection: torch.Tensor, state: torch.Tensor
        ) -> torch.Tensor:
            return step(input_projection, recurrent_projection, state)

    Stepping.gates, Stepping.states = gates, states
    return Stepping()


@pytest.mark.parametrize(
    ("mode", "saved", "parts", "recurrent"),
    [
        # A tanh's derivative is known from its result.
        ("RNN_TANH", 0, 1, (0,)),
        ("RNN_RELU", 0, 1, (0,)),
        # Equation 4.4 of the thesis: r, z, the candidate, and what r multiplies, which has a gradient of its own.
        ("GRU", 4, 4, (0, 1, 3)),
        # The four gates; the state's tanh is computed again.
        ("LSTM", 4, 4, (0, 1, 2, 3)),
    ],
)
def test_what_is_saved(mode: str, saved: int, parts: int, recurrent: tuple[int, ...]) -> None:
    step = ElementwiseStep.of(CELLS[mode])
    assert (step.saved, step.parts, step.recurrent) == (saved, parts, recurrent)
    assert step is ElementwiseStep.of(CELLS[mode])


def test_gates_in_other_orders() -> None:
    def step(x: torch.Tensor, p: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        (a, b), (c, d) = x.chunk(2, dim=1), p.chunk(2, dim=1)
        return torch.sigmoid(a + d) * torch.tanh(b) + torch.relu(c) * h

    actual = ElementwiseStep.of(cell_of(step, gates=2))
    # The gradient of d is that of a, which comes first; that of c is one more.
    assert actual.recurrent == (2, 0) and actual.parts == 3


def test_constants_and_comparisons_are_printed() -> None:
    def step(x: torch.Tensor, p: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        y = torch.where(x + p > 0.25, 0.5 * (x + p) ** 2, torch.exp(-(x + p)))
        return torch.clamp(y, max=3.0) + h / 7

    source = ElementwiseStep.of(cell_of(step)).source
    assert all(text in source for text in ("T(0.25)", "T(3.0)", "exp(", " ? "))


def test_a_step_that_uses_its_own_results_often_is_read_once() -> None:
    """Of 40 squares each reads the one before twice: paths double with each."""

    def step(x: torch.Tensor, p: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x + p)
        for _ in range(40):
            y = y * y + y * h
        return y

    assert ElementwiseStep.of(cell_of(step)).source.count(" * ") > 80


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda x, p, h: torch.tanh(x + p).roll(1, 1), "reads elements of other places"),
        (lambda x, p, h: torch.tanh(x + p) + h[:, :1], "reads elements of other places"),
        (lambda x, p, h: torch.softmax(x + p, 1), r"calls aten\._softmax"),
        (lambda x, p, h: torch.erfinv(torch.tanh(x + p)), r"calls aten\.erfinv"),
        (lambda x, p, h: torch.tanh(x + p) * torch.tensor(2.0), "reads a tensor that is none of its arguments"),
        (lambda x, p, h: torch.tanh(x + p) @ torch.zeros(20, 20), "fails for vectors of 2 elements"),
        (lambda x, p, h: torch.tanh(x + p) / math.sqrt(h.shape[1]), "depends on how many elements a state has"),
        (lambda x, p, h: torch.cat([torch.tanh(x + p)[:, :2], h[:, 2:]], 1), "places differently|depends on how many"),
        (lambda x, p, h: torch.tanh(x + p).roll(2, 1), "reads elements of other places"),
        (lambda x, p, h: torch.tanh(x + p) if h.sum() > 0 else x + p, "fails for tensors without elements"),
        (lambda x, p, h: torch.tanh(x + p) * h.abs().max().item(), "fails for tensors without elements"),
        (lambda x, p, h: torch.tanh(x + p) * torch.rand(()), "draws random numbers"),
        (lambda x, p, h: torch.tanh(x + p).double().add(1e9).sub(1e9).float(), r"computes in torch\.float64"),
        (lambda x, p, h: {}["none"], "fails for vectors of 2 elements: 'none'"),
        (
            lambda x, p, h: torch.tanh(x + p) * torch.arange(2),
            "treats elements of different places differently|reads a",
        ),
    ],
)
def test_steps_that_have_no_kernels(step: Step, message: str) -> None:
    with pytest.raises(NotElementwiseError, match=message):
        ElementwiseStep.of(cell_of(step))


@pytest.mark.parametrize(
    ("step", "recurrent"),
    [
        (lambda x, p, h: torch.tanh(x + p), (0,)),
        # Gradients are equal; but that of the input alone decides which.
        (lambda x, p, h: torch.where(x > 0, x + p, 0.1 * (x + p)), (1,)),
        (lambda x, p, h: torch.tanh(x + p) * torch.sigmoid(x.detach()), (1,)),
        (lambda x, p, h: torch.tanh(x + p) * torch.sigmoid((x + p).detach()), (0,)),
    ],
)
def test_parts_of_a_gate_that_are_more_than_added_stay_apart(step: Step, recurrent: tuple[int, ...]) -> None:
    assert ElementwiseStep.of(cell_of(step)).recurrent == recurrent


def test_nothing_of_the_callers_is_in_the_step() -> None:
    """Not where it is asked for in a checkpoint, in inference mode or in a transform."""

    def step(x: torch.Tensor, p: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x + p) * torch.tanh(h) + h * h

    expected = ElementwiseStep.of(cell_of(step))
    asked: list[ElementwiseStep] = []

    def ask(x: torch.Tensor) -> torch.Tensor:
        asked.append(ElementwiseStep.of(cell_of(step)))
        return x.sin()

    checkpoint(ask, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    with torch.inference_mode():
        ask(torch.ones(2))
    torch.func.vmap(ask)(torch.ones(2, 3))
    torch.func.grad(lambda x: ask(x).sum())(torch.ones(2))
    assert len(asked) == 5 and all(each == expected for each in asked)


def test_attributes_of_now_are_the_steps() -> None:
    class Scaled(Cell):
        mode, gates = "SCALED", 1

        def __init__(self, factors: list[float]) -> None:
            self.factors = factors

        def step(
            self, input_projection: torch.Tensor, recurrent_projection: torch.Tensor, state: torch.Tensor
        ) -> torch.Tensor:
            return self.factors[0] * torch.tanh(input_projection + recurrent_projection)

    cell = Scaled([0.25])
    assert "T(0.25)" in ElementwiseStep.of(cell).source
    assert cell.frozen == Scaled([0.25]).frozen and cell.frozen != Scaled([0.5]).frozen
    cell.factors[0] = 0.5
    assert "T(0.5)" in ElementwiseStep.of(cell).source
    cell.factors = [0.75]
    assert "T(0.75)" in ElementwiseStep.of(cell).source
