"""A recurrent layer as a chain of its steps, which `count_flop` counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..patterns import Pattern, UnsupportedOperatorError
from ..recurrence import CELLS, Recurrent, Saved, Sequences, StepJacobian, Weights, cell_on
from ..stages import check_shape
from ..tracing import refresh_weights, trains
from .layer_flop import LayerFlop, OperatorWork, StepFlop
from .subject import CountedOperator, Observation, Subject, without_zeros

_NAMES = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")


def is_sequence(module: nn.Module) -> bool:
    """Whether a module is one recurrent layer in one direction: a chain of its steps."""
    return isinstance(module, nn.RNNBase) and not (module.num_layers > 1 or module.bidirectional or module.proj_size)


def sequence_subject(module: nn.RNNBase, input_shape: Sequence[int], inputs: torch.Tensor | None = None) -> Subject:
    """The steps of a layer; their Jacobians with respect to the previous state have one pattern.

    Samples are observed of `inputs`, ``(batch, time, features)``.
    """
    shape = check_shape(input_shape)
    if len(shape) != 2 or shape[1] != module.input_size:
        raise ValueError(f"input_shape is {shape}; expected (time, {module.input_size})")
    if not is_sequence(module):
        raise UnsupportedOperatorError(
            f"{module} is no chain of steps; take its layers and directions one by one, without projections"
        )
    cell = module.cell if isinstance(module, Recurrent) else CELLS.get(module.mode)
    if cell is None or not cell.terms:
        raise UnsupportedOperatorError(f"{module}: the Jacobian's pattern of the cell {module.mode} is not known")
    refresh_weights(module)
    weights = Weights(*(getattr(module, name).detach() for name in _NAMES[: 4 if module.bias else 2]))
    time, jacobian, hidden = shape[0], StepJacobian(cell, weights), weights.hidden
    here = cell_on(cell, hidden)
    transposed = jacobian.pattern.T
    gate_flop, dense = 2.0 * int(hidden.count_nonzero()), 2.0 * hidden.numel()

    def observed(x: torch.Tensor) -> Observation:
        sequences = Sequences.equal(time, 1)
        rows = Saved(
            x.new_empty(time, weights.size),
            x.new_empty(time if here.saved_vectors else 0, here.saved_vectors * weights.size),
            x.new_zeros(1, cell.states * weights.size),
        )
        here.forward(sequences.whole(1), here.enter(x[0].contiguous(), weights), weights, rows.initial, rows)
        values = jacobian.values(sequences, 1, x[0], rows)
        values = values[torch.from_numpy(jacobian.pattern.transposition.astype("int64"))]
        return [without_zeros(transposed, values[:, step].cpu().numpy()) for step in range(time)], [{}] * time

    def observe() -> Iterator[Observation]:
        return map(observed, () if inputs is None else inputs.split(1))

    count = 0 if inputs is None else len(inputs)
    operators = [
        CountedOperator(f"step {step}", module.mode.lower(), lambda _: gate_flop, dense, dense) for step in range(time)
    ]
    layer = _layer(module, transposed, time)
    # The layer's figures are those of all steps together.
    dense_flop = StepFlop(layer.forward, layer.backward - layer.weight_gradient, layer.weight_gradient)
    operators[0] = replace(operators[0], work=(OperatorWork(layer, dense_flop),))
    weight_gradients = {"pruned": float(layer.weight_gradient_sparse), "observed": None}
    return Subject(
        shape, [transposed] * time, operators, observe, (layer,), weight_gradients, samples=count, recurrent=True
    )


def _layer(module: nn.RNNBase, transposed: Pattern, time: int) -> LayerFlop:
    """The FLOP of all steps of a layer, whose initial state needs no gradient."""
    tensors = {name: getattr(module, name).detach() for name in _NAMES[: 4 if module.bias else 2]}
    trained = [trains(module, name) for name in _NAMES]

    def flop(sizes: Mapping[str, int]) -> tuple[int, int, int]:
        """FLOP forward, backward, and of the weights' gradients, with `sizes` elements in the weights."""
        of_input, of_state = (sizes[name] for name in _NAMES[:2])
        of_weights = 2 * time * (trained[0] * of_input + trained[1] * of_state)
        return 2 * time * (of_input + of_state), of_weights + 2 * (time - 1) * any(trained) * of_state, of_weights

    sizes = {name: tensor.numel() for name, tensor in tensors.items()}
    nonzero = {name: int(tensor.count_nonzero()) for name, tensor in tensors.items()}
    dense, sparse = flop(sizes), flop(nonzero)
    return LayerFlop(
        path=type(module).__name__,
        operator=module.mode.lower(),
        parameters=sum(sizes.values()),
        nonzero=sum(nonzero.values()),
        weights=sum(sizes[name] for name in _NAMES[:2]),
        zeros=sum(sizes[name] - nonzero[name] for name in _NAMES[:2]),
        forward=dense[0],
        forward_sparse=sparse[0],
        backward=dense[1],
        backward_sparse=sparse[1],
        weight_gradient=dense[2],
        weight_gradient_sparse=sparse[2],
        jacobian_nnz=time * transposed.nnz,
        # All steps share the indices of one pattern.
        jacobian_nbytes=4 * time * transposed.nnz + transposed.index_nbytes,
    )
