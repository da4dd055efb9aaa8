"""Values that a user registered hold in every call, or the call is refused where autograd would take others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from jacsparse.patterns import RULES, Diagonal, Pattern
from torch import nn

import jacsparse
from jacsparse import UnsupportedOperatorError, hessian, jacobian, prepare_hessian, prepare_jacobian
from tests.helpers import BOUND, FLOAT, drawn

Values = Callable[[jacsparse.Call, Pattern], torch.Tensor]


def twos(call: jacsparse.Call, pattern: Pattern) -> torch.Tensor:
    return call.input.new_full((pattern.nnz, len(call.input)), 2.0)


def cosines(call: jacsparse.Call, pattern: Pattern) -> torch.Tensor:
    return call.input.flatten(1).cos().T.contiguous()


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    before = dict(RULES)

    def register(values: Values) -> None:
        pattern = lambda call: Pattern.of(Diagonal(call.in_size))  # noqa: E731
        jacsparse.register_rule("aten.sin", pattern=pattern, values=values, replace=True)

    yield register
    RULES.clear()
    RULES.update(before)


def test_each_call_shows_that_samples_stay_apart(register: Callable[..., None]) -> None:
    """By its elements: zeros tell nothing of a call that does the same."""
    pattern = lambda call: Pattern.of(Diagonal(call.in_size))  # noqa: E731
    jacsparse.register_rule("aten.roll", pattern=pattern, replace=True)

    def rolled(x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(x - 100)
        for step in range(6):
            h = torch.roll(h + (0.0 if step < 3 else 1.0) * x, 1, 0)
        return h

    with pytest.raises(UnsupportedOperatorError, match=r"aten\.roll mixes the samples of a batch"):
        jacobian(rolled, drawn(3, 2), batched=True)


def test_a_call_is_printed_by_what_rules_read(register: Callable[..., None]) -> None:
    texts = list[str]()

    def printing(call: jacsparse.Call, pattern: Pattern) -> torch.Tensor:
        texts.append(repr(call))
        return cosines(call, pattern)

    register(printing)
    jacobian(f, drawn(2))
    assert texts[0].startswith("Call(operator='aten.sin', arguments={}, in_shape=(2,), out_shape=(2,), path=")
    assert "vjp" not in texts[0] and "Node" not in texts[0]


def f(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 3


def total(x: torch.Tensor) -> torch.Tensor:
    return f(x).sum()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, dtype=FLOAT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sin()


def of_weight(wrapped: nn.Module, network: Network, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(wrapped(x).sum(), network.inner.weight)[0]


#: What takes derivatives by autograd, with what it is compared with where the registered values are right.
BY_AUTOGRAD: dict[str, Callable[[Network, torch.Tensor], torch.Tensor]] = {
    "create_graph": lambda network, x: jacobian(f, x, create_graph=True, batched=True).values,
    "prepared create_graph": lambda network, x: prepare_jacobian(f, x, create_graph=True)(x).values,
    "hessian": lambda network, x: hessian(total, x[0]).values,
    "linear": lambda network, x: of_weight(jacsparse.nn.Scan(network, schedule="linear"), network, x),
    "blelloch": lambda network, x: of_weight(jacsparse.nn.Scan(network, schedule="blelloch"), network, x),
    "leapfrog": lambda network, x: of_weight(jacsparse.nn.Leapfrog(network, threads=2), network, x),
    "solve": lambda network, x: of_weight(jacsparse.nn.Solve(network), network, x),
    "vjp": lambda network, x: jacsparse.vjp(network, x)[1](torch.ones_like(x))[0],
}


@pytest.mark.parametrize("name", BY_AUTOGRAD)
def test_other_values_are_refused_where_autograd_takes_its_own(name: str, register: Callable[..., None]) -> None:
    network, x = Network(), drawn(2, 3)
    expected = BY_AUTOGRAD[name](network, x)
    register(cosines)
    assert torch.equal(BY_AUTOGRAD[name](network, x), expected)
    register(twos)
    with pytest.raises(
        UnsupportedOperatorError, match=r"values registered for aten\.sin .* make it an operator of your"
    ):
        BY_AUTOGRAD[name](network, x)


@pytest.mark.parametrize("method", ["auto", "products"])
def test_values_of_prepared_jacobians(method: str, register: Callable[..., None]) -> None:
    x = drawn(2, 3)
    before = prepare_jacobian(f, x, method=method, batched=True)
    register(twos)
    prepared = prepare_jacobian(f, x, method=method, batched=True)
    assert (prepared(drawn(2, 3, seed=1)).values == 6).all()
    assert prepared.check(x) == 0
    # An object prepared before keeps the rules of its time, and its check says so.
    assert (before(x).values - 3 * x.T.cos()).abs().amax() <= BOUND
    with pytest.raises(jacsparse.VerificationError, match=r"that of jacsparse\.jacobian"):
        before.check(x)


@pytest.mark.parametrize("values", [cosines, twos])
def test_what_cannot_compare_at_each_call_is_refused(values: Values, register: Callable[..., None]) -> None:
    register(values)
    with pytest.raises(UnsupportedOperatorError, match=r"aten\.sin, whose values were .* call jacsparse\.hessian"):
        prepare_hessian(total, drawn(3))
    with pytest.raises(UnsupportedOperatorError, match=r"aten\.sin, whose values were registered .* method='products'"):
        prepare_jacobian(f, drawn(2, 3), method="compressed", batched=True)


def test_infinite_values(register: Callable[..., None]) -> None:
    register(lambda call, pattern: twos(call, pattern) / 0)
    for actual in (jacobian(f, drawn(2, 3), batched=True), prepare_jacobian(f, drawn(2, 3), batched=True)(drawn(2, 3))):
        assert torch.isinf(actual.values).all()


class Sines(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return f(x)


@pytest.mark.parametrize("function", [f, Sines()])
def test_programs_of_earlier_calls_end_with_their_rules(function: Any, register: Callable[..., None]) -> None:
    x = drawn(2, 3)
    for values, expected in ((cosines, 3 * x.T.cos()), (twos, torch.full((3, 2), 6.0, dtype=FLOAT))):
        register(values)
        for _ in range(3):
            assert (jacobian(function, x, batched=True).values - expected).abs().amax() <= BOUND


def test_a_living_scan_takes_new_rules(register: Callable[..., None]) -> None:
    scan, x = jacsparse.nn.Scan(Sines(), schedule="blelloch"), drawn(2, 3).requires_grad_()
    register(cosines)
    assert torch.autograd.grad(scan(x).sum(), x)[0].allclose(3 * x.cos())
    register(twos)
    with pytest.raises(UnsupportedOperatorError, match=r"values registered for aten\.sin"):
        scan(x)


def test_values_of_columns(register: Callable[..., None]) -> None:
    """A product with a full matrix takes the registered values too."""
    before = RULES["aten.cumsum"]

    def lower(call: jacsparse.Call) -> Pattern:
        return Pattern.from_scipy(scipy.sparse.csr_array(np.tri(call.out_size)))

    def threes(call: jacsparse.Call, pattern: Pattern) -> torch.Tensor:
        return call.input.new_full((pattern.nnz, len(call.input)), 3.0)

    jacsparse.register_rule("aten.cumsum", pattern=lower, values=threes, replace=True)
    try:
        weight, x = drawn(40, 40), drawn(2, 40)
        module: Any = nn.Sequential(
            nn.Linear(40, 40, bias=False, dtype=FLOAT), Cumsum(), nn.Linear(40, 40, dtype=FLOAT)
        )
        with torch.no_grad():
            module[0].weight.copy_(weight)
        expected = module[2].weight @ (3 * torch.ones(40, 40, dtype=FLOAT).tril()) @ weight
        for _ in range(3):
            difference = jacobian(module, x).todense(1) - expected
            assert difference.abs().amax() <= 1e-12 * expected.abs().amax()
    finally:
        RULES["aten.cumsum"] = before


class Cumsum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)
