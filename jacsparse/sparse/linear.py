"""Linear layers whose parameters are the weights that are left."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

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
    def from_dense(cls, layer: nn.Linear, mask: torch.Tensor | None = None) -> SparseLinear:
        """The sparse layer of a dense one, as `SparseConv2d.from_dense`."""
        if type(layer) is not nn.Linear:
            raise TypeError(f"layer is {a_type(layer)}; expected a torch.nn.Linear")
        return cls._made_like(layer, mask)

    def _like(self, layer: nn.Linear, mask: torch.Tensor | None) -> None:
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight_shape = (self.out_features, self.in_features)
        self._take(layer, mask)

    def to_dense(self) -> nn.Linear:
        """A ``torch.nn.Linear`` with copies of the weights, masked by ``torch.nn.utils.prune``."""
        dense = nn.Linear(self.in_features, self.out_features, self.bias is not None, dtype=self.values.dtype)
        return self._pruned(dense)  # type: ignore[return-value]

    def _structure_of(self, mask: torch.Tensor) -> WeightPlaces:
        return WeightPlaces.of(mask[:, :, None, None], _POINT, 1)

    def _window(self) -> Window:
        return _POINT

    def out_size(self, in_size: Pair) -> Pair:
        """The same rows and columns."""
        return in_size

    def _by_operators(self, x: Any) -> Any:
        return functional.linear(x, self.weight, self.bias)

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


def _columns(blocks: int) -> int:
    """How many blocks one broadcast of a weight serves: a power of two, so that there are few kernels."""
    fitting = [2**exponent for exponent in range(5) if 2**exponent <= tile_positions()]
    return min(fitting, key=lambda columns: -(-blocks // columns) * (columns + 1))
