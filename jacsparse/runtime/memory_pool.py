"""Memory of large results, kept for later ones when the last array or tensor over it is gone.

The operating system clears new memory page by page at its first use. That can take as long as the sparse product whose
values it holds.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

#: Bytes of the smallest results whose memory is kept.
SMALLEST = 2**20
#: Results begin at multiples of this, so that no vector register is loaded from two cache lines, which takes twice as
#: long.
ALIGNMENT = 64


class MemoryPool:
    """Memory that no array uses, for any number of threads; `limit` is its most bytes.

    Examples
    --------
    >>> pool = MemoryPool(2**24)
    >>> large = pool.empty((1000, 1000), np.float64)
    >>> address = large.ctypes.data
    >>> del large
    >>> pool.nbytes, pool.empty((500, 2000), np.float64).ctypes.data == address
    (8000000, True)
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        # What was returned last is at the end.
        self._free: list[np.ndarray] = []

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the pool holds."""
        return sum(memory.nbytes for memory in tuple(self._free))

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """An uninitialised array, as of ``np.empty``, in memory of an earlier one of as many bytes if there is any."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if not SMALLEST <= nbytes <= self.limit:
            return np.empty(shape, dtype)
        memory = self._taken(nbytes)
        if memory is None:
            more = np.empty(nbytes + ALIGNMENT, np.uint8)
            # `more.ctypes` imports a module, which fails while the interpreter shuts down.
            begin = -more.__array_interface__["data"][0] % ALIGNMENT
            memory = more[begin : begin + nbytes]
        return np.asarray(_Buffer(memory, self)).view(dtype).reshape(shape)

    def clear(self) -> None:
        """Free all memory that the pool holds."""
        # A new list needs no lock, which in a forked child may never be released.
        self._free = []

    def _taken(self, nbytes: int) -> np.ndarray | None:
        # It does without rather than wait: in a forked child, a lock may never be released.
        if not self._lock.acquire(blocking=False):
            return None
        try:
            free = self._free
            places = [place for place, memory in enumerate(free) if memory.nbytes == nbytes]
            return free.pop(places[-1]) if places else None
        finally:
            self._lock.release()

    def reclaim(self, memory: np.ndarray) -> None:
        """Keep memory, and free what was returned longest ago until all is within the limit."""
        # The collector of garbage may call this at any point, even while this thread holds the lock.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._free.append(memory)
            while self.nbytes > self.limit:
                del self._free[:1]
        finally:
            self._lock.release()


class _Buffer:
    """The memory of an array and of its views, which returns to the pool after the last of them."""

    def __init__(self, memory: np.ndarray, pool: MemoryPool) -> None:
        self._memory, self._pool = memory, pool
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._pool.reclaim(self._memory)


#: The memory of values of products and sums.
MEMORY_POOL = MemoryPool(128 * 2**20)
