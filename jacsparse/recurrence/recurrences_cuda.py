"""Recurrences on CUDA tensors: what launches their kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ..runtime import INDEX, REAL, THREADS, KernelFile, allocated, blocks, c_type, index_type, instances, uploaded
from .sequences import DeviceRuns, Runs

#: Elements of a state, at most: of a cell, whose threads have one each, and of a linear recurrence.
LARGEST, WIDEST = 128, 512

_FOLDER = Path(__file__).parent / "kernels"
#: Weights of a gate that a thread keeps in registers, and threads that share those of an element: what suffices for a
#: state, and leaves room for what is on its way from memory, is chosen; the last one takes all. By the number of gates;
#: a linear recurrence has none.
_SHARES = {
    (0, "float"): ((20, 1), (32, 1), (32, 2), (0, 1)),
    (0, "double"): ((20, 1), (32, 1), (0, 1)),
    (1, "float"): ((16, 1), (20, 1), (32, 1), (32, 2), (32, 4)),
    (1, "double"): ((20, 1), (32, 1), (32, 2), (0, 2)),
    (3, "float"): ((16, 1), (20, 1), (32, 1), (32, 2), (0, 4)),
    (3, "double"): ((16, 2), (16, 4), (0, 2)),
    (4, "float"): ((20, 1), (32, 1), (16, 4), (0, 4)),
    (4, "double"): ((8, 4), (0, 2)),
    (5, "float"): ((0, 4),),
    (5, "double"): ((0, 2),),
}
#: What sweeps compute in, and the dtype of their data: gaps between chunks of float32 are measured in float64.
SWEPT = ("float, float", "double, double", "double, float")


def _transfers(name: str) -> tuple[str, ...]:
    return (f"{name}_transfer<float, 4>", f"{name}_transfer<float, 8>", f"{name}_transfer<double, 4>")


_LINEAR = KernelFile(
    _FOLDER / "linear.cu",
    (
        *instances("dense_sweep", SWEPT),
        *instances("diagonal_sweep", SWEPT),
        *(
            f"scaled_sweep<{kind}, {registers}, {split}>"
            for kind in SWEPT
            for registers, split in _SHARES[0, kind.partition(",")[0]]
        ),
        *instances("sparse_sweep", SWEPT, INDEX),
        *instances("diagonal_transfer", REAL),
        *_transfers("dense"),
        *_transfers("scaled"),
    ),
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
    there, types, shared = runs.on(device), f"{c_type(like.dtype)}, {c_type(dtype)}", 0
    numbers: tuple[Any, ...] = (size, back) if form in ("dense", "scaled") else (count, size, back)
    if form != "diagonal":
        check_size("n", size, WIDEST)
    if form == "diagonal":
        grid, block = [blocks(count * size)], [THREADS]
    elif form == "sparse":
        # One type for all of them.
        kind = index_type(*(array for array in matrices[:3] if array is not None))
        arrays = (None if array is None else uploaded(array, device, kind) for array in matrices[:3])
        types, matrices = f"{types}, {c_type(kind)}", (*arrays, *matrices[3:])
        # Neighbouring samples' values lie side by side; two states of each have to fit.
        nbytes = 2 * size * like.element_size()
        lanes = 1 << min(5, there.batch.bit_length() - 1, (48 * 1024 // nbytes).bit_length() - 1)
        grid, block, shared = [blocks(count, lanes)], [lanes, THREADS // lanes], nbytes * lanes
    elif form == "scaled":
        (registers, split), threads = shares_of(0, c_type(like.dtype), size)
        types, grid, block = f"{types}, {registers}, {split}", [count], [threads]
    else:
        grid, block = [count], [max(THREADS, whole_warps(size))]
    arguments = (*there[:4], there.batch, *numbers, *matrices, *states)
    _LINEAR.launch(f"{form}_sweep<{types}>", grid, block, *arguments, device=device, shared=shared)


def transfer(
    form: str, runs: Runs | DeviceRuns, added: torch.Tensor, size: int, matrices: tuple[Any, ...], *, back: bool
) -> torch.Tensor:
    """What each run of a linear recurrence does: ``(runs, size + 1, size)``, as of `launch_transfer`.

    Of diagonal matrices, their diagonal and the offset, in float64, ``(runs, 2, size)``.

    Parameters
    ----------
    form : {"dense", "diagonal", "scaled"}
        Of the matrices.
    runs : Runs
        Which.
    added : Tensor
        What is added.
    size : int
        Elements of a state.
    matrices : tuple
        What the kernel takes of the matrices.
    back : bool
        Whether this is the adjoint.
    """
    there, device = runs.on(added.device), added.device
    table, count, arguments = (*there[:4], there.batch), len(there.sample), (back, *matrices, added)
    if form == "diagonal":
        out = allocated("the chunks' transfer diagonals", (count, 2, size), torch.float64, device)
        instance, grid = f"diagonal_transfer<{c_type(added.dtype)}>", [blocks(count * size)]
        _LINEAR.launch(instance, grid, [THREADS], *table, count, size, *arguments, out, device=device)
        return out
    check_size("n", size, LARGEST)
    return launch_transfer(_LINEAR, f"{form}_transfer", table, added, size, {"dense": 1, "scaled": 2}[form], arguments)


def launch_transfer(
    file: KernelFile,
    kernel: str,
    table: tuple[Any, ...],
    like: torch.Tensor,
    size: int,
    vectors: int,
    arguments: tuple[Any, ...],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The affine propagator of each run, ``(runs, size + 1, size)``: its matrix, and its offset in the last row.

    Parameters
    ----------
    file : KernelFile
        The file of the kernel.
    kernel : str
        Its name.
    table : tuple
        The runs, as the kernel takes them.
    like : Tensor
        Where, and of which dtype.
    size : int
        Elements of a state.
    vectors : int
        Of `size` elements, that a step's matrix is made of.
    arguments : tuple
        What the kernel takes after the share and before the result.
    out : Tensor, optional
        What is returned: of runs without steps it keeps what it has.
    """
    width, runs = like.element_size(), len(table[0])
    rows = 4 if size <= 32 or width > 4 else 8
    # A block's rows, of size + 1, the slab and the coefficients together fit 64 KiB.
    share = -(-(size + 1) // -(-(size + 1) // (260 // width)))
    height, columns = -(-share // rows) * rows, -(-size // 4) * 4
    pitch = height if height // 4 % 2 else height + 4
    if out is None:
        out = allocated("the chunks' transfer matrices", (runs, size + 1, size), like.dtype, like.device)
    instance, threads = f"{kernel}<{c_type(like.dtype)}, {rows}>", whole_warps(columns // 4 * (height // rows))
    grid, shared = [runs, blocks(size + 1, share)], (size * pitch + _SLAB * columns + 2 * vectors * size) * width
    file.launch(instance, grid, [threads], *table, size, share, *arguments, out, device=like.device, shared=shared)
    return out


#: As in `runs.cuh`.
_SLAB = 16


def tolerance(dtype: torch.dtype) -> float:
    """How far, as a share of its scale, a guess may be from what follows."""
    return 8 * torch.finfo(dtype).eps


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
        return functional.pad(weight, (0, -weight.shape[1] % 4)) if weight.shape[1] % 4 else weight.clone()
    return weight


def shares_of(gates: int, kind: str, size: int | None = None) -> Any:
    """The choices of registers of a thread and of threads of an element, by a cell's gates and C's type.

    For a `size`: the one that is chosen for states of so many elements, and the threads of a block.
    """
    known = (0, 1, 3, 4, 5)
    shares = _SHARES[next((number for number in known if gates <= number), known[-1]), kind]
    if size is None:
        return shares
    registers, split = next((share for share in shares if size <= share[0] * share[1]), shares[-1])
    return (registers, split), whole_warps(registers * split**2 or -(-size // 8) * 8 * split)


def whole_warps(size: int) -> int:
    """Threads of the warps that `size` threads take."""
    return max(1, -(-size // 32)) * 32
