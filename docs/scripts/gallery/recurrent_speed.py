"""
Recurrent layers by length
==========================

Seconds of a training step of one GRU layer, forward and backward, by PyTorch and by this library, which has the same
arguments, weights and outputs. Both on the machine that built this page; :doc:`/which-one` has figures of several.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.benchmark import Timer

import jacsparse

lengths = (10, 30, 100, 300, 1000)


def seconds(layer, length):
    """The least time of a step, of those that half a second lets in."""
    names = {"layer": layer, "x": torch.randn(length, 16, 8)}
    timer = Timer("layer(x)[0].sum().backward()", globals=names)
    return min(timer.blocked_autorange(min_run_time=0.5).times)


torch.manual_seed(0)
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for label, layer in (("torch.nn.GRU", nn.GRU(8, 20)), ("jacsparse.nn.GRU", jacsparse.nn.GRU(8, 20))):
    axes.loglog(lengths, [seconds(layer, length) for length in lengths], "o-", label=label)
axes.set(xlabel="steps", ylabel="seconds", title="batch 16, 20 units, one thread")
axes.grid(alpha=0.25)
axes.legend()
figure.savefig("speed.png", dpi=150)
