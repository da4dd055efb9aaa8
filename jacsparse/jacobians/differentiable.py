"""Values with gradients: those of a run, whose backward pass takes PyTorch's second derivatives of that run.

How the values themselves were computed plays no part. A weighting ``W`` of them is a sum over the pattern's colours,

    Σ_ij W_ij J_ij = Σ_c u_cᵀ J v_c,

where a colour of columns has its columns in ``v_c`` and its weights, each in its row, in ``u_c``; a colour of rows has
its rows in ``u_c`` and its weights in ``v_c``. PyTorch's backward pass gives ``Jᵀ u_c``, and a second one the gradient
of its product with ``v_c``. Forward mode would need a third derivative of operators that have no formula for tangents.

The run is of a copy of what the function is differentiated by, so that no backward pass here goes on to what that was
computed from: the caller's own does (`own_graph`). `TracedFunction.connected_output` computes the run once more for a
replay. Gradients of products of matrices that a user multiplies are in `spgemm.gradients`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import get_gradient_edge

from ..patterns import Pattern, UnsupportedOperatorError
from ..spgemm import SparseJacobian
from ..stages import Chain, Record, refuse_other_derivatives, walk
from ..tracing import Trace, is_hooked, saved_handle, without_autocast
from .colorings import coloring
from .own_graph import OwnGraph, check_alone, check_no_hooks, connected

#: Operators whose third derivative is wrong in PyTorch (2.6 to 2.15), and why.
WRONG_THIRD = {
    "aten.native_layer_norm": "takes the mean and the deviation for constants",
    "aten.native_batch_norm": "takes the mean and the deviation for constants",
    "aten._native_batch_norm_legit": "takes the mean and the deviation for constants",
    "aten.cudnn_batch_norm": "takes the mean and the deviation for constants",
    "aten.miopen_batch_norm": "takes the mean and the deviation for constants",
    "aten.logcumsumexp": "is not a number",
}


def with_gradients(jacobian: SparseJacobian, trace: Trace, x: torch.Tensor, entries: Pattern) -> SparseJacobian:
    """The same Jacobian of a run with gradients of its values.

    The run is of a copy of `x`, which the function is differentiated by, ``(batch, *shape)``. The entries are all,
    those of pruned weights too: such an entry adds nothing to a product, but its gradient to the product's.
    """
    if not trace.output.requires_grad:
        return jacobian
    weighted_sum = _WeightedSum(jacobian, trace, x, entries)
    values = _Values.apply(weighted_sum, jacobian.values, *weighted_sum.inputs)
    return SparseJacobian(jacobian.pattern, values)


def connected_to(x: torch.Tensor, trace: Trace, tensors: Sequence[Any]) -> list[Any]:
    """Results of a run with gradients by what it was computed from; what has none as it is."""
    start = trace.gradient_edge(0)
    assert start is not None
    return connected(tensors, [start], [x], externals_of(trace))


def externals_of(trace: Trace) -> list[torch.Tensor]:
    """The tensors from before a run that have gradients, each once."""
    return list({id(tensor): tensor for tensor in trace.externals if tensor.requires_grad}.values())


class _Values(torch.autograd.Function):
    """Values, whose gradient is that of their weighted sum."""

    @staticmethod
    def forward(ctx: Any, weighted_sum: _WeightedSum, values: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(saved_handle(weighted_sum))
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, weights: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if weights is None:
            return (None,) * len(ctx.needs_input_grad)
        check_alone([weights])
        (handle,) = ctx.saved_tensors
        return (None, None, *handle.content.gradients(weights, ctx.needs_input_grad[2:]))


class _WeightedSum:
    """The sum of a Jacobian's weighted values as a function of what it was computed from."""

    def __init__(self, jacobian: SparseJacobian, trace: Trace, x: torch.Tensor, entries: Pattern) -> None:
        self._pattern, self._entries, self._samples = jacobian.pattern, entries, jacobian.batch
        self._output = trace.output
        start = trace.gradient_edge(0)
        assert start is not None
        others = externals_of(trace)
        #: What gradients go to, each once, and where the run's graph has these: first that of its copy of `x`.
        self.inputs, self.ends = [x, *others], [start, *map(get_gradient_edge, others)]
        self._problem = _wrong_third_derivative(trace, "gradients of gradients of a Jacobian's values")

    def _vectors(self, weights: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each colour the vectors ``u``, ``(batch, rows)``, and ``v``, ``(batch, columns)``."""
        colors, x = coloring(self._entries), self.inputs[0]
        places = torch.from_numpy(colors.places[np.searchsorted(self._entries.places, self._pattern.places)])
        of_columns, of_rows = (torch.from_numpy(each).to(x) for each in colors.seeds())
        (columns, rows), (height, width), batch = colors.counts, self._pattern.shape, len(x)
        by_place = weights.new_zeros((columns * height + rows * width, self._samples))
        by_place = by_place.index_add(0, places.to(x.device), weights)
        # Where all samples share the values, they are those of the first one.
        by_place = torch.nn.functional.pad(by_place, (0, batch - self._samples))
        weights_of_columns, weights_of_rows = by_place.split([columns * height, rows * width])
        for u, v in zip(weights_of_columns.reshape(columns, height, batch), of_columns, strict=True):
            yield u.T, v.expand(batch, -1)
        for u, v in zip(of_rows, weights_of_rows.reshape(rows, width, batch), strict=True):
            yield u.expand(batch, -1), v.T

    def gradients(self, weights: torch.Tensor, needed: Sequence[bool]) -> list[torch.Tensor | None]:
        """The gradients by the inputs, of those that need one."""
        differentiable = torch.is_grad_enabled()
        if differentiable and self._problem is not None:
            raise self._problem
        # Weights of its own, since those may depend on what the values do.
        own_weights = weights.detach().requires_grad_(differentiable)
        totals: list[torch.Tensor | None] = [None] * len(self.inputs)
        with torch.enable_grad(), without_autocast(weights.device):
            for u, v in self._vectors(own_weights):
                terms = self._of_product(u, v, needed, differentiable)
                pairs = zip(totals, terms, strict=True)
                totals = [a if b is None else b if a is None else a + b for a, b in pairs]
            if differentiable:
                ends = [self.ends[0], get_gradient_edge(own_weights)]
                totals = connected(totals, ends, [self.inputs[0], weights], self.inputs[1:])
        return totals

    def _of_product(
        self, u: torch.Tensor, v: torch.Tensor, needed: Sequence[bool], differentiable: bool
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of ``uᵀ J v`` by the inputs, of those that need one."""
        y = self._output
        # Results of fewer bits than the input overflow where weights are large.
        scale = 1.0 if y.dtype == u.dtype else u.detach().abs().amax().clamp_min(torch.finfo(u.dtype).tiny)
        g = (u / scale).reshape(y.shape).to(y.dtype)
        (pulled,) = torch.autograd.grad(y, [self.ends[0]], g, create_graph=True, allow_unused=True)
        if pulled is None or not pulled.requires_grad:
            return [None] * len(needed)
        product = (pulled * v.reshape(pulled.shape)).sum() * scale
        # The first one is a copy of the run's own.
        if not any(is_hooked(x) for x, each in zip(self.inputs[1:], needed[1:], strict=True) if each):
            graph = OwnGraph([product], self.ends, self.inputs[1:])
            return graph.gradients([torch.ones_like(product)], needed, create_graph=differentiable)
        # The caller's own backward pass is to call the hooks of these tensors, once.
        if differentiable:
            check_no_hooks(self.inputs[1:])
        ends = [(end, x) for end, x, each in zip(self.ends, self.inputs, needed, strict=True) if each]
        walked = iter(walk([(get_gradient_edge(product), torch.ones_like(product))], ends))
        return [next(walked) if each else None for each in needed]


def check_second_derivatives(trace: Trace, chain: Chain, records: Sequence[Record], *, of_gradient: bool) -> None:
    """Raise where gradients of values by PyTorch's second derivatives are not those of the function's Jacobian.

    They are others by sparse tensors, where registered values are, and for a function that is itself a gradient, where
    PyTorch's third derivative of an operator is wrong.
    """
    for tensor in externals_of(trace):
        if tensor.layout != torch.strided:
            raise UnsupportedOperatorError(
                f"a sparse tensor of shape {tuple(tensor.shape)} that the function reads requires a gradient, and "
                "PyTorch's second derivatives by it are not those of its elements; detach it, or make it of its values "
                "within the function, by torch.sparse_coo_tensor"
            )
    if chain.registered_values:
        refuse_other_derivatives(records, "the gradient of values")
    problem = _wrong_third_derivative(trace, "gradients of a Hessian's values") if of_gradient else None
    if problem is not None:
        raise problem


def _wrong_third_derivative(trace: Trace, what: str) -> UnsupportedOperatorError | None:
    """An error that names the first operator of a run whose third derivative is wrong in PyTorch; None without one."""
    for node in trace.graph.nodes:
        reason = WRONG_THIRD.get(node.name)
        # By running statistics a batch normalisation is a scaling.
        trains = node.arguments.get("training", node.arguments.get("train", True))
        if reason is not None and trains and any(operand.active for operand in node.operands):
            return UnsupportedOperatorError(
                f"{node.name}: PyTorch's third derivative {reason}, and {what} need it; write it with other "
                f"operators, as by mean and var{node.source}"
            )
    return None
