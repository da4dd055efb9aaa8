"""What a recurrent cell is: one step, and runs of steps by a loop over it."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from .. import recurrences_cuda
from ..sequences import DeviceRuns, Runs, Sequences, index
from ..vector import padded


@dataclass(frozen=True, eq=False)
class Weights:
    """A layer's parameters in one direction, detached."""

    #: ``(gates · size, features)`` and ``(gates · size, size)``.
    input: torch.Tensor
    hidden: torch.Tensor
    #: ``(gates · size,)`` each.
    bias: torch.Tensor | None = None
    hidden_bias: torch.Tensor | None = None

    @functools.cached_property
    def size(self) -> int:
        """Elements of the state."""
        return self.hidden.shape[1]

    def to(self, dtype: torch.dtype) -> Weights:
        """The same weights in another dtype."""
        bias, hidden_bias = (None if b is None else b.to(dtype) for b in (self.bias, self.hidden_bias))
        return Weights(self.input.to(dtype), self.hidden.to(dtype), bias, hidden_bias)

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
        size, width = self.size, padded(self.size)
        if width == size:
            return self.columns.numpy()
        rows = functional.pad(self.hidden.view(-1, size, size).permute(2, 0, 1), (0, width - size))
        return rows.reshape(size, -1).numpy()

    @functools.cached_property
    def backward_rows(self) -> np.ndarray:
        """The hidden weight as backward kernels take it, ``(gates · width, width)``: a row for each gate element."""
        size, width = self.size, padded(self.size)
        if width == size:
            return self.hidden.numpy()
        rows = functional.pad(self.hidden.view(-1, size, size), (0, width - size, 0, width - size))
        return rows.view(-1, width).numpy()


@dataclass(frozen=True, eq=False)
class Saved:
    """What the forward pass saves for the backward pass."""

    #: The hidden state after each step, ``(rows, size)``.
    output: torch.Tensor
    #: What the cell saves of each step, ``(rows, saved_vectors · size)``; no rows where no backward pass follows.
    gates: torch.Tensor
    #: The state before each sample's first step, ``(batch, states · size)``.
    initial: torch.Tensor


class Terms(NamedTuple):
    """What an element of a vector of the state after a step is computed from, all of it at the element's own place.

    Attributes
    ----------
    gates : tuple of int
        The gates, which are products with the recurrent weights.
    states : tuple of int
        The vectors of the state before the step, where they are read beside these products.
    """

    gates: tuple[int, ...]
    states: tuple[int, ...]


class FrozenCell(tuple[Any, ...]):
    """A cell and the attributes that it has now, by which caches find what was made of it."""

    cell: Cell

    def __new__(cls, cell: Cell) -> FrozenCell:
        kind = type(cell)
        attributes = [
            (name, value)
            for name, value in vars(cell).items()
            if not isinstance(getattr(kind, name, None), functools.cached_property)
        ]
        frozen = super().__new__(cls, (kind, *attributes))
        try:
            hash(frozen)
        except TypeError:
            # As lists, which are told by what they hold.
            frozen = super().__new__(cls, (kind, repr(attributes)))
        frozen.cell = cell
        return frozen


class Cell(ABC):
    """A kind of recurrent cell, by a loop over its steps, which autograd differentiates one by one.

    A cell knows nothing of schedules: it takes *runs* of steps forward and backward, from the states it is called with.

    Attributes
    ----------
    gates : int
        Matrices of the hidden weight.
    states : int
        Vectors of the state, of which the first one is the output.
    terms : tuple of Terms
        Of each vector of the state, where elements of different places meet in the gates alone. A cell that lists them
        has the schedule ``planned``, and `count_flop`; both know from them what is zero in the Jacobian of a step.
    transfers : bool
        Whether devices have a kernel for `transfer`.
    """

    gates: ClassVar[int]
    states: ClassVar[int] = 1
    terms: ClassVar[tuple[Terms, ...]] = ()
    transfers: ClassVar[bool] = False

    @property
    def mode(self) -> str:
        """The name of the cell, which each kind sets."""
        raise AttributeError("mode")

    @property
    def frozen(self) -> FrozenCell:
        """The cell with the attributes that it has now."""
        return FrozenCell(self)

    @property
    def bounded(self) -> bool:
        """Whether states are finite if the first state and the input's part of the gates are."""
        return False

    @abstractmethod
    def step(
        self, input_projection: torch.Tensor, recurrent_projection: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        """The state after a step, by differentiable operations.

        It is a function of each row alone, the same whenever it is called: a backward pass calls it again, and chunks
        of a sequence are rows. So it counts no calls and asks no tensor what it holds, or gradients are wrong. Where
        gradients are asked for, a layer calls it once, before its first pass, and raises TypeError where it draws
        PyTorch's random numbers, writes to its arguments or reads an attribute that requires gradients. What is drawn
        or trained outside enters in the input, or in `hx` as a vector of the state that the step returns as it is.

        On CUDA devices it runs once for the cell's attributes, without elements, and kernels are printed of it: numbers
        that it reads from elsewhere are constants there. It has kernels where it computes at each place of the vectors
        alone, alike at all of them, and reads no elements and no other tensors.

        Parameters
        ----------
        input_projection : Tensor, (rows, gates · size)
            The input's part of the gates, ``W_ih x + b_ih``.
        recurrent_projection : Tensor, (rows, gates · size)
            The state's part, ``W_hh h + b_hh``.
        state : Tensor, (rows, states · size)
            The state before the step, of which ``h`` is the first vector.

        Returns
        -------
        Tensor, (rows, states · size)
        """

    @property
    def saved_vectors(self) -> int:
        """Vectors of a step that the backward pass needs: the input's part, and the state but for the output."""
        return self.gates + self.states - 1

    @property
    def _recurrent(self) -> Sequence[int]:
        """Which vector of a step's gradient of the gates is that of each gate's part from the state.

        It is the gate's own number where its two parts are added, and have one gradient; a step does not say so.
        """
        return range(self.gates, 2 * self.gates)

    @functools.cached_property
    def _apart(self) -> Sequence[int]:
        """The gates whose parts from the input and from the state are not added to each other."""
        return [gate for gate, part in enumerate(self._recurrent) if part != gate]

    @property
    def grad_width(self) -> int:
        """Vectors of each step's gradient of the gates: of the input's part, and of the state's unless they are one."""
        return 1 + max(self.gates - 1, *self._recurrent)

    def enter(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The input's part of the gates, ``(rows, gates · size)``: one matrix product for all steps.

        It has the hidden biases of those gates whose two parts are added.
        """
        bias, size, apart = weights.bias, weights.size, self._apart
        if bias is not None and weights.hidden_bias is not None and len(apart) < self.gates:
            bias = bias + weights.hidden_bias
            for gate in apart:
                of_gate = slice(gate * size, (gate + 1) * size)
                bias[of_gate] = weights.bias[of_gate]  # type: ignore[index]
        return functional.linear(x, weights.input, bias)

    def forward(
        self,
        runs: Runs | DeviceRuns,
        input_projection: torch.Tensor,
        weights: Weights,
        start: torch.Tensor,
        saved: Saved,
    ) -> torch.Tensor:
        """Take the runs from the states `start` to those that are returned, both ``(runs, states · size)``.

        Writes ``saved.output`` and ``saved.gates`` on the way.
        """
        state = start.clone()
        for active, rows in _steps(runs, start):
            recurrent_projection = functional.linear(state[active, : weights.size], weights.hidden, weights.hidden_bias)
            after = self.step(input_projection[rows], recurrent_projection, state[active])
            state[active], saved.output[rows] = after, after[:, : weights.size]
            if len(saved.gates):
                saved.gates[rows] = torch.cat([input_projection[rows], after[:, weights.size :]], dim=1)
        return state

    def backward(
        self,
        runs: Runs | DeviceRuns,
        weights: Weights,
        saved: Saved,
        grad_output: torch.Tensor | None,
        grad_end: torch.Tensor,
        grad_gates: torch.Tensor | None,
        live_steps: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Take the gradients of the runs' last states back to their first ones, in the dtype of `grad_end`.

        Adds `grad_output`, ``(rows, size)``, on the way, and writes `grad_gates`, ``(rows, grad_width · size)``; either
        may be left out. How many steps of each run, from its end, have gradients is written to `live_steps`, int64, on
        the CPU; those of the gates are then written for no other.
        """
        size, dtype, sequences = weights.size, grad_end.dtype, runs.sequences
        hidden, bias = weights.hidden.to(dtype), weights.hidden_bias
        bias = None if bias is None else bias.to(dtype)
        input_projection, before = (
            saved.gates[:, : self.gates * size],
            self.states_before(saved, sequences, runs.direction),
        )
        grad = grad_end.clone()
        for active, rows in reversed(list(_steps(runs, grad))):
            grad_after, state = grad[active], before[rows].to(dtype)
            if grad_output is not None:
                grad_after[:, :size] += grad_output[rows]
            recurrent_projection = functional.linear(state[:, :size], hidden, bias)
            inputs = [part.requires_grad_() for part in (input_projection[rows].to(dtype), recurrent_projection, state)]
            with torch.enable_grad():
                outcome = self.step(*inputs)
            grads = torch.autograd.grad(outcome, inputs, grad_after, allow_unused=True, materialize_grads=True)
            grad[active] = grads[2]
            grad[active, :size] += grads[1] @ hidden
            if grad_gates is not None:
                grad_gates[rows] = torch.cat(grads[:2], dim=1)
        if live_steps is not None:
            assert isinstance(runs, Runs)
            live_steps[:] = runs.count
        return grad

    def transfer(
        self,
        runs: Runs | DeviceRuns,
        weights: Weights,
        saved: Saved,
        grad_output: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """On a device, by a kernel that not every cell has: what runs do to the gradient of their last state.

        Returns
        -------
        Tensor, (runs, size + 1, size)
            Rows are what comes of unit vectors and, last, of zeros with `grad_output`. It is `out` if there is one, of
            which runs without steps keep what they have.
        """
        raise NotImplementedError(f"the cell {self.mode} has no kernel of transfers")

    def coefficients(
        self, input_projection: torch.Tensor, recurrent_projection: torch.Tensor, state: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What derivatives of steps are made of, for cells that have `terms`: those of elements at one place.

        Parameters
        ----------
        input_projection, recurrent_projection, state : Tensor
            As `step` takes them.

        Returns
        -------
        list of (Tensor, Tensor)
            Of each vector of the state after the steps: its derivatives by `recurrent_projection`,
            ``(rows, gates · size)``, which are the factors of the gates' weights in a row of the Jacobian, and by
            `state`, ``(rows, states · size)``, which are its diagonals.
        """
        inputs, coefficients = [part.detach().requires_grad_() for part in (recurrent_projection, state)], []
        with torch.enable_grad():
            vectors = self.step(input_projection, *inputs).chunk(self.states, dim=1)
        for vector in vectors:
            of_product, of_state = torch.autograd.grad(
                vector, inputs, torch.ones_like(vector), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            coefficients.append((of_product, of_state))
        return coefficients

    def states_before(self, saved: Saved, sequences: Sequences, direction: int) -> torch.Tensor:
        """The state before each row, ``(rows, states · size)``."""
        after, size = saved.output, saved.output.shape[1]
        if self.states > 1:
            after = torch.cat([after, saved.gates[:, (1 - self.states) * size :]], dim=1)
        return preceding(after, saved.initial, sequences.before(direction), index(sequences.sample, after))

    def limit(self, states: torch.Tensor, initial_state: torch.Tensor) -> torch.Tensor:
        """The nearest states that can be reached from `initial_state`, both ``(runs, states · size)``."""
        return states

    def grad_columns(self, size: int) -> tuple[slice, list[slice]]:
        """The columns of the gates' gradients that belong to the input's part, and those of the state's part."""
        return slice(0, self.gates * size), _columns(self._recurrent, size)


@functools.lru_cache(maxsize=64)
def _columns(vectors: Sequence[int], size: int) -> list[slice]:
    """The columns of some vectors of `size` elements, as few slices as can be."""
    slices: list[slice] = []
    for vector in vectors:
        begin = slices.pop().start if slices and slices[-1].stop == vector * size else vector * size
        slices.append(slice(begin, (vector + 1) * size))
    return slices


def preceding(states: torch.Tensor, initial: torch.Tensor, before: np.ndarray, sample: torch.Tensor) -> torch.Tensor:
    """The state before each row: the one of another row, or the sample's first state."""
    rows = index(before, states)
    return torch.where((rows < 0)[:, None], initial[sample], states[rows.clamp(min=0)])


def _steps(runs: Runs | DeviceRuns, like: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield for each number of a step the runs that have so many, and the rows in which these have it."""
    if isinstance(runs, Runs):
        sample, begin, steps = (index(array, like) for array in (runs.sample, runs.begin, runs.count))
    else:
        sample, begin, steps = runs.sample, runs.begin, runs.steps
    offset = index(runs.sequences.offset, like)
    for number in range(int(steps.max()) if len(steps) else 0):
        active = torch.nonzero(steps > number).flatten()
        yield active, offset[begin[active] + number * runs.direction] + sample[active]
