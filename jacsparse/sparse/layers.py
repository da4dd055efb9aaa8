"""Convolutions and linear layers whose parameters are the weights that are left."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

from ..runtime import a_type, is_exporting, is_traced, is_transformed, uncompiled
from ..tracing import check_initialised, is_recording
from .blocks import Blocks, Form, from_blocks, plain, records_gradients, reshaped, to_blocks
from .convolution import Convolution
from .pooling import Pool, convolve_and_pool
from .processor import lanes_for, tile_positions
from .weights import Structure
from .windows import Pair, Window

#: The most sizes of inputs and batches for which a layer holds index arrays.
_MOST_SIZES = 32


class SparseLayer(nn.Module):
    """What convolutions and linear layers of pruned weights share.

    `values` are the weights that are left, a parameter of one dimension, in the kernels' order: for each output
    channel, tap by tap. `mask` tells where they stand.
    """

    values: nn.Parameter
    bias: nn.Parameter | None
    #: Whether outputs stay in blocks, for the layers that follow in a model of `sparsify`.
    keeps_blocks: bool = False
    weight_shape: tuple[int, ...]

    def _take(self, weight: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Hold the weights that a mask leaves, copied."""
        self._structure = self._structure_of(check_mask(mask, self.weight_shape))
        values = weight.detach().flatten()[self._structure.places]
        if bool(values.isnan().any()):
            raise ValueError(
                f"the weight holds {int(values.isnan().sum())} NaN where the mask leaves it; start from weights that "
                "are numbers"
            )
        _check_dtype("the weight", values)
        self.values = nn.Parameter(values.clone(), requires_grad=weight.requires_grad)
        self.bias = None
        if bias is not None:
            self.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        self._convolutions: dict[Any, Convolution] = {}

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter; those that ``torch.nn.utils.prune`` would put in the weights' place are refused."""
        if name in ("weight_orig", "values_orig"):
            raise TypeError(
                f"torch.nn.utils.prune does not prune a {type(self).__name__}, which has only the weights that are "
                "left: give set_mask a mask with fewer, or prune the dense model of jacsparse.densify"
            )
        super().register_parameter(name, param)

    def _window(self) -> Window:
        raise NotImplementedError

    def out_size(self, in_size: Pair) -> Pair:
        """Rows and columns of the output, for those of an input."""
        raise NotImplementedError

    def _structure_of(self, mask: torch.Tensor) -> Structure:
        raise NotImplementedError

    @property
    def mask(self) -> torch.Tensor:
        """Which weights are left, bool, of the dense weight's shape."""
        mask = torch.zeros(math.prod(self.weight_shape), dtype=torch.bool)
        mask[self._structure.places] = True
        return mask.view(self.weight_shape)

    @property
    def weight(self) -> torch.Tensor:
        """The dense weight, with zeros where it is pruned; gradients go to `values`."""
        dense = self.values.new_zeros(math.prod(self.weight_shape))
        return dense.index_put((self._structure.places.to(dense.device),), self.values).view(self.weight_shape)

    def set_mask(self, mask: torch.Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Prune weights, and let pruned ones grow again, from zero.

        `values` remains the same parameter, with another number of elements, and has no gradient afterwards. Backward
        passes of what the layer has computed before raise an error.

        Parameters
        ----------
        mask : Tensor of bool, or of zeros and ones
            Which weights are left from now on, of the dense weight's shape.
        optimizer : Optimizer, optional
            Its state of `values`, as a momentum, goes along with each weight that stays; that of others is zero.

        Raises
        ------
        TypeError, ValueError
            Where it is no mask of this layer's weight.

        Examples
        --------
        >>> layer = SparseLinear(2, 2, mask=torch.eye(2))
        >>> layer.set_mask(torch.ones(2, 2))
        >>> (layer.weight != 0).tolist()
        [[True, False], [False, True]]
        """
        structure = self._structure_of(check_mask(mask, self.weight_shape))
        before = self._structure.places

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            dense = tensor.new_zeros(math.prod(self.weight_shape))
            dense[before] = tensor
            return dense[structure.places]

        state = {} if optimizer is None else optimizer.state.get(self.values, {})
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == self.values.shape:
                state[name] = moved(value)
        values, self.values.grad = moved(self.values.data), None
        # What adds gradients to a parameter expects its first shape, and lives as long as any graph, unless its dtype
        # changes. Written to in place, the parameter is refused by the backward passes of graphs that were made before.
        self.values.data = values.new_empty(0, dtype=torch.float16)
        self.values.data = torch.empty_like(values)
        with torch.no_grad():
            self.values.copy_(values)
        self._structure = structure
        self._convolutions.clear()

    def _convolution(self, in_size: Pair, lanes: int) -> Convolution:
        key = in_size, lanes, self.values.dtype
        convolution = self._convolutions.get(key)
        if convolution is None:
            if len(self._convolutions) >= _MOST_SIZES:
                self._convolutions.clear()
            out_size = self.out_size(in_size)
            convolution = Convolution(self._structure, self._window(), in_size, out_size, lanes, self.values.dtype)
            self._convolutions[key] = convolution
        return convolution

    def forward(self, x: Any) -> Any:
        """The layer's output.

        Programs that torch.export and torch.jit.trace make get PyTorch's own operators with a dense weight; so do
        transforms of ``torch.func``, and `jacsparse.jacobian` and its like, which see no kernels of ours.
        """
        if is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return self._by_operators(x)
        return self._run(x)

    @uncompiled
    def _run(self, x: Any) -> Any:
        if is_recording() or is_traced() or is_transformed():
            return self._by_operators(x)
        return self._by_kernels(x)

    def _by_operators(self, x: Any) -> Any:
        """The layer's output by PyTorch's operators alone."""
        raise NotImplementedError

    def _by_kernels(self, x: Any) -> Any:
        """The layer's output at the cost of the weights that are left; blocks, where the layer keeps them."""
        raise NotImplementedError

    def _of_blocks(self, x: Blocks) -> Blocks:
        """The layer's output for blocks, computed together with what follows."""
        blocks = x.blocks
        convolution = self._convolution((blocks.shape[2], blocks.shape[3]), blocks.shape[4])
        return Blocks(_Output(convolution, blocks, self.values, self.bias, records_gradients()), x.form)

    def _takes(self, x: Any) -> bool:
        """Whether an input is in blocks of this layer's dtype."""
        return isinstance(x, Blocks) and x.dtype == self.values.dtype

    def _leave(self, y: Blocks) -> Any:
        return y if self.keeps_blocks else y.tensor

    def _check(self, x: object) -> torch.Tensor:
        x = plain(x)
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is {a_type(x)}; expected a tensor")
        for name, tensor in (("x", x), ("the layer", self.values)):
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"{name} is on {tensor.device}; {type(self).__name__} runs on the CPU alone: move it by .cpu(), or "
                    "make a dense layer for the GPU by to_dense()"
                )
        _check_dtype("x", x)
        if x.dtype != self.values.dtype:
            raise TypeError(f"x is {x.dtype} and the layer's values are {self.values.dtype}; convert one of them")
        return x

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + "values"]
        weight, mask = self.weight, self.mask
        destination[prefix + "weight_orig"] = weight if keep_vars else weight.detach()
        destination[prefix + "weight_mask"] = mask.to(weight.dtype)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        dense, mask, weight = (prefix + name for name in ("weight_orig", "weight_mask", "weight"))
        name = dense if dense in state_dict or weight not in state_dict else weight
        if name not in state_dict:
            missing.append(name)
        else:
            try:
                self._load(state_dict[name], state_dict.get(mask))
            except (TypeError, ValueError) as error:
                errors.append(f"{name}: {error}")
        # The weights are taken; what is left for PyTorch is the bias.
        rest = {key: value for key, value in state_dict.items() if key not in (dense, mask, weight)}
        rest[prefix + "values"] = self.values.detach()
        super()._load_from_state_dict(rest, prefix, metadata, strict, missing, unexpected, errors)

    @torch.no_grad()
    def _load(self, weight: torch.Tensor, mask: torch.Tensor | None) -> None:
        if tuple(weight.shape) != self.weight_shape:
            raise ValueError(f"the weight has shape {tuple(weight.shape)}; expected {self.weight_shape}")
        if mask is not None:
            mask = check_mask(mask, self.weight_shape)
            if not torch.equal(mask, self.mask):
                self.set_mask(mask)
        elif bool((weight[~self.mask] != 0).any()):
            raise ValueError(
                "it has weights where this layer's mask has none; make the layer anew by from_dense, or give "
                "weight_orig and weight_mask"
            )
        self.values.copy_(weight.flatten()[self._structure.places])

    def __getstate__(self) -> dict[str, Any]:
        # Index arrays are made anew.
        return {**self.__dict__, "_convolutions": {}}

    def _pruned(self, layer: nn.Module) -> nn.Module:
        """A dense layer with this one's weights, masked by ``torch.nn.utils.prune``."""
        with torch.no_grad():
            layer.weight.copy_(self.weight)  # type: ignore[union-attr, operator]
            if self.bias is not None:
                layer.bias.copy_(self.bias)  # type: ignore[union-attr, operator]
            # Within: a weight that autograd knows could not be copied.
            prune.custom_from_mask(layer, "weight", self.mask)
        layer.weight_orig.requires_grad_(self.values.requires_grad)  # type: ignore[union-attr, operator]
        if self.bias is not None:
            layer.bias.requires_grad_(self.bias.requires_grad)  # type: ignore[union-attr, operator]
        return layer.train(self.training)

    def _left(self) -> str:
        total = math.prod(self.weight_shape)
        return f"{len(self.values)} of {total} weights left"


class _Output(NamedTuple):
    """A layer's output before it is computed."""

    convolution: Convolution
    x: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor | None
    #: Whether gradients were asked for where the layer ran.
    with_gradients: bool
    relu: bool = False
    #: What is added.
    other: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.x.shape[0], *self.convolution.out_shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def compute(self) -> torch.Tensor:
        return self.convolution(self.x, self.values, self.bias, self.relu, self.other)

    def pooled(self, pool: Pool) -> torch.Tensor | None:
        _, rows, columns, _ = self.convolution.out_shape
        # The kernel that pools adds nothing else.
        alone = self.relu and self.other is None
        if not (alone and pool.tiles((rows, columns)) and self.convolution.forward.pools(pool.kernel)):
            return None
        with torch.set_grad_enabled(self.with_gradients):
            return convolve_and_pool(self.x, self.values, self.bias, self.convolution, pool)

    def activated(self) -> _Output:
        return self._replace(relu=True)

    def plus(self, other: Blocks) -> _Output | None:
        return self._replace(other=other.blocks) if self.other is None and not self.relu else None

    def scaled(self, scale: torch.Tensor, shift: torch.Tensor) -> _Output | None:
        if self.relu or self.other is not None:
            return None
        values = self.values * scale.index_select(0, self.convolution.structure.outputs)
        return self._replace(values=values, bias=shift if self.bias is None else torch.addcmul(shift, self.bias, scale))


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
            nn.Conv2d(
                in_channels,
                out_channels,
                kernel_size,
                stride,
                padding,
                dilation,
                groups,
                bias,
                padding_mode,
                dtype=dtype,
            ),
            mask,
        )

    @classmethod
    def from_dense(cls, layer: nn.Conv2d, mask: torch.Tensor | None = None) -> SparseConv2d:
        """The sparse layer of a dense one, whose weights it copies.

        Parameters
        ----------
        layer : Conv2d
            With a mask of ``torch.nn.utils.prune``, or without one.
        mask : Tensor, optional
            Which weights are left. The layer's own mask by default; without one, the weights that are not zero.

        Raises
        ------
        TypeError, ValueError
            Where the layer is another one, or the mask has another shape.
        """
        if type(layer) is not nn.Conv2d:
            raise TypeError(f"layer is {a_type(layer)}; expected a torch.nn.Conv2d")
        sparse = cls.__new__(cls)
        nn.Module.__init__(sparse)
        sparse._like(layer, mask)
        return sparse

    def _like(self, layer: nn.Conv2d, mask: torch.Tensor | None) -> None:
        self.in_channels, self.out_channels, self.groups = layer.in_channels, layer.out_channels, layer.groups
        self.kernel_size, self.stride = _pair(layer.kernel_size), _pair(layer.stride)
        self.padding = layer.padding if isinstance(layer.padding, str) else _pair(layer.padding)
        self.dilation, self.padding_mode = _pair(layer.dilation), layer.padding_mode
        self.weight_shape = (self.out_channels, self.in_channels // self.groups, *self.kernel_size)
        self._take(*_masked(layer, mask), layer.bias)
        self.train(layer.training)

    def to_dense(self) -> nn.Conv2d:
        """A ``torch.nn.Conv2d`` with copies of the weights, masked by ``torch.nn.utils.prune``."""
        dense = nn.Conv2d(
            self.in_channels,
            self.out_channels,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.bias is not None,
            self.padding_mode,
            dtype=self.values.dtype,
        )
        return self._pruned(dense)  # type: ignore[return-value]

    def _structure_of(self, mask: torch.Tensor) -> Structure:
        return Structure.of(mask, self._window(), self.groups)

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

    def _check_channels(self, x: Any) -> None:
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected (batch, {self.in_channels}, rows, columns)")

    def _by_operators(self, x: Any) -> Any:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            x, padding = self._with_border(x), 0
        return functional.conv2d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def _with_border(self, x: torch.Tensor) -> torch.Tensor:
        """The input with a border that is no zeros."""
        (top, bottom), (left, right) = self._padded()
        return functional.pad(x, (left, right, top, bottom), mode=self.padding_mode)

    def _by_kernels(self, x: Any) -> Any:
        if self._takes(x) and x.ndim == 4 and self.padding_mode == "zeros":
            self._check_channels(x)
            return self._of_blocks(x)
        x = self._check(x)
        if x.ndim == 3:
            return self._by_kernels(x[None])[0]
        self._check_channels(x)
        if x.shape[0] == 0:
            return self._by_operators(x)
        if self.padding_mode != "zeros":
            x = self._with_border(x)
        lanes = lanes_for(len(x), x.dtype.itemsize)
        return self._leave(self._of_blocks(Blocks(to_blocks(x, lanes), Form(len(x), 4, lanes))))

    def extra_repr(self) -> str:
        """What the layer's text shows."""
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        if self.padding not in ((0, 0), "valid"):
            text += f", padding={self.padding}"
        if self.dilation != (1, 1):
            text += f", dilation={self.dilation}"
        if self.groups != 1:
            text += f", groups={self.groups}"
        return f"{text}, bias={self.bias is not None}, {self._left()}"


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
        sparse = cls.__new__(cls)
        nn.Module.__init__(sparse)
        sparse._like(layer, mask)
        return sparse

    def _like(self, layer: nn.Linear, mask: torch.Tensor | None) -> None:
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight_shape = (self.out_features, self.in_features)
        self._take(*_masked(layer, mask), layer.bias)
        self.train(layer.training)

    def to_dense(self) -> nn.Linear:
        """A ``torch.nn.Linear`` with copies of the weights, masked by ``torch.nn.utils.prune``."""
        dense = nn.Linear(self.in_features, self.out_features, self.bias is not None, dtype=self.values.dtype)
        return self._pruned(dense)  # type: ignore[return-value]

    def _structure_of(self, mask: torch.Tensor) -> Structure:
        return Structure.of(mask[:, :, None, None], _POINT, 1)

    def _window(self) -> Window:
        return _POINT

    def out_size(self, in_size: Pair) -> Pair:
        """The same rows and columns."""
        return in_size

    def _by_operators(self, x: Any) -> Any:
        return functional.linear(x, self.weight, self.bias)

    def _by_kernels(self, x: Any) -> Any:
        if self._takes(x) and x.shape == (x.form.batch, self.in_features):
            return self._of_blocks(x)
        x = self._check(x)
        if not x.ndim or x.shape[-1] != self.in_features:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected (..., {self.in_features})")
        rows = x.reshape(-1, self.in_features)
        if not len(rows):
            return self._by_operators(x)
        lanes = lanes_for(len(rows), x.dtype.itemsize)
        if self.keeps_blocks and x.ndim == 2:
            return self._of_blocks(Blocks(to_blocks(x[..., None, None], lanes), Form(len(x), 2, lanes)))
        columns = _columns(-(-len(rows) // lanes))
        # Several blocks side by side, as columns: a weight is read once for all of them.
        blocks = to_blocks(rows[..., None, None], lanes * columns)
        form = Form(len(rows), 4, lanes)
        y = self._of_blocks(Blocks(blocks.view(len(blocks), self.in_features, 1, columns, lanes), form)).blocks
        return reshaped(from_blocks(y.flatten(3)[:, :, :, None], len(rows)), (*x.shape[:-1], self.out_features))

    def extra_repr(self) -> str:
        """What the layer's text shows."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self._left()}"


_POINT = Window((1, 1), (1, 1), (0, 0), (1, 1))


def _columns(blocks: int) -> int:
    """How many blocks one broadcast of a weight serves: a power of two, so that there are few kernels."""
    fitting = [2**exponent for exponent in range(5) if 2**exponent <= tile_positions()]
    return min(fitting, key=lambda columns: -(-blocks // columns) * (columns + 1))


def check_mask(mask: object, shape: tuple[int, ...]) -> torch.Tensor:
    """A mask as bool on the CPU.

    Raises
    ------
    TypeError, ValueError
        Where it is no tensor, has another shape, or holds what is neither 0 nor 1.
    """
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"the mask is {a_type(mask)}; expected a tensor of bool, or of zeros and ones")
    if tuple(mask.shape) != shape:
        raise ValueError(f"the mask has shape {tuple(mask.shape)}; expected the weight's, {shape}")
    other = mask[(mask != 0) & (mask != 1)]
    if other.numel():
        raise ValueError(f"the mask holds {other[0].item()}; expected zeros and ones: a weight is left, or it is not")
    return (mask != 0).cpu()


def _masked(layer: nn.Module, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's weight, before the mask of its own is applied, and the mask to take."""
    check_initialised(layer)
    if hasattr(layer, "bias_mask"):
        raise ValueError("the bias is pruned too; make that permanent by torch.nn.utils.prune.remove(layer, 'bias')")
    original, own = getattr(layer, "weight_orig", None), getattr(layer, "weight_mask", None)
    weight = layer.weight if original is None else original
    assert isinstance(weight, torch.Tensor)
    if weight.device.type != "cpu":
        raise ValueError(f"the weight is on {weight.device}; sparse layers run on the CPU alone: move it by .cpu()")
    if mask is None:
        mask = weight != 0 if own is None else own
    return weight, mask


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in (torch.float32, torch.float64):
        remedy = "convert it by .float()"
        if tensor.dtype in (torch.float16, torch.bfloat16):
            remedy += ", and leave sparse layers out of autocast"
        raise TypeError(f"{name} is {tensor.dtype}; expected float32 or float64: {remedy}")


def _pair(value: int | tuple[int, ...]) -> Pair:
    first, second = (value, value) if isinstance(value, int) else value
    return first, second
