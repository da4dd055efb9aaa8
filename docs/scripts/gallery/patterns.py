"""
Patterns, plans and chains
==========================

The Jacobian of a convolution, a ReLU or a max-pooling is mostly zeros, and where they are follows from the architecture
alone.
"""

import torch
from torch import nn

import jacsparse

# %%
# A pattern: each dark cell is a position that is no guaranteed zero. Every block of rows belongs to a channel of the
# output, every block of columns to one of the input.
convolution = nn.Conv2d(3, 8, 3, padding=1)
pattern = jacsparse.jacobian_pattern(convolution, (3, 8, 8))
pattern.plot("convolution.png", title="3 × 3 convolution")

# %%
# In a terminal, ``print`` draws a pattern with dots.
print(jacsparse.jacobian_pattern(nn.Conv2d(1, 1, 3, padding=1), (1, 8, 8)))

# %%
# A Jacobian shows the magnitudes of its entries, on a logarithmic scale: here of a heat equation whose conductivity
# depends on the temperature.
temperature = torch.linspace(0.0, 1.0, 24, dtype=torch.float64).clamp(min=0.3)


def heat(u):
    """What flows into each cell, where the conductivity is a power of the temperature."""
    flux = ((u[1:] + u[:-1]) / 2) ** 8 * (u[1:] - u[:-1])
    return torch.nn.functional.pad(flux, (0, 1)) - torch.nn.functional.pad(flux, (1, 0))


jacsparse.jacobian(heat, temperature).plot("heat.png", title="heat", axes=("temperature", "change"))

# %%
# A plan of a product: max-pooling after the convolution. Its pattern, its method and its FLOP are known before there
# is a number.
pooling = jacsparse.jacobian_pattern(nn.MaxPool2d(2), (8, 8, 8))
plan = jacsparse.plan_product(pooling, pattern)
plan.plot("plan.png")
print(plan)


# %%
# A chain: the stages of a network from its input to its output. The outline has all positions of a stage's Jacobian,
# the bar those that are no guaranteed zeros. A residual block, which is no chain within, is one stage.
class Residual(nn.Module):
    """Adds a convolution's output to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return x + self.conv(x).relu()


model = nn.Sequential(convolution, nn.ReLU(), Residual(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))
jacsparse.chain(model, (3, 8, 8)).plot("chain.png")
