"""Predicted times of leapfrogging: each worker's timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .leapfrog import check_threads, shares


class Event(NamedTuple):
    """What a worker computes in a span of time."""

    #: The layer, from 0 at the output.
    layer: int
    #: The equation of the paper: 5, the recursion of errors, or 7, gradients of weights and biases.
    equation: int
    #: Seconds since the backward pass began.
    begin: float
    end: float


@dataclass(frozen=True)
class Timelines:
    """What each worker computes, one event after another."""

    workers: Sequence[Sequence[Event]]

    @property
    def seconds(self) -> float:
        """The time after which all workers have ended."""
        return max((events[-1].end for events in self.workers if events), default=0.0)


def simulate_leapfrog(errors: Sequence[float], gradients: Sequence[float], threads: int) -> Timelines:
    """The timelines of the workers of `jacsparse.leapfrog_backward`, each with a core or a stream of its own.

    Parameters
    ----------
    errors, gradients : sequence of float
        Seconds of equations 5 and 7 in each layer, from the output; those of a layer without parameters have gradients
        of 0.
    threads : int
        The number k of threads.

    Raises
    ------
    ValueError
        Where the two sequences differ in length, or `threads` is no integer of at least 1.

    Examples
    --------
    >>> timelines = simulate_leapfrog([1, 1, 1, 1], [2, 2, 2, 2], threads=2)
    >>> [(event.layer, event.equation, event.end) for event in timelines.workers[1]]
    [(0, 5, 1.0), (1, 7, 3.0), (1, 5, 4.0), (2, 5, 5.0), (3, 7, 7.0), (3, 5, 8.0)]
    >>> timelines.seconds
    8.0
    """
    if len(errors) != len(gradients):
        raise ValueError(f"errors has {len(errors)} layers and gradients {len(gradients)}; expected as many of both")
    weighted = [layer for layer, duration in enumerate(gradients) if duration]
    return Timelines(
        [
            _events(errors[:depth], [duration if layer in layers else 0 for layer, duration in enumerate(gradients)])
            for layers, depth in shares(weighted, len(errors), check_threads(threads))
        ]
    )


def _events(errors: Sequence[float], gradients: Sequence[float]) -> list[Event]:
    """The events of a worker that goes back through the layers of `errors`; it waits for no other."""
    events, time = [], 0.0
    for layer, (error, gradient) in enumerate(zip(errors, gradients, strict=False)):
        for equation, duration in ((7, gradient), (5, error)):
            if duration:
                events.append(Event(layer, equation, time, time + duration))
                time += duration
    return events
