"""A function of any arguments as a module from one flat tensor to another, and what else it returned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from ..patterns import UnsupportedOperatorError
from ..runtime import a_type
from ..tracing import module_of, name_of, saved_buffers, undisturbed
from .arguments import Arguments, flattened


def module_and_batch(
    f: Callable[..., Any], arguments: Arguments, *, has_aux: bool = False, connected: bool = False
) -> tuple[nn.Module, torch.Tensor]:
    """A module of one batch that computes a function, and its input: a module itself where one batch is all it takes.

    Where it is `connected`, the input has the graph of the arguments.
    """
    if isinstance(f, nn.Module) and arguments.is_one_batch and not (has_aux or isinstance(f, WithAux)):
        return f, arguments.leaves[0]
    function = FlatFunction(f, arguments, has_aux)
    return function, arguments.flat(connected=connected)


def run_once(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The result for a copy of `x`, with a graph that holds although the module's changes to itself are undone."""
    with torch.enable_grad(), undisturbed(module, x.device), saved_buffers(module):
        result: torch.Tensor = module(x.clone())
    return result


def wrap(wrapper: nn.Module, f: Callable[..., Any]) -> None:
    """Make a function the attribute `f` of a module that stands for it, whose parts and name are the function's."""
    # A part without a name of its own: the paths of its parts are those that the function's module gives them.
    wrapper._modules[""] = module_of(f)
    wrapper.__dict__.update(f=f, __qualname__=name_of(f))


class WithAux(nn.Module):
    """A function that returns ``(result, aux)``, whoever calls it."""


class FlatFunction(nn.Module):
    """A function of one flat tensor, ``(batch, elements)``, with a flat result: what is traced.

    Its arguments are those of `f`, whose module, if any, is a part, so that parameters and hooks are found. With
    `has_aux` the function returns a pair, of which the second part has no derivative.
    """

    f: Callable[..., Any]
    has_aux: bool
    arguments: Arguments
    #: What the last call returned.
    returned: Returned | None

    def __init__(self, f: Callable[..., Any], arguments: Arguments, has_aux: bool = False) -> None:
        super().__init__()
        # Without `nn.Module.__setattr__`, which takes microseconds.
        vars(self).update(has_aux=has_aux or isinstance(f, WithAux), arguments=arguments, returned=None)
        wrap(self, f)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        arguments = self.arguments
        result, aux = self.f(*arguments.with_flat(x)), None
        if self.has_aux:
            result, aux = parts_of_result(self.f, result)
        # A view of each tensor is what it holds at the end, whatever was written to that shares its memory.
        if aux is not None:
            aux = _pytree.tree_map_only(torch.Tensor, lambda part: part.view_as(part), aux)
        leaves, spec = flattened(result)
        parts: list[torch.Tensor] = []
        forms = []
        for y in leaves:
            part = self._flat_output(y, arguments)
            parts.append(part)
            forms.append((y.shape, y.dtype, part.shape[1]))
        if not parts:
            raise UnsupportedOperatorError(f"{name_of(self.f)} returns no tensor")
        out_shape = tuple(forms[0][0][arguments.batched :]) if len(forms) == 1 else None
        vars(self)["returned"] = Returned(forms, spec, aux, out_shape)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    # The hooks of all modules are not for this one.
    __call__ = forward

    def _flat_output(self, y: Any, arguments: Arguments) -> torch.Tensor:
        if not isinstance(y, torch.Tensor):
            raise UnsupportedOperatorError(
                f"{name_of(self.f)} returns {a_type(y)}; expected tensors, in tuples, lists or dicts"
            )
        if y.is_complex():
            raise UnsupportedOperatorError(
                f"{name_of(self.f)} returns complex numbers, {y.dtype}; return torch.view_as_real of them"
            )
        if not y.is_floating_point():
            raise UnsupportedOperatorError(
                f"{name_of(self.f)} returns {y.dtype}, which has no derivative; expected float32 or float64"
                + ("" if self.has_aux else ", or with has_aux=True (result, aux)")
            )
        if not arguments.batched:
            return y.reshape(1, -1)
        if not y.ndim or len(y) != arguments.batch:
            raise UnsupportedOperatorError(
                f"{name_of(self.f)}: its output of shape {tuple(y.shape)} for {arguments.batch} samples does not have "
                "them along its first axis; permute it, or pass batched=False for arguments without samples"
            )
        return y.reshape(len(y), math.prod(y.shape[1:]))


def parts_of_result(f: Callable[..., Any], result: Any) -> tuple[Any, Any]:
    """What a function with `has_aux` returned to be differentiated, and what beside that."""
    if not isinstance(result, tuple) or len(result) != 2:
        what = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise UnsupportedOperatorError(f"{name_of(f)} returns {what}; with has_aux=True expected a pair, (result, aux)")
    return result[0], result[1]


@dataclass(frozen=True, eq=False)
class Returned:
    """What a function returned: how its tensors make up its result, and what it returned beside that."""

    #: Of each tensor of the result the shape, the dtype, and the number of elements of a sample.
    forms: Sequence[tuple[torch.Size, torch.dtype, int]]
    spec: Any
    aux: Any
    #: The shape of a sample of the one tensor of the result; None where there are more.
    out_shape: tuple[int, ...] | None

    def result(self, flat: torch.Tensor) -> Any:
        """The result of which a flat output, ``(batch, rows)``, has the elements; tensors have memory of their own."""
        parts = zip(flat.split([size for *_, size in self.forms], 1), self.forms, strict=True)
        leaves = [part.reshape(shape).to(dtype, copy=True) for part, (shape, dtype, _) in parts]
        return _pytree.tree_unflatten(leaves, self.spec)
