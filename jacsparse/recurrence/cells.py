"""Recurrent cells: their kernels, and what the kernels take.

A cell knows nothing of schedules: it takes *runs* of steps forward and backward, from the states it is called with.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ..runtime import on_device, run_rows
from . import cell_kernels, recurrences_cuda
from .sequences import DeviceRuns, Runs, index, rows_of
from .vector import padded


@dataclass(frozen=True, eq=False)
class Weights:
    """A layer's parameters in one direction, detached."""

    #: ``(gates · size, features)`` and ``(gates · size, size)``.
    input: torch.Tensor
    hidden: torch.Tensor
    #: ``(gates · size,)`` each.
    bias: torch.Tensor | None = None
    hidden_bias: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Elements of the state."""
        return self.hidden.shape[1]

    @functools.cached_property
    def columns(self) -> torch.Tensor:
        """The hidden weight transposed, ``(size, gates · size)``."""
        return self.hidden.t().contiguous()

    @functools.cached_property
    def padded(self) -> torch.Tensor:
        """The hidden weight as kernels of transfers on a device take it."""
        return recurrences_cuda.padded(self.hidden)

    @functools.cached_property
    def forward_rows(self) -> np.ndarray:
        """The hidden weight as forward kernels take it, ``(size, gates · width)``: a row for each state element."""
        gates, width = self.hidden.shape[0] // max(1, self.size), padded(self.size)
        if width == self.size:
            return self.columns.numpy()
        rows = self.hidden.new_zeros(self.size, gates, width)
        rows[:, :, : self.size] = self.columns.view(self.size, gates, self.size)
        return rows.view(self.size, gates * width).numpy()

    @functools.cached_property
    def backward_rows(self) -> np.ndarray:
        """The hidden weight as backward kernels take it, ``(gates · width, width)``: a row for each gate element."""
        gates, width = self.hidden.shape[0] // max(1, self.size), padded(self.size)
        if width == self.size:
            return self.hidden.numpy()
        rows = self.hidden.new_zeros(gates, width, width)
        rows[:, : self.size, : self.size] = self.hidden.view(gates, self.size, self.size)
        return rows.view(gates * width, width).numpy()


@dataclass(frozen=True, eq=False)
class Saved:
    """What the forward pass saves for the backward pass."""

    #: The hidden state after each step, ``(rows, size)``.
    output: torch.Tensor
    #: What the cell saves of each step, ``(rows, saved_vectors · size)``; no rows where no backward pass follows.
    gates: torch.Tensor
    #: The state before each sample's first step, ``(batch, states · size)``.
    initial: torch.Tensor


class Cell(ABC):
    """A kind of recurrent cell."""

    #: Matrices of the hidden weight.
    gates: ClassVar[int]
    #: Vectors of the state.
    states: ClassVar[int] = 1
    #: Vectors of each step that the backward pass needs beside the output.
    saved_vectors: ClassVar[int] = 0
    #: Whether devices have a kernel for `transfer`.
    transfers: ClassVar[bool] = True
    #: Vectors of each step's gradient of the gates.
    grad_width: ClassVar[int]

    #: The forward and the backward kernel.
    _kernels: ClassVar[tuple[Any, Any]]

    def enter(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The input's part of the gates, ``(rows, gates · size)``: one matrix product for all steps."""
        if weights.bias is None or weights.hidden_bias is None:
            return x @ weights.input.T
        return torch.addmm(self._entering(weights.bias, weights.hidden_bias), x, weights.input.T)

    def forward(
        self, runs: Runs | DeviceRuns, entered: torch.Tensor, weights: Weights, start: torch.Tensor, saved: Saved
    ) -> torch.Tensor:
        """Take the runs from the states `start` to those that are returned, both ``(runs, states · size)``.

        Writes ``saved.output`` and ``saved.gates`` on the way.
        """
        end = torch.empty_like(start)
        written = (saved.output, saved.gates) if self.saved_vectors else (saved.output,)
        self._run("forward", runs, weights, (entered,), (*self._forward_constants(weights), start, *written, end))
        return end

    def backward(
        self,
        runs: Runs | DeviceRuns,
        weights: Weights,
        saved: Saved,
        grad_output: torch.Tensor | None,
        grad_end: torch.Tensor,
        grad_gates: torch.Tensor | None,
        reach: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Take the gradients of the runs' last states back to their first ones.

        Adds `grad_output`, ``(rows, size)``, on the way, and writes `grad_gates`, ``(rows, grad_width · size)``; either
        may be left out. How many steps of each run, from its end, have gradients is written to `reach`, int64, on the
        CPU; those of the gates are then written for no other.
        """
        grad_start = torch.empty_like(grad_end)
        after = [*self._backward_constants(), grad_output, grad_end, grad_gates, grad_start]
        if not on_device(weights.hidden):
            after.append(np.empty(0, np.int64) if reach is None else reach)
        self._run("backward", runs, weights, self._history(runs, saved), tuple(after))
        return grad_start

    def transfer(
        self,
        runs: Runs | DeviceRuns,
        weights: Weights,
        saved: Saved,
        grad_output: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """On a device: what runs do to the gradient of their last state, and what comes to a zero one.

        Returns
        -------
        Tensor, (runs, size + 1, size)
            Rows are those of unit vectors and, last, of zeros with `grad_output`. It is `out` if there is one, of
            which runs without steps keep what they have.
        """
        arguments = (*self._history(runs, saved), weights.padded, *self._backward_constants(), grad_output)
        return recurrences_cuda.transfer(self._name, runs, weights.hidden, weights.size, *arguments, out=out)

    @property
    def _name(self) -> str:
        """What the names of its kernels on devices begin with."""
        return self.mode.partition("_")[0].lower()

    def _run(
        self, way: str, runs: Runs | DeviceRuns, weights: Weights, before: tuple[Any, ...], after: tuple[Any, ...]
    ) -> None:
        """Call a kernel with what it takes before the weights and after them."""
        if on_device(weights.hidden):
            matrix = weights.columns if way == "forward" else weights.hidden
            recurrences_cuda.launch(f"{self._name}_{way}", runs, weights.hidden, weights.size, *before, matrix, *after)
            return
        assert isinstance(runs, Runs)
        kernel, rows = self._kernels[way == "backward"], getattr(weights, f"{way}_rows")
        first, then = ([rows_of(argument, weights.hidden) for argument in part] for part in (before, after))
        run_rows(kernel, runs.work(self._step_work(weights.size)), *runs.table, *first, rows, *then)

    def _entering(self, bias: torch.Tensor, hidden_bias: torch.Tensor) -> torch.Tensor:
        """The sum of the biases that is added to the input's part of the gates."""
        return bias + hidden_bias

    def _forward_constants(self, weights: Weights) -> tuple[Any, ...]:
        """The forward kernel's arguments after the weights."""
        return ()

    def _backward_constants(self) -> tuple[Any, ...]:
        """The backward kernel's arguments after the weights."""
        return ()

    def _history(self, runs: Runs | DeviceRuns, saved: Saved) -> tuple[Any, ...]:
        """The backward kernel's arguments from the forward pass."""
        return saved.gates, saved.initial, runs.sequences.edges(runs.direction)

    @property
    def bounded(self) -> bool:
        """Whether states are finite if the first state and the input's part of the gates are."""
        return True

    @property
    @abstractmethod
    def mode(self) -> str:
        """The name of the cell in `torch.nn`."""

    @abstractmethod
    def state(self, saved: Saved, before: np.ndarray, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each row's gates and states, as `state_jacobian_values` takes them.

        `before` is the row of each row's previous step, -1 for none, and `sample` each row's sample.
        """

    def limit(self, states: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
        """The nearest states that can be reached from `edge`, both ``(runs, states · size)``."""
        return states

    def grad_columns(self, size: int) -> tuple[slice, list[slice]]:
        """The columns of the gates' gradients that belong to the input's part, and those of the state's part."""
        return slice(0, self.gates * size), [slice(0, self.gates * size)]

    def _step_work(self, size: int) -> int:
        """Elementary operations of one step of one sample."""
        return self.gates * (size * -(-size // 8) + 4 * size)


def preceding(states: torch.Tensor, initial: torch.Tensor, before: np.ndarray, sample: torch.Tensor) -> torch.Tensor:
    """The state before each row: the one of another row, or the sample's first state."""
    rows = index(before, states)
    return torch.where((rows < 0)[:, None], initial[sample], states[rows.clamp(min=0)])


@dataclass(frozen=True)
class _RnnCell(Cell):
    relu: bool = False
    gates = grad_width = 1
    _kernels = (cell_kernels.rnn_forward, cell_kernels.rnn_backward)

    @property
    def mode(self) -> str:
        return "RNN_RELU" if self.relu else "RNN_TANH"

    def state(self, saved: Saved, before: np.ndarray, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": saved.output}

    def limit(self, states: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
        return states.clamp(min=0) if self.relu else states.clamp(-1, 1)

    @property
    def bounded(self) -> bool:
        return not self.relu

    def _forward_constants(self, weights: Weights) -> tuple[Any, ...]:
        return (self.relu,)

    def _backward_constants(self) -> tuple[Any, ...]:
        return (self.relu,)

    def _history(self, runs: Runs | DeviceRuns, saved: Saved) -> tuple[Any, ...]:
        return (saved.output,)


@dataclass(frozen=True)
class _GruCell(Cell):
    gates = 3
    grad_width = 4
    saved_vectors = 4
    mode = "GRU"
    _kernels = (cell_kernels.gru_forward, cell_kernels.gru_backward)

    def state(self, saved: Saved, before: np.ndarray, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        computed = dict(zip("rznm", saved.gates.chunk(4, dim=1), strict=True))
        return {**computed, "before": preceding(saved.output, saved.initial, before, sample)}

    def limit(self, states: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
        # Between the state before and a tanh.
        bound = edge.abs().amax(dim=1, keepdim=True).clamp(min=1)
        return torch.clamp(states, -bound, bound)

    def grad_columns(self, size: int) -> tuple[slice, list[slice]]:
        # r, z and n from the input; r, z and m = W_n h + b from the state.
        return slice(0, 3 * size), [slice(0, 2 * size), slice(3 * size, 4 * size)]

    def _entering(self, bias: torch.Tensor, hidden_bias: torch.Tensor) -> torch.Tensor:
        # n's hidden bias is inside the product with r.
        outside = len(bias) // 3 * 2
        return torch.cat([bias[:outside] + hidden_bias[:outside], bias[outside:]])

    def _forward_constants(self, weights: Weights) -> tuple[Any, ...]:
        size = weights.size
        bias = weights.hidden.new_zeros(size) if weights.hidden_bias is None else weights.hidden_bias[2 * size :]
        return (bias,)

    def _history(self, runs: Runs | DeviceRuns, saved: Saved) -> tuple[Any, ...]:
        return (saved.output, *super()._history(runs, saved))


@dataclass(frozen=True)
class _LstmCell(Cell):
    gates = grad_width = 4
    states = 2
    saved_vectors = 5
    mode = "LSTM"
    transfers = False
    _kernels = (cell_kernels.lstm_forward, cell_kernels.lstm_backward)

    def state(self, saved: Saved, before: np.ndarray, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        computed = dict(zip("ifgoc", saved.gates.chunk(5, dim=1), strict=True))
        first = saved.initial[:, saved.output.shape[1] :]
        return {**computed, "before": preceding(computed["c"], first, before, sample)}

    def limit(self, states: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
        # The cell's own state has no bound.
        size = states.shape[1] // 2
        return torch.cat([states[:, :size].clamp(-1, 1), states[:, size:]], dim=1)


#: By the modes of `torch.nn`.
CELLS: dict[str, Cell] = {
    "RNN_TANH": _RnnCell(),
    "RNN_RELU": _RnnCell(relu=True),
    "GRU": _GruCell(),
    "LSTM": _LstmCell(),
}
