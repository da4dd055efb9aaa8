"""`linear_recurrence`: ``h_t = A_t h_{t-1} + b_t``, differentiable in all its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..affine import AffineMaps, SparseMaps
from ..patterns import UnsupportedOperatorError
from ..runtime import a_type, is_exporting, is_traced, uncompiled
from ..schedule import Schedule
from ..tracing import without_autocast
from . import recurrences_cuda
from .across_ranks import SequencePart, SequenceRanks
from .levels_cuda import widened
from .matrices import StepMatrices, checked
from .once_differentiable import differentiable_once, once
from .reports import Report
from .sequences import Chunks, DeviceRuns, Runs, Sequences, index, plain
from .solvers import SOLVERS, Choice, Kept, Problem, Recurrence, choose, parse, solve

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class _Linear(Recurrence):
    """A linear recurrence, or its adjoint."""

    A: StepMatrices
    added: torch.Tensor | None
    out: torch.Tensor
    adjoint: bool

    @property
    def diagonal(self) -> bool:
        return self.A.diagonal

    def run(self, runs: Runs | DeviceRuns, start: torch.Tensor, *, record: bool = True) -> torch.Tensor:
        return self.A.run(runs, self.added, start, self.out if record else None, adjoint=self.adjoint)

    def matrices(self, runs: Runs, dtype: torch.dtype, kept: Kept | None = None) -> torch.Tensor:
        size = self.A.size
        if self.diagonal:
            return self.A.run(runs, None, self.out.new_ones(len(runs), size, dtype=dtype), None, adjoint=self.adjoint)
        units = torch.eye(size, dtype=dtype, device=self.out.device).repeat(len(runs), 1)
        ends = self.A.run(runs.repeat(size), None, units, None, adjoint=self.adjoint)
        return ends.reshape(len(runs), size, size)

    def transfer(self, runs: Runs, initial_state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        A, added = self.A, self.added
        if not self.diagonal and (A.size > recurrences_cuda.LARGEST or not A.transfers):
            return super().transfer(runs, initial_state, dtype)
        assert added is not None
        if added.dtype != dtype and not self.diagonal:
            *tensors, added = widened(*map(plain, A.tensors), added)
            A = A.form(*tensors)
        form, matrices = type(A).__name__.lower(), A.transferred(adjoint=self.adjoint)
        return recurrences_cuda.transfer(form, runs, added, A.size, matrices, back=self.adjoint)


@dataclass
class _SparseLinear(_Linear):
    """As `_Linear`, whose matrices have a pattern: maps of steps are products of sparse matrices."""

    sparse = True

    def maps(self, chunks: Chunks, initial_state: torch.Tensor, *, sparse: bool) -> AffineMaps:
        pattern, (values,) = self.A.pattern, self.A.tensors
        assert self.added is not None and pattern is not None
        values = values.detach().transpose(0, 1).expand(-1, -1, len(initial_state))
        offsets = self.added.permute(2, 0, 1)
        if (chunks.runs.direction < 0) != self.adjoint:
            values, offsets = values.flip(1), offsets.flip(1)
        if self.adjoint:
            values, pattern = values[index(pattern.transposition, values).long()], pattern.T
        values, offsets = values.double().contiguous(), offsets.double().contiguous()
        if self.adjoint:
            # The adjoint adds before it multiplies.
            offsets = SparseMaps(pattern, values, torch.zeros_like(offsets)).apply(offsets)
        return SparseMaps(pattern, values, offsets)

    def whole(self, chunks: Chunks, initial_state: torch.Tensor) -> AffineMaps:
        steps = chunks.sequences.cut(chunks.runs.direction, 1, backward=chunks.backward)
        return self.maps(steps, initial_state, sparse=True).composed()

    def constant(self, state: torch.Tensor) -> AffineMaps:
        assert self.A.pattern is not None
        pattern = self.A.pattern.T if self.adjoint else self.A.pattern
        return SparseMaps(pattern, None, state.double().T[:, None].contiguous())

    def state(self, constant: AffineMaps) -> torch.Tensor:
        assert constant.offsets is not None
        return constant.offsets[:, 0].T


def _recurrence(A: StepMatrices, added: torch.Tensor, out: torch.Tensor, *, adjoint: bool) -> _Linear:
    return (_Linear if A.pattern is None else _SparseLinear)(A, plain(added), out, adjoint)


@uncompiled
def linear_recurrence(
    A: StepMatrices,
    b: torch.Tensor,
    h0: torch.Tensor | None = None,
    *,
    reverse: bool = False,
    schedule: Schedule | str = "auto",
    reports: list[Report] | None = None,
    process_group: ProcessGroup | None = None,
    exchange: str = "auto",
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
    schedule : Schedule or str
        ``sequential``, or ``linear``: step after step, samples side by side. ``chunked`` or ``chunked:STEPS``: what
        each chunk of steps does to a state, as a matrix, side by side; then the states at the boundaries; then every
        chunk by itself. ``blelloch`` or ``blelloch:LEVELS``: a parallel scan over single steps. A
        `jacsparse.schedule.Schedule` of one stage more than there are steps: as its name says, or by its products.
        ``relaxed`` or ``relaxed:STEPS``: chunks from guessed states, again from the neighbours' results until they
        agree; chunked where they do not or, on a CUDA device, step after step. ``auto``: chunked where a few samples of
        long sequences and small states leave many workers idle, else sequential.
    reports : list, optional
        Takes a `Report` of this solution, and later of its gradient's; on a CUDA device, `Report.read` completes it.
    process_group, exchange
        As `jacsparse.nn.RNN` takes them: each rank passes its consecutive steps, and gets theirs back. `h0` is read
        where the sequences begin.

    Returns
    -------
    Tensor, (time, batch, n)

    Raises
    ------
    TypeError, ValueError
        Where a tensor's kind, dtype, device or shape does not fit, or the schedule is unknown.
    UnsupportedOperatorError
        Where torch.export, torch.jit.trace or make_fx make a program of the call.

    Notes
    -----
    The adjoint, ``v_t = g_t + A_{t+1}ᵀ v_{t+1}``, is a linear recurrence too, solved by the same schedule; thesis,
    section 3.1, with a loss at every step.

    Examples
    --------
    >>> import torch
    >>> from jacsparse.recurrence import Diagonal
    >>> d = torch.full((4, 1, 1), 0.5, requires_grad=True)
    >>> h = linear_recurrence(Diagonal(d), torch.ones(4, 1, 1))
    >>> h.flatten().tolist()
    [1.0, 1.5, 1.75, 1.875]
    >>> h[-1].backward()
    >>> d.grad.flatten().tolist()
    [0.0, 0.25, 0.75, 1.75]
    """
    if is_exporting() or torch.jit.is_tracing() or is_traced():  # type: ignore[attr-defined]
        raise UnsupportedOperatorError(
            "a linear recurrence cannot be exported, traced or functionalized; write it as a loop for that"
        )
    if not isinstance(A, StepMatrices):
        raise TypeError(f"A is {a_type(A)}; expected Dense, Diagonal, Scaled or Sparse")
    checked("b", b, 3, "(time, batch, n)")
    time, batch, size = b.shape
    if (A.time, A.size) != (time, size) or A.batch not in (1, batch):
        raise ValueError(
            f"A has {A.time} steps of {A.batch} samples, {A.size} × {A.size}, and b has shape {tuple(b.shape)}; "
            f"expected {time} steps of {batch} samples or 1, {size} × {size}"
        )
    if h0 is not None:
        checked("h0", h0, 2, "(batch, n)")
        if tuple(h0.shape) != (batch, size):
            raise ValueError(f"h0 has shape {tuple(h0.shape)}; expected ({batch}, {size})")
    start = b.new_zeros(batch, size) if h0 is None else h0
    for name, tensor in (("h0", start), *((type(A).__name__, tensor) for tensor in A.tensors)):
        if tensor.device != b.device:
            raise ValueError(f"{name} is on {tensor.device} and b is on {b.device}; move them to one device")
        if tensor.dtype != b.dtype:
            raise TypeError(f"{name} is {tensor.dtype} and b is {b.dtype}; convert one of them")
    choice = parse(schedule, "linear")
    part, across = None, SequenceRanks.of(process_group, exchange)
    if across is not None:
        facts = {"A": type(A).__name__, "size": size, "batch": batch, "dtype": str(b.dtype), "reverse": reverse}
        part = across.part(facts, time, (b, start, *A.tensors))
        start = part.joined(start)
    call = _Call(A.form, -1 if reverse else 1, choice, reports, part)
    states: torch.Tensor = _Recurrence.apply(call, b, start, *A.tensors)
    return states


class _Call(NamedTuple):
    """How a recurrence and its adjoint are solved, with matrices of a form, in a direction of time."""

    form: Callable[..., StepMatrices]
    direction: int
    choice: Choice
    reports: list[Report] | None
    part: SequencePart | None

    def matrices(self, tensors: Iterable[torch.Tensor]) -> StepMatrices:
        """The matrices, outside autograd's graph."""
        return self.form(*(tensor.detach() for tensor in tensors))

    def solve(self, recurrence: _Linear, start: torch.Tensor) -> torch.Tensor:
        """Fill ``recurrence.out``; the last state, or the gradient of the first one."""
        time, batch = recurrence.out.shape[:2]
        choice, part, backward = self.choice, self.part, recurrence.adjoint
        report = Report("backward" if backward else "forward", time)
        if self.reports is not None:
            self.reports.append(report)
        if not recurrence.out.numel() and part is None:
            report.methods = ["sequential"]
            return start.clone()
        sequences = Sequences.equal(time, batch)
        if choice.name == "auto":
            size, diagonal = recurrence.A.size, recurrence.diagonal
            choice = choose(sequences, size, recurrence.out, choice.chunk, guesses=False, diagonal=diagonal)
        fallback = SOLVERS["chunked"]
        problem = Problem(recurrence, sequences, self.direction, start, choice, report, backward, fallback=fallback)
        if part is None:
            return solve(problem)
        last = part.solve(problem)
        if not backward:
            part.initial = problem.initial_state
        return last


_Once = differentiable_once("linear recurrences", "write the recurrence as a loop for that")


class _Recurrence(_Once):  # type: ignore[misc, valid-type]
    @staticmethod
    def forward(call: _Call, b: torch.Tensor, h0: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        h = torch.empty_like(b, memory_format=torch.contiguous_format)
        recurrence = _recurrence(call.matrices(tensors), b, h, adjoint=False)
        with without_autocast(b.device):
            call.solve(recurrence, plain(h0))
        return h

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.call, _, h0, *tensors = inputs
        ctx.save_for_backward(output, h0, *tensors)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        gradients = iter(_gradients_once(ctx.call, wanted, gradient, *ctx.saved_tensors))
        return (None, *(next(gradients) if need else None for need in wanted))


def _gradients(
    call: _Call,
    wanted: Sequence[bool],
    gradient: torch.Tensor,
    h: torch.Tensor,
    h0: torch.Tensor,
    *tensors: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The gradients that are wanted, of what is added, the first state and what the matrices are made of."""
    with without_autocast(h.device):
        A, v = call.matrices(tensors), torch.empty_like(h)
        adjoint, end = _recurrence(A, gradient, v, adjoint=True), h.new_zeros(h0.shape)
        first = call.solve(adjoint, end)
        if call.part is not None:
            assert call.part.initial is not None
            h0, first = call.part.initial, first if call.part.begins(call.direction) else torch.zeros_like(first)
        of_matrices: Sequence[torch.Tensor] = ()
        if any(wanted[2:]):
            before = torch.cat([h0[None], h[:-1]] if call.direction > 0 else [h[1:], h0[None]])[: len(h)]
            of_matrices = A.gradients(v, before)
    gradients = (v, first, *(of_matrices or tensors))
    return tuple(gradient for gradient, need in zip(gradients, wanted, strict=True) if need)


_gradients_once = once(_gradients, _Once)
