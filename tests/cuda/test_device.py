"""What a device adds to the numbers: other devices, little memory, streams, captured graphs, and a host that waits.

Nearly all of it needs a GPU: `make test-gpu`.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from jacsparse.patterns import Full, Pattern
from jacsparse.spgemm import matvec, plan_product
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode

import jacsparse
from jacsparse.runtime import device_memory
from tests.cuda.harness import DEVICE, ON_GPU, emulated
from tests.cuda.test_linear_recurrence import FORMS, matrices
from tests.cuda.test_products import values_of
from tests.cuda.test_scans import network
from tests.helpers import FLOAT, random_pattern


class Work(NamedTuple):
    """What is computed again and again from the same tensors, whose numbers may change."""

    inputs: list[torch.Tensor]
    run: Callable[[], list[torch.Tensor]]
    #: What the host may read: it is there.
    sizes: torch.Tensor | None = None


def product(method: str, batch: int) -> Work:
    a, b = random_pattern(37, 19, 0.4, 1), random_pattern(19, 40, 0.4, 2)
    plan, left, right = (
        plan_product(a, b, method=method),
        *(values_of(p, batch, torch.float32, 3).to(DEVICE) for p in (a, b)),
    )
    return Work([left, right], lambda: [plan.multiply(left, right)])


def vectors(batch: int) -> Work:
    a = random_pattern(37, 19, 0.4, 1)
    values, x = values_of(a, batch, torch.float32, 3).to(DEVICE), torch.randn(19, batch).to(DEVICE)
    return Work([values, x], lambda: [matvec(a, values, x)])


def layer(kind: str, schedule: str, forward: str = "sequential") -> Work:
    recurrent = getattr(jacsparse.nn, kind)(3, 20, schedule=schedule, forward=forward, chunk=16).to(DEVICE)
    x = torch.randn(70, 2, 3).to(DEVICE).requires_grad_()

    def run() -> list[torch.Tensor]:
        output, last = recurrent(x)
        ends = torch.cat(last) if isinstance(last, tuple) else last
        return [output.detach(), *torch.autograd.grad(output.square().sum() + ends.sum(), [x, *recurrent.parameters()])]

    return Work([x], run)


def packed(kind: str) -> Work:
    recurrent = getattr(jacsparse.nn, kind)(3, 20, schedule="relaxed", forward="parallel", chunk=16).to(DEVICE)
    x = torch.randn(111, 3).to(DEVICE).requires_grad_()
    sizes = torch.tensor([2] * 41 + [1] * 29)

    def run() -> list[torch.Tensor]:
        output = recurrent(PackedSequence(x, sizes))[0].data
        return [output.detach(), *torch.autograd.grad(output.square().sum(), [x, *recurrent.parameters()])]

    return Work([x], run, sizes)


def linear(form: str, schedule: str) -> Work:
    make, tensors = matrices(form, 40, 2, 6, torch.float32, 1.0)
    leaves = [tensor.to(DEVICE).requires_grad_() for tensor in (*tensors, torch.randn(40, 2, 6))]

    def run() -> list[torch.Tensor]:
        h = jacsparse.linear_recurrence(make(*leaves[:-1]), leaves[-1], schedule=schedule)
        return [h.detach(), *torch.autograd.grad(h.square().sum(), leaves)]

    return Work(leaves, run)


def scan(schedule: str) -> Work:
    model = network()
    scan, x = jacsparse.nn.Scan(model, schedule=schedule), torch.randn(2, 2, 8, 8).to(DEVICE, FLOAT).requires_grad_()

    def run() -> list[torch.Tensor]:
        output = scan(x)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), [x, *model.parameters()])]

    return Work([x], run)


def jacobians(name: str) -> Work:
    """Values of a Jacobian that is prepared by the first run, and compiled where its name says so."""
    x = (0.1 + torch.rand(70, dtype=FLOAT)).to(DEVICE)
    prepare = functools.cache(lambda: PREPARED[name](x))
    return Work([x], lambda: [prepare().values(x)])


def bent(u: torch.Tensor) -> torch.Tensor:
    """Two levels of loops, of a few points."""
    y = u[1:] * u[:-1].exp()
    return y * y.roll(2).sin() + u[0]


PREPARED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a compiled Jacobian": lambda x: jacsparse.prepare_jacobian(bent, x, compile=True),
    "a compiled Hessian": lambda x: jacsparse.prepare_hessian(lambda u: bent(u).square().sum(), x, compile=True),
    "a Jacobian by colours": lambda x: jacsparse.prepare_jacobian(bent, x, method="compressed"),
    "a Jacobian by products": lambda x: jacsparse.prepare_jacobian(bent, x, method="products"),
}
PRODUCTS: dict[str, Callable[[], Work]] = {
    f"{method}, batch {batch}": lambda method=method, batch=batch: product(method, batch)
    for method, batch in itertools.product(("merge", "rowwise"), (1, 33))
} | {f"vectors, batch {batch}": lambda batch=batch: vectors(batch) for batch in (1, 33)}
LAYERS: dict[str, Callable[[], Work]] = {
    f"{kind}, {schedule}": lambda kind=kind, schedule=schedule: layer(kind, schedule)
    for kind, schedule in itertools.product(("RNN", "GRU", "LSTM"), ("sequential", "chunked", "blelloch", "relaxed"))
}
FORWARD: dict[str, Callable[[], Work]] = {
    f"{kind}, {forward} forward": lambda kind=kind, forward=forward: layer(kind, "auto", forward)
    for kind, forward in itertools.product(("RNN", "GRU", "LSTM"), ("parallel", "newton"))
} | {f"{kind}, packed": lambda kind=kind: packed(kind) for kind in ("RNN", "GRU", "LSTM")}
LINEAR: dict[str, Callable[[], Work]] = {
    f"{form}, {schedule}": lambda form=form, schedule=schedule: linear(form, schedule)
    for form, schedule in itertools.product(FORMS, ("sequential", "chunked:8", "blelloch", "relaxed:8"))
}
SCANS: dict[str, Callable[[], Work]] = {
    f"a scan, {schedule}": lambda schedule=schedule: scan(schedule) for schedule in ("linear", "blelloch:2")
}
JACOBIANS: dict[str, Callable[[], Work]] = {name: lambda name=name: jacobians(name) for name in PREPARED}
WORK = PRODUCTS | LAYERS | FORWARD | LINEAR | SCANS | JACOBIANS


def change(work: Work) -> None:
    """Other numbers in the same memory."""
    with torch.no_grad():
        for tensor in work.inputs:
            # Small ones: products of many steps' matrices stay finite.
            tensor.copy_(0.3 * torch.randn(tensor.shape).to(tensor))


@pytest.mark.gpu
def test_mixed_devices() -> None:
    here, there = torch.randn(2, 1, 4, 4), torch.randn(2, 1, 4, 4, device=DEVICE)
    a = random_pattern(4, 4, 0.5, 1)
    values = values_of(a, 2, torch.float32, 0)
    plan, gru = plan_product(a, a), jacsparse.nn.GRU(3, 5)
    wrong: list[Callable[[], Any]] = [
        lambda: jacsparse.jacobian(nn.Conv2d(1, 2, 3), there),
        lambda: jacsparse.jacobian(nn.Conv2d(1, 2, 3).to(DEVICE), here),
        lambda: jacsparse.nn.Scan(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), schedule="linear")(there),
        lambda: jacsparse.SparseJacobian(a, values) @ torch.randn(4, 2, device=DEVICE),
        lambda: plan.multiply(values, values.to(DEVICE)),
        lambda: plan.multiply(values.to(DEVICE), values.to(DEVICE), out=torch.empty(plan.pattern.nnz, 2)),
        lambda: matvec(a, values.to(DEVICE), torch.randn(4, 2)),
        lambda: gru(torch.randn(7, 2, 3, device=DEVICE)),
        lambda: jacsparse.nn.GRU(3, 5).to(DEVICE)(torch.randn(7, 2, 3)),
        lambda: jacsparse.nn.GRU(3, 5).to(DEVICE)(torch.randn(7, 2, 3, device=DEVICE), torch.zeros(1, 2, 5)),
    ]
    for run in wrong:
        with pytest.raises(ValueError, match=r"cuda:0.*cpu|cpu.*cuda:0"):
            run()


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "remedy"), [(torch.float32, "the CPU"), (torch.float64, "float32 or the CPU")])
def test_out_of_memory(dtype: torch.dtype, remedy: str) -> None:
    size = 2**20
    column, row = Pattern.of(Full(size, 1)), Pattern.of(Full(1, size))
    plan, operands = plan_product(column, row), [torch.ones(size, 1, dtype=dtype, device=DEVICE) for _ in range(2)]
    before = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError) as raised:
        plan.multiply(*operands)
    count, width = size**2, dtype.itemsize
    assert str(raised.value) == (
        f"values of a {size:,} × {size:,} product: {count * width:,} bytes ({count:,} × 1 of {dtype}) do not fit on "
        f"cuda:0; try {remedy}"
    )
    del raised
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(plan_product(row, column).multiply(*operands).cpu(), torch.full((1, 1), size, dtype=dtype))


@pytest.mark.gpu
def test_observed_flop() -> None:
    chain, layer = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)), nn.GRU(3, 5)
    for module, x in ((chain, torch.randn(2, 1, 4, 4)), (layer, torch.randn(2, 7, 3))):
        shape = tuple(x.shape[1:])
        here = jacsparse.count_flop(module, shape, structure="observed", inputs=x)
        there = jacsparse.count_flop(module.to(DEVICE), shape, structure="observed", inputs=x.to(DEVICE))
        assert there.total == here.total


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_the_largest_states(kind: str) -> None:
    x = torch.randn(5, 2, 3, device=DEVICE)
    with pytest.raises(ValueError, match="hidden_size is 129"):
        getattr(jacsparse.nn, kind)(3, 129, schedule="sequential").to(DEVICE)(x)
    # Larger states are cuDNN's where nobody asked for a schedule.
    for size in (128, 129):
        ours, theirs = (getattr(module, kind)(3, size).to(DEVICE) for module in (jacsparse.nn, nn))
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours(x)[0], theirs(x)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WORK)
def test_the_current_stream(name: str) -> None:
    """Where inputs are still to be written, the kernels have to wait."""
    work = WORK[name]()
    expected = work.run()
    copies = [tensor.detach().clone() for tensor in work.inputs]
    with torch.no_grad():
        for tensor in work.inputs:
            tensor.fill_(float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        with torch.no_grad():
            for tensor, numbers in zip(work.inputs, copies, strict=True):
                tensor.copy_(numbers)
        results = work.run()
    torch.cuda.current_stream().wait_stream(stream)
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WORK)
def test_captured_graphs(name: str) -> None:
    work, stream = WORK[name](), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Kernels are compiled, and arrays copied, when first used.
        for _ in range(3):
            work.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work.run()
    for _ in range(2):
        change(work)
        graph.replay()
        results = [tensor.clone() for tensor in captured]
        for one, other in zip(results, work.run(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
def test_a_graph_needs_what_was_not_there_before_it() -> None:
    """And what it reads stays, whatever becomes of the plan."""
    work, graph = PRODUCTS["merge, batch 1"](), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run the same once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        work.run()
    (expected,) = work.run()
    with torch.cuda.graph(graph):
        (captured,) = work.run()
    del work
    gc.collect()
    torch.cuda.empty_cache()
    others = [torch.full((2**20,), -1, device=DEVICE) for _ in range(8)]
    graph.replay()
    assert torch.equal(captured, expected) and len(others) == 8


@pytest.mark.gpu
def test_cupy_matrices_have_memory_of_their_own() -> None:
    cupy = pytest.importorskip("cupy")
    pattern, stream = random_pattern(5, 4, 0.5, 1), torch.cuda.Stream()
    numbers = values_of(pattern, 1, torch.float32, 0)
    values = torch.zeros_like(numbers, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        values.copy_(numbers)
        actual = jacsparse.SparseJacobian(pattern, values).to_cupy()
        values.zero_()
    torch.cuda.synchronize()
    assert (cupy.asnumpy(actual.data) == numbers[:, 0].numpy()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", WORK)
def test_the_host_never_waits(name: str) -> None:
    work = WORK[name]()
    work.run()
    change(work)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class _Waits(TorchDispatchMode):
    """Finds what makes a host wait for a device, on the CPU too."""

    _operators = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal")

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = str(function)
        assert not name.startswith(self._operators), name
        if name.startswith("aten.index"):
            places = arguments[1] if isinstance(arguments[1], list) else []
            assert all(place is None or place.dtype != torch.bool for place in places), name
        return function(*arguments, **(options or {}))


class _Kept(dict):
    """Of uploaded arrays, to which none is added."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise AssertionError("an array is uploaded again")


@contextmanager
def unattended(sizes: torch.Tensor | None) -> Iterator[None]:
    """What is run inside neither reads nor writes the memory of a device that kernels are emulated for."""

    def refusing(method: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            assert tensor is sizes, "the host reads a tensor"
            return method(tensor, *arguments, **options)

        return refuse

    with pytest.MonkeyPatch.context() as patch:
        for name in ("numpy", "tolist", "cpu"):
            patch.setattr(torch.Tensor, name, refusing(getattr(torch.Tensor, name)))
        patch.setattr(device_memory, "_uploads", _Kept(device_memory._uploads))
        with _Waits():
            yield


@pytest.mark.skipif(ON_GPU, reason="there the device says it")
@pytest.mark.parametrize("name", WORK)
def test_the_host_never_waits_as_far_as_the_cpu_shows(name: str) -> None:
    work = WORK[name]()
    with emulated():
        expected = work.run()
        with unattended(work.sizes):
            results = work.run()
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(one, other)
