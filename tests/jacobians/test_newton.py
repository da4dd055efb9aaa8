"""Roots by Newton's method, beside SciPy's and closed forms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import nn

import jacsparse


def reaction(u: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Diffusion between cold ends, and a reaction; samples along the axes before the last one."""
    padded = nn.functional.pad(u, (1, 1))
    return padded[..., 2:] - 2 * u + padded[..., :-2] - u.exp() * u + p


def drawn(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(), (1,), (17,), (3, 5)])
def test_root_beside_scipy(shape: tuple[int, ...]) -> None:
    p = 3 * drawn(*shape)
    f = reaction if shape else (lambda u, p: u.exp() * u - p)
    u = jacsparse.newton(f, torch.zeros_like(p), p, tolerance=1e-12)
    coarse = jacsparse.newton(f, torch.zeros_like(p), p)
    flat = scipy.optimize.root(lambda u: f(torch.from_numpy(u).reshape(shape), p).numpy().ravel(), np.zeros(p.numel()))
    assert u.shape == shape and not u.requires_grad
    assert (coarse - u).abs().max() <= 0.1 * 2.0**-26 * u.abs().max()
    assert np.allclose(u.numpy().ravel(), flat.x, rtol=0, atol=1e-7) and f(u, p).abs().max() < 1e-12


@pytest.mark.parametrize("samples", [1, 2, 17])
def test_samples_have_roots_of_their_own(samples: int) -> None:
    p = 50 * drawn(samples, 17)
    u = jacsparse.newton(reaction, torch.zeros_like(p), p, batched=True)
    each = torch.stack([jacsparse.newton(reaction, torch.zeros(17, dtype=p.dtype), of_sample) for of_sample in p])
    assert torch.allclose(u, each, rtol=0, atol=1e-8)


def test_as_many_samples_as_elements() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Softplus()).double()

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, u: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return u + 0.1 * self.module(u) - x

    x = drawn(4, 4)
    u = jacsparse.newton(Residual(), x, x)
    assert (Residual()(u, x)).abs().max() < 1e-8
    # Implicit derivatives by parameters, of an equilibrium.
    (u.square().sum()).backward()
    gradient = module[0].weight.grad
    step, moved = 1e-6, module[0].weight
    with torch.no_grad():
        moved[1, 2] += step
        higher = jacsparse.newton(Residual(), x, x).square().sum()
        moved[1, 2] -= 2 * step
        lower = jacsparse.newton(Residual(), x, x).square().sum()
    assert gradient is not None and np.isclose(gradient[1, 2], (higher - lower) / (2 * step), rtol=1e-6)


def test_gradients_are_those_of_the_implicit_function() -> None:
    p = (50 * drawn(3, 17)).requires_grad_()
    guess = torch.zeros(3, 17, dtype=p.dtype, requires_grad=True)
    u = jacsparse.newton(reaction, guess, p, batched=True)
    assert torch.autograd.gradcheck(lambda p: jacsparse.newton(reaction, guess, p, batched=True), [p])
    with pytest.raises(NotImplementedError, match="differentiated once; leave out create_graph"):
        torch.autograd.grad(u.sum(), p, create_graph=True)
    (of_guess,) = torch.autograd.grad(
        jacsparse.newton(reaction, guess, p, batched=True).sum(), guess, allow_unused=True
    )
    assert of_guess is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_prepared_residuals_take_many_guesses(dtype: torch.dtype) -> None:
    calls = []

    def f(u: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        calls.append(u)
        return reaction(u, p)

    p = drawn(6, 17).to(dtype)
    prepared = jacsparse.prepare_jacobian(f, p, p, batched=True)
    calls.clear()
    expected = jacsparse.newton(reaction, torch.zeros_like(p), p, batched=True)
    for guess in (torch.zeros_like(p), torch.ones_like(p), 3 * torch.ones_like(p)):
        u = jacsparse.newton(prepared, guess, p)
        assert torch.allclose(u, expected, rtol=0, atol=0.1 * torch.finfo(dtype).eps ** 0.5)
    # At the root, it costs one step.
    calls.clear()
    jacsparse.newton(prepared, expected, p)
    assert len(calls) <= 3


def test_damped_steps_and_zero_roots() -> None:
    far = torch.tensor([[50.0], [-3.0], [0.5], [0.0]], dtype=torch.float64)
    assert jacsparse.newton(torch.atan, far, batched=True).abs().max() < 1e-20
    # Outside the domain of a logarithm, whole steps are not finite.
    assert torch.allclose(jacsparse.newton(torch.log, far[:1]), torch.ones_like(far[:1]))
    assert jacsparse.newton(lambda u: u + u**3, far[:3]).abs().max() < 1e-20


def test_minimum_by_a_hessian() -> None:
    def energy(u: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return (u[1:] - u[:-1]).square().sum() / 2 + (u.exp() - p * u).sum()

    p = (1 + drawn(9)).requires_grad_()
    prepared = jacsparse.prepare_hessian(energy, p.detach(), p.detach())
    u = jacsparse.newton(prepared, torch.zeros(9, dtype=p.dtype), p)
    expected = scipy.optimize.minimize(
        lambda u: float(energy(torch.from_numpy(u), p.detach())), np.zeros(9), method="BFGS", options={"gtol": 1e-6}
    )
    assert np.allclose(u.detach().numpy(), expected.x, rtol=0, atol=1e-4)
    # Each equation of the gradient sums to Σ e^u = Σ p.
    assert np.isclose(u.exp().sum().item(), p.sum().item(), rtol=1e-8)
    assert torch.autograd.gradcheck(lambda p: jacsparse.newton(prepared, u, p), [p])


def shorter(u: torch.Tensor) -> torch.Tensor:
    return u[1:]


def never(u: torch.Tensor) -> torch.Tensor:
    return u.exp() + 1


def undefined(u: torch.Tensor) -> torch.Tensor:
    return u.log()


ERRORS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (
        lambda: jacsparse.newton(shorter, torch.ones(3)),
        ValueError,
        r"shorter returns .* of \(2,\); .*\(3,\)",
    ),
    (lambda: jacsparse.newton(never, torch.ones(3)), ArithmeticError, "does not settle in sample 0.*begin nearer"),
    (lambda: jacsparse.newton(torch.square, torch.ones(1), iterations=3), ArithmeticError, "does not settle"),
    (
        lambda: jacsparse.newton(undefined, torch.tensor([[1.0], [-1.0]]), batched=True),
        ValueError,
        "undefined is not finite at the first guess of sample 1",
    ),
    (lambda: jacsparse.newton(torch.square, torch.zeros(2)), ValueError, "sample 0 of the Jacobian is singular"),
    (lambda: jacsparse.newton(torch.sin, [1.0]), TypeError, "u is a list"),  # type: ignore[arg-type]
    (
        lambda: jacsparse.newton(jacsparse.prepare_jacobian(torch.sin, torch.ones(2)), torch.ones(2), batched=False),
        TypeError,
        "batched is False, and the Jacobian is prepared already",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS, ids=[message[:20] for _, _, message in ERRORS])
def test_errors(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
