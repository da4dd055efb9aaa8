"""Loops that are written by hand: their steps are stages, and their gradients autograd's."""

from __future__ import annotations

import concurrent.futures
import copy
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import jacsparse
from jacsparse.nn import Scan
from tests.helpers import close

INPUTS, STATE = 3, 4


class Loop(nn.Module):
    """A loop with the parts that the cases below take."""

    def __init__(self, run: Callable[..., torch.Tensor], cell: Callable[..., nn.Module] = nn.GRUCell) -> None:
        super().__init__()
        self.run = run
        self.cell, self.back, self.second = cell(INPUTS, STATE), cell(INPUTS, STATE), cell(STATE, STATE)
        self.into, self.over, self.head = nn.Linear(INPUTS, STATE), nn.Linear(STATE, STATE), nn.Linear(STATE, 2)
        self.both, self.norm, self.batch_norm = nn.Linear(2 * STATE, 2), nn.LayerNorm(STATE), nn.BatchNorm1d(STATE)
        self.first = nn.Parameter(torch.randn(STATE))

    def zeros(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(len(x), STATE)

    def forward(self, x: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        return self.run(self, x, *arguments)


def made(run: Callable[..., torch.Tensor], cell: Callable[..., nn.Module] = nn.GRUCell) -> Loop:
    torch.manual_seed(0)
    return Loop(run, cell).double()


def last(m: Loop, x: torch.Tensor, h: torch.Tensor | None = None) -> torch.Tensor:
    h = m.zeros(x) if h is None else h
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
    return h


def long_short(m: Loop, x: torch.Tensor, h: torch.Tensor | None = None) -> torch.Tensor:
    h = m.zeros(x) if h is None else h
    c = h
    for t in range(x.shape[1]):
        h, c = m.cell(x[:, t], (h, c))
    return h


def by_hand(m: Loop, x: torch.Tensor, h: torch.Tensor | None = None) -> torch.Tensor:
    h, projected = m.zeros(x) if h is None else h, m.into(x)
    for t in range(x.shape[1]):
        z = torch.sigmoid(projected[:, t] + m.over(h))
        h = (1 - z) * h + z * torch.tanh(2 * projected[:, t] + m.over(z * h))
    return h


def stacked(m: Loop, x: torch.Tensor, h: torch.Tensor | None = None) -> torch.Tensor:
    h, states = m.zeros(x) if h is None else h, []
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
        states.append(h)
    return torch.tanh(m.head(torch.stack(states, 1)))


def both_ways(m: Loop, x: torch.Tensor, h: torch.Tensor | None = None) -> torch.Tensor:
    forth = back = m.zeros(x) if h is None else h
    states, others = [], []
    for t in range(x.shape[1]):
        forth = m.cell(x[:, t], forth)
        states.append(forth)
    for t in reversed(range(x.shape[1])):
        back = m.back(x[:, t], back)
        others.append(back)
    return m.both(torch.cat([torch.stack(states, 1), torch.stack(others[::-1], 1)], -1))


def two_layers(m: Loop, x: torch.Tensor, h: torch.Tensor | None = None) -> torch.Tensor:
    first = second = m.zeros(x) if h is None else h
    states = []
    for t in range(x.shape[1]):
        first = m.cell(x[:, t], first)
        states.append(first)
    y = torch.stack(states, 1)
    for t in range(x.shape[1]):
        second = m.second(y[:, t], second)
    return second


#: The loops of the how-to, with the cell and the number of loops in each.
ASKED: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., nn.Module], int]] = {
    "RNN": (last, nn.RNNCell, 1),
    "GRU": (last, nn.GRUCell, 1),
    "LSTM": (long_short, nn.LSTMCell, 1),
    "by hand": (by_hand, nn.GRUCell, 1),
    "stack and head": (stacked, nn.GRUCell, 1),
    "bidirectional": (both_ways, nn.GRUCell, 2),
    "two layers": (two_layers, nn.GRUCell, 2),
}


def gradients(f: Callable[..., torch.Tensor], m: Loop, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of inputs and weights for a drawn one of the output; what has none has zeros."""
    torch.manual_seed(1)
    y = f(*inputs)
    weights = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2))
    wanted = [each for each in (*inputs, *m.parameters()) if each.requires_grad]
    found = torch.autograd.grad(y, wanted, weights, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]


def compare(
    scan: Scan,
    m: Loop,
    *inputs: torch.Tensor,
    tolerance: float = 1e-10,
    expected: Sequence[torch.Tensor] | None = None,
) -> None:
    expected = gradients(m, m, *inputs) if expected is None else expected
    for found, wanted in zip(gradients(scan, m, *inputs), expected, strict=True):
        close(found, wanted, tolerance)


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(3)).requires_grad_()


@pytest.fixture(autouse=True)
def _all_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.mark.parametrize("name", ASKED)
def test_200_steps(name: str) -> None:
    run, cell, count = ASKED[name]
    m, x, h = made(run, cell), drawn(2, 200, INPUTS), drawn(2, STATE)
    expected = gradients(m, m, x, h)
    for schedule in ("blelloch", "linear"):
        scan = Scan(m, schedule=schedule)
        compare(scan, m, x, h, expected=expected)
        loops = [report for report in scan.reports if report.steps > 100]
        assert len(loops) == count and {report.steps for report in loops} <= {199, 200}
        method = "blelloch" if schedule == "blelloch" else "sequential"
        assert all(report.methods == [method] and report.recurrence == "backward" for report in loops)


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("schedule", ["blelloch", "blelloch:1", "chunked:5", "balanced:3"])
def test_first_states_that_are_constants(name: str, schedule: str) -> None:
    run, cell, _ = ASKED[name]
    m = made(run, cell)
    compare(Scan(m, schedule=schedule), m, drawn(3, 17, INPUTS))


def _two_in_one(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h = k = m.zeros(x)
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
        k = m.second(h, k)
    return h * k


def _outputs_in_a_list(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h = k = m.zeros(x)
    states = []
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
        states.append(h)
    for state in states:
        k = m.second(state, k)
    return k


def _head_within(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h, outputs = m.zeros(x), []
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
        outputs.append(m.head(h).relu())
    return torch.stack(outputs, 1)


def _written(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h, out = m.zeros(x), x.new_zeros(len(x), x.shape[1], STATE)
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
        out[:, t] = h
    return out


def _two_steps_ago(m: Loop, x: torch.Tensor) -> torch.Tensor:
    states = [m.zeros(x)] * 3
    for t in range(x.shape[1]):
        states.append(torch.tanh(m.into(x[:, t]) + m.over(states[-1])) + 0.3 * states[-3])
    return states[-1]


def _differences(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h, before = m.zeros(x), x[:, 0]
    for t in range(1, x.shape[1]):
        h = torch.tanh(m.into(x[:, t] - before) + m.over(h))
        before = x[:, t]
    return h


def _windows(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h = m.zeros(x)
    for t in range(x.shape[1] - 2):
        h = torch.tanh(m.into(x[:, t : t + 3]).mean(1) + m.over(h))
    return h


def _time_first(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h = m.zeros(x)
    for step in x.transpose(0, 1):
        h = m.cell(step, h)
    return h


def _samples_last(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h = x.new_zeros(STATE, len(x))
    for step in x.unbind(1):
        h = torch.tanh(m.into(step).T + m.over.weight @ h)
    return h.T


def _same_input(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h, projected = m.zeros(x), m.into(x[:, 0])
    for _ in range(20):
        h = torch.tanh(projected + m.over(h))
    return h


def _numbers_of_steps(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h = m.zeros(x)
    for t in range(x.shape[1]):
        h = h + (torch.tanh(m.into(x[:, t]) + m.over(h)) - h) * (0.2 + 0.03 * t)
    return h


def _lengths(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h, lengths, outputs = m.zeros(x), torch.arange(len(x)) * 5 % x.shape[1] + 1, []
    for t in range(x.shape[1]):
        lives = (lengths > t)[:, None]
        h = torch.where(lives, m.cell(x[:, t], h), h)
        outputs.append(h * lives)
    return torch.stack(outputs, 1)


def _constant_part(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h = m.zeros(x)
    for t in range(x.shape[1]):
        with torch.no_grad():
            gate = (h > 0.1).to(h)
        h = torch.tanh(m.into(x[:, t]) + m.over(h) * gate) * h.detach().cos() + 0.3 * h
    return h


def _sum_of_outputs(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h, total = m.zeros(x), 0.0
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
        total = total + m.head(h) * 0.9**t
    return total  # type: ignore[return-value]


def _decoder(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h, y, outputs = m.into(x.mean(1)), x[:, 0], []
    for _ in range(x.shape[1]):
        h = m.cell(y, h)
        y = torch.tanh(h[:, :INPUTS])
        outputs.append(y)
    return torch.stack(outputs, 1)


def _matrix_state(m: Loop, x: torch.Tensor) -> torch.Tensor:
    memory = x.new_zeros(len(x), STATE, STATE)
    for t in range(x.shape[1]):
        key = m.into(x[:, t])
        memory = 0.9 * memory + torch.tanh(memory @ m.over.weight) + key[:, :, None] * key[:, None].tanh()
    return memory.flatten(1)


def _tied_weights(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h, x = m.zeros(x), torch.tanh(m.over(m.into(x)))
    for t in range(x.shape[1]):
        h = m.norm(torch.tanh(x[:, t] + m.over(h)))
    return m.over(h).sin()


def _trained_first_state(m: Loop, x: torch.Tensor) -> torch.Tensor:
    return last(m, x, torch.tanh(m.first).expand(len(x), -1))


def _loop_in_a_loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h = m.zeros(x)
    for t in range(x.shape[1]):
        inner = h
        for _ in range(9):
            inner = torch.tanh(m.into(x[:, t]) + 0.5 * m.over(inner))
        h = torch.sigmoid(m.over(inner)) * h + inner
    return h


def _passed_by(m: Loop, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([last(m, x), x.sum(1), m.into(x).prod(1)], 1)


def _read_by_all_steps(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h, outputs = torch.tanh(m.first).expand(len(x), -1), list[torch.Tensor]()
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
        outputs.append(h)
        outputs.append(h * outputs[0])
    return torch.stack(outputs, 1)


def _pieces_of_pieces(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h, parts = torch.tanh(m.first).expand(len(x), -1), []
    for t in range(x.shape[1]):
        part = x[:, :, 1:]
        parts.append(part)
        h = torch.tanh(part[:, t] @ m.over.weight[:2] + m.over(h))
    return torch.cat([h, torch.stack(parts).prod(2).sum(0)], 1)


def _attends_to_another_loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h, states = m.zeros(x), []
    for t in range(x.shape[1]):
        h = torch.tanh(m.into(x[:, t]) + m.over(h))
        states.append(h)
    encoded = torch.stack(states, 1)
    for _ in range(9):
        shares = torch.softmax((encoded * h[:, None]).sum(-1), 1)
        h = torch.tanh(m.over(h) + (shares[..., None] * encoded).sum(1))
    return h


def _dropped(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(m.first).expand(len(x), -1)
    for t in range(x.shape[1]):
        h = nn.functional.dropout(m.cell(x[:, t], h), 0.2)
    return h


def _broadcast_first_state(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h = m.first
    for t in range(x.shape[1]):
        h = torch.tanh(m.into(x[:, t]) + m.over(h))
    return h


def _reads_its_state_alone(m: Loop, x: torch.Tensor) -> torch.Tensor:
    p, v = m.into(x[:, 0]).chunk(2, 1)
    for _ in range(20):
        v = v - 0.1 * torch.sin(p)
        p = p + 0.1 * v
    return p + v


def _first_state_without_samples(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h = m.first
    for t in range(x.shape[1]):
        h = torch.tanh(h * m.norm.weight + x[:, t, :1])
    return h


def _first_states_without_samples(m: Loop, x: torch.Tensor) -> torch.Tensor:
    before, h = m.first, m.first.sin()
    for t in range(x.shape[1]):
        before, h = h, torch.tanh(h * m.over.bias + 0.5 * before * m.norm.weight + x[:, t, :1])
    return h


def _first_state_of_one_sample(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h, outputs = m.first[None], []
    for t in range(x.shape[1]):
        h = torch.tanh(m.into(x[:, t]) + m.over(h))
        outputs.append(h)
    return torch.stack(outputs, 1)


def _tensors_of_steps(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h = m.zeros(x)
    for t in range(x.shape[1]):
        h = torch.tanh((m.into(x[:, t]) + m.over(h)) / (t + 1.5)) + (0.1 * t - h) * 0.3 - 0.05 * t
    return h


OTHERS = [
    *(_two_in_one, _outputs_in_a_list, _head_within, _written, _two_steps_ago, _differences, _windows, _time_first),
    *(_samples_last, _same_input, _numbers_of_steps, _lengths, _constant_part, _sum_of_outputs, _decoder),
    *(_matrix_state, _tied_weights, _trained_first_state, _loop_in_a_loop, _passed_by),
    *(_read_by_all_steps, _pieces_of_pieces, _attends_to_another_loop, _dropped, _broadcast_first_state),
    *(_reads_its_state_alone, _first_state_without_samples, _first_states_without_samples),
    *(_first_state_of_one_sample, _tensors_of_steps),
]


@pytest.mark.parametrize("run", OTHERS)
@pytest.mark.parametrize(("batch", "dtype", "tolerance"), [(3, torch.float64, 1e-10), (1, torch.float32, 1e-4)])
def test_other_loops(run: Callable[..., torch.Tensor], batch: int, dtype: torch.dtype, tolerance: float) -> None:
    m = made(run).to(dtype)
    scan = Scan(m, schedule="blelloch")
    compare(scan, m, drawn(batch, 13, INPUTS, dtype=dtype), tolerance=tolerance)
    assert max(report.steps for report in scan.reports) >= 8
    assert any(report.tree is not None and report.methods == ["blelloch"] for report in scan.reports)


def test_arguments_that_pass_by_the_loop() -> None:
    def run(m: Loop, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        state = torch.tanh(h)
        for t in range(x.shape[1]):
            state = m.cell(x[:, t], state) + h
        return state * h

    m = made(run)
    x, leaf = drawn(2, 12, INPUTS), drawn(2, STATE)
    compare(Scan(m, schedule="blelloch"), m, x, leaf * 2)
    compare(Scan(m, schedule="blelloch"), m, x.detach(), leaf)
    for parameter in m.parameters():
        parameter.requires_grad_(False)
    compare(Scan(m, schedule="blelloch"), m, x.detach(), leaf)


def test_early_exits_are_those_of_the_run() -> None:
    def run(m: Loop, x: torch.Tensor) -> torch.Tensor:
        h = m.zeros(x)
        for t in range(x.shape[1]):
            h = m.cell(x[:, t], h)
            if h[0, 0] > 0 and t > 10:
                break
        return h

    m = made(run)
    scan = Scan(m, schedule="blelloch")
    for scale in (1, -1):
        compare(scan, m, (drawn(2, 20, INPUTS) * scale).detach().requires_grad_())


def test_auto_is_autograd() -> None:
    m, x = made(stacked), drawn(2, 12, INPUTS)
    scan = Scan(m)
    compare(scan, m, x)
    (report,) = scan.reports
    assert (report.steps, report.methods) == (1, ["sequential"]) and "no order of products is faster" in report.reason
    # Its output is the module's own, of which there are second derivatives.
    y = scan(x)
    assert y.grad_fn is not None and type(y.grad_fn) is type(m(x).grad_fn)
    scan = Scan(m, schedule="linear")
    compare(scan, m, x)
    assert [(report.steps, report.methods) for report in scan.reports] == [(3, ["linear"]), (11, ["sequential"])]


def test_other_schedules_of_one_scan() -> None:
    m, x = made(last), drawn(2, 12, INPUTS)
    scan = Scan(m, schedule="linear")
    for schedule, method in (("linear", "sequential"), ("blelloch", "blelloch"), ("auto", "sequential")):
        scan.schedule = schedule
        compare(scan, m, x)
        assert scan.reports[-1].methods == [method]


def test_later_calls_and_retained_graphs() -> None:
    m, x = made(stacked), drawn(2, 12, INPUTS)
    scan = Scan(m, schedule="blelloch")
    for _ in range(2):
        compare(scan, m, x)
        with torch.no_grad():
            for parameter in m.parameters():
                parameter.mul_(0.9)
    y = scan(x)
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert not copy.deepcopy(scan).reports and not pickle.loads(pickle.dumps(Scan(nn.ReLU()))).reports
    assert scan.reports
    scan.reset()
    assert not scan.reports


def test_hooks_of_weights_are_called_once() -> None:
    m, x, seen = made(stacked), drawn(2, 12, INPUTS), []
    m.cell.weight_hh.register_hook(lambda g: seen.append(g) or 2 * g)
    m.head.weight.register_hook(lambda g: -g)
    m(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in (m.cell.weight_hh, m.head.weight)]
    m.zero_grad()
    seen.clear()
    Scan(m, schedule="blelloch")(x).sum().backward()
    close(m.cell.weight_hh.grad, expected[0], 1e-10)
    close(m.head.weight.grad, expected[1], 1e-10)
    assert len(seen) == 1


def test_steps_in_parts_where_memory_is_limited() -> None:
    m, x = made(stacked), drawn(2, 33, INPUTS)
    step = 2 * 2 * STATE**2 * 8
    scan = Scan(m, schedule="blelloch", memory_limit=10 * step)
    compare(scan, m, x)
    assert [report.steps for report in scan.reports][:-1] == [2, 10, 10, 10]
    with pytest.warns(RuntimeWarning, match=r"a loop with a state of 4 elements.* take more than 511 bytes"):
        compare(Scan(m, schedule="blelloch", memory_limit=step - 1), m, x)


def test_functions_take_loops() -> None:
    m, x = made(last), drawn(2, 12, INPUTS).detach()
    y, pullback = jacsparse.vjp(m, x, schedule="blelloch")
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(m(leaf), leaf, torch.ones_like(y))
    close(pullback(torch.ones_like(y))[0], expected, 1e-10)
    close(jacsparse.backward(m, x, torch.ones_like(y), schedule="blelloch"), expected, 1e-10)


def _attention(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h = m.zeros(x)
    states = [h]
    for t in range(x.shape[1]):
        earlier = torch.stack(states, 1)
        shares = torch.softmax((earlier * h[:, None]).sum(-1), 1)
        h = m.cell(x[:, t], h) + (shares[..., None] * earlier).sum(1)
        states.append(h)
    return h


def _growing(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h, memory = m.zeros(x), x[:, :1]
    for t in range(1, x.shape[1]):
        memory = torch.cat([memory, x[:, t : t + 1]], 1)
        h = torch.tanh(m.into(memory).sum(1) + m.over(h))
    return h


def _coupled(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h = m.zeros(x)
    for t in range(x.shape[1]):
        h = torch.tanh(m.batch_norm(m.into(x[:, t])) + m.over(h))
    return h


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def _custom(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h = m.zeros(x)
    for t in range(x.shape[1]):
        h = torch.tanh(m.into(x[:, t]) + _Rounded.apply(m.over(h)))
    return h


def _selected(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h, mask = m.into(x[:, 0]), torch.tensor([True, False, True, True])
    for t in range(x.shape[1]):
        h = torch.cat([torch.tanh(m.into(x[:, t]) + m.over(h))[:, mask], h[:, ~mask]], 1)
    return h


def _with_numbers(f: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A loop whose steps combine a state and a new one by a number of theirs."""

    def run(m: Loop, x: torch.Tensor) -> torch.Tensor:
        h = m.zeros(x)
        for t in range(x.shape[1]):
            h = f(h, torch.tanh(m.into(x[:, t]) + m.over(h)), t)
        return h

    return run


def _hooked(m: Loop, x: torch.Tensor) -> torch.Tensor:
    h = m.zeros(x)
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
        if t == 5:
            h.register_hook(lambda g: 3 * g)
    return h


def _another(name: str, argument: str) -> str:
    return rf"a loop of 1[0-3] steps at .*: aten.{name} takes another number as {argument} in each step; autograd"


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (_attention, r"steps are not alike: aten\.\w+ gives .*, and no step may read all earlier ones"),
        (_growing, r"steps are not alike: aten\.\w+ gives .* a state has to keep its size"),
        (_custom, r"a loop of 1[23] steps at .*: _Rounded has a backward pass of its own"),
        (_selected, r"a loop of 1[23] steps at .*: aten.index gives as many elements as a mask says"),
        (_coupled, r"a loop of 12 steps at .*: aten.native_batch_norm couples the samples of a batch"),
        (_with_numbers(lambda h, new, t: torch.lerp(h, new, 1 / (t + 2))), _another("lerp", "weight")),
        (_with_numbers(lambda h, new, t: torch.add(h, new, alpha=0.1 * t + 0.2)), _another("add", "alpha")),
        (
            _with_numbers(lambda h, new, t: nn.functional.leaky_relu(h + new, 0.01 * t)),
            _another("leaky_relu", "negative_slope"),
        ),
        (_with_numbers(lambda h, new, t: torch.clamp(h + new, -0.1 * t, 0.1 * t)), _another("clamp", "min")),
        (_with_numbers(lambda h, new, t: (0.4 * h + 0.2 * new + 0.7) ** (1.1 + t / 9)), _another("pow", "exponent")),
    ],
)
def test_what_is_left_out_says_why(run: Callable[..., torch.Tensor], why: str) -> None:
    m, x = made(run), drawn(3, 13, INPUTS)
    scan = Scan(m, schedule="blelloch")
    with pytest.warns(RuntimeWarning, match=why):
        compare(scan, m, x)
    assert all(report.steps < 8 or report.methods == ["sequential"] for report in scan.reports)
    compare(Scan(m, schedule="linear"), m, x)


def test_numbers_are_those_of_the_run() -> None:
    weights = [0.5] * 12

    def run(m: Loop, x: torch.Tensor) -> torch.Tensor:
        h = m.zeros(x)
        for t in range(x.shape[1]):
            h = torch.lerp(h, m.cell(x[:, t], h), weights[t])
        return h

    m, x = made(run), drawn(2, 12, INPUTS)
    scan = Scan(m, schedule="blelloch")
    compare(scan, m, x)
    weights[4] = 0.7
    with pytest.warns(RuntimeWarning, match="aten.lerp takes another number as weight in each step"):
        compare(scan, m, x)
    weights[:] = [0.6] * 12
    compare(scan, m, x)
    assert any(report.methods == ["blelloch"] for report in scan.reports)


def test_threads_share_a_scan() -> None:
    m, x = made(stacked), drawn(2, 24, INPUTS).detach()
    scan = Scan(m, schedule="blelloch")
    wanted = gradients(m, m, x)
    compare(scan, m, x)
    methods = [report.methods for report in scan.reports]

    def go_back(_: int) -> list[torch.Tensor]:
        leaves = [*m.parameters()]
        y = scan(x)
        weights = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2))
        found = torch.autograd.grad(y, leaves, weights, allow_unused=True)
        return [torch.zeros_like(w) if g is None else g for w, g in zip(leaves, found, strict=True)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for found in pool.map(go_back, range(32)):
            for one, other in zip(found, wanted, strict=True):
                close(one, other, 1e-10)
    assert [report.methods for report in scan.reports] == methods


def test_hooks_within_a_loop() -> None:
    m, x = made(_hooked), drawn(2, 13, INPUTS)
    compare(Scan(m, schedule="linear"), m, x)
    with pytest.warns(RuntimeWarning, match="a backward hook sees gradients within a loop"):
        compare(Scan(m, schedule="blelloch"), m, x)


def test_chains_are_cut_as_before() -> None:
    def run(m: Loop, x: torch.Tensor) -> torch.Tensor:
        h = m.into(x)
        for _ in range(12):
            h = torch.tanh(m.over(h))
        return h

    m, x = made(run), drawn(2, INPUTS)
    scan = Scan(m, schedule="blelloch")
    compare(scan, m, x)
    (report,) = scan.reports
    assert report.steps == 25 == len(jacsparse.chain(m, (INPUTS,)))


def test_ranks_take_no_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    scan = Scan(nn.ReLU(), schedule="linear")
    monkeypatch.setattr(scan, "_across", object())
    with pytest.raises(TypeError, match="takes x alone, and got 1 more"):
        scan(torch.ones(1, 2), torch.ones(1))


def test_other_modules_take_arguments() -> None:
    m, x, h = made(last), drawn(2, 12, INPUTS), drawn(2, STATE)
    for module in (jacsparse.nn.Solve(m), jacsparse.nn.Leapfrog(m, threads=2)):
        compare(module, m, x, h)  # type: ignore[arg-type]
