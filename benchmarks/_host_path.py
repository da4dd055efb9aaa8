"""Counts and times what calls of layers, products and Jacobians cost the host, in a process of its own."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any
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

#: What is counted of a layer, and the layers beside that of one direction.
FORWARD, BACKWARD, WITH_INPUT = "forward", "backward", "backward, with the input's gradient"
PARTS = (FORWARD, BACKWARD, WITH_INPUT)
LAYERS: dict[str, dict[str, Any]] = {"": {}, "two directions": {"bidirectional": True}, "two layers": {"num_layers": 2}}
#: What stands for products with vectors among methods.
VECTORS = "vectors"
#: Networks with masks, and the shapes of their samples.
NETWORKS = {"VGG-11": (whole_pruned_vgg11, (3, 32, 32))}
#: The layer that computes nothing.
EMPTY = "a Function that computes nothing"


def main() -> None:
    """Print a line of JSON when ready, and one for each that is read: what a case's calls cost, and how long they take.

    Arguments are the elements of a state, and seconds and rounds of timing. A case is a line of JSON: a layer's kind,
    its inputs, steps, samples, and whether calls are timed; or a method of products, and samples; or an equation and
    its size; or a network and a schedule.
    """
    hidden, seconds, rounds = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with made_up_gpu() as launched:
        print(json.dumps({}), flush=True)
        for line in sys.stdin:
            case, answer = json.loads(line), dict[str, Any](counts=[], times={})
            if case[0] in PROBLEMS:
                print(json.dumps(_jacobian(case[0], case[1], launched)), flush=True)
                continue
            if case[0] in NETWORKS:
                print(json.dumps(_scan(case[0], case[1], launched)), flush=True)
                continue
            if len(case) == 2:
                for part, call in _products(*case):
                    answer["counts"].append({"part": part, **asdict(host_work(call, launched))})
                print(json.dumps(answer), flush=True)
                continue
            kind, features, time, batch, timed = case
            x = torch.randn(time, batch, features)
            for name, options in LAYERS.items():
                layer = getattr(nn, kind)(features, hidden, **options)
                for part, call in _calls(layer, x):
                    work = host_work(call, launched)
                    answer["counts"].append({"layer": name, "part": part, **asdict(work)})
            if timed:
                context = Context(seconds=seconds, rounds=rounds)
                layer = getattr(nn, kind)(features, hidden)
                empty = zip((FORWARD, BACKWARD), empty_passes(layer, x), strict=True)
                calls = dict(_calls(layer, x))
                turns = {
                    label: function
                    for part, nothing in empty
                    for label, function in ((part, calls[part]), (f"{part}, {EMPTY}", nothing))
                }
                for label, timing in context.times(turns).items():
                    answer["times"][label] = asdict(timing)
            print(json.dumps(answer), flush=True)


def _jacobian(equation: str, size: int, launched: Callable[[], int]) -> dict[str, Any]:
    """What a call of a compiled Jacobian costs, and how many of its kernels wait for each other."""
    problem = PROBLEMS[equation](size, 1)
    # No kernel computes anything there, and values are not compared.
    with mock.patch.object(PreparedJacobian, "check"):
        prepared = prepare_jacobian(problem.f, *problem.args, **problem.options, compile=True)
    fused = prepared._first.evaluator.fused
    assert fused is not None
    work = host_work(lambda: prepared(*problem.args), launched)
    return {**asdict(work), "levels": fused.levels}


def _scan(network: str, schedule: str, launched: Callable[[], int]) -> dict[str, Any]:
    """What both passes of a scan cost, the second one of autograd too, and of how many products that one is."""
    build, shape = NETWORKS[network]
    model = build()
    scan, x = nn.Scan(model, schedule=schedule), torch.randn(1, *shape).requires_grad_()
    inputs = [x, *model.parameters()]
    answer: dict[str, Any] = {FORWARD: asdict(host_work(lambda: scan(x), launched))}
    for part, y in ((BACKWARD, scan(x)), ("autograd", model(x))):
        answer[part] = asdict(host_work(_gradients(y, inputs, torch.ones_like(y)), launched))
    (scanner,) = scan._scanners.values()
    return {**answer, "products": len(scanner._executed.steps), "weights": len(inputs) - 1}


def _calls(layer: Any, x: torch.Tensor) -> Iterator[tuple[str, Call]]:
    """The calls of each part; backward passes start from a gradient of the last state, over a graph that stays."""
    weights = list(layer.parameters())
    yield FORWARD, lambda: layer(x)
    for part, inputs in ((BACKWARD, weights), (WITH_INPUT, [x.clone().requires_grad_(), *weights])):
        last = layer(inputs[0] if part == WITH_INPUT else x)[1]
        last = last[0] if isinstance(last, tuple) else last
        yield part, _gradients(last, inputs, torch.ones_like(last))


def _products(method: str, batch: int) -> Iterator[tuple[str, Call]]:
    """Products by a method: what the factors are, and the call."""

    def sparse(rows: int, columns: int) -> Pattern:
        return Pattern.from_scipy(scipy.sparse.random(rows, columns, 0.3, "csr", random_state=0))

    if method == VECTORS:
        a = sparse(7, 9)
        yield "", functools.partial(matvec, a, torch.randn(a.nnz, batch), torch.randn(9, batch))
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
        yield name, functools.partial(plan.multiply, *values)


def _gradients(result: torch.Tensor, inputs: list[torch.Tensor], gradient: torch.Tensor) -> Call:
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)


if __name__ == "__main__":
    main()
