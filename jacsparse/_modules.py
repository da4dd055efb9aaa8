"""Single modules as calls of ATen operators, without tracing."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from .patterns import Call

__all__ = [
    "Kept",
    "arguments_of",
    "call_of",
    "check_module",
    "fingerprint",
    "has_own_hooks",
    "is_inactive",
    "is_known",
    "origins",
    "parts_of",
    "refresh_weights",
    "remake_weights",
    "runs_as",
    "tensors_of",
    "trains",
    "twin",
    "undrawn",
    "weight_names",
]

Arguments = dict[str, Any]


class _Lowering:
    """How a module type calls an ATen operator.

    Attributes
    ----------
    operator : str
        The ATen operator.
    names : tuple of str
        The operator's arguments that are the module's attributes of the same name.
    forward : callable
        ``forward(module, x)`` on the meta device, for shapes; the module's own where it has no parameters.
    """

    def __init__(
        self, operator: str, *names: str, forward: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        self.operator, self.names, self.forward = operator, names, forward

    def arguments(self, module: nn.Module) -> Arguments:
        return {name: getattr(module, name) for name in self.names}


def _measures(module: Any) -> bool:
    """Whether a normalisation goes by the statistics of its input, not by running ones."""
    return module.training or module.running_var is None


class _BatchNorm(_Lowering):
    def arguments(self, module: Any) -> Arguments:
        return {**super().arguments(module), "training": _measures(module)}


class _InstanceNorm(_Lowering):
    def arguments(self, module: Any) -> Arguments:
        return {**super().arguments(module), "use_input_stats": _measures(module)}


def _meta_convolution(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module._conv_forward(x, module.weight.detach().to("meta"), None)  # type: ignore[no-any-return]


def _meta_transposed(module: Any, x: torch.Tensor) -> torch.Tensor:
    convolve = getattr(functional, f"conv_transpose{len(module.kernel_size)}d")
    weight = module.weight.detach().to("meta")
    sizes = (module.stride, module.padding, module.output_padding, module.groups, module.dilation)
    return convolve(x, weight, None, *sizes)  # type: ignore[no-any-return]


def _meta_linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, module.weight.detach().to("meta"))


def _meta_batch_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    module._check_input_dim(x)
    if x.shape[1] != module.num_features:
        raise RuntimeError(f"expected {module.num_features} channels")
    return x


def _meta_instance_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    if x.ndim == module._get_no_batch_dim():
        raise RuntimeError("it takes the samples for the channels of one image; give them an axis of channels")
    module._check_input_dim(x)
    if x.shape[1] != module.num_features and (module.affine or module.track_running_stats):
        raise RuntimeError(f"expected {module.num_features} channels")
    return functional.instance_norm(x) if _measures(module) else x


def _meta_group_norm(module: nn.GroupNorm, x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] != module.num_channels:
        raise RuntimeError(f"expected {module.num_channels} channels")
    return functional.group_norm(x, module.num_groups)


def _meta_line_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, module.normalized_shape)


def _meta_prelu(module: nn.PReLU, x: torch.Tensor) -> torch.Tensor:
    return functional.prelu(x, module.weight.detach().to("meta", x.dtype))


_STATISTICS = ("weight", "bias", "running_mean", "running_var", "eps")
_BATCH_NORM = _BatchNorm("aten.batch_norm", *_STATISTICS, forward=_meta_batch_norm)
_INSTANCE_NORM = _InstanceNorm("aten.instance_norm", *_STATISTICS, forward=_meta_instance_norm)

#: Each passes on its input where it is inactive.
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

_LOWERINGS: dict[type[nn.Module], _Lowering] = {
    nn.Linear: _Lowering("aten.linear", "weight", "bias", forward=_meta_linear),
    nn.GroupNorm: _Lowering("aten.group_norm", "num_groups", "weight", "bias", "eps", forward=_meta_group_norm),
    nn.LayerNorm: _Lowering("aten.layer_norm", "normalized_shape", "weight", "bias", "eps", forward=_meta_line_norm),
    nn.RMSNorm: _Lowering("aten.rms_norm", "normalized_shape", "weight", "eps", forward=_meta_line_norm),
    nn.Softmax: _Lowering("aten.softmax", "dim"),
    nn.LogSoftmax: _Lowering("aten.log_softmax", "dim"),
    nn.BatchNorm1d: _BATCH_NORM,
    nn.BatchNorm2d: _BATCH_NORM,
    nn.BatchNorm3d: _BATCH_NORM,
    nn.InstanceNorm1d: _INSTANCE_NORM,
    nn.InstanceNorm2d: _INSTANCE_NORM,
    nn.InstanceNorm3d: _INSTANCE_NORM,
    nn.CELU: _Lowering("aten.celu", "alpha"),
    nn.ELU: _Lowering("aten.elu", "alpha"),
    nn.GELU: _Lowering("aten.gelu", "approximate"),
    nn.Hardshrink: _Lowering("aten.hardshrink", "lambd"),
    nn.Hardsigmoid: _Lowering("aten.hardsigmoid"),
    nn.Hardswish: _Lowering("aten.hardswish"),
    nn.Hardtanh: _Lowering("aten.hardtanh", "min_val", "max_val"),
    nn.LeakyReLU: _Lowering("aten.leaky_relu", "negative_slope"),
    nn.LogSigmoid: _Lowering("aten.log_sigmoid"),
    nn.Mish: _Lowering("aten.mish"),
    nn.PReLU: _Lowering("aten.prelu", "weight", forward=_meta_prelu),
    nn.ReLU: _Lowering("aten.relu"),
    nn.ReLU6: _Lowering("aten.relu6"),
    nn.RReLU: _Lowering("aten.rrelu", "lower", "upper", "training"),
    nn.SELU: _Lowering("aten.selu"),
    nn.Sigmoid: _Lowering("aten.sigmoid"),
    nn.SiLU: _Lowering("aten.silu"),
    nn.Softplus: _Lowering("aten.softplus", "beta", "threshold"),
    nn.Softshrink: _Lowering("aten.softshrink", "lambd"),
    nn.Softsign: _Lowering("aten.softsign"),
    nn.Tanh: _Lowering("aten.tanh"),
    nn.Tanhshrink: _Lowering("aten.tanhshrink"),
    nn.Threshold: _Lowering("aten.threshold", "threshold", "value"),
    nn.Dropout: _Lowering("aten.dropout"),
    nn.Dropout1d: _Lowering("aten.feature_dropout"),
    nn.Dropout2d: _Lowering("aten.feature_dropout"),
    nn.Dropout3d: _Lowering("aten.feature_dropout"),
    nn.AlphaDropout: _Lowering("aten.alpha_dropout"),
    nn.FeatureAlphaDropout: _Lowering("aten.feature_alpha_dropout"),
    nn.Flatten: _Lowering("aten.flatten"),
    nn.Unflatten: _Lowering("aten.unflatten", "dim", "unflattened_size"),
    nn.Identity: _Lowering("aten.identity"),
}

_CONVOLUTION = ("weight", "bias", "stride", "padding", "dilation", "groups")
_WINDOW = ("kernel_size", "stride", "padding")
for _axes in (1, 2, 3):
    for _name, _lowering in {
        "Conv{}d": _Lowering(f"aten.conv{_axes}d", *_CONVOLUTION, forward=_meta_convolution),
        "ConvTranspose{}d": _Lowering(
            f"aten.conv_transpose{_axes}d", *_CONVOLUTION, "output_padding", forward=_meta_transposed
        ),
        "MaxPool{}d": _Lowering(f"aten.max_pool{_axes}d", *_WINDOW, "dilation", "ceil_mode"),
        "AvgPool{}d": _Lowering(
            f"aten.avg_pool{_axes}d",
            *(*_WINDOW, "ceil_mode", "count_include_pad"),
            *([] if _axes == 1 else ["divisor_override"]),
        ),
        "AdaptiveAvgPool{}d": _Lowering(f"aten.adaptive_avg_pool{_axes}d"),
        "AdaptiveMaxPool{}d": _Lowering(f"aten.adaptive_max_pool{_axes}d"),
    }.items():
        _LOWERINGS[getattr(nn, _name.format(_axes))] = _lowering


def _known_type(module: nn.Module) -> type[nn.Module] | None:
    """The type in the table whose forward the module runs."""
    for kind in type(module).__mro__:
        if kind in _LOWERINGS:
            # What has a forward of its own is another operator, and so are some settings.
            plain = getattr(module, "padding_mode", "zeros") == "zeros" and not getattr(module, "return_indices", False)
            named = getattr(module, "dim", 0) is not None
            return kind if runs_as(module, kind) and plain and named else None
    return None


def runs_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether what a module computes is what that type, of which it is one, does."""
    own = (getattr(type(module), name, None) is getattr(kind, name, None) for name in _RUNS)
    return all(own) and not module.__dict__.keys() & set(_RUNS)


#: The methods that decide what a module computes.
_RUNS = ("forward", "__call__", "_conv_forward", "_output_padding")


def is_known(module: nn.Module) -> bool:
    """Whether `call_of` takes this module."""
    return _known_type(module) is not None


def is_inactive(module: nn.Module) -> bool:
    """Whether the module only passes its input on, in another shape perhaps: it is no stage."""
    return isinstance(module, (nn.Flatten, nn.Identity, nn.Unflatten)) or (
        isinstance(module, _DROPOUTS) and not (module.training and module.p > 0)
    )


def refresh_weights(module: nn.Module) -> None:
    """Let the hooks that make weights out of others, pruning's above all, set them as they do before each forward."""
    with torch.no_grad():
        remake_weights(module)


def remake_weights(module: nn.Module) -> None:
    """As `refresh_weights`, with a graph from the weights to what they are made of."""
    for hook in module._forward_pre_hooks.values():
        if _makes_weights(hook):
            hook(module, None)


def weight_names(module: nn.Module) -> list[str]:
    """The weights that are made of others before each forward: plain tensors, where parameters would be."""
    made = (name.rpartition("_")[0] for name in module._parameters if name.endswith(("_orig", "_g")))
    return [*module.__dict__.get(_MADE, ()), *made]


def origins(module: nn.Module, name: str) -> list[nn.Parameter]:
    """The parameters that a weight is, or is made of, as pruning and parametrisations do."""
    own = module._parameters.get(name)
    if own is not None or name in module._buffers:
        return [] if own is None else [own]
    begins = (f"{name}_", f"parametrizations.{name}.")
    return [parameter for path, parameter in module.named_parameters() if path.startswith(begins)]


def trains(module: nn.Module, name: str) -> bool:
    """Whether any parameter that a weight is made of trains."""
    return any(parameter.requires_grad for parameter in origins(module, name))


#: Where a twin has the names of weights that parametrisations made.
_MADE = "_made_weights"


def has_own_hooks(module: nn.Module) -> bool:
    """Whether a hook is registered on the module that is not PyTorch's own, making a weight."""
    return any(not _makes_weights(hook) for kind in _HOOKS for hook in module.__dict__[kind].values())


def _makes_weights(hook: object) -> bool:
    """Whether a hook is PyTorch's own, of pruning, weight or spectral normalisation: it writes to its module."""
    return type(hook).__module__.startswith("torch.nn.utils.")


def twin(module: nn.Module, parameters: Mapping[int, torch.Tensor] | None = None, *, aside: bool = False) -> nn.Module:
    """A module that computes what `module` computes, out of other parameters: `module` is not touched, nor its users.

    Parametrised weights are made once, here, and stay what they are.

    Parameters
    ----------
    module : Module
        The original. Its hooks are run, and are given it.
    parameters : mapping of int to Tensor, optional
        What takes a parameter's place, by its ``id``.
    aside : bool
        Whether what `module` would change in itself, as spectral normalisation does, is changed in copies.
    """
    other = object.__new__(type(module))
    fields = other.__dict__
    fields.update(module.__dict__)
    given = parameters or {}
    fields["_parameters"] = {name: given.get(id(value), value) for name, value in module._parameters.items()}
    if aside:
        fields["_buffers"] = {name: None if b is None else b.clone() for name, b in module._buffers.items()}
    fields["_modules"] = {
        name: None if child is None else twin(child, parameters, aside=aside) for name, child in module._modules.items()
    }
    for kind in _HOOKS:
        hooks = {key: hook if _makes_weights(hook) else _given(hook, module) for key, hook in fields[kind].items()}
        fields[kind] = OrderedDict(hooks)
    if parametrize.is_parametrized(module):
        made = {name: weight() for name, weight in fields["_modules"].pop("parametrizations").items()}
        other.__class__ = parametrize.type_before_parametrizations(module)
        fields.update(made)
        fields[_MADE] = tuple(made)
    return other


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _given(hook: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    return lambda _, *args, **options: hook(module, *args, **options)


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Random numbers that are drawn meanwhile are drawn again afterwards."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        yield


def arguments_of(module: nn.Module) -> Arguments:
    """The arguments of the module's call, with its weights as they are now."""
    kind = _known_type(module)
    assert kind is not None
    return _LOWERINGS[kind].arguments(module)


class _Same:
    """An object of which nothing is known but which one it is; it is not kept alive where that can be helped."""

    def __init__(self, value: object) -> None:
        self._hash = id(value)
        try:
            self._value: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._value = lambda: value

    def __eq__(self, other: object) -> bool:
        own = self._value()
        return isinstance(other, _Same) and own is not None and own is other._value()

    def __hash__(self) -> int:
        return self._hash


def _mark(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """What tells whether an attribute is still what it was: plain values, and what holds them, by themselves."""
    kind = type(value)
    if kind in _PLAIN:
        # NaN is not itself.
        return (kind, value) if value == value else (kind, "nan")
    if isinstance(value, torch.Tensor):
        return _Same(value), None if value.is_inference() else value._version
    if len(inside) == _DEPTH or id(value) in inside:
        return _Same(value)
    inside = (*inside, id(value))
    if isinstance(value, (tuple, list, set, frozenset)):
        return type(value), tuple(_mark(element, inside) for element in value)
    if isinstance(value, Mapping):
        return type(value), tuple((_mark(key, inside), _mark(own, inside)) for key, own in value.items())
    if isinstance(value, types.MethodType):
        return _Same(value.__func__), _Same(value.__self__)
    if isinstance(value, functools.partial):
        return _mark((value.func, value.args, value.keywords), inside)
    if isinstance(value, _WHOLE) or not hasattr(value, "__dict__"):
        return _Same(value)
    return _Same(value), _mark(vars(value), inside)


def check_module(module: object) -> nn.Module:
    """`module` where it is one that can be looked into.

    Raises
    ------
    TypeError
        Where it is no Module, or a program that TorchScript has compiled.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; expected a torch.nn.Module")
    if any(isinstance(part, torch.jit.ScriptModule) for part in parts_of(module)):
        raise TypeError("module is, or holds, a torch.jit.ScriptModule; give the module that it was compiled from")
    return module


def parts_of(module: nn.Module) -> list[nn.Module]:
    """A module and all inside it, each once; in any order, but faster than ``module.modules()`` has them."""
    found, waiting = {id(module): module}, [module]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return list(found.values())


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """All parameters and buffers, in any order."""
    for part in parts_of(module):
        for tensors in (part._parameters, part._buffers):
            yield from (tensor for tensor in tensors.values() if tensor is not None)


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """All that a chain takes from the module itself, but for its weights' values."""
    fields = module.__dict__
    # Weights that are made before each forward are read at each.
    left = _INTERNAL.union(weight_names(module))
    plain = [(name, _mark(value)) for name, value in fields.items() if name not in left]
    shapes = [(name, p.shape, p.dtype) for name, p in module._parameters.items() if p is not None]
    # What they say where to read is part of patterns; so are pruning's masks.
    buffers = [
        (name, _mark(buffer))
        for name, buffer in module._buffers.items()
        if buffer is not None and name != "num_batches_tracked" and _decides(name, buffer)
    ]
    children = [(name, id(child)) for name, child in module._modules.items()]
    hooked = any(fields[hooks] for hooks in _HOOKS) and not is_known(module)
    return type(module), tuple(plain), tuple(shapes), tuple(buffers), tuple(children), hooked


def _decides(name: str, buffer: torch.Tensor) -> bool:
    return name.endswith("_mask") or not buffer.is_floating_point()


_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device}
#: What is not looked into.
_WHOLE = (type, nn.Module, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
#: How deep attributes are looked into.
_DEPTH = 3
#: What nn.Module has in its instances for itself.
_INTERNAL = set(nn.Module().__dict__) - {"training"}


def fingerprint(module: nn.Module, like: torch.Tensor | None = None) -> tuple[Any, ...]:
    """What a chain takes from a module: which operators it runs, their settings, modes and pruning masks.

    And the dtype and device of `like`, where the module has none of its own.
    """
    marks: list[Any] = []
    if like is not None and not any(tensor.is_floating_point() for tensor in tensors_of(module)):
        marks.append((like.dtype, like.device))
    marks += [(_Same(part), _settings(part)) for part in parts_of(module)]
    return tuple(marks)


def call_of(module: nn.Module, in_shape: tuple[int, ...], *, path: str) -> Call:
    """The call that the module makes on samples of that shape, without the batch axis.

    Raises
    ------
    ValueError
        Where the input does not fit the module.
    """
    kind = _known_type(module)
    assert kind is not None
    lowering = _LOWERINGS[kind]
    call = Call(lowering.operator, lowering.arguments(module), (1, *in_shape), (), path)
    forward = lowering.forward or kind.forward
    try:
        out = forward(module, torch.empty((1, *in_shape), device="meta"))
    except (RuntimeError, IndexError, ValueError) as error:
        raise ValueError(f"{path}: an input of shape {in_shape} does not fit {module}: {error}") from error
    if isinstance(module, (nn.Softmax, nn.LogSoftmax)) and module.dim is not None and not module.dim % out.ndim:
        raise call.unsupported(f"dim={module.dim} is the batch, whose samples it mixes", "name another axis")
    return replace(call, out_shape=tuple(out.shape))


class Kept:
    """Which elements of a weight a pattern keeps, and whether that still holds.

    An element is left out where a pruning mask says so; without a mask, where it is exactly zero.

    Parameters
    ----------
    name : str
        The weight's.
    weight : Tensor
        As the module computes it.
    mask : Tensor or None
        Pruning's.
    """

    def __init__(self, name: str, weight: torch.Tensor, mask: torch.Tensor | None) -> None:
        self.name = name
        self.mask = (weight != 0).detach()
        # A mask says which are zero for good; one that does not belong to pruning says nothing.
        if mask is not None and not bool((self.mask & (mask == 0)).any()):
            self.mask = (mask != 0).detach()
        # Those of the smaller share: the check of a forward pass looks at them, and counts what else there is.
        kept = self.mask.reshape(-1)
        self._most = 2 * int(kept.count_nonzero()) > kept.numel()
        self._places = (~kept if self._most else kept).nonzero().reshape(-1)

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Kept:
        """Of a module whose weights are refreshed."""
        mask = getattr(module, f"{name}_mask", None)
        return cls(name, getattr(module, name), mask if isinstance(mask, torch.Tensor) else None)

    def holds(self, weight: torch.Tensor) -> bool:
        """Whether all elements that were left out are zero in this weight."""
        elements = weight.detach().reshape(-1)
        some = elements.index_select(0, self._places).count_nonzero()
        return bool(some == (0 if self._most else elements.count_nonzero()))
