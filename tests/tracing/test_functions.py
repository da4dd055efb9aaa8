"""Custom functions, ``torch.autograd.Function``: their own backward passes, against autograd in float64."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import jacsparse
from jacsparse import UnsupportedOperatorError
from jacsparse.tracing import graphs_of

SIZE = 6
KERNEL = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 1, 3)
OTHER = torch.linspace(-2, 1, SIZE, dtype=torch.float64)


def function(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """A Function of these, whose backward pass gets the tensors that it saved behind its context."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            ctx.save_for_backward(*(arg for arg in args if isinstance(arg, Tensor)))
            return forward(ctx, *args)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward(ctx, *ctx.saved_tensors, *gradients)

    return Own.apply


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return functional.gelu(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return gradient * (torch.where(x == 0, 0.5, y / x) + x * (-x * x / 2).exp() / (2 * torch.pi) ** 0.5)


class ByVjp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def vjp(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].sign() * 2


class MaskedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, mask)
        return x @ (weight * mask).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, mask = ctx.saved_tensors
        return gradient @ (weight * mask), gradient.T @ x * mask, None


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.exp_())
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient * ctx.saved_tensors[0]


class TripledInPlace(torch.autograd.Function):
    """It saves nothing, so that others may write to its result too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 4 * gradient


def written_by_function(y: Tensor) -> Tensor:
    """A tensor that a Function has written to, where autograd sees no write."""
    return TripledInPlace.apply(y * 1)  # type: ignore[no-any-return]


def seen_before(y: Tensor) -> Tensor:
    """A view from before a Function's write."""
    y = y * 1
    view = y.view(2, 3)
    TripledInPlace.apply(y)
    return view.sin()


def also_written(y: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    """A view of what a Function has written to, and then others."""
    y = written_by_function(y)
    write(y)
    return y.view(2, 3) ** 2


class ByNumpy(torch.autograd.Function):
    """No operator computes the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(gradient.detach().numpy() * np.cos(x.detach().numpy()))


class ClippedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.1, 0.1)


straight = function(lambda ctx, x: x.sign(), lambda ctx, x, g: g)
clipped = function(lambda ctx, x: x.round(), lambda ctx, x, g: g * (x.abs() <= 1))
masked = function(lambda ctx, x: x.round(), lambda ctx, x, g: g.masked_fill(x > 0, 0))
reversal = function(lambda ctx, x, factor: x.view_as(x), lambda ctx, x, g: (-0.3 * g, None))
cubed = function(lambda ctx, x: x**3, lambda ctx, x, g: g * 3 * x**2)
once = function(lambda ctx, x: x**3, once_differentiable(lambda ctx, x, g: g * 3 * x**2))
product = function(lambda ctx, x, y: x * y, lambda ctx, x, y, g: (g * y, 3 * g * x))


def several_results(ctx: Any, x: Tensor, factor: float, y: Tensor, name: str) -> tuple[Any, ...]:
    ctx.factor = factor
    positive, doubled = x > 0, x * 2
    ctx.mark_non_differentiable(positive, doubled)
    return x * y * factor, positive, name, doubled, x.sum(0, keepdim=True) * y


def of_several(ctx: Any, x: Tensor, y: Tensor, of_product: Tensor, *others: Any) -> tuple[Any, ...]:
    of_x = of_y = None
    if ctx.needs_input_grad[0]:
        of_x = of_product * y * ctx.factor + (others[-1] * y).sum(0, keepdim=True)
    if ctx.needs_input_grad[2]:
        of_y = of_product * x * ctx.factor + others[-1] * x.sum()
    return of_x, None, of_y, None


several = function(several_results, of_several)


def without_materialised(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    ctx.set_materialize_grads(False)
    return x * 2, x * x / 2


def of_some(ctx: Any, x: Tensor, first: Tensor | None, second: Tensor | None) -> Tensor:
    total = torch.zeros_like(x)
    total = total if first is None else total + first * 2
    return total if second is None else total + second * x


def with_attributes(ctx: Any, x: Tensor) -> Tensor:
    ctx.mask, ctx.norm, ctx.parts = x.abs() < 1, x.norm(), [x * 2]
    return x * 1


def by_writes(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
    result = g.clone()
    result.mul_(2)
    result[1:] += g[:-1] * x[1:]
    result[0] = 0
    return result


def by_autograd(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad((leaf[1:] * leaf[:-1]).sin(), leaf, g)[0]


def of_input(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
    arguments = [1], [1], [1], False, [0], 1, [True, False, False]
    return torch.ops.aten.convolution_backward(g[None], x[None], KERNEL, None, *arguments)[0][0]


def convolved(x: Tensor) -> Tensor:
    return functional.conv1d(x[None], KERNEL, padding=1)[0].sign()


def of_softmax(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
    return ctx.y * (g - (g * ctx.y).sum())


def written_unseen(y: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    doubled = y * 2
    with torch.no_grad():
        write(y)
    return y * y + doubled


def softmax(ctx: Any, x: Tensor) -> Tensor:
    ctx.y = x.softmax(0)
    return ctx.y * 1


WEIGHT = torch.linspace(-1, 1, SIZE, dtype=torch.float64).requires_grad_()
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "straight": lambda x: straight(x) * x,
    "rounded": lambda x: clipped(x.sin() * 2) ** 2,
    "masked": lambda x: masked(x),
    "gelu": lambda x: Gelu.apply(Gelu.apply(x * 2)) * x,
    "reversal": lambda x: reversal(x**2, 0.3).exp(),
    "vjp": lambda x: ByVjp.apply(x) * x,
    "written to": lambda x: DoubledInPlace.apply(x * 2) * x,
    "written to itself": lambda x: written_by_function(x.sin()),
    "written to, a view": lambda x: written_by_function(x.sin()).view(2, 3).flatten().sin(),
    "written to, an earlier view": lambda x: seen_before(x.sin()),
    "written to twice": lambda x: TripledInPlace.apply(written_by_function(x.sin())).view(2, 3),
    "written to, then a part": lambda x: also_written(x.sin(), lambda y: y[:2].mul_(x[3])),
    "written to, then unseen": lambda x: also_written(x.sin(), lambda y: y.detach()[1:].mul_(2)),
    "a view of what was written to": lambda x: reversal((x * 1).mul_(x), 0.3).view(2, 3).flatten().sin(),
    "a part of what was written to": lambda x: reversal((x * 1).mul_(x), 0.3).split(3)[1].view(1, 3).sin(),
    "written to, then transposed": lambda x: TripledInPlace.apply(x.sin().view(2, 3).clone()).t_().contiguous().sin(),
    "several results": lambda x: (lambda y: y[0] * y[4].sin() + y[3])(several(x, 2.5, x**2, "")),
    "first result": lambda x: several(x, 2.5, x**2, "")[0],
    "last result": lambda x: several(x, 2.5, OTHER, "")[4],
    "the other argument": lambda x: several(OTHER, 2.5, x, "")[4],
    "one tensor twice": lambda x: product(x, x),
    "without zeros": lambda x: function(without_materialised, of_some)(x)[1].sin(),
    "attributes": lambda x: function(with_attributes, lambda ctx, x, g: g * ctx.mask * ctx.norm + g * ctx.parts[0])(x),
    "writes": lambda x: function(lambda ctx, x: x * 2, by_writes)(x.exp()),
    "autograd within": lambda x: function(lambda ctx, x: (x[1:] * x[:-1]).sin(), by_autograd)(x) ** 2,
    "transposed": lambda x: function(
        lambda ctx, x: convolved(x), lambda ctx, x, g: functional.conv_transpose1d(g[None], KERNEL, padding=1)[0]
    )(x[None]).sin(),
    "convolution": lambda x: function(lambda ctx, x: convolved(x), of_input)(x[None]).sin(),
    "broadcast": lambda x: function(lambda ctx, x: x * x.new_ones(3, 1), lambda ctx, x, g: g)(x[None]),
    "scalar": lambda x: function(lambda ctx, x: x.norm(), lambda ctx, x, g: g * x / x.norm())(x) * x,
    "no gradient": lambda x: function(lambda ctx, x: x * 2, lambda ctx, x, g: None)(x) + x.sin(),
    "zero": lambda x: function(lambda ctx, x: x * 2, lambda ctx, x, g: torch.zeros_like(g))(x),
    "one gradient": lambda x: function(lambda ctx, x, y: x * y, lambda ctx, x, y, g: (g, None))(x, x.exp()),
    "softmax": lambda x: function(softmax, of_softmax)(x),
    "where": lambda x: function(lambda ctx, x: x.round(), lambda ctx, x, g: torch.where(x > 0, g, g / 4))(x),
    "detached": lambda x: function(lambda ctx, x: x * 2, lambda ctx, x, g: g.detach() * x.data)(x),
    "checkpoint": lambda x: checkpoint(lambda y: cubed(y.sin()) * y, x, use_reentrant=False),
    "written to unseen": lambda x: written_unseen(clipped(x), lambda y: y.clamp_(max=0.5)),
    "replaced unseen": lambda x: written_unseen(clipped(x), lambda y: y.copy_(OTHER)),
    "of a weight": lambda x: x * straight(WEIGHT),
}  # fmt: skip


def point(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or (SIZE,), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(jacobian: jacsparse.SparseJacobian, expected: Tensor) -> None:
    torch.testing.assert_close(jacobian.todense(), expected.reshape(-1, SIZE), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", [*FUNCTIONS, "once"])
def test_jacobians(name: str) -> None:
    f = FUNCTIONS.get(name, lambda x: once(x).sin())
    for seed in range(3):
        check(jacsparse.jacobian(f, point(seed)), torch.autograd.functional.jacobian(f, point(seed)))
    for method in ("auto", "products", "compressed"):
        prepared = jacsparse.prepare_jacobian(f, point(0), method=method, compile=method == "auto")
        for seed in range(3, 6):
            check(prepared(point(seed)), torch.autograd.functional.jacobian(f, point(seed)))
        prepared.check(point(6))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_hessians(name: str) -> None:
    def f(x: Tensor) -> Tensor:
        return FUNCTIONS[name](x).pow(2).sum()

    expected = torch.autograd.functional.hessian(f, point(1))
    if not torch.allclose(expected, expected.T):
        pytest.skip("a derivative of the Function's own choice, which is none of a function")
    check(jacsparse.hessian(f, point(1)), expected)
    check(jacsparse.prepare_hessian(f, point(0))(point(1)), expected)


def test_a_backward_pass_that_is_not_differentiable() -> None:
    with pytest.raises(UnsupportedOperatorError, match="marked with once_differentiable is differentiated"):
        jacsparse.hessian(lambda x: once(x).sin().sum(), point(0))


def test_a_function_that_writes_to_a_part_is_refused() -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 1
        TripledInPlace.apply(y[:2])
        return y.sin()

    for use in (jacsparse.jacobian, jacsparse.prepare_jacobian):
        with pytest.raises(UnsupportedOperatorError, match=r"Function writes to a part of a tensor .* give it a clone"):
            use(f, point(0))


def test_patterns() -> None:
    assert jacsparse.jacobian(straight, point(0)).pattern == jacsparse.jacobian(torch.sin, point(0)).pattern
    band = jacsparse.prepare_jacobian(FUNCTIONS["autograd within"], point(0)).pattern
    assert band == jacsparse.prepare_jacobian(lambda x: x[1:] * x[:-1], point(0)).pattern


def test_values_with_gradients() -> None:
    x, f = point(0).requires_grad_(), FUNCTIONS["gelu"]
    values = jacsparse.jacobian(f, x, create_graph=True).values
    expected = torch.autograd.functional.jacobian(f, x, create_graph=True).diagonal()
    (actual,) = torch.autograd.grad(values.sin().sum(), x)
    torch.testing.assert_close(actual, torch.autograd.grad(expected.sin().sum(), x)[0])
    with pytest.raises(UnsupportedOperatorError, match=r"Gelu is a torch\.autograd\.Function .* by operators alone"):
        jacsparse.prepare_jacobian(f, x, create_graph=True)


def test_graphs_hold_no_node() -> None:
    jacsparse.jacobian(FUNCTIONS["gelu"], point(0))
    prepared = jacsparse.prepare_jacobian(FUNCTIONS["gelu"], point(0))
    gc.collect()
    assert graphs_of.cache_info().currsize and prepared.pattern.nnz
    assert not any(
        # An object may stand for one that is gone.
        issubclass(kind, BackwardCFunction) and kind.__name__.startswith("Gelu")
        for kind in map(type, gc.get_objects())
    )


def test_functions_that_each_call_makes_anew() -> None:
    f = FUNCTIONS["scalar"]
    jacsparse.jacobian(f, point(0))
    count = graphs_of.cache_info().currsize
    for seed in range(3):
        check(jacsparse.jacobian(f, point(seed)), torch.autograd.functional.jacobian(f, point(seed)))
    assert graphs_of.cache_info().currsize == count


class Network(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(4)]).double()
        self.weight = nn.Parameter(point(8, SIZE, SIZE))
        self.register_buffer("mask", (point(9, SIZE, SIZE) > 0).double())
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = MaskedLinear.apply(self.activation(layer(x)), self.weight, self.mask)
        return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "straight": straight,
    "rounded": clipped,
    "gelu": Gelu.apply,
    "reversal": lambda x: reversal(x, 0.3),
    "written to": lambda x: written_by_function(x.sin()).view(-1, 2, 3).flatten(1),
    "written unseen": lambda x: written_unseen(x.sin(), lambda y: y[:, :2].mul_(3)),
    # Products with vectors alone go through these.
    "clipped gradient": ClippedGradient.apply,
    "by NumPy": ByNumpy.apply,
}


def gradients(network: Network, run: Callable[[Tensor], Tensor], weights: Tensor) -> list[Tensor]:
    x = point(2, 5, SIZE).requires_grad_()
    return [*torch.autograd.grad((run(x) * weights).sum(), [x, *network.parameters()])]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_networks(name: str) -> None:
    torch.manual_seed(0)
    network, weights = Network(ACTIVATIONS[name]), point(3, 5, SIZE)
    expected = gradients(network, network, weights)
    scans = [jacsparse.nn.Scan(network, schedule=schedule) for schedule in ("linear", "blelloch", "auto")]
    for run in (*scans, *scans, jacsparse.nn.Leapfrog(network, threads=2)):
        for ours, reference in zip(gradients(network, run, weights), expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-12)
    x = point(2, 5, SIZE)
    for of_x in (jacsparse.vjp(network, x)[1](weights)[0], jacsparse.backward(network, x, weights)):
        torch.testing.assert_close(of_x, expected[0], rtol=1e-10, atol=1e-12)
    if "clipped" in name or "NumPy" in name:
        for use in (lambda: jacsparse.jacobian(network, x), lambda: jacsparse.jacobian_pattern(network, (SIZE,))):
            with pytest.raises(UnsupportedOperatorError, match=r"(ClippedGradient|ByNumpy) is a torch\.autograd\.Func"):
                use()
        return
    jacobian = jacsparse.jacobian(network, x)
    assert jacsparse.jacobian_pattern(network, (SIZE,)) == jacobian.pattern
    for sample in range(5):
        (dense,) = torch.autograd.functional.jacobian(network, x[sample : sample + 1]).reshape(1, SIZE, SIZE)
        torch.testing.assert_close(jacobian.todense(sample=sample), dense, rtol=1e-10, atol=1e-12)


def test_pruned_weights_are_left_out() -> None:
    network = Network(straight)
    linear = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Flatten()).double()
    pattern = jacsparse.jacobian(
        lambda x: MaskedLinear.apply(x, network.weight, network.mask), point(0, 1, SIZE)
    ).pattern
    assert pattern.nnz == int(network.mask.sum()) < jacsparse.jacobian_pattern(linear, (SIZE,)).nnz


def hidden_copy(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
    result = torch.zeros_like(g)
    ctypes.memmove(result.data_ptr(), g.data_ptr(), 8 * g.numel())
    return result


def filled(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
    result = torch.empty_like(g)
    np.copyto(np.asarray(result), np.asarray(x))
    return result


REFUSED: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "asks what a tensor holds": lambda ctx, x, g: g if g.any() else g * 2,
    "asks what a tensor holds.": lambda ctx, x, g: torch.tensor(g.tolist()),
    "asks what a tensor holds..": hidden_copy,
    "asks what a tensor holds...": filled,
    "not linear": lambda ctx, x, g: g.sign(),
    "not linear.": lambda ctx, x, g: g + 1,
    "not linear..": lambda ctx, x, g: g / (g.norm() + 1),
    "not linear...": lambda ctx, x, g: g * (g > 0),
}


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("ask", [jacsparse.jacobian, jacsparse.prepare_jacobian])
def test_what_is_refused(ask: Callable[..., Any], message: str) -> None:
    f = function(lambda ctx, x: x * 2, REFUSED[message])
    with pytest.raises(UnsupportedOperatorError, match=rf"Own is a torch\.autograd\.Function.*{message.rstrip('.')}"):
        ask(lambda x: f(x.sin()), point(0))
    if ask is jacsparse.prepare_jacobian:
        with pytest.raises(
            UnsupportedOperatorError, match=rf"Own is a torch\.autograd\.Function.*{message.rstrip('.')}"
        ):
            ask(lambda x: f(x.sin()), point(0), pattern=jacsparse.jacobian(torch.sin, point(0)).pattern)


def test_random_numbers() -> None:
    f = function(lambda ctx, x: x * 2, lambda ctx, x, g: functional.dropout(g))
    diagonal = jacsparse.jacobian(f, point(0)).todense().diagonal()
    assert set(diagonal.tolist()) <= {0.0, 2.0}
    with pytest.raises(UnsupportedOperatorError, match="draws random numbers"):
        jacsparse.prepare_jacobian(lambda x: f(x.sin()), point(0))


def test_numbers_among_the_arguments() -> None:
    scaled = function(
        lambda ctx, x, factor: (setattr(ctx, "factor", factor), x * 1)[1], lambda ctx, x, g: (g * ctx.factor, None)
    )
    for factor in (0.5, 3.0):
        expected = torch.diag(torch.full((SIZE,), factor, dtype=torch.float64))
        check(jacsparse.jacobian(lambda x, c=factor: scaled(x, c), point(0)), expected)
