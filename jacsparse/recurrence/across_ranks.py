"""Recurrences whose consecutive steps are on several ranks (thesis, section 3.6): what goes from rank to rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..affine import AffineMaps, compose
from ..distributed import MATRICES, VECTORS, RankGroup, Ranks, RankScan, interconnect_of
from ..patterns import requiring_gradient
from .solvers import Problem, solve


class SequenceRanks(RankGroup):
    """The ranks of a process group that have consecutive parts of sequences."""

    def part(self, facts: Mapping[str, Any], steps: int, inputs: Iterable[torch.Tensor]) -> SequencePart:
        """This rank's part in a call that all ranks make.

        Parameters
        ----------
        facts : mapping
            What all ranks have to have in common.
        steps : int
            This rank's steps.
        inputs : iterable of Tensor
            Those that may require a gradient on some ranks only.

        Raises
        ------
        RankError
            Where ranks have other facts.
        ValueError
            Where no rank has a step.
        """
        ranks, facts = self.ranks, {**facts, "gradients": torch.is_grad_enabled(), "exchange": self.exchange}
        requires_grad = any(tensor.requires_grad for tensor in inputs)
        numbers = ranks.check("start of the forward pass", facts, steps, requires_grad)
        lengths, differentiated = zip(*numbers, strict=True)
        if not any(lengths):
            raise ValueError(f"input has no steps on any of the {ranks.size} ranks; expected at least one")
        return SequencePart(ranks, lengths, self.exchange, differentiated=any(differentiated))


class SequencePart:
    """This rank's consecutive steps of sequences, in one call that all ranks make.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    lengths : sequence of int
        The steps of each.
    exchange : {"auto", "linear", "gather", "scan"}
        As `RankGroup` takes it.
    differentiated : bool
        Whether an input of any rank requires a gradient.

    Attributes
    ----------
    initial : Tensor or None
        The states before this rank's steps in the forward pass, where a recurrence is linear.
    """

    def __init__(self, ranks: Ranks, lengths: Sequence[int], exchange: str, *, differentiated: bool) -> None:
        self.ranks, self.lengths, self._exchange, self._differentiated = ranks, lengths, exchange, differentiated
        self.initial: torch.Tensor | None = None

    def joined(self, state: torch.Tensor) -> torch.Tensor:
        """The first states, which require a gradient where any rank's inputs do, so that all ranks go backward."""
        return requiring_gradient(state) if self._differentiated else state

    def begins(self, direction: int) -> bool:
        """Whether this rank has the first steps in a direction."""
        return self.ranks.rank == (0 if direction > 0 else self.ranks.size - 1)

    def solve(self, problem: Problem) -> torch.Tensor:
        """Solve an affine recurrence across ranks: this rank's last states; `problem` gets its ``initial_state``.

        Parameters
        ----------
        problem : Problem
            This rank's steps; on the first rank, in the direction of the recurrence, with the first states.
        """
        report, step = problem.report, -problem.direction if problem.backward else problem.direction
        phase = f"{report.recurrence} pass of {report.layer or 'the linear recurrence'}"
        report.exchange = self._way(problem)
        if report.exchange == "linear":
            return self._from_rank_to_rank(problem, step, phase)
        recurrence = problem.recurrence
        scan = RankScan(self.ranks, compose, report.exchange, phase, reverse=step < 0)
        last = solve(problem) if scan.is_first else problem.initial_state
        # Nobody asks for the map of the last rank.
        before = scan(recurrence.constant(last) if scan.is_first or scan.is_last else _map(problem))
        state = problem.initial_state if scan.is_first else recurrence.state(before)
        finite = bool(state.isfinite().all())
        if not all(good for (good,) in self.ranks.check(phase, {}, finite)):
            # A product of many matrices may overflow where no state does.
            return self._from_rank_to_rank(problem, step, phase)
        if scan.is_first:
            return last
        problem.initial_state = state.to(problem.initial_state.dtype).contiguous()
        return solve(problem)

    def _from_rank_to_rank(self, problem: Problem, step: int, phase: str) -> torch.Tensor:
        problem.report.exchange = "linear"
        problem.initial_state, number = self.ranks.take_over(problem.initial_state, step, phase)
        last = solve(problem)
        self.ranks.hand_over(last, step, phase, number)
        return last

    def _way(self, problem: Problem) -> str:
        """The exchange that was asked for, or the one of the least predicted time."""
        if self._exchange != "auto":
            return self._exchange
        (batch, size), count = problem.initial_state.shape, self.ranks.size
        interconnect, diagonal = interconnect_of(self.ranks), problem.recurrence.diagonal
        step = batch * size * (1 if diagonal else size)
        vectors = [length * step / VECTORS for length in self.lengths]
        product = step * (1 if diagonal else size) / MATRICES
        passes = max(vectors) + max(max(self.lengths) * product, max(vectors))
        nbytes = 8 * (step + batch * size)
        seconds = {
            "linear": sum(vectors) + interconnect.scan_seconds(count, "linear", problem.initial_state.nbytes),
            # What the last rank gets begins with a constant map, so that it multiplies vectors alone.
            "gather": passes + interconnect.scan_seconds(count, "gather", nbytes),
            "scan": passes + interconnect.scan_seconds(count, "scan", nbytes) + (count - 1).bit_length() * product,
        }
        return min(seconds, key=lambda way: seconds[way])

    def whole(self, directions: int, output: torch.Tensor, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The output, and the whole sequences' last states on all ranks; `states` are those after this rank's steps.

        Parameters
        ----------
        directions : int
            Of each layer: 1, or 2 where every second state is of a recurrence from the last step to the first.
        output : Tensor
            Of this rank's steps. It goes through, so that a backward pass takes part in the exchange where it has a
            gradient of either.
        *states : Tensor, (layers · directions, batch, size)
            After this rank's steps.
        """
        result: tuple[torch.Tensor, ...] = _WholeSequence.apply(self, directions, output, *states)
        return result

    def owners(self, directions: int) -> list[int]:
        """The rank with the last steps of each direction."""
        return [self.ranks.size - 1, 0][:directions]


def _map(problem: Problem) -> AffineMaps:
    """What all of this rank's steps do to a state, whatever the schedule."""
    sequences = problem.sequences
    if not sequences.steps:
        return problem.recurrence.constant(problem.initial_state).identity()
    chunks = sequences.cut(problem.direction, sequences.time, backward=problem.backward)
    return problem.recurrence.whole(chunks, problem.initial_state)


class _WholeSequence(torch.autograd.Function):
    """Last states from the ranks that have the last steps to all; their gradients, summed, back."""

    @staticmethod
    def forward(
        ctx: Any, part: SequencePart, directions: int, output: torch.Tensor, *states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.part, ctx.directions = part, directions
        whole = [torch.empty_like(state) for state in states]
        for direction, owner in enumerate(part.owners(directions)):
            here = [state[direction::directions] for state in states]
            for state, last in zip(whole, part.ranks.shared(here, owner, "exchange of the last states"), strict=True):
                state[direction::directions] = last
        return (output, *whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_output: torch.Tensor, *of_states: torch.Tensor) -> Any:
        ranks, phase = ctx.part.ranks, "exchange of the last states' gradients"
        gradients = [torch.empty_like(gradient) for gradient in of_states]
        for direction, owner in enumerate(ctx.part.owners(ctx.directions)):
            here = [gradient[direction :: ctx.directions] for gradient in of_states]
            for gradient, total in zip(gradients, ranks.summed(here, owner, phase), strict=True):
                gradient[direction :: ctx.directions] = total
        return (None, None, of_output, *gradients)
