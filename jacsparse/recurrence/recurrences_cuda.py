"""Recurrences on CUDA tensors: what launches their kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from ..runtime import INDEX, REAL, THREADS, KernelFile, allocated, blocks, c_type, index_type, instances, uploaded
from .sequences import Chunks, DeviceRuns, Runs

#: Elements of a state, at most: of a cell, whose threads have one each, and of a linear recurrence.
LARGEST, WIDEST = 128, 512

_FOLDER = Path(__file__).parent / "kernels"
#: Weights of a gate that a thread keeps in registers, and threads that share those of an element: what suffices for a
#: state, and leaves room for what is on its way from memory, is chosen; the last one takes all.
_SHARES = {
    ("rnn", "float"): ((16, 1), (20, 1), (32, 1), (32, 2), (32, 4)),
    ("rnn", "double"): ((20, 1), (32, 1), (32, 2), (0, 2)),
    ("gru", "float"): ((16, 1), (20, 1), (32, 1), (32, 2), (0, 4)),
    ("gru", "double"): ((16, 2), (16, 4), (0, 2)),
    ("lstm", "float"): ((20, 1), (32, 1), (16, 4), (0, 4)),
    ("lstm", "double"): ((8, 4), (0, 2)),
    ("scaled", "float"): ((20, 1), (32, 1), (32, 2), (0, 1)),
    ("scaled", "double"): ((20, 1), (32, 1), (0, 1)),
}


#: What sweeps compute in, and the dtype of their data: gaps between chunks of float32 are measured in float64.
_SWEPT = ("float, float", "double, double", "double, float")


def _in_registers(name: str, types: Iterable[str], *cells: str) -> tuple[str, ...]:
    return tuple(
        f"{name.format(cell)}<{kind}, {registers}, {split}>"
        for cell, kind in itertools.product(cells, types)
        for registers, split in _SHARES[cell, kind.partition(",")[0]]
    )


def _transfers(name: str) -> tuple[str, ...]:
    return (f"{name}_transfer<float, 4>", f"{name}_transfer<float, 8>", f"{name}_transfer<double, 4>")


_CELLS = KernelFile(
    _FOLDER / "recurrent.cu",
    (
        *_in_registers("{}_forward", REAL, "rnn", "gru", "lstm"),
        *_in_registers("{}_backward", _SWEPT, "rnn", "gru", "lstm"),
        *_transfers("rnn"),
        *_transfers("gru"),
    ),
)
_LINEAR = KernelFile(
    _FOLDER / "linear.cu",
    (
        *instances("dense_sweep", _SWEPT),
        *instances("diagonal_sweep", _SWEPT),
        *_in_registers("{}_sweep", _SWEPT, "scaled"),
        *instances("sparse_sweep", _SWEPT, INDEX),
        *_transfers("dense"),
        *_transfers("scaled"),
    ),
)
_BOUNDARIES = KernelFile(
    _FOLDER / "boundaries.cu",
    (*instances("judge", REAL), *instances("walk", REAL), *instances("walk_diagonals", REAL)),
)


def launch(name: str, runs: Runs | DeviceRuns, weight: torch.Tensor, size: int, *arguments: Any) -> None:
    """Run one of the cells' kernels, as in ``gru_forward``, on the device of the weight.

    Arguments are those that the CPU's kernel of that cell and direction takes after the runs, without `live_steps`;
    arrays are uploaded, and tensors without rows are left out. The last one is the result, whose dtype is that of all
    arithmetic.

    Raises
    ------
    ValueError
        Where the state is too large.
    """
    check_size("hidden_size", size, LARGEST)
    device = weight.device
    there, dtype, (cell, _, way) = runs.on(device), arguments[-1].dtype, name.partition("_")
    (registers, split), threads = _shares(cell, dtype, size)
    types = c_type(dtype) if way == "forward" else _swept(dtype, weight.dtype)
    _CELLS.launch(
        f"{name}<{types}, {registers}, {split}>",
        [len(there.sample)],
        [threads],
        *there[:6],
        size,
        *(_given(argument, device) for argument in arguments),
        device=device,
    )


def sweep(
    form: str,
    runs: Runs | DeviceRuns,
    like: torch.Tensor,
    dtype: torch.dtype,
    matrices: tuple[Any, ...],
    states: tuple[Any, ...],
    back: bool,
) -> None:
    """Take runs of a linear recurrence with matrices of a form, as in ``dense``, from first to last states, or back.

    Parameters
    ----------
    form : {"dense", "diagonal", "scaled", "sparse"}
        Of the matrices.
    runs : Runs
        Which.
    like : Tensor, (runs, n)
        The first states, in whose dtype all is computed.
    dtype : torch.dtype
        Of the matrices and of what is added.
    matrices, states : tuple
        What the kernel takes of each, before and after `shared`, or the width of sparse values.
    back : bool
        Whether this is the adjoint.

    Raises
    ------
    ValueError
        Where the state is too large.
    """
    device, (count, size) = like.device, like.shape
    there, types = runs.on(device), _swept(like.dtype, dtype)
    table = (*there[:4], there.batch)
    arguments = (*matrices, *states)
    if form == "diagonal":
        grid = [blocks(count * size)]
        _LINEAR.launch(
            f"diagonal_sweep<{types}>", grid, [THREADS], *table, count, size, back, *arguments, device=device
        )
        return
    check_size("n", size, WIDEST)
    if form == "sparse":
        # One type for all of them.
        kind = index_type(*(array for array in matrices[:3] if array is not None))
        arrays = (None if array is None else uploaded(array, device, kind) for array in matrices[:3])
        index, arguments = c_type(kind), (*arrays, *matrices[3:], *states)
        # Neighbouring samples' values lie side by side; two states of each have to fit.
        batch, fitting = there.batch, 48 * 1024 // (2 * size * like.element_size())
        lanes = 1 << min(5, batch.bit_length() - 1, fitting.bit_length() - 1)
        _LINEAR.launch(
            f"sparse_sweep<{types}, {index}>",
            [blocks(count, lanes)],
            [lanes, THREADS // lanes],
            *table,
            count,
            size,
            back,
            *arguments,
            device=device,
            shared=2 * size * lanes * like.element_size(),
        )
        return
    if form == "scaled":
        (registers, split), threads = _shares(form, like.dtype, size)
        instance = f"scaled_sweep<{types}, {registers}, {split}>"
    else:
        instance, threads = f"dense_sweep<{types}>", max(THREADS, _warps(size))
    _LINEAR.launch(instance, [count], [threads], *table, size, back, *arguments, device=device)


def transfer(
    name: str,
    runs: Runs | DeviceRuns,
    like: torch.Tensor,
    size: int,
    *arguments: Any,
    back: bool | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The affine propagator of each run, ``(runs, size + 1, size)``: its matrix, and its offset in the last row.

    Parameters
    ----------
    name : {"rnn", "gru", "dense", "scaled"}
        Of the recurrence: the gradients' of a cell, or a linear one.
    runs : Runs
        Which.
    like : Tensor
        Where, and of which dtype.
    size : int
        Elements of a state.
    *arguments
        What the kernel takes after the shares and before the result.
    back : bool, optional
        Of a linear recurrence: whether this is the adjoint.
    out : Tensor, optional
        What is returned: of runs without steps it keeps what it has.
    """
    check_size("hidden_size" if back is None else "n", size, LARGEST)
    device, width = like.device, like.element_size()
    there = runs.on(device)
    rows = 4 if size <= 32 or width > 4 else 8
    # A block's rows, of size + 1, the slab and the coefficients together fit 64 KiB.
    share = -(-(size + 1) // -(-(size + 1) // (260 // width)))
    height, columns = -(-share // rows) * rows, -(-size // 4) * 4
    pitch = height if height // 4 % 2 else height + 4
    coefficients = {"rnn": 2, "gru": 5, "dense": 1, "scaled": 2}[name]
    if out is None:
        out = allocated("the chunks' transfer matrices", (len(there.sample), size + 1, size), like.dtype, device)
    table = there[:6] if back is None else (*there[:4], there.batch)
    (_CELLS if back is None else _LINEAR).launch(
        f"{name}_transfer<{c_type(like.dtype)}, {rows}>",
        [len(there.sample), blocks(size + 1, share)],
        [_warps(columns // 4 * (height // rows))],
        *table,
        size,
        share,
        *(() if back is None else (back,)),
        *(_given(argument, device) for argument in arguments),
        out,
        device=device,
        shared=(size * pitch + _SLAB * columns + 2 * coefficients * size) * width,
    )
    return out


#: As in `runs.cuh`.
_SLAB = 16


class Convergence(NamedTuple):
    """What `judge` finds of the runs and of the samples; memory that all sweeps share.

    Attributes
    ----------
    start : Tensor, (runs, state)
        Where runs are to start, or what they came to.
    again : Tensor of int64, (runs,)
        Steps that they are to be taken through again.
    begin, steps : Tensor of int64, (batch,)
        The time of the first step that is left of each sample, and how many are.
    rest : Tensor, (batch, state)
        Where these start; the last state where there are none.
    """

    start: torch.Tensor
    again: torch.Tensor
    begin: torch.Tensor
    steps: torch.Tensor
    rest: torch.Tensor

    @classmethod
    def of(cls, guess: torch.Tensor, initial_state: torch.Tensor) -> Convergence:
        """Room for runs that start at `guess`, of samples that start at `initial_state`."""
        again, begin, steps = (
            torch.empty(len(like), dtype=torch.int64, device=initial_state.device)
            for like in (guess, initial_state, initial_state)
        )
        return cls(torch.empty_like(guess), again, begin, steps, torch.empty_like(initial_state))


def tolerance(dtype: torch.dtype) -> float:
    """How far, as a share of the largest state, a guess may be from what follows."""
    return 8 * torch.finfo(dtype).eps


def judge(
    chunks: Chunks,
    ends: torch.Tensor,
    following: torch.Tensor | None,
    initial_state: torch.Tensor,
    scale_floor: float,
    guess: torch.Tensor,
    previous: torch.Tensor | None,
    defect: torch.Tensor,
    judged: Convergence,
) -> None:
    """Compare first states with those that follow from the runs' last ones, or with `following`.

    Writes `guess`, `defect` and `judged`; for samples that were already within the tolerance it writes only `defect`.
    """
    device, size = initial_state.device, initial_state.shape[1]
    _BOUNDARIES.launch(
        f"judge<{c_type(initial_state.dtype)}>",
        [len(initial_state)],
        [1024],
        *_of_chunks(chunks, device),
        size,
        chunks.backward,
        ends,
        following,
        initial_state,
        previous,
        tolerance(initial_state.dtype),
        max(scale_floor, torch.finfo(initial_state.dtype).tiny),
        guess,
        judged.start,
        judged.again,
        defect,
        judged.begin,
        judged.steps,
        judged.rest,
        device=device,
    )


def scan_boundaries(
    chunks: Chunks,
    matrices: torch.Tensor,
    initial_state: torch.Tensor,
    *,
    offsets: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
) -> tuple[torch.Tensor, DeviceRuns]:
    """First states of the runs, by what these do to a state, and the runs of the samples where that overflows.

    Parameters
    ----------
    chunks : Chunks
        The runs.
    matrices : Tensor, (runs, state + 1, state), or (runs, state) with `offsets`
        What runs do to a row vector, and what they add; or the diagonals of such matrices.
    initial_state : Tensor, (batch, state)
        The samples' first states.
    offsets : Tensor, (runs, state), optional
        What is added, where matrices are diagonal.
    previous : Tensor, (batch,), optional
        Defects: samples within the tolerance are passed over.
    """
    device, (batch, size) = initial_state.device, initial_state.shape
    start = initial_state.new_empty(len(chunks.runs), size)
    begin, count = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
    if offsets is None:
        name, threads = "walk", max(1, min(8, WIDEST // _warps(size))) * _warps(size)
        arguments: tuple[Any, ...] = (matrices, initial_state, previous, tolerance(initial_state.dtype))
    else:
        name, threads, arguments = "walk_diagonals", THREADS, (matrices, offsets, initial_state)
    _BOUNDARIES.launch(
        f"{name}<{c_type(initial_state.dtype)}>",
        [batch],
        [threads],
        *_of_chunks(chunks, device),
        size,
        chunks.backward,
        *arguments,
        start,
        begin,
        count,
        device=device,
    )
    return start, remaining_runs(chunks, device, begin, count)


def remaining_runs(chunks: Chunks, device: torch.device, begin: torch.Tensor, steps: torch.Tensor) -> DeviceRuns:
    """For each sample a run of so many steps from a time on."""
    whole = chunks.sequences.whole(chunks.runs.direction).on(device)
    return whole._replace(begin=begin, steps=steps)


def check_size(name: str, size: int, largest: int) -> None:
    """Refuse states that kernels have no room for."""
    if size > largest:
        raise ValueError(
            f"{name} is {size}; on CUDA devices states have at most {largest} elements: move the work to the CPU by "
            ".cpu()" + (", or use torch.nn's layer" if name == "hidden_size" else "")
        )


def padded(weight: torch.Tensor) -> torch.Tensor:
    """A weight as `transfer` takes it: rows are aligned, and padded to whole fours."""
    if weight.shape[1] % 4 or weight.data_ptr() % 16:
        return functional.pad(weight, (0, -weight.shape[1] % 4)).clone()
    return weight


def _shares(cell: str, dtype: torch.dtype, size: int) -> tuple[tuple[int, int], int]:
    """Registers of a thread and threads of an element, and the threads of a block."""
    shares = _SHARES[cell, c_type(dtype)]
    registers, split = next((share for share in shares if size <= share[0] * share[1]), shares[-1])
    return (registers, split), _warps(registers * split**2 or -(-size // 8) * 8 * split)


def _swept(dtype: torch.dtype, memory: torch.dtype) -> str:
    return f"{c_type(dtype)}, {c_type(memory)}"


def _warps(size: int) -> int:
    return max(1, -(-size // 32)) * 32


def _of_chunks(chunks: Chunks, device: torch.device) -> tuple[Any, ...]:
    runs, tables = chunks.runs.on(device), (uploaded(array, device) for array in (chunks.table, chunks.counts))
    return (*tables, runs.begin, runs.steps, chunks.sequences.batch)


def _given(argument: Any, device: torch.device) -> Any:
    if isinstance(argument, np.ndarray):
        return uploaded(argument, device, index_type(argument))
    return None if isinstance(argument, torch.Tensor) and not len(argument) else argument
