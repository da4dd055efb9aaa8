"""jacsparse.nn's RNN, GRU and LSTM against torch.nn's: outputs and gradients, every schedule and kind of input."""

from __future__ import annotations

import copy
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import prune
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import jacsparse
from jacsparse.recurrence import CELLS, SOLVERS, Diagonal, Saved, Sequences, Weights, parse
from jacsparse.recurrence.cells import Cell
from jacsparse.recurrence.cells.fused import FusedCell
from jacsparse.recurrence.layer_recurrences import LayerPass
from jacsparse.recurrence.solvers.choice import Choice
from jacsparse.recurrence.vector import sigmoid, tanh
from jacsparse.runtime import flushing, run_rows
from tests.helpers import close, reflections, uniform

KINDS = {
    "RNN": (jacsparse.nn.RNN, nn.RNN, {}),
    "RNN relu": (jacsparse.nn.RNN, nn.RNN, {"nonlinearity": "relu"}),
    "GRU": (jacsparse.nn.GRU, nn.GRU, {}),
    "LSTM": (jacsparse.nn.LSTM, nn.LSTM, {}),
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
SOLUTIONS = [
    {"schedule": "sequential"},
    {"schedule": "chunked"},
    {"schedule": "blelloch"},
    {"schedule": "planned"},
    {"schedule": "relaxed"},
    {"schedule": "auto", "forward": "parallel"},
    {"schedule": "auto", "forward": "relaxed"},
    {"schedule": "auto", "forward": "newton"},
]
FULL, PORTABLE = (os.environ.get("JACSPARSE_TESTS") == name for name in ("full", "portable"))
ALL = pytest.mark.parametrize("kind", KINDS)


def pair(kind: str, *args: Any, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Ours and PyTorch's layer with the same weights."""
    ours, theirs, more = KINDS[kind]
    added = {name: options.pop(name) for name in ("schedule", "forward", "chunk") if name in options}
    # By `auto` PyTorch's kernels would run the small ones.
    added.setdefault("schedule", "sequential")
    reference = theirs(*args, **more, **options).to(dtype)
    layer = ours(*args, **more, **options, **added).to(dtype)
    layer.load_state_dict(reference.state_dict())
    return layer, reference


def padded(output: torch.Tensor | PackedSequence) -> torch.Tensor:
    return pad_packed_sequence(output)[0] if isinstance(output, PackedSequence) else output


def outcome(
    layer: nn.Module, given: Callable[[], Any], leaves: list[torch.Tensor], hx: Any, loss: str = "all"
) -> list[torch.Tensor]:
    """Outputs, last states and the gradients of all leaves and parameters."""
    output, last = layer(given(), hx)
    output, last = padded(output), torch.cat(last) if isinstance(last, tuple) else last
    generator = torch.Generator().manual_seed(7)
    weigh = lambda tensor: (tensor * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)).sum()  # noqa: E731
    total = weigh(last) if loss == "last" else weigh(output) + (weigh(last) if loss == "all" else 0)
    gradients = torch.autograd.grad(total, [*leaves, *layer.parameters()], allow_unused=True)
    of_parameters = [
        torch.zeros_like(x) if g is None else g for g, x in zip(gradients, [*leaves, *layer.parameters()], strict=True)
    ]
    return [output.detach(), last.detach(), *of_parameters]


def compare(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(results) == len(expected)
    for ours, reference in zip(results, expected, strict=True):
        assert ours.shape == reference.shape and ours.dtype == reference.dtype
        largest = reference.abs().max().item() if reference.numel() else 0.0
        difference = (ours - reference).abs().max().item() if reference.numel() else 0.0
        assert difference <= TOLERANCE[ours.dtype] * largest, (ours.shape, difference, largest)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    batch, time = draw(st.integers(1, 9)), draw(st.integers(1, 64))
    return {
        "sizes": (draw(st.integers(1, 9)), draw(st.integers(1, 64)), draw(st.integers(1, 3))),
        "options": {
            "bias": draw(st.booleans()),
            "batch_first": draw(st.booleans()),
            "bidirectional": draw(st.booleans()),
            "chunk": draw(st.sampled_from([4, 16, 64])),
            **draw(st.sampled_from(SOLUTIONS)),
        },
        "shape": (time, batch),
        "lengths": draw(st.none() | st.lists(st.integers(1, time), min_size=batch, max_size=batch)),
        "states": draw(st.booleans()),
        "loss": draw(st.sampled_from(["all", "outputs", "last"])),
        "dtype": draw(st.sampled_from([torch.float64, torch.float64, torch.float32])),
        "seed": draw(st.integers(0, 2**31)),
    }


@ALL
@given(case=cases())
@settings(max_examples=200 if FULL else 15 if PORTABLE else 30)
def test_drawn_layers(kind: str, case: dict[str, Any]) -> None:
    torch.manual_seed(case["seed"])
    (features, hidden, layers), dtype, options = case["sizes"], case["dtype"], case["options"]
    layer, reference = pair(kind, features, hidden, layers, dtype=dtype, **options)
    time, batch = case["shape"]
    x = torch.randn(time, batch, features, dtype=dtype, requires_grad=True)
    leaves, hx = [x], None
    if case["states"]:
        directions = layers * (2 if options["bidirectional"] else 1)
        parts = [torch.randn(directions, batch, hidden, dtype=dtype, requires_grad=True) for _ in range(2)]
        parts = parts if kind == "LSTM" else parts[:1]
        leaves, hx = [x, *parts], tuple(parts) if kind == "LSTM" else parts[0]

    def given() -> Any:
        laid = x.transpose(0, 1) if options["batch_first"] else x
        if case["lengths"] is None:
            return laid
        return pack_padded_sequence(laid, case["lengths"], options["batch_first"], enforce_sorted=False)

    compare(outcome(layer, given, leaves, hx, case["loss"]), outcome(reference, given, leaves, hx, case["loss"]))


@ALL
def test_a_single_sequence(kind: str) -> None:
    layer, reference = pair(kind, 3, 7, 2, bidirectional=True)
    x = torch.randn(11, 3, dtype=torch.float64, requires_grad=True)
    parts = [torch.randn(4, 7, dtype=torch.float64) for _ in range(2)]
    for hx in (None, tuple(parts) if kind == "LSTM" else parts[0]):
        compare(outcome(layer, lambda: x, [x], hx), outcome(reference, lambda: x, [x], hx))


@ALL
def test_an_empty_batch(kind: str) -> None:
    layer, _ = pair(kind, 3, 5, 2)
    output, last = layer(torch.zeros(4, 0, 3, dtype=torch.float64))
    assert output.shape == (4, 0, 5) and (last[0] if kind == "LSTM" else last).shape == (2, 0, 5)
    output.sum().backward()
    assert all(not parameter.grad.any() for parameter in layer.parameters())


SCHEDULES = ["auto", "blelloch:2", "chunked:7", *(name for name, one in SOLVERS.items() if "gradients" in one.solves)]
FORWARDS = ["sequential", *(name for name, one in SOLVERS.items() if "states" in one.solves)]


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@ALL
def test_an_empty_batch_by_every_solver(kind: str, schedule: str, forward: str) -> None:
    lengths = (1, 40, 200)
    # Each solver with each length, but for `make test-full` not in each combination.
    turn = list(KINDS).index(kind) + SCHEDULES.index(schedule) + FORWARDS.index(forward)
    for number, time in enumerate(lengths if FULL else [lengths[turn % 3]]):
        options = {"bidirectional": time != 40, "batch_first": time == 40, "bias": time != 1}
        dtype = (torch.float32, torch.float64)[(number + len(schedule) + len(forward)) % 2]
        layer, reference = pair(kind, 3, 5, 2, dtype=dtype, schedule=schedule, forward=forward, chunk=16, **options)
        shape = (0, time, 3) if options["batch_first"] else (time, 0, 3)
        x = torch.zeros(shape, dtype=dtype, requires_grad=True)
        state = torch.zeros(4 if options["bidirectional"] else 2, 0, 5, dtype=dtype, requires_grad=True)
        hx, leaves = ((state, state) if kind == "LSTM" else state, [x, state]) if time == 40 else (None, [x])
        results, expected = (outcome(run, lambda: x, leaves, hx) for run in (layer, reference))  # noqa: B023
        compare(results, expected)
        assert not any(gradient.any() for gradient in results[2:])
        assert all(report.methods and report.schedule for report in layer.reports)
        assert len(layer.boundaries) == len(layer.reports) // 2


@ALL
def test_packed_without_an_order_given(kind: str) -> None:
    layer, reference = pair(kind, 3, 4)
    steps = [torch.randn(n, 3, dtype=torch.float64) for n in (5, 4, 4, 1)]
    compare(
        outcome(layer, lambda: pack_sequence(steps), [], None),
        outcome(reference, lambda: pack_sequence(steps), [], None),
    )


@ALL
def test_dropout_between_layers(kind: str) -> None:
    layer, reference = pair(kind, 3, 6, 3, dropout=0.4)
    x = torch.randn(5, 4, 3, dtype=torch.float64, requires_grad=True)
    results = []
    for run in (layer, reference):
        torch.manual_seed(3)
        results.append(outcome(run, lambda: x, [x], None))
    # One seed draws one mask.
    compare(*results)
    layer.eval(), reference.eval()
    compare(outcome(layer, lambda: x, [x], None), outcome(reference, lambda: x, [x], None))


@ALL
def test_state_dicts_go_both_ways(kind: str) -> None:
    layer, reference = pair(kind, 3, 4, 2, bidirectional=True)
    assert list(layer.state_dict()) == list(reference.state_dict())
    reference.load_state_dict(layer.state_dict())
    assert isinstance(layer, type(reference))
    torch.manual_seed(1)
    ours = KINDS[kind][0](3, 4, **KINDS[kind][2])
    torch.manual_seed(1)
    theirs = KINDS[kind][1](3, 4, **KINDS[kind][2])
    # Initialised alike, too.
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@ALL
def test_frozen_weights_and_inputs(kind: str) -> None:
    layer, reference = pair(kind, 3, 4, 2)
    for run in (layer, reference):
        run.weight_hh_l0.requires_grad_(False)
        run.bias_ih_l1.requires_grad_(False)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    for run in (layer, reference):
        run(x)[0].square().sum().backward()
    for ours, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            close(ours.grad, theirs.grad, 1e-10)


@ALL
def test_no_grad_keeps_nothing(kind: str) -> None:
    layer, reference = pair(kind, 3, 4)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    with torch.no_grad():
        output, _ = layer(x)
        close(output, reference(x)[0], 1e-12)
    assert not output.requires_grad and output.grad_fn is None


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_gates_are_kept_only_for_a_backward_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    solve = LayerPass.solve_forward

    def spy(layer: LayerPass, input_projection: torch.Tensor, weights: Weights, saved: Saved) -> torch.Tensor:
        rows.append(len(saved.gates))
        return solve(layer, input_projection, weights, saved)

    monkeypatch.setattr(LayerPass, "solve_forward", spy)
    layer, _ = pair(kind, 3, 4)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    layer(x)
    with torch.no_grad():
        layer(x)
    assert rows == [12, 0]


@ALL
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_hooks_and_anomaly_mode(kind: str) -> None:
    layer, reference = pair(kind, 3, 4)
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    for run in (layer, reference):
        run.weight_hh_l0.register_hook(lambda gradient: gradient * 3)
        run.register_forward_hook(lambda _m, _i, output: (output[0] * 2, output[1]))
    with torch.autograd.detect_anomaly(check_nan=True):
        compare(outcome(layer, lambda: x, [x], None), outcome(reference, lambda: x, [x], None))


@ALL
def test_gradient_checkpointing(kind: str) -> None:
    from torch.utils.checkpoint import checkpoint

    layer, _ = pair(kind, 3, 4)
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(layer(x)[0].square().sum(), [x, *layer.parameters()])
    for reentrant in (False, True):
        output = checkpoint(lambda given: layer(given)[0], x, use_reentrant=reentrant)
        output.square().sum().backward()
        for ours, reference in zip([x, *layer.parameters()], expected, strict=True):
            close(ours.grad, reference, 1e-12)
            ours.grad = None


@ALL
@pytest.mark.parametrize("steps", [1, 6, 70])
@pytest.mark.parametrize("form", ["padded", "packed", "two layers, both directions"])
def test_gradients_of_gradients(kind: str, steps: int, form: str) -> None:
    options = {"num_layers": 2, "bidirectional": True} if form.startswith("two") else {}
    layer, reference = pair(kind, 3, 4, **options)
    x = torch.randn(steps, 2, 3, dtype=torch.float64, requires_grad=True)
    results = []
    for run in (layer, reference):
        inputs = [x, *run.parameters()]
        y, last = run(pack_padded_sequence(x, [steps, max(1, steps - 3)]) if form == "packed" else x)
        y = y.data if form == "packed" else y
        last = sum(each.sin().sum() for each in last) if isinstance(last, tuple) else last.sin().sum()
        first = torch.autograd.grad(y.square().sum() + last, inputs, create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), inputs, create_graph=True)
        third = torch.autograd.grad(sum(each.sum() for each in second), inputs) if steps < 70 else []
        # Of some inputs alone, and of a last state that nobody read.
        (only,) = torch.autograd.grad(run(x)[0].sum(), x, create_graph=True)
        results.append([*first, *second, *third, *torch.autograd.grad(only.square().sum(), [*run.parameters()][:1])])
    for ours, expected in zip(*results, strict=True):
        close(ours, expected, 1e-11)


def test_compiled_around() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = jacsparse.nn.GRU(3, 5), nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.rnn(x * 2)[0])).sum()

    model = Model()
    x = torch.randn(4, 2, 3)
    compiled = torch.compile(model, backend="eager")
    expected, results = torch.autograd.grad(model(x), list(model.parameters())), None
    results = torch.autograd.grad(compiled(x), list(model.parameters()))
    for ours, reference in zip(results, expected, strict=True):
        close(ours, reference, 1e-6)


@ALL
def test_compiled_anew_too_often(kind: str) -> None:
    """Frames that the compiler gives up are run as they are; those that they call are not."""
    layer, _ = pair(kind, 3, 5, dtype=torch.float32, schedule="auto")
    torch._dynamo.reset()
    compiled = torch.compile(nn.Sequential(layer), backend="eager")
    with torch._dynamo.config.patch(cache_size_limit=1):
        for steps in (1, 5, 40, 600, 50, 2):
            for batch in (2, 3):
                x = torch.randn(steps, batch, 3)
                assert torch.equal(compiled(x)[0], layer(x)[0])


class Tagger(nn.Module):
    """A recurrent layer within a model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(layer.hidden_size, 2, dtype=layer.weight_hh_l0.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0])


@ALL
@pytest.mark.parametrize("strict", [False, True])
def test_exported_and_traced(kind: str, strict: bool) -> None:
    layer, _ = pair(kind, 3, 4)
    model, x = Tagger(layer), torch.randn(5, 2, 3, dtype=torch.float64)
    if strict and not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("PyTorch 2.6 exports subclasses of its recurrent layers with strict=False alone")
    program = torch.export.export(model, (x,), strict=strict)
    close(program.module()(x), model(x), 1e-12)
    if not strict:
        close(torch.jit.trace(model, (x,))(x + 1), model(x + 1), 1e-12)


@ALL
def test_jacobians_of_models_with_layers(kind: str) -> None:
    layer, _ = pair(kind, 3, 4, batch_first=True)
    model, x = Tagger(layer), torch.randn(2, 5, 3, dtype=torch.float64)
    assert not jacsparse.verify(model, x).failed
    given = [x.clone().requires_grad_() for _ in range(2)]
    results, expected = (
        torch.autograd.grad(run(each_input).square().sum(), [each_input, *model.parameters()])
        for run, each_input in zip((jacsparse.nn.Scan(model, schedule="linear"), model), given, strict=True)
    )
    for one, other in zip(results, expected, strict=True):
        close(one, other, 1e-10)


@ALL
def test_what_other_transforms_say(kind: str) -> None:
    layer, _ = pair(kind, 3, 4)
    model, x = Tagger(layer), torch.randn(5, 2, 3, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"torch\.func\.jacrev .*, use torch\.nn's layers .*convert"):
        torch.func.jacrev(model)(x)
    with pytest.raises(NotImplementedError, match=r"no derivative in forward mode; use torch\.nn's layers .*convert"):
        torch.func.hessian(lambda given: model(given).sum())(x)
    with pytest.raises(TypeError, match=r"torch\.jit\.script cannot compile a jacsparse\.nn\.\w+; script .*convert"):
        torch.jit.script(model)
    assert type(model.layer) is type(layer)


@ALL
def test_converted_models(kind: str) -> None:
    layer, reference = pair(kind, 3, 4, 2, bidirectional=True)
    model = nn.ModuleDict({"one": nn.Sequential(reference), "same": reference, "other": nn.Linear(2, 2)})
    names, parameters = list(model.state_dict()), list(model.parameters())
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    expected = reference(x)[0]
    assert jacsparse.nn.convert(model, schedule="chunked") is model
    ours = model["same"]
    assert type(ours) is type(layer) and model["one"][0] is ours and ours.schedule == "chunked"
    close(ours(x)[0], expected, 1e-12)
    assert jacsparse.nn.convert(model, to="torch")["same"].__class__ is type(reference)
    assert model["one"][0] is model["same"]
    assert model["same"].__dict__.keys() == reference.__dict__.keys()
    close(model["same"](x)[0], expected, 0)
    assert list(model.state_dict()) == names
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert type(jacsparse.nn.convert(reference)) is type(layer)


@ALL
def test_hooks_of_converted_layers_can_be_removed(kind: str) -> None:
    layer, reference = pair(kind, 3, 4)
    calls: list[str] = []
    handle = reference.register_forward_hook(lambda *_: calls.append("hook"))
    ours = jacsparse.nn.convert(reference)
    handle.remove()
    ours(torch.zeros(2, 1, 3, dtype=torch.float64))
    handle = layer.register_forward_pre_hook(lambda *_: calls.append("hook"))
    theirs = jacsparse.nn.convert(layer, to="torch")
    theirs(torch.zeros(2, 1, 3, dtype=torch.float64))
    handle.remove()
    theirs(torch.zeros(2, 1, 3, dtype=torch.float64))
    assert calls == ["hook"]


@ALL
def test_subclasses_and_parametrised_layers_stay(kind: str) -> None:
    layer, _ = pair(kind, 3, 4)

    class Doubled(type(layer)):  # type: ignore[misc]
        def forward(self, *args: Any) -> Any:
            return 2 * super().forward(*args)[0]

    parametrised = nn.utils.parametrizations.spectral_norm(layer, "weight_hh_l0")
    model = nn.ModuleList([Doubled(3, 4), parametrised])
    before = list(model)
    assert all(one is other for one, other in zip(jacsparse.nn.convert(model, to="torch"), before, strict=True))
    with pytest.raises(TypeError, match=r"weights of the Parametrized.* are parametrised; .*remove_parametrizations"):
        parametrised.to_torch()


@ALL
def test_weights_of_another_dtype_for_one_call(kind: str) -> None:
    layer, reference = pair(kind, 3, 4, dtype=torch.float32)
    weights = {name: weight.double() for name, weight in reference.named_parameters()}
    x = torch.randn(40, 2, 3, dtype=torch.float64)
    actual, expected = (torch.func.functional_call(run, weights, (x,))[0] for run in (layer, reference))
    close(actual, expected, 1e-10)


@ALL
@pytest.mark.parametrize("steps", [5, 70])
def test_weights_that_do_not_fit(kind: str, steps: int) -> None:
    """Kernels read as many as there should be."""
    layer, _ = pair(kind, 3, 4, dtype=torch.float32)
    gates, x = len(layer.bias_hh_l0), torch.randn(steps, 2, 3)
    for name, shape in (("weight_hh_l0", (gates, 3)), ("weight_ih_l0", (4, 2)), ("bias_hh_l0", (1,))):
        with pytest.raises(ValueError, match=rf"{name} has shape .*; expected \("):
            torch.func.functional_call(layer, {name: torch.full(shape, 0.1)}, (x,))
    with pytest.raises(TypeError, match=r"weight_hh_l0 is torch\.float64 on cpu, and the input torch\.float32 on cpu"):
        torch.func.functional_call(layer, {"weight_hh_l0": torch.zeros(gates, 4, dtype=torch.float64)}, (x,))


@ALL
def test_batches_of_gradients_are_refused_in_a_sentence(kind: str) -> None:
    layer, _ = pair(kind, 3, 4)
    output = layer(torch.randn(70, 2, 3, dtype=torch.float64))[0]
    with pytest.raises(NotImplementedError, match=r"is_grads_batched, which use it, use torch.nn's layers"):
        torch.autograd.grad(output, [layer.weight_hh_l0], torch.randn(2, *output.shape).double(), is_grads_batched=True)


def test_gates_may_be_closed() -> None:
    """A sigmoid far below is zero: else what the gate holds back comes through where that is large."""
    layer, reference = pair("LSTM", 3, 4, dtype=torch.float32)
    for run in (layer, reference):
        with torch.no_grad():
            run.bias_ih_l0[4:8] = -1e4
    x, first = torch.randn(2, 1, 3), (torch.zeros(1, 1, 4), torch.full((1, 1, 4), 1e38))
    close(layer(x, first)[0], reference(x, first)[0], 1e-6)


def test_packed_input_of_another_index_type() -> None:
    packed = pack_padded_sequence(torch.randn(70, 2, 3), torch.tensor([70, 40]))
    packed = packed._replace(batch_sizes=packed.batch_sizes.int())
    with pytest.raises(TypeError, match=r"batch_sizes of the packed input are torch\.int32; expected torch\.int64"):
        jacsparse.nn.GRU(3, 4)(packed)


def test_options_set_later_are_looked_at() -> None:
    layer = jacsparse.nn.GRU(3, 4)
    other = copy.copy(layer)
    layer(torch.randn(100, 1, 3))
    other(torch.randn(5, 1, 3))
    assert layer.reports[0].methods == ["sequential"] and other.reports[0].methods == ["torch.nn"]
    layer.chunk = 0
    with pytest.raises(ValueError, match="chunk is 0; expected a number of steps"):
        layer(torch.randn(5, 1, 3))
    for arguments in ({"schedule": "bogus"}, {"forward": "bogus"}, {"chunk": -1}):
        with pytest.raises(ValueError, match="; expected"):
            jacsparse.nn.convert(nn.Linear(3, 4), **arguments)
    with pytest.raises(TypeError, match=r"module is a str; expected a torch.nn.Module"):
        jacsparse.nn.convert("model")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_low_precision_are_not_converted(dtype: torch.dtype) -> None:
    model = nn.ModuleDict({"first": nn.GRU(3, 4), "second": nn.LSTM(3, 4).to(dtype)})
    with pytest.raises(TypeError, match=rf"second: its weights are {dtype}, .* convert\(model, to='torch'\)"):
        jacsparse.nn.convert(model)
    assert type(model["first"]) is nn.GRU
    ours = jacsparse.nn.convert(model.float()).to(dtype)
    with pytest.raises(TypeError, match=rf"input is {dtype}; .* by jacsparse.nn.convert\(model, to='torch'\)"):
        ours["second"](torch.zeros(2, 1, 3, dtype=dtype))
    x = torch.zeros(2, 1, 3, dtype=dtype)
    assert jacsparse.nn.convert(ours, to="torch")["second"](x)[0].dtype == dtype


def test_what_is_not_converted() -> None:
    class Own(nn.GRU):
        def forward(self, *given: Any) -> Any:
            return super().forward(*given)

    model = nn.ModuleList([nn.LSTM(3, 4, proj_size=2), Own(3, 4), nn.GRUCell(3, 4), nn.GRU(3, 4)])
    nn.utils.parametrizations.weight_norm(model[3], "weight_hh_l0")
    before = list(model)
    assert all(one is other for one, other in zip(jacsparse.nn.convert(model), before, strict=True))
    model = nn.Sequential(nn.GRU(3, 4))
    with pytest.raises(ValueError, match=r"chunk is 0; expected a number of steps"):
        jacsparse.nn.convert(model, chunk=0)
    assert type(model[0]) is nn.GRU
    with pytest.raises(ValueError, match=r"to is 'nn'; expected 'jacsparse' or 'torch'"):
        jacsparse.nn.convert(model, to="nn")


def test_copies_train_by_themselves() -> None:
    layer = jacsparse.nn.GRU(3, 4, forward="parallel")
    layer(torch.randn(5, 2, 3))[0].sum().backward()
    other = copy.deepcopy(layer)
    other(torch.randn(5, 2, 3))[0].sum().backward()
    assert torch.equal(other.weight_hh_l0, layer.weight_hh_l0) and other.weight_hh_l0 is not layer.weight_hh_l0


def test_the_same_bits_on_any_number_of_threads_and_for_any_batch() -> None:
    layer = jacsparse.nn.LSTM(3, 20)
    x, states = torch.randn(50, 33, 3), torch.zeros(1, 33, 20, requires_grad=True)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            output = layer(x, (states, states))[0]
            results.append((output.detach(), torch.autograd.grad(output.sum(), states)[0]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for result in results for one, other in zip(result, results[0], strict=True))
    # The kernel's arithmetic for a sample is the same whichever samples it is with.
    alone = torch.cat([layer(x[:, s : s + 1])[0] for s in range(33)], dim=1)
    assert (alone - results[0][0]).abs().max() < 1e-6


# Elementary functions.


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_activations_are_accurate(dtype: type) -> None:
    import numba

    @numba.njit(error_model="numpy")
    def apply(x, first, second):  # type: ignore[no-untyped-def]
        for i in range(len(x)):
            first[i], second[i] = tanh(x[i]), sigmoid(x[i])

    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30]
    x = np.concatenate([np.linspace(-30, 30, 20001), np.logspace(-20, 1, 2001), -np.logspace(-20, 1, 2001), special])
    x = x.astype(dtype)
    first, second = np.empty_like(x), np.empty_like(x)
    apply(x, first, second)
    wide = x.astype(np.longdouble)
    with np.errstate(over="ignore"):
        for actual, expected in ((first, np.tanh(wide)), (second, 1 / (1 + np.exp(-wide)))):
            ordinary = np.isfinite(x)
            error = np.abs(actual - expected)[ordinary]
            assert (error <= 2 * np.finfo(dtype).eps * np.abs(expected[ordinary]) + 2 * np.finfo(dtype).tiny).all()
    assert np.isnan(first[-3]) and np.isnan(second[-3])
    assert first[-5:-3].tolist() == [1, -1] and second[-5] == 1 and second[-4] < 1e-30
    assert np.signbit(first[-6])


# Parallel solutions.


@pytest.mark.parametrize("time", [1000, 10_000])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_few_sweeps_at_the_weights_of_the_beginning(kind: str, time: int) -> None:
    layer, _ = pair(kind, 20, 20, dtype=torch.float32, forward="parallel", schedule="relaxed")
    layer(torch.randn(time, 4, 20))[0].sum().backward()
    assert [report.methods for report in layer.reports] == [["relaxed"], ["relaxed"]]
    assert all(report.sweeps <= 3 and report.fallback_steps == 0 for report in layer.reports)


@torch.no_grad()
def rescaled(layer: nn.Module, reference: nn.Module, change: str) -> None:
    weight = reference.weight_hh_l0
    size = weight.shape[1]
    if change.startswith("radius"):
        for block in weight.split(size):
            block.mul_(float(change.split()[1]) / torch.linalg.eigvals(block).abs().max())
    elif change == "times 4":
        weight.mul_(4)
    else:
        for block in weight.split(size):
            block.copy_(0.999 * torch.linalg.qr(torch.randn_like(block))[0])
    layer.load_state_dict(reference.state_dict())


@pytest.mark.parametrize("change", ["radius 1.5", "radius 2.5", "times 4", "orthogonal"])
@pytest.mark.parametrize("solution", [{"forward": "parallel", "schedule": "relaxed"}, {"forward": "newton"}])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_networks_that_do_not_contract(kind: str, solution: dict[str, str], change: str) -> None:
    layer, reference = pair(kind, 5, 20, chunk=32, **solution)
    rescaled(layer, reference, change)
    # Ours step after step: where a network is chaotic, PyTorch's own rounding leads elsewhere.
    sequential, _ = pair(kind, 5, 20)
    sequential.load_state_dict(reference.state_dict())
    x = (0.5 * torch.randn(300, 3, 5, dtype=torch.float64)).requires_grad_()
    output, expected = layer(x)[0], sequential(x)[0]
    gradient, wanted = (torch.autograd.grad(result.sum(), x)[0] for result in (output, expected))
    report = layer.reports[0]
    assert report.defects[-1] <= 1e-14 or (report.methods[-1] == "sequential" and report.fallback_steps > 0)
    close(output, expected, 1e-10)
    assert (gradient - wanted).abs().max() <= 1e-8 * wanted.abs().max()


@pytest.mark.parametrize("change", ["radius 1.5", "radius 2.5", "times 4", "orthogonal"])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_networks_that_do_not_contract_at_full_length(kind: str, change: str) -> None:
    layer, reference = pair(kind, 5, 20, dtype=torch.float32, forward="parallel", schedule="relaxed")
    rescaled(layer, reference, change)
    sequential, _ = pair(kind, 5, 20, dtype=torch.float32, schedule="sequential")
    sequential.load_state_dict(reference.state_dict())
    x = torch.randn(1000, 3, 5)
    with torch.no_grad():
        assert (layer(x)[0] - sequential(x)[0]).abs().max() <= 1e-4
    report = layer.reports[0]
    if "sequential" in report.methods:
        # From the first chunk that had not settled: whole chunks, and what follows them.
        assert 0 < report.fallback_samples <= 3 and report.fallback_steps % 128 in (
            0,
            1000 % 128,
            2000 % 128,
            3000 % 128,
        )
    else:
        assert report.fallback_steps == 0 and report.defects[-1] <= 1e-6
    # The same states, and so the same Jacobians, for both: only the gradients are guessed.
    layer.forward_method, given = "sequential", x.clone().requires_grad_()
    actual, expected = (torch.autograd.grad(run(given)[0].sum(), given)[0] for run in (layer, sequential))
    # Some explode, beyond what float32 holds.
    steps = expected.isfinite().all(dim=2).all(dim=1)
    assert steps[-100:].all()
    scale = expected[steps].abs().amax(dim=(1, 2), keepdim=True)
    assert ((actual - expected)[steps].abs() / scale).max() <= 1e-4


@pytest.mark.parametrize("change", ["radius 1.5", "radius 2.5", "times 4", "orthogonal"])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_relaxed_gradients_of_networks_that_do_not_contract(kind: str, change: str) -> None:
    layer, reference = pair(kind, 5, 20, chunk=32, schedule="relaxed")
    rescaled(layer, reference, change)
    sequential, _ = pair(kind, 5, 20, schedule="sequential")
    sequential.load_state_dict(reference.state_dict())
    x = torch.randn(300, 3, 5, dtype=torch.float64, requires_grad=True)
    gradient, wanted = (torch.autograd.grad(run(x)[0].sum(), x)[0] for run in (layer, sequential))
    report = layer.reports[1]
    assert report.methods == ["relaxed", "chunked"] or report.defects[-1] <= 1e-14
    assert (gradient - wanted).abs().max() <= 1e-10 * wanted.abs().max()


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_a_nan_in_one_sample_harms_no_other(kind: str) -> None:
    layer, reference = pair(kind, 3, 8, chunk=16, forward="parallel", schedule="relaxed")
    x = torch.randn(100, 3, 3, dtype=torch.float64)
    x[40, 1] = float("nan")
    outputs = []
    for run in (layer, reference):
        given = x.clone().requires_grad_()
        output, _ = run(given)
        output[:, [0, 2]].sum().backward()
        outputs.append((output.detach(), given.grad))
    (output, gradient), (expected, wanted) = outputs
    assert torch.equal(output.isnan(), expected.isnan()) and bool(output[40:, 1].isnan().all())
    for sample in (0, 2):
        close(output[:, sample], expected[:, sample], 1e-12)
        close(gradient[:, sample], wanted[:, sample], 1e-10)
    assert layer.reports[0].fallback_samples == 1


@ALL
def test_pruned_layers_scan_sparse_jacobians(kind: str) -> None:
    layer, reference = pair(kind, 3, 12, schedule="planned")
    with torch.no_grad():
        reference.weight_hh_l0.mul_(torch.rand_like(reference.weight_hh_l0) < 0.05)
    layer.load_state_dict(reference.state_dict())
    x = torch.randn(37, 4, 3, dtype=torch.float64, requires_grad=True)
    compare(outcome(layer, lambda: x, [x], None), outcome(reference, lambda: x, [x], None))
    assert layer.reports[1].methods == ["planned"]


def test_a_warm_start_saves_a_sweep() -> None:
    layer, reference = pair("GRU", 3, 8, chunk=16, forward="relaxed")
    x = torch.randn(200, 2, 3, dtype=torch.float64)
    expected, _ = reference(x)
    close(layer(x)[0], expected, 1e-12)
    cold, boundaries = layer.reports[0].sweeps, layer.boundaries
    close(layer(x, warm=boundaries)[0], expected, 1e-12)
    assert layer.reports[0].sweeps < cold
    with pytest.raises(ValueError, match="the warm start holds states"):
        layer(x[:50], warm=boundaries)
    with pytest.raises(ValueError, match="warm has 2 entries; expected 1"):
        layer(x, warm=boundaries * 2)
    layer.forward_method = "sequential"
    with pytest.raises(ValueError, match=r"the warm start holds states \(26, 8\) .* have \(2, 8\)"):
        layer(x, warm=boundaries)


def test_auto_says_what_it_chose() -> None:
    layer = jacsparse.nn.GRU(3, 4, 2, bidirectional=True)
    layer(torch.randn(50, 4, 3))[0].sum().backward()
    backward = [report for report in layer.reports if report.recurrence == "backward"]
    assert [report.methods for report in backward] == [["sequential"]] * 4
    assert all("4 samples of 50 steps" in report.reason for report in backward)
    layer(torch.randn(5, 4, 3))[0].sum().backward()
    assert [report.methods for report in layer.reports] == [["torch.nn"]] * 8
    assert {report.layer for report in layer.reports} == {"l0", "l0_reverse", "l1", "l1_reverse"}
    assert all("4 samples of 5 steps" in report.reason for report in layer.reports)


@pytest.mark.parametrize(
    ("kind", "steps", "size", "batch", "inference", "training"),
    [
        ("GRU", 8, 8, 1, False, False),
        ("GRU", 9, 8, 1, False, True),
        ("GRU", 12, 8, 1, False, True),
        ("GRU", 13, 8, 1, True, True),
        # The fewer steps, the fewer elements.
        ("GRU", 16, 32, 102, True, True),
        ("GRU", 16, 32, 103, False, True),
        ("GRU", 31, 32, 251, True, True),
        ("GRU", 31, 32, 252, False, True),
        ("GRU", 32, 32, 256, True, True),
        ("RNN", 20, 8, 1, False, False),
        ("RNN", 21, 8, 1, False, True),
        ("RNN", 24, 8, 113, False, True),
        ("RNN", 24, 8, 114, False, False),
        ("RNN", 29, 8, 7, True, True),
        ("RNN", 29, 8, 8, False, True),
        ("LSTM", 31, 8, 1, False, False),
    ],
)
def test_few_steps_are_ours_where_operators_take_longer_than_a_call(
    kind: str, steps: int, size: int, batch: int, inference: bool, training: bool
) -> None:
    layer, x = getattr(jacsparse.nn, kind)(3, size).double(), torch.randn(steps, batch, 3, dtype=torch.float64)
    for trains, expected in ((False, inference), (True, training)):
        with torch.set_grad_enabled(trains):
            layer(x)
        assert (layer.reports[0].methods == ["torch.nn"]) != expected


@pytest.mark.parametrize("kind", ["RNN", "GRU"])
def test_few_steps_have_derivatives_in_forward_mode(kind: str) -> None:
    layer, x = getattr(jacsparse.nn, kind)(3, 8), torch.randn(31, 2, 3)
    assert layer(x)[0].requires_grad and layer.reports[0].methods == ["sequential"]
    y, tangent = torch.func.jvp(lambda x: layer(x)[0], (x,), (x,))
    assert y.shape == tangent.shape and layer.reports[0].methods == ["torch.nn"]


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({"schedule": "sequential"}, ["a step is not linear in the state", "asked for$"]),
        ({"schedule": "chunked:5", "forward": "relaxed:5"}, ["asked for$", "asked for$"]),
        ({"schedule": jacsparse.schedule.blelloch(21), "forward": "newton:5"}, ["asked for$", "asked for$"]),
        (
            {"schedule": "chunked", "forward": "relaxed"},
            [r"asked for; which leaves \w+ one chunk of all steps$"] * 2,
        ),
        ({"forward": "relaxed:5"}, ["asked for$", "2 samples of 20 steps on . workers: "]),
    ],
    ids=str,
)
def test_reports_say_why(options: dict[str, Any], reasons: list[str]) -> None:
    reason, gradients = reasons
    layer = jacsparse.nn.GRU(3, 4, **options)
    layer(torch.randn(20, 2, 3))[0].sum().backward()
    assert [report.recurrence for report in layer.reports] == ["forward", "backward"]
    assert re.match(reason, layer.reports[0].reason) and re.match(gradients, layer.reports[1].reason)


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_pytorch_is_faster_its_kernels_run(kind: str, dtype: torch.dtype) -> None:
    x, size = torch.randn(600, 3, 2, dtype=dtype), 8
    for steps, batch in ((3, 3), (600, 3)):
        layer, reference = pair(kind, 2, size, dtype=dtype, schedule="auto", bidirectional=True)
        theirs = steps == 3
        for inputs in (x[:steps, :batch], pack_sequence(list(x[:steps, :batch].unbind(1)))):
            states = torch.randn(2, 2, batch, size, dtype=dtype)
            hx = tuple(states) if kind == "LSTM" else states[0]
            (actual, last), (expected, end) = layer(inputs, hx), reference(inputs, hx)
            compare([padded(actual).detach()], [padded(expected).detach()])
            close(torch.stack(tuple(last)), torch.stack(tuple(end)), TOLERANCE[dtype])
            assert (layer.reports[0].methods == ["torch.nn"]) == theirs
    for module in (layer, reference):
        module.weight_hh_l0 = nn.Parameter(torch.full_like(module.weight_hh_l0, 0.1))
    close(layer(x[:3])[0], reference(x[:3])[0], TOLERANCE[dtype])
    assert layer.reports[0].methods == ["torch.nn"]
    weights = {name: torch.zeros_like(weight) for name, weight in layer.named_parameters()}
    swapped = [torch.func.functional_call(module, weights, (x[:3],))[0] for module in (layer, reference)]
    close(*swapped, TOLERANCE[dtype])
    # What parametrisations make is made anew in each pass.
    nn.utils.parametrizations.spectral_norm(layer, "weight_hh_l0_reverse")
    other = copy.deepcopy(layer)
    other.schedule = "sequential"
    close(layer(x[:100])[0], other(x[:100])[0], TOLERANCE[dtype])
    assert layer.reports[0].methods == ["sequential"]


@ALL
@pytest.mark.parametrize("options", [{"batch_first": True}, {"num_layers": 2, "dropout": 0.5}, {"bias": False}])
def test_what_pytorch_runs_is_what_it_gives(kind: str, options: dict[str, Any]) -> None:
    layer, reference = pair(kind, 2, 5, schedule="auto", **options)
    for inputs in (torch.randn(4, 3, 2), torch.randn(4, 2), torch.randn(4, 0, 2)):
        if options.get("batch_first") and not inputs.numel():
            inputs = inputs.transpose(0, 1)
        results = []
        for module in (layer, reference):
            torch.manual_seed(0)
            x = inputs.double().requires_grad_()
            results.append([module(x)[0], *torch.autograd.grad(module(x)[0].sum(), [x, *module.parameters()])])
        compare(*([tensor.detach() for tensor in each] for each in results))
        assert layer.reports[0].methods == ["torch.nn"]


def test_a_kernel_that_fails_leaves_the_mode_as_it_was() -> None:
    def fail() -> None:
        raise ValueError("stopped")

    with pytest.raises(ValueError, match="stopped"):
        flushing(fail)()
    assert np.float32(1e-38) * np.float32(0.1) != 0


def test_workers_keep_their_mode() -> None:
    layer, before = jacsparse.nn.RNN(3, 20, schedule="sequential"), torch.get_num_threads()
    together, subnormal = threading.Barrier(4), list[np.float32]()

    def multiply(*_: int) -> None:
        together.wait(60)
        subnormal.append(np.float32(1e-38) * np.float32(0.1))

    try:
        torch.set_num_threads(4)
        layer(torch.randn(500, 256, 3))[0].sum().backward()
        # Four ranges for each thread: the barrier lets no thread take more.
        run_rows(multiply, 10_000 * np.arange(17))
    finally:
        torch.set_num_threads(before)
    assert len(subnormal) == 16 and all(subnormal)


def test_adjoints_alone_are_flushed() -> None:
    blocks = Diagonal(torch.full((2, 1, 1), 1e-30))
    start = torch.full((1, 1), 1e-9, requires_grad=True)
    actual = jacsparse.linear_recurrence(blocks, torch.zeros(2, 1, 1), start)
    assert actual[0].item() == pytest.approx(1e-39, rel=1e-3)


def test_reports_count_as_the_chain_does() -> None:
    results = {}
    for schedule in ("sequential", "chunked", "blelloch", "relaxed"):
        layer = jacsparse.nn.GRU(3, 4, schedule=schedule, chunk=10)
        layer(torch.randn(100, 2, 3))[0].sum().backward()
        results[schedule] = layer.reports[1].schedule
    assert results["relaxed"] is None
    steps = {name: plan.complexity(64).steps for name, plan in results.items() if plan}
    assert steps == {"sequential": 100, "chunked": 28, "blelloch": 11}
    assert results["chunked"].name == "chunked:10"


@ALL
def test_outputs_and_states_may_be_changed_in_place(kind: str) -> None:
    layer, reference = pair(kind, 3, 4)
    results = []
    for run in (layer, reference):
        output, last = run(torch.arange(36.0, dtype=torch.float64).reshape(6, 2, 3) / 36)
        output[3:] = 0
        torch.relu_(output)
        for state in last if kind == "LSTM" else (last,):
            state.mul_(2)
        results.append(torch.autograd.grad(output.sum() + state.sum(), list(run.parameters())))
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs, 1e-10)


@ALL
def test_functional_gradients(kind: str) -> None:
    layer, reference = pair(kind, 3, 4)
    x = torch.randn(6, 2, 3, dtype=torch.float64)

    def loss(run: nn.Module) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
        return lambda parameters: torch.func.functional_call(run, parameters, (x,))[0].square().sum()

    results, expected = (torch.func.grad(loss(run))(dict(run.named_parameters())) for run in (layer, reference))
    for name, gradient in results.items():
        close(gradient, expected[name], 1e-10)
    with pytest.raises(NotImplementedError, match=r"no batching rule for torch\.vmap"):
        torch.func.vmap(lambda sample: layer(sample)[0])(x[None])
    with pytest.raises(NotImplementedError, match="no derivative in forward mode"):
        torch.func.jvp(lambda given: layer(given)[0], (x,), (x,))


@ALL
@pytest.mark.parametrize("frozen", [False, True])
def test_transforms_without_gradients_are_refused_too(kind: str, frozen: bool) -> None:
    """Kernels would see no tangent, and no batch."""
    layer, _ = pair(kind, 3, 4)
    layer.requires_grad_(not frozen)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    with torch.set_grad_enabled(frozen):
        with pytest.raises(NotImplementedError, match=r"no batching rule for torch\.vmap"):
            torch.func.vmap(lambda sample: layer(sample)[0])(x[None])
        stacked = {name: torch.stack([weight, weight]) for name, weight in layer.named_parameters()}
        with pytest.raises(NotImplementedError, match=r"no batching rule for torch\.vmap"):
            torch.func.vmap(lambda weights: torch.func.functional_call(layer, weights, (x,))[0])(stacked)
        with pytest.raises(NotImplementedError, match="no derivative in forward mode"):
            torch.func.jvp(lambda given: layer(given)[0], (x,), (x,))
        with (
            torch.autograd.forward_ad.dual_level(),
            pytest.raises(NotImplementedError, match="no derivative in forward mode"),
        ):
            layer(torch.autograd.forward_ad.make_dual(x, x))


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_transforms_of_what_is_left_to_pytorch(kind: str) -> None:
    layer, x = getattr(jacsparse.nn, kind)(3, 4), torch.randn(6, 2, 3)
    for chunk_size in (None, 1):
        with pytest.raises(NotImplementedError, match=r"no batching rule .*: pass all samples as one batch, or call"):
            torch.func.vmap(lambda sample: layer(sample)[0], chunk_size=chunk_size)(x[None])

    def tangents(run: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.func.jvp(lambda given: run(given)[0], (x,), (x,))

    if kind == "LSTM" and torch.backends.mkldnn.is_available():
        with pytest.raises(NotImplementedError, match=r"hessian take; call them within torch\.backends\.mkldnn\.flags"):
            tangents(layer)
    reference = getattr(nn, kind)(3, 4)
    reference.load_state_dict(layer.state_dict())
    with torch.backends.mkldnn.flags(enabled=False):
        for ours, theirs in zip(tangents(layer), tangents(reference), strict=True):
            close(ours, theirs, 1e-6)


@ALL
def test_functionalized(kind: str) -> None:
    layer, reference = pair(kind, 3, 4)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    close(torch.func.functionalize(lambda given: layer(given)[0])(x), reference(x)[0], 1e-10)
    transform = torch.func.functionalize(torch.func.grad(lambda given: layer(given)[0].square().sum()))
    expected = torch.func.grad(lambda given: reference(given)[0].square().sum())(x)
    close(transform(x), expected, 1e-10)


@ALL
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_programs_of_make_fx(kind: str, pre_dispatch: bool) -> None:
    layer, _ = pair(kind, 3, 4, 2, bidirectional=True, forward="parallel", chunk=2)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    program = make_fx(lambda given: layer(given)[0], pre_dispatch=pre_dispatch)(x)
    close(program(x + 1), layer(x + 1)[0], 1e-12)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x))[0].shape == (5, 2, 8)


@ALL
def test_gradients_with_their_signs_elsewhere(kind: str) -> None:
    """As those of imaginary parts are, where PyTorch conjugates lazily."""
    layer, _ = pair(kind, 3, 4)
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    output, last = layer(x)
    ends = [output, *(last if kind == "LSTM" else (last,))]
    given = [torch.randn_like(end) for end in ends]
    lazily, at_once = (
        torch.autograd.grad(ends, [x, *layer.parameters()], [negative(end) for end in given], retain_graph=True)
        for negative in (torch._neg_view, torch.neg)
    )
    assert all(torch.equal(one, other) for one, other in zip(lazily, at_once, strict=True))
    weights = {name: torch._neg_view(weight) for name, weight in layer.named_parameters()}
    negated = {name: -weight for name, weight in layer.named_parameters()}
    one, other = (torch.func.functional_call(layer, each, (x,))[0] for each in (weights, negated))
    assert torch.equal(one, other)


@ALL
def test_autocast_changes_no_digit(kind: str) -> None:
    layer = KINDS[kind][0](3, 4, schedule="sequential", **KINDS[kind][2])
    x = torch.randn(6, 2, 3, requires_grad=True)
    expected = torch.autograd.grad(layer(x)[0].square().sum(), [x, *layer.parameters()])
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.bfloat16())[0].dtype == torch.float32
        results = torch.autograd.grad(layer(x)[0].square().sum(), [x, *layer.parameters()])
    for ours, reference in zip(results, expected, strict=True):
        assert torch.equal(ours, reference)


@pytest.mark.parametrize("schedule", ["chunked", "chunked:64", "blelloch", "planned"])
def test_matrices_that_overflow(schedule: str) -> None:
    layer, reference = pair("RNN", 5, 20, dtype=torch.float32, schedule=schedule)
    sequential, _ = pair("RNN", 5, 20, dtype=torch.float32, schedule="sequential")
    rescaled(layer, reference, "times 4")
    sequential.load_state_dict(reference.state_dict())
    x = torch.randn(1500, 3, 5)
    # A loss on the first steps: from there on all gradients are zero.
    results, expected = (
        torch.autograd.grad(run(x)[0][:50].sum(), list(run.parameters())) for run in (layer, sequential)
    )
    for ours, theirs in zip(results, expected, strict=True):
        close(ours, theirs, 1e-4)
    report = layer.reports[1]
    assert schedule.startswith(report.methods[0])
    if len(report.methods) > 1:
        assert report.methods[1:] == ["sequential"] and report.fallback_steps == 1500 * report.fallback_samples > 0


@ALL
def test_where_auto_chose_to_guess_in_vain(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a machine with many more workers than samples.
    choice = Choice("relaxed", 2, reason="many workers")
    monkeypatch.setattr("jacsparse.recurrence.layer_recurrences.choose", lambda *_, **__: choice)
    layer, reference = pair(kind, 5, 6, bidirectional=True, chunk=2, schedule="auto")
    rescaled(layer, reference, "times 4")
    packed = pack_sequence([torch.randn(length, 5).double() for length in (70, 41, 9, 3)])
    results, expected = (
        torch.autograd.grad(run(packed)[0].data.sum(), list(run.parameters())) for run in (layer, reference)
    )
    for ours, theirs in zip(results, expected, strict=True):
        close(ours, theirs, 1e-10)
    assert any("sequential" in report.methods for report in layer.reports if report.recurrence == "backward")


def test_options_are_checked_whenever_they_are_set() -> None:
    layer, x = jacsparse.nn.GRU(3, 4), torch.randn(5, 2, 3)
    layer.schedule = "fast"
    with pytest.raises(ValueError, match="schedule is 'fast'; expected one of auto"):
        layer(x)
    layer.schedule, layer.forward_method = "chunked:2", "fast"
    with pytest.raises(ValueError, match="forward is 'fast'"):
        layer(x)
    layer.forward_method = "sequential"
    with pytest.raises(TypeError, match="warm is no list of tensors"):
        layer(x, warm=3)
    layer(x)[0].sum().backward()
    assert layer.reports[1].chunk == 2
    assert "chunk=9" in repr(jacsparse.nn.GRU(3, 4, chunk=9)) and "schedule" not in repr(jacsparse.nn.GRU(3, 4))


@pytest.mark.parametrize("schedule", ["auto", "sequential"])
@pytest.mark.parametrize(
    ("name", "value", "count"), [("num_layers", 2, 16), ("bias", False, 4), ("bidirectional", False, 4)]
)
def test_sizes_are_not_changed_later(name: str, value: object, count: int, schedule: str) -> None:
    layer = jacsparse.nn.GRU(3, 4, bidirectional=True, schedule=schedule)
    setattr(layer, name, value)
    with pytest.raises(ValueError, match=rf"made with 8 weights, .*{name}={value}.* take {count}; make a new layer"):
        layer(torch.randn(5, 2, 3))


def test_reports_say_whose_they_are_and_are_of_the_last_pass() -> None:
    layer = jacsparse.nn.GRU(3, 4, 2, bidirectional=True)
    output = layer(torch.randn(5, 2, 3))[0].sum()
    for _ in range(3):
        output.backward(retain_graph=True)
    names = {(report.recurrence, report.layer) for report in layer.reports}
    layers = ("l0", "l0_reverse", "l1", "l1_reverse")
    assert len(layer.reports) == 8 and names == {(way, name) for way in ("forward", "backward") for name in layers}


def test_layers_made_of_others() -> None:
    reference = nn.GRU(3, 4)
    layer = jacsparse.nn.GRU.of(reference, schedule="chunked")
    assert all(a is b for a, b in zip(layer.parameters(), reference.parameters(), strict=True))
    heard: list[str] = []
    layer.register_forward_hook(lambda *_: heard.append("ours"))
    reference(torch.randn(5, 2, 3))
    assert not heard
    nn.utils.parametrizations.weight_norm(reference, "weight_hh_l0")
    with pytest.raises(TypeError, match="the weights of the ParametrizedGRU are parametrised"):
        jacsparse.nn.GRU.of(reference)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.RNN"):
        jacsparse.nn.RNN.of(nn.GRU(3, 4))


# What is put in the place of weights.


class Noisy(nn.Module):
    """A weight with noise: another one at each access."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("accesses", torch.zeros(()))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.accesses += 1
        return weight + 0.01 * torch.randn_like(weight) if self.training else weight


def noisy(layer: nn.Module, name: str) -> None:
    nn.utils.parametrize.register_parametrization(layer, name, Noisy())


def pruned(layer: nn.Module, name: str) -> None:
    prune.random_unstructured(layer, name, 0.4)


REPLACEMENTS: dict[str, Callable[[nn.Module, str], Any]] = {
    "spectral": nn.utils.parametrizations.spectral_norm,
    "spectral, as a hook": nn.utils.spectral_norm,
    "weight norm": nn.utils.parametrizations.weight_norm,
    "weight norm, as a hook": nn.utils.weight_norm,
    "orthogonal": lambda layer, name: nn.utils.parametrizations.orthogonal(layer, name, use_trivialization=False),
    "pruned": pruned,
    "noisy": noisy,
}


def same(ours: nn.Module, theirs: nn.Module) -> None:
    """Parameters, gradients and buffers."""
    assert list(ours.state_dict()) == list(theirs.state_dict())
    compare([*map(torch.Tensor.detach, ours.state_dict().values())], [*theirs.state_dict().values()])
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            compare([one.grad], [other.grad])


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("names", [["weight_hh_l0"], ["weight_hh_l1", "weight_ih_l0", "weight_hh_l0_reverse"]], ids=len)
@pytest.mark.parametrize("schedule", ["auto", "chunked:4"])
@pytest.mark.parametrize("replacement", REPLACEMENTS)
@ALL
def test_what_takes_the_place_of_weights(kind: str, replacement: str, schedule: str, names: list[str]) -> None:
    """Made as often as for torch.nn's layers, whose steps of training these follow."""
    layer, reference = pair(kind, 3, 4, 2, bidirectional=True, schedule=schedule)
    x = torch.randn(9, 2, 3, dtype=torch.float64)
    optimizers = []
    for run in (layer, reference):
        torch.manual_seed(1)
        for name in names:
            REPLACEMENTS[replacement](run, name)
        optimizers.append(torch.optim.SGD(run.parameters(), 0.01))
    for step in range(4):
        outputs = []
        for run, optimizer in zip((layer, reference), optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            # The second pass goes on where the first one has left off.
            run(x)
            outputs.append(run(x)[0])
            outputs[-1].square().sum().backward()
        compare([outputs[0].detach()], [outputs[1].detach()])
        same(layer, reference)
        for optimizer in optimizers:
            optimizer.step()
    for change in (nn.Module.eval, nn.Module.train, nn.Module.float, nn.Module.double):
        for run in (layer, reference):
            change(run)
        with torch.no_grad():
            torch.manual_seed(7)
            result = layer(x.to(layer.bias_hh_l0.dtype))[0]
            torch.manual_seed(7)
            compare([result], [reference(x.to(layer.bias_hh_l0.dtype))[0]])
        same(layer, reference)


@ALL
def test_parametrised_weights_are_asked_for_as_often(kind: str) -> None:
    layer, reference = pair(kind, 3, 4, 2, bias=kind != "GRU")
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    for run in (layer, reference):
        for name in ("weight_hh_l1", "weight_hh_l0"):
            noisy(run, name)

    def accesses(run: nn.Module) -> list[float]:
        counts = [run.parametrizations[name][0].accesses for name in ("weight_hh_l0", "weight_hh_l1")]
        values = [count.item() for count in counts]
        for count in counts:
            count.zero_()
        return values

    def both(call: Callable[[nn.Module], Any]) -> list[list[float]]:
        return [(call(run), accesses(run))[1] for run in (layer, reference)]

    both(lambda _: None)
    ours, theirs = both(lambda run: run(x))
    assert ours == theirs and ours[0] > ours[1] >= 1
    changed = {"weight_ih_l0": torch.zeros_like(layer.weight_ih_l0)}
    for call in (
        lambda run: torch.func.functional_call(run, changed, (x,)),
        lambda run: run(x),
        lambda run: run(x),
        lambda run: setattr(run, "weight_ih_l1", nn.Parameter(torch.zeros_like(run.weight_ih_l1))),
        lambda run: run(x),
        lambda run: run(x),
    ):
        ours, theirs = both(call)
        assert ours == theirs
    with nn.utils.parametrize.cached():
        for _ in range(2):
            ours, theirs = both(lambda run: run(x))
            assert ours == theirs
    for run in (layer, reference):
        nn.utils.parametrize.remove_parametrizations(run, "weight_hh_l0")
        run.parametrizations["weight_hh_l1"][0].eval()
    close(layer(x)[0], reference(x)[0], 1e-12)


@ALL
def test_parametrised_layers_are_copied_after_a_pass(kind: str) -> None:
    layer, _ = pair(kind, 3, 4)
    nn.utils.parametrizations.spectral_norm(layer, "weight_hh_l0")
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    layer(x)[0].sum().backward()
    other = copy.deepcopy(layer)
    for run in (layer, other):
        run.eval()
    assert torch.equal(layer(x)[0], other(x)[0])


@ALL
def test_parametrised_layers_of_several_threads(kind: str) -> None:
    """Each pass has a graph of its own."""
    layer, _ = pair(kind, 3, 4, schedule="chunked:4")
    nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    x = torch.randn(9, 2, 3, dtype=torch.float64)
    expected = torch.autograd.grad(layer(x)[0].sum(), list(layer.parameters()))
    results: list[Any] = []

    def run() -> None:
        results.extend(torch.autograd.grad(layer(x)[0].sum(), list(layer.parameters())) for _ in range(20))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    for gradients in results:
        for one, other in zip(gradients, expected, strict=True):
            close(one, other, 1e-12)


# Bad input.


def bad_inputs() -> dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]]:
    x = torch.randn(5, 2, 3)
    packed = pack_padded_sequence(x, [5, 2])
    return {
        "rank": (lambda run: run(torch.randn(1, 5, 2, 3)), ValueError, r"input has shape \(1, 5, 2, 3\)"),
        "features": (lambda run: run(torch.randn(5, 2, 4)), ValueError, r"expected \(time, batch, 3\)"),
        "no steps": (lambda run: run(torch.randn(0, 2, 3)), ValueError, "no steps; expected at least one"),
        "dtype": (lambda run: run(x.double()), TypeError, "input is torch.float64 and the weights are torch.float32"),
        "half": (lambda run: run(x.half()), TypeError, "input is torch.float16; layers take float32 and float64"),
        "bfloat16": (lambda run: run.bfloat16()(x), TypeError, "the weights are torch.bfloat16; layers take float32"),
        "integers": (lambda run: run(x.long()), TypeError, "input is torch.int64"),
        "device": (lambda run: run(x.to("meta")), ValueError, "input is on meta"),
        "list": (lambda run: run([1.0]), TypeError, "input is a list"),
        "sparse": (lambda run: run(x.to_sparse()), TypeError, "input has layout"),
        "nested": (
            lambda run: run(torch.nested.nested_tensor([x[:, 0], x[:3, 1]])),
            TypeError,
            "input is a nested tensor; pad its sequences, or pack them",
        ),
        "states' shape": (
            lambda run: run(x, torch.zeros(1, 3, 4)),
            ValueError,
            r"hx has shape .*; expected \(1, 2, 4\)",
        ),
        "states' dtype": (lambda run: run(x, torch.zeros(1, 2, 4).double()), TypeError, "hx is torch.float64"),
        "packed features": (
            lambda run: run(pack_padded_sequence(torch.randn(5, 2, 4), [5, 2])),
            ValueError,
            r"input.data has shape \(7, 4\); expected \(steps, 3\)",
        ),
        "unsorted packed": (
            lambda run: run(PackedSequence(packed.data, torch.tensor([1, 2, 2, 1, 1]))),
            ValueError,
            r"batch_sizes of the packed input are \[1, 2, 2, 1, 1\]",
        ),
        "empty packed": (
            lambda run: run(PackedSequence(torch.zeros(0, 3), torch.tensor([], dtype=torch.int64))),
            ValueError,
            "batch_sizes of the packed input are",
        ),
    }


@pytest.mark.parametrize("case", bad_inputs())
def test_bad_inputs(case: str) -> None:
    call, error, message = bad_inputs()[case]
    with pytest.raises(error, match=message):
        call(jacsparse.nn.GRU(3, 4))


def test_bad_states_of_lstm() -> None:
    with pytest.raises(TypeError, match="hx is a Tensor; expected a pair of tensors"):
        jacsparse.nn.LSTM(3, 4)(torch.randn(5, 2, 3), torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match=r"hx\[1\] has shape"):
        jacsparse.nn.LSTM(3, 4)(torch.randn(5, 2, 3), (torch.zeros(1, 2, 4), torch.zeros(1, 2, 5)))


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="schedule is 'fast'; expected one of auto, linear"):
        jacsparse.nn.RNN(3, 4, schedule="fast")
    with pytest.raises(ValueError, match="forward is 'fast'; expected one of auto, sequential, parallel"):
        jacsparse.nn.GRU(3, 4, forward="fast")
    with pytest.raises(ValueError, match="chunk is 0; expected a number of steps"):
        jacsparse.nn.GRU(3, 4, chunk=0)
    with pytest.raises(ValueError, match=r"proj_size is 2, which is not supported; use torch\.nn\.LSTM"):
        jacsparse.nn.LSTM(3, 4, proj_size=2)
    with pytest.raises(ValueError, match="Unknown nonlinearity"):
        jacsparse.nn.RNN(3, 4, nonlinearity="sine")


def equal_steps(cell: Cell, time: int, batch: int, seed: int, dtype: torch.dtype) -> tuple[Weights, Saved]:
    """Weights, and what a forward pass might have kept, with the same Jacobian at each step.

    With a reflection ``Q`` that is ``Q`` for an RNN, ``(I + Q) / 2`` for a GRU and, for the sum of both of its states'
    gradients, for an LSTM.
    """
    n, rows = 12, time * batch
    Q = torch.from_numpy(reflections(n, 1, np.random.default_rng(seed))).float()
    # r, z, n and what is inside n's product; i, f, g, o and c.
    gates = {"GRU": (1, 0.5, 0, 0), "LSTM": (0.5, 0.5, 0, 1, 0)}.get(cell.mode, ())
    hidden = torch.cat([Q if gate == len(gates) // 2 else torch.zeros(n, n) for gate in range(cell.gates)]).to(dtype)
    saved = torch.tensor(gates, dtype=dtype).repeat_interleave(n).expand(rows, -1).contiguous()
    output = torch.full((rows, n), float(cell.mode == "RNN_RELU"), dtype=dtype)
    # By which a step has these gates where its input is zero, or, of ReLU, the same derivative.
    opened = {"GRU": (40, 0, 0), "LSTM": (0, 0, 0, 40), "RNN_RELU": (40,)}.get(cell.mode, (0,))
    bias = torch.tensor(opened, dtype=dtype).repeat_interleave(n)
    return Weights(hidden, hidden, bias=bias), Saved(output, saved, torch.zeros(batch, n * cell.states, dtype=dtype))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("schedule", ["chunked", "chunked:3", "chunked:32", "blelloch", "planned"])
@pytest.mark.parametrize("mode", [mode for mode, cell in CELLS.items() if isinstance(cell, FusedCell)])
def test_what_equal_steps_round_does_not_add_up(mode: str, schedule: str, seed: int) -> None:
    """Up to a bound that is derived where linear recurrences are tested."""
    time, batch, cell = 5_000, 2, CELLS[mode]

    def solved(schedule: str, dtype: torch.dtype) -> torch.Tensor:
        weights, saved = equal_steps(cell, time, batch, seed, dtype)
        rng, shapes = np.random.default_rng(seed), (saved.output.shape, saved.initial.shape)
        gradients = (uniform(rng, *shape).to(dtype) for shape in shapes)
        layer = LayerPass(cell, Sequences.equal(time, batch), 1, parse("sequential", "states"), parse(schedule))
        x = torch.zeros(time * batch, 12, dtype=dtype)
        gates, rows, _ = layer.solve_backward(x, weights, saved, *gradients)
        assert rows == slice(0, batch * time)
        return gates.view(time, -1)

    expected = solved("sequential", torch.float64)
    sequential, error = (
        float((solved(way, torch.float32) - expected).abs().max() / expected.abs().max())
        for way in ("sequential", schedule)
    )
    size = 12 * cell.states
    condition = size**0.5
    assert error <= 2 * (1 + condition) * sequential + (size + 2) * condition * torch.finfo(torch.float32).eps


def forgetful(module: nn.RNNBase) -> nn.RNNBase:
    """With weights by which a gradient vanishes within twenty steps."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "weight_hh" in name:
                weight *= 1e-20
            if "bias" in name:
                # The gate that keeps a GRU's and an LSTM's state is the second one.
                weight[module.hidden_size : 2 * module.hidden_size] = -60
    return module


@pytest.mark.parametrize("batch", [1, 11])
@pytest.mark.parametrize("lengths", ["equal", "packed"])
@pytest.mark.parametrize("schedule", ["sequential", "auto", "relaxed", "chunked"])
@ALL
def test_gradients_that_vanish(kind: str, schedule: str, lengths: str, batch: int) -> None:
    time, size = 150, 5
    layer, reference = pair(kind, 3, size, bidirectional=True, schedule=schedule, chunk=16)
    torch.manual_seed(0)
    forgetful(layer)
    reference.load_state_dict(layer.state_dict())
    weights = torch.zeros(time, batch, 2 * size, dtype=torch.float64)
    # Between the steps that have a gradient it vanishes; and not all samples have one at the same steps.
    for step, sample in ((140, 0), (70, batch // 2), (69, 0), (3, batch - 1)):
        weights[step, sample] = torch.randn(2 * size, dtype=torch.float64)
    steps = torch.randint(1, time + 1, (batch,)) if lengths == "packed" else torch.full((batch,), time)
    steps[0] = time
    results = []
    for module in (layer, reference):
        x = torch.randn(time, batch, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        given = x if lengths == "equal" else pack_padded_sequence(x, steps, enforce_sorted=False)
        output = padded(module(given)[0])
        results.append(torch.autograd.grad((output * weights).sum(), [x, *module.parameters()]))
    for ours, theirs in zip(*results, strict=True):
        # Elements as small as they are.
        assert ((ours - theirs).abs() <= 1e-9 * theirs.abs() + 1e-300).all()
    assert not results[0][0][100:120].any()


@pytest.mark.parametrize("direction", [1, -1])
@given(data=st.data())
def test_rows_that_gradients_reach(direction: int, data: st.DataObject) -> None:
    lengths = sorted(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)), reverse=True)
    sizes = torch.tensor([sum(length > time for length in lengths) for time in range(lengths[0])])
    runs = Sequences.packed(sizes).whole(direction)
    reach = np.array([data.draw(st.integers(0, length)) for length in lengths])
    rows, others = runs.live_rows(reach)
    offset = np.append(0, np.cumsum(sizes))
    expected = {
        offset[time] + sample
        for sample, (length, steps) in enumerate(zip(lengths, reach, strict=True))
        for time in (range(length - steps, length) if direction > 0 else range(steps))
    }
    covered = set(range(rows.start, rows.stop))
    assert len(set(others)) == len(others) and set(others) == covered - expected and expected <= covered


@ALL
def test_gradients_that_vanish_are_zeros_at_once(kind: str) -> None:
    torch.manual_seed(0)
    layer, _ = pair(kind, 3, 20, dtype=torch.float32, schedule="sequential")
    x = torch.randn(3000, 3, 3, requires_grad=True)
    output, _ = layer(x)
    output[-1].sum().backward()
    number = torch.finfo(torch.float32)
    subnormal = (x.grad != 0) & (x.grad.abs() < number.tiny)
    wide = x.detach().double().requires_grad_()
    layer.double()(wide)[0][-1].sum().backward()
    # On their way, and not for long: a step of half a unit in the last place is rounded to none.
    assert subnormal.any(dim=(1, 2)).sum() < 100
    # Where the exact gradient is as small: it is a sum over the gates, each of which may have been taken for zero.
    gates = len(layer.weight_ih_l0)
    assert (wide.grad[subnormal].abs() < (1 + gates) * number.tiny).all() and not x.grad[:1000].any()
    # The mode is the caller's again.
    assert np.float32(1e-40) * np.float32(1) != 0 and bool(torch.tensor(1e-40) * 1 != 0)


@ALL
@pytest.mark.parametrize("schedule", ["sequential", "chunked", "relaxed", "blelloch"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_no_number_is_seen_where_gradients_vanish(kind: str, schedule: str, value: float) -> None:
    layer, _ = pair(kind, 3, 5, schedule=schedule, chunk=16)
    forgetful(layer)
    x = torch.randn(150, 2, 3, dtype=torch.float64)
    x[2, 1, 0] = value
    output, _ = layer(x)
    output[-1].sum().backward()
    assert not layer.weight_ih_l0.grad.isfinite().all()
