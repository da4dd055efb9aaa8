"""How all functions of this room take their arguments: samples or none, tensors or shapes, and what errors say."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree

import jacsparse
from jacsparse import (
    SparseJacobian,
    hessian,
    hessian_pattern,
    jacobian,
    jacobian_pattern,
    prepare_hessian,
    prepare_jacobian,
    verify,
)
from tests.helpers import BOUND, FLOAT, drawn

CALLS: dict[str, Callable[..., Any]] = {
    "jacobian": jacobian,
    "jacobian with gradients": functools.partial(jacobian, create_graph=True),
    "prepare_jacobian": prepare_jacobian,
    "jacobian_pattern": jacobian_pattern,
    "verify": verify,
}
OF_SCALARS: dict[str, Callable[..., Any]] = {
    "hessian": hessian,
    "prepare_hessian": prepare_hessian,
    "hessian_pattern": hessian_pattern,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2, dtype=FLOAT)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.linear(x).tanh() * scale

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().sum(1)


NET = Net()
#: Functions of a module, which take samples, and others.
MODULES: dict[str, Callable[..., Any]] = {
    "module": NET,
    "method": NET.forward,
    "partial": functools.partial(NET, scale=2.0),
    "partial of a method": functools.partial(functools.partial(NET.forward), scale=2.0),
    "scan": jacsparse.nn.Scan(NET, schedule="linear"),
    "compiled": torch.compile(NET, backend="eager"),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "function": lambda x: NET(x),
    "partial of a function": functools.partial(lambda x, scale: NET(x, scale), scale=2.0),
    "method of another class": MODULES.get,
}


def shape_of(result: Any) -> tuple[int, int]:
    """The shape of a Jacobian, a pattern, or what was verified."""
    if isinstance(result, jacsparse.Verification):
        return result.checks[-1].shape
    return getattr(result, "pattern", result).shape


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_modules_have_samples_and_functions_none(call: Callable[..., Any]) -> None:
    x = drawn(4, 3)
    for f in MODULES.values():
        assert shape_of(call(f, x)) == (2, 3)
    assert shape_of(call(NET, x, batched=False)) == (8, 12)
    for name in ("function", "partial of a function"):
        assert shape_of(call(FUNCTIONS[name], x)) == (8, 12)
        assert shape_of(call(FUNCTIONS[name], x, batched=True)) == (2, 3)


@pytest.mark.parametrize("call", OF_SCALARS.values(), ids=OF_SCALARS)
def test_hessians_of_modules_have_samples(call: Callable[..., Any]) -> None:
    x = drawn(4, 3)
    assert shape_of(call(NET.loss, x)) == (3, 3)
    assert shape_of(call(lambda x: NET.loss(x).sum(), x)) == (12, 12)
    with pytest.raises(NotImplementedError, match=r"one for each of 4 samples: pass batched=False"):
        call(nn.Sequential(NET, nn.Flatten(0), nn.Softmax(0), nn.Linear(8, 1, dtype=FLOAT), nn.Flatten(0)), x)
    with pytest.raises(NotImplementedError, match=r"as by .sum\(\): pass batched=True"):
        call(lambda x: NET.loss(x), x)


@pytest.mark.parametrize("batched", ["no", 1, 0.0])
@pytest.mark.parametrize("call", [*CALLS.values(), *OF_SCALARS.values()], ids=[*CALLS, *OF_SCALARS])
def test_batched_is_a_bool(call: Callable[..., Any], batched: Any) -> None:
    with pytest.raises(TypeError, match=f"batched is {batched!r}; expected True"):
        call(NET, drawn(4, 3), batched=batched)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_arguments_that_are_refused(call: Callable[..., Any]) -> None:
    nested = torch.nested.nested_tensor([drawn(2), drawn(3)], layout=torch.jagged)
    for f, x, error, message in (
        (NET, drawn(3), ValueError, r"^x has shape \(3,\); expected \(batch, \*sample\): x\[None\] for one sample"),
        (torch.square, drawn(3).to_sparse(), TypeError, "^x has layout torch.sparse_coo; expected a dense tensor"),
        (torch.square, nested, TypeError, "^x is a nested tensor"),
    ):
        with pytest.raises(error, match=message):
            call(f, x)


def test_patterns_by_shapes_and_by_tensors() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, scale: float) -> torch.Tensor:
        return scale * (x[..., 1:] - x[..., :-1]) * w[..., 1:]

    x, w = drawn(5), torch.ones(5, dtype=FLOAT)
    for argnums in (0, 1, (0, 1), (1, 0)):
        pattern = jacobian_pattern(f, x, w, 2.0, argnums=argnums)
        assert pattern == jacobian(f, x, w, 2.0, argnums=argnums).pattern
        shapes = [(5,) if n in (argnums if isinstance(argnums, tuple) else (argnums,)) else w for n in range(2)]
        assert pattern == jacobian_pattern(f, *shapes, 2.0, argnums=argnums)
    assert jacobian_pattern(f, drawn(4, 5), torch.stack([w] * 4), 2.0, batched=True).shape == (4, 5)
    # Zeros of an argument may be filled, and those of a constant are pruned.
    w[2] = 0
    assert jacobian_pattern(f, (5,), w, 2.0).nnz == 8
    assert jacobian_pattern(NET, (3,)) == jacobian_pattern(NET, drawn(7, 3)) == jacobian_pattern(NET, drawn(0, 3))
    tree = {"a": drawn(2), "b": [drawn(3)]}
    assert jacobian_pattern(lambda tree: torch.cat(_pytree.tree_leaves(tree)), tree).shape == (5, 5)
    product = lambda x, y: (x * y).sum()  # noqa: E731
    both = hessian(product, drawn(3), drawn(3), argnums=(0, 1))
    assert hessian_pattern(product, (3,), (3,), argnums=(0, 1)) == both.pattern
    constant = torch.eye(3, dtype=FLOAT)
    assert jacobian_pattern(lambda x: x @ constant, drawn(1, 3)).nnz == 3
    assert jacobian_pattern(lambda x: x @ constant, drawn(1, 3), pruned=False).nnz == 9
    square = lambda x: (x @ constant).square().sum()  # noqa: E731
    for pruned, nnz in ((True, 6), (False, 18)):
        assert hessian_pattern(square, drawn(2, 3), pruned=pruned).nnz == nnz
        assert hessian(square, drawn(2, 3), pruned=pruned).nnz == nnz
        assert prepare_hessian(square, drawn(2, 3), pruned=pruned).pattern.nnz == nnz
    # A module that a function reads tells the dtype where there are shapes alone.
    assert jacobian_pattern(lambda x: NET(x), (4, 3)).shape == (8, 12)
    with pytest.raises(ValueError, match=r"x is \(3, 0\); expected the sizes of one sample"):
        jacobian_pattern(NET, (3, 0))
    with pytest.raises(ValueError, match="there is no argument"):
        hessian_pattern(NET.loss)


def by(shape: str) -> dict[str, Any]:
    """A function of a tensor without samples, or of one sample, and its argument."""
    return {
        "without samples": {"f": lambda x: x[1:].sin() * x[:-1], "x": drawn(3, 2), "batch": ()},
        "samples": {"f": lambda x: (x[:, 1:] * x[:, :-1]).sum(2), "x": drawn(4, 3, 2), "batch": (4,)},
        "one row": {"f": lambda x: x[:, 1:] * x[:, :-1], "x": drawn(1, 5), "batch": ()},
    }[shape]


@pytest.mark.parametrize("kind", ["without samples", "samples", "one row"])
def test_vectors_have_the_shapes_of_argument_and_result(kind: str) -> None:
    f, x, batch = by(kind).values()
    batched = bool(batch)
    y, pull = torch.func.vjp(f, x)
    g, v = drawn(*y.shape, seed=1), drawn(*x.shape, seed=2)
    expected, tangent = pull(g)[0], torch.func.jvp(f, (x,), (v,))[1]
    in_shape, out_shape = tuple(x.shape[len(batch) :]), tuple(y.shape[len(batch) :])
    prepared = [prepare_jacobian(f, x, batched=batched, method=method)(x) for method in ("products", "compressed")]
    by_jacobian = [jacobian(f, x, batched=batched, create_graph=create) for create in (False, False, True)]
    for J in (*prepared, *by_jacobian):
        assert (J.in_shape, J.out_shape) == (in_shape, out_shape)
        for vector in (g, g.reshape(*batch, -1)):
            torch.testing.assert_close(J.vjp(vector), expected, rtol=BOUND, atol=BOUND)
        for vector in (v, v.reshape(*batch, -1)):
            torch.testing.assert_close(J.jvp(vector), tangent, rtol=BOUND, atol=BOUND)
        assert J.T.jvp(g).shape == x.shape and (2 * J - J).vjp(g).shape == x.shape
        gram, outer = J.gram(), J.outer()
        assert gram.in_shape == gram.out_shape == in_shape and outer.in_shape == outer.out_shape == out_shape
        identity = SparseJacobian.identity(gram.shape[0], dtype=FLOAT)
        assert (identity + gram).jvp(v).shape == x.shape and (J @ identity).vjp(g).shape == (*batch, J.shape[1])
        assert J.to(torch.float32).in_shape == in_shape


def test_vectors_of_several_tensors_are_flat() -> None:
    x = drawn(3, 2)
    J = jacobian(lambda a, b: (a * b, a), x, x, argnums=(0, 1))
    assert (J.in_shape, J.out_shape) == (None, None)
    assert J.vjp(drawn(12)).shape == (12,) and J.jvp(drawn(12)).shape == (12,)
    H = hessian(lambda x: (x[1:] * x[:-1]).sum(), x)
    assert H.jvp(x).shape == H.vjp(x).shape == (3, 2)
    assert prepare_hessian(lambda x: (x[1:] * x[:-1]).sum(), x)(x).jvp(x).shape == (3, 2)
    other = replace_shapes(H, (6,))
    assert (H + other).in_shape is None and (H + other).jvp(x).shape == (6,)
    with pytest.raises(ValueError, match=r"in_shape is \(5,\), and the Jacobian 6 × 6"):
        replace_shapes(H, (5,))


def replace_shapes(J: SparseJacobian, shape: tuple[int, ...]) -> SparseJacobian:
    return SparseJacobian(J.pattern, J.values, shape, shape)


def test_errors_name_the_parts_of_a_module() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    for call in (jacobian, prepare_jacobian, jacobian_pattern, verify):
        for f in (net, net.forward, functools.partial(net)):
            with pytest.raises(ValueError, match=r"^0: an input of shape \(5,\) does not fit Linear"):
                call(f, torch.ones(2, 5))
            with pytest.raises(TypeError, match=r"^0\.weight is torch\.float32, its input torch\.float64; convert one"):
                call(f, torch.ones(2, 3, dtype=FLOAT))
        with pytest.raises(TypeError, match=r"^Linear\.weight is torch\.float32, its input torch\.float64"):
            call(net[0], torch.ones(2, 3, dtype=FLOAT))
    with pytest.raises(ValueError, match=r"^0: an input of shape \(5,\) does not fit Linear"):
        hessian(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), torch.ones(2, 5))


def test_arguments_that_do_not_fit() -> None:
    matrix = torch.ones(3, 3, dtype=FLOAT)
    for call in (jacobian, prepare_jacobian, jacobian_pattern):
        message = r"<lambda>: aten.mv gets tensors of torch.float64 and torch.float32 at .*test_arguments.*to one dtype"
        with pytest.raises(TypeError, match=message):
            call(lambda x, w: w @ x, torch.ones(3), matrix)
        with pytest.raises(ValueError, match=r"a call with torch.float64 \(3,\), str does not fit .*<lambda>"):
            call(lambda x, name: x * name, drawn(3), "a")
    for call in (jacobian, prepare_jacobian):
        with pytest.raises(TypeError, match=r"argument 0 is an int; .* by argnums, or .* by functools\.partial"):
            call(lambda n, x: n * x, 3, drawn(3))
    prepared = prepare_jacobian(lambda x: x**2, drawn(3))
    with pytest.raises(TypeError, match=r"x is an int; expected a torch\.Tensor"):
        prepared(3)
    with pytest.raises(NotImplementedError, match=r"the index of aten.scatter_reduce depends .* at .*test_arguments"):
        jacobian(lambda x: x.scatter_reduce(0, x.argsort(), x, "amax"), drawn(3))


@pytest.mark.parametrize("draw", [random.random, np.random.default_rng(0).random])
def test_functions_that_do_not_repeat(draw: Callable[[], float]) -> None:
    with pytest.raises(jacsparse.VerificationError, match=r"<lambda> returns other numbers where it is called again"):
        prepare_jacobian(lambda x: x**2 * draw(), drawn(3))


def test_a_star_import_leaves_torch_alone() -> None:
    names: dict[str, Any] = {}
    exec("from torch import nn, distributed\nfrom jacsparse import *", names)
    assert names["nn"] is nn and names["distributed"] is torch.distributed and names["jacobian"] is jacobian
    public = set(dir(jacsparse))
    assert {"nn", "jacobian", "schedule"} <= public and not {"importlib", "Path", "Any"} & public
