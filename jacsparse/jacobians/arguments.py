"""Arguments of a function, with those that it is differentiated by as one flat tensor."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree

from ..patterns import requiring_gradient
from ..runtime import a_type, is_transformed
from ..stages import check_batch, check_tensor, is_fit
from ..tracing import check_outside_transforms, form_of, overlaps
from .options import checked_argnums, has_samples

#: How a leaf makes up a tree that is one.
_LEAF = _pytree.tree_flatten(0)[1]


def flattened(tree: Any) -> tuple[list[Any], _pytree.TreeSpec]:
    """The leaves of a tree, and how they make it up."""
    # PyTorch's function leaves a cycle, which would keep a tensor until the garbage collector runs.
    return ([tree], _LEAF) if isinstance(tree, (torch.Tensor, int, float)) else _pytree.tree_flatten(tree)


def unflattened(leaves: list[Any], spec: _pytree.TreeSpec) -> Any:
    """The tree that leaves make up."""
    return leaves[0] if spec is _LEAF else _pytree.tree_unflatten(leaves, spec)


@dataclass(frozen=True, eq=False)
class Arguments:
    """A call's arguments: the tensors that the function is differentiated by, and the other leaves.

    Tensors are the leaves of tuples, lists and dicts, in PyTorch's order.
    """

    argnums: tuple[int, ...]
    batched: bool
    leaves: list[Any]
    #: How the leaves make up each argument.
    specs: tuple[Any, ...]
    #: The places of the leaves that the function is differentiated by, in the order of `argnums`.
    places: tuple[int, ...]
    #: The numbers of the arguments that are constants, numbers among them too.
    static: tuple[int, ...] = ()
    #: The places of the other numbers.
    numbers: tuple[int, ...] = ()

    @classmethod
    def of_call(
        cls,
        f: Callable[..., Any],
        args: Sequence[Any],
        argnums: int | Sequence[int],
        batched: bool | None,
        static: int | Sequence[int] = (),
    ) -> Arguments:
        """The arguments of a call of a function, checked.

        Raises
        ------
        TypeError
            Where an argument that the function is differentiated by holds anything but plain tensors of float32 or
            float64, or as `has_samples`.
        ValueError
            Where `argnums` names no argument, or batches differ.
        """
        # In loops, which take half the time of comprehensions: most calls have one argument.
        batched = has_samples(f, batched)
        numbers = checked_argnums(argnums, len(args))
        static = _checked_static(static, args, numbers) if static != () else ()
        leaves: list[Any] = []
        places: list[int] = []
        specs, ranges = [], []
        for arg in args:
            leaves_of_arg, spec = flattened(arg)
            ranges.append(range(len(leaves), len(leaves) + len(leaves_of_arg)))
            leaves += leaves_of_arg
            specs.append(spec)
        for number in numbers:
            places += ranges[number]
            name = "x" if len(args) == 1 else f"argument {number}"
            for place in ranges[number]:
                if not isinstance(leaves[place], torch.Tensor):
                    raise _no_tensors(name, args[number])
                _check_alike(name, leaves[place], leaves[places[0]], batched)
        if not places:
            raise ValueError(f"argnums is {argnums!r}, but the arguments that it names hold no tensor")
        check_outside_transforms(f, leaves)
        others: tuple[int, ...] = ()
        if len(leaves) > len(places):
            constants = {place for number in static for place in ranges[number]}
            others = tuple([n for n, leaf in enumerate(leaves) if _is_number(leaf) and n not in constants])
        arguments = cls(numbers, batched, leaves, tuple(specs), tuple(places), static, others)
        if isinstance(f, nn.Module) and arguments.is_one_batch:
            check_batch("x", leaves[0])
        return arguments

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the function is differentiated by."""
        return [self.leaves[place] for place in self.places]

    @property
    def others(self) -> list[torch.Tensor]:
        """The tensors that the function is not differentiated by."""
        if len(self.leaves) == len(self.places):
            return []
        leaves = enumerate(self.leaves)
        return [leaf for place, leaf in leaves if place not in self.places and isinstance(leaf, torch.Tensor)]

    @property
    def batch(self) -> int:
        """The number of samples; 1 where there are none."""
        # Several times as fast as the length of a tensor.
        return self.leaves[self.places[0]].shape[0] if self.batched else 1  # type: ignore[no-any-return]

    @property
    def is_one_batch(self) -> bool:
        """Whether there is one argument, a tensor with samples along its first axis."""
        return self.batched and len(self.leaves) == 1 and len(self.specs) == 1 and self.specs[0].is_leaf()

    def with_leaves(self, leaves: list[Any]) -> Arguments:
        """Arguments of the same form with other leaves."""
        return Arguments(self.argnums, self.batched, leaves, self.specs, self.places, self.static, self.numbers)

    def apart(self, *, with_gradients: bool = False) -> Arguments:
        """The same arguments as new tensors, on the same memory if contiguous: no closure of the function holds one.

        On request the other tensors of floats have gradients, and may be written to: none is a leaf.
        """
        leaves = list(self.leaves)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaf = leaf.detach()
                if place in self.places:
                    leaf = leaf.contiguous()
                elif with_gradients and leaf.is_floating_point():
                    leaf = requiring_gradient(leaf).clone()
            # The caller may write to an array later.
            leaves[place] = leaf.copy() if isinstance(leaf, np.ndarray) else leaf
        return self.with_leaves(leaves)

    def dense(self) -> Arguments:
        """The same arguments where no two elements of one lie in one place, as they do after ``expand``."""
        overlapping = [isinstance(leaf, torch.Tensor) and overlaps(leaf) for leaf in self.leaves]
        if not any(overlapping):
            return self
        pairs = zip(self.leaves, overlapping, strict=True)
        return self.with_leaves([leaf.contiguous() if each else leaf for leaf, each in pairs])

    def flat(self, *, connected: bool = False) -> torch.Tensor:
        """The tensors that the function is differentiated by, ``(batch, elements)``, on request with their graphs."""
        parts: list[torch.Tensor] = []
        first = self.leaves[self.places[0]]
        batch = first.shape[0] if self.batched else 1
        for place in self.places:
            tensor = self.leaves[place] if connected else self.leaves[place].detach()
            parts.append(tensor.reshape(batch, math.prod(tensor.shape[self.batched :])))
        # An expanded tensor has less memory than elements.
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, 1)

    def memory_of(self, leaves: list[Any]) -> torch.Tensor:
        """The elements of `flat` of other leaves of this form in their order, in any shape."""
        if len(self.places) == 1 and leaves[self.places[0]].is_contiguous():
            return leaves[self.places[0]]  # type: ignore[no-any-return]
        return self.with_leaves(leaves).flat()

    @property
    def in_shape(self) -> tuple[int, ...] | None:
        """The shape of a sample of the one tensor that the function is differentiated by; None where there are more."""
        return tuple(self.leaves[self.places[0]].shape[self.batched :]) if len(self.places) == 1 else None

    def with_zeros(self, samples: int, *, others: bool = False) -> Arguments:
        """The same arguments with samples of zeros, on request also in the place of other tensors without elements."""
        leaves = list(self.leaves)
        for place, leaf in enumerate(leaves):
            is_empty = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and not len(leaf)
            if place in self.places or (others and is_empty):
                leaves[place] = leaf.new_zeros((samples, *leaf.shape[1:]))
        return self.with_leaves(leaves)

    def with_flat(self, x: torch.Tensor) -> list[Any]:
        """The arguments with other elements, those of a flat tensor."""
        leaves, parts = list(self.leaves), (x,)
        if len(self.places) > 1:
            parts = x.split([math.prod(tensor.shape[self.batched :]) for tensor in self.tensors], 1)
        for place, part in zip(self.places, parts, strict=True):
            leaves[place] = _ordered_as(part.reshape(leaves[place].shape), leaves[place])
        rest = iter(leaves)
        return [unflattened(list(islice(rest, spec.num_leaves)), spec) for spec in self.specs]

    @functools.cached_property
    def form(self) -> tuple[Any, ...]:
        """All that a prepared program depends on besides elements and constants.

        Last come the forms of all leaves, and whether the function is differentiated by them.
        """
        forms = tuple([(_form(leaf), place in self.places) for place, leaf in enumerate(self.leaves)])
        return self.argnums, self.batched, self.specs, self.surroundings(), self.static, forms

    def surroundings(self) -> tuple[torch.dtype, torch.dtype | None]:
        """The default dtype, and the one of autocast; None without it."""
        device = self._device_type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return torch.get_default_dtype(), autocast

    @functools.cached_property
    def _device_type(self) -> str:
        """The kind of device of the tensors, to which autocast applies."""
        return self.leaves[self.places[0]].device.type  # type: ignore[no-any-return]

    @functools.cached_property
    def _are_leaves(self) -> bool:
        """Whether no argument is a tuple, a list or a dict."""
        return all(spec.is_leaf() for spec in self.specs)

    def leaves_of(self, args: Sequence[Any]) -> list[Any] | None:
        """The leaves of another call's arguments where they are of this form, which is found sooner; else None.

        They have tensors in the place of numbers, as these have.
        """
        if not self._are_leaves or len(args) != len(self.leaves) or is_transformed():
            return None
        if self.form[3] != self.surroundings():
            return None
        leaves = list(args)
        for place in self.numbers:
            leaves[place] = _as_tensor(leaves[place], self.leaves[place])
        for leaf, (form, differentiated) in zip(leaves, self.form[-1], strict=True):
            if _form(leaf) != form or (differentiated and not is_fit(leaf)):
                return None
        return leaves

    def check_form(self, prepared: Arguments) -> None:
        """Raise ValueError where these are of another form than those that a Jacobian is prepared for."""
        (default_dtype, autocast), (expected, expected_autocast) = self.form[3], prepared.form[3]
        if default_dtype != expected:
            raise ValueError(
                f"the default dtype is {default_dtype}; this Jacobian is prepared for {expected}: call "
                "torch.set_default_dtype, or prepare one for this"
            )
        if autocast != expected_autocast:
            raise ValueError(
                f"torch.autocast is {_autocast(autocast)}; this Jacobian is prepared for "
                f"{_autocast(expected_autocast)}: call it as it was prepared, or prepare one for this"
            )
        if self.form != prepared.form:
            others = str(prepared)
            if others == str(self):
                others = "others of the order of keys, the containers or the strides"
            raise ValueError(f"the arguments are {self}; this Jacobian is prepared for {others}: prepare one for these")

    def differs_in_samples(self, prepared: Arguments) -> bool:
        """Whether these are of a prepared form but for the number of samples, the length of tensors' first axes."""
        if not self.batched or not self.batch or self.batch == prepared.batch or self.form[:-1] != prepared.form[:-1]:
            return False

        def alike(leaf: Any, other: Any) -> bool:
            if isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor) and leaf.shape != other.shape:
                shapes = leaf.shape[:1], leaf.shape[1:], other.shape[:1]
                same = (leaf.layout, leaf.dtype, leaf.device) == (other.layout, other.dtype, other.device)
                return same and shapes == ((self.batch,), other.shape[1:], (prepared.batch,))
            return bool(_form(leaf) == _form(other))

        return all(map(alike, self.leaves, prepared.leaves))

    def laid_out_as(self, other: Arguments) -> Arguments:
        """The same arguments, whose tensors lie in memory as another call's do where they have their shapes."""
        if len(self.leaves) != len(other.leaves):
            return self
        pairs = zip(self.leaves, other.leaves, strict=True)
        return self.with_leaves([_laid_out(leaf, like) for leaf, like in pairs])

    @functools.cached_property
    def constant_places(self) -> list[int]:
        """The places of the leaves that are constants of a prepared program."""
        plain = (place for place, leaf in enumerate(self.leaves) if not isinstance(leaf, torch.Tensor))
        return [place for place in plain if place not in self.numbers]

    def constants_of(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The constants among leaves of this form, by their values; one that has no hash is like none."""
        return tuple([_constant(leaves[place]) for place in self.constant_places])

    def with_tensors(self, prepared: Arguments | None = None) -> Arguments:
        """The same arguments with tensors without axes in the place of numbers: of the dtype that changes no result's.

        In a call of a prepared Jacobian these are at the places where its arguments have some.
        """
        prepared = self if prepared is None else prepared
        if not prepared.numbers or len(prepared.leaves) != len(self.leaves):
            return self
        leaves, x = list(self.leaves), prepared.tensors[0]
        for place in prepared.numbers:
            leaves[place] = _as_tensor(leaves[place], x)
        return replace(self, leaves=leaves, numbers=prepared.numbers)

    def with_numbers_apart(self) -> Arguments:
        """The same arguments with tensors that sets and dictionaries refuse in the place of those of numbers."""
        leaves = list(self.leaves)
        for place in self.numbers:
            leaves[place] = leaves[place].as_subclass(_Number)
        return self.with_leaves(leaves)

    def __str__(self) -> str:
        return ", ".join(
            _described(leaf) if isinstance(leaf, torch.Tensor) else type(leaf).__name__ for leaf in self.leaves
        )


def _laid_out(leaf: Any, like: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not isinstance(like, torch.Tensor):
        return leaf
    if leaf.layout != torch.strided or like.layout != torch.strided or leaf.shape != like.shape:
        return leaf
    if leaf.stride() == like.stride() or overlaps(like):
        return leaf
    return torch.empty_strided(like.shape, like.stride(), dtype=leaf.dtype, device=leaf.device).copy_(leaf)


def _ordered_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor whose elements follow each other in memory as another one's: random numbers are drawn in that order."""
    if like.is_contiguous() or overlaps(like):
        return tensor
    order = sorted(range(like.ndim), key=lambda axis: -like.stride()[axis])
    if order == sorted(order):
        return tensor
    return tensor.permute(order).contiguous().permute(sorted(order, key=order.__getitem__))


def _autocast(dtype: torch.dtype | None) -> str:
    return "off" if dtype is None else f"on, with {dtype}"


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}" + (f" of strides {tensor.stride()}" if overlaps(tensor) else "")


class _Number(torch.Tensor):
    """A number among the arguments as a function sees it that is captured: sets and dictionaries do not find it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __hash__(self) -> int:
        raise TypeError(
            "a number among the arguments of a prepared Jacobian is a tensor, which no set or dictionary finds; name "
            "its argument in static_argnums"
        )


_NUMBERS = (int, float, np.integer, np.floating)
#: Constants that are compared by their texts: zeros have signs.
_BY_TEXT = (*_NUMBERS, bool, complex, np.generic, str, type(None), torch.dtype, torch.device)


def _is_number(leaf: Any) -> bool:
    # Coarser numbers overflow sooner.
    return isinstance(leaf, _NUMBERS) and not isinstance(leaf, (bool, np.float16))


def _as_tensor(leaf: Any, x: torch.Tensor) -> Any:
    """A number, or a tensor without axes in its place, as one of the dtype and on the device of another tensor."""
    if _is_number(leaf):
        return torch.tensor(leaf, dtype=x.dtype, device=x.device)
    if isinstance(leaf, torch.Tensor) and not leaf.ndim and leaf.dtype in (torch.float32, torch.float64):
        return leaf.to(x)
    return leaf


def _constant(leaf: Any) -> Any:
    if isinstance(leaf, _BY_TEXT):
        return type(leaf), repr(leaf)
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return leaf.shape, leaf.dtype, leaf.tobytes()
    try:
        hash(leaf)
    except TypeError:
        return object()
    return leaf


def _form(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return form_of(leaf)
    # Of numbers that are constants, as SciPy passes NumPy's.
    return float if _is_number(leaf) else type(leaf)


def _checked_static(static: int | Sequence[int], args: Sequence[Any], argnums: Sequence[int]) -> tuple[int, ...]:
    """The numbers of the arguments that are constants."""
    numbers = checked_argnums(static, len(args), "static_argnums")
    for number in numbers:
        if number in argnums:
            raise ValueError(f"static_argnums is {static!r}, and argument {number} is one to differentiate by")
        if any(isinstance(leaf, torch.Tensor) for leaf in _pytree.tree_leaves(args[number])):
            raise TypeError(
                f"static_argnums is {static!r}, and argument {number} holds a tensor, which is read at each call; pass "
                "a number in its place"
            )
    return numbers


def _no_tensors(name: str, arg: Any) -> TypeError:
    remedy = "name the arguments that are tensors by argnums, or bind this one by functools.partial"
    if isinstance(arg, np.ndarray):
        remedy = "pass torch.from_numpy of it"
    return TypeError(f"{name} is {a_type(arg)}; expected a torch.Tensor, or a tuple, list or dict of tensors: {remedy}")


def _check_alike(name: str, x: Any, first: torch.Tensor, batched: bool) -> None:
    """Raise where a value is no tensor to differentiate by, or does not go with the first one."""
    check_tensor(name, x)
    if x.dtype != first.dtype or x.device != first.device:
        raise TypeError(f"{name} is {x.dtype} on {x.device}, another one {first.dtype} on {first.device}; convert one")
    if batched and (not x.ndim or x.shape[0] != first.shape[0]):
        samples = len(first) if first.ndim else "the"
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; expected {samples} samples along its first axis: pass batched=False "
            "for arguments without samples"
        )
