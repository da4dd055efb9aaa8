"""A recurrent layer as `count_flop` counts it: a chain of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from .._chain import check_shape
from .._flop import Counted, LayerFlop, Observation, Subject, without_zeros
from .._modules import refresh_weights, trains
from ..patterns import Pattern, UnsupportedOperatorError, state_jacobian_pattern, state_jacobian_values
from ._cells import CELLS, Kept, Weights
from ._runs import Sequences

__all__ = ["flop_subject"]

_NAMES = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")


def flop_subject(module: nn.RNNBase, input_shape: Sequence[int]) -> Subject:
    """The steps of a layer, whose Jacobians with respect to the state before all have one pattern.

    Raises
    ------
    UnsupportedOperatorError
        Where the layer is several, goes both ways or projects: its steps are no chain.
    ValueError
        Where the shape is not ``(time, features)``.
    """
    shape = check_shape(input_shape)
    if len(shape) != 2 or shape[1] != module.input_size:
        raise ValueError(f"input_shape is {shape}; expected (time, {module.input_size})")
    if module.num_layers > 1 or module.bidirectional or module.proj_size:
        raise UnsupportedOperatorError(
            f"{module} is no chain of steps; count its layers and directions one by one, without projections"
        )
    refresh_weights(module)
    weights = Weights(*(getattr(module, name).detach() for name in _NAMES[: 4 if module.bias else 2]))
    cell, time = CELLS[module.mode], shape[0]
    kept = weights.hidden != 0
    transposed = state_jacobian_pattern(module.mode, kept.cpu().numpy()).T
    gate_flop = 2.0 * int(kept.sum())

    def observe(x: torch.Tensor) -> Observation:
        sequences = Sequences.equal(time, 1)
        rows = Kept(
            x.new_empty(time, weights.size),
            x.new_empty(time if cell.kept else 0, cell.kept * weights.size),
            x.new_zeros(1, cell.states * weights.size),
        )
        cell.forward(sequences.whole(1), cell.enter(x[0].contiguous(), weights), weights, rows.initial, rows)
        state = cell.state(rows, sequences.before(1), torch.from_numpy(sequences.sample))
        values = state_jacobian_values(module.mode, weights.hidden, transposed.T, state)
        values = values[torch.from_numpy(transposed.T.transposition.astype("int64"))]
        return [without_zeros(transposed, values[:, step].cpu().numpy()) for step in range(time)], [{}] * time

    dense = 2.0 * kept.numel()
    operators = [
        Counted(f"step {step}", module.mode.lower(), lambda _: gate_flop, dense, dense) for step in range(time)
    ]
    layer = _layer(module, transposed, time)
    of_weights = {"pruned": float(layer.weight_gradient_sparse), "observed": None}
    return Subject(shape, [transposed] * time, operators, observe, (layer,), of_weights)


def _layer(module: nn.RNNBase, transposed: Pattern, time: int) -> LayerFlop:
    """All steps of a layer. The first step's state has no gradient; its weights' gradient is added up all the same."""
    tensors = {name: getattr(module, name).detach() for name in _NAMES[: 4 if module.bias else 2]}
    trained = [trains(module, name) for name in _NAMES]

    def flop(sizes: Mapping[str, int]) -> tuple[int, int, int]:
        """Forward, back and the weights' part of that, where the weights have so many elements to multiply by."""
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
        # One pattern for all steps.
        jacobian_nbytes=4 * time * transposed.nnz + transposed.index_nbytes,
    )
