"""A module's back-propagation as a triangular system: of a chain of stages, and of a stacked recurrent network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..runtime import a_type
from ..spgemm import SparseJacobian
from ..stages import check_input, forward_pass
from ..tracing import check_module, without_autocast
from .recorded_systems import ChainSystem, GraphSystem, diagonal_block
from .recurrent_run import RecurrentRun, check_like, weight_block
from .solver import Solution
from .systems import BlockTriangular


class Propagation(ABC):
    """A module's back-propagation as a system, and what its solution is the gradients of."""

    system: BlockTriangular

    @abstractmethod
    def gradients(self, solution: Solution) -> dict[str, torch.Tensor]:
        """The gradients of the input, by the name ``input``, of an RNN's first states, by ``hx``, and of parameters.

        Parameters have the names of ``named_parameters``: a tied one has the first of its names, and a pruned or
        parametrised weight is there by the parameters that it is computed from. Frozen and unused ones have none.
        """


class ModulePropagation(Propagation):
    """Back-propagation of a module, as a chain of stages, or as a graph of its operators."""

    def __init__(self, module: nn.Module, x: torch.Tensor, gradient: torch.Tensor, graph: bool) -> None:
        check_input("x", x)
        self.module = module
        chain, self.run = forward_pass(check_module(module), x)
        if not len(chain):
            raise ValueError(f"{type(module).__name__} has no stages; a system needs an operator that does something")
        check_like("gradient", gradient, self.run.trace.output.shape, self.run.trace.output)
        with without_autocast(x.device):
            self.recorded = (GraphSystem if graph else ChainSystem)(self.run.records, gradient.detach())
        self.system = self.recorded.system

    def gradients(self, solution: Solution) -> dict[str, torch.Tensor]:
        places = {id(tensor): place for place, tensor in enumerate(self.run.trace.externals)}
        names = {name: places[id(p)] for name, p in self.module.named_parameters() if id(p) in places}
        gradients = self.recorded.external_gradients(solution.values, names.values())
        x = self.run.records[0].input
        return {
            "input": solution.values[0].reshape(x.shape),
            **{name: gradients[place] for name, place in names.items() if place in gradients},
        }


class RecurrentPropagation(Propagation):
    """Back-propagation of a stacked RNN of k layers over τ steps: a two-level system (Naumov, equations 22 to 29).

    Its nodes are those of `RecurrentRun`, and its groups the steps, the last one first.

    Parameters
    ----------
    layer : RNN
        In one direction, and without dropout.
    x : Tensor, (time, batch, features), or (batch, time, features) where `batch_first`
        The input.
    gradient : Tensor
        Of the output.
    last : Tensor, (layers, batch, hidden), optional
        The gradient of the last states.
    hx : Tensor, (layers, batch, hidden), optional
        The first states.
    """

    def __init__(
        self,
        layer: nn.RNN,
        x: torch.Tensor,
        gradient: torch.Tensor,
        last: torch.Tensor | None = None,
        hx: torch.Tensor | None = None,
    ) -> None:
        self.run = RecurrentRun(layer, x, hx)
        check_like("gradient", gradient, (*x.shape[:2], layer.hidden_size), x)
        if last is not None:
            check_like("last", last, self.run.first.shape, x)
        if layer.batch_first:
            gradient = gradient.transpose(0, 1)
        self._recurrent = [weight_block(weights[1].T) for weights in self.run.weights]
        self.system = self._system(gradient.detach(), None if last is None else last.detach())

    def _system(self, gradient: torch.Tensor, last: torch.Tensor | None) -> BlockTriangular:
        layer, node_of, time = self.run.layer, self.run.node, len(gradient)
        depth = layer.num_layers
        entering = [weight_block(weights[0].T) for weights in self.run.weights]
        blocks, right, inverse = dict[tuple[int, int], SparseJacobian](), list[torch.Tensor](), list[Any]()
        for step in range(time):
            for place, states in enumerate(self.run.states):
                node, h = node_of(place, step), states[step]
                if place < depth:
                    blocks[node, node_of(place + 1, step)] = entering[place]
                if place and step + 1 < time:
                    blocks[node, node_of(place, step + 1)] = self._recurrent[place - 1]
                c = gradient[step] if place == depth else torch.zeros_like(h)
                if place and last is not None and step == time - 1:
                    c = c + last[place - 1]
                right.append(c)
                derivative = 1 - h.square() if layer.nonlinearity == "tanh" else (h > 0).to(h.dtype)
                inverse.append(diagonal_block(derivative) if place else None)
        groups = [[node_of(place, step) for place in range(depth, -1, -1)] for step in range(time - 1, -1, -1)]
        return BlockTriangular(blocks, right, inverse_diagonal=inverse, groups=groups, check_finite=False)

    def gradients(self, solution: Solution) -> dict[str, torch.Tensor]:
        layer, states = self.run.layer, self.run.states
        v = [
            torch.stack([solution.values[self.run.node(place, step)] for step in range(len(states[0]))])
            for place in range(layer.num_layers + 1)
        ]
        of_weights = list[torch.Tensor]()
        for place, first in enumerate(self.run.first):
            of_gates = v[place + 1].flatten(0, 1)
            before = torch.cat([first[None], states[place + 1][:-1]]).flatten(0, 1)
            of_weights += [of_gates.T @ states[place].flatten(0, 1), of_gates.T @ before]
            of_weights += [of_gates.sum(dim=0)] * (2 * layer.bias)
        return {
            "input": v[0].transpose(0, 1) if layer.batch_first else v[0],
            "hx": torch.stack([block.jvp(part[0]) for block, part in zip(self._recurrent, v[1:], strict=True)]),
            **self._of_parameters(of_weights),
        }

    def _of_parameters(self, of_weights: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The gradients of the parameters that the weights are computed from."""
        weights = [weight for weights in self.run.weights for weight in weights]
        trained = [pair for pair in zip(weights, of_weights, strict=True) if pair[0].requires_grad]
        parameters = {name: p for name, p in self.run.layer.named_parameters() if p.requires_grad}
        if not trained:
            return {}
        gradients = torch.autograd.grad(
            [weight for weight, _ in trained],
            list(parameters.values()),
            [gradient for _, gradient in trained],
            retain_graph=True,
            allow_unused=True,
        )
        return {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}


def propagation(
    module: nn.Module,
    x: torch.Tensor,
    gradient: torch.Tensor,
    *,
    last: torch.Tensor | None = None,
    hx: torch.Tensor | None = None,
    graph: bool = False,
) -> Propagation:
    """A module's back-propagation as a triangular system.

    Parameters
    ----------
    module : Module
        A chain of stages, or an ``nn.RNN``.
    x : Tensor, (batch, *input_shape)
        The input.
    gradient : Tensor
        Of the output.
    last, hx : Tensor, (layers, batch, hidden), optional
        Of an RNN, the gradient of the last states, and the first states.
    graph : bool
        Whether each operator's result is a node of its own, so that residual connections are blocks beside the others.
        By default the nodes are those of a chain, and a residual block is one matrix.

    Raises
    ------
    TypeError, ValueError, UnsupportedOperatorError
        Where an argument does not fit, or an operator has no rule.

    Examples
    --------
    >>> import torch
    >>> from jacsparse.solvers import solve
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    >>> backward = propagation(net, torch.randn(5, 3), torch.ones(5, 2))
    >>> backward.system
    <BlockTriangular of 3 block rows, 2 blocks, batch 5>
    >>> sorted(backward.gradients(solve(backward.system, method="scan")))
    ['0.bias', '0.weight', '2.bias', '2.weight', 'input']
    """
    if isinstance(module, nn.RNN):
        if graph:
            raise ValueError("graph=True is for modules of operators; the nodes of an RNN are its layers and steps")
        return RecurrentPropagation(module, x, gradient, last, hx)
    if last is not None or hx is not None:
        raise TypeError(f"last and hx are of an RNN, and the module is {a_type(module)}")
    return ModulePropagation(module, x, gradient, graph)
