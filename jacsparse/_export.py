"""Modules as torch.export writes them down."""

from __future__ import annotations

import functools
import inspect
import operator
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from numba.core.registry import cpu_target
from torch import fx, nn

from ._examination import check_output, compare, examine
from ._modules import has_own_hooks, refresh_weights, twin, undrawn, weight_names
from ._program import Operation, Program, operator_name
from ._stages import own_parameters
from .patterns import UnsupportedOperatorError
from .patterns._rules import has_rule

__all__ = ["trace"]


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
            given, copies = x.clone().requires_grad_(), own_parameters(module)
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
        known = examine(program, x, where)
    check_output(program, expected, where)
    if not any(operation.random for operation in program.operations.values()):
        compare(program, given, copies, expected, where)
    return program, known


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
    names = {_memory(tensor): name for name, tensor in (*module.named_buffers(), *module.named_parameters())}
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            program.sizes[node] = _of_batch(value, node, where)
        elif node.op == "placeholder":
            _place(program, node, exported, names)
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


def _place(
    program: Program, node: fx.Node, exported: torch.export.ExportedProgram, names_by_memory: Mapping[Any, str]
) -> None:
    signature = exported.graph_signature
    for names in (signature.inputs_to_parameters, signature.inputs_to_buffers):
        if node.name in names:
            program.attributes[node] = names[node.name]
    constant = signature.inputs_to_lifted_tensor_constants.get(node.name)
    if constant is not None:
        tensor = exported.constants[constant]
        name = names_by_memory.get(_memory(tensor)) if tensor.numel() else None
        if name is None:
            program.constants[node] = tensor.detach()
        else:
            # Reached by another way than its module: a list, a bound method.
            program.attributes[node] = name


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
