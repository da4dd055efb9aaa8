"""Calls of operators on tensors, as one Python function."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False, repr=False, slots=True)
class CallResult:
    """A tensor that calls work on: an input, a constant, or what a call returns; or all that a call returns."""

    #: Its place in the order of the calls.
    number: int
    #: The operator, or ``operator.getitem`` of what another call returns; None of inputs.
    target: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    #: A tensor of its form, without elements.
    form: torch.Tensor | None = None
    #: Its elements, where they are the same in each run.
    constant: torch.Tensor | None = None
    #: Whether it is written to; whether its elements are conjugates or negatives of what is in its memory.
    written: bool = False
    lazy: bool = False
    #: What an input is of, by which calls are compared.
    source: Any = None

    @property
    def operands(self) -> list[CallResult]:
        """The tensors among the arguments."""
        operands: list[CallResult] = []
        waiting: list[Any] = [*reversed(self.kwargs.values()), *reversed(self.args)]
        while waiting:
            value = waiting.pop()
            if type(value) is CallResult:
                operands.append(value)
            elif type(value) in (tuple, list):
                waiting += reversed(value)
        return operands

    @property
    def value(self) -> torch.Tensor:
        """The tensor of its form."""
        assert self.form is not None
        return self.form

    def __repr__(self) -> str:
        return f"%{self.number}" if self.source is None else repr(self.source)


def mapped(value: Any, function: Callable[[CallResult], Any]) -> Any:
    """Arguments, in which a function has replaced the tensors."""
    if isinstance(value, CallResult):
        return function(value)
    if isinstance(value, dict):
        return {name: mapped(part, function) for name, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(mapped(part, function) for part in value)
    return value


@dataclass(frozen=True, eq=False)
class Calls:
    """The calls that compute tensors from others, in their order, as a function of these.

    Attributes
    ----------
    inputs, outputs : sequence of CallResult
        What it takes and what it returns; the calls are those between.
    writes : sequence of CallResult
        The calls that write to tensors, which it makes in any case.
    """

    inputs: Sequence[CallResult]
    outputs: Sequence[CallResult]
    writes: Sequence[CallResult] = ()

    @functools.cached_property
    def steps(self) -> list[CallResult]:
        """The calls, in order."""
        needed, waiting = set(self.inputs), [*self.outputs, *self.writes]
        while waiting:
            each = waiting.pop()
            if each not in needed and each.constant is None:
                needed.add(each)
                waiting += each.operands
        return sorted(needed.difference(self.inputs), key=operator.attrgetter("number"))

    def returning(self, outputs: Sequence[CallResult], *, least: int = 0) -> Calls:
        """The same calls with other results, and with those inputs that are read, but for the first ones."""
        read = Calls(self.inputs, outputs, self.writes).read
        inputs = [each for place, each in enumerate(self.inputs) if place < least or each in read]
        return Calls(inputs, outputs, self.writes)

    @functools.cached_property
    def read(self) -> set[CallResult]:
        """The tensors that calls read, and what it returns."""
        return {*self.outputs, *(operand for step in self.steps for operand in step.operands)}

    def apart(self, inputs: Collection[CallResult]) -> tuple[Calls, Calls]:
        """The calls that depend on none of some inputs; and the others, which take the results of those as inputs too.

        What is written to is made anew by the latter.
        """
        varying = set(inputs)
        for step in self.steps:
            if step.written or not varying.isdisjoint(step.operands):
                varying.add(step)
        read = [each for step in self.steps if step in varying for each in step.operands]
        fixed = set(self.steps) - varying
        alike = [each for each in dict.fromkeys([*read, *self.outputs]) if each in fixed]
        rest = [each for each in self.inputs if each not in inputs]
        return Calls(rest, alike), Calls([*self.inputs, *alike], self.outputs, self.writes)

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """What the calls compute from other inputs of the same forms."""
        return self._function(*inputs)

    @functools.cached_property
    def _function(self) -> Callable[..., list[torch.Tensor]]:
        names, scope = {each: f"x{n}" for n, each in enumerate(self.inputs)}, dict[str, Any]()
        lines = [f"def function({', '.join(names.values())}):"]
        last = {operand: step for step in self.steps for operand in step.operands} | dict.fromkeys(self.outputs)

        def text(value: Any) -> str:
            if isinstance(value, CallResult):
                if value not in names:
                    names[value] = f"c{len(scope)}"
                    scope[names[value]] = value.constant
                return names[value]
            if type(value) in (tuple, list):
                return f"[{', '.join(map(text, value))}]"
            if type(value) in (int, bool, type(None)):
                return repr(value)
            name = f"c{len(scope)}"
            scope[name] = value
            return name

        for place, step in enumerate(self.steps):
            arguments = [*map(text, step.args), *(f"{name}={text(each)}" for name, each in step.kwargs.items())]
            call = "{}[{}]" if step.target is operator.getitem else f"{text(step.target)}({', '.join(arguments)})"
            names[step] = f"v{place}"
            lines.append(f"    v{place} = {call.format(*arguments)}")
            # Their memory is free for what comes next.
            used = [each for each in dict.fromkeys([*step.operands, step]) if last.get(each, step) is step]
            gone = [names[each] for each in used if each.constant is None]
            lines += [f"    del {', '.join(gone)}"] if gone else []
        lines.append(f"    return {text([*self.outputs])}")
        # Under this folder's name, so that messages take its lines for no user's.
        exec(compile("\n".join(lines), f"{__file__}: emitted", "exec"), scope)
        return scope["function"]  # type: ignore[no-any-return]
