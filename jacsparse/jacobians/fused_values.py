"""The values of a Jacobian by one call: of machine code, of a GPU's kernels, or of the kernel that interprets loops."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import flop_registry

from ..codegen import (
    OUT,
    CallResult,
    Calls,
    CallsOfElements,
    DeviceCode,
    ElementGraph,
    Fusion,
    Interpreted,
    MachineCode,
    MixedDtypesError,
    Scratch,
    TooManyElementsError,
    UnreadableWriteError,
    mapped,
)
from ..patterns import Pattern, holds_numbers
from ..runtime import (
    MEMORY_POOL,
    SMALLEST,
    extend_lives,
    frozen,
    host_flag,
    on_device,
    on_this_thread,
    thread_count,
    uploaded,
)
from ..stages import tell_of_infinite_values
from ..tracing import Trace, is_recording, without_autocast
from .traced_function import TracedFunction
from .value_functions import ValueFunction

_LOGGER = logging.getLogger("jacsparse")
#: Work beyond which several threads may pay: some 100 µs of one. Where a core is busy they wait for it, much longer.
SERIAL_WORK = 2_000_000
#: The work of an element that PyTorch computes, as by a tangent.
ELEMENT = 10
#: Bytes at multiples of which memories begin.
ALIGNMENT = 64
#: The most bytes of scratch memory that are kept between calls.
MOST_SCRATCH = 2**20


#: The numbers of the elements that are wanted, ``(nnz, batch)``, from those of the results of a graph's calls.
Entries = Callable[["ElementGraph", list[np.ndarray]], np.ndarray]


class FusedValues:
    """The values of a Jacobian by one call of fused loops, after what PyTorch has to compute.

    Parameters
    ----------
    calls : ValueFunction
        Tensors of which the values are made, in runs or in replays.
    function : TracedFunction
        The function.
    entries : callable
        ``entries(graph, results)``: the numbers of the elements that are the values, which may be new ones.
    pattern : Pattern
        The pattern of the values.
    others : sequence of Tensor
        The other tensors that `calls` takes.
    compile : bool
        Whether machine code is compiled for the function, or on a GPU kernels; else a kernel for all functions
        interprets its loops.

    Attributes
    ----------
    reads : set of int
        The values and numbers of the function that a call takes, as in `ValueFunction.sources`.
    levels : int
        The most loops that wait for each other, one after the other.
    """

    def __init__(
        self,
        calls: ValueFunction,
        function: TracedFunction,
        entries: Entries,
        pattern: Pattern,
        others: Sequence[torch.Tensor] = (),
        *,
        compile: bool = True,
    ) -> None:
        begin = time.perf_counter()
        self._calls, self._dtype, self._device = calls, function.x.dtype, function.x.device
        self._on_device = on_device(function.x)
        self._numpy_dtype = torch.empty(0, dtype=self._dtype, device="cpu").numpy().dtype
        #: What leaves the values that a replay keeps, as what the function returns, in its trace.
        self._keep = ValueFunction(function, lambda values: (), ()) if function.kept else None
        inputs = [*others, *calls.inputs(function.trace)]
        # The others are constants: a replay is refused where elements of indices and masks are others.
        self._begin = {
            place: source
            for place, source in enumerate(calls.sources, len(others))
            if not function.replays or holds_numbers(inputs[place])
        }
        try:
            fusion = self._fused(inputs, entries, pattern, leaves=False, compile=compile)
        except (UnreadableWriteError, MixedDtypesError):
            fusion = self._fused(inputs, entries, pattern, leaves=True, compile=compile)
        self._make_table(fusion, inputs)
        self.levels = len({loop.level for loop in fusion.loops})
        arrays = self._constants if self._on_device else [*(loop.runs for loop in fusion.loops), *self._constants]
        #: Bytes of what it holds for all calls.
        self.nbytes = sum(array.nbytes for array in arrays)
        if compile:
            _LOGGER.info("compiled %d loops in %.2f s", len(fusion.loops), time.perf_counter() - begin)

    def _fused(
        self, inputs: Sequence[torch.Tensor], entries: Entries, pattern: Pattern, *, leaves: bool, compile: bool
    ) -> Fusion:
        """The loops that compute the values, and the code that runs them; `leaves` as in `CallsOfElements`."""

        def numbered(graph: ElementGraph) -> tuple[ElementGraph, np.ndarray]:
            places = {place: place for place in self._begin}
            elements = CallsOfElements(graph, self._calls.calls, inputs, places, leaves=leaves)
            return graph, entries(graph, elements.results[: len(self._calls.outputs)])

        try:
            graph, wanted = numbered(ElementGraph())
        except TooManyElementsError:
            graph, wanted = numbered(ElementGraph(np.int64))
        self._shape = wanted.shape
        self._is_large = not self._on_device and wanted.size * self._dtype.itemsize >= SMALLEST
        fusion = Fusion(graph, wanted, pattern.indptr, self._dtype, on_device=self._on_device)
        self._code: Any
        if self._on_device:
            self._code = DeviceCode(fusion.loops, self._dtype, max(graph.count, wanted.size), self._device)
        else:
            self._code = (MachineCode if compile else Interpreted)(fusion.loops, fusion.scratch, self._dtype)
        return fusion

    def _make_table(self, fusion: Fusion, inputs: Sequence[torch.Tensor]) -> None:
        """Decide where each call finds the memories of the code."""
        begin, graph = self._begin, fusion.graph
        #: By dtypes, how many elements of scratch memory there are, and where these begin among its bytes.
        self._counts = {memory.dtype: count for memory, count in fusion.scratch.items() if not memory.of_tile}
        offsets, self._bytes = _aligned([count * dtype.itemsize for dtype, count in self._counts.items()])
        self._offsets = dict(zip(self._counts, offsets, strict=True))
        left, constants = list[CallResult](), dict[int, np.ndarray]()
        #: Arrays that are the same in each call, beside those of the code.
        self._constants: list[np.ndarray] = []
        #: The places in the table of values, with their strides, of PyTorch's results and of scratch memory.
        self._values: list[tuple[int, int, tuple[int, ...]]] = []
        self._left: list[tuple[int, torch.dtype]] = []
        self._scratch: list[tuple[int, torch.dtype]] = []
        for slot, memory in enumerate(self._code.memories):
            source = graph.tensors[memory] if isinstance(memory, int) else memory
            if source == OUT:
                self._out = slot
            elif isinstance(source, str):
                constants[slot] = self._code.runs[source]
            elif isinstance(source, Scratch):
                self._scratch.append((slot, source.dtype))
            elif isinstance(source, torch.Tensor):
                constants[slot] = source.numpy()
                self._constants.append(constants[slot])
            elif isinstance(source, CallResult):
                left.append(source)
                self._left.append((slot, graph.nodes[memory].dtype))
            else:
                self._values.append((slot, begin[source], inputs[source].stride()))
        #: A table, with what is the same in each call: of addresses, or on a GPU of tensors.
        self._fixed: list[Any] = [0] * (len(self._code.memories) + 1)
        if self._on_device:
            self._upload(constants)
        else:
            for slot, array in constants.items():
                self._fixed[slot] = array.ctypes.data
        #: The tables, with their scratch memory, that no call uses: any number of threads may call at once.
        self._free: list[tuple[Any, torch.Tensor]] = []
        self._by_pytorch: Calls | None = None
        #: How many calls are left to PyTorch, and how much these compute.
        self.calls_of_pytorch = 0
        used, self._work_of_pytorch = list[int](), 0
        if left:
            self._by_pytorch = self._calls.calls.returning(left)
            places = {each: place for place, each in enumerate(self._calls.calls.inputs)}
            used = [places[each] for each in self._by_pytorch.inputs]
            self._work_of_pytorch = flop_of(self._by_pytorch, ELEMENT)
            self.calls_of_pytorch = len(self._by_pytorch.steps)
        #: What PyTorch's calls begin with: values of the function in their shapes, or tensors.
        self._taken = [(begin[n], inputs[n].shape) if n in begin else inputs[n] for n in used]
        self.reads = {value for _, value, _ in self._values} | {begin[n] for n in used if n in begin}

    def _upload(self, constants: Mapping[int, np.ndarray]) -> None:
        """Copy arrays to the GPU, by their places in the table, as parts of one."""
        begins, nbytes = _aligned([array.nbytes for array in constants.values()])
        packed = np.zeros(nbytes, np.uint8)
        for array, begin in zip(constants.values(), begins, strict=True):
            packed[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        self._constants = [frozen(packed)]
        self._uploaded = uploaded(packed, self._device, None)
        for (slot, array), begin in zip(constants.items(), begins, strict=True):
            part = self._uploaded[begin : begin + array.nbytes]
            self._fixed[slot] = part.view(torch.from_numpy(array).dtype)
        self._fixed[-1] = host_flag(self._device)
        self._infinite = self._fixed[-1].numpy()

    def __call__(self, known: Mapping[int, torch.Tensor]) -> tuple[torch.Tensor, bool]:
        """The values, ``(nnz, batch)``, and whether all are finite.

        Parameters
        ----------
        known : mapping of int to Tensor
            Values of the function, those in `reads` among them; the input is contiguous, in any shape.

        On a GPU, which is not waited for, a later call logs a warning where some are not, and True is returned.
        """
        if is_recording():
            # A run that may read no elements sees this; what is computed here would be constant to it.
            for value in self.reads:
                if value >= 0:
                    known[value].detach().numpy(force=True)
        try:
            table, scratch = self._free.pop()
        except IndexError:
            table, scratch = self._new_table()
        if self._is_large:
            # The system would clear its pages one by one, which takes longer than to compute the values.
            out = torch.from_numpy(MEMORY_POOL.empty(self._shape, self._numpy_dtype))
        else:
            # A shape in one tuple takes half as long again, and so does ``list[torch.Tensor]()``.
            out = torch.empty(*self._shape, dtype=self._dtype, device=self._device)
        alive: list[torch.Tensor] = []
        of_tensors = self._on_device
        for slot, value, stride in self._values:
            tensor = known[value]
            if tensor.is_neg():
                tensor = tensor.detach().resolve_neg()
                alive.append(tensor)
            if value and tensor.stride() != stride:
                tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=self._device).copy_(
                    tensor.detach()
                )
                alive.append(tensor)
            table[slot] = tensor if of_tensors else tensor.data_ptr()
        if self._by_pytorch is not None:
            alive += self._computed_by_pytorch(known, table)
        if of_tensors:
            table[self._out] = out
            extend_lives([self._uploaded])
            if self._infinite[0]:
                tell_of_infinite_values(self._device)
            self._code.run(table)
            return out, True
        table[self._out], table[-1] = out.data_ptr(), 0
        if self._code.work > SERIAL_WORK and thread_count() > 1:
            self._code.run_on_threads(table)
        else:
            self._code.run(table)
        are_finite = not table[-1]
        if self._bytes <= MOST_SCRATCH:
            self._free.append((table, scratch))
        return out, are_finite

    def _new_table(self) -> tuple[Any, Any]:
        """A table for one call at a time, and its scratch memory."""
        if self._on_device:
            table: Any = [*self._fixed]
            tensors: dict[torch.dtype, torch.Tensor] = {}
            for slot, dtype in self._scratch:
                if dtype not in tensors:
                    tensors[dtype] = torch.empty(self._counts[dtype], dtype=dtype, device=self._device)
                table[slot] = tensors[dtype]
            return table, tensors
        scratch = torch.empty(self._bytes, dtype=torch.uint8, device="cpu")
        table, begin = (ctypes.c_size_t * len(self._fixed))(*self._fixed), scratch.data_ptr()
        for slot, dtype in self._scratch:
            table[slot] = begin + self._offsets[dtype]
        return table, scratch

    def of(self, trace: Trace) -> tuple[torch.Tensor, bool]:
        """The same in a run, or in a replay, in whose trace it leaves the values that are kept."""
        if self._keep is not None:
            self._keep(trace)
        return self(self._calls.known(trace, self.reads))

    def _computed_by_pytorch(self, known: Mapping[int, torch.Tensor], table: Any) -> list[torch.Tensor]:
        """What the loops read of PyTorch's calls, whose addresses it puts into a table."""
        begin = [
            each if isinstance(each, torch.Tensor) else known[each[0]].reshape(each[1]).resolve_neg()
            for each in self._taken
        ]
        threads = contextlib.nullcontext() if self._work_of_pytorch > SERIAL_WORK else on_this_thread()
        with torch.no_grad(), without_autocast(self._device), threads:
            results = self._by_pytorch(*begin)  # type: ignore[misc]
        converted = [
            result.to(dtype).resolve_neg().contiguous() for result, (_, dtype) in zip(results, self._left, strict=True)
        ]
        for tensor, (slot, _) in zip(converted, self._left, strict=True):
            table[slot] = tensor if self._on_device else tensor.data_ptr()
        return converted


def _aligned(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where memories of so many bytes begin, one behind the other, and where the last one ends."""
    ends = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
    return ends[:-1], ends[-1]


def flop_of(calls: Calls, element: int = 1) -> int:
    """The work of calls: two for each multiply-add of a matrix product, else so much for each element."""
    total = 0
    for step in calls.steps:
        if step.form is not None:
            count = flop_registry.get(getattr(step.target, "overloadpacket", None))
            if count is None:
                total += element * step.form.numel()
            else:
                args, kwargs = mapped((step.args, step.kwargs), lambda each: each.value)
                total += int(count(*args, **kwargs, out_val=step.form))
    return total
