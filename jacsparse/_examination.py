"""What is found out about a program by running it on random samples.

Each operator is tried on a batch of two samples and on each of them alone, and again on random operands. That shows
where the batch is among a tensor's axes, and that no operator mixes samples. The whole is compared with the module
once: outputs, and the derivatives with respect to input and parameters.
"""

from __future__ import annotations

import contextlib
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ._modules import twin, undrawn
from ._program import OF_SHAPE, PLAIN, Layout, Operation, Program
from ._stages import AT_ONCE, own_parameters
from .patterns import UnsupportedOperatorError

__all__ = ["check_output", "compare", "examine"]

#: What these give is not initialised: nothing can be compared.
_BLANK = {"aten.empty_like", "aten.new_empty"}

#: What these give changes in steps, or is taken for a constant: no derivative passes.
_CONSTANT = {f"aten.{name}" for name in ("ceil", "detach", "floor", "heaviside", "round", "sgn", "sign", "trunc")}


def examine(program: Program, x: torch.Tensor, where: str) -> dict[fx.Node, torch.Tensor]:
    """Fill in layouts, shapes, and which tensors depend on the input, by running each operation on samples.

    Returns all tensors for a batch of one.
    """
    # Copies: some operators update running statistics.
    read = program.read({}, aside=True).items()
    pair, single = ({node: value if value.requires_grad else value.clone() for node, value in read} for _ in range(2))
    pair[program.input], single[program.input] = x, x[:1]
    program.layouts[program.input] = PLAIN
    program.shapes[program.input] = tuple(x[:1].shape)
    program.dtypes[program.input] = x.dtype
    program.dependent.add(program.input)
    program.active.add(program.input)
    for node, operation in program.operations.items():
        operands = set(operation.operands.values())
        tried = _tried(program, operation, pair, single)
        # What is compared draws nothing; what goes on may.
        pair[node] = operation.evaluate(program.resolved(operation, pair, 2)) if operation.random else tried.together
        alone = tried.alone[0]
        if operands & program.dependent and operation.name not in OF_SHAPE:
            program.dependent.add(node)
            if operands & program.active and pair[node].is_complex():
                raise UnsupportedOperatorError(
                    f"{operation.path or where}: {operation.name} gives complex numbers{operation.source}; Jacobians "
                    "are of real ones: work on real and imaginary parts"
                )
            differentiable = pair[node].is_floating_point() and operation.name not in _CONSTANT
            if operands & program.active and differentiable:
                program.active.add(node)
        layout = _layout(program, operation, tried, pair, single)
        mixes = layout is None and (node in program.dependent or pair[node].shape != alone.shape)
        if mixes:
            raise UnsupportedOperatorError(
                f"{operation.path or where}: {operation.name} mixes the samples of a batch{operation.source}; "
                "each sample must be worked on by itself"
            )
        if layout is not None:
            program.layouts[node] = layout
            alone = layout.join(layout.split(pair[node])[:1])
        elif operation.random:
            # Drawn once for all samples.
            alone = pair[node]
        single[node] = alone
        program.shapes[node], program.dtypes[node] = tuple(alone.shape), alone.dtype
    return single


@dataclass(frozen=True)
class _Tried:
    """What an operation makes of two samples together, and of each of them alone."""

    together: torch.Tensor
    alone: tuple[torch.Tensor, torch.Tensor]

    def fits(self, layout: Layout) -> bool:
        """Whether the samples are where a layout says, and none is another with the other beside it."""
        samples = layout.split(self.together)
        return all(_alike(layout.join(samples[number : number + 1]), alone) for number, alone in enumerate(self.alone))


def _tried(program: Program, operation: Operation, pair: dict[fx.Node, Any], single: dict[fx.Node, Any]) -> _Tried:
    """An operation on two samples and on each alone; what has no samples is made for one anew, in `single`."""

    def evaluated(values: Mapping[fx.Node, Any], batch: int) -> torch.Tensor:
        return operation.evaluate({**program.resolved(operation, values, batch), **operation.quiet})

    def sample(number: int) -> Mapping[fx.Node, Any]:
        own = {}
        for node in operation.operands.values():
            if node in program.layouts:
                layout = program.layouts[node]
                own[node] = layout.join(layout.split(pair[node])[number : number + 1])
        return ChainMap(own, single)

    return _Tried(evaluated(pair, 2), (evaluated(sample(0), 1), evaluated(sample(1), 1)))


def _layout(
    program: Program, operation: Operation, tried: _Tried, pair: dict[fx.Node, Any], single: dict[fx.Node, Any]
) -> Layout | None:
    """Where the samples are in an operation's result of two samples; None where it is nowhere.

    It must be there for each of the two, and, lest values that happen to be alike hide anything, for random operands.
    """
    made, alone = tried.together, tried.alone[0]
    grown = [axis for axis in range(made.ndim) if made.ndim == alone.ndim and made.shape[axis] != alone.shape[axis]]
    if len(grown) != 1 or made.shape[grown[0]] != 2 * alone.shape[grown[0]]:
        return None
    (axis,) = grown
    operands = [node for node in operation.operands.values() if node in program.layouts]
    copies = alone.shape[axis]
    minor = next((program.layouts[node].minor for node in operands if program.layouts[node].copies > 1), False)
    fitting = [Layout(axis, copies, first) for first in (minor, not minor)] if copies > 1 else [Layout(axis, copies)]
    if (operation.random and not operation.quiet) or operation.name in _BLANK:
        # Nothing can be compared; what draws works on each element by itself.
        return fitting[0]
    fitting = [layout for layout in fitting if tried.fits(layout)]
    generator = torch.Generator().manual_seed(0)
    drawn = {
        node: torch.randn(pair[node].shape, generator=generator).to(pair[node])
        for node in operands
        if pair[node].is_floating_point()
    }
    # Not every operator takes any numbers.
    with contextlib.suppress(RuntimeError):
        again = _tried(program, operation, {**pair, **drawn}, single)
        fitting = [layout for layout in fitting if again.fits(layout)]
    return fitting[0] if fitting else None


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results are one, but for rounding."""
    if torch.equal(one, other):
        return True
    if one.shape != other.shape or not one.is_floating_point():
        return False
    size = other.nan_to_num(0, 0, 0).abs().max().item()
    share = 1e-9 if one.dtype == torch.float64 else 1e-5
    return torch.allclose(one, other, rtol=share, atol=share * size, equal_nan=True)


def compare(
    program: Program, x: torch.Tensor, copies: Mapping[int, torch.Tensor], expected: torch.Tensor, where: str
) -> None:
    """Raise where the program is not what the module computes, for one sample or two, or has another derivative.

    What is `expected` of two samples was made of `x` and of copies of the parameters, by the parameters' ``id``.
    """
    own = own_parameters(program.module)
    with undrawn(), torch.enable_grad():
        alone = twin(program.module, aside=True)(x[:1].detach() * 1)
        results = {}
        for batch in (1, 2):
            values = {**program.read(own, aside=True), program.input: x[:batch].detach().requires_grad_()}
            for node, operation in program.operations.items():
                values[node] = operation.evaluate(program.resolved(operation, values, batch))
            results[batch] = values[program.input], values[program.output]
    if not (_alike(results[2][1], expected) and _alike(results[1][1], alone)):
        raise UnsupportedOperatorError(
            f"{where}: its output is not that of its operators, for one sample or two; nothing but shapes may depend "
            "on the size of the batch"
        )
    if not expected.is_floating_point():
        return
    given, made = results[2]
    leaves = _leaves(expected)
    parameters = {name: p for name, p in program.module.named_parameters() if p.requires_grad}
    known = {id(tensor) for tensor in (x, *copies.values(), *parameters.values())}
    if leaves.keys() - known:
        shapes = ", ".join(str(tuple(leaf.shape)) for number, leaf in leaves.items() if number not in known)
        raise UnsupportedOperatorError(
            f"{where}: it uses a tensor of shape {shapes} that requires a gradient and is no parameter; make it an "
            "nn.Parameter, or detach it"
        )
    # A parameter that is reached by another way than its module is a leaf itself, beside its copy.
    wanted = {"": ([x], given)}
    for name, p in parameters.items():
        wanted[name] = ([copies[id(p)], *([p] if id(p) in leaves else [])], own[id(p)])
    seed = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(expected)
    try:
        differences = [measured for some in _chunks(wanted) for measured in _differences(expected, made, seed, some)]
    except RuntimeError:
        # It overwrites what its own derivative needs: there is none to compare with.
        return
    # What is zero but for rounding, as the gradient of a bias before a normalisation, is rounded in either's own way.
    rounding = 1e3 * torch.finfo(expected.dtype).eps * max((largest for *_, largest in differences), default=0.0)
    for name, difference, size, count, _ in differences:
        if difference > max(0.01 * size, rounding * count**0.5):
            of = f" with respect to {name}" if name else ""
            raise UnsupportedOperatorError(
                f"{where}: its derivative{of} is not that of its operators; a torch.autograd.Function, a hook on a "
                "tensor, or a tensor made of parameters before the forward pass, is not traced: write it with "
                "operators, as x + (f(x) - x).detach(), or make it a custom operator"
            )


def _leaves(y: torch.Tensor) -> dict[int, torch.Tensor]:
    """What a graph of autograd begins with, by the ``id``."""
    found, seen, waiting = {}, set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            found[id(leaf)] = leaf
        waiting.extend(behind for behind, _ in node.next_functions)
    return found


_Wanted = dict[str, tuple[list[torch.Tensor], torch.Tensor]]


def _chunks(wanted: _Wanted) -> list[_Wanted]:
    """Parts of it, so that few gradients are held at once."""
    parts: list[_Wanted] = []
    room = 0
    for name, (theirs, ours) in wanted.items():
        if ours.nbytes > room:
            parts.append({})
            room = max(AT_ONCE, ours.nbytes)
        parts[-1][name] = theirs, ours
        room -= ours.nbytes
    return parts


def _differences(
    expected: torch.Tensor, made: torch.Tensor, seed: torch.Tensor, wanted: _Wanted
) -> list[tuple[str, float, float, int, float]]:
    """Of derivatives that should be one: name, norm of the difference, norm, elements and largest of what is right."""
    names = [(name, tensor) for name, (theirs, _) in wanted.items() for tensor in theirs]
    found = {name: torch.zeros_like(ours) for name, (_, ours) in wanted.items()}
    for (name, _), gradient in zip(names, _gradients(expected, [tensor for _, tensor in names], seed), strict=True):
        found[name] = found[name] + gradient
    measured = []
    for own, (name, one) in zip(
        _gradients(made, [ours for _, ours in wanted.values()], seed), found.items(), strict=True
    ):
        # Where the derivative does not exist, nothing can be compared.
        if bool(one.isfinite().all()):
            largest = one.abs().max().item() if one.numel() else 0.0
            measured.append((name, (own - one).norm().item(), one.norm().item(), one.numel(), largest))
    return measured


def _gradients(y: torch.Tensor, tensors: Sequence[torch.Tensor], seed: torch.Tensor) -> Sequence[torch.Tensor]:
    """Derivatives of a tensor, zero where it does not depend; the graph is kept, for the user may have begun it."""
    if not y.requires_grad:
        return [torch.zeros_like(tensor) for tensor in tensors]
    return torch.autograd.grad(y, tensors, seed, retain_graph=True, allow_unused=True, materialize_grads=True)


def check_output(program: Program, expected: torch.Tensor, where: str) -> None:
    if program.output not in program.dependent or program.layouts[program.output] != PLAIN:
        raise UnsupportedOperatorError(
            f"{where}: its output of shape {tuple(expected.shape)} for two samples does not have them along its first "
            "axis; permute it, or let it depend on the input"
        )
    if tuple(expected.shape[1:]) != program.shapes[program.output][1:]:
        raise UnsupportedOperatorError(f"{where}: torch.export gives another output than the module")
