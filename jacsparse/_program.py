"""A module traced by torch.export: a graph of ATen operators, and what is known of each tensor in it.

Each operator is tried on a batch of two random samples and on each of them alone, and again on random operands. That
shows where the batch is among a tensor's axes, and that no operator mixes samples. The whole is compared with the
module once: outputs, and the derivatives with respect to input and parameters.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import threading
import traceback
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from numba.core.registry import cpu_target
from torch import fx, nn

from ._modules import has_own_hooks, origins, refresh_weights, remake_weights, twin, undrawn, weight_names
from .patterns import UnsupportedOperatorError
from .patterns._rules import has_rule

__all__ = ["Layout", "Operation", "Program", "trace"]

#: What these give depends on their operand's shape, not on its elements.
_OF_SHAPE = {
    *(f"aten.{what}_like" for what in ("empty", "full", "ones", "rand", "randn", "zeros")),
    *(f"aten.new_{what}" for what in ("empty", "full", "ones", "zeros")),
}

#: What these give is not initialised: nothing can be compared.
_BLANK = {"aten.empty_like", "aten.new_empty"}

#: Arguments that keep an operator from drawing random numbers, and what does not.
_QUIET = (("dropout_p", 0.0, 1.0), ("p", 0.0, 1.0), ("train", False, True), ("training", False, True))

#: What these give changes in steps, or is taken for a constant: no derivative passes.
_CONSTANT = {f"aten.{name}" for name in ("ceil", "detach", "floor", "heaviside", "round", "sgn", "sign", "trunc")}


@dataclass(frozen=True)
class Layout:
    """Where the samples of a batch are in a tensor: along one axis, `copies` elements of it for each.

    Attributes
    ----------
    axis : int
        Its size is the batch times `copies`.
    copies : int
        How many images, heads or windows a sample is to the operator.
    minor : bool
        Whether the sample is the faster index of the two.
    """

    axis: int
    copies: int = 1
    minor: bool = False

    def split(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as ``(batch, *shape for a batch of one)``."""
        if not self.axis and self.copies == 1:
            return tensor.unsqueeze(1)
        batch = tensor.shape[self.axis] // max(1, self.copies)
        if self.minor:
            return tensor.unflatten(self.axis, (self.copies, batch)).movedim(self.axis + 1, 0)
        return tensor.unflatten(self.axis, (batch, self.copies)).movedim(self.axis, 0)

    def join(self, samples: torch.Tensor) -> torch.Tensor:
        """What `split` took apart."""
        place = self.axis + 1 if self.minor else self.axis
        return samples.movedim(0, place).flatten(self.axis, self.axis + 1)


_PLAIN = Layout(0)


@dataclass(frozen=True, eq=False)
class Operation:
    """One ATen operator of a program that gives one tensor.

    Attributes
    ----------
    node : Node
        The tensor's; where the operator gives several, the one that takes this one out.
    overload : OpOverload
        As in ``torch.ops.aten.add.Tensor``.
    arguments : dict
        By name; of a list of tensors each by the name and its place, as in ``tensors.0``.
    number : int or None
        Which of the operator's results this is.
    path, source : str
        Of the module that runs it, and the line of its code.
    """

    node: fx.Node
    overload: Any
    arguments: dict[str, Any]
    number: int | None
    path: str
    source: str

    @property
    def name(self) -> str:
        """The operator, as in ``aten.add``."""
        return operator_name(self.overload)

    @cached_property
    def random(self) -> bool:
        """Whether it draws random numbers: tagged as one that may, and not told to leave it."""
        tagged = torch.Tag.nondeterministic_seeded in getattr(self.overload, "tags", ())
        return tagged and not any(self.arguments.get(name, loud) == quiet for name, quiet, loud in _QUIET)

    @cached_property
    def quiet(self) -> dict[str, Any]:
        """Arguments with which it draws nothing, in the place of its own."""
        return {name: value for name, value, _ in _QUIET if self.random and name in self.arguments}

    @cached_property
    def operands(self) -> dict[str, fx.Node]:
        """The arguments that are made in the graph, by name."""
        return {name: value for name, value in self.arguments.items() if isinstance(value, fx.Node)}

    @cached_property
    def nested(self) -> dict[str, Any]:
        """The arguments that have parts that are made in the graph, as sizes are."""
        found = {}
        for name, argument in self.arguments.items():
            parts: list[fx.Node] = []
            fx.map_arg(argument, parts.append)
            if parts and not isinstance(argument, fx.Node):
                found[name] = argument
        return found

    @cached_property
    def _names(self) -> tuple[list[str], list[str]]:
        """Of the operator's parameters: by position, and by keyword alone."""
        schema = self.overload._schema.arguments
        return [a.name for a in schema if not a.kwarg_only], [a.name for a in schema if a.kwarg_only]

    def evaluate(self, arguments: Mapping[str, Any]) -> torch.Tensor:
        """The result on these arguments."""
        positional, named = self._names
        given = [arguments[name] if name in arguments else _listed(name, arguments) for name in (*positional, *named)]
        result = self.overload(*given[: len(positional)], **dict(zip(named, given[len(positional) :], strict=True)))
        return result if self.number is None else result[self.number]  # type: ignore[no-any-return]


def operator_name(overload: Any) -> str:
    """As in ``aten.add``; of what is no ATen operator, its own name."""
    schema = getattr(overload, "_schema", None)
    return str(overload) if schema is None else schema.name.replace("::", ".")


def _listed(name: str, arguments: Mapping[str, Any]) -> list[Any]:
    """The elements ``name.0``, ``name.1``, ... as a list again."""
    elements: list[Any] = []
    while f"{name}.{len(elements)}" in arguments:
        elements.append(arguments[f"{name}.{len(elements)}"])
    return elements


def _bound(node: fx.Node) -> dict[str, Any]:
    """A call's arguments by their names in the operator's schema, defaults included."""
    overload: Any = node.target
    given = dict(zip((argument.name for argument in overload._schema.arguments), node.args, strict=False))
    given.update(node.kwargs)
    bound: dict[str, Any] = {}
    for argument in overload._schema.arguments:
        value = given.get(argument.name, argument.default_value)
        if isinstance(value, (list, tuple)) and any(isinstance(element, fx.Node) for element in value):
            bound.update({f"{argument.name}.{place}": element for place, element in enumerate(value)})
        else:
            bound[argument.name] = value
    return bound


@dataclass(eq=False)
class Program:
    """A module's graph: tensors, and the operations that make them.

    Attributes
    ----------
    module : Module
        Whose parameters and buffers it reads at each run.
    input, output : Node
        Of the graph.
    operations : dict of Node to Operation
        In the order in which they run.
    attributes : dict of Node to str
        Parameters and buffers, by their names in the module.
    constants : dict of Node to Tensor
        What else the module's code refers to.
    sizes : dict of Node to callable
        Numbers that depend on the batch's size.
    layouts : dict of Node to Layout
        Of the tensors that have a batch; others are the same for any.
    shapes, dtypes : dict
        Of each tensor the shape for a batch of one, and the dtype.
    active : set of Node
        The tensors through which a derivative passes.
    dependent : set of Node
        The tensors that depend on the input's elements, with a derivative or without.
    """

    module: nn.Module
    input: fx.Node
    output: fx.Node
    operations: dict[fx.Node, Operation] = field(default_factory=dict)
    attributes: dict[fx.Node, str] = field(default_factory=dict)
    constants: dict[fx.Node, torch.Tensor] = field(default_factory=dict)
    sizes: dict[fx.Node, Callable[[int], Any]] = field(default_factory=dict)
    layouts: dict[fx.Node, Layout] = field(default_factory=dict)
    shapes: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[fx.Node, torch.dtype] = field(default_factory=dict)
    active: set[fx.Node] = field(default_factory=set)
    dependent: set[fx.Node] = field(default_factory=set)

    @cached_property
    def located(self) -> dict[str, tuple[nn.Module, str]]:
        """The module that holds each attribute, and its name there."""
        found = {}
        for target in self.attributes.values():
            path, _, name = target.rpartition(".")
            found[target] = (self.module.get_submodule(path), name)
        return found

    def parameters_of(self, target: str) -> set[int]:
        """The ``id`` of each training parameter that an attribute is, or is made of."""
        return {id(parameter) for parameter in origins(*self.located[target]) if parameter.requires_grad}

    def layouts_of(self, operation: Operation) -> dict[str, Layout]:
        """Those of an operation's operands that have a batch, by name."""
        return {name: self.layouts[node] for name, node in operation.operands.items() if node in self.layouts}

    def read_by(self, operations: Iterable[Operation], *nodes: fx.Node) -> list[str]:
        """The attributes that operations read, and those among other nodes."""
        read = {operand for operation in operations for operand in operation.operands.values()}.union(nodes)
        return [target for node, target in self.attributes.items() if node in read]

    def read(self, own: Mapping[int, torch.Tensor], *, aside: bool = False) -> dict[fx.Node, torch.Tensor]:
        """The attributes and constants as they are now, made of other parameters where `own` names them by ``id``.

        With `aside`, what making them changes in the module, as spectral normalisation does, is changed in copies.
        """
        made: dict[int, nn.Module] = {}
        values: dict[fx.Node, torch.Tensor] = dict(self.constants)
        for node, target in self.attributes.items():
            module, name = self.located[target]
            value: torch.Tensor | None = module._parameters.get(name)
            if value is None:
                value = module._buffers.get(name)
            if value is None:
                # Made of others before each forward, by pruning's hooks or a parametrisation.
                if id(module) not in made:
                    made[id(module)] = twin(module, own, aside=aside)
                    remake_weights(made[id(module)])
                value = getattr(made[id(module)], name)
            values[node] = own.get(id(value), value)
        return values

    def mask_of(self, node: Any) -> torch.Tensor | None:
        """The pruning mask of an attribute, where it has one."""
        if node not in self.attributes:
            return None
        module, name = self.located[self.attributes[node]]
        mask = getattr(module, f"{name}_mask", None)
        return mask if isinstance(mask, torch.Tensor) else None

    def resolved(self, operation: Operation, values: Mapping[fx.Node, Any], batch: int) -> dict[str, Any]:
        """An operation's arguments, tensors and numbers in the place of nodes."""

        def value(node: fx.Node) -> Any:
            if node in self.sizes:
                return self.sizes[node](batch)
            if node not in values and operation.name in _OF_SHAPE:
                # Made before the stage: only its shape is asked for.
                device = next(iter(values.values())).device
                blank = torch.empty((batch, *self.shapes[node]), dtype=self.dtypes[node], device=device)
                return self.layouts[node].join(blank)
            return values[node]

        found = dict(operation.arguments)
        for name, node in operation.operands.items():
            found[name] = values[node] if node in values else value(node)
        for name, argument in operation.nested.items():
            found[name] = fx.map_arg(argument, value)
        return found

    def between(self, start: fx.Node, stop: fx.Node, *, shapes: bool = False) -> list[Operation]:
        """The operations that make `stop` from `start`, with those on no input that they need; in order.

        Those of which only the shape is asked for are left out, unless `shapes`.
        """
        needed, waiting = set(), [stop]
        while waiting:
            node = waiting.pop()
            if node in needed or node is start or node not in self.operations:
                continue
            needed.add(node)
            if shapes or self.operations[node].name not in _OF_SHAPE:
                waiting.extend(self.operations[node].operands.values())
        return [operation for node, operation in self.operations.items() if node in needed]

    def cuts(self) -> list[fx.Node]:
        """The tensors through which all of the input's influence on the output passes, in order, both included."""
        import networkx

        graph = networkx.DiGraph()
        graph.add_node(self.input)
        for node in self.dependent & self.operations.keys():
            for operand in self.operations[node].operands.values():
                if operand in self.dependent:
                    graph.add_edge(operand, node)
        dominators = networkx.immediate_dominators(graph, self.input)
        found = [self.output]
        while found[-1] is not self.input:
            found.append(dominators[found[-1]])
        # What passes from stage to stage has the batch first, and elements that a derivative is of.
        fit = [node for node in found if self.layouts[node] == _PLAIN and node in self.active | {self.input}]
        return list(reversed([self.output, *(node for node in fit if node is not self.output)]))


def trace(
    module: nn.Module, in_shape: Sequence[int], path: str = "", like: torch.Tensor | None = None
) -> tuple[Program, dict[fx.Node, torch.Tensor]]:
    """The program of a module, for samples of that shape, any number of them; and all its tensors for a random one.

    Raises
    ------
    UnsupportedOperatorError
        Where torch.export cannot trace the module, or it mixes samples; with the line of its source.
    ValueError
        Where the input does not fit.
    """
    # torch.export replaces functions of Python's for all threads, and Numba must not meet those.
    with _TRACING:
        _load_numba()
        return _traced(module, in_shape, path, like)


_TRACING = threading.RLock()


@functools.cache
def _load_numba() -> None:
    """Let Numba look up what it knows, as it does when it first compiles."""
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


def _traced(
    module: nn.Module, in_shape: Sequence[int], path: str, like: torch.Tensor | None
) -> tuple[Program, dict[fx.Node, torch.Tensor]]:
    _check_hooks(module, path)
    x = _random_samples(module, in_shape, like)
    where = path or type(module).__name__
    with undrawn(), torch.enable_grad():
        try:
            given, copies = x.clone().requires_grad_(), _copies(module)
            expected = twin(module, copies, aside=True)(given * 1)
        except Exception as error:
            # Whatever the user's own code raises.
            raise ValueError(
                f"{where}: an input of shape {tuple(in_shape)} does not fit{_source_of(error)}: {error}"
            ) from error
    if not isinstance(expected, torch.Tensor):
        raise UnsupportedOperatorError(
            f"{where}: its output is a {type(expected).__name__}; wrap it in a module that returns one tensor"
        )
    program = _program(module, _exported(module, x, where), where)
    with undrawn():
        known = _examine(program, x, where)
    _check_output(program, expected, where)
    if not any(operation.random for operation in program.operations.values()):
        _check_alike(program, given, copies, expected, where)
    return program, known


def _copies(module: nn.Module) -> dict[int, torch.Tensor]:
    """In the place of parameters, by their ``id``: the user's hooks on those are none of ours to call."""
    return {id(p): p.detach().requires_grad_() for p in module.parameters() if p.requires_grad}


def _check_hooks(module: nn.Module, path: str) -> None:
    for inner, part in module.named_modules():
        if has_own_hooks(part):
            where = ".".join(name for name in (path, inner) if name) or type(part).__name__
            hooks = [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
            if any(getattr(hook, "__module__", "").startswith("torch.export.") for hook in hooks):
                raise UnsupportedOperatorError(
                    f"{where}: what ExportedProgram.module() makes checks its inputs by hooks; take "
                    "torch.export.unflatten(program) in its place"
                )
            raise UnsupportedOperatorError(
                f"{where}: hooks inside a module that is traced are not run; remove them, or build the model as "
                "nn.Sequential of single operators"
            )


def _random_samples(module: nn.Module, in_shape: Sequence[int], like: torch.Tensor | None) -> torch.Tensor:
    """Two random samples of the module's dtype, on its device; where it has neither, as `like`."""
    own = (t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point())
    like = next(own, torch.empty(0) if like is None else like)
    generator = torch.Generator().manual_seed(0)
    return torch.randn((2, *in_shape), generator=generator).to(like)


def _exported(module: nn.Module, x: torch.Tensor, where: str) -> torch.export.ExportedProgram:
    """The module as torch.export writes it down, of functional ATen operators."""
    # Parameters that train: PyTorch takes short cuts that have no derivative where none does.
    trained = {id(p): nn.Parameter(p.detach()) for p in module.parameters() if p.is_floating_point()}
    plain = twin(module, trained, aside=True)
    for part in plain.modules():
        refresh_weights(part)
        part._forward_pre_hooks.clear()
        if getattr(part, "inplace", False) is True:
            part.__dict__["inplace"] = False
        part.__dict__["_buffers"] = dict(part._buffers)
        for name, value in [item for item in part.__dict__.items() if isinstance(item[1], torch.Tensor)]:
            del part.__dict__[name]
            if name in weight_names(part):
                part.register_parameter(name, nn.Parameter(value.detach()))
            else:
                part._buffers[name] = value.detach()
    # PyTorch 2.6 wants to know that it is not the number that stands for the end of a slice.
    shapes: Any = {0: torch.export.Dim("batch", max=2**31 - 1)}
    if _takes_any(plain):
        shapes = (shapes,)
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(plain, (x,), dynamic_shapes=(shapes,), strict=False)
            unknown = _composed(exported)
            # Nothing may be overwritten: what a stage was given is asked for again.
            return exported.run_decompositions(unknown) if unknown or _overwrites(exported) else exported
    except Exception as error:
        # torch.export's errors share no base class.
        if "specialized" in str(error) or "Constraints violated" in str(error):
            raise UnsupportedOperatorError(
                f"{where}: its code takes the size of the batch for a constant, as len(x) and int(x.shape[0]) do; use "
                "x.shape[0] itself, and let nothing but shapes depend on it"
            ) from error
        reason = str(error).strip().split("\n", 1)[0]
        raise UnsupportedOperatorError(
            f"{where}: torch.export cannot trace it{_source_of(error)}: {reason}; what is computed must not depend on "
            "the values of the input in any other way than by its operators: use torch.where in the place of a branch"
        ) from error


def _takes_any(module: nn.Module) -> bool:
    """Whether its forward takes ``*args``, of which torch.export asks for a tuple of shapes."""
    try:
        first = next(iter(inspect.signature(module.forward).parameters.values()), None)
    except ValueError:
        # A function of C's.
        return False
    return first is not None and first.kind is inspect.Parameter.VAR_POSITIONAL


def _composed(exported: torch.export.ExportedProgram) -> dict[Any, Any]:
    """How ATen composes the operators of a program that have no rule of their own of others."""
    numbers = (torch.SymInt, torch.SymFloat)
    made = (node for node in exported.graph.nodes if not isinstance(node.meta.get("val"), numbers))
    called = {node.target for node in made if isinstance(node.target, torch._ops.OpOverload)}
    unknown = [overload for overload in called if not has_rule(operator_name(overload)) and overload._can_decompose()]
    known = torch.export.default_decompositions() if unknown else {}
    return {overload: known[overload] for overload in unknown if overload in known}


def _overwrites(exported: torch.export.ExportedProgram) -> bool:
    """Whether any operator writes to its operand."""
    schemas = [getattr(node.target, "_schema", None) for node in exported.graph.nodes]
    return any(schema is not None and schema.is_mutable for schema in schemas)


def _source_of(error: BaseException) -> str:
    """The last line of the user's own code that an error came through, as in `` at net.py, line 7``."""
    torch_folder = Path(torch.__file__).parent
    here = Path(__file__).parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_file() and not file.is_relative_to(torch_folder) and not file.is_relative_to(here):
            return f" at {file}, line {frame.lineno} ({(frame.line or '').strip()})"
    return ""


def _program(module: nn.Module, exported: torch.export.ExportedProgram, where: str) -> Program:
    signature = exported.graph_signature
    changed = {*signature.buffers_to_mutate.values()}
    if changed:
        raise UnsupportedOperatorError(
            f"{where}: the forward pass changes {', '.join(sorted(changed))}, as batch normalisation in training mode "
            "does; call .eval() on it first"
        )
    nodes = list(exported.graph.nodes)
    users = [node for node in nodes if node.op == "placeholder" and node.name in signature.user_inputs]
    (outputs,) = (node for node in nodes if node.op == "output")
    results = [node for node in outputs.args[0] if node is not None and node.name in signature.user_outputs]
    program = Program(module, users[0], results[0])
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            program.sizes[node] = _of_batch(value, node, where)
        elif node.op == "placeholder":
            _place(program, node, exported)
        elif node.op == "call_function" and isinstance(value, torch.Tensor):
            program.operations[node] = _operation(node, where)
    # Numbers that were computed have no tensor behind them; neither has what nobody needs.
    needed = {operation.node for operation in program.between(program.input, program.output, shapes=True)}
    program.operations = {node: made for node, made in program.operations.items() if node in needed}
    read = {operand for made in program.operations.values() for operand in made.operands.values()}
    read |= {program.output}
    program.attributes = {node: target for node, target in program.attributes.items() if node in read}
    program.constants = {node: value for node, value in program.constants.items() if node in read}
    return program


def _place(program: Program, node: fx.Node, exported: torch.export.ExportedProgram) -> None:
    signature = exported.graph_signature
    for names in (signature.inputs_to_parameters, signature.inputs_to_buffers):
        if node.name in names:
            program.attributes[node] = names[node.name]
    constant = signature.inputs_to_lifted_tensor_constants.get(node.name)
    if constant is not None:
        tensor = exported.constants[constant]
        name = _names(program.module).get(_memory(tensor)) if tensor.numel() else None
        if name is None:
            program.constants[node] = tensor.detach()
        else:
            # Reached by another way than its module: a list, a bound method.
            program.attributes[node] = name


def _names(module: nn.Module) -> dict[Any, str]:
    """The name of each parameter and buffer, by its memory."""
    return {_memory(tensor): name for name, tensor in (*module.named_buffers(), *module.named_parameters())}


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Which elements a tensor has: a view of another has other ones."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _of_batch(value: Any, node: fx.Node, where: str) -> Callable[[int], Any]:
    """A symbolic number as a function of the batch's size."""
    expression = value.node.expr
    symbols = list(getattr(expression, "free_symbols", ()))
    if len(symbols) > 1 or any(str(symbol).startswith("u") for symbol in symbols):
        # What asks for a size may be PyTorch's own: then the line that made the tensor is the user's.
        places = map(_place_of, (node, *node.all_input_nodes))
        path, source = max(places, key=lambda place: bool(place[1]))
        raise UnsupportedOperatorError(
            f"{path or where}: a size depends on what a tensor holds{source}; take elements by their numbers, found "
            "once, as by mask.nonzero().flatten() in __init__, or keep the shape, with torch.where"
        )
    kind = {torch.SymInt: int, torch.SymFloat: float}.get(type(value), bool)
    known: dict[int, Any] = {}

    def evaluate(batch: int) -> Any:
        if batch not in known:
            known[batch] = kind(expression.subs(dict.fromkeys(symbols, batch)))
        return known[batch]

    return evaluate


def _operation(node: fx.Node, where: str) -> Operation:
    number: Any = None
    call: Any = node
    if node.target is operator.getitem:
        call, number = node.args
    path, source = _place_of(call)
    if not isinstance(call.target, torch._ops.OpOverload):
        raise UnsupportedOperatorError(
            f"{path or where}: {call.target} is no ATen operator{source}; write it with operators of tensors alone: "
            "t.detach() in the place of torch.no_grad(), torch.where in that of torch.cond"
        )
    if call.target is torch.ops.aten.copy.default:
        # What an assignment becomes; it has no derivative of its own.
        assigned = {"self": call.args[1], "other": call.args[0]}
        return Operation(node, torch.ops.aten.expand_as.default, assigned, number, path, source)
    return Operation(node, call.target, _bound(call), number, path, source)


def _place_of(node: fx.Node) -> tuple[str, str]:
    """The path of the module that runs a node, and the line of its source."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    if isinstance(path, str):
        path = path.removeprefix("L['self']").removeprefix(".").replace("slice(None, None, None)", "")
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    files = [n for n, line in enumerate(lines) if line.startswith('File "') and not line.startswith('File "torch/')]
    source = ""
    if files:
        name, line, *_ = lines[files[-1]].removeprefix('File "').split('", line ')
        code = lines[files[-1] + 1] if files[-1] + 1 < len(lines) else ""
        source = f" at {name}, line {line.split(',')[0]} ({code})"
    return path, source


def _examine(program: Program, x: torch.Tensor, where: str) -> dict[fx.Node, torch.Tensor]:
    """Fill in layouts, shapes, and which tensors depend on the input, by running each operation on samples.

    Returns all tensors for a batch of one.
    """
    # Copies: some operators update running statistics.
    read = program.read({}, aside=True).items()
    pair, single = ({node: value if value.requires_grad else value.clone() for node, value in read} for _ in range(2))
    pair[program.input], single[program.input] = x, x[:1]
    program.layouts[program.input] = _PLAIN
    program.shapes[program.input] = tuple(x[:1].shape)
    program.dtypes[program.input] = x.dtype
    program.dependent.add(program.input)
    program.active.add(program.input)
    for node, operation in program.operations.items():
        operands = set(operation.operands.values())
        tried = _tried(program, operation, pair, single)
        # What is compared draws nothing; what goes on may.
        pair[node] = operation.evaluate(program.resolved(operation, pair, 2)) if operation.random else tried.together
        alone = tried.alone[0]
        if operands & program.dependent and operation.name not in _OF_SHAPE:
            program.dependent.add(node)
            if operands & program.active and pair[node].is_complex():
                raise UnsupportedOperatorError(
                    f"{operation.path or where}: {operation.name} gives complex numbers{operation.source}; Jacobians "
                    "are of real ones: work on real and imaginary parts"
                )
            differentiable = pair[node].is_floating_point() and operation.name not in _CONSTANT
            if operands & program.active and differentiable:
                program.active.add(node)
        layout = _layout(program, operation, tried, pair, single)
        mixes = layout is None and (node in program.dependent or pair[node].shape != alone.shape)
        if mixes:
            raise UnsupportedOperatorError(
                f"{operation.path or where}: {operation.name} mixes the samples of a batch{operation.source}; "
                "each sample must be worked on by itself"
            )
        if layout is not None:
            program.layouts[node] = layout
            alone = layout.join(layout.split(pair[node])[:1])
        elif operation.random:
            # Drawn once for all samples.
            alone = pair[node]
        single[node] = alone
        program.shapes[node], program.dtypes[node] = tuple(alone.shape), alone.dtype
    return single


@dataclass(frozen=True)
class _Tried:
    """What an operation makes of two samples together, and of each of them alone."""

    together: torch.Tensor
    alone: tuple[torch.Tensor, torch.Tensor]

    def fits(self, layout: Layout) -> bool:
        """Whether the samples are where a layout says, and none is another with the other beside it."""
        samples = layout.split(self.together)
        return all(_alike(layout.join(samples[number : number + 1]), alone) for number, alone in enumerate(self.alone))


def _tried(program: Program, operation: Operation, pair: dict[fx.Node, Any], single: dict[fx.Node, Any]) -> _Tried:
    """An operation on two samples and on each alone; what has no samples is made for one anew, in `single`."""

    def evaluated(values: Mapping[fx.Node, Any], batch: int) -> torch.Tensor:
        return operation.evaluate({**program.resolved(operation, values, batch), **operation.quiet})

    def sample(number: int) -> Mapping[fx.Node, Any]:
        own = {}
        for node in operation.operands.values():
            if node in program.layouts:
                layout = program.layouts[node]
                own[node] = layout.join(layout.split(pair[node])[number : number + 1])
        return ChainMap(own, single)

    return _Tried(evaluated(pair, 2), (evaluated(sample(0), 1), evaluated(sample(1), 1)))


def _layout(
    program: Program, operation: Operation, tried: _Tried, pair: dict[fx.Node, Any], single: dict[fx.Node, Any]
) -> Layout | None:
    """Where the samples are in an operation's result of two samples; None where it is nowhere.

    It must be there for each of the two, and, lest values that happen to be alike hide anything, for random operands.
    """
    made, alone = tried.together, tried.alone[0]
    grown = [axis for axis in range(made.ndim) if made.ndim == alone.ndim and made.shape[axis] != alone.shape[axis]]
    if len(grown) != 1 or made.shape[grown[0]] != 2 * alone.shape[grown[0]]:
        return None
    (axis,) = grown
    operands = [node for node in operation.operands.values() if node in program.layouts]
    copies = alone.shape[axis]
    minor = next((program.layouts[node].minor for node in operands if program.layouts[node].copies > 1), False)
    fitting = [Layout(axis, copies, first) for first in (minor, not minor)] if copies > 1 else [Layout(axis, copies)]
    if (operation.random and not operation.quiet) or operation.name in _BLANK:
        # Nothing can be compared; what draws works on each element by itself.
        return fitting[0]
    fitting = [layout for layout in fitting if tried.fits(layout)]
    generator = torch.Generator().manual_seed(0)
    drawn = {
        node: torch.randn(pair[node].shape, generator=generator).to(pair[node])
        for node in operands
        if pair[node].is_floating_point()
    }
    # Not every operator takes any numbers.
    with contextlib.suppress(RuntimeError):
        again = _tried(program, operation, {**pair, **drawn}, single)
        fitting = [layout for layout in fitting if again.fits(layout)]
    return fitting[0] if fitting else None


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results are one, but for rounding."""
    if torch.equal(one, other):
        return True
    if one.shape != other.shape or not one.is_floating_point():
        return False
    size = other.nan_to_num(0, 0, 0).abs().max().item()
    share = 1e-9 if one.dtype == torch.float64 else 1e-5
    return torch.allclose(one, other, rtol=share, atol=share * size, equal_nan=True)


def _check_alike(
    program: Program, x: torch.Tensor, copies: Mapping[int, torch.Tensor], expected: torch.Tensor, where: str
) -> None:
    """Raise where the program is not what the module computes, for one sample or two, or has another derivative.

    What is `expected` of two samples was made of `x` and of copies of the parameters, by the parameters' ``id``.
    """
    own = _copies(program.module)
    with undrawn(), torch.enable_grad():
        alone = twin(program.module, aside=True)(x[:1].detach() * 1)
        results = {}
        for batch in (1, 2):
            values = {**program.read(own, aside=True), program.input: x[:batch].detach().requires_grad_()}
            for node, operation in program.operations.items():
                values[node] = operation.evaluate(program.resolved(operation, values, batch))
            results[batch] = values[program.input], values[program.output]
    if not (_alike(results[2][1], expected) and _alike(results[1][1], alone)):
        raise UnsupportedOperatorError(
            f"{where}: its output is not that of its operators, for one sample or two; nothing but shapes may depend "
            "on the size of the batch"
        )
    given, made = results[2]
    leaves = _leaves(expected)
    parameters = {name: p for name, p in program.module.named_parameters() if p.requires_grad}
    known = {id(tensor) for tensor in (x, *copies.values(), *parameters.values())}
    if leaves.keys() - known:
        shapes = ", ".join(str(tuple(leaf.shape)) for number, leaf in leaves.items() if number not in known)
        raise UnsupportedOperatorError(
            f"{where}: it uses a tensor of shape {shapes} that requires a gradient and is no parameter; make it an "
            "nn.Parameter, or detach it"
        )
    # A parameter that is reached by another way than its module is a leaf itself, beside its copy.
    wanted = {"": ([x], given)}
    for name, p in parameters.items():
        wanted[name] = ([copies[id(p)], *([p] if id(p) in leaves else [])], own[id(p)])
    seed = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(expected)
    try:
        differences = [measured for some in _chunks(wanted) for measured in _differences(expected, made, seed, some)]
    except RuntimeError:
        # It overwrites what its own derivative needs: there is none to compare with.
        return
    # What is zero but for rounding, as the gradient of a bias before a normalisation, is rounded in either's own way.
    rounding = 1e3 * torch.finfo(expected.dtype).eps * max(largest for *_, largest in differences)
    for name, difference, size, count, _ in differences:
        if difference > max(0.01 * size, rounding * count**0.5):
            of = f" with respect to {name}" if name else ""
            raise UnsupportedOperatorError(
                f"{where}: its derivative{of} is not that of its operators; a torch.autograd.Function, a hook on a "
                "tensor, or a tensor made of parameters before the forward pass, is not traced: write it with "
                "operators, as x + (f(x) - x).detach(), or make it a custom operator"
            )


def _leaves(y: torch.Tensor) -> dict[int, torch.Tensor]:
    """What a graph of autograd begins with, by the ``id``."""
    found, seen, waiting = {}, set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            found[id(leaf)] = leaf
        waiting.extend(behind for behind, _ in node.next_functions)
    return found


_Wanted = dict[str, tuple[list[torch.Tensor], torch.Tensor]]

#: Bytes of gradients that are compared at once.
_AT_ONCE = 2**26


def _chunks(wanted: _Wanted) -> list[_Wanted]:
    """Parts of it, so that few gradients are held at once."""
    parts: list[_Wanted] = []
    room = 0
    for name, (theirs, ours) in wanted.items():
        if ours.nbytes > room:
            parts.append({})
            room = max(_AT_ONCE, ours.nbytes)
        parts[-1][name] = theirs, ours
        room -= ours.nbytes
    return parts


def _differences(
    expected: torch.Tensor, made: torch.Tensor, seed: torch.Tensor, wanted: _Wanted
) -> list[tuple[str, float, float, int, float]]:
    """Of derivatives that should be one: name, norm of the difference, norm, elements and largest of what is right."""
    names = [(name, tensor) for name, (theirs, _) in wanted.items() for tensor in theirs]
    found = {name: torch.zeros_like(ours) for name, (_, ours) in wanted.items()}
    for (name, _), gradient in zip(names, _gradients(expected, [tensor for _, tensor in names], seed), strict=True):
        found[name] = found[name] + gradient
    measured = []
    for own, (name, one) in zip(
        _gradients(made, [ours for _, ours in wanted.values()], seed), found.items(), strict=True
    ):
        # Where the derivative does not exist, nothing can be compared.
        if bool(one.isfinite().all()):
            largest = one.abs().max().item() if one.numel() else 0.0
            measured.append((name, (own - one).norm().item(), one.norm().item(), one.numel(), largest))
    return measured


def _gradients(y: torch.Tensor, tensors: Sequence[torch.Tensor], seed: torch.Tensor) -> Sequence[torch.Tensor]:
    """Derivatives of a tensor, zero where it does not depend; the graph is kept, for the user may have begun it."""
    if not y.requires_grad:
        return [torch.zeros_like(tensor) for tensor in tensors]
    return torch.autograd.grad(y, tensors, seed, retain_graph=True, allow_unused=True, materialize_grads=True)


def _check_output(program: Program, expected: torch.Tensor, where: str) -> None:
    if program.output not in program.dependent or program.layouts[program.output] != _PLAIN:
        raise UnsupportedOperatorError(
            f"{where}: its output of shape {tuple(expected.shape)} for two samples does not have them along its first "
            "axis; permute it, or let it depend on the input"
        )
    if tuple(expected.shape[1:]) != program.shapes[program.output][1:]:
        raise UnsupportedOperatorError(f"{where}: torch.export gives another output than the module")
