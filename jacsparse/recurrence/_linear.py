"""`linear_recurrence`: ``h_t = A_t h_{t-1} + b_t``, differentiable in all its arguments."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ..patterns import Pattern
from ..patterns._cuda import multiprocessors, on_device
from ..patterns._runtime import run_rows, threads, uncompiled
from ..patterns._structure import frozen
from . import _cuda, _on_device
from . import _linear_kernels as kernels
from ._chunks import Chunks
from ._once import differentiable_once, once
from ._planned import scan, times
from ._runs import OnDevice, Runs, Sequences, index, rows_of
from ._sweeps import Report, Sweep, parse, solve_affine
from ._vector import padded

__all__ = ["Blocks", "Dense", "Diagonal", "Scaled", "Sparse", "linear_recurrence"]

_SCHEDULES = ("auto", "linear", "chunked", "blelloch", "relaxed")


class Blocks(ABC):
    """The matrices ``A_t`` of a recurrence, n × n, in one of several forms.

    Attributes
    ----------
    size : int
        n.
    """

    #: What the matrices are made of, in the order of the constructor's arguments.
    tensors: tuple[torch.Tensor, ...]
    size: int
    _kernels: ClassVar[tuple[Any, Any]]

    @property
    def time(self) -> int:
        """Steps."""
        return self.tensors[-1].shape[0]

    @property
    def batch(self) -> int:
        """Samples; 1 where all share the matrices."""
        return self.tensors[-1].shape[1]

    @property
    def form(self) -> Callable[..., Blocks]:
        """Makes matrices of this form of other tensors."""
        return type(self)

    @abstractmethod
    def dense(self) -> torch.Tensor:
        """``(time, batch, n, n)``."""

    @abstractmethod
    def gradients(self, v: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of `tensors` from those of the states and the states before, both ``(time, batch, n)``."""

    @abstractmethod
    def arrays(self, *, adjoint: bool) -> tuple[Any, ...]:
        """What the kernel takes."""

    @abstractmethod
    def on_device(self, *, adjoint: bool) -> tuple[Any, ...]:
        """What the kernel of a device takes: tensors and arrays."""

    @abstractmethod
    def step_work(self) -> int:
        """Elementary operations of a step of a sample."""

    def run(
        self,
        runs: Runs | OnDevice,
        added: torch.Tensor | None,
        start: torch.Tensor,
        out: torch.Tensor | None,
        *,
        adjoint: bool,
    ) -> torch.Tensor:
        """Take runs from first to last states, or back."""
        end = start.new_empty(start.shape)
        if on_device(start):
            given = self.on_device(adjoint=adjoint)
            form, dtype = type(self).__name__.lower(), self.tensors[0].dtype
            _cuda.sweep(form, runs, start, dtype, given, (added, start, out, end), adjoint)
            return end
        assert isinstance(runs, Runs)
        states = (rows_of(tensor, start) for tensor in (added, start, out, end))
        arrays = (*self.arrays(adjoint=adjoint), *states)
        table = (runs.sample, runs.begin, runs.count, runs.direction, runs.sequences.batch)
        work = np.append(0, np.cumsum(runs.count * self.step_work()))
        run_rows(self._kernels[adjoint], work, *table, *arrays)
        return end


def _checked(name: str, value: Any, ndim: int, sizes: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a torch.Tensor")
    if value.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} is {value.dtype}; expected float32 or float64")
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {value.device}; this runs on the CPU and on CUDA devices: move it with .cpu()")
    if value.ndim != ndim:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; expected {sizes}")
    return value


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().numpy()


class Dense(Blocks):
    """Full matrices.

    Parameters
    ----------
    blocks : Tensor, (time, batch, n, n)
        ``A_t`` of each sample; a batch of 1 is shared by all.
    """

    _kernels = (kernels.dense_sweep, kernels.dense_adjoint)

    def __init__(self, blocks: torch.Tensor) -> None:
        self.blocks = _checked("blocks", blocks, 4, "(time, batch, n, n)")
        if blocks.shape[2] != blocks.shape[3]:
            raise ValueError(f"blocks has shape {tuple(blocks.shape)}; expected square matrices, (time, batch, n, n)")
        self.tensors, self.size = (blocks,), blocks.shape[3]

    def dense(self) -> torch.Tensor:
        return self.blocks

    def gradients(self, v: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.batch == 1:
            return ((v.transpose(1, 2) @ before).unsqueeze(1),)
        return (v.unsqueeze(3) * before.unsqueeze(2),)

    def arrays(self, *, adjoint: bool) -> tuple[Any, ...]:
        return _array(self.blocks), self.batch == 1

    def on_device(self, *, adjoint: bool) -> tuple[Any, ...]:
        return self.blocks.detach().contiguous(), self.batch == 1

    def step_work(self) -> int:
        return self.size * (self.size // 8 + 4)


class Diagonal(Blocks):
    """Diagonal matrices.

    Parameters
    ----------
    d : Tensor, (time, batch, n)
        ``A_t = diag(d_t)``; a batch of 1 is shared by all.
    """

    _kernels = (kernels.diagonal_sweep, kernels.diagonal_adjoint)

    def __init__(self, d: torch.Tensor) -> None:
        self.d = _checked("d", d, 3, "(time, batch, n)")
        self.tensors, self.size = (d,), d.shape[2]

    def dense(self) -> torch.Tensor:
        return torch.diag_embed(self.d)

    def gradients(self, v: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = v * before
        return (found.sum(dim=1, keepdim=True) if self.batch == 1 else found,)

    def arrays(self, *, adjoint: bool) -> tuple[Any, ...]:
        return _array(self.d), self.batch == 1

    def on_device(self, *, adjoint: bool) -> tuple[Any, ...]:
        return self.d.detach().contiguous(), self.batch == 1

    def step_work(self) -> int:
        return self.size // 8 + 4


class Scaled(Blocks):
    """One matrix with its columns scaled, never multiplied out: what a plain RNN's Jacobians are.

    Parameters
    ----------
    W : Tensor, (n, n)
        Common to all steps and samples.
    d : Tensor, (time, batch, n)
        ``A_t = W diag(d_t)``; a batch of 1 is shared by all.
    """

    _kernels = (kernels.scaled_sweep, kernels.scaled_adjoint)

    def __init__(self, W: torch.Tensor, d: torch.Tensor) -> None:
        self.W, self.d = _checked("W", W, 2, "(n, n)"), _checked("d", d, 3, "(time, batch, n)")
        if tuple(W.shape) != (d.shape[2], d.shape[2]):
            raise ValueError(f"W has shape {tuple(W.shape)}; expected ({d.shape[2]}, {d.shape[2]}), as d has columns")
        if W.dtype != d.dtype:
            raise TypeError(f"W is {W.dtype} and d is {d.dtype}; convert one of them")
        self.tensors, self.size = (W, d), d.shape[2]

    def dense(self) -> torch.Tensor:
        return self.W * self.d.unsqueeze(2)

    def gradients(self, v: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scaled = (self.d * before).reshape(-1, self.size)
        found = (v @ self.W) * before
        return (
            v.reshape(-1, self.size).T @ scaled,
            found.sum(dim=1, keepdim=True) if self.batch == 1 else found,
        )

    def arrays(self, *, adjoint: bool) -> tuple[Any, ...]:
        rows = np.zeros((self.size, padded(self.size)), dtype=_array(self.W).dtype)
        rows[:, : self.size] = _array(self.W if adjoint else self.W.T)
        return rows, _array(self.d), self.batch == 1

    def on_device(self, *, adjoint: bool) -> tuple[Any, ...]:
        weight = self.W.detach()
        return (weight if adjoint else weight.t()).contiguous(), self.d.detach().contiguous(), self.batch == 1

    def step_work(self) -> int:
        return self.size * (self.size // 8 + 2)


class Sparse(Blocks):
    """Sparse matrices that share one pattern: what a pruned recurrent network's Jacobians are.

    Parameters
    ----------
    pattern : Pattern
        n × n.
    values : Tensor, (time, nnz, batch)
        Of each step; a batch of 1 is shared by all samples.
    """

    _kernels = (kernels.sparse_sweep, kernels.sparse_adjoint)

    def __init__(self, pattern: Pattern, values: torch.Tensor) -> None:
        if not isinstance(pattern, Pattern):
            raise TypeError(f"pattern is a {type(pattern).__name__}; expected a Pattern")
        if pattern.shape[0] != pattern.shape[1]:
            raise ValueError(f"pattern is {pattern.shape[0]} × {pattern.shape[1]}; expected a square one")
        self.pattern, self.values = pattern, _checked("values", values, 3, "(time, nnz, batch)")
        if values.shape[1] != pattern.nnz:
            raise ValueError(f"values has shape {tuple(values.shape)}; expected (time, {pattern.nnz}, batch)")
        self.tensors, self.size = (values,), pattern.shape[0]

    @property
    def batch(self) -> int:
        return self.values.shape[2]

    @property
    def form(self) -> Callable[..., Blocks]:
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
        found = (v[:, :, rows] * before[:, :, columns]).transpose(1, 2)
        return (found.sum(dim=2, keepdim=True) if self.batch == 1 else found,)

    def arrays(self, *, adjoint: bool) -> tuple[Any, ...]:
        return self.pattern.indptr, self.pattern.indices, _array(self.values)

    def on_device(self, *, adjoint: bool) -> tuple[Any, ...]:
        pattern, slots = (self.pattern.T, self.pattern.transposition) if adjoint else (self.pattern, None)
        return pattern.indptr, pattern.indices, slots, self.values.detach().contiguous(), self.batch

    def step_work(self) -> int:
        return self.pattern.nnz + 4 * self.size


@functools.lru_cache(maxsize=16)
def _rows(pattern: Pattern) -> np.ndarray:
    """The row of each entry."""
    return frozen(np.repeat(np.arange(pattern.shape[0]), np.diff(pattern.indptr)))


@dataclass
class _Linear(Sweep):
    """A linear recurrence, or its adjoint."""

    blocks: Blocks
    added: torch.Tensor | None
    out: torch.Tensor
    adjoint: bool

    @property
    def diagonal(self) -> bool:
        return isinstance(self.blocks, Diagonal)

    def run(self, runs: Runs | OnDevice, start: torch.Tensor, *, record: bool = True) -> torch.Tensor:
        return self.blocks.run(runs, self.added, start, self.out if record else None, adjoint=self.adjoint)

    def matrices(
        self,
        runs: Runs,
        dtype: torch.dtype,
        again: torch.Tensor | None = None,
        before: torch.Tensor | None = None,
    ) -> torch.Tensor:
        size = self.blocks.size
        if self.diagonal:
            return self.blocks.run(
                runs, None, self.out.new_ones(len(runs), size, dtype=dtype), None, adjoint=self.adjoint
            )
        units = torch.eye(size, dtype=dtype, device=self.out.device).repeat(len(runs), 1)
        ends = self.blocks.run(runs.repeat(size), None, units, None, adjoint=self.adjoint)
        return ends.reshape(len(runs), size, size)

    def transfer(self, runs: Runs, edge: torch.Tensor) -> torch.Tensor:
        if self.blocks.size > _cuda.LARGEST or not isinstance(self.blocks, Dense | Scaled):
            return super().transfer(runs, edge)
        name, given = type(self.blocks).__name__.lower(), self.blocks.on_device(adjoint=self.adjoint)
        if isinstance(self.blocks, Scaled):
            given = (_cuda.padded(given[0]), *given[1:])
        return _cuda.transfer(name, runs, self.out, self.blocks.size, *given, self.added, back=self.adjoint)

    def starts(self, chunks: Chunks, edge: torch.Tensor, schedule: str) -> torch.Tensor:
        if schedule == "blelloch" and isinstance(self.blocks, Sparse):
            states = _planned(self, self.blocks, edge, chunks.runs.direction)
            return states[index(chunks.place, edge), index(chunks.runs.sample, edge)]
        return super().starts(chunks, edge, schedule)


@uncompiled
def linear_recurrence(
    A: Blocks,
    b: torch.Tensor,
    h0: torch.Tensor | None = None,
    *,
    reverse: bool = False,
    schedule: str = "auto",
    reports: list[Report] | None = None,
) -> torch.Tensor:
    """Solve ``h_t = A_t h_{t-1} + b_t`` for all t, differentiably.

    Parameters
    ----------
    A : Dense, Diagonal, Scaled or Sparse
        The matrices, n × n, of each step.
    b : Tensor, (time, batch, n)
        What is added; float32 or float64, on the CPU or on a CUDA device, there with n of at most 512 unless the
        matrices are diagonal.
    h0 : Tensor, (batch, n), optional
        The state before the first step; zeros where left out.
    reverse : bool
        Whether to go from the last step to the first: ``h_t = A_t h_{t+1} + b_t``.
    schedule : str
        ``linear``: step after step, samples side by side. ``chunked`` or ``chunked:STEPS``: what each chunk of steps
        does to a state, as a matrix, side by side; then the states at the boundaries; then every chunk by itself.
        ``blelloch``: a parallel scan over single steps. ``relaxed`` or ``relaxed:STEPS``: chunks from guessed states,
        again from the neighbours' results until they agree; chunked where they do not or, on a CUDA device, step after
        step. ``auto``: chunked where a few samples of long sequences and small states leave many workers idle, else
        linear.
    reports : list, optional
        Takes a `Report` of this solution, and later of its gradient's; on a CUDA device, `Report.read` completes it.

    Returns
    -------
    Tensor, (time, batch, n)

    Raises
    ------
    TypeError, ValueError
        Where a tensor's kind, dtype, device or shape does not fit, or the schedule is unknown.

    Notes
    -----
    The adjoint, ``v_t = g_t + A_{t+1}ᵀ v_{t+1}``, is a linear recurrence too, solved by the same schedule; thesis,
    section 3.1, with a loss at every step.

    Examples
    --------
    >>> import torch
    >>> d = torch.full((4, 1, 1), 0.5, requires_grad=True)
    >>> h = linear_recurrence(Diagonal(d), torch.ones(4, 1, 1))
    >>> h.flatten().tolist()
    [1.0, 1.5, 1.75, 1.875]
    >>> h[-1].backward()
    >>> d.grad.flatten().tolist()
    [0.0, 0.25, 0.75, 1.75]
    """
    if not isinstance(A, Blocks):
        raise TypeError(f"A is a {type(A).__name__}; expected Dense, Diagonal, Scaled or Sparse")
    _checked("b", b, 3, "(time, batch, n)")
    time, batch, size = b.shape
    if (A.time, A.size) != (time, size) or A.batch not in (1, batch):
        raise ValueError(
            f"A has {A.time} steps of {A.batch} samples, {A.size} × {A.size}, and b has shape {tuple(b.shape)}; "
            f"expected {time} steps of {batch} samples or 1, {size} × {size}"
        )
    if h0 is not None:
        _checked("h0", h0, 2, "(batch, n)")
        if tuple(h0.shape) != (batch, size):
            raise ValueError(f"h0 has shape {tuple(h0.shape)}; expected ({batch}, {size})")
    start = b.new_zeros(batch, size) if h0 is None else h0
    for name, tensor in (("h0", start), *((type(A).__name__, tensor) for tensor in A.tensors)):
        if tensor.device != b.device:
            raise ValueError(f"{name} is on {tensor.device} and b is on {b.device}; move them to one device")
        if tensor.dtype != b.dtype:
            raise TypeError(f"{name} is {tensor.dtype} and b is {b.dtype}; convert one of them")
    parse(schedule, _SCHEDULES)
    found: torch.Tensor = _Recurrence.apply(A.form, -1 if reverse else 1, schedule, reports, b, start, *A.tensors)
    return found


_Once = differentiable_once("linear recurrences", "write the recurrence as a loop for that")


class _Recurrence(_Once):  # type: ignore[misc, valid-type]
    @staticmethod
    def forward(
        form: Callable[..., Blocks],
        direction: int,
        schedule: str,
        reports: list[Report] | None,
        b: torch.Tensor,
        h0: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        A = form(*(tensor.detach() for tensor in tensors))
        h = torch.empty_like(b, memory_format=torch.contiguous_format)
        sweep = _Linear(A, b.detach().contiguous(), h, False)
        with torch.autocast(b.device.type, enabled=False):
            _solve(sweep, h0.detach().contiguous(), direction, schedule, reports)
        return h

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.form, ctx.direction, ctx.schedule, ctx.reports, _, h0, *tensors = inputs
        ctx.save_for_backward(output, h0, *tensors)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, h0, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4:]
        given = (ctx.form, ctx.direction, ctx.schedule, ctx.reports, wanted)
        found = iter(_gradients_once(*given, gradient, h, h0, *tensors))
        return (None, None, None, None, *(next(found) if need else None for need in wanted))


def _gradients(
    form: Callable[..., Blocks],
    direction: int,
    schedule: str,
    reports: list[Report] | None,
    wanted: Sequence[bool],
    gradient: torch.Tensor,
    h: torch.Tensor,
    h0: torch.Tensor,
    *tensors: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The gradients that are wanted, of what is added, the first state and what the matrices are made of."""
    with torch.autocast(h.device.type, enabled=False):
        A, v = form(*(tensor.detach() for tensor in tensors)), torch.empty_like(h)
        first = _solve(_Linear(A, gradient.contiguous(), v, True), h.new_zeros(h0.shape), direction, schedule, reports)
        found: Sequence[torch.Tensor] = ()
        if any(wanted[2:]):
            before = torch.cat([h0[None], h[:-1]] if direction > 0 else [h[1:], h0[None]])[: len(h)]
            found = A.gradients(v, before)
    gradients = (v, first, *(found or tensors))
    return tuple(gradient for gradient, need in zip(gradients, wanted, strict=True) if need)


_gradients_once = once(_gradients, _Once)


def _solve(
    sweep: _Linear, start: torch.Tensor, direction: int, schedule: str, reports: list[Report] | None
) -> torch.Tensor:
    """Fill ``sweep.out``; the last state, or the gradient of the first one."""
    time, batch = sweep.out.shape[:2]
    name, length = parse(schedule, _SCHEDULES)
    report = Report("backward" if sweep.adjoint else "forward", time)
    if reports is not None:
        reports.append(report)
    if not sweep.out.numel():
        report.methods = ["linear"]
        return start.clone()
    sequences = Sequences.equal(time, batch)
    if name == "auto":
        name, length, report.reason = _choose(time, batch, sweep.blocks, length)
    return solve_affine(sweep, sequences, direction, start, name, length, report, backward=sweep.adjoint)


def _choose(time: int, batch: int, blocks: Blocks, chunk: int) -> tuple[str, int, str]:
    """What ``auto`` means for such a recurrence on this machine, a chunk's steps, and why."""
    diagonal = isinstance(blocks, Diagonal)
    if on_device(blocks.tensors[0]):
        processors = multiprocessors(blocks.tensors[0].device)
        return _on_device.choose(time, batch, blocks.size, processors, schedule="chunked", diagonal=diagonal)
    workers, rows = threads(), 1 if diagonal else blocks.size
    # A chunk takes that many rows to its matrix, one to what it adds, and one at last; that all workers do this
    # together has to be well worth it.
    linearly, by_chunks = math.ceil(batch / workers), batch * (rows + 2) / workers
    told = f"{batch} samples of {time} steps and {blocks.size} elements on {workers} workers"
    name = "chunked" if 2 * by_chunks < linearly and time >= 4 * workers * chunk else "linear"
    return name, chunk, told


def _planned(sweep: _Linear, blocks: Sparse, start: torch.Tensor, direction: int) -> torch.Tensor:
    """The states before each step, in the order of the steps, by a scan over planned sparse products."""
    pattern, values = blocks.pattern, blocks.values.detach().transpose(0, 1)
    assert sweep.added is not None
    values, offsets = values.expand(-1, -1, len(start)), sweep.added.permute(2, 0, 1)
    if (direction < 0) != sweep.adjoint:
        values, offsets = values.flip(1), offsets.flip(1)
    if sweep.adjoint:
        values, pattern = values[index(pattern.transposition, values).long()], pattern.T
    # In float64, as `Sweep.starts` has single steps.
    values, offsets, state = (tensor.double().contiguous() for tensor in (values, offsets, start.T))
    if sweep.adjoint:
        # The adjoint adds before it multiplies.
        offsets = times(pattern, values, offsets)
    return scan(pattern, values, offsets, state).permute(1, 2, 0)[:-1].to(start.dtype).contiguous()
