"""Hessians of drawn functions and of further operators against PyTorch's, or against differences of gradients."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from torch.func import functional_call
from torch.nn import functional

import jacsparse
from jacsparse import UnsupportedOperatorError, hessian, hessian_pattern, prepare_hessian
from jacsparse.tracing import facts_of
from tests.helpers import BOUND, FLOAT, drawn
from tests.patterns.operators import Case, convolutions, transposed_convolutions
from tests.patterns.test_operators import fits

from .drawn_hessians import (
    ENDINGS,
    FURTHER,
    MATRICES,
    Drawn,
    Function,
    differences,
    drawn_functions,
    further_step,
    reference,
)

FULL = os.environ.get("JACSPARSE_TESTS") == "full"
DRAWS = 1500 if FULL else 12
#: The largest share of drawn functions that may be refused.
REFUSED = 0.02
#: What an error must say: an operator or what the code does, and what to do.
REMEDIES = (
    "register one",
    "write it",
    "use torch.where",
    "write to a clone",
    "call jacsparse.jacobian",
    "take ",
    "takes ",
)


def assert_close(actual: jacsparse.SparseJacobian, expected: torch.Tensor, tolerance: float = 1e-9) -> None:
    """Each sample's Hessian is symmetric, and near the expected one; elements on the way to it are of order one."""
    for number, matrix in enumerate(expected):
        result = actual.todense(0 if actual.batch == 1 else number)
        assert torch.equal(result, result.T)
        assert (result - matrix).abs().max() <= tolerance * max(1e-2, matrix.abs().max())


def expected_at(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor | None:
    """PyTorch's Hessians where it has them, and they are numbers."""
    if "logcumsumexp" in repr(f):
        # PyTorch's second derivative is wrong where a gradient is zero.
        return None
    try:
        expected = reference(f, x)
    except RuntimeError:
        return None
    return expected if expected.isfinite().all() else None


def test_drawn_functions() -> None:
    counts: Counter[str] = Counter()

    @settings(max_examples=DRAWS)
    @given(f=drawn_functions())
    def check(f: Drawn) -> None:
        x, y = f.input(), f.input(1)
        expected, then = expected_at(f, x), expected_at(f, y)
        assume(expected is not None and then is not None)
        counts["drawn"] += 1
        try:
            actual = hessian(f, x, batched=True)
        except UnsupportedOperatorError as error:
            counts["refused"] += 1
            assert any(remedy in str(error) for remedy in REMEDIES), error
            return
        assert_close(actual, expected)
        # The second call may follow the program of the first one, where other elements win.
        assert_close(hessian(f, y, batched=True), then)
        outside = hessian(f, y, batched=True).pattern.to_scipy().toarray() == 0
        assert not expected[:, torch.from_numpy(outside)].any()

    check()
    print(f"\n{counts['drawn']} drawn, {counts['refused']} refused")
    assert counts["refused"] <= REFUSED * counts["drawn"]


@settings(max_examples=500 if FULL else 8)
@given(f=drawn_functions())
def test_drawn_functions_prepared(f: Drawn) -> None:
    x, y = f.input(), f.input(1)
    expected, then = expected_at(f, x), expected_at(f, y)
    assume(expected is not None and then is not None)
    try:
        prepared = prepare_hessian(f, x, batched=True)
    except UnsupportedOperatorError as error:
        assert any(remedy in str(error) for remedy in REMEDIES), error
        return
    for arguments, values in ((x, expected), (y, then)):
        assert_close(prepared(arguments), values)


def check_at(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Compare with PyTorch or, where that has no second derivatives, with differences of gradients."""
    expected, actual = expected_at(f, x), hessian(f, x, batched=True)
    if expected is None:
        assert_close(actual, differences(f, x), 1e-5)
    else:
        assert_close(actual, expected)


def has_derivative_of_aminmax() -> bool:
    """Not in PyTorch 2.6."""
    y = torch.aminmax(drawn(2).requires_grad_())[0]
    return "NotImplemented" not in y.grad_fn.name()


@pytest.mark.parametrize("name", [*FURTHER, *MATRICES])
def test_further_operators(name: str) -> None:
    if name == "aminmax" and not has_derivative_of_aminmax():
        with pytest.raises(UnsupportedOperatorError, match="PyTorch has no derivative for aten::aminmax"):
            hessian(lambda x: torch.aminmax(x)[0].square(), drawn(3))
        return
    for ending in ENDINGS if FULL else ("sines",):
        for size in (1, 2, 3, 4) if FULL else (3,):
            f = Drawn((further_step(name, size),), ending, 9, 1, size)
            for seed in range(2 if FULL else 1):
                check_at(f, f.input(seed))


#: Selections by a computed index, and puts of a part of the input at computed places.
SELECTIONS: dict[str, Function] = {
    "gather": lambda x, i: x.gather(1, i),
    "index": lambda x, i: x[:, i[0]],
    "two indices": lambda x, i: x.reshape(-1, 1, x.shape[1])[:, i[0] * 0, i[0]],
    "indices apart": lambda x, i: x.reshape(1, 1, 5, 1)[i[0] * 0, :, i[0]],
    "one element": lambda x, i: torch.ops.aten.index(x, [None, i[0, 1]]),
    "index of two axes": lambda x, i: x[:, i.reshape(5, 1)[:, [0, 0]]],
    "index select": lambda x, i: x.index_select(1, i[0]),
    "scatter": lambda x, i: x.scatter(1, i[:, :2], x[:, 3:] ** 2),
    "scatter a number": lambda x, i: x.scatter(1, i[:, :2], 2.0),
    "scatter to fewer lines": lambda x, i: torch.cat([x, x**2]).scatter(0, i[:, :3] % 2, x[:, :3] ** 2)[1:],
    "scatter add": lambda x, i: x.scatter_add(1, i, x**2),
    "index add": lambda x, i: x.index_add(1, i[0], x**2, alpha=0.5),
    "index copy": lambda x, i: x.index_copy(1, i[0, :2], x[:, :2] ** 2),
    "index fill": lambda x, i: x.index_fill(1, i[0, :2], 2.0),
    "index put": lambda x, i: x.index_put((torch.arange(len(x))[:, None], i[:, :2]), x[:, :2] ** 2),
    "index put of one": lambda x, i: x.index_put((i[0, 0] * 0, i[0, 1]), x[0, 0] ** 2),
    "index put in all": lambda x, i: torch.ops.aten.index_put(x, [None, i[0]], x**2, True),
    "mask": lambda x, i: x[:, i[0] > 1],
    "put by a mask": lambda x, i: x.index_put((i > 1,), x[0, :3] ** 2),
    "masked scatter": lambda x, i: x.masked_scatter(i > 1, x.flip(1) ** 2),
    "take": lambda x, i: x.take(i),
    "largest": lambda x, i: x.max(1, keepdim=True)[0] * x.min(1, keepdim=True)[0],
}


def selected(name: str, x: torch.Tensor) -> torch.Tensor:
    y = SELECTIONS[name](x, x.argsort(1)).reshape(len(x), -1)
    return (y.sin() * torch.arange(1.0, y.shape[1] + 1)).sum(1)


@pytest.mark.parametrize("name", SELECTIONS)
def test_selections_by_computed_indices(name: str) -> None:
    f = functools.partial(selected, name)
    x, y = (torch.randn(1, 5, dtype=FLOAT, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    for each in (x, y):
        assert_close(hessian(f, each, batched=True), reference(f, each))
    if name in ("mask", "put by a mask"):
        with pytest.raises(UnsupportedOperatorError, match=r"depends on what a tensor holds|asks what a tensor holds"):
            prepare_hessian(f, x, batched=True)
        return
    prepared = prepare_hessian(f, x, batched=True)
    for each in (x, y):
        # Other elements win.
        assert_close(prepared(each), reference(f, each))
    outside = hessian_pattern(lambda x: f(x[None])[0], (5,)).to_scipy().toarray() == 0
    assert not reference(f, y)[0][torch.from_numpy(outside)].any()


def test_writes_to_computed_places_are_refused() -> None:
    f = lambda x: (x * 2).scatter_(0, x.argsort(), x**2).sin().sum()  # noqa: E731
    with pytest.raises(UnsupportedOperatorError, match=r"index of aten.scatter depends on the input: .*torch.where"):
        hessian(f, drawn(4))


def test_hessians_of_windows_are_blocks() -> None:
    f = lambda x: (functional.max_pool1d(x[None], 3)[0] ** 2).sum()  # noqa: E731
    pattern = hessian_pattern(f, (9,))
    assert pattern.nnz == 3 * 9 and hessian(f, drawn(9)).pattern == pattern
    overlapping = hessian_pattern(lambda x: (functional.avg_pool1d(x[None], 2, 1)[0] ** 4).sum(), (5,))
    assert overlapping.nnz == 5 + 2 * 4


@pytest.mark.parametrize("order", [1.0, 1.5, 2.0, 3.0, torch.inf])
def test_distances(order: float) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        points, others = x[:, :6].reshape(-1, 3, 2), x[:, 6:].reshape(-1, 2, 2)
        return (torch.cdist(points, others, order) ** 3).sum((1, 2))

    check_at(f, torch.randn(2, 10, dtype=FLOAT, generator=torch.Generator().manual_seed(0)))


def test_points_at_one_place_have_no_gradient() -> None:
    f = lambda x: (torch.cdist(x[:2], x[2:], 3.0) ** 4).sum()  # noqa: E731
    x = torch.tensor([[0.0, 1.0], [2.0, 3.0], [0.0, 1.0]], dtype=FLOAT)
    assert hessian(f, x).todense().isfinite().all()


def written(x: torch.Tensor) -> torch.Tensor:
    y = 2 * torch.cat([x, x.new_ones(len(x), 2)], 1)
    y.narrow(1, 0, 1).zero_()
    return y.sum(1) ** 2


def pooled(x: torch.Tensor) -> torch.Tensor:
    return (functional.adaptive_max_pool3d(x.reshape(-1, 1, 2, 3), (1, None, 2)) ** 2).flatten(1).sum(1)


def normalised(x: torch.Tensor) -> torch.Tensor:
    return (functional.group_norm(x.reshape(-1, 3, 2).transpose(1, 2), 2, eps=0.1) ** 4).flatten(1).sum(1)


@pytest.mark.parametrize(
    ("f", "method"),
    [
        (written, "products"),
        *((f, method) for f in (pooled, normalised) for method in ("products", "compressed")),
    ],
)
def test_operators_of_consecutive_memory(f: Callable[[torch.Tensor], torch.Tensor], method: str) -> None:
    x, y = (torch.randn(2, 6, dtype=FLOAT, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert_close(prepare_hessian(f, x, batched=True, method=method)(y), reference(f, y))
    assert_close(hessian(f, x, batched=True), reference(f, x))


def test_the_backward_pass_of_cudnn() -> None:
    shape = (3, 2, 4)
    x, gradient = (torch.randn(shape, dtype=FLOAT, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    weight, bias = drawn(2), drawn(2, seed=1)
    backward = facts_of(torch.ops.aten.cudnn_batch_norm_backward.default).parts

    def pulled(x: torch.Tensor) -> torch.Tensor:
        _, mean, deviation = torch.native_batch_norm(x.detach(), weight, bias, None, None, True, 0.1, 1e-5)
        return backward(x, gradient, weight, None, None, mean, deviation, 1e-5, None)[0]

    def expected(x: torch.Tensor) -> torch.Tensor:
        y = functional.batch_norm(x, None, None, weight, bias, training=True)
        return torch.autograd.grad(y, x, gradient, create_graph=True)[0]

    x.requires_grad_()
    assert (pulled(x) - expected(x)).abs().max() <= BOUND * 10
    second, other = (torch.autograd.grad((f(x) ** 2).sum(), x)[0] for f in (pulled, expected))
    assert (second - other).abs().max() <= BOUND * 100


@settings(max_examples=200 if FULL else 10)
@given(case=convolutions(1) | convolutions(2) | transposed_convolutions(1) | transposed_convolutions(2))
def test_convolutions_by_weights_and_input(case: Case) -> None:
    module, shape = case
    assume(fits(module, shape, 2))
    x = torch.randn(2, *shape, dtype=FLOAT, generator=torch.Generator().manual_seed(0))
    parts = {name: value.detach() for name, value in module.named_parameters()} | {"": x}
    sizes = [part.numel() for part in parts.values()]
    assume(sum(sizes) <= 60)

    def f(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        *parameters, (_, x) = parts.items()
        return (functional_call(module, dict(parameters), (x,)) ** 3).sum()

    def whole(flat: torch.Tensor) -> torch.Tensor:
        pieces = zip(parts.items(), flat[0].split(sizes), strict=True)
        return f({name: piece.reshape(part.shape) for (name, part), piece in pieces})[None]

    flat = torch.cat([part.reshape(-1) for part in parts.values()])[None]
    assert_close(hessian(f, parts), reference(whole, flat))


@pytest.mark.parametrize("name", ["windows", "weights", "selections", "statistics"])
def test_gradients_of_these_hessians(name: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        if name == "windows":
            return (functional.max_pool1d(y[None], 2, 1) ** 3).sum()
        if name == "weights":
            return (functional.conv1d(y[None, None, :4], y[None, None, 4:]) ** 3).sum()
        if name == "selections":
            return (y.scatter_add(0, x.argsort(), y**2) ** 3).sum()
        return (functional.group_norm(y.reshape(1, 2, 3), 2, eps=0.1) ** 4).sum()

    values = lambda x: hessian(f, x, create_graph=True).values  # noqa: E731
    assert torch.autograd.gradcheck(values, drawn(6, seed=3).requires_grad_())


def test_statistics_of_groups_depend_on_the_input() -> None:
    f = lambda x: (functional.group_norm(x.reshape(1, 4, 3), 2, eps=0.1) ** 4).sum()  # noqa: E731
    x = drawn(12)
    assert_close(hessian(f, x), torch.autograd.functional.hessian(f, x)[None])
