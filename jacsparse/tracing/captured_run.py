"""What a captured run did: its calls, and the values of its tensors."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree

from .graph import Form, Value


@dataclass(eq=False, slots=True)
class CapturedCall:
    """A call of a run."""

    #: An OpOverload, a `Gather`, a `Rewrite` or a `FunctionCall`.
    overload: Any
    #: With a `Value` in the place of each tensor, and a `Scalar` in that of each number that is no part of the key.
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: For each tensor among these, the class of autograd's node; that of None for a leaf, None without a gradient.
    kinds: tuple[type | None, ...]
    #: For each, whether a derivative passes through it; empty where none does.
    active: tuple[bool, ...]
    #: Whether autograd recorded the call.
    seen: bool
    #: The values of what it returns, and then of what else it writes to.
    results: range
    #: Whether it writes to its arguments.
    writes: bool = False
    #: The number of the node that autograd made last when it began.
    sequence: int = -1
    #: The path of the module that made it, and the line of the user's code in it, for messages.
    path: str = ""
    source: str = ""

    @property
    def values(self) -> list[int]:
        """The values of its arguments that are tensors."""
        leaves = _pytree.tree_leaves((self.args, self.kwargs))
        return [leaf.number for leaf in leaves if type(leaf) is Value]


@dataclass(eq=False)
class CapturedRun:
    """What a function did at an input."""

    calls: list[CapturedCall] = field(default_factory=list)
    #: By value, as the run left them: some have been overwritten.
    tensors: list[torch.Tensor] = field(default_factory=list)
    overwritten: set[int] = field(default_factory=set)
    #: The elements of values that were overwritten, and that no call computes again.
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    #: The forms of tensors from elsewhere, by value, and whether they need gradients.
    captures: dict[int, tuple[Form, bool]] = field(default_factory=dict)
    #: The numbers of calls that are no part of the key.
    scalars: list[Any] = field(default_factory=list)
    #: Where autograd computes the gradients of values that calls used.
    gradient_edges: dict[int, GradientEdge] = field(default_factory=dict)
    #: Whether what its operators saved passed through hooks, as those of a checkpoint within the function.
    saved_by_hooks: bool = False
    #: If there are backward hooks of modules: the calls within each module that returned, from one to another.
    hooked_spans: list[tuple[int, int]] = field(default_factory=list)
    #: How many hooks had been registered when it began.
    hooks: int = 0
    key: tuple[Hashable, ...] = ()
    output: int = -1
    #: Whether a derivative passes through the output.
    active: bool = False
    #: The values of what the function returned beside it.
    beside: list[int] = field(default_factory=list)

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
                waiting.extend(makers[number].values)
        return False
