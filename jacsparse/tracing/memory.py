"""The memory of a run: which values lie where, and the writes that left tensors with other ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .graph import Node
from .overwrite import Extent, Overwrite, extent_of
from .saved_tensors import version_of
from .traces import Trace, memory_of

_LIFTED = torch.ops.aten.lift_fresh.default


class Write(NamedTuple):
    """One write to memory: its place, the value of the tensor after it, that tensor, and whether autograd saw it."""

    place: Extent
    value: int
    tensor: torch.Tensor
    seen: bool


def is_numpys(tensor: torch.Tensor) -> bool:
    """Whether NumPy has had an array of a tensor's memory, to which it may have written with no operator's call."""
    return tensor.layout == torch.strided and not tensor.untyped_storage().resizable()


class Memory:
    """Which values the memory of a run holds; `numbers` has those of tensors by their ids."""

    def __init__(self, trace: Trace, numbers: dict[int, int]) -> None:
        self.trace, self.numbers = trace, numbers
        #: By memory: writes to it, and how many of them a tensor has, by its id.
        self.writes: dict[int, list[Write]] = {}
        self.known: dict[int, int] = {}
        #: By memory, the values in it that nobody has overwritten.
        self.values: dict[int, list[int]] = {memory_of(trace.input): [0]}
        #: The memory of values that are the same in each run, when they were computed.
        self._memories: dict[int, int] = {}
        #: Memory that this run has made, by its first calls, so many.
        self._fresh, self._fresh_calls = {memory_of(trace.input)}, 0

    def hold(self, number: int, tensor: torch.Tensor, *, written: bool, viewed: torch.Tensor | None) -> None:
        """Take a tensor for a value: one that is being written to, or a view of another one."""
        # A tensor gets its next version after the call's dispatch, and a view that of its base.
        self.trace.versions[number] = version_of(tensor if viewed is None else viewed) + written
        memory = memory_of(tensor)
        self.values.setdefault(memory, []).append(number)
        if memory in self.writes:
            self.known[id(tensor)] = len(self.writes[memory])

    def hold_all(self) -> None:
        """Note what is needed of all tensors so far: from now on calls may write."""
        trace = self.trace
        self.values.clear()
        for value, tensor in enumerate(trace.tensors):
            if tensor is not None:
                trace.versions[value] = version_of(tensor)
                self.values.setdefault(memory_of(tensor), []).append(value)
                trace.note_gradient_edge(value)

    def same_elements(self, result: torch.Tensor, tensor: torch.Tensor) -> None:
        """Give a tensor the value of another one."""
        self.numbers[id(result)] = self.numbers[id(tensor)]
        if id(tensor) in self.known:
            self.known[id(result)] = self.known[id(tensor)]

    def note_fixed(self, number: int, tensor: torch.Tensor) -> None:
        """Note the memory of a value that is the same in each run."""
        self._memories[number] = memory_of(tensor)

    def is_changed(self, tensor: torch.Tensor) -> bool:
        """Whether NumPy, or ``.data =``, may have changed a tensor that was the same in each run."""
        memory = self._memories.get(self.numbers.get(id(tensor), -1))
        return memory is not None and (memory_of(tensor) != memory or is_numpys(tensor))

    def preserve(self, tensor: torch.Tensor, node: Node) -> None:
        """Keep what a write to a tensor is about to change, and nobody can compute again."""
        trace, number = self.trace, self.numbers.get(id(tensor))
        for value in self.values.get(memory_of(tensor), ()):
            maker = trace.graph.infos[value].maker
            if value not in trace.copies and (maker is None or maker.draws):
                trace.copies[value] = trace.tensor(value).detach().clone()
        if number is None:
            return
        trace.note_gradient_edge(number)
        if node.facts.reshapes:
            # On the same memory, in the old shape.
            same = tensor.detach()
            trace.tensors = [same if each is tensor else each for each in trace.tensors]

    def note_write(self, tensor: torch.Tensor, seen: bool) -> None:
        """Note a write to a tensor that now has another value."""
        trace, memory, place, number = self.trace, memory_of(tensor), extent_of(tensor), self.numbers[id(tensor)]
        writes = self.writes.setdefault(memory, [])
        writes.append(Write(place, number, tensor, seen))
        self.known[id(tensor)] = len(writes)
        # A write tells its new version to all views but those that ``.data`` and ``unsafe_split`` make.
        others = [value for value in self.values[memory] if value != number and trace.is_intact(value)]
        for value in others:
            if Overwrite(extent_of(trace.tensor(value)), place).meets:
                trace.versions[value] = -1
        self.values[memory] = [number, *(value for value in others if trace.versions[value] >= 0)]

    def take_writes(self, tensor: torch.Tensor) -> Sequence[Write]:
        """The writes to a tensor's memory that its value does not have, once each."""
        writes = self.writes.get(memory_of(tensor), [])
        known = self.known.get(id(tensor), 0)
        # No write changes a leaf that has a gradient.
        if known == len(writes) or (id(tensor) not in self.numbers and tensor.requires_grad and tensor.is_leaf):
            return ()
        self.known[id(tensor)] = len(writes)
        return writes[known:]

    def is_fresh(self, tensor: torch.Tensor) -> bool:
        """Whether this run has made the memory that a tensor lies in."""
        trace = self.trace
        for node in trace.graph.nodes[self._fresh_calls :]:
            results = {memory_of(trace.tensor(number)) for number in node.results}
            if node.overload is not _LIFTED:
                # What torch.tensor makes is lifted.
                results -= {memory_of(trace.tensor(number)) for _, number in node.tensors}
            self._fresh |= results
        self._fresh_calls = len(trace.graph.nodes)
        return memory_of(tensor) in self._fresh
