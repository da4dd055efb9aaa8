"""What messages between ranks cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch.distributed as dist

from ..schedule import exchanges
from .ranks import Ranks


@dataclass(frozen=True)
class Link:
    """A connection between two ranks.

    Attributes
    ----------
    latency : float
        Seconds of an empty message.
    bandwidth : float
        Bytes per second.
    """

    latency: float
    bandwidth: float

    @classmethod
    def of(cls, ranks: Ranks) -> Self:
        """Round numbers for a group's back end: NVLink, or TCP in one machine."""
        return cls(2e-5, 1e11) if dist.get_backend(ranks.group) == "nccl" else cls(1e-4, 1e9)

    def seconds(self, ranks: int, way: str, nbytes: int) -> float:
        """The time of an exclusive scan of elements of so many bytes, where a rank's messages of a round queue up.

        Examples
        --------
        >>> link = Link(latency=1e-4, bandwidth=1e9)
        >>> [f"{link.seconds(8, way, 100_000) * 1e3:.1f} ms" for way in ("scan", "gather", "linear")]
        ['0.6 ms', '0.8 ms', '1.4 ms']
        """
        longest = (
            max(map([message.target for message in round].count, range(ranks))) for round in exchanges(ranks, way)
        )
        return sum(self.latency + count * nbytes / self.bandwidth for count in longest)

    def best_way(self, ranks: int, nbytes: int) -> str:
        """The exchange that takes the least time: ``gather`` for few ranks or small elements, else ``scan``.

        Examples
        --------
        >>> link = Link(latency=1e-4, bandwidth=1e9)
        >>> [link.best_way(8, nbytes) for nbytes in (10_000, 1_000_000)]
        ['gather', 'scan']
        """
        return min(("gather", "scan"), key=lambda way: self.seconds(ranks, way, nbytes))
