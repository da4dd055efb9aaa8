"""One layer in one direction of time, as autograd sees it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from ..runtime import is_batched, is_transformed, on_device
from ..tracing import without_autocast
from .cells import Saved, Weights, check_step, preceding
from .layer_recurrences import LayerPass
from .once_differentiable import LayerOnce, alive, once
from .reference import outputs_by_steps
from .reports import PassOfReports
from .sequences import index, plain
from .small_layer import SmallLayer

_requires_grad, _is_there = attrgetter("requires_grad"), partial(is_not, None)


def run_layer(
    layer: LayerPass, x: torch.Tensor, initial: torch.Tensor, parameters: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs ``(rows, size)`` and last states ``(batch, states · size)`` of a layer in one direction.

    Parameters
    ----------
    layer : LayerPass
        The layer, and how both of its recurrences are solved.
    x : Tensor, (rows, features)
        The input.
    initial : Tensor, (batch, states · size)
        The states before the first steps.
    parameters : sequence of Tensor or None
        As `Weights` orders them.
    """
    tensors = (x, initial, *parameters)
    trains = torch.is_grad_enabled() and any(map(_requires_grad, filter(_is_there, tensors)))
    differentiated = trains or is_transformed()
    check_step(layer.cell, initial.shape[1] // layer.cell.states, x, gradients=differentiated)
    if differentiated:
        output, end, *_ = _Layer.apply(layer, *tensors)
    else:
        with torch.no_grad():
            _, saved, end = _forward(layer, x, initial, *parameters, keep=False)
        output = saved.output
    return output, end


def _forward(
    layer: LayerPass, x: torch.Tensor, initial: torch.Tensor, *parameters: torch.Tensor | None, keep: bool
) -> tuple[torch.Tensor, Saved, torch.Tensor]:
    """The states and gates that the backward pass reads, each step's output, and the last states."""
    cell, part, steps = layer.cell, layer.part, layer.sequences.steps
    with without_autocast(x.device):
        weights, phase = _weights(layer, x, initial, parameters), f"forward pass of {layer.name}"
        if part is not None:
            initial, number = part.ranks.take_over(initial.detach(), layer.direction, phase)
            layer.initial = initial
        # Newton's method needs the gates too.
        rows = steps if cell.saved_vectors and (keep or layer.forward.name not in ("auto", "sequential")) else 0
        size, initial = weights.size, plain(initial)
        first, _, after = layer.sequences.state_rows(layer.direction)
        states = x.new_empty(max(first.stop, after.stop) if keep else steps, size)
        if len(states) > steps:
            states[first] = initial[:, :size]
        saved = Saved(states[after] if keep else states, x.new_empty(rows, cell.saved_vectors * size), initial)
        end = layer.solve_forward(cell.enter(plain(x), weights), weights, saved)
        if part is not None:
            part.ranks.hand_over(end, layer.direction, phase, number)
        return states, saved, end


class _Layer(LayerOnce):  # type: ignore[misc, valid-type]
    @staticmethod
    def forward(
        layer: LayerPass, x: torch.Tensor, initial: torch.Tensor, *parameters: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        states, saved, end = _forward(layer, x, initial, *parameters, keep=True)
        # The output is the caller's, to change as they like.
        return saved.output.clone(), end, states, saved.gates

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.layer, *tensors = inputs
        _, _, states, gates = output
        ctx.mark_non_differentiable(states, gates)
        ctx.save_for_backward(states, gates, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor | None, grad_end: torch.Tensor | None, *_: None
    ) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        gradients = iter(_gradients_once(ctx.layer, wanted, grad_output, grad_end, *ctx.saved_tensors))
        return (None, *[next(gradients) if need else None for need in wanted])


def _gradients(
    layer: LayerPass,
    wanted: Sequence[bool],
    grad_output: torch.Tensor | None,
    grad_end: torch.Tensor | None,
    states: torch.Tensor,
    gates: torch.Tensor,
    x: torch.Tensor,
    initial: torch.Tensor,
    *parameters: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """The gradients that are wanted, of the input, the first states and the parameters."""
    with without_autocast(x.device):
        weights = Weights(*[None if each is None else plain(each) for each in parameters])  # type: ignore[arg-type]
        x, initial = x.detach(), plain(initial if layer.initial is None else layer.initial)
        saved = Saved(states[layer.sequences.state_rows(layer.direction).after], gates, initial)
        grad_gates, rows, grad_initial = layer.solve_backward(
            x,
            weights,
            saved,
            None if grad_output is None else plain(grad_output),
            torch.zeros_like(initial) if grad_end is None else plain(grad_end),
        )
        factors = (x, initial, weights.input) if layer.cell.bounded else (x, states, initial, weights.input)
        if rows != slice(0, len(x)) and not all(tensor.sum().isfinite() for tensor in factors):
            # Their products with zeros are to be seen.
            grad_gates[: rows.start], grad_gates[rows.stop :], rows = 0, 0, slice(0, len(x))
        if layer.part is not None and not layer.part.begins(layer.direction):
            # The first states were not this rank's.
            grad_initial = torch.zeros_like(grad_initial)
        for_x, *others = _products(layer, x, states, saved, weights, grad_gates, rows, wanted)
    gradients = (for_x, grad_initial, *others)
    return tuple([grad for grad, need in zip(gradients, wanted, strict=True) if need and grad is not None])


def _gradients_by_steps(
    layer: LayerPass,
    wanted: Sequence[bool],
    grad_output: torch.Tensor | None,
    grad_end: torch.Tensor | None,
    _states: torch.Tensor,
    _gates: torch.Tensor,
    *inputs: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """As `_gradients`, step after step in PyTorch's operations, which autograd differentiates again.

    Raises
    ------
    NotImplementedError
        Of a layer on a device, whose kernels have only first derivatives there, or across ranks.
    """
    x, initial, *parameters = inputs
    assert x is not None and initial is not None
    if layer.part is not None or on_device(x):
        raise NotImplementedError(LayerOnce.no_second)
    with without_autocast(x.device):
        steps = x.split(np.diff(layer.sequences.offset).tolist())
        outputs, end = outputs_by_steps(layer.cell, steps, initial, parameters, reverse=layer.direction < 0)
        pairs = [(y, of_y) for y, of_y in ((torch.cat(outputs), grad_output), (end, grad_end)) if of_y is not None]
        results, factors = zip(*pairs, strict=True)
        leaves = [each for each, need in zip(inputs, wanted, strict=True) if need]
        return torch.autograd.grad(results, leaves, factors, create_graph=True, materialize_grads=True)  # type: ignore[arg-type]


_gradients_once = once(_gradients, LayerOnce, _gradients_by_steps)


def _weights(
    layer: LayerPass, x: torch.Tensor, initial: torch.Tensor, parameters: Sequence[torch.Tensor | None]
) -> Weights:
    """The parameters, detached; TypeError or ValueError where one does not fit the input, for kernels do not check."""
    size = initial.shape[1] // layer.cell.states
    check_weights(layer.name, layer.cell.gates, size, x.shape[1], x, parameters)
    weight, hidden, *biases = [None if parameter is None else plain(parameter) for parameter in parameters]
    assert weight is not None and hidden is not None
    return Weights(weight, hidden, *biases)


def check_weights(
    layer: str, gates: int, size: int, inputs: int, x: torch.Tensor, parameters: Sequence[torch.Tensor | None]
) -> None:
    """TypeError or ValueError where a layer's parameter does not fit the input; the message names it."""
    rows = gates * size
    shapes = {"weight_ih": (rows, inputs), "weight_hh": (rows, size), "bias_ih": (rows,), "bias_hh": (rows,)}
    for (name, shape), parameter in zip(shapes.items(), parameters, strict=False):
        if parameter is None:
            continue
        if parameter.shape != shape:
            raise ValueError(f"{name}_{layer} has shape {tuple(parameter.shape)}; expected {shape}")
        if parameter.dtype != x.dtype or parameter.device != x.device:
            raise TypeError(
                f"{name}_{layer} is {parameter.dtype} on {parameter.device}, and the input {x.dtype} on "
                f"{x.device}; convert or move one of them"
            )


def _products(
    layer: LayerPass,
    x: torch.Tensor,
    states: torch.Tensor,
    saved: Saved,
    weights: Weights,
    grad_gates: torch.Tensor,
    rows: slice,
    wanted: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Gradients of the input, both weights and both biases: a few products of large matrices (equation 2.2).

    Those of the gates are zeros but for some `rows`.
    """
    for_x, _, for_input, for_hidden, for_bias, for_hidden_bias = wanted
    entering, recurrent = layer.cell.grad_columns(weights.size)
    from_input = grad_gates[rows, entering]
    sums = grad_gates[rows].sum(dim=0) if for_bias or for_hidden_bias else None
    return [
        _placed(from_input @ weights.input, rows, len(x)) if for_x else None,
        _outer(from_input, x[rows]) if for_input else None,
        _hidden_gradient(layer, states, saved, grad_gates, rows, recurrent) if for_hidden else None,
        sums[entering] if sums is not None and for_bias else None,
        _joined([sums[part] for part in recurrent]) if sums is not None and for_hidden_bias else None,
    ]


def _placed(some: torch.Tensor, rows: slice, count: int) -> torch.Tensor:
    """``(count, ...)``: `some` at `rows`, and zeros elsewhere."""
    return some if len(some) == count else functional.pad(some, (0, 0, rows.start, count - rows.stop))


def _hidden_gradient(
    layer: LayerPass,
    states: torch.Tensor,
    saved: Saved,
    grad_gates: torch.Tensor,
    rows: slice,
    recurrent: list[slice],
) -> torch.Tensor:
    """``Σ_t (gradient of the gates at t) ⊗ (state before t)``."""
    sequences, direction = layer.sequences, layer.direction
    if len(states) > sequences.steps:
        before = states[sequences.state_rows(direction).before]
    else:
        initial = saved.initial[:, : states.shape[1]]
        before = preceding(states, initial, sequences.before(direction), index(sequences.sample, initial))
    return _joined([_outer(grad_gates[rows, part], before[rows]) for part in recurrent])


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]


#: Rows in each part of a product of `_outer` on a device.
_ROWS = 1024


def _outer(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``leftᵀ @ right``, of many more rows than columns.

    A device has one block for a small product, however many rows it is a sum over: there it is the sum of products of
    parts of the rows, in a fixed order.
    """
    parts = len(left) // _ROWS
    if parts < 2 or not on_device(left):
        return left.T @ right
    size = len(left) // parts
    whole = size * parts
    pieces = (factor[:whole].unflatten(0, (parts, size)) for factor in (left, right))
    return torch.addmm(torch.bmm(next(pieces).mT, next(pieces)).sum(dim=0), left[whole:].T, right[whole:])


def run_small_layers(
    layers: Sequence[SmallLayer],
    this: PassOfReports,
    x: torch.Tensor,
    starts: Sequence[torch.Tensor | None],
    weights: Sequence[torch.Tensor],
    guesses: Sequence[torch.Tensor | None],
    dropout: float,
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Outputs and last states of a module's layers of small states, one after the other.

    Parameters
    ----------
    layers : sequence of SmallLayer
        The layers.
    this : PassOfReports
        The pass, which is told how the recurrences are solved.
    x, starts, weights, guesses
        As `SmallLayer.forward` takes them, of all layers and directions.
    dropout : float
        The share of the elements of outputs that are dropped before another layer.
    """
    count, alone, shape = len(weights) // len(layers), len(layers) == 1, layers[0].shape
    # The last states of several layers are written into one tensor.
    whole = len(layers) * shape.directions, shape.batch, shape.size
    ends, lasts = [] if alone else [x.new_empty(whole) for _ in starts], []
    for number, layer in enumerate(layers):
        places = slice(number * shape.directions, (number + 1) * shape.directions)
        first = starts if alone else [each if each is None else each[places] for each in starts]
        own, room = weights[number * count : (number + 1) * count], None if alone else [end[places] for end in ends]
        x, *last = _SmallCall(layer, this, number).run(x, first, own, guesses[places], room)
        if dropout and number < len(layers) - 1:
            x = functional.dropout(x, dropout)
        lasts.append(last)
    if alone:
        return x, lasts[0]
    return x, [_Joined.apply([end], *parts) for end, parts in zip(ends, zip(*lasts, strict=True), strict=True)]


class _SmallCall(NamedTuple):
    """A pass of a layer of small states, by the layer's number in its module."""

    layer: SmallLayer
    this: PassOfReports
    number: int

    def run(
        self,
        x: torch.Tensor,
        starts: Sequence[torch.Tensor | None],
        weights: Sequence[torch.Tensor],
        guesses: Sequence[torch.Tensor | None],
        last: Sequence[torch.Tensor] | None,
    ) -> tuple[torch.Tensor, ...]:
        """Outputs and last states."""
        x, *weights = map(alive, (x, *weights))
        device, dtype, facts = x.device, x.dtype, zip(weights, self.layer.weight_shapes, strict=True)
        # One look at each weight finds what does not fit, for kernels do not check, and what they could not read.
        for weight, shape in facts:
            if weight.shape != shape or weight.dtype is not dtype or weight.device != device:
                self._check_weights(x, weights)
            if not weight.is_contiguous() or weight.is_neg():
                weights = [each.resolve_neg().contiguous() for each in weights]
        if x.stride(2) != 1 or x.is_neg():
            x = x.resolve_neg().contiguous()
        starts = [None if each is None else alive(each).resolve_neg().contiguous() for each in starts]
        tensors = (x, *starts, *weights)
        if torch.is_grad_enabled() and any(map(_requires_grad, filter(_is_there, tensors))):
            return _SmallLayer.apply_outside(self, guesses, last, *tensors)
        output, last, _ = self.forward(x, starts, weights, guesses, last, keep=False)
        return output, *last

    def forward(self, *arguments: Any, keep: bool) -> tuple[torch.Tensor, Sequence[torch.Tensor], list[torch.Tensor]]:
        """Outputs, last states and what a backward pass reads."""
        try:
            output, last, saved, memories = self.layer.forward(*arguments, keep=keep)
        except torch.OutOfMemoryError as error:
            raise self._no_memory("forward") from error
        self._tell("forward", memories)
        self.this.starts += [partial(self.layer.boundaries, memory) for memory in memories]
        return output, last, saved

    def backward(self, *arguments: Any) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the input, the first states and the weights; None where none is wanted."""
        try:
            gradients, memories = self.layer.backward(*arguments)
        except torch.OutOfMemoryError as error:
            raise self._no_memory("backward") from error
        self._tell("backward", memories)
        return tuple(gradients)

    def _tell(self, recurrence: str, memories: Sequence[torch.Tensor]) -> None:
        """Say how recurrences were solved, by the memory of each direction in which kernels tell what came of it."""
        for name, memory in zip(self.layer.names(self.number), memories, strict=True):
            self.this.add(recurrence, name, partial(self.layer.report, recurrence, name, memory))

    def _no_memory(self, recurrence: str) -> torch.OutOfMemoryError:
        time, batch, _, size, _ = self.layer.shape
        return torch.OutOfMemoryError(
            f"{recurrence} pass of {' and '.join(self.layer.names(self.number))}: {time:,} steps of {batch:,} samples "
            f"of {size} elements do not fit on {self.layer.device}; try a smaller batch or the CPU"
        )

    def _check_weights(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
        """TypeError or ValueError where a weight does not fit the input."""
        layer, count = self.layer, 4 if self.layer.bias else 2
        for direction, name in enumerate(layer.names(self.number)):
            of_direction = weights[count * direction : count * (direction + 1)]
            check_weights(name, layer.cell.gates, layer.shape.size, layer.shape.inputs, x, of_direction)


class _SmallLayer(LayerOnce):  # type: ignore[misc, valid-type]
    @staticmethod
    def forward(
        ctx: Any,
        call: _SmallCall,
        guesses: Sequence[torch.Tensor | None],
        last: Sequence[torch.Tensor] | None,
        x: torch.Tensor,
        *others: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        states = call.layer.cell.states
        output, last, saved = call.forward(x, others[:states], others[states:], guesses, last, keep=True)
        ctx.call = call
        ctx.save_for_backward(x, *others, *saved)
        ctx.set_materialize_grads(False)
        return output, *last

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None,) * 3 + _small_gradients(ctx.call, ctx.needs_input_grad[3:], *gradients, *ctx.saved_tensors)


def _gradients_of_small(
    call: _SmallCall, wanted: Sequence[bool], grad_output: torch.Tensor | None, *tensors: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """As `_SmallCall.backward`.

    The tensors are the gradients of the last states, the input, the first states, the weights, and what was saved.
    """
    states, count = call.layer.cell.states, len(wanted) - 1
    grad_last, x, saved = tensors[:states], tensors[states], tensors[states + 1 :]
    if any(each is not None and is_batched(each) for each in (grad_output, *grad_last)):
        raise NotImplementedError(_SmallLayer.no_batching)
    if grad_output is not None:
        # Of any strides, but with the elements' signs in memory.
        grad_output = grad_output.resolve_neg()
    ends = [None if each is None else plain(each) for each in grad_last]
    return call.backward(x, saved[:states], saved[states:count], saved[count:], grad_output, ends, wanted)


_small_gradients = once(_gradients_of_small, LayerOnce)


class _Joined(torch.autograd.Function):
    """One tensor of parts that lie in it side by side already, along the first axis: nothing is copied."""

    @staticmethod
    def forward(ctx: Any, whole: Sequence[torch.Tensor], *parts: torch.Tensor) -> torch.Tensor:
        ctx.sizes = [len(part) for part in parts]
        # In a sequence it is no input, of which the result would be a view that nobody may write to.
        return whole[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *gradient.split(ctx.sizes)
