"""The `process_group` and `exchange` arguments of modules and functions that go across ranks."""

from __future__ import annotations

from typing import Any, Self

import torch.distributed as dist

from ..schedule import check_exchange
from .ranks import Ranks, checked_group, ranks_of


class RankGroup:
    """The ranks of a process group that have consecutive parts of something, and how gradients get across them.

    Parameters
    ----------
    group : ProcessGroup
        The ranks, in the order of their parts.
    exchange : {"auto", "linear", "gather", "scan"}
        ``linear``: each rank waits for what comes from the one before it. ``gather``, ``scan``: ranks first reduce
        their parts to one affine map; the maps are combined as `jacsparse.schedule.exchanges` has it. ``auto`` is the
        one that is predicted to take the least time.

    Raises
    ------
    TypeError, ValueError
        Where an argument is none of these.
    """

    def __init__(self, group: dist.ProcessGroup, exchange: str = "auto") -> None:
        self.group = checked_group(group)
        self.exchange = check_exchange(exchange)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, exchange: str) -> Self | None:
        """The ranks of a group; None without one, where the exchange has to be one all the same."""
        check_exchange(exchange)
        return None if group is None else cls(group, exchange)

    @property
    def ranks(self) -> Ranks:
        """The ranks; all of them take part in the first call for a group."""
        return ranks_of(self.group)

    def __deepcopy__(self, memo: object) -> Self:
        # A process group cannot be copied, and a copy of a module has the same ranks.
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a process group cannot be written to a file; save the state_dict of the module")
