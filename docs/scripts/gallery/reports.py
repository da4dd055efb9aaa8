"""
Reports of FLOP and of parallel training
========================================

A report answers how much a training step computes, and a simulation how long an iteration would take on many workers.
Both are explained, column by column, in :doc:`/how-to/read-a-flop-report`.
"""

import torch
from jacsparse.models import build, prune_weights
from torch import nn

import jacsparse

# %%
# The thesis' Figure 5.5 for a pruned LeNet-5: each point is a step of the scan, or one of back-propagation's gradient
# operators. Steps on the critical path are filled.
torch.manual_seed(0)
model = build("lenet5")
prune_weights(model, 0.9)
report = jacsparse.count_flop(model, (3, 32, 32), schedule="blelloch:2")
report.plot("flop.png")
print(report.summary())

# %%
# Time and memory of an iteration over the number of workers, for each way of training in parallel: here of sixteen
# equal layers, at a rate of 10⁹ FLOP a second and without latency.
layers = nn.Sequential(*[part for _ in range(16) for part in (nn.Linear(8, 8), nn.Tanh())])
simulation = jacsparse.simulation.simulate(layers, torch.randn(16, 8), rate=1e9, latency=0.0)
simulation.plot("simulation.png")
