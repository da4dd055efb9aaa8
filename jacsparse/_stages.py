"""Stages of a chain, and what a forward pass records of each."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ._accumulation import Accumulation, Region, eliminate, empty_pattern
from ._jacobian import SparseJacobian
from ._modules import Kept, arguments_of, parts_of, tensors_of, trains, twin
from .patterns import Call, Diagonal, Identity, Pattern, Rule, rule_for
from .spgemm import matvec

__all__ = [
    "AT_ONCE",
    "TRAINS",
    "Edge",
    "ModuleStage",
    "Record",
    "Stage",
    "check_alike",
    "check_dtype",
    "own_parameters",
    "pull_back_all",
    "working",
]


@dataclass(frozen=True, eq=False, repr=False)
class Edge:
    """One operator's dependence on one of its operands: a local Jacobian.

    Attributes
    ----------
    source, target : hashable
        The operand and the result.
    call : Call
        The operator's, while only shapes are known.
    kept : tuple of Kept
        The weights of which the pattern leaves some out.
    """

    source: Any
    target: Any
    call: Call
    kept: tuple[Kept, ...] = ()

    @functools.cached_property
    def rule(self) -> Rule:
        """How the operator's pattern and values are made."""
        return rule_for(self.call)

    @functools.cached_property
    def pattern(self) -> Pattern:
        """Of the transposed Jacobian, ``(in_size, out_size)``."""
        pattern, expected = self.rule.pattern(self.call), (self.call.out_size, self.call.in_size)
        if pattern.shape != expected:
            raise ValueError(
                f"{self.call.path}: the rule of {self.call.operator} gave a pattern of shape {pattern.shape}; "
                f"expected {expected}"
            )
        return pattern.T

    @property
    def shared(self) -> bool:
        """Whether all samples share the values."""
        return self.rule.shared(self.call)

    def keeping(self, kept: Sequence[Kept]) -> Edge:
        """The same edge with a pattern that leaves out what these weights do."""
        some = tuple(weight for weight in kept if not bool(weight.mask.all()))
        return replace(self, call=replace(self.call, kept={weight.name: weight.mask for weight in some}), kept=some)

    def __repr__(self) -> str:
        return f"<Edge {self.call.path}: {self.call.operator}, {self.call.argument}>"


def working(edges: Sequence[Edge]) -> list[Edge]:
    """The edges of operators that do more than pass their one operand on, in another shape perhaps."""
    operands = Counter(edge.target for edge in edges)
    return [edge for edge in edges if operands[edge.target] > 1 or not isinstance(edge.pattern.structure, Identity)]


@dataclass(frozen=True, eq=False)
class Stage(ABC):
    """A part of a chain through which all of the gradient passes: an operator, or a graph of several.

    Attributes
    ----------
    path : str
        In the model, as in ``features.0``.
    in_shape, out_shape : tuple of int
        Without the batch axis.
    edges : tuple of Edge
        The operators, with their operands.
    start, stop : hashable
        The edges' first source and last target.
    """

    path: str
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    edges: tuple[Edge, ...]
    start: Any
    stop: Any

    @functools.cached_property
    def operator(self) -> Edge | None:
        """The operator, where there is one alone among others that only reshape; else None."""
        if len({edge.source for edge in self.edges}) < len(self.edges):
            return None
        some = working(self.edges) or self.edges[:1]
        return some[0] if len(some) == 1 else None

    @property
    def name(self) -> str:
        """The ATen operator, or how many there are that do more than reshape."""
        operator, count = self.operator, len({edge.target for edge in working(self.edges)})
        return f"{count} operators" if operator is None else operator.call.operator

    @functools.cached_property
    def _accumulated(self) -> tuple[Accumulation, int | None]:
        accumulation = Accumulation()
        return accumulation, self.joined(accumulation, lambda edge: accumulation.leaf(edge, edge.pattern))

    @functools.cached_property
    def pattern(self) -> Pattern:
        """Of the transposed Jacobian, ``(in_size, out_size)``: the union over all paths."""
        accumulation, result = self._accumulated
        if result is None:
            return empty_pattern(math.prod(self.in_shape), math.prod(self.out_shape))
        return accumulation.matrices[result].pattern

    def factor(self, patterns: Sequence[Pattern] | None = None) -> Pattern | Region:
        """The transposed Jacobian as what counts ask of it; made of other patterns of the edges where given."""
        own = [edge.pattern for edge in self.edges] if patterns is None else patterns
        if self.operator is not None:
            return own[self.edges.index(self.operator)]
        edges = [(edge.source, edge.target, pattern) for edge, pattern in zip(self.edges, own, strict=True)]
        return Region((math.prod(self.in_shape), math.prod(self.out_shape)), edges, self.start, self.stop)

    def joined(self, accumulation: Accumulation, leaf: Callable[[Edge], int]) -> int | None:
        """The stage's matrix among those of an accumulation, made of its edges' own; None where it is zero."""
        if self.operator is not None:
            return leaf(self.operator)
        edges = [(edge.source, edge.target, leaf(edge)) for edge in self.edges]
        return eliminate(accumulation, edges, self.start, self.stop)

    @property
    def shared(self) -> bool:
        """Whether all samples share the Jacobian's values."""
        return all(edge.shared for edge in self.edges)

    @property
    def backward_work(self) -> int:
        """Multiply-adds, roughly, of the operators' own backward for one sample: dense, and one for each element."""
        return sum(edge.rule.multiply_adds(edge.call) + edge.call.in_size + edge.call.out_size for edge in self.edges)

    @property
    def hooked(self) -> bool:
        """Whether a module of the stage has hooks that see gradients."""
        return False

    @abstractmethod
    def run(self, x: torch.Tensor, state: dict[Any, Any]) -> Record:
        """The stage's output for a batch, with a graph of its own: nothing before `x` is reached from it.

        Parameters
        ----------
        x : Tensor, (batch, *in_shape)
            Its input.
        state : dict
            What the stages of one forward pass share.
        """

    def weights_of(self, edge: Edge) -> dict[str, tuple[torch.Tensor, bool]]:
        """The weights of an edge's operator, as the module computes them, and whether they train; by name."""
        return {}

    def keeping(self, edges: Sequence[Edge]) -> Stage:
        """The same stage with other edges in the place of its own."""
        return replace(self, edges=tuple(edges))

    def __repr__(self) -> str:
        return f"<Stage {self.path}: {self.name}, {self.in_shape} to {self.out_shape}>"


@dataclass(frozen=True, eq=False, repr=False)
class ModuleStage(Stage):
    """One module that is an operator, with the modules around it that only reshape.

    Attributes
    ----------
    modules : tuple of (str, Module)
        What runs, in order, with paths; one of them is the operator.
    module : Module
        The one that computes.
    """

    modules: tuple[tuple[str, nn.Module], ...]
    module: nn.Module

    @property
    def hooked(self) -> bool:
        """As `Stage.hooked`."""
        return any(module._backward_hooks or module._backward_pre_hooks for _, module in self.modules)

    def run(self, x: torch.Tensor, state: dict[Any, Any]) -> Record:
        """As `Stage.run`.

        Raises
        ------
        RuntimeError
            Where a hook changes what a module takes or gives: the operator's Jacobian would be another one.
        """
        # Parameters of the record's own: the user's hooks on theirs are for autograd to call, once, not for the stage.
        check_alike(self.path, self.module, x)
        own = own_parameters(self.module, trains=state[TRAINS])
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = operator_input = operator_output = leaf
            hooked, arguments = False, {}
            for path, module in self.modules:
                # An in-place operator would overwrite the stage's input, which the stage before may need.
                given = y.clone() if getattr(module, "inplace", False) else y
                running = twin(module, own)
                y = _called(running, given, path)
                hooked |= _pulls(running, y)
                if module is self.module:
                    operator_input, operator_output, arguments = given, y, arguments_of(running)
        check_dtype(self.path, y, x)
        arguments_of_edge = {self.edges[0]: arguments}
        ends = {"operator_input": operator_input, "operator_output": operator_output}
        return ModuleRecord(self, leaf, y, own, arguments_of_edge, hooked, **ends)

    def weights_of(self, edge: Edge) -> dict[str, tuple[torch.Tensor, bool]]:
        """As `Stage.weights_of`."""
        found = ((name, edge.call.arguments.get(name)) for name in ("weight", "bias"))
        return {name: (value, trains(self.module, name)) for name, value in found if isinstance(value, torch.Tensor)}


#: Names, among what the stages of a forward pass share, whether gradients of parameters will be asked for.
TRAINS = "trains"


def own_parameters(module: nn.Module, *, trains: bool = True) -> dict[int, torch.Tensor]:
    """What a forward pass has in the place of a module's training parameters, by their ``id``.

    The user's hooks on those are for autograd to call, once.
    """
    held = (p for part in parts_of(module) for p in part._parameters.values() if p is not None)
    return {id(p): p.detach().requires_grad_(trains) for p in held if p.requires_grad}


def check_dtype(path: str, y: torch.Tensor, x: torch.Tensor) -> None:
    """Raise where what a stage makes is not of its input's dtype."""
    if y.dtype != x.dtype:
        raise TypeError(
            f"{path} makes {y.dtype} of {x.dtype}; keep one dtype, without torch.autocast, .half() or .double()"
        )


def check_alike(path: str, module: nn.Module, x: torch.Tensor) -> None:
    """Raise where a parameter or buffer is not of the input's kind, or elsewhere."""
    dtypes = (x.dtype, *_INTEGERS)
    if all(tensor.dtype in dtypes and tensor.device == x.device for tensor in tensors_of(module)):
        return
    for own, tensor in (*module.named_parameters(), *module.named_buffers()):
        name = f"{path}.{own}".lstrip(".")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, its input on {x.device}; move one of them")
        if tensor.is_floating_point() and tensor.dtype != x.dtype:
            raise TypeError(f"{name} is {tensor.dtype}, its input {x.dtype}; convert one of them")


_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _called(module: nn.Module, x: torch.Tensor, path: str) -> torch.Tensor:
    """``module(x)``, hooks and all, where no hook changes what goes in or comes out."""
    seen: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    forward = module.forward

    def look(taken: torch.Tensor) -> torch.Tensor:
        output = forward(taken)
        seen.append((taken, output, output._version))
        return output

    module.forward = look
    try:
        y = module(x)
    finally:
        # Or it would hold itself, and all that it computed.
        del module.forward
    taken, given, version = seen[0]
    if not _same(taken, x) or not _same(given, y) or y._version != version:
        raise RuntimeError(
            f"{path}: a forward hook changes the module's input or output, so its Jacobian is not the operator's; "
            "make the change in a module of its own"
        )
    return y


def _pulls(module: nn.Module, y: torch.Tensor) -> bool:
    """Whether a hook is run when a gradient passes through the module."""
    everywhere = nn.modules.module
    hooks = (module._backward_hooks, module._backward_pre_hooks, y._backward_hooks)
    return any((*hooks, everywhere._global_backward_hooks, everywhere._global_backward_pre_hooks))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are one, or one is the other as PyTorch's backward hooks wrap it."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())


@dataclass(eq=False)
class Record(ABC):
    """What a stage computed for one batch.

    Attributes
    ----------
    input, output : Tensor
        ``(batch, *shape)``; a graph leads from one to the other and to the stage's parameters.
    parameters : dict of int to Tensor
        The graph's own parameters, by the ``id`` of the module's; those that train.
    arguments : dict of Edge to dict
        Each operator's: its weights as pruning hooks and parametrisations made them for this forward.
    hooked : bool
        Whether a hook sees gradients on their way through.
    """

    stage: Stage
    input: torch.Tensor
    output: torch.Tensor
    parameters: dict[int, torch.Tensor] = field(repr=False)
    arguments: dict[Edge, dict[str, Any]] = field(repr=False)
    hooked: bool = False

    def __post_init__(self) -> None:
        # Whether the patterns are known to leave out none of this forward's weights.
        self._fits = False
        # No derivative depends on what is only added.
        self._versions = {
            (edge, name): value._version
            for edge, arguments in self.arguments.items()
            for name, value in arguments.items()
            if isinstance(value, torch.Tensor) and name not in ("bias", "running_mean")
        }

    def adapted(self) -> Record:
        """The same record, of a stage whose pattern leaves out what is zero in the weights of this forward."""
        new: dict[Edge, Edge] = {}
        for edge in self.stage.edges:
            arguments = self.arguments[edge]
            if not all(kept.holds(arguments[kept.name]) for kept in edge.kept):
                # Masks are in the stage's key: what does not hold is what was zero by chance.
                new[edge] = edge.keeping([Kept(name, arguments[name], None) for name in edge.rule.weights])
        if not new:
            self._fits = True
            return self
        renamed = {new.get(edge, edge): own for edge, own in self.arguments.items()}
        stage = self.stage.keeping([new.get(edge, edge) for edge in self.stage.edges])
        return replace(self, stage=stage, arguments=renamed)

    @property
    def batch(self) -> int:
        """Samples."""
        return self.input.shape[0]

    def vjp(self, gradient: torch.Tensor) -> torch.Tensor:
        """``Jᵀ g`` for each sample, ``(batch, *out_shape)`` to ``(batch, *in_shape)``: the operators' own backward."""
        return self.pull_back(gradient, (), for_input=True)[0]

    def pull_back(
        self, gradient: torch.Tensor, parameters: Sequence[int], *, for_input: bool
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Gradients of the input and of parameters (equation 2.2), for a gradient of the output.

        Parameters
        ----------
        gradient : Tensor, (batch, *out_shape)
            Of the output.
        parameters : sequence of int
            Which, by the ``id`` of the module's.
        for_input : bool
            Whether the input's is wanted too; it is empty otherwise.
        """
        wanted = [*([self.input] if for_input else []), *(self.parameters[key] for key in parameters)]
        if not wanted:
            return gradient.new_empty(0), {}
        if not self.output.requires_grad:
            # No derivative passes through the stage.
            found: Sequence[torch.Tensor] = [torch.zeros_like(tensor) for tensor in wanted]
        else:
            found = torch.autograd.grad(
                self.output, wanted, gradient.reshape(self.output.shape), retain_graph=True, materialize_grads=True
            )
        own = found[1:] if for_input else found
        return found[0] if for_input else gradient.new_empty(0), dict(zip(parameters, own, strict=True))

    def jacobian(self) -> SparseJacobian:
        """``J`` for the whole batch."""
        operator = self.stage.operator
        if operator is None:
            return self.transposed_jacobian().T
        call = self._call(operator, slice(None))
        return self._made(self.stage.pattern.T, lambda: operator.rule.values(call, self.stage.pattern.T))

    def transposed_jacobian(self, samples: slice = slice(None)) -> SparseJacobian:
        """``J.T`` for a slice of the batch."""
        operator = self.stage.operator
        if operator is not None:
            return self._made(self.stage.pattern, lambda: self.values(operator, samples))
        accumulation, result = self.stage._accumulated
        if result is None:
            return SparseJacobian(self.stage.pattern, self.input.new_empty((0, len(self.input[samples]))))
        return self._made(self.stage.pattern, lambda: accumulation.run(result, lambda edge: self.values(edge, samples)))

    def values(self, edge: Edge, samples: slice = slice(None)) -> torch.Tensor:
        """Values of one operator's transposed Jacobian, ``(nnz, batch)`` or ``(nnz, 1)``."""
        return edge.rule.transposed_values(self._call(edge, samples), edge.pattern)

    def pull_back_sparse(self, vectors: torch.Tensor, samples: slice = slice(None)) -> torch.Tensor:
        """``Jᵀ g`` for a slice of the batch by the operators' sparse Jacobians, one by one: ``(elements, batch)``."""
        held = {self.stage.stop: vectors}
        for edge in reversed(self.stage.edges):
            if edge.target in held:
                own = matvec(edge.pattern, self.values(edge, samples), held[edge.target])
                held[edge.source] = held[edge.source] + own if edge.source in held else own
        found = held.get(self.stage.start)
        return vectors.new_zeros((math.prod(self.stage.in_shape), vectors.shape[1])) if found is None else found

    def pull_back_columns(self, gradients: Scaled) -> Scaled:
        """``Jᵀ g`` of many gradients for each sample by the operators' own backward."""
        columns = gradients.gradients.shape[:2]
        held = {self.stage.stop: gradients}
        for edge in reversed(self.stage.edges):
            if edge.target not in held:
                continue
            own = held[edge.target]
            if isinstance(edge.pattern.structure, Identity):
                pass
            elif isinstance(edge.pattern.structure, Diagonal):
                own = own.times(self.values(edge).T)
            else:
                given = own.product().reshape(*columns, *edge.call.out_shape)
                pulled = edge.rule.pull_back(self._call(edge, slice(None)), edge.pattern.T, given)
                own = Scaled(pulled.reshape(*columns, edge.call.in_size))
            held[edge.source] = held[edge.source].plus(own) if edge.source in held else own
        if self.stage.start not in held:
            return Scaled(gradients.gradients.new_zeros(()).expand(*columns, math.prod(self.stage.in_shape)))
        return held[self.stage.start]

    def _made(self, pattern: Pattern, values: Callable[[], torch.Tensor]) -> SparseJacobian:
        try:
            return SparseJacobian(pattern, values())
        except torch.OutOfMemoryError as error:
            rows, columns = pattern.shape
            raise torch.OutOfMemoryError(f"{self.stage.path}, {rows:,} × {columns:,}: {error}") from error

    def winners(self, samples: slice = slice(None)) -> torch.Tensor | None:
        """For a stage that selects, what it selects: int32, ``(windows, batch)``."""
        operator = self.stage.operator
        return None if operator is None else operator.rule.selection(self._call(operator, samples))

    def _call(self, edge: Edge, samples: slice) -> Call:
        """An operator's call with its tensors, for a slice of the batch."""
        arguments, path = self.arguments[edge], edge.call.path
        for name, value in arguments.items():
            if (edge, name) in self._versions and value._version != self._versions[edge, name]:
                raise RuntimeError(
                    f"{path}.{name} was changed in place between forward and backward; run the forward again"
                )
        for kept in () if self._fits else edge.kept:
            if not kept.holds(arguments[kept.name]):
                raise RuntimeError(
                    f"{path}.{kept.name}: weights that were pruned or zero when the pattern was made are not "
                    "zero any more; make the chain again, keep them zero by a mask (torch.nn.utils.prune), or pass "
                    "pruned=False"
                )
        return self._filled(edge, arguments, samples)

    @abstractmethod
    def _filled(self, edge: Edge, arguments: dict[str, Any], samples: slice) -> Call:
        """The call with what a forward pass knows, for a slice of the batch."""


@dataclass(frozen=True)
class Scaled:
    """Gradients, ``(columns, batch, elements)``, and what each element is still to be multiplied by."""

    gradients: torch.Tensor
    scale: torch.Tensor | None = None

    def times(self, scale: torch.Tensor) -> Scaled:
        """Of diagonals that follow each other the product is taken, not that of each with all columns."""
        return Scaled(self.gradients, scale if self.scale is None else self.scale * scale)

    def product(self) -> torch.Tensor:
        """The gradients."""
        return self.gradients if self.scale is None else self.gradients * self.scale

    def plus(self, other: Scaled) -> Scaled:
        """The sum of two."""
        if self.scale is None and other.scale is not None:
            return other.plus(self)
        if self.scale is None:
            return Scaled(self.gradients + other.gradients)
        return Scaled(torch.addcmul(other.product(), self.gradients, self.scale))


#: Bytes of gradients that are held at once.
AT_ONCE = 2**26


def pull_back_all(records: Sequence[Record], columns: torch.Tensor) -> torch.Tensor:
    """``Jᵀ K`` for each sample by the operators' own backward, from the last record's output to the first one's input.

    Of ``(out_size, columns, batch)``, where a batch of 1 is shared; the result is ``(in_size, columns, batch)``.
    """
    batch = records[0].batch
    gradients = columns.expand(-1, -1, batch).permute(1, 2, 0)
    largest = max(max(edge.pattern.shape) for record in records for edge in record.stage.edges)
    if not gradients.numel():
        return gradients.new_zeros(math.prod(records[0].stage.in_shape), *columns.shape[1:2], batch)
    parts = []
    for part in gradients.split(max(1, AT_ONCE // (largest * batch * columns.element_size()))):
        own = Scaled(part)
        for record in reversed(records):
            own = record.pull_back_columns(own)
        parts.append(own.product())
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).permute(2, 0, 1)


@dataclass(eq=False)
class ModuleRecord(Record):
    """Of a stage that is one module: input and output of the operator among those around it that reshape."""

    operator_input: torch.Tensor = field(kw_only=True, repr=False)
    operator_output: torch.Tensor = field(kw_only=True, repr=False)

    def _filled(self, edge: Edge, arguments: dict[str, Any], samples: slice) -> Call:
        # As the operator is given one sample: with a batch of one.
        given, made = (t.detach().unsqueeze(1) for t in (self.operator_input, self.operator_output))
        whole = samples == slice(None)
        return replace(
            edge.call,
            arguments=arguments,
            input=given if whole else given[samples],
            output=made if whole else made[samples],
            node=self.operator_output.grad_fn if whole else None,
            vjp=lambda gradient: self._operator_vjp(gradient, samples),
            vjps=self._operator_vjps if whole else None,
        )

    def _operator_vjps(self, gradients: torch.Tensor) -> torch.Tensor:
        given, made = self.operator_input, self.operator_output
        if not made.requires_grad:
            return torch.zeros_like(given).expand(len(gradients), *given.shape)
        (found,) = torch.autograd.grad(
            made, given, gradients.reshape(len(gradients), *made.shape), retain_graph=True, is_grads_batched=True
        )
        return found

    def _operator_vjp(self, gradient: torch.Tensor, samples: slice) -> torch.Tensor:
        # The graph holds the whole batch; samples do not mix, so the others may have any gradient.
        whole = gradient.new_zeros(self.output.shape)
        whole[samples] = gradient.reshape(whole[samples].shape)
        return self.vjp(whole)[samples]
