"""Jacobians at kinks, ties, zeros, infinities and edges of domains against autograd, entry by entry."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn, special
from torch.nn import functional

import jacsparse
from tests.patterns.operators import MATRIX_FUNCTIONS, OPERATORS
from tests.patterns.test_operators import fits

FULL = os.environ.get("JACSPARSE_TESTS") == "full"
INF, NAN, FLOAT = math.inf, math.nan, torch.float64

Function = Callable[[torch.Tensor], torch.Tensor]
Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: Zeros, kinks and thresholds of operators, infinities, what overflows when squared, and what underflows.
FINITE = [0.0, -0.0, 1, -1, 0.5, -0.5, 2, -2, 3, -3, 1.5, 2.5, -2.5, 6, -6, 0.1, -0.7, 0.4, 20, -20, math.pi / 2]
EXTREME = [INF, -INF, NAN, 1e308, -1e308, 5e-324, -5e-324, 1e-310, 1e-160, -1e-160]
POINTS = torch.tensor([*FINITE, *EXTREME], dtype=FLOAT)
#: All pairs of some of them.
PAIR_POINTS = torch.tensor([0.0, -0.0, 1, -1, 0.5, -3, INF, -INF, NAN, 1e308, 5e-324, 1e-160], dtype=FLOAT)
PAIRS = torch.cartesian_prod(PAIR_POINTS, PAIR_POINTS).T.contiguous()

#: What the elements of an operator's input are drawn from.
POOLS = {
    "kinks": [*FINITE[:14], 0.1, 0.3, 0.4, -0.7],
    "ties": [0.0, 1.0, 1.0, -1.0],
    "zeros": [0.0, -0.0],
    "edges": [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 2.5],
    "extremes": [0.0, 1e308, -1e308, 5e-324, 1e-160, 1.0, -1e155],
    "one infinity": [1.0, 2.0, 0.5, -1.0, INF],
}

#: Where autograd has no number and `jacobian` may have one, by the operator's name; and why.
BESIDE = "autograd multiplies the zero gradient of another output by an infinite derivative"
OVERFLOWS = "PyTorch's backward pass is no number where the variance overflows, whatever the gradient"
KNOWN = {
    **dict.fromkeys(("addcdiv", "addcmul", "atan2", "div", "fmod", "glu", "hypot", "logaddexp", "mul"), BESIDE),
    **dict.fromkeys(("_trilinear", "baddbmm", "bmm", "cumprod", "logcumsumexp", "matmul", "prod"), BESIDE),
    **dict.fromkeys(("binary_cross_entropy_with_logits", "mse_loss", "rms_norm"), BESIDE),
    **dict.fromkeys(("linalg_solve_triangular", "scaled_dot_product_attention"), BESIDE),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "group_norm", "native_group_norm"), OVERFLOWS),
    "instance_norm": OVERFLOWS,
}
#: The pools of operators that cannot take all; and why.
_ORDINARY = ("kinks", "ties", "zeros")
POOLS_OF = {
    # PyTorch's backward pass writes outside of its tensor where a coordinate is infinite or no number.
    **dict.fromkeys(("grid_sampler_2d", "grid_sampler_3d"), _ORDINARY),
    # It raises where a probability or a pivot is no number.
    **dict.fromkeys(("binary_cross_entropy", "linalg_inv", "linalg_solve"), _ORDINARY),
    # A product with an inverse overflows for other matrices than a solution does.
    "linalg_solve_triangular": (*_ORDINARY, "edges", "one infinity"),
    # Factorisations are of matrices near a diagonal one.
    **dict.fromkeys(("linalg_lu_solve", *MATRIX_FUNCTIONS.split()), ("ties", "zeros")),
}


def _powers(base: float) -> Function:
    return lambda x: base**x


def _of_names(module: Any, names: str) -> dict[str, Any]:
    return {f"{module.__name__}.{name}": getattr(module, name) for name in names.split()}


def _with(function: Callable[..., torch.Tensor], *args: object, **kwargs: object) -> Function:
    return lambda x: function(x, *args, **kwargs)


def _loss(function: Callable[..., torch.Tensor], target: float, swapped: bool = False) -> Function:
    def loss(x: torch.Tensor) -> torch.Tensor:
        pair = (x, torch.full_like(x, target))
        return function(*(pair[::-1] if swapped else pair), reduction="none")

    return loss


def _lines(function: Function) -> Function:
    """A function of lines of two, the number and one, at each number."""
    return lambda x: function(torch.stack([x, torch.ones_like(x)], 1)).reshape(len(x), -1)[:, 0]


ELEMENTWISE: dict[str, Function] = {
    **_of_names(torch, "abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2"),
    **_of_names(torch, "expm1 floor frac i0 lgamma log log10 log1p log2 nan_to_num neg positive rad2deg reciprocal"),
    **_of_names(torch, "relu round rsqrt selu sgn sigmoid sign sin sinc sinh sqrt square tan tanh trunc logit angle"),
    **_of_names(special, "airy_ai bessel_j0 bessel_j1 digamma entr erfcx expit gammaln i0e i1 i1e log_ndtr ndtr ndtri"),
    **_of_names(functional, "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6"),
    **_of_names(functional, "silu softplus softshrink softsign tanhshrink rrelu"),
    **{f"power {p}": _with(torch.pow, p) for p in (0, 1, 2, 3, 0.5, -1, -2, 1.5, 1 / 3, INF, NAN)},
    **{f"powers of {base}": _powers(base) for base in (0, 1, 0.5, -1, INF)},
    **{f"fmod {n}": _with(torch.fmod, n) for n in (1, 0.5, 2, INF)},
    **{f"remainder {n}": _with(torch.remainder, n) for n in (1, 0.5, 2, -1)},
    **{f"{how} by {n}": _with(torch.div, n, rounding_mode=how) for how in ("floor", "trunc") for n in (0.5, -2)},
    **{f"times {n}": _with(torch.mul, n) for n in (0.0, -0.0, INF, NAN, 1e308)},
    "gelu tanh": _with(functional.gelu, approximate="tanh"),
    "leaky_relu 0": _with(functional.leaky_relu, 0.0),
    "softplus 0.5": _with(functional.softplus, 2.0, 1.0),
    "threshold": _with(functional.threshold, 0.5, 2.0),
    "prelu": lambda x: functional.prelu(x, x.new_full((1,), 0.25)),
    "clamp": _with(torch.clamp, -0.5, 0.5),
    "clamp to one": _with(torch.clamp, 0.5, 0.5),
    "clamp between tensors": lambda x: torch.clamp(x, torch.full_like(x, -0.5), torch.full_like(x, 0.5)),
    "clamp_min of a tensor": lambda x: torch.clamp(x, min=torch.zeros_like(x)),
    "logit 0.1": _with(torch.logit, 0.1),
    "round 1": _with(torch.round, decimals=1),
    "polygamma": lambda x: torch.polygamma(1, x),
    "x / x": lambda x: x / x,
    "x ** x": lambda x: x**x,
    "atan2": lambda x: torch.atan2(x, x),
    "maximum": lambda x: torch.maximum(x, x),
    "where root": lambda x: torch.where(x > 0, x.sqrt(), 0.0),
    "where log": lambda x: torch.where(x > 0, x.log(), 0.0),
    "where inside": lambda x: torch.where(x > 0, torch.where(x > 0, x, 1.0).log(), 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, 2.0),
    "copysign": _with(torch.copysign, -1.0),
    **{f"norm {p}": _lines(_with(torch.linalg.vector_norm, p, 1)) for p in (0, 0.5, 1, 2, 3, INF, -INF)},
    **{f"lp_pool {p}": _lines(lambda x, p=p: functional.lp_pool1d(x[:, None], p, 2)) for p in (1, 2, 3)},  # type: ignore[misc]
    **{
        f"{kind}": _lines(lambda x, kind=kind: getattr(torch, kind)(x, 1))  # type: ignore[misc]
        for kind in ("amax", "amin", "prod", "logsumexp", "softmax", "log_softmax", "std", "var", "nansum", "cumprod")
    },
    **{
        f"{kind} of a line": _lines(lambda x, kind=kind: getattr(torch, kind)(x, dim=1)[0])  # type: ignore[misc]
        for kind in ("max", "min", "median", "nanmedian", "mode", "sort", "cummax", "cummin")
    },
    **{
        f"{function.__name__} {target} {swapped}": _loss(function, target, swapped)
        for function in (functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss)
        for target in (0.0, 1.0, INF)
        for swapped in (False, True)
    },
    **{
        f"{function.__name__} {target}": _loss(function, target)
        for function in (
            *(functional.soft_margin_loss, functional.hinge_embedding_loss, functional.kl_div),
            *(functional.poisson_nll_loss, functional.binary_cross_entropy_with_logits),
        )
        for target in (1.0, -1.0)
    },
    "multi_margin_loss": lambda x: functional.multi_margin_loss(
        torch.stack([x, x * 0], 1), torch.zeros(len(x), dtype=torch.long), reduction="none"
    ),
    "multilabel_margin_loss": lambda x: functional.multilabel_margin_loss(
        torch.stack([x, x * 0], 1), torch.tensor([[0, -1]]).expand(len(x), 2), reduction="none"
    ),
}

TWO_OPERANDS: dict[str, Binary] = {
    **_of_names(torch, "add sub mul div maximum minimum fmax fmin atan2 logaddexp hypot fmod remainder pow copysign"),
    **_of_names(torch, "xlogy nextafter"),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "where": lambda x, y: torch.where(x > y, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y),
    "clamp": lambda x, y: x.clamp(min=y, max=y + 1),
    "mse_loss": lambda x, y: functional.mse_loss(x, y, reduction="none"),
    "huber_loss": lambda x, y: functional.huber_loss(x, y, reduction="none"),
    "binary_cross_entropy_with_logits": lambda x, y: functional.binary_cross_entropy_with_logits(
        x, y, pos_weight=x.new_full((1,), 2.0), reduction="none"
    ),
    "margin_ranking_loss": lambda x, y: functional.margin_ranking_loss(x, y, torch.ones_like(x), 0.5, reduction="none"),
}


def agreement(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Where two tensors have the same numbers, up to roundings, the same infinities or no numbers."""
    scale = torch.maximum(actual.abs(), expected.abs()).clamp(min=1)
    eps = 1e-12 if actual.dtype == FLOAT else 1e-5
    close = actual.isfinite() & expected.isfinite() & ((actual - expected).abs() <= eps * scale)
    return (actual == expected) | close | (actual.isnan() & expected.isnan())


def assert_diagonal(function: Function, x: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that the Jacobian is a diagonal, which is expected."""
    actual = jacsparse.jacobian(function, x, batched=False).todense(0)
    agrees = agreement(actual.diagonal(), expected)
    assert agrees.all(), (x[~agrees], actual.diagonal()[~agrees], expected[~agrees])
    assert not actual[~torch.eye(len(x), dtype=torch.bool)].any()


def gradient_of_sum(function: Function, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    y = function(x)
    if not y.requires_grad:
        # Some functions have no derivative in PyTorch, and are taken for constants.
        return torch.zeros_like(x)
    return torch.autograd.grad(y, x, torch.ones_like(y), materialize_grads=True)[0]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_functions_of_one_number(name: str) -> None:
    function = ELEMENTWISE[name]
    assert_diagonal(function, POINTS, gradient_of_sum(function, POINTS))


@pytest.mark.parametrize("name", TWO_OPERANDS)
def test_functions_of_two_numbers(name: str) -> None:
    function, (x, y) = TWO_OPERANDS[name], PAIRS
    for one in (lambda x: function(x, y), lambda x: function(y, x)):
        try:
            expected = gradient_of_sum(one, x)
        except RuntimeError:
            # The operator has no derivative by this operand.
            continue
        assert_diagonal(one, x, expected)


@pytest.mark.full
@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("dtype", [torch.float32, FLOAT])
def test_functions_of_one_number_in_batches(name: str, dtype: torch.dtype) -> None:
    x = torch.stack([POINTS, POINTS.flip(0), POINTS.roll(3)]).to(dtype)
    function = lambda x: ELEMENTWISE[name](x.flatten()).reshape(x.shape)  # noqa: E731
    expected = gradient_of_sum(function, x)
    for _ in range(2):
        jacobian = jacsparse.jacobian(function, x)
        for sample, numbers in enumerate(expected):
            assert agreement(jacobian.todense(sample if jacobian.batch > 1 else 0).diagonal(), numbers).all()


#: What follows a function, or comes before it.
OTHERS: dict[str, Function] = {
    "relu": torch.relu,
    "where": lambda y: torch.where(y > 0, y, 0.0),
    "clamp": lambda y: y.clamp(0, 1),
    "abs": torch.abs,
    "maximum": lambda y: torch.maximum(y, torch.zeros_like(y)),
}
INNER = _of_names(torch, "sqrt log rsqrt reciprocal sinc acos atanh logit square exp sign")


def _both(f: Function, g: Function) -> list[Function]:
    return [lambda x: f(g(x)), lambda x: g(f(x)), lambda x: torch.where(x > 0, g(f(x)), 0.0)]


@pytest.mark.parametrize("other", OTHERS)
def test_two_functions(other: str) -> None:
    x = torch.tensor(FINITE, dtype=FLOAT)
    for inner in INNER.values():
        for both in _both(inner, OTHERS[other]):
            assert_diagonal(both, x, gradient_of_sum(both, x))


def by_rows(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The Jacobians of a batch, ``(batch, rows, columns)``, by a backward pass of the whole batch for each row."""
    x = x.clone().requires_grad_()
    y = module(x * 1)
    flat = y.reshape(len(x), -1)
    rows = []
    for row in range(flat.shape[1]):
        seed = torch.zeros_like(flat)
        seed[:, row] = 1
        (gradient,) = torch.autograd.grad(flat, x, seed, retain_graph=True, materialize_grads=True)
        rows.append(gradient.reshape(len(x), -1))
    return torch.stack(rows, 1) if rows else x.new_zeros((len(x), 0, x[0].numel()))


@pytest.mark.parametrize("operator", OPERATORS)
@settings(max_examples=60 if FULL else 2)
@given(data=st.data())
def test_operators(operator: str, data: st.DataObject) -> None:
    name = operator.removeprefix("aten.")
    module, shape = data.draw(OPERATORS[operator])
    batch, pool = data.draw(st.sampled_from([1, 3])), data.draw(st.sampled_from(POOLS_OF.get(name, tuple(POOLS))))
    assume(math.prod(shape) <= 60 and fits(module, shape, batch))
    numbers = random.Random(data.draw(st.integers(0, 2**31 - 1)))
    drawn = [numbers.choice(POOLS[pool]) for _ in range(batch * math.prod(shape))]
    x = torch.tensor(drawn, dtype=FLOAT).reshape(batch, *shape)
    expected, jacobian = by_rows(module, x), jacsparse.jacobian(module, x)
    inside = torch.from_numpy(jacobian.pattern.to_scipy().toarray())
    for sample in range(batch):
        actual = jacobian.todense(sample if jacobian.batch > 1 else 0)
        agrees = agreement(actual, expected[sample])
        # A guaranteed zero is one, whatever it is multiplied by.
        agrees |= expected[sample].isnan() & (~inside if name not in KNOWN else torch.ones_like(inside))
        assert agrees.all(), (x[sample], actual, expected[sample])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.prelu(x, x.new_full((1,), 0.25)),
        lambda x: torch.clamp(x, min=torch.zeros_like(x)),
        lambda x: torch.clamp(x, torch.zeros_like(x), torch.ones_like(x)),
        lambda x: torch.fmax(x, torch.zeros_like(x)),
        lambda x: torch.fmin(torch.zeros_like(x), x),
        lambda x: torch.maximum(x, torch.zeros_like(x)),
        lambda x: torch.atan2(x, torch.zeros_like(x)),
        lambda x: functional.lp_pool1d(x[None], 2, 1)[0],
        lambda x: torch.relu(x).sqrt(),
        torch.sinc,
        lambda x: functional.huber_loss(x, torch.zeros_like(x), reduction="none"),
    ],
)
@pytest.mark.parametrize("method", ["products", "compressed"])
def test_programs_made_elsewhere(function: Function, method: str) -> None:
    # A product that does not fold, so that later calls do not all take one way.
    whole = lambda x: torch.cat([function(x), function(x).sum()[None]])  # noqa: E731
    kinks = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0], dtype=FLOAT)
    expected = torch.autograd.functional.jacobian(whole, kinks)
    ordinary = torch.linspace(-1.7, 1.9, 5, dtype=FLOAT)
    prepared = jacsparse.prepare_jacobian(whole, ordinary, batched=False, method=method)
    # That of atan2 at the origin is no number in PyTorch 2.6.
    told = ~expected.isnan()
    assert agreement(prepared(kinks).todense(0), expected)[told].all()
    for _ in range(3):
        jacsparse.jacobian(whole, ordinary, batched=False)
        assert agreement(jacsparse.jacobian(whole, kinks, batched=False).todense(0), expected)[told].all()


def test_later_calls_of_running_sums_of_exponentials_are_as_exact_as_the_first() -> None:
    x = torch.tensor([[0.0, -40.0, 300.0], [-400.0, -440.0, 1.0]], dtype=FLOAT)
    function = lambda x: torch.logcumsumexp(x, 1)  # noqa: E731
    expected = torch.autograd.functional.jacobian(function, x).reshape(6, 6)
    for _ in range(3):
        jacobian = jacsparse.jacobian(function, x, batched=False).todense(0)
        assert ((jacobian - expected).abs() <= 1e-12 * expected.abs()).all()


def test_only_entries_that_are_not_finite_are_computed_again() -> None:
    x = torch.tensor([[0.0, 4.0, -1.0], [1.0, 9.0, 0.0]], dtype=FLOAT)
    module = nn.Sequential(nn.ReLU(), nn.Linear(3, 2, bias=False, dtype=FLOAT), nn.Softplus())
    function = lambda x: module(x).sqrt() + x.relu().sqrt().sum(1, keepdim=True)  # noqa: E731
    jacobian, expected = jacsparse.jacobian(function, x, batched=True), by_rows(function, x)  # type: ignore[arg-type]
    for sample in range(2):
        assert agreement(jacobian.todense(sample), expected[sample]).all()


@pytest.mark.parametrize("function", [torch.sinc, lambda x: functional.lp_pool1d(x[None], 2, 1)[0]])
def test_values_with_gradients(function: Function) -> None:
    x = torch.tensor([0.0, 0.0, 1.0, -1.0, 0.5], dtype=FLOAT, requires_grad=True)
    values = jacsparse.jacobian(function, x, batched=False, create_graph=True).values[:, 0]
    expected = torch.autograd.functional.jacobian(function, x, create_graph=True).diagonal()
    assert agreement(values, expected).all()
    gradients = [torch.autograd.grad(each.sum(), x)[0] for each in (values, expected)]
    assert agreement(*gradients).all()


@pytest.mark.parametrize(
    ("function", "kink"),
    [
        (lambda x: functional.elu(x, 2.0), 0.0),
        (functional.selu, 0.0),
        (lambda x: functional.softplus(x, 2.0, 1.0), 0.5),
        (lambda x: functional.huber_loss(x, torch.zeros_like(x), reduction="none", delta=0.5), 0.5),
        (lambda x: functional.huber_loss(x, torch.zeros_like(x), reduction="none", delta=0.5), -0.5),
    ],
)
def test_second_derivatives(function: Function, kink: float) -> None:
    x = torch.tensor([kink, kink + 0.1, kink - 0.1], dtype=FLOAT)
    total = lambda x: function(x).sum()  # noqa: E731
    expected = torch.autograd.functional.hessian(total, x)
    assert agreement(jacsparse.hessian(total, x).todense(0), expected).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"])
def test_reduced_losses(name: str, reduction: str) -> None:
    x, target = torch.tensor([[0.0, 1.0], [-1.0, 2.0]], dtype=FLOAT), torch.ones(2, 2, dtype=FLOAT)
    function = lambda x: getattr(functional, name)(x, target, reduction=reduction)  # noqa: E731
    expected = torch.autograd.functional.jacobian(function, x).reshape(1, 4)
    assert agreement(jacsparse.jacobian(function, x, batched=False).todense(0), expected).all()


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_margin_losses(shape: tuple[int, ...], reduction: str) -> None:
    x = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.0, 0.5], dtype=FLOAT)[: math.prod(shape)].reshape(shape)
    label = torch.ones(shape[:-1], dtype=torch.long)
    labels = torch.tensor([1, -1, 0]).expand(shape)
    for function in (
        lambda x: functional.multi_margin_loss(x, label, reduction=reduction),
        lambda x: functional.multilabel_margin_loss(x, labels, reduction=reduction),
    ):
        jacobian = jacsparse.jacobian(function, x, batched=False)
        expected = torch.autograd.functional.jacobian(function, x).reshape(jacobian.shape)
        assert agreement(jacobian.todense(0), expected).all()


def test_losses_of_elements_fold() -> None:
    function = lambda x: functional.huber_loss(x[1:], x[:-1], reduction="none")  # noqa: E731
    prepared = jacsparse.prepare_jacobian(function, torch.randn(9, dtype=FLOAT), batched=False)
    assert "local derivatives" in repr(prepared)
