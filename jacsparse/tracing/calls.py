"""Functions of tensors as ATen calls, made simple: what repeated calls run, and loops are made of.

What is left out changes no place in memory of what remains: some kernels refuse other operands than contiguous ones,
and some read them as if they were.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..codegen import CallResult, Calls, mapped
from ..runtime import DispatchMode
from .operators import RUNNING, WITHOUT_MEMORY, is_lazily_changed, is_written, tensors_in
from .storages import memory_of

aten = torch.ops.aten


def calls_of(
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    sources: Sequence[Any] = (),
    *,
    identities: Collection[int] = (),
    known: Mapping[str, Sequence[Any]] | None = None,
) -> Calls:
    """The ATen calls that a function of tensors makes, of which only the values count.

    Parameters
    ----------
    function : callable
        The function.
    inputs : sequence of Tensor
        Its arguments.
    sources : sequence, optional
        What each of these is of.
    identities : collection of int
        The places of those that are identity matrices in each call.
    known : mapping of str to sequence, optional
        By `key_of` of some calls, the sources of their results: these become inputs, behind the others.
    """
    inputs = [tensor.detach() for tensor in inputs]
    recording = _Recording(inputs, sources)
    with _FORWARD_MODE, DispatchMode(recording.call):
        outputs = function(*inputs)
    return recording.simplified(outputs, identities, known or {})


def key_of(target: Any, args: Any, kwargs: Mapping[str, Any]) -> str:
    """A text that is equal for equal calls."""
    return repr((target, _in_tuples(args), _in_tuples(sorted(kwargs.items()))))


def _in_tuples(value: Any) -> Any:
    return tuple(map(_in_tuples, value)) if type(value) in (tuple, list) else value


class _Recording:
    """Records calls, and makes them simple."""

    def __init__(self, inputs: Sequence[torch.Tensor], sources: Sequence[Any]) -> None:
        #: By a tensor's id. An operator may return its argument itself, which then is another result.
        self.results: dict[int, CallResult] = {}
        self.alive: list[tuple[torch.Tensor, CallResult]] = []
        self.inputs, self.calls = list[CallResult](), list[CallResult]()
        self.written: set[int] = set()
        for place, tensor in enumerate(inputs):
            source = sources[place] if sources else None
            self.inputs.append(self.note(tensor, CallResult(-1 - place, source=source)))
        self.of_source = {each.source: each for each in self.inputs}
        devices = {tensor.device for tensor in inputs}
        self.device = devices.pop() if len(devices) == 1 else None
        #: By results that depend on no elements, the same as constants; and one element of either.
        self.fills: dict[CallResult, CallResult] = {}
        self.ones: dict[CallResult, torch.Tensor] = {}

    # Recording.

    def call(self, overload: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a call of an operator, and record it."""
        overload = aten.zeros.default if overload is WITHOUT_MEMORY else overload
        call = self.new(overload, *self.arguments((args, kwargs)))
        result = overload(*args, **kwargs)
        if returns_one_tensor(overload):
            self.note(result, call)
        else:
            for place, part in enumerate(result if isinstance(result, (list, tuple)) else ()):
                if isinstance(part, torch.Tensor):
                    self.note(part, self.new(operator.getitem, (call, place), {}))
        for place, parameter in enumerate(overload._schema.arguments):
            if is_written(parameter) or parameter.name in RUNNING:
                value = args[place] if place < len(args) else kwargs.get(parameter.name)
                self.written |= set(map(memory_of, tensors_in(value)))
        return result

    def new(self, target: Any, args: Any, kwargs: dict[str, Any]) -> CallResult:
        """Add a call."""
        self.calls.append(CallResult(len(self.calls), target, tuple(args), kwargs))
        return self.calls[-1]

    def note(self, tensor: torch.Tensor, result: CallResult) -> CallResult:
        """Take a result for a tensor."""
        self.results[id(tensor)] = result
        self.alive.append((tensor, result))
        result.lazy = is_lazily_changed(tensor)
        if tensor.layout == torch.strided:
            form = tensor.shape, tensor.stride()
            result.form = torch.empty_strided(*form, dtype=tensor.dtype, device="meta")
        else:
            result.form = tensor.detach().to("meta")
        return result

    def arguments(self, value: Any) -> Any:
        """Arguments with results for tensors, and tuples for lists; what no call has made is a constant."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self.results:
                self.note(value, CallResult(-1 - len(self.alive), constant=value))
            return self.results[id(value)]
        if isinstance(value, dict):
            return {name: self.arguments(part) for name, part in value.items()}
        return tuple(map(self.arguments, value)) if type(value) in (tuple, list) else value

    # Simplification.

    def simplified(
        self, outputs: Sequence[torch.Tensor], identities: Collection[int], known: Mapping[str, Sequence[Any]]
    ) -> Calls:
        """The calls that the outputs need, each once, without those that return what others hold."""
        returned, tensors = self.arguments(outputs), dict[CallResult, torch.Tensor]()
        for tensor, result in self.alive:
            tensors[result], result.written = tensor, memory_of(tensor) in self.written
        for call in self.calls:
            if call.target is operator.getitem:
                call.args[0].written |= call.written
        matrices = {self.inputs[place] for place in identities}
        # Some calls take places in memory.
        moves = not any(call.target in _OF_PLACES for call in self.calls)
        #: What takes the place of other results; and the calls so far.
        same: dict[CallResult, CallResult] = {}
        so_far: dict[str, CallResult] = {}
        for call in self.calls:
            call.args, call.kwargs = mapped((call.args, call.kwargs), lambda each: same.get(each, each))
            if moves:
                _skip_views(call)
            if call.target is aten._to_copy.default and not call.written:
                copied, constant = tensors[call], call.args[0].constant
                if constant is not None and constant.device != copied.device:
                    # It is there for all calls.
                    same[call] = CallResult(call.number, form=call.form, constant=copied)
                    continue
            other = _equal(call, matrices) if moves else None
            if other is None and not call.written:
                other = self._known(call, known)
            if other is None and not call.written:
                self._take_fills(call)
                other = so_far.setdefault(key_of(call.target, call.args, call.kwargs), call)
            if other is not None and other is not call:
                same[call] = other
        writes = [call for call in self.calls if call.target is not operator.getitem and call.target._schema.is_mutable]
        return Calls(self.inputs, [same.get(each, each) for each in returned], writes)

    def _known(self, call: CallResult, known: Mapping[str, Sequence[Any]]) -> CallResult | None:
        """The input for a result that the caller knows, a new one where there is none yet."""
        whole, place = (call.args[0], call.args[1]) if call.target is operator.getitem else (call, 0)
        sources = known.get(key_of(whole.target, whole.args, whole.kwargs)) if known else None
        if sources is None or call.form is None or len(sources) != len(whole.target._schema.returns):
            return None
        source = sources[place]
        if source not in self.of_source:
            self.inputs.append(CallResult(call.number, form=call.form, lazy=call.lazy, source=source))
            self.of_source[source] = self.inputs[-1]
        return self.of_source[source]

    def _take_fills(self, call: CallResult) -> None:
        """Let an elementwise call read what depends on no elements as constants of one element each."""
        if self.device is None or call.form is None:
            return
        operands = call.operands
        if self.fills and _takes_constants(call, operands):
            call.args, call.kwargs = mapped((call.args, call.kwargs), lambda each: self.fills.get(each, each))
        known = bool(operands) and all(each in self.ones for each in operands)
        if call.target in _FILLS or (known and _is_fresh(call)):
            args, kwargs = mapped((call.args, call.kwargs), self._one)
            one, shape = call.target(*args, **kwargs), call.form.shape
            form = call.form.new_empty((1,) * len(shape)).expand(shape)
            constant = CallResult(call.number, call.target, form=form, constant=one.expand(shape))
            self.fills[call], self.ones[call], self.ones[constant] = constant, one, one

    def _one(self, result: CallResult) -> torch.Tensor:
        """One element of a result, any one where it is no constant, with as many axes."""
        if result in self.ones:
            return self.ones[result]
        return torch.empty((1,) * result.value.ndim, dtype=result.value.dtype, device=self.device)


#: PyTorch's forward mode has one state for all threads, and ends the process where two of them enter it at once.
_FORWARD_MODE = threading.RLock()


def returns_one_tensor(overload: Any) -> bool:
    """Whether an operator returns a tensor, and no list or tuple."""
    returns = overload._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)


#: What takes places in memory.
_OF_PLACES = (aten.as_strided.default, aten.as_strided_scatter.default)
_COPIES = (
    *(aten.alias.default, aten.clone.default, aten.detach.default),
    *(aten.lift_fresh.default, aten.lift_fresh_copy.default),
    aten._to_copy.default,
)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_MOVES = (*_VIEWS, aten.expand.default, aten.permute.default)
#: What holds the elements of its operand in their order.
_ORDERED = (*_VIEWS, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default)
#: What depends on an operand's form alone.
_FILLS = (aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.scalar_tensor.default)
_ONES = (aten.ones_like.default, aten.ones.default, aten.new_ones.default)


def _equal(call: CallResult, identities: Collection[CallResult]) -> CallResult | None:
    """What a call's result equals, in all places; None where there is none."""
    operands: list[Any] = list(call.args[:2])
    if call.target is aten.mul.Tensor:
        # The factors of ones.
        factors = zip(operands, reversed(operands), strict=True)
        operands = [each for each, other in factors if isinstance(other, CallResult) and other.target in _ONES]
    elif call.target is aten.mm.default:
        operands = operands[1:] if operands[0] in identities else []
    elif call.target in (*_COPIES, *_MOVES):
        operands = operands[:1]
    elif call.target is aten.t.default and operands[0].target is aten.t.default:
        return operands[0].args[0]  # type: ignore[no-any-return]
    else:
        return None
    for each in operands:
        if isinstance(each, CallResult) and _form(each) == _form(call):
            return each if call.target in _MOVES or not (call.written or each.written) else None
    return None


def _skip_views(call: CallResult) -> None:
    """Let a view of a tensor that holds the elements of another one in their order take that one."""
    while call.target in _VIEWS and call.args[0].target in _ORDERED:
        first = call.args[0].args[0]
        if call.written or call.args[0].written or first.written:
            return
        call.args = (first, *call.args[1:])


def _is_fresh(call: CallResult) -> bool:
    """Whether a call computes new elements one by one, and writes to no argument."""
    if torch.Tag.pointwise not in getattr(call.target, "tags", ()):
        return False
    return all(argument.alias_info is None for argument in call.target._schema.arguments)


def _takes_constants(call: CallResult, operands: Sequence[CallResult]) -> bool:
    """Whether a call works on elements one by one, and no constant of one element moves its result in memory."""
    if not _is_fresh(call):
        return False
    values = (each.value for each in (call, *operands))
    # Where an operand is expanded, strides of axes of one element decide how the result lies in memory.
    return all(each.stride() in (each.new_empty(each.shape).stride(), (0,) * each.ndim) for each in values)


def _form(result: CallResult) -> tuple[Any, ...] | None:
    value = result.value
    form = value.shape, value.stride(), value.dtype, result.lazy
    return form if value.layout == torch.strided else None
