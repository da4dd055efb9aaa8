"""What each operator of a network costs forward and back: dense, and without what is pruned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ._stages import Edge, Stage

__all__ = ["LayerFlop", "layers_of"]


@dataclass(frozen=True)
class LayerFlop:
    """One operator, for one sample.

    Attributes
    ----------
    path, operator : str
        In the model, and as ATen names it.
    parameters, nonzero : int
        Elements of its weights, and those that are not zero.
    forward, backward : int
        FLOP, dense, as ``torch.utils.flop_counter.FlopCounterMode`` counts a training step: products of matrices and
        convolutions alone, with padding, without biases; backward the gradients of weights that train and of inputs
        on which such weights depend.
    forward_sparse, backward_sparse : int
        The same, with 2 for each entry of the Jacobian in the place of each multiply-add.
    jacobian_nnz, jacobian_nbytes : int
        Entries of the Jacobian, and its bytes as CSR with float32 values.
    """

    path: str
    operator: str
    parameters: int
    nonzero: int
    forward: int
    forward_sparse: int
    backward: int
    backward_sparse: int
    jacobian_nnz: int
    jacobian_nbytes: int

    @property
    def sparsity(self) -> float:
        """Share of the parameters that is zero."""
        return 1.0 - self.nonzero / self.parameters if self.parameters else 0.0


def layers_of(stages: Sequence[Stage]) -> Iterator[LayerFlop]:
    """The operators of a chain that have weights, or multiply."""
    # Whether a gradient is wanted of each tensor: the chain's input has none.
    wanted: dict[Any, bool] = {}
    before = False
    for stage in stages:
        wanted[stage.start] = before
        for target, group in groupby(stage.edges, lambda edge: edge.target):
            edges = list(group)
            weights = stage.weights_of(edges[0])
            trains = any(trained for _, trained in weights.values())
            operands = [edge for edge in edges if wanted.get(edge.source, False)]
            layer = _layer(edges, operands, weights)
            if layer.parameters or layer.forward:
                yield layer
            wanted[target] = trains or bool(operands)
        before = wanted.get(stage.stop, False)


def _layer(edges: Sequence[Edge], operands: Sequence[Edge], weights: dict[str, tuple[Any, bool]]) -> LayerFlop:
    call, rule = edges[0].call, edges[0].rule
    dense = rule.multiply_adds(call)
    nnz = sum(edge.pattern.nnz for edge in edges)
    # Only where weights are pruned does the Jacobian tell how many multiply-adds there are.
    sparse = nnz if dense and rule.weights else dense
    of_weights = any(trained for name, (_, trained) in weights.items() if name in rule.weights)
    gradients = [rule.backward_multiply_adds(call, len(operands), of_weights, count) for count in (dense, sparse)]
    return LayerFlop(
        path=call.path,
        operator=call.operator,
        parameters=sum(tensor.numel() for tensor, _ in weights.values()),
        nonzero=sum(int(tensor.detach().count_nonzero()) for tensor, _ in weights.values()),
        forward=2 * dense,
        forward_sparse=2 * sparse,
        backward=2 * gradients[0],
        backward_sparse=2 * gradients[1],
        jacobian_nnz=nnz,
        jacobian_nbytes=sum(4 * edge.pattern.nnz + edge.pattern.index_nbytes for edge in edges),
    )
