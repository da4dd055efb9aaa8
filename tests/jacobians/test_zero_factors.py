"""Zeros of constant factors, exponents and masks: which of them decide a pattern, and when they are looked at."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import jacsparse
from tests.helpers import FLOAT, drawn

Function = Callable[[torch.Tensor], torch.Tensor]
FACTOR = torch.tensor([[1.0, 0, 2, 0], [0, 0, 1, 3]], dtype=FLOAT)
METHODS = ("auto", "products", "compressed")


def reference(f: Function, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.functional.jacobian(f, x).reshape(-1, x.numel())


FACTORS: dict[str, Function] = {
    "sum": lambda y: (y * FACTOR).sum(-1),
    "truth values": lambda y: (y.sin() * (FACTOR > 0)).sum(-1),
    "integers": lambda y: y * FACTOR.long(),
    "prod of powers": lambda y: (y**FACTOR).prod(-1),
    "powers": lambda y: (y**FACTOR).sin(),
    "several": lambda y: ((y**2 * FACTOR).exp() * FACTOR.flip(0)).sin(),
    "a broadcast operand": lambda y: y[:, :1] * FACTOR,
    "a broadcast factor": lambda y: (y * FACTOR[:1]).cumsum(-1),
    "a stencil": lambda y: (FACTOR[:1] * (y[1:] - y[:-1])) ** 2,
    "computed": lambda y: y * (FACTOR - 1).clamp(min=0),
    "filled": lambda y: y.exp().masked_fill(FACTOR == 0, 2.0),
}


@pytest.mark.parametrize("name", FACTORS)
def test_constant_zero_factors_leave_no_entry(name: str) -> None:
    f, y = FACTORS[name], drawn(2, 4, seed=3).abs() + 0.5
    expected = reference(f, y)
    results = [jacsparse.jacobian(f, y), jacsparse.jacobian(f, y), jacsparse.jacobian(f, y, create_graph=True)]
    prepared = [jacsparse.prepare_jacobian(f, drawn(2, 4).abs(), method=method) for method in METHODS]
    prepared.append(jacsparse.prepare_jacobian(f, drawn(2, 4).abs(), create_graph=True))
    results += [each(y) for each in prepared]
    for J in results:
        torch.testing.assert_close(J.todense().detach(), expected, rtol=1e-12, atol=1e-12)
        # Integers that a replay computes of floats are no part of a program.
        if name != "integers" and not name.startswith("truth") and name != "filled":
            assert J.pattern.nnz == expected.count_nonzero()
    assert results[0].pattern.nnz == expected.count_nonzero()
    assert jacsparse.jacobian_pattern(f, y) == results[0].pattern
    assert jacsparse.jacobian(f, y, pruned=False).pattern.nnz > results[0].pattern.nnz

    def total(y: torch.Tensor) -> torch.Tensor:
        return f(y).sin().sum()

    expected = torch.autograd.functional.hessian(total, y).reshape(8, 8)
    for H in (jacsparse.hessian(total, y), jacsparse.prepare_hessian(total, drawn(2, 4).abs())(y)):
        torch.testing.assert_close(H.todense(), expected, rtol=1e-11, atol=1e-11)


class Masked(nn.Module):
    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.mask).exp()


def test_a_filled_mask_is_seen_in_the_next_call() -> None:
    module, x = Masked(FACTOR[0].clone()), drawn(3, 4)
    prepared = jacsparse.prepare_jacobian(module, x)
    assert jacsparse.jacobian(module, x).pattern == prepared.pattern and prepared.pattern.nnz == 2
    module.mask.data.add_(1)
    J = jacsparse.jacobian(module, x)
    assert J.pattern.nnz == 4
    torch.testing.assert_close(J.todense(1), reference(module, x[1]))
    with pytest.raises(RuntimeError, match=r"Masked\.mask was zero|mask was zero where the pattern leaves it out"):
        prepared(x)
    leaf = x.clone().requires_grad_()
    scan = jacsparse.nn.Scan(
        nn.Sequential(Masked(FACTOR[0].clone()), nn.Linear(4, 4, dtype=FLOAT)), schedule="blelloch"
    )
    for _ in range(2):
        (actual,) = torch.autograd.grad(scan(leaf).sum(), leaf)
        (expected,) = torch.autograd.grad(scan.module(leaf).sum(), leaf)
        torch.testing.assert_close(actual, expected)
        scan.module[0].mask.fill_(2)


def test_masks_of_truth_values_are_compared() -> None:
    mask, x = FACTOR[0] > 0, drawn(4)
    prepared = jacsparse.prepare_jacobian(lambda x: (x * mask).sin(), x)
    assert prepared.pattern.nnz == 2
    mask.logical_not_()
    with pytest.raises(ValueError, match="holds other elements"):
        prepared(x)
    assert jacsparse.jacobian(lambda x: (x * mask).sin(), x).pattern.indices.tolist() == [1, 3]


def test_factors_that_train_or_are_arguments_decide_nothing() -> None:
    scale, x = nn.Parameter(torch.zeros(4, dtype=FLOAT)), drawn(4)

    def trained(x: torch.Tensor) -> torch.Tensor:
        return x * (2 * scale)

    def passed(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return (x * c).sin()

    def captured(x: torch.Tensor) -> torch.Tensor:
        return passed(x, FACTOR[0])

    for J in (jacsparse.jacobian(trained, x), jacsparse.prepare_jacobian(trained, x)(x)):
        assert J.pattern.nnz == 4
    assert jacsparse.jacobian(captured, x).pattern.nnz == 2
    prepared = jacsparse.prepare_jacobian(passed, x, FACTOR[0])
    for c in (FACTOR[0], FACTOR[1], FACTOR[0] > 0):
        J = jacsparse.jacobian(passed, x, c)
        assert J.pattern.nnz == 4
        expected = reference(lambda x, c=c: passed(x, c), x)
        torch.testing.assert_close(J.todense(), expected)
        if c.is_floating_point():
            torch.testing.assert_close(prepared(x, c).todense(), expected)

    def drop(x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(4) > 0.9)

    assert jacsparse.jacobian(drop, x).pattern.nnz == 4


BAND = (torch.arange(5)[:, None] - torch.arange(5)).abs() <= 1
ATTENTION_MASKS = {
    "truth values": BAND,
    "numbers": torch.zeros(5, 5, dtype=FLOAT).masked_fill(~BAND, -torch.inf),
    "causal": torch.ones(5, 5, dtype=torch.bool).tril(),
    "of heads": torch.stack([BAND, BAND.tril()])[None],
    "a query without keys": BAND & (torch.arange(5) != 2)[:, None],
}


@pytest.mark.parametrize("name", ATTENTION_MASKS)
def test_attention_masks(name: str) -> None:
    mask, x = ATTENTION_MASKS[name], drawn(3, 6, 5, 2, seed=1)

    def f(x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(*x.split(2, -3), attn_mask=mask)

    allowed = mask if mask.dtype == torch.bool else mask == 0
    allowed = allowed.expand(1, 2, 5, 5)[0]
    # A row depends on its query, and on the keys and values of what it may attend to, of which one channel alone.
    counts = 2 + allowed.sum(-1) * 3
    for J in (
        jacsparse.jacobian(f, x, batched=True),
        jacsparse.prepare_jacobian(f, drawn(3, 6, 5, 2), batched=True)(x),
    ):
        assert J.pattern.nnz == 2 * int(counts.sum())
        for sample in range(3):
            expected = reference(lambda y: f(y[None])[0], x[sample])
            torch.testing.assert_close(J.todense(sample), expected, rtol=1e-10, atol=1e-12)
    jacsparse.verify(lambda y: f(y[None])[0], x[0])


def test_an_attention_mask_that_changes() -> None:
    mask, x = ATTENTION_MASKS["numbers"].clone(), drawn(6, 5, 2)

    def f(x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(*x[None].split(2, 1), attn_mask=mask)

    prepared = jacsparse.prepare_jacobian(f, x)
    mask[0, 4] = 0.5
    torch.testing.assert_close(jacsparse.jacobian(f, x).todense(), reference(f, x), rtol=1e-10, atol=1e-12)
    with pytest.raises(RuntimeError, match="was zero where the pattern leaves it out"):
        prepared(x)


KEYS = torch.tensor([[True, False, True, True], [False, False, True, False], [True, True, True, True]])
EXCLUDED = torch.zeros(3, 4, dtype=FLOAT).masked_fill(~KEYS, -torch.inf)
SCORES: dict[str, Function] = {
    "added": lambda x: torch.softmax(x + EXCLUDED, -1),
    "added in place": lambda x: (2 * x).add_(EXCLUDED).softmax(-1),
    "filled": lambda x: torch.softmax(x.masked_fill(~KEYS, -torch.inf), -1),
    "one mask for all": lambda x: torch.softmax(EXCLUDED[0] + x, -1),
    "along another axis": lambda x: torch.softmax(x + EXCLUDED, -2),
}


@pytest.mark.parametrize("name", SCORES)
def test_excluded_scores_have_no_entries(name: str) -> None:
    f, x = SCORES[name], drawn(2, 3, 4)
    exact = sum(int(reference(f, sample).count_nonzero()) for sample in x) // 2
    prepared = [jacsparse.prepare_jacobian(f, drawn(2, 3, 4, seed=2), batched=True, method=m) for m in METHODS]
    results = [jacsparse.jacobian(f, x, batched=True), jacsparse.jacobian(f, x, batched=True, create_graph=True)]
    for J in (*results, *(each(x) for each in prepared)):
        # The one key of a query has a weight of one, whatever its score is.
        assert exact <= J.pattern.nnz <= exact + 2
        for sample in range(2):
            expected = reference(f, x[sample])
            torch.testing.assert_close(J.todense(sample).detach(), expected, rtol=1e-12, atol=1e-14)
    jacsparse.verify(f, x[0])

    def total(y: torch.Tensor) -> torch.Tensor:
        return (f(y) * torch.arange(4.0, dtype=FLOAT)).square().sum()

    expected = torch.autograd.functional.hessian(total, x[0]).reshape(12, 12)
    torch.testing.assert_close(jacsparse.hessian(total, x[0]).todense(), expected, rtol=1e-10, atol=1e-12)


def test_masks_of_scores_that_change() -> None:
    mask, x, number = EXCLUDED.clone(), drawn(3, 4), [-torch.inf]

    def added(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x + mask, -1)

    def filled(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.masked_fill(~KEYS, number[0]), -1)

    few = [jacsparse.jacobian(f, x).pattern.nnz for f in (added, filled)]
    assert few == [9 + 1 + 16] * 2
    prepared = jacsparse.prepare_jacobian(added, x)
    mask[0, 1] = number[0] = 0.5
    for f in (added, filled):
        torch.testing.assert_close(jacsparse.jacobian(f, x).todense(), reference(f, x), rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError, match="was zero where the pattern leaves it out"):
        prepared(x)


def test_masks_of_scores_that_are_arguments_or_differ_between_samples() -> None:
    x, masks = drawn(2, 4), torch.stack([EXCLUDED[0], EXCLUDED[1]])

    def f(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x + mask, -1)

    assert jacsparse.jacobian(f, x[0], masks[0]).pattern.nnz == 16
    prepared = jacsparse.prepare_jacobian(f, x[0], masks[0])
    for mask in masks:
        torch.testing.assert_close(prepared(x[0], mask).todense(), reference(lambda x, m=mask: f(x, m), x[0]))
    J = jacsparse.jacobian(lambda x: f(x, masks), x, batched=True)
    assert J.pattern.nnz == 16
    for sample in range(2):
        expected = reference(lambda x, m=masks[sample]: f(x, m), x[sample])
        torch.testing.assert_close(J.todense(sample), expected, rtol=1e-12, atol=1e-14)
    fill = jacsparse.prepare_jacobian(lambda x, c: torch.softmax(x.masked_fill(~KEYS[0], c), -1), x[0], -torch.inf)
    for c in (-torch.inf, 0.5):
        expected = reference(lambda x, c=c: torch.softmax(x.masked_fill(~KEYS[0], c), -1), x[0])
        torch.testing.assert_close(fill(x[0], c).todense(), expected, rtol=1e-12, atol=1e-14)
