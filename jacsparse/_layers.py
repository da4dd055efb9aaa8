"""What each operator of a network costs forward and back: dense, and without what is pruned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from ._stages import Edge, Record
from .patterns import Call

__all__ = ["LayerFlop", "layers_of"]


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
    forward_sparse, backward_sparse : int
        The same, times the share of the Jacobian's entries that pruning leaves; as many where nothing is pruned.
    jacobian_nnz, jacobian_nbytes : int
        Entries of the Jacobian, and its bytes as CSR with float32 values.

    Notes
    -----
    Dense FLOP are those of ``torch.utils.flop_counter.FlopCounterMode`` for a training step, but where that counts
    otherwise: the gradient of a grouped convolution's weight times the number of groups, and neither attention on the
    CPU nor products of a matrix and a vector. What makes a weight of others is not counted here.
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

    @property
    def sparsity(self) -> float:
        """Share of the weights that is zero."""
        return self.zeros / self.weights if self.weights else 0.0


def layers_of(records: Sequence[Record]) -> Iterator[LayerFlop]:
    """The operators of a chain that have weights, or multiply; from what a run of it recorded."""
    # Whether a gradient is wanted of each tensor: the chain's input has none.
    wanted: dict[Any, bool] = {}
    before = False
    for record in records:
        stage = record.stage
        wanted[stage.start] = before
        for target, group in groupby(stage.edges, lambda edge: edge.target):
            edges = list(group)
            weights = _weights_of(record, edges[0])
            trains = any(trained for _, trained in weights.values())
            operands = [edge for edge in edges if wanted.get(edge.source, False)]
            layer = _layer(edges, operands, weights)
            if layer.parameters or layer.forward:
                yield layer
            wanted[target] = trains or bool(operands)
        before = wanted.get(stage.stop, False)


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


def _layer(edges: Sequence[Edge], operands: Sequence[Edge], weights: dict[str, tuple[Any, bool]]) -> LayerFlop:
    call, rule = edges[0].call, edges[0].rule
    dense = rule.multiply_adds(call)
    nnz = sum(edge.pattern.nnz for edge in edges)
    sparse = _kept(dense, nnz, sum(_unpruned(edge) for edge in edges)) if dense else 0
    multiplied = [weight for name, weight in weights.items() if dense and not _is_added(name, call)]
    of_weights = any(trained for _, trained in multiplied)
    gradients = [rule.backward_multiply_adds(call, len(operands), of_weights, count) for count in (dense, sparse)]
    return LayerFlop(
        path=call.path,
        operator=call.operator,
        parameters=sum(tensor.numel() for tensor, _ in weights.values()),
        nonzero=sum(_nonzero(tensor) for tensor, _ in weights.values()),
        weights=sum(tensor.numel() for tensor, _ in multiplied),
        zeros=sum(tensor.numel() - _nonzero(tensor) for tensor, _ in multiplied),
        forward=2 * dense,
        forward_sparse=2 * sparse,
        backward=2 * gradients[0],
        backward_sparse=2 * gradients[1],
        jacobian_nnz=nnz,
        jacobian_nbytes=sum(4 * edge.pattern.nnz + edge.pattern.index_nbytes for edge in edges),
    )


def _kept(dense: int, nnz: int, unpruned: int) -> int:
    """Multiply-adds where pruning leaves `nnz` of the Jacobian's entries."""
    return dense if nnz == unpruned else round(dense * nnz / unpruned)


def _unpruned(edge: Edge) -> int:
    """Entries of an edge's Jacobian if all of its weights were kept."""
    return edge.rule.pattern(replace(edge.call, kept={})).nnz if edge.call.kept else edge.pattern.nnz


def _is_added(name: str, call: Call) -> bool:
    """Whether an operand is a summand, not a factor: of ``aten.addmm`` and its like it is what ``beta`` scales."""
    return name in ("bias", "attn_mask") or (name == "self" and "beta" in call.arguments)


def _nonzero(tensor: torch.Tensor) -> int:
    return int(tensor.detach().count_nonzero())
