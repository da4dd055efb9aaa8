"""
Power flow
==========

Which voltages does a grid settle at, for the power that its buses feed in and take out? Each bus depends on itself and
on the buses that a line joins it to: the pattern of the Jacobian is the map of the grid.
"""

import matplotlib.pyplot as plt
import torch

import jacsparse

torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
side = 11  # buses stand on a square, somewhat out of line, each joined to its neighbours
buses = side**2
number = torch.arange(buses).view(side, side)
start = torch.cat([number[1:].flatten(), number[:, 1:].flatten()])
end = torch.cat([number[:-1].flatten(), number[:, :-1].flatten()])
places = torch.cartesian_prod(torch.arange(side), torch.arange(side)) + 0.5 * torch.rand(buses, 2)
length = (places[start] - places[end]).norm(dim=1)
conductance, susceptance = 1 / length, -4 / length
feeds = torch.zeros(buses).index_fill(0, torch.arange(3, buses, 9), 0.25)
loads = 0.02 + 0.02 * torch.rand(buses)
active, reactive = feeds - loads, 0.3 * (feeds - loads)


def mismatch(state):
    """What is missing to Kirchhoff's laws at all buses but the first, which holds its voltage."""
    angle, voltage = torch.cat([torch.zeros(2, 1), state.view(2, -1)], 1)
    voltage = 1 + voltage
    flows = []
    for here, there in ((start, end), (end, start)):
        difference, product = angle[here] - angle[there], voltage[here] * voltage[there]
        cos, sin = difference.cos(), difference.sin()
        p = conductance * voltage[here] ** 2 - product * (conductance * cos + susceptance * sin)
        q = -susceptance * voltage[here] ** 2 - product * (conductance * sin - susceptance * cos)
        flows.append(torch.zeros(2, buses).index_add(1, here, torch.stack([p, q])))
    return (flows[0] + flows[1] - torch.stack([active, reactive]))[:, 1:].flatten()


# %%
# Newton's method from a flat start, as the programs of grid operators do it:
state = torch.zeros(2 * (buses - 1))
prepared = jacsparse.prepare_jacobian(mismatch, state, value=True)
for iteration in range(6):
    J, f = prepared(state)
    print(iteration, f"{f.abs().max().item():.1e}")
    state = state - J.solve(f)
J.pattern.plot("pattern.png", title="power flow")

# %%
# The voltages that come out, and the lines that carry the current:
voltage = torch.cat([torch.ones(1), 1 + state[buses - 1 :]])
figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
axes.plot(places[:, 0][torch.stack([start, end])], places[:, 1][torch.stack([start, end])], color="gray", linewidth=0.8)
dots = axes.scatter(*places.T, c=voltage, cmap="viridis", s=45, zorder=2)
axes.set(xticks=[], yticks=[], title="voltage, where the first bus has 1")
figure.colorbar(dots)
figure.savefig("voltages.png", dpi=150)

# sphinx_gallery_thumbnail_number = 2
