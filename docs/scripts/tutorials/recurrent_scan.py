"""
Training a GRU by scan
======================

You will put this library's GRU in the place of `torch.nn.GRU`, train it, and ask it to go backward by a parallel scan.
The task is the thesis': to tell from a stream of bits how often it is one.
"""

import time

import torch
from jacsparse.models import bitstreams
from torch import nn
from torch.nn import functional

import jacsparse

torch.manual_seed(0)
data = bitstreams(100, train=640, test=160)
streams, labels = data.train_inputs.float().permute(2, 0, 1) - 0.5, data.train_labels
print(streams.shape)


class Classifier(nn.Module):
    """A GRU, and a linear layer on its last state."""

    def __init__(self, gru):
        super().__init__()
        self.gru, self.head = gru, nn.Linear(20, 10)

    def forward(self, x):
        _, last = self.gru(x)
        return self.head(last[0])


# %%
# The layer takes `torch.nn.GRU`'s arguments, and its weights have the same names:
theirs = Classifier(nn.GRU(1, 20))
ours = Classifier(jacsparse.nn.GRU(1, 20))
print(ours.load_state_dict(theirs.state_dict()))

# %%
# Outputs and gradients agree with PyTorch's within rounding:
for model in (theirs, ours):
    functional.cross_entropy(model(streams), labels).backward()
for (name, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
    print(name, f"{(p.grad - q.grad).abs().max().item():.0e}")

# %%
# ``reports`` says how the states and their gradients were computed, and why:
for report in ours.gru.reports:
    print(report.recurrence, report.methods, report.reason)

# %%
# By scan
# -------
# States are gone through step after step: each needs the one before it. Their gradients are a *linear* recurrence,
# which any associative order solves: by chunks side by side, or by the modified Blelloch scan of the thesis.
# ``schedule=`` asks for one of them.
streams_alone = streams[:, :4]
for schedule in ("auto", "chunked:50", "blelloch:2"):
    model = Classifier(jacsparse.nn.GRU(1, 20, schedule=schedule))
    model.load_state_dict(theirs.state_dict())
    for _ in range(2):  # the first pass compiles and plans
        model.zero_grad()
        loss = functional.cross_entropy(model(streams_alone), labels[:4])
        begin = time.perf_counter()
        loss.backward()
        took = time.perf_counter() - begin
    norm = model.gru.weight_hh_l0.grad.norm().item()
    print(f"{schedule}: {model.gru.reports[1].methods}, norm of a gradient {norm:.6f}, {1e3 * took:.1f} ms")

# %%
# All give the same gradient. The times are of one pass, on the machine that built this page. On few cores a batch of
# any size keeps them busy, and ``auto`` goes step after step. A scan pays where many workers would wait: on a GPU, or
# across processes. Which schedule is for what is on :doc:`/how-to/choose-a-schedule`, and measured break-evens are on
# :doc:`/which-one`.
#
# Train
# -----
# An ordinary loop:
optimizer = torch.optim.Adam(ours.parameters(), lr=0.03)
for epoch in range(6):
    for part in torch.randperm(640).split(32):
        optimizer.zero_grad()
        loss = functional.cross_entropy(ours(streams[:, part]), labels[part])
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = (ours(streams).argmax(1) == labels).float().mean().item()
    print(epoch, f"{right:.2f}")

# %%
# A model that exists already is converted in place, and back:
model = jacsparse.nn.convert(nn.Sequential(nn.GRU(1, 20)))
print(model)
print(jacsparse.nn.convert(model, to="torch"))
