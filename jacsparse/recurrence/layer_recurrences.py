"""The recurrences of a layer: of its states, and of their gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from ..affine import AffineMaps, SparseMaps
from ..patterns import gathered
from ..runtime import on_device
from .across_ranks import SequencePart
from .cells import Cell, Saved, StepJacobian, Weights
from .levels_cuda import widened
from .reports import PassOfReports, Report
from .sequences import Chunks, DeviceRuns, Runs, Sequences, index
from .solvers import SOLVERS, Choice, Kept, Problem, Recurrence, Solver, choose, solve


@dataclass
class _OfCell(Recurrence):
    """A recurrence of a cell's states, or of their gradients."""

    cell: Cell
    weights: Weights
    saved: Saved

    def matrices(self, runs: Runs, dtype: torch.dtype, kept: Kept | None = None) -> torch.Tensor:
        """Each run's transposed Jacobian: unit gradients at its end, pulled back to its start."""
        size = self.cell.states * self.weights.size
        if self.cell.transfers and on_device(self.weights.hidden) and dtype == self.weights.hidden.dtype:
            there = runs.on(self.weights.hidden.device)
            there, out = (there, None) if kept is None else (there._replace(steps=kept.steps), kept.matrices)
            if out is not None:
                # Its rows are those of a matrix with another one below.
                out = out.as_strided((len(runs), size + 1, size), out.stride())
            return self.cell.transfer(there, self.weights, self.saved, None, out)[:, :size]
        units = torch.eye(size, dtype=dtype, device=self.weights.hidden.device).repeat(len(runs), 1)
        ends = self.cell.backward(runs.repeat(size), self.weights, self.saved, None, units, None)
        return ends.reshape(len(runs), size, size)


@dataclass
class _States(_OfCell):
    """The forward pass."""

    input_projection: torch.Tensor

    @property
    def local(self) -> int:  # type: ignore[override]
        # Those that enter products with weights: what a step rounds is of their order, or of the element's own.
        return self.weights.size

    def run(self, runs: Runs | DeviceRuns, start: torch.Tensor, *, record: bool = True) -> torch.Tensor:
        return self.cell.forward(runs, self.input_projection, self.weights, start, self.saved)

    def matrices(self, runs: Runs, dtype: torch.dtype, kept: Kept | None = None) -> torch.Tensor:
        # Row j is the gradient of element j of the last state.
        if kept is not None and kept.matrices is not None:
            kept = kept._replace(matrices=kept.matrices.transpose(1, 2))
        return super().matrices(runs, dtype, kept).transpose(1, 2)

    def limit(self, states: torch.Tensor, initial_state: torch.Tensor) -> torch.Tensor:
        return self.cell.limit(states, initial_state)


@dataclass
class _Gradients(_OfCell):
    """The backward pass; only `rows` of `grad_gates` are valid, and the others count as zeros."""

    x: torch.Tensor
    grad_output: torch.Tensor | None
    grad_gates: torch.Tensor
    rows: slice

    def run(self, runs: Runs | DeviceRuns, start: torch.Tensor, *, record: bool = True) -> torch.Tensor:
        inputs, gates = (self.weights, self.saved, self.grad_output, start), self.grad_gates if record else None
        if gates is None or not isinstance(runs, Runs) or not runs.is_whole or on_device(gates):
            return self.cell.backward(runs, *inputs, gates)
        live_steps = np.empty(len(runs.count), np.int64)
        grad_start = self.cell.backward(runs, *inputs, gates, live_steps)
        self.rows, others = runs.live_rows(live_steps)
        if len(others):
            gates[index(others, gates)] = 0
        return grad_start

    def transfer(self, runs: Runs, initial_state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not self.cell.transfers:
            return super().transfer(runs, initial_state, dtype)
        weights, saved, grad_output = self.weights, self.saved, self.grad_output
        if dtype != weights.hidden.dtype:
            # The kernel computes in the dtype of what it reads.
            *wide, grad_output = widened(weights.hidden, saved.output, saved.gates, saved.initial, grad_output)
            hidden, *states = wide
            weights, saved = Weights(weights.input, hidden), Saved(*states)
        return self.cell.transfer(runs, weights, saved, grad_output)

    def maps(self, chunks: Chunks, initial_state: torch.Tensor, *, sparse: bool) -> AffineMaps:
        if not sparse:
            return super().maps(chunks, initial_state, sparse=False)
        sequences, jacobian = chunks.sequences, StepJacobian(self.cell, self.weights.to(torch.float64))
        values = jacobian.values(sequences, chunks.runs.direction, self.x, self.saved)
        values, pattern = gathered(values, jacobian.pattern.transposition), jacobian.pattern.T
        # In the order in which gradients get to them.
        rows = torch.zeros(chunks.table.shape, dtype=torch.int64, device=initial_state.device)
        place, sample = index(chunks.place, initial_state), index(chunks.runs.sample, initial_state)
        rows[place, sample] = index(sequences.offset[chunks.runs.begin] + chunks.runs.sample, initial_state)
        added = initial_state.new_zeros(sequences.steps, initial_state.shape[1])
        if self.grad_output is not None:
            added[:, : self.weights.size] = self.grad_output
        maps = SparseMaps(
            pattern, values[:, rows], initial_state.new_zeros(initial_state.shape[1], *rows.shape, dtype=torch.float64)
        )
        # A step adds before it multiplies.
        return maps.like(maps.matrices, maps.apply(added[rows].permute(2, 0, 1).double().contiguous()))


#: What ``auto`` is for states on the host.
_ONE_BY_ONE = Choice(
    "sequential", reason="a step is not linear in the state, and guesses of states, on a CPU, are to be asked for"
)


@dataclass
class LayerPass:
    """A pass of a layer in one direction of time: how its recurrences are solved, and how they were.

    Attributes
    ----------
    cell : Cell
        The layer's kind.
    sequences : Sequences
        Which rows of the input are whose.
    direction : int
        1, or -1 for a layer that runs from each sample's end.
    forward, backward : Choice
        The solvers of the states and of their gradients.
    warm : Tensor or None
        First states of the chunks, ``(chunks of all samples, states · size)``, to begin guessing with.
    name : str
        The layer's name, ``l0`` or ``l0_reverse``.
    this : PassOfReports
        Is told how the recurrences are solved, and the chunks' first states that guessing came to, for a later `warm`.
    part : SequencePart or None
        This rank's part of sequences that go across ranks.
    initial : Tensor or None
        The states before this rank's steps, where another rank has the steps before.
    obstacle : str
        Why steps are taken in PyTorch's operations on a device, where they are.
    """

    cell: Cell
    sequences: Sequences
    direction: int
    forward: Choice
    backward: Choice
    warm: torch.Tensor | None = None
    name: str = ""
    this: PassOfReports = field(default_factory=PassOfReports)
    part: SequencePart | None = None
    initial: torch.Tensor | None = None
    obstacle: str = ""

    def _report(self, recurrence: str) -> Report:
        report = Report(recurrence, self.sequences.time, self.name, reason=self.obstacle)
        self.this.add(recurrence, self.name, report.read)
        return report

    def _chosen(self, choice: Choice, weights: Weights) -> Choice:
        """What ``auto`` is here."""
        return choose(self.sequences, weights.size, weights.hidden, choice.chunk, gates=self.cell.gates)

    def solve_forward(self, input_projection: torch.Tensor, weights: Weights, saved: Saved) -> torch.Tensor:
        """Fill what the forward pass saves; the last states. Across ranks, the first ones came from the rank before."""
        recurrence, report = _States(self.cell, weights, saved, input_projection), self._report("forward")
        choice, warm = self.forward, self.warm
        if choice.name == "auto":
            there = on_device(weights.hidden)
            choice = self._chosen(choice, weights) if there else _ONE_BY_ONE
        problem = Problem(recurrence, self.sequences, self.direction, saved.initial, choice, report, warm=warm)
        last = solve(problem)
        self.this.starts.append(problem.boundaries)
        return last

    def solve_backward(
        self,
        x: torch.Tensor,
        weights: Weights,
        saved: Saved,
        grad_output: torch.Tensor | None,
        grad_end: torch.Tensor,
    ) -> tuple[torch.Tensor, slice, torch.Tensor]:
        """The gradients of the gates, ``(rows, columns)``, which rows are written, and those of the first states."""
        sequences, choice, report = self.sequences, self.backward, self._report("backward")
        grad_gates = grad_end.new_empty(sequences.steps, self.cell.grad_width * weights.size)
        recurrence = _Gradients(self.cell, weights, saved, x, grad_output, grad_gates, slice(0, sequences.steps))
        fallback: Solver | None = SOLVERS["chunked"]
        if choice.name == "auto":
            fallback = None
            choice = self._chosen(choice, weights)
        problem = Problem(recurrence, sequences, self.direction, grad_end, choice, report, True, fallback=fallback)
        grad_start = solve(problem) if self.part is None else self.part.solve(problem)
        return grad_gates, recurrence.rows, grad_start
