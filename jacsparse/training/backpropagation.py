"""Plain training, in the same shape as the others."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .delayed_gradients import Loss
from .delayed_part import OptimizerFactory


class Backpropagation:
    """Trains a module by the gradients that autograd computes, or that modules of `jacsparse.nn` do.

    Parameters
    ----------
    model : Module
        The model, as `jacsparse.nn.Scan` around one.
    optimizer, loss
        As of `DelayedGradients`.

    Examples
    --------
    >>> import functools
    >>> trainer = Backpropagation(nn.Linear(3, 2), optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    >>> trainer.step(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)).shape
    torch.Size([])
    """

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory, loss: Loss = functional.cross_entropy) -> None:
        self.model, self.loss = model, loss
        self.optimizers = [optimizer(model.parameters())]

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Train on a batch; return its loss, detached."""
        (optimizer,) = self.optimizers
        optimizer.zero_grad()
        loss = self.loss(self.model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def synchronize(self) -> None:
        """All weights are in this process."""

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's state; the model's weights are apart."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(copy.deepcopy(values))
