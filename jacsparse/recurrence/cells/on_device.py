"""Cells on CUDA devices: kernels over runs of steps around a cell's printed elementwise part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ...runtime import KernelFile, c_type, on_device
from ..recurrences_cuda import LARGEST, SWEPT, check_size, launch_transfer, padded, shares_of
from ..sequences import DeviceRuns, Runs
from .cell import Cell, FrozenCell, Saved, Weights
from .elementwise import ElementwiseStep, NotElementwiseError

_FOLDER = Path(__file__).parent.parent / "kernels"
_TRANSFERS = ("transfer<float, 4>", "transfer<float, 8>", "transfer<double, 4>")


class CellKernels:
    """A file of kernels around the printed elementwise part of each cell.

    Parameters
    ----------
    file : str
        Its name in the folder of kernels.
    instances : callable
        From a cell, the instances of the file's templates.
    suffix : str
        Behind the cell's mode in the names of the kernels that are listed.
    headers : mapping of str to callable
        As of `KernelFile`, beside ``cell.cuh``.
    """

    def __init__(
        self,
        file: str,
        instances: Callable[[Cell], tuple[str, ...]],
        suffix: str = "",
        headers: Mapping[str, Callable[[], str]] = MappingProxyType({}),
    ) -> None:
        self._path, self._instances, self._suffix, self._headers = _FOLDER / file, instances, suffix, headers
        self._listed: dict[FrozenCell, KernelFile] = {}
        self._unlisted = functools.lru_cache(maxsize=32)(self._around_other)

    def list(self, cell: Cell) -> None:
        """List the kernels around a cell among those of the library."""
        name = f"{cell.mode.lower()}{self._suffix}.cu"
        self._listed[cell.frozen] = self._around(cell, lambda: ElementwiseStep.of(cell).source, name)

    def of(self, cell: Cell) -> KernelFile:
        """The kernels around a cell."""
        frozen = cell.frozen
        return self._listed.get(frozen) or self._unlisted(frozen)

    def _around_other(self, frozen: FrozenCell) -> KernelFile:
        # Its attributes may be others when the kernels are compiled.
        source = ElementwiseStep.of(frozen.cell).source
        return self._around(frozen.cell, lambda: source, "")

    def _around(self, cell: Cell, source: Callable[[], str], name: str) -> KernelFile:
        return KernelFile(self._path, self._instances(cell), name, {"cell.cuh": source, **self._headers})


def _instances(cell: Cell) -> tuple[str, ...]:
    types = {"forward": ("float", "double"), "backward": SWEPT}
    instances = tuple(
        f"{way}<{kind}, {registers}, {split}>"
        for way, kinds in types.items()
        for kind in kinds
        for registers, split in shares_of(cell.gates, kind.partition(",")[0])
    )
    return (*instances, *(_TRANSFERS if cell.states == 1 else ()))


#: What takes runs of steps.
RUN_KERNELS = CellKernels("recurrent.cu", _instances)


class DeviceCell(Cell):
    """A cell whose runs of steps are kernels' work, as `recurrent.cu` describes it.

    Parameters
    ----------
    cell : Cell
        The cell.

    Raises
    ------
    NotElementwiseError
        Where its step cannot be printed.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell, self.step_parts, self._file = cell, ElementwiseStep.of(cell), RUN_KERNELS.of(cell)
        self.gates, self.states, self.terms = cell.gates, cell.states, cell.terms  # type: ignore[misc]
        self.transfers = cell.states == 1  # type: ignore[misc]

    @property
    def mode(self) -> str:
        return self.cell.mode

    @property
    def bounded(self) -> bool:
        return self.cell.bounded

    def step(
        self, input_projection: torch.Tensor, recurrent_projection: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        return self.cell.step(input_projection, recurrent_projection, state)

    def limit(self, states: torch.Tensor, initial_state: torch.Tensor) -> torch.Tensor:
        return self.cell.limit(states, initial_state)

    @property
    def saved_vectors(self) -> int:
        return self.step_parts.saved + self.states - 1

    @property
    def _recurrent(self) -> Sequence[int]:
        return self.step_parts.recurrent

    def forward(
        self,
        runs: Runs | DeviceRuns,
        input_projection: torch.Tensor,
        weights: Weights,
        start: torch.Tensor,
        saved: Saved,
    ) -> torch.Tensor:
        end, kind = torch.empty_like(start), c_type(start.dtype)
        # The kernel adds the hidden bias of a gate whose two parts are not added to each other.
        own_bias = weights.hidden_bias if self._apart else None
        arguments = (input_projection, weights.columns, own_bias, start, saved.output, _rows(saved.gates), end)
        self._launch("forward", kind, runs, weights, arguments)
        return end

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
        there, grad_start = runs.on(weights.hidden.device), torch.empty_like(grad_end)
        types = f"{c_type(grad_end.dtype)}, {c_type(weights.hidden.dtype)}"
        arguments = (*_history(there, saved), weights.hidden, grad_output, grad_end, grad_gates, grad_start)
        self._launch("backward", types, there, weights, arguments)
        return grad_start

    def transfer(
        self,
        runs: Runs | DeviceRuns,
        weights: Weights,
        saved: Saved,
        grad_output: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_size("hidden_size", weights.size, LARGEST)
        there = runs.on(weights.hidden.device)
        arguments = (*_history(there, saved), padded(weights.hidden), grad_output)
        vectors = self.gates + 2
        return launch_transfer(self._file, "transfer", there[:6], weights.hidden, weights.size, vectors, arguments, out)

    def _launch(
        self, way: str, types: str, runs: Runs | DeviceRuns, weights: Weights, arguments: tuple[Any, ...]
    ) -> None:
        """Run a kernel, a block for each run."""
        size = weights.size
        check_size("hidden_size", size, LARGEST)
        there = runs.on(weights.hidden.device)
        (registers, split), threads = shares_of(self.gates, types.partition(",")[0], size)
        instance = f"{way}<{types}, {registers}, {split}>"
        blocks = [len(there.sample)]
        self._file.launch(instance, blocks, [threads], *there[:6], size, *arguments, device=weights.hidden.device)


@functools.lru_cache(maxsize=32)
def _on_device(frozen: FrozenCell) -> DeviceCell | NotElementwiseError:
    try:
        return DeviceCell(frozen.cell)
    except NotElementwiseError as error:
        return error


def cell_on(cell: Cell, like: torch.Tensor) -> Cell:
    """What takes a cell's steps where a tensor is: its kernels on a device or, where its step has none, itself."""
    there = _on_device(cell.frozen) if on_device(like) else cell
    return there if isinstance(there, Cell) else cell


def obstacle_on(cell: Cell, like: torch.Tensor) -> str:
    """Why a cell has no kernels on the device of a tensor, as a clause of a sentence; empty where it has some."""
    there = _on_device(cell.frozen) if on_device(like) else cell
    return "" if isinstance(there, Cell) else f"no kernels are printed of the step of {cell.mode}, which {there}"


def _history(runs: DeviceRuns, saved: Saved) -> tuple[Any, ...]:
    """The backward kernels' arguments from the forward pass."""
    return saved.output, _rows(saved.gates), saved.initial, runs.first_times


def _rows(tensor: torch.Tensor) -> torch.Tensor | None:
    """None for a tensor without elements: nothing is read or written there."""
    return tensor if tensor.numel() else None
