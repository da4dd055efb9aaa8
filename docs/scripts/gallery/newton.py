"""
How fast Newton's method converges
==================================

Bratu's problem, ``Δu + λ eᵘ = 0`` on a square: an exact Jacobian at each step doubles the number of right digits. One
that is factored once and used again is cheaper, and gains the same few digits in each step.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import pad

import jacsparse

n = 32


def residual(u, heat):
    """Differences on n × n points within a square whose border is cold."""
    around = pad(u, (1, 1, 1, 1))
    neighbours = around[2:, 1:-1] + around[:-2, 1:-1] + around[1:-1, 2:] + around[1:-1, :-2]
    return (neighbours - 4 * u) * (n + 1) ** 2 + heat * u.exp()


zero = torch.zeros(n, n, dtype=torch.float64)
prepared = jacsparse.prepare_jacobian(residual, zero, 6.0, value=True)


def newton(steps, once):
    """The norms of the residual, with a Jacobian factored once or at each step."""
    u, norms = zero, []
    for number in range(steps):
        J, f = prepared(u, 6.0)
        norms.append(f.norm().item())
        if number == 0 or not once:
            factors = J.factorize()
        u = u - factors.solve(f.flatten()).reshape(n, n)
    return norms


# %%
# The last points lie at rounding: the residual is a difference of numbers of ``4 (n + 1)² u``.
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
axes.semilogy(newton(8, once=False), "o-", label="a Jacobian at each step")
axes.semilogy(newton(25, once=True), "s-", label="the first one's factors")
axes.set(xlabel="step", ylabel="norm of the residual")
axes.grid(alpha=0.25)
axes.legend()
figure.savefig("newton.png", dpi=150)
