"""What messages between workers take."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from .schedule import exchanges


@dataclass(frozen=True)
class Interconnect:
    """What a message between two workers takes. Messages between other workers do not hinder it.

    Attributes
    ----------
    latency : float
        Seconds until a message begins to arrive.
    bandwidth : float
        Bytes per second; infinity for messages whose size is free.
    """

    latency: float = 1e-5
    bandwidth: float = 1e10

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and math.isfinite(self.latency)):
            raise ValueError(f"latency is {self.latency}; expected seconds, at least 0, as in 1e-5")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth is {self.bandwidth}; expected bytes per second above 0, as in 1e10")

    def seconds(self, nbytes: float) -> float:
        """The time from the end of the work that sends a message to its arrival."""
        return self.latency + nbytes / self.bandwidth

    def scan_seconds(self, workers: int, exchange: str, nbytes: int) -> float:
        """The time of an exclusive scan of elements of so many bytes; a worker takes its messages one after another.

        So ``scan`` is never slower than the other exchanges: none has fewer messages on its critical path.

        Examples
        --------
        >>> interconnect = Interconnect(latency=1e-4, bandwidth=1e9)
        >>> [f"{interconnect.scan_seconds(8, way, 100_000) * 1e3:.1f} ms" for way in ("scan", "gather", "linear")]
        ['0.6 ms', '1.4 ms', '1.4 ms']
        """
        rounds = exchanges(workers, exchange)
        longest = sum(max(Counter(message.target for message in messages).values()) for messages in rounds)
        return longest * self.seconds(nbytes)
