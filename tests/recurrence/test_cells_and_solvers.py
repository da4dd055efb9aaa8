"""Each listed cell and solver against plain loops in float64; and new ones, added as CONTRIBUTING says."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from jacsparse.patterns import UnsupportedOperatorError
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import jacsparse
from jacsparse.recurrence import (
    CELLS,
    SOLVERS,
    Cell,
    Dense,
    Problem,
    Recurrent,
    Report,
    Solver,
    Terms,
    linear_recurrence,
    parse,
)
from jacsparse.recurrence.layer_autograd import run_layer
from jacsparse.recurrence.layer_recurrences import LayerPass
from jacsparse.recurrence.reference import linear_recurrence as looped
from jacsparse.recurrence.reference import recurrent_layer
from jacsparse.recurrence.sequences import Sequences


class MinimalGatedCell(Cell):
    """A minimal gated unit, whose candidate is gated after its product."""

    mode, gates, terms = "MGU", 2, (Terms(gates=(0, 1), states=(0,)),)

    def step(
        self, input_projection: torch.Tensor, recurrent_projection: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        (f, n), (of_f, of_n) = input_projection.chunk(2, dim=1), recurrent_projection.chunk(2, dim=1)
        f = torch.sigmoid(f + of_f)
        return state + f * (torch.tanh(n + f * of_n) - state)


class LeakyCell(Cell):
    """Two vectors of state, of which the second one follows the first one slowly."""

    mode, gates, states, terms = "LEAKY", 1, 2, (Terms(gates=(0,), states=(1,)), Terms(gates=(), states=(0, 1)))

    def step(
        self, input_projection: torch.Tensor, recurrent_projection: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        h, slow = state.chunk(2, dim=1)
        fresh = torch.tanh(input_projection + recurrent_projection + slow)
        return torch.cat([fresh, 0.9 * slow + 0.1 * h], dim=1)


class MGU(Recurrent):
    cell = MinimalGatedCell()


class Leaky(Recurrent):
    cell = LeakyCell()


class OneByOne(Solver):
    """Sample after sample, each step after step."""

    name = "one_by_one"
    solves = frozenset({"linear", "gradients", "states"})

    def solve(self, problem: Problem) -> torch.Tensor:
        runs = problem.sequences.whole(problem.direction)
        problem.report.methods.append(self.name)
        samples = range(len(problem.initial_state))
        ends = [problem.recurrence.run(runs.take(np.array([at])), problem.initial_state[at : at + 1]) for at in samples]
        return torch.cat(ends)


@pytest.fixture(params=[*SOLVERS, OneByOne.name])
def solver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Solver:
    monkeypatch.setitem(SOLVERS, OneByOne.name, OneByOne())
    return SOLVERS[request.param]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("cell", [*CELLS.values(), MinimalGatedCell(), LeakyCell()], ids=lambda cell: cell.mode)
def test_cell_equals_its_steps(cell: Cell, direction: int, bias: bool) -> None:
    time, batch, features, size = 9, 3, 2, 5
    shapes = [(time, batch, features), (batch, cell.states * size), (cell.gates * size, features)]
    shapes += [(cell.gates * size, size), *([(cell.gates * size,)] * 2 if bias else [])]
    tensors = [drawn(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    weights_of_sum = drawn(time, batch, size, seed=8), drawn(batch, cell.states * size, seed=9)

    def gradients(output: torch.Tensor, last: torch.Tensor) -> list[torch.Tensor]:
        total = (output * weights_of_sum[0]).sum() + (last * weights_of_sum[1]).sum()
        return list(torch.autograd.grad(total, tensors))

    x, initial, *parameters = tensors
    parameters += [None] * (4 - len(parameters))
    expected = recurrent_layer(cell, x, initial, tuple(parameters), reverse=direction < 0)
    layer = LayerPass(cell, Sequences.equal(time, batch), direction, parse("sequential", "states"), parse("auto"))
    output, last = run_layer(layer, x.reshape(-1, features), initial, parameters)
    output = output.view(time, batch, size)
    assert close(output, expected[0]) and close(last, expected[1])
    assert all(map(close, gradients(output, last), gradients(*expected)))


def test_solver_equals_a_loop(solver: Solver) -> None:
    time, batch, size = 70, 3, 4
    A, b = 0.3 * drawn(time, batch, size, size), drawn(time, batch, size, seed=1)
    numbered = solver.number is not None and solver.number.word == "STEPS"
    schedule = f"{solver.name}:16" if numbered else solver.name
    if "linear" in solver.solves:
        for reverse in (False, True):
            reports: list[Report] = []
            h = linear_recurrence(Dense(A), b, reverse=reverse, schedule=schedule, reports=reports)
            assert close(h, looped(A, b, b.new_zeros(batch, size), reverse=reverse))
            assert reports[0].methods == [solver.name]
    options = {}
    if "gradients" in solver.solves:
        options["schedule"] = schedule
    if "states" in solver.solves:
        options["forward"] = solver.name
    layer = jacsparse.nn.GRU(2, size, dtype=torch.float64, chunk=16, **options)
    reference = layer.to_torch()
    x = drawn(time, batch, 2)
    expected, computed = ([module(x)[0], *_gradients(module, x)] for module in (reference, layer))
    assert all(map(close, computed, expected))
    forward, backward = layer.reports
    if "gradients" in solver.solves:
        assert backward.methods == [solver.name]
    if "states" in solver.solves:
        assert forward.methods[0] in (solver.name, "relaxed")


@pytest.mark.parametrize("kind", [MGU, Leaky])
def test_solver_of_an_empty_batch(kind: type[Recurrent], solver: Solver) -> None:
    options = {"schedule": solver.name} if "gradients" in solver.solves else {}
    options |= {"forward": solver.name} if "states" in solver.solves else {}
    layer = kind(2, 4, num_layers=2, bidirectional=True, chunk=6, **options)
    x = torch.zeros(40, 0, 2, requires_grad=True)
    output, _ = layer(x)
    assert output.shape == (40, 0, 8)
    gradients = torch.autograd.grad(output.sum(), [x, *layer.parameters()])
    assert gradients[0].shape == x.shape and not any(gradient.any() for gradient in gradients)


def _gradients(module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    output = module(x)[0]
    return list(torch.autograd.grad((output * drawn(*output.shape, seed=5)).sum(), list(module.parameters())))


def test_names_of_solvers_are_listed_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOLVERS, OneByOne.name, OneByOne())
    with pytest.raises(ValueError, match=r"expected one of auto, linear, sequential.*one_by_one, or a Schedule$"):
        jacsparse.nn.GRU(2, 3, schedule="none")
    with pytest.raises(ValueError, match=r"one of auto, sequential, parallel.*one_by_one$"):
        jacsparse.nn.GRU(2, 3, forward="linear")
    with pytest.raises(ValueError, match="schedule is 'one_by_one:3'"):
        jacsparse.nn.GRU(2, 3, schedule="one_by_one:3")


def stepped(layer: Recurrent, x: torch.Tensor) -> torch.Tensor:
    """The outputs of a new layer for one sample ``(time, features)``, by the loop over its steps."""
    x = x.unsqueeze(1)
    names = [name.removeprefix("weight_hh_") for name, _ in layer.named_parameters() if "weight_hh" in name]
    for at in range(layer.num_layers):
        outputs = []
        for name in names[2 * at : 2 * at + 2]:
            parameters = tuple(
                getattr(layer, f"{part}_{name}") for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            initial = x.new_zeros(1, layer.cell.states * layer.hidden_size)
            outputs.append(recurrent_layer(layer.cell, x, initial, parameters, reverse="reverse" in name)[0])
        x = torch.cat(outputs, dim=2)
    return x.squeeze(1)


@pytest.mark.parametrize("kind", [MGU, Leaky])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "chunked", "forward": "parallel"},
        {"schedule": "relaxed:5", "forward": "newton"},
        {"schedule": "blelloch:2", "forward": "relaxed"},
    ],
    ids=str,
)
def test_layer_of_a_new_cell(kind: type[Recurrent], options: dict[str, str]) -> None:
    torch.manual_seed(0)
    layer = kind(2, 4, num_layers=2, bidirectional=True, dtype=torch.float64, chunk=6, **options)
    x, lengths = drawn(23, 3, 2), torch.tensor([23, 7, 15])
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    output = pad_packed_sequence(layer(packed)[0])[0]
    parameters = list(layer.parameters())
    weights = drawn(*output.shape, seed=3)
    expected = torch.zeros_like(output)
    for sample, length in enumerate(lengths):
        expected[:length, sample] = stepped(layer, x[:length, sample])
    assert close(output, expected)
    ours, theirs = (torch.autograd.grad((each * weights).sum(), parameters) for each in (output, expected))
    assert all(map(close, ours, theirs))
    assert len(layer.reports) == 8 and layer.reports[0].layer == "l0"
    assert close(layer(x)[0][:, 0], stepped(layer, x[:, 0]))


def test_layer_of_a_new_cell_is_a_module() -> None:
    torch.manual_seed(0)
    layer = MGU(2, 4, batch_first=True)
    assert layer.weight_hh_l0.shape == (8, 4) and layer.bias_ih_l0.shape == (8,)
    assert all(0 < parameter.abs().max() <= 0.5 for parameter in layer.parameters())
    x = torch.randn(3, 6, 2)
    output, last = layer(x)
    assert output.shape == (3, 6, 4) and torch.equal(last[0], output[:, -1])
    single, _ = layer(x[0])
    assert torch.allclose(single, output[0], atol=1e-6)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    other = MGU(2, 4, batch_first=True)
    other.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    for twin in (other, copy.deepcopy(layer), layer.float()):
        assert torch.equal(twin(x)[0], output)
    with pytest.raises(TypeError, match=r"torch\.nn has no layer with the cell of MGU"):
        layer.to_torch()
    with pytest.raises(TypeError, match=r"torch\.nn has no layer with the cell of MGU"):
        MGU.of(torch.nn.GRU(2, 4))
    with pytest.raises(TypeError, match="hx is a Tensor; expected a pair of tensors"):
        Leaky(2, 4)(torch.randn(5, 3, 2), torch.zeros(1, 3, 4))
    model = torch.nn.ModuleDict({"new": layer, "old": torch.nn.RNN(2, 3)})
    assert jacsparse.nn.convert(model)["new"] is layer and jacsparse.nn.convert(model, to="torch")["new"] is layer


class Last(torch.nn.Module):
    """The output of the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MGU(2, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x)[0][:, -1]
        return output


def test_layer_of_a_new_cell_is_recorded_and_exported() -> None:
    torch.manual_seed(0)
    model, x = Last(), torch.randn(4, 5, 2)
    expected = torch.autograd.functional.jacobian(lambda x: model(x).sum(0), x)
    dense = jacsparse.jacobian(model, x).todense(1).view(3, 5, 2)
    assert torch.allclose(dense, expected[:, 1], atol=1e-6)
    exported = torch.export.export(model, (x,), strict=False)
    assert torch.allclose(exported.module()(x), model(x), atol=1e-6)


class Packing(Last):
    """A model that packs its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, torch.full((len(x),), x.shape[1]), batch_first=True)
        output: torch.Tensor = pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]
        return output


def test_packed_input_of_a_new_cell_is_not_recorded() -> None:
    with pytest.raises(UnsupportedOperatorError, match="a packed input of MGU cannot be recorded, exported or traced"):
        jacsparse.jacobian(Packing(), torch.randn(4, 5, 2))


def own(step: Callable[..., Any], **attributes: Any) -> type[Recurrent]:
    """A layer of a cell with a step of `cell, input_projection, recurrent_projection, state`."""
    kind = type("OwnCell", (Cell,), {"mode": "OWN", "gates": 1, "step": step})
    cell = kind()
    vars(cell).update(attributes)
    return type("Own", (Recurrent,), {"cell": cell})


TRAINED, OUTSIDE = torch.nn.Parameter(torch.ones(4)), torch.ones(4, requires_grad=True)
GENERATOR = torch.Generator()

#: Steps that gradients cannot be had of; what the error says; and whether it comes without gradients too.
BAD_STEPS: dict[str, tuple[Callable[..., Any], str, bool]] = {
    "dropout": (lambda _, x, p, h: functional.dropout(x + p), r"draws random numbers by aten\.bernoulli", False),
    "rand": (lambda _, x, p, h: x + p + torch.rand(h.shape), r"draws random numbers by aten\.rand\.default.*hx", False),
    "generator": (lambda _, x, p, h: x + torch.rand(h.shape, generator=GENERATOR), r"draws .*aten\.rand", False),
    "parameter": (lambda cell, x, p, h: (x + p) * cell.scale, "reads the attribute scale, which .*hx.*detach", False),
    "module": (lambda cell, x, p, h: cell.linear(x + p), r"reads the attribute linear\.weight and linear\.bias", False),
    "global": (lambda _, x, p, h: (x + p) * OUTSIDE, "reads a tensor that requires gradients", False),
    "in place": (lambda _, x, p, h: h.mul_(2) + x, "writes to its arguments in place", False),
    "view": (lambda _, x, p, h: x.chunk(2, 1)[0].mul_(2).repeat(1, 2), "writes to its arguments in place", False),
    "result": (lambda _, x, p, h: (y := x.exp()) * y.mul_(2), "cannot be differentiated .*inplace", False),
    "constant": (lambda _, x, p, h: torch.zeros_like(h), "cannot be differentiated", False),
    "tuple": (lambda _, x, p, h: (x + p, h), r"returns a tuple for states \(2, 4\) .*; expected the states", True),
    "width": (lambda _, x, p, h: torch.cat([x, h], 1), r"returns \(2, 8\) of torch.float32 for states \(2, 4\)", True),
    "dtype": (lambda _, x, p, h: (x + p).double(), r"returns \(2, 4\) of torch.float64 for states", True),
}


@pytest.mark.parametrize("case", BAD_STEPS)
def test_steps_that_gradients_cannot_be_had_of(case: str) -> None:
    step, message, always = BAD_STEPS[case]
    layer, x = own(step, scale=TRAINED, linear=torch.nn.Linear(4, 4))(3, 4), torch.randn(5, 2, 3)
    for _ in range(2):
        with pytest.raises(TypeError, match=f"the step of the cell OWN {message}"):
            layer(x)
    with torch.no_grad():
        if always:
            with pytest.raises(TypeError, match=message):
                layer(x)
            return
        # The look at the step moves no generator on.
        results = []
        for _ in range(2):
            torch.manual_seed(0)
            GENERATOR.manual_seed(0)
            results.append(torch.cat([layer(x)[0].flatten(), torch.rand(1)]))
        assert results[0].equal(results[1])


def test_steps_that_draw_and_train_nothing_are_taken() -> None:
    """Nor does what could draw, and does not, or what is there and not read."""
    fixed = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def step(cell: Any, x: torch.Tensor, p: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        three = [each[:, None, None] for each in (x + p, x + p, h)]
        attention = functional.scaled_dot_product_attention(*three).flatten(1)
        return functional.dropout(attention, training=False) + torch.tanh(x + p) * cell.fixed

    calls = []

    def counted(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return step(*arguments)

    layer, x = own(counted, fixed=fixed, unread=TRAINED)(3, 4), torch.randn(5, 2, 3)
    for extra in (2, 0):
        calls.clear()
        layer(x)[0].sum().backward()
        assert len(calls) == 10 + extra


@pytest.mark.parametrize("mode", ["RNN_TANH", "GRU"])
def test_a_cell_with_the_mode_of_another_is_itself(mode: str) -> None:
    layer = own(lambda _, x, p, h: torch.sigmoid(x + p))
    layer.cell.mode = mode
    torch.manual_seed(0)
    run, x = layer(2, 4, dtype=torch.float64), drawn(9, 3, 2)
    initial, weights = torch.zeros(3, 4).double(), tuple(run.parameters())
    assert close(run(x)[0], recurrent_layer(run.cell, x, initial, weights)[0])
    assert [report.methods for report in run.reports] == [["sequential"]]


def test_masks_are_a_vector_of_the_state() -> None:
    """The same mask for all steps, as of variational dropout; it has gradients, as what is trained outside needs."""

    def step(_: Any, x: torch.Tensor, p: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        h, mask = state.chunk(2, dim=1)
        return torch.cat([h + mask * (torch.tanh(x + p) - h), mask], dim=1)

    layer = own(step)
    layer.cell.states = 2
    for forward in ("sequential", "relaxed:4", "newton:4"):
        run, x, h = layer(3, 4, forward=forward, dtype=torch.float64), drawn(9, 2, 3), torch.zeros(1, 2, 4).double()
        mask = drawn(1, 2, 4).requires_grad_()
        assert torch.autograd.gradcheck(lambda mask, run=run, x=x, h=h: run(x, (h, mask))[0], (mask,))


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (type("Nameless", (Cell,), {"gates": 1, "step": lambda *_: None})(), "the cell Nameless of Own has no `mode`"),
        (
            type("Gateless", (Cell,), {"mode": "G", "step": lambda *_: None})(),
            "the cell Gateless of Own has no `gates`",
        ),
        (MinimalGatedCell, "the cell of Own is the class MinimalGatedCell, not an instance"),
        (3, "the cell of Own is an int; expected a jacsparse.recurrence.Cell"),
    ],
)
def test_cells_that_lack_something(cell: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        type("Own", (Recurrent,), {"cell": cell})(3, 4)
