"""Ways of solving a recurrence, a file each."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ...schedule import Schedule, blelloch
from .choice import CHUNK, Choice, choose
from .chunked import Chunked
from .newton import Newton, Parallel
from .recurrence import Problem, Recurrence, Solver
from .relaxed import Relaxed
from .sequential import Sequential
from .tree import Planned, Tree

__all__ = ["CHUNK", "FORWARD", "SCHEDULES", "SOLVERS", "Choice", "Problem", "Recurrence", "choose", "parse", "solve"]

#: By their names.
SOLVERS: dict[str, Solver] = {
    solver.name: solver for solver in (Sequential(), Chunked(), Tree(), Planned(), Relaxed(), Newton(), Parallel())
}
#: Names in ``schedule=``, of affine recurrences; ``auto`` chooses one.
SCHEDULES = ("auto", "linear", "chunked", "blelloch", "planned", "relaxed")
#: Names in ``forward=``.
FORWARD = ("sequential", "parallel", "relaxed", "newton")


def parse(schedule: object, names: Sequence[str] = SCHEDULES, chunk: int = CHUNK) -> Choice:
    """What a ``schedule=`` argument asks for, with `chunk` steps in a chunk unless it says so, as ``chunked:64``.

    Raises
    ------
    ValueError
        Where it is neither a Schedule none of `names`.

    Examples
    --------
    >>> parse("chunked:64").chunk, parse("blelloch:2").levels
    (64, 2)
    """
    if isinstance(schedule, Schedule):
        return Choice("linear" if schedule.name == "linear" else "blelloch", chunk, schedule=schedule)
    name, colon, argument = schedule.partition(":") if isinstance(schedule, str) else ("", "", "")
    number = int(argument) if argument.isascii() and argument.isdecimal() else -1
    least = {"chunked": 1, "relaxed": 1, "blelloch": 0}.get(name)
    if name not in names or (colon and (least is None or number < least)):
        raise ValueError(
            f"schedule is {schedule!r}; expected one of {', '.join(names)}; chunked and relaxed also with the steps of "
            "a chunk, as in chunked:64, and blelloch with its levels, as in blelloch:2; or a Schedule"
        )
    if name == "blelloch":
        return Choice(name, chunk, number if colon else None)
    return Choice(name, number if colon else chunk)


def solve(problem: Problem, choice: Choice) -> torch.Tensor:
    """Solve a problem as chosen: the last states, ``(batch, state)``.

    Raises
    ------
    ValueError
        Where the schedule is for another number of stages than there are steps and a first state.
    """
    time, report, solver = problem.sequences.time, problem.report, SOLVERS[choice.name]
    stages = time + 1
    if choice.schedule is not None and choice.schedule.n != stages:
        raise ValueError(
            f"the schedule is for {choice.schedule.n} stages, but {time} steps and a first state are {stages}; make "
            f"one with n={stages}"
        )
    report.chunk, report.reason = choice.chunk, choice.reason
    if isinstance(solver, Tree):
        report.chunk, problem.schedule = 1, choice.schedule or _blelloch(stages, choice.levels)
    return (SOLVERS["linear"] if time <= report.chunk else solver).solve(problem)


_blelloch = functools.lru_cache(maxsize=16)(blelloch)
