"""The features that are crossed: each changes a world before its calls, or says what happens between them."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import jacsparse
from jacsparse import PreparedJacobian

from .programs import (
    SIZE,
    Attribute,
    Captured,
    Counter,
    First,
    Masked,
    Of,
    Recurrent,
    Residual,
    RunningMean,
    parametrised,
    pruned,
)
from .subjects import SUBJECTS
from .worlds import Change, Run, World

MATRICES = frozenset(name for name, subject in SUBJECTS.items() if subject.is_matrix)
ALL = frozenset(SUBJECTS)
MODULES = ALL - MATRICES
PREPARED = frozenset({"prepare_jacobian", "prepare_hessian"})
#: Whose programs have layers before and after the core.
LAYERED = ALL - {"algebra"}
#: Whose arguments may be two.
SEVERAL = MATRICES | {"linear_recurrence", "recurrent layers", "algebra"}


@dataclass(frozen=True)
class Feature:
    """A feature: what it does to a world, and the subjects that it applies to; of each of its groups one is drawn."""

    apply: Callable[[World], object]
    subjects: frozenset[str] = ALL
    groups: frozenset[str] = frozenset()
    #: Whether it is drawn in the long form alone.
    slow: bool = False


def group(*names: str) -> frozenset[str]:
    return frozenset(names)


def before(*names: str, groups: frozenset[str] = frozenset()) -> Feature:
    """One of some layers before the core."""

    def apply(world: World) -> None:
        world.program.before.append(Of(world.choose.choice(names)))

    return Feature(apply, ALL if "complex" in names or "in place" in names else LAYERED, groups)


def layer(
    *makers: Callable[[], nn.Module], groups: frozenset[str] = frozenset(), subjects: frozenset[str] = LAYERED
) -> Feature:
    return Feature(lambda world: world.program.before.append(world.choose.choice(makers)()), subjects, groups)


def first(*names: str, other: bool = False) -> Feature:
    """A layer that writes to an argument, before all others."""

    def apply(world: World) -> None:
        world.program.before.insert(0, Of(world.choose.choice(names)))
        world.writes = True
        if other:
            world.count = 2

    return Feature(apply, SEVERAL if other else ALL, group("writes"))


def argnums(world: World) -> None:
    world.count = 2
    world.argnums = world.choose.choice([0, 1, (0, 1), (1, 0)])


def writes_to_itself(world: World) -> None:
    world.program.before.append(world.choose.choice([Counter, RunningMean, Attribute])())
    world.as_module = True


def option(name: str, *values: Any, subjects: frozenset[str] = PREPARED, slow: bool = False) -> Feature:
    return Feature(lambda world: world.options.update({name: world.choose.choice(values)}), subjects, slow=slow)


def attribute(*names: str, subjects: frozenset[str] = ALL, **values: Any) -> Feature:
    def apply(world: World) -> None:
        for name, value in values.items():
            setattr(world, name, value)

    return Feature(apply, subjects, group(*names))


def layout(*ways: Callable[[Tensor], Tensor], groups: frozenset[str] = group("layout")) -> Feature:
    return Feature(lambda world: setattr(world, "layout", world.choose.choice(ways)), groups=groups)


def twice(world: World) -> None:
    world.count, world.same_twice = 2, True
    world.argnums = world.choose.choice([0, 1, (0, 1)])


def within(
    *managers: Callable[[], Any], without_gradients: bool = False, groups: frozenset[str] = group("context")
) -> Feature:
    def apply(world: World) -> None:
        world.contexts.append(world.choose.choice(managers))
        world.without_gradients |= without_gradients

    return Feature(apply, groups=groups)


def change(*changes: Change, subjects: frozenset[str] = ALL) -> Feature:
    """Something that happens after a call or two, before another one."""

    def apply(world: World) -> None:
        world.changes = [None] * world.choose.choice([1, 2, 3]) + [world.choose.choice(changes), None]

    return Feature(apply, subjects, group("change"))


def between(*changes: Callable[[World, list[Tensor]], object], subjects: frozenset[str] = ALL - PREPARED) -> Feature:
    """Something that happens between a call's forward and backward pass."""

    def apply(world: World) -> None:
        world.during.append(world.choose.choice(changes))
        if world.is_matrix:
            world.create_graph = True

    return Feature(apply, subjects, group("between"))


def around(ours: Callable[[Run], Run], plain: Callable[[Run], Run], *names: str, **values: Any) -> Feature:
    def apply(world: World) -> None:
        world.around, world.plain_around = ours, plain
        for name, value in values.items():
            setattr(world, name, value)

    return Feature(apply, ALL - PREPARED if values else ALL, group("around", *names))


# Changes between calls.


def stepped(world: World, leaves: list[Tensor] | None = None) -> None:
    parameters = [p for p in world.program.parameters() if p.requires_grad]
    if not parameters:
        return
    optimiser = torch.optim.SGD(parameters, lr=0.5)
    for p in parameters:
        p.grad = torch.linspace(0.1, 0.7, p.numel(), dtype=p.dtype).reshape(p.shape)
    optimiser.step()
    optimiser.zero_grad()


def data(world: World, leaves: list[Tensor] | None = None) -> None:
    for p in world.program.parameters():
        p.data.mul_(-0.7)


def new_data(world: World) -> None:
    for p in world.program.parameters():
        p.data = p.data * -0.7 + 0.1


def loaded(world: World, assign: bool = False) -> None:
    state = {name: t * 0.6 if t.is_floating_point() else t.clone() for name, t in world.program.state_dict().items()}
    world.program.load_state_dict(state, assign=assign)


def replaced(world: World) -> None:
    for part in world.program.modules():
        for name, p in list(part._parameters.items()):
            if p is not None:
                setattr(part, name, nn.Parameter(p.detach() * 0.4 + 0.2))


def frozen(world: World) -> None:
    for number, p in enumerate(world.program.parameters()):
        p.requires_grad_(number % 2 == 0)


def moved_buffers(world: World) -> None:
    for buffer in world.program.buffers():
        if buffer.dtype == torch.bool:
            buffer.logical_not_()
        elif buffer.is_floating_point():
            buffer.mul_(2)


def pruned_later(world: World) -> None:
    for part in world.program.modules():
        if isinstance(part, nn.Linear) and not prune.is_pruned(part):
            places = torch.arange(part.weight.numel()).reshape(part.weight.shape)
            prune.custom_from_mask(part, "weight", (places % 2 == 0).to(part.weight.dtype))


def made_permanent(world: World) -> None:
    for part in world.program.modules():
        if isinstance(part, nn.Linear) and prune.is_pruned(part):
            prune.remove(part, "weight")


def copied(world: World, way: Callable[[Any], Any]) -> None:
    """Go on with a copy of what is called, and of the program in it."""
    if isinstance(world.called, PreparedJacobian):
        way(world.called)
    elif hasattr(world.called, "module"):
        world.called = way(world.called)
        world.program = world.called.module
    else:
        world.program = way(world.program)
        world.called = None


def saved(world: World) -> None:
    if not world.ours:
        return
    args = world.given(world.arguments(0), 0)
    with tempfile.TemporaryDirectory() as folder:
        world.called.save(f"{folder}/prepared.npz")
        f = world.called._f
        f = getattr(f, "f", f)
        world.called = type(world.called).load(f"{folder}/prepared.npz", f, *args)


def relaid(world: World, way: Callable[[Tensor], Tensor]) -> None:
    world.layout = way


def to_float32(world: World) -> None:
    world.dtype = torch.float32
    world.program.float()


def argument_written(world: World, leaves: list[Tensor]) -> None:
    with torch.no_grad():
        leaves[0].mul_(1.5)


# What surrounds calls.


def weighted(y: Tensor) -> Tensor:
    return (y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)).sum()


def by_vmap(run: Run) -> Run:
    return lambda *args: torch.vmap(lambda *parts: run(*(part[None] for part in parts))[0])(*args)


def by_func_grad(run: Run) -> Run:
    return lambda *args: torch.func.grad(lambda *args: weighted(run(*args)))(*args)


def by_loop(run: Run) -> Run:
    def looped(*args: Tensor) -> Tensor:
        samples = [run(*(arg[n : n + 1] for arg in args))[:1] for n in range(len(args[0]))]
        return torch.cat(samples) if samples else run(*args)

    return looped


def by_autograd(run: Run) -> Run:
    def gradient(*args: Tensor) -> Tensor:
        with torch.enable_grad():
            entered = [args[0].detach().clone().requires_grad_(), *args[1:]]
            return torch.autograd.grad(weighted(run(*entered)), entered[0], materialize_grads=True)[0]

    return gradient


def by_checkpoint(run: Run) -> Run:
    return lambda *args: checkpoint(run, *args, use_reentrant=False)


@contextlib.contextmanager
def with_mutations() -> Iterator[None]:
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        yield


def nested(world: World) -> None:
    """A layer around which the plain side has no module of ours."""
    make: list[Callable[[nn.Module], nn.Module]] = [
        jacsparse.nn.Scan,
        functools.partial(jacsparse.nn.Scan, schedule="blelloch"),
        jacsparse.nn.Solve,
        functools.partial(jacsparse.nn.Leapfrog, threads=2),
    ]
    maker, part = world.choose.choice(make), Residual()
    world.program.before.append(First(maker(part) if world.ours else part))


def nested_recurrence(world: World) -> None:
    part = Recurrent(nn.GRU)
    kind = world.choose.choice(["auto", "linear", "chunked:1"])
    if world.ours:
        part = jacsparse.nn.convert(part, schedule=kind)
    world.program.before.append(Shortened(part))


class Shortened(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.part(x)[..., :SIZE]


def inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.mT.contiguous().mT if x.ndim > 1 else x.repeat(2)[::2],
    lambda x: torch.stack([x, x], -1)[..., 0],
    lambda x: torch.cat([x, x], -1)[..., :SIZE],
    lambda x: x[:1].expand(x.shape),
    lambda x: x[..., :1].expand(x.shape),
]

FEATURES: dict[str, Feature] = {
    "no samples": attribute("batched", subjects=MATRICES, batched=False),
    "argnums": Feature(argnums, MATRICES, group("arguments")),
    "method": option("method", "products", "compressed"),
    "compile": option("compile", True, slow=True),
    "create_graph": Feature(lambda world: setattr(world, "create_graph", True), ALL),
    "float32": attribute(dtype=torch.float32),
    "complex": before("complex", "polar"),
    "fft": before("fft", "spectrum"),
    "writes to an intermediate": before("in place", "assigned", "rectified in place", "through a view"),
    "writes to its argument": first("scales its argument", "sets its argument", "squares its argument"),
    "writes to another argument": first("scales the other", "sets the other", other=True),
    "writes to itself": Feature(writes_to_itself, LAYERED, group("writes", "state")),
    "mask": layer(*(functools.partial(Masked, way) for way in ("where", "index", "assignment", "fill", "dropout"))),
    "where": before("where"),
    "pruned": layer(pruned),
    "parametrised": layer(parametrised),
    "pruned=False": attribute(subjects=frozenset({"jacobian"}), pruned=False),
    "a number": attribute(subjects=MATRICES, number=1.5),
    "several outputs": Feature(lambda world: setattr(world.program, "outputs", 2), MATRICES),
    "sum": attribute("loss", loss=Tensor.sum),
    "one output": attribute("loss", loss=lambda y: y.flatten()[1:2].sum()),
    "two passes": attribute(subjects=MODULES, passes=2),
    "input without gradient": attribute(subjects=MODULES, of_input=False),
    "dropout": before("dropout", groups=group("random")),
    "custom Function": before("custom", "replaced derivative"),
    "inner checkpoint": before("checkpoint"),
    "mean of samples": before("mean of samples"),
    "nested": Feature(nested, LAYERED),
    "nested recurrence": Feature(nested_recurrence, LAYERED),
    # Another tensor in each call; a prepared Jacobian goes on with the first one.
    "captured": layer(Captured, groups=group("captured", "state"), subjects=LAYERED - PREPARED),
    "one tensor twice": Feature(twice, SEVERAL, group("arguments")),
    "no sample at all": attribute("batched", samples=0),
    "one sample": attribute("batched", samples=1),
    "not contiguous": layout(*LAYOUTS[:3]),
    "expanded": layout(*LAYOUTS[3:]),
    "inference tensor": layout(inference, groups=group("layout", "around")),
    "a parameter": layout(lambda x: nn.Parameter(x.clone())),
    "steps": change(stepped),
    "data": change(data, new_data),
    "load_state_dict": change(loaded, functools.partial(loaded, assign=True)),
    "replaced weights": change(replaced),
    "frozen": change(frozen),
    "buffers change": change(moved_buffers),
    "pruned later": change(pruned_later, made_permanent),
    # Constants to a prepared Jacobian.
    "factor": change(lambda world: setattr(world.program, "factor", 2.0), subjects=ALL - PREPARED),
    "mode": change(lambda world: world.program.train(not world.program.core.training), subjects=ALL - PREPARED),
    "deepcopy": change(functools.partial(copied, way=copy.deepcopy)),
    "pickle": change(functools.partial(copied, way=lambda each: pickle.loads(pickle.dumps(each)))),
    "save and load": change(saved, subjects=PREPARED),
    "another layout": change(*(functools.partial(relaid, way=way) for way in LAYOUTS)),
    "another batch": change(lambda world: setattr(world, "samples", 2)),
    "another dtype": change(to_float32),
    "empty later": change(lambda world: setattr(world, "samples", 0)),
    "steps before backward": between(stepped),
    # Unseen: what was computed before has the old weights, the rest the new ones. These two compute as PyTorch does.
    "data before backward": between(data, subjects=frozenset({"Scan", "Leapfrog"})),
    "argument written before backward": between(argument_written),
    "no_grad": within(torch.no_grad, without_gradients=True),
    "inference_mode": within(torch.inference_mode, without_gradients=True),
    "no hooks of saved tensors": within(
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("none, please"),
    ),
    "mutations of saved tensors": within(with_mutations, groups=group("context", "mutations")),
    "saved on the CPU": within(torch.autograd.graph.save_on_cpu, groups=group("context", "between")),
    "vmap": around(by_vmap, by_loop, "batched", "state", "random", "writes"),
    "func.grad": around(by_func_grad, by_autograd, "writes", without_gradients=True),
    "checkpoint": around(by_checkpoint, by_checkpoint, "state", "writes"),
    "threads": attribute("around", "state", "random", "mutations", "between", threads=3),
}
