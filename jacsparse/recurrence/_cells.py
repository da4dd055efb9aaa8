"""Recurrent cells: what their kernels take, and the gradients that are matrix products.

A cell knows nothing of schedules: it runs *runs* of steps forward and backward, from states that it is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ..patterns._runtime import run_rows
from . import _kernels
from ._runs import Runs
from ._vector import padded

__all__ = ["CELLS", "Cell", "Kept", "Weights", "preceding"]


@dataclass(frozen=True, eq=False)
class Weights:
    """A layer's parameters in one direction, detached.

    Attributes
    ----------
    input : Tensor, (gates · size, features)
        What enters the gates from the input.
    hidden : Tensor, (gates · size, size)
        What enters them from the state.
    bias, hidden_bias : Tensor or None, (gates · size,)
        Beside each.
    """

    input: torch.Tensor
    hidden: torch.Tensor
    bias: torch.Tensor | None = None
    hidden_bias: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Elements of the state."""
        return self.hidden.shape[1]

    def forward_rows(self) -> np.ndarray:
        """The hidden weight as forward kernels take it, ``(size, gates · width)``: a row for each state element."""
        gates, width = self.hidden.shape[0] // max(1, self.size), padded(self.size)
        rows = np.zeros((self.size, gates, width), dtype=self.hidden.numpy().dtype)
        rows[:, :, : self.size] = self.hidden.numpy().reshape(gates, self.size, self.size).transpose(2, 0, 1)
        return rows.reshape(self.size, gates * width)

    def backward_rows(self) -> np.ndarray:
        """The hidden weight as backward kernels take it, ``(gates · width, width)``: a row for each gate element."""
        gates, width = self.hidden.shape[0] // max(1, self.size), padded(self.size)
        rows = np.zeros((gates, width, width), dtype=self.hidden.numpy().dtype)
        rows[:, : self.size, : self.size] = self.hidden.numpy().reshape(gates, self.size, self.size)
        return rows.reshape(gates * width, width)


@dataclass(frozen=True, eq=False)
class Kept:
    """What the forward pass keeps for the backward pass.

    Attributes
    ----------
    output : Tensor, (rows, size)
        The hidden state after each step.
    gates : Tensor, (rows, kept · size)
        What the cell keeps of each step; without rows where nothing was to be kept.
    initial : Tensor, (batch, states · size)
        The state before each sample's first step.
    """

    output: torch.Tensor
    gates: torch.Tensor
    initial: torch.Tensor


class Cell(ABC):
    """A kind of recurrent cell.

    Attributes
    ----------
    gates : int
        Matrices of the hidden weight.
    states : int
        Vectors of the state.
    kept : int
        Vectors that the backward pass needs of each step, beside the output.
    """

    gates: ClassVar[int]
    states: ClassVar[int] = 1
    kept: ClassVar[int] = 0
    grad_width: ClassVar[int]

    @abstractmethod
    def enter(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """What enters the gates from the input, ``(rows, gates · size)``: one matrix product for all steps."""

    @abstractmethod
    def forward(
        self, runs: Runs, entered: torch.Tensor, weights: Weights, start: torch.Tensor, kept: Kept
    ) -> torch.Tensor:
        """Take the runs from the states `start` to those that are returned, both ``(runs, states · size)``.

        Writes ``kept.output`` and ``kept.gates`` on the way.
        """

    @abstractmethod
    def backward(
        self,
        runs: Runs,
        weights: Weights,
        kept: Kept,
        grad_output: torch.Tensor | None,
        grad_end: torch.Tensor,
        grad_gates: torch.Tensor | None,
    ) -> torch.Tensor:
        """Take the gradients of the runs' last states back to their first ones.

        Adds `grad_output`, ``(rows, size)``, on the way, and writes `grad_gates`, ``(rows, gates_grad · size)``; either
        may be left out.
        """

    @property
    @abstractmethod
    def mode(self) -> str:
        """`torch.nn`'s name of it."""

    @abstractmethod
    def state(self, kept: Kept, before: np.ndarray, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        """What each row computed, as `state_jacobian_values` takes it.

        Parameters
        ----------
        kept : Kept
            What the forward pass kept.
        before : ndarray of int, (rows,)
            The row of the step before, -1 for a sample's first one.
        sample : Tensor of int64, (rows,)
            Whose step each is.
        """

    def limit(self, states: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
        """The nearest states that can be reached from `edge`, both ``(runs, states · size)``."""
        return states

    def grad_columns(self, size: int) -> tuple[slice, list[slice]]:
        """Which columns of the gates' gradients are of what enters from the input, and which from the state."""
        return slice(0, self.gates * size), [slice(0, self.gates * size)]

    def _step_work(self, size: int) -> int:
        """Elementary operations of one step of one sample."""
        return self.gates * (size * -(-size // 8) + 4 * size)


def preceding(states: torch.Tensor, initial: torch.Tensor, before: np.ndarray, sample: torch.Tensor) -> torch.Tensor:
    """The state before each row: another row's, or the sample's own."""
    rows = torch.from_numpy(before)
    return torch.where((rows < 0)[:, None], initial[sample], states[rows.clamp(min=0)])


def _or_nothing(tensor: torch.Tensor | None, like: torch.Tensor) -> np.ndarray:
    return np.empty((0, 0), dtype=like.numpy().dtype) if tensor is None else tensor.numpy()


@dataclass(frozen=True)
class _RnnCell(Cell):
    relu: bool = False
    gates = grad_width = 1

    @property
    def mode(self) -> str:
        return "RNN_RELU" if self.relu else "RNN_TANH"

    def state(self, kept: Kept, before: np.ndarray, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": kept.output}

    def limit(self, states: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
        return states.clamp(min=0) if self.relu else states.clamp(-1, 1)

    def enter(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        if weights.bias is None or weights.hidden_bias is None:
            return x @ weights.input.T
        return torch.addmm(weights.bias + weights.hidden_bias, x, weights.input.T)

    def forward(
        self, runs: Runs, entered: torch.Tensor, weights: Weights, start: torch.Tensor, kept: Kept
    ) -> torch.Tensor:
        end = torch.empty_like(start)
        arrays = (entered.numpy(), weights.forward_rows(), self.relu, start.numpy(), kept.output.numpy(), end.numpy())
        run_rows(_kernels.rnn_forward, runs.work(self._step_work(weights.size)), *runs.table, *arrays)
        return end

    def backward(
        self,
        runs: Runs,
        weights: Weights,
        kept: Kept,
        grad_output: torch.Tensor | None,
        grad_end: torch.Tensor,
        grad_gates: torch.Tensor | None,
    ) -> torch.Tensor:
        grad_start = torch.empty_like(grad_end)
        run_rows(
            _kernels.rnn_backward,
            runs.work(self._step_work(weights.size)),
            *runs.table,
            kept.output.numpy(),
            weights.backward_rows(),
            self.relu,
            _or_nothing(grad_output, grad_end),
            grad_end.numpy(),
            _or_nothing(grad_gates, grad_end),
            grad_start.numpy(),
        )
        return grad_start


@dataclass(frozen=True)
class _GruCell(Cell):
    gates = 3
    grad_width = 4
    kept = 4
    mode = "GRU"

    def state(self, kept: Kept, before: np.ndarray, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        computed = dict(zip("rznm", kept.gates.chunk(4, dim=1), strict=True))
        return {**computed, "before": preceding(kept.output, kept.initial, before, sample)}

    def limit(self, states: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
        # Between the state before and a tanh.
        bound = edge.abs().amax(dim=1, keepdim=True).clamp(min=1)
        return torch.clamp(states, -bound, bound)

    def grad_columns(self, size: int) -> tuple[slice, list[slice]]:
        # r, z and n from the input; r, z and m = W_n h + b from the state.
        return slice(0, 3 * size), [slice(0, 2 * size), slice(3 * size, 4 * size)]

    def enter(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        if weights.bias is None or weights.hidden_bias is None:
            return x @ weights.input.T
        bias = weights.bias.clone()
        # n's hidden bias is inside the product with r.
        bias[: 2 * weights.size] += weights.hidden_bias[: 2 * weights.size]
        return torch.addmm(bias, x, weights.input.T)

    def forward(
        self, runs: Runs, entered: torch.Tensor, weights: Weights, start: torch.Tensor, kept: Kept
    ) -> torch.Tensor:
        end = torch.empty_like(start)
        size = weights.size
        bias = start.new_zeros(size) if weights.hidden_bias is None else weights.hidden_bias[2 * size :]
        arrays = (bias.numpy(), start.numpy(), kept.output.numpy(), kept.gates.numpy(), end.numpy())
        work = runs.work(self._step_work(size))
        run_rows(_kernels.gru_forward, work, *runs.table, entered.numpy(), weights.forward_rows(), *arrays)
        return end

    def backward(
        self,
        runs: Runs,
        weights: Weights,
        kept: Kept,
        grad_output: torch.Tensor | None,
        grad_end: torch.Tensor,
        grad_gates: torch.Tensor | None,
    ) -> torch.Tensor:
        grad_start = torch.empty_like(grad_end)
        run_rows(
            _kernels.gru_backward,
            runs.work(self._step_work(weights.size)),
            *runs.table,
            kept.output.numpy(),
            kept.gates.numpy(),
            kept.initial.numpy(),
            runs.sequences.edges(runs.direction),
            weights.backward_rows(),
            _or_nothing(grad_output, grad_end),
            grad_end.numpy(),
            _or_nothing(grad_gates, grad_end),
            grad_start.numpy(),
        )
        return grad_start


@dataclass(frozen=True)
class _LstmCell(Cell):
    gates = grad_width = 4
    states = 2
    kept = 5
    mode = "LSTM"

    def state(self, kept: Kept, before: np.ndarray, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        computed = dict(zip("ifgoc", kept.gates.chunk(5, dim=1), strict=True))
        first = kept.initial[:, kept.output.shape[1] :]
        return {**computed, "before": preceding(computed["c"], first, before, sample)}

    def limit(self, states: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
        # The cell's own state has no bound.
        size = states.shape[1] // 2
        return torch.cat([states[:, :size].clamp(-1, 1), states[:, size:]], dim=1)

    def enter(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        if weights.bias is None or weights.hidden_bias is None:
            return x @ weights.input.T
        return torch.addmm(weights.bias + weights.hidden_bias, x, weights.input.T)

    def forward(
        self, runs: Runs, entered: torch.Tensor, weights: Weights, start: torch.Tensor, kept: Kept
    ) -> torch.Tensor:
        end = torch.empty_like(start)
        arrays = (start.numpy(), kept.output.numpy(), kept.gates.numpy(), end.numpy())
        work = runs.work(self._step_work(weights.size))
        run_rows(_kernels.lstm_forward, work, *runs.table, entered.numpy(), weights.forward_rows(), *arrays)
        return end

    def backward(
        self,
        runs: Runs,
        weights: Weights,
        kept: Kept,
        grad_output: torch.Tensor | None,
        grad_end: torch.Tensor,
        grad_gates: torch.Tensor | None,
    ) -> torch.Tensor:
        grad_start = torch.empty_like(grad_end)
        run_rows(
            _kernels.lstm_backward,
            runs.work(self._step_work(weights.size)),
            *runs.table,
            kept.gates.numpy(),
            kept.initial.numpy(),
            runs.sequences.edges(runs.direction),
            weights.backward_rows(),
            _or_nothing(grad_output, grad_end),
            grad_end.numpy(),
            _or_nothing(grad_gates, grad_end),
            grad_start.numpy(),
        )
        return grad_start


#: By the modes of `torch.nn`.
CELLS: dict[str, Cell] = {
    "RNN_TANH": _RnnCell(),
    "RNN_RELU": _RnnCell(relu=True),
    "GRU": _GruCell(),
    "LSTM": _LstmCell(),
}
