"""The gradient of a scalar function as a function, whose Jacobian is the Hessian.

Its run is that of the function and of autograd's backward pass. So its operators tell where second derivatives are:
only where an operator that is not linear joins two elements.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..patterns import UnsupportedOperatorError
from ..runtime import a_type
from ..stages import chain_of, refuse_other_derivatives
from ..tracing import Node, Trace, name_of, traced, undisturbed
from .arguments import Arguments, flattened, unflattened
from .flat_function import FlatFunction, WithAux, parts_of_result, wrap
from .options import Options


class Gradient(WithAux):
    """The gradient of a scalar function, in each sample, by the tensors that its Hessian is of.

    The arguments tell which tensors these are, and whether they have samples.
    """

    f: Callable[..., Any]

    def __init__(self, f: Callable[..., Any], arguments: Arguments, options: Options) -> None:
        super().__init__()
        self._argnums, self._batched, self._has_aux = arguments.argnums, arguments.batched, options.has_aux
        self._is_beside = options.value or options.has_aux
        wrap(self, f)
        self.__qualname__ = f"the gradient of {name_of(f)}"

    def forward(self, *args: Any) -> tuple[Any, tuple[torch.Tensor, Any] | None]:
        """The gradients; beside them, if asked for, the function's value and what it returned beside that."""
        leaves, copies = list[torch.Tensor](), list(args)
        with torch.enable_grad():
            for number in self._argnums:
                tensors, spec = flattened(args[number])
                leaves += tensors
                # Copies, which the function may write to.
                copies[number] = unflattened([tensor.clone() for tensor in tensors], spec)
            with _ATTENTION_BY_PRODUCTS:
                y, aux = self.f(*copies), None
            if self._has_aux:
                y, aux = parts_of_result(self.f, y)
            self._check_scalar(y, len(leaves[0]) if self._batched else 1)
            gradients = _gradients(y, leaves)
        return gradients[0] if len(gradients) == 1 else gradients, (y, aux) if self._is_beside else None

    # The hooks of all modules are not for this one.
    __call__ = forward

    def check_derivatives(self, trace: Trace, arguments: Arguments) -> None:
        """Raise where a run of the function has an operator with registered values that are no derivative of it."""
        if registered_in(trace) is None:
            return
        function = FlatFunction(self.f, arguments, self._has_aux)
        with undisturbed(function, arguments.tensors[0].device):
            run = traced(function, arguments.flat())
            refuse_other_derivatives(chain_of(run, pruned=False).records(run), "a Hessian")

    def _check_scalar(self, y: Any, batch: int) -> None:
        """Raise where the function's result is not one number, or one for each sample."""
        if not isinstance(y, torch.Tensor) or not y.is_floating_point():
            what = str(y.dtype) if isinstance(y, torch.Tensor) else a_type(y)
        elif y.numel() != batch or (self._batched and (not y.ndim or len(y) != batch)):
            what = f"a tensor of shape {tuple(y.shape)}"
        else:
            return
        if isinstance(y, (int, float)):
            what = f"{what}, which has no derivative: leave out .item()"
        expected = (
            f"one for each of {batch} samples: pass batched=False where it returns one for all"
            if self._batched
            else "as by .sum(): pass batched=True where it returns one for each sample"
        )
        raise UnsupportedOperatorError(
            f"{name_of(self.f)} returns {what}; a Hessian is of a function that returns one number, {expected}"
        )


class _AttentionByProducts:
    """A context in which attention is products and a softmax: PyTorch has no second derivatives of its fused kernels.

    PyTorch's switch is one for all threads. So it stays on until the last of the threads within has left.
    """

    def __init__(self) -> None:
        self._lock, self._within, self._switch = threading.Lock(), 0, contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._within:
                self._switch.enter_context(sdpa_kernel(SDPBackend.MATH))
            self._within += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._within -= 1
            if not self._within:
                self._switch.close()


_ATTENTION_BY_PRODUCTS = _AttentionByProducts()


def registered_in(trace: Trace) -> Node | None:
    """The first call in a run of an operator whose values were registered; None without one."""
    for node in trace.graph.differentiated:
        rule = node.facts.rule
        if rule is not None and rule.has_registered_values and node.operands:
            return node
    return None


def _gradients(y: torch.Tensor, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of a result, with a derivative; zeros where it does not depend on a leaf."""
    parts: Sequence[torch.Tensor | None] = [None] * len(leaves)
    if y.requires_grad:
        parts = torch.autograd.grad(y, leaves, torch.ones_like(y), create_graph=True, allow_unused=True)
    pairs = zip(parts, leaves, strict=True)
    return [torch.zeros_like(leaf) if part is None else part for part, leaf in pairs]
