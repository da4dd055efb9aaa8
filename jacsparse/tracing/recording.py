"""A recorded forward pass: its ATen calls, with the tensors of that run."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from .modules import name_of
from .operators import Facts, operator_name


class Operand(NamedTuple):
    """A tensor argument that depends on the input."""

    #: The argument in the operator's schema; ``tensors.0`` is the first element of a list.
    name: str
    vertex: int
    #: Whether autograd computes a gradient of it.
    active: bool


# Equal operands are one object: to construct a tuple with names is slow.
operand_of = functools.lru_cache(maxsize=1 << 16)(Operand)


@dataclass(eq=False, slots=True)
class Invocation:
    """One call of an ATen operator."""

    #: An OpOverload, as in ``torch.ops.aten.add.Tensor``, or an Overwrite, which has no facts.
    overload: Any
    facts: Facts | None
    #: By their names in the schema. Elements of lists of tensors have names of their own; defaults are absent.
    arguments: dict[str, Any]
    #: The arguments that depend on the input.
    operands: list[Operand]
    #: The version of each tensor argument after the call.
    versions: dict[str, int]
    #: The number of the node that autograd made for the call; -1 where there is none, or it cannot be told.
    sequence: int
    #: The module that made the call, and the line of the user's code, for messages.
    module: nn.Module | None = None
    code: CodeType | None = None
    line: int = 0
    #: The tensors that the call returned or wrote to, and their versions after the call.
    results: list[torch.Tensor] = field(default_factory=list)
    result_versions: list[int] = field(default_factory=list)
    #: Copies of operands, by name, and of the first result, by None, that were overwritten later and that the values of
    #: the Jacobian are computed from.
    saved: dict[str | None, torch.Tensor] = field(default_factory=dict)
    #: The index of the call in the recording.
    place: int = -1
    #: The vertex of the first result; the other results have the next vertices.
    first: int = -1
    #: Whether the call stands for a module's backward hooks.
    hooked: bool = False
    #: Whether the call wrote to an argument.
    writes: bool = False

    @property
    def name(self) -> str:
        """The name of the operator, as in ``aten.add``."""
        return operator_name(self.overload)

    def is_stale(self, name: str) -> bool:
        """Whether this call, or a later one, has overwritten an argument."""
        version = self.versions.get(name)
        if version is None:
            return False
        argument = self.arguments[name]
        return argument._version != version or (self.writes and any(argument is result for result in self.results))

    @property
    def source(self) -> str:
        """The line of code, as in `` at net.py, line 7``."""
        return "" if self.code is None else f" at {self.code.co_filename}, line {self.line}"


class Constant(NamedTuple):
    """A tensor that does not depend on the input."""

    #: Held here so that no other tensor gets its ``id``.
    tensor: torch.Tensor
    #: The call that computed it; None and empty for a tensor from before the run.
    overload: Any
    arguments: dict[str, Any]
    #: The external tensors that it was computed from, by their places among the recording's.
    externals: frozenset[int]
    #: Whether it was computed from random numbers.
    drawn: bool


@dataclass(eq=False)
class Recording:
    """What a forward pass did."""

    module: nn.Module
    #: A copy of the caller's input; its vertex is 0.
    input: torch.Tensor
    output: torch.Tensor = field(init=False)
    #: The output as an operand; None where it does not depend on the input.
    last: Operand | None = None
    #: The calls, in the order in which they ran.
    invocations: list[Invocation] = field(default_factory=list)
    #: Where autograd computes the gradient of each vertex; None for a vertex that has no gradient, or was never used.
    edges: list[GradientEdge | None] = field(default_factory=list)
    #: The call that computed each vertex; None for the input.
    makers: list[Invocation | None] = field(default_factory=list)
    #: The tensors from before the run that autograd computes gradients of: mostly parameters.
    externals: list[torch.Tensor] = field(default_factory=list)
    #: The tensors that do not depend on the input, by ``id``.
    constants: dict[int, Constant] = field(default_factory=dict)
    #: By memory, the last write that did not depend on the input, with the externals of all such writes.
    written: dict[int, Constant] = field(default_factory=dict)
    #: Whether a call wrote to a tensor from before the run, as an argument or a buffer.
    writes_outside: bool = False
    #: The module of each call that drew random numbers.
    draws: list[nn.Module | None] = field(default_factory=list)
    #: Whether what its operators saved passed through hooks, as those of a checkpoint within the module.
    saved_by_hooks: bool = False
    #: The number of hooks that PyTorch had numbered before the run.
    hooks: int = field(default_factory=lambda: RemovableHandle.next_id)

    @property
    def may_have_hooks(self) -> bool:
        """Whether any hook was registered anywhere since the run began; if not, no tensor of the run has one."""
        return self.hooks != RemovableHandle.next_id

    @property
    def drawing(self) -> str | None:
        """The path of the first module that drew random numbers; None where none did."""
        if not self.draws:
            return None
        paths = {id(part): path for path, part in self.module.named_modules()}
        return paths.get(id(self.draws[0])) or name_of(self.draws[0] or self.module)

    def externals_of(self, invocation: Invocation, through: Collection[str] = ()) -> set[int]:
        """The externals that the arguments of a call were computed from, except the arguments in `through`."""
        externals = self._constant_externals(invocation, through)
        for operand in invocation.operands:
            if operand.active and operand.name not in through:
                externals |= self._externals_of_vertices[operand.vertex]
        return externals

    def _constant_externals(self, invocation: Invocation, through: Collection[str] = ()) -> set[int]:
        names = (name for name in invocation.versions if name not in through)
        constants = (constant for name in names for constant in self.constants_in(invocation.arguments[name]))
        return set[int]().union(*(constant.externals for constant in constants))

    @functools.cached_property
    def _externals_of_vertices(self) -> list[set[int]]:
        """The externals that each vertex was computed from, as far as autograd computes gradients of them."""
        of_vertices: list[set[int]] = [set()]
        for invocation in self.invocations:
            externals = self._constant_externals(invocation)
            externals.update(*(of_vertices[operand.vertex] for operand in invocation.operands if operand.active))
            of_vertices.extend([externals] * len(invocation.results))
        return of_vertices

    def made_of(self, tensor: torch.Tensor, others: Collection[int]) -> bool:
        """Whether a tensor that does not depend on the input is among others, by ``id``, or was computed from them."""
        waiting, seen = [tensor], set[int]()
        while waiting:
            ancestor = waiting.pop()
            if id(ancestor) in others:
                return True
            if id(ancestor) not in seen:
                seen.add(id(ancestor))
                for constant in self.constants_in(ancestor):
                    waiting.extend(tensors_in(list(constant.arguments.values())))
        return False

    def drawn(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor holds random numbers that were drawn in this run."""
        return any(constant.drawn for constant in self.constants_in(tensor))

    def constants_in(self, tensor: torch.Tensor) -> list[Constant]:
        """The constants that a tensor which does not depend on the input holds: itself, and writes to its memory."""
        constant = self.constants.get(id(tensor))
        constants = [] if constant is None else [constant]
        # Most runs write to no such memory.
        if self.written and (written := self.written.get(memory_of(tensor))) is not None:
            constants.append(written)
        return constants


class _State(threading.local):
    """The number of nested observations that run in a thread."""

    depth = 0


_STATE = _State()


def is_recording() -> bool:
    """Whether this thread observes the calls of a function, as those of a forward pass."""
    return _STATE.depth > 0


@contextlib.contextmanager
def observing() -> Iterator[None]:
    """A context in which the calls of a function are observed: what replaces them steps aside."""
    _STATE.depth += 1
    try:
        yield
    finally:
        _STATE.depth -= 1


def memory_of(tensor: torch.Tensor) -> int:
    """The memory that a tensor lies in; 0 for a sparse tensor, which has several."""
    return 0 if tensor.layout != torch.strided else tensor.untyped_storage()._cdata


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that autograd knows `tensor` as a view of; `tensor` itself where it is no view."""
    return tensor._base if tensor._base is not None else tensor


def tensors_in(result: Any) -> list[torch.Tensor]:
    """The tensors that an operator's result is or holds."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [part for part in result if isinstance(part, torch.Tensor)] if isinstance(result, (list, tuple)) else []
