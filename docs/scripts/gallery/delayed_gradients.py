"""
Delayed gradients
=================

A network in K modules, each of which goes backward with the gradient of an earlier batch, so that none waits for
another (Huo et al., 2018). What does the delay cost?
"""

import copy
import functools

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import jacsparse

torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
net = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(64, 64), nn.Tanh())], nn.Linear(64, 10))
batches = [part for _ in range(8) for part in torch.randperm(1437).split(64)]

# %%
# The same weights and batches for each K; with one module, delayed gradients are back-propagation.
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
optimizer = functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9)
for modules in (1, 2, 4):
    trainer = jacsparse.training.DelayedGradients(copy.deepcopy(net), modules=modules, optimizer=optimizer)
    losses = torch.tensor([float(trainer.step(images[part], labels[part])) for part in batches])
    smooth = losses.unfold(0, 23, 23).mean(1)  # an epoch has 23 batches
    axes.semilogy(range(1, len(smooth) + 1), smooth, "o-", markersize=3, label=f"K = {modules}")
axes.set(xlabel="epoch", ylabel="training loss")
axes.legend()
figure.savefig("losses.png", dpi=150)
