"""The elements that graphs of calls compute."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .calls import CallResult, Calls, mapped
from .elements import ElementGraph, sums
from .emitter import FLOATS
from .operations import has_jumps, is_operation, operation_of

#: The most elements that a call may sum up to one: PyTorch computes longer sums as fast.
MOST_SUMMED = 64

aten = torch.ops.aten

#: What only moves elements, and may fill up with zeros.
_MOVES = {
    "alias", "broadcast_to", "cat", "chunk", "clone", "constant_pad_nd", "contiguous", "detach", "diagonal",
    "expand", "flip", "gather", "index", "index_select", "lift_fresh", "lift_fresh_copy", "movedim", "narrow",
    "permute", "repeat", "reshape", "roll", "select", "select_backward", "select_scatter", "slice",
    "slice_backward", "slice_scatter", "split", "split_with_sizes", "squeeze", "stack", "t", "tile",
    "transpose", "tril", "triu", "unbind", "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip
#: Those whose other operands are indices.
_INDEXED = ("gather", "index", "index_select")
#: What depends on the form of its operands alone.
_FILLS = {
    "_new_zeros_with_same_feature_meta", "arange", "full", "full_like", "new_full", "new_ones", "new_zeros",
    "ones", "ones_like", "scalar_tensor", "zeros", "zeros_like",
}  # fmt: skip
_DTYPES = (*FLOATS, torch.bool)


class UnreadableWriteError(Exception):
    """A call writes to a tensor in a way that cannot be followed element by element."""


def _name_of(overload: Any) -> str | None:
    """The name of an operator of ATen; other libraries may have the same ones."""
    name: str = overload.overloadpacket.__name__
    return name if overload.namespace == "aten" else None


def may_be_loops(name: str) -> bool:
    """Whether calls of an operator, as ``aten.add``, are no work of PyTorch's, unless they sum many elements."""
    library, _, name = name.partition(".")
    return library == "aten" and (name in _MOVES or name in _FILLS or name == "sum" or is_operation(name))


class CallsOfElements:
    """The elements that a graph of calls computes.

    Parameters
    ----------
    elements : ElementGraph
        What they are added to.
    calls : Calls
        The calls.
    inputs : sequence of Tensor
        Its inputs in a run.
    sources : mapping of int to object
        By places among the inputs, what finds them in each call; the others are the same in each call.
    leaves : bool
        Whether all calls are left to PyTorch.

    Attributes
    ----------
    results : list of ndarray
        The numbers of the elements of each tensor that the graph returns, in its shape.
    left : list of Node
        The calls that are no operations, and whose results are tensors in memory: PyTorch makes them.

    Raises
    ------
    UnreadableWriteError
        Where calls write to tensors, unless all are left to PyTorch.
    """

    def __init__(
        self,
        elements: ElementGraph,
        calls: Calls,
        inputs: Sequence[torch.Tensor],
        sources: Mapping[int, Any],
        *,
        leaves: bool,
    ) -> None:
        self.elements, self.left, self._leaves = elements, list[CallResult](), leaves
        #: The tensors that are the same in each call, and the numbers of the elements of others, in their shapes.
        self._known: dict[CallResult, Any] = {}
        self._numbers: dict[CallResult, Any] = {}
        #: As sets of bits, the operations that loops compute for a tensor, and those that PyTorch computes for it; they
        #: take memory with the square of the calls, so that calls wait until some are asked for, each with whether it
        #: is left to PyTorch.
        self._waiting = list[tuple[CallResult, bool]]()
        self._in_loops: dict[CallResult, int] = {}
        self._by_pytorch: dict[CallResult, int] = {}
        for place, (node, tensor) in enumerate(zip(calls.inputs, inputs, strict=True)):
            if place not in sources:
                self._known[node] = tensor.cpu()
            elif tensor.dtype in _DTYPES and tensor.layout == torch.strided:
                self._numbers[node] = self._in_memory(tensor, sources[place])
        self._known |= {node: node.constant.cpu() for node in calls.read if node.constant is not None}
        for node in calls.steps:
            self._call(node)
            self._waiting.append((node, bool(self.left) and self.left[-1] is node))
        self.results = [self._result(node).numpy() for node in calls.outputs]

    def _in_memory(self, tensor: torch.Tensor, source: Any) -> torch.Tensor:
        """The numbers of the elements of a tensor, which may lie in memory in any order."""
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0
        numbers = torch.from_numpy(self.elements.tensor(source, extent, tensor.dtype))
        return numbers.as_strided(tensor.shape, tensor.stride())

    def _result(self, node: CallResult) -> torch.Tensor:
        if node not in self._known and node not in self._numbers:
            # It has another dtype, and is converted.
            self._leave(node, torch.float32)
        return self._numbers_of(node, torch.float64)

    def _numbers_of(self, node: CallResult, dtype: torch.dtype) -> torch.Tensor:
        """The numbers of the elements of a tensor; where it is the same in each call, in a dtype."""
        if node in self._numbers:
            return self._numbers[node]  # type: ignore[no-any-return]
        tensor = self._known[node]
        return torch.from_numpy(self.elements.array(tensor.to(dtype))).reshape(tensor.shape)

    def _leave(self, node: CallResult, dtype: torch.dtype | None = None) -> None:
        """Leave a call to PyTorch, whose result may be converted to a dtype that operations read."""
        value = node.form
        if isinstance(value, torch.Tensor) and (dtype or value.dtype) in _DTYPES:
            self.left.append(node)
            numbers = self.elements.tensor(node, value.numel(), dtype or value.dtype)
            self._numbers[node] = torch.from_numpy(numbers).reshape(value.shape)

    def _call(self, node: CallResult) -> None:
        target: Any = node.target
        operands = node.operands
        first = next((each for each in (self._known, self._numbers) if node.args and node.args[0] in each), None)
        if self._leaves or (target is operator.getitem and first is None):
            self._leave(node)
            return
        if target is operator.getitem:
            first[node] = first[node.args[0]][node.args[1]]  # type: ignore[index]
        elif target._schema.is_mutable:
            self._write(node)
        elif _name_of(target) in _FILLS:
            self._known[node] = target(*mapped(node.args, _of_form), **_on_cpu(node.kwargs))
        elif all(each in self._known for each in operands):
            self._known[node] = target(*mapped(node.args, self._known.__getitem__), **_on_cpu(node.kwargs))
        elif not all(each in self._known or each in self._numbers for each in operands):
            self._leave(node)
        elif _name_of(target) in _MOVES and target is not aten.view.dtype:
            self._move(node)
        else:
            numbers = self._summed(node) if _name_of(target) == "sum" else self._computed(node)
            if numbers is None:
                self._leave(node)
            else:
                self._numbers[node] = numbers
        if node.written:
            self._check_written(node)

    def _note_waiting(self) -> None:
        """Note who computes what the calls so far depend on."""
        for node, is_left in self._waiting:
            if node in self._known:
                continue
            in_loops, by_pytorch = self._computed_for(node)
            if is_left:
                in_loops, by_pytorch = 0, in_loops | by_pytorch
            elif node in self._numbers and node.target is not operator.getitem and _name_of(node.target) not in _MOVES:
                in_loops |= 1 << node.number
            self._in_loops[node], self._by_pytorch[node] = in_loops, by_pytorch
        self._waiting.clear()

    def _computed_for(self, node: CallResult) -> tuple[int, int]:
        """The operations that loops compute for a call's operands, and those that PyTorch computes for these."""
        sets = [(self._in_loops.get(each, 0), self._by_pytorch.get(each, 0)) for each in node.operands]
        in_loops, by_pytorch = ([*each] for each in zip((0, 0), *sets, strict=True))
        return functools.reduce(operator.or_, in_loops), functools.reduce(operator.or_, by_pytorch)

    def _may_jump(self, node: CallResult) -> bool:
        """Whether a call compares numbers of a loop with others that PyTorch computes of the same, rounded otherwise.

        An element would not be equal to the maximum that it is.
        """
        if not self.left or not has_jumps(_name_of(node.target)):
            return False
        self._note_waiting()
        in_loops, by_pytorch = self._computed_for(node)
        return bool(in_loops & by_pytorch) or any(each.written for each in node.operands)

    def _move(self, node: CallResult) -> None:
        """Apply a call to the numbers of elements, each one more: at zeros it fills up."""
        target: Any = node.target
        name = target.overloadpacket.__name__
        # Those that are joined may have several dtypes.
        dtypes = [each.value.dtype for each in node.operands if each in self._numbers]
        dtype = functools.reduce(torch.promote_types, dtypes)
        if node.written and any(argument.alias_info for argument in target._schema.arguments):
            # A view, through which the numbers are written to.
            self._numbers[node] = target(*mapped(node.args, self._numbers.__getitem__), **node.kwargs)
            return

        def argument(each: CallResult) -> torch.Tensor:
            if name in _INDEXED and each in self._known:
                return self._known[each]  # type: ignore[no-any-return]
            return self._numbers_of(each, dtype) + 1

        def moved(numbers: torch.Tensor) -> torch.Tensor:
            return torch.where(numbers == 0, filling, numbers - 1)

        if name in ("view", "_unsafe_view"):
            # The numbers may lie in memory otherwise than the elements.
            target = aten.reshape.default
        args: Any = mapped(node.args, argument)
        filling = self.elements.constant(0.0, dtype)
        if target is aten.constant_pad_nd.default and len(args) > 2:
            *args, value = args
            filling = self.elements.constant(float(value), dtype)
        result = target(*args, **node.kwargs)
        self._numbers[node] = moved(result) if isinstance(result, torch.Tensor) else [moved(each) for each in result]

    def _computed(self, node: CallResult) -> torch.Tensor | None:
        """The numbers of what an elementwise call computes; None where PyTorch has to compute it."""
        target: Any = node.target
        value: Any = node.form
        given = (
            dict(zip([argument.name for argument in target._schema.arguments], node.args, strict=False)) | node.kwargs
        )
        forms = {name: each.value if isinstance(each, CallResult) else each for name, each in given.items()}
        found = operation_of(target, forms, value.dtype) if isinstance(value, torch.Tensor) else None
        if found is None or self._may_jump(node):
            return None
        operation, taken = found
        operands = []
        for name, dtype in zip(taken, operation.reads, strict=True):
            operand: Any = given[name]
            numbers = self._numbers_of(operand, dtype).expand(value.shape).reshape(-1)
            # A later write replaces the numbers of what is written to.
            operands.append((numbers.clone() if operand.written else numbers).numpy())
        return torch.from_numpy(self.elements.compute(operation, operands)).reshape(value.shape)

    def _summed(self, node: CallResult) -> torch.Tensor | None:
        """The numbers of sums along some axes; None where they are long, or of another dtype than their elements."""
        operand: Any = node.args[0]
        value, dtype = node.value, operand.value.dtype
        numbers = self._numbers_of(operand, dtype)
        axes: Any = (node.args[1] if len(node.args) > 1 else None) or range(numbers.ndim)
        numbers = numbers.movedim(list(axes), list(range(-len(axes), 0)))
        numbers = numbers.reshape(value.numel(), -1 if value.numel() else 1)
        rows, count = numbers.shape
        if dtype not in FLOATS or value.dtype != dtype or count > MOST_SUMMED:
            return None
        weights = torch.ones(rows * count, dtype=dtype, device="cpu").numpy()
        terms = numbers.reshape(-1, 1).numpy()
        summed = sums(self.elements, np.arange(rows + 1) * count, [terms], weights, None, dtype)
        return torch.from_numpy(summed).reshape(value.shape)

    def _write(self, node: CallResult) -> None:
        """Write the numbers of elements over those of others, in the memory that views of these share."""
        target, written = node.target, self._numbers.get(node.args[0])  # type: ignore[arg-type]
        if not isinstance(written, torch.Tensor):
            raise UnreadableWriteError
        dtype = node.args[0].value.dtype
        numbers: torch.Tensor | None
        if target is aten.copy_.default and node.args[1].value.dtype == dtype:
            numbers = self._numbers_of(node.args[1], dtype)  # type: ignore[arg-type]
        elif target is aten.zero_.default or target is aten.fill_.Scalar:
            value = node.args[1] if len(node.args) > 1 else 0.0
            numbers = torch.tensor(self.elements.constant(float(value), dtype))  # type: ignore[arg-type]
        else:
            numbers = self._computed(node)
        if numbers is None:
            raise UnreadableWriteError
        written.copy_(numbers)
        self._numbers[node] = written

    def _check_written(self, node: CallResult) -> None:
        """See that the numbers of a tensor that is written to lie in memory as it does."""
        if node in self._known:
            if node.value.is_complex():
                raise UnreadableWriteError
            self._numbers[node] = self._numbers_of(node, node.value.dtype).clone()
            del self._known[node]
        numbers, target = self._numbers.get(node), node.target
        if node in self.left or target is operator.getitem or not isinstance(numbers, torch.Tensor):
            raise UnreadableWriteError
        aliases = any(argument.alias_info for argument in target._schema.arguments)
        if not aliases and numbers.stride() != node.value.stride():
            raise UnreadableWriteError


def _on_cpu(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments of a call whose result is on the CPU: what is known when preparing is there."""
    return {name: "cpu" if name == "device" else each for name, each in kwargs.items()}


def _of_form(node: CallResult) -> torch.Tensor:
    """A tensor of the form of a call's result."""
    value: torch.Tensor = node.value
    return torch.zeros(value.shape, dtype=value.dtype, device="cpu")
