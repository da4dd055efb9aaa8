"""Gradients of sparse products with respect to values, of any order.

The product ``C = A B``, weighted by ``G`` on C's pattern, is a trilinear form::

    T(a, b, g) = Σ a_p · b_q · g_e        over all pairs (p, q) of entries that meet, in the entry e of C

Its partial derivatives are the product itself, ``∂T/∂g``, and the two gradients ``∂T/∂a = (G Bᵀ)`` on A's pattern and
``∂T/∂b = (Aᵀ G)`` on B's. Each is linear in two of the three arguments, and its own gradients are the other two
derivatives. The same holds for a matrix times a vector, where ``∂T/∂a`` is an outer product at the entries of A.

These are for products that a user takes; ``jacobian(..., create_graph=True)`` has its own in `jacsparse.jacobians`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..patterns import Full, Pattern, gathered
from ..runtime import a_type, allocated, kernel, on_device, run_rows
from . import products_cuda
from .lanes import block_width
from .operands import check_outside_transforms, flat, matrices

if TYPE_CHECKING:
    from .methods import Product
    from .plan import ProductPlan


@kernel
def _at_entries(
    first, last, a_indptr, a_indices, b_indptr, b_indices, columns, c_indptr, c_indices,
    g, g_batch, b, b_batch, out, batch,
):  # fmt: skip
    lane = 0
    while lane < batch:
        width = block_width(batch - lane)
        # A row of G over all columns; only the columns that the row has are written and read.
        g_row, sums = np.zeros(columns * width, out.dtype), np.zeros(width, out.dtype)
        g_lane, b_lane = lane if g_batch > 1 else 0, lane if b_batch > 1 else 0
        for row in range(first, last):
            for entry in range(c_indptr[row], c_indptr[row + 1]):
                at, at_g = np.int64(c_indices[entry]) * width, np.int64(entry) * g_batch + g_lane
                for sample in range(width):
                    g_row[at + sample] = g[at_g + (sample if g_batch > 1 else 0)]
            for p in range(a_indptr[row], a_indptr[row + 1]):
                k = a_indices[p]
                sums[:] = 0
                for q in range(b_indptr[k], b_indptr[k + 1]):
                    at, at_b = np.int64(b_indices[q]) * width, np.int64(q) * b_batch + b_lane
                    for sample in range(width):
                        sums[sample] += g_row[at + sample] * b[at_b + (sample if b_batch > 1 else 0)]
                at_out = np.int64(p) * batch + lane
                for sample in range(width):
                    out[at_out + sample] = sums[sample]
        lane += width


class Form(ABC):
    """A form that is linear in each of three arguments."""

    #: Names of the arguments; the derivative with respect to the last one is the product itself.
    names: tuple[str, str, str]

    @abstractmethod
    def evaluate(self, wanted: str, values: dict[str, torch.Tensor]) -> torch.Tensor:
        """The derivative with respect to `wanted`, from the values ``(entries, batch)`` of the other two arguments."""


class ProductForm(Form):
    """The form of a product `c` of two matrices `a` and `b`, which a plan multiplies."""

    names = ("a", "b", "c")

    def __init__(self, plan: ProductPlan, product: Product) -> None:
        self.plan, self.product = plan, product

    def evaluate(self, wanted: str, values: dict[str, torch.Tensor]) -> torch.Tensor:
        product = self.product
        a, b, c = product.a, product.b, product.c
        if wanted == "c":
            return self.plan.multiply(values["a"], values["b"])  # type: ignore[no-any-return]
        if all(isinstance(pattern.structure, Full) for pattern in (a, b, c)):
            g = matrices(values["c"], *c.shape)
            full = g @ matrices(values["b"], *b.shape).mT if wanted == "a" else matrices(values["a"], *a.shape).mT @ g
            return full.movedim(0, 2).flatten(0, 1)
        if wanted == "a":
            return _left_gradient(a, b, c, product.work, values["c"], values["b"])
        # In the transposed product Cᵀ = Bᵀ Aᵀ, B is the left factor.
        g, a_values = gathered(values["c"], c.transposition), gathered(values["a"], a.transposition)
        return gathered(_left_gradient(b.T, a.T, c.T, product.transposed_work, g, a_values), b.T.transposition)


def _left_gradient(
    a: Pattern, b: Pattern, c: Pattern, work: np.ndarray, g_values: torch.Tensor, b_values: torch.Tensor
) -> torch.Tensor:
    """``G Bᵀ`` at A's entries."""
    batch = g_values.shape[1] if b_values.shape[1] == 1 else b_values.shape[1]
    out = allocated("gradients of a sparse product", (a.nnz, batch), g_values.dtype, g_values.device, batch)
    if not batch or not a.nnz:
        return out
    g_values, b_values = g_values.contiguous(), b_values.contiguous()
    if on_device(g_values):
        products_cuda.at_entries(a, b, c, g_values, b_values, out)
    else:
        patterns = (a.indptr, a.indices, b.indptr, b.indices, b.shape[1], c.indptr, c.indices)
        values = flat(g_values.numpy(), b_values.numpy(), out.numpy())
        run_rows(_at_entries, work, *patterns, *values, lanes=batch)
    return out


class _ProductDerivative(torch.autograd.Function):
    """The derivative of a form with respect to one argument, as a function of the other two, which `names` lists."""

    @staticmethod
    def forward(ctx: Any, form: Form, wanted: str, names: list[str], *operands: torch.Tensor) -> torch.Tensor:
        ctx.form, ctx.wanted, ctx.names = form, wanted, names
        ctx.save_for_backward(*operands)
        return form.evaluate(wanted, dict(zip(names, (operand.detach() for operand in operands), strict=True)))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values = {**dict(zip(ctx.names, ctx.saved_tensors, strict=True)), ctx.wanted: gradient}
        gradients: list[torch.Tensor | None] = [None, None, None]
        for name, needed in zip(ctx.names, ctx.needs_input_grad[3:], strict=True):
            derivative = _differentiable(ctx.form, name, values) if needed else None
            if derivative is not None and derivative.shape[1] != values[name].shape[1]:
                # All samples share these values: their gradient is the sum over the samples.
                derivative = derivative.sum(1, keepdim=True)
            gradients.append(derivative)
        return tuple(gradients)


def _differentiable(form: Form, wanted: str, values: dict[str, torch.Tensor]) -> torch.Tensor:
    names = [name for name in form.names if name != wanted]
    derivative: torch.Tensor = _ProductDerivative.apply(form, wanted, names, *(values[name] for name in names))
    return derivative


def differentiable_product(form: Form, out: Any, **operands: Any) -> torch.Tensor:
    """The product of a form's first two arguments, as a node of autograd's graph."""
    columns = graph_operands(out, **operands)
    product = _differentiable(form, form.names[2], dict(zip(form.names[:2], columns, strict=True)))
    return product[:, 0] if all(operand.ndim == 1 for operand in operands.values()) else product


def graph_operands(out: Any, **operands: Any) -> list[torch.Tensor]:
    """Operands for autograd as tensors ``(entries, batch)``; ValueError with `out`, for autograd keeps its results."""
    if out is not None:
        raise ValueError("out is given, but an operand requires grad; omit the argument out, or detach the operands")
    for name, operand in operands.items():
        if not isinstance(operand, torch.Tensor):
            raise TypeError(f"{name} is {a_type(operand)}, but another operand requires grad; pass a tensor")
        check_outside_transforms(name, operand)
    return [operand[:, None] if operand.ndim == 1 else operand for operand in operands.values()]


def wants_gradient(*operands: Any) -> bool:
    """Whether a product of these operands belongs in autograd's graph."""
    for operand in operands:
        if isinstance(operand, torch.Tensor) and operand.requires_grad:
            return torch.is_grad_enabled()
    return False
