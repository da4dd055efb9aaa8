"""Drawn functions by every way to their Jacobians, at three points, against autograd."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, seed, settings
from torch import nn

import jacsparse
from jacsparse import UnsupportedOperatorError, prepare_jacobian

from .drawn_hessians import Drawn, drawn_functions, fit
from .test_drawn_hessians import REMEDIES, assert_close, expected_at

FULL = os.environ.get("JACSPARSE_TESTS") == "full"
PARTS, DRAWS = (20, 100) if FULL else (1, 4)
#: Refusals of prepared Jacobians alone.
PREPARED_REMEDIES = (*REMEDIES, "pass method=", "leave it out", "use the same", "prepare ")
#: Drawn operators of which PyTorch's gradients of many at once are wrong: `cdist`, and the operator within it.
WRONG = {"distance", "aten._cdist_forward"}


class OneToThree(nn.Module):
    """The operators of a drawn function without its ending."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for step in self.drawn.steps:
            y = step.function(fit(y, step.shape), fit(x, step.shape))
        return y.reshape(len(x), -1)


def by_autograd(f: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """Each sample's Jacobian, ``(batch, rows, columns)``; None where it is no number, or PyTorch has no derivative."""
    leaf = x.clone().requires_grad_()
    y = f(leaf)
    if not y.requires_grad or not y.numel() or y.shape[1] > 200:
        return None
    try:
        # PyTorch's backward pass of batch normalisation is wrong for some gradients that are not contiguous.
        units = [unit.expand_as(y).contiguous() for unit in torch.eye(y.shape[1], dtype=y.dtype)]
        rows = [torch.autograd.grad(y, leaf, unit, retain_graph=True, materialize_grads=True)[0] for unit in units]
    except RuntimeError as error:
        # PyTorch 2.6 has no derivative of `aminmax`.
        if "is not implemented" in str(error):
            return None
        raise
    return torch.stack(rows, 1) if all(row.isfinite().all() for row in rows) else None


def agrees(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((actual - expected).abs().max() <= 1e-9 * max(1.0, expected.abs().max().item()))


def ways(f: nn.Module, x: torch.Tensor) -> dict[str, Callable[[], Callable[[torch.Tensor], jacsparse.SparseJacobian]]]:
    """Each way, as what prepares it."""
    found: dict[str, Callable[[], Callable[[torch.Tensor], jacsparse.SparseJacobian]]] = {
        "jacobian": lambda: lambda x: jacsparse.jacobian(f, x)
    }
    for method in ("auto", "products", "compressed"):
        for compile in (False, True):
            found[f"{method}, compile={compile}"] = lambda method=method, compile=compile: prepare_jacobian(
                f, x, method=method, compile=compile
            )
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_every_way_agrees_with_autograd(part: int) -> None:
    counts: Counter[str] = Counter()

    @seed(part)
    @settings(max_examples=DRAWS)
    @given(drawn=drawn_functions())
    def check(drawn: Drawn) -> None:
        f, points = OneToThree(drawn), [drawn.input(seed) for seed in range(3)]
        expected = [by_autograd(f, x) for x in points]
        assume(all(each is not None for each in expected))
        pairs = list(zip(points, expected, strict=True))
        counts["drawn"] += 1
        for name, prepare in ways(f, points[0]).items():
            try:
                call = prepare()
                for x, matrices in pairs:
                    actual = call(x)
                    for number, matrix in enumerate(matrices):
                        assert agrees(actual.todense(0 if actual.batch == 1 else number), matrix), (name, drawn)
                counts[name] += 1
            except jacsparse.VerificationError:
                assert name.startswith("compressed") and {step.name for step in drawn.steps} & WRONG, (name, drawn)
                counts[f"{name}: refused"] += 1
            except (UnsupportedOperatorError, ValueError) as error:
                assert any(remedy in str(error) for remedy in PREPARED_REMEDIES), (name, drawn, error)
                counts[f"{name}: refused"] += 1
        check_scan(f, pairs)
        check_hessian(drawn, points)

    def check_scan(f: nn.Module, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        scan = jacsparse.nn.Scan(f, schedule="blelloch:1")
        try:
            for x, matrices in pairs:
                leaf = x.clone().requires_grad_()
                y = scan(leaf)
                g = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
                (pulled,) = torch.autograd.grad(y, leaf, g)
                assert agrees(pulled, torch.einsum("br,brc->bc", g, matrices)), ("Scan", f.drawn)
            counts["Scan"] += 1
        except UnsupportedOperatorError as error:
            assert any(remedy in str(error) for remedy in PREPARED_REMEDIES), ("Scan", f.drawn, error)
            counts["Scan: refused"] += 1

    def check_hessian(drawn: Drawn, points: list[torch.Tensor]) -> None:
        expected = [expected_at(drawn, x) for x in points]
        if any(each is None for each in expected):
            return
        try:
            for x, matrices in zip(points, expected, strict=True):
                assert_close(jacsparse.hessian(drawn, x, batched=True), matrices)
            counts["hessian"] += 1
        except UnsupportedOperatorError as error:
            assert any(remedy in str(error) for remedy in REMEDIES), error
            counts["hessian: refused"] += 1

    check()
    print("\n" + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    assert counts["jacobian: refused"] <= 0.02 * counts["drawn"]
