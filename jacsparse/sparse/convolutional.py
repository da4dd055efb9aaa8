"""Convolutions whose parameters are the weights that are left."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn
from torch.nn import functional

from ..runtime import a_type
from .layers import SparseLayer
from .layouts import enter, leave
from .processor import lanes_for
from .weights import WeightPlaces
from .windows import Pair, Window


class SparseConv2d(SparseLayer):
    """A convolution whose parameters are the weights that are left, at the cost of these alone.

    Its outputs and gradients are those of ``torch.nn.Conv2d`` with a mask on its weight. No optimiser can change a
    pruned weight, nor hold a state for it.

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode
        As of ``torch.nn.Conv2d``.
    mask : Tensor of bool, or of zeros and ones, shape (out_channels, in_channels // groups, *kernel_size)
        Which weights are left.
    dtype : torch.dtype, optional
        float32 or float64.

    Raises
    ------
    TypeError, ValueError
        Where an argument does not fit, the mask has another shape or holds what is neither 0 nor 1; in a forward pass,
        where the input is no tensor of the layer's dtype on the CPU. Under autocast inputs may be bfloat16: leave the
        layer out of it.

    Notes
    -----
    A pruned weight is a guaranteed zero: where a masked dense layer multiplies it with an infinite input, that gives
    NaN, and here nothing. Results have the same bits for any number of threads. The order of sums in the weights'
    gradients depends on the processor's vectors and on the batch.

    Examples
    --------
    >>> dense = torch.nn.Conv2d(3, 8, 3, padding=1)
    >>> layer = SparseConv2d.from_dense(dense, mask=torch.rand(8, 3, 3, 3) < 0.1)
    >>> layer(torch.randn(5, 3, 32, 32)).shape
    torch.Size([5, 8, 32, 32])
    """

    _dense_class: ClassVar[type[nn.Conv1d | nn.Conv2d]] = nn.Conv2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair | str = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        *,
        mask: torch.Tensor,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._like(
            self._dense_class(
                in_channels,
                out_channels,
                kernel_size,  # type: ignore[arg-type]
                stride,  # type: ignore[arg-type]
                padding,  # type: ignore[arg-type]
                dilation,  # type: ignore[arg-type]
                groups,
                bias,
                padding_mode,
                dtype=dtype,
            ),
            mask,
        )

    @classmethod
    def from_dense(cls, layer: Any, mask: torch.Tensor | None = None) -> Self:
        """The sparse layer of a dense one, whose weights it copies.

        Parameters
        ----------
        layer : Conv2d, for `SparseConv1d` a Conv1d
            With a mask of ``torch.nn.utils.prune``, or without one.
        mask : Tensor, optional
            Which weights are left. The layer's own mask by default; without one, the weights that are not zero.

        Raises
        ------
        TypeError, ValueError
            Where the layer is another one, or the mask has another shape.
        """
        if type(layer) is not cls._dense_class:
            raise TypeError(f"layer is {a_type(layer)}; expected a torch.nn.{cls._dense_class.__name__}")
        return cls._made_like(layer, mask)

    def _like(self, layer: nn.Conv1d | nn.Conv2d, mask: torch.Tensor | None) -> None:
        self.in_channels, self.out_channels, self.groups = layer.in_channels, layer.out_channels, layer.groups
        self.kernel_size, self.stride = _pair(layer.kernel_size), _pair(layer.stride)
        self.padding = layer.padding if isinstance(layer.padding, str) else _pair(layer.padding, rows=0)
        self.dilation, self.padding_mode = _pair(layer.dilation), layer.padding_mode
        self.weight_shape = tuple(layer.weight.shape)
        self._take(layer, mask)

    def to_dense(self) -> nn.Conv1d | nn.Conv2d:
        """The layer of ``torch.nn`` with copies of the weights, masked by ``torch.nn.utils.prune``."""
        dense = self._dense_class(
            self.in_channels,
            self.out_channels,
            **self._sizes(),
            groups=self.groups,
            bias=self.bias is not None,
            padding_mode=self.padding_mode,
            dtype=self.values.dtype,
            # On no device: weights that are overwritten need not be drawn.
            device="meta",
        )
        return self._pruned(dense)  # type: ignore[return-value]

    def _sizes(self) -> dict[str, Any]:
        """Those of the window, as the dense layer has them."""
        sizes = {name: getattr(self, name) for name in ("kernel_size", "stride", "padding", "dilation")}
        axes = len(self.weight_shape) - 2
        return {name: size if isinstance(size, str) else size[-axes:] for name, size in sizes.items()}

    def _structure_of(self, mask: torch.Tensor) -> WeightPlaces:
        return WeightPlaces.of(mask.view(*mask.shape[:2], *self.kernel_size), self._window(), self.groups)

    def _padded(self) -> tuple[Pair, Pair]:
        """How many rows the padding adds before and after the input, and how many columns."""
        if self.padding == "valid":
            return (0, 0), (0, 0)
        if isinstance(self.padding, str):
            totals = [step * (size - 1) for step, size in zip(self.dilation, self.kernel_size, strict=True)]
            rows, columns = ((total // 2, total - total // 2) for total in totals)
            return rows, columns
        rows, columns = ((count, count) for count in self.padding)
        return rows, columns

    def _borders(self) -> tuple[Pair, Pair]:
        """The padding of zeros, which is never stored; any other is, before the kernel runs."""
        return self._padded() if self.padding_mode == "zeros" else ((0, 0), (0, 0))

    def _window(self) -> Window:
        (top, _), (left, _) = self._borders()
        return Window(self.kernel_size, self.stride, (top, left), self.dilation)

    def _read_size(self, in_size: Pair) -> Pair:
        """Rows and columns that kernels read: those of an input, and of a border that is no zeros."""
        if self.padding_mode == "zeros":
            return in_size
        (top, bottom), (left, right) = self._padded()
        return in_size[0] + top + bottom, in_size[1] + left + right

    def out_size(self, in_size: Pair) -> Pair:
        """Rows and columns of the output, for those of an input.

        Raises
        ------
        ValueError
            Where the kernel is larger than the padded input.
        """
        sizes = []
        for axis, border in enumerate(self._borders()):
            reach = self.dilation[axis] * (self.kernel_size[axis] - 1) + 1
            padded = in_size[axis] + sum(border)
            if padded < reach:
                raise ValueError(
                    f"the kernel reaches over {reach} {('rows', 'columns')[axis]}, and the input of {in_size[0]} × "
                    f"{in_size[1]} has {padded} with its padding; give a larger input"
                )
            sizes.append((padded - reach) // self.stride[axis] + 1)
        rows, columns = sizes
        return rows, columns

    def _check_channels(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 4 or shape[1] != self.in_channels:
            raise ValueError(f"x has shape {shape}; expected (batch, {self.in_channels}, rows, columns)")

    def _by_operators(self, x: Any) -> Any:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            x, padding = self._with_border(x), 0
        weight = self.weight.view(*self.weight_shape[:2], *self.kernel_size)
        return functional.conv2d(x, weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def _with_border(self, x: torch.Tensor) -> torch.Tensor:
        """The input with a border that is no zeros."""
        (top, bottom), (left, right) = self._padded()
        return functional.pad(x, (left, right, top, bottom), mode=self.padding_mode)

    def _by_kernels(self, x: Any) -> Any:
        if self._takes(x) and len(x.sizes) == 4 and self.padding_mode == "zeros":
            self._check_channels(x.sizes)
            return self._of_blocks(x)
        x = self._check(x)
        if x.ndim == 3:
            return self._by_kernels(x[None])[0]
        self._check_channels(tuple(x.shape))
        if x.shape[0] == 0:
            return self._by_operators(x)
        if self.padding_mode != "zeros":
            x = self._with_border(x)
        y = self._of_blocks(enter(x, lanes_for(len(x), x.dtype.itemsize)))
        return y if self.keeps_blocks else leave(y)

    def extra_repr(self) -> str:
        """What the layer's text shows."""
        sizes = self._sizes()
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={sizes['kernel_size']}, stride={sizes['stride']}"
        if self.padding not in ((0, 0), "valid"):
            text += f", padding={sizes['padding']}"
        if self.dilation != (1, 1):
            text += f", dilation={sizes['dilation']}"
        if self.groups != 1:
            text += f", groups={self.groups}"
        return f"{text}, bias={self.bias is not None}, {self._left()}"


class SparseConv1d(SparseConv2d):
    """A convolution of sequences whose parameters are the weights that are left, at the cost of these alone.

    It is the `SparseConv2d` of height 1 in all but shapes: parameters are those of ``torch.nn.Conv1d``, with a mask of
    shape (out_channels, in_channels // groups, kernel_size), and inputs are of shape (batch, in_channels, length).

    Examples
    --------
    >>> dense = torch.nn.Conv1d(3, 8, 5, padding=2)
    >>> layer = SparseConv1d.from_dense(dense, mask=torch.rand(8, 3, 5) < 0.1)
    >>> layer(torch.randn(4, 3, 100)).shape
    torch.Size([4, 8, 100])
    """

    _dense_class = nn.Conv1d

    def _by_operators(self, x: Any) -> Any:
        return super()._by_operators(x.unsqueeze(-2)).squeeze(-2)

    def _by_kernels(self, x: Any) -> Any:
        if not self._takes(x):
            x = self._check(x)
        if x.ndim == 2:
            return self._by_kernels(x[None])[0]
        if x.ndim != 3 or x.shape[1] != self.in_channels:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected (batch, {self.in_channels}, length)")
        batch, channels, length = x.shape
        if batch == 0:
            return self._by_operators(x)
        y = super()._by_kernels(x.reshape(batch, channels, 1, length))
        return y.reshape(batch, self.out_channels, y.shape[-1])


def _pair(value: int | tuple[int, ...], rows: int = 1) -> Pair:
    """A size for rows and for columns; a window over one axis is of `rows` rows."""
    if isinstance(value, int):
        return value, value
    first, second = value if len(value) == 2 else (rows, *value)
    return first, second
