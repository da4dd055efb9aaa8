"""Where the steps of a batch of sequences lie in memory, and the runs that kernels take them in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import torch

from ..patterns._cuda import on_device, uploaded
from ..patterns._runtime import threads
from ..patterns._structure import frozen
from ._vector import ROWS

if TYPE_CHECKING:
    from ._chunks import Chunks

__all__ = ["OnDevice", "Runs", "Sequences", "index", "rows_of"]


Method = TypeVar("Method", bound=Callable[..., Any])


def kept(method: Method) -> Method:
    """Decorator: what a method gives for some arguments is made once, and kept as long as the object is."""

    @functools.wraps(method)
    def remembered(self: Any, *arguments: Any, **options: Any) -> Any:
        found, key = self.__dict__.setdefault("_kept", {}), (method.__name__, arguments, *options.items())
        if key not in found:
            found[key] = method(self, *arguments, **options)
        return found[key]

    return cast(Method, remembered)


@dataclass(frozen=True, eq=False)
class Sequences:
    """A batch of sequences, the longest first, as rows of a matrix: all samples' first steps, then all second ones, ...

    That is how a `PackedSequence` lies in memory, and a ``(time, batch, ...)`` tensor where all are equally long.

    Attributes
    ----------
    offset : ndarray of int64, (time + 1,)
        The row in which each time's steps start.
    lengths : ndarray of int64, (batch,)
        Steps of each sample, none shorter than the next one.
    """

    offset: np.ndarray
    lengths: np.ndarray

    @classmethod
    @functools.lru_cache(maxsize=64)
    def equal(cls, time: int, batch: int) -> Sequences:
        """`batch` sequences of `time` steps."""
        return cls(frozen(np.arange(time + 1) * batch), frozen(np.full(batch, time)))

    @classmethod
    def packed(cls, batch_sizes: torch.Tensor) -> Sequences:
        """What a `PackedSequence` of these batch sizes holds."""
        return cls._packed(batch_sizes.numpy().tobytes())

    @classmethod
    @functools.lru_cache(maxsize=16)
    def _packed(cls, batch_sizes: bytes) -> Sequences:
        sizes = np.frombuffer(batch_sizes, dtype=np.int64)
        batch = int(sizes[0])
        offset, lengths = np.append(0, np.cumsum(sizes)), (sizes[:, None] > np.arange(batch)).sum(axis=0)
        return cls(frozen(offset), frozen(lengths))

    @property
    def batch(self) -> int:
        """Samples."""
        return len(self.lengths)

    @property
    def time(self) -> int:
        """Steps of the longest sample."""
        return len(self.offset) - 1

    @property
    def steps(self) -> int:
        """Of all samples together: rows."""
        return int(self.offset[-1])

    @functools.cached_property
    def _times(self) -> np.ndarray:
        return np.repeat(np.arange(self.time), np.diff(self.offset))

    @functools.cached_property
    def sample(self) -> np.ndarray:
        """Whose step each row is."""
        return np.arange(self.steps) - self.offset[self._times]

    @functools.cached_property
    def previous(self) -> np.ndarray:
        """The row of the same sample's step before each row's, -1 for none."""
        return np.where(self._times > 0, self.offset[self._times - 1] + self.sample, -1)

    @functools.cached_property
    def next(self) -> np.ndarray:
        """The row of the same sample's step after each row's, -1 for none."""
        after = np.full(self.steps, -1)
        held = self.previous >= 0
        after[self.previous[held]] = np.flatnonzero(held)
        return after

    def before(self, direction: int) -> np.ndarray:
        """The row of the step that comes before each row's in a direction of time, -1 for none."""
        return self.previous if direction > 0 else self.next

    @kept
    def edges(self, direction: int) -> np.ndarray:
        """The time at which each sample begins, in a direction of time."""
        return frozen(np.zeros_like(self.lengths) if direction > 0 else self.lengths - 1)

    @kept
    def whole(self, direction: int) -> Runs:
        """One run for each sample."""
        sample, first = np.arange(self.batch), np.zeros(self.batch, np.int64)
        return Runs(self, direction, sample, first, self.lengths)

    def chunks(self, direction: int, length: int) -> Runs:
        """Runs of `length` steps and, at each sample's end, of what is left; the longest first."""
        counts = -(-self.lengths // length)
        sample = np.repeat(np.arange(self.batch), counts)
        chunk = np.arange(len(sample)) - np.repeat(np.cumsum(counts) - counts, counts)
        size = np.minimum(length, self.lengths[sample] - chunk * length)
        # Of equally long ones those of the same time side by side, as in memory.
        order = np.lexsort((sample, chunk, -size))
        return Runs(self, direction, sample[order], chunk[order] * length, size[order])

    @kept
    def cut(self, direction: int, length: int, *, backward: bool = False) -> Chunks:
        """The same as `Chunks`, made once."""
        from ._chunks import Chunks

        return Chunks(self, direction, length, backward=backward)


class OnDevice(NamedTuple):
    """Runs as kernels on a device take them; how many steps they have may be known there alone.

    Attributes
    ----------
    sample, begin, steps : Tensor of int64, (runs,)
        Whose steps, the time of the first one, and how many.
    direction : int
        As that of `Runs`.
    offset : Tensor of int64, (time + 1,), or None
        As that of `Sequences`; None where all are equally long.
    batch : int
        Samples.
    sequences : Sequences
        Whose steps they are.
    """

    sample: torch.Tensor
    begin: torch.Tensor
    steps: torch.Tensor
    direction: int
    offset: torch.Tensor | None
    batch: int
    sequences: Sequences

    def on(self, device: torch.device) -> OnDevice:
        """Itself."""
        return self


@dataclass(frozen=True, eq=False)
class Runs:
    """Some consecutive steps of one sample each, the longest first.

    Attributes
    ----------
    sequences : Sequences
        Whose steps they are.
    direction : int
        1 where a step's state comes from the time before it, -1 where it comes from the time after it.
    sample : ndarray of int64, (runs,)
        Whose steps.
    first : ndarray of int64, (runs,)
        How many steps of the sample come before the run, in its direction.
    count : ndarray of int64, (runs,)
        Steps.
    """

    sequences: Sequences
    direction: int
    sample: np.ndarray
    first: np.ndarray
    count: np.ndarray

    def __post_init__(self) -> None:
        for array in (self.sample, self.first, self.count):
            frozen(array)

    def __len__(self) -> int:
        return len(self.sample)

    @functools.cached_property
    def begin(self) -> np.ndarray:
        """The time of each run's first step."""
        if self.direction > 0:
            return self.first
        return frozen(self.sequences.lengths[self.sample] - 1 - self.first)

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether these are all steps of all samples, each of which is one run."""
        return len(self) == self.sequences.batch and int(self.count.sum()) == self.sequences.steps

    def live_rows(self, reach: np.ndarray) -> tuple[slice, np.ndarray]:
        """Of whole runs, a slice of rows that covers each sample's last `reach` steps, and its rows of earlier ones."""
        if (reach == self.count).all():
            return slice(0, self.sequences.steps), np.empty(0, np.int64)
        offset, forward = self.sequences.offset, self.direction > 0
        times = self.begin + (self.count - reach) * self.direction
        edge = times.min() if forward else times.max()
        rows = slice(int(offset[edge]), self.sequences.steps) if forward else slice(0, int(offset[edge + 1]))
        others = [
            offset[np.arange(max(edge, begin) if forward else min(edge, begin), time, self.direction)] + sample
            for sample, begin, time in zip(self.sample, self.begin, times, strict=True)
            if time != edge
        ]
        return rows, np.concatenate([np.empty(0, np.int64), *others])

    @property
    def together(self) -> int:
        """How many runs kernels take at a time: `ROWS`, or half as many where a thread would be left idle."""
        return ROWS if len(self) > ROWS // 2 * threads() else ROWS // 2

    @property
    def blocks(self) -> int:
        """How often they are taken."""
        return -(-len(self) // self.together)

    @property
    def table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, np.ndarray, int]:
        """As kernels take them."""
        return self.sample, self.begin, self.count, self.direction, self.sequences.offset, self.together

    def work(self, step: int) -> np.ndarray:
        """Running total of the blocks' work, for `run_rows`, where each step takes so many elementary operations."""
        return self._work(step, self.together)

    @kept
    def _work(self, step: int, together: int) -> np.ndarray:
        blocks = np.add.reduceat(self.count, np.arange(0, len(self), together)) if len(self) else self.count
        return np.append(0, np.cumsum(blocks * step))

    def take(self, chosen: np.ndarray) -> Runs:
        """Some of the runs, in an order that keeps the longest first."""
        return Runs(self.sequences, self.direction, self.sample[chosen], self.first[chosen], self.count[chosen])

    @kept
    def repeat(self, times: int) -> Runs:
        """Each run so many times."""
        return self.take(np.repeat(np.arange(len(self)), times))

    def on(self, device: torch.device) -> OnDevice:
        """The same on a device."""
        sequences = self.sequences
        if sequences.steps >= 2**31:
            raise ValueError(f"the input has {sequences.steps} steps in all; on CUDA devices fewer than 2^31")
        sample, begin, steps = (uploaded(array, device) for array in (self.sample, self.begin, self.count))
        equal = sequences.steps == sequences.time * sequences.batch
        offset = None if equal else uploaded(sequences.offset, device)
        return OnDevice(sample, begin, steps, self.direction, offset, sequences.batch, sequences)


def index(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """An array that will not change as a tensor where `like` is."""
    if on_device(like):
        return uploaded(frozen(array), like.device, None)
    # PyTorch warns of memory that it may not write.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def rows_of(tensor: Any, like: torch.Tensor) -> Any:
    """A tensor as rows, as kernels take it; without rows where there is none, and what is no tensor as it is."""
    if tensor is None:
        return np.empty((0, 0), dtype=like.numpy().dtype)
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return tensor.numpy().reshape(-1, tensor.shape[-1]) if tensor.ndim > 2 else tensor.numpy()
