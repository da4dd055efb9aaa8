"""What a step must not do where gradients are asked for, found by a call of it before its layer's first pass.

A backward pass calls the step again, on leaves of a graph of its own: what the step draws, overwrites or trains beside
its arguments would give wrong gradients, or an error that does not say whose.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...runtime import DispatchMode, a_type
from .cell import Cell, FrozenCell


def check_cell(cell: object, layer: str) -> None:
    """TypeError where what a layer has as its `cell` is none, or lacks an attribute."""
    if not isinstance(cell, Cell):
        given = f"the class {cell.__name__}, not an instance" if isinstance(cell, type) else a_type(cell)
        raise TypeError(f"the cell of {layer} is {given}; expected a jacsparse.recurrence.Cell, as cell = MyCell()")
    for name, meaning in (("mode", "its name"), ("gates", "how many matrices the hidden weight has")):
        if not hasattr(cell, name):
            raise TypeError(f"the cell {type(cell).__name__} of {layer} has no `{name}`: set it to {meaning}")


def check_step(cell: Cell, size: int, like: torch.Tensor, *, gradients: bool) -> None:
    """TypeError where the step of a cell without kernels breaks its contract, once for a kind of call.

    Parameters
    ----------
    cell : Cell
        The cell.
    size : int
        Elements of a vector of the state.
    like : Tensor
        A tensor of the layer's dtype, on its device.
    gradients : bool
        Whether a backward pass may follow.
    """
    if type(cell).forward is Cell.forward:
        _check(cell.frozen, size, like.dtype, like.device, gradients)


@functools.lru_cache(maxsize=64)
def _check(frozen: FrozenCell, size: int, dtype: torch.dtype, device: torch.device, gradients: bool) -> None:
    # In a thread of its own, where no mode or transform of the caller's is in force.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_look, frozen.cell, size, dtype, device, gradients).result()


def _look(cell: Cell, size: int, dtype: torch.dtype, device: torch.device, gradients: bool) -> None:
    """Call a step of two samples, and see what it does."""
    name = f"the step of the cell {cell.mode}"
    inputs = [
        torch.linspace(0.1, 0.9, 2 * count * size, dtype=dtype, device=device).view(2, count * size)
        for count in (cell.gates, cell.gates, cell.states)
    ]
    draws: list[str] = []
    try:
        with DispatchMode(functools.partial(_without_draws, draws)):
            after: Any = cell.step(*inputs)
    except Exception:
        # Not every step takes these numbers: with a layer's own it fails for itself, or does not.
        if not (draws and gradients):
            return
        raise TypeError(
            f"{name} draws random numbers by {draws[0]}, and a backward pass, which calls it again, would draw "
            "others; draw outside, and pass masks in the input or as a vector of the state (hx)"
        ) from None
    if not isinstance(after, torch.Tensor) or (after.shape, after.dtype) != (inputs[2].shape, dtype):
        given = f"{tuple(after.shape)} of {after.dtype}" if isinstance(after, torch.Tensor) else a_type(after)
        raise TypeError(
            f"{name} returns {given} for states {tuple(inputs[2].shape)} of {dtype}; expected the states after the "
            "step, a tensor like the states before, (rows, states · size)"
        )
    if not gradients:
        return
    # What writes to a tensor, or to a view of it, counts in its version.
    if any(part._version for part in inputs):
        raise TypeError(f"{name} writes to its arguments in place; have it make new tensors")
    if after.requires_grad:
        raise TypeError(
            f"{name} reads {_trained(cell, after)}, which would get no gradient; pass it in the input or as a vector "
            "of the state (hx), or detach it"
        )
    leaves = [part.requires_grad_() for part in inputs]
    try:
        after = cell.step(*leaves)
        torch.autograd.grad(after, leaves, torch.ones_like(after), allow_unused=True)
    except RuntimeError as error:
        raise TypeError(f"{name} cannot be differentiated by autograd, as a backward pass does: {error}") from error


def _trained(cell: Cell, after: torch.Tensor) -> str:
    """The attributes with gradients that a step's result was computed of."""
    read, whole = [], torch.ones_like(after)
    for name, tensor in _tensors(cell):
        (gradient,) = torch.autograd.grad(after, tensor, whole, retain_graph=True, allow_unused=True)
        if gradient is not None:
            read.append(name)
    return f"the attribute {' and '.join(read)}" if read else "a tensor that requires gradients"


def _tensors(cell: Cell) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors with gradients, of a cell's attributes, what they list, and modules, by their names."""
    attributes: dict[str, Any] = {}
    for kind in reversed(type(cell).__mro__):
        attributes |= vars(kind)
    for name, value in (attributes | vars(cell)).items():
        for leaf in tree_leaves(value):
            parts = leaf.named_parameters(name) if isinstance(leaf, nn.Module) else [(name, leaf)]
            yield from ((path, part) for path, part in parts if isinstance(part, torch.Tensor) and part.requires_grad)


def _without_draws(draws: list[str], operator: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operator, unless it draws random numbers: of those that may, one that moves a generator on."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return operator(*args, **kwargs)
    of_call = kwargs.get("generator")
    generators = [torch.default_generator, *torch.cuda.default_generators, *([] if of_call is None else [of_call])]
    before = [generator.get_state() for generator in generators]
    result = operator(*args, **kwargs)
    for generator, state in zip(generators, before, strict=True):
        if not generator.get_state().equal(state):
            generator.set_state(state)
            draws.append(str(operator))
            raise RuntimeError(f"{operator} draws random numbers")
    return result
