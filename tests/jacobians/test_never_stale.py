"""`jacobian` of a function after anything that it reads has changed: always of what the function computes now."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import jacsparse
from jacsparse.jacobians.unprepared import plan_of
from jacsparse.stages import COSTS, forward_pass
from jacsparse.tracing import graphs_of, traced
from tests.helpers import Counts, Straight, assert_equal, dense, drawn
from tests.patterns.operators import Apply

from .test_prepared import messages


class State:
    """All that `computed` reads besides its input."""

    def __init__(self) -> None:
        self.number, self.exponent, self.power = 2.0, 2, torch.tensor(3.0, dtype=torch.float64)
        self.weight, self.indices, self.mask = drawn(4), torch.tensor([0, 3, 1, 2]), torch.tensor([True, False] * 2)
        self.branch, self.detaches, self.sees, self.hooks, self.tied = True, False, True, False, True
        self.other, self.slope, self.fails, self.matrix = self.weight, 0.1, False, drawn(4, 4)


def computed(state: State, x: torch.Tensor) -> torch.Tensor:
    y = x * state.weight + x.roll(1, 1) * state.number
    y = y[:, state.indices] ** state.exponent
    y = torch.where(state.mask, y, y.sin())
    with contextlib.nullcontext() if state.sees else torch.no_grad():
        z = y * y
    z = z.detach() if state.detaches else z
    if state.hooks:
        z.register_hook(lambda gradient: gradient)
    try:
        y = y.cos() if state.fails else y.exp()
    except Exception:
        y = y * 5
    y = nn.functional.leaky_relu(y - 1, state.slope) + (z if state.branch else -z)
    return y * (state.weight if state.tied else state.other) * state.power


CHANGES: dict[str, Callable[[State], Any]] = {
    "number": lambda s: setattr(s, "number", 5.0),
    "integer": lambda s: setattr(s, "number", 5),
    "exponent": lambda s: setattr(s, "exponent", 3),
    "slope": lambda s: setattr(s, "slope", 0.7),
    "tensor without axes": lambda s: setattr(s, "power", torch.tensor(5.0, dtype=torch.float64)),
    "tensor": lambda s: setattr(s, "weight", drawn(4, seed=3)),
    "matrix": lambda s: setattr(s, "matrix", drawn(4, 4, seed=3)),
    "tensor in place": lambda s: s.weight.mul_(2),
    "elements of a tensor": lambda s: s.weight.data.add_(1),
    "indices": lambda s: setattr(s, "indices", torch.tensor([1, 0, 2, 3])),
    "indices in place": lambda s: s.indices.copy_(torch.tensor([1, 0, 2, 3])),
    "indices by NumPy": lambda s: s.indices.numpy().sort(),
    "mask in place": lambda s: s.mask.logical_not_(),
    "a mask that selects less": lambda s: s.mask.fill_(False),
    "a mask that selects more": lambda s: s.mask.fill_(True),
    "elements of a mask": lambda s: s.mask.data.logical_not_(),
    "branch": lambda s: setattr(s, "branch", False),
    "detach": lambda s: setattr(s, "detaches", True),
    "no_grad": lambda s: setattr(s, "sees", False),
    "caught": lambda s: setattr(s, "fails", True),
    "no longer tied": lambda s: (setattr(s, "tied", False), setattr(s, "other", drawn(4, seed=4))),
}


def mixed(state: State, x: torch.Tensor) -> torch.Tensor:
    """As `computed`, whose entries do not fold, since the output's elements are sums of all."""
    return computed(state, x) @ state.matrix


@pytest.mark.parametrize("function", [computed, mixed])
@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change(change: str, function: Callable[..., Any]) -> None:
    state, x = State(), drawn(2, 4)
    f = lambda x: function(state, x)  # noqa: E731
    for _ in range(2):
        assert_equal(jacsparse.jacobian(f, x, batched=True), dense(f, x))
    CHANGES[change](state)
    for seed in range(2):
        x = drawn(2, 4, seed=seed)
        assert_equal(jacsparse.jacobian(f, x, batched=True), dense(f, x))


def clamped(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.0
    with torch.no_grad():
        y.clamp_(max=1.0)
    return y * y


def clamped_by_alias(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.0
    y.detach().clamp_(max=1.0)
    return y + y.relu()


def copied(x: torch.Tensor) -> torch.Tensor:
    y = (x - 1.0).relu()
    with torch.no_grad():
        z = torch.zeros_like(x).copy_(y)
    return x * z


def stacked(x: torch.Tensor) -> torch.Tensor:
    y = (x - 1.0).relu()
    with torch.no_grad():
        z = torch.stack([y, y])
    return x * z.sum(0)


@pytest.mark.parametrize("f", [clamped, clamped_by_alias, copied, stacked])
def test_what_autograd_does_not_see(f: Callable[..., Any]) -> None:
    # At the first input, a derivative that passes where it should not is zero or the same.
    inputs = drawn(2, 4) / 2, drawn(2, 4, seed=1) + 1
    for x in inputs:
        assert_equal(jacsparse.jacobian(f, x, batched=True), dense(f, x))
    for method in ("auto", "products", "compressed"):
        assert_equal(
            jacsparse.prepare_jacobian(f, inputs[0], method=method, batched=True)(inputs[1]), dense(f, inputs[1])
        )


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


@pytest.mark.parametrize("function", [Straight, Reversed])
def test_a_derivative_of_its_own_after_other_calls(function: Any) -> None:
    straight, x = [False], drawn(2, 4)

    def f(x: torch.Tensor) -> torch.Tensor:
        if straight[0]:
            return x * function.apply(x)
        with torch.no_grad():
            y = function.forward(None, x)
        return x * y

    prepared = jacsparse.prepare_jacobian(f, x, batched=True)
    for _ in range(2):
        assert_equal(jacsparse.jacobian(f, x, batched=True), dense(f, x))
    straight[0] = True
    for _ in range(2):
        assert_equal(jacsparse.jacobian(f, x, batched=True), dense(f, x))
    with pytest.raises(jacsparse.VerificationError, match="differs from autograd's"):
        prepared.check(x)


def test_a_list_that_is_written_to() -> None:
    counts = [torch.zeros(2), torch.zeros(2)]

    def f(x: torch.Tensor) -> torch.Tensor:
        torch._foreach_add_(counts, 1.0)
        return x * x

    with pytest.raises(jacsparse.UnsupportedOperatorError, match="writes to a tensor from before the call"):
        jacsparse.prepare_jacobian(f, drawn(2, 4), batched=True)


def test_memory_of_numpy() -> None:
    array, x = np.ones(4), drawn(2, 4)
    f = lambda x: (x * torch.from_numpy(array)).sin() * torch.tensor(array[0])  # noqa: E731
    for _ in range(4):
        array *= 2
        assert_equal(jacsparse.jacobian(f, x, batched=True), dense(f, x))


def test_hooks_are_refused_after_other_calls() -> None:
    state, x = State(), drawn(2, 4)
    f = lambda x: computed(state, x)  # noqa: E731
    jacsparse.jacobian(f, x, batched=True)
    state.hooks = True
    with pytest.raises(jacsparse.UnsupportedOperatorError, match="backward hook"):
        jacsparse.jacobian(f, x, batched=True)


def test_chains_of_functions_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where elements of weights fold, a program does the same.
    monkeypatch.setitem(COSTS, "cpu", replace(COSTS["cpu"], term=math.inf))
    patterns = []
    for edges in (2000, 2000, 1999):
        f, h = messages(300, edges, 6)
        jacobian = jacsparse.jacobian(f, h, batched=False)
        assert_equal(jacobian, dense(f, h, batched=False))
        patterns.append(jacobian.pattern)
        # No chain keeps the function.
        function = weakref.ref(f)
        del f
        gc.collect()
        assert function() is None
    # Each chain makes its pattern once; other indices need another chain.
    assert patterns[1] is patterns[0] and patterns[2] is not patterns[0]


def test_modules_that_omit_nothing_share_their_plans() -> None:
    x, patterns = drawn(2, 4), []
    for kind in (nn.Sequential, nn.Sequential, Renamed, nn.Sequential):
        module = kind(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        if len(patterns) == 3:
            # Zeros of one's own ask for patterns of one's own, until they are filled.
            with torch.no_grad():
                module[0].weight[:, 1] = 0
        jacobian = jacsparse.jacobian(module, x)
        assert_equal(jacobian, dense(module, x))
        patterns.append(jacobian.pattern)
        assert forward_pass(module, x)[0].name == kind.__name__
    assert patterns[1] is patterns[0] and patterns[3].nnz < patterns[0].nnz
    with torch.no_grad():
        module[0].weight[:, 1] = 1
    jacobian = jacsparse.jacobian(module, x)
    assert_equal(jacobian, dense(module, x))
    assert jacobian.pattern is patterns[0]


class Renamed(nn.Sequential):
    """The same calls, of another name."""


def test_programs_hold_no_numbers_of_a_run() -> None:
    x = drawn(2, 3001)
    for f in (_squares, lambda x: _squares(x).sin() @ drawn(3001, 1)):
        jacsparse.jacobian(f, x, batched=True)
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    assert all(tensor is x or tensor.is_meta or tensor.numel() != x.numel() for tensor in tensors)


def test_functions_of_one_code() -> None:
    x = drawn(2, 4)
    for factor in (2.0, 3.0, drawn(4), drawn(2, 1), 1):
        f = lambda x, factor=factor: x.roll(1, 1) * x * factor  # noqa: E731
        assert_equal(jacsparse.jacobian(f, x, batched=True), dense(f, x))


@pytest.mark.parametrize("shape", [(1, 4), (3, 4), (2, 5)])
def test_shapes_in_turn(shape: tuple[int, int]) -> None:
    for x in (drawn(2, 4), drawn(*shape), drawn(2, 4), drawn(*shape).T.contiguous().T, drawn(*shape)):
        assert_equal(jacsparse.jacobian(_squares, x, batched=True), dense(_squares, x))


def _squares(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, 1) * x


@pytest.mark.parametrize("shared", [True, False])
def test_empty_batch(shared: bool) -> None:
    f = (lambda x: x.roll(1, 1)) if shared else _squares
    jacobian = jacsparse.jacobian(f, drawn(0, 4), batched=True)
    assert jacobian.shape == (4, 4) and jacobian.values.shape == (jacobian.pattern.nnz, 1 if shared else 0)


@pytest.mark.parametrize("f", [_squares, lambda x: x.sum(1), lambda x: torch.cat([x, x.new_ones(len(x), 3)], 1)])
def test_samples_without_elements(f: Callable[..., Any]) -> None:
    for _ in range(2):
        jacobian = jacsparse.jacobian(f, drawn(2, 0), batched=True)
        assert jacobian.shape == (f(drawn(2, 0)).numel() // 2, 0) and jacobian.pattern.nnz == 0


def test_hooks_of_all_modules() -> None:
    linear, x = nn.Linear(4, 4).double(), drawn(2, 4)
    functions = linear, lambda x: linear(x) ** 2
    expected = [2 * dense(f, x) for f in functions]
    expected[1] *= 2
    with nn.modules.module.register_module_forward_hook(lambda module, args, y: 2 * y):
        for f, value in zip(functions, expected, strict=True):
            for _ in range(2):
                assert_equal(expanded(jacsparse.jacobian(f, x, batched=True), 2), value)
            assert_equal(expanded(jacsparse.prepare_jacobian(f, x, batched=True)(x), 2), value)


def expanded(jacobian: jacsparse.SparseJacobian, batch: int) -> jacsparse.SparseJacobian:
    return jacsparse.SparseJacobian(jacobian.pattern, jacobian.values.expand(-1, batch))


def test_a_module_that_counts_its_calls() -> None:
    module, x = Counts(lambda x: x), drawn(2, 3)
    for calls in (0, 0, 4):
        module.calls = calls
        assert jacsparse.jacobian(module, x).values.unique().tolist() == [calls + 1]
        assert module.calls == calls


@pytest.mark.parametrize(
    ("now", "same"),
    [
        (lambda x, w: x * w + 2.0, True),
        (lambda x, w: x * (w + 0).mul(1) + 2.0, False),
        (lambda x, w: x * w - 2.0, False),
        (lambda x, w: (x * w + 2.0).clone(), False),
        (lambda x, w: (x * w, x + 2.0)[0], False),
        (lambda x, w: x * w + w, False),
        (lambda x, w: x * w[:1] + 2.0, False),
        (lambda x, w: x * w.float() + 2.0, False),
    ],
)
def test_calls_are_compared(now: Callable[..., Any], same: bool) -> None:
    x, w, other = drawn(1, 3), drawn(3, seed=1), drawn(3, seed=2)
    before = traced(Apply(lambda x: x * w + 3.0), x, cached=True)
    assert before.scalars == [3.0] and before.tensor(*before.graph.captures) is w
    after = traced(Apply(lambda x: now(x, other)), x, cached=True)
    assert (after.graph is before.graph) is same
    assert torch.equal(after.output, now(x, other))
    if same:
        assert after.scalars == [2.0] and after.tensor(*after.graph.captures) is other


@pytest.mark.parametrize(("layer", "zeros", "nnz"), [(0, (slice(None), 0), 12), (2, (0, slice(None)), 10)])
def test_no_program_of_another_module_fills_zeros_of_weights(layer: int, zeros: Any, nnz: int) -> None:
    x = drawn(2, 5)
    for expected in (15, nnz, 15):
        network = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        if expected == nnz:
            network[layer].weight.data[zeros] = 0
        for _ in range(3):
            result = jacsparse.jacobian(network, x)
            assert result.pattern.nnz == expected
            assert_equal(result, dense(network, x))


def test_zeros_have_signs() -> None:
    x = drawn(2, 4)
    for number in (0.0, 0.0, 0.0, -0.0, 0.0):
        f = functools.partial(lambda x, c: torch.copysign(x, torch.tensor(c)) * x.copysign(c), c=number)
        assert_equal(jacsparse.jacobian(f, x, batched=True), dense(f, x))


def test_what_is_kept_between_calls_keeps_no_module_alive() -> None:
    x = drawn(2, 4)
    for use in (jacsparse.jacobian, jacsparse.verify):
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        f = functools.partial(lambda module, x: module(x) * 2, module)
        for _ in range(4):
            use(module, x)
            use(f, x, batched=True)
        ended = weakref.ref(module)
        del module, f
        gc.collect()
        assert ended() is None, use


def test_a_call_that_fails_keeps_no_argument_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = drawn(2, 40), drawn(40, 40)
    monkeypatch.setattr("jacsparse.stages.chains.machine_memory", lambda device: 1)
    f = functools.partial(lambda weight, x: (x @ weight).tanh() @ weight, weight)
    with pytest.raises(MemoryError):
        jacsparse.jacobian(f, x, batched=True)
    ended = weakref.ref(weight)
    del f, weight
    gc.collect()
    assert ended() is None


@pytest.mark.parametrize("taken", [torch.take, lambda y, t: nn.functional.cross_entropy(y, t, reduction="none")])
def test_indices_that_were_written_to_before_are_followed(taken: Callable[..., torch.Tensor]) -> None:
    index = torch.tensor([0, 2, 1])
    index += 0

    def f(x: torch.Tensor) -> torch.Tensor:
        return taken(x.reshape(3, 3), index) + x.reshape(3, 3).gather(1, index[:, None])[:, 0]

    for _ in range(4):
        x = drawn(9)
        torch.testing.assert_close(jacsparse.jacobian(f, x).todense(), torch.func.jacrev(f)(x))


def test_the_default_dtype() -> None:
    """It is the one of tensors that a function makes without naming one."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * torch.linspace(0, 1, 3)).sin() * torch.full((3,), 1.2)

    default = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            for _ in range(4):
                x = drawn(3).to(torch.float32)
                expected = torch.autograd.functional.jacobian(f, x).to(torch.float32)
                torch.testing.assert_close(jacsparse.jacobian(f, x).todense(), expected)
    finally:
        torch.set_default_dtype(default)


def test_a_call_that_fails_leaves_no_number() -> None:
    other = drawn(7)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        with contextlib.suppress(RuntimeError):
            y = torch.add(y, other, alpha=0.7)
        z = y * 1.5
        return torch.stack([z, torch.where(x > 0.1, z, x)])

    x = drawn(3)
    for _ in range(5):
        assert_equal(jacsparse.jacobian(f, x), dense(f, x, batched=False))
    assert_equal(jacsparse.prepare_jacobian(f, x)(x), dense(f, x, batched=False))


def test_jacobians_within_a_function() -> None:
    square = lambda u: u**2  # noqa: E731
    prepared = jacsparse.prepare_jacobian(square, drawn(3))
    for of_square in (prepared, lambda x: jacsparse.jacobian(square, x)):
        f = lambda x, of=of_square: of(x.detach()).values.flatten() * x  # noqa: E731
        for seed in range(8):
            x = drawn(3, seed=seed)
            assert_equal(jacsparse.jacobian(f, x), torch.diag(2 * x)[None])


def test_sizes_that_take_turns_have_a_graph_each() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x[(x.detach() > 0).nonzero()[:, 0]] ** 2

    for number in range(8):
        x = -drawn(6).abs() - 1
        x[: 3 + number % 2] *= -1
        assert_equal(jacsparse.jacobian(f, x), dense(f, x, batched=False))
    assert graphs_of.cache_info().currsize == 2


def test_later_calls_make_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    chains: list[object] = []
    chain_of = jacsparse.stages.forward_passes.chain_of
    monkeypatch.setattr(
        "jacsparse.stages.forward_passes.chain_of",
        lambda *args, **options: chains.append(args) or chain_of(*args, **options),
    )
    for ask in (jacsparse.jacobian, jacsparse.hessian):
        f = (lambda x: (x**3).sum()) if ask is jacsparse.hessian else (lambda x: x**3 * x.roll(1))
        for seed in range(6):
            ask(f, drawn(4, seed=seed))
        assert len(chains) == 1
        chains.clear()


def test_graphs_in_use_are_remembered() -> None:
    first = traced(nn.ReLU(), torch.ones(1, 1), cached=True).graph
    for size in range(2, graphs_of.cache_parameters()["maxsize"] + 3):
        traced(nn.ReLU(), torch.ones(1, size), cached=True)
        assert traced(nn.ReLU(), torch.ones(1, 1), cached=True).graph is first
    assert graphs_of.cache_info().currsize == graphs_of.cache_parameters()["maxsize"]


def test_places_of_writes_end_with_their_graphs() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.new_zeros(5)
        for number in range(5):
            y[number] = x[number] ** 2
        return y

    plan_of.cache_clear()
    before = count_of("Gather")
    jacsparse.jacobian(f, drawn(5))
    graphs_of.cache_clear()
    plan_of.cache_clear()
    assert count_of("Gather") == before


def count_of(kind: str) -> int:
    gc.collect()
    return sum(type(each).__name__ == kind for each in gc.get_objects())


class Parting(nn.Module):
    """A module of several graphs, which part at a call on whose indices its pattern depends."""

    def __init__(self) -> None:
        super().__init__()
        self.way = 0
        self.register_buffer("index", torch.tensor([2, 0, 1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        if self.way == 1:
            return y.index_select(1, self.index)
        if self.way == 2:
            return y.new_zeros(len(x), 3).scatter(1, self.index.expand(len(x), 3) * 1, y)
        if self.way == 3:
            return y[:, self.index][:, self.index]
        if self.way == 4:
            return nn.functional.cross_entropy(y * 1, self.index[: len(x)], reduction="none")[:, None]
        return y


def test_graphs_that_part_at_a_call_with_indices() -> None:
    """An earlier graph than the last one is compared by its own numbers of values."""
    module = Parting()
    for call, way in enumerate([1, 0, 1, 0, 2, 0, 2, 3, 0, 3, 1, 3, 2, 0, 1, 4, 0, 4, 1, 4, 2, 4, 3]):
        module.way, x = way, drawn(2, 3, seed=call)
        assert_equal(jacsparse.jacobian(module, x), dense(module, x))
        if call % 6 == 5:
            module.index = module.index.roll(1)


def test_graphs_of_a_function_go_with_its_code() -> None:
    space: dict[str, Any] = {}
    exec("def f(x):\n    return x.sin() * 2", space)
    for _ in range(4):
        jacsparse.jacobian(space["f"], drawn(3))
    code = weakref.ref(space["f"].__code__)
    space.clear()
    gc.collect()
    assert code() is None


@pytest.mark.parametrize("of", ["jacobian", "with gradients", "hessian"])
def test_running_statistics_are_updated_once_in_each_call(of: str) -> None:
    norm, x = nn.BatchNorm1d(2, dtype=torch.float64), drawn(4)
    mean, deviation = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = norm(x.view(2, 2)) * nn.functional.batch_norm(x.view(2, 2).sin(), mean, deviation, training=True)
        return y.flatten() * x

    call: Callable[..., Any] = {
        "jacobian": functools.partial(jacsparse.jacobian, f),
        "with gradients": functools.partial(jacsparse.jacobian, f, create_graph=True),
        "hessian": functools.partial(jacsparse.hessian, lambda x: f(x).sum()),
    }[of]
    for _ in range(5):
        states = []
        for run in (call, f):
            norm.reset_running_stats(), mean.zero_(), deviation.fill_(1)
            run(x)
            states.append([tensor.clone() for tensor in (*norm.buffers(), mean, deviation)])
        assert all(map(torch.equal, *states))


def test_what_a_run_held_ends_with_it() -> None:
    read: dict[str, torch.Tensor] = {}

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x * read["scale"], x]).sin()

    gc.collect()
    gc.disable()
    try:
        for size in (3, 4, 4):
            read["scale"] = drawn(size).requires_grad_()
            reference_to_scale = weakref.ref(read["scale"])
            jacsparse.jacobian(f, drawn(size))
            read.clear()
            assert reference_to_scale() is None
    finally:
        gc.enable()


def test_the_profiler_sees_a_run_and_is_no_part_of_it() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("part"):
            y = x * 2
        return y * x

    x = drawn(4)
    for _ in range(4):
        assert_equal(jacsparse.jacobian(f, x), dense(f, x, batched=False))
    assert_equal(jacsparse.prepare_jacobian(f, x)(x), dense(f, x, batched=False))
    assert torch.equal(jacsparse.hessian(lambda x: f(x).sum(), x).todense(), 4 * torch.eye(4, dtype=x.dtype))
