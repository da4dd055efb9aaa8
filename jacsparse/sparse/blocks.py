"""Activations with the samples of a block last: ``(blocks, channels, rows, columns, lanes)``.

A vector register holds one position of all samples of a block. What the last block's lanes without a sample hold is
no part of the activation: whoever adds up lanes sets them to zero first.

A `BlockTensor` has elements that lie so. Autograd sees a tensor like any other, so derivatives, views, writes and
hooks are PyTorch's own. Below autograd, elementwise operators and those in `RULES` go on with blocks. Before any other
operator the elements are copied to PyTorch's layout, and it returns tensors; those that share memory with the
activation take the blocks' place. Functions in `FUNCTIONS` have a derivative of their own for blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from ..runtime import is_transformed, uncompiled
from .deferred import Deferred

if TYPE_CHECKING:
    from .normalisation import Statistics

#: By an ATen operator, what computes it for blocks, below autograd, or returns NotImplemented; and what computes those
#: tagged as pointwise.
RULES: dict[Any, Callable[..., Any]] = {}
#: By a function of PyTorch, what computes it for blocks, above autograd, or returns NotImplemented.
FUNCTIONS: dict[Any, Callable[..., Any]] = {}


def rule(*functions: Any, of: dict[Any, Callable[..., Any]] = RULES) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: what computes these operators for blocks."""

    def added(compute: Callable[..., Any]) -> Callable[..., Any]:
        of.update(dict.fromkeys(functions, compute))
        return compute

    return added


def to_blocks(x: torch.Tensor, lanes: int) -> torch.Tensor:
    """``(batch, channels, rows, columns)`` as blocks of `lanes` samples, in memory of their own.

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
    """Blocks as ``(batch, channels, rows, columns)``, in memory of its own."""
    return _apart(x.movedim(-1, 1).flatten(0, 1)[:batch], x)


def _apart(view: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    copied = view.contiguous()
    return copied.clone() if copied.data_ptr() == x.data_ptr() else copied


_CPU = torch.device("cpu")


class Memory:
    """What holds an activation's elements, and those of its views: blocks, or one tensor that other code may write to.

    Blocks are never written to, but replaced: who has read them may go on with what was there.
    """

    __slots__ = ("batch", "content", "dtype", "empty_positions", "in_inference", "lanes", "statistics", "tensor")

    def __init__(self, content: torch.Tensor | Deferred, batch: int, empty_positions: int = 0) -> None:
        self.content: torch.Tensor | Deferred | None = content
        self.batch, self.lanes, self.dtype = batch, content.shape[-1], content.dtype
        #: Of the positions of all samples, those that no sample is at, where several blocks stand side by side.
        self.empty_positions = empty_positions
        self.in_inference = torch.is_inference_mode_enabled()
        #: Where there are no blocks any more.
        self.tensor: torch.Tensor | None = None
        #: The batch's statistics, where they have been measured.
        self.statistics: Statistics | None = None


class BlockTensor(torch.Tensor):
    """A tensor of shape ``(batch, channels, ...)``, of two to four dimensions, whose elements lie in blocks."""

    memory: Memory
    #: The shape.
    sizes: tuple[int, ...]
    #: Whether the shape is not that of the memory's blocks.
    is_view = False

    @staticmethod
    def __new__(cls, memory: Memory, sizes: tuple[int, ...]) -> BlockTensor:
        """A tensor with the elements of a memory."""
        self: BlockTensor = torch.Tensor._make_wrapper_subclass(cls, sizes, dtype=memory.dtype, device=_CPU)  # type: ignore[attr-defined]
        self.memory, self.sizes = memory, sizes
        return self

    def like(self, content: torch.Tensor | Deferred) -> BlockTensor:
        """A tensor of the same samples and dimensions with blocks of its own."""
        memory = self.memory
        new = Memory(content, memory.batch, memory.empty_positions)
        return BlockTensor(new, (memory.batch, *content.shape[1 : len(self.sizes)]))

    def replace(self, content: torch.Tensor | Deferred) -> BlockTensor:
        """This tensor with other elements, as after a write."""
        memory = self.memory
        if self.is_view:
            assert memory.content is not None
            content = (content if isinstance(content, torch.Tensor) else content.blocks).view(memory.content.shape)
        memory.content, memory.statistics = content, None
        return self

    @property
    def pending(self) -> Deferred | None:
        """What computes the blocks, where they are not computed yet."""
        content = self.memory.content
        return content if isinstance(content, Deferred) and not self.is_view else None

    @property
    def blocks(self) -> torch.Tensor:
        """The blocks, which have no history: to be read, not written to."""
        memory = self.memory
        content = memory.content
        if isinstance(content, Deferred):
            if not memory.in_inference and torch.is_inference_mode_enabled():
                with torch.inference_mode(False):
                    content = memory.content = content.blocks
            else:
                content = memory.content = content.blocks
        if content is None:
            return to_blocks(planes(self.shared()), memory.lanes)
        if self.is_view:
            return content.view(-1, *(*self.sizes[1:], 1, 1)[:3], memory.lanes)
        return content

    @property
    def padded(self) -> torch.Tensor:
        """The blocks, with zeros in lanes without a sample."""
        blocks, missing = self.blocks, -self.memory.batch % self.memory.lanes
        if missing:
            # By NumPy: what is no part of the activation has no version.
            blocks.numpy()[-1, ..., -missing:] = 0
        return blocks

    def copied(self) -> torch.Tensor:
        """The elements in a new tensor."""
        if self.memory.content is None:
            return self.shared().clone()
        y = from_blocks(self.blocks, self.memory.batch).view(self.sizes)
        count_bytes(y)
        return y

    def shared(self) -> torch.Tensor:
        """The elements in a tensor that they stay in from now on, of this one's shape and strides."""
        memory = self.memory
        if memory.content is not None:
            with torch.inference_mode(memory.in_inference):
                memory.tensor = self.copied()
            memory.content = None
        assert memory.tensor is not None
        with torch._C.DisableTorchFunctionSubclass():
            return memory.tensor.as_strided(self.size(), self.stride(), self.storage_offset())

    @classmethod
    @uncompiled
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            compute = FUNCTIONS.get(function)
            if compute is not None and not is_transformed():
                result = compute(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            return function(*args, **kwargs)

    @classmethod
    @uncompiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        compute = RULES.get(function)
        if compute is None and torch.Tag.pointwise in function.tags:
            compute = RULES[function] = functools.partial(RULES[torch.Tag.pointwise], function)
        if compute is not None and all(
            type(each) is not BlockTensor or each.memory.content is not None for each in args
        ):
            result = compute(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return _by_tensors(function, args, kwargs)


class BlockOperators(TorchFunctionMode):
    """Counts operators that are called with activations in blocks, and bytes that go into blocks or out of them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.nbytes = 0

    def __enter__(self) -> Self:
        self._token = counting.set(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        counting.reset(self._token)

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Looking up a shape is none.
        self.count += BlockTensor in kinds and function.__name__ != "__get__"
        return function(*args, **(kwargs or {}))


#: What counts in this thread, if anything does.
counting: ContextVar[BlockOperators | None] = ContextVar("counting", default=None)


def count_bytes(x: torch.Tensor) -> None:
    """Have what counts add the bytes of a tensor that goes into blocks or out of them."""
    if (operators := counting.get()) is not None:
        operators.nbytes += x.nbytes


def planes(x: torch.Tensor) -> torch.Tensor:
    """A tensor of two to four dimensions as one of four."""
    return x if x.ndim == 4 else x.reshape(*x.shape, *(1,) * (4 - x.ndim))


def _by_tensors(function: Any, args: Any, kwargs: Any) -> Any:
    """Any operator, with tensors in the place of blocks."""
    if torch.Tag.inplace_view in function.tags:
        x = args[0]
        x.shared()
        with no_dispatch(), torch._C.DisableTorchFunctionSubclass():
            function(*args, **kwargs)
            x.sizes = tuple(x.shape)
        return x
    aliased, written = _aliased(function), {}

    def tensors(name: int | str, value: Any) -> Any:
        def tensor(x: BlockTensor) -> torch.Tensor:
            if name not in aliased:
                return x.copied()
            shared = x.shared()
            written[id(shared)] = x, shared
            return shared

        return tree_map_only(BlockTensor, tensor, value)

    result = function(
        *[tensors(place, value) for place, value in enumerate(args)],
        **{name: tensors(name, value) for name, value in kwargs.items()},
    )
    return tree_map_only(torch.Tensor, lambda y: written[id(y)][0] if id(y) in written else y, result)


@functools.cache
def _aliased(function: Any) -> set[int | str]:
    """Which arguments of an operator, by place and by name, it writes to or returns views of."""
    arguments = function._schema.arguments
    return {key for place, each in enumerate(arguments) if each.alias_info for key in (place, each.name)}
