"""What is called in drawn cases, and the same in plain PyTorch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import jacsparse

from .programs import ALGEBRA, CORES, RECURRENCES, RECURRENT, Algebra, LinearRecurrence, dense
from .worlds import World


@dataclass(frozen=True)
class Subject:
    """A part of the library.

    Attributes
    ----------
    cores : dict
        The cores of its programs, each from a world.
    prepare : callable
        Of a world and arguments: what is called.
    call : callable
        Of a world, that and arguments: a tensor.
    plain : callable
        Of a world and arguments: the same tensor by plain PyTorch.
    is_matrix : bool
        Whether the tensor is a Jacobian or a Hessian, ``(batch, rows, columns)``.
    """

    cores: Mapping[str, Callable[[bool], nn.Module]]
    prepare: Callable[[World, list[Tensor]], Any]
    call: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    is_matrix: bool = False
    options: tuple[Any, ...] = ()


def function(world: World) -> Callable[..., Any]:
    """The program as a module, or as one of several kinds of functions."""
    kind = 0 if world.as_module else world.seed % 3
    return (world.program, world.program.forward, functools.partial(lambda *args, f: f(*args), f=world.program))[kind]


def joined(y: Tensor | tuple[Tensor, ...], batched: bool) -> Tensor:
    """All outputs as one tensor."""
    if isinstance(y, Tensor):
        return y
    return torch.cat([each.flatten(1) if batched else each.flatten() for each in y], -1)


class Energy(nn.Module):
    """A number for each sample, or of all."""

    def __init__(self, f: Callable[..., Tensor], batched: bool) -> None:
        super().__init__()
        self.f, self.batched = f, batched

    def forward(self, *args: Tensor) -> Tensor:
        terms = (joined(self.f(*args), self.batched) + 0.5).pow(3)
        return terms.flatten(1).sum(1) if self.batched else terms.sum()


def energy(world: World) -> Callable[..., Tensor]:
    module = Energy(function(world), world.batched)
    return module if world.as_module else module.forward


class MixedError(Exception):
    """Samples depend on each other."""


@contextlib.contextmanager
def undone(world: World) -> Iterator[None]:
    """Put back what a run changes in the program, in tensors that graphs do not hold."""
    parts = [(part, dict(part.__dict__), dict(part._buffers)) for part in world.program.modules()]
    for part, _, _ in parts:
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for part, attributes, buffers in parts:
            part.__dict__.update(attributes)
            part._buffers.update(buffers)


def rows_of(f: Callable[..., Any], world: World, args: tuple[Tensor, ...]) -> Tensor:
    """The Jacobian of each sample, by a backward pass for each row."""
    numbers = world.argnums if isinstance(world.argnums, tuple) else (world.argnums,)
    batch = args[numbers[0]].shape[0] if world.batched else 1
    with torch.enable_grad():
        given, entered = list(args), []
        for number in numbers:
            leaf = args[number] if args[number].requires_grad else args[number].detach().clone().requires_grad_()
            entered.append(leaf * 1)
            given[number] = entered[-1].clone()
        y = joined(f(*given), world.batched)
        y = y.reshape(batch, -1) if batch else y.flatten(1)
        rows = []
        for sample, row in [(b, r) for b in range(batch) for r in range(y.shape[1])]:
            if not y.requires_grad:
                rows.append(torch.cat([x.new_zeros(x.numel() // batch) for x in entered]))
                continue
            gradients = torch.autograd.grad(
                y[sample, row], entered, retain_graph=True, create_graph=world.create_graph, materialize_grads=True
            )
            of_samples = [g.reshape(batch, -1) for g in gradients]
            if any(g[other].any() for g in of_samples for other in range(batch) if other != sample):
                raise MixedError
            rows.append(torch.cat([g[sample] for g in of_samples]))
        columns = sum((x.shape[1:] if world.batched else x.shape).numel() for x in entered)
        return torch.stack(rows).reshape(batch, -1, columns) if rows else y.new_zeros(batch, y.shape[1], columns)


def gradient_of(f: Callable[..., Tensor], world: World) -> Callable[..., Tensor]:
    numbers = world.argnums if isinstance(world.argnums, tuple) else (world.argnums,)

    def gradient(*args: Tensor) -> Tensor:
        entered = [args[number] for number in numbers]
        given = list(args)
        for number in numbers:
            given[number] = args[number].clone()
        value = f(*given).sum()
        if not value.requires_grad:
            return torch.cat([x.detach().flatten(int(world.batched)) for x in entered], -1) * 0
        gradients = torch.autograd.grad(value, entered, create_graph=True, materialize_grads=True)
        return torch.cat([g.flatten(1) if world.batched else g.flatten() for g in gradients], -1)

    return gradient


def plain_jacobian(world: World, *args: Tensor) -> Tensor:
    with undone(world):
        return rows_of(world.program, world, args)


def plain_hessian(world: World, *args: Tensor) -> Tensor:
    with undone(world):
        return rows_of(gradient_of(energy(world), world), world, args)


def how(world: World) -> dict[str, Any]:
    return {"argnums": world.argnums, "batched": world.batched}


def samples(world: World, args: tuple[Tensor, ...]) -> int:
    number = world.argnums[0] if isinstance(world.argnums, tuple) else world.argnums
    return len(args[number]) if world.batched else 1


def called_jacobian(world: World, f: Callable[..., Any], *args: Tensor) -> Tensor:
    options = {"create_graph": world.create_graph, "pruned": world.pruned}
    return dense(jacsparse.jacobian(f, *args, **how(world), **options), samples(world, args))


def called_hessian(world: World, f: Callable[..., Any], *args: Tensor) -> Tensor:
    return dense(jacsparse.hessian(f, *args, **how(world), create_graph=world.create_graph), samples(world, args))


def called_prepared(world: World, prepared: jacsparse.PreparedJacobian, *args: Tensor) -> Tensor:
    return dense(prepared(*args), samples(world, args))


def plain_module(world: World, *args: Tensor) -> Tensor:
    return world.program(*args)


def called_module(world: World, called: nn.Module, *args: Tensor) -> Tensor:
    return called(*args)


def of_chain(kind: type[nn.Module], **options: list[Any]) -> Subject:
    """A module around a program; an option of each list is drawn."""

    def prepare(world: World, args: list[Tensor]) -> nn.Module:
        return kind(world.program, **{name: world.choose.choice(values) for name, values in options.items()})

    return Subject(MODULES, prepare, called_module, plain_module)


def converted(world: World, args: list[Tensor]) -> nn.Module:
    schedule = world.choose.choice(["auto", "sequential", "chunked:2", "blelloch", "blelloch:1", "planned", "relaxed"])
    forward = world.choose.choice(["sequential", "sequential", "parallel", "relaxed", "newton"])
    return jacsparse.nn.convert(world.program, schedule=schedule, forward=forward, chunk=2)


def itself(world: World, args: list[Tensor]) -> nn.Module:
    return world.program


def linear_recurrence(kind: str) -> Callable[[bool], nn.Module]:
    def core(ours: bool) -> nn.Module:
        schedules = ["auto", "sequential", "chunked:2", "blelloch", "blelloch:1", "relaxed"]
        # Drawn after the weights' seed, alike on both sides.
        draw = int(torch.randint(1000, ()))
        return LinearRecurrence(kind, schedules[draw % len(schedules)], bool(draw % 2), ours)

    return core


MODULES = {name: lambda ours, core=core: core() for name, core in CORES.items()}

SUBJECTS: dict[str, Subject] = {
    "jacobian": Subject(MODULES, lambda w, args: function(w), called_jacobian, plain_jacobian, True),
    "prepare_jacobian": Subject(
        MODULES,
        lambda w, args: jacsparse.prepare_jacobian(
            function(w), *args, **how(w), **w.options, create_graph=w.create_graph
        ),
        called_prepared,
        plain_jacobian,
        True,
    ),
    "hessian": Subject(MODULES, lambda w, args: energy(w), called_hessian, plain_hessian, True),
    "prepare_hessian": Subject(
        MODULES,
        lambda w, args: jacsparse.prepare_hessian(energy(w), *args, **how(w), **w.options, create_graph=w.create_graph),
        called_prepared,
        plain_hessian,
        True,
    ),
    "Scan": of_chain(jacsparse.nn.Scan, schedule=["linear", "blelloch", "blelloch:1", "chunked:2", "auto"]),
    "Leapfrog": of_chain(jacsparse.nn.Leapfrog, threads=[1, 2, 3, 4]),
    "Solve": of_chain(jacsparse.nn.Solve, method=["substitution", "scan", "cyclic_reduction", "jacobi"]),
    "recurrent layers": Subject(
        {name: lambda ours, core=core: core() for name, core in RECURRENT.items()},
        converted,
        called_module,
        plain_module,
    ),
    "linear_recurrence": Subject(
        {kind: linear_recurrence(kind) for kind in RECURRENCES}, itself, called_module, plain_module
    ),
    "algebra": Subject(
        {name: lambda ours, name=name: Algebra(name, ours) for name in ALGEBRA}, itself, called_module, plain_module
    ),
}
