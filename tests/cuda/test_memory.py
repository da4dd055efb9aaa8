"""A device without enough memory: what did not fit is named, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from jacsparse.patterns import Full, Pattern
from jacsparse.spgemm import matvec, plan_product
from torch import nn

import jacsparse
from jacsparse.runtime import allocated
from tests.cuda.harness import emulated
from tests.cuda.test_products import values_of
from tests.helpers import by_products, random_pattern


def refusing(make: Callable[..., Any], most: int) -> Callable[..., Any]:
    """`make`, of tensors of at most so many bytes, and of any where there is only a shape."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        tensor = make(*arguments, **options)
        if tensor.device.type != "meta" and tensor.numel() * tensor.element_size() > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return tensor

    return refuse


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that has room for nothing new."""
    monkeypatch.setattr(torch, "empty", refusing(torch.empty, 0))


@pytest.mark.parametrize(
    ("shape", "batch", "dtype", "message"),
    [
        (
            (7, 5),
            5,
            torch.float64,
            "it: 280 bytes (7 × 5 of torch.float64) do not fit on cpu; try a smaller batch or float32",
        ),
        ((2000, 3), 1, torch.float32, "it: 24,000 bytes (2,000 × 3 of torch.float32) do not fit on cpu; try the CPU"),
        ((9,), 1, torch.int64, "it: 72 bytes (9 of torch.int64) do not fit on cpu; try the CPU"),
    ],
)
def test_the_message(shape: tuple[int, ...], batch: int, dtype: torch.dtype, message: str, small: None) -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        allocated("it", shape, dtype, torch.device("cpu"), batch)
    assert str(raised.value).startswith(message)
    assert "Tried to allocate 2.00 GiB" in str(raised.value.__cause__)


def test_products_and_vectors(small: None) -> None:
    a, b = random_pattern(7, 5, 0.4, 1), random_pattern(5, 9, 0.4, 2)
    plan, (left, right) = plan_product(a, b), (values_of(pattern, 3, torch.float32, 0) for pattern in (a, b))
    message = rf"values of a 7 × 9 product: {plan.pattern.nnz * 12} bytes \({plan.pattern.nnz} × 3 of torch.float32\)"
    with emulated():
        with pytest.raises(torch.OutOfMemoryError, match=message):
            plan.multiply(left, right)
        with pytest.raises(torch.OutOfMemoryError, match=r"vectors of a product: 84 bytes \(7 × 3 of torch.float32\)"):
            matvec(a, left, torch.ones(5, 3))


@pytest.mark.parametrize("module", [nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.AvgPool2d(2)])
def test_jacobians_say_whose_they_are(module: nn.Module, small: None) -> None:
    network, x = nn.Sequential(module), torch.randn(2, 1, 4, 4)
    pattern = jacsparse.jacobian_pattern(network, (1, 4, 4))
    rows, columns = pattern.shape
    message = rf"0, {rows} × {columns}: values of a Jacobian: [\d,]+ bytes \(\d+ × [12] of torch.float32\)"
    with emulated(), pytest.raises(torch.OutOfMemoryError, match=message):
        by_products(network, x)


@pytest.mark.parametrize(
    ("most", "message"), [(0, "values of a Jacobian: "), (600, r"values of a \d+ × \d+ product: [\d,]+ bytes")]
)
def test_scans(most: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(*(nn.ReLU() if at % 2 else nn.Conv2d(1, 1, 2, padding=1) for at in range(8)))
    x = torch.randn(2, 1, 4, 4)
    monkeypatch.setattr(torch, "empty", refusing(torch.empty, most))
    with emulated(), pytest.raises(torch.OutOfMemoryError, match=message):
        jacsparse.nn.Scan(module, schedule="blelloch")(x).square().sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("method", ["merge", "rowwise"])
def test_nothing_is_written_where_a_plan_does_not_fit(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of which one after the other does not fit."""
    lengths = np.array([1, 300, 2000])
    b = Pattern((3, 2000), np.append(0, np.cumsum(lengths)), np.concatenate([np.arange(n) for n in lengths]))
    a = Pattern((3, 3), np.arange(4), np.arange(3))
    plan, operands = plan_product(a, b, method=method), [values_of(pattern, 1, torch.float32, 0) for pattern in (a, b)]
    fitting, to = 0, torch.Tensor.to
    while True:
        out, left = torch.full((plan.pattern.nnz, 1), float("nan")), iter(range(fitting))

        def full(tensor: torch.Tensor, *arguments: Any, left: Any = left) -> torch.Tensor:
            if next(left, None) is None:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return to(tensor, *arguments)

        with emulated(), monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", full)
            try:
                plan.multiply(*operands, out=out)
            except torch.OutOfMemoryError as error:
                assert str(error).startswith("an array of a plan or pattern: ") and bool(out.isnan().all())
                fitting += 1
            else:
                break
    assert fitting > 2 and not out.isnan().any()


def test_full_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "matmul", refusing(torch.matmul, 0))
    plan, out = plan_product(Pattern.of(Full(2, 3)), Pattern.of(Full(3, 2))), torch.full((4, 5), float("nan"))
    message = r"a full product, the batch first: 80 bytes \(4 × 5 of torch.float32\)"
    with emulated(), pytest.raises(torch.OutOfMemoryError, match=message):
        plan.multiply(torch.ones(6, 5), torch.ones(6, 1), out=out)
    assert bool(out.isnan().all())


def test_transposed_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "__getitem__", refusing(torch.Tensor.__getitem__, 0))
    pattern = random_pattern(4, 6, 0.5, 1)
    with (
        emulated(),
        pytest.raises(torch.OutOfMemoryError, match=rf"reordered values: \d+ bytes \({pattern.nnz} × 2 of"),
    ):
        jacsparse.SparseJacobian(pattern, values_of(pattern, 2, torch.float32, 0)).T


@pytest.mark.parametrize(
    ("most", "message"), [(200, "forward pass of l0 and l0_reverse"), (4000, "backward pass of l1")]
)
def test_layers_of_small_states(most: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that has no room is named, and no gradient is left."""
    layer, x = jacsparse.nn.GRU(3, 4, num_layers=2, bidirectional=True), torch.randn(9, 2, 3)
    message = rf"{message}.*: 9 steps of 2 samples of 4 elements do not fit on cpu; try a smaller batch or the CPU"
    monkeypatch.setattr(torch.Tensor, "new_empty", refusing(torch.Tensor.new_empty, most))
    with emulated(), pytest.raises(torch.OutOfMemoryError, match=message) as raised:
        layer(x)[0].square().sum().backward()
    assert "Tried to allocate" in str(raised.value.__cause__)
    assert all(parameter.grad is None for parameter in layer.parameters())
