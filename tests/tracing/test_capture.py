"""A captured run, computed again without a write: its values and derivatives are autograd's of the function."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import jacsparse
from jacsparse import UnsupportedOperatorError
from jacsparse.tracing.capture import capture
from jacsparse.tracing.operators import BackwardPass, Gather, Rewrite, facts_of, with_written, written_tensors
from jacsparse.tracing.traces import CapturedRun
from tests.helpers import Straight

Function = Callable[[torch.Tensor], torch.Tensor]


class _OfNode(torch.autograd.Function):
    """What a Function returned in a run, with the backward pass of its node."""

    @staticmethod
    def forward(ctx: Any, node: Any, output: int, elements: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        ctx.node, ctx.output = node, output
        return elements.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        node = ctx.node
        gradients = [torch.zeros(each.shape, dtype=each.dtype) for each in node._input_metadata]
        gradients[ctx.output] = gradient
        with torch.no_grad():
            passed = node.apply(*gradients)
        passed = passed if isinstance(passed, tuple) else (passed,)
        pairs = zip(passed, node.next_functions, strict=True)
        return None, None, None, *(g for g, (behind, _) in pairs if behind is not None)


def computed(run: CapturedRun, x: torch.Tensor) -> torch.Tensor:
    """What a run returns for its own input, by its calls alone, with the derivatives that it says."""
    values = {0: x, **{value: run.copies.get(value, run.tensors[value]) for value in run.captures}}
    for call in run.calls:
        pairs = zip(call.operands, run.active_operands(call), strict=True)
        operands = iter([values[value] if active else values[value].detach() for value, active in pairs])

        def given(argument: Any, operands: Iterator[torch.Tensor] = operands) -> Any:
            if isinstance(argument, torch.Tensor):
                return next(operands)
            return type(argument)(map(given, argument)) if isinstance(argument, (list, tuple)) else argument

        if isinstance(call.overload, (Gather, Rewrite)):
            results = [call.overload(*operands)]
        elif isinstance(call.overload, BackwardPass):
            elements, *others = operands
            pairs = zip(others, run.active_operands(call)[1:], strict=True)
            if active := [operand for operand, passes in pairs if passes]:
                node = run.gradient_edges[call.first + 1][0]
                elements = _OfNode.apply(node, call.overload.output, elements, *active)
            results = [elements]
        else:
            args, kwargs = [*map(given, call.args)], {name: given(each) for name, each in call.kwargs.items()}
            facts = facts_of(call.overload)
            for place, name in enumerate(facts.names[: len(args)]):
                args[place] = args[place].clone() if name in facts.written else args[place]
            kwargs = {name: each.clone() if name in facts.written else each for name, each in kwargs.items()}
            results = with_written(call.overload(*args, **kwargs), written_tensors(facts, args, kwargs))
            if facts.random:
                results = [run.copies.get(value, run.tensors[value]) for value in call.results]
        values |= zip(call.results, results, strict=False)
    return values[run.output] if run.active else values[run.output].detach()


def check(function: Function, x: torch.Tensor) -> CapturedRun:
    run = capture(function, x)
    results = []
    for by in (function, lambda leaf: computed(run, leaf)):
        leaf = x.clone().requires_grad_()
        y = by(leaf * 1 if by is function else leaf)
        torch.manual_seed(0)
        gradient = torch.randn_like(y)
        of_x = torch.zeros_like(x)
        if y.requires_grad:
            (of_x,) = torch.autograd.grad(y, leaf, gradient, allow_unused=True, materialize_grads=True)
        results.append((y.detach(), of_x))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    return run


def vector(size: int = 8) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))


class Cubed(torch.autograd.Function):
    """Squares, whose derivative it takes for another one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * ctx.saved_tensors[0] * gradient


class ByNumpy(torch.autograd.Function):
    """Squares, by no call of PyTorch's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() ** 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


class ProductAndSum(torch.autograd.Function):
    """Two results."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, of_product: torch.Tensor, of_sum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ctx.saved_tensors
        return of_product * y + of_sum, of_product * x + of_sum


class DoubledInPlace(torch.autograd.Function):
    """Writes to its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


PARAMETER = torch.linspace(-1, 1, 8, dtype=torch.float64).requires_grad_()
BUFFER = torch.zeros(3, 8, dtype=torch.float64)
LINEAR = nn.Linear(8, 8).double()


def element_by_element(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for i in range(1, len(x)):
        out[i] = x[i - 1] ** 2
    return out


def recurrence(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    out[0] = x[0]
    for i in range(1, len(x)):
        out[i] = out[i - 1] * 0.5 + x[i]
    return out


def views(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    every_other = y[::2]
    every_other.mul_(3)
    inner = y[1:4]
    y[2:6] = x[0:4]
    return y * inner.sum() + every_other.sum()


def nothing_of_a_written_tensor(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[2:] *= x[2:]
    with torch.no_grad():
        y[3] = 2
    return torch.cat([y.sin(), y[len(x) :] * 2])


def transposed_view(x: torch.Tensor) -> torch.Tensor:
    y = x.clone().view(2, 4)
    z = y.t()
    z[1] = z[0] * 2
    return y.reshape(-1) * x


def transposed_in_place(x: torch.Tensor) -> torch.Tensor:
    y = (x * 1).view(2, 4)
    y.transpose_(0, 1)
    y[0] *= 3
    return y.reshape(-1)


def without_grad(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    with torch.no_grad():
        y[2:5] *= 3
    return y * x


def without_grad_between(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.mul_(x)
    with torch.no_grad():
        y.add_(1)
    y[1:3] = x[3:5]
    return y * y


def through_detach(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.detach().mul_(5)
    z = y.detach()
    z[2:4] = 0
    y[0:2] = x[2:4]
    return y * x + y


def detached_and_written_in_part(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.detach()
    z[1].mul_(x[0])
    z[3:5] = x[5:7]
    return torch.cat([y, z])


def transposed_after_writes(x: torch.Tensor) -> torch.Tensor:
    y = (x * 1)[None]
    y[y.detach() > 0.3] = 0.25
    y.add_(BUFFER[0]).t_()
    return y.reshape(-1) * x


def through_data(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.data[1:3] = 7.0
    part = y[0:4]
    y.data.mul_(3)
    return part * x[:4] + y.sum()


def constants_among_others(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(8, dtype=x.dtype)
    out[0:4] = x[0:4].detach() * 2
    out[4:] = x[4:] * 3
    out += PARAMETER
    with torch.no_grad():
        out[1:2] = x[0:1]
    return out * out


def by_masks(x: torch.Tensor) -> torch.Tensor:
    y = x**2
    mask = x > 0
    y[x < 0] = 0.0
    y[mask] = -x[mask]
    return torch.where(y > 0.1, y**2, -y)


def written_from_elsewhere(x: torch.Tensor) -> torch.Tensor:
    buffer = BUFFER.clone()
    before = BUFFER[0]
    with torch.no_grad():
        BUFFER[0] += 1
        BUFFER[0] -= 1
    buffer[1] = x
    return buffer.sum(0) * x + before


def given_memory(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(8, dtype=x.dtype)
    torch.mul(x.detach(), 2, out=out)
    filled = torch.empty_like(x)
    filled.copy_(x)
    filled[3] = x.sum()
    return out * filled


def by_indices(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[torch.tensor([1, 3])] = x[torch.tensor([0, 2])] * 2
    return y.index_add_(0, torch.tensor([0, 0, 1]), x[:3])


def hooked(x: torch.Tensor) -> torch.Tensor:
    handle = LINEAR.register_full_backward_hook(lambda *_: None)
    y = LINEAR(x.view(1, 8)).view(-1)
    handle.remove()
    return y * x


def complex_between(x: torch.Tensor) -> torch.Tensor:
    z = torch.view_as_complex(x.view(4, 2).contiguous())
    return (z * z).abs()


FUNCTIONS: list[Function] = [
    element_by_element,
    recurrence,
    views,
    nothing_of_a_written_tensor,
    transposed_view,
    transposed_in_place,
    without_grad,
    without_grad_between,
    through_detach,
    detached_and_written_in_part,
    transposed_after_writes,
    through_data,
    constants_among_others,
    by_masks,
    written_from_elsewhere,
    given_memory,
    by_indices,
    hooked,
    complex_between,
    lambda x: Cubed.apply(x[1:] - x[:-1]).sin(),
    lambda x: ByNumpy.apply(x * 2) * x,
    lambda x: Straight.apply(x),
    lambda x: Straight.apply(x * 2) * x.detach() + Cubed.apply(PARAMETER) * x,
    lambda x: torch.mul(*ProductAndSum.apply(x[:4], x[4:])),
    lambda x: (y := x * 3, DoubledInPlace.apply(y), y * x)[-1],
    lambda x: checkpoint(lambda u: u.sin() * u, x, use_reentrant=False) * x,
    lambda x: torch.ones(3, dtype=x.dtype),
    lambda x: x.detach() * 2,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_computed_again_without_a_write(function: Function) -> None:
    check(function, vector())
    # PyTorch may set up something at the first call.
    first, second = (capture(function, vector()).key for _ in range(2))
    assert first == second


def test_normalisation_in_training() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten())
    check(layers.double().train(), torch.randn(2, 3, 6, 6, dtype=torch.float64))


def drawn(seed: int) -> Function:
    """A function of ten writes, seen by autograd and not, to views of three tensors."""

    def function(x: torch.Tensor) -> torch.Tensor:
        draws = random.Random(seed)
        tensors = [x * 2, torch.zeros_like(x), x.sin().view(2, 4)]
        for _ in range(10):
            target, source = (draws.choice(tensors).reshape(-1) for _ in range(2))
            if not any(target.untyped_storage()._cdata == each.untyped_storage()._cdata for each in tensors):
                continue
            begin, other, length = draws.randrange(5), draws.randrange(5), draws.randrange(1, 4)
            elements = source[other : other + length] * draws.choice([1, 3])
            kind = draws.randrange(5)
            if kind == 0:
                with torch.no_grad():
                    target[begin : begin + length] = elements
            elif kind == 1:
                target.detach()[begin : begin + length] = elements.detach()
            elif kind == 2:
                target.data[begin : begin + length] *= 2
            else:
                target[begin : begin + length] = elements
        first, second, third = tensors
        return first + 2 * second + third.reshape(-1) + x * first.detach()

    return function


@pytest.mark.parametrize("seed", range(60))
def test_drawn_writes(seed: int) -> None:
    check(drawn(seed), vector())


def written_twice(x: torch.Tensor, place: int, again: int) -> torch.Tensor:
    """Two elements at two places, whose order and whose further write views alone tell."""
    out = torch.zeros(3, 1, dtype=x.dtype)
    out[2] = x[7:]
    out[place] = out[1 - place] = x[:1]
    out[place] = x[1:2]
    out[again].mul_(3)
    return out


def test_other_calls_have_other_keys() -> None:
    x = vector()
    functions: list[Function] = [
        lambda x: x * 2,
        lambda x: x * 0.0,
        lambda x: x.detach() * 2,
        lambda x: x[1:] * x[:-1],
        lambda x: x[:-1] * x[1:],
        lambda x: x[:-1] * x[1:] * True,
        lambda x: x[:-1] * x[1:] * 1,
        lambda x: x * PARAMETER,
        lambda x: x * PARAMETER.detach(),
        lambda x: torch.cat([x, x], 0),
        lambda x: torch.stack([x, x], 0),
        element_by_element,
        recurrence,
        *(
            lambda x, place=place, again=again: written_twice(x, place, again)
            for place, again in ((0, 0), (0, 1), (1, 0), (1, 1))
        ),
    ]
    keys = [capture(function, x).key for function in functions]
    assert len({hash(key) for key in keys}) == len(set(keys)) == len(functions)


def test_numbers_that_scale_are_no_part_of_a_key() -> None:
    runs = [capture(lambda x, c=c: x * c + 1, vector()) for c in (2, 3, -2.0, 0.5)]
    assert len({run.key for run in runs}) == 1
    assert [run.scalars for run in runs] == [[2, 1], [3, 1], [-2.0, 1], [0.5, 1]]
    powers = [capture(lambda x, c=c: x**c, vector()).key for c in (2, 3)]
    assert powers[0] != powers[1]


def test_calls_grow_with_the_steps() -> None:
    counts = [len(check(recurrence, vector(size)).calls) for size in (16, 64)]
    assert counts[1] < 4.2 * counts[0]


def test_views_of_one_shape_after_a_write() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * x
        first, second = y.view(-1), y[:]
        y.mul_(2)
        return first * second + first.exp()

    expected = torch.autograd.functional.jacobian(function, vector())
    for actual in (
        jacsparse.jacobian(function, vector()),
        jacsparse.prepare_jacobian(function, vector(8) + 1)(vector()),
    ):
        torch.testing.assert_close(actual.todense(), expected, rtol=1e-12, atol=1e-12)


def test_elements_in_one_place_are_not_written_to() -> None:
    for view in (lambda y: y.unfold(0, 3, 1), lambda y: y.detach().unfold(0, 2, 1)):
        with pytest.raises(UnsupportedOperatorError, match=r"several elements in one place .* write to a clone"):
            capture(lambda x, view=view: view(x * 1).mul_(2).sum(0), vector())


def test_parts_of_complex_numbers_are_not_written_to() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex((x * 1).view(4, 2))
        torch.view_as_real(z)[0, 0] = 3.0
        return z.abs()

    with pytest.raises(UnsupportedOperatorError, match="numbers of another kind"):
        capture(function, vector())
