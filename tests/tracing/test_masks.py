"""Computed boolean masks: writes by them, and what they select, against autograd in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import jacsparse
from jacsparse import UnsupportedOperatorError
from jacsparse.tracing import graphs_of

SIZE = 6


def point(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or (SIZE,), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def written(write: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor], Tensor]:
    """A function that returns twice its argument after a write to that; it gets both."""

    def f(x: Tensor) -> Tensor:
        y = x * 2
        write(y, x)
        return y

    return f


def set_to(y: Tensor, mask: Tensor, value: Tensor | float) -> None:
    y[mask] = value


def scaled(y: Tensor, x: Tensor) -> None:
    y[x > 0.1] *= 3


def added(y: Tensor, x: Tensor) -> None:
    y[x > 0] += x[x > 0].exp() * x.sum()


def two_branches(y: Tensor, x: Tensor) -> None:
    mask = x > 0
    y[mask] = x[mask].exp()
    y[~mask] = x[~mask] ** 2


def several_operands(y: Tensor, x: Tensor) -> None:
    mask = x > 0
    a, b = x[mask], x.exp()[mask]
    y[mask] = torch.where(a > 0.5, a * b, b)


def guarded(y: Tensor, x: Tensor) -> None:
    mask = x > 0
    y[mask] = x[mask].sqrt() + 1 / x[mask]


def loop(x: Tensor) -> Tensor:
    for step in range(3):
        mask = x > x.mean()
        x = x.sin()
        x[mask] = x[mask] ** 2 + step
    return x


def rows(x: Tensor) -> Tensor:
    y = x.reshape(3, 2) * 1
    mask = y[:, 0] > 0
    y[mask] = y[mask] * y.sum(0)
    return y.reshape(-1)


def columns(x: Tensor) -> Tensor:
    y = x.reshape(2, 3) * 1
    mask = y[0] > 0
    y[:, mask] = y[:, mask] * 2
    y[:, 1][mask[:2]] = 5.0
    return y.reshape(-1)


def of_one_row(x: Tensor) -> Tensor:
    y = x.reshape(1, SIZE) * 2
    mask = x > 0
    y[:, mask] = y[:, mask].sin()
    return y.reshape(-1)


def first_two(c: Tensor) -> Tensor:
    c.mul_(2)
    c[:2].zero_()
    return c


def scattered_rows(x: Tensor) -> Tensor:
    y = torch.stack([x[:3], x[3:], x[1:4]])
    mask = y[0] > -10
    return (y * 2).masked_scatter(mask, y.sin()[mask]).flatten()


DIAGONAL: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": written(lambda y, x: set_to(y, x < 0, 0)),
    "scaled": written(scaled),
    "negative": written(lambda y, x: set_to(y, x < 0, -x[x < 0])),
    "function": written(lambda y, x: set_to(y, x < 0, -x[x < 0].sin() * y[x < 0])),
    "fill": written(lambda y, x: y.masked_fill_(x > 0, 1.0)),
    "accumulated": written(lambda y, x: y.index_put_((x > 0,), x[x > 0], accumulate=True)),
    "two branches": written(two_branches),
    "several operands": written(several_operands),
    "guarded": written(guarded),
    "clamped": written(lambda y, x: (set_to(y, x < -0.5, -0.5), set_to(y, x > 0.5, y[x > 0.5] * 0 + 0.5))),
    "within": written(lambda y, x: set_to(y, (x > 0) & (x < 1), x.clone()[(x > 0) & (x < 1)].clamp(max=0.5))),
    "scattered": lambda x: (x * 2).masked_scatter(x > 0, x.exp()[x > 0]),
    "columns": columns,
    "of one row": of_one_row,
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "added": written(added),
    "first": written(lambda y, x: set_to(y, x < 0, x[0])),
    "rows": rows,
    "loop": loop,
    "scatter": lambda x: (x * 2).masked_scatter_(x > 0, x.exp()),
    "sum": lambda x: x[x > 0].sin().sum() * x,
    "mean": lambda x: x.masked_select(x > -3).pow(2).mean() + x,
    "sums of rows": lambda x: x.reshape(3, 2)[x[::2] > 0].sin().sum(0),
}
#: What takes as many elements as there are, so that no replay repeats it.
SIZED: dict[str, Callable[[Tensor], Tensor]] = {
    "joined": lambda x: torch.cat([x[x > 0] ** 2, x]),
    "returned": lambda x: x[x > 0],
    "counted": written(lambda y, x: set_to(y, x > 0, x[x > 0] / x[x > 0].numel())),
    "shape": written(lambda y, x: set_to(y, x > 0, torch.ones(x[x > 0].shape, dtype=x.dtype))),
    "written to": lambda x: (lambda c: c[:1].zero_().sum() + c.sum() + x)(x[x > 0]),
    "another mask": written(lambda y, x: set_to(y, x > 0, x[x >= 0])),
    "of a selection": lambda x: (lambda c: c[c > 0.5].sum() * x)(x[x > 0]),
    "part of what was written": lambda x: first_two(x[x > 0] * 1).sum() * x,
    "scattered rows": lambda x: scattered_rows(x),
    "places": written(lambda y, x: set_to(y, (x > 0).nonzero()[:, 0], 2.0)),
}  # fmt: skip


def check(jacobian: jacsparse.SparseJacobian, expected: Tensor) -> None:
    torch.testing.assert_close(jacobian.todense(), expected.reshape(-1, SIZE), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", [*DIAGONAL, *OTHERS, *SIZED])
def test_jacobians(name: str) -> None:
    f = (DIAGONAL | OTHERS | SIZED)[name]
    for seed in range(5):
        jacobian = jacsparse.jacobian(f, point(seed))
        check(jacobian, torch.autograd.functional.jacobian(f, point(seed)))
        assert name not in DIAGONAL or jacobian.pattern.nnz <= SIZE


#: Of which the mask selects all, none and one.
POINTS = [point(0), point(0).abs() + 0.01, -point(0).abs() - 0.01, torch.cat([point(1)[:1].abs(), -point(0)[1:].abs()])]


@pytest.mark.parametrize("at", range(len(POINTS)))
@pytest.mark.parametrize("name", [*DIAGONAL, *OTHERS])
def test_prepared_jacobians(name: str, at: int) -> None:
    f = (DIAGONAL | OTHERS)[name]
    prepared = [
        jacsparse.prepare_jacobian(f, POINTS[at], method=method, compile=at == 0 and method == "auto")
        for method in ("auto", "products", "compressed")
    ]
    for x in (*POINTS, point(7)):
        for each in prepared:
            check(each(x), torch.autograd.functional.jacobian(f, x))


@pytest.mark.parametrize("name", [*DIAGONAL, *OTHERS])
def test_hessians(name: str) -> None:
    def f(x: Tensor) -> Tensor:
        return (DIAGONAL | OTHERS)[name](x).pow(2).sum()

    for seed in range(3):
        check(jacsparse.hessian(f, point(seed)), torch.autograd.functional.hessian(f, point(seed)))
    x = torch.tensor([0.3, -1.2, 0.7, 0.4, -0.6, 0.9], dtype=torch.float64)
    if name in ("sum", "mean", "sums of rows", "scattered", "of one row"):
        # Autograd's backward pass expands to as many elements as are selected.
        with pytest.raises(UnsupportedOperatorError, match=r"a size depends on what a tensor holds.*torch\.where"):
            jacsparse.prepare_hessian(f, x)
        return
    prepared = jacsparse.prepare_hessian(f, x)
    for seed in range(3):
        check(prepared(point(seed)), torch.autograd.functional.hessian(f, point(seed)))


@pytest.mark.parametrize("name", SIZED)
def test_what_no_replay_repeats(name: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"a size depends on what a tensor holds.*torch\.where"):
        jacsparse.prepare_jacobian(SIZED[name], point(0))


def test_infinite_derivatives_where_a_mask_is_false() -> None:
    f = written(lambda y, x: set_to(y, x >= 0, x[x >= 0].sqrt()))
    prepared = jacsparse.prepare_jacobian(f, point(0))
    x = torch.tensor([0.0, -1.0, 4.0, -2.0, 1.0, 0.0], dtype=torch.float64)
    for jacobian in (jacsparse.jacobian(f, x), prepared(x)):
        assert jacobian.todense().diagonal().tolist() == [torch.inf, 2.0, 0.25, 2.0, 0.5, torch.inf]


def test_hessians_where_nothing_is_selected() -> None:
    def f(x: Tensor) -> Tensor:
        return (x.exp() * 1).masked_scatter(x > 9, x.sin()[x > 9]).pow(2).sum() + x[x > 9].pow(3).sum()

    check(jacsparse.hessian(f, point(0)), torch.autograd.functional.hessian(f, point(0)))


def test_thresholds_that_are_equal_once() -> None:
    def f(x: Tensor, a: float, b: float) -> Tensor:
        y = x * 2
        y[x > a] = x[x > b] * 3
        return y

    x = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    for a, b in ((0.1, 0.1), (0.1, 0.15), (0.3, 0.3), (0.1, 0.1)):
        check(jacsparse.jacobian(f, x, a, b), torch.autograd.functional.jacobian(lambda x, a=a, b=b: f(x, a, b), x))


def test_one_graph_for_all_masks() -> None:
    f = DIAGONAL["function"]
    jacsparse.jacobian(f, point(0))
    count = graphs_of.cache_info().currsize
    for seed in range(1, 9):
        jacsparse.jacobian(f, point(seed))
    assert graphs_of.cache_info().currsize == count
    assert jacsparse.jacobian(f, point(0, 100_000)).pattern.nnz == 100_000


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(4)]).double()
        self.scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            mask = y < 0
            y[mask] = y[mask] * self.scale
            x = y
        return x


def test_networks() -> None:
    torch.manual_seed(0)
    network, x, weights = Network(), point(1, 5, SIZE).requires_grad_(), point(2, 5, SIZE)
    leaves = [x, *network.parameters()]
    expected = torch.autograd.grad((network(x) * weights).sum(), leaves)
    scans = [jacsparse.nn.Scan(network, schedule=schedule) for schedule in ("linear", "blelloch")]
    for run in (*scans, *scans, jacsparse.nn.Leapfrog(network, threads=2)):
        for ours, reference in zip(torch.autograd.grad((run(x) * weights).sum(), leaves), expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-12)
    jacobian = jacsparse.jacobian(network, x.detach())
    prepared = jacsparse.prepare_jacobian(network, point(3, 5, SIZE))(x.detach())
    for sample in range(5):
        dense = torch.autograd.functional.jacobian(network, x[sample : sample + 1].detach()).reshape(SIZE, SIZE)
        torch.testing.assert_close(jacobian.todense(sample=sample), dense, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(prepared.todense(sample=sample), dense, rtol=1e-10, atol=1e-12)
    assert jacsparse.jacobian_pattern(network, (SIZE,)) == jacobian.pattern
