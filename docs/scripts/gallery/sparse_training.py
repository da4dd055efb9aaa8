"""
Retraining a pruned network
===========================

A mask alone saves no time, for PyTorch multiplies its zeros. A model of ``sparsify`` has only the weights that are
left: the same loop, at their cost.
"""

import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

import jacsparse

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
masked = nn.Sequential(
    nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(),
    nn.MaxPool2d(2), nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 10),
)  # fmt: skip


def train(model, iterations):
    """Loss on the test images over seconds of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    functional.cross_entropy(model(images[:64]), labels[:64]).backward()  # the first call compiles
    seconds, losses = 0.0, []
    for part in torch.arange(1437).repeat(2).split(64)[:iterations]:
        begin = time.perf_counter()
        optimizer.zero_grad()
        functional.cross_entropy(model(images[part]), labels[part]).backward()
        optimizer.step()
        seconds += time.perf_counter() - begin
        with torch.no_grad():
            losses.append((seconds, functional.cross_entropy(model(images[-100:]), labels[-100:]).item()))
    return losses


# %%
# Train, prune, and make the sparse model. With ``measure=True``, the default, each layer runs the faster way.
train(masked, 30)
for part in masked[2], masked[5], masked[8]:
    prune.l1_unstructured(part, "weight", 0.97)
sparse = jacsparse.sparsify(masked, images[:64], measure=False)
print(sparse.report())

# %%
# Both start from the same weights, see the same batches, and take the same steps within rounding.
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for label, model in (("masks, by PyTorch", masked), ("sparsify", sparse)):
    axes.plot(*zip(*train(model, 30), strict=True), label=label)
axes.set(xlabel="seconds of training, where this page was built", ylabel="loss on test images")
axes.legend()
figure.savefig("training.png", dpi=150)
