"""Recurrent cells: what their kernels take, and the gradients that are matrix products.

A cell knows nothing of schedules: it runs *runs* of steps forward and backward, from states that it is given.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ..patterns._cuda import on_device
from ..patterns._runtime import run_rows
from . import _cuda, _kernels
from ._runs import OnDevice, Runs, index, rows_of
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

    @functools.cached_property
    def columns(self) -> torch.Tensor:
        """The hidden weight transposed, ``(size, gates · size)``."""
        return self.hidden.t().contiguous()

    @functools.cached_property
    def padded(self) -> torch.Tensor:
        """The hidden weight as transfers on a device take it."""
        return _cuda.padded(self.hidden)

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
    transfers : bool
        Whether devices have a kernel for `transfer`.
    """

    gates: ClassVar[int]
    states: ClassVar[int] = 1
    kept: ClassVar[int] = 0
    transfers: ClassVar[bool] = True
    grad_width: ClassVar[int]

    #: Forward and backward.
    _kernels: ClassVar[tuple[Any, Any]]

    def enter(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """What enters the gates from the input, ``(rows, gates · size)``: one matrix product for all steps."""
        if weights.bias is None or weights.hidden_bias is None:
            return x @ weights.input.T
        return torch.addmm(self._entering(weights.bias, weights.hidden_bias), x, weights.input.T)

    def forward(
        self, runs: Runs | OnDevice, entered: torch.Tensor, weights: Weights, start: torch.Tensor, kept: Kept
    ) -> torch.Tensor:
        """Take the runs from the states `start` to those that are returned, both ``(runs, states · size)``.

        Writes ``kept.output`` and ``kept.gates`` on the way.
        """
        end = torch.empty_like(start)
        written = (kept.output, kept.gates) if self.kept else (kept.output,)
        self._run("forward", runs, weights, (entered,), (*self._forward_constants(weights), start, *written, end))
        return end

    def backward(
        self,
        runs: Runs | OnDevice,
        weights: Weights,
        kept: Kept,
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
        self._run("backward", runs, weights, self._history(runs, kept), tuple(after))
        return grad_start

    def transfer(
        self,
        runs: Runs | OnDevice,
        weights: Weights,
        kept: Kept,
        grad_output: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """On a device: what runs do to the gradient of their last state, and what comes to a zero one.

        Returns
        -------
        Tensor, (runs, size + 1, size)
            Rows are those of unit vectors and, last, of zeros with `grad_output`. It is `out` where that is given, of
            which runs without steps keep what they have.
        """
        given = (*self._history(runs, kept), weights.padded, *self._backward_constants(), grad_output)
        return _cuda.transfer(self._name, runs, weights.hidden, weights.size, *given, out=out)

    @property
    def _name(self) -> str:
        """As kernels on devices begin."""
        return self.mode.partition("_")[0].lower()

    def _run(
        self, way: str, runs: Runs | OnDevice, weights: Weights, before: tuple[Any, ...], after: tuple[Any, ...]
    ) -> None:
        """Call a kernel with what it takes before the weights and after them."""
        if on_device(weights.hidden):
            given = weights.columns if way == "forward" else weights.hidden
            _cuda.launch(f"{self._name}_{way}", runs, weights.hidden, weights.size, *before, given, *after)
            return
        assert isinstance(runs, Runs)
        kernel, rows = self._kernels[way == "backward"], getattr(weights, f"{way}_rows")
        first, then = ([rows_of(argument, weights.hidden) for argument in part] for part in (before, after))
        run_rows(kernel, runs.work(self._step_work(weights.size)), *runs.table, *first, rows, *then)

    def _entering(self, bias: torch.Tensor, hidden_bias: torch.Tensor) -> torch.Tensor:
        """What both biases add to what enters."""
        return bias + hidden_bias

    def _forward_constants(self, weights: Weights) -> tuple[Any, ...]:
        """What the forward kernel takes after the weights."""
        return ()

    def _backward_constants(self) -> tuple[Any, ...]:
        """What the backward kernel takes after the weights."""
        return ()

    def _history(self, runs: Runs | OnDevice, kept: Kept) -> tuple[Any, ...]:
        """What the backward kernel reads of the forward pass."""
        return kept.gates, kept.initial, runs.sequences.edges(runs.direction)

    @property
    def bounded(self) -> bool:
        """Whether states are finite wherever the first one and what enters are numbers."""
        return True

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
    rows = index(before, states)
    return torch.where((rows < 0)[:, None], initial[sample], states[rows.clamp(min=0)])


@dataclass(frozen=True)
class _RnnCell(Cell):
    relu: bool = False
    gates = grad_width = 1
    _kernels = (_kernels.rnn_forward, _kernels.rnn_backward)

    @property
    def mode(self) -> str:
        return "RNN_RELU" if self.relu else "RNN_TANH"

    def state(self, kept: Kept, before: np.ndarray, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": kept.output}

    def limit(self, states: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
        return states.clamp(min=0) if self.relu else states.clamp(-1, 1)

    @property
    def bounded(self) -> bool:
        return not self.relu

    def _forward_constants(self, weights: Weights) -> tuple[Any, ...]:
        return (self.relu,)

    def _backward_constants(self) -> tuple[Any, ...]:
        return (self.relu,)

    def _history(self, runs: Runs | OnDevice, kept: Kept) -> tuple[Any, ...]:
        return (kept.output,)


@dataclass(frozen=True)
class _GruCell(Cell):
    gates = 3
    grad_width = 4
    kept = 4
    mode = "GRU"
    _kernels = (_kernels.gru_forward, _kernels.gru_backward)

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

    def _entering(self, bias: torch.Tensor, hidden_bias: torch.Tensor) -> torch.Tensor:
        # n's hidden bias is inside the product with r.
        outside = len(bias) // 3 * 2
        return torch.cat([bias[:outside] + hidden_bias[:outside], bias[outside:]])

    def _forward_constants(self, weights: Weights) -> tuple[Any, ...]:
        size = weights.size
        bias = weights.hidden.new_zeros(size) if weights.hidden_bias is None else weights.hidden_bias[2 * size :]
        return (bias,)

    def _history(self, runs: Runs | OnDevice, kept: Kept) -> tuple[Any, ...]:
        return (kept.output, *super()._history(runs, kept))


@dataclass(frozen=True)
class _LstmCell(Cell):
    gates = grad_width = 4
    states = 2
    kept = 5
    mode = "LSTM"
    transfers = False
    _kernels = (_kernels.lstm_forward, _kernels.lstm_backward)

    def state(self, kept: Kept, before: np.ndarray, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        computed = dict(zip("ifgoc", kept.gates.chunk(5, dim=1), strict=True))
        first = kept.initial[:, kept.output.shape[1] :]
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
