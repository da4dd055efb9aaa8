"""Cells of one's own on a device, by kernels printed of their steps; and changed steps of known cells."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from jacsparse.recurrence import CELLS, Cell, Weights
from jacsparse.recurrence.cells.cell import Saved
from jacsparse.recurrence.cells.gru import GruCell
from jacsparse.recurrence.cells.lstm import LstmCell
from jacsparse.recurrence.cells.rnn import RnnCell
from jacsparse.recurrence.recurrent import Recurrent
from jacsparse.recurrence.reference import recurrent_layer
from jacsparse.recurrence.sequences import Sequences
from tests.cuda.harness import DEVICE, emulated, took_small_kernels
from tests.recurrence.test_cells_and_solvers import MGU, Leaky, stepped


def gradients(layer: Recurrent, x: torch.Tensor, lengths: list[int] | None) -> list[torch.Tensor]:
    """Outputs, and the gradients of a loss of them: by the input, and by each weight."""
    leaf = x.to(DEVICE).requires_grad_()
    with emulated():
        given: Any = leaf if lengths is None else pack_padded_sequence(leaf, lengths)
        output = layer(given)[0]
        outputs = output if lengths is None else output.data
        found = torch.autograd.grad(outputs.square().sum(), [leaf, *layer.parameters()])
    return [each.cpu() for each in (outputs, *found)]


def expected(layer: Recurrent, x: torch.Tensor) -> list[torch.Tensor]:
    """As `gradients`, by autograd through the loop over single steps, in float64."""
    layer, leaf = layer.cpu().double(), x.double().requires_grad_()
    output = torch.stack([stepped(layer, leaf[:, sample]) for sample in range(x.shape[1])], dim=1)
    return [output, *torch.autograd.grad(output.square().sum(), [leaf, *layer.parameters()])]


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (20, {}),
        (5, {"schedule": "relaxed:6", "forward": "relaxed:2"}),
        (40, {}),
        (5, {"schedule": "chunked:5", "forward": "newton"}),
        (5, {"schedule": "blelloch"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [MGU, Leaky])
def test_cells_of_ones_own(kind: type[Recurrent], size: int, options: dict[str, str]) -> None:
    torch.manual_seed(0)
    layer = kind(3, size, bidirectional=True, num_layers=2, chunk=6, **options).to(DEVICE)
    x = torch.randn(23, 2, 3)
    actual = gradients(layer, x, None)
    small = size <= 32 and options.get("schedule", "auto").partition(":")[0] in ("auto", "relaxed")
    assert took_small_kernels(layer) == small
    assert all("no kernels" not in report.reason for report in layer.reports)
    for one, other in zip(actual, expected(layer, x), strict=True):
        assert (one - other).abs().max() <= 1e-5 * max(1.0, other.abs().max().item())


@pytest.mark.parametrize("kind", [MGU, Leaky])
def test_packed_sequences(kind: type[Recurrent]) -> None:
    torch.manual_seed(0)
    layer = kind(3, 5).to(DEVICE)
    x = torch.randn(9, 2, 3)
    actual = gradients(layer, x, [9, 4])[0]
    reference = expected(layer, x)[0]
    assert torch.allclose(actual[:8].double(), reference[:4].flatten(0, 1), atol=1e-6)
    assert torch.allclose(actual[8:].double(), reference[4:, 0], atol=1e-6)


class NormalisedCell(Cell):
    """Of which all elements of a state meet in each."""

    mode, gates = "NORMALISED", 1

    def step(
        self, input_projection: torch.Tensor, recurrent_projection: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        return torch.softmax(input_projection + recurrent_projection, dim=1)


class Normalised(Recurrent):
    cell = NormalisedCell()


def test_a_cell_without_kernels_says_why() -> None:
    torch.manual_seed(0)
    layer = Normalised(3, 5).to(DEVICE)
    x = torch.randn(7, 2, 3)
    actual = gradients(layer, x, None)
    reason = r"no kernels are printed of the step of NORMALISED, which calls aten\._softmax"
    assert len(layer.reports) == 2
    for report in layer.reports:
        assert re.match(reason, report.reason)
    for one, other in zip(actual, [each.float() for each in expected_of_a_direction(layer, x)], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def expected_of_a_direction(layer: Recurrent, x: torch.Tensor) -> list[torch.Tensor]:
    """As `expected`, of a layer of one direction."""
    layer, leaf = layer.cpu().double(), x.double().requires_grad_()
    weights = tuple(layer.parameters())
    output, _ = recurrent_layer(layer.cell, leaf, leaf.new_zeros(x.shape[1], layer.hidden_size), weights, reverse=False)
    return [output, *torch.autograd.grad(output.square().sum(), [leaf, *weights])]


Tensors = tuple[torch.Tensor, ...]


def rnn(x: torch.Tensor, p: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x - p)


def rnn_sigmoid(x: torch.Tensor, p: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x + p)


def gru(x: torch.Tensor, p: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The other gate weighs the state."""
    (r, z, n), (of_r, of_z, of_n) = x.chunk(3, dim=1), p.chunk(3, dim=1)
    candidate = torch.tanh(n + torch.sigmoid(z + of_z) * of_n)
    return candidate + torch.sigmoid(r + of_r) * (state - candidate)


def gru_outside(x: torch.Tensor, p: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The reset gate is outside the product."""
    (r, z, n), (of_r, of_z, of_n) = x.chunk(3, dim=1), p.chunk(3, dim=1)
    candidate = torch.tanh(torch.sigmoid(r + of_r) * (n + of_n))
    return candidate + torch.sigmoid(z + of_z) * (state - candidate)


def lstm(x: torch.Tensor, p: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The forget gate is the input gate's complement."""
    enter, _, fresh, leave = (x + p).chunk(4, dim=1)
    c = (1 - torch.sigmoid(enter)) * state.chunk(2, dim=1)[1] + torch.sigmoid(enter) * torch.tanh(fresh)
    return torch.cat([torch.sigmoid(leave) * torch.tanh(c), c], dim=1)


def lstm_shown(x: torch.Tensor, p: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The output is the cell's own state without a tanh."""
    enter, forget, fresh, leave = (x + p).chunk(4, dim=1)
    c = torch.sigmoid(forget) * state.chunk(2, dim=1)[1] + torch.sigmoid(enter) * torch.tanh(fresh)
    return torch.cat([torch.sigmoid(leave) * c, c], dim=1)


MUTATIONS = [
    ("RNN", RnnCell, rnn),
    ("RNN", RnnCell, rnn_sigmoid),
    ("GRU", GruCell, gru),
    ("GRU", GruCell, gru_outside),
    ("LSTM", LstmCell, lstm),
    ("LSTM", LstmCell, lstm_shown),
]


@pytest.mark.parametrize(("kind", "cell", "step"), MUTATIONS, ids=lambda each: getattr(each, "__name__", each))
def test_a_changed_step_is_noticed_on_a_device(kind: str, cell: Any, step: Any) -> None:
    """The kernels that are printed of it give other numbers than torch.nn's layer."""
    torch.manual_seed(0)
    changed = type("Changed", (cell,), {"step": lambda self, *tensors: step(*tensors)})()
    layer_type = type("Layer", (Recurrent,), {"cell": changed})
    reference = getattr(nn, kind)(3, 5)
    x = torch.randn(9, 2, 3)
    leaf = x.clone().requires_grad_()
    output = reference(leaf)[0]
    right = [output, *torch.autograd.grad(output.square().sum(), [leaf, *reference.parameters()])]
    # Those of small states, and of one cell those of others.
    for schedule in ("auto", *(["chunked:3"] if step is gru else [])):
        layer = layer_type(3, 5, schedule=schedule)
        layer.load_state_dict(reference.state_dict())
        actual = gradients(layer.to(DEVICE), x, None)
        for one, other in zip(actual, right, strict=True):
            assert (one - other).abs().max() > 1e-2 * other.abs().max()


@pytest.mark.parametrize(("kind", "cell", "step"), MUTATIONS, ids=lambda each: getattr(each, "__name__", each))
def test_a_changed_step_is_noticed_on_the_cpu(kind: str, cell: Any, step: Any) -> None:
    """A loop over it gives other numbers than the kernels, as it does not where nothing is changed."""
    torch.manual_seed(0)
    changed = type("Changed", (cell,), {"step": lambda self, *tensors: step(*tensors)})()
    weights = tuple(getattr(nn, kind)(3, 5, dtype=torch.float64).parameters())
    x, initial = torch.randn(9, 2, 3).double(), torch.zeros(2, changed.states * 5).double()
    outputs = []
    for one in (changed, CELLS[changed.mode]):
        loop = recurrent_layer(one, x, initial, weights, reverse=False)[0].detach()
        outputs.append((loop - kernels(one, x, initial, weights)).abs().max() / loop.abs().max())
    assert outputs[0] > 1e-2 and outputs[1] < 1e-12


def kernels(cell: Cell, x: torch.Tensor, initial: torch.Tensor, parameters: Tensors) -> torch.Tensor:
    """The outputs by the CPU's kernels of a cell."""
    weights = Weights(*(each.detach() for each in parameters))
    sequences = Sequences.equal(len(x), x.shape[1])
    rows = x.reshape(-1, x.shape[2])
    saved = Saved(
        rows.new_empty(len(rows), weights.size), rows.new_empty(len(rows), cell.saved_vectors * weights.size), initial
    )
    cell.forward(sequences.whole(1), cell.enter(rows, weights), weights, initial, saved)
    return saved.output.view(*x.shape[:2], -1)


def test_a_layer_of_its_own_kind_learns_on_a_device() -> None:
    """A minimal gated unit in training: its loss falls."""
    torch.manual_seed(0)
    layer, head = MGU(2, 8).to(DEVICE), nn.Linear(8, 1).to(DEVICE)
    x = torch.randn(12, 16, 2).to(DEVICE)
    target = x.sum(dim=(0, 2), keepdim=True)[0] / 5
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=0.02)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        with emulated():
            loss = nn.functional.mse_loss(head(layer(x)[1][0]), target)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
