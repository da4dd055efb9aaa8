"""Gradients of sparse products with respect to values, of any order.

The product ``C = A B``, weighted by ``G`` on C's pattern, is a form that is linear in each of three::

    T(a, b, g) = Σ a_p · b_q · g_e        over all pairs (p, q) of entries that meet, in the entry e of C

Its partial derivatives are the product itself, ``∂T/∂g``, and the two gradients ``∂T/∂a = (G Bᵀ)`` on A's pattern and
``∂T/∂b = (Aᵀ G)`` on B's. Each is linear in two of the three, and its own gradients are the other two. So is a matrix
times a vector, with ``∂T/∂a`` an outer product at the entries of A.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..patterns import Full, Pattern
from ..patterns._cuda import allocated, on_device
from ..patterns._runtime import kernel, run_rows
from ..patterns._values import gathered
from . import _cuda
from ._lanes import block_width
from ._symbolic import row_work

if TYPE_CHECKING:
    from ._plan import ProductPlan

__all__ = ["ProductForm", "VectorForm", "differentiable", "graph_operands", "wants_gradient"]


@kernel
def _left(
    first,
    last,
    a_indptr,
    a_indices,
    b_indptr,
    b_indices,
    columns,
    c_indptr,
    c_indices,
    g,
    g_batch,
    b,
    b_batch,
    out,
    batch,
):
    lane = 0
    while lane < batch:
        width = block_width(batch - lane)
        # A row of G by its columns; none is read that the row does not hold.
        held, sums = np.zeros(columns * width, out.dtype), np.zeros(width, out.dtype)
        g_lane, b_lane = lane if g_batch > 1 else 0, lane if b_batch > 1 else 0
        for row in range(first, last):
            for entry in range(c_indptr[row], c_indptr[row + 1]):
                at, at_g = np.int64(c_indices[entry]) * width, np.int64(entry) * g_batch + g_lane
                for sample in range(width):
                    held[at + sample] = g[at_g + (sample if g_batch > 1 else 0)]
            for p in range(a_indptr[row], a_indptr[row + 1]):
                k = a_indices[p]
                sums[:] = 0
                for q in range(b_indptr[k], b_indptr[k + 1]):
                    at, at_b = np.int64(b_indices[q]) * width, np.int64(q) * b_batch + b_lane
                    for sample in range(width):
                        sums[sample] += held[at + sample] * b[at_b + (sample if b_batch > 1 else 0)]
                at_out = np.int64(p) * batch + lane
                for sample in range(width):
                    out[at_out + sample] = sums[sample]
        lane += width


class _Form(ABC):
    """A form that is linear in each of three: `evaluate` gives its derivative by one of them."""

    #: Names of the three; the last one's derivative is the product itself.
    names: tuple[str, str, str]

    @abstractmethod
    def evaluate(self, wanted: str, values: dict[str, torch.Tensor]) -> torch.Tensor:
        """The derivative by `wanted`, of the other two's values; ``(entries, batch)`` each."""


class ProductForm(_Form):
    """Of a product of two matrices: `a`, `b` and the product `c`."""

    names = ("a", "b", "c")

    def __init__(self, plan: ProductPlan) -> None:
        self.plan = plan

    def evaluate(self, wanted: str, values: dict[str, torch.Tensor]) -> torch.Tensor:
        """As `_Form.evaluate`."""
        plan = self.plan
        if wanted == "c":
            return plan.multiply(values["a"], values["b"])  # type: ignore[no-any-return]
        if all(isinstance(pattern.structure, Full) for pattern in (plan.a, plan.b, plan.pattern)):
            return self._full(wanted, values)
        if wanted == "a":
            return self._left(plan.a, plan.b, plan.pattern, self._work, values["c"], values["b"])
        # Transposed, B is the left factor: Cᵀ = Bᵀ Aᵀ.
        a, b, c = plan.a, plan.b, plan.pattern
        turned = (gathered(values["c"], c.transposition), gathered(values["a"], a.transposition))
        return gathered(self._left(b.T, a.T, c.T, self._transposed_work, *turned), b.T.transposition)

    @functools.cached_property
    def _work(self) -> np.ndarray:
        return row_work(self.plan.a, self.plan.b)

    @functools.cached_property
    def _transposed_work(self) -> np.ndarray:
        return row_work(self.plan.b.T, self.plan.a.T)

    def _left(
        self, a: Pattern, b: Pattern, c: Pattern, work: np.ndarray, g_values: torch.Tensor, b_values: torch.Tensor
    ) -> torch.Tensor:
        """``G Bᵀ`` at A's entries."""
        batch = g_values.shape[1] if b_values.shape[1] == 1 else b_values.shape[1]
        out = allocated("gradients of a sparse product", (a.nnz, batch), g_values.dtype, g_values.device, batch)
        if not batch or not a.nnz:
            return out
        if on_device(g_values):
            _cuda.at_entries(a, b, c, g_values.contiguous(), b_values.contiguous(), out)
        else:
            g, other = (values.contiguous().numpy() for values in (g_values, b_values))
            patterns = (a.indptr, a.indices, b.indptr, b.indices, b.shape[1], c.indptr, c.indices)
            flat = (g.reshape(-1), g.shape[1], other.reshape(-1), other.shape[1], out.numpy().reshape(-1), batch)
            run_rows(_left, work, *patterns, *flat, lanes=batch)
        return out

    def _full(self, wanted: str, values: dict[str, torch.Tensor]) -> torch.Tensor:
        (m, k), n = self.plan.a.shape, self.plan.b.shape[1]
        g = self._matrices(values["c"], m, n)
        found = g @ self._matrices(values["b"], k, n).mT if wanted == "a" else self._matrices(values["a"], m, k).mT @ g
        return found.movedim(0, 2).flatten(0, 1)

    def _matrices(self, values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """``(batch, rows, columns)``."""
        return values.reshape(rows, columns, values.shape[1]).movedim(2, 0)


class VectorForm(_Form):
    """Of a matrix times a vector for each sample: `values`, `x` and the product `y`."""

    names = ("values", "x", "y")

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern

    def evaluate(self, wanted: str, values: dict[str, torch.Tensor]) -> torch.Tensor:
        """As `_Form.evaluate`."""
        from ._matvec import matvec

        pattern = self.pattern
        if wanted == "y":
            return matvec(pattern, values["values"], values["x"])  # type: ignore[no-any-return]
        if wanted == "x":
            turned = gathered(values["values"], pattern.transposition)
            return matvec(pattern.T, turned, values["y"])  # type: ignore[no-any-return]
        return gathered(values["y"], pattern.rows) * gathered(values["x"], pattern.indices)


class _Derivative(torch.autograd.Function):
    """The derivative of a form by one of its three, as a function of the other two."""

    @staticmethod
    def forward(ctx: Any, form: _Form, wanted: str, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.form, ctx.wanted = form, wanted
        ctx.save_for_backward(one, other)
        return form.evaluate(wanted, dict(zip(_others(form, wanted), (one.detach(), other.detach()), strict=True)))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        names = _others(ctx.form, ctx.wanted)
        values = {**dict(zip(names, ctx.saved_tensors, strict=True)), ctx.wanted: gradient}
        found = []
        for name, needed in zip(names, ctx.needs_input_grad[2:], strict=True):
            own = differentiable(ctx.form, name, values) if needed else None
            # What all samples share gets the sum of their gradients.
            shared = own is not None and values[name].shape[1] != own.shape[1]
            found.append(own.sum(1, keepdim=True) if own is not None and shared else own)
        return (None, None, *found)


def _others(form: _Form, wanted: str) -> tuple[str, str]:
    one, other = (name for name in form.names if name != wanted)
    return one, other


def differentiable(form: _Form, wanted: str, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The derivative of a form by one of its three, as a node of autograd's graph."""
    found: torch.Tensor = _Derivative.apply(form, wanted, *(values[name] for name in _others(form, wanted)))
    return found


def graph_operands(out: Any, **operands: Any) -> list[torch.Tensor]:
    """Operands of a product that autograd is to know of, ``(entries, batch)`` each.

    Raises
    ------
    TypeError
        Where one is no tensor.
    ValueError
        Where memory for the result is given: autograd keeps what it makes.
    """
    if out is not None:
        raise ValueError("out is given, but an operand requires grad; leave out away, or detach the operands")
    for name, operand in operands.items():
        if not isinstance(operand, torch.Tensor):
            raise TypeError(f"{name} is a {type(operand).__name__}, but another operand requires grad; pass a tensor")
    return [operand[:, None] if operand.ndim == 1 else operand for operand in operands.values()]


def wants_gradient(*operands: Any) -> bool:
    """Whether autograd is to know of a product of these."""
    return torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in operands)
