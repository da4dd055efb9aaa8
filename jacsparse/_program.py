"""A module as a graph of ATen operators, and what is known of each tensor in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from ._modules import origins, remake_weights, twin

__all__ = ["OF_SHAPE", "PLAIN", "Layout", "Operation", "Program", "operator_name"]

#: What these give depends on their operand's shape, not on its elements.
OF_SHAPE = {
    *(f"aten.{what}_like" for what in ("empty", "full", "ones", "rand", "randn", "zeros")),
    *(f"aten.new_{what}" for what in ("empty", "full", "ones", "zeros")),
}

#: Arguments that keep an operator from drawing random numbers, and what does not.
_QUIET = (("dropout_p", 0.0, 1.0), ("p", 0.0, 1.0), ("train", False, True), ("training", False, True))


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


PLAIN = Layout(0)


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
            if node not in values and operation.name in OF_SHAPE:
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
            if shapes or self.operations[node].name not in OF_SHAPE:
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
        fit = [node for node in found if self.layouts[node] == PLAIN and node in self.active | {self.input}]
        return list(reversed([self.output, *(node for node in fit if node is not self.output)]))
