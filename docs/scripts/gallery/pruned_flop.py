"""
FLOP of training a pruned network
=================================

How much does a training step compute, by back-propagation and by scan? The report has every step and every layer;
:doc:`/how-to/read-a-flop-report` explains its columns.
"""

import torch
from jacsparse.models import build, prune_weights

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
