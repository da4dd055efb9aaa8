"""The matrices of a linear recurrence's steps, in each of the forms that have kernels."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from ..patterns import Pattern
from ..runtime import a_type, frozen, on_device, run_rows
from . import recurrences_cuda
from .linear_kernels import KERNELS
from .sequences import DeviceRuns, Runs, check_dense, index, plain, rows_of
from .vector import padded


class StepMatrices(ABC):
    """The matrices ``A_t`` of a recurrence, n × n, in one of several forms.

    Attributes
    ----------
    size : int
        n.
    diagonal : bool
        Whether they are diagonal.
    transfers : bool
        Whether devices have a kernel of their transfers.
    pattern : Pattern or None
        That all of them share; None where they are not sparse.
    """

    #: What the matrices are made of, in the order of the constructor's arguments.
    tensors: tuple[torch.Tensor, ...]
    size: int
    diagonal: ClassVar[bool] = False
    transfers: ClassVar[bool] = False
    pattern: Pattern | None = None

    def __repr__(self) -> str:
        size = f"{self.time} steps of {self.size} × {self.size}, batch {self.batch}"
        return f"<{type(self).__name__} {size}, {self.tensors[0].dtype}>"

    @property
    def time(self) -> int:
        """Steps."""
        return self.tensors[-1].shape[0]

    @property
    def batch(self) -> int:
        """Samples; 1 where all share the matrices."""
        return self.tensors[-1].shape[1]

    @property
    def form(self) -> Callable[..., StepMatrices]:
        """Makes matrices of this form of other tensors."""
        return type(self)

    @abstractmethod
    def dense(self) -> torch.Tensor:
        """``(time, batch, n, n)``."""

    @abstractmethod
    def gradients(self, v: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of `tensors` from those of the states and the states before, both ``(time, batch, n)``."""

    def arrays(self, *, adjoint: bool) -> tuple[Any, ...]:
        """What the kernel takes."""
        return _array(self.tensors[0]), self.batch == 1

    def on_device(self, *, adjoint: bool) -> tuple[Any, ...]:
        """What the kernel of a device takes: tensors and arrays."""
        return plain(self.tensors[0]), self.batch == 1

    def transferred(self, *, adjoint: bool) -> tuple[Any, ...]:
        """What a device's kernel of transfers takes."""
        return self.on_device(adjoint=adjoint)

    @abstractmethod
    def step_work(self) -> int:
        """Elementary operations of a step of a sample."""

    def run(
        self,
        runs: Runs | DeviceRuns,
        added: torch.Tensor | None,
        start: torch.Tensor,
        out: torch.Tensor | None,
        *,
        adjoint: bool,
    ) -> torch.Tensor:
        """Take runs from first to last states, or back."""
        end, form = start.new_empty(start.shape), type(self).__name__.lower()
        if on_device(start):
            arguments, dtype = self.on_device(adjoint=adjoint), self.tensors[0].dtype
            recurrences_cuda.sweep(form, runs, start, dtype, arguments, (added, start, out, end), adjoint)
            return end
        assert isinstance(runs, Runs)
        arrays = (*self.arrays(adjoint=adjoint), *rows_of((added, start, out, end), start))
        table = (runs.sample, runs.begin, runs.count, runs.direction, runs.sequences.batch, adjoint)
        work = np.append(0, np.cumsum(runs.count * self.step_work()))
        run_rows(KERNELS[form][adjoint], work, *table, *arrays)
        return end


def checked(name: str, value: Any, ndim: int, sizes: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is {a_type(value)}; expected a torch.Tensor")
    if value.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} is {value.dtype}; expected float32 or float64")
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {value.device}; this runs on the CPU and on CUDA devices: move it with .cpu()")
    check_dense(name, value)
    if value.ndim != ndim:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; expected {sizes}")
    return value


def _array(tensor: torch.Tensor) -> np.ndarray:
    return plain(tensor).numpy()


class Dense(StepMatrices):
    """Full matrices.

    Parameters
    ----------
    blocks : Tensor, (time, batch, n, n)
        ``A_t`` of each sample; a batch of 1 is shared by all.
    """

    transfers = True

    def __init__(self, blocks: torch.Tensor) -> None:
        self.blocks = checked("blocks", blocks, 4, "(time, batch, n, n)")
        if blocks.shape[2] != blocks.shape[3]:
            raise ValueError(f"blocks has shape {tuple(blocks.shape)}; expected square matrices, (time, batch, n, n)")
        self.tensors, self.size = (blocks,), blocks.shape[3]

    def dense(self) -> torch.Tensor:
        return self.blocks

    def gradients(self, v: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.batch == 1:
            return ((v.transpose(1, 2) @ before).unsqueeze(1),)
        return (v.unsqueeze(3) * before.unsqueeze(2),)

    def step_work(self) -> int:
        return self.size * (self.size // 8 + 4)


class Diagonal(StepMatrices):
    """Diagonal matrices.

    Parameters
    ----------
    d : Tensor, (time, batch, n)
        ``A_t = diag(d_t)``; a batch of 1 is shared by all.
    """

    diagonal = True

    def __init__(self, d: torch.Tensor) -> None:
        self.d = checked("d", d, 3, "(time, batch, n)")
        self.tensors, self.size = (d,), d.shape[2]

    def dense(self) -> torch.Tensor:
        return torch.diag_embed(self.d)

    def gradients(self, v: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradient = v * before
        return (gradient.sum(dim=1, keepdim=True) if self.batch == 1 else gradient,)

    def step_work(self) -> int:
        return self.size // 8 + 4


class Scaled(StepMatrices):
    """One matrix with its columns scaled, never multiplied out: what a plain RNN's Jacobians are.

    Parameters
    ----------
    W : Tensor, (n, n)
        Common to all steps and samples.
    d : Tensor, (time, batch, n)
        ``A_t = W diag(d_t)``; a batch of 1 is shared by all.
    """

    transfers = True

    def __init__(self, W: torch.Tensor, d: torch.Tensor) -> None:
        self.W, self.d = checked("W", W, 2, "(n, n)"), checked("d", d, 3, "(time, batch, n)")
        if tuple(W.shape) != (d.shape[2], d.shape[2]):
            raise ValueError(f"W has shape {tuple(W.shape)}; expected ({d.shape[2]}, {d.shape[2]}), as d has columns")
        if W.dtype != d.dtype:
            raise TypeError(f"W is {W.dtype} and d is {d.dtype}; convert one of them")
        self.tensors, self.size = (W, d), d.shape[2]

    def dense(self) -> torch.Tensor:
        return self.W * self.d.unsqueeze(2)

    def gradients(self, v: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scaled = (self.d * before).flatten(0, 1)
        gradient = (v @ self.W) * before
        return (
            v.flatten(0, 1).T @ scaled,
            gradient.sum(dim=1, keepdim=True) if self.batch == 1 else gradient,
        )

    def arrays(self, *, adjoint: bool) -> tuple[Any, ...]:
        rows = np.zeros((self.size, padded(self.size)), dtype=_array(self.W).dtype)
        rows[:, : self.size] = _array(self.W if adjoint else self.W.T)
        return rows, _array(self.d), self.batch == 1

    @functools.cached_property
    def _columns(self) -> torch.Tensor:
        return plain(self.W.t())

    def on_device(self, *, adjoint: bool) -> tuple[Any, ...]:
        return plain(self.W) if adjoint else self._columns, plain(self.d), self.batch == 1

    def transferred(self, *, adjoint: bool) -> tuple[Any, ...]:
        weight, *others = self.on_device(adjoint=adjoint)
        return recurrences_cuda.padded(weight), *others

    def step_work(self) -> int:
        return self.size * (self.size // 8 + 2)


class Sparse(StepMatrices):
    """Sparse matrices that share one pattern: what a pruned recurrent network's Jacobians are.

    Parameters
    ----------
    pattern : Pattern
        n × n.
    values : Tensor, (time, nnz, batch)
        Of each step; a batch of 1 is shared by all samples.
    """

    pattern: Pattern

    def __init__(self, pattern: Pattern, values: torch.Tensor) -> None:
        if not isinstance(pattern, Pattern):
            raise TypeError(f"pattern is {a_type(pattern)}; expected a Pattern")
        if pattern.shape[0] != pattern.shape[1]:
            raise ValueError(f"pattern is {pattern.shape[0]} × {pattern.shape[1]}; expected a square one")
        self.pattern, self.values = pattern, checked("values", values, 3, "(time, nnz, batch)")
        if values.shape[1] != pattern.nnz:
            raise ValueError(f"values has shape {tuple(values.shape)}; expected (time, {pattern.nnz}, batch)")
        self.tensors, self.size = (values,), pattern.shape[0]

    @property
    def batch(self) -> int:
        return self.values.shape[2]

    @property
    def form(self) -> Callable[..., StepMatrices]:
        return functools.partial(type(self), self.pattern)

    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column of each entry."""
        return index(_rows(self.pattern), self.values), index(self.pattern.indices, self.values).long()

    def dense(self) -> torch.Tensor:
        blocks = self.values.new_zeros(self.time, self.batch, self.size, self.size)
        rows, columns = self._places()
        blocks[:, :, rows, columns] = self.values.transpose(1, 2)
        return blocks

    def gradients(self, v: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, columns = self._places()
        gradient = (v[:, :, rows] * before[:, :, columns]).transpose(1, 2)
        return (gradient.sum(dim=2, keepdim=True) if self.batch == 1 else gradient,)

    def arrays(self, *, adjoint: bool) -> tuple[Any, ...]:
        return self.pattern.indptr, self.pattern.indices, _array(self.values)

    def on_device(self, *, adjoint: bool) -> tuple[Any, ...]:
        pattern, slots = (self.pattern.T, self.pattern.transposition) if adjoint else (self.pattern, None)
        return pattern.indptr, pattern.indices, slots, plain(self.values), self.batch

    def step_work(self) -> int:
        return self.pattern.nnz + 4 * self.size


@functools.lru_cache(maxsize=16)
def _rows(pattern: Pattern) -> np.ndarray:
    """The row of each entry."""
    return frozen(np.repeat(np.arange(pattern.shape[0]), np.diff(pattern.indptr)))
