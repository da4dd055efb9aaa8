"""
A loop of your own, backward by a scan
======================================

A recurrence that is written as a loop goes back step after step, as long as it is. ``jacsparse.nn.Scan`` finds the
loop, computes the matrices of all steps at once, and composes them in an order that workers can share.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import jacsparse


class Oscillator(nn.Module):
    """A chain of states, each a turn and a nonlinear pull of the one before."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Linear(4, 4)

    def forward(self, x):
        state, states = x[:, 0], []
        for t in range(x.shape[1]):
            state = 0.9 * state + 0.3 * torch.tanh(self.turn(state) + x[:, t])
            states.append(state)
        return torch.stack(states, 1)


# %%
# Gradients are autograd's within rounding, by each schedule, and ``reports`` says what has run:
torch.manual_seed(0)
model, x = Oscillator().double(), torch.randn(2, 256, 4, dtype=torch.float64, requires_grad=True)
(expected,) = torch.autograd.grad(model(x)[:, -1].sum(), x)
for schedule in ("linear", "blelloch", "chunked:32"):
    scan = jacsparse.nn.Scan(model, schedule=schedule)
    (gradient,) = torch.autograd.grad(scan(x)[:, -1].sum(), x)
    print(schedule, f"{(gradient - expected).abs().max().item():.0e}", [report.methods for report in scan.reports])

# %%
# What the last state owes to each step of the input: the farther back, the less.
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
axes.semilogy(expected[0].norm(dim=1), color="gray", linewidth=3, label="autograd, step after step")
axes.semilogy(gradient[0].norm(dim=1), "--", label="by scan, chunks of 32 steps")
axes.set(xlabel="step", ylabel="norm of the gradient")
axes.legend()
figure.savefig("gradients.png", dpi=150)
