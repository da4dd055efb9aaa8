"""Products of matrices, linear layers among them, and attention; each factor may depend on the input.

With ``y[b, i, j] = Σ_k a[b, i, k] · c[b, k, j]``, where `b` stands for all axes before the last two::

    ∂y[b, i, j]/∂a[b, i, k] = c[b, k, j]            ∂y[b, i, j]/∂c[b, k, j] = a[b, i, k]

so that row ``(b, i, j)`` has an entry for each ``k``, and its value is an element of the other factor.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from .blocks import block_pattern, equal_rows, scores_left, with_entries
from .convolution import Convolution, packed
from .layout import Labels
from .pattern import Pattern
from .rules import Call, Rule, Use, add_rule
from .strided import pattern_from_sources

#: Axes of the factors, and of the product; a summand is broadcast to the product.
_AXES: dict[str, tuple[dict[str, str], str]] = {
    "aten.mm": ({"self": "ik", "mat2": "kj"}, "ij"),
    "aten.mv": ({"self": "ik", "vec": "k"}, "i"),
    "aten.bmm": ({"self": "bik", "mat2": "bkj"}, "bij"),
    "aten.addmm": ({"mat1": "ik", "mat2": "kj"}, "ij"),
    "aten.addmv": ({"mat": "ik", "vec": "k"}, "i"),
    "aten.baddbmm": ({"batch1": "bik", "batch2": "bkj"}, "bij"),
}


@add_rule("aten.mm", "aten.mv", "aten.bmm")
class _ProductRule(Rule):
    """A product of matrices, or of a matrix and a vector; a factor that does not depend on the input may be pruned."""

    several = True
    reads = ()

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        factors, out = _AXES[use.operator]
        return {name: tuple(axes) for name, axes in factors.items()}, tuple(out)

    def check(self, call: Call) -> None:
        """All uses have a Jacobian."""

    def shared(self, call: Call) -> bool:
        return self._other(call) not in call.batched

    def multiply_adds(self, call: Call) -> int:
        return call.out_size * self._sizes(call)[2]

    def pruned_arguments(self, call: Call) -> list[str]:
        return [self._other(call)]

    def entries(self, call: Call) -> int:
        return self.multiply_adds(call)

    def pattern(self, call: Call) -> Pattern:
        lead, rows, inner, columns = self._sizes(call)
        left, mask = self._is_left(call), call.masks.get(self._other(call))
        if mask is None:
            return block_pattern(lead * rows, columns, inner) if left else block_pattern(lead, rows, inner, columns)
        if left and mask.ndim == 2:
            bits = packed(mask.T, lead * rows)
            return Pattern.of(Convolution(lead * rows * columns, lead * rows * inner, lead * rows, (), bits))
        places = np.arange(call.in_size).reshape((lead, rows, inner) if left else (lead, inner, columns))
        places = places[:, :, None, :] if left else places.swapaxes(1, 2)[:, None, :, :]
        shape = (lead, rows, columns, inner)
        present = self._per_entry(call, mask.cpu()).expand(shape).numpy()
        return with_entries(np.broadcast_to(places, shape), present, call)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        lead, rows, inner, columns = self._sizes(call)
        factor, samples = self._factor(call)
        if isinstance(pattern.structure, Convolution):
            return self._scaled(call, pattern.structure.values(_linear_weight(factor, lead * rows)))
        values = self._per_entry(call, factor).expand(samples, lead, rows, columns, inner).flatten(1)
        mask = call.masks.get(self._other(call))
        if mask is not None:
            values = values[:, self._per_entry(call, mask).expand(lead, rows, columns, inner).flatten()]
        return self._scaled(call, values.T)

    def _per_entry(self, call: Call, factor: torch.Tensor) -> torch.Tensor:
        """The other factor, or its mask, with the axes of the Jacobian's entries: rows, columns, terms of a sum."""
        _, rows, inner, columns = self._sizes(call)
        if self._is_left(call):
            return factor.reshape(*factor.shape[:-2], inner, columns).transpose(-1, -2)[..., None, :, :]
        return factor.reshape(*factor.shape[:-2], rows, inner)[..., :, None, :]

    def transposed_values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        if isinstance(pattern.structure, Convolution):
            # The structure knows its orientation, and so the order of its weights.
            return self.values(call, pattern)
        lead, rows, inner, columns = self._sizes(call)
        if not self._is_left(call) or call.masks.get(self._other(call)) is not None:
            return super().transposed_values(call, pattern)
        factor, samples = self._factor(call)
        return self._scaled(call, factor[:, :, None].expand(samples, lead, rows, inner, columns).flatten(1).T)

    def pull_back(self, call: Call, pattern: Pattern, gradients: torch.Tensor) -> torch.Tensor:
        lead, rows, _, columns = self._sizes(call)
        factor, _ = self._factor(call)
        gradients = gradients.reshape(*gradients.shape[:2], lead, rows, columns)
        transpose = factor.transpose(-1, -2)
        return self._scaled(call, gradients @ transpose if self._is_left(call) else transpose @ gradients)

    def _scaled(self, call: Call, values: torch.Tensor) -> torch.Tensor:
        alpha = call.arguments.get("alpha", 1)
        return values.contiguous() if alpha == 1 else values * alpha

    def _is_left(self, call: Call) -> bool:
        return call.argument == next(iter(_AXES[call.operator][0]))

    def _other(self, call: Call) -> str:
        """The name of the factor that is not differentiated."""
        left, right = _AXES[call.operator][0]
        return right if call.argument == left else left

    def _sizes(self, call: Call) -> tuple[int, int, int, int]:
        """Number of products, and the rows, terms of a sum and columns of each."""
        lengths = dict(zip(_AXES[call.operator][0][call.argument], call.in_shape, strict=True))
        lengths |= dict(zip(_AXES[call.operator][1], call.out_shape, strict=True))
        return lengths.get("b", 1), lengths.get("i", 1), lengths["k"], lengths.get("j", 1)

    def _factor(self, call: Call) -> tuple[torch.Tensor, int]:
        """The other factor as ``(batch, lead, rows, columns)``, and the batch: 1 where all samples share the factor."""
        name = self._other(call)
        _, rows, inner, columns = self._sizes(call)
        factor = call[name].detach()
        samples = len(factor) if name in call.batched else 1
        sizes = (inner, columns) if self._is_left(call) else (rows, inner)
        lead = factor.numel() // max(1, samples * math.prod(sizes)) if factor.numel() else 1
        return factor.reshape(samples, lead, *sizes), samples


class _SummandRule(Rule):
    """What is added to a product, broadcast to its shape and multiplied by ``beta``."""

    reads = ()

    def check(self, call: Call) -> None:
        """All uses have a Jacobian."""

    def shared(self, call: Call) -> bool:
        return True

    def pattern(self, call: Call) -> Pattern:
        places = np.arange(call.in_size).reshape(call.in_shape)
        return pattern_from_sources(np.broadcast_to(places, call.out_shape), call.in_size)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return call.input.new_full((pattern.nnz, 1), call.arguments.get("beta", 1))


_SUMMAND = _SummandRule()


@add_rule("aten.addmm", "aten.addmv", "aten.baddbmm")
class _SumOfProductRule(_ProductRule):
    """A product to which ``self`` is added."""

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        labels, out = super().labels(use)
        return {**labels, "self": out[len(out) - use.rank("self") :]}, out

    def of_argument(self, argument: str) -> Rule:
        return _SUMMAND if argument == "self" else self


def _linear_weight(factor: torch.Tensor, copies: int) -> torch.Tensor:
    """A factor as the weight of a convolution without axes, ``(columns, terms)``, repeated `copies` times."""
    weight = factor[0, 0].T
    return weight.contiguous() if copies == 1 else weight.repeat(copies, 1)


#: The arguments that are added to the scores.
_SCORE_MASKS = ("attn_mask", "attn_bias")
_ATTENTIONS = "flash_attention_for_cpu flash_attention efficient_attention cudnn_attention fused_attention_overrideable"


@add_rule(*(f"aten._scaled_dot_product_{name}" for name in _ATTENTIONS.split()))
class _AttentionRule(Rule):
    """Fused attention: ``out = softmax(q kᵀ · scale + mask) v`` for each head.

    With the attention ``A`` and ``D[i, j, c] = A[i, j] · (v[j, c] - out[i, c])``, for each head::

        ∂out[i, c]/∂q[i, e] = scale · Σ_j D[i, j, c] · k[j, e]
        ∂out[i, c]/∂k[j, e] = scale · D[i, j, c] · q[i, e]
        ∂out[i, c]/∂v[j, c] = A[i, j]

    Where a constant mask is minus infinity, or False, ``A[i, j]`` is zero: ``k[j]`` and ``v[j]`` have no entries.
    """

    several = True
    entrywise = False
    lists_entries = True
    prunes_variables = False

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        rank = use.output.ndim
        lead = tuple(range(rank - 2))
        labels: dict[str, Labels] = {
            "query": (*lead, "query", "width"),
            "key": (*lead, "key", "width"),
            "value": (*lead, "key", "channel"),
        }
        mask = (*lead, "query", "key")
        labels |= {name: mask[len(mask) - use.rank(name) :] for name in _SCORE_MASKS if use.rank(name)}
        return labels, (*lead, "query", "channel")

    def check(self, call: Call) -> None:
        if call["dropout_p"] != 0:
            raise call.unsupported("attention that drops weights at random", "call .eval() on the model")
        if call.argument in _SCORE_MASKS:
            raise call.unsupported("an attention mask that depends on the input", "add it before a softmax of its own")
        lead, out_lead = call.in_shape[:-2], call.out_shape[:-2]
        grouped = call.argument != "query" and lead[:-1] == out_lead[:-1] and lead and out_lead[-1] % lead[-1] == 0
        if lead != out_lead and not grouped:
            raise call.unsupported(f"{call.argument} is broadcast to all heads", "expand it before")

    def _shapes(self, call: Call) -> tuple[int, int, int, int, int]:
        """Heads, queries, keys, width of queries and keys, width of values."""
        *lead, queries, values = call.out_shape
        keys = call.in_shape[-2] if call.argument in ("key", "value") else int(call["key"].shape[-2])
        width = call.in_shape[-1] if call.argument != "value" else int(call["key"].shape[-1])
        return math.prod(lead), queries, keys, width, values

    def multiply_adds(self, call: Call) -> int:
        heads, queries, keys, width, values = self._shapes(call)
        return heads * queries * keys * (width + values)

    def backward_multiply_adds(self, call: Call, operands: int, weights: bool, forward: int) -> int:
        # The scores are computed once more; then each product has two gradients.
        heads, queries, keys, width, values = self._shapes(call)
        return heads * queries * keys * (3 * width + 2 * values) if operands or weights else 0

    def pruned_arguments(self, call: Call) -> list[str]:
        if call.argument == "query" or call.in_shape[:-2] != call.out_shape[:-2]:
            return []
        return [name for name in _SCORE_MASKS if call.arguments.get(name) is not None]

    def as_weight(self, call: Call, name: str, value: torch.Tensor) -> torch.Tensor:
        return scores_left(value)

    def entries(self, call: Call) -> int:
        heads, queries, keys, width, values = self._shapes(call)
        return heads * queries * keys * values * (width if call.argument == "key" else 1)

    def _present(self, call: Call, width: int) -> np.ndarray | None:
        """Which entries of the keys' or values' pattern a mask leaves; None without one."""
        heads, queries, keys, _, values = self._shapes(call)
        for mask in call.masks.values():
            allowed = mask.cpu().expand(*call.out_shape[:-2], queries, keys).reshape(heads, queries, 1, keys, 1)
            return allowed.expand(-1, -1, values, -1, width).flatten(-2).numpy()
        return None

    def pattern(self, call: Call) -> Pattern:
        heads, queries, keys, width, values = self._shapes(call)
        if call.argument == "query":
            return block_pattern(heads * queries, values, width)
        present = self._present(call, width if call.argument == "key" else 1)
        if present is not None:
            places = np.arange(call.in_size).reshape(heads, 1, keys, -1)
            places = places.reshape(heads, 1, 1, -1) if call.argument == "key" else places.transpose(0, 1, 3, 2)
            return with_entries(np.broadcast_to(places, present.shape), present, call)
        if call.in_shape[:-2] != call.out_shape[:-2]:
            return self._grouped(call)
        if call.argument == "key":
            return block_pattern(heads, queries * values, keys * width)
        return block_pattern(heads, queries, keys, values)

    def _grouped(self, call: Call) -> Pattern:
        """The pattern for keys or values that several heads share."""
        heads, queries, keys, _, values = self._shapes(call)
        places = np.arange(call.in_size).reshape(*call.in_shape[:-2], keys, -1)
        places = places.repeat(call.out_shape[-3] // call.in_shape[-3], axis=-3).reshape(heads, keys, -1)
        rows = places.reshape(heads, 1, 1, -1) if call.argument == "key" else places.transpose(0, 2, 1)[:, None]
        return equal_rows(np.broadcast_to(rows, (heads, queries, values, rows.shape[-1])), call.in_size)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        (q, k, v), attention, scale = self._factors(call)
        heads, queries, keys, _, channels = self._shapes(call)
        batch = len(attention)
        if call.argument == "value":
            # Row (head, query, channel) has an entry for each key.
            weights = attention[:, :, :, None, :].expand(batch, heads, queries, channels, keys)
            return self._of_entries(call, weights, 1)
        out = call.output.detach().reshape(batch, heads, queries, channels)
        change = attention[..., None] * (v[:, :, None] - out[:, :, :, None]) * scale
        if call.argument == "query":
            values = torch.einsum("bhijc,bhje->bhice", change, k)
            return values.flatten(1).T.contiguous()
        return self._of_entries(call, torch.einsum("bhijc,bhie->bhicje", change, q), q.shape[-1])

    def _of_entries(self, call: Call, values: torch.Tensor, width: int) -> torch.Tensor:
        """The values of the entries that a mask leaves, ``(entries, batch)``, from those of all keys."""
        present, values = self._present(call, width), values.flatten(1)
        if present is not None:
            values = values[:, torch.from_numpy(present.reshape(-1)).to(values.device)]
        return values.T.contiguous()

    def _factors(self, call: Call) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor, float]:
        """Queries, keys and values of each head, the attention and the scale."""
        heads, queries, keys, width, channels = self._shapes(call)
        q = self._heads(call, "query", heads, queries, width)
        k = self._heads(call, "key", heads, keys, width)
        v = self._heads(call, "value", heads, keys, channels)
        scale = call["scale"] if call["scale"] is not None else 1 / math.sqrt(width)
        return (q, k, v), self._attention(call, q, k, scale), scale

    def _heads(self, call: Call, name: str, heads: int, length: int, width: int) -> torch.Tensor:
        """An argument as ``(batch, heads, length, width)``."""
        batch, lead = len(call.input), call.out_shape[:-2]
        tensor = call.input if name == call.argument else call[name]
        if name != call.argument and name not in call.batched:
            tensor = tensor[None]
        if tensor.ndim > 3 and 1 < tensor.shape[-3] < lead[-1]:
            # Several heads share keys and values.
            tensor = tensor.repeat_interleave(lead[-1] // tensor.shape[-3], -3)
        return tensor.detach().expand(batch, *lead, length, width).reshape(batch, heads, length, width)

    def _attention(self, call: Call, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
        """``A``, ``(batch, heads, queries, keys)``."""
        scores = torch.einsum("bhie,bhje->bhij", q, k) * scale
        queries, keys = scores.shape[-2:]
        if call["is_causal"]:
            allowed = torch.ones((queries, keys), dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~allowed, -math.inf)
        name = next((name for name in _SCORE_MASKS if call.arguments.get(name) is not None), None)
        if name is not None:
            mask = call[name] if name in call.batched else call[name][None]
            lead = call.out_shape[:-2]
            mask = mask.reshape(len(mask), *[1] * (len(lead) + 3 - mask.ndim), *mask.shape[1:])
            mask = mask.expand(len(scores), *lead, queries, keys).reshape(scores.shape)
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        # A query without any allowed key attends to nothing.
        return scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0)
