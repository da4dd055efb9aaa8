"""Functions of PyTorch for activations in blocks, beside the sparse layers."""

from __future__ import annotations

import inspect
import math
import sys
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from .blocks import Blocks, Sum, TensorsNeededError, alike, operator, records_gradients
from .normalisation import Normalised, Statistics
from .pooling import MOST_POSITIONS, Pool, max_pool

_ELEMENTWISE = (
    "leaky_relu", "relu6", "elu", "selu", "celu", "gelu", "silu", "hardswish", "hardsigmoid", "hardtanh", "softplus",
    "mish", "sigmoid", "tanh", "logsigmoid", "softsign",
)  # fmt: skip
_ELEMENTWISE_METHODS = ("sigmoid", "tanh", "abs", "exp", "square", "neg", "__neg__", "clamp")
#: In place, and of more than values.
_OTHER_FORMS = (
    "detach_", "set_", "resize_", "resize_as_", "squeeze_", "unsqueeze_", "transpose_", "swapaxes_", "swapdims_", "t_",
    "as_strided_",
)  # fmt: skip
#: By a function of two operands, its operators in Python, those in place last.
_BINARY = {
    "add": ("__add__", "__radd__", "__iadd__"),
    "sub": ("__sub__", "__isub__"),
    "mul": ("__mul__", "__rmul__", "__imul__"),
    "div": ("__truediv__", "__itruediv__"),
}


@operator(functional.relu, torch.relu, torch.Tensor.relu)
def _relu(x: Blocks, inplace: bool = False) -> Any:
    if inplace and not x.is_alone:
        return NotImplemented
    y = x.like(torch.relu(x.blocks) if x.pending is None else x.pending.activated())
    return x.replace(y) if inplace else y


@operator(functional.relu_, torch.relu_, torch.Tensor.relu_)
def _relu_in_place(x: Blocks) -> Any:
    return _relu(x, inplace=True)


@operator(torch.Tensor.register_hook, torch.Tensor.retain_grad)
def _take_gradient(x: Blocks, *hook: Any) -> Any:
    _check_gradients(x)
    return NotImplemented


@operator(torch.autograd.grad)
def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    for each in tree_leaves(inputs):
        if isinstance(each, Blocks):
            _check_gradients(each)
    return NotImplemented


def _check_gradients(x: Blocks) -> None:
    if x.was_read:
        raise TensorsNeededError("what was computed from an activation in blocks adds to no gradient of its tensor")


@operator(*(getattr(torch.Tensor, name) for name in _OTHER_FORMS))
def _change_form(x: Blocks, *args: Any, **kwargs: Any) -> Any:
    raise TensorsNeededError("an activation in blocks keeps its shape and its graph")


def _elementwise(function: Any) -> None:
    place = _place_of_inplace(function)

    @operator(function)
    def compute(x: Any, *args: Any, inplace: bool = False, **kwargs: Any) -> Any:
        if not isinstance(x, Blocks) or any(isinstance(each, torch.Tensor) for each in (*args, *kwargs.values())):
            return NotImplemented
        inplace = inplace or any(args[place:])
        if inplace and not x.is_alone:
            return NotImplemented
        # Never in place: layers that are not computed yet may read these blocks.
        y = x.like(function(x.blocks, *args[:place], **kwargs))
        return x.replace(y) if inplace else y


def _place_of_inplace(function: Any) -> int:
    """Where, after a function's first argument, the last one tells to write to it; beyond all, where none does."""
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:  # A function in C++, of which none has that argument.
        names = []
    return names.index("inplace") - 1 if "inplace" in names else sys.maxsize


for _function in {
    *(getattr(functional, name) for name in _ELEMENTWISE),
    *(getattr(torch.Tensor, name) for name in _ELEMENTWISE_METHODS),
    *(getattr(torch, name) for name in _ELEMENTWISE_METHODS if not name.startswith("_")),
}:
    _elementwise(_function)


@operator(functional.dropout)
def _dropout(x: Blocks, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or not p:
        return x
    if inplace and not x.is_alone:
        return NotImplemented
    y = x.like(functional.dropout(x.blocks, p))
    return x.replace(y) if inplace else y


def _binary(name: str, *others: str) -> None:
    function, tensor = getattr(torch, name), torch.Tensor

    @operator(function, *(getattr(tensor, each) for each in (name, *others[:-1])))
    def compute(x: Any, y: Any, **kwargs: Any) -> Any:
        form = alike((x, y))
        if form is None or "out" in kwargs:
            return NotImplemented
        if name == "div" and form.batch % form.lanes and isinstance(y, torch.Tensor) and y.ndim:
            # Zeros of lanes without a sample would be divided by zero, and their gradients are added to all others.
            return NotImplemented
        if name == "add" and not kwargs and (content := _sum(x, y)) is not None:
            return Blocks(content, form)
        first, second = (_data(each, x if isinstance(x, Blocks) else y) for each in (x, y))
        if first is NotImplemented or second is NotImplemented:
            return NotImplemented
        return Blocks(function(first, second, **kwargs), form)

    @operator(getattr(tensor, f"{name}_"), getattr(tensor, others[-1]))
    def compute_in_place(x: Any, y: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Blocks) or not x.is_alone:
            return NotImplemented
        result = compute(x, y, **kwargs)
        if not isinstance(result, Blocks) or (result.shape, result.dtype) != (x.shape, x.dtype):
            return NotImplemented
        return x.replace(result)


def _sum(x: Any, y: Any) -> Sum | None:
    """The sum of two activations, where that can become part of what computes one of them."""
    if isinstance(x, Blocks) and isinstance(y, Blocks) and x.shape == y.shape and x.dtype == y.dtype:
        for first, second in ((x, y), (y, x)):
            if first.pending is not None and (content := first.pending.plus(second)) is not None:
                return content
    return None


def _data(value: Any, other: Blocks) -> Any:
    """What stands for an operand beside an activation in blocks: a number, or blocks."""
    if isinstance(value, Blocks):
        return value.blocks
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim == 0:
        return value
    return other.blocks_of(value) if value.shape == other.shape else NotImplemented


for _name, _others in _BINARY.items():
    _binary(_name, *_others)


@operator(torch.flatten, torch.Tensor.flatten)
def _flatten(x: Blocks, start_dim: int = 0, end_dim: int = -1) -> Any:
    if start_dim % x.ndim != 1 or end_dim % x.ndim != x.ndim - 1:
        return NotImplemented
    return _as_features(x)


@operator(torch.reshape, torch.Tensor.reshape, torch.Tensor.view)
def _reshape(x: Blocks, *shape: Any, **named: Any) -> Any:
    if named or not shape or isinstance(shape[0], torch.dtype):
        return NotImplemented
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    features = x.shape[1:].numel()
    if len(sizes) != 2 or sizes[0] not in (x.form.batch, -1) or sizes[1] not in (features, -1) or sizes == (-1, -1):
        return NotImplemented
    return _as_features(x)


def _as_features(x: Blocks) -> Blocks:
    blocks, channels, rows, columns, lanes = x.blocks.shape
    return x.view_of(x.blocks.view(blocks, channels * rows * columns, 1, 1, lanes), rank=2)


@operator(torch.cat, torch.concat, torch.concatenate)
def _cat(tensors: Any, dim: int = 0, **named: Any) -> Any:
    form = alike(tensors)
    if named or form is None or form.rank != 4 or dim % 4 != 1 or not all(isinstance(each, Blocks) for each in tensors):
        return NotImplemented
    return Blocks(torch.cat([each.blocks for each in tensors], dim=1), form)


@operator(functional.batch_norm)
def _batch_norm(
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if not isinstance(x, Blocks):
        return NotImplemented
    if not training:
        scale = torch.rsqrt(running_var + eps)
        scale = scale if weight is None else scale * weight
        shift = -running_mean * scale if bias is None else bias - running_mean * scale
        if x.pending is not None and (scaled := x.pending.scaled(scale, shift)) is not None:
            return x.like(scaled)
        view = (-1, 1, 1, 1)
        return x.like(torch.addcmul(shift.view(view), x.blocks, scale.view(view)))
    parameters = [each for each in (running_mean, running_var, weight, bias) if each is not None]
    if len(x) * x.shape[2:].numel() < 2 or any(each.dtype != x.dtype for each in parameters):
        return NotImplemented
    channels, batch, data = x.shape[1], x.form.batch, x.blocks.contiguous()
    weight = torch.ones(channels, dtype=x.dtype) if weight is None else weight
    bias = torch.zeros(channels, dtype=x.dtype) if bias is None else bias
    statistics = Statistics.of(data, batch)
    if running_mean is not None:
        statistics.update(running_mean, running_var, momentum)
    return x.like(Normalised(data, weight, bias, None, eps, batch, statistics, records_gradients()))


@operator(functional.max_pool2d, torch.max_pool2d)
def _max_pool2d(
    x: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    kernel = _pair(kernel_size)
    if ceil_mode or return_indices or x.form.rank != 4 or math.prod(kernel) > MOST_POSITIONS:
        return NotImplemented
    pool = Pool(kernel, _pair(stride) if stride else kernel, _pair(padding), _pair(dilation))
    if min(pool.out_size(x.shape[2:])) < 1 or any(2 * pool.padding[axis] > kernel[axis] for axis in (0, 1)):
        return NotImplemented
    if x.pending is not None and (pooled := x.pending.pooled(pool)) is not None:
        return x.like(pooled)
    return x.like(max_pool(x.blocks, pool))


@operator(functional.avg_pool2d)
def _avg_pool2d(
    x: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    kernel, (_, _, rows, columns) = _pair(kernel_size), x.shape
    divides = rows % kernel[0] == 0 and columns % kernel[1] == 0
    if divisor_override is not None or _pair(padding) != (0, 0) or not divides:
        return NotImplemented
    if stride and _pair(stride) != kernel:
        return NotImplemented
    return x.like(_means(x.blocks, (rows // kernel[0], columns // kernel[1])))


@operator(functional.adaptive_avg_pool2d)
def _adaptive_avg_pool2d(x: Any, output_size: Any) -> Any:
    sizes = tuple(old if new is None else new for new, old in zip(_pair(output_size), x.shape[2:], strict=True))
    if any(old % new for old, new in zip(x.shape[2:], sizes, strict=True)):
        return NotImplemented
    return x.like(_means(x.blocks, sizes))


def _means(data: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    rows, columns = sizes
    return data.unflatten(3, (columns, -1)).unflatten(2, (rows, -1)).mean((3, 5))


def _pair(value: Any) -> tuple[int, int]:
    first, second = (value, value) if isinstance(value, int) else (value[0], value[-1])
    return first, second
