"""What the stages of a module cost: counted in FLOP, or measured on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ..flop import counted_record, layers_of, sequence_subject
from ..patterns import Pattern
from ..runtime import run_times
from ..stages import Record, check_input, forward_pass
from ..terminal import layer_in_words
from ..tracing import check_module, traced, undisturbed
from .workload import StageCost, Workload


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
        return _recurrent(module, x, rate)
    return _chain(module, x, rate)[0]


def measured_workload(
    module: nn.Module, x: torch.Tensor, seconds: float, progress: Callable[[str], None] = lambda _: None
) -> Workload:
    """The workload of a module, by times of each stage's passes on this machine.

    Jacobians and their products are FLOP at the rate that all passes together reach.

    Parameters
    ----------
    module : Module
        As in `counted_workload`.
    x : Tensor, (batch, *input_shape)
        The mini-batch.
    seconds : float
        For how long each pass is timed, at most, once it has run three times.
    progress : callable
        Called with what is timed next.
    """
    if isinstance(module, nn.RNNBase):
        counted = _recurrent(module, x, 1.0)
        progress("steps")
        steps = [time / len(counted) for time in _recurrent_passes(module, x, seconds)]
        return _timed(counted, [steps] * len(counted))
    counted, records = _chain(module, x, 1.0)
    passes = []
    with undisturbed(module):
        for record in records:
            progress(layer_in_words(record.stage.path))
            passes.append(_passes(record, seconds))
    return _timed(counted, passes)


def _timed(counted: Workload, passes: Sequence[Sequence[float]]) -> Workload:
    """A workload that was counted at one FLOP a second, with measured seconds of its stages' passes."""
    stages = []
    rate = (counted.forward + counted.backward) / math.fsum(map(math.fsum, passes))
    for number, (stage, (forward, errors, gradients)) in enumerate(zip(counted.stages, passes, strict=True)):
        errors = errors if number else 0.0
        jacobian = stage.jacobian / rate
        stages.append(replace(stage, forward=forward, errors=errors, gradients=gradients, jacobian=jacobian))
    return replace(counted, stages=tuple(stages), rate=rate)


def _chain(module: nn.Module, x: torch.Tensor, rate: float) -> tuple[Workload, list[Record]]:
    """The workload of a chain by FLOP, and the records of its stages."""
    with undisturbed(check_module(module)):
        run = forward_pass(module, _samples(x), couples=True, by_autograd=False)[1]
        records = [counted_record(record) for record in run.records]
        stages, seen, seconds = list[StageCost](), set[int](), len(x) / rate
        counted = layers_of(records, lambda: traced(module, x[:1]))
        for record, layers in zip(records, counted, strict=True):
            stage, factor = record.stage, record.stage.factor()
            forward, errors, gradients = map(sum, zip(*(each.dense for each in layers.work), strict=True))
            weights = sum(record.trace.externals[place].nbytes for place in record.externals - seen)
            seen |= record.externals
            if not gradients and weights:
                gradients = math.prod(stage.out_shape)
            entries = factor.nnz if isinstance(factor, Pattern) else 0.0 if stage.couples else factor.estimate
            stages.append(
                StageCost(
                    forward=forward * seconds,
                    errors=errors * seconds,
                    gradients=gradients * seconds,
                    jacobian=entries * (1 if stage.shared else record.batch) / rate,
                    stored=_stored(record),
                    output=record.output.nbytes,
                    weights=weights,
                    factor=factor,
                    shared=stage.shared,
                    path=stage.path,
                )
            )
    if not stages:
        raise ValueError("the module has no stages, so that there is nothing to share; name one with an operator")
    return Workload(tuple(stages), len(x), x.nbytes, rate, x.element_size()), records


def _samples(x: torch.Tensor) -> torch.Tensor:
    """The mini-batch, where it can be worked on and is not empty."""
    if not check_input("x", x).numel():
        raise ValueError(f"x has shape {tuple(x.shape)}, which is empty; pass at least one sample")
    return x


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
    nodes = [operation.node for operation in record.stage.operations]
    read = {
        value
        for node in nodes
        for name, value in node.tensors
        if all(name != operand.name for operand in node.operands)
    }
    weights = [tensor for value in sorted(read) if (tensor := record.trace.tensor(value)).requires_grad]
    return _times(lambda: record.output_for(leaf), [leaf], weights, seconds)


def _recurrent_passes(module: nn.RNNBase, x: torch.Tensor, seconds: float) -> tuple[float, float, float]:
    """Seconds of all steps forward, of the gradient of the first state, and of those of the weights."""
    batch = x.shape[0] if module.batch_first else x.shape[1]
    states = [x.new_zeros(1, batch, module.hidden_size, requires_grad=True) for _ in range(1 + (module.mode == "LSTM"))]
    first = states[0] if len(states) == 1 else tuple(states)
    return _times(lambda: module(x, first)[0], states, [p for p in module.parameters() if p.requires_grad], seconds)


def _times(
    output: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], seconds: float
) -> tuple[float, float, float]:
    """Seconds of a forward pass, of the gradients of leaves, and of those of weights."""
    with torch.enable_grad():
        (forward,), y = run_times(output, most=seconds), output()
    if not y.requires_grad:
        return forward.fastest, 0.0, 0.0
    gradient = torch.ones_like(y)

    def back(*tensors: torch.Tensor) -> object:
        return torch.autograd.grad(y, tensors, gradient, retain_graph=True, allow_unused=True)

    passes = [partial(back, *leaves), *([partial(back, *leaves, *weights)] if weights else [])]
    errors, *whole = (each.fastest for each in run_times(*passes, most=seconds * len(passes)))
    # Noise may make both passes together shorter than one of them.
    return forward.fastest, errors, max(whole[0] - errors, 0.01 * errors) if whole else 0.0


def _recurrent(module: nn.RNNBase, x: torch.Tensor, rate: float) -> Workload:
    """The steps of a recurrent layer, by FLOP."""
    axes = "batch, time" if module.batch_first else "time, batch"
    if _samples(x).ndim != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected a padded batch, ({axes}, {module.input_size})")
    time, batch = (x.shape[1], x.shape[0]) if module.batch_first else x.shape[:2]
    subject = sequence_subject(module, (time, x.shape[2]))
    (layer,), factor = subject.layers, subject.factors[0]
    assert isinstance(factor, Pattern)
    seconds, state = batch / rate, factor.shape[0] * batch * x.element_size()
    # A step stores its input, its gates and its state.
    gates = module.all_weights[0][1].shape[0] * batch * x.element_size()
    step = StageCost(
        forward=layer.forward / time * seconds,
        errors=float(subject.operators[0].executed) * seconds,
        gradients=layer.weight_gradient / time * seconds,
        jacobian=factor.nnz * batch / rate,
        stored=int(x.nbytes) // time + gates + state,
        output=state,
        weights=0,
        factor=factor,
    )
    weights = sum(int(parameter.nbytes) for parameter in module.parameters() if parameter.requires_grad)
    stages = (replace(step, errors=0.0, weights=weights), *[step] * (time - 1))
    return Workload(stages, batch, 0, rate, x.element_size(), recurrent=True)
