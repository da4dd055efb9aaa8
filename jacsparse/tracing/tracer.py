"""Traces a function: runs it under a dispatch mode that sees each ATen call below autograd.

While the calls are those of a graph that an earlier run has made, the tracer only takes the run's tensors. At the first
other call it goes on with another graph that begins with the same calls, or adds to a copy of that beginning. So a
function runs once, and what is known of its calls is known of this very run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..decompositions import is_sparse, operator_on_elements, selection
from ..patterns import UnsupportedOperatorError
from ..runtime import DispatchMode, a_type
from .callers import caller
from .derivatives_seen import SeenDerivatives, next_node, untraced
from .following import Followed
from .graph import Graph, Info, Node, Operand, Value, captured_form, kind_of, name_modules, tensors_in, with_written
from .memory import Memory, Write
from .modules import name_of
from .operators import OVERWRITES, Facts, draws, facts_of, named_tensors, shows, with_memory, written_tensors
from .overwrite import Overwrite, extent_of
from .saved_tensors import saves_by_hooks, versions_of
from .traces import Trace, base_of, memory_of

aten = torch.ops.aten


class Tracer(DispatchMode):
    """Traces the calls while it is active, into a trace that has the input alone and may have one of some graphs.

    Calls may show elements where it is `readable`.
    """

    def __init__(self, trace: Trace, graphs: Sequence[Graph], readable: bool) -> None:
        super().__init__()
        self.trace, self.readable = trace, readable
        #: By a tensor's id; the trace holds these tensors, and `alive` the others.
        self.numbers: dict[int, int] = {id(trace.input): 0}
        self.alive: list[torch.Tensor] = []
        self.memory = Memory(trace, self.numbers)
        #: The calls that take the place of an operator's, while it is decomposed.
        self.parts: list[Node] | None = None
        self.derivatives = SeenDerivatives(trace)
        trace.note_gradient_edge(0)
        form, dtype = trace.graph.input, trace.graph.default_dtype
        alike = [graph for graph in graphs if graph.input == form and graph.default_dtype is dtype]
        # None of these refers to the tracer: the trace is to end when nobody needs it, not later.
        self.followed = Followed(trace, self.memory, self.derivatives, alike)

    def __torch_dispatch__(self, overload: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Written for speed: with small operators this method is most of a run's cost.
        if overload is _DETACH and id(args[0]) in self.numbers:
            # Autograd calls it on the tensors that it saves.
            return self.alias(_DETACH(args[0]), args[0])
        kwargs = kwargs or {}
        if args and type(args[0]) in _OF_PROFILER:
            return overload(*args, **kwargs)
        # Of autograd's node of this call, before a look at the node of a view makes that anew.
        sequence = next_node() - 1
        if self.memory.writes:
            for tensor in tensors_in((*args, *kwargs.values())):
                self.refresh(tensor)
        if not self.trace.saved_by_hooks and saves_by_hooks():
            self.trace.saved_by_hooks = True
        node = self.followed.next(overload, args, kwargs)
        if node is not None:
            return self.repeat(node, args, kwargs, sequence)
        return self.add(with_memory(overload), args, kwargs, sequence)

    # What the two ways have in common.

    def alias(self, result: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Give a tensor without a gradient the value of another tensor with the same elements."""
        self.memory.same_elements(result, tensor)
        self.alive.append(result)
        return result

    def bind(
        self,
        number: int,
        tensor: torch.Tensor,
        *,
        written: bool = False,
        viewed: torch.Tensor | None = None,
    ) -> None:
        """Take a tensor for a value."""
        trace = self.trace
        trace.tensors[number] = tensor
        self.numbers[id(tensor)] = number
        if trace.graph.infos[number].fixed:
            self.memory.note_fixed(number, tensor)
        if self.followed.active and not trace.graph.writes:
            return
        self.memory.hold(number, tensor, written=written, viewed=viewed)

    def bind_results(
        self,
        node: Node,
        results: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        viewed: torch.Tensor | None,
    ) -> None:
        """Take tensors for the results of a call."""
        for number, tensor in zip(node.results, results, strict=True):
            self.bind(number, tensor, written=any(tensor is each for each in written), viewed=viewed)
        for tensor in written:
            self.memory.note_write(tensor, node.seen or self.parts is not None)

    def refresh(self, tensor: torch.Tensor) -> None:
        """Give a tensor a new value where others were written to that share its memory."""
        for write in self.memory.take_writes(tensor):
            overload = Overwrite(extent_of(tensor), write.place)
            if overload.meets:
                self.overwrite(overload, tensor, write)

    def overwrite(self, overload: Overwrite, tensor: torch.Tensor, write: Write) -> None:
        """Give a tensor the value that it has after a write to another one."""
        in_parts = self.parts is not None
        seen = in_parts or (write.seen and base_of(tensor) is base_of(write.tensor))
        written = Value(write.value)
        node = self.followed.next(overload, (tensor, written), {}, seen=seen)
        if node is not None:
            self.followed.take(node, self.bind, -1)
            self.bind(node.results[0], tensor)
            return
        self.followed.leave()
        infos = self.trace.graph.infos
        begin = len(infos), self.trace.graph.scalars
        value = self.numbers[id(tensor)] if id(tensor) in self.numbers else self.capture(tensor)
        operands = []
        if infos[value].dependent:
            operands.append(Operand("tensor", value, self.derivatives.is_active(tensor, value, in_parts=in_parts)))
        if infos[write.value].dependent:
            active = seen and self.derivatives.is_active(write.tensor, write.value, in_parts=in_parts)
            operands.append(Operand("written", write.value, active))
        arguments = {"tensor": Value(value), "written": written}
        args, kinds = tuple(arguments.values()), (kind_of(tensor),)
        node = Node(overload, OVERWRITES, args, {}, arguments, tuple(operands), kinds, seen, begin=begin)
        node.shift, (node.module, node.file, node.line) = None, caller()
        self.append(node, [tensor], (), dependent=bool(operands))

    # A call that is the next one of a graph.

    def repeat(self, node: Node, args: Any, kwargs: Any, sequence: int) -> Any:
        """Run a call that is the next one of the graph, and take its results."""
        if node.sizes is not None:
            # How large they are depends on what a tensor holds; none of these calls writes.
            result = node.overload(*args, **kwargs)
            sizes = [tensor.shape for tensor in tensors_in(result)]
            if sizes != node.sizes:
                other = self.followed.next(node.overload, args, kwargs, sizes=sizes)
                if other is None:
                    return self.add(node.overload, args, kwargs, sequence, lambda: result)
                node = other
        self.followed.take(node, self.bind, sequence)
        written = written_tensors(node.facts, args, kwargs) if node.writes else ()
        for tensor in written:
            self.memory.preserve(tensor, node)
        if node.sizes is None:
            result = node.overload(*args, **kwargs)
        trace = self.trace
        if not trace.graph.writes and type(result) is torch.Tensor:
            # As `bind`, without a call.
            (number,) = node.results
            trace.tensors[number], self.numbers[id(result)] = result, number
            if trace.graph.infos[number].fixed:
                self.memory.note_fixed(number, result)
            return result
        name = node.facts.viewed if trace.graph.writes else None
        viewed = None if name is None else dict(named_tensors(node.facts, args, kwargs)).get(name)
        self.bind_results(node, with_written(result, written), written, viewed)
        return result

    # A call that no graph has.

    def add(
        self,
        overload: Any,
        args: Any,
        kwargs: dict[str, Any],
        sequence: int,
        run: Callable[[], Any] | None = None,
    ) -> Any:
        """Run a call, and add it to the graph."""
        self.followed.leave()
        graph, facts, derivatives = self.trace.graph, facts_of(overload), self.derivatives
        begin = len(graph.infos), graph.scalars
        tensors = dict(named_tensors(facts, args, kwargs))
        numbers = {name: self.number_of(tensor) for name, tensor in tensors.items()}
        operands = tuple(
            Operand(name, number, derivatives.is_active(tensors[name], number, in_parts=self.parts is not None))
            for name, number in numbers.items()
            if graph.infos[number].dependent
        )
        depends = bool(operands) and not facts.of_shape
        parts = self.parts_of(overload, facts, args, tensors, operands) if depends else None
        reads = facts.reads and depends and not self.readable
        if reads and shows(overload, [tensors[operand.name].dtype for operand in operands]):
            raise derivatives.read_error(overload)
        # What takes the place of a call is made for its numbers.
        varies = parts is None and self.parts is None
        free = not (depends and facts.exact)
        node, scalars = graph.new_node(overload, facts, args, kwargs, self.numbers, varies=varies, free=free)
        self.trace.scalars += scalars
        node.operands, node.begin = operands if depends else (), begin
        node.fixed = tuple([number for number in numbers.values() if graph.infos[number].fixed])
        node.module, node.file, node.line = caller()
        node.draws = facts.random and draws(overload, node.arguments)
        if facts.contents:
            node.contents = {
                name: tensor.detach().clone()
                for name, tensor in tensors.items()
                if not tensor.is_floating_point() and not graph.infos[numbers[name]].fixed
            }
        self.look_behind(node, tensors, numbers)
        written = written_tensors(facts, args, kwargs) if facts.written else []
        if written:
            self.check_writes(node, written)
        # Autograd's node of a write to a view is that of its base.
        node.shift = None if self.parts is not None or any(tensor._is_view() for tensor in written) else 0
        copies = {}
        for tensor in written:
            self.memory.preserve(tensor, node)
            if parts is not None:
                copies[id(tensor)] = self.alias(tensor.clone(), tensor)
        try:
            result = overload(*args, **kwargs) if run is None else run()
        except Exception:
            # The function may go on without this call.
            graph.scalars = begin[1]
            del self.trace.scalars[graph.scalars :]
            raise
        results = with_written(result, written)
        if facts.dynamic:
            node.sizes = [tensor.shape for tensor in results]
        if (
            parts is not None
            and (self.parts is not None or any(operand.active for operand in operands))
            # Complex results are refused under the operator's own name.
            and not any(tensor.is_complex() for tensor in results)
        ):
            self.decompose(node, parts, [copies.get(id(arg), arg) for arg in args], kwargs, results)
            # The derivative of a cross product is not elementwise.
            node.by_parts = overload is aten.linalg_cross.default or any(map(is_sparse, tensors.values()))
            depends = False
        self.append(node, results, written, tensors.get(facts.viewed or ""), dependent=depends, sequence=sequence)
        return result

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's value, a new one where it is from elsewhere."""
        number = self.numbers.get(id(tensor))
        if number is None or self.memory.is_changed(tensor):
            number = self.capture(tensor)
        if self.parts is not None:
            self.refresh(tensor)
            number = self.numbers[id(tensor)]
        return number

    def capture(self, tensor: torch.Tensor) -> int:
        """The number of a new value, of a tensor from elsewhere."""
        graph = self.trace.graph
        number = len(graph.infos)
        if not self.readable and self.shares_memory_with_input(tensor):
            raise self.derivatives.read_error(None)
        graph.captures[number] = captured_form(tensor)
        graph.infos.append(Info(None))
        self.trace.extend()
        self.bind(number, tensor)
        if tensor.requires_grad and not self.derivatives.is_unseen(tensor, known=False):
            self.derivatives.check_thread(tensor)
            graph.infos[number].externals = frozenset((len(graph.externals),))
            graph.externals.append(number)
        return number

    def shares_memory_with_input(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that no call made, as a parameter of a detached one, lies in memory of the run's own."""
        trace, memory = self.trace, memory_of(tensor)
        pairs = zip(trace.graph.infos, trace.tensors, strict=True)
        return any(info.dependent and each is not None and memory_of(each) == memory != 0 for info, each in pairs)

    def parts_of(
        self, overload: Any, facts: Facts, args: Any, tensors: dict[str, torch.Tensor], operands: Sequence[Operand]
    ) -> Callable[..., Any] | None:
        """Other operators that have the derivative of a call, if it needs such."""
        if any(map(is_sparse, tensors.values())):
            return operator_on_elements(overload, args)
        if facts.contents and any(not tensors[operand.name].is_floating_point() for operand in operands):
            return selection(overload, args)
        if facts.weighted is not None and any(o.active and o.name in ("weight", "bias") for o in operands):
            return facts.weighted
        return facts.parts

    def decompose(
        self, node: Node, parts: Callable[..., Any], args: Any, kwargs: dict[str, Any], results: list[torch.Tensor]
    ) -> None:
        """Trace the operators of a decomposition, and give the call's results the values of theirs."""
        outer, self.parts = self.parts, [] if self.parts is None else self.parts
        try:
            with self:
                copies = tensors_in(parts(*args, **kwargs))
            numbers = [self.number_of(copy) for copy in copies]
        finally:
            inner, self.parts = self.parts, outer
        if outer is None:
            node.parts = tuple(inner)
        trace, infos = self.trace, self.trace.graph.infos
        self.alive += [tensor for part in inner for n in part.results if (tensor := trace.tensors[n]) is not None]
        node.results = tuple(n if infos[n].dependent else -1 for n, _ in zip(numbers, results, strict=False))
        for number, copy, tensor in zip(node.results, copies, results, strict=False):
            if number >= 0:
                self.derivatives.parts |= {id(copy), id(tensor)}

    def append(
        self,
        node: Node,
        results: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        viewed: torch.Tensor | None = None,
        *,
        dependent: bool,
        sequence: int = -1,
    ) -> None:
        """Add a call to the graph, and give its results their values."""
        trace, graph = self.trace, self.trace.graph
        nodes = graph.nodes if self.parts is None else self.parts
        node.place, node.writes = len(graph.nodes), bool(written)
        numbers = [*node.results, *itertools.repeat(-1, len(results) - len(node.results))]
        for place, tensor in enumerate(results):
            if numbers[place] < 0:
                numbers[place] = len(graph.infos)
                info = graph.info(node, dependent)
                if any(tensor is each for each in written):
                    info.externals |= graph.infos[self.numbers[id(tensor)]].externals
                graph.infos.append(info)
            elif numbers[place] >= node.begin[0]:
                # An operator may return an argument.
                graph.infos[numbers[place]].whole = node
        # Of a part that has parts itself, these are enough.
        if self.parts is None or min(node.results, default=-1) < 0 or len(node.results) < len(numbers):
            nodes.append(node)
        node.results = tuple(numbers)
        trace.extend()
        self.bind_results(node, results, written, viewed)
        if self.parts is None:
            self.followed.count += 1
            trace.sequences.append(sequence)
            # The run computes no others than the results of the whole.
            inner = {number for part in node.parts for number in part.results} - {*numbers}
            for number in inner:
                trace.tensors[number] = None
        elif any(operand.active for operand in node.operands):
            self.derivatives.parts.update(map(id, results))

    def look_behind(self, node: Node, tensors: dict[str, torch.Tensor], numbers: dict[str, int]) -> None:
        """Note from which captures a Function of this run has computed an argument, by no call that was seen."""
        graph = self.trace.graph
        for name, tensor in tensors.items():
            number = numbers[name]
            if not tensor.requires_grad or graph.infos[number].dependent:
                continue
            if self.derivatives.is_unseen(tensor, known=number not in graph.captures):
                leaves = self.derivatives.leaves_behind(tensor.grad_fn, untraced())
                node.behind[number] = tuple([self.number_of(leaf) for leaf in leaves])
                places = (place for leaf in node.behind[number] for place in graph.infos[leaf].externals)
                # Graphs that begin alike have one `Info` of a value.
                graph.infos[number] = replace(graph.infos[number], externals=frozenset(places))

    def check_writes(self, node: Node, written: Sequence[torch.Tensor]) -> None:
        """Note writes to tensors from before the run; refuse those that have a gradient, or that would wait forever."""
        graph = self.trace.graph
        node.writes_outside = not all(map(self.memory.is_fresh, written))
        for tensor in written if torch.is_grad_enabled() else ():
            if any(node.kinds) and (tensor.dtype != base_of(tensor).dtype or tensor.is_conj()):
                # Autograd makes the view again under a lock, which a look at its node within that call waits for.
                what = f"{node.name} writes to a part, or a conjugate, of a complex tensor"
                raise self.derivatives.unsupported(
                    untraced(), what, "compute new parts, and take torch.complex of these"
                )
            form = graph.captures.get(self.numbers.get(id(base_of(tensor)), -1))
            if form is not None and form[-1]:
                what = "a tensor that has a gradient from before the call is written to"
                self.derivatives.refuse(untraced(), what, "write to a clone of it")

    def depends_on_input(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor depends on the input."""
        self.refresh(tensor)
        number = self.numbers.get(id(tensor))
        return number is not None and self.trace.graph.infos[number].dependent

    def finished(self, output: Any) -> Trace:
        """The trace, after the function has returned its output."""
        trace = self.trace
        if not isinstance(output, torch.Tensor):
            raise UnsupportedOperatorError(
                f"{name_of(trace.module)}: its output is {a_type(output)}; wrap it in a module that returns one tensor"
            )
        trace.output = output
        self.refresh(output)
        if self.followed.ends_at(output):
            if not trace.graph.writes:
                trace.versions = versions_of(trace.tensors)
            return trace
        self.followed.leave()
        graph = trace.graph
        graph.output = number = self.numbers.get(id(output))
        if number is not None and graph.infos[number].dependent:
            graph.last = Operand("", number, self.derivatives.is_active(output, number))
        if self.derivatives.problem is not None:
            raise self.derivatives.problem
        name_modules(trace.graph, trace.module)
        return trace


_DETACH = aten.detach.default
#: What the profiler's calls begin with, which work on no tensor.
_OF_PROFILER = (str, torch.ScriptObject)
