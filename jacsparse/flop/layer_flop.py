"""The FLOP of each operator of a network, forward and backward: dense, and without pruned weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from ..patterns import Identity
from ..stages import Edge, Record, Stage
from ..tracing import Node, Trace, Value


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
    the number of groups, and omits attention and LSTMs on the CPU and products of a matrix and a vector. Products of
    constants, as of two weights or of a first state and a weight, are counted as a batch of one sample takes them.
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
    #: The most elements of the result's gradient that each of these reads.
    reads: tuple[int, ...] = ()
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


def layers_of(records: Sequence[Record], sample: Callable[[], Trace], joined: bool = False) -> list[StageLayers]:
    """The FLOP of each stage of a chain, from the records of one run; `sample` runs one sample.

    What takes apart a joined input is no operator of the network.

    Products of constants, as of a recurrent layer's first state and its weight, are among those of the first stage.
    """
    # Whether each tensor needs a gradient; the chain's input needs none.
    needs_gradient: dict[Any, bool] = {}
    before = False
    counted: set[Hashable] = set()
    stages = []
    parameters = records[0].trace.values_of([*records[0].trace.module.parameters()]) if records else frozenset()
    for record in records:
        stage = record.stage
        needs_gradient[stage.start] = before
        layers, executed, entrywise, other_weights, work = [], 0, [], 0, []
        for target, group in groupby(stage.edges, lambda edge: edge.target):
            edges = [edge for edge in group if not (joined and edge.source == 0)]
            if not edges:
                continue
            weights = _weights_of(record, edges[0], parameters)
            operands = sum(needs_gradient.get(edge.source, False) for edge in edges)
            # A weight that several operators read, such as those of a recurrence's steps, is counted once.
            keys = _keys(record, edges[0], weights)
            fresh = {name for name, key in keys.items() if key not in counted}
            counted.update(keys.values())
            values = dict(edges[0].operation.node.tensors)
            trained = {name for name in weights if _trains(record.trace, values[name])}
            sources = {name: _sources(record.trace, values[name], parameters) for name in fresh}
            layer = _layer(edges, operands, weights, trained, sources)
            if layer.weights:
                # Whoever multiplies by a product of weights has their elements.
                counted.update(_parameters(keys.values()))
            executed += _executed(edges)
            work.append(_work(stage, edges, [needs_gradient.get(edge.source, False) for edge in edges], layer))
            if layer.parameters or layer.forward:
                layers.append(layer)
            if layer.weight_gradient and _is_entrywise(edges):
                entrywise.append(0 if stage.operator is not None else stage.edges.index(edges[0]))
            else:
                other_weights += layer.weight_gradient
            needs_gradient[target] = operands > 0 or bool(trained)
        before = needs_gradient.get(stage.stop, False)
        stages.append(StageLayers(tuple(layers), executed, tuple(entrywise), other_weights, tuple(work)))
    if stages and constant_products(records[0].trace):
        first, trace = stages[0], sample()
        constants = [_constant_layer(trace, *product, counted) for product in constant_products(trace)]
        work = [OperatorWork(layer, StepFlop(layer.forward, 0, layer.backward)) for layer in constants]
        stages[0] = replace(
            first,
            layers=(*constants, *first.layers),
            other_weights=first.other_weights + sum(layer.weight_gradient_sparse for layer in constants),
            work=(*work, *first.work),
        )
    return stages


def constant_products(trace: Trace) -> list[tuple[Node, int]]:
    """The calls with products of which none depends on the input but the output does, with their multiply-adds."""
    graph, used = trace.graph, set[int]()
    waiting = [graph.output]
    while waiting:
        value = waiting.pop()
        if value not in used:
            used.add(value)
            info = graph.infos[value]
            waiting += (each for node in (info.maker, info.whole) if node is not None for _, each in node.tensors)
    parts = (each for node in graph.nodes for each in (node, *node.parts))
    nodes = (node for node in parts if not node.operands and not used.isdisjoint(node.results))
    products = ((node, multiply_adds_of(trace, node.overload, node.args, node.results[0])) for node in nodes)
    return [(node, count) for node, count in products if count]


def _parameters(keys: Iterable[Hashable]) -> set[Hashable]:
    """The parameters that weights come from, of whose keys these are."""
    return {parameter for key in keys if isinstance(key, tuple) for parameter in key[0]}


def multiply_adds_of(trace: Trace, overload: Any, arguments: Iterable[Any], result: int) -> int:
    """Multiply-adds of the matrix products in a call's forward pass, for the whole batch."""
    count = flop_registry.get(getattr(overload, "_overloadpacket", None))
    if count is None:
        return 0
    read = [trace.tensor(each.number) if isinstance(each, Value) else trace.read(each) for each in arguments]
    return int(count(*read, out_val=trace.tensor(result))) // 2


def _constant_layer(trace: Trace, node: Node, products: int, counted: set[Hashable]) -> LayerFlop:
    """The FLOP of a product of constants, some of which may be weights."""
    keys = {name: _key(trace, value) for name, value in node.tensors if _trains(trace, value)}
    tensors = {name: trace.tensor(value).detach() for name, value in node.tensors if name in keys}
    counts = {name: (tensor.numel(), int(tensor.count_nonzero())) for name, tensor in tensors.items()}
    fresh = [name for name, key in keys.items() if key not in counted and not counted.issuperset(_parameters([key]))]
    counted.update(keys.values())
    factors = [name for name in keys if name not in _summands(node.overload)]
    sparse = products
    if len(factors) == 1:
        elements, nonzero = counts[factors[0]]
        sparse = products * nonzero // max(1, elements)
    return LayerFlop(
        path=node.path,
        operator=node.name,
        parameters=sum(counts[name][0] for name in fresh),
        nonzero=sum(counts[name][1] for name in fresh),
        weights=sum(counts[name][0] for name in fresh if name in factors),
        zeros=sum(counts[name][0] - counts[name][1] for name in fresh if name in factors),
        forward=2 * products,
        forward_sparse=2 * sparse,
        backward=2 * products * len(factors),
        backward_sparse=2 * sparse * len(factors),
        jacobian_nnz=0,
        jacobian_nbytes=0,
        weight_gradient=2 * products * len(factors),
        weight_gradient_sparse=2 * sparse * len(factors),
    )


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
    # Forward, the operands that it reads and its one result; backward, a gradient of each operand.
    read = sum(min(edge.call.in_size, _reach(edge)) for edge, _ in counted)
    written = edges[0].call.out_size if counted else 0
    dense = StepFlop(read + written, sum(_elementwise_backward(edge) for edge, needs in counted if needs), 0)
    if multiplies:
        dense = StepFlop(layer.forward, layer.backward - layer.weight_gradient, layer.weight_gradient)
    return OperatorWork(
        layer if layer.parameters or multiplies else None,
        dense,
        tuple(number for number, _ in numbers),
        tuple(number for number, needs in numbers if needs),
        tuple(_gradient_read(edge) for edge, needs in counted if needs),
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
        _elementwise_backward(edge) for edge in edges if not isinstance(edge.transposed_pattern.structure, Identity)
    )


def _elementwise_backward(edge: Edge) -> int:
    """Elements of gradients that PyTorch reads and writes for one operand of an operator without products."""
    return edge.call.in_size + _gradient_read(edge)


def _gradient_read(edge: Edge) -> int:
    """Elements of the result's gradient that the gradient of one operand depends on."""
    return min(edge.call.out_size, _reach(edge))


def _reach(edge: Edge) -> int:
    """A bound on the elements of the result that depend on the operand, and the other way around.

    A part of a concatenation reaches as many as it has, and a slice reads as many as it gives.
    """
    return edge.call.in_size + edge.call.out_size if edge.coupling else unpruned_nnz(edge)


def unpruned_nnz(edge: Edge) -> int:
    """Entries of an edge's Jacobian without any pruning."""
    return edge.rule.pattern(replace(edge.call, masks={})).nnz if edge.call.masks else edge.transposed_pattern.nnz


def _weights_of(record: Record, edge: Edge, parameters: frozenset[int]) -> dict[str, torch.Tensor]:
    """The arguments of an operator that are parameters, or computed from parameters, by name."""
    trace, node = record.trace, edge.operation.node
    dependent = {operand.name for operand in node.operands}
    constants = {name: value for name, value in node.tensors if name not in dependent}
    return {
        name: trace.tensor(value)
        for name, value in constants.items()
        if _trains(trace, value) or trace.graph.made_of(value, parameters)
    }


def _sources(trace: Trace, value: int, parameters: frozenset[int]) -> list[torch.Tensor]:
    """The parameters that a weight is, or is computed from."""
    numbers = {value} & parameters or {each for each in parameters if trace.graph.made_of(value, {each})}
    return [trace.tensor(number).detach() for number in sorted(numbers)]


def _trains(trace: Trace, value: int) -> bool:
    """Whether a value has a gradient, or is computed of what has one: the parts of a call are recorded without."""
    graph = trace.graph
    trained = [graph.externals[place] for place in graph.infos[value].externals]
    # A dropout's mask has the shape of what has a gradient, and nothing else of it.
    return trace.tensor(value).requires_grad or graph.made_of(value, trained)


def _keys(record: Record, edge: Edge, weights: Collection[str]) -> dict[str, Hashable]:
    """What is the same for two weights that are one: the parameters that they come from, and the part of these."""
    values = dict(edge.operation.node.tensors)
    return {name: _key(record.trace, values[name]) for name in weights}


def _key(trace: Trace, value: int) -> Hashable:
    """What is the same for two weights that are one, also in another run."""
    tensor, places = trace.tensor(value), trace.graph.infos[value].externals
    parameters = frozenset(id(trace.tensor(trace.graph.externals[place])) for place in places)
    return (parameters, tensor.storage_offset(), tensor.numel()) if parameters else id(tensor)


def _summands(overload: Any) -> Collection[str]:
    """The arguments that are no factors; `beta` scales the summand `self` of ``aten.addmm`` and similar operators."""
    scaled = any(argument.name == "beta" for argument in overload._schema.arguments)
    return ("bias", "attn_mask", "self") if scaled else ("bias", "attn_mask")


def _layer(
    edges: Sequence[Edge],
    operands: int,
    weights: Mapping[str, torch.Tensor],
    trained: Set[str],
    fresh: Mapping[str, Sequence[torch.Tensor]],
) -> LayerFlop:
    """The FLOP of an operator with `operands` operands that need a gradient.

    Of the weights, `trained` ones have gradients, and `fresh` ones are not counted yet; with these, the parameters
    that they come from.
    """
    call, rule = edges[0].call, edges[0].rule
    dense = rule.multiply_adds(call)
    patterns = [edge.transposed_pattern for edge in edges if not edge.coupling]
    nnz = sum(pattern.nnz for pattern in patterns)
    sparse = nnz if _is_entrywise(edges) else dense
    factors = [name for name in weights if dense and name not in _summands(edges[0].operation.overload)]
    # Of a weight that samples have each, as what an embedding gives, one sample's counts.
    of_sample = {name: edges[0].operation.of_sample(name, weights[name].detach()) for name in fresh}
    counted = {name: (weight.numel(), int(weight.count_nonzero())) for name, weight in of_sample.items()}
    for name in counted.keys() - factors:
        # What repeats its parameters, as an expanded class token or a table of biases by positions, has their elements.
        elements = sum(source.numel() for source in fresh[name])
        if 0 < elements < counted[name][0]:
            counted[name] = elements, sum(int(source.count_nonzero()) for source in fresh[name])
    multiplied = [counted[name] for name in factors if name in fresh]
    trains = not trained.isdisjoint(factors)
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
