"""Attention whose projections are layers of their own, so that they can be sparse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

from ..runtime import a_type
from .layers import SparseLayer, rename_state

#: Modules that pass their parts' weights to one kernel in evaluation mode, by what such a kernel is not used with.
_FUSED: dict[type[nn.Module], tuple[str, Any]] = {
    nn.TransformerEncoder: ("use_nested_tensor", False),
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
}
#: Why a layer with a mask on its bias stays dense.
PRUNED_BIAS = "its bias is pruned too, which only the dense layer keeps so"


def hooks_of(layer: nn.Module) -> str | None:
    """Why a layer with hooks stays dense; None where it has none but those of pruning."""
    hooks = [layer._forward_hooks, layer._backward_hooks, layer._backward_pre_hooks]
    others = [hook for hook in layer._forward_pre_hooks.values() if not isinstance(hook, prune.BasePruningMethod)]
    return "it has hooks, which only the dense layer runs" if any(hooks) or others else None


class UnpackedAttention(nn.Module):
    """A ``torch.nn.MultiheadAttention`` whose projections of the inputs and of the output are linear layers.

    Its `state_dict` is that of the attention. Where queries, keys and values are one tensor, `in_proj` projects it;
    others are multiplied by the three parts of its dense weight.

    Parameters
    ----------
    attention : MultiheadAttention
        Whose parameters it takes over; one without an `obstacle`.
    """

    #: What ``torch.nn.TransformerEncoderLayer`` asks its attention for: whether it may read `in_proj_weight`.
    _qkv_same_embed_dim = False
    #: What other code may ask an attention for.
    bias_k = bias_v = None
    add_zero_attn = False

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = attention.embed_dim, attention.num_heads
        self.dropout, self.batch_first = attention.dropout, attention.batch_first
        self.in_proj = nn.Linear(self.embed_dim, 3 * self.embed_dim, attention.in_proj_bias is not None, device="meta")
        _hand_over(attention, "in_proj_weight", self.in_proj, "weight")
        self.in_proj.bias = attention.in_proj_bias
        self.out_proj: nn.Module = attention.out_proj
        rename_state(self, "in_proj.", "in_proj_")
        self.train(attention.training)

    @staticmethod
    def obstacle(attention: nn.Module) -> str | None:
        """Why an attention cannot be taken over, if it cannot."""
        if type(attention) is not nn.MultiheadAttention:
            return f"{type(attention).__name__} has no sparse layer"
        if attention.in_proj_weight is None:
            return "its keys or values have another size than its queries, and so weights of their own"
        if attention.bias_k is not None or attention.add_zero_attn:
            return "it adds keys of its own (add_bias_kv or add_zero_attn)"
        if hasattr(attention, "in_proj_bias_mask"):
            return PRUNED_BIAS
        return hooks_of(attention)

    @property
    def in_proj_weight(self) -> torch.Tensor:
        """The dense weight of the inputs' projection, for code that multiplies by it itself."""
        return self.in_proj.weight

    @property
    def in_proj_bias(self) -> torch.Tensor | None:
        """The bias of the inputs' projection."""
        return self.in_proj.bias

    def to_dense(self) -> nn.MultiheadAttention:
        """The attention again, with the same parameters; of sparse layers there must be none any more."""
        with_bias = self.in_proj.bias is not None
        attention = nn.MultiheadAttention(
            self.embed_dim, self.num_heads, self.dropout, with_bias, batch_first=self.batch_first, device="meta"
        )
        _hand_over(self.in_proj, "weight", attention, "in_proj_weight")
        attention.in_proj_bias, attention.out_proj = self.in_proj.bias, self.out_proj  # type: ignore[assignment]
        return attention.train(self.training)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output and, if asked for, the weights of the values, as of ``torch.nn.MultiheadAttention``."""
        if is_causal and attn_mask is None:
            raise ValueError("is_causal is a hint about attn_mask, which is None: pass the causal mask too")
        has_batch = query.ndim == 3
        heads_of = self._heads_of(has_batch)
        q, k, v = map(heads_of, self._projected(query, key, value))
        mask = None if attn_mask is None else _additive("attn_mask", attn_mask, q.dtype)
        if mask is not None and mask.ndim == 3:
            mask = mask.unflatten(0, (-1, self.num_heads))
        if key_padding_mask is not None:
            padding = _additive("key_padding_mask", key_padding_mask, q.dtype)
            padding = padding.view(-1, 1, 1, padding.shape[-1])
            mask = padding if mask is None else mask + padding
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q / math.sqrt(q.shape[-1])) @ k.mT
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = functional.dropout(weights, dropout)
            y = weights @ v
        else:
            y = functional.scaled_dot_product_attention(q, k, v, mask, dropout)
        # In the layout that PyTorch's own has, for which a dropout that follows draws the same numbers.
        y = self.out_proj(y.permute(2, 0, 1, 3).flatten(2))
        y = y.transpose(0, 1) if self.batch_first or not has_batch else y
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not has_batch:
            return y[0], None if weights is None else weights[0]
        return y, weights

    def _projected(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if query is key and key is value:
            return self.in_proj(query if query.ndim == 3 else query[None]).chunk(3, -1)  # type: ignore[no-any-return]
        weights, bias = self.in_proj.weight.chunk(3), self.in_proj.bias
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        parts = zip((query, key, value), weights, biases, strict=True)
        return tuple(functional.linear(x if x.ndim == 3 else x[None], *others) for x, *others in parts)

    def _heads_of(self, has_batch: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        """What makes (batch, heads, length, size of a head) of a projected input."""
        order = (0, 2, 1, 3) if self.batch_first or not has_batch else (1, 2, 0, 3)
        return lambda x: x.unflatten(-1, (self.num_heads, -1)).permute(order)


def unpack_attentions(model: nn.Module, paths: set[str] | None = None) -> dict[nn.Module, nn.Module]:
    """The attentions of a model, or of those at some paths, by the layers that are to be in their places."""
    return {
        part: UnpackedAttention(part)
        for path, part in model.named_modules()
        if isinstance(part, nn.MultiheadAttention)
        and (paths is None or path in paths)
        and UnpackedAttention.obstacle(part) is None
    }


def leave_fused(model: nn.Module) -> None:
    """Have a transformer's layers call their parts where these are ours; one kernel for all would multiply zeros."""
    for part in model.modules():
        for kind, (name, value) in _FUSED.items():
            are_ours = (isinstance(each, (SparseLayer, UnpackedAttention)) for each in part.modules())
            if isinstance(part, kind) and any(are_ours):
                vars(part).setdefault("_fused_again", getattr(part, name))
                setattr(part, name, value)


def fuse_again(model: nn.Module) -> None:
    """Undo `leave_fused`."""
    for part in model.modules():
        for kind, (name, _) in _FUSED.items():
            if isinstance(part, kind) and "_fused_again" in vars(part):
                setattr(part, name, vars(part).pop("_fused_again"))


def _hand_over(source: nn.Module, name: str, target: nn.Module, other_name: str) -> None:
    """Let a module have another one's parameter, with its mask."""
    mask = source._buffers.get(f"{name}_mask")
    setattr(target, other_name, source._parameters[name if mask is None else f"{name}_orig"])
    if mask is not None:
        with torch.no_grad():
            prune.custom_from_mask(target, other_name, mask)


def _additive(name: str, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as numbers that are added to scores: minus infinity where nothing is to be read."""
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():
            raise TypeError(f"{name} is {a_type(mask)} of {mask.dtype}; expected a tensor of bool or of floats")
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(mask, -math.inf)
