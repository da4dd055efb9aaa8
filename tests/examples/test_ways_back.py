"""Networks as people train them, batch normalisation in training mode included: each way back against autograd.

A gradient may differ by `BOUND` times the largest element of all gradients of its layer: that of a bias before a
normalisation is rounding alone, whose size the layer's weights tell. Running statistics are the same bits.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from examples.ways_back import ResNet, ResNet20, vgg11
from jacsparse.nn import Leapfrog, Scan, Solve
from jacsparse.training import DelayedGradients
from tests.distributed.launch import run_ranks
from tests.helpers import BOUND, FLOAT

NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "VGG-11": vgg11,
    "VGG-11, an eighth of its channels": functools.partial(vgg11, 8),
    "ResNet-20": ResNet20,
    "a ResNet of one's own": ResNet,
}
#: Those whose matrices fit memory.
NARROW = list(NETWORKS)[1:]

SCHEDULES = ("auto", "linear", "blelloch", "blelloch:1", "blelloch:2", "chunked:2", "balanced:2", "balanced:3")
SOLVERS: Mapping[str, Mapping[str, float]] = {
    **{name: {} for name in ("substitution", "scan", "cyclic_reduction", "jacobi", "richardson")},
    # The others are exact after a number of steps, and this one as far as it goes on.
    "bicgstab": {"tolerance": 1e-14},
}
WAYS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    **{f"Scan, {name}": functools.partial(Scan, schedule=name) for name in SCHEDULES},
    **{f"Leapfrog, {k} threads": functools.partial(Leapfrog, threads=k) for k in range(1, 8)},
    **{f"Solve, {name}": functools.partial(Solve, method=name, **options) for name, options in SOLVERS.items()},
}
#: Ways that make no matrices, for layers of any width.
WITHOUT_MATRICES = ("Scan, auto", "Scan, linear", *(way for way in WAYS if way.startswith("Leapfrog")))


def network(name: str) -> nn.Module:
    """A network of its own for each test, since runs change statistics."""
    return copy.deepcopy(_built(name))


@functools.cache
def _built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]().double()


def batches(count: int, batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(batch)
    images = (torch.randn(batch, 3, 32, 32, generator=generator, dtype=FLOAT) for _ in range(count))
    return [(x, torch.randint(10, (batch,), generator=generator)) for x in images]


@dataclass
class Trained:
    """What two training steps leave: gradients of the input and of parameters by name, and running statistics."""

    gradients: dict[str, torch.Tensor]
    buffers: list[torch.Tensor]


def trained(module: nn.Module, wrap: Callable[[nn.Module], nn.Module], batch: int) -> Trained:
    """Gradients add up over two batches, the second of which goes by what the first one has planned."""
    wrapped, inputs = wrap(module), list[torch.Tensor]()
    for x, y in batches(2, batch):
        inputs.append(x.requires_grad_())
        functional.cross_entropy(wrapped(x), y).backward()
    leaves = {**dict(enumerate(inputs)), **dict(module.named_parameters())}
    gradients = {f"{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert len(gradients) == len(leaves)
    return Trained(gradients, list(module.buffers()))


@functools.cache
def by_autograd(name: str, batch: int) -> Trained:
    return trained(network(name), lambda module: module, batch)


def assert_gradients(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str) -> None:
    assert actual.keys() == expected.keys()
    layer = {name: name.rpartition(".")[0] or name for name in expected}
    largest = dict.fromkeys(layer.values(), 0.0)
    for name, gradient in expected.items():
        largest[layer[name]] = max(largest[layer[name]], gradient.abs().max().item())
    for name, gradient in actual.items():
        error = (gradient - expected[name]).abs().max().item()
        assert error <= BOUND * largest[layer[name]], f"{what}: {name} differs by {error} of {largest[layer[name]]}"


CASES = [
    pytest.param(name, way, batch, marks=() if name == NARROW[-1] and batch == 2 else pytest.mark.full)
    for name in NETWORKS
    for way in (WAYS if name in NARROW else WITHOUT_MATRICES)
    for batch in (2, 16)
]


@pytest.mark.parametrize(("name", "way", "batch"), CASES)
def test_gradients_and_statistics(name: str, way: str, batch: int) -> None:
    expected, actual = by_autograd(name, batch), trained(network(name), WAYS[way], batch)
    assert_gradients(actual.gradients, expected.gradients, way)
    assert all(torch.equal(one, other) for one, other in zip(actual.buffers, expected.buffers, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_one_sample_is_refused_as_by_pytorch(way: str) -> None:
    # VGG-11's last normalisation but for this one is of 2 × 2 pixels.
    module = nn.Sequential(network(NARROW[0])[:-1], nn.BatchNorm1d(64, dtype=FLOAT))
    ((x, _),) = batches(1, 1)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        WAYS[way](module)(x.requires_grad_())


def test_a_solver_of_groups_says_why_not() -> None:
    ((x, _),) = batches(1, 2)
    with pytest.raises(ValueError, match="hybrid does not apply: the system has no groups; recurrent networks' have"):
        Solve(network("a ResNet of one's own"), method="hybrid")(x.requires_grad_())


def compare_delayed_gradients(name: str, modules: int, batch: int, group: dist.ProcessGroup | None = None) -> None:
    """Each gradient of delayed gradients is autograd's at the weights and the batch of its forward pass."""
    model, twin = network(name), network(name)
    trainer = DelayedGradients(
        model, modules=modules, optimizer=functools.partial(torch.optim.SGD, lr=0.05), process_group=group,
        recompute=modules % 2 == 0,
    )  # fmt: skip
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    here = range(modules) if group is None else [dist.get_rank(group)]
    history = list[dict[str, torch.Tensor]]()
    for iteration, (x, y) in enumerate(batches(modules + 2, batch)):
        with torch.no_grad():
            for parameter, value in zip(twin.parameters(), model.parameters(), strict=True):
                parameter.copy_(value)
        twin.zero_grad()
        functional.cross_entropy(twin(x), y).backward()
        history.append({name: p.grad.clone() for name, p in twin.named_parameters() if p.grad is not None})
        trainer.step(x, y)
        for number in here:
            passed = iteration - modules + 1 + number
            parameters = {names[id(p)]: p for p in trainer.partition[number].parameters()}
            actual = {name: p.grad for name, p in parameters.items() if p.grad is not None}
            if passed < 0:
                assert not any(gradient.any() for gradient in actual.values())
                continue
            expected = {name: history[passed][name] for name in parameters}
            assert_gradients(actual, expected, f"part {number} of {modules} at iteration {iteration}")
        trainer.synchronize()
        for one, other in zip(model.buffers(), twin.buffers(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("batch", [2, pytest.param(16, marks=pytest.mark.full)])
@pytest.mark.parametrize("modules", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == NARROW[-1] else pytest.mark.full) for name in NETWORKS]
)
def test_delayed_gradients(name: str, modules: int, batch: int) -> None:
    compare_delayed_gradients(name, modules, batch)


def delayed_across_ranks(names: str) -> None:
    """What each rank runs: a process for each module, of 1 to as many as there are ranks."""
    for modules in range(1, dist.get_world_size() + 1):
        group = dist.new_group(list(range(modules)))
        if dist.get_rank() < modules:
            for name in names.split(";"):
                for batch in (2, 16):
                    compare_delayed_gradients(name, modules, batch, group)
    dist.barrier()


@pytest.mark.full
@pytest.mark.parametrize(("name", "count"), [(NARROW[-1], 2), ("VGG-11", 2), *((name, 4) for name in NARROW)])
def test_delayed_gradients_in_processes(name: str, count: int) -> None:
    for rank in run_ranks(__name__, "delayed_across_ranks", name, count=count, seconds=500):
        assert rank.status == 0, rank.output
