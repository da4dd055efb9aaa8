"""
Bundle adjustment
=================

Where were the cameras, and where are the points that they see? Each residual depends on one camera and on one point.
Indexing tells which: the Jacobian is sparse without any annotation, and so are the normal equations.
"""

import matplotlib.pyplot as plt
import scipy.sparse
import torch

import jacsparse

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
camera = torch.arange(8).repeat(60)  # each of 8 cameras sees each of 60 points
point = torch.arange(60).repeat_interleave(8)


def project(cameras, points):
    """Where cameras, with three small angles, a translation and a focal length, see points: ``(observations, 2)``."""
    angles, shift, focal = cameras[camera].split([3, 3, 1], 1)
    x = points[point]
    turned = x + angles.roll(-1, 1) * x.roll(1, 1) - angles.roll(1, 1) * x.roll(-1, 1)
    seen = turned + shift
    return focal * seen[:, :2] / seen[:, 2:]


in_front = torch.tensor([0.0, 0, 0, 0, 0, 6, 500])
true_cameras = in_front + torch.randn(8, 7) * torch.tensor([0.1, 0.1, 0.1, 0.3, 0.3, 0.3, 20])
true_points = torch.randn(60, 3).clamp(-2, 2)
pixels = project(true_cameras, true_points) + 0.5 * torch.randn(480, 2)


def residuals(cameras, points):
    """What is to be small, in pixels."""
    return project(cameras, points) - pixels


# %%
# Levenberg and Marquardt: the normal equations, damped less where a step was good and more where it was not.
cameras = true_cameras + 0.02 * torch.randn(8, 7) * torch.tensor([1.0, 1, 1, 1, 1, 1, 250])
points = true_points + 0.05 * torch.randn(60, 3)
prepared = jacsparse.prepare_jacobian(residuals, cameras, points, argnums=(0, 1), value=True)
damping, costs = 1.0, [residuals(cameras, points).square().sum().item() / 2]
for _ in range(12):
    J, r = prepared(cameras, points)
    normal = J.gram()
    scale = jacsparse.SparseJacobian.from_scipy(scipy.sparse.diags_array(normal.diagonal()[:, 0].numpy()))
    step = (normal + damping * scale).solve(J.vjp(r.flatten()))
    new_cameras, new_points = cameras - step[:56].reshape(8, 7), points - step[56:].reshape(60, 3)
    cost = residuals(new_cameras, new_points).square().sum().item() / 2
    damping = damping / 10 if cost < costs[-1] else damping * 10
    if cost < costs[-1]:
        cameras, points = new_cameras, new_points
        costs.append(cost)
print(", ".join(f"{cost:,.1f}" for cost in costs))

# %%
# The normal equations' pattern is the well-known arrow: a block for each camera, a block for each point, and what
# joins them.
J.gram().pattern.plot("normal.png", title="JᵀJ")

# %%
# Half a pixel of noise is left in each of 960 numbers, less one for each unknown.
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.semilogy(costs, "o-")
axes.axhline(0.5 * 0.5**2 * (960 - 236), color="black", linestyle="--", label="expected of the noise alone")
axes.set(xlabel="accepted step", ylabel="cost")
axes.legend()
figure.savefig("cost.png", dpi=150)
