"""Reductions of segments and by indices, and distances of pairs, which are made of other operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jacsparse
from tests.helpers import drawn

Function = Callable[[torch.Tensor], torch.Tensor]
HOW = {"sum": "sum", "mean": "mean", "prod": "prod", "amax": "max", "amin": "min"}
seeds = st.integers(0, 2**31)


def check(f: Function, x: torch.Tensor, nonzero: bool = True) -> None:
    """Values, and gradients of values, are autograd's, and the pattern has no other entries than they have, if told."""
    expected = torch.autograd.functional.jacobian(f, x).reshape(-1, x.numel())
    prepared = jacsparse.prepare_jacobian(f, x + 1)
    for J in (jacsparse.jacobian(f, x), jacsparse.jacobian(f, x, create_graph=True), prepared(x)):
        torch.testing.assert_close(J.todense().detach(), expected, rtol=1e-12, atol=1e-12)
        assert not nonzero or J.pattern.nnz == expected.count_nonzero()


def numbers(*shape: int, seed: int) -> torch.Tensor:
    """Random numbers, some of which are equal, and some zero."""
    return drawn(*shape, seed=seed).mul(2).round().div(2)


@given(
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any),
    lead=st.lists(st.integers(1, 2), max_size=2),
    behind=st.integers(1, 3),
    how=st.sampled_from([*HOW.values()]),
    by_offsets=st.booleans(),
    initial=st.sampled_from([None, 0.5, -1.0, 2.0]),
    seed=seeds,
)
@settings(max_examples=12, deadline=None)
def test_segments(
    lengths: list[int],
    lead: list[int],
    behind: int,
    how: str,
    by_offsets: bool,
    initial: float | None,
    seed: int,
) -> None:
    sizes = torch.tensor(lengths).expand(*lead, len(lengths)).contiguous()
    places = {"lengths": sizes}
    if by_offsets:
        places = {"offsets": torch.nn.functional.pad(sizes.cumsum(-1), (1, 0))}

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.segment_reduce(x, how, axis=len(lead), initial=initial, **places)

    # PyTorch shares positive gradients among equal extremes, and no negative ones (2.13).
    x = (drawn if how in ("max", "min") else numbers)(*lead, sum(lengths), behind, seed=seed)
    check(f, x, nonzero=how in ("sum", "mean"))


@pytest.mark.parametrize("how", ["max", "min"])
def test_equal_extremes_share_the_derivative(how: str) -> None:
    x, sign = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64), 1 if how == "max" else -1
    lengths = torch.tensor([1, 2])
    for initial in (None, 2.0 * sign, 3.0 * sign):
        f = partial(torch.segment_reduce, reduce=how, lengths=lengths, initial=initial)
        J = jacsparse.jacobian(f, sign * x)
        assert torch.equal(J.todense(), torch.autograd.functional.jacobian(f, sign * x))


@given(
    index=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    axis=st.integers(0, 2),
    how=st.sampled_from(["mean", "prod", "amax", "amin"]),
    includes=st.booleans(),
    seed=seeds,
)
@settings(max_examples=12, deadline=None)
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_indices(index: list[int], shape: tuple[int, int], axis: int, how: str, includes: bool, seed: int) -> None:
    places = torch.tensor(index)

    def f(x: torch.Tensor) -> torch.Tensor:
        leading, source = (part.movedim(0, axis) for part in (x[:4], x[4:]))
        return torch.index_reduce(leading, axis, places, source, how, include_self=includes)

    check(f, numbers(4 + len(index), *shape, seed=seed), nonzero=how == "mean" and includes)


@given(
    count=st.integers(2, 5),
    width=st.integers(1, 3),
    p=st.sampled_from([0.0, 1.0, 1.5, 2.0, 3.0, torch.inf]),
    seed=seeds,
)
@settings(max_examples=12, deadline=None)
def test_pairs(count: int, width: int, p: float, seed: int) -> None:
    check(lambda x: torch.pdist(x, p), numbers(count, width, seed=seed), nonzero=False)
    J = jacsparse.jacobian(lambda x: torch.pdist(x, p), drawn(count, width))
    assert J.pattern.nnz == count * (count - 1) * width


@pytest.mark.parametrize("p", [1.5, 2.0, 3.0])
def test_hessians_of_pairs(p: float) -> None:
    x = drawn(4, 3)

    def by_powers(x: torch.Tensor) -> torch.Tensor:
        pairs = [(i, j) for i in range(4) for j in range(i)]
        return torch.stack([((x[i] - x[j]).abs() ** p).sum() ** (2 / p) for i, j in pairs]).sum()

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.pdist(x, p).square().sum()

    expected = torch.autograd.functional.hessian(by_powers, x).reshape(12, 12)
    for H in (jacsparse.hessian(f, x), jacsparse.prepare_hessian(f, drawn(4, 3, seed=1))(x)):
        torch.testing.assert_close(H.todense(), expected, rtol=1e-10, atol=1e-10)


def test_lengths_of_segments_are_read_in_each_call() -> None:
    x, lengths = drawn(5), torch.tensor([2, 3])

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.segment_reduce(x, "mean", lengths=lengths)

    prepared = jacsparse.prepare_jacobian(f, x)
    for _ in range(2):
        assert torch.equal(jacsparse.jacobian(f, x).todense(), torch.autograd.functional.jacobian(f, x))
        lengths.copy_(torch.tensor([4, 1]))
    with pytest.raises(ValueError, match="holds other elements"):
        prepared(x)
