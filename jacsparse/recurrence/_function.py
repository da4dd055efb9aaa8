"""One layer in one direction of time, as autograd sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._cells import Cell, Kept, Weights, preceding
from ._once import once
from ._runs import Sequences
from ._sweeps import Options, solve_backward, solve_forward

__all__ = ["run_layer"]


def run_layer(
    cell: Cell,
    sequences: Sequences,
    direction: int,
    x: torch.Tensor,
    initial: torch.Tensor,
    parameters: tuple[torch.Tensor | None, ...],
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs ``(rows, size)`` and last states ``(batch, states · size)`` of a layer in one direction.

    Parameters
    ----------
    cell : Cell
        Its kind.
    sequences : Sequences
        Which rows of `x` are whose.
    direction : int
        1, or -1 for a layer that runs from each sample's end.
    x : Tensor, (rows, features)
        The input.
    initial : Tensor, (batch, states · size)
        The states before the first steps.
    parameters : tuple of Tensor or None
        As `Weights` orders them.
    options : Options
        How both recurrences are solved.
    """
    output, end = _Layer.apply(cell, sequences, direction, options, x, initial, *parameters)
    return output, end


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        cell: Cell,
        sequences: Sequences,
        direction: int,
        options: Options,
        x: torch.Tensor,
        initial: torch.Tensor,
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, states = _weights(parameters), initial.detach().contiguous()
        wanted = any(ctx.needs_input_grad)
        # Newton's method needs the gates too.
        rows = sequences.steps if cell.kept and (wanted or options.forward != "sequential") else 0
        output = x.new_empty(sequences.steps, weights.size)
        kept = Kept(output, x.new_empty(rows, cell.kept * weights.size), states)
        entered = cell.enter(x.detach().contiguous(), weights)
        end = solve_forward(cell, sequences, direction, entered, weights, kept, options)
        if wanted:
            ctx.cell, ctx.sequences, ctx.direction, ctx.options = cell, sequences, direction, options
            ctx.save_for_backward(output, kept.gates, x, initial, *parameters)
        ctx.set_materialize_grads(False)
        return output, end

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor | None, grad_end: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        output, gates, *inputs = ctx.saved_tensors
        x, initial, *parameters = inputs
        wanted = ctx.needs_input_grad[4:]
        with torch.no_grad():
            weights, states = _weights(parameters), initial.contiguous()
            kept = Kept(output, gates, states)
            grad_gates, grad_initial = solve_backward(
                ctx.cell,
                ctx.sequences,
                ctx.direction,
                weights,
                kept,
                None if grad_output is None else grad_output.contiguous(),
                torch.zeros_like(states) if grad_end is None else grad_end.contiguous(),
                ctx.options,
            )
            for_x, *others = _products(ctx, x, kept, weights, grad_gates, wanted)
        found = [grad if need else None for grad, need in zip((for_x, grad_initial, *others), wanted, strict=True)]
        message = (
            "jacsparse.nn's recurrent layers cannot be differentiated twice; use torch.nn's layer of the same name: it "
            "loads the same state_dict"
        )
        return (None, None, None, None, *once(found, inputs, message))


def _weights(parameters: Sequence[torch.Tensor | None]) -> Weights:
    weight, hidden, *biases = (None if p is None else p.detach().contiguous() for p in parameters)
    assert weight is not None and hidden is not None
    return Weights(weight, hidden, *biases)


def _products(
    ctx: Any, x: torch.Tensor, kept: Kept, weights: Weights, grad_gates: torch.Tensor, wanted: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Gradients of the input, both weights and both biases: a few products of large matrices (equation 2.2)."""
    for_x, _, for_input, for_hidden, for_bias, for_hidden_bias = wanted
    entering, recurrent = ctx.cell.grad_columns(weights.size)
    from_input = grad_gates[:, entering]
    sums = grad_gates.sum(dim=0) if for_bias or for_hidden_bias else None
    return [
        from_input @ weights.input if for_x else None,
        from_input.T @ x if for_input else None,
        _hidden_gradient(ctx.sequences, ctx.direction, kept, grad_gates, recurrent) if for_hidden else None,
        sums[entering] if sums is not None and for_bias else None,
        torch.cat([sums[part] for part in recurrent]) if sums is not None and for_hidden_bias else None,
    ]


def _hidden_gradient(
    sequences: Sequences, direction: int, kept: Kept, grad_gates: torch.Tensor, recurrent: list[slice]
) -> torch.Tensor:
    """``Σ_t (gradient of the gates at t) ⊗ (state before t)``."""
    size, batch = kept.output.shape[1], sequences.batch
    initial = kept.initial[:, :size]
    if sequences.steps == sequences.time * batch:
        # All equally long: the state before a step is the row of a whole batch earlier, or later.
        early, late = slice(None, sequences.steps - batch), slice(batch, None)
        at, before = (late, early) if direction > 0 else (early, late)
        edge = slice(None, batch) if direction > 0 else slice(sequences.steps - batch, None)
        parts = [
            torch.addmm(grad_gates[edge, part].T @ initial, grad_gates[at, part].T, kept.output[before])
            for part in recurrent
        ]
    else:
        states = preceding(kept.output, initial, sequences.before(direction), torch.from_numpy(sequences.sample))
        parts = [grad_gates[:, part].T @ states for part in recurrent]
    return torch.cat(parts) if len(parts) > 1 else parts[0]
