"""Stages of a traced module: parts of its program between tensors that carry everything."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from ._export import trace
from ._modules import Kept, trains
from ._program import Operation, Program
from ._stages import TRAINS, Edge, Record, Stage, check_alike, check_dtype, own_parameters, working
from .patterns import Call, Identity

__all__ = ["traced_stages"]


@dataclass(frozen=True, eq=False, repr=False)
class TracedStage(Stage):
    """Operations of a program, from one of its tensors to another.

    Attributes
    ----------
    program : Program
        The whole.
    operations : tuple of Operation
        What runs, in order.
    where : str
        Path of the traced module in the model.
    """

    program: Program
    operations: tuple[Operation, ...]
    where: str

    def run(self, x: torch.Tensor, state: dict[Any, Any]) -> Record:
        """As `Stage.run`."""
        with torch.enable_grad():
            own, attributes = self._read(x, state)
            leaf = x.detach().requires_grad_()
            values: dict[fx.Node, torch.Tensor] = {**attributes, self.start: leaf}
            arguments: dict[fx.Node, dict[str, Any]] = {}
            for operation in self.operations:
                given = self.program.resolved(operation, values, len(x))
                arguments[operation.node] = given
                values[operation.node] = made = operation.evaluate(given)
                if operation.node in self.program.active:
                    check_dtype(f"{operation.path or self.path}: {operation.name}", made, x)
        y = values[self.stop]
        of_edges = {edge: arguments[edge.target] for edge in self.edges}
        mine = {key: own[key] for key in self._parameters() if key in own}
        return TracedRecord(self, leaf, y, mine, of_edges, tensors=values)

    def weights_of(self, edge: Edge) -> dict[str, tuple[torch.Tensor, bool]]:
        """As `Stage.weights_of`."""
        program, found = self.program, {}
        for name, node in program.operations[edge.target].operands.items():
            if node in program.dependent or node in program.layouts:
                continue
            read = program.read_by(program.between(program.input, node), node)
            made_of = [program.located[target] for target in read]
            if any(own not in module._buffers for module, own in made_of):
                found[name] = (edge.call.arguments[name], any(trains(module, own) for module, own in made_of))
        return found

    def _read(self, x: torch.Tensor, state: dict[Any, Any]) -> tuple[dict[int, torch.Tensor], dict[fx.Node, Any]]:
        """Parameters of this forward's own, by the ``id`` of the module's; and the attributes that are made of them."""
        if self.program not in state:
            module = self.program.module
            check_alike(self.where, module, x)
            own = own_parameters(module, trains=state[TRAINS])
            state[self.program] = own, self.program.read(own)
        return state[self.program]  # type: ignore[no-any-return]

    def _parameters(self) -> set[int]:
        """The training parameters that the stage reads, by their ``id``."""
        return set().union(*(self.program.parameters_of(target) for target in self._attributes))

    @functools.cached_property
    def _attributes(self) -> list[str]:
        return self.program.read_by(self.operations)


@dataclass(eq=False)
class TracedRecord(Record):
    """Of a stage of a program: all tensors that it made or read."""

    tensors: dict[Any, torch.Tensor] = field(kw_only=True, repr=False)

    def _filled(self, edge: Edge, arguments: dict[str, Any], samples: slice) -> Call:
        program = self.stage.program  # type: ignore[attr-defined]
        operation = program.operations[edge.target]
        layouts = program.layouts_of(operation)
        split = {
            name: layouts[name].split(value.detach())[samples] if name in layouts else value
            for name, value in arguments.items()
        }
        into, out = layouts[edge.call.argument], program.layouts[edge.target]
        x = split.pop(edge.call.argument)

        # Samples of no tensor but the operand, on which the derivative does not depend: columns are more samples.
        alike = edge.shared and not split.keys() & layouts.keys() and not operation.random

        def run(own: torch.Tensor) -> torch.Tensor:
            """The operator on these samples, as PyTorch is given them, with others in the place of its operand."""
            given = program.resolved(operation, self.tensors, len(own))
            for name, value in split.items():
                if isinstance(value, torch.Tensor):
                    given[name] = layouts[name].join(value) if name in layouts else value.detach()
            given[edge.call.argument] = into.join(own)
            return out.split(operation.evaluate(given))

        def vjp(gradient: torch.Tensor) -> torch.Tensor:
            if operation.random:
                # What was drawn is in the graph of the forward pass alone.
                whole = out.split(torch.zeros_like(self.tensors[edge.target]))
                whole[samples] = gradient.reshape(whole[samples].shape)
                (found,) = torch.autograd.grad(
                    self.tensors[edge.target], self.tensors[edge.source], out.join(whole), retain_graph=True
                )
                return into.split(found)[samples]
            return vjps(gradient[None])[0]

        def vjps(gradients: torch.Tensor) -> torch.Tensor:
            count = len(gradients)
            if alike and count > 1:
                with torch.enable_grad():
                    own = x.new_zeros(()).expand(count * len(x), *x.shape[1:]).requires_grad_()
                    y = run(own)
                (found,) = torch.autograd.grad(y, own, gradients.reshape(y.shape), materialize_grads=True)
                return found.reshape(count, *x.shape)
            with torch.enable_grad():
                own = x.detach().requires_grad_()
                y = run(own)
            if not y.requires_grad:
                # Its operand's shape is all that the operator asks for.
                return torch.zeros_like(x).expand(count, *x.shape)
            if count == 1:
                return torch.autograd.grad(y, own, gradients.reshape(y.shape), materialize_grads=True)[0][None]
            gradients = gradients.reshape(count, *y.shape)
            (found,) = torch.autograd.grad(y, own, gradients, is_grads_batched=True, allow_unused=True)
            return torch.zeros_like(x).expand(count, *x.shape) if found is None else found

        def jvp(tangent: torch.Tensor) -> torch.Tensor:
            # Twice backward: forward mode takes an operator that has none for a constant, and says nothing.
            with torch.enable_grad():
                own = x.detach().requires_grad_()
                y = run(own)
                gradient = torch.zeros_like(y, requires_grad=True)
                (pulled,) = torch.autograd.grad(y, own, gradient, create_graph=True)
            (found,) = torch.autograd.grad(pulled, gradient, tangent.reshape(x.shape))
            return found

        return replace(
            edge.call,
            arguments=split,
            batched=frozenset(layouts.keys() - {edge.call.argument}),
            input=x,
            output=out.split(self.tensors[edge.target].detach())[samples],
            node=self.tensors[edge.target].grad_fn if samples == slice(None) else None,
            vjp=vjp,
            vjps=None if operation.random else vjps,
            jvp=None if operation.random else jvp,
        )


def traced_stages(
    module: nn.Module, in_shape: Sequence[int], path: str, *, pruned: bool, like: torch.Tensor | None
) -> list[Stage]:
    """The stages of a module that is traced.

    Raises
    ------
    UnsupportedOperatorError
        Where it cannot be traced, mixes samples, or has an operator without a rule; the message begins with its path.
    ValueError
        Where the input does not fit.
    """
    program, known = trace(module, in_shape, path, like)
    stages: list[Stage] = []
    cuts = program.cuts()
    start = cuts[0]
    for stop in cuts[1:]:
        operations = program.between(start, stop)
        edges = tuple(_edges(program, operations, known, pruned, path))
        only_reshapes = len(edges) == 1 and isinstance(edges[0].pattern.structure, Identity)
        if only_reshapes and stop is not cuts[-1]:
            # It runs with the stage that follows.
            continue
        stage = TracedStage(
            path=_path(edges, program, path, {stage.path for stage in stages}),
            in_shape=program.shapes[start][1:],
            out_shape=program.shapes[stop][1:],
            edges=edges,
            start=start,
            stop=stop,
            program=program,
            operations=tuple(operations),
            where=path,
        )
        if only_reshapes and stages:
            # It runs with the stage before.
            last = stages.pop()
            assert isinstance(last, TracedStage)
            stage = replace(
                stage,
                path=last.path,
                in_shape=last.in_shape,
                edges=(*last.edges, *edges),
                start=last.start,
                operations=(*last.operations, *operations),
            )
        stages.append(stage)
        start = stop
    return stages


def _path(edges: Sequence[Edge], program: Program, where: str, taken: set[str]) -> str:
    """Where a stage is in the model: what the paths of its operations have in common, and more where that is taken."""
    operations = [program.operations[edge.target] for edge in working(edges) or edges]
    paths = zip(*(operation.path.split(".") for operation in operations), strict=False)
    common = [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, paths)]
    path = ".".join(part for part in (where, *common) if part) or type(program.module).__name__
    name = operations[-1].name.partition(".")[2] if operations else "constant"
    candidates = [path, f"{path}:{name}", *(f"{path}:{name}:{number}" for number in range(2, len(taken) + 3))]
    return next(candidate for candidate in candidates if candidate not in taken)


def _edges(
    program: Program,
    operations: Sequence[Operation],
    known: dict[fx.Node, Any],
    pruned: bool,
    where: str,
) -> list[Edge]:
    return [
        _edge(program, operation, name, known, pruned, where)
        for operation in operations
        if operation.node in program.active
        for name, operand in operation.operands.items()
        if operand in program.active
    ]


def _edge(
    program: Program, operation: Operation, argument: str, known: dict[fx.Node, Any], pruned: bool, where: str
) -> Edge:
    arguments = program.resolved(operation, known, 1)
    batched = {name for name, node in operation.operands.items() if node in program.layouts}
    source = operation.arguments[argument]
    path = ".".join(part for part in (where, operation.path) if part) or type(program.module).__name__

    def apply(x: torch.Tensor) -> torch.Tensor:
        given = dict(arguments)
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                given[name] = torch.zeros_like(value, dtype=x.dtype) if name in batched else value.to(x.dtype)
        given[argument] = x.to(known[source].device)
        return operation.evaluate(given)

    call = Call(
        operation.name,
        {name: value for name, value in arguments.items() if name != argument},
        program.shapes[source],
        program.shapes[operation.node],
        path,
        operation.source,
        argument=argument,
        batched=frozenset(batched - {argument}),
        dependent=frozenset(n for n, node in operation.operands.items() if node in program.dependent and n != argument),
        function=operation.evaluate,
        apply=apply,
    )
    edge = Edge(source, operation.node, call)
    edge.rule.check(call)
    # What was drawn is no guaranteed zero.
    drawn = [
        name
        for name in edge.rule.weights
        if any(made.random for made in program.between(program.input, operation.arguments[name]))
    ]
    weights = [name for name in edge.rule.weights if name not in {argument, *batched, *drawn}]
    if pruned and weights:
        masks = {name: program.mask_of(operation.arguments[name]) for name in weights}
        edge = edge.keeping([Kept(name, arguments[name], masks[name]) for name in weights])
    return edge
