"""A recurrent layer as `count_flop` counts it: a chain of its steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .._chain import check_shape
from .._flop import Subject, without_zeros
from .._modules import refresh_weights
from ..patterns import Pattern, UnsupportedOperatorError, state_jacobian_pattern, state_jacobian_values
from ._cells import CELLS, Kept, Weights
from ._runs import Sequences

__all__ = ["flop_subject"]


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
    names = ("weight_ih_l0", "weight_hh_l0", *(("bias_ih_l0", "bias_hh_l0") if module.bias else ()))
    weights = Weights(*(getattr(module, name).detach() for name in names))
    cell, time = CELLS[module.mode], shape[0]
    kept = weights.hidden != 0
    transposed = state_jacobian_pattern(module.mode, kept.cpu().numpy()).T
    gate_flop = 2.0 * int(kept.sum())

    def observe(x: torch.Tensor) -> list[Pattern]:
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
        return [without_zeros(transposed, values[:, step].cpu().numpy()) for step in range(time)]

    operators = [(f"step {step}", module.mode.lower(), lambda _: gate_flop) for step in range(time)]
    return Subject(shape, [transposed] * time, operators, observe)
