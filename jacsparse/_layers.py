"""What each operator of a network costs forward and back: dense, and without what is pruned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from ._stages import Edge, Record
from .patterns import Call, Identity

__all__ = ["LayerFlop", "StageLayers", "layers_of", "unpruned"]


@dataclass(frozen=True)
class LayerFlop:
    """One operator, for one sample.

    Attributes
    ----------
    path, operator : str
        In the model, and as ATen names it.
    parameters, nonzero : int
        Elements of its weights, biases and what else it takes of parameters, and those that are not zero.
    weights, zeros : int
        Elements of the weights that it multiplies by, and those that are zero.
    forward, backward : int
        FLOP, dense: products of matrices and convolutions alone, with padding, without biases; backward the gradients
        of weights that train and of inputs that depend on such weights.
    weight_gradient : int
        The FLOP of `backward` that make the gradients of weights; the others make those of inputs.
    forward_sparse, backward_sparse, weight_gradient_sparse : int
        The same with one multiply-add for each entry of the Jacobian: without padding and without what is pruned.
        Attention and products of two tensors that depend on the input have no sparse form: they count as dense.
    jacobian_nnz, jacobian_nbytes : int
        Entries of the Jacobian, and its bytes as CSR with float32 values.

    Notes
    -----
    Dense FLOP are counted by the rules of ``torch.utils.flop_counter.FlopCounterMode`` for a training step, and equal
    its figures but where those are wrong or missing: it multiplies the gradient of a grouped convolution's weight by
    the number of groups, and leaves out attention on the CPU and products of a matrix and a vector. What makes a weight
    of others is not counted here.
    """

    path: str
    operator: str
    parameters: int
    nonzero: int
    weights: int
    zeros: int
    forward: int
    forward_sparse: int
    backward: int
    backward_sparse: int
    jacobian_nnz: int
    jacobian_nbytes: int
    weight_gradient: int = 0
    weight_gradient_sparse: int = 0

    @property
    def sparsity(self) -> float:
        """Share of the weights that is zero."""
        return self.zeros / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class StageLayers:
    """What back-propagation executes in one stage.

    Attributes
    ----------
    layers : tuple of LayerFlop
        The operators that have weights, or multiply.
    executed : int
        FLOP of PyTorch's own gradient operators for what the stage is given: of products as `LayerFlop.backward` counts
        them, of others one for each element of the gradients that they read and write.
    entrywise : tuple of int
        The edges, by number, whose weights' gradient takes a multiply-add for each entry of the Jacobian. Of a stage
        of one operator there is one edge, 0.
    otherwise : int
        FLOP of the other weights' gradients.
    """

    layers: tuple[LayerFlop, ...]
    executed: int
    entrywise: tuple[int, ...]
    otherwise: int


def layers_of(records: Sequence[Record]) -> list[StageLayers]:
    """What each stage of a chain executes; from what a run of it recorded."""
    # Whether a gradient is wanted of each tensor: the chain's input has none.
    wanted: dict[Any, bool] = {}
    before = False
    counted: set[int] = set()
    stages = []
    for record in records:
        stage = record.stage
        wanted[stage.start] = before
        layers, executed, entrywise, otherwise = [], 0, [], 0
        for target, group in groupby(stage.edges, lambda edge: edge.target):
            edges = list(group)
            weights = _weights_of(record, edges[0])
            trains = any(trained for _, trained in weights.values())
            operands = [edge for edge in edges if wanted.get(edge.source, False)]
            # A weight that several operators read, as those of a recurrence's steps, is one all the same.
            parameters = [tensor for tensor, _ in weights.values() if id(tensor) not in counted]
            counted.update(map(id, parameters))
            layer = _layer(edges, operands, weights, parameters)
            executed += _executed(edges)
            if layer.parameters or layer.forward:
                layers.append(layer)
            if layer.weight_gradient and _is_entrywise(edges):
                entrywise += [number for number, edge in enumerate(stage.edges) if edge is edges[0]]
            else:
                otherwise += layer.weight_gradient
            wanted[target] = trains or bool(operands)
        before = wanted.get(stage.stop, False)
        numbers = entrywise if stage.operator is None else [0] * len(entrywise)
        stages.append(StageLayers(tuple(layers), executed, tuple(numbers), otherwise))
    return stages


def _is_entrywise(edges: Sequence[Edge]) -> bool:
    """Whether an operator is one product, with a multiply-add for each entry of its one Jacobian."""
    return len(edges) == 1 and edges[0].rule.entrywise and edges[0].rule.multiply_adds(edges[0].call) > 0


def _executed(edges: Sequence[Edge]) -> int:
    """FLOP of an operator's own gradients with respect to all of its operands."""
    call, rule = edges[0].call, edges[0].rule
    dense = rule.multiply_adds(call)
    if dense:
        return 2 * rule.backward_multiply_adds(call, len(edges), False, dense)
    some = (edge.call for edge in edges if not isinstance(edge.pattern.structure, Identity))
    return sum(each.in_size + each.out_size for each in some)


def _weights_of(record: Record, edge: Edge) -> dict[str, tuple[torch.Tensor, bool]]:
    """What an operator reads of parameters, as the module computes it, and whether it trains; by name."""
    recording, invocation = record.recording, record.invocation(edge.target)
    dependent = {operand.name for operand in invocation.operands}
    given = {name: invocation.arguments[name] for name in invocation.versions if name not in dependent}
    parameters = {id(parameter) for parameter in recording.module.parameters()}
    return {
        name: (tensor, tensor.requires_grad)
        for name, tensor in given.items()
        if tensor.requires_grad or recording.made_of(tensor, parameters)
    }


def _layer(
    edges: Sequence[Edge],
    operands: Sequence[Edge],
    weights: dict[str, tuple[Any, bool]],
    parameters: Sequence[torch.Tensor],
) -> LayerFlop:
    call, rule = edges[0].call, edges[0].rule
    dense = rule.multiply_adds(call)
    nnz = sum(edge.pattern.nnz for edge in edges)
    sparse = nnz if _is_entrywise(edges) else dense
    multiplied = [weight for name, weight in weights.items() if dense and not _is_added(name, call)]
    of_weights = any(trained for _, trained in multiplied)
    gradients = [rule.backward_multiply_adds(call, len(operands), of_weights, count) for count in (dense, sparse)]
    of_inputs = [rule.backward_multiply_adds(call, len(operands), False, count) for count in (dense, sparse)]
    return LayerFlop(
        path=call.path,
        operator=call.operator,
        parameters=sum(tensor.numel() for tensor in parameters),
        nonzero=sum(map(_nonzero, parameters)),
        weights=sum(tensor.numel() for tensor, _ in multiplied),
        zeros=sum(tensor.numel() - _nonzero(tensor) for tensor, _ in multiplied),
        forward=2 * dense,
        forward_sparse=2 * sparse,
        backward=2 * gradients[0],
        backward_sparse=2 * gradients[1],
        jacobian_nnz=nnz,
        jacobian_nbytes=sum(4 * edge.pattern.nnz + edge.pattern.index_nbytes for edge in edges),
        weight_gradient=2 * (gradients[0] - of_inputs[0]),
        weight_gradient_sparse=2 * (gradients[1] - of_inputs[1]),
    )


def unpruned(edge: Edge) -> int:
    """Entries of an edge's Jacobian if all of its weights were there."""
    return edge.rule.pattern(replace(edge.call, kept={})).nnz if edge.call.kept else edge.pattern.nnz


def _is_added(name: str, call: Call) -> bool:
    """Whether an operand is a summand, not a factor: of ``aten.addmm`` and its like it is what ``beta`` scales."""
    return name in ("bias", "attn_mask") or (name == "self" and "beta" in call.arguments)


def _nonzero(tensor: torch.Tensor) -> int:
    return int(tensor.detach().count_nonzero())
