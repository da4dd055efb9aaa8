"""
Ways of parallel training
=========================

Time and memory of an iteration over the number of workers, for each way of training in parallel: here of sixteen equal
layers, at a rate of 10⁹ FLOP a second and with ten microseconds for a message.
"""

import torch
from torch import nn

import jacsparse

layers = nn.Sequential(*[part for _ in range(16) for part in (nn.Linear(64, 64), nn.Tanh())])
simulation = jacsparse.simulation.simulate(layers, torch.randn(16, 64), rate=1e9, latency=1e-5)
simulation.plot("simulation.png")

# %%
# From how many workers on is which way the fastest, of those whose gradients are exact?
for workers, method in simulation.fastest_exact:
    print(f"{workers:>9,} workers: {method}")
