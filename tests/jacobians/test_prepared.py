"""Prepared Jacobians against autograd in float64, by both methods, for functions of any arguments."""

from __future__ import annotations

import collections
import functools
import math
import pickle
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jacsparse.patterns import Identity, Pattern
from torch import nn
from torch.nn import functional

import jacsparse
from jacsparse import PreparedJacobian, UnsupportedOperatorError, prepare_jacobian
from jacsparse.jacobians import compressed
from jacsparse.jacobians import prepared as prepared_room
from jacsparse.runtime import read_archive, write_archive
from tests.helpers import BOUND, FLOAT, Counts, assert_equal, dense, drawn


def brusselator(x: torch.Tensor) -> torch.Tensor:
    u, v = x[:, 0], x[:, 1]
    uuv = u * u * v

    def laplacian(w: torch.Tensor) -> torch.Tensor:
        return w.roll(1, 1) + w.roll(-1, 1) + w.roll(1, 2) + w.roll(-1, 2) - 4 * w

    return torch.stack([1 + uuv - 4.4 * u + 10.0 * laplacian(u), 3.4 * u - uuv + 10.0 * laplacian(v)], 1)


def burgers(u: torch.Tensor) -> torch.Tensor:
    flux = 0.5 * u**2
    inner = -(flux[:, 2:] - flux[:, :-2]) / 0.2 + 0.01 * (u[:, 2:] - 2 * u[:, 1:-1] + u[:, :-2]) / 0.01
    return nn.functional.pad(inner, (1, 1))


def heat(u: torch.Tensor) -> torch.Tensor:
    conductivity = torch.linspace(1.0, 2.0, u.shape[1] - 1, dtype=u.dtype)
    return (conductivity * torch.exp(u[:, 1:]).diff(dim=1, prepend=u[:, :1])).diff(dim=1)


def upwind(u: torch.Tensor) -> torch.Tensor:
    left, right = u - u.roll(1, 1), u.roll(-1, 1) - u
    return torch.where(u > 1.0, left, right) * u


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 1:] *= x[:, :-1]
    y += 2.0
    y[:, ::2].exp_()
    return y


def into_zeros(x: torch.Tensor) -> torch.Tensor:
    sums = torch.zeros(x.shape, dtype=FLOAT).index_add_(1, torch.tensor([0, 2, 2, 1]), x**2)
    return sums / torch.zeros(4, dtype=FLOAT).add_(2.0) * x.detach()


def detached(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        factor = x.sin()
    return x * x.detach() + factor * x


def with_autograd(x: torch.Tensor) -> torch.Tensor:
    return x * torch.stack([x.cos(), x.exp()]).sum(0) / (1 + x**2) - x.clamp(min=1.0)


def messages(nodes: int, edges: int, features: int) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """A layer that sends messages along random edges, and features of its nodes."""
    source, target = torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(0))
    weight = drawn(2, features, features)
    return lambda h: (h @ weight[0]).index_add(0, target, h[source] @ weight[1]).tanh(), drawn(nodes, features)


FUNCTIONS = {
    "brusselator": (brusselator, (2, 5, 6)),
    "burgers": (burgers, (9,)),
    "heat": (heat, (7,)),
    "upwind": (upwind, (8,)),
    "in_place": (in_place, (6,)),
    "into_zeros": (into_zeros, (4,)),
    "detached": (detached, (4,)),
    "elementwise": (with_autograd, (3, 2)),
    "constant": (lambda x: x.cumsum(1).flip(1) * 3.0, (5,)),
    "softmax": (lambda x: (x[:, 1:] - x[:, :-1]).softmax(1) * x[:, :1], (5,)),
    "cross": (lambda x: torch.linalg.cross(x[:, :2], x[:, 2:], dim=2), (4, 3)),
    "norms": (lambda x: (x[:, 1:] - x[:, :-1]).pow(2).reshape(len(x), -1, 2).sum(2).sqrt(), (5,)),
    "keywords": (lambda x: torch.addcmul(x, x, x.sin(), value=0.3) - x.div(x**2, rounding_mode="floor"), (4,)),
    "scaled terms": (lambda x: x.index_add(1, torch.arange(3), x.sin(), alpha=0.7), (3,)),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("method", ["products", "compressed"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_autograd(name: str, method: str, batch: int) -> None:
    f, shape = FUNCTIONS[name]
    prepared = prepare_jacobian(f, drawn(batch, *shape), method=method, batched=True)
    assert prepared.method == method
    for seed in (1, 2):
        x = drawn(batch, *shape, seed=seed)
        expected = dense(f, x)
        jacobian = prepared(x)
        if jacobian.batch == 1 < batch:
            jacobian = jacsparse.SparseJacobian(jacobian.pattern, jacobian.values.expand(-1, batch))
        assert_equal(jacobian, expected)


@pytest.mark.parametrize("most", [1, 2000])
@pytest.mark.parametrize("name", [*FUNCTIONS, "both ways"])
def test_seeds_in_parts(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "PART_BYTES", most)
    both_ways = (lambda x: torch.cat([x**2 * x[:, :1], x.sin().sum(1, keepdim=True)], 1), (20,))
    f, shape = FUNCTIONS.get(name, both_ways)
    prepared, x = prepare_jacobian(f, drawn(3, *shape), method="compressed", batched=True), drawn(3, *shape, seed=1)
    actual = prepared(x)
    assert_equal(jacsparse.SparseJacobian(actual.pattern, actual.values.expand(-1, 3)), dense(f, x))


def test_seeds_in_parts_print_their_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "PART_BYTES", 1)
    x = drawn(3, 8)
    prepared = prepare_jacobian(lambda x: (x[:, None] * torch.sin(x)[:, :, None]) @ x[:, :, None], x, batched=True,
                                method="compressed")  # fmt: skip
    assert "flop" in repr(prepared)


def pair(x: dict[str, torch.Tensor], t: float, p: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    return {"a": x["u"][1:] * x["v"] * t, "b": (p[0] * x["u"]).sum(), "c": p[1] * x["v"] ** 2}


@pytest.mark.parametrize("method", ["products", "compressed"])
@pytest.mark.parametrize("argnums", [0, 2, (0, 2), (2, 0), (-1,)])
def test_arguments_of_any_kind(argnums: int | tuple[int, ...], method: str) -> None:
    def args(seed: int, t: float) -> tuple[Any, ...]:
        x = {"u": drawn(5, seed=seed), "v": drawn(4, seed=seed + 1)}
        return x, t, (drawn(5, seed=seed + 2), drawn(1, seed=seed + 3))

    prepared = prepare_jacobian(pair, *args(0, 2.0), argnums=argnums, batched=False, method=method)
    for seed, t in ((10, 2.0), (20, 0.3), (30, 5)):
        numbers = tuple(number % 3 for number in argnums) if isinstance(argnums, tuple) else argnums
        assert_equal(
            prepared(*args(seed, float(t))), dense(pair, *args(seed, float(t)), argnums=numbers, batched=False)
        )


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_scalars_without_samples(shape: tuple[int, ...]) -> None:
    x = drawn(*shape)
    for f in (lambda x: (x**3).sum(), lambda x: x.sin() * x, lambda x: x.max() * x):
        assert_equal(prepare_jacobian(f, x, batched=False)(x), dense(f, x, batched=False))


class Reaction(nn.Module):
    """Reads a parameter, a buffer, an attribute and a closure's number."""

    def __init__(self, exponent: list[float]) -> None:
        super().__init__()
        self.rate = nn.Parameter(drawn(4))
        self.register_buffer("field", drawn(4, seed=5))
        self.scale = 2.0
        self.exponent = exponent

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rate * x.roll(1, 1) * x * self.scale + self.exponent[0] * x * self.field


CHANGES: dict[str, Callable[[Reaction], None]] = {
    "nothing": lambda m: None,
    "attribute": lambda m: setattr(m, "scale", 3.0),
    "list": lambda m: m.exponent.__setitem__(0, 7.0),
    "buffer in place": lambda m: m.field.mul_(2),
    "buffer": lambda m: setattr(m, "field", drawn(4, seed=9)),
    "parameter in place": lambda m: m.rate.data.add_(1),
    "parameter": lambda m: setattr(m, "rate", nn.Parameter(drawn(4, seed=8))),
    "state": lambda m: m.load_state_dict({"rate": drawn(4, seed=1), "field": drawn(4, seed=2)}, assign=True),
}


@pytest.mark.parametrize("method", ["products", "compressed", "jacobian"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_module_reads_is_an_input(change: str, method: str) -> None:
    module, x = Reaction([1.5]), drawn(2, 4)
    call = functools.partial(jacsparse.jacobian, module)
    if method != "jacobian":
        call = prepared = prepare_jacobian(module, x, method=method)
    assert_equal(call(x), dense(module, x))
    CHANGES[change](module)
    if method != "jacobian" and change in ("attribute", "list"):
        # Numbers are parts of the program.
        with pytest.raises(jacsparse.VerificationError, match="differs from autograd's"):
            prepared.check(x)
        return
    assert_equal(call(x), dense(module, x))
    CHANGES[change](module)
    assert_equal(call(drawn(2, 4, seed=3)), dense(module, drawn(2, 4, seed=3)))


class Slotted:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 2.0


class Described:
    factor = 2.0

    @property
    def number(self) -> float:
        return self.factor + OUTER.number

    def times(self, x: torch.Tensor, *, shift: float = 1.0) -> torch.Tensor:
        return self._shifted(x, shift) * self.number

    @staticmethod
    def _shifted(x: torch.Tensor, shift: float) -> torch.Tensor:
        return x * (x + shift) * OUTER.scale


class Private(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._scale, self.inner = 2.0, nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self._scale


OUTER = types.SimpleNamespace(number=1.0, scale=2.0)
OUTSIDE = types.ModuleType("outside")
OUTSIDE.number = 2.0
SLOTTED, DESCRIBED, PRIVATE, QUEUE = Slotted(), Described(), Private(), collections.deque([2.0])


def more(thing: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(thing, name, getattr(thing, name) + 1, raising=False)


def attributed(x: torch.Tensor) -> torch.Tensor:
    return x * x * attributed.number


attributed.number = 2.0


@pytest.mark.parametrize(
    ("f", "change"),
    [
        (lambda x: x * x * SLOTTED.number, more(SLOTTED, "number")),
        (lambda x: x * x * OUTSIDE.number, more(OUTSIDE, "number")),
        (lambda x: x * x * sum(QUEUE), lambda patch: QUEUE.append(2.0)),
        (attributed, more(attributed, "number")),
        (DESCRIBED.times, more(OUTER, "number")),
        (DESCRIBED.times, more(OUTER, "scale")),
        (DESCRIBED.times, more(Described, "factor")),
        (DESCRIBED.times, more(DESCRIBED, "factor")),
        (DESCRIBED.times, lambda patch: patch.setitem(Described.times.__kwdefaults__, "shift", 3.0)),
        (PRIVATE, more(PRIVATE, "_scale")),
        (lambda x: functional.softplus(x), lambda patch: patch.setattr(functional, "softplus", torch.sin)),
    ],
)
def test_numbers_that_a_function_reads_are_parts_of_the_program(
    f: Callable[..., Any], change: Callable[[pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = drawn(2, 3)
    prepared, before = prepare_jacobian(f, x, batched=True), dense(f, x)
    change(monkeypatch)
    assert_equal(prepared(x), before)
    with pytest.raises(jacsparse.VerificationError, match="differs from autograd's"):
        prepared.check(x)
    assert_equal(jacsparse.jacobian(f, x, batched=True), dense(f, x))


def test_other_calls_than_prepared() -> None:
    switch = [True]
    f = lambda x: x.sin() if switch[0] else x.cos()  # noqa: E731
    x = drawn(2, 3)
    prepared, before = prepare_jacobian(f, x, batched=True), dense(f, x)
    switch[0] = False
    assert_equal(prepared(x), before)
    with pytest.raises(jacsparse.VerificationError, match="differs from autograd's"):
        prepared.check(x)


def test_networks_take_products_of_stages() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(15, 4), nn.Softmax(1)).double()
    x = drawn(3, 2, 7)
    for method in ("auto", "products", "compressed"):
        prepared = prepare_jacobian(network, x, method=method)
        assert_equal(prepared(x), dense(network, x))
        with torch.no_grad():
            network[0].weight.mul_(-1)
        network[3].bias = nn.Parameter(drawn(4))
        network[3].weight = nn.Parameter(drawn(4, 15) - 1)
        assert_equal(prepared(x), dense(network, x))


def test_the_cheaper_way_is_taken() -> None:
    inner, outer = drawn(200, 200), drawn(200, 1)
    assert prepare_jacobian(lambda x: (x @ inner).tanh() @ outer, drawn(1, 200), batched=True).method == "compressed"
    # Messages along random edges need a colour for almost each neighbour's neighbour.
    layer, h = messages(300, 2000, 6)
    prepared = prepare_jacobian(layer, h, batched=False)
    assert prepared.method == "products"
    # Where tanh is not saturated: else one rounding of it, which libraries do otherwise, changes 1 - tanh² by more.
    assert_equal(prepared(h / 10), dense(layer, h / 10, batched=False))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(6, 4),
        nn.Conv1d(2, 4, 2, stride=2, groups=2),
        nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
        nn.Sequential(nn.Conv1d(2, 3, 2), nn.Softplus(), nn.Conv1d(3, 1, 2)),
    ],
    ids=str,
)
def test_elements_of_weights_fold(layer: nn.Module, batch: int) -> None:
    layer = layer.double()
    shape = (6,) if next(layer.parameters()).ndim == 2 else (2, 3)
    prepared = prepare_jacobian(layer, drawn(batch, *shape), method="products")
    assert "local derivatives" in repr(prepared)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.5
    x = drawn(batch, *shape, seed=1)
    actual, expected = prepared(x), dense(layer, x)
    assert_equal(jacsparse.SparseJacobian(actual.pattern, actual.values.expand(-1, batch)), expected)


@pytest.mark.parametrize("alpha", [0, 2])
def test_multiples_of_weights_are_no_elements_of_them(alpha: int) -> None:
    # Zeros are multiples of each other.
    x, weight = drawn(2, 1), torch.zeros(1, 1, dtype=FLOAT)

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(weight[0], x, weight, alpha=alpha).sin() + x

    prepared = prepare_jacobian(f, x, method="products", pruned=False, batched=True)
    weight += 3
    assert_equal(prepared(x), dense(f, x, batched=True))


def test_cross_products_fold() -> None:
    x, axis = drawn(2, 3), drawn(3, seed=1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cross(torch.linalg.cross(x, axis.expand_as(x)), x.sin(), dim=-1)

    prepared = prepare_jacobian(turned, x, batched=False)
    assert "local derivatives" in repr(prepared)
    assert_equal(prepared(x + 1), dense(turned, x + 1, batched=False))


def test_arguments_that_lie_otherwise_in_memory() -> None:
    def f(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x[:, 1:] * x[:, :-1] * scale.view(-1)[:3]

    x, scale = drawn(3, 4), drawn(2, 3)
    prepared = prepare_jacobian(f, x, scale, batched=True)
    for other, factor in ((drawn(4, 3).T, scale), (drawn(3, 8)[:, ::2], drawn(3, 2).T), (x[:1].expand(3, 4), scale)):
        assert_equal(prepared(other, factor), dense(lambda x: f(x, factor.contiguous()), other.contiguous()))  # noqa: B023


def test_constants_may_be_read() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        flags = torch.arange(3) > torch.ones((), dtype=torch.int64)
        return x * x if torch.equal(flags.logical_not_(), torch.zeros(3) > 0) or flags[0].item() else -x

    x = drawn(2, 3)
    for compile in (False, True):
        assert_equal(prepare_jacobian(f, x, compile=compile, batched=True)(x + 1), dense(f, x + 1))


@pytest.mark.parametrize("write", ["whole", "row", "list"])
def test_constants_into_which_others_are_written_may_not_be_read(write: str) -> None:
    other = drawn(2, 3)

    def f(x: torch.Tensor) -> torch.Tensor:
        total, whole = torch.zeros(2, 3, dtype=FLOAT), torch.zeros(2, 3, dtype=FLOAT)
        row = total[0]
        if write == "whole":
            total.copy_(other)
        elif write == "row":
            row.add_(other[0])
        else:
            torch._foreach_add_([whole, total], [whole, other])
        return x if torch.equal(total, whole) else -x

    with pytest.raises(jacsparse.UnsupportedOperatorError, match=r"aten\.equal shows Python what a tensor holds"):
        prepare_jacobian(f, drawn(2, 3), batched=False)


def test_a_number_that_decides() -> None:
    def f(x: torch.Tensor, number: float) -> torch.Tensor:
        total = torch.ones(2, 3, dtype=FLOAT)
        total.mul_(number)
        return x * x if torch.equal(total, torch.ones_like(total)) else -x

    x = drawn(2, 3)
    prepared = prepare_jacobian(lambda x, c: f(x, c) + x * x, x, 1.0, batched=True, static_argnums=1)
    assert_equal(prepared(x, 1.0), dense(lambda x: 2 * x * x, x))
    assert_equal(prepared(x, 2.0), dense(lambda x: x * x - x, x))


def test_a_tensor_is_no_list_of_one() -> None:
    x = drawn(2, 3)
    prepared = prepare_jacobian(lambda parts: parts[0] * parts[0], [x], batched=True)
    assert_equal(prepared([x + 1]), dense(lambda x: x * x, x + 1))
    with pytest.raises(ValueError, match="prepare one for these"):
        prepared(x)


def test_one_tensor_in_several_places() -> None:
    start, scale = drawn(4), drawn(4, seed=1)
    f = lambda x, a, b: (x - start) ** 2 * a * scale + x * b  # noqa: E731
    prepared = prepare_jacobian(f, start, scale, scale, batched=False)
    for args in ((drawn(4, seed=2), drawn(4, seed=3), drawn(4, seed=4)), (start, scale, start), (scale, start, start)):
        assert_equal(prepared(*args), dense(f, *args, batched=False))


def test_objects_as_arguments() -> None:
    f = lambda x, s: x * s["scale"].factor * torch.tensor(s["array"])  # noqa: E731
    settings = {"scale": types.SimpleNamespace(factor=2.0), "array": np.ones(3)}
    prepared, x = prepare_jacobian(f, drawn(3), settings, batched=False), drawn(3, seed=1)
    settings["scale"].factor = 5.0
    assert_equal(prepared(x, settings), dense(f, x, settings, batched=False))
    settings["array"] *= 2
    assert_equal(prepared(x, settings), dense(f, x, settings, batched=False))
    other = {"scale": types.SimpleNamespace(factor=3.0), "array": np.zeros(3) + 7}
    assert_equal(prepared(x, other), dense(f, x, other, batched=False))


def test_threads_with_numbers_of_their_own() -> None:
    f = lambda x, t: x * x * t  # noqa: E731
    x = drawn(3)
    prepared = prepare_jacobian(f, x, 1.0, batched=False)

    def differs(t: float) -> bool:
        return not torch.equal(prepared.values(x, t)[:, 0], 2 * t * x)

    with ThreadPoolExecutor(8) as pool:
        assert not any(pool.map(differs, [float(2**power) for power in range(8)] * 50))


def test_a_module_is_as_before() -> None:
    module, x = Counts(lambda x: x * x), drawn(2, 3)
    prepared = prepare_jacobian(module, x)
    jacobian = prepared(x)
    assert module.calls == 0
    assert_equal(jacobian, dense(lambda x: x * x, x))


def test_samples_of_other_shapes_in_memory_to_prepare_with() -> None:
    f = lambda x, scale: x * x * scale  # noqa: E731
    one = torch.ones(1, dtype=FLOAT).expand(3)
    prepared = prepare_jacobian(f, one, drawn(3), batched=False)
    assert_equal(prepared(drawn(3), drawn(3, seed=1)), dense(f, drawn(3), drawn(3, seed=1), batched=False))
    prepared = prepare_jacobian(f, drawn(3), one, batched=False)
    for scale in (drawn(3, seed=1), 2 * one):
        assert_equal(prepared(drawn(3), scale), dense(f, drawn(3), scale, batched=False))


def test_functions_that_read_memory_beside_an_argument() -> None:
    f = lambda x, scale: x * scale.as_strided((3,), (0,))  # noqa: E731
    one = 2 * torch.ones(1, dtype=FLOAT).expand(3)
    prepared = prepare_jacobian(f, drawn(3), one.expand(3), batched=False)
    assert_equal(prepared(drawn(3), one), dense(f, drawn(3), one, batched=False))
    strided = torch.ones(1, dtype=FLOAT).expand(3)
    with pytest.raises(ValueError, match=r"prepared for .* \(3,\) of strides \(0,\)"):
        prepare_jacobian(f, drawn(3), strided, batched=False)(drawn(3), drawn(3))


def test_infinite_derivatives_where_it_is_prepared() -> None:
    f = lambda x: (x[1:] - x[:-1]).sqrt() * x[1:] ** 2  # noqa: E731
    prepared, x = prepare_jacobian(f, torch.zeros(4, dtype=FLOAT), batched=False), drawn(4).cumsum(0)
    assert_equal(prepared(x), dense(f, x, batched=False))


@pytest.mark.parametrize("method", ["auto", "products", "compressed"])
def test_infinite_weights_are_shared(method: str) -> None:
    layer = nn.Linear(3, 2, bias=False, dtype=FLOAT)
    with torch.no_grad():
        layer.weight[0, 1] = math.inf
    x = drawn(4, 3)
    prepared = prepare_jacobian(layer, x, method=method)
    for _ in range(5):
        for jacobian in (jacsparse.jacobian(layer, x), prepared(x)):
            assert jacobian.batch == 1
            assert torch.equal(jacobian.todense(), layer.weight)


def test_nothing_to_compile() -> None:
    prepared = prepare_jacobian(lambda x: (x @ x.sign().diag()).sign(), drawn(3), compile=True)
    assert prepared.pattern.nnz == 0


def test_operators_that_could_draw() -> None:
    attention = nn.functional.scaled_dot_product_attention
    x = drawn(2, 1, 4, 3)
    f = lambda x: nn.functional.dropout(attention(x, x, x), 0.3, training=False)  # noqa: E731
    assert_equal(prepare_jacobian(f, drawn(2, 1, 4, 3), batched=True)(x), dense(f, x))
    with pytest.raises(jacsparse.UnsupportedOperatorError, match="draws random numbers"):
        prepare_jacobian(lambda x: attention(x, x, x, dropout_p=0.5), x, batched=True)


def test_tangents_that_are_zero() -> None:
    bias, weight = drawn(2), drawn(3, 2)
    f = lambda x: torch.addmm(bias, x, weight, beta=0.5)  # noqa: E731
    assert_equal(
        prepare_jacobian(f, drawn(4, 3), method="compressed", batched=True)(drawn(4, 3)), dense(f, drawn(4, 3))
    )


def padded(x: torch.Tensor) -> torch.Tensor:
    y = x.new_zeros(len(x), 6)
    y[:, 1:-1] = x
    return (y[:, 1:] - y[:, :-1]) ** 2


DIRECTIONAL = {
    "quotient": lambda x: x / (1 + x**2) / 0.3,
    "linear": nn.Linear(4, 4, dtype=FLOAT).requires_grad_(False),
    "write": padded,
}


@pytest.mark.parametrize("name", DIRECTIONAL)
def test_derivatives_along_a_direction(name: str) -> None:
    f = lambda x, scale: torch.func.jvp(lambda x: scale * DIRECTIONAL[name](x), (x,), (x**2,))[1]  # noqa: E731
    for scale in (2.0, 3.0):
        assert_equal(jacsparse.jacobian(f, drawn(2, 4), scale, batched=True), dense(f, drawn(2, 4), scale))
    batched = name != "write"
    prepared = prepare_jacobian(f, drawn(2, 4), 2.0, batched=batched)
    assert_equal(prepared(drawn(2, 4), 3.0), dense(f, drawn(2, 4), 3.0, batched=batched))


@pytest.mark.parametrize("method", ["products", "compressed"])
def test_coarser_numbers_on_the_way(method: str) -> None:
    x, network = drawn(2, 4).float(), nn.Linear(4, 4)
    expected = dense(network, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prepared = prepare_jacobian(network, drawn(2, 4).float(), method=method)
        values = prepared(x)
    assert values.values.dtype == torch.float32
    # Weights and the result are rounded to 8 bits.
    assert (values.todense(0) - expected[0]).abs().amax() <= 2**-7 * expected.abs().amax()
    with pytest.raises(ValueError, match=r"torch.autocast is off; .* prepared for on, with torch.bfloat16"):
        prepared(x)
    prepared = prepare_jacobian(network, drawn(2, 4).float(), method=method)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="prepared for off"):
        prepared(x)


@pytest.mark.parametrize("method", ["products", "compressed"])
@pytest.mark.parametrize(
    "f",
    [
        lambda y: functional.layer_norm(y, (6,))[:, :3],
        lambda y: functional.layer_norm(y, (6,)).flip(1),
        lambda y: functional.group_norm(y.view(-1, 3, 2).transpose(1, 2), 1).flatten(1),
        lambda y: functional.group_norm(y.view(-1, 2, 3).mT * 2, 1)[:, ::2].flatten(1),
        lambda y: functional.max_pool1d(y.view(-1, 2, 3).mT.tanh(), 2).flatten(1),
        lambda y: functional.conv1d(y.view(-1, 2, 3).mT.exp(), torch.ones(2, 3, 2, dtype=y.dtype))[..., :1].flatten(1),
    ],
)
def test_operators_that_need_contiguous_operands(f: Callable[[torch.Tensor], torch.Tensor], method: str) -> None:
    prepared = prepare_jacobian(f, drawn(3, 6), method=method, batched=True)
    for seed in range(3):
        assert_equal(prepared(drawn(3, 6, seed=seed)), dense(f, drawn(3, 6, seed=seed)))


def test_elements_that_are_zero_but_for_rounding() -> None:
    f = lambda x: x.softmax(1).sum(1, keepdim=True)  # noqa: E731
    for seed in range(5):
        assert prepare_jacobian(f, drawn(3, 5, seed=seed), batched=True)(drawn(3, 5)).values.abs().amax() <= BOUND


@pytest.mark.parametrize(
    "numbers",
    [(1.0, np.float64(3.0)), (np.float64(1.0), 3), (2, 0.5), (0.0, np.float32(0.5)), (0.0, np.int64(3)), (0.0, 2)],
)
def test_numbers_of_any_kind(numbers: tuple[Any, Any]) -> None:
    f = lambda x, t: x**2 * t  # noqa: E731
    prepared = prepare_jacobian(f, drawn(3), numbers[0], batched=False)
    assert_equal(prepared(drawn(3), numbers[1]), dense(f, drawn(3), float(numbers[1]), batched=False))


def test_no_warning_where_a_number_is_zero(recwarn: pytest.WarningsRecorder) -> None:
    prepared = prepare_jacobian(lambda x, t: x / t, drawn(2), 1.0, batched=False)
    recwarn.clear()
    assert prepared.values(drawn(2), 0.0).tolist() == [[math.inf]] * 2 and not recwarn.list


def test_jacobian_by_parameters() -> None:
    network = nn.Linear(3, 2).double()
    f = lambda parameters, x: torch.func.functional_call(network, parameters, x).tanh()  # noqa: E731
    args = (dict(network.named_parameters()), drawn(4, 3))
    for call in (functools.partial(jacsparse.jacobian, f), functools.partial(prepare_jacobian, f)):
        jacobian = call(*args, batched=False)
        jacobian = jacobian(*args) if callable(jacobian) else jacobian
        assert_equal(jacobian, dense(f, *args, batched=False))


class Hidden:
    def __init__(self) -> None:
        self.count = np.ones(1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * x * float(self.count[0])


@pytest.mark.parametrize(
    ("f", "args", "options", "error", "message"),
    [
        (
            lambda x: x.argmax(1),
            (drawn(2, 3),),
            {},
            NotImplementedError,
            "returns torch.int64, which has no derivative",
        ),
        (lambda x: (x, 3), (drawn(2, 3),), {}, NotImplementedError, "returns an int"),
        (
            lambda x, y: y.mul_(2) * x,
            (drawn(2, 3), drawn(2, 3)),
            {},
            NotImplementedError,
            "writes to a tensor from before the call",
        ),
        (lambda x: x - x.mean(0), (drawn(2, 3),), {}, NotImplementedError, "^<lambda>: .* samples takes batched=False"),
        (lambda x, y: x, (drawn(2, 3),), {}, ValueError, "^<lambda>: .* does not fit <lambda>.*'y'"),
        (lambda x: x, (np.ones((2, 3)),), {}, TypeError, "x is an ndarray.*: pass torch.from_numpy of it"),
        (lambda x: x * torch.rand(3, dtype=FLOAT), (drawn(2, 3),), {}, NotImplementedError, "draws random numbers"),
        (
            nn.Sequential(nn.Tanh(), nn.BatchNorm1d(3, dtype=FLOAT)),
            (drawn(2, 3),),
            {},
            NotImplementedError,
            r"^1: aten.add writes to the buffer 1.num_batches_tracked, .*; call .eval\(\) on the module first",
        ),
        (nn.Dropout(), (drawn(2, 3),), {}, NotImplementedError, r"draws random numbers, .*; call .eval\(\)"),
        (lambda x: x if x.sum() > 0 else -x, (drawn(2, 3),), {}, NotImplementedError, "what a tensor holds"),
        (lambda x: x[:, x[0] > 1], (drawn(2, 3),), {}, NotImplementedError, "depends on what a tensor holds"),
        (lambda x: x.sum(), (drawn(2, 3),), {}, NotImplementedError, "does not have them along its first axis"),
        (lambda x: x, (drawn(2, 3),), {"argnums": 1}, ValueError, "argnums is 1; the call has 1 arguments"),
        (lambda x: x, (drawn(2, 3),), {"argnums": ()}, ValueError, r"argnums is \(\)"),
        (lambda x: x, (drawn(2, 3),), {"argnums": "x"}, TypeError, "argnums is 'x'; expected an integer"),
        (lambda x: x, (drawn(2, 3),), {"argnums": (0, -1)}, ValueError, "it names an argument twice"),
        (lambda x: x, (drawn(2, 3),), {"method": "magic"}, ValueError, "method is 'magic'; expected one of"),
        (lambda x: x, ((),), {}, ValueError, "hold no tensor"),
        (lambda x: x, (3.0,), {}, TypeError, "x is a float; expected a torch.Tensor"),
        (lambda x: x, (drawn(2, 3).int(),), {}, TypeError, "x is torch.int32"),
        (lambda x: x, ([drawn(2, 3), drawn(3, 3)],), {}, ValueError, "expected 2 samples along its first axis"),
        (3, (drawn(2, 3),), {}, TypeError, "f is an int; expected a function"),
        (lambda x: x, (drawn(0, 3),), {}, ValueError, r"torch.float64 \(0, 3\), without any sample; give one or more"),
    ],
)
def test_bad_input(f: Any, args: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prepare_jacobian(f, *args, **{"batched": True, **options})


def set_to_a_number(x: torch.Tensor, y: torch.Tensor) -> None:
    y[..., 0] = 0.5


@pytest.mark.parametrize(
    "write",
    [set_to_a_number, lambda x, y: y.copy_(x * 2), lambda x, y: y.masked_fill_(x > 0, 1)],
)
def test_writes_of_what_a_call_computes_to_another_argument(write: Callable[..., Any]) -> None:
    """The argument may have another layout later, as one whose elements share memory."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        write(x, y)
        return x * y

    with pytest.raises(UnsupportedOperatorError, match=r"writes to a tensor from before the call.* to a clone"):
        prepare_jacobian(f, drawn(2, 3), drawn(2, 3), batched=True)
    on_a_clone, args = lambda x, y: f(x, y.clone()), (drawn(2, 3), drawn(2, 3, seed=1))
    assert_equal(prepare_jacobian(on_a_clone, *args, batched=True)(*args), dense(on_a_clone, *args))


def test_arguments_of_other_shapes() -> None:
    prepared = prepare_jacobian(lambda x, i: x[:, i] ** 2, drawn(2, 3), torch.tensor([0, 2]), batched=True)
    for args, message in (
        ((drawn(2, 4), torch.tensor([0, 2])), r"the arguments are torch.float64 \(2, 4\)"),
        ((drawn(2, 3).float(), torch.tensor([0, 2])), r"prepared for torch.float64 \(2, 3\)"),
        ((drawn(2, 3), torch.tensor([0, 1])), "holds other elements than when this Jacobian was prepared"),
    ):
        with pytest.raises(ValueError, match=message):
            prepared(*args)


def test_another_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare_jacobian(lambda x: x**2, drawn(2, 3), batched=True)
    monkeypatch.setattr(torch, "get_default_dtype", lambda: FLOAT)
    with pytest.raises(ValueError, match=r"the default dtype is torch.float64; .* prepared for torch.float32: call"):
        prepared(drawn(2, 3))


def test_outputs_of_another_dtype() -> None:
    x = drawn(2, 3)
    prepared = prepare_jacobian(lambda x: (x**2).float(), x, batched=True)
    assert_equal(prepared(x), dense(lambda x: x**2, x))


def test_wrong_tangents_of_pytorch_are_not_taken() -> None:
    products = lambda x: x.scatter_reduce(0, torch.tensor([0, 0, 1]), x, "prod")  # noqa: E731
    inverse = lambda x: torch.cholesky_inverse(x.reshape(3, 3).tril())  # noqa: E731
    for f, size in ((products, 3), (inverse, 9)):
        prepared, x = prepare_jacobian(f, drawn(size), batched=False, method="compressed"), drawn(size, seed=1)
        assert prepared.method == "compressed"
        assert_equal(prepared(x), dense(f, x, batched=False))


def test_a_wrong_derivative_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    # That of its forward mode, were it not known.
    monkeypatch.setattr("jacsparse.jacobians.choice.WRONG_TANGENTS", ())
    f, x = lambda x: x.scatter_reduce(0, torch.tensor([0, 0, 1]), x, "prod"), drawn(3)
    with pytest.raises(jacsparse.VerificationError, match="prepare it again with method='products'"):
        prepare_jacobian(f, x, batched=False, method="compressed")
    prepared = prepare_jacobian(f, x, batched=False)
    assert prepared.method == "products"
    assert_equal(prepared(x), dense(f, x, batched=False))


@pytest.mark.parametrize(
    ("pattern", "counts"),
    [
        (jacsparse.Pattern((3, 3), [0, 1, 2, 3], [0, 1, 2]), (1, 0)),
        (jacsparse.Pattern((3, 1), [0, 1, 2, 3], [0, 0, 0]), (1, 0)),
        (jacsparse.Pattern((1, 3), [0, 3], [0, 1, 2]), (0, 1)),
        (jacsparse.Pattern((2, 2), [0, 0, 0], []), (0, 0)),
    ],
)
def test_colours(pattern: jacsparse.Pattern, counts: tuple[int, int]) -> None:
    from jacsparse.jacobians.colorings import coloring

    assert coloring(pattern).counts == counts


def test_both_ways_at_once() -> None:
    def arrow(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([(x**2).sum(1, keepdim=True), x[:, 1:] * x[:, :1].sin()], 1)

    x = drawn(2, 30)
    for compile in (False, True):
        prepared = prepare_jacobian(arrow, x, method="compressed", compile=compile, batched=True)
        assert "2 colours of columns and 1 of rows, in place of 30 products" in repr(prepared)
        assert_equal(prepared(x + 1), dense(arrow, x + 1))


def branching(x: torch.Tensor, c: float, other: torch.Tensor) -> torch.Tensor:
    return (x**2 if c > 0 else x**3) * other


@pytest.mark.parametrize("compile", [False, True])
def test_loaded_for_other_numbers_and_layouts(compile: bool, tmp_path: Path) -> None:
    x, other = drawn(4), torch.full((1,), 2.0, dtype=FLOAT).expand(4)
    prepared = prepare_jacobian(branching, x, 1.0, other, batched=False, static_argnums=1)
    prepared.save(tmp_path / "prepared.npz")
    loaded = PreparedJacobian.load(tmp_path / "prepared.npz", branching, x, 1.0, other, compile=compile)
    for c in (1.0, -1.0, 2.0):
        expected = dense(lambda x, c=c: branching(x, c, other), x, batched=False)
        for each in (prepared, loaded):
            assert_equal(each(x, c, other), expected)


def test_programs_of_objects_do_not_add_up() -> None:
    f = lambda x, thing: x**2 * float(thing.sum())  # noqa: E731
    x = drawn(3)
    prepared = prepare_jacobian(f, x, np.ones(2), batched=False)
    for number in range(20):
        assert_equal(prepared(x, np.full(2, number)), dense(lambda x, n=number: x**2 * 2.0 * n, x, batched=False))
    assert len(prepared._programs) == prepared_room.MOST_PROGRAMS
    assert next(iter(prepared._programs.values())) is prepared._first


def test_a_later_program_takes_equal_arguments_apart() -> None:
    x, a, b = drawn(3), drawn(3, seed=1), drawn(3, seed=2)
    f = lambda x, a, b, c: (x ** int(c) * a).sin() * b  # noqa: E731
    prepared = prepare_jacobian(f, x, a, b, 1.0, static_argnums=3)
    prepared(x, a, a, 2.0)
    assert_equal(prepared(x, a, b, 2.0), dense(lambda x: f(x, a, b, 2.0), x, batched=False))


def test_parameters_that_were_one_and_are_two() -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).double()
    module[1].weight = module[0].weight
    x = drawn(1, 3)
    prepared = prepare_jacobian(module, x)
    module[0].weight = module[1].weight = nn.Parameter(drawn(3, 3))
    assert_equal(prepared(x), dense(module, x))
    module[1].weight = nn.Parameter(drawn(3, 3, seed=1))
    with pytest.raises(
        ValueError, match=r"Sequential\.0\.weight and Sequential\.1\.weight were one tensor .* prepare one"
    ):
        prepared(x)


def test_elements_that_python_reads() -> None:
    x, c = drawn(3), drawn(3, seed=1)
    for f in (
        lambda x, c: x * torch.tensor([c, 1.0, c], dtype=FLOAT),
        lambda x, c: x * torch.as_tensor((c, c, 2.0)).to(x),
        lambda x, c: x * torch.from_numpy(np.full(3, c)),
    ):
        prepared = prepare_jacobian(f, x, 2.0, static_argnums=1)
        for number in (3.0, -1.0, 2.0):
            assert_equal(prepared(x, number), dense(lambda x, f=f, n=number: f(x, n), x, batched=False))
    for g in (
        lambda x, c: x * torch.tensor(c.tolist(), dtype=FLOAT),
        lambda x, c: x * torch.from_numpy(c.numpy() * 1.0),
        lambda x, c: x * torch.tensor([x[0], 1.0, c[0]], dtype=FLOAT),
    ):
        with pytest.raises(UnsupportedOperatorError, match="asks what a tensor holds"):
            prepare_jacobian(g, x, c)
    constant = prepare_jacobian(lambda x: x * torch.tensor(torch.ones(3).tolist(), dtype=FLOAT), x)
    assert_equal(constant(x), torch.eye(3, dtype=FLOAT)[None])


def test_numbers_of_functions_that_raise_anything() -> None:
    class OwnError(Exception):
        pass

    def asks(x: torch.Tensor, c: float) -> torch.Tensor:
        if not isinstance(c, float) or c < 0:
            raise OwnError
        return x * c

    x = drawn(3)
    for f in (asks, lambda x, c: x * {0.5: 2.0}.get(c, c), lambda x, c: x**2 if c.is_integer() else x * c):
        prepared = prepare_jacobian(f, x, 0.5, static_argnums=1)
        for number in (0.5, 2.0):
            assert_equal(prepared(x, number), dense(lambda x, f=f, n=number: f(x, n), x, batched=False))


def test_a_value_that_does_not_depend_on_the_argument() -> None:
    for method in ("auto", "products", "compressed"):
        prepared = prepare_jacobian(lambda x, a: a[:2] * 2, drawn(3), drawn(3), value=True, method=method)
        J, y = prepared(drawn(3), torch.arange(3.0, dtype=FLOAT))
        assert J.shape == (2, 3) and not J.pattern.nnz and y.tolist() == [0, 2]


def test_threads_make_a_program_once() -> None:
    prepared = prepare_jacobian(lambda x, c: x**2 * math.sin(c), drawn(3), 1.0, static_argnums=1)
    with ThreadPoolExecutor(8) as pool:
        for values in pool.map(lambda _: prepared.values(drawn(3), 2.0), range(16)):
            assert (values[:, 0] - 2 * drawn(3) * math.sin(2.0)).abs().amax() <= BOUND
    assert len(prepared._programs) == 2


def test_activations_fold() -> None:
    x, slope = drawn(2, 7), drawn(7).abs()

    def f(x: torch.Tensor) -> torch.Tensor:
        y = functional.hardswish(3 * x) * functional.logsigmoid(x.roll(1, 1)) + functional.leaky_relu(x, 0.1)
        return y[:, 1:] - functional.prelu(x, slope)[:, :-1]

    prepared = prepare_jacobian(f, x, method="products", batched=True)
    assert "local derivatives" in repr(prepared)
    assert_equal(prepared(x - 0.5), dense(f, x - 0.5))


@pytest.mark.parametrize("method", ["products", "compressed"])
@pytest.mark.parametrize("name", ["brusselator", "heat", "softmax", "constant"])
def test_saved_and_loaded(name: str, method: str, tmp_path: Path) -> None:
    f, shape = FUNCTIONS[name]
    path, x = tmp_path / "prepared.npz", drawn(2, *shape)
    prepared = prepare_jacobian(f, x, method=method, batched=True)
    prepared.save(path)
    loaded = PreparedJacobian.load(path, f, x)
    x = drawn(2, *shape, seed=1)
    assert loaded.pattern == prepared.pattern and torch.equal(loaded.values(x), prepared.values(x))
    other = drawn(3, *shape)
    with pytest.raises(ValueError, match="is not of this function at arguments of these shapes"):
        PreparedJacobian.load(path, f, other)
    with pytest.raises(ValueError, match="is not of this function"):
        PreparedJacobian.load(path, lambda x: f(x) * 2.0, x)


@pytest.mark.parametrize(
    ("field", "content", "message"),
    [
        ("version", "0.0", "is of version '0.0' of jacsparse"),
        ("argnums", "x", "argnums is 'x'"),
        ("batched", None, "batched is None.*the file is damaged"),
        ("method", "other", "method is 'other'"),
        ("shape", [3, 3], "no valid prepared Jacobian"),
        ("indptr", None, "no valid prepared Jacobian"),
        ("indices", np.full(6, 9), "no valid prepared Jacobian"),
        ("rows", None, "rows is no array of one axis"),
        ("columns", np.zeros(1, int), "columns has 1 elements"),
        ("places", np.full(6, 10**6), "places does not run from"),
    ],
)
def test_damaged_files(field: str, content: Any, message: str, tmp_path: Path) -> None:
    x, path = drawn(4), tmp_path / "prepared.npz"
    prepare_jacobian(lambda x: x[1:] * x[:-1], x, method="compressed").save(path)
    saved = read_archive(path, "prepared Jacobian")
    del saved[field]
    write_archive(path, "prepared Jacobian", saved if content is None else saved | {field: content})
    with pytest.raises(ValueError, match=message):
        PreparedJacobian.load(path, lambda x: x[1:] * x[:-1], x)


def test_is_not_pickled() -> None:
    prepared = prepare_jacobian(torch.sin, drawn(2, 3), batched=True)
    with pytest.raises(TypeError, match=r"PreparedJacobian.load\(path, f, \*args\)"):
        pickle.dumps(prepared)


def test_shows_itself() -> None:
    prepared = prepare_jacobian(brusselator, drawn(1, 2, 4, 4), batched=True)
    text = repr(prepared)
    for part in (
        "PreparedJacobian of brusselator",
        "32 × 32",
        "method products",
        "flop",
        "bytes",
        "arguments: torch.float64 (1, 2, 4, 4), of any number of samples; other tensors: 0",
        "baked in",
    ):
        assert part in text
    assert prepared.check(drawn(1, 2, 4, 4)) < 1e-14
    assert math.isfinite(prepared.check(drawn(1, 2, 4, 4, seed=1)))


@pytest.mark.parametrize("method", ["products", "compressed"])
@pytest.mark.parametrize("size", [3, 8, 16, 18])
def test_a_jacobian_that_is_zero_but_for_rounding(size: int, method: str) -> None:
    def normalised(x: torch.Tensor) -> torch.Tensor:
        a = functional.group_norm(x[None, : size // 3 * 3], 1)[0]
        return torch.outer(a, a).sum(1)

    for f in (
        lambda x: (x - x.mean()).sum(),
        lambda x: ((x - x.mean()) / x.std()).sum(),
        lambda x: torch.linalg.cross(x[:3], x[:3]),
        lambda x: x.softmax(0).sum(),
        normalised,
    ):
        prepared = prepare_jacobian(f, drawn(size), method=method)
        assert prepared(drawn(size)).values.abs().amax() <= 1e-13
    # An error of small derivatives is found nevertheless.
    for scale in (1e-9, 1e-6):
        read = [scale]
        prepared = prepare_jacobian(lambda x, read=read: read[0] * x.sin(), drawn(size), method=method)
        read[0] *= 1.0001
        with pytest.raises(jacsparse.VerificationError, match="differs from autograd's"):
            prepared.check(drawn(size))


@pytest.mark.parametrize(("size", "offset"), [(1e-6, 0.0), (1.0, 1e6)])
def test_a_large_constant_part_hides_no_error(size: float, offset: float) -> None:
    """Where the function's values are large beside its arguments, in units of which derivatives are not."""
    x, diagonal = size * drawn(4).float(), Pattern.of(Identity(4))
    with pytest.raises(jacsparse.VerificationError, match="differs from autograd's"):
        prepare_jacobian(lambda x: x.roll(1) * 2 + x.cos() + offset, x, pattern=diagonal)
    read = [1.0]
    prepared = prepare_jacobian(lambda x: read[0] * x.sin() + 3 * x.cos() + offset, x)
    read[0] = 2.0
    with pytest.raises(jacsparse.VerificationError, match="differs from autograd's"):
        prepared.check(x)


def test_values_that_are_not_finite_when_it_is_prepared() -> None:
    f = lambda x, c: x.index_put((torch.tensor([0, 2]),), x[:2] * 3, accumulate=True) / c  # noqa: E731
    with pytest.raises(jacsparse.VerificationError, match="values are not finite at these arguments: prepare it at"):
        prepare_jacobian(f, drawn(4), 0.0)


@pytest.mark.parametrize("f", [lambda x: functional.hardsigmoid(x).sin().sum(), lambda x: torch.cdist(x, x + 2).sum()])
def test_hessians_of_operators_without_second_derivatives_in_pytorch(f: Callable[..., torch.Tensor]) -> None:
    x = drawn(3, 2)
    prepared = jacsparse.prepare_hessian(f, x)
    assert torch.allclose(prepared(x).todense(), jacsparse.hessian(f, x).todense(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.tensor([0, 2]),
        lambda: torch.tensor([True, False, True, False]),
        lambda: torch.arange(4) % 2 == 0,
        lambda: (torch.tensor([0, 2]), torch.tensor([1])),
    ],
)
def test_writes_with_an_index_that_the_function_makes(made: Callable[[], Any]) -> None:
    def f(x: torch.Tensor, power: int) -> torch.Tensor:
        y = (x if not isinstance(made(), tuple) else x[:, None] * torch.ones(2, dtype=FLOAT)).clone()
        y[made()] *= 2
        return y**power

    for power in (1, 2):
        g = functools.partial(f, power=power)
        for options in (
            {},
            {"method": "products"},
            {"compile": True},
            {"create_graph": True},
            {"method": "compressed"},
        ):
            prepared = prepare_jacobian(g, drawn(4), **options)
            assert_equal(prepared(drawn(4, seed=1)), dense(g, drawn(4, seed=1), batched=False).flatten(1, -2))
        total = lambda x: (g(x) ** 3).sum()  # noqa: B023, E731
        expected = torch.autograd.functional.hessian(total, drawn(4))
        assert torch.allclose(jacsparse.prepare_hessian(total, drawn(4))(drawn(4)).todense(), expected, rtol=1e-12)
