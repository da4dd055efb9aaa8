"""
A discretised equation and its pattern
======================================

The equation of Allen and Cahn separates a mixture into two phases. On a grid, the change of each point depends on the
point and on its four neighbours: five entries in a row of 4,096.
"""

import matplotlib.pyplot as plt
import torch

import jacsparse

n, width, step = 64, 0.02, 0.5


def change(u):
    """The time derivative on a periodic square of n × n points."""
    neighbours = u.roll(1, 0) + u.roll(-1, 0) + u.roll(1, 1) + u.roll(-1, 1)
    return width**2 * n**2 * (neighbours - 4 * u) + u - u**3


# %%
# The Jacobian is exact, and nobody has written its pattern down: the operators tell it. The lines apart from the
# diagonal are the neighbours above and below; where the square closes, they are in the corners.
torch.manual_seed(0)
u = 0.1 * torch.randn(n, n, dtype=torch.float64)
prepared = jacsparse.prepare_jacobian(change, u, value=True)
J, _ = prepared(u)
J.pattern.plot("pattern.png", title="Allen and Cahn")
print(repr(J))

# %%
# A step of a linearly implicit method solves one sparse system, and may be far longer than an explicit one, which ends
# in overflow beyond a step of 0.15.
identity = jacsparse.SparseJacobian.identity(n * n, dtype=u.dtype)
figure, axes = plt.subplots(1, 3, figsize=(8, 2.9), layout="constrained")
for number in range(61):
    if number in (0, 10, 60):
        panel = axes[(0, 10, 60).index(number)]
        panel.imshow(u, cmap="RdBu", vmin=-1, vmax=1)
        panel.set(title=f"time {number * step:g}", xticks=[], yticks=[])
    J, f = prepared(u)
    u = u + step * (identity - step * J).solve(f.flatten()).reshape(n, n)
figure.savefig("phases.png", dpi=150)

# sphinx_gallery_thumbnail_number = 2
