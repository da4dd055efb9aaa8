"""
A sparse Jacobian, and what to do with it
=========================================

You will take the Jacobian of a network and of a function, see what its zeros save, and then solve a system of equations
by Newton's method and a least-squares problem by Gauss and Newton's. No knowledge of sparse matrices is needed, some of
PyTorch is.

Of a network
------------
A Jacobian ``J`` has a row for each element of the output and a column for each of the input: ``J[i, j] = ∂y_i/∂x_j``. A
convolution's output reads nine pixels of each channel around it, so that nearly all of the matrix is zero.
"""

import time

import torch
from torch import nn

import jacsparse

torch.manual_seed(0)
convolution = nn.Conv2d(3, 8, 3, padding=1)
images = torch.randn(4, 3, 16, 16)
J = jacsparse.jacobian(convolution, images)
J

# %%
# 2048 × 768 positions, of which 3.2 % are stored. The pattern, that is where they are, follows from the shapes alone.
# The pattern of the whole layer can be had without a number:
jacsparse.jacobian_pattern(convolution, (3, 16, 16)).plot("convolution.png", title="convolution")

# %%
# A module works on samples along its first axis, and so does its Jacobian. ``vjp`` multiplies by the transposed
# matrix, as back-propagation does, and ``jvp`` by the matrix itself. Vectors have the shape of the output or of the
# input:
gradient = torch.randn(4, 8, 16, 16)
ours = J.vjp(gradient)
x = images.clone().requires_grad_()
convolution(x).backward(gradient)
print(ours.shape, (ours - x.grad).abs().max().item() < 1e-5)

# %%
# Several layers are one Jacobian too. This one multiplies the layers' matrices by plans that are made once, and found
# again at the next call.
model = nn.Sequential(convolution, nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3, padding=1))
print(repr(jacsparse.jacobian(model, images)))
print(jacsparse.verify(model, images[:1]))

# %%
# Of a function: Newton's method
# ------------------------------
# A function works on its arguments as they are, as in ``torch.func``. Here is a chain of a thousand points, each
# pulled by its neighbours and by a cubic spring; at rest, all forces are zero.


def forces(u, load):
    """The force on each point."""
    ends = torch.zeros(1, dtype=u.dtype)
    padded = torch.cat([ends, u, ends])
    return padded[2:] - 2 * u + padded[:-2] - u**3 + load


u = torch.ones(1000, dtype=torch.float64)
jacsparse.jacobian(forces, u, 0.1)

# %%
# Each row has at most three entries. Newton's method needs this Jacobian at every step: ``prepare_jacobian`` decides
# once all that shapes decide, and each call only moves numbers. ``value=True`` returns the function's value of the
# same run. ``solve`` factors the sparse matrix.
prepared = jacsparse.prepare_jacobian(forces, u, 0.1, value=True)
for step in range(12):
    J, f = prepared(u, 0.1)
    print(step, f"{f.norm().item():.1e}")
    if f.norm() < 1e-12:
        break
    u = u - J.solve(f)

# %%
# The number of right digits doubles in each of the last steps, as Newton's method promises where the Jacobian is
# exact.
#
# A prepared Jacobian holds the function as it was when it was prepared; ``check`` compares it with the function
# itself.
print(prepared.check(u, 0.1) < 1e-12)

# %%
# What do the zeros save? ``torch.func.jacrev`` fills all of a million positions, and a dense solver goes through them:


def milliseconds(step):
    """The least time of ten runs."""
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - begin))
    return min(times)


dense = torch.func.jacrev(forces)
print(f"dense {milliseconds(lambda: torch.linalg.solve(dense(u, 0.1), forces(u, 0.1))):.1f} ms a step")
print(f"sparse {milliseconds(lambda: prepared(u, 0.1)[0].solve(forces(u, 0.1))):.2f} ms a step")

# %%
# Least squares: Gauss and Newton's method
# ----------------------------------------
# A curve of 200 values is to be smooth and near to noisy measurements. The residuals are differences to the
# measurements and, with a weight, second differences; a robust loss makes the problem nonlinear.
t = torch.linspace(0, 6.28, 200, dtype=torch.float64)
measured = t.sin() + 0.2 * torch.randn(200, dtype=torch.float64)


def residuals(curve):
    """What is to be small."""
    bent = 10 * (curve[2:] - 2 * curve[1:-1] + curve[:-2])
    return torch.cat([torch.asinh(curve - measured), bent])


curve = measured.clone()
prepared = jacsparse.prepare_jacobian(residuals, curve, value=True)
identity = jacsparse.SparseJacobian.identity(200, dtype=curve.dtype)
for step in range(5):
    J, r = prepared(curve)
    print(step, f"{0.5 * r.square().sum().item():.4f}")
    normal = J.gram() + 1e-9 * identity  # JᵀJ, exactly symmetric, with five diagonals
    curve = curve - normal.solve(J.vjp(r))
print(repr(normal))
print(f"error {(measured - t.sin()).norm().item():.2f} before, {(curve - t.sin()).norm().item():.2f} after")

# %%
# Where to go from here
# ---------------------
# - :doc:`/how-to/stiff-equations` gives such a Jacobian to SciPy.
# - :doc:`/how-to/add-a-rule` is for an operator that is refused.
# - :doc:`/which-one` says when a dense Jacobian, or another library, is the better choice.
# - `jacsparse.jacobian`, `jacsparse.prepare_jacobian` and `jacsparse.SparseJacobian` say all that they take.
