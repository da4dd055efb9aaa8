"""
The Hessian of an optimal control
=================================

Which torque swings a pendulum up with the least effort? On a grid of times, this is a minimum under equations, and its
Lagrangian's Hessian is a band: each time meets its neighbours only. Newton's method factors it at each step.
"""

import matplotlib.pyplot as plt
import torch

import jacsparse

torch.set_default_dtype(torch.float64)
steps, duration = 100, 3.0
h = duration / steps


def lagrangian(w):
    """Effort, and multipliers times what is missing to the equations of motion: by time, angle, speed, torque, both."""
    angle, speed, torque, first, second = w.T
    middle = lambda x: (x[1:] + x[:-1]) / 2  # noqa: E731
    motion = torch.diff(angle) - h * middle(speed)
    force = torch.diff(speed) - h * (middle(torque) - 5 * middle(angle).sin())
    ends = first[-1] * angle[0] + second[-1] * speed[0] + 1e3 * ((angle[-1] - torch.pi) ** 2 + speed[-1] ** 2)
    return h * torque.square().sum() / 2 + (first[:-1] * motion + second[:-1] * force).sum() + ends


# %%
# The unknowns are ordered by time, so that the matrix is narrow:
w = torch.zeros(steps + 1, 5)
w[:, 0] = torch.linspace(0, torch.pi, steps + 1)
hessian = jacsparse.prepare_hessian(lagrangian, w)
print(repr(hessian(w)))
hessian(w).pattern.plot("hessian.png", title="Lagrangian")

# %%
# Where all derivatives vanish, the motion obeys the equations and the effort is least:
gradient = torch.func.grad(lagrangian)
for number in range(30):
    g = gradient(w)
    print(number, f"{g.norm().item():.1e}")
    if g.norm() < 1e-9:
        break
    w = w - hessian(w).solve(g.flatten()).reshape(w.shape)

# %%
figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
time = torch.linspace(0, duration, steps + 1)
for column, label in enumerate(("angle", "speed", "torque")):
    axes.plot(time, w[:, column], label=label)
axes.axhline(torch.pi, color="black", linestyle=":", label="upright")
axes.set(xlabel="time")
axes.legend(ncols=4, loc="lower left")
figure.savefig("swing.png", dpi=150)

# sphinx_gallery_thumbnail_number = 2
