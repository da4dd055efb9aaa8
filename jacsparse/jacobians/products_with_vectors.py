"""Products of a function's Jacobian with many vectors at once, call by call, at the values of a run.

A call's derivative is PyTorch's. But that of some elementwise operators takes another side of a kink in forward mode
than in backward passes: PyTorch's tangent of a leaky ReLU with a learnt slope is one at 0, where its gradient is the
slope; at equal elements the tangents of `fmax`, `fmin` and of clamps between tensors are those of the other operand;
that of `atan2` at the origin is no number. Here their tangents are scaled by what the backward pass makes of ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..patterns import gradients_of, input_gradients
from ..tracing import Node, Operand, Rewrite, Values
from .traced_function import TracedFunction
from .value_functions import elementwise_derivatives

aten = torch.ops.aten

#: Elementwise operators whose tangents are those of their backward passes.
_ELEMENTWISE = (
    *(aten._prelu_kernel.default, aten.atan2.default, aten.fmax.default, aten.fmin.default),
    *(aten.maximum.default, aten.minimum.default),
    *(aten.clamp.Tensor, aten.clamp_max.Tensor, aten.clamp_min.Tensor),
)

#: Operators of which PyTorch's tangents are inexact, or wrong: those of `logcumsumexp` are relative to the largest
#: element of all lines, those of `scatter_reduce` ignore elements, those of `cholesky_inverse` are of another function.
WRONG_TANGENTS = (aten.logcumsumexp.default, aten.scatter_reduce.two, aten.cholesky_inverse.default)
#: Those whose functions ``auto`` does not compress: products cost less than backward passes alone, and PyTorch's
#: gradients of many rows at once are wrong for `cdist`.
_NOT_COMPRESSED = (aten.logcumsumexp.default, aten.scatter_reduce.two, aten._cdist_forward.default)

#: All have the arguments input, weight, bias, running_mean, running_var, training, momentum and one for rounding.
_NORMALISATIONS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)

Vectors = dict[int, torch.Tensor]


def may_be_compressed(function: TracedFunction) -> bool:
    """Whether ``auto`` may compress a function."""
    # PyTorch takes the statistics of groups, further results of their normalisation, for constants.
    return not any(node.overload in _NOT_COMPRESSED for node in function.nodes) and not any(
        edge.operation.overload is aten.native_group_norm.default and edge.target != edge.operation.node.results[0]
        for edge in function.chain.edges
    )


def push_forward(function: TracedFunction, values: Values, tangents: torch.Tensor) -> torch.Tensor:
    """The products with columns, ``(many, batch, columns)`` to ``(many, batch, rows)``."""
    derivatives = [_derivative_at(function, node, values) for node in function.nodes]
    output, y = _output(function)

    def pushed(tangent: torch.Tensor) -> torch.Tensor:
        vectors = {0: tangent.reshape(function.x.shape)}
        for derivative in derivatives:
            operands = [operand for operand in derivative.operands if operand.value in vectors]
            if operands:
                vectors |= zip(derivative.results.values(), derivative.push(operands, vectors), strict=True)
        result = vectors.get(output.value) if output.active else None
        return (tangent.new_zeros(y.shape) if result is None else result).reshape(function.batch, -1)

    return torch.vmap(pushed)(tangents)


def pull_back(function: TracedFunction, values: Values, cotangents: torch.Tensor) -> torch.Tensor:
    """The products with rows, ``(many, batch, rows)`` to ``(many, batch, columns)``."""
    derivatives = [_derivative_at(function, node, values) for node in reversed(function.nodes)]
    for derivative in derivatives:
        derivative.run()
    output, y = _output(function)

    def pulled(cotangent: torch.Tensor) -> torch.Tensor:
        vectors = {output.value: cotangent.reshape(y.shape).to(y.dtype)} if output.active else {}
        for derivative in derivatives:
            if not vectors.keys().isdisjoint(derivative.results.values()):
                for operand, part in zip(derivative.operands, derivative.pull(vectors), strict=True):
                    total = vectors.get(operand.value)
                    vectors[operand.value] = part if total is None else total + part
        result = vectors.get(0)
        return (cotangent.new_zeros(function.x.shape) if result is None else result).reshape(function.batch, -1)

    return torch.vmap(pulled)(cotangents)


def _output(function: TracedFunction) -> tuple[Operand, torch.Tensor]:
    output = function.graph.last
    return output, function.trace.tensor(output.value)


class _Derivative:
    """The derivative of a call at the values of a run, by PyTorch."""

    def __init__(self, function: TracedFunction, node: Node, arguments: dict[str, Any]) -> None:
        self.node, self.arguments = node, arguments
        self.operands = [operand for operand in node.operands if operand.active]
        results = enumerate(node.results)
        #: By their places, the results that may have derivatives.
        self.results = {place: n for place, n in results if function.is_differentiable(n)}

    def _results(self, operands: Sequence[Operand], tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The results for some operands."""
        named = {operand.name: tensor for operand, tensor in zip(operands, tensors, strict=True)}
        results = self.node.computed(self.arguments | named)
        return tuple([results[place] for place in self.results])

    def push(self, operands: Sequence[Operand], tangents: Vectors) -> Sequence[torch.Tensor]:
        """The tangents of the results, from those of some operands."""
        primals = tuple([self.arguments[operand.name] for operand in operands])
        vectors = tuple([tangents[operand.value] for operand in operands])
        return torch.func.jvp(lambda *tensors: self._results(operands, tensors), primals, vectors)[1]  # type: ignore[no-any-return]

    def run(self) -> None:
        """Run the call for `pull`, which PyTorch's transforms do not let make a graph of autograd."""
        if self.node.draws:
            raise RuntimeError(f"{self.node.name} draws random numbers")
        with torch.enable_grad():
            primals = [self.arguments[operand.name].detach().requires_grad_() for operand in self.operands]
            self._run = primals, self._results(self.operands, primals)

    def pull(self, cotangents: Vectors) -> Sequence[torch.Tensor]:
        """The cotangents of all operands, from those of some results."""
        # Not by ``torch.func.vjp``, which loads PyTorch's compiler.
        (primals, results), numbers = self._run, self.results.values()
        reached = {n: y for n, y in zip(numbers, results, strict=True) if n in cotangents and y.requires_grad}
        if not reached:
            return [torch.zeros_like(primal) for primal in primals]
        gradients = gradients_of([*reached.values()], primals, [cotangents[n] for n in reached], retain_graph=True)
        pairs = zip(gradients, primals, strict=True)
        return [torch.zeros_like(primal) if gradient is None else gradient for gradient, primal in pairs]


class _InputGradients(torch.autograd.Function):
    """`input_gradients` of many gradients at once, as those of more samples."""

    generate_vmap_rule = False

    @staticmethod
    def forward(gradients: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
        return input_gradients(arguments, gradients, [len(gradients), *arguments["input"].shape[1:]])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: nobody differentiates it."""

    @staticmethod
    def vmap(_: Any, in_dims: Any, gradients: torch.Tensor, arguments: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
        many = gradients.movedim(in_dims[0], 0)
        return _InputGradients.apply(many.flatten(0, 1), arguments).unflatten(0, many.shape[:2]), 0


class _Convolution(_Derivative):
    """A convolution of what is differentiated, by a constant weight: PyTorch's tangents are sums with zeros."""

    def push(self, operands: Sequence[Operand], tangents: Vectors) -> Sequence[torch.Tensor]:
        (operand,) = operands
        return self.node.computed({**self.arguments, "input": tangents[operand.value], "bias": None})

    @property
    def _has_kernels(self) -> bool:
        """Whether there are faster kernels than those that PyTorch takes."""
        return bool(self.arguments["input"].is_cpu) and not self.arguments["transposed"]

    def run(self) -> None:
        if not self._has_kernels:
            super().run()

    def pull(self, cotangents: Vectors) -> Sequence[torch.Tensor]:
        if not self._has_kernels:
            return super().pull(cotangents)
        return [_InputGradients.apply(cotangents[self.results[0]], self.arguments)]


class _Diagonal(_Derivative):
    """The derivative of a call whose result depends on each operand at its own place alone, by given derivatives."""

    def __init__(
        self, function: TracedFunction, node: Node, arguments: dict[str, Any], derivatives: Mapping[str, Any]
    ) -> None:
        super().__init__(function, node, arguments)
        self.operands = [operand for operand in self.operands if operand.name in derivatives]
        # A normalisation has further results, which nothing differentiable reads.
        self.results = {0: node.results[0]}
        self.derivatives, self.dtype = derivatives, function.trace.tensor(node.results[0]).dtype

    def run(self) -> None:
        """Do nothing: the derivatives are known."""

    def push(self, operands: Sequence[Operand], tangents: Vectors) -> Sequence[torch.Tensor]:
        terms = [tangents[operand.value] * self.derivatives[operand.name] for operand in operands]
        return [sum(terms[1:], terms[0]).to(self.dtype)]

    def pull(self, cotangents: Vectors) -> Sequence[torch.Tensor]:
        gradient = cotangents[self.results[0]]
        return [self._reduced(gradient * self.derivatives[each.name], each.name) for each in self.operands]

    def _reduced(self, gradient: torch.Tensor, name: str) -> torch.Tensor:
        """The sum over the axes along which an operand is broadcast."""
        operand: torch.Tensor = self.arguments[name]
        return gradient.sum_to_size(operand.shape).to(operand.dtype)


def _derivative_at(function: TracedFunction, node: Node, values: Values) -> _Derivative:
    arguments = values.arguments(node.arguments)
    active = [operand.name for operand in node.operands if operand.active]
    if isinstance(node.overload, Rewrite):
        return _Diagonal(function, node, arguments, dict.fromkeys(active, 1.0))
    if node.overload in _NORMALISATIONS and active == ["input"] and not arguments["training"]:
        # A scaling of each channel. PyTorch's derivative of it copies the input for each of many vectors.
        return _Diagonal(function, node, arguments, {"input": _scale(arguments)})
    if node.overload is aten.convolution.default and active == ["input"]:
        return _Convolution(function, node, arguments)
    if node.overload in _ELEMENTWISE:
        names = [n for n, a in arguments.items() if isinstance(a, torch.Tensor) and a.is_floating_point()]
        shape = torch.broadcast_shapes(*(arguments[name].shape for name in names))
        return _Diagonal(
            function, node, arguments, elementwise_derivatives(lambda of: node.computed(of)[0], arguments, names, shape)
        )
    return _Derivative(function, node, arguments)


def _scale(arguments: Mapping[str, Any]) -> torch.Tensor:
    """The derivative of a batch normalisation by running statistics."""
    rounding = arguments["eps"] if "eps" in arguments else arguments["epsilon"]
    scale: torch.Tensor = torch.rsqrt(arguments["running_var"] + rounding)
    if arguments["weight"] is not None:
        scale = scale * arguments["weight"]
    return scale.reshape(-1, *[1] * (arguments["input"].ndim - 2))
