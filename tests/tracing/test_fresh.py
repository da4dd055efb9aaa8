"""What a call returns is what the module computes now, whatever has changed since the last call; or it is refused."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.sparse
import torch
from jacsparse.patterns import RULES
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import jacsparse
from jacsparse import UnsupportedOperatorError
from jacsparse.recurrence import Diagonal

SCHEDULES = ("linear", "blelloch", "blelloch:1")


class Net(nn.Module):
    """A forward that is given as a function, with layers, buffers and plain attributes at hand."""

    def __init__(self, function: Callable[..., torch.Tensor], **parts: object) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def linear(into: int = 4, out: int = 4) -> nn.Linear:
    return nn.Linear(into, out).double()


def samples(batch: int = 3, *shape: int) -> torch.Tensor:
    return torch.randn(batch, *(shape or (4,)), dtype=torch.float64, generator=torch.Generator().manual_seed(batch))


@contextlib.contextmanager
def undone(module: nn.Module) -> Iterator[None]:
    """What a module counts, and what is drawn, is as before on exit: what follows does what was done here."""
    counts = {name: value for name, value in module.__dict__.items() if isinstance(value, int) and name != "training"}
    with torch.random.fork_rng():
        yield
    module.__dict__.update(counts)


def expected_jacobian(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """``(batch, outputs, inputs)``, by autograd on the whole batch at once, as the module would compute it next."""
    leaf = x.clone().requires_grad_()
    with undone(module):
        y = module(leaf * 1).flatten(1)
    rows = [
        torch.autograd.grad(y[:, n].sum(), leaf, retain_graph=True, materialize_grads=True)[0]
        for n in range(y.shape[1])
    ]
    return torch.stack(rows, 1).flatten(2)


def gradients(run: nn.Module, module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Output, and the gradients of input and parameters."""
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    y = run(leaf)
    (y * torch.linspace(1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)).sum().backward()
    return y.detach(), [leaf.grad, *(p.grad for p in module.parameters())]


class Watched:
    """A module and scans of it that live as long: what they say must be what the module does now."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.scans = [jacsparse.nn.Scan(module, schedule=schedule) for schedule in SCHEDULES]

    def check(self, x: torch.Tensor) -> None:
        actual, expected = jacsparse.jacobian(self.module, x), expected_jacobian(self.module, x)
        for number in range(len(x)):
            assert torch.allclose(actual.todense(number), expected[number], rtol=1e-9, atol=1e-11)
        assert not jacsparse.verify(self.module, x).failed
        for scan in self.scans:
            with undone(self.module):
                y, by_autograd = gradients(self.module, self.module, x)
            z, theirs = gradients(scan, self.module, x)
            assert torch.equal(y, z)
            for one, other in zip(by_autograd, theirs, strict=True):
                assert (one is None and (other is None or not other.any())) or torch.allclose(
                    one, other, rtol=1e-9, atol=1e-11
                )


def watch_change(module: nn.Module, change: Callable[[nn.Module], object]) -> Watched:
    """What is said of a module before and after a change."""
    watched = Watched(module)
    watched.check(samples())
    change(module)
    watched.check(samples())
    return watched


# What a module reads from elsewhere.

GLOBAL = {"scale": 2.0}


class Shared(nn.Module):
    factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.factor)


@dataclass(slots=True)
class Slots:
    scale: float = 2.0


def elsewhere() -> Iterator[tuple[str, nn.Module, Callable[[nn.Module], object]]]:
    yield (
        "global",
        Net(lambda self, x: torch.tanh(x * GLOBAL["scale"])),
        lambda m: GLOBAL.update(scale=GLOBAL["scale"] + 1),
    )
    cell = [2.0]
    yield "closure", Net(lambda self, x: torch.tanh(x * cell[0])), lambda m: cell.__setitem__(0, 5.0)
    yield "class attribute", Shared(), lambda m: setattr(Shared, "factor", Shared.factor + 1)
    config = types.SimpleNamespace(model=types.SimpleNamespace(scale=2.0))
    yield (
        "nested namespace",
        Net(lambda self, x: (x * self.cfg.model.scale).sin(), cfg=config),
        (lambda m: setattr(config.model, "scale", 3.0)),
    )
    deep = {"a": {"b": {"c": {"d": 2.0}}}}
    yield (
        "deep dictionary",
        Net(lambda self, x: (x * self.deep["a"]["b"]["c"]["d"]).sin(), deep=deep),
        (lambda m: deep["a"]["b"]["c"].update(d=7.0)),
    )
    slots = Slots()
    yield (
        "slots",
        Net(lambda self, x: (x * self.slots.scale).sin(), slots=slots),
        lambda m: setattr(slots, "scale", 4.0),
    )
    array = np.array([1.0, 2.0, 3.0, 4.0])
    yield (
        "array",
        Net(lambda self, x: (x * torch.from_numpy(self.array)).sin(), array=array),
        (lambda m: array.__imul__(2)),
    )
    number = np.array(2.0)
    yield (
        "number of an array",
        Net(lambda self, x: (x * float(self.number)).sin(), number=number),
        (lambda m: number.__iadd__(1)),
    )
    listed = [nn.Threshold(0.1, 0.0)]
    yield (
        "module in a list",
        Net(lambda self, x: self.listed[0](x) * 2, listed=listed),
        (lambda m: setattr(listed[0], "value", 3.0) or listed.__setitem__(0, nn.Tanh())),
    )
    yield "counter", Counter(), lambda m: None
    beside = Net(lambda self, x: torch.tanh(x * self.scale) * self.scale_g, scale=2.0)
    beside.scale_g = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
    yield "attribute beside a parameter", beside, lambda m: setattr(m, "scale", 5.0)
    yield (
        "size of a kernel",
        Net(lambda self, x: functional.avg_pool1d(x[:, None], self.size, 1).flatten(1), size=2),
        lambda m: setattr(m, "size", 3),
    )
    yield (
        "a branch",
        Net(lambda self, x: x.sin() if self.flag else x.cumsum(1), flag=True),
        (lambda m: setattr(m, "flag", False)),
    )
    yield (
        "a list of layers",
        Net(lambda self, x: functools_reduce(self.layers, x), layers=[torch.tanh, torch.sin]),
        lambda m: m.layers.append(lambda x: x.flip(1)),
    )


def functools_reduce(layers: list[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.k += 1
        return torch.tanh(x * self.k)


ELSEWHERE = {name: (module, change) for name, module, change in elsewhere()}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_read_from_elsewhere(name: str) -> None:
    module, change = ELSEWHERE[name]
    watched = Watched(module)
    for batch in (3, 2, 3):
        watched.check(samples(batch))
        change(module)
        watched.check(samples(batch))


# What is read from tensors as positions.


class Picks(nn.Module):
    """Takes columns by what a function reads from its buffers."""

    def __init__(self, read: Callable[[nn.Module], torch.Tensor], index: torch.Tensor) -> None:
        super().__init__()
        self.read = read
        self.register_buffer("index", index)
        self.weight = nn.Parameter(torch.tensor([0.3, 0.1, 0.4, 0.2], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x[:, self.read(self)] * 2)


def positions() -> dict[str, tuple[nn.Module, Callable[[nn.Module], object]]]:
    whole, halves = torch.tensor([2, 0, 1, 3]), torch.tensor([2.4, 0.4, 1.4, 3.4])
    memory = np.array([2, 0, 1, 3])
    mask = torch.tensor([True, False, True, True])

    def chosen(m: nn.Module) -> None:
        with torch.no_grad():
            m.weight.copy_(torch.tensor([0.1, 0.4, 0.2, 0.3]))

    integers = Picks(lambda self: self.p, whole.clone())
    integers.p = nn.Parameter(torch.tensor([1, 1, 0]), requires_grad=False)
    return {
        "topk": (Picks(lambda self: self.weight.topk(3).indices, whole.clone()), chosen),
        "argsort": (Picks(lambda self: self.weight.argsort(), whole.clone()), chosen),
        "long": (Picks(lambda self: self.index.long(), halves.clone()), lambda m: m.index.add_(1).remainder_(4)),
        "copy": (Picks(lambda self: self.index, whole.clone()), lambda m: m.index.copy_(torch.tensor([0, 3, 2, 1]))),
        "data": (
            Picks(lambda self: self.index, whole.clone()),
            lambda m: m.index.data.copy_(torch.tensor([3, 3, 2, 1])),
        ),
        "shared memory": (Picks(lambda self: self.index, torch.from_numpy(memory)), lambda m: memory.sort()),
        "integer parameter": (
            integers,
            lambda m: m.load_state_dict({**m.state_dict(), "p": torch.tensor([3, 2, 2])}),
        ),
        "assigned": (
            Picks(lambda self: self.index, whole.clone()),
            lambda m: m.load_state_dict({**m.state_dict(), "index": torch.tensor([1, 1, 0, 2])}, assign=True),
        ),
        "mask": (
            Picks(lambda self: self.index, mask.clone()),
            lambda m: m.index.copy_(torch.tensor([0, 1, 1, 1]).bool()),
        ),
        "fewer": (Picks(lambda self: self.index, mask.clone()), lambda m: m.index.fill_(True)),
        "permutation": (Picks(lambda self: torch.randperm(4), whole.clone()), lambda m: torch.manual_seed(5)),
    }


@pytest.mark.parametrize("name", positions())
def test_what_is_read_as_positions(name: str) -> None:
    torch.manual_seed(1)
    watch_change(*positions()[name])


# Structure that changes.


def structures() -> dict[str, tuple[nn.Module, Callable[[nn.Module], object]]]:
    def of(function: Callable[..., torch.Tensor], **parts: object) -> Net:
        return Net(function, **parts).double()

    tied = of(lambda self, x: self.b(torch.tanh(self.a(x))), a=linear(), b=linear())
    tied.b.weight = tied.a.weight
    optional = of(lambda self, x: x.sin() if self.shift is None else (x + self.shift).sin() * self.shift)
    optional.register_buffer("shift", None)
    inner = of(lambda self, x: self.a(x) + x, a=linear())
    statistics = of(lambda self, x: self.norm(x), norm=nn.BatchNorm1d(4).eval())
    replaced = of(lambda self, x: self.a(x).tanh(), a=linear())
    spread = nn.Sequential(linear(), nn.ReLU(), linear())
    return {
        "untied": (tied, lambda m: setattr(m.b, "weight", nn.Parameter(m.a.weight.detach() * 2))),
        "tied": (
            of(lambda self, x: self.b(torch.tanh(self.a(x))), a=linear(), b=linear()),
            lambda m: setattr(m.b, "weight", m.a.weight),
        ),
        "a buffer appears": (optional, lambda m: setattr(m, "shift", torch.arange(4.0).double())),
        "a forward hook": (inner, lambda m: m.a.register_forward_hook(lambda _m, _i, output: output * 3)),
        "statistics vanish": (statistics, lambda m: m.norm.running_var.mul_(4)),
        "a layer of another kind": (replaced, lambda m: setattr(m, "a", nn.Sequential(linear(), nn.ReLU()))),
        "a layer more": (spread, lambda m: m.append(nn.Tanh())),
        "frozen": (
            of(lambda self, x: self.a(x).tanh(), a=linear()),
            lambda m: m.requires_grad_(False),
        ),
        "thawed": (
            of(lambda self, x: self.a(x).tanh(), a=linear()).requires_grad_(False),
            lambda m: m.requires_grad_(),
        ),
        "pruned": (nn.Sequential(linear(), nn.Tanh(), linear()), lambda m: prune.l1_unstructured(m[0], "weight", 0.5)),
        "a mask loosened": (
            prune.l1_unstructured(linear(), "weight", 0.5),
            lambda m: m.weight_mask.data.fill_(1),
        ),
    }


@pytest.mark.parametrize("name", structures())
def test_structure_that_changes(name: str) -> None:
    torch.manual_seed(2)
    watch_change(*structures()[name]).check(samples(5))


def test_statistics_that_vanish_couple_the_samples() -> None:
    module = nn.BatchNorm1d(4).double().eval()
    jacsparse.jacobian(module, samples())
    module.running_var = module.running_mean = None
    for use in (jacsparse.jacobian, jacsparse.verify):
        with pytest.raises(UnsupportedOperatorError, match="without running statistics couples the samples of a batch"):
            use(module, samples())


# Derivatives that are not the operators'.


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class Viewed(Reversed):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)


class Clamped(torch.autograd.Function):
    """Differs from its operators only far from zero."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-4, 4)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Nearly(torch.autograd.Function):
    """Differs from its operators by a share of 1e-7."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * (1 + 1e-7)


def halved(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda gradient: gradient / 2)
    return y.tanh()


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reversal": lambda x: Reversed.apply(x) * 2,
    "reversal of a view": lambda x: Viewed.apply(x) * 2,
    "reversal last": lambda x: Reversed.apply(x.sin()),
    "clamp": lambda x: Clamped.apply(x) * 2,
    "nearly": lambda x: Nearly.apply(x) * 2,
    "in place behind": lambda x: Reversed.apply(x).mul_(3),
    "hook": halved,
}


@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_derivatives_that_are_not_the_operators(name: str, dropping: bool) -> None:
    function = OTHERS[name]
    module = Net(lambda self, x: self.drop(function(self.a(x))), a=linear(), drop=nn.Dropout(0.3).train(dropping))
    if name == "hook":
        for use in (jacsparse.jacobian, jacsparse.verify, lambda m, x: jacsparse.jacobian_pattern(m, (4,))):
            with pytest.raises(UnsupportedOperatorError, match="a backward hook"):
                use(module, samples())
    elif not dropping:
        watch_change(module, lambda m: m.a.weight.data.neg_())
    scan, x = Watched(module).scans[1], samples(2)
    with undone(module):
        _, expected = gradients(module, module, x)
    try:
        _, results = gradients(scan, module, x)
    except (UnsupportedOperatorError, RuntimeError) as error:
        assert name == "hook" and "a backward hook" in str(error)
    else:
        assert all(torch.allclose(one, other, rtol=1e-10) for one, other in zip(results, expected, strict=True))


STRAIGHT: dict[str, Callable[..., torch.Tensor]] = {
    "straight-through": lambda self, x: (y := self.a(x)) + (y.round() - y).detach(),
    "no gradient": lambda self, x: self.a(x) * without_gradient(x),
    "of data": lambda self, x: self.a(x) * x.data.sin(),
    "residual in place": lambda self, x: functional.relu(self.a(x), inplace=True) + x,
    "in place on the residual": lambda self, x: (y := self.a(x), z := y * 2, functional.relu(z, inplace=True) + y)[-1],
    "unregistered": lambda self, x: self.a(x) * self.loose,
    "a leaf of its own": lambda self, x: self.a(x) * x.detach().requires_grad_().sin(),
    "gradient inside": lambda self, x: self.a(x) * inner_gradient(x),
    "written without a gradient": lambda self, x: written(self.a(x)),
}


def without_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.exp()


def written(y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y.clamp_(-0.5, 0.5)
    return y * 2


def inner_gradient(x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(leaf.sin().sum(), leaf)
    return gradient


@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize("name", STRAIGHT)
def test_what_autograd_takes_for_a_constant(name: str, dropping: bool) -> None:
    function = STRAIGHT[name]
    module = Net(lambda self, x: self.drop(function(self, x)), a=linear(), drop=nn.Dropout(0.3).train(dropping))
    module.loose = torch.arange(4.0).double()
    Watched(module).check(samples())


# Samples that are mixed.

MIXED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "roll": lambda x: x.roll(2, 0),
    "roll by one": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(0),
    "convolution over the batch": lambda x: functional.conv1d(
        x.t()[:, None], torch.ones(1, 1, 5, dtype=x.dtype), padding=2, dilation=1
    )[:, 0].t(),
    "the next but one": lambda x: functional.conv1d(
        x.t()[:, None], torch.tensor([[[1.0, 0, 0, 0, 1]]], dtype=x.dtype), padding=2
    )[:, 0].t(),
    "the first two": lambda x: x[:2].mean(0, keepdim=True) + x,
    "cut": lambda x: x[:2],
    "padded": lambda x: functional.pad(x, (0, 0, 1, 1)),
    "mean": lambda x: x - x.mean(0),
    "running": lambda x: x.cumsum(0),
    "sorted": lambda x: x.sort(0)[0],
    "attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "gram": lambda x: x @ x.t(),
    "softmax": lambda x: x.softmax(0),
    "gathered": lambda x: x[torch.tensor([0, 0, 1, 3, 4])],
    "tensor": lambda x: x.gather(0, torch.tensor([[1, 0, 0, 2]]).expand(5, 4)),
    "merged": lambda x: functional.layer_norm(x.reshape(-1), (20,)).view(5, 4),
    "norm": lambda x: x / x.norm(),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_samples(name: str) -> None:
    module = Net(lambda self, x: MIXED[name](x) * 2)
    scan, refused = jacsparse.nn.Scan(module, schedule="blelloch"), [jacsparse.jacobian, jacsparse.verify]
    if name in ("cut", "padded"):
        refused.append(lambda _, x: scan(x.requires_grad_()))
    else:
        # A scan has a stage that couples them.
        x = samples(5).requires_grad_()
        actual, expected = (torch.autograd.grad(each(x).sin().sum(), x)[0] for each in (scan, module))
        assert torch.allclose(actual, expected, rtol=1e-12, atol=1e-12)
    for use in refused:
        with pytest.raises(
            UnsupportedOperatorError, match=r"mixes the samples|does not have them along its first axis"
        ):
            use(module, samples(5))


# Masks.


@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 4), (1,), ()])
def test_masks_that_broadcast(shape: tuple[int, ...]) -> None:
    mask = (torch.arange(max(1, int(np.prod(shape)))) % 2 == 0).double().reshape(shape)
    module = Net(lambda self, x: functional.linear(x, self.weight * self.weight_mask).tanh())
    module.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    module.register_buffer("weight_mask", mask)
    Watched(module).check(samples())
    expected = (torch.ones(4, 4) * mask != 0).sum().item()
    assert jacsparse.jacobian_pattern(module, (4,)).nnz == expected


def test_a_mask_of_a_convolution_that_broadcasts() -> None:
    module = nn.Conv2d(1, 4, 3).double()
    weight = module.weight
    del module.weight
    module.register_parameter("weight_orig", nn.Parameter(weight.detach()))
    module.register_buffer("weight_mask", torch.tensor([[[[1.0, 0, 1], [0, 1, 0], [1, 1, 1]]]]).double())
    module.register_forward_pre_hook(lambda m, _: setattr(m, "weight", m.weight_orig * m.weight_mask))
    module.weight = None
    del module.weight
    x = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    actual = jacsparse.jacobian(module, x)
    assert torch.allclose(actual.todense(0), expected_jacobian(module, x)[0])
    assert actual.pattern.nnz == 4 * 4 * 6


# Containers of one's own.


class Backwards(nn.Sequential):
    def __iter__(self) -> Iterator[nn.Module]:
        return iter(list(self._modules.values())[::-1])


def test_a_sequential_with_an_order_of_its_own() -> None:
    torch.manual_seed(3)
    watch_change(Backwards(linear(), nn.Tanh(), linear(), nn.ReLU()), lambda m: m.append(nn.Tanh()))


# Tensors that are written to.


def built(self: Net, x: torch.Tensor) -> torch.Tensor:
    weight = torch.zeros(4, 4, dtype=x.dtype)
    weight[0, 0], weight[1] = self.p.cos(), self.q
    return torch.tanh(self.a(x) @ weight) * weight[1]


def written_copy(self: Net, x: torch.Tensor) -> torch.Tensor:
    weight = torch.ones_like(self.q).repeat(4, 1)
    row = weight[2]
    row.mul_(self.p)
    return torch.tanh(self.a(x) @ weight)


def through_detached(self: Net, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    y.detach().mul_(3)
    return torch.tanh(self.b(y))


def through_a_detached_part(self: Net, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    y.detach()[:, 0] = x.detach()[:, 1]
    y.data[:, 1] = 0
    return torch.tanh(self.b(y))


def input_into_a_constant(self: Net, x: torch.Tensor) -> torch.Tensor:
    scale = self.q * torch.ones(len(x), 1, dtype=x.dtype)
    scale.detach()[:, 0] = x[:, 0]
    return self.a(x) * scale


def broadcast_product(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.a(x) * 1.5
    h.mul_(self.a(x).relu().sum(1, keepdim=True))
    h.div_(x.norm(dim=1, keepdim=True) + 1)
    return self.b(h)


def scaled_sum(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.a(x) * 1.5
    h.add_(x.mean(1, keepdim=True), alpha=2)
    return self.b(h.addcmul_(x, self.a(x)))


def product_of_views(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.a(x) * 2
    h[:, :2].mul_(h[:, 2:].clone())
    return self.b(h).tanh()


def new_shape(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.a(x) + 1
    other = h * 2
    h.unsqueeze_(1)
    return torch.tanh(h.transpose_(1, 2).squeeze_(2) + other)


def detached_trunk(self: Net, x: torch.Tensor) -> torch.Tensor:
    trunk = x.detach()
    for _ in range(30):
        trunk = trunk + self.b(trunk).tanh() * 0.1
    return self.a(x) * trunk


def parts(self: Net, x: torch.Tensor) -> torch.Tensor:
    return functional.soft_margin_loss(self.a(x), self.b(x).detach().sign(), reduction="none").tanh()


def counted(self: Net, x: torch.Tensor) -> torch.Tensor:
    self.steps.mul_(2)
    return torch.tanh(self.a(x) * self.steps)


WRITES = [built, written_copy, through_detached, through_a_detached_part, input_into_a_constant, broadcast_product]
WRITES += [scaled_sum, product_of_views, new_shape, detached_trunk, parts]


@pytest.mark.parametrize("function", WRITES)
def test_tensors_that_are_written_to(function: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(4)
    p, q = torch.tensor(0.3).double(), torch.randn(4).double()
    module = Net(function, a=linear(), b=linear(), p=nn.Parameter(p), q=nn.Parameter(q))
    watched = Watched(module)
    watched.check(samples())
    watched.check(samples(1))


def test_a_buffer_that_the_forward_changes() -> None:
    module = Net(counted, a=linear())
    module.register_buffer("steps", torch.ones(4, dtype=torch.float64))
    module(samples())
    for power in (4.0, 8.0):
        x = samples().requires_grad_()
        y = jacsparse.nn.Scan(module, schedule="blelloch")(x)
        y.sum().backward()
        assert bool((module.steps == power).all())
        assert torch.equal(y, torch.tanh(module.a(x) * power))
        (expected,) = torch.autograd.grad(torch.tanh(module.a(x) * power).sum(), x)
        assert torch.allclose(x.grad, expected)


def test_what_is_overwritten_after_its_use() -> None:
    def function(self: Net, x: torch.Tensor) -> torch.Tensor:
        index = torch.tensor([0, 1, 1, 3])
        y = x[:, index] * self.factor
        index.add_(-1)
        self.factor.mul_(2)
        return y.sin()

    module, factor = Net(function), torch.arange(4.0).double()
    x = samples()
    expected = (x[:, [0, 1, 1, 3]] * factor).cos() * factor
    for _ in range(3):
        module.register_buffer("factor", factor.clone())
        actual = jacsparse.jacobian(module, x).T
        assert torch.allclose(torch.stack([actual.todense(n).sum(0) for n in range(len(x))]), expected)


REFUSED_WRITES: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "from before the call": (
        lambda self, x: (self.outside.mul_(self.p), x * self.outside)[1],
        "a tensor that has a gradient from before the call is written to",
    ),
    "several at once": (
        lambda self, x: (y := self.a(x), z := x * 2, torch._foreach_mul_([y, z], 5.0), y * z)[-1],
        "is not the derivative of aten._foreach_mul",
    ),
}


@pytest.mark.parametrize("name", REFUSED_WRITES)
def test_writes_that_are_refused(name: str) -> None:
    function, message = REFUSED_WRITES[name]
    module = Net(function, a=linear(), p=nn.Parameter(torch.tensor(0.3).double()))
    module.register_buffer("factor", torch.arange(4.0).double())
    module.outside = module.p * torch.ones(4).double()
    with pytest.raises((UnsupportedOperatorError, RuntimeError), match=message):
        jacsparse.jacobian(module, samples())


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 7


def test_a_function_that_writes_in_place() -> None:
    module = Net(lambda self, x: torch.tanh(InPlace.apply(self.a(x))), a=linear())
    watch_change(module, lambda m: m.a.weight.data.neg_())


# Hooks that only autograd knows of.


def hooked_node(self: Net, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(self.a(x))
    if y.requires_grad:
        node = y.grad_fn
        (node.register_hook if self.after else node.register_prehook)(lambda *g: tuple(10 * each for each in g[0]))
    return torch.tanh(self.b(y))


@pytest.mark.parametrize("after", [False, True])
def test_hooks_of_nodes(after: bool) -> None:
    module = Net(hooked_node, a=linear(), b=linear(), after=after)
    with pytest.raises(UnsupportedOperatorError, match="a node of autograd's graph"):
        jacsparse.jacobian(module, samples())
    for schedule in SCHEDULES:
        obeyed_or_refused(module, schedule)


def obeyed_or_refused(module: nn.Module, schedule: str) -> None:
    _, expected = gradients(module, module, samples())
    expected = [gradient.clone() for gradient in expected]
    try:
        _, results = gradients(jacsparse.nn.Scan(module, schedule=schedule), module, samples())
    except RuntimeError as error:
        assert "a backward hook" in str(error)
    else:
        assert all(torch.allclose(one, other, rtol=1e-10) for one, other in zip(results, expected, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["module", "tensor", "none"])
def test_hooks_of_parameters_beside_others(kind: str, schedule: str) -> None:
    middle = Net(lambda self, x: halved(x)) if kind == "tensor" else nn.Tanh()
    module = nn.Sequential(linear(), middle, linear(), nn.Tanh(), linear())
    if kind == "module":
        middle.register_full_backward_hook(lambda _m, leaf, _o: (leaf[0] * 10,))
    module[0].weight.register_hook(lambda gradient: gradient * 3)
    obeyed_or_refused(module, schedule)


def test_a_hook_of_a_parameter_that_leads_nowhere() -> None:
    module = Net(lambda self, x: (x @ self.unused, x.sin())[1], unused=nn.Parameter(torch.ones(4, 4).double()))
    module.unused.register_hook(lambda gradient: gradient * 2)
    Watched(module).check(samples())
    assert module.unused.grad is None


# Rules that come later.


@pytest.fixture
def _without_new_rules() -> Iterator[None]:
    """Remove the rules that a test registers: other tests look at all rules."""
    rules = dict(RULES)
    yield
    RULES.clear()
    RULES.update(rules)


@pytest.mark.usefixtures("_without_new_rules")
def test_a_rule_that_is_registered_after_a_refusal() -> None:
    @torch.library.custom_op("tests::taken", mutates_args=())
    def taken(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[:, index].clone()

    taken.register_autograd(
        lambda ctx, g: (torch.zeros(len(g), 4, dtype=g.dtype).index_add_(1, ctx.index, g), None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "index", inputs[1]),
    )

    def pattern(call: jacsparse.Call) -> jacsparse.Pattern:
        matrix = np.zeros((call.out_size, call.in_size))
        matrix[np.arange(call.out_size), call["index"].numpy()] = 1
        return jacsparse.Pattern.from_scipy(scipy.sparse.csr_array(matrix))

    module = Net(lambda self, x: torch.ops.tests.taken(x, self.index).sin())
    module.register_buffer("index", torch.tensor([0, 2]))
    with pytest.raises(UnsupportedOperatorError, match=r"operator tests\.taken has no rule"):
        jacsparse.jacobian(module, samples())
    jacsparse.register_rule("tests.taken", pattern=pattern)
    watch_change(module, lambda m: m.index.add_(1))


# Slices of a batch, and a module that is given to the scan later.

PER_SAMPLE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gather": lambda x, index: x.gather(1, index),
    "index": lambda x, index: x[torch.arange(len(x))[:, None], index],
    "scatter": lambda x, index: x.new_zeros(len(x), 5).scatter(1, index.argsort(1) + 1, x)[:, :4],
    "factor": lambda x, index: x * index,
    "mask": lambda x, index: x.masked_fill(index > 1, 0),
    "sort": lambda x, index: x.sort(1)[0],
}


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_slices_of_what_differs_by_sample(name: str) -> None:
    torch.manual_seed(5)
    index = torch.randint(0, 4, (24, 4))
    module = Net(lambda self, x: self.b(PER_SAMPLE[name](torch.tanh(self.a(x)), index)), a=linear(), b=linear())
    _, expected = gradients(module, module, samples(24))
    expected = [gradient.clone() for gradient in expected]
    for limit in (1, 4000):
        scan = jacsparse.nn.Scan(module, schedule="blelloch", memory_limit=limit)
        _, results = gradients(scan, module, samples(24))
        assert all(
            torch.allclose(one, other, rtol=1e-9, atol=1e-11) for one, other in zip(results, expected, strict=True)
        )


def test_a_scan_that_is_given_another_module() -> None:
    scan = jacsparse.nn.Scan(linear(), schedule="linear")
    scan(samples().requires_grad_())
    scan.module = nn.Sequential(linear(), nn.Tanh())
    assert torch.equal(scan(samples().requires_grad_()), scan.module(samples()))


def test_strides_decide_what_as_strided_reads() -> None:
    module = Net(lambda self, x: x.as_strided((2, 3, 3), (9, 3, 1)) * 2)
    jacsparse.jacobian(module, samples(2, 3, 3))
    with pytest.raises(UnsupportedOperatorError, match="as_strided"):
        jacsparse.jacobian(module, samples(2, 3, 3).transpose(1, 2))


def test_threads_share_a_scan() -> None:
    module = nn.Sequential(linear(), nn.Tanh(), linear())
    scan = jacsparse.nn.Scan(module, schedule="blelloch")

    def run(batch: int) -> bool:
        (gradient,) = torch.autograd.grad(scan(x := samples(batch).requires_grad_()).sum(), x)
        (expected,) = torch.autograd.grad(module(x).sum(), x)
        return torch.allclose(gradient, expected)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, [*range(1, 13)] * 4))


# Identities that meet are no identity.


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: x + x,
        lambda self, x: x + x + x,
        lambda self, x: x + 1 + x,
        lambda self, x: x - x.detach() + x,
        lambda self, x: x.clone().add_(x),
        lambda self, x: x.view(-1, 2, 2).flatten(1) + x,
        lambda self, x: x + functional.dropout(x, 0.5, training=False),
        lambda self, x: torch.add(x, x, alpha=1),
    ],
)
def test_sums_of_the_input_with_itself(function: Callable[..., torch.Tensor]) -> None:
    Watched(Net(function)).check(samples())


# What leads from input to output and is no operator that was seen.


class ByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.from_numpy(x.detach().numpy() ** 2 * weight.detach().numpy())

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return 2 * x * weight * gradient, x.square() * gradient


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda self, x: torch.normal(x, 0.1), "aten.normal has no rule"),
        (
            lambda self, x: x + jacsparse.linear_recurrence(Diagonal(x.new_ones(4, 1, 1)), x.T[:, :, None])[:, :, 0].T,
            "_Recurrence is a torch.autograd.Function",
        ),
    ],
)
def test_what_no_operator_shows_is_refused(function: Callable[..., torch.Tensor], message: str) -> None:
    module = Net(function, weight=nn.Parameter(torch.ones(4).double()))
    for ask in (jacsparse.jacobian, lambda m, x: jacsparse.nn.Scan(m, schedule="linear")(x.requires_grad_())):
        with pytest.raises(UnsupportedOperatorError, match=message):
            ask(module, samples())


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: x + ByNumpy.apply(x, self.weight),
        lambda self, x: x + (2 * ByNumpy.apply(x.tanh(), self.weight)).sin(),
        lambda self, x: ByNumpy.apply(x, self.weight),
    ],
)
def test_functions_whose_results_no_operator_computes(function: Callable[..., torch.Tensor]) -> None:
    watch_change(Net(function, weight=nn.Parameter(torch.ones(4).double())), lambda m: m.weight.data.neg_())


def test_functions_of_weights_alone() -> None:
    module = Net(
        lambda self, x: functional.linear(x, 2 * Rounded.apply(self.weight)), weight=nn.Parameter(linear().weight.data)
    )
    watch_change(module, lambda m: m.weight.data.neg_())


def test_rows_of_a_table_that_depends_on_the_input() -> None:
    rows = torch.tensor([[1, 1, 0]])
    module = Net(lambda self, x: functional.embedding(rows, x.view(2, 2), **self.options).flatten(1), options={})
    Watched(module).check(samples(1))
    for options in ({"padding_idx": 1}, {"scale_grad_by_freq": True}):
        module.options = options
        with pytest.raises(UnsupportedOperatorError, match="is not its derivative; leave them out"):
            jacsparse.jacobian(module, samples(1))


# What is returned stays as it is, and what is asked leaves the module as it was.


@pytest.mark.parametrize("pruned", [True, False])
def test_what_is_returned_is_the_callers(pruned: bool) -> None:
    matrix = linear().weight.detach()
    modules = [
        linear(),
        nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False).double()),
        Net(lambda self, x: x @ self.matrix.T, matrix=matrix),
        Net(lambda self, x: x * x.detach()),
    ]
    for module in modules:
        x = samples()
        actual = jacsparse.jacobian(module, x, pruned=pruned)
        before = actual.values.clone()
        tensors = [x, matrix, *module.parameters()]
        copies = [tensor.detach().clone() for tensor in tensors]
        actual.values.mul_(2)
        assert all(torch.equal(one, other) for one, other in zip(tensors, copies, strict=True))
        for tensor in tensors:
            tensor.data.mul_(3)
        assert torch.equal(actual.values, 2 * before)


class Drifting(nn.Linear):
    """It draws a mask of its own weights, from when it is told to."""

    drifts = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.drifts:
            self.weight_mask.copy_(1 - self.weight_mask)
        return super().forward(self.norm(x))


class Counting(nn.BatchNorm1d):
    """It counts its batches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_batches_tracked.add_(1)
        return x


def test_masks_that_a_forward_pass_writes_to() -> None:
    module = prune.random_unstructured(Drifting(4, 4).double(), "weight", 0.5)
    # Its statistics come behind the mask.
    module.norm = Counting(4).double()
    before = module.weight_mask.clone()
    module.drifts = True
    jacsparse.jacobian(module, samples())
    assert torch.equal(module.weight_mask, before)
    module.drifts = False
    jacsparse.jacobian(module, samples())
    module.drifts = True
    with pytest.raises(RuntimeError, match=r"Drifting.weight_mask: a forward pass has written to this mask of pruning"):
        jacsparse.jacobian(module, samples())
    assert module.norm.num_batches_tracked == 0
    before = module.weight_mask.clone()
    jacsparse.jacobian(module, samples())
    assert torch.equal(module.weight_mask, before)


@pytest.mark.parametrize("masked", [False, True])
def test_patterns_of_weights_that_are_written_after_use(masked: bool) -> None:
    def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
        self.copies.copy_(self.start)
        weight = self.matrix * self.copies if masked else self.copies
        y = functional.linear(x, weight)
        self.copies.zero_()
        return y

    module = Net(forward, matrix=nn.Parameter(linear().weight.data), start=torch.ones(4, 4).double())
    module.register_buffer("copies", torch.ones(4, 4).double())
    assert jacsparse.jacobian_pattern(module, (4,)).nnz == 16


# Operators that write to what they are given, numbers without axes, layers without units.


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: x.sin().cumsum_(1).tanh(),
        lambda self, x: x.sin().cumprod_(1).tanh(),
        lambda self, x: torch.full(x.shape, 0.5, dtype=x.dtype).sub_(x).tanh(),
        lambda self, x: x.sin().sub_(x.cos()).tanh(),
        lambda self, x: functional.hinge_embedding_loss(x, -torch.ones_like(x), reduction="none"),
        lambda self, x: functional.linear(functional.linear(x.tanh(), x.new_ones(0, 4)), x.new_ones(3, 0)) + x[:, :3],
    ],
)
def test_what_is_overwritten(function: Callable[..., torch.Tensor], batch: int) -> None:
    Watched(Net(function)).check(samples(batch))


@pytest.mark.parametrize("name", ["max", "amax", "prod", "median", "norm", "sum"])
def test_numbers_without_axes(name: str) -> None:
    Watched(Net(lambda self, x: getattr(x.squeeze().sum(), name)().view(1, 1) * x)).check(samples(1))


def test_no_output_at_all() -> None:
    actual = jacsparse.jacobian(nn.Linear(4, 0).double(), samples())
    assert actual.shape == (0, 4) and actual.pattern.nnz == 0


def test_other_results_of_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(RULES["aten.native_group_norm"]), "all_results", False)
    module = Net(lambda self, x: torch.native_group_norm(x.view(-1, 4, 1), None, None, len(x), 4, 1, 2, 1e-5)[1])
    with pytest.raises(UnsupportedOperatorError, match="is of its first result alone"):
        jacsparse.jacobian(module, samples())


def test_what_torch_compile_was_given() -> None:
    module = nn.Sequential(linear(), nn.Tanh())
    compiled = torch.compile(module, backend="eager")
    for _ in range(2):
        Watched(module).check(samples())
        expected = jacsparse.jacobian(module, samples())
        # Later calls may go another way than first ones, with other roundings.
        torch.testing.assert_close(jacsparse.jacobian(compiled, samples()).values, expected.values, rtol=1e-12, atol=0)
        compiled(samples())
    assert jacsparse.jacobian_pattern(compiled, (4,)) == expected.pattern


def test_what_is_no_plain_tensor() -> None:
    class Own(torch.Tensor):
        pass

    module = nn.Tanh()
    with pytest.raises(TypeError, match=r"nn\.Scan is called within a transform of torch\.func, grad, vjp"):
        torch.func.grad(lambda x: jacsparse.nn.Scan(module, schedule="linear")(x).sum())(samples())
    with pytest.raises(TypeError, match=r"x is an Own; expected a plain tensor: x.as_subclass\(torch.Tensor\)"):
        jacsparse.jacobian(module, samples().as_subclass(Own))


@pytest.mark.parametrize(
    "module, remedy",
    [
        (
            Net(lambda self, x: checkpoint(torch.sin, x, use_reentrant=True)),
            "CheckpointFunction is .*; pass use_reentrant=False",
        ),
        (nn.BatchNorm1d(4, track_running_stats=False).double().eval(), "without running .* track_running_stats=True"),
        (nn.BatchNorm1d(4).double(), r"in training mode .* call .eval\(\)"),
    ],
)
def test_remedies(module: nn.Module, remedy: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=remedy):
        jacsparse.jacobian(module, samples())


def view_of_what_is_written_to(x: torch.Tensor) -> torch.Tensor:
    view = x[:, :2]
    x.mul_(3)
    return view * view


def test_a_view_of_what_is_written_to() -> None:
    module, x = Net(lambda self, x: view_of_what_is_written_to(x * 2)), samples()
    expected = torch.autograd.functional.jacobian(lambda x: module(x).sum(0), x).movedim(1, 0)
    assert torch.allclose(jacsparse.jacobian(module, x).todense(0), expected[0])


def test_integers() -> None:
    with pytest.raises(TypeError, match=r"expected float32 or float64: convert .*, what their embedding makes of them"):
        jacsparse.jacobian(nn.Embedding(4, 3), torch.ones(2, 1, dtype=torch.int64))


def test_a_solution_that_is_overwritten_after_its_use() -> None:
    # Its derivative is that of other operators, which do not compute the solution.
    matrix = linear().weight.detach()[:3, :3] + 3 * torch.eye(3).double()

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.linalg.solve(matrix + torch.diag_embed(x), torch.ones(3).double())
        z = y.sin()
        y.mul_(2)
        return z

    x = torch.randn(2, 3).double()
    expected = torch.autograd.functional.jacobian(
        lambda x: torch.linalg.solve(matrix + torch.diag(x), torch.ones(3).double()).sin(), x[0]
    )
    for _ in range(3):
        assert torch.allclose(jacsparse.jacobian(function, x, batched=True).todense(0), expected)


@pytest.mark.parametrize("part", [lambda y: y.data[:, :2], lambda y: torch.unsafe_split(y, 2, 1)[0]])
def test_writes_through_views_that_do_not_tell(part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y * y
        with torch.no_grad():
            part(y).mul_(3)
        return z

    x = torch.randn(2, 4).double()
    for _ in range(3):
        assert torch.allclose(jacsparse.jacobian(function, x, batched=True).values, 8 * x.T)


def test_sizes_of_what_is_read_may_change() -> None:
    def function(self: Net, x: torch.Tensor) -> torch.Tensor:
        # The first call that reads the buffer gives as many rows as it has elements that are not zero.
        return (2.0 * x).sin() * len(torch.nonzero(self.buffer)) * 3.0

    module, x = Net(function), samples()
    for buffer in ([1, 0, 2, 0], [1, 0, 2, 0], [1, 1, 2, 0], [1, 1, 2, 3], [0, 0, 0, 0], [1, 1, 2, 0]):
        module.register_buffer("buffer", torch.tensor(buffer).double())
        count = sum(number != 0 for number in buffer)
        assert torch.allclose(jacsparse.jacobian(module, x).values, (6 * count * (2 * x).cos()).T)
