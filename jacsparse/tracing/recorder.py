"""Record a module's forward pass: the ATen calls that it made, with the tensors of that run.

The module runs by itself, under a dispatch mode that sees every call below autograd. Each call on tensors that depend
on the input becomes an `Invocation`. Such tensors have numbers, called vertices; a write in place gives a tensor a new
vertex. Where a tensor is used, autograd's graph tells which node made it, and whether a derivative passes at all. So a
`torch.autograd.Function`, whose derivative replaces those of its operators, is seen as such.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from ..patterns import UnsupportedOperatorError, is_pointwise, requiring_gradient
from ..runtime import without_compiling
from .modules import name_of
from .operators import Facts, draws, facts_of, operator_name, with_memory
from .overwrite import Extent, Overwrite, extent_of
from .recording import (
    Constant,
    Invocation,
    Operand,
    Recording,
    base_of,
    memory_of,
    observing,
    operand_of,
    tensors_in,
)
from .saved_tensors import saves_by_hooks
from .selections import selection
from .sparse_products import is_sparse, operator_on_elements


def record(module: nn.Module, x: torch.Tensor, *, readable: bool = True, connected: bool = False) -> Recording:
    """Run a module on a batch, and record its calls.

    Parameters
    ----------
    module : Module
        Its forward pass runs once, with all that it changes and draws.
    x : Tensor, (batch, *input_shape)
        The module gets a copy, which it may overwrite.
    readable : bool
        Whether Python may read the elements of a tensor, as a branch does: the recording then holds for this input
        alone.
    connected : bool
        Whether autograd's graph of the run goes on to what `x` was computed from.

    Raises
    ------
    UnsupportedOperatorError
        Where a derivative is not that of the operators, or where elements are read although `readable` is False.
    """
    with torch.enable_grad():
        # No leaf, so that the module may write to it.
        copy = requiring_gradient(x if connected else x.detach()).clone()
        recorder = _Recorder(Recording(module, copy), readable)
        with observing(), contextlib.ExitStack() as contexts:
            contexts.enter_context(recorder)
            if "torch._dynamo" in sys.modules:
                # Functions given to torch.compile run as they are written, operator by operator.
                contexts.enter_context(without_compiling())
            if not readable:
                contexts.enter_context(_Unreadable(recorder))
            output = module(copy)
        return recorder.finished(output)


class _Write(NamedTuple):
    """One write to memory: its time and place, the tensor that was written to, and its vertex after the write."""

    time: int
    place: Extent
    vertex: int
    tensor: torch.Tensor


class _Recorder(TorchDispatchMode):
    """Records calls while it is active."""

    def __init__(self, recording: Recording, readable: bool) -> None:
        super().__init__()
        self.recording, self.readable = recording, readable
        # By a tensor's id: its vertex, and the time at which it got that. The recording holds these tensors.
        self.vertices: dict[int, tuple[int, int]] = {id(recording.input): (0, 0)}
        self.makers = recording.makers
        self.makers.append(None)
        recording.edges.append(get_gradient_edge(recording.input))
        # By memory: writes to it; and the calls whose Jacobians depend on a tensor in it, with the operand's name, or
        # None for the first result.
        self.writes: dict[int, list[_Write]] = {}
        self.last_write = -1
        self.readers: dict[int, list[tuple[Invocation, str | None, torch.Tensor]]] = {}
        self.time = 0
        self.problem: Exception | None = None
        # Tensors within decomposed operators, for which autograd has no nodes, and the results of those operators.
        self.parts: dict[int, torch.Tensor] = {}
        self.in_parts = False
        # Autograd's nodes of this run have this number or a higher one.
        self.begin = _next_node()
        # Tensors that nothing else holds, so that no other tensor gets their ids.
        self.alive: list[torch.Tensor] = []
        # Memory that this run has made, by its calls and constants up to these numbers.
        self.fresh = {memory_of(recording.input)}
        self.fresh_from = 0, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and PyTorch's wrapper against compilation is slow.
        return False

    def __torch_dispatch__(self, overload: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Written for speed: with small operators this method is most of a run's cost.
        vertices = self.vertices
        if overload is _DETACH and id(args[0]) in vertices:
            # Autograd calls it on the tensors that it saves.
            result = _DETACH(args[0])
            self.alias(result, vertices[id(args[0])][0])
            return result
        facts = facts_of(overload)
        arguments: dict[str, Any] = dict(zip(facts.names, args, strict=False))
        if kwargs:
            arguments.update(kwargs)
        else:
            kwargs = {}
        # An argument that the schema calls a tensor may be a number.
        tensors = {name: tensor for name in facts.tensors if isinstance(tensor := arguments.get(name), torch.Tensor)}
        if facts.lists:
            tensors |= _spread(facts.lists, arguments)
        if facts.random and draws(overload, arguments):
            self.recording.draws.append(_place_of_call()[0])
        if not tensors and not facts.random:
            result = with_memory(overload)(*args, **kwargs)
            self.fresh.update(map(memory_of, tensors_in(result)))
            return result
        self.time += 1
        if not self.recording.saved_by_hooks and saves_by_hooks():
            self.recording.saved_by_hooks = True
        operands: list[Operand] = []
        constants: list[torch.Tensor] = []
        for name, tensor in tensors.items():
            entry = vertices.get(id(tensor))
            operand = None if entry is None and not self.writes else self.operand(name, tensor, entry)
            if operand is None:
                constants.append(tensor)
            else:
                operands.append(operand)
        if not operands or facts.of_shape:
            result = overload(*args, **kwargs)
            self.note_constants(overload, facts, arguments, tensors, constants, result)
            return result
        parts = facts.parts
        if any(map(is_sparse, tensors.values())):
            parts = operator_on_elements(overload, args)
        elif facts.contents and any(not tensors[operand.name].is_floating_point() for operand in operands):
            parts = selection(overload, args)
        elif facts.weighted is not None and any(o.active and o.name in ("weight", "bias") for o in operands):
            parts = facts.weighted
        if facts.reads and not self.readable and _shows(overload, operands, tensors):
            raise self.read_error(overload)
        # The number of the node that autograd made last, in this thread.
        sequence = -1 if self.in_parts else _next_node() - 1
        written: list[torch.Tensor] = []
        for name in _written_names(facts, tensors) if facts.written else ():
            tensor = tensors[name]
            written.append(tensor)
            if tensor._is_view():
                # Autograd's node is then of the view's base.
                sequence = -1
            if facts.reshapes:
                arguments[name] = self.keep_shape(tensor)
            elif sequence < 0 or _asks_for_overwritten(facts, arguments, operands, name):
                arguments[name] = tensor.clone()
            for reader, argument, operand_read in self.readers.pop(memory_of(tensor), ()):
                reader.saved[argument] = operand_read.detach().clone()
        result = overload(*args, **kwargs)
        if (
            parts is not None
            and (self.in_parts or any(operand.active for operand in operands))
            # Complex results are refused under the operator's own name.
            and not any(tensor.is_complex() for tensor in tensors_in(result))
        ):
            self.append_parts(parts, args, kwargs, result)
            self.fresh.update(_new_memory(tensors.values(), tensors_in(result)))
            return result
        if written and not torch.is_grad_enabled() and all(id(tensor) in self.vertices for tensor in written):
            # Autograd does not see this write.
            return result
        versions = {name: tensor._version for name, tensor in tensors.items()}
        if written:
            # A tensor gets its next version after this method returns.
            for name in tensors:
                versions[name] = arguments[name]._version + any(arguments[name] is tensor for tensor in written)
            self.check_writes(written)
        self.note_externals(constants)
        invocation = Invocation(overload, facts, arguments, operands, versions, sequence, *_place_of_call())
        self.append(invocation, tensors_in(result), written)
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
        """Copy a tensor before its shape changes in place, and let the recorded calls have the copy."""
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
        """Let the next write to a tensor's memory save a copy of it for an invocation, whose Jacobian depends on it."""
        self.readers.setdefault(memory_of(tensor), []).append((invocation, name, tensor))

    def alias(self, tensor: torch.Tensor, vertex: int) -> None:
        """Give a tensor without a gradient the vertex of another tensor with the same elements."""
        self.vertices[id(tensor)] = vertex, self.time
        self.alive.append(tensor)

    def append_parts(self, parts: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Record the operators of a decomposition instead of the operator."""
        outer, self.in_parts, constants = self.in_parts, True, self.recording.constants
        try:
            with self:
                copies = tensors_in(parts(*args, **kwargs))
            for copy in copies:
                # Records writes to its memory through other tensors.
                self.dependence(copy)
        finally:
            self.in_parts = outer
        for copy, tensor in zip(copies, tensors_in(result), strict=False):
            if id(copy) in self.vertices:
                self.parts[id(copy)], self.parts[id(tensor)] = copy, tensor
                self.vertices[id(tensor)] = self.vertices[id(copy)]
            elif id(copy) in constants:
                constants[id(tensor)] = constants[id(copy)]._replace(tensor=tensor)

    def append(self, invocation: Invocation, results: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """Add an invocation to the recording, and give its results their vertices."""
        recording, makers, vertices, time = self.recording, self.makers, self.vertices, self.time
        invocation.place, invocation.first = len(recording.invocations), len(makers)
        if written:
            invocation.writes, self.last_write = True, time
            results = [*results, *(w for w in written if not any(w is result for result in results))]
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
            write = _Write(self.time, extent_of(tensor), vertex, tensor)
            self.writes.setdefault(memory_of(tensor), []).append(write)

    def operand(self, name: str, tensor: torch.Tensor, entry: tuple[int, int] | None) -> Operand | None:
        """A tensor with its entry in `vertices`, if any, as an operand; None where it does not depend on the input."""
        if entry is None:
            # No write changes a leaf that has a gradient.
            if not self.writes or (tensor.requires_grad and tensor.is_leaf):
                return None
            entry = self.overwritten(tensor, None)
            if entry is None:
                return None
        elif entry[1] < self.last_write:
            entry = self.overwritten(tensor, entry)
            assert entry is not None
        vertex, _ = entry
        return operand_of(name, vertex, self.is_active(tensor, vertex))

    def dependence(self, tensor: torch.Tensor) -> Operand | None:
        """A tensor that is no operator's argument, as an operand; None where it does not depend on the input."""
        return self.operand("", tensor, self.vertices.get(id(tensor)))

    def overwritten(self, tensor: torch.Tensor, entry: tuple[int, int] | None) -> tuple[int, int] | None:
        """The entry of a tensor in `vertices` after the writes to its memory since the former entry, if any."""
        for write in self.writes.get(memory_of(tensor), ()):
            if entry is not None and write.time <= entry[1]:
                continue
            # Autograd does not see a write through a detached tensor: no derivative changes.
            seen = self.in_parts or base_of(tensor) is base_of(write.tensor)
            overload = Overwrite(extent_of(tensor), write.place)
            if (entry is not None and not seen) or not overload.meets:
                continue
            arguments = {"tensor": tensor, "written": write.tensor}
            operands = []
            if entry is not None:
                operands.append(Operand("tensor", entry[0], self.is_active(tensor, entry[0])))
            operands.append(Operand("written", write.vertex, seen and self.is_active(write.tensor, write.vertex)))
            versions = {name: argument._version for name, argument in arguments.items()}
            self.append(Invocation(overload, None, arguments, operands, versions, -1, *_place_of_call()), [tensor], [])
            if self.in_parts and any(operand.active for operand in operands):
                self.parts[id(tensor)] = tensor
            entry = self.vertices[id(tensor)][0], write.time
        if entry is not None:
            self.vertices[id(tensor)] = entry = entry[0], self.time
        return entry

    def is_active(self, tensor: torch.Tensor, vertex: int) -> bool:
        """Whether a derivative passes through a tensor that is used; the place of its gradient is recorded."""
        if self.in_parts and not tensor.requires_grad:
            return id(tensor) in self.parts and (tensor.is_floating_point() or tensor.is_complex())
        node = tensor.grad_fn
        if node is None:
            # A leaf that the module made begins a graph of its own.
            return False
        edges = self.recording.edges
        # A write in place may have made it the result of a torch.autograd.Function since.
        if edges[vertex] is None or isinstance(node, BackwardCFunction):
            self.examine(node, self.makers[vertex])
        if edges[vertex] is None:
            edges[vertex] = GradientEdge(node, tensor.output_nr)
        return True

    def examine(self, node: Any, maker: Invocation | None) -> None:
        """Set the error where autograd's node of a tensor is not that of the operator that made it."""
        if maker is None:
            return
        if not isinstance(node, BackwardCFunction):
            number = node._sequence_nr()
            if maker.sequence == number + 1 and maker.writes:
                # Autograd made this node first, and then that of a copy of the overwritten tensor.
                maker.sequence = number
            if not any(o.active for o in maker.operands) and not any(
                maker.arguments[name].requires_grad for name in maker.versions
            ):
                # No operator was seen that made its operand, as where that is a lazy conjugate.
                self.unseen_leaves(node, maker)
            if maker.sequence not in (-1, number):
                is_view = node.name() == "AsStridedBackward0"
                remedy = "take the view after the write" if is_view else "write it with operators"
                self.refuse(maker, f"autograd's {node.name()} is not the derivative of {maker.name}", remedy)
            return
        function = type(node)._forward_cls  # type: ignore[attr-defined]
        if issubclass(function, BackwardHookFunction):
            maker.hooked = True
        elif function.__module__ != "torch._library.autograd":
            remedy = "write it with operators, as x + (f(x) - x).detach(), or make it a custom operator with a rule"
            if function is CheckpointFunction:
                remedy = "pass use_reentrant=False to checkpoint"
            what = f"{function.__name__} is a torch.autograd.Function, whose derivative is its own"
            self.refuse(maker, what, remedy)

    def refuse(self, invocation: Invocation, what: str, remedy: str) -> None:
        """Set the error that the recording ends with, unless one is set."""
        self.problem = self.problem or self.unsupported(invocation, what, remedy)

    def unsupported(self, invocation: Invocation, what: str, remedy: str) -> UnsupportedOperatorError:
        """An error that names the calling module or function; the path of a module is not looked up during the run."""
        name = name_of(invocation.module or self.recording.module)
        return UnsupportedOperatorError(f"{name}: {what}{invocation.source}; {remedy}")

    def read_error(self, overload: Any) -> UnsupportedOperatorError:
        """The error where elements are read that may not be."""
        invocation = _unrecorded()
        if overload is not None and torch.Tag.dynamic_output_shape in overload.tags:
            remedy = "take elements by their numbers, or keep the shape, with torch.where"
            return self.unsupported(invocation, "a size depends on what a tensor holds", remedy)
        remedy = "no pattern holds for all inputs: use torch.where in the place of a branch, or give the input"
        return self.unsupported(invocation, "its code asks what a tensor holds", remedy)

    def unseen_leaves(self, node: Any, invocation: Invocation) -> list[torch.Tensor]:
        """The parameters that a node of this run leads to; the error is set where it leads to the input as well."""
        start = self.recording.edges[0]
        assert start is not None
        leaves: list[torch.Tensor] = []
        waiting, seen = [node], set()
        while waiting:
            reached = waiting.pop()
            if reached is None or reached in seen:
                continue
            seen.add(reached)
            if hasattr(reached, "variable"):
                leaves.append(reached.variable)
            elif reached is start.node or reached._sequence_nr() < self.begin:
                is_function = isinstance(node, BackwardCFunction)
                name = type(node)._forward_cls.__name__ if is_function else node.name()  # type: ignore[attr-defined]
                what = "what depends on the input"
                if reached is not start.node:
                    what = "what was made of parameters before the call"
                remedy = "write it with operators, or make it a custom operator with a rule"
                self.refuse(invocation, f"{name} works on {what} by no operator of PyTorch's", remedy)
            else:
                waiting.extend(behind for behind, _ in reached.next_functions)
        return leaves

    def note_externals(self, constants: list[torch.Tensor]) -> None:
        """Record which tensors are from before the run and have gradients."""
        recording = self.recording
        for tensor in constants:
            if not tensor.requires_grad:
                continue
            node = tensor.grad_fn
            recorded = bool(recording.constants_in(tensor))
            unseen = node is not None and (isinstance(node, BackwardCFunction) or not recorded)
            if unseen and node._sequence_nr() >= self.begin:  # type: ignore[union-attr]
                # A Function computes it from parameters, by no operator that was seen.
                leaves = self.unseen_leaves(node, _unrecorded())
                constant = recording.constants.get(id(tensor), Constant(tensor, None, {}, frozenset(), drawn=False))
                externals = frozenset(self.place_of(leaf) for leaf in leaves)
                recording.constants[id(tensor)] = constant._replace(externals=externals)
            elif not recorded:
                self.place_of(tensor)

    def place_of(self, tensor: torch.Tensor) -> int:
        """The place of a tensor from before the run among the externals."""
        recording = self.recording
        constant = recording.constants.get(id(tensor))
        if constant is None:
            place = len(recording.externals)
            recording.externals.append(tensor)
            constant = recording.constants[id(tensor)] = Constant(tensor, None, {}, frozenset((place,)), drawn=False)
        (place,) = constant.externals
        return place

    def is_fresh(self, tensor: torch.Tensor) -> bool:
        """Whether this run has made the memory that a tensor lies in."""
        calls, constants = self.recording.invocations, self.recording.constants
        first_call, first_constant = self.fresh_from
        for call in calls[first_call:]:
            self.fresh |= _new_memory((call.arguments[name] for name in call.versions), call.results)
        for constant in itertools.islice(constants.values(), first_constant, None):
            if constant.overload is _LIFTED:
                # What torch.tensor makes.
                self.fresh.add(memory_of(constant.tensor))
            elif constant.overload is not None:
                self.fresh |= _new_memory(tensors_in(list(constant.arguments.values())), [constant.tensor])
        self.fresh_from = len(calls), len(constants)
        return memory_of(tensor) in self.fresh

    def check_writes(self, written: list[torch.Tensor]) -> None:
        """Record writes to tensors from before the run; set the error where one of them has a gradient."""
        if not self.recording.writes_outside:
            self.recording.writes_outside = not all(map(self.is_fresh, written))
        for tensor in written if torch.is_grad_enabled() else ():
            constant = self.recording.constants.get(id(base_of(tensor)))
            if constant is not None and constant.overload is None:
                what = "a tensor that has a gradient from before the call is written to"
                self.refuse(_unrecorded(), what, "write to a clone of it")

    def note_constants(
        self,
        overload: Any,
        facts: Facts,
        arguments: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        constants: list[torch.Tensor],
        result: Any,
    ) -> None:
        """Record a call that does not depend on the input: its externals, and whether it was drawn."""
        recording, externals, drawn = self.recording, frozenset[int](), facts.random
        names = _written_names(facts, tensors) if facts.written else []
        self.note_externals(constants)
        self.check_writes([tensors[name] for name in names])
        for tensor in tensors.values():
            for constant in recording.constants_in(tensor):
                externals, drawn = externals | constant.externals, drawn or constant.drawn
        externals = externals if torch.is_grad_enabled() else frozenset[int]()
        for tensor in tensors_in(result):
            recording.constants[id(tensor)] = Constant(tensor, overload, arguments, externals, drawn)
        for name in names:
            tensor, before = tensors[name], recording.written.get(memory_of(tensors[name]))
            if before is not None:
                externals, drawn = externals | before.externals, drawn or before.drawn
            recording.written[memory_of(tensor)] = Constant(tensor, overload, arguments, externals, drawn)

    def finished(self, output: Any) -> Recording:
        """The recording, after the module has returned its output."""
        if not isinstance(output, torch.Tensor):
            raise UnsupportedOperatorError(
                f"{name_of(self.recording.module)}: its output is a {type(output).__name__}; wrap it in a module "
                "that returns one tensor"
            )
        self.recording.output = output
        self.recording.last = self.dependence(output)
        if self.problem is not None:
            raise self.problem
        return self.recording


class _Unreadable(TorchFunctionMode):
    """Raises where Python reads the elements of a tensor that depends on the input, without a call of an operator.

    ``.data`` calls none either: its result is recorded as dependent on the input.
    """

    READS = frozenset((torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__))
    DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self.READS and self.recorder.dependence(args[0]) is not None:
            raise self.recorder.read_error(None)
        result = function(*args, **(kwargs or {}))
        if function is self.DATA and (operand := self.recorder.dependence(args[0])) is not None:
            self.recorder.alias(result, operand.vertex)
        return result


def _new_memory(inputs: Iterable[torch.Tensor], results: Iterable[torch.Tensor]) -> set[int]:
    """The memory of a call's results that is none of its inputs'."""
    return set(map(memory_of, results)) - set(map(memory_of, inputs))


def _spread(lists: tuple[str, ...], arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Replace the lists of tensors among a call's arguments by their elements, and return those that are tensors."""
    tensors: dict[str, torch.Tensor] = {}
    for name in lists:
        for place, element in enumerate(arguments.pop(name, None) or ()):
            arguments[f"{name}.{place}"] = element
            if element is not None:
                tensors[f"{name}.{place}"] = element
    return tensors


def _written_names(facts: Facts, tensors: dict[str, torch.Tensor]) -> list[str]:
    """The names of the tensors that a call writes to."""
    return [name for name in tensors if name.partition(".")[0] in facts.written]


def _asks_for_overwritten(facts: Facts, arguments: dict[str, Any], operands: list[Operand], written: str) -> bool:
    """Whether a derivative depends on overwritten elements, as that of a product by its other factor does."""
    if not is_pointwise(facts.name):
        # An operator that moves elements needs none; other derivatives run the operator once more.
        return facts.rule is not None and not facts.contents and any(o.active for o in operands)
    if not any(o.active and o.name != written for o in operands):
        return False
    return facts.name != "aten.add" or arguments.get("alpha", 1) != 1


def _shows(overload: Any, operands: list[Operand], tensors: dict[str, torch.Tensor]) -> bool:
    """Whether a call shows an operand's elements: it does not where a constant mask selects them."""
    name = operator_name(overload)
    kinds = [tensors[operand.name].dtype for operand in operands]
    if name == "aten.index":
        # Elements are selected by a mask or by numbers, and as many as there are numbers.
        return torch.bool in kinds or torch.uint8 in kinds
    by_mask = name in ("aten.masked_select", "aten.repeat_interleave")
    return not by_mask or not all(kind.is_floating_point for kind in kinds)


_DETACH = torch.ops.aten.detach.default
_LIFTED = torch.ops.aten.lift_fresh.default

_next_node = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]

_CALL = nn.Module._call_impl.__code__


def _folders(package: str) -> list[str]:
    spec = find_spec(package)
    return [] if spec is None else list(spec.submodule_search_locations or [])


_LIBRARY = __name__.partition(".")[0]
#: The folders of PyTorch and of this library, some of whose packages lie beside the others in a checkout; and the file
#: of contexts that decorate its functions.
_FOREIGN = (
    Path(contextlib.__file__),
    Path(torch.__file__).parent,
    Path(__file__).parent.parent,
    *(Path(folder) for name in ("patterns", "spgemm", "models") for folder in _folders(f"{_LIBRARY}.{name}")),
)


@functools.cache
def is_users(filename: str) -> bool:
    """Whether a file's code is the user's, neither PyTorch's nor this library's."""
    return not any(Path(filename).is_relative_to(folder) for folder in _FOREIGN)


def _place_of_call() -> tuple[nn.Module | None, CodeType | None, int]:
    """The module that runs, and the line of the user's code in it."""
    frame = sys._getframe(2)
    code, line = None, 0
    while frame is not None:
        if frame.f_code is _CALL:
            return frame.f_locals["self"], code, line
        if code is None and is_users(frame.f_code.co_filename):
            code, line = frame.f_code, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None, code, line


def _unrecorded() -> Invocation:
    """A call that runs and is in no recording, for messages."""
    return Invocation(None, None, {}, [], {}, -1, *_place_of_call())
