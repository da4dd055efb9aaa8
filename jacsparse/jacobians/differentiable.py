"""Values with gradients: products of the function with the seeds of all colours, by autograd of the function itself.

Forward mode is backward mode twice: ``u -> Jᵀ u`` is linear, and its product with ``v`` is ``J v``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..patterns import Pattern
from ..spgemm import SparseJacobian
from ..stages import all_finite
from ..tracing import undisturbed, without_autocast
from .arguments import Arguments, FlatFunction
from .compressed import Coloring, coloring, coloring_of_rows, seeds


def with_graph(
    f: Callable[..., Any], arguments: Arguments, jacobian: SparseJacobian, entries: Pattern
) -> SparseJacobian:
    """A function's Jacobian at these arguments with gradients of its values; `entries` has the pruned ones too."""
    if not jacobian.pattern.nnz:
        return jacobian
    function = FlatFunction(f, arguments)
    with torch.enable_grad(), undisturbed(function):
        x = arguments.flat_with_graph()
        y = function(x)
        if not y.requires_grad:
            return jacobian
        places = np.searchsorted(entries.places, jacobian.pattern.places)
        values = _values(y, x, coloring(entries), places)
        if not all_finite(values.detach()):
            # The derivative of a masking backward pass by its gradient multiplies.
            values = _values(y, x, coloring_of_rows(entries), places)
        return SparseJacobian(jacobian.pattern, values[:, : jacobian.batch])


def _values(y: torch.Tensor, x: torch.Tensor, colors: Coloring, places: np.ndarray) -> torch.Tensor:
    """The values of some entries, ``(entries, batch)``, by the products with the seeds of a colouring."""
    forward, backward = (torch.from_numpy(seed).to(x) for seed in seeds(colors))
    with without_autocast(x.device):
        products = [_forward_products(y, x, forward), _products(y, x, backward)]
    together = torch.cat([product.permute(0, 2, 1).reshape(-1, len(x)) for product in products])
    return together.index_select(0, torch.from_numpy(colors.places[places]).to(x.device))


def _products(y: torch.Tensor, x: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """The products of seeds with the Jacobian of `y` by `x`, ``(seeds, batch, columns)``."""
    if not len(seeds):
        return x.new_empty((0, *x.shape))
    # PyTorch's transforms would do all at once, no faster, and not for all operators.
    gradients = (seed.expand(len(y), -1) for seed in seeds)
    return torch.stack([torch.autograd.grad(y, x, g, create_graph=True, materialize_grads=True)[0] for g in gradients])


def _forward_products(y: torch.Tensor, x: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """The products of the Jacobian of `y` by `x` with seeds, ``(seeds, batch, rows)``."""
    if not len(seeds):
        return y.new_empty((0, *y.shape))
    # Any `u` would do. That of logcumsumexp takes logarithms of it.
    u = torch.ones_like(y).requires_grad_()
    (pulled_back,) = torch.autograd.grad(y, x, u, create_graph=True, materialize_grads=True)
    if not pulled_back.requires_grad:
        return y.new_zeros((len(seeds), *y.shape))
    return _products(pulled_back, u, seeds)
