"""The FLOP of each operator of a network, forward and backward: dense, and without pruned weights."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch

from ..patterns import Identity
from ..stages import Edge, Record, Stage


@dataclass(frozen=True)
class LayerFlop:
    """The FLOP of one operator, for one sample.

    Attributes
    ----------
    path, operator : str
        Path in the model, and name of the ATen operator.
    parameters, nonzero : int
        Elements of all parameters that the operator reads, such as weights and biases, and those that are not zero.
        What an operator before it has read too, as an earlier step of a recurrence, is counted there.
    weights, zeros : int
        Elements of the weights that the operator multiplies by, and those that are zero, counted likewise.
    forward, backward : int
        Dense FLOP of products of matrices and convolutions, with padding, without biases. `backward` counts the
        gradients of weights that train, and of inputs that depend on such weights.
    weight_gradient : int
        The part of `backward` for gradients of weights, not of inputs.
    forward_sparse, backward_sparse, weight_gradient_sparse : int
        The same with one multiply-add for each entry of the Jacobian: without padding and without pruned weights.
        Attention and products of two tensors that depend on the input have no sparse form: they count as dense.
    jacobian_nnz, jacobian_nbytes : int
        Entries of the Jacobian, and its bytes as CSR with float32 values.
    unmasked_zeros : int
        Those of the zeros that no pruning mask holds at zero: training may fill them.

    Notes
    -----
    Dense FLOP are counted by the rules of ``torch.utils.flop_counter.FlopCounterMode`` for a training step, and equal
    its figures except where those are wrong or missing: it multiplies the gradient of a grouped convolution's weight by
    the number of groups, and omits attention on the CPU and products of a matrix and a vector. Operators that compute a
    weight from other weights are not counted here.
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
    unmasked_zeros: int = 0

    @property
    def sparsity(self) -> float:
        """Share of the weights that is zero."""
        return self.zeros / self.weights if self.weights else 0.0


class StepFlop(NamedTuple):
    """The FLOP of one operator in a training step of one sample."""

    forward: float
    input_gradient: float
    weight_gradient: float


@dataclass(frozen=True)
class OperatorWork:
    """What a training step computes for one operator."""

    #: The counts of the operator; None where it neither multiplies nor has parameters.
    layer: LayerFlop | None
    #: FLOP as PyTorch executes them. An operator without products takes one for each element that it reads and writes.
    dense: StepFlop
    #: The numbers of its edges in the stage's factor; identities take no FLOP, and are left out.
    edges: tuple[int, ...] = ()
    #: Those of the edges whose source needs a gradient.
    needed: tuple[int, ...] = ()
    #: Whether it takes a multiply-add for each entry of the Jacobian.
    entrywise: bool = False


@dataclass(frozen=True)
class StageLayers:
    """The FLOP of back-propagation in one stage."""

    #: The operators that have weights, or multiply.
    layers: tuple[LayerFlop, ...]
    #: FLOP of PyTorch's gradient operators for the stage's input: of products as `LayerFlop.backward` counts them, of
    #: other operators one for each element of the gradients that they read and write.
    executed: int
    #: The numbers of the edges whose weights' gradient takes a multiply-add for each entry of the Jacobian; a stage of
    #: one operator has one edge, 0.
    entrywise: tuple[int, ...]
    #: FLOP of the gradients of all other weights.
    other_weights: int
    #: The work of each operator.
    work: tuple[OperatorWork, ...]


def layers_of(records: Sequence[Record]) -> list[StageLayers]:
    """The FLOP of each stage of a chain, from the records of one run."""
    # Whether each tensor needs a gradient; the chain's input needs none.
    needs_gradient: dict[Any, bool] = {}
    before = False
    counted: set[Hashable] = set()
    stages = []
    trained = records[0].trace.values_of([*records[0].trace.module.parameters()]) if records else frozenset()
    for record in records:
        stage = record.stage
        needs_gradient[stage.start] = before
        layers, executed, entrywise, other_weights, work = [], 0, [], 0, []
        for target, group in groupby(stage.edges, lambda edge: edge.target):
            edges = list(group)
            weights = _weights_of(record, edges[0], trained)
            operands = sum(needs_gradient.get(edge.source, False) for edge in edges)
            # A weight that several operators read, such as those of a recurrence's steps, is counted once.
            keys = _keys(record, edges[0], weights)
            fresh = {name for name, key in keys.items() if key not in counted}
            counted.update(keys.values())
            layer = _layer(edges, operands, weights, fresh)
            executed += _executed(edges)
            work.append(_work(stage, edges, [needs_gradient.get(edge.source, False) for edge in edges], layer))
            if layer.parameters or layer.forward:
                layers.append(layer)
            if layer.weight_gradient and _is_entrywise(edges):
                entrywise.append(0 if stage.operator is not None else stage.edges.index(edges[0]))
            else:
                other_weights += layer.weight_gradient
            needs_gradient[target] = operands > 0 or any(weight.requires_grad for weight in weights.values())
        before = needs_gradient.get(stage.stop, False)
        stages.append(StageLayers(tuple(layers), executed, tuple(entrywise), other_weights, tuple(work)))
    return stages


def _work(stage: Stage, edges: Sequence[Edge], needed: Sequence[bool], layer: LayerFlop) -> OperatorWork:
    """The work of one operator, some of whose operands need a gradient."""
    single, multiplies = stage.operator, bool(layer.forward)
    counted = [
        (edge, needs)
        for edge, needs in zip(edges, needed, strict=True)
        # A stage's one operator is edge 0 of its factor, and what only reshapes beside it is no edge.
        if (single is None or edge is single)
        and (multiplies or not isinstance(edge.transposed_pattern.structure, Identity))
    ]
    numbers = [(0 if single is not None else stage.edges.index(edge), needs) for edge, needs in counted]
    elements = [(edge.call.in_size + edge.call.out_size, needs) for edge, needs in counted]
    dense = StepFlop(sum(size for size, _ in elements), sum(size for size, needs in elements if needs), 0)
    if multiplies:
        dense = StepFlop(layer.forward, layer.backward - layer.weight_gradient, layer.weight_gradient)
    return OperatorWork(
        layer if layer.parameters or multiplies else None,
        dense,
        tuple(number for number, _ in numbers),
        tuple(number for number, needs in numbers if needs),
        _is_entrywise(edges),
    )


def _is_entrywise(edges: Sequence[Edge]) -> bool:
    """Whether an operator is one product, with a multiply-add for each entry of its one Jacobian."""
    return len(edges) == 1 and edges[0].rule.entrywise and edges[0].rule.multiply_adds(edges[0].call) > 0


def _executed(edges: Sequence[Edge]) -> int:
    """FLOP of PyTorch's gradients of one operator with respect to all of its operands."""
    call, rule = edges[0].call, edges[0].rule
    dense = rule.multiply_adds(call)
    if dense:
        return 2 * rule.backward_multiply_adds(call, len(edges), False, dense)
    return sum(
        edge.call.in_size + edge.call.out_size
        for edge in edges
        if not isinstance(edge.transposed_pattern.structure, Identity)
    )


def _weights_of(record: Record, edge: Edge, parameters: frozenset[int]) -> dict[str, torch.Tensor]:
    """The arguments of an operator that are parameters, or computed from parameters, by name."""
    trace, node = record.trace, edge.operation.node
    dependent = {operand.name for operand in node.operands}
    constants = {name: value for name, value in node.tensors if name not in dependent}
    return {
        name: trace.tensor(value)
        for name, value in constants.items()
        if trace.tensor(value).requires_grad or trace.graph.made_of(value, parameters)
    }


def _keys(record: Record, edge: Edge, weights: Collection[str]) -> dict[str, Hashable]:
    """What is the same for two weights that are one: the parameters that they come from, and the part of these."""
    trace, values = record.trace, dict(edge.operation.node.tensors)

    def key(value: int) -> Hashable:
        tensor, parameters = trace.tensor(value), trace.graph.infos[value].externals
        return (parameters, tensor.storage_offset(), tensor.numel()) if parameters else id(tensor)

    return {name: key(values[name]) for name in weights}


def _layer(edges: Sequence[Edge], operands: int, weights: dict[str, torch.Tensor], fresh: Collection[str]) -> LayerFlop:
    """The FLOP of an operator with `operands` operands that need a gradient; `fresh` weights are not counted yet."""
    call, rule = edges[0].call, edges[0].rule
    dense = rule.multiply_adds(call)
    patterns = [edge.transposed_pattern for edge in edges if not edge.coupling]
    nnz = sum(pattern.nnz for pattern in patterns)
    sparse = nnz if _is_entrywise(edges) else dense
    # Summands are no factors; `beta` scales the summand `self` of ``aten.addmm`` and similar operators.
    summands = ("bias", "attn_mask", *(["self"] if "beta" in call.arguments else []))
    factors = [name for name in weights if dense and name not in summands]
    counted = {name: (weights[name].numel(), int(weights[name].detach().count_nonzero())) for name in fresh}
    multiplied = [counted[name] for name in factors if name in fresh]
    trains = any(weights[name].requires_grad for name in factors)
    backward = [rule.backward_multiply_adds(call, operands, trains, count) for count in (dense, sparse)]
    of_inputs = [rule.backward_multiply_adds(call, operands, False, count) for count in (dense, sparse)]
    return LayerFlop(
        path=call.path,
        operator=call.operator,
        parameters=sum(count for count, _ in counted.values()),
        nonzero=sum(nonzero for _, nonzero in counted.values()),
        weights=sum(count for count, _ in multiplied),
        zeros=sum(count - nonzero for count, nonzero in multiplied),
        forward=2 * dense,
        forward_sparse=2 * sparse,
        backward=2 * backward[0],
        backward_sparse=2 * backward[1],
        jacobian_nnz=nnz,
        jacobian_nbytes=sum(4 * pattern.nnz + pattern.index_nbytes for pattern in patterns),
        weight_gradient=2 * (backward[0] - of_inputs[0]),
        weight_gradient_sparse=2 * (backward[1] - of_inputs[1]),
        unmasked_zeros=sum(
            int((~pruned.mask).sum())
            for pruned in edges[0].omissions
            if not pruned.masked and pruned.floating and pruned.name in fresh
        ),
    )
