"""A model's inference as a list of steps: recorded once, and run again without the model's own Python code.

As with a graph of CUDA's, each step works on the memory that it had when it was recorded, or on another tensor's that
is not needed any more. Steps that no input reaches are constants. Kernels that follow each other are one call, for
which threads are started once.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..runtime import DispatchMode, KernelSequence, thread_count
from ..tracing import facts_of
from .blocks import BlockTensor
from .frozen_outputs import check_frozen, copies_of
from .kernel_runs import BLOCK_DIMENSIONS, TensorKernelRun, recorder
from .outputs import leaves_of, plain

aten = torch.ops.aten
#: Bytes of the largest tensor that kernels leave to each other: a few of them fit the last cache of most processors.
_AT_ONCE = 2**22
#: What gives a tensor's place to another one.
_Move = Callable[[torch.Tensor], torch.Tensor]
#: Operators whose results hold nothing yet.
_EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


class FrozenRun:
    """What a model runs for inputs of one shape, to be run again for others; made by `record_run`."""

    def __init__(self, inputs: Sequence[torch.Tensor], steps: Sequence[_Step], output: Any) -> None:
        self._inputs = tuple(inputs)
        self._leaves = leaves_of(output)
        outside = [*inputs, *_tensors(self._leaves)]
        self._kernel_count = sum(step.run is not None for step in steps)
        steps = _by_blocks(steps, outside)
        move = _placed(steps, outside)
        self._output = output
        calls: list[Any] = [step.again(move) for step in steps if step.again]
        # Held, since arguments of kernels are addresses.
        self._kernels: list[TensorKernelRun] = list(filter(_is_kernel, calls))
        self._operators = len(calls) - len(self._kernels)
        self._calls = [
            call
            for are_kernels, group in groupby(calls, _is_kernel)
            for call in ([KernelSequence([run.prepared() for run in group])] if are_kernels else group)
        ]
        self._lock = threading.Lock()

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """The output, in memory of its own, for inputs of the shapes and dtypes of those that were recorded."""
        with self._lock, torch.no_grad():
            for x, place in zip(inputs, self._inputs, strict=True):
                place.copy_(x)
            for call in self._calls:
                call()
            copies = {id(each): each.clone() if isinstance(each, torch.Tensor) else each for each in self._leaves}
            return copy.deepcopy(self._output, copies)

    def __str__(self) -> str:
        return f"{_counted(self._kernel_count, 'sparse kernel')}, {_counted(self._operators, 'operator')} of PyTorch"


def _is_kernel(call: object) -> bool:
    return isinstance(call, TensorKernelRun)


def _counted(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def record_run(name: str, model: nn.Module, inputs: Sequence[torch.Tensor], *, is_compared: bool = True) -> FrozenRun:
    """Record what a model runs for some inputs, and compare it with the model for others.

    The model runs once, and what it runs is recorded: sparse layers' kernels, and PyTorch's operators. Weights,
    running statistics and all else that no input reaches are constants from then on. What is timed, and not given
    away, need not be compared.

    Raises
    ------
    ValueError
        Where what the model computes depends on the values of an input in Python, as in ``if x.sum() > 0``; or where it
        gives something else for other values of the inputs than its recorded steps.
    """
    with torch.inference_mode(False), torch.no_grad():
        original, model = model, _twin(model)
        places, steps = copies_of(inputs), list[_Step]()
        # What a model makes when it first runs is no part of later runs.
        model(*copies_of(inputs))
        token = recorder.set(lambda run: steps.append(_Step.of_kernel(run)))
        try:
            # All tensors of the steps live as long as these, so that no two have the same memory.
            with DispatchMode(functools.partial(_recorded, steps)):
                output = plain(model(*places))
        finally:
            recorder.reset(token)
        steps = _needed(name, steps, places)
        frozen = FrozenRun(places, steps, output)
        if is_compared:
            check_frozen(frozen, name, _twin_that_ran(model, original, inputs), inputs)
    return frozen


def _twin_that_ran(model: nn.Module, original: nn.Module, inputs: Sequence[torch.Tensor]) -> nn.Module:
    """A copy of a model as it is after two runs, from which its recorded steps go on."""
    try:
        return _twin(model)
    except Exception:
        # What it made in them may have no copies, as a lock.
        twin = _twin(original)
        for _ in range(2):
            twin(*copies_of(inputs))
        return twin


def _twin(model: nn.Module) -> nn.Module:
    """A copy with the same parameters, so that recordings for several shapes have one memory for them."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


@dataclass(eq=False)
class _Step:
    """An operator of PyTorch, or a kernel, with the tensors that it reads and writes."""

    name: str
    reads: list[torch.Tensor]
    writes: list[torch.Tensor]
    #: What runs it again, with other tensors in the places of its own.
    again: Callable[[_Move], Callable[[], object] | TensorKernelRun] | None = None
    #: Whether it overwrites tensors that it is given.
    in_place: bool = False
    #: Whether it draws random numbers.
    draws: bool = False
    #: Whether the model reads its result in Python.
    is_read: bool = False
    #: What it is, if it is a kernel.
    run: TensorKernelRun | None = None

    @classmethod
    def of_kernel(cls, run: TensorKernelRun) -> _Step:
        return cls(run.kernel.__name__, _tensors(run.inputs), _tensors(run.outputs), run.with_tensors, run=run)


def _recorded(steps: list[_Step], function: Any, kinds: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a call of an operator returns, which becomes a step."""
    if BlockTensor in kinds:
        # What it calls comes here too.
        return NotImplemented
    facts = facts_of(function)
    if facts.reshapes:
        # It changes a tensor's shape or strides, which the aliases of other steps keep.
        return function(*args, **kwargs)
    before = _aliases((args, kwargs))
    returned = function(*args, **kwargs)
    (args, kwargs), result = before, _aliases(returned)
    reads, writes = _tensors(before), _tensors(result)
    if any(each._is_zerotensor() for each in (*reads, *writes)):
        raise ValueError(
            "the model differentiates in forward mode, as by torch.func.jvp, whose zeros have no memory that steps "
            "could use again; call the model itself"
        )
    step = _Step(facts.name, reads, writes, in_place=bool(facts.written), draws=facts.random, is_read=facts.reads)
    if step.in_place:
        arguments = dict(zip(facts.names, args, strict=False)) | kwargs
        step.writes = _tensors([arguments.get(name) for name in facts.written])
    is_view = not step.in_place and {_memory(each) for each in writes} <= {_memory(each) for each in reads}
    if not is_view and function.overloadpacket not in _EMPTY:
        step.again = functools.partial(_operator_again, function, args, kwargs, result)
    steps.append(step)
    return returned


def _aliases(values: Any) -> Any:
    """The same values, with tensors of their own shape and strides on the same memory."""
    return tree_map_only(torch.Tensor, aten.alias.default, values)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    """What tensors share that are views of each other."""
    return tensor.untyped_storage().data_ptr()


def _operator_again(function: Any, args: Any, kwargs: Any, result: Any, move: _Move) -> Callable[[], object]:
    """What runs an operator of PyTorch and puts its results where they were."""
    args, kwargs, result = tree_map_only(torch.Tensor, move, (args, kwargs, result))
    if function._schema.is_mutable:
        return functools.partial(function, *args, **kwargs)
    if function in (aten.clone.default, aten._to_copy.default):
        return functools.partial(result.copy_, args[0])
    outputs = _tensors(result)
    variant, names = _out_variant(function)
    if variant is not None and len(outputs) == len(names):
        return functools.partial(variant, *args, **kwargs, **dict(zip(names, outputs, strict=True)))

    def run() -> None:
        for output, new in zip(outputs, _tensors(function(*args, **kwargs)), strict=True):
            output.copy_(new)

    return run


@functools.cache
def _out_variant(function: Any) -> tuple[Any, list[str]]:
    """The variant of an operator that writes to tensors it is given, and their names; None where it has none."""

    def inputs(schema: Any) -> list[tuple[str, str]]:
        return [(argument.name, str(argument.type)) for argument in schema.arguments if not argument.is_out]

    for overload in function.overloadpacket.overloads():
        variant = getattr(function.overloadpacket, overload)
        names = [argument.name for argument in variant._schema.arguments if argument.is_out]
        if names and inputs(variant._schema) == inputs(function._schema):
            return variant, names
    return None, []


def _needed(name: str, steps: Sequence[_Step], inputs: Sequence[torch.Tensor]) -> list[_Step]:
    """The steps whose results may differ from call to call, and those that restore what such a step overwrites."""
    # The memory of what steps make, and of all that was met so far.
    results: set[int] = set()
    seen = {_memory(each) for each in inputs}
    # What was there before and is overwritten is a state, that one call leaves to the next.
    varying = set(seen)
    for step in steps:
        seen |= {_memory(each) for each in step.reads}
        new = {_memory(each) for each in step.writes}
        if step.in_place:
            varying |= new - results
        results |= new - seen
        seen |= new
    varies = set()
    for step in steps:
        # What is overwritten in place is read too.
        if step.draws or any(_memory(each) in varying for each in step.reads):
            if step.is_read:
                raise ValueError(
                    f"{name} reads values in Python that depend on its inputs, by {step.name}, and may compute "
                    "something else for others; call the model itself"
                )
            varies.add(step)
            varying |= {_memory(each) for each in step.writes}
    overwritten = {_memory(each) for step in varies if step.in_place for each in step.writes}
    return [
        step
        for step in steps
        if step.again and (step in varies or any(_memory(each) in overwritten for each in step.writes))
    ]


def _by_blocks(steps: Sequence[_Step], outside: Sequence[torch.Tensor]) -> list[_Step]:
    """The steps, of which kernels that follow each other all go over some blocks, and then over the next ones.

    So what one leaves to the next is still in a cache where a batch has many samples. Each thread has at least half a
    block to work on, so that it waits little for the others.
    """
    done: list[_Step] = []
    for (_, blocks), group in groupby(steps, lambda step: (step.run is None, step.run.blocks if step.run else 0)):
        runs = [*group]
        largest = max((each.nbytes for step in runs for each in step.writes), default=0)
        at_once = max(1, thread_count() // 2, blocks * _AT_ONCE // max(1, largest))
        if blocks <= at_once or len(runs) == 1:
            done += runs
            continue
        others = [each for step in steps if step not in runs for each in (*step.reads, *step.writes)]
        read_elsewhere = {_memory(each) for each in (*outside, *others)}
        for first in range(0, blocks, at_once):
            done += _of_blocks(runs, slice(first, min(first + at_once, blocks)), read_elsewhere)
    return done


def _of_blocks(steps: Sequence[_Step], part: slice, read_elsewhere: set[int]) -> Iterator[_Step]:
    """Kernels' steps for some of their blocks; what these alone read has memory of as many blocks."""
    count, passed = part.stop - part.start, dict[int, torch.Tensor]()
    written = {_memory(each) for step in steps for each in step.writes} - read_elsewhere

    def of_part(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim != BLOCK_DIMENSIONS:
            return tensor
        blocks = tensor[part]
        if _memory(tensor) not in written:
            return blocks
        place = passed.setdefault(_memory(tensor), torch.empty(blocks.numel(), dtype=tensor.dtype))
        return place.view(blocks.shape)

    for step in steps:
        assert step.run is not None
        yield _Step.of_kernel(step.run.of_blocks(count).with_tensors(of_part))


def _placed(steps: Sequence[_Step], others: Sequence[torch.Tensor]) -> _Move:
    """What gives a tensor a place in memory that others leave free; all but what only these steps write stays."""
    staying = {_memory(each) for each in others}
    written: dict[int, torch.Tensor] = {}
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        for each in step.reads:
            if _memory(each) not in written:
                staying.add(_memory(each))
        for each in step.writes:
            if _memory(each) not in staying:
                written.setdefault(_memory(each), each)
        for each in (*step.reads, *step.writes):
            last[_memory(each)] = number
    places: dict[int, torch.Tensor] = {}
    free: list[torch.Tensor] = []
    for number, step in enumerate(steps):
        for memory in {_memory(each) for each in step.writes} & written.keys() - places.keys():
            size = written[memory].untyped_storage().nbytes()
            fitting = [place for place in free if len(place) >= size]
            places[memory] = min(fitting, key=len) if fitting else torch.empty(size, dtype=torch.uint8)
            free = [place for place in free if place is not places[memory]]
        free += [places[memory] for memory in places if last[memory] == number]

    def move(tensor: torch.Tensor) -> torch.Tensor:
        place = places.get(_memory(tensor))
        if place is None:
            return tensor
        moved = torch.empty(0, dtype=tensor.dtype)
        return moved.set_(place.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    return move
