"""What a ``schedule=`` argument means for a chain."""

from __future__ import annotations

from .blockwise import Cuttable, balanced, between, chunked
from .names import Names, Number
from .scans import blelloch, linear
from .schedules import Schedule

#: The schedule of the papers' analysis, which is counted by default. What executes schedules takes ``auto`` instead:
#: plain back-propagation, the baseline of each count.
COUNTED = "blelloch:2"

_NAMES = Names(
    "schedule",
    {
        "auto": None,
        "linear": None,
        "blelloch": Number("LEVELS", 0),
        "chunked": Number("LENGTH", needed=True),
        "balanced": Number("WORKERS", needed=True),
    },
    "a Schedule",
)


def resolve(schedule: Schedule | str, n: int, chain: Cuttable | None = None) -> Schedule:
    """The schedule that a ``schedule=`` argument means, for a chain of `n` stages.

    Parameters
    ----------
    schedule : Schedule or str
        A schedule, or ``linear``, ``blelloch``, ``blelloch:LEVELS``, ``chunked:LENGTH``, ``balanced:WORKERS`` or
        ``auto``. ``auto`` is ``linear``: each step already uses the whole device, so that the schedule of the least
        work is the fastest.
    n : int
        The number of stages.
    chain : Chain, optional
        The chain that ``balanced`` cuts into blocks. No matrices are multiplied across its stages that couple samples.

    Raises
    ------
    TypeError
        If `schedule` is neither a schedule nor a name.
    ValueError
        If the name is unknown, or the schedule is for another number of stages, or multiplies what has no matrix.
    """
    name, number = parse(schedule)
    coupling = () if chain is None else chain.coupling
    if isinstance(schedule, Schedule):
        if schedule.n != n:
            raise ValueError(f"the schedule is for {schedule.n} stages, but the chain has {n}; make one with n={n}")
        without = {n - stage for stage in coupling}
        step = next((s for s in schedule.live_steps() if s.kind == "mm" and without & {s.left, s.right}), None)
        if step is not None:
            raise ValueError(
                f"the schedule's step {step} multiplies the matrix of a stage that couples samples, which has none; "
                "pass a name such as 'blelloch:2', by which no product goes across those stages"
            )
        return schedule
    if name in ("linear", "auto"):
        return linear(n)
    if name == "blelloch":
        return between(n, coupling, lambda first, stop: blelloch(stop - first, number))
    assert number is not None
    if name == "chunked":
        length = number
        return between(n, coupling, lambda first, stop: chunked(stop - first, length))
    if chain is None:
        raise ValueError(f"schedule is {schedule!r}, which balances a chain; pass the chain")
    return balanced(chain, number)


def parse(schedule: Schedule | str) -> tuple[str, int | None]:
    """The name and the number that a ``schedule=`` argument consists of; this check needs no chain.

    Raises
    ------
    TypeError, ValueError
        If `schedule` is neither a schedule nor one of the names of `resolve`.

    Examples
    --------
    >>> parse("blelloch:2")
    ('blelloch', 2)
    """
    return (schedule.name, None) if isinstance(schedule, Schedule) else _NAMES.parse(schedule)
