"""What a captured run did: its calls, and the values of its tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .callers import Place
from .graph import Form, Scalar
from .operators import Facts, number_types

#: A value that depends on the input; one through which its derivative passes; and one through which any passes.
DEPENDENT, ACTIVE, DIFFERENTIABLE = 1, 2, 4


class CapturedCall(NamedTuple):
    """A call of a run."""

    #: An OpOverload, a `Gather`, a `Rewrite` or a `BackwardPass`.
    overload: Any
    #: As they were passed; of a call that the run did not make, any tensors.
    args: Sequence[Any]
    kwargs: dict[str, Any]
    #: The values of the tensors among these, in order.
    operands: Sequence[int]
    #: For each, the class of autograd's node; that of None for a leaf, None without a gradient.
    kinds: tuple[type | None, ...]
    #: The numbers that are no part of the key, by the names of the arguments.
    scalars: tuple[tuple[str, Scalar], ...]
    #: Whether autograd recorded the call.
    seen: bool
    #: The first value of what it returns, and then of what else it writes to; and how many these are.
    first: int
    result_count: int
    #: Whether it writes to its arguments.
    writes: bool
    #: The number of the node that autograd made last when it began; -1 where the run did not make the call.
    sequence: int
    #: The path of the module that made it, and the line of the user's code in it, for messages.
    path: str
    place: Place | None

    @property
    def results(self) -> range:
        """The values of its results."""
        return range(self.first, self.first + self.result_count)


@dataclass(eq=False)
class CapturedRun:
    """What a function did at an input."""

    calls: list[CapturedCall] = field(default_factory=list)
    #: By value, those of `DEPENDENT`, `ACTIVE` and `DIFFERENTIABLE` that it is.
    flags: list[int] = field(default_factory=list)
    #: By value, as the run left them: some have been overwritten.
    tensors: list[torch.Tensor] = field(default_factory=list)
    overwritten: set[int] = field(default_factory=set)
    #: The elements of values that were overwritten, and that no call computes again.
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    #: The forms of tensors from elsewhere, by value, and whether they need gradients.
    captures: dict[int, tuple[Form, bool]] = field(default_factory=dict)
    #: The numbers of calls that are no part of the key.
    scalars: list[Any] = field(default_factory=list)
    #: Where autograd computes the gradients of values that calls used: a node, and the place among its outputs.
    gradient_edges: dict[int, tuple[Any, int]] = field(default_factory=dict)
    #: Whether what its operators saved passed through hooks, as those of a checkpoint within the function.
    saved_by_hooks: bool = False
    #: If there are backward hooks of modules: the calls within each module that returned, from one to another.
    hooked_spans: list[tuple[int, int]] = field(default_factory=list)
    #: How many hooks had been registered when it began.
    hooks: int = 0
    #: The values of elements that masks select which are of the masks' own shapes in a graph.
    spread: set[int] = field(default_factory=set)
    #: What computes the results of some calls from tensors of such shapes, by the first result: see `Masks`.
    by_mask: dict[int, tuple[Callable[..., torch.Tensor] | None, int | None]] = field(default_factory=dict)
    key: tuple[Hashable, ...] = ()
    output: int = -1
    #: Whether a derivative passes through the output.
    active: bool = False
    #: The values of what the function returned beside it.
    beside: list[int] = field(default_factory=list)

    def active_operands(self, call: CapturedCall) -> list[bool]:
        """For each operand of a call, whether a derivative passes through it."""
        pairs = zip(call.operands, call.kinds, strict=True)
        return [kind not in (None, type(None)) and bool(self.flags[value] & ACTIVE) for value, kind in pairs]

    def is_of_captures(self, value: int | None) -> bool:
        """Whether a value was computed from tensors from elsewhere, or is none of the run."""
        makers = {number: call for call in self.calls for number in call.results}
        waiting, seen = [value], set[int]()
        while waiting:
            number = waiting.pop()
            if number is None or number in self.captures:
                return True
            if number not in seen and number in makers:
                seen.add(number)
                waiting.extend(makers[number].operands)
        return False


def free_numbers(
    facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], keys: list[Hashable], numbers: list[Any]
) -> tuple[tuple[str, Scalar], ...]:
    """Take the numbers of a call out of a key that its runs may have others for, and add them to those of the run.

    It returns references to them by their arguments' names.
    """
    scalars: list[tuple[str, Scalar]] = []
    named = [*zip(facts.names, args, strict=False), *kwargs.items()]
    for number, (name, value) in enumerate(named):
        if type(value) in (float, int):
            types = number_types(facts, name, args)
            if type(value) in types:
                scalar = _scalar(len(numbers), types, value if value in (0, 1) else None)
                scalars.append((name, scalar))
                keys[number if number < len(args) else number + len(kwargs)] = types, scalar.special
                numbers.append(value)
    return tuple(scalars)


#: A reference to a number, of which there are few.
_scalar = functools.lru_cache(maxsize=1024)(Scalar)
