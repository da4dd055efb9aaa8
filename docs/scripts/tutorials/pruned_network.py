"""
A pruned network: its FLOP, retraining and serving
==================================================

You will train a small network, prune nine tenths of its weights, count what that saves, retrain it at the cost of the
weights that are left, and serve it. The data are scikit-learn's handwritten digits.
"""

import time

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
train, test = slice(0, 1437), slice(1437, None)

model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10),
)  # fmt: skip


def fit(network, epochs, lr=0.05):
    """An ordinary training loop."""
    optimizer = torch.optim.SGD(network.parameters(), lr=lr, momentum=0.9, fused=True)
    for _ in range(epochs):
        for part in torch.randperm(1437).split(64):
            optimizer.zero_grad()
            functional.cross_entropy(network(images[train][part]), labels[train][part]).backward()
            optimizer.step()


def accuracy(network):
    """The share of right answers."""
    with torch.no_grad():
        return (network(images[test]).argmax(1) == labels[test]).float().mean().item()


fit(model, epochs=4)
print(f"dense: {accuracy(model):.3f}")

# %%
# Prune
# -----
# ``torch.nn.utils.prune`` puts a mask beside each weight. jacsparse knows these masks, and takes what they prune as
# zero for certain.
layers = [(part, "weight") for part in model if isinstance(part, nn.Conv2d | nn.Linear)]
prune.global_unstructured(layers, prune.L1Unstructured, amount=0.9)
print(f"pruned, not retrained: {accuracy(model):.3f}")

# %%
# Count
# -----
# How many floating-point operations does a training step take, for one sample? ``count_flop`` says it for dense
# kernels, as PyTorch runs them, and without the pruned weights.
report = jacsparse.count_flop(model, (1, 8, 8), schedule="linear")
print(report.summary())

# %%
# Which layers? Each record has a layer's name, the share of its weights that are zero, and the FLOP of a step, dense
# and without pruned weights.
for layer in report.layers:
    print(layer["layer"], f"{layer['sparsity']:.2f}", f"{layer['dense_step']:,.0f}", f"{layer['pruned_step']:,.0f}")

# %%
# The columns are explained in :doc:`/how-to/read-a-flop-report`.
#
# Retrain
# -------
# A mask alone saves no time: PyTorch multiplies its zeros. ``sparsify`` makes a copy whose pruned layers have only the
# weights that are left, as parameters. It measures each layer on a batch, and keeps dense what is faster dense.
batch = images[train][:64]
sparse = jacsparse.sparsify(model, batch)
print(sparse.report())

# %%
# The loop stays what it is:
fit(sparse, epochs=4, lr=0.02)
print(f"retrained: {accuracy(sparse):.3f}")

# %%
# A pruned weight cannot come back, for it is no parameter. The masked model takes the weights:
print(model.load_state_dict(sparse.state_dict()))
print(f"the masked model with these weights: {accuracy(model):.3f}")

# %%
# Serve
# -----
# ``densify(..., masks=False)`` gives plain layers with zeros, whose weights any PyTorch program can load. For requests
# of one image, sparsify again with a batch of that size: what pays depends on it.
plain = jacsparse.densify(sparse, masks=False).eval()
served = jacsparse.sparsify(plain, images[:1], training=False)
with torch.inference_mode():
    same = torch.allclose(served(images[:1]), plain(images[:1]), atol=1e-5)
print(same, sorted(plain.state_dict())[:2])

# %%
# Did it pay? On this machine, in this run, for one image:


def seconds(network):
    """The least time of a forward pass."""
    times = []
    with torch.inference_mode():
        for _ in range(200):
            begin = time.perf_counter()
            network(images[:1])
            times.append(time.perf_counter() - begin)
    return min(times)


print(f"dense {1e6 * seconds(plain):.0f} µs, as sparsify chose {1e6 * seconds(served):.0f} µs")

# %%
# A network as small as this one is bound by calls, not by FLOP; layers of hundreds of channels are where zeros pay.
# What holds when is on :doc:`/which-one`.
