"""
Schedules: which products, in which order
=========================================

Back-propagation through several stages computes ``∇x_{i-1} = J_iᵀ ∇x_i``, one product after the other. A schedule is
an order of these products in which some of them can run at the same time.
"""

from jacsparse import schedule

# %%
# Plain back-propagation has only products of a matrix and a vector, and one of them at a time.
schedule.linear(8).plot("linear.png")

# %%
# The modified Blelloch scan (Algorithm 1 of the thesis) goes up, multiplying neighbours, and down, where gradients
# meet these products. All bars of a line can run at the same time. Blue bars, products of two matrices, are the price.
schedule.blelloch(8).plot("blelloch.png")

# %%
# With few levels, a linear middle goes over what the up-sweep has multiplied: the 21 stages of VGG-11's convolutional
# part with two levels, as in the thesis' section 5.3. The dashed product is computed by the algorithm as printed, and
# read by nobody; the library marks such steps as dead and does not run them.
schedule.blelloch(21, levels=2).plot("two_levels.png")

# %%
# Cyclic reduction has fewer rounds, and more work.
schedule.cyclic_reduction(8).plot("cyclic_reduction.png")

# %%
# Steps and work can be counted without a picture:
for one in (schedule.linear(8), schedule.blelloch(8), schedule.cyclic_reduction(8)):
    print(one.name, one.complexity(workers=8))
