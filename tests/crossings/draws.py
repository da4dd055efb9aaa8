"""Draws of cases, and their judgement: right, or clearly refused."""

from __future__ import annotations

import importlib
import os
import random
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import allow_mutation_on_saved_tensors

import jacsparse
from jacsparse import VerificationError

from .features import FEATURES, weighted
from .known import KNOWN
from .programs import Program
from .subjects import SUBJECTS, MixedError
from .worlds import World

ROOT = Path(jacsparse.__file__).parent.parent
#: The folders whose errors are ours.
OURS = tuple(str(ROOT / name) + os.sep for name in ("jacsparse", "patterns", "spgemm"))
INTENDED = (TypeError, ValueError, RuntimeError, VerificationError, NotImplementedError)
#: What PyTorch cannot do itself: some second derivatives, and transforms and complex numbers of no sample at all.
UNABLE = ("is not implemented", "MKL FFT error", "Tensor must have a last dimension with stride 1")
#: Cores that a fault is shown with, where they show it.
SIMPLE = ("linear", "products", "dense", "gru", "J.T")
CHAINS = ("Scan", "Leapfrog", "Solve")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class Draw:
    """A case: all of it follows from the seed and these names."""

    seed: int
    subject: str
    core: str
    features: tuple[str, ...]

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.subject} of {self.core} with {', '.join(self.features) or 'nothing'}"


@dataclass(frozen=True)
class Verdict:
    draw: Draw
    #: "right", "refused", or what is wrong.
    kind: str
    detail: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind not in ("right", "refused", "refused by both", "without reference", "known")


def drawn(seed: int, full: bool = False) -> Draw:
    """A subject, a core and mostly two features that go together."""
    choose = random.Random(seed)
    subject = choose.choice(list(SUBJECTS))
    core = choose.choice(list(SUBJECTS[subject].cores))
    slow = full and seed % 20 == 0
    fitting = [name for name, each in FEATURES.items() if subject in each.subjects and (slow or not each.slow)]
    features: list[str] = []
    for _ in range(choose.choice([1, 2, 2, 2, 2, 2, 3, 3])):
        groups = set().union(*(FEATURES[name].groups for name in features))
        others = [name for name in fitting if name not in features and not FEATURES[name].groups & groups]
        features.append(choose.choice(others))
    return Draw(seed, subject, core, tuple(features))


def world_of(draw: Draw, ours: bool) -> World:
    torch.manual_seed(draw.seed)
    subject = SUBJECTS[draw.subject]
    program = Program(subject.cores[draw.core](ours))
    world = World(draw.seed, ours, program, subject.is_matrix, random.Random(draw.seed))
    if draw.subject == "algebra":
        world.count = 2
    for name in draw.features:
        # Of its own, whatever the other features draw, and how many random numbers layers of the library take.
        world.choose = random.Random(f"{draw.seed} {name}")
        torch.manual_seed(draw.seed)
        FEATURES[name].apply(world)
    world.program.to(world.dtype)
    world.as_module |= draw.core == "batch statistics"
    return world


@contextmanager
def surroundings(world: World) -> Iterator[None]:
    """The contexts of a call; the reference of a Jacobian is the same where there are no gradients."""
    with ExitStack() as stack:
        if world.ours or not (world.is_matrix and world.without_gradients):
            for context in world.contexts:
                stack.enter_context(context())
        yield


def observed(draw: Draw, world: World, number: int, called: Any) -> dict[str, Any]:
    """What a call shows: its result, its gradients, and what it changed."""
    subject = SUBJECTS[draw.subject]
    leaves = world.arguments(number)
    given = world.given(leaves, number)
    was = [tensor.detach().clone() for tensor in leaves]
    torch.manual_seed(draw.seed + number)
    generator = torch.get_rng_state()

    def run(*args: Tensor) -> Tensor:
        return subject.call(world, called, *args) if world.ours else subject.plain(world, *args)

    around = world.around if world.ours else world.plain_around
    with surroundings(world):
        y = (around(run) if around else run)(*given)
        found = {"result": y.detach().clone()}
        if not world.without_gradients:
            found |= gradients(world, y, leaves)
    if world.is_matrix:
        numbers = world.argnums if isinstance(world.argnums, tuple) else (world.argnums,)
        found |= {
            f"argument {n} after": leaves[n].detach().clone() if world.ours else was[n]
            for n in numbers
            if not (world.during or (world.same_twice and world.writes))
        }
        if world.threads == 1:
            found["random state"] = torch.get_rng_state() if world.ours else generator
    elif world.threads == 1 and not world.during:
        # Modules around a chain run it on a copy of what it writes to.
        if not (world.writes and draw.subject in CHAINS):
            found |= {f"argument {n} after": x.detach().clone() for n, x in enumerate(given) if isinstance(x, Tensor)}
        found["random state"] = torch.get_rng_state()
    if world.threads == 1:
        found |= world.state()
        found["grad"] = [tensor.grad is None for tensor in (*leaves, *world.program.parameters())]
    return found


def gradients(world: World, y: Tensor, leaves: list[Tensor]) -> dict[str, Any]:
    """Gradients of a weighting of a result, to arguments and parameters; with `create_graph` those of gradients too."""
    if world.is_matrix and not world.create_graph:
        return {}
    wanted = {f"gradient of argument {n}": leaf for n, leaf in enumerate(leaves) if leaf.requires_grad}
    # Modules of ours within the program change names.
    wanted |= {f"gradient of parameter {n}": p for n, p in enumerate(world.program.parameters()) if p.requires_grad}
    wanted = {name: tensor for name, tensor in wanted.items() if tensor.is_leaf}
    if not wanted:
        return {}
    found: dict[str, Any] = {}
    if not world.is_matrix:
        found["requires grad"] = y.requires_grad
    for change in world.during:
        change(world, leaves)
    loss = world.loss or weighted
    for _ in range(world.passes - 1 if y.requires_grad else 0):
        torch.autograd.grad(loss(y), list(wanted.values()), retain_graph=True, allow_unused=True)
    if not y.requires_grad:
        first = [torch.zeros_like(tensor) for tensor in wanted.values()]
    elif world.is_matrix or world.create_graph or world.threads > 1:
        first = list(
            torch.autograd.grad(
                loss(y),
                list(wanted.values()),
                create_graph=world.create_graph and not world.is_matrix,
                materialize_grads=True,
            )
        )
    else:
        loss(y).backward()
        first = [torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in wanted.values()]
        for tensor in wanted.values():
            tensor.grad = None
    found |= {name: gradient.detach().clone() for name, gradient in zip(wanted, first, strict=True)}
    if not world.is_matrix and world.create_graph:
        terms = [gradient.pow(2).sum() for gradient in first if gradient.requires_grad]
        if terms:
            second = torch.autograd.grad(sum(terms), list(wanted.values()), materialize_grads=True)
            found |= {f"second {name}": gradient for name, gradient in zip(wanted, second, strict=True)}
    return found


def observations(draw: Draw, world: World) -> list[dict[str, Any]]:
    """What all calls show, one after the other; in several threads, all at once."""
    found = []
    for number, change in enumerate(world.changes):
        if change is not None:
            change(world)
        if world.ours and world.called is None:
            with surroundings(world):
                world.called = SUBJECTS[draw.subject].prepare(world, world.given(world.arguments(0), 0))
        if world.threads == 1 or not world.ours:
            found += [
                observed(draw, world, number * world.threads + part, world.called) for part in range(world.threads)
            ]
        else:
            found += in_threads(draw, world, number)
    return found


def in_threads(draw: Draw, world: World, number: int) -> list[dict[str, Any]]:
    found: list[Any] = [None] * world.threads

    def work(part: int) -> None:
        try:
            found[part] = observed(draw, world, number * world.threads + part, world.called)
        except BaseException as error:
            found[part] = error

    threads = [threading.Thread(target=work, args=(part,)) for part in range(world.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def difference(draw: Draw, ours: list[dict[str, Any]], plain: list[dict[str, Any]]) -> str:
    """What differs, or nothing."""
    for number, (one, other) in enumerate(zip(ours, plain, strict=True)):
        for name in other:
            if name not in one:
                return f"{name} is missing"
            a, b = one[name], other[name]
            if not isinstance(b, Tensor):
                if a != b:
                    return f"{name} in call {number}: {a}, expected {b}"
                continue
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"{name} in call {number}: {a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}"
            if not b.is_floating_point():
                if not torch.equal(a, b):
                    return f"{name} in call {number}: other elements"
                continue
            if not b.numel():
                continue
            limit = TOLERANCE.get(b.dtype, 0.0) * max(1.0, b.abs().max().item())
            error = (a.double() - b.double()).abs().max().item()
            if not error <= limit and not torch.equal(a.isnan(), b.isnan()):
                return f"{name} in call {number}: not a number in other places"
            if not (a.double() - b.double()).nan_to_num().abs().max().item() <= limit:
                return f"{name} in call {number}: differs by {error:.1e}"
    return ""


def is_clear(error: BaseException) -> bool:
    """Whether an error is one that the library raises itself, of an intended kind."""
    if not isinstance(error, INTENDED) or isinstance(error, RecursionError):
        return False
    if "has been modified by an inplace operation" in str(error):
        # Autograd's own, of a tensor that was saved, and changed before the backward pass.
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename.startswith(OURS) and (last.line or "").startswith("raise ")


def summary(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = last.filename.removeprefix(str(ROOT) + os.sep).rpartition("site-packages/")[2]
    return f"{type(error).__name__} at {place}:{last.lineno}: {str(error).partition(chr(10))[0]}"


def refuses_literally(draw: Draw) -> bool:
    """Whether plain PyTorch refuses the program in these surroundings itself."""
    world = world_of(draw, ours=False)
    try:
        for number, change in enumerate(world.changes):
            if change is not None:
                change(world)
            leaves = world.arguments(number)
            run = world.around(world.program) if world.around else world.program
            with ExitStack() as stack:
                for context in world.contexts:
                    stack.enter_context(context())
                y = run(*world.given(leaves, number))
                if not world.without_gradients and y.requires_grad:
                    for each in world.during:
                        each(world, leaves)
                    y.sum().backward()
    except Exception:
        return True
    return False


def others(draw: Draw) -> Iterator[list[dict[str, Any]]]:
    """What plain PyTorch gives where nothing changes between the passes, or what is saved and written to is copied."""
    for changes, context in (
        (False, nullcontext),
        (False, allow_mutation_on_saved_tensors),
        (True, allow_mutation_on_saved_tensors),
    ):
        world = world_of(draw, ours=False)
        world.during = world.during if changes else [lambda world, leaves: None for _ in world.during]
        world.contexts = []
        with suppress(Exception), context():
            yield observations(draw, world)


def smallest(verdict: Verdict) -> Verdict:
    """The same kind of fault with fewer features, or of a simpler core."""
    draw = verdict.draw
    fewer = [replace(draw, features=tuple(each for each in draw.features if each != name)) for name in draw.features]
    cores = [core for core in SIMPLE if core in SUBJECTS[draw.subject].cores and draw.core not in SIMPLE]
    for smaller in [*fewer, *(replace(draw, core=core) for core in cores)]:
        found = judged(smaller)
        if found.kind == verdict.kind:
            return smallest(found)
    return verdict


def judged(draw: Draw) -> Verdict:
    """Run a case on both sides, and compare; where that shows a known fault, its kind is that."""
    verdict = compared(draw)
    names = {draw.core, *draw.features, *(["create_graph"] if world_of(draw, False).create_graph else [])}
    if verdict.is_fault and any(
        draw.subject in each.subjects and each.names <= names and each.detail in verdict.detail for each in KNOWN
    ):
        return replace(verdict, kind="known")
    return verdict


def compared(draw: Draw) -> Verdict:
    """Run a case on both sides, and compare."""
    # What earlier draws left would hide what this one does.
    importlib.import_module("jacsparse.tracing").graphs_of.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain: Any = observations(draw, world_of(draw, ours=False))
        except Exception as error:
            plain = error
        try:
            ours: Any = observations(draw, world_of(draw, ours=True))
        except Exception as error:
            ours = error
        if isinstance(ours, Exception):
            if isinstance(plain, Exception) and not isinstance(plain, MixedError):
                return Verdict(draw, "refused by both")
            if is_clear(ours):
                return Verdict(draw, "refused", summary(ours))
            if refuses_literally(draw):
                return Verdict(draw, "refused by both")
            return Verdict(draw, "unclear error", summary(ours))
        references = [] if isinstance(plain, Exception) else [plain]
        if isinstance(plain, Exception) or world_of(draw, False).during or "saved on the CPU" in draw.features:
            # PyTorch does not see every write after a use: by ``.data``, to what is saved on the CPU without a copy,
            # and to a view where saved tensors may change.
            references += others(draw)
        if not references and any(what in str(plain) for what in UNABLE):
            # Tests of drawn Hessians compare with differences.
            return Verdict(draw, "without reference")
        if not references:
            return Verdict(draw, f"accepted: {type(plain).__name__}", summary(plain))
        wrong = [difference(draw, ours, reference) for reference in references]
        return Verdict(draw, "wrong", wrong[0]) if all(wrong) else Verdict(draw, "right")
