"""Layers of small states in a launch or two, fiber by fiber on the CPU, against torch.nn's in float64."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from torch import nn

import jacsparse
from jacsparse.recurrence.recurrent import Recurrent
from jacsparse.recurrence.small_layer import MOST_BLOCKS, small_layers
from jacsparse.runtime import active_backend
from jacsparse.schedule import Step, blelloch, linear
from tests.cuda.harness import DEVICE, emulated, took_small_kernels
from tests.cuda.test_recurrent import KINDS

#: Errors of float32 relative to the largest element: a gradient of a weight is a sum over all steps.
TOLERANCE = 5e-5


def pair(kind: str, inputs: int, size: int, scale: float = 1.0, **options: Any) -> tuple[Recurrent, nn.RNNBase]:
    """Our layer where kernels run, and torch.nn's with the same weights in float64."""
    ours, theirs, more = KINDS[kind]
    shared = {name: options.pop(name) for name in ("schedule", "forward", "chunk") if name in options}
    reference = theirs(inputs, size, **more, **options)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.mul_(scale if "weight_hh" in name else 1)
    layer = ours(inputs, size, **more, **options, **shared)
    layer.load_state_dict(reference.state_dict())
    return layer.to(DEVICE), reference.double()


def states_of(last: Any) -> list[torch.Tensor]:
    return list(last) if isinstance(last, tuple) else [last]


def check(
    layer: Recurrent,
    reference: nn.RNNBase,
    x: torch.Tensor,
    first: Any = None,
    *,
    of_output: bool = True,
    of_last: bool = True,
    tolerance: float = TOLERANCE,
) -> None:
    """Compares outputs, last states, and gradients of the input, the first states and the weights."""
    results = []
    for module, dtype in ((layer, torch.float32), (reference, torch.float64)):
        place = DEVICE if module is layer else torch.device("cpu")
        leaf = x.to(place, dtype).detach().requires_grad_()
        starts = (
            [each.to(place, dtype).detach().requires_grad_() for each in states_of(first)] if first is not None else []
        )
        hx = None if first is None else tuple(starts) if len(starts) > 1 else starts[0]
        with emulated():
            output, last = module(leaf, hx)
            torch.manual_seed(7)
            terms = [output] * of_output + states_of(last) * of_last
            loss = sum((each * torch.randn(each.shape).to(each)).sum() for each in terms)
            leaves = [leaf, *starts, *module.parameters()]
            results.append([output, *states_of(last), *torch.autograd.grad(loss, leaves)])
    assert took_small_kernels(layer)
    for actual, expected in zip(*results, strict=True):
        largest = max(1e-30, expected.abs().max().item())
        assert (actual.cpu() - expected).abs().max() <= tolerance * largest


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_shapes(kind: str, number: int) -> None:
    drawn = random.Random(f"{kind} {number}")
    time, batch = drawn.choice([1, 2, 7, 30, 61, 100]), drawn.choice([1, 2, 5])
    inputs, size = drawn.choice([1, 3, 4, 31, 32, 33, 50]), drawn.choice([1, 2, 19, 20, 21, 31, 32])
    chunks = {name: f"relaxed:{drawn.choice([1, 3, 8, 20])}" for name in ("schedule", "forward")}
    options = {name: drawn.choice([value, "auto", "sequential"]) for name, value in chunks.items()}
    batch_first, bidirectional, bias = (drawn.random() < 0.4 for _ in range(3))
    scale, layers = drawn.choice([0.3, 1.0, 1.7]), drawn.choice([1, 1, 2])
    torch.manual_seed(number)
    layer, reference = pair(
        kind, inputs, size, scale, num_layers=layers, bidirectional=bidirectional, bias=bias, batch_first=batch_first,
        **options,
    )  # fmt: skip
    shape = (batch, time, inputs) if batch_first else (time, batch, inputs)
    places = layers * (2 if bidirectional else 1)
    first: Any = None
    if drawn.random() < 0.7:
        first = tuple(torch.randn(places, batch, size) for _ in range(2 if kind == "LSTM" else 1))
        first = first if kind == "LSTM" else first[0]
    which = drawn.choice([(True, True), (True, False), (False, True)])
    check(layer, reference, torch.randn(shape), first, of_output=which[0], of_last=which[1])
    for report in layer.reports:
        asked = options["forward" if report.recurrence == "forward" else "schedule"].partition(":")
        assert report.steps == time and report.methods[0] in ("sequential", "relaxed")
        if report.methods[0] == "relaxed" and asked[2]:
            assert report.chunk == int(asked[2]) and len(report.defects) == report.sweeps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [25, 8])
def test_states_that_are_forgotten_need_two_sweeps(kind: str, chunk: int) -> None:
    """By eight warps of a block, or swept before."""
    torch.manual_seed(0)
    layer, reference = pair(kind, 3, 20, 0.1, schedule=f"relaxed:{chunk}", forward=f"relaxed:{chunk}")
    with torch.no_grad():
        # Gates that forget soon: GRU's z, LSTM's f.
        if kind in ("GRU", "LSTM"):
            for module in (layer, reference):
                module.bias_ih_l0[20:40] -= 4
    check(layer, reference, torch.randn(100, 2, 3))
    for report in layer.reports:
        assert report.methods == ["relaxed"] and report.fallback_steps == 0 and 1 <= report.sweeps <= 3
        assert report.defects[-1] <= 8 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [10, 5])
def test_states_that_are_not_are_finished_step_after_step(kind: str, chunk: int) -> None:
    torch.manual_seed(0)
    layer, reference = pair(kind, 3, 20, 2.0, schedule=f"relaxed:{chunk}", forward=f"relaxed:{chunk}")
    check(layer, reference, torch.randn(60, 2, 3))
    sequential, _ = pair(kind, 3, 20, schedule="sequential", forward="sequential")
    sequential.load_state_dict(layer.state_dict())
    x = torch.randn(60, 2, 3).to(DEVICE)
    with emulated():
        outputs = [module(x)[0] for module in (layer, sequential)]
    report = layer.reports[0]
    # All that was not settled is the sequential one, bit for bit.
    late = report.fallback_steps // 2
    assert report.methods == ["relaxed", "sequential"] and report.fallback_samples == 2 and late > 0
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_one_gradient_at_a_time(kind: str) -> None:
    """Others are not asked for, and their memory is nowhere."""
    torch.manual_seed(0)
    layer, reference = pair(kind, 3, 5, bidirectional=True)
    x, weights = torch.randn(7, 2, 3), [name for name, _ in layer.named_parameters()]
    for wanted in ("x", *weights):
        results = []
        for module, dtype in ((layer, torch.float32), (reference, torch.float64)):
            leaf = x.to(next(module.parameters()).device, dtype)
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name == wanted)
            leaf.requires_grad_(wanted == "x")
            with emulated():
                output = module(leaf)[0]
                target = leaf if wanted == "x" else module.get_parameter(wanted)
                results.append(torch.autograd.grad(output.square().sum(), target)[0].cpu().double())
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


class _NegatedGradient(torch.autograd.Function):
    """Minus the products, whose gradient is a view of what is there with its sign changed."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        ctx.factors = factors
        return -output * factors

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch._neg_view(gradient * ctx.factors), None


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_any_strides(kind: str) -> None:
    torch.manual_seed(0)
    layer, reference = pair(kind, 3, 5, schedule="relaxed:3")
    x = torch.randn(10, 2, 3)
    factors = torch.randn(10, 2, 5)
    for of in (
        lambda y: y.sum(),
        lambda y: y[-1].sum(),
        lambda y: (y.transpose(0, 1).contiguous() ** 2).sum(),
        # The gradient comes with a sign that is not in memory.
        lambda y: _NegatedGradient.apply(y, factors.to(y)).sum(),
    ):
        results = []
        for module, dtype in ((layer, torch.float32), (reference, torch.float64)):
            with emulated():
                output = module(x.to(next(module.parameters()).device, dtype))[0]
                gradients = torch.autograd.grad(of(output), list(module.parameters()))
            results.append([each.cpu().double() for each in gradients])
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_inputs_of_any_strides() -> None:
    torch.manual_seed(0)
    layer, reference = pair("GRU", 3, 5)
    for x in (
        torch.randn(10, 3, 2).transpose(1, 2),
        torch.randn(2, 10, 6)[:, :, ::2].transpose(0, 1),
        torch.randn(1, 2, 3).expand(10, 2, 3),
    ):
        check(layer, reference, x)


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_sequence(kind: str) -> None:
    torch.manual_seed(0)
    layer, _ = pair(kind, 3, 5, num_layers=2)
    x, count = torch.randn(10, 3).to(DEVICE), layer.cell.states
    first = tuple(torch.randn(2, 5).to(DEVICE) for _ in range(count))
    for hx, batched in ((None, None), (first, tuple(each.unsqueeze(1) for each in first))):
        with emulated():
            output, last = layer(x, hx if hx is None or count > 1 else hx[0])
            assert took_small_kernels(layer)
            whole, ends = layer(x.unsqueeze(1), batched if batched is None or count > 1 else batched[0])
        assert torch.equal(output, whole[:, 0])
        for one, other in zip(states_of(last), states_of(ends), strict=True):
            assert torch.equal(one, other[:, 0])
    with emulated(), pytest.raises(ValueError, match=r"has shape \(2, 1, 5\); expected \(2, 5\)"):
        layer(x, batched if count > 1 else batched[0])


def test_an_output_can_be_changed_and_a_graph_kept() -> None:
    torch.manual_seed(0)
    layer, _ = pair("GRU", 3, 5, schedule="relaxed:4")
    x = torch.randn(10, 2, 3).to(DEVICE)
    with emulated():
        output, last = layer(x)
        loss = output.square().sum() + last.sum()
        expected = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
        again = torch.autograd.grad(loss, list(layer.parameters()))
        output, last = layer(x)
        changed = output.mul_(2)
        half = torch.autograd.grad((changed / 2).square().sum() + last.sum(), list(layer.parameters()))
    for one, two, three in zip(expected, again, half, strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, three, rtol=1e-5, atol=1e-6)
    assert [report.recurrence for report in layer.reports] == ["forward", "backward"]


def test_weights_that_are_replaced_and_reshaped_are_seen() -> None:
    torch.manual_seed(0)
    layer, reference = pair("RNN", 3, 5)
    x = torch.randn(10, 2, 3)
    check(layer, reference, x)
    for module in (layer, reference):
        weight = module.weight_hh_l0
        module.weight_hh_l0 = nn.Parameter(torch.linspace(-1, 1, 25).reshape(5, 5).to(weight))
    check(layer, reference, x)
    layer.weight_hh_l0.data = torch.zeros(5, 4).to(DEVICE)
    with emulated(), pytest.raises(ValueError, match=r"weight_hh_l0 has shape \(5, 4\); expected \(5, 5\)"):
        layer(x.to(DEVICE))
    layer.weight_hh_l0.data = torch.zeros(5, 5, dtype=torch.float64).to(DEVICE)
    with (
        emulated(),
        pytest.raises(TypeError, match=r"weight_hh_l0 is torch.float64 on .*, and the input torch.float32"),
    ):
        layer(x.to(DEVICE))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_that_is_no_number_harms_no_other(kind: str) -> None:
    torch.manual_seed(0)
    layer, _ = pair(kind, 3, 5, schedule="relaxed:4", forward="relaxed:4")
    sequential, _ = pair(kind, 3, 5, schedule="sequential", forward="sequential")
    sequential.load_state_dict(layer.state_dict())
    x = torch.randn(30, 3, 3).to(DEVICE)
    x[7, 1] = float("nan")
    results = []
    for module in (layer, sequential):
        leaf = x.clone().requires_grad_()
        with emulated():
            output = module(leaf)[0]
            results.append((output, torch.autograd.grad(output.sum(), leaf)[0]))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert results[0][0][8:, 1].isnan().all() and not results[0][0][:, [0, 2]].isnan().any()


def test_a_warm_start_settles_in_one_sweep() -> None:
    torch.manual_seed(0)
    for kind in ("GRU", "LSTM"):
        layer, _ = pair(kind, 3, 5, 0.02, forward="relaxed:20", bidirectional=True)
        x = torch.randn(150, 2, 3).to(DEVICE)
        with emulated():
            expected = layer(x)[0]
            cold, boundaries = layer.reports, layer.boundaries
            assert [each.shape for each in boundaries] == [(16, 5 * (2 if kind == "LSTM" else 1))] * 2
            actual = layer(x, warm=boundaries)[0]
            # They are the caller's.
            copies = layer.boundaries
            copies[0].zero_()
            assert layer.boundaries[0].any()
        warm = layer.reports
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        assert all(one.sweeps == 1 and other.sweeps > 1 for one, other in zip(warm, cold, strict=True))
        # Numbers that are none are no start.
        with emulated():
            lost = [torch.full_like(each, float("nan")) for each in boundaries]
            assert torch.equal(layer(x, warm=lost)[0], expected)
        assert layer.reports == cold
        for forward in ("relaxed:20", "sequential"):
            layer.forward_method = forward
            with emulated(), pytest.raises(ValueError, match=r"the warm start holds states \(3, 5\)"):
                layer(x, warm=[torch.zeros(3, 5).to(DEVICE)] * 2)
        layer.schedule = linear(5)
        with emulated(), pytest.raises(ValueError, match="the schedule is for 5 stages, but 150 steps"):
            layer(x)


def test_last_states_of_two_layers_are_whole_tensors() -> None:
    """As in truncated back-propagation: detached in place, and passed on."""
    torch.manual_seed(0)
    layer, reference = pair("LSTM", 3, 5, num_layers=2, bidirectional=True)
    x, results = torch.randn(9, 2, 3), []
    for module, dtype in ((layer, torch.float32), (reference, torch.float64)):
        with emulated():
            _, last = module(x.to(next(module.parameters()).device, dtype))
            for state in last:
                assert not state._is_view() and state.is_contiguous()
                state.detach_()
            output, (h, c) = module(x.to(next(module.parameters()).device, dtype), last)
            h.mul_(2)
            loss = output.sum() + h.sum() + c.square().sum()
            results.append([each.cpu().double() for each in torch.autograd.grad(loss, list(module.parameters()))])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_dropout_between_layers() -> None:
    torch.manual_seed(0)
    layer = jacsparse.nn.GRU(3, 20, num_layers=2, dropout=0.5).to(DEVICE)
    x = torch.randn(10, 4, 3).to(DEVICE)
    with emulated():
        one, other = layer(x)[0], layer(x)[0]
        layer.eval()
        still = [layer(x)[0] for _ in range(2)]
    assert not torch.equal(one, other) and torch.equal(*still)


def test_what_is_refused() -> None:
    layer, _ = pair("GRU", 3, 5)
    x = torch.randn(10, 2, 3).to(DEVICE).requires_grad_()
    with emulated():
        output = layer(x)[0]
        (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
            gradient.sum().backward()
        # By what the gradient that comes to the layer depends on, alone.
        for part in range(2):
            factor = torch.ones(1, device=DEVICE, requires_grad=True)
            (gradient,) = torch.autograd.grad((factor * layer(x)[part]).sum(), x, create_graph=True)
            with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
                torch.autograd.grad(gradient.square().sum(), factor)
        output = layer(x)[0]
        with pytest.raises(NotImplementedError, match="no batching rule"):
            torch.autograd.grad(output, x, torch.ones(3, *output.shape).to(DEVICE), is_grads_batched=True)
        with pytest.raises(NotImplementedError, match="no batching rule"):
            torch.func.vmap(lambda each: layer(each)[0])(torch.randn(4, 10, 2, 3).to(DEVICE))


def test_reports_and_layers_can_be_copied() -> None:
    layer, _ = pair("GRU", 3, 5, schedule="relaxed:4", forward="relaxed:4")
    with emulated():
        layer(torch.randn(30, 2, 3).to(DEVICE))[0].sum().backward()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.reports == layer.reports and len(other.boundaries) == 1
        assert torch.equal(other.boundaries[0], layer.boundaries[0])
        with emulated():
            other(torch.randn(30, 2, 3).to(DEVICE))


@pytest.mark.parametrize(
    "options", [{"schedule": "chunked:4"}, {"schedule": "blelloch"}, {"forward": "newton"}, {"dtype": torch.float64}]
)
def test_other_ways_and_types_are_others_work(options: dict[str, Any]) -> None:
    layer = jacsparse.nn.GRU(3, 5, **options).to(DEVICE)
    with emulated():
        layer(torch.randn(10, 2, 3, dtype=options.get("dtype")).to(DEVICE))[0].sum().backward()
    assert not took_small_kernels(layer)


def test_autocast_changes_nothing() -> None:
    torch.manual_seed(0)
    layer, _ = pair("GRU", 40, 5)
    x = torch.randn(10, 2, 40).to(DEVICE).requires_grad_()
    results = []
    for enabled in (False, True):
        with emulated(), torch.autocast(DEVICE.type, enabled=enabled, dtype=torch.bfloat16):
            output = layer(x)[0]
            results.append([output, *torch.autograd.grad(output.sum(), [x, *layer.parameters()])])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype == torch.float32 and torch.equal(one, other)


def test_a_call_does_not_go_through_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose steps take longer to hash than a call takes."""
    layer = jacsparse.nn.GRU(3, 5, schedule=blelloch(11)).to(DEVICE)
    monkeypatch.setattr(Step, "__hash__", None)
    with emulated():
        layer(torch.randn(10, 2, 3).to(DEVICE))[0].sum().backward()
    assert not took_small_kernels(layer)


@pytest.mark.parametrize("size", [4, 40])
def test_small_states_that_are_not_forgotten(size: int) -> None:
    """A sum over all steps, whose first chunks come to as much as the tolerance of states of order one."""
    layer = jacsparse.nn.RNN(1, size, nonlinearity="relu", bias=False, forward="parallel:8").to(DEVICE)
    with torch.no_grad():
        layer.weight_ih_l0.fill_(1)
        layer.weight_hh_l0.copy_(torch.eye(size))
    x = torch.full((100, 2, 1), 1e-9).to(DEVICE)
    with emulated():
        output, last = layer(x)
    assert took_small_kernels(layer) == (size <= 32)
    torch.testing.assert_close(last.cpu(), torch.full_like(last.cpu(), 1e-7), rtol=1e-5, atol=0)
    torch.testing.assert_close(output[:, 0, 0].cpu(), torch.arange(1, 101) * 1e-9, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_small_inputs_without_biases(kind: str) -> None:
    torch.manual_seed(0)
    layer, reference = pair(kind, 3, 8, bias=False, forward="relaxed:25", schedule="relaxed:25")
    check(layer, reference, 1e-6 * torch.randn(200, 2, 3))


@pytest.mark.parametrize("size", [8, 40])
def test_a_large_first_cell_state_harms_no_later_output(size: int) -> None:
    torch.manual_seed(0)
    layer, reference = (each for each in pair("LSTM", 3, size, forward="parallel:25", schedule="sequential"))
    for module in (layer, reference):
        with torch.no_grad():
            module.bias_ih_l0[size : 2 * size] += 1.5
    x, c = torch.randn(400, 2, 3), 1000 * torch.randn(1, 2, size)
    with emulated():
        actual = layer(x.to(DEVICE), (torch.zeros(1, 2, size).to(DEVICE), c.to(DEVICE)))[0].cpu()
    expected = reference(x.double(), (torch.zeros(1, 2, size).double(), c.double()))[0]
    error, largest = (actual - expected).abs(), expected.abs().amax(dim=(1, 2), keepdim=True)
    assert (error <= 2e-5 * largest).all()


def test_chunks_beyond_what_a_grid_has_are_others_work() -> None:
    layer = jacsparse.nn.GRU(1, 2, forward="relaxed:1", schedule="sequential").to(DEVICE)
    steps = 4 * MOST_BLOCKS + 1
    with emulated(), torch.no_grad():
        for count in (steps - 1, steps):
            layers = layer._chosen.forward[:2]
            assert layers == ("relaxed", 1)
            small = small_layers(
                layer.cell.frozen, count, 1, 1, 2, 1, 1, True, layers, ("sequential", 1), torch.float32, DEVICE,
                active_backend(),
            )  # fmt: skip
            assert (small is None) == (count == steps)
