"""A module's back-propagation as a triangular system: of a chain of stages, and of a stacked recurrent network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import scipy.sparse
import torch
from torch import nn

from ..patterns import Full, Pattern
from ..recurrence import RNN
from ..runtime import a_type
from ..spgemm import SparseJacobian
from ..stages import check_input, forward_pass
from ..tracing import check_module, set_weights, sets_weights, without_autocast
from .recorded_systems import ChainSystem, GraphSystem, diagonal_block
from .solver import Solution
from .systems import BlockTriangular

#: A weight with a smaller share of nonzeros is a sparse block.
_DENSE = 0.5


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
        _check_like("gradient", gradient, self.run.trace.output.shape, self.run.trace.output)
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

    Node ``(layer, step)`` has the number ``step · (k + 1) + layer``; layer 0 is the input. The groups are the steps,
    the last one first. Arguments are those of `propagation`.
    """

    def __init__(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        gradient: torch.Tensor,
        last: torch.Tensor | None = None,
        hx: torch.Tensor | None = None,
    ) -> None:
        self.layer = layer = _checked(layer)
        check_input("x", x)
        if x.ndim != 3 or x.shape[2] != layer.input_size:
            axes = "batch, time" if layer.batch_first else "time, batch"
            raise ValueError(f"x has shape {tuple(x.shape)}; expected a padded batch, ({axes}, {layer.input_size})")
        _check_like("gradient", gradient, (*x.shape[:2], layer.hidden_size), x)
        if layer.batch_first:
            x, gradient = x.transpose(0, 1), gradient.transpose(0, 1)
        shape = (layer.num_layers, x.shape[1], layer.hidden_size)
        for name, states in (("hx", hx), ("last", last)):
            if states is not None:
                _check_like(name, states, shape, x)
        with torch.enable_grad():
            set_weights(layer)
            #: The weights of each layer, as masks and parametrisations make them of parameters.
            self._weights: list[list[torch.Tensor]] = [[*weights] for weights in layer.all_weights]
        self._first = x.new_zeros(shape) if hx is None else hx.detach().clone()
        #: The input, and the states of each layer, each (time, batch, elements).
        self._states = self._run(x.detach().clone())
        self._recurrent = [_weight_block(weights[1].T) for weights in self._weights]
        self.system = self._system(gradient.detach(), None if last is None else last.detach())

    @torch.no_grad()
    def _run(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The input, and the states of each layer at each step."""
        operator = torch.rnn_tanh if self.layer.nonlinearity == "tanh" else torch.rnn_relu
        states = [x]
        for weights, first in zip(self._weights, self._first, strict=True):
            output, _ = operator(states[-1], first[None], weights, self.layer.bias, 1, 0.0, False, False, False)
            states.append(output)
        return states

    def _node(self, place: int, step: int) -> int:
        """The number of a layer at a step."""
        return step * (self.layer.num_layers + 1) + place

    def _system(self, gradient: torch.Tensor, last: torch.Tensor | None) -> BlockTriangular:
        layer, node_of, time = self.layer, self._node, len(gradient)
        depth = layer.num_layers
        entering = [_weight_block(weights[0].T) for weights in self._weights]
        blocks, right, inverse = dict[tuple[int, int], SparseJacobian](), list[torch.Tensor](), list[Any]()
        for step in range(time):
            for place, states in enumerate(self._states):
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
        layer, states = self.layer, self._states
        v = [
            torch.stack([solution.values[self._node(place, step)] for step in range(len(states[0]))])
            for place in range(layer.num_layers + 1)
        ]
        of_weights = list[torch.Tensor]()
        for place, first in enumerate(self._first):
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
        weights = [weight for weights in self._weights for weight in weights]
        trained = [pair for pair in zip(weights, of_weights, strict=True) if pair[0].requires_grad]
        parameters = {name: p for name, p in self.layer.named_parameters() if p.requires_grad}
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


def _checked(layer: nn.Module) -> nn.RNN:
    """The layer; TypeError or ValueError where its system would not be that of its pass."""
    if not isinstance(layer, nn.RNN):
        raise TypeError(
            f"layer is {a_type(layer)}; expected a torch.nn.RNN, whose step is one matrix and f: in a GRU and an LSTM "
            "states are products with gates"
        )
    if layer.bidirectional or (layer.dropout and layer.training):
        raise ValueError("layer is bidirectional or drops out; expected one direction, and no active dropout")
    before = (hook for hook in layer._forward_pre_hooks.values() if not sets_weights(hook))
    hooks = (layer._forward_hooks, layer._backward_hooks, layer._backward_pre_hooks, list(before))
    if any(hooks) or type(layer).forward not in (nn.RNN.forward, RNN.forward):
        raise TypeError("layer has hooks or a forward pass of its own, which its system would not know of; remove them")
    return layer


def _check_like(name: str, tensor: object, shape: Sequence[int], like: torch.Tensor) -> None:
    """Raise where a tensor's shape, dtype or device is not the expected one."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {a_type(tensor)}; expected a torch.Tensor of shape {tuple(shape)}")
    if (tensor.shape, tensor.dtype, tensor.device) != (torch.Size(shape), like.dtype, like.device):
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected {like.dtype} {tuple(shape)} "
            f"on {like.device}"
        )


def _weight_block(matrix: torch.Tensor) -> SparseJacobian:
    """A matrix of weights as a block, sparse where most of it is pruned."""
    matrix = matrix.detach()
    mask = matrix != 0
    if float(mask.sum()) < _DENSE * mask.numel():
        pattern = Pattern.from_scipy(scipy.sparse.csr_array(mask.cpu().numpy()))
        return SparseJacobian(pattern, matrix[mask].unsqueeze(1))
    values = matrix.clone(memory_format=torch.contiguous_format).reshape(-1, 1)
    return SparseJacobian(Pattern.of(Full(*matrix.shape)), values)


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
