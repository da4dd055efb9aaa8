"""A module as a chain of stages, which back-propagation goes through one after the other."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..patterns import Identity, Pattern, UnsupportedOperatorError
from ..runtime import announced_where_long, machine_memory
from ..spgemm import SparseJacobian, matvec
from ..tracing import (
    PrunedWeight,
    Trace,
    check_module,
    name_of,
    program_of,
    samples_of,
    shows,
    traced,
    undisturbed,
    without_autocast,
)
from .accumulation import Accumulation, Region
from .balance import boundaries
from .chain_figure import chain_figure
from .checks import agree, check_input, check_shape
from .costs import COSTS, Costs, costs_for
from .graph_gradients import has_hooks
from .loops import LoopRegion, loop_regions
from .order import Estimates, Order, accumulated, best_order
from .record import Record, pull_back_all
from .stage import Edge, Stage, stages_of

#: A Jacobian takes at least this share of its estimated size.
SURE = 0.5


class Chain:
    """The stages of a module, in order; `chain` makes it.

    Operators that only reshape are no stages: they belong to the stage that follows them, or to the last one.

    Attributes
    ----------
    module : Module
        The module, of a chain that `chain` made: one in a cache must not keep it alive.
    name : str
        The module's class, or the name of a function.
    stages : tuple of Stage
        The stages; the first one is next to the input.
    in_shape, out_shape : tuple of int
        Shapes of one sample of the input and of the output.
    costs : Costs
        Those of the device, by which orders are chosen.
    """

    module: nn.Module

    def __init__(
        self,
        name: str,
        stages: Sequence[Stage],
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        costs: Costs | None = None,
    ) -> None:
        self.name, self.stages, self.costs = name, tuple(stages), costs or COSTS["cpu"]
        self.in_shape, self.out_shape = in_shape, out_shape
        self._loops: tuple[list[LoopRegion], list[str]] | None = None

    def __len__(self) -> int:
        return len(self.stages)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def adapted(self, trace: Trace, *, by_masks: bool = False) -> Chain:
        """The same chain with patterns that omit only elements that are zero in a run's weights."""
        pairs = ((edge, edge.adapted(trace, by_masks=by_masks)) for edge in self._pruned)
        others = {edge: other for edge, other in pairs if other is not edge}
        if not others:
            return self
        stages = [
            stage
            if others.keys().isdisjoint(stage.edges)
            else replace(stage, edges=tuple(others.get(edge, edge) for edge in stage.edges))
            for stage in self.stages
        ]
        return Chain(self.name, stages, self.in_shape, self.out_shape, self.costs)

    def records(self, trace: Trace) -> list[Record]:
        """The record of each stage in a run in which all that the patterns omit is zero."""
        return [Record(stage, trace) for stage in self.stages]

    def loops(self, trace: Trace) -> tuple[list[LoopRegion], list[str]]:
        """The stages that are loops, and why others are none, from a run of the chain's graph."""
        if self._loops is None:
            self._loops = loop_regions(trace, self.stages)
        return self._loops

    def part(self, first: int, stop: int) -> Chain:
        """The chain of the stages from `first` to `stop`, of which there is one and none is a loop."""
        stages = self.stages[first:stop]
        part = Chain(self.name, stages, stages[0].in_shape, stages[-1].out_shape, self.costs)
        part._loops = [], []
        return part

    def trained_zeros(self, trace: Trace) -> bool:
        """Whether patterns omit elements that training may fill: zeros of weights that have a gradient and no mask."""
        pairs = ((edge, weight) for edge in self._pruned for weight in edge.omissions)
        return any(
            not w.masked and trace.tensor(edge.number_of(w.name)).requires_grad and not bool(w.mask.all())
            for edge, w in pairs
        )

    def run(self, x: torch.Tensor) -> list[Record]:
        """Run the module on a batch, and return the record of each stage, with patterns that hold for this run."""
        trace = traced(self.module, check_input("x", x, self.in_shape))
        with without_autocast(x.device):
            return chain_of(trace).adapted(trace).records(trace)

    @property
    def edges(self) -> Iterator[Edge]:
        """The edges of all stages, in order."""
        return itertools.chain.from_iterable(stage.edges for stage in self.stages)

    @functools.cached_property
    def _pruned(self) -> tuple[Edge, ...]:
        """The edges whose patterns omit elements of weights."""
        return tuple(edge for edge in self.edges if edge.omissions)

    @functools.cached_property
    def pruned_weights(self) -> tuple[PrunedWeight, ...]:
        """The weights from which patterns omit elements; masks that select are none."""
        weights = (weight for edge in self._pruned for weight in edge.omissions)
        return tuple(weight for weight in weights if weight.floating)

    @functools.cached_property
    def registered_values(self) -> tuple[Edge, ...]:
        """The edges whose values were registered, and may be others than those of PyTorch's derivative."""
        return tuple(edge for edge in self.edges if edge.rule.has_registered_values)

    @functools.cached_property
    def coupling(self) -> tuple[int, ...]:
        """The stages, from 0, in which the samples of a batch depend on each other."""
        return tuple(number for number, stage in enumerate(self.stages) if stage.couples)

    @property
    def factors(self) -> list[Pattern | Region]:
        """The transposed Jacobian of each stage, as counts see it."""
        return [stage.factor() for stage in self.stages]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the stages from input to output: the entries of each Jacobian beside all positions of the matrix.

        A stage that couples samples has no matrix, and only the outline. Patterns of stages of several operators are
        computed, which takes as long as `Stage.pattern`.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        chain_figure(self, path)

    def boundaries(self, workers: int, first: int = 0, stop: int | None = None) -> list[int]:
        """The places at which `jacsparse.schedule.balanced` cuts the stages from `first` to `stop`."""
        return boundaries([stage.factor() for stage in self.stages[first:stop]], workers)

    @functools.cached_property
    def order(self) -> Order:
        """The order of least predicted cost, in which `jacobian` multiplies; the chain has at least one stage.

        UnsupportedOperatorError is raised where a stage couples samples.
        """
        for number in self.coupling:
            self.stages[number].check_matrix()
        return best_order(self.stages, self.costs)

    @functools.cached_property
    def estimated_entries(self) -> float:
        """The entries of the Jacobian; of several operators an estimate, without any pattern of a product."""
        operator = self.stages[0].operator if len(self) == 1 else None
        if operator is not None:
            return operator.transposed_pattern.nnz
        return float(Estimates(self.stages, at_ends=True).entries[0, -1])

    @functools.cached_property
    def accumulation(self) -> Accumulation:
        """The products and sums of `jacobian`; the chain has at least one stage."""
        with announced_where_long(f"planning the Jacobian of {self.name}, for calls that run alike"):
            return accumulated(self.stages, self.order, self.costs)

    @property
    def pattern(self) -> Pattern:
        """The pattern of the whole module's Jacobian, ``(out_size, in_size)``."""
        return self.transposed_pattern.T

    @functools.cached_property
    def transposed_pattern(self) -> Pattern:
        """The pattern of the transposed Jacobian, ``(in_size, out_size)``."""
        return self.accumulation.pattern if len(self) else Pattern.of(Identity(math.prod(self.in_shape)))

    def products(self, records: Sequence[Record], x: torch.Tensor) -> SparseJacobian:
        """The whole module's Jacobian at each sample of a batch, by those of operators.

        Its batch is 1 where all samples share the values.
        """
        refuse_hooks(records)
        if len(records) == 1:
            return records[0].jacobian()
        if not len(self):
            return SparseJacobian(self.pattern, x.new_ones((self.pattern.nnz, 1)))
        if self.accumulation.result is None:
            return SparseJacobian(self.pattern, x.new_empty((0, len(x))))
        values = self.accumulation.run(
            lambda key: records[key[0]].transposed_values(key[1]),
            lambda span, matrix: pull_back_all(records[span[0] : span[1] + 1], matrix),
            transposed=True,
        )
        return SparseJacobian(self.pattern, values)

    def __repr__(self) -> str:
        lines = [f"<Chain of {len(self)} stages, {self.in_shape} to {self.out_shape}>"]
        lines += [
            f"  {stage.path}: {stage.name} {stage.in_shape} to {stage.out_shape}, "
            f"{'no matrix' if stage.couples else stage.pattern.summary()}"
            for stage in self.stages
        ]
        return "\n".join(lines)


def chain(
    module: nn.Module,
    input_shape: Sequence[int],
    *,
    pruned: bool = True,
    couples: bool = False,
    like: torch.Tensor | None = None,
) -> Chain:
    """The chain of a module's operators.

    Parameters
    ----------
    module : Module
        The module. It runs once, on a few random samples; its changes to itself are undone.
    input_shape : sequence of int
        Shape of one sample of the input.
    pruned : bool
        Whether patterns omit pruned weights where that pays: those that a mask of ``torch.nn.utils.prune`` removes and,
        without a mask, those that are exactly zero.
    couples : bool
        Whether stages may couple the samples of a batch, as batch normalisation in training mode does. These have
        products with vectors and no matrix.
    like : Tensor, optional
        A tensor of the input's dtype and device, for a module without parameters.

    Raises
    ------
    UnsupportedOperatorError
        Where an operator has no rule, or the calls depend on the input's elements; the message begins with the path.
    TypeError
        Where `module` is no Module.
    ValueError
        Where the input shape does not fit, or a parameter is neither on the CPU nor on a CUDA device.

    Examples
    --------
    >>> from torch import nn
    >>> [stage.path for stage in chain(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()), (3, 8, 8))]
    ['0', '1']
    """
    x = samples_of(check_module(module), check_shape(input_shape), like)
    return chain_for_all(module, x, pruned=pruned, couples=couples)


def chain_for_all(
    module: nn.Module,
    x: torch.Tensor,
    *,
    pruned: bool = True,
    varying: Collection[torch.Tensor] = (),
    couples: bool = False,
) -> Chain:
    """The chain of a module's operators for all batches of the shape of `x`, with the others as in `chain_of`.

    It raises what `chain` raises.
    """
    with undisturbed(check_module(module), x.device):
        trace = traced(module, x, readable=False)
        with without_autocast(x.device):
            chain = chain_of(trace, pruned=pruned, varying=varying, couples=couples)
        chain.module = module
        refuse_hooks(chain.records(trace))
    for edge in chain.edges:
        if edge.call.sources is not None and edge.call.sources.rows > 1:
            raise edge.call.unsupported(
                f"{edge.call.operator} mixes the samples of a batch: it moves the elements of each in another way",
                "each sample must be worked on alike where no input is given",
            )
    return chain


def check_size(chain: Chain, x: torch.Tensor) -> None:
    """Raise MemoryError where a chain's Jacobian at a batch is too large for the device."""
    if not len(chain):
        return
    rows, columns, device = math.prod(chain.out_shape), math.prod(chain.in_shape), x.device
    itemsize = x.element_size() * (1 if all(stage.shared for stage in chain) else len(x))
    memory = machine_memory(device)
    if rows * columns * itemsize > SURE * memory and SURE * chain.estimated_entries * itemsize > memory:
        raise MemoryError(
            f"{chain.name}: its Jacobian, {rows:,} × {columns:,} with about {chain.estimated_entries:.1e} entries, "
            f"takes about {chain.estimated_entries * itemsize / 2**30:,.0f} GiB, and {device} has "
            f"{memory / 2**30:,.0f}; take products with it, by jacsparse.vjp or jacsparse.nn.Scan, or the Jacobian "
            "of a part of the module, or fewer samples"
        )


def refuse_hooks(records: Sequence[Record]) -> None:
    """Raise where a backward hook may change a derivative of the operators."""
    for record in records:
        if has_hooks(record, of_nodes=True):
            raise UnsupportedOperatorError(
                f"{record.stage.path}: a backward hook, of a module, a tensor or a node of autograd's graph, may "
                "change gradients, so that the Jacobian is not the operators'; remove it"
            )


def refuse_other_derivatives(records: Sequence[Record], what: str) -> None:
    """Raise where registered values are not those of PyTorch's derivative, which `what` takes."""
    edges = [(record, e) for record in records for e in record.stage.edges if e.rule.has_registered_values]
    for record, edge in edges:
        call, x = edge.call, record.input
        if not len(x):
            continue
        g = torch.randn((record.batch, *call.out_shape), generator=torch.Generator().manual_seed(0), device="cpu").to(x)
        vectors = g.reshape(len(g), -1).T.contiguous()
        registered = matvec(edge.transposed_pattern, record.transposed_values(edge), vectors).T
        expected = record.call(edge).vjp(g).reshape(registered.shape)
        if not agree(registered, expected):
            raise UnsupportedOperatorError(
                f"{call.path}: the values registered for {call.operator} are not those of PyTorch's derivative, which "
                f"{what} takes{call.source}; make it an operator of your own whose derivative they are, "
                "by torch.library.custom_op and register_autograd"
            )


def chain_of(
    trace: Trace,
    *,
    pruned: bool | None = True,
    varying: Collection[torch.Tensor] = (),
    watched: Collection[torch.Tensor] = (),
    arguments: Collection[torch.Tensor] = (),
    couples: bool = False,
) -> Chain:
    """The chain of a traced function; UnsupportedOperatorError where its output has no samples along its first axis.

    Where `pruned` is None, masks alone decide which weights are pruned. Stages may couple samples where `couples`;
    these have products with vectors alone. No weight is pruned that is among the `varying` tensors or was computed from
    one. Weights of the `watched` tensors may vary too: their zeros are pruned, but the truth values of a selection that
    was computed from them are not. Zeros of factors are pruned where they neither have a gradient nor depend on
    `arguments`: others may be zero at other places in each call.
    """
    x, y, name = trace.input, trace.output, name_of(trace.module)
    in_shape, out_shape = tuple(x.shape[1:]), tuple(y.shape[1:])
    of_input = (node for node in trace.graph.nodes if node.facts.reads and node.operands)
    reads = any(shows(node.overload, [trace.tensor(each.value).dtype for each in node.operands]) for node in of_input)
    if reads and not trace.graph.infos[trace.graph.output].dependent:
        raise UnsupportedOperatorError(
            f"{name}: no operator that was seen leads from its input to its output, and Python read elements of what "
            "depends on the input; compute the output by PyTorch's operators, without .item() or a new torch.tensor"
        )
    without_samples = UnsupportedOperatorError(
        f"{name}: its output of shape {tuple(y.shape)} for {len(x)} samples does not have them along its first axis; "
        "permute it; a Jacobian by arguments without samples takes batched=False"
    )
    if not y.ndim or y.shape[0] != len(x):
        raise without_samples
    program = program_of(trace, couples=couples)
    if program.operations and program.layouts.get(program.output) != program.layouts[0]:
        raise without_samples
    if program.output and not program.operations:
        # No derivative passes.
        stage = Stage(name, in_shape, out_shape, (), 0, program.output, ())
        return Chain(name, [stage], in_shape, out_shape, costs_for(x))
    kinds = trace.values_of(varying), trace.values_of(watched), trace.values_of(arguments)
    stages = stages_of(program, trace, None if pruned is False else kinds, by_masks=pruned is None)
    return Chain(name, stages, in_shape, out_shape, costs_for(x))
