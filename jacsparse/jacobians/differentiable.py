"""Values with gradients: those of a run, whose backward pass takes PyTorch's second derivatives of that run.

How the values themselves were computed plays no part. A weighting ``W`` of them is a sum over the pattern's colours,

    Σ_ij W_ij J_ij = Σ_c u_cᵀ J v_c,

where a colour of columns has its columns in ``v_c`` and its weights, each in its row, in ``u_c``; a colour of rows has
its rows in ``u_c`` and its weights in ``v_c``. PyTorch's backward pass gives ``Jᵀ u_c``, and a second one the gradient
of its product with ``v_c``. Forward mode would need a third derivative of operators that have no formula for tangents.

The run is of a copy of what the function is differentiated by, so that no backward pass here goes on to what that was
computed from: the caller's own does, since each call has an `OwnGraph`. `TracedFunction.connected_output` computes the
run once more for a replay. Gradients of products of matrices that a user multiplies are in `spgemm.gradients`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..patterns import Pattern, UnsupportedOperatorError
from ..runtime import is_batched
from ..spgemm import SparseJacobian
from ..stages import Chain, Record, refuse_other_derivatives, walk
from ..tracing import Trace, ending_at, is_hooked, saved_handle, without_autocast
from .colorings import coloring


@dataclass(frozen=True, eq=False)
class OwnGraph:
    """Results of a call, and where their graph computes the gradients of what they depend on.

    That graph is the call's own: it begins with copies. A backward pass of PyTorch's that asks for the gradient of a
    tensor, as a parameter, goes through all of the graph that leads there: through a call's arguments also to the calls
    before it, if they read that parameter too. A call whose backward pass takes passes of its own, as that of a
    Jacobian's values does, would take those of all calls before it each time, which is exponential time.

    The first ends are those of the call's own copies, the last ones those of the `others`, which it has no copies of.
    """

    results: Sequence[torch.Tensor]
    ends: Sequence[GradientEdge]
    others: Sequence[torch.Tensor]

    def gradients(
        self, weights: Sequence[torch.Tensor | None], needed: Sequence[bool], *, create_graph: bool
    ) -> list[torch.Tensor | None]:
        """The gradients at as many ends as are asked about, where needed, of the sum of the weighted results."""
        pairs = [(y, g) for y, g in zip(self.results, weights, strict=True) if g is not None]
        ends = [end for end, each in zip(self.ends, needed, strict=False) if each]
        if not pairs or not ends:
            return [None] * len(needed)
        results, of_results = zip(*pairs, strict=True)
        with ending_at(ends, [y.grad_fn for y in results]):
            gradients = torch.autograd.grad(
                results, ends, of_results, retain_graph=True, create_graph=create_graph, allow_unused=True
            )
        computed = iter(gradients)
        return [next(computed) if each else None for each in needed]


def connected(
    results: Sequence[Any], ends: Sequence[GradientEdge], inputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> list[Any]:
    """The same results, of which tensors with gradients have these by what the call has copies of, too.

    The ends are those of the copies; by the others the results have gradients in any case.
    """
    tensors = [each for each in results if _has_gradient(each)]
    if not tensors:
        return list(results)
    graph = OwnGraph(tensors, [*ends, *map(get_gradient_edge, others)], others)
    outputs = iter(_Connected.apply(graph, *tensors, *inputs, *others))
    return [next(outputs) if _has_gradient(each) else each for each in results]


def _has_gradient(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result.requires_grad


class _Connected(torch.autograd.Function):
    """Results of an own graph: the caller's backward pass goes on through it, and to what the call has copies of."""

    @staticmethod
    def forward(ctx: Any, graph: OwnGraph, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        count = len(graph.results)
        ctx.save_for_backward(saved_handle(graph), *tensors[count:])
        return tuple([result.view_as(result) for result in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *weights: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        check_alone(weights)
        handle, *inputs = ctx.saved_tensors
        graph, needed = handle.content, ctx.needs_input_grad[1 + len(weights) :]
        count = len(graph.ends) - len(graph.others)
        if not torch.is_grad_enabled():
            of_copies = graph.gradients(weights, needed[:count], create_graph=False)
            return None, *weights, *of_copies, *[None] * len(graph.others)
        # Gradients by the others depend on the copies as well, so that they are computed here: beside their hooks.
        check_no_hooks(graph.others)
        # Copies of the weights, since those may depend on what the results do.
        copies = [None if g is None else g.detach().requires_grad_() for g in weights]
        gradients = graph.gradients(copies, needed, create_graph=True)
        ends = [*graph.ends[:count], *(get_gradient_edge(g) for g in copies if g is not None)]
        own_inputs = [*inputs[:count], *(g for g in weights if g is not None)]
        return None, *[None] * len(weights), *connected(gradients, ends, own_inputs, inputs[count:])


def check_no_hooks(tensors: Sequence[torch.Tensor]) -> None:
    """Raise where a hook of a tensor that a function reads would see gradients of gradients twice."""
    if any(map(is_hooked, tensors)):
        raise UnsupportedOperatorError(
            "a hook, or retain_grad, of a tensor that a function reads sees gradients of gradients of a Jacobian's "
            "values, or of what is returned beside it; remove it"
        )


def check_alone(weights: Sequence[torch.Tensor | None]) -> None:
    """Raise where a backward pass goes back with several gradients at once, as with ``is_grads_batched=True``."""
    if any(weight is not None and is_batched(weight) for weight in weights):
        raise UnsupportedOperatorError(
            "torch.vmap and is_grads_batched=True ask for several gradients at once of a Jacobian's values, or of what "
            "is returned beside it, which these do not give; take one after the other, as vectorize=False does"
        )


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
