"""Linear layers whose parameters are the weights that are left."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..runtime import a_type
from .layers import SparseLayer
from .layouts import enter, leave
from .processor import lanes_for, tile_positions
from .weights import WeightPlaces
from .windows import Pair, Window

_POINT = Window((1, 1), (1, 1), (0, 0), (1, 1))


class SparseLinear(SparseLayer):
    """A linear layer whose parameters are the weights that are left, at the cost of these alone.

    Parameters
    ----------
    in_features, out_features, bias
        As of ``torch.nn.Linear``.
    mask : Tensor of bool, or of zeros and ones, shape (out_features, in_features)
        Which weights are left.
    dtype : torch.dtype, optional
        float32 or float64.

    Raises
    ------
    TypeError, ValueError
        As `SparseConv2d`.

    Examples
    --------
    >>> layer = SparseLinear(64, 32, mask=torch.rand(32, 64) < 0.1)
    >>> layer(torch.randn(5, 7, 64)).shape
    torch.Size([5, 7, 32])
    """

    #: The dense layer's class: one of `linear_classes`.
    _dense_class: Any = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mask: torch.Tensor,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._like(nn.Linear(in_features, out_features, bias, dtype=dtype), mask)

    @classmethod
    def from_dense(cls, layer: nn.Module, mask: torch.Tensor | None = None) -> SparseLinear:
        """The sparse layer of a dense one, as `SparseConv2d.from_dense`; also of a ``Conv1D`` of transformers."""
        if type(layer) not in linear_classes():
            raise TypeError(f"layer is {a_type(layer)}; expected a torch.nn.Linear")
        return cls._made_like(layer, mask)

    def _like(self, layer: Any, mask: torch.Tensor | None) -> None:
        self._dense_class, self.weight_shape = type(layer), tuple(layer.weight.shape)
        self.out_features, self.in_features = self.weight_shape[::-1] if self._is_transposed else self.weight_shape
        self._take(layer, mask)

    @property
    def _is_transposed(self) -> bool:
        """Whether the weight is of shape (in_features, out_features)."""
        return not issubclass(self._dense_class, nn.Linear)

    def to_dense(self) -> nn.Module:
        """The layer that it was made of, with copies of the weights, masked by ``torch.nn.utils.prune``."""
        if self._is_transposed:
            dense = self._dense_class(self.out_features, self.in_features).to(self.values.dtype)
        else:
            size = self.in_features, self.out_features
            # On no device: weights that are overwritten need not be drawn.
            dense = self._dense_class(*size, self.bias is not None, dtype=self.values.dtype, device="meta")
        return self._pruned(dense)

    def _structure_of(self, mask: torch.Tensor) -> WeightPlaces:
        if not self._is_transposed:
            return WeightPlaces.of(mask[:, :, None, None], _POINT, 1)
        structure = WeightPlaces.of(mask.T[:, :, None, None], _POINT, 1)
        output, source = structure.places // self.in_features, structure.places % self.in_features
        return replace(structure, places=source * self.out_features + output)

    def _window(self) -> Window:
        return _POINT

    def out_size(self, in_size: Pair) -> Pair:
        """The same rows and columns."""
        return in_size

    def _by_operators(self, x: Any) -> Any:
        weight = self.weight
        return functional.linear(x, weight.T if self._is_transposed else weight, self.bias)

    def _by_kernels(self, x: Any) -> Any:
        if self._takes(x) and x.sizes[1:] == (self.in_features,):
            return self._of_blocks(x)
        x = self._check(x)
        if not x.ndim or x.shape[-1] != self.in_features:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected (..., {self.in_features})")
        rows = x.reshape(-1, self.in_features)
        if not len(rows):
            return self._by_operators(x)
        lanes = lanes_for(len(rows), x.dtype.itemsize)
        if self.keeps_blocks and x.ndim == 2:
            return self._of_blocks(enter(x, lanes))
        # Several blocks side by side, as columns: a weight is read once for all of them.
        columns = _columns(-(-len(rows) // lanes))
        y = self._of_blocks(enter(rows, lanes, columns))
        return leave(y, len(rows), columns).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """What the layer's text shows."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self._left()}"


def linear_classes() -> tuple[type[nn.Module], ...]:
    """The classes of linear layers: that of `torch.nn`, its subclass in attention, and transformers' ``Conv1D``.

    The last, of GPT-2 and others, holds its weight transposed.
    """
    transposed = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return nn.Linear, NonDynamicallyQuantizableLinear, *([] if transposed is None else [transposed])


def _columns(blocks: int) -> int:
    """How many blocks one broadcast of a weight serves: a power of two, so that there are few kernels."""
    fitting = [2**exponent for exponent in range(5) if 2**exponent <= tile_positions()]
    return min(fitting, key=lambda columns: -(-blocks // columns) * (columns + 1))
