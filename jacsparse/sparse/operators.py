"""Operators of PyTorch on activations in blocks, beside the sparse layers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from .activations import GradientOfSums
from .blocks import FUNCTIONS, RULES, BlockTensor, planes, rule, to_blocks
from .deferred import Deferred
from .kernel_runs import empty
from .layouts import enter, in_blocks, records_gradients
from .normalisation import Normalised, Statistics
from .pooling import MOST_POSITIONS, Pool, max_pool

aten = torch.ops.aten
Tensor = torch.Tensor


def elementwise(function: Any, *args: Any, **kwargs: Any) -> Any:
    """An elementwise operator of ATen, in place too, for blocks and what is broadcast to them."""
    is_written = function._schema.is_mutable
    if "out" in kwargs or (is_written and type(args[0]) is not BlockTensor):
        return NotImplemented
    x = next((each for each in (*args, *kwargs.values()) if type(each) is BlockTensor), None)
    if x is None or torch.Tag.nondeterministic_seeded in function.tags:
        return NotImplemented
    operands = [_operand(each, x) for each in args]
    named = {name: _operand(each, x) for name, each in kwargs.items()}
    if any(each is NotImplemented for each in (*operands, *named.values())):
        return NotImplemented
    if is_written:
        operands[0] = operands[0].clone()
        return x.replace(function(*operands, **named))
    result = function(*operands, **named)
    return x.like(result) if isinstance(result, torch.Tensor) else NotImplemented


def _operand(value: Any, x: BlockTensor) -> Any:
    """What stands for an operand beside the blocks of `x`; NotImplemented where that takes tensors."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    batch, rank = x.memory.batch, len(x.sizes)
    if type(value) is BlockTensor:
        memory = value.memory
        is_alike = memory.content is not None and (memory.batch, memory.lanes) == (batch, x.memory.lanes)
        return value.blocks if is_alike and len(value.sizes) == rank else NotImplemented
    if value.shape == x.sizes:
        # Its gradient would be in blocks too.
        return NotImplemented
    if value.ndim == rank and value.shape[0] == batch:
        return to_blocks(planes(value), x.memory.lanes)
    if value.ndim == rank and value.shape[0] == 1:
        value = value[0]
    if value.ndim >= rank:
        return NotImplemented
    return value.reshape(*(1,) * (rank - 1 - value.ndim), *value.shape, *(1,) * (5 - rank))


RULES[torch.Tag.pointwise] = elementwise
#: Elementwise operators without the tag.
for _function in (
    *(aten.hardswish.default, aten.hardswish_.default, aten.leaky_relu.default, aten.leaky_relu_.default),
    *(aten.hardswish_backward.default, aten.leaky_relu_backward.default, aten.elu_backward.default),
    *(aten.hardtanh_backward.default, aten.softplus_backward.default, aten.mish_backward.default),
    aten.hardsigmoid_backward.default,
):
    RULES[_function] = functools.partial(elementwise, _function)


@rule(functional.relu, torch.relu, Tensor.relu, of=FUNCTIONS)
def _relu(x: Any, inplace: bool = False) -> Any:
    if type(x) is not BlockTensor or x.memory.content is None:
        return NotImplemented
    if records_gradients():
        return _Relu.apply(x, inplace)
    y = _activated(x)
    if not inplace:
        return x.like(y)
    if not torch.is_inference_mode_enabled():
        torch.autograd.graph.increment_version(x)
    return x.replace(y)


@rule(functional.relu_, torch.relu_, Tensor.relu_, of=FUNCTIONS)
def _relu_in_place(x: Any) -> Any:
    return _relu(x, inplace=True)


@rule(aten.relu.default)
def _relu_below_autograd(x: BlockTensor) -> BlockTensor:
    return x.like(_activated(x))


def _activated(x: BlockTensor) -> Tensor | Deferred:
    pending = x.pending
    activated = None if pending is None else pending.activated()
    return torch.relu(x.blocks) if activated is None else activated


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: BlockTensor, inplace: bool) -> BlockTensor:
        y = _activated(x)
        ctx.lanes, ctx.has_two_summands = y.shape[-1], isinstance(y, Deferred) and y.other is not None
        # Not the output itself, whose blocks a later write may replace.
        ctx.save_for_backward(x.like(y))
        if not inplace:
            return x.like(y)
        ctx.mark_dirty(x)
        return x.replace(y)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        y = enter(ctx.saved_tensors[0], ctx.lanes)
        if torch.is_grad_enabled():
            return aten.threshold_backward(gradient, y, 0), None
        gradient = enter(gradient, ctx.lanes)
        pending = gradient.pending
        if isinstance(pending, GradientOfSums) and pending.source is not None and pending.source is y.pending:
            # Pooling within the convolution has left out what ReLU makes zero.
            return gradient, None
        return gradient.like(GradientOfSums(gradient.padded, y.blocks, has_two_summands=ctx.has_two_summands)), None


@rule(aten.add.Tensor)
def _add(x: Any, y: Any, **kwargs: Any) -> Any:
    if kwargs or not type(x) is type(y) is BlockTensor or _form(x) != _form(y):
        return elementwise(aten.add.Tensor, x, y, **kwargs)
    for first, second in ((x, y), (y, x)):
        added = None if first.pending is None else first.pending.plus(second.blocks)
        if added is not None:
            return x.like(added)
    # Where a gradient is added to another one, the allocation would take longer than the sum.
    blocks = x.blocks
    return x.like(torch.add(blocks, y.blocks, out=empty(blocks.shape, blocks.dtype)))


def _form(x: BlockTensor) -> tuple[Any, ...]:
    return x.sizes, x.memory.lanes, x.memory.dtype


def _in_place(function: Any, compute: Callable[..., Any]) -> None:
    """What computes an operator in place where another one has the same values."""

    @rule(function)
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        y = compute(x, *args, **kwargs) if type(x) is BlockTensor else NotImplemented
        if y is NotImplemented or (y.sizes, y.memory.dtype) != (x.sizes, x.memory.dtype):
            return NotImplemented
        return x.replace(y.memory.content)


_in_place(aten.relu_.default, _relu_below_autograd)
_in_place(aten.add_.Tensor, _add)


@rule(aten.detach.default, aten.alias.default)
def _alias(x: BlockTensor) -> BlockTensor:
    y = BlockTensor(x.memory, x.sizes)
    y.is_view = x.is_view
    return y


@rule(aten.clone.default)
def _clone(x: BlockTensor, memory_format: Any = None) -> Any:
    return NotImplemented if memory_format is torch.channels_last else x.like(x.blocks)


@rule(aten.view.default)
def _view(x: BlockTensor, shape: Any) -> Any:
    count, known = math.prod(x.sizes), -math.prod(shape)
    sizes = tuple(count // known if size == -1 else size for size in shape)
    if not 2 <= len(sizes) <= 4 or sizes[0] != x.memory.batch or math.prod(sizes) != count:
        return NotImplemented
    y = BlockTensor(x.memory, sizes)
    y.is_view = True
    return y


@rule(aten.empty_like.default)
def _empty_like(x: BlockTensor, **kwargs: Any) -> Any:
    return NotImplemented if any(kwargs.values()) else x.like(torch.empty_like(x.blocks))


@rule(aten.bernoulli_.float)
def _bernoulli(x: BlockTensor, p: float = 0.5, **kwargs: Any) -> BlockTensor:
    # The numbers that a tensor would get, as of dropout.
    drawn = torch.empty(x.sizes, dtype=x.memory.dtype).bernoulli_(p, **kwargs)
    return x.replace(in_blocks(drawn, x.memory.lanes).blocks)


@rule(torch.cat, torch.concat, torch.concatenate, of=FUNCTIONS)
def _cat(tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    if kwargs or dim not in (1, 1 - tensors[0].ndim) or not all(type(each) is BlockTensor for each in tensors):
        return NotImplemented
    forms = {(each.memory.dtype, each.memory.lanes, each.sizes[:1] + each.sizes[2:]) for each in tensors}
    return _Cat.apply(*tensors) if len(forms) == 1 else NotImplemented


class _Cat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: BlockTensor) -> BlockTensor:
        ctx.channels = [each.sizes[1] for each in tensors]
        return tensors[0].like(torch.cat([each.blocks for each in tensors], dim=1))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled() or type(gradient) is not BlockTensor:
            return gradient.split(ctx.channels, dim=1)
        return tuple([gradient.like(each.contiguous()) for each in gradient.blocks.split(ctx.channels, dim=1)])


@rule(functional.batch_norm, of=FUNCTIONS)
def _evaluated_batch_norm(
    x: Any,
    mean: Any,
    variance: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if training or type(x) is not BlockTensor:
        return NotImplemented
    scale = torch.rsqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    scaled = None if x.pending is None or records_gradients() else x.pending.scaled(scale, shift)
    if scaled is not None:
        return x.like(scaled)
    shape = (-1, *(1,) * (len(x.sizes) - 2))
    return torch.addcmul(shift.view(shape), x, scale.view(shape))


@rule(aten.native_batch_norm.default)
def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> Any:
    parameters = [each for each in (weight, bias, mean, variance) if each is not None]
    if not training or type(x) is not BlockTensor or any(each.dtype != x.memory.dtype for each in parameters):
        return NotImplemented
    memory = x.memory
    weight = torch.ones(x.sizes[1], dtype=memory.dtype) if weight is None else weight.detach()
    bias = torch.zeros(x.sizes[1], dtype=memory.dtype) if bias is None else bias.detach()
    blocks = x.blocks
    statistics = memory.statistics = Statistics.of(blocks, memory.batch)
    if mean is not None:
        statistics.update(mean, variance, momentum)
    deviations = torch.rsqrt(statistics.moments[:, 1] + eps).to(memory.dtype)
    normalised = Normalised(blocks, weight, bias, eps, statistics).reading(weight, bias)
    return x.like(normalised), statistics.centres, deviations


@rule(aten.native_batch_norm_backward.default)
def _batch_norm_backward(gradient: Tensor, x: Any, weight: Any, *others: Any) -> Any:
    *_, training, eps, mask = others
    if not training or type(x) is not BlockTensor or x.memory.statistics is None:
        return NotImplemented
    gradient = in_blocks(gradient, x.memory.lanes)
    weight = torch.ones(x.sizes[1], dtype=x.memory.dtype) if weight is None else weight.detach()
    normalised = Normalised(x.blocks, weight, weight, eps, x.memory.statistics)
    pending = gradient.pending
    if isinstance(pending, GradientOfSums) and pending.window == (1, 1):
        of_x, *of_parameters, masked = normalised.gradients(pending.y, pending.marks, (*mask, pending.has_two_summands))
        if masked is not None:
            gradient.memory.content = masked
    else:
        of_x, *of_parameters, _ = normalised.gradients(gradient.blocks, None, (*mask, False))
    return None if of_x is None else x.like(of_x), *of_parameters


@rule(functional.max_pool2d, torch.max_pool2d, of=FUNCTIONS)
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
    if (
        type(x) is not BlockTensor
        or ceil_mode
        or return_indices
        or len(x.sizes) != 4
        or math.prod(kernel) > MOST_POSITIONS
    ):
        return NotImplemented
    pool = Pool(kernel, _pair(stride) if stride else kernel, _pair(padding), _pair(dilation))
    if min(pool.out_size(x.sizes[2:])) < 1 or any(2 * pool.padding[axis] > kernel[axis] for axis in (0, 1)):
        return NotImplemented
    return max_pool(x, pool)


@rule(functional.avg_pool2d, of=FUNCTIONS)
def _avg_pool2d(
    x: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    kernel = _pair(kernel_size)
    if divisor_override is not None or _pair(padding) != (0, 0) or (stride and _pair(stride) != kernel):
        return NotImplemented
    return _means(x, kernel)


@rule(functional.adaptive_avg_pool2d, of=FUNCTIONS)
def _adaptive_avg_pool2d(x: Any, output_size: Any) -> Any:
    sizes = zip(_pair(output_size), x.shape[-2:], strict=True)
    windows = [1 if new is None else old // new if old % new == 0 else 0 for new, old in sizes]
    return _means(x, windows) if all(windows) else NotImplemented


def _means(x: Any, windows: Any) -> Any:
    if type(x) is not BlockTensor or len(x.sizes) != 4 or x.sizes[2] % windows[0] or x.sizes[3] % windows[1]:
        return NotImplemented
    return _Means.apply(x, *windows)


class _Means(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: BlockTensor, rows: int, columns: int) -> BlockTensor:
        ctx.windows, ctx.lanes = (rows, columns), x.memory.lanes
        return x.like(x.blocks.unflatten(3, (-1, columns)).unflatten(2, (-1, rows)).mean((3, 5)))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        rows, columns = ctx.windows

        def spread(y: Tensor) -> Tensor:
            return (y / (rows * columns)).repeat_interleave(rows, 2).repeat_interleave(columns, 3)

        if torch.is_grad_enabled():
            return spread(gradient), None, None
        gradient = enter(gradient, ctx.lanes)
        return gradient.like(spread(gradient.blocks)), None, None


def _pair(value: Any) -> tuple[int, int]:
    first, second = (value, value) if isinstance(value, int) else (value[0], value[-1])
    return first, second


def _join(function: Any, in_place: bool) -> None:
    """Let an operator take a tensor beside blocks, whose gradient is a tensor too."""

    @rule(function, of=FUNCTIONS)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and type(args[0]) is not type(args[1]):
            args = args[0] if in_place else _joined(*args), _joined(args[1], args[0])
        return function(*args, **kwargs)


def _joined(x: Any, y: Any) -> Any:
    """An operand, in blocks if the other one is."""
    is_alike = type(y) is BlockTensor and type(x) is Tensor and (x.shape, x.dtype) == (y.sizes, y.memory.dtype)
    return enter(x, y.memory.lanes) if is_alike else x


for _names, _is_in_place in (
    (("add", "sub", "mul", "div", "__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__"), False),
    (("add_", "sub_", "mul_", "div_", "__iadd__", "__isub__", "__imul__", "__itruediv__"), True),
):
    for _name in _names:
        _join(getattr(Tensor, _name), _is_in_place)
        if hasattr(torch, _name):
            _join(getattr(torch, _name), _is_in_place)


def _read_memory(function: Any) -> None:
    """Let a function read an activation's memory, which is a tensor's from then on."""

    @rule(function, of=FUNCTIONS)
    def call(*args: Any, **kwargs: Any) -> Any:
        # A slice is a view, and so no blocks.
        return function(*tree_map_only(BlockTensor, lambda x: aten.slice(x, 0), args), **kwargs)


for _name in (
    *("numpy", "tolist", "data_ptr", "storage", "untyped_storage", "share_memory_", "__array__", "__dlpack__"),
    *("__reduce_ex__", "__deepcopy__", "__repr__", "__format__"),
):
    _read_memory(getattr(Tensor, _name))


@rule(Tensor.data.__set__, of=FUNCTIONS)  # type: ignore[attr-defined]
def _set_data(x: Tensor, value: Tensor) -> None:
    raise TypeError("an activation of a sparse model cannot be given other data; write to it by copy_()")
