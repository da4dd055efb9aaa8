"""Arguments of a function, with those that it is differentiated by as one flat tensor."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import index
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree

from ..patterns import requiring_gradient
from ..runtime import a_type, flattened, is_transformed
from ..stages import check_batch, check_tensor, is_fit
from ..tracing import check_outside_transforms, form_of, module_of


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
    #: Whether the numbers among the others have gradients where they are tensors; see `requiring_gradients`.
    has_gradients: bool = False

    @classmethod
    def of_call(
        cls, f: Callable[..., Any], args: Sequence[Any], argnums: int | Sequence[int], batched: bool | None
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
        batched = has_samples(f, batched)
        numbers = checked_argnums(argnums, len(args))
        leaves: list[Any] = []
        specs, ranges = [], []
        for arg in args:
            leaves_of_arg, spec = flattened(arg)
            ranges.append(range(len(leaves), len(leaves) + len(leaves_of_arg)))
            leaves += leaves_of_arg
            specs.append(spec)
        places = tuple(place for number in numbers for place in ranges[number])
        names = names_of_arguments(numbers, len(args))
        for number in numbers:
            if not all(isinstance(leaves[place], torch.Tensor) for place in ranges[number]):
                remedy = "pass torch.from_numpy of it"
                if not isinstance(args[number], np.ndarray):
                    remedy = "name the arguments that are tensors by argnums, or bind this one by functools.partial"
                raise TypeError(
                    f"{names[number]} is {a_type(args[number])}; expected a torch.Tensor, or a tuple, list or "
                    f"dict of tensors: {remedy}"
                )
        for number in numbers:
            for place in ranges[number]:
                _check_alike(names[number], leaves[place], leaves[places[0]], batched)
        if not places:
            raise ValueError(f"argnums is {argnums!r}, but the arguments that it names hold no tensor")
        check_outside_transforms(f, leaves)
        arguments = cls(numbers, batched, leaves, tuple(specs), places)
        if isinstance(f, nn.Module) and arguments.is_one_batch:
            check_batch("x", leaves[0])
        return arguments

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the function is differentiated by."""
        return [self.leaves[place] for place in self.places]

    @property
    def batch(self) -> int:
        """The number of samples; 1 where there are none."""
        # Several times as fast as the length of a tensor.
        return self.leaves[self.places[0]].shape[0] if self.batched else 1  # type: ignore[no-any-return]

    @property
    def is_one_batch(self) -> bool:
        """Whether there is one argument, a tensor with samples along its first axis."""
        return self.batched and len(self.leaves) == 1 and len(self.specs) == 1 and self.specs[0].is_leaf()

    def apart(self) -> Arguments:
        """The same arguments as new tensors, on the same memory if contiguous: no closure of the function holds one."""
        leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        # The caller may write to an array later.
        leaves = [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        for place in self.places:
            leaves[place] = leaves[place].contiguous()
        return replace(self, leaves=leaves)

    def requiring_gradients(self) -> Arguments:
        """The same arguments whose other tensors of floats have gradients, and may be written to: none is a leaf."""
        leaves = list(self.leaves)
        for place, leaf in enumerate(leaves):
            if place not in self.places and isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                leaves[place] = requiring_gradient(leaf.detach()).clone()
        return replace(self, leaves=leaves, has_gradients=True)

    def dense(self) -> Arguments:
        """The same arguments where no two elements of one lie in one place, as they do after ``expand``."""
        overlapping = [isinstance(leaf, torch.Tensor) and _overlaps(leaf) for leaf in self.leaves]
        if not any(overlapping):
            return self
        pairs = zip(self.leaves, overlapping, strict=True)
        return replace(self, leaves=[leaf.contiguous() if each else leaf for leaf, each in pairs])

    def flat(self, *, connected: bool = False) -> torch.Tensor:
        """The tensors that the function is differentiated by, ``(batch, elements)``, on request with their graphs."""
        pairs = zip(self.tensors, self._sizes, strict=True)
        parts = [(tensor if connected else tensor.detach()).reshape(self.batch, size) for tensor, size in pairs]
        # An expanded tensor has less memory than elements.
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, 1)

    def memory(self) -> torch.Tensor:
        """The elements of `flat` in their order, in any shape."""
        if len(self.places) == 1 and self.leaves[self.places[0]].is_contiguous():
            return self.leaves[self.places[0]]  # type: ignore[no-any-return]
        return self.flat()

    def shape_of(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The shape of a sample."""
        return tuple(tensor.shape[1:] if self.batched else tensor.shape)

    @functools.cached_property
    def in_shape(self) -> tuple[int, ...] | None:
        """The shape of a sample of the one tensor that the function is differentiated by; None where there are more."""
        return self.shape_of(self.tensors[0]) if len(self.places) == 1 else None

    @functools.cached_property
    def _sizes(self) -> list[int]:
        """Elements of a sample of each tensor."""
        return [math.prod(self.shape_of(tensor)) for tensor in self.tensors]

    def with_zeros(self, samples: int, *, others: bool = False) -> Arguments:
        """The same arguments with samples of zeros, on request also in the place of other tensors without elements."""
        leaves = list(self.leaves)
        for place, leaf in enumerate(leaves):
            is_empty = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and not len(leaf)
            if place in self.places or (others and is_empty):
                leaves[place] = leaf.new_zeros((samples, *leaf.shape[1:]))
        return replace(self, leaves=leaves)

    def with_flat(self, x: torch.Tensor) -> list[Any]:
        """The arguments with other elements, those of a flat tensor."""
        leaves, tensors = list(self.leaves), self.tensors
        parts = [x] if len(tensors) == 1 else x.split(self._sizes, 1)
        for place, tensor, part in zip(self.places, tensors, parts, strict=True):
            leaves[place] = _ordered_as(part.reshape(tensor.shape), tensor)
        rest = iter(leaves)
        return [_pytree.tree_unflatten(list(islice(rest, spec.num_leaves)), spec) for spec in self.specs]

    @functools.cached_property
    def form(self) -> tuple[Any, ...]:
        """All that a prepared program depends on besides elements and numbers.

        Last come the forms of all leaves, and whether the function is differentiated by them.
        """
        pairs = ((leaf, place in self.places) for place, leaf in enumerate(self.leaves))
        forms = tuple([(_form(leaf, differentiated), differentiated) for leaf, differentiated in pairs])
        return self.argnums, self.batched, self.specs, self.surroundings(), forms

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

    def with_args(self, args: Sequence[Any]) -> Arguments | None:
        """The arguments of another call where they are leaves of this form, which is found sooner; else None."""
        if not self._are_alike(args):
            return None
        alike = object.__new__(Arguments)
        # All that is cached depends on the form alone.
        _ = self._sizes, self._plain
        alike.__dict__.update(self.__dict__, leaves=list(args))
        return alike

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

    def memory_of(self, args: Sequence[Any]) -> torch.Tensor | None:
        """`memory` of another call where that is one tensor's, and all arguments are tensors like these; else None."""
        if self._place_of_memory is None or not self._are_alike(args):
            return None
        tensor: torch.Tensor = args[self._place_of_memory]
        return tensor if tensor.is_contiguous() else None

    @functools.cached_property
    def _place_of_memory(self) -> int | None:
        """The place of the one tensor that the function is differentiated by, unless other arguments are no tensors."""
        return self.places[0] if len(self.places) == 1 and not self._plain else None

    def _are_alike(self, args: Sequence[Any]) -> bool:
        if not self._are_leaves or len(args) != len(self.leaves) or is_transformed():
            return False
        if self.form[3] != self.surroundings():
            return False
        for arg, (form, differentiated) in zip(args, self.form[-1], strict=True):
            if _form(arg, differentiated) != form or (differentiated and not is_fit(arg)):
                return False
        return True

    def laid_out_as(self, other: Arguments) -> Arguments:
        """The same arguments, whose tensors lie in memory as another call's do where they have their shapes."""
        if len(self.leaves) != len(other.leaves):
            return self
        pairs = zip(self.leaves, other.leaves, strict=True)
        return replace(self, leaves=[_laid_out(leaf, like) for leaf, like in pairs])

    @property
    def number_places(self) -> frozenset[int]:
        """The places of floating-point numbers: Python's, NumPy's, and tensors without axes."""
        return frozenset([place for place in self._plain if _is_number(self.leaves[place])])

    @functools.cached_property
    def _plain(self) -> list[int]:
        """The places of the leaves that are no tensors with axes."""
        return [n for n, leaf in enumerate(self.leaves) if n not in self.places and _is_plain(leaf)]

    def kinds_of_plain(self, tensors: Collection[int] = ()) -> tuple[Any, ...]:
        """What the leaves are that are no tensors with axes: numbers, and other constants by value.

        An object of another kind is like none, so that each call with one makes a program of its own. At the places of
        `tensors`, where a program takes numbers for tensors, those of 64 bits are like Python's.
        """
        kinds = [(place, _kind(self.leaves[place])) for place in self._plain]
        doubles = (torch.float64, np.float64)
        return tuple([float if place in tensors and kind in doubles else kind for place, kind in kinds])

    def numbers_but(self, places: Collection[int]) -> tuple[str, ...]:
        """The numbers at other places than these, by their texts: zeros have signs."""
        if not self._plain:
            return ()
        return tuple([repr(_float(self.leaves[place])) for place in sorted(self.number_places.difference(places))])

    def with_numbers(self, change: Callable[[float], float]) -> Arguments:
        """The same arguments with other numbers."""
        leaves = list(self.leaves)
        for place in self.number_places:
            leaf, changed = leaves[place], change(_float(leaves[place]))
            leaves[place] = torch.full_like(leaf, changed) if isinstance(leaf, torch.Tensor) else type(leaf)(changed)
        return replace(self, leaves=leaves)

    def with_tensors(self, places: Collection[int]) -> Arguments:
        """The same arguments with tensors in the place of the numbers at some places, and numbers at the others."""
        numbers = self.number_places if self._plain else ()
        if not numbers:
            return self
        leaves = list(self.leaves)
        for place in numbers:
            is_tensor = isinstance(leaves[place], torch.Tensor)
            if place not in places:
                leaves[place] = _float(leaves[place]) if is_tensor else leaves[place]
            elif not is_tensor:
                number = torch.tensor(_float(leaves[place]), dtype=torch.float64, device=self.tensors[0].device)
                leaves[place] = requiring_gradient(number) if self.has_gradients else number
        return replace(self, leaves=leaves)

    def __str__(self) -> str:
        return ", ".join(
            _described(leaf) if isinstance(leaf, torch.Tensor) else type(leaf).__name__ for leaf in self.leaves
        )


def _laid_out(leaf: Any, like: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not isinstance(like, torch.Tensor):
        return leaf
    if leaf.layout != torch.strided or like.layout != torch.strided or leaf.shape != like.shape:
        return leaf
    if leaf.stride() == like.stride() or _overlaps(like):
        return leaf
    return torch.empty_strided(like.shape, like.stride(), dtype=leaf.dtype, device=leaf.device).copy_(leaf)


def _ordered_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor whose elements follow each other in memory as another one's: random numbers are drawn in that order."""
    if like.is_contiguous() or _overlaps(like):
        return tensor
    order = sorted(range(like.ndim), key=lambda axis: -like.stride()[axis])
    if order == sorted(order):
        return tensor
    return tensor.permute(order).contiguous().permute(sorted(order, key=order.__getitem__))


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements may lie in one place, as after ``expand``."""
    if tensor.layout != torch.strided:
        return False
    last = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= last:
            return True
        last += step * (size - 1)
    return False


def _autocast(dtype: torch.dtype | None) -> str:
    return "off" if dtype is None else f"on, with {dtype}"


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}" + (f" of strides {tensor.stride()}" if _overlaps(tensor) else "")


#: Arguments that nobody can change.
_CONSTANT = (bool, int, np.number, str, type(None), torch.dtype, torch.device)


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return not leaf.ndim and leaf.dtype in (torch.float32, torch.float64) and leaf.layout == torch.strided
    # Coarser numbers overflow sooner.
    return isinstance(leaf, (float, np.floating)) and not isinstance(leaf, np.float16)


def _float(number: Any) -> float:
    return float(number.detach() if isinstance(number, torch.Tensor) else number)


def _is_plain(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or _is_number(leaf)


def _kind(leaf: Any) -> Any:
    if _is_number(leaf):
        # The dtype of a result may be that of a tensor, and is not that of a number.
        return leaf.dtype if isinstance(leaf, torch.Tensor) else type(leaf)
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return leaf.shape, leaf.dtype, leaf.tobytes()
    # Any other object may have changed, and is like none.
    return (type(leaf), repr(leaf)) if isinstance(leaf, _CONSTANT) else object()


def _form(leaf: Any, differentiated: bool) -> Any:
    if isinstance(leaf, torch.Tensor) and (differentiated or not _is_number(leaf)):
        return form_of(leaf)
    # A number may be a tensor without axes, and SciPy's solvers pass NumPy's.
    is_number = type(leaf) is int or isinstance(leaf, np.integer) or _is_number(leaf)
    return float if is_number else type(leaf)


def has_samples(f: Callable[..., Any], batched: bool | None) -> bool:
    """Whether what `f` is differentiated by has samples along its first axis: `batched`, or what is usual for `f`.

    By default a module has samples, as have its methods and a ``functools.partial`` of these. Any other function has
    none, as in ``torch.func``.

    Raises
    ------
    TypeError
        Where `f` is no function, or `batched` neither a bool nor None.
    """
    if not callable(f):
        raise TypeError(f"f is {a_type(f)}; expected a function or a module")
    if batched is None:
        return module_of(f) is not None
    if not isinstance(batched, bool):
        raise TypeError(
            f"batched is {batched!r}; expected True where arguments have samples along their first axis, False where "
            "they have none, or None for what is usual: samples for a module, none for a function"
        )
    return batched


def names_of_arguments(numbers: Sequence[int], count: int) -> dict[int, str]:
    """The names of some arguments in messages, by their numbers."""
    return {number: "x" if count == 1 else f"argument {number}" for number in numbers}


def checked_argnums(argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    """The numbers of the arguments that `argnums` names, from 0 on."""
    if type(argnums) is int and 0 <= argnums < count:
        return (argnums,)
    listed = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    try:
        # A bool is no number of an argument.
        numbers = tuple(index(None if isinstance(n, bool) else n) for n in listed)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"argnums is {argnums!r}; expected an integer or a tuple of integers") from None
    if not count:
        raise ValueError("there is no argument to differentiate by; give at least one tensor")
    outside = [number for number in numbers if not -count <= number < count]
    if outside or not numbers:
        raise ValueError(f"argnums is {argnums!r}; the call has {count} arguments, numbered 0 to {count - 1}")
    numbers = tuple(number % count for number in numbers)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"argnums is {argnums!r}; it names an argument twice")
    return numbers


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
