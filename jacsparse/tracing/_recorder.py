"""A module's forward pass as the ATen calls that it made, with the tensors of this very run.

The module runs by itself, under a dispatch mode that sees every call below autograd. Each call on tensors that depend
on the input becomes an `Invocation`; tensors have numbers, called vertices, and an operator that writes in place gives
a tensor a new one. What autograd thinks of a tensor is asked where it is used: which node of its graph made it, and
whether a derivative passes at all. So a derivative that a `torch.autograd.Function` has in the place of an operator's
is seen by what it is.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch._decomp
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from ..patterns import UnsupportedOperatorError
from ..patterns._rules import _RULES, CONSTANT, Rule, is_pointwise, rule_of

__all__ = [
    "Constant",
    "Invocation",
    "Operand",
    "Overwrite",
    "Recording",
    "is_recording",
    "is_users",
    "operator_name",
    "record",
]


class _State(threading.local):
    """How many recordings are under way in a thread, one within the other."""

    depth = 0


_STATE = _State()


def is_recording() -> bool:
    """Whether this thread is recording a forward pass."""
    return _STATE.depth > 0


class Operand(NamedTuple):
    """A tensor that an operator is given and that depends on the input.

    Attributes
    ----------
    name : str
        The argument's in the operator's schema; ``tensors.0`` for the first element of a list.
    vertex : int
        The tensor's number.
    active : bool
        Whether autograd has a gradient of it.
    """

    name: str
    vertex: int
    active: bool


#: The same ones in each run: a tuple with names takes as long to make as what it is made of.
_operand = functools.lru_cache(maxsize=1 << 16)(Operand)


@dataclass(eq=False, slots=True)
class Invocation:
    """One call of an ATen operator.

    Attributes
    ----------
    overload : OpOverload or Overwrite
        As in ``torch.ops.aten.add.Tensor``.
    facts : Facts or None
        What is known of it; None of an Overwrite.
    arguments : dict
        By their names in the schema, elements of lists of tensors each by its own; defaults are left out.
    operands : list of Operand
        Those of the arguments that depend on the input.
    place : int
        Its number among the recording's.
    versions : dict of str to int
        Of the arguments that are tensors, after the call.
    sequence : int
        Number of autograd's node, if the call made one; -1 where that is not found again.
    module, code, line
        Which module ran it, and the line of the user's code: for messages.
    results : list of Tensor
        What it gave, or wrote to.
    result_versions : list of int
        Theirs, after the call.
    saved : dict of str or None to Tensor
        Copies of operands, by their names, and of the first result, by None, where the module wrote to them later and
        values are made of them.
    first : int
        Vertex of the first result; the others follow.
    hooked : bool
        Whether it stands for a module's backward hooks.
    writes : bool
        Whether it wrote to what it was given.
    """

    overload: Any
    facts: Facts | None
    arguments: dict[str, Any]
    operands: list[Operand]
    versions: dict[str, int]
    sequence: int
    module: nn.Module | None = None
    code: CodeType | None = None
    line: int = 0
    results: list[torch.Tensor] = field(default_factory=list)
    result_versions: list[int] = field(default_factory=list)
    saved: dict[str | None, torch.Tensor] = field(default_factory=dict)
    place: int = -1
    first: int = -1
    hooked: bool = False
    writes: bool = False

    @property
    def name(self) -> str:
        """The operator, as in ``aten.add``."""
        return operator_name(self.overload)

    def is_stale(self, name: str) -> bool:
        """Whether an argument does not hold any more what the operator was given: it, or a later one, wrote to it."""
        version = self.versions.get(name)
        if version is None:
            return False
        argument = self.arguments[name]
        return argument._version != version or (self.writes and any(argument is each for each in self.results))

    @property
    def source(self) -> str:
        """The line of code, as in `` at net.py, line 7``."""
        return "" if self.code is None else f" at {self.code.co_filename}, line {self.line}"


class Constant(NamedTuple):
    """A tensor that does not depend on the input.

    Attributes
    ----------
    tensor : Tensor
        Itself, so that its ``id`` is no other's meanwhile.
    overload, arguments
        The call that made it; None and empty where it was there before.
    externals : frozenset of int
        The external tensors that it is made of, by their places among them.
    drawn : bool
        Whether random numbers went into it.
    """

    tensor: torch.Tensor
    overload: Any
    arguments: dict[str, Any]
    externals: frozenset[int]
    drawn: bool


@dataclass(eq=False)
class Recording:
    """What a forward pass did.

    Attributes
    ----------
    module : Module
        What ran.
    input : Tensor
        What it was given: a copy of the caller's, with vertex 0.
    output : Tensor
        What it gave.
    last : Operand or None
        The output; None where it does not depend on the input.
    invocations : list of Invocation
        In the order in which they ran.
    edges : list of GradientEdge or None
        Of each vertex, where autograd takes its gradient; None for those that have none, or were never used.
    makers : list of Invocation or None
        Of each vertex, what made it.
    externals : list of Tensor
        The tensors made before the run that autograd has gradients of: parameters above all.
    constants : dict of int to Constant
        What does not depend on the input, by the ``id`` of the tensor.
    written : dict of int to Constant
        By memory, what was written to it without the input: the last call, and of all of them together what it is
        made of.
    draws : list of Module or None
        Which modules drew random numbers.
    hooks : int
        How many hooks PyTorch had given numbers before the run.
    """

    module: nn.Module
    input: torch.Tensor
    output: torch.Tensor = field(init=False)
    last: Operand | None = None
    invocations: list[Invocation] = field(default_factory=list)
    edges: list[GradientEdge | None] = field(default_factory=list)
    makers: list[Invocation | None] = field(default_factory=list)
    externals: list[torch.Tensor] = field(default_factory=list)
    constants: dict[int, Constant] = field(default_factory=dict)
    written: dict[int, Constant] = field(default_factory=dict)
    draws: list[nn.Module | None] = field(default_factory=list)
    hooks: int = field(default_factory=lambda: RemovableHandle.next_id)

    @property
    def may_have_hooks(self) -> bool:
        """Whether any hook was put anywhere since the run began: if none, none is on what the run made."""
        return self.hooks != RemovableHandle.next_id

    def externals_of(self, invocation: Invocation, through: Collection[str] = ()) -> set[int]:
        """The externals that an invocation reads, or what it reads is made of, but for some arguments; by place."""
        externals = self._constant_externals(invocation, through)
        for operand in invocation.operands:
            if operand.active and operand.name not in through:
                externals |= self._externals_of_vertices[operand.vertex]
        return externals

    def _constant_externals(self, invocation: Invocation, through: Collection[str] = ()) -> set[int]:
        externals: set[int] = set()
        for name in invocation.versions:
            if name not in through:
                for constant in self.constants_in(invocation.arguments[name]):
                    externals |= constant.externals
        return externals

    @functools.cached_property
    def _externals_of_vertices(self) -> list[set[int]]:
        """Of each vertex the externals that it is made of, as far as autograd has gradients of them."""
        of_vertices: list[set[int]] = [set()]
        for invocation in self.invocations:
            externals = self._constant_externals(invocation)
            externals.update(*(of_vertices[operand.vertex] for operand in invocation.operands if operand.active))
            of_vertices.extend([externals] * len(invocation.results))
        return of_vertices

    def made_of(self, tensor: torch.Tensor, others: Collection[int]) -> bool:
        """Whether a tensor that does not depend on the input is one of others, by ``id``, or is made of one."""
        waiting, seen = [tensor], set[int]()
        while waiting:
            each = waiting.pop()
            if id(each) in others:
                return True
            if id(each) not in seen:
                seen.add(id(each))
                for constant in self.constants_in(each):
                    waiting.extend(_tensors_of(list(constant.arguments.values())))
        return False

    def drawn(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor holds random numbers that were drawn in this run."""
        return any(constant.drawn for constant in self.constants_in(tensor))

    def constants_in(self, tensor: torch.Tensor) -> list[Constant]:
        """What is known of a tensor that does not depend on the input, and of what was written to its memory."""
        constant = self.constants.get(id(tensor))
        constants = [] if constant is None else [constant]
        # Most runs write to no such memory.
        if self.written and (written := self.written.get(_memory(tensor))) is not None:
            constants.append(written)
        return constants


def record(module: nn.Module, x: torch.Tensor, *, readable: bool = True) -> Recording:
    """Run a module on a batch, and note what it does.

    Parameters
    ----------
    module : Module
        Its forward pass runs once, with all that it changes and draws.
    x : Tensor, (batch, *input_shape)
        Not changed, whatever the module does to what it is given.
    readable : bool
        Whether Python may ask what a tensor holds, as a branch does: what is recorded then holds for this input alone.

    Raises
    ------
    UnsupportedOperatorError
        Where a derivative is not that of the operators, or a value is read that may not be.
    """
    with torch.enable_grad():
        # A copy, and no leaf: the module may write to it.
        given = x.detach().requires_grad_().clone()
        recorder = _Recorder(Recording(module, given), readable)
        _STATE.depth += 1
        try:
            with recorder, _uncompiled(), contextlib.nullcontext() if readable else _Unreadable(recorder):
                output = module(given)
            return recorder.finished(output)
        finally:
            _STATE.depth -= 1


def _uncompiled() -> contextlib.AbstractContextManager[object]:
    """Where what torch.compile was given runs as it is written, operator by operator."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


@dataclass(frozen=True, eq=False, slots=True)
class Facts:
    """What is known of an operator before it is called.

    Attributes
    ----------
    name : str
        As in ``aten.add``.
    rule : Rule or None
        Its rule.
    names : tuple of str
        Its parameters, in order.
    tensors, lists : tuple of str
        Those that are tensors, and those that are lists of tensors.
    written : tuple of str
        Those that it writes to.
    random : bool
        Whether it may draw random numbers.
    reads : bool
        Whether it tells Python what a tensor holds, or makes a tensor whose shape depends on that.
    of_shape : bool
        Whether what it gives depends on its operand's shape, not on its elements.
    reshapes : bool
        Whether it changes the shape of the very tensor that it is given.
    parts : callable or None
        How PyTorch makes it of other operators, where it has no rule.
    """

    name: str
    rule: Rule | None
    names: tuple[str, ...]
    tensors: tuple[str, ...]
    lists: tuple[str, ...]
    written: tuple[str, ...]
    random: bool
    reads: bool
    of_shape: bool
    reshapes: bool
    parts: Callable[..., Any] | None

    @property
    def saved(self) -> tuple[str, ...]:
        """What values are made of among its input and output, as its rule says."""
        return () if self.rule is None else self.rule.reads

    @property
    def exact(self) -> bool:
        """Whether its rule asks for floating-point numbers among its arguments, or there is none."""
        return self.rule is None or self.rule.reads_numbers

    @property
    def contents(self) -> bool:
        """Whether its rule asks what indices and masks hold."""
        return self.rule is not None and self.rule.reads_contents


#: By the operator's ``id``: operators live as long as the process, and hashing one takes longer than all else here.
_FACTS: dict[int, Facts] = {}


def _facts(overload: Any) -> Facts:
    known = _FACTS.get(id(overload))
    # A rule may have been registered since.
    if known is None or _RULES.get(known.name, known.rule) is not known.rule:
        known = _FACTS[id(overload)] = _found_out(overload)
    return known


def _found_out(overload: Any) -> Facts:
    parameters, tags, name = overload._schema.arguments, overload.tags, operator_name(overload)
    rule, random = rule_of(name), torch.Tag.nondeterministic_seeded in tags
    return Facts(
        name=name,
        rule=rule,
        names=tuple(parameter.name for parameter in parameters),
        tensors=tuple(parameter.name for parameter in parameters if _is_tensor(parameter.type)),
        lists=tuple(parameter.name for parameter in parameters if _is_list(parameter.type)),
        written=tuple(p.name for p in parameters if p.alias_info is not None and p.alias_info.is_write),
        random=random,
        reads=torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags,
        of_shape=name in _OF_SHAPE,
        reshapes=torch.Tag.inplace_view in tags,
        # What draws would draw twice.
        parts=_decomposition(overload) if rule is None and name not in CONSTANT and not random else None,
    )


def _is_tensor(kind: Any) -> bool:
    return isinstance(kind, torch.TensorType) or (
        isinstance(kind, torch.OptionalType) and _is_tensor(kind.getElementType())
    )


def _is_list(kind: Any) -> bool:
    if isinstance(kind, torch.OptionalType):
        return _is_list(kind.getElementType())
    return isinstance(kind, torch.ListType) and _is_tensor(kind.getElementType())


def _decomposition(overload: Any) -> Callable[..., Any] | None:
    if overload == torch.ops.aten.mkldnn_rnn_layer.default:
        return _lstm_layer
    if overload == torch.ops.aten.embedding.default:
        return _embedding
    if overload._can_decompose():
        # Reached within parts of another alone: autograd takes such an operator apart before it is seen here.
        return overload.decompose  # type: ignore[no-any-return]
    return torch._decomp.decomposition_table.get(overload)  # type: ignore[no-any-return]


def _lstm_layer(
    x: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor,
    b_hh: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    reverse: bool,
    *_: Any,
) -> list[torch.Tensor]:
    """A layer of an LSTM, ``(time, batch, features)``, which oneDNN computes as one operator."""
    gates, states = torch.nn.functional.linear(x, w_ih, b_ih), []
    for step in reversed(gates.unbind(0)) if reverse else gates.unbind(0):
        i, f, g, o = (step + torch.nn.functional.linear(h, w_hh, b_hh)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        states.append(h)
    return [torch.stack(states[::-1] if reverse else states), h, c]


def _embedding(
    weight: torch.Tensor, indices: torch.Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, *_: Any
) -> torch.Tensor:
    """Rows of a table that depends on the input."""
    if padding_idx >= 0 or scale_grad_by_freq:
        raise UnsupportedOperatorError(
            "aten.embedding: with padding_idx or scale_grad_by_freq the gradient of its table, which depends on the "
            "input, is not its derivative; leave them out"
        )
    return weight[indices]


_OF_SHAPE = {
    *(f"aten.{name}_like" for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")),
    *(f"aten.new_{name}" for name in ("empty", "empty_strided", "full", "ones", "zeros")),
}


@functools.cache
def operator_name(overload: Any) -> str:
    """An operator, as in ``aten.add``, whether it writes to its operand or not."""
    if isinstance(overload, Overwrite):
        return Overwrite.name
    name = overload._schema.name.replace("::", ".")
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in overload._schema.arguments)
    return name.removesuffix("_") if writes else name


class Overwrite:
    """An operator of our own: a tensor some of whose places were written to through another one of the same memory.

    Called on a tensor and the one that was written, it gives the first with the second's elements where they meet.

    Parameters
    ----------
    view, written : tuple of (size, stride, offset)
        Where the elements of the two are in memory.
    """

    name = "jacsparse.overwrite"

    def __init__(self, view: _Extent, written: _Extent) -> None:
        self.view, self.written = view, written

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Overwrite) and (self.view, self.written) == (other.view, other.written)

    def __hash__(self) -> int:
        return hash((self.view, self.written))

    @functools.cached_property
    def sources(self) -> torch.Tensor:
        """Of each element its place in the tensor that was written; -1 where it keeps its own."""
        return _sources(self.view, self.written)

    @property
    def meets(self) -> bool:
        """Whether the two have a place in common."""
        return _meets(self.view, self.written)

    def __call__(self, tensor: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        places = self.sources.to(tensor.device)
        if not written.numel():
            return tensor.clone()
        return torch.where(places < 0, tensor, written.flatten()[places.clamp_min(0)])


_Extent = tuple[torch.Size, tuple[int, ...], int]


def _sources(view: _Extent, written: _Extent) -> torch.Tensor:
    memory = torch.full((1 + max(_reach(*view), _reach(*written)),), -1, dtype=torch.int64)
    memory.as_strided(*written).copy_(torch.arange(written[0].numel()).reshape(written[0]))
    return memory.as_strided(*view).clone()


@functools.lru_cache(maxsize=1024)
def _meets(view: _Extent, written: _Extent) -> bool:
    if not view[0].numel() or not written[0].numel():
        return False
    (first, last), (begin, end) = ((each[2], _reach(*each)) for each in (view, written))
    # Places within one another may still be different ones, as those of two columns.
    return first <= end and begin <= last and (view == written or bool((_sources(view, written) >= 0).any()))


def _strided(tensor: torch.Tensor) -> _Extent:
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())


def _reach(size: torch.Size, stride: tuple[int, ...], offset: int) -> int:
    """The last place in memory of a strided tensor."""
    return offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True) if n)


class _Write(NamedTuple):
    """One write to memory: when, where, and the vertex of what was written."""

    time: int
    place: _Extent
    vertex: int
    tensor: torch.Tensor


class _Recorder(TorchDispatchMode):
    """Notes calls while it is active."""

    def __init__(self, recording: Recording, readable: bool) -> None:
        super().__init__()
        self.recording, self.readable = recording, readable
        given = recording.input
        # By the tensor's id: its vertex, and when it got that. Tensors are held by what is recorded of them.
        self.vertices: dict[int, tuple[int, int]] = {id(given): (0, 0)}
        self.makers = recording.makers
        self.makers.append(None)
        recording.edges.append(get_gradient_edge(given))
        # By memory: what was written to it; and which calls' values are made of what is in it.
        self.writes: dict[int, list[_Write]] = {}
        self.last_write = -1
        self.readers: dict[int, list[tuple[Invocation, str | None, torch.Tensor]]] = {}
        self.time = 0
        self.problem: Exception | None = None
        # Tensors that operators are made of that have no rule: autograd knows nothing of them.
        self.parts: dict[int, torch.Tensor] = {}
        self.in_parts = False
        # Autograd's nodes of this run have this number or a higher one.
        self.begin = _next_node()
        # What nothing else holds, so that no other tensor gets its id.
        self.alive: list[torch.Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here: PyTorch's wrapper against that takes longer than the rest.
        return False

    def __torch_dispatch__(self, overload: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Between the calls of small operators this is most of what a run costs: it is written for speed.
        vertices = self.vertices
        if overload is _DETACH and id(args[0]) in vertices:
            return self.detached(args[0])
        facts = _facts(overload)
        arguments: dict[str, Any] = dict(zip(facts.names, args, strict=False))
        if kwargs:
            arguments.update(kwargs)
        else:
            kwargs = {}
        # A number may stand for a tensor.
        tensors = {name: tensor for name in facts.tensors if isinstance(tensor := arguments.get(name), torch.Tensor)}
        if facts.lists:
            tensors |= _spread(facts.lists, arguments)
        if facts.random and _draws(overload, arguments):
            self.recording.draws.append(_place_of_call()[0])
        if not tensors and not facts.random:
            return overload(*args, **kwargs)
        self.time += 1
        operands: list[Operand] = []
        constants: list[torch.Tensor] = []
        for name, tensor in tensors.items():
            known = vertices.get(id(tensor))
            if known is None and not self.writes:
                constants.append(tensor)
            elif (operand := self.operand(name, tensor, known)) is not None:
                operands.append(operand)
            else:
                constants.append(tensor)
        if not operands or facts.of_shape:
            result = overload(*args, **kwargs)
            self.note_constants(overload, facts, arguments, tensors, constants, result)
            return result
        if facts.reads and not self.readable and _shows(overload, operands, tensors):
            raise self.reading(overload)
        sequence = -1 if self.in_parts else _latest_node()
        written: list[torch.Tensor] = []
        for name in _written_names(facts, tensors) if facts.written else ():
            tensor = tensors[name]
            written.append(tensor)
            if tensor._is_view():
                # Autograd's node is then one of the whole memory.
                sequence = -1
            if facts.reshapes:
                arguments[name] = self.keep_shape(tensor)
            elif sequence < 0 or _asks_for_overwritten(facts, arguments, operands, name):
                arguments[name] = tensor.clone()
            for reader, what, read in self.readers.pop(_memory(tensor), ()):
                reader.saved[what] = read.detach().clone()
        result = overload(*args, **kwargs)
        if (
            facts.parts is not None
            and (self.in_parts or any(operand.active for operand in operands))
            # These are refused under the operator's own name.
            and not any(tensor.is_complex() for tensor in _tensors_of(result))
        ):
            self.append_parts(facts.parts, args, kwargs, result)
            return result
        if written and not torch.is_grad_enabled() and all(id(tensor) in self.vertices for tensor in written):
            # To autograd it is what it was.
            return result
        versions = {name: tensor._version for name, tensor in tensors.items()}
        if written:
            # What is written to gets its next version once this returns.
            for name in tensors:
                versions[name] = arguments[name]._version + any(arguments[name] is each for each in written)
            self.check_writes(written)
        self.note_externals(constants)
        invocation = Invocation(overload, facts, arguments, operands, versions, sequence, *_place_of_call())
        self.append(invocation, _tensors_of(result), written)
        if self.in_parts and any(operand.active for operand in operands):
            self.parts.update((id(tensor), tensor) for tensor in invocation.results)
        if "output" in facts.saved:
            self.read_later(invocation, None, invocation.results[0])
        if "input" in facts.saved:
            for operand in operands:
                if operand.active:
                    self.read_later(invocation, operand.name, arguments[operand.name])
        return result

    def keep_shape(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor whose shape is about to change in place, which calls so far are given too."""
        copy, constants = tensor.detach().clone(), self.recording.constants
        if id(tensor) in constants:
            constants[id(copy)] = constants[id(tensor)]._replace(tensor=copy)
        for invocation in self.recording.invocations:
            names = [name for name in invocation.versions if invocation.arguments[name] is tensor]
            for name, stale in [(name, invocation.is_stale(name)) for name in names]:
                invocation.arguments[name], invocation.versions[name] = copy, -1 if stale else copy._version
            for number, result in enumerate(invocation.results):
                if result is tensor:
                    changed = tensor._version != invocation.result_versions[number]
                    invocation.results[number] = copy
                    invocation.result_versions[number] = -1 if changed else copy._version
        self.alive.append(tensor)
        return copy

    def read_later(self, invocation: Invocation, name: str | None, tensor: torch.Tensor) -> None:
        """Note that values are made of what a tensor holds now: a write is to save that for the invocation."""
        self.readers.setdefault(_memory(tensor), []).append((invocation, name, tensor))

    def detached(self, tensor: torch.Tensor) -> torch.Tensor:
        """What ``detach`` gives, as autograd itself calls it for what it saves: the same vertex, without a gradient."""
        result: torch.Tensor = _DETACH(tensor)
        self.alias(result, self.vertices[id(tensor)][0])
        return result

    def alias(self, tensor: torch.Tensor, vertex: int) -> None:
        """Note that a tensor is one that has a vertex, but for its gradient."""
        self.vertices[id(tensor)] = vertex, self.time
        self.alive.append(tensor)

    def append_parts(self, parts: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Record what an operator is made of, in its place."""
        outer, self.in_parts = self.in_parts, True
        try:
            with self:
                made = _tensors_of(parts(*args, **kwargs))
            for tensor in made:
                # What was written to its memory through others.
                self.dependence(tensor)
        finally:
            self.in_parts = outer
        for own, tensor in zip(made, _tensors_of(result), strict=False):
            if id(own) in self.vertices:
                self.parts[id(own)], self.parts[id(tensor)] = own, tensor
                self.vertices[id(tensor)] = self.vertices[id(own)]

    def append(self, invocation: Invocation, results: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """Give results their vertices."""
        recording, makers, vertices, time = self.recording, self.makers, self.vertices, self.time
        invocation.place, invocation.first = len(recording.invocations), len(makers)
        if written:
            invocation.writes, self.last_write = True, time
            results = [*results, *(each for each in written if not any(each is one for one in results))]
        invocation.results = results
        invocation.result_versions = [tensor._version for tensor in results]
        recording.invocations.append(invocation)
        for tensor in results:
            vertices[id(tensor)] = len(makers), time
            makers.append(invocation)
            recording.edges.append(None)
        for tensor in written:
            vertex, _ = self.vertices[id(tensor)]
            invocation.result_versions[vertex - invocation.first] += 1
            write = _Write(self.time, _strided(tensor), vertex, tensor)
            self.writes.setdefault(_memory(tensor), []).append(write)

    def operand(self, name: str, tensor: torch.Tensor, known: tuple[int, int] | None) -> Operand | None:
        """A tensor that has a vertex, or none, as an operand; None where it does not depend on the input."""
        if known is None:
            # Nothing is written to a leaf that has a gradient.
            if not self.writes or (tensor.requires_grad and tensor.is_leaf):
                return None
            known = self.overwritten(tensor, None)
            if known is None:
                return None
        elif known[1] < self.last_write:
            known = self.overwritten(tensor, known)
            assert known is not None
        vertex, _ = known
        return _operand(name, vertex, self.is_active(tensor, vertex))

    def dependence(self, tensor: torch.Tensor) -> Operand | None:
        """How a tensor that no operator is given depends on the input; None where it does not."""
        return self.operand("", tensor, self.vertices.get(id(tensor)))

    def overwritten(self, tensor: torch.Tensor, known: tuple[int, int] | None) -> tuple[int, int] | None:
        """The vertex of a tensor after what was written to its memory since it got the one that is known."""
        for write in self.writes.get(_memory(tensor), ()):
            if known is not None and write.time <= known[1]:
                continue
            # Autograd knows of no write through what was detached: what it changes is no derivative.
            seen = self.in_parts or _base(tensor) is _base(write.tensor)
            overload = Overwrite(_strided(tensor), write.place)
            if (known is not None and not seen) or not overload.meets:
                continue
            arguments = {"tensor": tensor, "written": write.tensor}
            operands = []
            if known is not None:
                operands.append(Operand("tensor", known[0], self.is_active(tensor, known[0])))
            operands.append(Operand("written", write.vertex, seen and self.is_active(write.tensor, write.vertex)))
            versions = {key: each._version for key, each in arguments.items()}
            self.append(Invocation(overload, None, arguments, operands, versions, -1, *_place_of_call()), [tensor], [])
            if self.in_parts and any(operand.active for operand in operands):
                self.parts[id(tensor)] = tensor
            known = self.vertices[id(tensor)][0], write.time
        if known is not None:
            self.vertices[id(tensor)] = known = known[0], self.time
        return known

    def is_active(self, tensor: torch.Tensor, vertex: int) -> bool:
        """Whether a derivative passes through a tensor that is used, as autograd has it or as a part of an operator."""
        if self.in_parts and not tensor.requires_grad:
            return id(tensor) in self.parts and (tensor.is_floating_point() or tensor.is_complex())
        return self.passes(tensor, vertex)

    def passes(self, tensor: torch.Tensor, vertex: int) -> bool:
        """Whether a derivative passes through a tensor that is used; where autograd takes its gradient is noted."""
        node = tensor.grad_fn
        if node is None:
            # Of a leaf that the module made autograd begins a graph of its own.
            return False
        edges = self.recording.edges
        # It may have become a torch.autograd.Function's since: by one that writes in place.
        if edges[vertex] is None or isinstance(node, BackwardCFunction):
            self.examine(node, self.makers[vertex])
        if edges[vertex] is None:
            edges[vertex] = GradientEdge(node, tensor.output_nr)
        return True

    def examine(self, node: Any, maker: Invocation | None) -> None:
        """Note the error where autograd's node of a tensor is not that of the operator that made it."""
        if maker is None:
            return
        if not isinstance(node, BackwardCFunction):
            number = node._sequence_nr()
            if maker.sequence == number + 1 and maker.writes:
                # Autograd made its node, and then a copy of what is overwritten, which has one too.
                maker.sequence = number
            if not any(o.active for o in maker.operands) and not any(
                maker.arguments[name].requires_grad for name in maker.versions
            ):
                # Its operand came to it by no operator that was seen, as what a lazy conjugate stands for.
                self.unseen_leaves(node, maker)
            if maker.sequence not in (-1, number) and self.problem is None:
                remedy = "write it with operators"
                if node.name() == "AsStridedBackward0":
                    remedy = "take the view after the write"
                self.problem = UnsupportedOperatorError(
                    f"{_where(maker)}: autograd's {node.name()} is not the derivative of {maker.name}{maker.source}; "
                    f"{remedy}"
                )
            return
        function = type(node)._forward_cls  # type: ignore[attr-defined]
        if issubclass(function, BackwardHookFunction):
            maker.hooked = True
        elif function.__module__ != "torch._library.autograd" and self.problem is None:
            remedy = "write it with operators, as x + (f(x) - x).detach(), or make it a custom operator with a rule"
            if function is CheckpointFunction:
                remedy = "pass use_reentrant=False to checkpoint"
            self.problem = UnsupportedOperatorError(
                f"{_where(maker)}: {function.__name__} is a torch.autograd.Function, whose derivative is its own"
                f"{maker.source}; {remedy}"
            )

    def unseen_leaves(self, node: Any, invocation: Invocation) -> list[torch.Tensor]:
        """The parameters that a node of this run leads to; the error is noted where it leads to the input as well."""
        start = self.recording.edges[0]
        assert start is not None
        leaves: list[torch.Tensor] = []
        waiting, seen = [node], set()
        while waiting:
            each = waiting.pop()
            if each is None or each in seen:
                continue
            seen.add(each)
            if hasattr(each, "variable"):
                leaves.append(each.variable)
            elif each is start.node or each._sequence_nr() < self.begin:
                own = isinstance(node, BackwardCFunction)
                name = type(node)._forward_cls.__name__ if own else node.name()  # type: ignore[attr-defined]
                what = (
                    "what depends on the input" if each is start.node else "what was made of parameters before the call"
                )
                self.problem = self.problem or UnsupportedOperatorError(
                    f"{_where(invocation)}: {name} works on {what} by no operator of PyTorch's{invocation.source}; "
                    "write it with operators, or make it a custom operator with a rule"
                )
            else:
                waiting.extend(behind for behind, _ in each.next_functions)
        return leaves

    def note_externals(self, constants: list[torch.Tensor]) -> None:
        """Note which tensors were there before the run where autograd has gradients of them."""
        recording = self.recording
        for tensor in constants:
            if not tensor.requires_grad:
                continue
            node = tensor.grad_fn
            known = bool(recording.constants_in(tensor))
            unseen = node is not None and (isinstance(node, BackwardCFunction) or not known)
            if unseen and node._sequence_nr() >= self.begin:  # type: ignore[union-attr]
                self.note_unseen(tensor, node)
            elif not known:
                self.place_of(tensor)

    def note_unseen(self, tensor: torch.Tensor, node: Any) -> None:
        """Of which parameters a tensor is made, by a Function that computes it in a way of its own."""
        leaves = self.unseen_leaves(node, _unrecorded())
        constant = self.recording.constants.get(id(tensor), Constant(tensor, None, {}, frozenset(), drawn=False))
        externals = frozenset(self.place_of(leaf) for leaf in leaves)
        self.recording.constants[id(tensor)] = constant._replace(externals=externals)

    def place_of(self, tensor: torch.Tensor) -> int:
        """The place of a tensor from before the run among the externals."""
        recording = self.recording
        known = recording.constants.get(id(tensor))
        if known is None:
            place = len(recording.externals)
            recording.externals.append(tensor)
            known = recording.constants[id(tensor)] = Constant(tensor, None, {}, frozenset((place,)), drawn=False)
        (place,) = known.externals
        return place

    def check_writes(self, written: list[torch.Tensor]) -> None:
        """Note the error where a tensor is written to that has a gradient from before the run."""
        for tensor in written if torch.is_grad_enabled() else ():
            constant = self.recording.constants.get(id(_base(tensor)))
            if constant is not None and constant.overload is None and self.problem is None:
                call = _unrecorded()
                self.problem = UnsupportedOperatorError(
                    f"{_where(call)}: a tensor that has a gradient from before the call is written to{call.source}; "
                    "write to a clone of it"
                )

    def note_constants(
        self,
        overload: Any,
        facts: Facts,
        arguments: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        own: list[torch.Tensor],
        result: Any,
    ) -> None:
        """What is made without the input: of which externals, and whether it was drawn."""
        recording, externals, drawn = self.recording, frozenset[int](), facts.random
        names = _written_names(facts, tensors) if facts.written else []
        self.note_externals(own)
        self.check_writes([tensors[name] for name in names])
        for tensor in tensors.values():
            for constant in recording.constants_in(tensor):
                externals, drawn = externals | constant.externals, drawn or constant.drawn
        externals = externals if torch.is_grad_enabled() else frozenset[int]()
        for tensor in _tensors_of(result):
            recording.constants[id(tensor)] = Constant(tensor, overload, arguments, externals, drawn)
        for name in names:
            tensor, before = tensors[name], recording.written.get(_memory(tensors[name]))
            if before is not None:
                externals, drawn = externals | before.externals, drawn or before.drawn
            recording.written[_memory(tensor)] = Constant(tensor, overload, arguments, externals, drawn)

    def reading(self, overload: Any) -> UnsupportedOperatorError:
        """The error where a value may not be read."""
        invocation = _unrecorded(overload)
        if overload is not None and torch.Tag.dynamic_output_shape in overload.tags:
            return UnsupportedOperatorError(
                f"{_where(invocation)}: a size depends on what a tensor holds{invocation.source}; take elements by "
                "their numbers, or keep the shape, with torch.where"
            )
        return UnsupportedOperatorError(
            f"{_where(invocation)}: its code asks what a tensor holds{invocation.source}, so that no pattern holds for "
            "all inputs; use torch.where in the place of a branch, or give the input"
        )

    def finished(self, output: Any) -> Recording:
        """The recording, once the module has given its output."""
        if not isinstance(output, torch.Tensor):
            raise UnsupportedOperatorError(
                f"{type(self.recording.module).__name__}: its output is a {type(output).__name__}; wrap it in a module "
                "that returns one tensor"
            )
        self.recording.output = output
        self.recording.last = self.dependence(output)
        if self.problem is not None:
            raise self.problem
        return self.recording


class _Unreadable(TorchFunctionMode):
    """Raises where Python asks what a tensor holds that depends on the input, in a way that no operator is called.

    ``.data`` calls none either: what it gives depends on the input as much.
    """

    READS = frozenset((torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__))
    DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self.READS and self.recorder.dependence(args[0]) is not None:
            raise self.recorder.reading(None)
        result = function(*args, **(kwargs or {}))
        if function is self.DATA and (operand := self.recorder.dependence(args[0])) is not None:
            self.recorder.alias(result, operand.vertex)
        return result


def _spread(lists: tuple[str, ...], arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The elements of a call's lists of tensors, which take the lists' places among its arguments."""
    tensors: dict[str, torch.Tensor] = {}
    for name in lists:
        for place, element in enumerate(arguments.pop(name, None) or ()):
            arguments[f"{name}.{place}"] = element
            if element is not None:
                tensors[f"{name}.{place}"] = element
    return tensors


def _written_names(facts: Facts, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Which of a call's tensors it writes to."""
    return [name for name in tensors if name.partition(".")[0] in facts.written]


def _asks_for_overwritten(facts: Facts, arguments: dict[str, Any], operands: list[Operand], written: str) -> bool:
    """Whether a derivative is made of what is overwritten, as that of a product by the other factor is."""
    if not is_pointwise(facts.name):
        # What moves elements asks for none; what is not an operator's own is found by running it once more.
        return facts.rule is not None and not facts.contents and any(o.active for o in operands)
    if not any(o.active and o.name != written for o in operands):
        return False
    return facts.name != "aten.add" or arguments.get("alpha", 1) != 1


def _shows(overload: Any, operands: list[Operand], tensors: dict[str, torch.Tensor]) -> bool:
    """Whether a call shows what an operand holds: not where elements are taken by a mask of constants."""
    by_mask = operator_name(overload) in ("aten.index", "aten.masked_select", "aten.repeat_interleave")
    return not by_mask or any(not tensors[operand.name].is_floating_point() for operand in operands)


def _draws(overload: Any, arguments: dict[str, Any]) -> bool:
    """Whether an operator that may draw random numbers does, and is not told to leave it."""
    parameters = {p.name: p.default_value for p in overload._schema.arguments}
    switches = parameters.keys() & {"train", "training", "p", "dropout_p"}
    return all(arguments.get(name, parameters[name]) for name in switches)


def _tensors_of(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [each for each in result if isinstance(each, torch.Tensor)] if isinstance(result, (list, tuple)) else []


_DETACH = torch.ops.aten.detach.default
_next_node = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]


def _latest_node() -> int:
    """The number of the node that autograd made last, in this thread."""
    return _next_node() - 1  # type: ignore[no-any-return]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _base(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor is a view of, as autograd sees it."""
    return tensor._base if tensor._base is not None else tensor


_CALL = nn.Module._call_impl.__code__
_FOREIGN = (Path(torch.__file__).parent, Path(__file__).parent.parent)


@functools.cache
def is_users(filename: str) -> bool:
    """Whether a file's code is the user's, neither PyTorch's nor this library's."""
    return not any(Path(filename).is_relative_to(folder) for folder in _FOREIGN)


def _place_of_call() -> tuple[nn.Module | None, CodeType | None, int]:
    """The module that is running, and the line of the user's code in it."""
    frame = sys._getframe(2)
    code, line = None, 0
    while frame is not None:
        if frame.f_code is _CALL:
            return frame.f_locals["self"], code, line
        if code is None and is_users(frame.f_code.co_filename):
            code, line = frame.f_code, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None, code, line


def _unrecorded(overload: Any = None) -> Invocation:
    """A call that is running and that no recording has: for messages."""
    return Invocation(overload, None, {}, [], {}, -1, *_place_of_call())


def _where(invocation: Invocation) -> str:
    """A module's class, as long as its path is not known."""
    return type(invocation.module).__name__
