"""Activations with the samples of a block last: ``(blocks, channels, rows, columns, lanes)``.

A vector register holds one position of all samples of a block. Where a batch does not fill its last block, that
block's other lanes hold zeros going in, and are dropped going out.

`Blocks` is such an activation in the place of a tensor. PyTorch hands each function that a model's forward pass calls
on it to ``__torch_function__``. Those in `OPERATORS` go on with blocks, and before any other one the activation becomes
a tensor again. So the runs of layers that share the layout are as long as can be, whatever the model's code does.
"""

from __future__ import annotations

import dis
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from ..runtime import is_transformed

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
    return _apart(x.unflatten(0, ((batch + missing) // lanes, lanes)).movedim(1, -1), x)


def from_blocks(x: torch.Tensor, batch: int) -> torch.Tensor:
    """Blocks as ``(batch, channels, rows, columns)``, contiguous."""
    return _apart(x.movedim(-1, 1).flatten(0, 1)[:batch], x)


def reshaped(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A new tensor in another shape; to autograd no view, and so to be written to as any layer's output."""
    return torch.ops.aten._unsafe_view(x, shape)  # type: ignore[no-any-return]


def _apart(view: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy: what is written to `x` later must not reach layers that are computed later still."""
    copied = view.contiguous()
    return copied.clone() if copied.data_ptr() == x.data_ptr() else copied


class Sum(Protocol):
    """An affine layer's output that is not computed yet, so that what follows may become part of it."""

    @property
    def x(self) -> torch.Tensor:
        """The blocks that it is computed from."""

    @property
    def with_gradients(self) -> bool:
        """Whether gradients were asked for where the layer ran."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the blocks."""

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype."""

    def compute(self) -> torch.Tensor:
        """The output's blocks, in the mode for gradients that the layer ran in."""

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


class TensorsNeededError(TypeError):
    """Blocks were given to what asks for tensors and hands them to no ``__torch_function__``."""


class Blocks:
    """An activation as blocks of samples; to code that takes tensors, one of shape ``(batch, channels, ...)``.

    From when on the tensor is asked for, it is the activation, whatever is written to it, and the blocks are made from
    it anew.

    Parameters
    ----------
    content : Tensor or Sum
        The blocks, or what computes them.
    form : Form
        The batch, the dimensions and the samples of a block.
    source : Blocks, optional
        The activation that this one is a view of.
    """

    #: NumPy's arrays leave operators to activations, as to tensors.
    __array_priority__ = torch.Tensor.__array_priority__
    # Here, what few activations ever change: a small layer's time is that of its objects.
    _source: Blocks | None = None
    _tensor: torch.Tensor | None = None
    #: The tensor's version that the blocks were made from.
    _seen = math.nan
    #: Whether the tensor may be written to without PyTorch counting it, as by NumPy.
    _escaped = False
    #: Whether another activation is a view of this one.
    _is_viewed = False
    #: Whether something has been computed from the blocks, and not from the tensor.
    was_read = False

    def __init__(self, content: torch.Tensor | Sum, form: Form, source: Blocks | None = None) -> None:
        self._content, self.form = content, form
        if source is not None:
            self._source = source

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """A tensor's, to Python code that asks by ``isinstance``; so blocks are what to ask for first.

        PyTorch's code in C++ asks too, and would read the memory of a tensor where there is none. Its code in Python
        that asks, as of custom autograd functions and of checkpoints, goes on in C++.
        """
        caller = sys._getframe(1)
        module = caller.f_globals.get("__name__", "")
        if _asks_for_class(caller.f_code, caller.f_lasti) and _goes_on_in_python(module):
            return torch.Tensor
        raise TensorsNeededError(f"{module} takes tensors, and got an activation of a part of a sparse model alone")

    @property
    def pending(self) -> Sum | None:
        """What computes the blocks, where they are not computed yet and operators may become part of it."""
        if isinstance(self._content, torch.Tensor) or self._content.with_gradients != records_gradients():
            return None
        self.was_read = True
        return self._content

    @property
    def blocks(self) -> torch.Tensor:
        """The blocks."""
        source = self._source
        if self._tensor is None and (source is None or source._tensor is None):
            self.was_read = True
            return self._computed()
        tensor = self.tensor
        if self._escaped or (source is not None and source._escaped) or self._seen != _writes(tensor):
            with _mode_of(tensor.is_inference(), tensor.requires_grad or torch.is_grad_enabled()):
                self._content = self.blocks_of(tensor)
            self._seen = _writes(tensor)
        assert isinstance(self._content, torch.Tensor)
        return self._content

    @property
    def tensor(self) -> torch.Tensor:
        """The activation as a tensor, samples first."""
        if self._tensor is None:
            _check_transforms()
            tensor = self._computed() if self._source is None else self._source.tensor
            with _mode_of(tensor.is_inference(), tensor.requires_grad or torch.is_grad_enabled()):
                if self._source is None:
                    self._tensor = reshaped(from_blocks(tensor, self.form.batch), self.shape)
                else:
                    self._tensor = tensor.view(self.shape)
        return self._tensor

    def _computed(self) -> torch.Tensor:
        content = self._content
        if isinstance(content, torch.Tensor):
            return content
        _check_transforms()
        if content.with_gradients == torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            computed = content.compute()
        else:
            with _mode_of(content.x.is_inference(), content.with_gradients):
                computed = content.compute()
        self._content = computed
        return computed

    @property
    def is_alone(self) -> bool:
        """Whether an operator in place may put other blocks in the place of these, as no memory of theirs is shared."""
        if self._tensor is not None or self._source is not None or self._is_viewed:
            return False
        # Without gradients, an operator in place changes the values and leaves the graph.
        content = self._content
        return torch.is_grad_enabled() or not (
            content.requires_grad if isinstance(content, torch.Tensor) else content.with_gradients
        )

    def blocks_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape as blocks of this form."""
        _check_transforms()
        planes = tensor.view(*tensor.shape, *(1,) * (4 - tensor.ndim))
        return to_blocks(planes, self.form.lanes).view(self._content.shape)

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

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def requires_grad(self) -> bool:
        """Whether gradients may be asked for."""
        return (self._computed() if self._tensor is None and self._source is None else self.tensor).requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.tensor.requires_grad = value
        self._seen = math.nan

    @property
    def grad(self) -> torch.Tensor | None:
        """The tensor's gradient."""
        return self.tensor.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.tensor.grad = value

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its graph."""
        self._note(self.tensor.data)
        return self.tensor.data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise TensorsNeededError("an activation of a part of a sparse model alone cannot be given other memory")

    def like(self, data: torch.Tensor | Sum) -> Blocks:
        """An activation of the same samples."""
        return Blocks(data, self.form)

    def view_of(self, data: torch.Tensor, rank: int) -> Blocks:
        """An activation that shares the memory of this one."""
        self._is_viewed = True
        return Blocks(data, self.form._replace(rank=rank), self)

    def replace(self, other: Blocks) -> Blocks:
        """Take over another one's values, as an operator in place does."""
        self._content, self.was_read = other._content, False
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
            value = getattr(self.tensor, name)
            self._note(value)
            return value
        return lambda *args, **kwargs: self.__torch_function__(method, (), (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in OPERATORS:
            named = dict(kwargs)
            operands = [named.pop(name) for name in ("input", "other") if name in named]
            operands = [*operands[: "input" in kwargs], *args, *operands["input" in kwargs :]]
            result = OPERATORS[function](*operands, **named)
            if result is not NotImplemented:
                return result
        result = function(*plain(args), **plain(kwargs))
        for each in (*args, *kwargs.values()):
            if type(each) is Blocks and each._note(result):
                return each
        return result

    def _note(self, result: Any) -> bool:
        """Note what a function has made of the tensor; whether that is the tensor itself."""
        tensor = self.tensor
        if result is tensor:
            # It may have been taken out of a graph, or into one.
            self._seen = math.nan
            return True
        if not _is_apart(result, tensor):
            self._escaped = True
            if self._source is not None:
                self._source._escaped = True
        return False


def _is_apart(value: Any, tensor: torch.Tensor) -> bool:
    """Whether nothing that is written to a value reaches a tensor's memory."""
    if isinstance(value, torch.Tensor):
        if not torch._C._has_storage(value):
            return True
        return value.untyped_storage()._cdata != tensor.untyped_storage()._cdata
    return value is None or type(value) in (bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


def records_gradients() -> bool:
    """Whether autograd sees what is computed; in inference mode it does not, whatever else enables gradients."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def _mode_of(inference: bool, gradients: bool) -> AbstractContextManager[Any]:
    """The mode that a tensor was made in, whatever the mode of those who ask for another form of it."""
    if gradients == torch.is_grad_enabled() and (inference or not torch.is_inference_mode_enabled()):
        return _UNCHANGED
    return _changed_mode(inference, gradients)


_UNCHANGED = nullcontext()


@contextmanager
def _changed_mode(inference: bool, gradients: bool) -> Iterator[None]:
    with torch.inference_mode(inference and torch.is_inference_mode_enabled()), torch.set_grad_enabled(gradients):
        yield


def _check_transforms() -> None:
    if is_transformed():
        # What is made here would belong to the transform, and outlive it.
        raise TensorsNeededError("a transform of torch.func got an activation of a part of a sparse model from outside")


@functools.cache
def _asks_for_class(code: CodeType, place: int) -> bool:
    """Whether an instruction asks for a class itself, and does not call what asks.

    A call begins where the name does that it calls.
    """
    positions = list(code.co_positions())
    if place < 0 or positions[place // 2][2] is None:
        return "isinstance" in code.co_names
    row, _, column, _ = positions[place // 2]
    for each in dis.get_instructions(code):
        if each.offset == place and (each.opname == "MATCH_CLASS" or each.argval == "__class__"):
            return True
        at = each.positions
        if each.argval == "isinstance" and at is not None and (at.lineno, at.col_offset) == (row, column):
            return True
    # As ABCMeta's, whose code in Python calls one in C.
    return code.co_name == "__instancecheck__"


def _goes_on_in_python(module: str) -> bool:
    return not module.startswith("torch.") or module.startswith("torch.nn.")


def _writes(tensor: torch.Tensor) -> float:
    """How many times a tensor was written to; NaN, which differs from itself, where PyTorch does not count it."""
    return math.nan if tensor.is_inference() else tensor._version


def _delegated(name: str) -> Callable[..., Any]:
    def call(self: Blocks, *args: Any) -> Any:
        return self.__torch_function__(getattr(torch.Tensor, name), (), (self, *args))

    call.__name__ = name
    return call


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_OTHERS = (
    "neg", "pos", "abs", "invert", "lt", "gt", "le", "ge", "eq", "ne", "getitem", "setitem", "iter", "bool", "int",
    "float", "complex", "index", "array", "repr", "format", "contains", "reversed", "reduce_ex", "lshift", "rshift",
)  # fmt: skip
for _name in [*(f"{prefix}{name}" for name in _BINARY for prefix in ("", "r", "i")), *_OTHERS]:
    if hasattr(torch.Tensor, f"__{_name}__"):
        setattr(Blocks, f"__{_name}__", _delegated(f"__{_name}__"))


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
