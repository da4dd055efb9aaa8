"""The recurrences of a layer: of its states, and of their gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from ..affine import AffineMaps, SparseMaps
from ..patterns import gathered
from ..runtime import on_device
from ..schedule import Schedule
from .across_ranks import SequencePart
from .cells import Cell, Saved, StepJacobian, Weights
from .reports import Report
from .sequences import Chunks, DeviceRuns, Runs, Sequences, index
from .solvers import CHUNK, SOLVERS, Problem, Recurrence, choose, forward_choice, parse, solve


@dataclass
class Options:
    """How a layer's recurrences are solved, and how they were.

    Attributes
    ----------
    forward : str
        ``sequential``, or a solver's name.
    schedule : Schedule or str
        Of the gradients' recurrence, as `parse` takes it.
    chunk : int
        Steps of a chunk.
    warm : Tensor or None
        First states of the chunks, ``(chunks of all samples, states · size)``, to begin guessing with.
    layer : str
        The layer's name, ``l0`` or ``l0_reverse``.
    reports : list of Report
        Each solution's, the last of each kind.
    boundaries : Tensor or None
        The chunks' first states that guessing came to, for a later `warm`.
    part : SequencePart or None
        This rank's part of sequences that go across ranks.
    initial : Tensor or None
        The states before this rank's steps, where another rank has the steps before.
    """

    forward: str = "sequential"
    schedule: Schedule | str = "auto"
    chunk: int = CHUNK
    warm: torch.Tensor | None = None
    layer: str = ""
    reports: list[Report] = field(default_factory=list)
    boundaries: torch.Tensor | None = None
    part: SequencePart | None = None
    initial: torch.Tensor | None = None

    def report(self, recurrence: str, steps: int) -> Report:
        """A new report; it replaces that of an earlier pass over the same graph."""
        report = Report(recurrence, steps, self.layer)
        others = [other for other in self.reports if (other.recurrence, other.layer) != (recurrence, self.layer)]
        self.reports[:] = [*others, report]
        return report


@dataclass
class _States(Recurrence):
    """The forward pass."""

    cell: Cell
    weights: Weights
    entered: torch.Tensor
    saved: Saved
    # What enters the gates is of the order of one, however small the states are.
    scale_floor = 1.0
    affine = False

    def run(self, runs: Runs | DeviceRuns, start: torch.Tensor, *, record: bool = True) -> torch.Tensor:
        return self.cell.forward(runs, self.entered, self.weights, start, self.saved)

    def matrices(
        self,
        runs: Runs,
        dtype: torch.dtype,
        again: torch.Tensor | None = None,
        before: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Row j is the gradient of element j of the last state.
        rows = None if before is None else before.transpose(1, 2)
        return _jacobians(self.cell, self.weights, self.saved, runs, dtype, again, rows).transpose(1, 2)

    def limit(self, states: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
        return self.cell.limit(states, edge)


@dataclass
class _Gradients(Recurrence):
    """The backward pass; only `rows` of `grad_gates` are valid, and the others count as zeros."""

    cell: Cell
    weights: Weights
    x: torch.Tensor
    saved: Saved
    grad_output: torch.Tensor | None
    grad_gates: torch.Tensor
    rows: slice

    def run(self, runs: Runs | DeviceRuns, start: torch.Tensor, *, record: bool = True) -> torch.Tensor:
        inputs, gates = (self.weights, self.saved, self.grad_output, start), self.grad_gates if record else None
        if gates is None or not isinstance(runs, Runs) or not runs.is_whole or on_device(gates):
            return self.cell.backward(runs, *inputs, gates)
        reach = np.empty(len(runs), np.int64)
        grad_start = self.cell.backward(runs, *inputs, gates, reach)
        self.rows, others = runs.live_rows(reach)
        if len(others):
            gates[index(others, gates)] = 0
        return grad_start

    def matrices(
        self,
        runs: Runs,
        dtype: torch.dtype,
        again: torch.Tensor | None = None,
        before: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _jacobians(self.cell, self.weights, self.saved, runs, dtype, again, before)

    def transfer(self, runs: Runs, edge: torch.Tensor) -> torch.Tensor:
        if not self.cell.transfers:
            return super().transfer(runs, edge)
        return self.cell.transfer(runs, self.weights, self.saved, self.grad_output)

    def maps(self, chunks: Chunks, edge: torch.Tensor, *, sparse: bool) -> AffineMaps:
        if not sparse:
            return super().maps(chunks, edge, sparse=False)
        sequences, jacobian = chunks.sequences, StepJacobian(self.cell, self.weights.to(torch.float64))
        values = jacobian.values(sequences, chunks.runs.direction, self.x, self.saved)
        values, pattern = gathered(values, jacobian.pattern.transposition), jacobian.pattern.T
        # In the order in which gradients get to them.
        rows = torch.zeros(chunks.table.shape, dtype=torch.int64, device=edge.device)
        place, sample = index(chunks.place, edge), index(chunks.runs.sample, edge)
        rows[place, sample] = index(sequences.offset[chunks.runs.begin] + chunks.runs.sample, edge)
        added = edge.new_zeros(sequences.steps, edge.shape[1])
        if self.grad_output is not None:
            added[:, : self.weights.size] = self.grad_output
        maps = SparseMaps(pattern, values[:, rows], edge.new_zeros(edge.shape[1], *rows.shape, dtype=torch.float64))
        # A step adds before it multiplies.
        return maps.like(maps.matrices, maps.apply(added[rows].permute(2, 0, 1).double().contiguous()))


def _jacobians(
    cell: Cell,
    weights: Weights,
    saved: Saved,
    runs: Runs,
    dtype: torch.dtype,
    again: torch.Tensor | None = None,
    before: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each run's transposed Jacobian, ``(runs, state, state)``: unit gradients at its end, pulled back to its start."""
    size = cell.states * weights.size
    if cell.transfers and on_device(weights.hidden) and dtype == weights.hidden.dtype:
        there = runs.on(weights.hidden.device)
        there = there if again is None else there._replace(steps=again)
        # The rows before are those of a matrix with another one below.
        out = None if before is None else before.as_strided((len(runs), size + 1, size), before.stride())
        return cell.transfer(there, weights, saved, None, out)[:, :size]
    units = torch.eye(size, dtype=dtype, device=weights.hidden.device).repeat(len(runs), 1)
    return cell.backward(runs.repeat(size), weights, saved, None, units, None).reshape(len(runs), size, size)


def solve_forward(
    cell: Cell,
    sequences: Sequences,
    direction: int,
    entered: torch.Tensor,
    weights: Weights,
    saved: Saved,
    options: Options,
) -> torch.Tensor:
    """Fill what the forward pass saves; the last states."""
    recurrence, report = _States(cell, weights, entered, saved), options.report("forward", sequences.time)
    choice = forward_choice(options.forward, options.chunk)
    problem = Problem(recurrence, sequences, direction, saved.initial, choice, report, warm=options.warm)
    last = solve(problem)
    options.boundaries = problem.boundaries
    return last


def solve_backward(
    cell: Cell,
    sequences: Sequences,
    direction: int,
    x: torch.Tensor,
    weights: Weights,
    saved: Saved,
    grad_output: torch.Tensor | None,
    grad_end: torch.Tensor,
    options: Options,
) -> tuple[torch.Tensor, slice, torch.Tensor]:
    """The gradients of the gates, ``(rows, columns)``, which rows are written, and those of the first states."""
    grad_gates = grad_end.new_empty(sequences.steps, cell.grad_width * weights.size)
    recurrence = _Gradients(cell, weights, x, saved, grad_output, grad_gates, slice(0, sequences.steps))
    choice = parse(options.schedule, chunk=options.chunk)
    automatic = choice.name == "auto"
    if automatic:
        choice = choose(sequences, weights.size, weights.hidden, choice.chunk, guesses=True)
    report = options.report("backward", sequences.time)
    fallback = None if automatic else SOLVERS["chunked"]
    part = options.part
    problem = Problem(recurrence, sequences, direction, grad_end, choice, report, True, fallback=fallback, part=part)
    grad_start = solve(problem)
    return grad_gates, recurrence.rows, grad_start
