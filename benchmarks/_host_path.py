"""Counts and times what calls of layers, products and Jacobians cost the host, in a process of its own."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, TypeAlias
from unittest import mock

import scipy.sparse
import torch
from jacsparse.patterns import Diagonal, Full, Pattern
from jacsparse.spgemm import matvec, plan_product
from torch.nn import MaxPool2d

from jacsparse import PreparedJacobian, chain, nn, prepare_jacobian

from ._calls import Call
from ._context import Context
from ._empty_function import empty_passes
from ._made_up_gpu import host_work, made_up_gpu
from ._problems import PROBLEMS
from ._workloads import whole_pruned_vgg11

#: What is counted of a layer.
FORWARD, BACKWARD, WITH_INPUT = "forward", "backward", "backward, with the input's gradient"
#: What stands for products with vectors among methods.
VECTORS = "vectors"
#: Networks with masks, and the shapes of their samples.
NETWORKS = {"VGG-11": (whole_pruned_vgg11, (3, 32, 32))}
#: What follows the name of a pass of the layer that computes nothing.
NOTHING = "a Function that computes nothing"

#: Calls with their names, and further numbers that belong to them.
Calls: TypeAlias = Iterator[tuple[str, Call, dict[str, int]]]


def main() -> None:
    """Print a line of JSON when ready, and one for each that is read: what calls cost, or times of a layer's passes.

    Arguments are seconds and rounds of timing. A line has the name of one of `_CALLS`, or ``times``, and the arguments
    of its function.
    """
    context = Context(seconds=float(sys.argv[1]), rounds=int(sys.argv[2]))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with made_up_gpu() as launched:
        print(json.dumps({}), flush=True)
        for line in sys.stdin:
            what, *arguments = json.loads(line)
            if what == "times":
                answer = {label: asdict(timing) for label, timing in context.times(_passes(*arguments)).items()}
            else:
                calls = _CALLS[what](*arguments)
                answer = {
                    part: {**asdict(work := host_work(call, launched)), "nodes": work.nodes, "facts": facts}
                    for part, call, facts in calls
                }
            print(json.dumps(answer), flush=True)


def _layer(
    kind: str, features: int, hidden: int, time: int, batch: int, options: dict[str, Any]
) -> tuple[Any, torch.Tensor]:
    return getattr(nn, kind)(features, hidden, **options), torch.randn(time, batch, features)


def _layers(*sizes: Any) -> Calls:
    """The calls of each part; backward passes start from a gradient of the last state, over a graph that stays."""
    layer, x = _layer(*sizes)
    weights = list(layer.parameters())
    yield FORWARD, lambda: layer(x), {}
    for part, inputs in ((BACKWARD, weights), (WITH_INPUT, [x.clone().requires_grad_(), *weights])):
        last = layer(inputs[0] if part == WITH_INPUT else x)[1]
        last = last[0] if isinstance(last, tuple) else last
        yield part, _gradients(last, inputs), {}


def _passes(*sizes: Any) -> dict[str, Call]:
    """Both passes of a layer, each beside that of a Function which computes nothing."""
    calls = {part: call for part, call, _ in _layers(*sizes)}
    empty = zip((FORWARD, BACKWARD), empty_passes(*_layer(*sizes)), strict=True)
    return {
        label: call for part, nothing in empty for label, call in ((part, calls[part]), (f"{part}, {NOTHING}", nothing))
    }


def _jacobian(equation: str, size: int) -> Calls:
    """A call of a compiled Jacobian, and how many of its kernels wait for each other."""
    problem = PROBLEMS[equation](size, 1)
    # No kernel computes anything there, and values are not compared.
    with mock.patch.object(PreparedJacobian, "check"):
        prepared = prepare_jacobian(problem.f, *problem.args, **problem.options, compile=True)
    fused = prepared._first.evaluator.fused
    assert fused is not None
    yield "", lambda: prepared(*problem.args), {"levels": fused.levels}


def _scan(network: str, schedule: str) -> Calls:
    """Both passes of a scan, and of how many products the second one is; and the second one of autograd."""
    build, shape = NETWORKS[network]
    model = build()
    scan, x = nn.Scan(model, schedule=schedule), torch.randn(1, *shape).requires_grad_()
    inputs = [x, *model.parameters()]
    yield FORWARD, lambda: scan(x), {}
    backward, weights = _gradients(scan(x), inputs), len(inputs) - 1
    (scanner,) = scan._scanners.values()
    yield BACKWARD, backward, {"products": len(scanner._executed.steps) + weights, "gradients of weights": weights}
    yield "autograd's backward", _gradients(model(x), inputs), {}


def _products(method: str, batch: int) -> Calls:
    """Products by a method: what the factors are, and the call."""

    def sparse(rows: int, columns: int) -> Pattern:
        return Pattern.from_scipy(scipy.sparse.random(rows, columns, 0.3, "csr", random_state=0))

    if method == VECTORS:
        a = sparse(7, 9)
        yield "", functools.partial(matvec, a, torch.randn(a.nnz, batch), torch.randn(9, batch)), {}
        return
    pooling = chain(MaxPool2d(2), (1, 4, 4)).stages[0].transposed_pattern
    factors = {
        "scale": {"rows": (Pattern.of(Diagonal(9)), sparse(9, 7)), "columns": (sparse(7, 9), Pattern.of(Diagonal(9)))},
        "dense": {
            "a full right factor": (sparse(7, 9), Pattern.of(Full(9, 5))),
            "a full left factor": (Pattern.of(Full(5, 9)), sparse(9, 7)),
            "full factors": (Pattern.of(Full(5, 9)), Pattern.of(Full(9, 7))),
        },
        "select": {"rows": (pooling, sparse(4, 7)), "columns": (sparse(7, 16), pooling)},
    }
    for name, (a, b) in factors.get(method, {"": (sparse(7, 9), sparse(9, 8))}).items():
        plan = plan_product(a, b, method=method)
        # A full left factor that all samples share is one matrix; windows select row 0.
        values = [torch.randn(a.nnz, 1 if method == "dense" else batch), torch.randn(b.nnz, batch)]
        for number, selects in enumerate((plan.selects_left, plan.selects_right)):
            if selects:
                values[number] = torch.zeros(pooling.shape[1], batch, dtype=torch.int32)
        yield name, functools.partial(plan.multiply, *values), {}


def _gradients(result: torch.Tensor, inputs: list[torch.Tensor]) -> Call:
    gradient = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)


_CALLS: dict[str, Callable[..., Calls]] = {
    "layer": _layers, "product": _products, "jacobian": _jacobian, "scan": _scan
}  # fmt: skip

if __name__ == "__main__":
    main()
