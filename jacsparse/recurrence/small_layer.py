"""A layer of small states on a CUDA device: a whole pass in a launch or two, as `kernels/layer.cu` describes it.

What a pass needs beside its tensors is decided once for a shape: a `SmallLayer` has its launches, and a call fills in
pointers. So a call takes the host less time than the kernels take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..runtime import Backend, multiprocessors
from ..tracing import without_autocast
from .cells import CELLS, CellKernels, DeviceCell, FrozenCell, cell_on
from .recurrences_cuda import tolerance
from .reports import Report, outcome
from .solvers.choice import RecurrenceSize, choose_small, way_in_chunks
from .solvers.recurrence import ASKED, Choice, check_warm
from .solvers.relaxed import Relaxed

Tensors = Sequence[torch.Tensor | None]
Launch = Callable[..., None]

#: Elements of a state, vectors of one, and gates, at most.
SIZE, STATES, GATES = 32, 2, 4
#: What the kernels are told. Inputs whose weights fit into a block's shared memory, at most; warps of a block that
#: looks after a sample, at most, and of one that sweeps; sides of a tile of the weights' gradients.
INPUTS, WARPS, SWEEPING, TILE = 32, 8, 4, 32
#: Blocks of a grid in all directions but the first, at most.
MOST_BLOCKS = 65535
#: Threads of such a tile, and groups of threads that sum its parts.
_TILE_THREADS, _GROUPS = 64, 8
#: Parts into which rows are split for these, at most, and the fewest rows of one.
_PARTS, _ROWS = 264, 64
#: Weights of a gate that a thread has in registers.
_REGISTERS = (20, 32)
_INSTANCES = (
    *(
        f"{kernel}<{registers}, {settles}>"
        for kernel in ("take_states", "take_gradients")
        for registers in _REGISTERS
        for settles in ("false", "true")
    ),
    f"weights_parts<{_TILE_THREADS}>",
    f"weights_sums<{_GROUPS}>",
)


def _sizes() -> str:
    return f"constexpr int INPUTS = {INPUTS}, WARPS = {WARPS}, SWEEPING = {SWEEPING}, TILE = {TILE};\n"


#: What takes whole passes.
LAYER_KERNELS = CellKernels("layer.cu", lambda _: _INSTANCES, "_layer", {"sizes.cuh": _sizes})
for _cell in CELLS.values():
    LAYER_KERNELS.list(_cell)


class Shape(NamedTuple):
    """Sizes of a layer's pass: steps, samples and features of its input; elements of a state, and directions."""

    time: int
    batch: int
    inputs: int
    size: int
    directions: int


class SmallLayer:
    """The passes of a layer, in both directions if it has two, over samples of equal lengths in float32.

    Parameters
    ----------
    cell : DeviceCell
        The cell.
    shape : Shape
        The sizes.
    bias : bool
        Whether there are biases.
    device : torch.device
        Where.
    forward, backward : Choice
        How the recurrences are solved: ``sequential``, in a chunk of all steps, or ``relaxed``.
    """

    def __init__(
        self, cell: DeviceCell, shape: Shape, bias: bool, device: torch.device, forward: Choice, backward: Choice
    ) -> None:
        self.cell, self.shape, self.bias, self.device = cell, shape, bias, device
        self._choices = {"forward": forward, "backward": backward}
        self._file = LAYER_KERNELS.of(cell.cell)
        self.rows, parts = shape.time * shape.batch, cell.grad_width
        self.kept_vectors = 1 + cell.saved_vectors
        self.projected = shape.inputs > INPUTS
        gates = cell.gates * shape.size
        shapes = ((gates, shape.inputs), (gates, shape.size), (gates,), (gates,))
        self.weight_shapes = shapes[: 4 if bias else 2] * shape.directions
        self._states = [self._recurrence("states", forward, direction) for direction in self._directions]
        self._gradients = [self._recurrence("gradients", backward, direction) for direction in self._directions]
        tiles = -(-parts * shape.size // TILE), -(-(shape.inputs + shape.size) // TILE)
        self.splits = max(1, min(_PARTS, self.rows // _ROWS))
        self._part = tiles[0] * (tiles[1] * TILE + 1) * TILE
        sizes = {"size": shape.size, "inputs": shape.inputs}
        self._parts = [
            self._file.record(
                f"weights_parts<{_TILE_THREADS}>", [self.splits, *tiles], [_TILE_THREADS],
                time=shape.time, batch=shape.batch, **sizes, direction=direction,
                rows_each=-(-self.rows // self.splits), device=device,
            )
            for direction in self._directions
        ]  # fmt: skip
        elements = cell.gates * shape.size * (shape.inputs + shape.size + 2)
        self._sums = self._file.record(
            f"weights_sums<{_GROUPS}>",
            [-(-elements // 32)],
            [32, _GROUPS],
            **sizes,
            parts_count=self.splits,
            device=device,
        )

    @property
    def _directions(self) -> tuple[int, ...]:
        return (1, -1)[: self.shape.directions]

    def names(self, number: int) -> tuple[str, ...]:
        """What PyTorch's names of the weights of each direction end in, if this is a module's layer of that number."""
        return (f"l{number}", f"l{number}_reverse")[: self.shape.directions]

    def boundary_elements(self, choice: Choice) -> int:
        """Elements of the states in which chunks start and end."""
        shape = self.shape
        return 2 * -(-shape.time // choice.chunk) * self.cell.states * shape.batch * shape.size

    def report(self, recurrence: str, name: str, memory: torch.Tensor) -> Report:
        """How a recurrence of a direction was solved, by the memory of its launches; this waits for the device."""
        choice, shape = self._choices[recurrence], self.shape
        places, most = -(-shape.time // choice.chunk), Relaxed.device_sweeps
        told = memory[self.boundary_elements(choice) + places * shape.batch :].cpu()
        defects, left = told[: most * shape.batch].unflatten(0, (most, shape.batch)), told[most * shape.batch :]
        fields: dict[str, Any] = {"methods": [choice.name], "sweeps": 1}
        if choice.name != "sequential":
            fields = outcome([choice.name], left.view(torch.int32), defects)
        return Report(recurrence, shape.time, name, chunk=choice.chunk, reason=choice.reason, **fields)

    def boundaries(self, memory: torch.Tensor) -> torch.Tensor | None:
        """The first states of the chunks that guessing came to, ``(chunks of all samples, states · size)``."""
        shape, states, choice = self.shape, self.cell.states, self._choices["forward"]
        if choice.name == "sequential":
            return None
        places = -(-shape.time // choice.chunk)
        starts = memory[: places * states * shape.batch * shape.size]
        by_sample = starts.unflatten(0, (places, states, shape.batch, shape.size)).transpose(1, 2)
        return by_sample.clone(memory_format=torch.contiguous_format).flatten(0, 1).flatten(1)

    def _recurrence(self, kind: str, choice: Choice, direction: int) -> tuple[list[Launch], int]:
        """The launches of one recurrence in one direction, and the elements of their memory."""
        shape, places = self.shape, -(-self.shape.time // choice.chunk)
        registers = next(each for each in _REGISTERS if shape.size <= each)
        numbers: dict[str, Any] = {
            "time": shape.time, "batch": shape.batch, "size": shape.size, "chunk": choice.chunk, "direction": direction,
            "swept": 2 if choice.swept else 0, "most": Relaxed.device_sweeps, "tolerance": tolerance(torch.float32),
        }  # fmt: skip
        if kind == "states":
            out_row = shape.directions * shape.size
            numbers |= {"inputs": shape.inputs, "projected": self.projected, "out_row": out_row}
        launches = [("true", [shape.batch], min(WARPS, places))]
        if choice.swept:
            # More chunks than a block has warps are swept by all multiprocessors first.
            launches.insert(0, ("false", [shape.batch, -(-places // SWEEPING)], SWEEPING))
        memory = self.boundary_elements(choice) + (places + Relaxed.device_sweeps + 1) * shape.batch
        return [
            self._file.record(f"take_{kind}<{registers}, {settles}>", grid, [32, warps], device=self.device, **numbers)
            for settles, grid, warps in launches
        ], memory

    def forward(
        self,
        x: torch.Tensor,
        starts: Tensors,
        weights: Sequence[Any],
        guesses: Tensors,
        last: Sequence[torch.Tensor] | None,
        *,
        keep: bool,
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """A forward pass.

        Parameters
        ----------
        x : Tensor, (time, batch, inputs)
            The input, whose features lie side by side.
        starts : sequence of Tensor or None, (directions, batch, size)
            The first states, of each vector of the state; None for zeros.
        weights : sequence of Tensor
            In PyTorch's order, of each direction.
        guesses : sequence of Tensor or None
            Of each direction, the first states of chunks to begin guessing with.
        last : sequence of Tensor, (directions, batch, size), optional
            Memory for the last states, of each vector of the state.
        keep : bool
            Whether a backward pass may follow.

        Returns
        -------
        output : Tensor, (time, batch, directions · size)
        last : sequence of Tensor, (directions, batch, size)
            The last states, of each vector of the state.
        kept : list of Tensor
            Of each direction, what the backward pass reads.
        memory : list of Tensor
            Of each direction, what kernels tell of the solution.
        """
        states, count = self.cell.states, 4 if self.bias else 2
        time, batch, inputs, size, directions = self.shape
        output = x.new_empty((time, batch, directions * size))
        last = last or [x.new_empty((directions, batch, size)) for _ in range(states)]
        kept: list[torch.Tensor] = []
        memories: list[torch.Tensor] = []
        for number, (launches, elements) in enumerate(self._states):
            own = weights[count * number : count * (number + 1)]
            w_in, w, *bias = own if self.bias else (*own, None, None)
            here, there = self._at(number, starts), self._at(number, last)
            entered, (x_time, x_sample, _) = x, x.stride()
            if self.projected:
                with without_autocast(x.device):
                    entered = x.reshape(-1, inputs) @ w_in.t()
                x_sample = entered.shape[1]
                x_time = batch * x_sample
            keeps = x.new_empty((self.rows, self.kept_vectors * size)) if keep else None
            memory = x.new_empty(elements)
            out = output if directions == 1 else output[:, :, number * size :]
            guess = None if guesses[number] is None else self._guess(guesses[number])
            for launch in launches:
                launch(entered, x_time, x_sample, w_in, w, *bias, *here, guess, out, keeps, memory, *there)
            memories.append(memory)
            if keeps is not None:
                kept.append(keeps)
        return output, last, kept, memories

    def _guess(self, warm: Any) -> torch.Tensor | None:
        """First states of chunks to begin guessing with, as kernels read them, of `Solved.boundaries`."""
        shape, states = self.shape, self.cell.states
        choice = self._choices["forward"]
        places = -(-shape.time // choice.chunk)
        check_warm(warm, (places * shape.batch, states * shape.size), torch.float32, self.device)
        if choice.name == "sequential":
            return None
        guess = warm.detach().unflatten(0, (places, shape.batch)).unflatten(2, (states, shape.size))
        # Numbers that are none are zeros.
        return torch.where(guess.isfinite(), guess, 0).transpose(1, 2).contiguous()

    def backward(
        self,
        x: torch.Tensor,
        starts: Tensors,
        weights: Sequence[Any],
        kept: Tensors,
        grad_output: torch.Tensor | None,
        grad_last: Tensors,
        wanted: Sequence[bool],
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
        """A backward pass: gradients of the input, the first states and the weights, and what kernels tell.

        Those that are not `wanted`, in this order, are None.
        """
        shape, states, count = self.shape, self.cell.states, 4 if self.bias else 2
        time, batch, inputs, size, directions = shape
        for_x, for_starts, for_weights = wanted[0], wanted[1 : 1 + states], wanted[1 + states :]
        grad_starts = [x.new_empty((directions, batch, size)) if need else None for need in for_starts]
        grad_weights: list[torch.Tensor | None] = []
        grad_x: torch.Tensor | None = None
        memories = []
        for number, (launches, elements) in enumerate(self._gradients):
            w_in, w = weights[count * number : count * number + 2]
            here, width = self._at(number, starts), self.cell.grad_width * size
            grad_gates, memory = x.new_empty((self.rows, width)), x.new_empty(elements)
            added = grad_output
            if added is not None and directions > 1:
                added = added[:, :, number * size : (number + 1) * size]
            strides = (0, 0, 0) if added is None else added.stride()
            ends, there = self._at(number, grad_last), self._at(number, grad_starts)
            for launch in launches:
                launch(kept[number], *here, w, added, *strides, *ends, grad_gates, memory, *there)
            memories.append(memory)
            needs = for_weights[count * number : count * (number + 1)]
            if any(needs):
                parts = x.new_empty((self.splits, self._part))
                self._parts[number](grad_gates, x, *x.stride()[:2], kept[number], here[0], parts)
                shapes = zip(self.weight_shapes, needs, strict=False)
                sums = [x.new_empty(each) if need else None for each, need in shapes]
                self._sums(parts, *sums, *(() if self.bias else (None, None)))
                grad_weights += sums
            else:
                grad_weights += [None] * count
            if for_x:
                with without_autocast(x.device):
                    entering = grad_gates.as_strided((self.rows, self.cell.gates * size), (width, 1))
                    grad_x = entering @ w_in if grad_x is None else grad_x.addmm_(entering, w_in)
        grad_x = None if grad_x is None else grad_x.view(time, batch, inputs)
        return [grad_x, *grad_starts, *grad_weights], memories

    def _at(self, number: int, states: Tensors) -> list[torch.Tensor | None]:
        """The vectors of the state of a direction, two of them."""
        if self.shape.directions > 1:
            states = [each if each is None else each[number] for each in states]
        return [*states, None] if len(states) == 1 else list(states)


#: How layers of small states may be solved, by the names of solvers.
_FORWARD = {"auto": "auto", "sequential": "sequential", "parallel": "relaxed", "relaxed": "relaxed"}
_BACKWARD = {"auto": "auto", "sequential": "sequential", "relaxed": "relaxed"}


@functools.lru_cache(maxsize=256)
def small_layers(
    frozen: FrozenCell,
    time: int,
    batch: int,
    inputs: int,
    size: int,
    layers: int,
    directions: int,
    bias: bool,
    forward: tuple[str, int],
    backward: tuple[str, int],
    dtype: torch.dtype,
    device: torch.device,
    backend: Backend,
) -> list[SmallLayer] | None:
    """The layers of a module whose kernels are those of small states; None where they are not.

    A graph that is captured runs what was run before it: what ``auto`` is does not depend on whether one is.

    Parameters
    ----------
    frozen, time, batch, inputs, size, layers, directions, bias, dtype, device
        The module, and its input.
    forward, backward : (str, int)
        Names of the solvers that were asked for, and their steps of a chunk.
    backend : Backend
        What runs kernels.
    """
    ways = (_FORWARD.get(forward[0]), forward[1]), (_BACKWARD.get(backward[0]), backward[1])
    if None in (ways[0][0], ways[1][0]) or dtype != torch.float32 or size > SIZE or not batch or time * batch >= 2**31:
        return None
    here = cell_on(frozen.cell, torch.empty(0, device=device))
    if not isinstance(here, DeviceCell) or here.states > STATES or here.gates > GATES:
        return None
    features = (inputs, *[directions * size] * (layers - 1))
    shapes = [Shape(time, batch, each, size, directions) for each in features]
    solved_by = [_way(str(name), chunk, shapes[0], here, device) for name, chunk in ways]
    sweeps = max(-(-time // (way.chunk * SWEEPING)) for way in solved_by)
    if max(sweeps, *(-(-(each + size) // TILE) for each in features)) > MOST_BLOCKS:
        return None
    return [SmallLayer(here, shape, bias, device, *solved_by) for shape in shapes]


def _way(name: str, chunk: int, shape: Shape, cell: DeviceCell, device: torch.device) -> Choice:
    """How a recurrence is solved for which a name was asked."""
    if name == "auto":
        work = RecurrenceSize(shape.time, shape.batch, shape.size, cell.gates, multiprocessors(device))
        return choose_small(work, WARPS)
    way = way_in_chunks(shape.time, shape.time if name == "sequential" else chunk, WARPS)
    left = "" if way.name == name else f"; which leaves {name} one chunk of all steps"
    return way._replace(reason=ASKED + left)
