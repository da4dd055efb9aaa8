"""Values with gradients: those of a run without a graph, whose backward pass takes PyTorch's second derivatives.

A weighting ``W`` of the values is a sum over the colours of the pattern,

    Σ_ij W_ij J_ij = Σ_c u_cᵀ J v_c,

where a colour of columns has its columns in ``v_c`` and its weights, each in its row, in ``u_c``; a colour of rows has
its rows in ``u_c`` and its weights in ``v_c``. PyTorch's backward pass gives ``Jᵀ u_c``, and a second one the gradient
of its product with ``v_c``. Forward mode would need a third derivative of operators that have no formula for tangents.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..patterns import Pattern, UnsupportedOperatorError
from ..spgemm import SparseJacobian
from ..tracing import Recording, ending_at, without_autocast
from .compressed import coloring, seeds

#: Operators whose third derivative is wrong in PyTorch (2.6 to 2.15), and why.
WRONG_THIRD = {
    "aten.native_layer_norm": "takes the mean and the deviation for constants",
    "aten.native_batch_norm": "takes the mean and the deviation for constants",
    "aten._native_batch_norm_legit": "takes the mean and the deviation for constants",
    "aten.logcumsumexp": "is not a number",
}


def with_graph(jacobian: SparseJacobian, recording: Recording, x: torch.Tensor, entries: Pattern) -> SparseJacobian:
    """The same Jacobian with gradients of its values.

    Parameters
    ----------
    jacobian : SparseJacobian
        The Jacobian of a run.
    recording : Recording
        The run, connected to `x`.
    x : Tensor, (batch, *shape)
        What the function is differentiated by, with a graph to the caller's tensors.
    entries : Pattern
        All entries, those of pruned weights too: such an entry adds nothing to a product, but its gradient to the
        product's.
    """
    if not recording.output.requires_grad:
        return jacobian
    weighted_sum = _WeightedSum(jacobian, recording, x, entries)
    values = _Values.apply(weighted_sum, jacobian.values, x, *recording.externals)
    return SparseJacobian(jacobian.pattern, values)


class _Values(torch.autograd.Function):
    """Values, whose gradient is that of their weighted sum."""

    @staticmethod
    def forward(ctx: Any, weighted_sum: _WeightedSum, values: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.weighted_sum = weighted_sum
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, weights: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        gradients = iter(ctx.weighted_sum.gradients(weights, needed))
        return (None, None, *(next(gradients) if each else None for each in needed))


class _WeightedSum:
    """The sum of a Jacobian's weighted values as a function of what it was computed from."""

    def __init__(self, jacobian: SparseJacobian, recording: Recording, x: torch.Tensor, entries: Pattern) -> None:
        self._pattern, self._entries, self._samples = jacobian.pattern, entries, jacobian.batch
        start, *_ = recording.edges
        assert start is not None
        self._start, self._output = start, recording.output
        #: What gradients go to; that of `x` is the one of the run's copy of it.
        self._inputs = [x, *recording.externals]
        self._problem = wrong_third_derivative(recording, "gradients of gradients of a Jacobian's values")

    @functools.cached_property
    def _coloring(self) -> tuple[tuple[int, int], torch.Tensor, list[torch.Tensor]]:
        """The numbers of colours of columns and rows, each entry's place in the products, and the seeds."""
        x, *_ = self._inputs
        colors = coloring(self._entries)
        places = colors.places[np.searchsorted(self._entries.places, self._pattern.places)]
        of_colors = [torch.from_numpy(each).to(x) for each in seeds(colors)]
        return colors.counts, torch.from_numpy(places).to(x.device), of_colors

    def _pairs(self, weights: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each colour the vectors ``u``, ``(batch, rows)``, and ``v``, ``(batch, columns)``."""
        (columns, rows), places, (of_columns, of_rows) = self._coloring
        (height, width), batch = self._pattern.shape, len(self._inputs[0])
        # Where all samples share the values, they are those of the first one.
        by_place = weights.new_zeros((columns * height + rows * width, self._samples)).index_add(0, places, weights)
        by_place = torch.nn.functional.pad(by_place, (0, batch - self._samples))
        weights_of_columns, weights_of_rows = by_place.split([columns * height, rows * width])
        for u, v in zip(weights_of_columns.reshape(columns, height, batch), of_columns, strict=True):
            yield u.T, v.expand(batch, -1)
        for u, v in zip(of_rows, weights_of_rows.reshape(rows, width, batch), strict=True):
            yield u.expand(batch, -1), v.T

    def gradients(self, weights: torch.Tensor, needed: Sequence[bool]) -> list[torch.Tensor | None]:
        """The gradients by the inputs that need one."""
        again = torch.is_grad_enabled()
        if again and self._problem is not None:
            raise self._problem
        y, (x, *externals) = self._output, self._inputs
        wanted: list[Any] = [end for end, each in zip([self._start, *externals], needed, strict=True) if each]
        tensors = [tensor for tensor, each in zip(self._inputs, needed, strict=True) if each]
        totals: list[torch.Tensor | None] = [None] * len(wanted)
        with torch.enable_grad(), without_autocast(x.device), ending_at(tensors):
            for u, v in self._pairs(weights if again else weights.detach()):
                g = u.reshape(y.shape).to(y.dtype)
                (pulled,) = torch.autograd.grad(y, [self._start], g, create_graph=True, allow_unused=True)
                if pulled is None or not pulled.requires_grad:
                    continue
                product = (pulled * v.reshape(pulled.shape)).sum()
                terms = torch.autograd.grad(product, wanted, retain_graph=True, create_graph=again, allow_unused=True)
                pairs = zip(totals, terms, strict=True)
                totals = [a if b is None else b if a is None else a + b for a, b in pairs]
        return totals


def wrong_third_derivative(recording: Recording, what: str) -> UnsupportedOperatorError | None:
    """An error that names the first operator of a run whose third derivative is wrong in PyTorch; None without one."""
    for invocation in recording.invocations:
        reason = WRONG_THIRD.get(invocation.name)
        # By running statistics a batch normalisation is a scaling.
        trains = invocation.arguments.get("training", invocation.arguments.get("train", True))
        if reason is not None and trains and any(operand.active for operand in invocation.operands):
            return UnsupportedOperatorError(
                f"{invocation.name}: PyTorch's third derivative {reason}, and {what} need it; write it with other "
                f"operators, as by mean and var{invocation.source}"
            )
    return None
