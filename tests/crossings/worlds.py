"""Worlds: all that one side of a case consists of. Both sides are built from one seed, so that nothing is shared."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .programs import SIZE, Captured, Program

Change = Callable[["World"], object]
Run = Callable[..., Tensor]


@dataclass
class World:
    """What is called, and how; features change it before the calls, and between them."""

    seed: int
    #: Whether this side runs the library; the other one is plain PyTorch.
    ours: bool
    program: Program
    #: Whether the result is a Jacobian or a Hessian.
    is_matrix: bool
    #: Of all choices that features have.
    choose: random.Random
    batched: bool = True
    samples: int = 3
    dtype: torch.dtype = torch.float64
    count: int = 1
    argnums: int | tuple[int, ...] = 0
    create_graph: bool = False
    #: Arguments of `prepare_jacobian` or `prepare_hessian`.
    options: dict[str, Any] = field(default_factory=dict)
    #: A number among the arguments, of the first call; later ones differ.
    number: float | None = None
    #: How each argument lies in memory.
    layout: Callable[[Tensor], Tensor] = Tensor.clone
    #: Whether both arguments are one tensor.
    same_twice: bool = False
    #: Whether the program writes to its arguments, which are no leaves then.
    writes: bool = False
    #: What happens before each call, and between its forward and its backward pass.
    changes: list[Change | None] = field(default_factory=lambda: [None])
    during: list[Callable[[World, list[Tensor]], object]] = field(default_factory=list)
    contexts: list[Callable[[], AbstractContextManager]] = field(default_factory=list)
    #: What surrounds ours; "plain" is what the reference does in its place.
    around: Callable[[Run], Run] | None = None
    plain_around: Callable[[Run], Run] | None = None
    threads: int = 1
    #: Whether results have no gradients, though the plain ones may have.
    without_gradients: bool = False
    #: Whether the program is called as a module, whose changes to itself are undone.
    as_module: bool = False
    #: Whether inputs of modules have gradients.
    of_input: bool = True
    #: The scalar whose gradients are compared, and how many backward passes there are.
    loss: Callable[[Tensor], Tensor] | None = None
    passes: int = 1
    #: Whether pruned weights are left out of patterns.
    pruned: bool = True
    #: What is called again and again: a function, a module of ours, or a prepared Jacobian.
    called: Any = None

    def arguments(self, number: int) -> list[Tensor]:
        """New arguments of a call; leaves, except where the program writes to them."""
        generator = torch.Generator().manual_seed(self.seed + number)
        shape = (self.samples, SIZE)
        if self.is_matrix and not self.batched and self.seed % 2:
            shape = (SIZE,)
        tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(self.count)]
        leaves = [self.layout(tensor.to(self.dtype)).detach() for tensor in tensors]
        if self.same_twice:
            leaves = leaves[:1] * self.count
        if self.create_graph or (self.of_input and not self.is_matrix):
            leaves = [leaf if leaf.is_inference() else leaf.requires_grad_() for leaf in leaves]
        for layer in self.program.modules():
            if isinstance(layer, Captured):
                layer.tensors = leaves[:1]
        return leaves

    def given(self, leaves: list[Tensor], number: int) -> list[Any]:
        """The arguments as they are passed in a call."""
        copies = leaves if self.is_matrix or not self.writes else [leaf.clone() for leaf in leaves]
        return copies if self.number is None else [*copies, self.number + 0.5 * number]

    def _calls(self) -> list[int]:
        # Modules of ours are among the program's.
        return [part.calls for part in self.program.modules() if hasattr(part, "calls")]

    def state(self) -> dict[str, Any]:
        """What calls may change: buffers, and numbers of modules."""
        return {
            **{f"buffer {n}": buffer.clone() for n, buffer in enumerate(self.program.buffers())},
            **{f"number {n}": calls for n, calls in enumerate(self._calls())},
        }
