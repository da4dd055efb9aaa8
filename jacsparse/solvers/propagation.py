"""Back-propagation as a triangular system: of a chain of stages, and of a stacked recurrent network."""

from __future__ import annotations

import itertools
import math
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..patterns import Diagonal, Pattern
from ..runtime import a_type
from ..spgemm import SparseJacobian
from ..stages import (
    Chain,
    Chains,
    Record,
    Run,
    add_gradients,
    check_input,
    counted_record,
    empty_pattern,
    factor_of,
    pull_back,
    recent_chains,
    refuse_hooks,
)
from ..tracing import check_module, without_autocast
from .blocks import Block, sum_of
from .recurrent_run import RecurrentRun, check_like, weight_block
from .solver import Solution, TriangularSolver
from .systems import BlockTriangular


@dataclass(frozen=True)
class Group:
    """The stages of one block row: what multiplies, if anything, and the elementwise ones that follow it."""

    linear: Record | None
    elementwise: tuple[Record, ...]

    @property
    def records(self) -> tuple[Record, ...]:
        """All of them, in the order of the forward pass."""
        return (*([] if self.linear is None else [self.linear]), *self.elementwise)

    def scale(self) -> torch.Tensor | None:
        """The product of the elementwise derivatives, ``(batch, elements)``; None where there are none."""
        product: torch.Tensor | None = None
        for record in self.elementwise:
            values = record.transposed_jacobian().values.T
            product = values if product is None else product * values
        return product


def groups_of(records: Sequence[Record]) -> list[Group]:
    """The block rows of a chain's records, the one next to the input first; its group has no matrix."""
    groups: list[tuple[Record | None, list[Record]]] = [(None, [])]
    for record in records:
        operator = record.stage.operator
        if operator is not None and isinstance(operator.transposed_pattern.structure, Diagonal):
            groups[-1][1].append(record)
        else:
            groups.append((record, []))
    return [Group(linear, tuple(elementwise)) for linear, elementwise in groups]


def _diagonal(scale: torch.Tensor | None) -> SparseJacobian | None:
    """The diagonal matrix of each sample, from its elements ``(batch, elements)``."""
    return None if scale is None else SparseJacobian(Pattern.of(Diagonal(scale.shape[1])), scale.T.contiguous())


class RecordedSystem(ABC):
    """The system of a forward pass, and where its solution has the gradients of the stages' outputs."""

    system: BlockTriangular

    @abstractmethod
    def outputs(self, values: Sequence[torch.Tensor]) -> Iterator[tuple[Sequence[Record], torch.Tensor]]:
        """Successive records, and the gradient of the last one's output, ``(batch, elements)``; all records in turn."""

    def external_gradients(
        self, values: Sequence[torch.Tensor], places: Collection[int], apart: Collection[int] = ()
    ) -> dict[int, torch.Tensor]:
        """Gradients of externals by their places in the trace, from the solution of the system.

        Those in `apart` are read elsewhere too: the gradients through that are left out.
        """
        passes = [
            (records, gradient, sorted(set().union(*(record.externals for record in records)) & set(places)))
            for records, gradient in self.outputs(values)
        ]
        readers = Counter(place for *_, read in passes for place in read)
        apart = {place for place, count in readers.items() if count > 1 or place in apart}
        gradients: dict[int, torch.Tensor] = {}
        for records, gradient, read in passes:
            if read:
                _, pulled = pull_back(records[::-1], gradient, [], read, apart)
                add_gradients(gradients, pulled)
        return gradients


class ChainSystem(RecordedSystem):
    """Back-propagation through a chain's records as one block bi-diagonal system (Naumov, equation 14).

    Its rows are ``E_k v_k - A_k v_{k+1} = c_k``: `v_k` is the gradient of what the matrix of group k gives, and `v_0`
    that of the input.
    """

    def __init__(self, records: Sequence[Record], gradient: torch.Tensor) -> None:
        refuse_hooks(records)
        self.groups, batch = groups_of(records), len(gradient)
        like = records[0].trace.input.detach()
        gradient = gradient.flatten(1).to(like.dtype)
        blocks = {
            (place, place + 1): group.linear.transposed_jacobian()
            for place, group in enumerate(self.groups[1:])
            if group.linear is not None
        }
        sizes = [*(block.shape[0] for block in blocks.values()), gradient.shape[1]]
        right = [like.new_zeros(batch, size) for size in sizes]
        right[-1] = gradient
        # As autograd, it passes on infinities.
        scales = [_diagonal(group.scale()) for group in self.groups]
        self.system = BlockTriangular(blocks, right, inverse_diagonal=scales, check_finite=False)

    def outputs(self, values: Sequence[torch.Tensor]) -> Iterator[tuple[Sequence[Record], torch.Tensor]]:
        for place, group in enumerate(self.groups):
            if group.linear is not None:
                yield [group.linear], values[place]
            # `values` are behind the elementwise stages; only gradients of their parameters need those before them.
            if any(record.externals for record in group.elementwise):
                yield group.elementwise, self._before_scaling(place, values)

    def _before_scaling(self, place: int, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """``c_k + A_k v_{k+1}``, the gradient of what a group's elementwise stages give."""
        block, right = self.system.off_diagonal.blocks.get((place, place + 1)), self.system.right[place].T
        if block is None:
            return right
        return right + SparseJacobian(block.pattern, block.values).jvp(values[place + 1])


class GraphSystem(RecordedSystem):
    """Back-propagation through all operators' edges as one block triangular system (the end of Naumov's section 2).

    Its nodes are the results of operators, of which several may be read more than once, as in a residual connection.
    """

    def __init__(self, records: Sequence[Record], gradient: torch.Tensor) -> None:
        refuse_hooks(records)
        self.records, batch = records, len(gradient)
        like = records[0].trace.input.detach()
        terms: dict[tuple[int, int], list[Block]] = {}
        sizes: dict[int, int] = {}
        for record in records:
            # Where the output does not depend on the input, a stage has no edges.
            sizes[record.stage.start] = math.prod(record.input.shape[1:])
            sizes[record.stage.stop] = math.prod(record.output.shape[1:])
            for edge in record.stage.edges:
                terms.setdefault((edge.source, edge.target), []).append(
                    Block(edge.transposed_pattern, record.values(edge))
                )
                sizes[edge.source], sizes[edge.target] = edge.transposed_pattern.shape
        self.nodes = {vertex: node for node, vertex in enumerate(sorted(sizes))}
        blocks = {}
        for (source, target), parts in terms.items():
            total = sum_of(parts)
            blocks[self.nodes[source], self.nodes[target]] = SparseJacobian(total.pattern, total.values)
        right = [like.new_zeros(batch, sizes[vertex]) for vertex in self.nodes]
        right[self.nodes[records[-1].stage.stop]] = gradient.flatten(1).to(like.dtype)
        self.system = BlockTriangular(blocks, right, check_finite=False)

    def outputs(self, values: Sequence[torch.Tensor]) -> Iterator[tuple[Sequence[Record], torch.Tensor]]:
        for record in self.records:
            yield [record], values[self.nodes[record.stage.stop]]


def _outline(records: Sequence[Record]) -> BlockTriangular:
    """A system with the shape, dtype and device of a chain's, and no elements in its blocks."""
    x = records[0].trace.input.detach()
    linear = [group.linear for group in groups_of(records) if group.linear is not None]
    sizes = [records[0].input[0].numel(), *(record.output[0].numel() for record in linear)]
    blocks = {
        (place, place + 1): SparseJacobian(empty_pattern(*shape), x.new_empty(0, 1))
        for place, shape in enumerate(itertools.pairwise(sizes))
    }
    return BlockTriangular(blocks, [x.new_zeros(len(x), size) for size in sizes], check_finite=False)


def _stretches(records: Sequence[Record]) -> list[Sequence[Record]]:
    """The records between those that couple samples, and each of these by itself, in order."""
    groups = itertools.groupby(records, lambda record: record.stage.stop if record.stage.couples else None)
    return [list(group) for _, group in groups]


class Propagator:
    """Pulls gradients back through a chain by a triangular solver, as `jacsparse.scan.Scanner` does by a schedule.

    Stages that couple samples have no block: each stretch between them is a system, and autograd goes through them.

    Raises
    ------
    ValueError, UnsupportedOperatorError
        Where the solver does not apply to the run's chain, or hooks may change its gradients.
    """

    module: ClassVar[str] = "nn.Solve"

    def __init__(self, method: TriangularSolver, run: Run) -> None:
        self.method, self.in_shape = method, run.trace.input.shape[1:]
        if run.records:
            # In the forward pass, where the traceback shows the caller's own line.
            refuse_hooks(run.records)
            for records in _stretches(run.records):
                if not records[0].stage.couples:
                    method.check(_outline(records))

    def pull_back(
        self, records: Sequence[Record], gradient: torch.Tensor, externals: Iterable[int], *, for_input: bool
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Gradients of the chain's input and of externals, for a gradient of its output."""
        places = set(externals)
        if not records:
            return (gradient.reshape(len(gradient), *self.in_shape) if for_input else None), {}
        stretches = [
            (part, places & set[int]().union(*(record.externals for record in part))) for part in _stretches(records)
        ]
        readers = Counter(place for _, read in stretches for place in read)
        apart = {place for place, count in readers.items() if count > 1}
        gradients: dict[int, torch.Tensor] = {}
        with without_autocast(gradient.device):
            for part, read in reversed(stretches):
                if part[0].stage.couples:
                    (gradient,), terms = pull_back(part, gradient, part, sorted(read), apart)
                else:
                    gradient, terms = self._solved(part, gradient, read, apart)
                add_gradients(gradients, terms)
        return (gradient.reshape(records[0].input.shape) if for_input else None), gradients

    def _solved(
        self, records: Sequence[Record], gradient: torch.Tensor, places: Collection[int], apart: Collection[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The gradients of the input of successive stages, ``(batch, elements)``, and of externals."""
        recorded = ChainSystem(records, gradient)
        solution = self.method.solve(recorded.system)
        if not solution.converged and solution.residual is not None:
            warnings.warn(
                f"{solution.method} stopped after {solution.iterations} iterations, with a residual of "
                f"{solution.residual:.1e}; the gradients are as inexact",
                RuntimeWarning,
                stacklevel=3,
            )
        return solution.values[0], recorded.external_gradients(solution.values, places, apart)


def stretches_of(module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> list[BlockTriangular | int]:
    """The systems of a module's back-propagation, from its output on; between them what the other stages take.

    A number stands for a stage that couples samples: the multiply-adds of its operators for the whole batch.
    """
    if isinstance(module, nn.RNN):
        return [propagation(module, x, gradient).system]
    chain, run = Chains(check_module(module), couples=True).of(check_input("x", x))
    _check_run(module, chain, run, gradient)
    refuse_hooks(run.records)
    stretches, gradient = list[BlockTriangular | int](), gradient.detach()
    with without_autocast(x.device):
        for part in reversed(_stretches(run.records)):
            if part[0].stage.couples:
                stretches.append(factor_of(counted_record(part[0])).nnz * len(x))
            else:
                stretches.append(ChainSystem(part, gradient).system)
            if part[0] is not run.records[0]:
                (gradient,), _ = pull_back(part[::-1], gradient, part[:1], [], ())
    return stretches


def _check_run(module: nn.Module, chain: Chain, run: Run, gradient: torch.Tensor) -> None:
    """Raise where a run has no stages, or the gradient is not one of its output."""
    if not len(chain):
        raise ValueError(f"{type(module).__name__} has no stages; a system needs an operator that does something")
    check_like("gradient", gradient, run.trace.output.shape, run.trace.output)


class Propagation(ABC):
    """A module's back-propagation as a system, and what its solution is the gradients of."""

    system: BlockTriangular

    @abstractmethod
    def gradients(self, solution: Solution) -> dict[str, torch.Tensor]:
        """The gradients of the input, by the name ``input``, of an RNN's first states, by ``hx``, and of parameters.

        Parameters have the names of ``named_parameters``: a tied one has the first of its names, and a pruned or
        parametrised weight is there by the parameters that it is computed from. Frozen and unused ones have none.
        """


class ModulePropagation(Propagation):
    """Back-propagation of a module, as a chain of stages, or as a graph of its operators."""

    def __init__(self, module: nn.Module, x: torch.Tensor, gradient: torch.Tensor, graph: bool) -> None:
        check_input("x", x)
        self.module = module
        chain, self.run = recent_chains(check_module(module), pruned=True).of(x)
        _check_run(module, chain, self.run, gradient)
        with without_autocast(x.device):
            self.recorded = (GraphSystem if graph else ChainSystem)(self.run.records, gradient.detach())
        self.system = self.recorded.system

    def gradients(self, solution: Solution) -> dict[str, torch.Tensor]:
        places = {id(tensor): place for place, tensor in enumerate(self.run.trace.externals)}
        names = {name: places[id(p)] for name, p in self.module.named_parameters() if id(p) in places}
        gradients = self.recorded.external_gradients(solution.values, names.values())
        x = self.run.records[0].input
        return {
            "input": solution.values[0].reshape(x.shape),
            **{name: gradients[place] for name, place in names.items() if place in gradients},
        }


class RecurrentPropagation(Propagation):
    """Back-propagation of a stacked RNN of k layers over τ steps: a two-level system (Naumov, equations 22 to 29).

    Its nodes are those of `RecurrentRun`, and its groups the steps, the last one first.

    Parameters
    ----------
    layer : RNN
        In one direction, and without dropout.
    x : Tensor, (time, batch, features), or (batch, time, features) where `batch_first`
        The input.
    gradient : Tensor
        Of the output.
    last : Tensor, (layers, batch, hidden), optional
        The gradient of the last states.
    hx : Tensor, (layers, batch, hidden), optional
        The first states.
    """

    def __init__(
        self,
        layer: nn.RNN,
        x: torch.Tensor,
        gradient: torch.Tensor,
        last: torch.Tensor | None = None,
        hx: torch.Tensor | None = None,
    ) -> None:
        self.run = RecurrentRun(layer, x, hx)
        check_like("gradient", gradient, (*x.shape[:2], layer.hidden_size), x)
        if last is not None:
            check_like("last", last, self.run.first.shape, x)
        if layer.batch_first:
            gradient = gradient.transpose(0, 1)
        self._recurrent = [weight_block(weights[1].T) for weights in self.run.weights]
        self.system = self._system(gradient.detach(), None if last is None else last.detach())

    def _system(self, gradient: torch.Tensor, last: torch.Tensor | None) -> BlockTriangular:
        layer, node_of, time = self.run.layer, self.run.node, len(gradient)
        depth = layer.num_layers
        entering = [weight_block(weights[0].T) for weights in self.run.weights]
        blocks, right, inverse = dict[tuple[int, int], SparseJacobian](), list[torch.Tensor](), list[Any]()
        for step in range(time):
            for place, states in enumerate(self.run.states):
                node, h = node_of(place, step), states[step]
                if place < depth:
                    blocks[node, node_of(place + 1, step)] = entering[place]
                if place and step + 1 < time:
                    blocks[node, node_of(place, step + 1)] = self._recurrent[place - 1]
                c = gradient[step] if place == depth else torch.zeros_like(h)
                if place and last is not None and step == time - 1:
                    c = c + last[place - 1]
                right.append(c)
                derivative = 1 - h.square() if layer.nonlinearity == "tanh" else (h > 0).to(h.dtype)
                inverse.append(_diagonal(derivative) if place else None)
        groups = [[node_of(place, step) for place in range(depth, -1, -1)] for step in range(time - 1, -1, -1)]
        return BlockTriangular(blocks, right, inverse_diagonal=inverse, groups=groups, check_finite=False)

    def gradients(self, solution: Solution) -> dict[str, torch.Tensor]:
        layer, states = self.run.layer, self.run.states
        v = [
            torch.stack([solution.values[self.run.node(place, step)] for step in range(len(states[0]))])
            for place in range(layer.num_layers + 1)
        ]
        of_weights = list[torch.Tensor]()
        for place, first in enumerate(self.run.first):
            of_gates = v[place + 1].flatten(0, 1)
            before = torch.cat([first[None], states[place + 1][:-1]]).flatten(0, 1)
            of_weights += [of_gates.T @ states[place].flatten(0, 1), of_gates.T @ before]
            of_weights += [of_gates.sum(dim=0)] * (2 * layer.bias)
        return {
            "input": v[0].transpose(0, 1) if layer.batch_first else v[0],
            "hx": torch.stack([block.jvp(part[0]) for block, part in zip(self._recurrent, v[1:], strict=True)]),
            **self._of_parameters(of_weights),
        }

    def _of_parameters(self, of_weights: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The gradients of the parameters that the weights are computed from."""
        weights = [weight for weights in self.run.weights for weight in weights]
        trained = [pair for pair in zip(weights, of_weights, strict=True) if pair[0].requires_grad]
        parameters = {name: p for name, p in self.run.layer.named_parameters() if p.requires_grad}
        if not trained:
            return {}
        gradients = torch.autograd.grad(
            [weight for weight, _ in trained],
            list(parameters.values()),
            [gradient for _, gradient in trained],
            retain_graph=True,
            allow_unused=True,
        )
        return {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}


def propagation(
    module: nn.Module,
    x: torch.Tensor,
    gradient: torch.Tensor,
    *,
    last: torch.Tensor | None = None,
    hx: torch.Tensor | None = None,
    graph: bool = False,
) -> Propagation:
    """A module's back-propagation as a triangular system.

    Parameters
    ----------
    module : Module
        A chain of stages, or an ``nn.RNN``.
    x : Tensor, (batch, *input_shape)
        The input.
    gradient : Tensor
        Of the output.
    last, hx : Tensor, (layers, batch, hidden), optional
        Of an RNN, the gradient of the last states, and the first states.
    graph : bool
        Whether each operator's result is a node of its own, so that residual connections are blocks beside the others.
        By default the nodes are those of a chain, and a residual block is one matrix.

    Raises
    ------
    TypeError, ValueError, UnsupportedOperatorError
        Where an argument does not fit, or an operator has no rule.

    Examples
    --------
    >>> import torch
    >>> from jacsparse.solvers import solve
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    >>> backward = propagation(net, torch.randn(5, 3), torch.ones(5, 2))
    >>> backward.system
    <BlockTriangular of 3 block rows, 2 blocks, batch 5>
    >>> sorted(backward.gradients(solve(backward.system, method="scan")))
    ['0.bias', '0.weight', '2.bias', '2.weight', 'input']
    """
    if isinstance(module, nn.RNN):
        if graph:
            raise ValueError("graph=True is for modules of operators; the nodes of an RNN are its layers and steps")
        return RecurrentPropagation(module, x, gradient, last, hx)
    if last is not None or hx is not None:
        raise TypeError(f"last and hx are of an RNN, and the module is {a_type(module)}")
    return ModulePropagation(module, x, gradient, graph)
