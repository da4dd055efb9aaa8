"""The forward pass of a stacked recurrent network as a two-level lower triangular system (Naumov, section 2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..spgemm import SparseJacobian
from .linearised_forward import LinearisedForward
from .recorded_systems import diagonal_block
from .recurrent_run import RecurrentRun, weight_block
from .systems import BlockTriangular


class RecurrentForward(LinearisedForward):
    """The pass of a stacked RNN of k layers over τ steps (Naumov, equations 23, 25, 27 and 29).

    Its rows are ``D z_{k,s} - W_k z_{k-1,s} - U_k z_{k,s-1} = b_k``, with ``D = y / f(y)`` from k = 1 on, where the
    paper's equation 27 has k = 2, and ``z_{0,s}`` the input. What the first states pass on is part of the first step's
    right-hand side. The groups are the steps, in order.

    Parameters
    ----------
    layer : RNN
        In one direction, and without dropout.
    x : Tensor, (time, batch, features), or (batch, time, features) where `batch_first`
        The input.
    hx : Tensor, (layers, batch, hidden), optional
        The first states.
    """

    axes = ("step", "sample", "element")

    def __init__(self, layer: nn.Module, x: torch.Tensor, hx: torch.Tensor | None = None) -> None:
        self.run = RecurrentRun(layer, x, hx)
        with torch.no_grad():
            zeros = x.new_zeros(self.run.layer.hidden_size)
            self._biases = [sum(weights[2:], start=zeros) for weights in self.run.weights]
            self.points = self._points(self.run.states)
        self.expected = self._shown(self.run.states[-1])

    def activated(self, place: int, y: torch.Tensor) -> torch.Tensor:
        return y.tanh() if self.run.layer.nonlinearity == "tanh" else y.relu()

    def system(self, scales: Sequence[torch.Tensor]) -> BlockTriangular:
        run, depth = self.run, self.run.layer.num_layers
        entering, recurrent = ([weight_block(weights[n]) for weights in run.weights] for n in (0, 1))
        blocks, right, inverse = dict[tuple[int, int], SparseJacobian](), list[torch.Tensor](), list[Any]()
        for step, x in enumerate(run.states[0]):
            right.append(x)
            inverse.append(None)
            for place in range(1, depth + 1):
                node, c = run.node(place, step), self._biases[place - 1].expand(len(x), -1)
                blocks[node, run.node(place - 1, step)] = entering[place - 1]
                if step:
                    blocks[node, run.node(place, step - 1)] = recurrent[place - 1]
                else:
                    c = c + recurrent[place - 1].jvp(run.first[place - 1])
                right.append(c)
                inverse.append(diagonal_block(scales[place - 1][step]))
        groups = [[run.node(place, step) for place in range(depth + 1)] for step in range(len(run.states[0]))]
        return BlockTriangular(blocks, right, inverse_diagonal=inverse, groups=groups)

    def points_of(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._points([self._states(values, place) for place in range(self.run.layer.num_layers + 1)])

    def output_of(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._shown(self._states(values, self.run.layer.num_layers))

    def _states(self, values: Sequence[torch.Tensor], place: int) -> torch.Tensor:
        """The states of a layer, from the values of the system's nodes."""
        return torch.stack([values[self.run.node(place, step)] for step in range(len(self.run.states[0]))])

    def _points(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``W_k z_{k-1,s} + U_k z_{k,s-1} + b_k`` of each layer, (time, batch, hidden)."""
        points = []
        for place, (weights, bias) in enumerate(zip(self.run.weights, self._biases, strict=True)):
            before = torch.cat([self.run.first[place][None], states[place + 1][:-1]])
            points.append((states[place] @ weights[0].T + before @ weights[1].T + bias).detach())
        return points

    def _shown(self, states: torch.Tensor) -> torch.Tensor:
        """States in the order of the layer's output."""
        return states.transpose(0, 1) if self.run.layer.batch_first else states
