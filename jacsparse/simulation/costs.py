"""What the stages of a module cost: measured on this machine, or counted in FLOP."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import nn

from ..flop import counted_record, layers_of, sequence_subject
from ..patterns import Pattern
from ..spgemm import matvec, multiply_adds, plan_product
from ..stages import Record, Region, check_input, forward_pass
from ..terminal import layer_in_words
from ..tracing import check_module, undisturbed
from .workload import StageCost, Workload

#: Multiply-adds of the product whose rate is measured, and the entries of a Jacobian whose values are: the most.
_MEASURED = 10**8


def counted_workload(module: nn.Module, x: torch.Tensor, rate: float) -> Workload:
    """The workload of a module, by FLOP at one rate for all operators and products.

    Passes are those of the dense training step of `jacsparse.count_flop`, as PyTorch executes it. The gradients of
    weights in a stage without products, as of batch normalisation, take an operation for each element of its result,
    and a Jacobian one for each entry.

    Parameters
    ----------
    module : Module
        A chain of stages, or an ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM`` of one layer in one direction.
    x : Tensor, (batch, *input_shape)
        The mini-batch.
    rate : float
        FLOP per second of a worker.
    """
    if isinstance(module, nn.RNNBase):
        return _recurrent(module, x, rate, rate)
    with undisturbed(check_module(module)):
        records = _records(module, x)
        stages, seconds = _stages(records, rate), len(x) / rate
        for number, layers in enumerate(layers_of(records)):
            forward, errors, gradients = map(sum, zip(*(each.dense for each in layers.work), strict=True))
            if not gradients and stages[number].weights:
                gradients = math.prod(records[number].stage.out_shape)
            stages[number] = replace(
                stages[number], forward=forward * seconds, errors=errors * seconds, gradients=gradients * seconds
            )
    return _workload(stages, x, rate, rate)


def measured_workload(
    module: nn.Module, x: torch.Tensor, seconds: float, progress: Callable[[str], None] = lambda _: None
) -> Workload:
    """The workload of a module, by measurements on this machine.

    Each stage's passes and Jacobian are timed. Products of Jacobians are FLOP at the rate of one that is timed, that of
    two consecutive stages with the most multiply-adds, if these are no more than 10^8.

    Parameters
    ----------
    module : Module
        As in `counted_workload`.
    x : Tensor, (batch, *input_shape)
        The mini-batch.
    seconds : float
        For how long each pass is timed.
    progress : callable
        Called with what is timed next.
    """
    if isinstance(module, nn.RNNBase):
        counted = _recurrent(module, x, 1.0, 1.0)
        progress("steps")
        passes = _recurrent_passes(module, x, seconds)
        progress("products")
        rates = _rates([stage.factor for stage in counted.stages[:2]], [False] * 2, x, seconds)
        forward, errors, gradients = (time / len(counted) for time in passes)
        stages = [
            replace(s, forward=forward, errors=errors, gradients=gradients, jacobian=s.jacobian / rates[1])
            for s in counted.stages
        ]
        steps = (replace(stages[0], errors=0.0), *stages[1:])
        return replace(counted, stages=steps, product_rate=rates[0], vector_rate=rates[1])
    with undisturbed(check_module(module)):
        records = _records(module, x)
        progress("products")
        stages = _stages(records, 1.0)
        rates = _rates([stage.factor for stage in stages], [stage.shared for stage in stages], x, seconds)
        for number, record in enumerate(records):
            progress(layer_in_words(record.stage.path))
            forward, errors, gradients = _passes(record, seconds)
            stages[number] = replace(
                stages[number],
                forward=forward,
                errors=errors if number else 0.0,
                gradients=gradients,
                jacobian=stages[number].jacobian / rates[1],
            )
            if record.stage.operator is not None and record.stage.transposed_pattern.nnz * len(x) <= _MEASURED:
                time = shortest_time(record.transposed_jacobian, seconds)
                stages[number] = replace(stages[number], jacobian=time)
    return _workload(stages, x, *rates)


def _records(module: nn.Module, x: torch.Tensor) -> list[Record]:
    """The records of the module's stages, as counts see them."""
    run = forward_pass(module, _samples(x), couples=True, by_autograd=False)[1]
    return [counted_record(record) for record in run.records]


def _samples(x: torch.Tensor) -> torch.Tensor:
    """The mini-batch, where it can be worked on and is not empty."""
    if not check_input("x", x).numel():
        raise ValueError(f"x has shape {tuple(x.shape)}, which is empty; pass at least one sample")
    return x


def shortest_time(function: Callable[[], object], seconds: float) -> float:
    """The shortest time of a call, which other users of the machine change least; of one call for no seconds."""
    if seconds:
        # The first call makes plans, and touches memory.
        function()
    times, end = list[float](), perf_counter() + seconds
    while not times or perf_counter() < end:
        begin = perf_counter()
        function()
        times.append(perf_counter() - begin)
    return min(times)


def _workload(stages: Sequence[StageCost], x: torch.Tensor, product_rate: float, vector_rate: float) -> Workload:
    if not stages:
        raise ValueError("the module has no stages, so that there is nothing to share; name one with an operator")
    return Workload(tuple(stages), len(x), x.nbytes, product_rate, vector_rate, x.element_size())


def _stages(records: Sequence[Record], rate: float) -> list[StageCost]:
    """The stages without the times of their passes; an entry of a Jacobian takes an operation at a rate."""
    stages, counted = [], set[int]()
    for record in records:
        stage, weights = record.stage, 0
        for place in record.externals - counted:
            weights += record.trace.externals[place].nbytes
        counted |= record.externals
        copies = 1 if stage.shared else record.batch
        factor = record.stage.factor()
        operations = factor.nnz if isinstance(factor, Pattern) else 0.0 if stage.couples else factor.estimate
        sizes = (_stored(record), record.output.nbytes, weights)
        stages.append(StageCost(0.0, 0.0, 0.0, operations * copies / rate, *sizes, factor, stage.shared, stage.path))
    return stages


def _stored(record: Record) -> int:
    """Bytes of the results of a stage's operators, without views of one another and of its input."""
    memory = record.input.untyped_storage().data_ptr()
    values = [value for operation in record.stage.operations for value in operation.node.results]
    results = [tensor for value in values if (tensor := record.trace.tensors[value]) is not None]
    storages = {result.untyped_storage().data_ptr(): result.nbytes for result in results}
    return sum(nbytes for pointer, nbytes in storages.items() if pointer != memory)


def _passes(record: Record, seconds: float) -> tuple[float, float, float]:
    """Seconds of a stage's forward pass, of the gradient of its input, and of those of its weights."""
    leaf = record.trace.elements(record.stage.start).detach().requires_grad_()
    with torch.enable_grad():
        forward = shortest_time(lambda: record.output_for(leaf), seconds)
        y = record.output_for(leaf)
    return forward, *(_backward_passes(y, [leaf], _weights(record), seconds) if y.requires_grad else (0.0, 0.0))


def _backward_passes(
    y: torch.Tensor, leaves: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], seconds: float
) -> tuple[float, float]:
    """Seconds of the gradients of leaves, and of those of weights."""
    gradient = torch.ones_like(y)

    def back(*tensors: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(y, tensors, gradient, retain_graph=True, allow_unused=True)

    errors = shortest_time(back(*leaves), seconds)
    if not weights:
        return errors, 0.0
    # Noise may make both passes together shorter than one of them.
    return errors, max(shortest_time(back(*leaves, *weights), seconds) - errors, 0.01 * errors)


def _weights(record: Record) -> list[torch.Tensor]:
    """The weights of a stage's operators that autograd computes gradients of."""
    weights = {}
    for operation in record.stage.operations:
        for name, value in operation.node.tensors:
            tensor = record.trace.tensor(value)
            if tensor.requires_grad and all(name != operand.name for operand in operation.node.operands):
                weights[value] = tensor
    return [*weights.values()]


def _rates(
    factors: Sequence[Pattern | Region], shared: Sequence[bool], x: torch.Tensor, seconds: float
) -> tuple[float, float]:
    """FLOP per second of a product of two matrices, and of the product's one with a vector."""
    candidates = []
    for number, (left, right) in enumerate(itertools.pairwise(factors)):
        if isinstance(left, Region) or isinstance(right, Region):
            continue
        pairs = multiply_adds(left, right)
        samples = 1 if all(shared[number : number + 2]) else len(x)
        if 0 < pairs * samples <= _MEASURED:
            candidates.append((pairs * samples, samples, left, right))
    if not candidates:
        # No two stages are multiplied, or only large ones: a dense product tells the rate.
        size = 256
        dense = torch.ones(size, size, dtype=x.dtype)
        products, vectors = (
            shortest_time(lambda: dense @ dense, seconds),
            shortest_time(lambda: dense @ dense[0], seconds),
        )
        return 2.0 * size**3 / products, 2.0 * size**2 / vectors
    pairs, samples, left, right = max(candidates, key=lambda candidate: candidate[0])
    plan = plan_product(left, right)
    a, b, c = (torch.ones(pattern.nnz, samples, dtype=x.dtype) for pattern in (left, right, plan.pattern))
    vector = torch.ones(plan.pattern.shape[1], samples, dtype=x.dtype)
    products = shortest_time(lambda: plan.multiply(a, b), seconds)
    vectors = shortest_time(lambda: matvec(plan.pattern, c, vector), seconds)
    return 2.0 * pairs / products, 2.0 * plan.pattern.nnz * samples / vectors


def _recurrent(module: nn.RNNBase, x: torch.Tensor, product_rate: float, vector_rate: float) -> Workload:
    """The steps of a recurrent layer, by FLOP."""
    axes = "batch, time" if module.batch_first else "time, batch"
    if _samples(x).ndim != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected a padded batch, ({axes}, {module.input_size})")
    time, batch = (x.shape[1], x.shape[0]) if module.batch_first else x.shape[:2]
    subject = sequence_subject(module, (time, x.shape[2]))
    (layer,), factor = subject.layers, subject.factors[0]
    assert isinstance(factor, Pattern)
    seconds, state = batch / product_rate, factor.shape[0] * batch * x.element_size()
    # A step stores its input, its gates and its state.
    gates = module.all_weights[0][1].shape[0] * batch * x.element_size()
    step = StageCost(
        forward=layer.forward / time * seconds,
        errors=float(subject.operators[0].executed) * seconds,
        gradients=layer.weight_gradient / time * seconds,
        jacobian=factor.nnz * batch / vector_rate,
        stored=int(x.nbytes) // time + gates + state,
        output=state,
        weights=0,
        factor=factor,
    )
    weights = sum(int(parameter.nbytes) for parameter in module.parameters() if parameter.requires_grad)
    stages = (replace(step, errors=0.0, weights=weights), *[step] * (time - 1))
    return Workload(stages, batch, 0, product_rate, vector_rate, x.element_size(), recurrent=True)


def _recurrent_passes(module: nn.RNNBase, x: torch.Tensor, seconds: float) -> tuple[float, float, float]:
    """Seconds of all steps forward, of the gradient of the first state, and of those of the weights."""
    batch = x.shape[0] if module.batch_first else x.shape[1]
    states = [x.new_zeros(1, batch, module.hidden_size, requires_grad=True) for _ in range(1 + (module.mode == "LSTM"))]
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def output() -> torch.Tensor:
        with torch.enable_grad():
            result: torch.Tensor = module(x, states[0] if len(states) == 1 else tuple(states))[0]
        return result

    forward = shortest_time(output, seconds)
    return forward, *_backward_passes(output(), states, weights, seconds)
