"""Products of matrices, of which one or both depend on the input, and attention.

With ``y[b, i, j] = Σ_k a[b, i, k] · c[b, k, j]``, b standing for all axes before the last two::

    ∂y[b, i, j]/∂a[b, i, k] = c[b, k, j]            ∂y[b, i, j]/∂c[b, k, j] = a[b, i, k]

so that row ``(b, i, j)`` has an entry for each ``k``, and its value is found in the other factor.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ._blocks import blocks
from ._pattern import Pattern
from ._rules import Call, Rule, add_rule
from ._structure import Csr, frozen, index_dtype

__all__: list[str] = []


@add_rule("aten.matmul", "aten.mm", "aten.bmm", "aten.mv", "aten.addmm", "aten.baddbmm")
class _MatmulRule(Rule):
    """A product of matrices, or of a matrix and a vector, broadcast as ``torch.matmul`` does."""

    several = True
    #: The names of left and right factor in the operators' schemas.
    FACTORS = (("self", "other"), ("self", "mat2"), ("self", "vec"), ("mat1", "mat2"), ("batch1", "batch2"))

    def check(self, call: Call) -> None:
        if call.argument not in self._names(call):
            raise call.unsupported(
                f"{call.argument} of {call.operator} depends on the input", "add it to the product instead"
            )

    def shared(self, call: Call) -> bool:
        return not call.batched

    def multiply_adds(self, call: Call) -> int:
        return call.out_size * self._sizes(call)[1]

    def pattern(self, call: Call) -> Pattern:
        lead, own = self._lead(call), self._matrices(call, call.in_shape)
        rows, inner, columns = self._sizes(call)
        left = call.argument == self._names(call)[0]
        size = math.prod(lead)
        if own[:-2] == lead:
            return blocks(size * rows, columns, inner) if left else blocks(size, rows, inner, columns)
        # Broadcast along some axes: several blocks of rows share their columns.
        places = np.arange(call.in_size).reshape(own)
        if left:
            picked = np.broadcast_to(places, (*lead, rows, inner))[..., :, None, :]
        else:
            picked = np.broadcast_to(places, (*lead, inner, columns)).swapaxes(-1, -2)[..., None, :, :]
        indices = np.broadcast_to(picked, (*lead, rows, columns, inner)).reshape(-1)
        dtype = index_dtype(len(indices), call.out_size, call.in_size)
        indptr = np.arange(call.out_size + 1, dtype=dtype) * dtype(inner)
        return Pattern.of(Csr(call.out_size, call.in_size, frozen(indptr), frozen(indices.astype(dtype))))

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert call.input is not None
        left_name, right_name = self._names(call)
        lead, (rows, inner, columns) = self._lead(call), self._sizes(call)
        left = call.argument == left_name
        name = right_name if left else left_name
        other = call[name].detach()
        samples = len(other) if name in call.batched else 1
        shape = tuple(other.shape[1:] if name in call.batched else other.shape)
        # What is a vector is a matrix of one column or row.
        whole = (*shape, 1) if len(shape) == 1 and left else (1, *shape) if len(shape) == 1 else shape
        matrices = other.reshape(samples, *[1] * (len(lead) + 2 - len(whole)), *whole)
        taken = matrices.transpose(-1, -2)[..., None, :, :] if left else matrices[..., :, None, :]
        values = taken.expand(samples, *lead, rows, columns, inner).flatten(1).T
        alpha = call.arguments.get("alpha", 1)
        return values.contiguous() if alpha == 1 else values * alpha

    def _names(self, call: Call) -> tuple[str, str]:
        known = {*call.arguments, call.argument}
        return next(names for names in reversed(self.FACTORS) if known.issuperset(names))

    def _matrices(self, call: Call, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A factor's shape as that of matrices."""
        if len(shape) > 1:
            return shape
        return (1, *shape) if call.argument == self._names(call)[0] else (*shape, 1)

    def _sizes(self, call: Call) -> tuple[int, int, int]:
        """Rows, terms of a sum and columns of one product."""
        own = self._matrices(call, call.in_shape)
        if call.argument == self._names(call)[0]:
            rows, inner = own[-2:]
            return rows, inner, call.out_size // max(1, rows * math.prod(self._lead(call)))
        inner, columns = own[-2:]
        return call.out_size // max(1, columns * math.prod(self._lead(call))), inner, columns

    def _lead(self, call: Call) -> tuple[int, ...]:
        """The axes before the matrices, broadcast."""
        left_name, right_name = self._names(call)
        shapes = []
        for name in (left_name, right_name):
            if name == call.argument:
                shapes.append(call.in_shape[:-2])
            else:
                shape = tuple(call[name].shape)
                shapes.append((shape[1:] if name in call.batched and call.input is not None else shape)[:-2])
        return tuple(np.broadcast_shapes(*shapes))


@add_rule("aten.scaled_dot_product_attention")
class _AttentionRule(Rule):
    """``aten.scaled_dot_product_attention``: ``out = softmax(q kᵀ · scale + mask) v`` for each head.

    With the attention ``A`` and ``D[i, j, c] = A[i, j] · (v[j, c] - out[i, c])``, for each head::

        ∂out[i, c]/∂q[i, e] = scale · Σ_j D[i, j, c] · k[j, e]
        ∂out[i, c]/∂k[j, e] = scale · D[i, j, c] · q[i, e]
        ∂out[i, c]/∂v[j, c] = A[i, j]
    """

    several = True

    def check(self, call: Call) -> None:
        if call["dropout_p"] > 0:
            raise call.unsupported("attention that drops weights at random", "call .eval() on the model")
        if call.argument == "attn_mask":
            raise call.unsupported("an attention mask that depends on the input", "add it before a softmax of its own")
        if call["enable_gqa"]:
            raise call.unsupported("enable_gqa=True", "repeat the keys and values for all heads")
        if call.in_shape[:-2] != call.out_shape[:-2]:
            raise call.unsupported(f"{call.argument} is broadcast to all heads", "expand it before")

    def _shapes(self, call: Call) -> tuple[int, int, int, int, int]:
        """Heads, queries, keys, width of queries and keys, width of values."""
        *lead, queries, values = call.out_shape
        return math.prod(lead), queries, self._length(call), self._width(call), values

    def _length(self, call: Call) -> int:
        name = "value" if call.argument == "key" else "key"
        return call.in_shape[-2] if call.argument in ("key", "value") else int(call[name].shape[-2])

    def _width(self, call: Call) -> int:
        return call.in_shape[-1] if call.argument != "value" else int(call["key"].shape[-1])

    def multiply_adds(self, call: Call) -> int:
        heads, queries, keys, width, values = self._shapes(call)
        return heads * queries * keys * (width + values)

    def backward_multiply_adds(self, call: Call, operands: int, weights: bool, forward: int) -> int:
        # The scores are made once more; then each product has two gradients.
        heads, queries, keys, width, values = self._shapes(call)
        return heads * queries * keys * (3 * width + 2 * values) if operands or weights else 0

    def pattern(self, call: Call) -> Pattern:
        heads, queries, keys, width, values = self._shapes(call)
        if call.argument == "query":
            return blocks(heads * queries, values, width)
        if call.argument == "key":
            return blocks(heads, queries * values, keys * width)
        return blocks(heads, queries, keys, values)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert call.input is not None and call.output is not None
        heads, queries, keys, width, channels = self._shapes(call)
        batch = len(call.input)
        q, k, v = (
            self._heads(call, name, heads, *sizes)
            for name, sizes in (("query", (queries, width)), ("key", (keys, width)), ("value", (keys, channels)))
        )
        scale = call["scale"] if call["scale"] is not None else 1 / math.sqrt(width)
        attention = self._attention(call, q, k, scale, heads)
        if call.argument == "value":
            # Row (head, query, channel): an entry for each key.
            weights = attention[:, :, :, None, :].expand(batch, heads, queries, channels, keys)
            return weights.flatten(1).T.contiguous()
        out = call.output.detach().reshape(batch, heads, queries, channels)
        change = attention[..., None] * (v[:, :, None] - out[:, :, :, None]) * scale
        if call.argument == "query":
            own = torch.einsum("bhijc,bhje->bhice", change, k)
        else:
            own = torch.einsum("bhijc,bhie->bhicje", change, q)
        return own.flatten(1).T.contiguous()

    def _heads(self, call: Call, name: str, heads: int, length: int, width: int) -> torch.Tensor:
        """An argument as ``(batch, heads, length, width)``."""
        assert call.input is not None
        batch, lead = len(call.input), call.out_shape[:-2]
        tensor = call.input if name == call.argument else call[name]
        if name != call.argument and name not in call.batched:
            tensor = tensor[None]
        return tensor.detach().expand(batch, *lead, length, width).reshape(batch, heads, length, width)

    def _attention(self, call: Call, q: torch.Tensor, k: torch.Tensor, scale: float, heads: int) -> torch.Tensor:
        """``A``, ``(batch, heads, queries, keys)``."""
        assert call.input is not None
        scores = torch.einsum("bhie,bhje->bhij", q, k) * scale
        queries, keys = scores.shape[-2:]
        if call["is_causal"]:
            allowed = torch.ones((queries, keys), dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~allowed, -math.inf)
        mask = call["attn_mask"]
        if mask is not None:
            batched = "attn_mask" in call.batched
            whole = mask if batched else mask[None]
            lead = call.out_shape[:-2]
            whole = whole.reshape(len(whole), *[1] * (len(lead) + 3 - whole.ndim), *whole.shape[1:])
            whole = whole.expand(len(scores), *lead, queries, keys).reshape(scores.shape)
            scores = scores.masked_fill(~whole, -math.inf) if mask.dtype == torch.bool else scores + whole
        # A query that no key is allowed to attends to nothing.
        return scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0)
