"""Numbers of workers, and what is done first on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index

#: A time is shorter than another if it is so beyond the rounding of sums.
_SURELY = 1 - 1e-9


def check_workers(workers: Sequence[int], fewest: int = 1) -> tuple[int, ...]:
    """Numbers of workers as integers, without repetitions.

    Raises
    ------
    TypeError, ValueError
        Where they are no integers of at least 1, or there are less than `fewest`.

    Examples
    --------
    >>> check_workers([4, 1, 4])
    (4, 1)
    """
    try:
        numbers = tuple(dict.fromkeys(index(number) for number in workers))
    except TypeError:
        raise TypeError(f"workers is {workers!r}; expected integers, as in (1, 4, 16)") from None
    if len(numbers) < fewest or min(numbers, default=1) < 1:
        raise ValueError(f"workers is {workers!r}; expected integers of at least 1, as in (1, 4, 16)")
    return numbers


def fastest_on(workers: Iterable[int], times_on: Callable[[int], Mapping[str, float]]) -> tuple[tuple[int, str], ...]:
    """The name of the shortest time, from each number of workers on at which it changes.

    Examples
    --------
    >>> fastest_on([1, 2, 4, 8], lambda p: {"alone": 10.0, "shared": 30.0 / p})
    ((1, 'alone'), (4, 'shared'))
    """
    changes: list[tuple[int, str]] = []
    for number in workers:
        times = times_on(number)
        least = min(times.values())
        if not changes or times[changes[-1][1]] * _SURELY > least:
            changes.append((number, next(name for name, time in times.items() if time * _SURELY <= least)))
    return tuple(changes)
