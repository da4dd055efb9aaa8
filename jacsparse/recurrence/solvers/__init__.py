"""Ways of solving a recurrence, a file each."""

from __future__ import annotations

import torch

from ...runtime import on_device
from ...schedule import Names, Schedule
from .choice import RecurrenceSize, choose
from .chunked import Chunked, device_chunk
from .newton import Newton, Parallel
from .recurrence import ASKED, CHUNK, Choice, Kept, Problem, Recurrence, Solver
from .relaxed import Relaxed
from .sequential import Sequential
from .tree import Planned, Tree

__all__ = [
    "ASKED",
    "CHUNK",
    "SOLVERS",
    "Choice",
    "Kept",
    "Problem",
    "Recurrence",
    "RecurrenceSize",
    "Solver",
    "check_stages",
    "choose",
    "parse",
    "solve",
]

#: The solvers by their names.
SOLVERS: dict[str, Solver] = {
    solver.name: solver for solver in (Sequential(), Chunked(), Tree(), Planned(), Parallel(), Relaxed(), Newton())
}


def parse(value: object, recurrence: str = "gradients", chunk: int = CHUNK) -> Choice:
    """What a ``schedule=`` or ``forward=`` argument asks for.

    A schedule does what its name says: ``linear`` runs step after step, ``chunked`` in chunks of its blocks' length.
    Any other one is executed product by product.

    Parameters
    ----------
    value : object
        The argument.
    recurrence : {"gradients", "linear", "states"}
        What is to be solved: the states of layers by ``forward=``, the others by ``schedule=``.
    chunk : int
        Steps of a chunk, unless the argument says so, as ``chunked:64``.

    Raises
    ------
    TypeError, ValueError
        Where it is neither a name nor, for ``schedule=``, a Schedule.

    Examples
    --------
    >>> parse("chunked:64").chunk, parse("blelloch:2").levels, parse("linear").name
    (64, 2, 'sequential')
    """
    if isinstance(value, Schedule) and recurrence != "states":
        name = value.name.partition(":")[0]
        like = parse(value.name, recurrence) if name in ("linear", "chunked") else Choice("blelloch", 1, reason=ASKED)
        return like._replace(schedule=value)
    names = {name: solver.number for name, solver in SOLVERS.items() if recurrence in solver.solves}
    if recurrence == "states":
        name, number = Names("forward", {"auto": None, **names}).parse(value)
    else:
        name, number = Names("schedule", {"auto": None, "linear": None, **names}, "a Schedule").parse(value)
    if name == "auto":
        return Choice(name, chunk)
    # A chain's name for what goes step after step.
    return SOLVERS["sequential" if name == "linear" else name].choice(number, chunk)._replace(reason=ASKED)


def check_stages(choice: Choice, time: int) -> None:
    """ValueError where a schedule is for another number of stages than there are steps and a first state."""
    if choice.schedule is not None and choice.schedule.n != time + 1:
        raise ValueError(
            f"the schedule is for {choice.schedule.n} stages, but {time} steps and a first state are {time + 1}; make "
            f"one with n={time + 1}"
        )


def solve(problem: Problem) -> torch.Tensor:
    """Solve a problem as chosen: the last states, ``(batch, state)``.

    Raises
    ------
    ValueError
        Where the schedule is for another number of stages than there are steps and a first state.
    """
    time, choice, report = problem.sequences.time, problem.choice, problem.report
    if not time:
        return problem.initial_state
    check_stages(choice, time)
    full = not problem.recurrence.diagonal
    if choice.name == "chunked" and full and not choice.asked and on_device(problem.initial_state):
        choice = choice._replace(chunk=device_chunk(time, problem.initial_state.shape[1]))
        problem.choice = choice
    report.chunk = choice.chunk
    # A batch without samples has no chunks either.
    in_one = time <= choice.chunk or not problem.sequences.batch
    name = "sequential" if in_one else choice.name
    left = f"which leaves {choice.name} one chunk of all steps" if name != choice.name else ""
    report.reason = "; ".join(filter(None, (report.reason, choice.reason, left)))
    return SOLVERS[name].solve(problem)
