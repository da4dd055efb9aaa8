"""A forward pass of a stacked recurrent network, and the numbers of the nodes of its two-level systems."""

from __future__ import annotations

from collections.abc import Sequence

import scipy.sparse
import torch
from torch import nn

from ..patterns import Full, Pattern
from ..recurrence import RNN
from ..runtime import a_type
from ..spgemm import SparseJacobian
from ..stages import check_input
from ..tracing import set_weights, sets_weights

#: A weight with a smaller share of nonzeros is a sparse block.
DENSE = 0.5


class RecurrentRun:
    """A stacked RNN of k layers over τ steps: its weights, and its states at each step.

    Node ``(layer, step)`` has the number ``step · (k + 1) + layer``; layer 0 is the input.

    Parameters
    ----------
    layer : RNN
        In one direction, and without dropout.
    x : Tensor, (time, batch, features), or (batch, time, features) where `batch_first`
        The input.
    hx : Tensor, (layers, batch, hidden), optional
        The first states.
    """

    def __init__(self, layer: nn.Module, x: torch.Tensor, hx: torch.Tensor | None = None) -> None:
        self.layer = layer = _checked(layer)
        check_input("x", x)
        if x.ndim != 3 or x.shape[2] != layer.input_size:
            axes = "batch, time" if layer.batch_first else "time, batch"
            raise ValueError(f"x has shape {tuple(x.shape)}; expected a padded batch, ({axes}, {layer.input_size})")
        x = x.transpose(0, 1) if layer.batch_first else x
        shape = (layer.num_layers, x.shape[1], layer.hidden_size)
        if hx is not None:
            check_like("hx", hx, shape, x)
        with torch.enable_grad():
            set_weights(layer)
            #: The weights of each layer, as masks and parametrisations make them of parameters.
            self.weights: list[list[torch.Tensor]] = [[*weights] for weights in layer.all_weights]
        self.first = x.new_zeros(shape) if hx is None else hx.detach().clone()
        #: The input, and the states of each layer, each (time, batch, elements).
        self.states = self._run(x.detach().clone())

    @torch.no_grad()
    def _run(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The input, and the states of each layer at each step."""
        operator = torch.rnn_tanh if self.layer.nonlinearity == "tanh" else torch.rnn_relu
        states = [x]
        for weights, first in zip(self.weights, self.first, strict=True):
            output, _ = operator(states[-1], first[None], weights, self.layer.bias, 1, 0.0, False, False, False)
            states.append(output)
        return states

    def node(self, place: int, step: int) -> int:
        """The number of a layer at a step."""
        return step * (self.layer.num_layers + 1) + place


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


def check_like(name: str, tensor: object, shape: Sequence[int], like: torch.Tensor) -> None:
    """Raise where a tensor's shape, dtype or device is not the expected one."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {a_type(tensor)}; expected a torch.Tensor of shape {tuple(shape)}")
    if (tensor.shape, tensor.dtype, tensor.device) != (torch.Size(shape), like.dtype, like.device):
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected {like.dtype} {tuple(shape)} "
            f"on {like.device}"
        )


def weight_block(matrix: torch.Tensor) -> SparseJacobian:
    """A matrix of weights as a block, sparse where most of it is pruned."""
    matrix = matrix.detach()
    mask = matrix != 0
    if float(mask.sum()) < DENSE * mask.numel():
        pattern = Pattern.from_scipy(scipy.sparse.csr_array(mask.cpu().numpy()))
        return SparseJacobian(pattern, matrix[mask].unsqueeze(1))
    values = matrix.clone(memory_format=torch.contiguous_format).reshape(-1, 1)
    return SparseJacobian(Pattern.of(Full(*matrix.shape)), values)
