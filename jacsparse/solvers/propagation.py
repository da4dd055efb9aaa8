"""A module's back-propagation as a triangular system: of a chain of stages, and of a stacked recurrent network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..patterns import Full, Pattern
from ..recurrence import RNN
from ..runtime import a_type
from ..spgemm import SparseJacobian
from ..stages import Chain, Chains, Run, check_input, counted_record, factor_of, pull_back, recent_chains, refuse_hooks
from ..tracing import check_module, set_weights, sets_weights, without_autocast
from .recorded_systems import ChainSystem, GraphSystem, diagonal_block, stretches
from .solver import Solution
from .systems import BlockTriangular

#: A weight with a smaller share of nonzeros is a sparse block.
DENSE = 0.5


def stretches_of(module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> list[BlockTriangular | int]:
    """The systems of a module's back-propagation, from its output on; between them what the other stages take.

    A number stands for a stage that couples samples: the multiply-adds of its operators for the whole batch.
    """
    if isinstance(module, nn.RNN):
        return [propagation(module, x, gradient).system]
    chain, run = Chains(check_module(module), couples=True).of(check_input("x", x))
    _check_run(module, chain, run, gradient)
    refuse_hooks(run.records)
    systems, gradient = list[BlockTriangular | int](), gradient.detach()
    with without_autocast(x.device):
        for part in reversed(stretches(run.records)):
            if part[0].stage.couples:
                systems.append(factor_of(counted_record(part[0])).nnz * len(x))
            else:
                systems.append(ChainSystem(part, gradient).system)
            if part[0] is not run.records[0]:
                (gradient,), _ = pull_back(part[::-1], gradient, part[:1], [], ())
    return systems


def _check_run(module: nn.Module, chain: Chain, run: Run, gradient: torch.Tensor) -> None:
    """Raise where a run has no stages, or the gradient is not one of its output."""
    if not len(chain):
        raise ValueError(f"{type(module).__name__} has no stages; a system needs an operator that does something")
    _check_like("gradient", gradient, run.trace.output.shape, run.trace.output)


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
        chain, self.run = recent_chains(check_module(module), pruned=True).of(x)
        _check_run(module, chain, self.run, gradient)
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
    the last one first.

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
        _check_layer(layer)
        check_input("x", x)
        if x.ndim != 3 or x.shape[2] != layer.input_size:
            axes = "batch, time" if layer.batch_first else "time, batch"
            raise ValueError(f"x has shape {tuple(x.shape)}; expected a padded batch, ({axes}, {layer.input_size})")
        _check_like("gradient", gradient, (*x.shape[:2], layer.hidden_size), x)
        self.layer = layer
        if layer.batch_first:
            x, gradient = x.transpose(0, 1), gradient.transpose(0, 1)
        states = (layer.num_layers, x.shape[1], layer.hidden_size)
        for name, state in (("last", last), ("hx", hx)):
            if state is not None:
                _check_like(name, state, states, x)
        with torch.enable_grad():
            set_weights(layer)
            #: The weights of each layer, as masks and parametrisations make them of parameters.
            self._weights: list[list[torch.Tensor]] = [[*weights] for weights in layer.all_weights]
        self._first = x.new_zeros(states) if hx is None else hx.detach().clone()
        self._states = self._run(x.detach().clone())
        self._recurrent = [_weight_block(weights[1]) for weights in self._weights]
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

    def _system(self, gradient: torch.Tensor, last: torch.Tensor | None) -> BlockTriangular:
        depth, time = self.layer.num_layers, len(gradient)
        entering = [_weight_block(weights[0]) for weights in self._weights]
        blocks, right, inverse = dict[tuple[int, int], SparseJacobian](), list[torch.Tensor](), list[Any]()
        for step in range(time):
            for place, states in enumerate(self._states):
                node, h = self._node(place, step), states[step]
                if place < depth:
                    blocks[node, self._node(place + 1, step)] = entering[place]
                if place and step + 1 < time:
                    blocks[node, self._node(place, step + 1)] = self._recurrent[place - 1]
                c = gradient[step] if place == depth else torch.zeros_like(h)
                if place and last is not None and step == time - 1:
                    c = c + last[place - 1]
                right.append(c)
                derivative = 1 - h.square() if self.layer.nonlinearity == "tanh" else (h > 0).to(h.dtype)
                inverse.append(diagonal_block(derivative) if place else None)
        groups = [[self._node(place, step) for place in range(depth, -1, -1)] for step in range(time - 1, -1, -1)]
        return BlockTriangular(blocks, right, inverse_diagonal=inverse, groups=groups, check_finite=False)

    def _node(self, place: int, step: int) -> int:
        return step * (self.layer.num_layers + 1) + place

    def gradients(self, solution: Solution) -> dict[str, torch.Tensor]:
        layer, time = self.layer, len(self._states[0])
        v = [
            torch.stack([solution.values[self._node(place, step)] for step in range(time)])
            for place in range(layer.num_layers + 1)
        ]
        of_weights = list[torch.Tensor]()
        for place, first in enumerate(self._first):
            of_gates = v[place + 1].flatten(0, 1)
            before = torch.cat([first[None], self._states[place + 1][:-1]]).flatten(0, 1)
            of_weights += [of_gates.T @ self._states[place].flatten(0, 1), of_gates.T @ before]
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


def _check_layer(layer: object) -> None:
    if not isinstance(layer, nn.RNN):
        raise TypeError(f"layer is {a_type(layer)}; expected a torch.nn.RNN, whose step is one matrix and f")
    if layer.bidirectional or (layer.dropout and layer.training):
        raise ValueError("layer is bidirectional or drops out; expected one direction, and no active dropout")
    before = (hook for hook in layer._forward_pre_hooks.values() if not sets_weights(hook))
    hooks = (layer._forward_hooks, layer._backward_hooks, layer._backward_pre_hooks, list(before))
    if any(hooks) or type(layer).forward not in (nn.RNN.forward, RNN.forward):
        raise TypeError("layer has hooks or a forward pass of its own, which its system would not know of; remove them")


def _check_like(name: str, tensor: object, shape: Sequence[int], like: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {a_type(tensor)}; expected a torch.Tensor of shape {tuple(shape)}")
    if (tensor.shape, tensor.dtype, tensor.device) != (torch.Size(shape), like.dtype, like.device):
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected {like.dtype} {tuple(shape)} "
            f"on {like.device}"
        )


def _weight_block(weight: torch.Tensor) -> SparseJacobian:
    """``Wᵀ``, sparse where most of it is pruned."""
    transposed = weight.detach().T
    mask = transposed != 0
    if float(mask.sum()) < DENSE * mask.numel():
        rows, columns = torch.nonzero(mask, as_tuple=True)
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64, device=mask.device), mask.sum(dim=1).cumsum(0)])
        pattern = Pattern((mask.shape[0], mask.shape[1]), indptr.cpu().numpy(), columns.cpu().numpy())
        return SparseJacobian(pattern, transposed[rows, columns].unsqueeze(1))
    values = transposed.clone(memory_format=torch.contiguous_format).reshape(-1, 1)
    return SparseJacobian(Pattern.of(Full(*transposed.shape)), values)


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
