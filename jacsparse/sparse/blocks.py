"""Activations with the samples of a block last: ``(blocks, channels, rows, columns, lanes)``.

A vector register holds one position of all samples of a block. Where a batch does not fill its last block, that
block's other lanes hold zeros going in, and are dropped going out.

`Blocks` is such an activation in the place of a tensor. PyTorch hands each function that a model's forward pass calls
on it to ``__torch_function__``. Those in `OPERATORS` go on with blocks, and before any other one the activation becomes
a tensor again. So the runs of layers that share the layout are as long as can be, whatever the model's code does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map_only

#: By a function of PyTorch, what computes it for blocks, or returns NotImplemented.
OPERATORS: dict[Any, Callable[..., Any]] = {}


def to_blocks(x: torch.Tensor, lanes: int) -> torch.Tensor:
    """``(batch, channels, rows, columns)`` as blocks of as many samples.

    Examples
    --------
    >>> to_blocks(torch.ones(5, 3, 2, 2), 4).shape
    torch.Size([2, 3, 2, 2, 4])
    """
    batch, *shape = x.shape
    missing = -batch % lanes
    if missing:
        x = functional.pad(x, (0,) * (2 * len(shape)) + (0, missing))
    return x.unflatten(0, ((batch + missing) // lanes, lanes)).movedim(1, -1).contiguous()


def from_blocks(x: torch.Tensor, batch: int) -> torch.Tensor:
    """Blocks as ``(batch, channels, rows, columns)``, contiguous."""
    return x.movedim(-1, 1).flatten(0, 1)[:batch].contiguous()


class Sum(Protocol):
    """An affine layer's output that is not computed yet, so that what follows may become part of it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the blocks."""

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype."""

    def compute(self) -> torch.Tensor:
        """The output's blocks."""

    def activated(self) -> Sum:
        """The output after ReLU."""

    def pooled(self, pool: Any) -> torch.Tensor | None:
        """The blocks of the maximum of each window of a `Pool`; None where that cannot be computed at once."""

    def scaled(self, scale: torch.Tensor, shift: torch.Tensor) -> Sum | None:
        """The output times a number for each channel, plus another one; None where that cannot be part of it."""

    def plus(self, other: Blocks) -> Sum | None:
        """The output plus another activation of its shape; None where that cannot be part of it."""


class Form(NamedTuple):
    """What two activations must share for an operator that takes both."""

    batch: int
    #: Dimensions of the tensor: 4, or 2 for samples of one dimension.
    rank: int
    lanes: int


class Blocks:
    """An activation as blocks of samples; to code that takes tensors, one of shape ``(batch, channels, ...)``.

    Parameters
    ----------
    content : Tensor or Sum
        The blocks, or what computes them.
    form : Form
        The batch, the dimensions and the samples of a block.
    """

    def __init__(self, content: torch.Tensor | Sum, form: Form) -> None:
        self._content, self.form = content, form
        self._tensor: torch.Tensor | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """A tensor's, to code that asks by ``isinstance``; so blocks are what to ask for first."""
        return torch.Tensor

    @property
    def pending(self) -> Sum | None:
        """What computes the blocks, unless they are computed already."""
        return None if isinstance(self._content, torch.Tensor) else self._content

    @property
    def data(self) -> torch.Tensor:
        """The blocks."""
        if not isinstance(self._content, torch.Tensor):
            self._content = self._content.compute()
        return self._content

    @property
    def tensor(self) -> torch.Tensor:
        """The activation as a tensor, samples first."""
        if self._tensor is None:
            self._tensor = from_blocks(self.data, self.form.batch).view(self.shape)
        return self._tensor

    @property
    def shape(self) -> torch.Size:
        """The tensor's shape."""
        _, *sizes, _ = self._content.shape
        return torch.Size((self.form.batch, *(sizes if self.form.rank == 4 else [math.prod(sizes)])))

    @property
    def ndim(self) -> int:
        """The tensor's dimensions."""
        return self.form.rank

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self._content.dtype

    def like(self, data: torch.Tensor | Sum, rank: int | None = None) -> Blocks:
        """An activation of the same samples."""
        return Blocks(data, self.form if rank is None else self.form._replace(rank=rank))

    def replace(self, other: Blocks) -> Blocks:
        """Take over another one's values, as an operator in place does."""
        self._content, self.form, self._tensor = other._content, other.form, None
        return self

    def size(self, dim: int | None = None) -> Any:
        """As ``Tensor.size``."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As ``Tensor.dim``."""
        return self.form.rank

    def __len__(self) -> int:
        return self.form.batch

    def __getattr__(self, name: str) -> Any:
        method = getattr(torch.Tensor, name)
        if not callable(method):
            return getattr(self.tensor, name)
        return lambda *args, **kwargs: self.__torch_function__(method, (), (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in OPERATORS:
            result = OPERATORS[function](*args, **kwargs)
            if result is not NotImplemented:
                return result
        return function(*plain(args), **plain(kwargs))


def _delegated(name: str) -> Callable[..., Any]:
    def call(self: Blocks, *args: Any) -> Any:
        return self.__torch_function__(getattr(torch.Tensor, name), (), (self, *args))

    call.__name__ = name
    return call


for _name in [
    *(f"__{prefix}{name}__" for name in ("add", "sub", "mul", "truediv") for prefix in ("", "r", "i")),
    *(f"__{name}__" for name in ("neg", "pow", "matmul", "getitem", "bool", "float", "lt", "gt", "le", "ge")),
]:
    setattr(Blocks, _name, _delegated(_name))


def plain(value: Any) -> Any:
    """The tensor of an activation in blocks; those in lists, tuples and mappings too."""
    if type(value) is Blocks:
        return value.tensor
    if type(value) is torch.Tensor:
        return value
    return tree_map_only(Blocks, lambda blocks: blocks.tensor, value)


def operator(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: what computes these functions of PyTorch for blocks."""

    def added(compute: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            OPERATORS[function] = compute
        return compute

    return added


def alike(values: Sequence[Any]) -> Form | None:
    """The form that all activations in blocks among some values share; None where they differ."""
    forms = {value.form for value in values if isinstance(value, Blocks)}
    return forms.pop() if len(forms) == 1 else None
