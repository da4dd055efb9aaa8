"""Short runs of all kernels, for the tools that look for what numbers do not show.

``python -m tests.cuda.sets NAME...`` runs some of them on a GPU, for a tool that watches the whole process.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jacsparse.patterns import Diagonal, Full, Pattern
from jacsparse.spgemm import matvec, plan_product
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import jacsparse
from tests.cuda.harness import DEVICE
from tests.cuda.test_linear_recurrence import FORMS, matrices
from tests.cuda.test_products import values_of
from tests.helpers import by_products, random_pattern


def multiply(left: Pattern, right: Pattern, method: str, batches: Iterable[int], dtype: torch.dtype) -> None:
    operands = (values_of(one, batch, dtype, 0).to(DEVICE) for one, batch in zip((left, right), batches, strict=True))
    plan_product(left, right, method=method).multiply(*operands)


def values() -> None:
    for module, shape in (
        (nn.Conv2d(2, 3, 3, padding=1), (2, 4, 4)),
        (nn.ReLU(), (5,)),
        (nn.MaxPool2d(2), (1, 4, 4)),
        (nn.AvgPool2d(2), (1, 4, 4)),
    ):
        for batch in (1, 33):
            by_products(module.to(DEVICE), torch.randn(batch, *shape).to(DEVICE))
    jacsparse.jacobian(nn.Linear(3, 2).to(DEVICE), torch.randn(2, 3).to(DEVICE))


def products() -> None:
    a, b = random_pattern(7, 5, 0.4, 1), random_pattern(5, 9, 0.4, 2)
    diagonal, full = Pattern.of(Diagonal(5)), Pattern.of(Full(5, 3))
    cases = [(a, b, method) for method in ("merge", "rowwise")]
    cases += [(a, diagonal, "scale"), (diagonal, b, "scale"), (a, full, "dense"), (Pattern.of(Full(3, 5)), b, "dense")]
    for case, batches in itertools.product(cases, ((1, 1), (2, 1), (1, 33))):
        multiply(*case, batches, torch.float32)
    for batches in ((1, 1), (2, 1), (1, 33)):
        operands = [values_of(one, n, torch.float32, 0).to(DEVICE) for one, n in zip((a, b), batches, strict=True)]
        plan_product(a, b).multiply(*(operand.requires_grad_() for operand in operands)).sum().backward()
    long = random_pattern(2, 90, 0.9, 3)
    for batch in (1, 3):
        multiply(long, long.T, "merge", (batch, 1), torch.float64)
    # Several tiles, and numbers of more than a byte.
    wide = random_pattern(5, 300, 0.95, 4)
    for batches in ((1, 1), (1, 19)):
        multiply(random_pattern(90, 60, 0.06, 1), random_pattern(60, 70, 0.1, 2), "merge", batches, torch.float32)
        multiply(a, wide, "merge", batches, torch.float64)
    for batch in (1, 33):
        matvec(a, values_of(a, 1, torch.float32, 0).to(DEVICE), torch.randn(5, batch).to(DEVICE))


def selections() -> None:
    chain = jacsparse.chain(nn.MaxPool2d(2, 1), (1, 4, 4))
    (record,) = chain.run(torch.randn(3, 1, 4, 4).to(DEVICE))
    winners, selecting = record.winners(), chain.stages[0].transposed_pattern
    rows, windows = selecting.shape
    for left in (True, False):
        other = random_pattern(*((windows, 4) if left else (4, rows)), 0.4, 6)
        plan = plan_product(*((selecting, other) if left else (other, selecting)), method="select")
        values = values_of(other, 3, torch.float32, 7).to(DEVICE)
        plan.multiply(*((winners, values) if left else (values, winners)))


def train(
    kind: str, size: int, time: int = 3, lengths: tuple[int, ...] = (), *, inputs: int = 2, **options: Any
) -> None:
    run = getattr(jacsparse.nn, kind)(inputs, size, **options).to(DEVICE)
    x: Any = torch.randn(time, 2, inputs).to(DEVICE)
    output, _ = run(pack_padded_sequence(x, list(lengths)) if lengths else x)
    (output.data if lengths else output).square().sum().backward()


def recurrent() -> None:
    for kind, size in itertools.product(("RNN", "GRU", "LSTM"), (5, 33)):
        train(kind, size, bidirectional=True)


def small_layers() -> None:
    """All kernels of each cell: with inputs that are projected before and not, chunks of a block's warps and more."""
    kinds = (("RNN", {}), ("RNN", {"nonlinearity": "relu"}), ("GRU", {}), ("LSTM", {}))
    for kind, more in kinds:
        train(kind, 21, 9, inputs=34, schedule="relaxed:2", forward="relaxed:4", bidirectional=True, **more)
        train(kind, 3, 10, schedule="relaxed:1", forward="relaxed:1", **more)


def chunks() -> None:
    """What finds the states between chunks, and what is left where it does not."""
    for kind in ("RNN", "GRU"):
        train(kind, 5, 7, schedule="chunked:3", forward="newton", chunk=3)
        train(kind, 34, 5, (5, 2), schedule="chunked:2")
    train("RNN", 5, 7, nonlinearity="relu", schedule="chunked:3", forward="newton", chunk=3)
    train("LSTM", 3, 7, (7, 4), schedule="relaxed:2", forward="parallel", chunk=2)
    # So many chunks that states go over them in two levels.
    train("RNN", 3, 33, (33, 7), schedule="chunked:1")


def solve(
    form: str, size: int, schedule: str, time: int = 5, batch: int = 2, dtype: torch.dtype = torch.float32
) -> None:
    make, tensors = matrices(form, time, batch, size, dtype, 1.0)
    leaves = [tensor.to(DEVICE).requires_grad_() for tensor in (*tensors, torch.randn(time, batch, size, dtype=dtype))]
    jacsparse.linear_recurrence(make(*leaves[:-1]), leaves[-1], schedule=schedule).sum().backward()


def linear() -> None:
    for form, size in itertools.product(FORMS, (5, 34)):
        solve(form, size, "sequential")
        solve(form, size, "chunked:2", batch=1)


def levels() -> None:
    """Products of schedules: matrices of one tile and of several, diagonals, and samples of different lengths."""
    train("RNN", 5, 5, (5, 2), schedule="blelloch")
    solve("dense", 70, "blelloch", 4, 1)
    solve("diagonal", 5, "blelloch", dtype=torch.float64)


def long_products() -> None:
    """Of all methods and types, with rows that take several passes over shared memory."""
    shapes = ((1, 1, 1), (37, 30, 40), (4, 70, 5))
    for (rows, inner, columns), dtype in itertools.product(shapes, (torch.float32, torch.float64)):
        a, b = random_pattern(rows, inner, 0.4, 1), random_pattern(inner, columns, 0.4, 2)
        diagonal = Pattern.of(Diagonal(inner))
        cases = [(a, b, method) for method in ("merge", "rowwise")]
        cases += [(a, diagonal, "scale"), (diagonal, b, "scale"), (a, Pattern.of(Full(inner, 3)), "dense")]
        cases += [(Pattern.of(Full(3, inner)), b, "dense")]
        for case, batches in itertools.product(cases, ((1, 1), (3, 3), (33, 1), (1, 70))):
            multiply(*case, batches, dtype)
    wide = random_pattern(3, 14_000, 0.95, 3)
    for method in ("merge", "rowwise"):
        multiply(random_pattern(2, 3, 1.0, 4), wide, method, (1, 1), torch.float32)


def long_recurrent() -> None:
    """Several chunks of every schedule, with states that fill warps and that do not."""
    schedules = ("sequential", "chunked", "blelloch", "planned", "relaxed")
    for kind, size, schedule in itertools.product(("RNN", "GRU", "LSTM"), (5, 20, 32, 70), schedules):
        train(kind, size, 11, schedule=schedule, chunk=4)
        train(kind, size, 9, (9, 2), schedule=schedule, forward="parallel", chunk=4)
    for kind in ("RNN", "GRU"):
        train(kind, 128, 5, schedule="chunked:2")


def long_linear() -> None:
    """All forms, types and schedules, with states that fill warps and that do not."""
    schedules = ("sequential", "chunked:3", "blelloch", "relaxed:3")
    for form, size, schedule in itertools.product(FORMS, (1, 20, 32, 70), schedules):
        for batch, dtype in ((1, torch.float32), (33, torch.float64)):
            solve(form, size, schedule, 8, batch, dtype)


def fused_loops() -> None:
    """Levels of loops: one run of points, several, and points by themselves."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.exp().sin().tanh()
        z = y.roll(1) * y.roll(2) * y
        return torch.cat([z, x[::2] * z[::2].flip(0), x[:4].square() * x[2:6]])

    x = torch.rand(300).to(DEVICE)
    jacsparse.prepare_jacobian(f, x, compile=True)(x)


#: Each kernel at least once.
SETS: dict[str, Callable[[], None]] = {
    "values": values,
    "products": products,
    "selections": selections,
    "recurrent": recurrent,
    "small layers": small_layers,
    "chunks": chunks,
    "linear": linear,
    "levels": levels,
    "fused loops": fused_loops,
}
#: Larger ones, for `make test-full`.
LONG: dict[str, Callable[[], None]] = {
    "long products": long_products,
    "long recurrent": long_recurrent,
    "long linear": long_linear,
}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        (SETS | LONG)[name]()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    print("ran on", DEVICE)
