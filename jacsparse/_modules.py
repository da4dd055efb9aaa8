"""Single modules as calls of ATen operators, without tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod

from .patterns import Call, UnsupportedOperatorError

__all__ = ["call_of", "is_known", "refresh_weights"]

Arguments = dict[str, Any]
#: For each module type the ATen operator it calls, and that operator's arguments.
_LOWERINGS: dict[type[nn.Module], tuple[str, Callable[[Any], Arguments]]] = {}


def _conv2d(module: nn.Conv2d) -> Arguments:
    return {name: getattr(module, name) for name in ("weight", "bias", "stride", "padding", "dilation", "groups")}


def _linear(module: nn.Linear) -> Arguments:
    return {"weight": module.weight, "bias": module.bias}


def _max_pool2d(module: nn.MaxPool2d) -> Arguments:
    return {name: getattr(module, name) for name in ("kernel_size", "stride", "padding", "dilation", "ceil_mode")}


def _avg_pool2d(module: nn.AvgPool2d) -> Arguments:
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    return {name: getattr(module, name) for name in names}


def _batch_norm(module: nn.BatchNorm2d) -> Arguments:
    return {
        "weight": module.weight,
        "bias": module.bias,
        "running_mean": module.running_mean,
        "running_var": module.running_var,
        "training": module.training or module.running_var is None,
        "eps": module.eps,
    }


def _nothing(module: nn.Module) -> Arguments:
    return {}


_LOWERINGS.update(
    {
        nn.Conv2d: ("aten.conv2d", _conv2d),
        nn.Linear: ("aten.linear", _linear),
        nn.MaxPool2d: ("aten.max_pool2d", _max_pool2d),
        nn.AvgPool2d: ("aten.avg_pool2d", _avg_pool2d),
        nn.AdaptiveAvgPool2d: ("aten.adaptive_avg_pool2d", _nothing),
        nn.BatchNorm2d: ("aten.batch_norm", _batch_norm),
        nn.ReLU: ("aten.relu", _nothing),
        nn.Dropout: ("aten.dropout", _nothing),
        nn.Flatten: ("aten.flatten", _nothing),
        nn.Identity: ("aten.identity", _nothing),
    }
)


def _known_type(module: nn.Module) -> type[nn.Module] | None:
    """The type in the table whose forward the module runs."""
    for kind in type(module).__mro__:
        if kind in _LOWERINGS:
            # A subclass with a forward of its own is another operator.
            return kind if type(module).forward is kind.forward else None
    return None


def is_known(module: nn.Module) -> bool:
    """Whether `call_of` takes this module."""
    return _known_type(module) is not None


def is_inactive(module: nn.Module) -> bool:
    """Whether the module only passes its input on, in another shape perhaps: it is no stage."""
    return isinstance(module, (nn.Flatten, nn.Identity)) or (
        isinstance(module, nn.Dropout) and not (module.training and module.p > 0)
    )


def refresh_weights(module: nn.Module) -> None:
    """Let the pruning hooks set the module's weights, as they do before each forward."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, BasePruningMethod):
            hook(module, None)


def call_of(
    module: nn.Module, in_shape: tuple[int, ...], out_shape: tuple[int, ...], *, path: str = "", pruned: bool = True
) -> Call:
    """The module's call, with its weights as they are now.

    Raises
    ------
    UnsupportedOperatorError
        Where the module is not in the table, or asks for what has no pattern; the message begins with `path`.
    """
    kind = _known_type(module)
    if kind is None:
        raise UnsupportedOperatorError(
            f"{path or 'module'}: {type(module).__name__} has no pattern; supported are "
            f"{', '.join(sorted(known.__name__ for known in _LOWERINGS))} and nn.Sequential of them, "
            "others through jacsparse.register_rule"
        )
    operator, arguments = _LOWERINGS[kind]
    masks = {
        name.removesuffix("_mask"): buffer for name, buffer in module.named_buffers(recurse=False) if name.endswith("_mask")
    }
    call = Call(operator, arguments(module), in_shape, out_shape, path or type(module).__name__, masks, pruned)
    if isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
        raise call.unsupported(f"padding_mode={module.padding_mode!r}", "use padding_mode='zeros', or pad with a module of its own")
    if isinstance(module, nn.MaxPool2d) and module.return_indices:
        raise call.unsupported("return_indices=True gives two outputs", "set it to False")
    return call
