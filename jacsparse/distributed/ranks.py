"""Messages between the ranks of a process group, whose failures name the rank and what it was doing."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..runtime import a_type

#: Seconds in which a rank that failed can say why.
GRACE = 2.0
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
#: The most tensors of a message, and of axes of each.
_TENSORS, _AXES = 8, 8
#: Numbers in a message's header: iteration, checksum, number of tensors and, for each, dtype, number of axes, lengths.
_HEADER = 3 + _TENSORS * (2 + _AXES)


class RankError(RuntimeError):
    """A rank has failed, does not answer, or differs from the others."""


class Ranks:
    """The ranks of a process group, as one of them sees the others.

    Parameters
    ----------
    group : ProcessGroup
        The group; its timeout is how long a rank waits for another.

    Attributes
    ----------
    rank, size : int
        This rank in the group, and their number.
    sent_messages, sent_bytes : int
        What `send` has sent so far, without headers.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        _check_initialised()
        # A group that is destroyed lets go of its threads and connections where nothing else refers to it.
        self._group = weakref.ref(checked_group(group))
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent_messages = self.sent_bytes = self._calls = 0
        #: Where messages are: what the back end takes.
        self._device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        #: Messages that may not have arrived: their ranks, what they are of, and the tensors, which have to stay.
        self._sent: list[tuple[int, str, dist.Work, torch.Tensor]] = []
        # Making the store takes messages, which ask for it where they fail.
        self._faults: Any = None
        self._faults = self._store()

    @property
    def group(self) -> dist.ProcessGroup:
        """The group; ValueError where it is destroyed."""
        return _registered(self._group())

    def _store(self) -> Any:
        """Where ranks write down why they fail: the launcher's store, which outlives them; None without one."""
        # Not every build of PyTorch has them.
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        # Stores may outlive groups, so that each has its part of one.
        token = self.check("start", {}, secrets.randbits(62))[0][0]
        if "MASTER_PORT" not in os.environ:
            return None
        host, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ["MASTER_PORT"])
        with contextlib.suppress(RuntimeError):
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
            return PrefixStore(f"jacsparse/{token}", store)
        return None

    def broadcast(self, tensors: Iterable[torch.Tensor], source: int) -> None:
        """Overwrite tensors by those of a rank."""
        with self.waiting_for(source, "exchange of weights"), torch.no_grad():
            for tensor in tensors:
                shared = tensor.detach().to(self._device).contiguous()
                dist.broadcast(shared, self._global(source), group=self.group)
                # The source's own tensors stay as they are, as graphs of autograd may hold them.
                if self.rank != source:
                    tensor.copy_(shared)

    def gather(self, value: dict[str, Any], to: int | None = None) -> list[dict[str, Any]]:
        """The dictionaries of all ranks, on all of them or on one; none on the others."""
        everybody: list[dict[str, Any]] = [{} for _ in range(self.size)] if to in (None, self.rank) else []
        with self.waiting_for(to, "exchange of states"):
            if to is None:
                dist.all_gather_object(everybody, value, group=self.group)
            else:
                dist.gather_object(value, everybody or None, self._global(to), group=self.group)
        return everybody

    def _receive(self, buffer: torch.Tensor, source: int) -> dist.Work:
        work = dist.irecv(buffer, self._global(source), group=self.group)
        assert work is not None
        return work

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise RankError on all ranks where one has other facts than the first."""
        everybody = self.gather(dict(facts))
        for rank, others in enumerate(everybody):
            for name in {**everybody[0], **others}:
                here, there = (repr(each[name]) if name in each else "none" for each in (everybody[0], others))
                if here != there:
                    raise RankError(
                        f"rank 0 has {name}: {here}, and rank {rank}: {there}; start all ranks with the same arguments"
                    )

    def next_number(self) -> int:
        """The number of a call that all ranks make, for its messages' `iteration`."""
        self._calls += 1
        return self._calls

    def check(self, phase: str, facts: Mapping[str, Any], *numbers: int) -> list[list[int]]:
        """The numbers of all ranks; RankError, as of `agree`, where ranks have other facts.

        The messages are Bruck's: ⌈log2 p⌉ rounds between pairs, so that one without an answer is from a known rank.
        """
        number = self.next_number()
        rows = torch.tensor([[zlib.crc32(repr(sorted(facts.items())).encode()), *numbers]])
        while (step := len(rows)) < self.size:
            self.send(rows[: self.size - step], (self.rank - step) % self.size, phase, number)
            following = self.expect((self.rank + step) % self.size, phase).wait(number)
            rows = torch.cat([rows, following.cpu()])
        self.flush()
        # Rows are in the order of ranks, beginning with this one.
        digests, *columns = rows.roll(self.rank, 0).T.tolist()
        if len(set(digests)) > 1:
            self.agree(facts)
        return [list(row) for row in zip(*columns, strict=True)] if columns else [[]] * self.size

    def shared(self, tensors: Sequence[torch.Tensor], source: int, phase: str) -> list[torch.Tensor]:
        """A rank's tensors, of any shapes, on all ranks; the others' lend their devices."""
        number = self.next_number()
        if self.rank != source:
            received, _ = self.expect(source, phase).message(number)
            tensors = [other.to(tensor.device) for tensor, other in zip(tensors, received, strict=True)]
        else:
            for other in set(range(self.size)) - {source}:
                self.send(tensors, other, phase, number)
        self.flush()
        return list(tensors)

    def summed(self, tensors: Sequence[torch.Tensor], target: int, phase: str) -> list[torch.Tensor]:
        """The sums of all ranks' tensors, in the order of ranks, on one of them; zeros on the others."""
        number = self.next_number()
        if self.rank != target:
            self.send(tensors, target, phase, number)
            self.flush()
            return [torch.zeros_like(tensor) for tensor in tensors]
        sums = list(tensors)
        for other in sorted(set(range(self.size)) - {target}):
            received, _ = self.expect(other, phase).message(number)
            sums = [tensor + part.to(tensor.device) for tensor, part in zip(sums, received, strict=True)]
        return sums

    def take_over(self, first: torch.Tensor, step: int, phase: str) -> tuple[torch.Tensor, int]:
        """What the rank before this one hands over, or `first` on the first one, and the number of these messages.

        Ranks follow each other by a step of 1, or of -1 from the last one on.
        """
        number, before = self.next_number(), self.rank - step
        if 0 <= before < self.size:
            first = self.expect(before, phase).wait(number).to(first.device)
        return first, number

    def hand_over(self, tensor: torch.Tensor, step: int, phase: str, number: int) -> None:
        """Send what this rank came to, for the next one to take over; the last one sends nothing."""
        after = self.rank + step
        if 0 <= after < self.size:
            self.send(tensor, after, phase, number)
        self.flush()

    def send(
        self, tensors: torch.Tensor | Sequence[torch.Tensor], to: int, phase: str, iteration: int, check: int = 0
    ) -> None:
        """Send a tensor or a few, and go on; `flush` waits for their arrival.

        The receiver compares iteration and checksum with its own.
        """
        several = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        with self.during(phase):
            numbers = [iteration, check, len(several), *described(several)]
        header = torch.tensor([*numbers, *[0] * (_HEADER - len(numbers))], device=self._device)
        with self.waiting_for(to, phase):
            for part in (header, *(tensor.detach().contiguous().to(self._device) for tensor in several)):
                work = dist.isend(part, self._global(to), group=self.group)
                assert work is not None
                # The tensors stay until they have arrived.
                self._sent.append((to, phase, work, part))
        self.sent_messages += 1
        self.sent_bytes += sum(tensor.nbytes for tensor in several)

    def flush(self) -> None:
        """Wait until all messages have arrived."""
        for to, phase, work, _ in self._sent:
            with self.waiting_for(to, phase):
                work.wait()
        self._sent = []

    def expect(self, source: int, phase: str) -> Incoming:
        """A message to come, which may arrive while this rank works."""
        return Incoming(self, source, phase)

    @contextlib.contextmanager
    def waiting_for(self, peer: int | None, phase: str) -> Iterator[None]:
        """A context in which a failure is that of another rank; of any where it is None, or this one."""
        try:
            yield
        except RuntimeError as error:
            words = f"it did not answer rank {self.rank} in the {phase}"
            peer = None if peer == self.rank else peer
            self._write(peer, words)
            root, words = self._root(peer, words)
            who = "another rank" if root is None else f"rank {root}"
            raise RankError(
                f"{who} has failed: {words.rstrip('.')}. Its own messages say why, where it could still write them; "
                "start again from the last checkpoint"
            ) from error

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A context whose exceptions are told to the other ranks."""
        try:
            yield
        except Exception as error:
            self._write(self.rank, f"{type(error).__name__} in the {phase}: {error}")
            raise

    def _write(self, suspect: int | None, words: str) -> None:
        """Write down why this rank fails; what comes after its first failure is a consequence."""
        if self._faults is not None:
            with self._asking():
                self._faults.compare_set(str(self.rank), "", json.dumps([suspect, words]))

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """A context that forgets the store where its process has ended: each question would print a stack."""
        try:
            yield
        except RuntimeError:
            self._faults = None

    def _root(self, suspect: int | None, words: str) -> tuple[int | None, str]:
        """The rank that failed first, as far as ranks have written down whom they wait for, and what it did."""
        entries = self._written()
        for rank, (blamed, confession) in entries.items():
            if blamed == rank:
                return rank, confession
        if suspect is None and (entries or self.size == 2):
            # Whoever fails without a word is waited for by all who wrote something; else one waits for this rank.
            silent = [rank for rank in range(self.size) if rank != self.rank and rank not in entries]
            waiting = [rank for rank, (blamed, _) in entries.items() if blamed == self.rank]
            suspect = next(iter(silent + waiting), None)
        while suspect in entries and entries[suspect][0] not in (None, self.rank):
            suspect, words = entries.pop(suspect)
        return suspect, words

    def _written(self) -> dict[int, tuple[int | None, str]]:
        """What the other ranks have written, after some time for those that are about to."""
        entries: dict[int, tuple[int | None, str]] = {}
        until = time.monotonic() + GRACE
        while self._faults is not None and len(entries) < self.size - 1 and time.monotonic() < until:
            with self._asking():
                for rank in set(range(self.size)) - {self.rank, *entries}:
                    if self._faults.check([str(rank)]):
                        entries[rank] = json.loads(self._faults.get(str(rank)))
            time.sleep(0.02)
        return entries


def described(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The dtype, the number of axes and the lengths of each tensor, as a message's header has them.

    Raises
    ------
    TypeError, ValueError
        Where they cannot be sent.
    """
    if len(tensors) > _TENSORS:
        raise ValueError(f"{len(tensors)} tensors cannot be sent as one message; stack some to {_TENSORS} at most")
    numbers = []
    for tensor in tensors:
        if tensor.dtype not in _DTYPES or tensor.ndim > _AXES:
            raise TypeError(
                f"a tensor of {tensor.dtype} with {tensor.ndim} axes cannot be sent; expected real numbers, "
                f"and {_AXES} axes at most"
            )
        numbers += [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape, *[0] * (_AXES - tensor.ndim)]
    return numbers


_ranks: weakref.WeakKeyDictionary[dist.ProcessGroup, Ranks] = weakref.WeakKeyDictionary()


def ranks_of(group: dist.ProcessGroup | None) -> Ranks:
    """The ranks of a group, of all processes where it is None; all of them take part in the first call for a group."""
    _check_initialised()
    group = checked_group(dist.group.WORLD if group is None else group)
    if group not in _ranks:
        _ranks[group] = Ranks(group)
    return _ranks[group]


def checked_group(group: Any) -> dist.ProcessGroup:
    """The group, where it is one that this process is in.

    Raises
    ------
    TypeError, ValueError
        Where it is not.
    """
    if dist.is_available():
        if isinstance(group, dist.ProcessGroup):
            return _registered(group)
        # What new_group returns to all other processes.
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("this process is not part of process_group; pass the group on its own processes alone")
    raise TypeError(f"process_group is {a_type(group)}; expected a torch.distributed.ProcessGroup")


def _registered(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group; ValueError where it is destroyed."""
    if group is not None:
        with contextlib.suppress(ValueError):
            dist.get_global_rank(group, 0)
            return group
    raise ValueError("the process group is destroyed; make another one, and run forward again")


def _check_initialised() -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("there is no process group; call torch.distributed.init_process_group, and run by torchrun")


class Incoming:
    """A message that may be on its way."""

    def __init__(self, ranks: Ranks, source: int, phase: str) -> None:
        self._ranks, self._source, self._phase = ranks, source, phase
        self._header = torch.empty(_HEADER, dtype=torch.int64, device=ranks._device)
        with ranks.waiting_for(source, phase):
            self._arrival = ranks._receive(self._header, source)

    def wait(self, iteration: int, check: int = 0) -> torch.Tensor:
        """The tensor; RankError where it is of another iteration or batch."""
        (tensor,), sent_check = self.message(iteration)
        with self._ranks.during(self._phase):
            if sent_check != check:
                raise RankError(
                    f"rank {self._source} and rank {self._ranks.rank} have different batches at iteration {iteration}; "
                    "pass the same ones to all ranks, in the same order"
                )
        return tensor

    def message(self, iteration: int) -> tuple[list[torch.Tensor], int]:
        """The tensors of a message, and its checksum; RankError where it is of another iteration."""
        ranks = self._ranks
        with ranks.waiting_for(self._source, self._phase):
            self._arrival.wait()
        sent, check, count, *numbers = self._header.tolist()
        with ranks.during(self._phase):
            if sent != iteration:
                raise RankError(
                    f"rank {self._source} is at iteration {sent} and rank {ranks.rank} at {iteration}; each rank has "
                    "to make the same steps"
                )
        tensors = []
        for begin in range(0, count * (2 + _AXES), 2 + _AXES):
            dtype, axes, *lengths = numbers[begin : begin + 2 + _AXES]
            tensors.append(torch.empty(lengths[:axes], dtype=_DTYPES[dtype], device=ranks._device))
        with ranks.waiting_for(self._source, self._phase):
            for work in [ranks._receive(tensor, self._source) for tensor in tensors]:
                work.wait()
        return tensors, check
