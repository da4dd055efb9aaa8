"""What messages between ranks cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Self

import torch.distributed as dist

from ..schedule import exchanges
from .ranks import Ranks

#: Multiply-adds per second of one thread: of products with vectors, of dense matrices, and of stages to one Jacobian.
VECTORS, MATRICES, JACOBIANS = 1e9, 4e9, 2e8


@dataclass(frozen=True)
class Link:
    """A connection between two ranks.

    Attributes
    ----------
    latency : float
        Seconds of an empty message, its header included.
    bandwidth : float
        Bytes per second.
    """

    latency: float
    bandwidth: float

    @classmethod
    def of(cls, ranks: Ranks) -> Self:
        """Round numbers for a group's back end: NVLink, or TCP in one machine, of which the latter are measured."""
        return cls(2e-5, 1e11) if dist.get_backend(ranks.group) == "nccl" else cls(2e-4, 1e9)

    def seconds(self, ranks: int, way: str, nbytes: int) -> float:
        """The time of an exclusive scan of elements of so many bytes; a rank takes its messages one after another.

        So ``scan`` is never slower than the other ways: none has fewer messages on its critical path.

        Examples
        --------
        >>> link = Link(latency=1e-4, bandwidth=1e9)
        >>> [f"{link.seconds(8, way, 100_000) * 1e3:.1f} ms" for way in ("scan", "gather", "linear")]
        ['0.6 ms', '1.4 ms', '1.4 ms']
        """
        rounds = exchanges(ranks, way)
        longest = sum(max(Counter(message.target for message in messages).values()) for messages in rounds)
        return longest * (self.latency + nbytes / self.bandwidth)
