"""Where the steps of a batch of sequences lie in memory, and the runs and chunks that kernels take them in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch

from ..runtime import frozen, on_device, thread_count, uploaded, within_rows
from .vector import ROWS

Method = TypeVar("Method", bound=Callable[..., Any])


def memoised(method: Method) -> Method:
    """Decorator: a method computes its result for given arguments once in the life of the object."""

    @functools.wraps(method)
    def memoising(self: Any, *arguments: Any, **options: Any) -> Any:
        results, key = self.__dict__.setdefault("_results", {}), (method.__name__, arguments, *options.items())
        if key not in results:
            results[key] = method(self, *arguments, **options)
        return results[key]

    return cast(Method, memoising)


class StateRows(NamedTuple):
    """Rows of a matrix of all states: of those before the first steps, before each step, and after each step."""

    first: slice
    before: slice
    after: slice


@dataclass(frozen=True, eq=False)
class Sequences:
    """A batch of sequences, the longest first, as rows of a matrix: all samples' first steps, then all second ones, ...

    A `PackedSequence` lies in memory like this, and so does a ``(time, batch, ...)`` tensor of equally long samples.
    """

    #: The row in which each time's steps start, int64, ``(time + 1,)``.
    offset: np.ndarray
    #: Steps of each sample, int64, ``(batch,)``; none is shorter than the next one.
    lengths: np.ndarray

    @classmethod
    @functools.lru_cache(maxsize=64)
    def equal(cls, time: int, batch: int) -> Sequences:
        """`batch` sequences of `time` steps."""
        return cls(frozen(np.arange(time + 1) * batch), frozen(np.full(batch, time)))

    @classmethod
    def packed(cls, batch_sizes: torch.Tensor) -> Sequences:
        """The sequences of a `PackedSequence` with these batch sizes."""
        return cls._packed(batch_sizes.numpy().tobytes())

    @classmethod
    @functools.lru_cache(maxsize=16)
    def _packed(cls, batch_sizes: bytes) -> Sequences:
        sizes = np.frombuffer(batch_sizes, dtype=np.int64)
        batch = int(sizes[0])
        offset, lengths = np.append(0, np.cumsum(sizes)), (sizes[:, None] > np.arange(batch)).sum(axis=0)
        return cls(frozen(offset), frozen(lengths))

    @functools.cached_property
    def batch(self) -> int:
        """Samples."""
        return len(self.lengths)

    @functools.cached_property
    def time(self) -> int:
        """Steps of the longest sample."""
        return len(self.offset) - 1

    @functools.cached_property
    def steps(self) -> int:
        """Steps of all samples together: rows."""
        return int(self.offset[-1])

    @functools.cached_property
    def _times(self) -> np.ndarray:
        return np.repeat(np.arange(self.time), np.diff(self.offset))

    @functools.cached_property
    def sample(self) -> np.ndarray:
        """The sample of each row."""
        return np.arange(self.steps) - self.offset[self._times]

    @functools.cached_property
    def previous(self) -> np.ndarray:
        """The row of the same sample's previous step, -1 where there is none."""
        return np.where(self._times > 0, self.offset[self._times - 1] + self.sample, -1)

    @functools.cached_property
    def next(self) -> np.ndarray:
        """The row of the same sample's next step, -1 where there is none."""
        after = np.full(self.steps, -1)
        inner = self.previous >= 0
        after[self.previous[inner]] = np.flatnonzero(inner)
        return after

    def before(self, direction: int) -> np.ndarray:
        """`previous` in a direction of time."""
        return self.previous if direction > 0 else self.next

    @memoised
    def first_times(self, direction: int) -> np.ndarray:
        """The time of each sample's first step in a direction of time."""
        return frozen(np.zeros_like(self.lengths) if direction > 0 else self.lengths - 1)

    @memoised
    def state_rows(self, direction: int) -> StateRows:
        """Where a matrix of all states has them; without the first ones where samples differ in length."""
        steps, batch = self.steps, self.batch
        if steps != self.time * batch:
            return StateRows(slice(0, 0), slice(0, 0), slice(0, steps))
        early, late = slice(0, steps), slice(batch, steps + batch)
        if direction > 0:
            return StateRows(slice(0, batch), early, late)
        return StateRows(slice(steps, steps + batch), late, early)

    @memoised
    def whole(self, direction: int) -> Runs:
        """One run for each sample."""
        sample, first = np.arange(self.batch), np.zeros(self.batch, np.int64)
        return Runs(self, direction, sample, first, self.lengths)

    def chunks(self, direction: int, length: int) -> Runs:
        """Runs of `length` steps, each sample's last one perhaps shorter; the longest runs first."""
        counts = -(-self.lengths // length)
        sample = np.repeat(np.arange(self.batch), counts)
        chunk = within_rows(counts)
        size = np.minimum(length, self.lengths[sample] - chunk * length)
        # Runs of equal length at the same time are side by side, as they are in memory.
        order = np.lexsort((sample, chunk, -size))
        return Runs(self, direction, sample[order], chunk[order] * length, size[order])

    @memoised
    def cut(self, direction: int, length: int, *, backward: bool = False) -> Chunks:
        """`Chunks` of this length, shared by all who ask."""
        return Chunks(self, direction, length, backward=backward)


class DeviceRuns(NamedTuple):
    """Runs on a device, whose number of steps may be known there alone; int64 tensors ``(runs,)``."""

    sample: torch.Tensor
    #: The time of the first step, and the number of steps.
    begin: torch.Tensor
    steps: torch.Tensor
    direction: int
    #: As of `Sequences`; None where all samples are equally long.
    offset: torch.Tensor | None
    batch: int
    sequences: Sequences

    def on(self, device: torch.device) -> DeviceRuns:
        """The runs themselves."""
        return self

    @property
    def first_times(self) -> torch.Tensor:
        """The time of each sample's first step, as of `Sequences`."""
        return uploaded(self.sequences.first_times(self.direction), self.sample.device)


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of consecutive steps of one sample each, the longest first; int64 arrays ``(runs,)``."""

    sequences: Sequences
    #: 1 where a step's state comes from the time before it, -1 where it comes from the time after it.
    direction: int
    sample: np.ndarray
    #: How many steps of its sample come before the run, in its direction.
    first: np.ndarray
    #: Steps of the run.
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

    def live_rows(self, live_steps: np.ndarray) -> tuple[slice, np.ndarray]:
        """For whole runs: a slice of rows that covers each sample's last `live_steps`, and the earlier rows in it."""
        if (live_steps == self.count).all():
            return slice(0, self.sequences.steps), np.empty(0, np.int64)
        offset, forward = self.sequences.offset, self.direction > 0
        times = self.begin + (self.count - live_steps) * self.direction
        edge = times.min() if forward else times.max()
        rows = slice(int(offset[edge]), self.sequences.steps) if forward else slice(0, int(offset[edge + 1]))
        others = [
            offset[np.arange(max(edge, begin) if forward else min(edge, begin), time, self.direction)] + sample
            for sample, begin, time in zip(self.sample, self.begin, times, strict=True)
            if time != edge
        ]
        return rows, np.concatenate([np.empty(0, np.int64), *others])

    @property
    def block_size(self) -> int:
        """Runs that kernels take at a time: `ROWS`, or half as many where a thread would be left idle."""
        return ROWS if len(self.sample) > ROWS // 2 * thread_count() else ROWS // 2

    @property
    def blocks(self) -> int:
        """Blocks of `block_size` runs."""
        return -(-len(self) // self.block_size)

    @memoised
    def in_blocks(self, block_size: int, step: int) -> tuple[Any, ...]:
        """What `run_rows` takes for blocks of `block_size` runs, with `step` elementary operations in a step.

        The running total of the blocks' work, and the kernel's arguments that describe the runs.
        """
        blocks = np.add.reduceat(self.count, np.arange(0, len(self), block_size)) if len(self) else self.count
        work = np.append(0, np.cumsum(blocks * step))
        return work, self.sample, self.begin, self.count, self.direction, self.sequences.offset, block_size

    def take(self, chosen: np.ndarray) -> Runs:
        """The chosen runs; the order must keep the longest first."""
        return Runs(self.sequences, self.direction, self.sample[chosen], self.first[chosen], self.count[chosen])

    @memoised
    def repeat(self, times: int) -> Runs:
        """Each run `times` times."""
        return self.take(np.repeat(np.arange(len(self)), times))

    def on(self, device: torch.device) -> DeviceRuns:
        """The runs on a device."""
        sequences = self.sequences
        if sequences.steps >= 2**31:
            raise ValueError(f"the input has {sequences.steps} steps in all; on CUDA devices fewer than 2^31")
        sample, begin, steps = (uploaded(array, device) for array in (self.sample, self.begin, self.count))
        equal = sequences.steps == sequences.time * sequences.batch
        offset = None if equal else uploaded(sequences.offset, device)
        return DeviceRuns(sample, begin, steps, self.direction, offset, sequences.batch, sequences)


class Groups(NamedTuple):
    """Groups of consecutive chunks of one sample each, sample by sample; int64 arrays ``(groups,)``."""

    sample: np.ndarray
    #: The place of the first chunk among its sample's, and the number of chunks.
    begin: np.ndarray
    chunks: np.ndarray
    #: Chunks of all groups but a sample's last one.
    length: int


class Chunks:
    """Each sample's steps in runs of `length`, and the order in which a recurrence gets to them.

    A recurrence of gradients is `backward`: it gets to the last steps first.
    """

    def __init__(self, sequences: Sequences, direction: int, length: int, *, backward: bool = False) -> None:
        self.sequences, self.backward = sequences, backward
        self.runs = sequences.chunks(direction, length)
        self.counts = frozen(-(-sequences.lengths // length))
        chunk = self.runs.first // length
        # Chunks of the same sample that come before each.
        self.place = frozen(self.counts[self.runs.sample] - 1 - chunk if backward else chunk)

    def rest(self, late: np.ndarray) -> tuple[Runs, np.ndarray]:
        """For each sample with runs among `late`: its steps from the first of them on, and that run's number."""
        late = late[np.argsort(self.place[late], kind="stable")]
        late = late[np.unique(self.runs.sample[late], return_index=True)[1]]
        first, sample = self.runs.first[late], self.runs.sample[late]
        begin, end = (
            (0 * first, first + self.runs.count[late]) if self.backward else (first, self.sequences.lengths[sample])
        )
        order = np.argsort(begin - end, kind="stable")
        rest = Runs(self.sequences, self.runs.direction, sample[order], begin[order], (end - begin)[order])
        return rest, late[order]

    @functools.cached_property
    def table(self) -> np.ndarray:
        """The run at each place of each sample, ``(places, batch)``; -1 where there is none."""
        table = np.full((int(self.counts.max(initial=0)), self.sequences.batch), -1)
        table[self.place, self.runs.sample] = np.arange(len(self.runs))
        return frozen(table)

    @functools.cached_property
    def before(self) -> np.ndarray:
        """The run whose last state is each run's first one; -1 for the sample's first run."""
        return frozen(np.where(self.place > 0, self.table[self.place - 1, self.runs.sample], -1))

    @functools.cached_property
    def inner(self) -> np.ndarray:
        """The runs that are neither the first nor the last of their sample."""
        return frozen(np.flatnonzero((self.place > 0) & (self.place < self.counts[self.runs.sample] - 1)))

    @functools.cached_property
    def inner_runs(self) -> Runs:
        """`inner` as runs."""
        return self.runs.take(self.inner)

    @functools.cached_property
    def last(self) -> np.ndarray:
        """Each sample's last run."""
        return frozen(self.table[self.counts - 1, np.arange(self.sequences.batch)])

    @memoised
    def groups(self, length: int) -> Groups:
        """Each sample's chunks in groups of `length`, the last one perhaps of fewer, in the order of the recurrence."""
        counts = -(-self.counts // length)
        sample, begin = np.repeat(np.arange(len(counts)), counts), within_rows(counts) * length
        count = np.minimum(length, self.counts[sample] - begin)
        return Groups(frozen(sample), frozen(begin), frozen(count), length)

    def starts(self, ends: torch.Tensor, initial_state: torch.Tensor) -> torch.Tensor:
        """Each run's first state: the last state of the run before it, or the sample's `initial_state`."""
        first = initial_state[index(self.runs.sample, initial_state)]
        before = index(self.before, initial_state)
        return torch.where((before < 0)[:, None], first, ends[before.clamp(min=0)])

    def guess(self, initial_state: torch.Tensor) -> torch.Tensor:
        """First states to begin guessing with: zeros, and the samples' first states for their first runs."""
        return self.starts(initial_state.new_zeros(len(self.runs), initial_state.shape[1]), initial_state)


def index(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """An array, which must not change any more, as a tensor on the device of `like`."""
    if on_device(like):
        return uploaded(frozen(array), like.device, None)
    # PyTorch warns of read-only memory.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """TypeError where a tensor is sparse or nested."""
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested tensor; pad its sequences, or pack them")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}; expected a dense tensor")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels read it: without a graph, in one piece, with the elements' signs in memory."""
    return tensor.detach().resolve_neg().contiguous()


def rows_of(arguments: Iterable[Any], like: torch.Tensor) -> list[Any]:
    """Tensors as arrays of rows, None as an array without any, and other arguments of a kernel as they are."""
    arrays: list[Any] = []
    for argument in arguments:
        if argument is None:
            argument = like.new_empty(0, 0)
        if isinstance(argument, torch.Tensor):
            argument = (argument.flatten(0, -2) if argument.ndim > 2 else argument).numpy()
        arrays.append(argument)
    return arrays
