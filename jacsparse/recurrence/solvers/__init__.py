"""Ways of solving a recurrence, a file each."""

from __future__ import annotations

import torch

from ...schedule import Schedule
from .choice import choose
from .chunked import Chunked
from .newton import Newton, Parallel
from .recurrence import CHUNK, Choice, Part, Problem, Recurrence, Solver
from .relaxed import Relaxed
from .sequential import Sequential
from .tree import Planned, Tree

__all__ = [
    "CHUNK",
    "SOLVERS",
    "Choice",
    "Part",
    "Problem",
    "Recurrence",
    "Solver",
    "choose",
    "forward_choice",
    "parse",
    "solve",
]

#: The solvers by their names.
SOLVERS: dict[str, Solver] = {
    solver.name: solver for solver in (Sequential(), Chunked(), Tree(), Planned(), Parallel(), Relaxed(), Newton())
}


def _names(recurrence: str) -> list[str]:
    return [name for name, solver in SOLVERS.items() if recurrence in solver.solves]


def parse(schedule: object, recurrence: str = "gradients", chunk: int = CHUNK) -> Choice:
    """What a ``schedule=`` argument asks for, with `chunk` steps in a chunk unless it says so, as ``chunked:64``.

    Parameters
    ----------
    schedule : object
        The argument.
    recurrence : {"gradients", "linear"}
        What is to be solved.
    chunk : int
        Steps of a chunk.

    Raises
    ------
    ValueError
        Where it is neither a Schedule nor a name.

    Examples
    --------
    >>> parse("chunked:64").chunk, parse("blelloch:2").levels
    (64, 2)
    """
    if isinstance(schedule, Schedule):
        return Choice("linear") if schedule.name == "linear" else Choice("blelloch", 1, schedule=schedule)
    if schedule == "auto":
        return Choice("auto", chunk)
    name, colon, argument = schedule.partition(":") if isinstance(schedule, str) else ("", "", "")
    solver, number = SOLVERS.get(name), int(argument) if argument.isascii() and argument.isdecimal() else None
    unfit = colon and (solver is None or solver.min_argument is None or number is None or number < solver.min_argument)
    if solver is None or recurrence not in solver.solves or unfit:
        raise ValueError(
            f"schedule is {schedule!r}; expected one of auto, {', '.join(_names(recurrence))}; chunked and relaxed "
            "also with the steps of a chunk, as in chunked:64, and blelloch with its levels, as in blelloch:2; or a "
            "Schedule"
        )
    return solver.choice(number, chunk)


def forward_choice(forward: object, chunk: int) -> Choice:
    """What a ``forward=`` argument asks for, with `chunk` steps in a chunk.

    Raises
    ------
    ValueError
        Where it is no name.
    """
    if forward == "sequential":
        return SOLVERS["linear"].choice(None, chunk)
    if forward not in (names := _names("states")):
        raise ValueError(f"forward is {forward!r}; expected one of sequential, {', '.join(names)}")
    return SOLVERS[str(forward)].choice(None, chunk)


def solve(problem: Problem) -> torch.Tensor:
    """Solve a problem as chosen: the last states, ``(batch, state)``.

    Raises
    ------
    ValueError
        Where the schedule is for another number of stages than there are steps and a first state.
    """
    return _solve_here(problem) if problem.part is None else problem.part.solve(problem, _solve_here)


def _solve_here(problem: Problem) -> torch.Tensor:
    time, choice, report = problem.sequences.time, problem.choice, problem.report
    if not time:
        return problem.edge
    if choice.schedule is not None and choice.schedule.n != time + 1:
        raise ValueError(
            f"the schedule is for {choice.schedule.n} stages, but {time} steps and a first state are {time + 1}; make "
            f"one with n={time + 1}"
        )
    report.chunk, report.reason = choice.chunk, choice.reason
    # A batch without samples has no chunks either.
    in_one = time <= choice.chunk or not problem.sequences.batch
    return SOLVERS["linear" if in_one else choice.name].solve(problem)
