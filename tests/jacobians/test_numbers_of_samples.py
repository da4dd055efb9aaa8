"""A prepared Jacobian takes any number of samples: each is captured once, and all are as autograd has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import jacsparse
from jacsparse import PreparedJacobian, prepare_hessian, prepare_jacobian
from jacsparse.jacobians import prepared as prepared_room
from tests.helpers import assert_equal, dense, drawn

NUMBERS = (3, 1, 5, 3, 2, 5)


def scaled(x: torch.Tensor, scale: torch.Tensor, c: float) -> torch.Tensor:
    return (x * scale)[:, 1:] * x[:, :-1].sin() * c


@pytest.mark.parametrize(
    "options", [{}, {"compile": True}, {"method": "compressed"}, {"method": "products"}, {"create_graph": True}]
)
def test_functions_of_several_arguments(options: dict[str, Any]) -> None:
    prepared = prepare_jacobian(scaled, drawn(3, 4), drawn(3, 1), 2.0, batched=True, **options)
    for seed, samples in enumerate(NUMBERS):
        x, scale = drawn(samples, 4, seed=seed), drawn(samples, 1, seed=seed + 1)
        assert_equal(prepared(x, scale, seed + 0.5), dense(lambda x, s=scale, c=seed + 0.5: scaled(x, s, c), x))
    # An argument without samples has the shape that it had.
    shared = prepare_jacobian(scaled, drawn(3, 4), drawn(1), 2.0, batched=True, **options)
    assert_equal(shared(drawn(7, 4), drawn(1), 2.0), dense(lambda x: scaled(x, drawn(1), 2.0), drawn(7, 4)))


def test_a_number_of_samples_is_captured_once() -> None:
    calls = 0

    def f(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x**2

    prepared = prepare_jacobian(f, drawn(3, 4), batched=True)
    made, counts = calls, []
    for samples in NUMBERS:
        prepared(drawn(samples, 4))
        counts.append(calls - made)
    assert counts == [0, 1, 2, 2, 3, 3]
    assert "(3, 4), of any number of samples;" in repr(prepared)


def test_modules_and_their_batch_axes() -> None:
    convolution = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)).double()
    channels_last = {"memory_format": torch.channels_last}
    prepared = prepare_jacobian(convolution, drawn(2, 2, 4, 6).to(**channels_last), value=True)
    for samples in NUMBERS:
        for x in (drawn(samples, 2, 4, 6), drawn(samples, 2, 4, 6).to(**channels_last)):
            J, y = prepared(x)
            assert_equal(J, dense(convolution, x))
            torch.testing.assert_close(y, convolution(x))
            assert prepared.check(x) < 1e-9
            assert J.vjp(torch.ones_like(y)).shape == x.shape
    linear = prepare_jacobian(nn.Linear(4, 3), torch.ones(2, 4))
    assert linear(torch.ones(5, 4)).values.shape == (12, 1), "all samples share them"


def test_hessians_and_several_tensors() -> None:
    def energy(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return (parts["a"][:, 1:] * parts["b"] ** 2).sum(1)

    prepared = prepare_hessian(energy, {"a": drawn(2, 4), "b": drawn(2, 3)}, batched=True)
    for samples in NUMBERS:
        parts = {"a": drawn(samples, 4, seed=samples), "b": drawn(samples, 3)}
        flat = torch.cat([parts["a"], parts["b"]], 1)
        of_one = lambda row: energy({"a": row[None, :4], "b": row[None, 4:]})[0]  # noqa: E731
        assert_equal(prepared(parts), torch.vmap(torch.func.hessian(of_one))(flat))


def test_gradients_of_values() -> None:
    prepared = prepare_jacobian(lambda x: x**3, drawn(2, 3), batched=True, create_graph=True)
    for samples in NUMBERS:
        x = drawn(samples, 3).requires_grad_()
        (gradient,) = torch.autograd.grad(prepared(x).values.sum(), x)
        torch.testing.assert_close(gradient, 6 * x.detach())


def test_programs_do_not_add_up(caplog: pytest.LogCaptureFixture) -> None:
    prepared = prepare_jacobian(lambda x, n: x**n, drawn(2, 3), 2, batched=True, static_argnums=1)
    for samples in range(1, 20):
        for n in (2, 3):
            assert_equal(prepared(drawn(samples, 3), n), dense(lambda x, n=n: x**n, drawn(samples, 3)))
    assert len(prepared._programs) == prepared_room.MOST_PROGRAMS
    (record,) = caplog.records
    assert "or numbers of samples, have made programs of their own" in record.message


def test_another_form_is_still_refused() -> None:
    prepared = prepare_jacobian(scaled, drawn(3, 4), drawn(3, 1), 2.0, batched=True)
    for args in (
        (drawn(2, 5), drawn(2, 1), 2.0),
        (drawn(2, 4).float(), drawn(2, 1).float(), 2.0),
        (drawn(2, 4), drawn(1, 1), 2.0),
        (drawn(2, 4), drawn(2), 2.0),
        (drawn(2, 4), drawn(2, 1), "2"),
        (drawn(0, 4), drawn(0, 1), 2.0),
    ):
        with pytest.raises((TypeError, ValueError), match=r"prepared for .*: prepare one for these"):
            prepared(*args)
    without = prepare_jacobian(lambda x: x**2, drawn(3, 4), batched=False)
    with pytest.raises(ValueError, match="prepare one for these"):
        without(drawn(2, 4))

    def by_size(x: torch.Tensor) -> torch.Tensor:
        return x**2 if len(x) < 3 else x.cumsum(1)

    decided = prepare_jacobian(by_size, drawn(2, 3), batched=True)
    with pytest.raises(ValueError, match="is another than that for which it was prepared"):
        decided(drawn(3, 3))


def test_saved_ones(tmp_path: Path) -> None:
    f: Callable[..., Any] = lambda x: x[:, 1:] * x[:, :-1]  # noqa: E731
    prepare_jacobian(f, drawn(2, 3), batched=True).save(tmp_path / "prepared.npz")
    loaded = PreparedJacobian.load(tmp_path / "prepared.npz", f, drawn(2, 3))
    for samples in NUMBERS:
        assert_equal(loaded(drawn(samples, 3)), dense(f, drawn(samples, 3)))


def test_within_vmap_the_error_has_the_remedy() -> None:
    def f(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x[1:] * x[:-1] * t

    x, t = drawn(5, 4), drawn(5)
    with pytest.raises(TypeError, match=r"x is within .* vmap; .* vmap within: jacobian\(torch.vmap\(f\), x, batched"):
        torch.vmap(lambda x: jacsparse.jacobian(lambda x: f(x, t[0]), x).values)(x)
    expected = torch.vmap(torch.func.jacrev(f))(x, t)
    assert_equal(jacsparse.jacobian(torch.vmap(f), x, t, batched=True), expected)
    assert_equal(prepare_jacobian(torch.vmap(f), x[:2], t[:2], batched=True)(x, t), expected)
