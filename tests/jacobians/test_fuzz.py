"""Random graphs of operators, changed between calls in every way we could think of: right, or refused, each time."""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune

import jacsparse
from jacsparse import UnsupportedOperatorError

FULL = os.environ.get("JACSPARSE_TESTS") == "full"
#: Graphs, each with several changes; in as many tests as may run side by side.
CASES, TESTS = (10_000, 50) if FULL else (90, 3)
SIZE = 6
OUTSIDE = {"scale": 1.5, "shift": 1}

Step = Callable[["Graph", torch.Tensor, torch.Tensor], torch.Tensor]


def pair(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(1, (2, 3))


def fit(x: torch.Tensor) -> torch.Tensor:
    """As many elements a sample as all tensors of a graph have."""
    x = x.flatten(1)
    return functional.pad(x, (0, max(0, SIZE - x.shape[1])))[:, :SIZE]


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def assigned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    out[:, ::2] = x[:, 1::2]
    out[:, 1] += y[:, 0]
    return out + x


def viewed(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.view(-1, 2, 3)[:, 1].mul_(3)
    return y.sin()


def built(g: Graph, x: torch.Tensor) -> torch.Tensor:
    weight = torch.zeros(SIZE, SIZE, dtype=x.dtype)
    weight[1], weight[:, 2] = g.row, g.square[0].sin()
    weight.view(-1)[:SIZE].mul_(g.row)
    return x @ weight + weight[1]


def through_detached(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * 1.5
    z.detach()[:, :2].mul_(2)
    z.data[:, 3] = y.detach()[:, 0]
    return z.sin()


def product_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x.tanh() * 1.5
    z.mul_(y.mean(1, keepdim=True))
    z[:, 1:3].div_(y[:, :2].square() + 1)
    return z.addcmul_(x, y, value=0.5)


def new_shape(x: torch.Tensor) -> torch.Tensor:
    z = x + 1
    y = z * 2
    return fit(z.unsqueeze_(1).transpose_(1, 2)).sin() + y


def loop(g: Graph, x: torch.Tensor) -> torch.Tensor:
    h = x.new_zeros(x.shape[0], 3)
    for step in pair(x).unbind(1):
        h = torch.tanh(step + h @ g.square[:3, :3])
    return fit(h)


def hooked(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 1.001)
    return y


def hooked_node(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    if y.requires_grad:
        y.grad_fn.register_prehook(lambda gradients: tuple(None if g is None else g * 1.001 for g in gradients))
    return y


def quiet(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.cos()


# Of a graph, a tensor and another tensor of it.
PLAIN: dict[str, Step] = {
    **{
        function.__name__: (lambda g, x, y, function=function: function(x))
        for function in (torch.sin, torch.tanh, torch.sigmoid, torch.atan, torch.abs, torch.relu)
    },
    "gelu": lambda g, x, y: functional.gelu(x),
    "silu": lambda g, x, y: functional.silu(x),
    "clamp": lambda g, x, y: x.clamp(-0.7, 0.6),
    "square": lambda g, x, y: x.square() * 0.3,
    "round": lambda g, x, y: x + x.round(),
    "add": lambda g, x, y: x + y,
    "sub": lambda g, x, y: torch.sub(x, y, alpha=0.5),
    "mul": lambda g, x, y: x * y,
    "same": lambda g, x, y: x * x,
    "div": lambda g, x, y: x / (y.square() + 1),
    "maximum": lambda g, x, y: torch.maximum(x, y),
    "where": lambda g, x, y: torch.where(x > y, x, y * 2),
    "masked": lambda g, x, y: x.masked_fill(g.mask, 0.5),
    "lerp": lambda g, x, y: torch.lerp(x, y, 0.3),
    "broadcast": lambda g, x, y: x * y.mean(1, keepdim=True),
    "linear": lambda g, x, y: g.linear(x),
    "functional linear": lambda g, x, y: functional.linear(x, g.square, g.row),
    "rows": lambda g, x, y: fit(functional.linear(pair(x), g.square[:3, :3])),
    "matmul": lambda g, x, y: fit(pair(x) @ pair(y).transpose(1, 2)),
    "einsum": lambda g, x, y: fit(torch.einsum("bij,kj->bki", pair(x), g.square[:4, :3])),
    "outer": lambda g, x, y: fit(x[:, :2, None] * y[:, None, :3]),
    "conv": lambda g, x, y: fit(g.conv(pair(x))),
    "conv strided": lambda g, x, y: fit(functional.conv1d(x[:, None], g.square[:2, None, :2], stride=2)),
    "batch norm": lambda g, x, y: g.norm(x),
    "layer norm": lambda g, x, y: functional.layer_norm(x, (SIZE,), g.row),
    "group norm": lambda g, x, y: fit(functional.group_norm(pair(x), 2)),
    "instance norm": lambda g, x, y: fit(functional.instance_norm(pair(x), weight=g.row[:2])),
    "softmax": lambda g, x, y: x.softmax(1),
    "log softmax": lambda g, x, y: fit(pair(x).log_softmax(2)),
    "attention": lambda g, x, y: fit(
        functional.scaled_dot_product_attention(pair(x)[:, None], pair(y)[:, None], pair(x)[:, None])
    ),
    "max pool": lambda g, x, y: fit(functional.max_pool1d(pair(x), 2, 1)),
    "avg pool": lambda g, x, y: fit(functional.avg_pool1d(pair(x), 2, 1)),
    "adaptive": lambda g, x, y: fit(functional.adaptive_max_pool1d(pair(x), 2)),
    "upsample": lambda g, x, y: fit(functional.interpolate(pair(x), scale_factor=1.5, mode="linear")),
    "unpool": lambda g, x, y: fit(
        functional.max_unpool1d(*functional.max_pool1d(x[:, None], 2, return_indices=True), 2)
    ),
    "cumsum": lambda g, x, y: x.cumsum(1) * 0.3,
    "cumprod": lambda g, x, y: x.tanh().cumprod(1),
    "logcumsumexp": lambda g, x, y: x.logcumsumexp(1),
    "sort": lambda g, x, y: x.sort(1)[0],
    "topk": lambda g, x, y: fit(x.topk(3, 1)[0]),
    "kthvalue": lambda g, x, y: x + x.kthvalue(2, 1, keepdim=True)[0],
    "amax": lambda g, x, y: x - x.amax(1, keepdim=True),
    "logsumexp": lambda g, x, y: x - x.logsumexp(1, keepdim=True),
    "norm": lambda g, x, y: functional.normalize(x + 2, dim=1),
    "var": lambda g, x, y: x * x.var(1, keepdim=True),
    "sum": lambda g, x, y: fit(pair(x).sum(2)),
    "flip": lambda g, x, y: x.flip(1),
    "roll": lambda g, x, y: x.roll(2, 1),
    "permute": lambda g, x, y: fit(pair(x).permute(0, 2, 1)),
    "transposed": lambda g, x, y: (x.t() * g.row[:, None]).t(),
    "frames": lambda g, x, y: pair(x).flatten(0, 1).cumsum(1).unflatten(0, (-1, 2)).flatten(1),
    "minor frames": lambda g, x, y: fit(
        pair(x).transpose(0, 1).flatten(0, 1).softmax(1).unflatten(0, (2, -1)).transpose(0, 1)
    ),
    "cat": lambda g, x, y: torch.cat([x[:, :2], y[:, 2:]], 1),
    "stack": lambda g, x, y: fit(torch.stack([x[:, :3], y[:, :3]], 2)),
    "split": lambda g, x, y: torch.cat(x.split(2, 1)[::-1], 1),
    "unbind": lambda g, x, y: torch.stack(x.unbind(1)[::-1], 1),
    "pad": lambda g, x, y: functional.pad(x, (1, -1), value=2.0),
    "index": lambda g, x, y: x[:, g.index],
    "gather": lambda g, x, y: x.gather(1, g.index.expand(x.shape[0], -1)),
    "index select": lambda g, x, y: x.index_select(1, g.index),
    "scatter": lambda g, x, y: torch.scatter(x, 1, g.index[:2].expand(x.shape[0], -1), y[:, :2]),
    "scatter add": lambda g, x, y: x.scatter_add(1, g.index.expand(x.shape[0], -1), y),
    "index put": lambda g, x, y: x.index_put((torch.arange(x.shape[0])[:, None], g.index[:2]), y[:, :2]),
    "boolean": lambda g, x, y: fit(x[:, g.mask]),
    "masked scatter": lambda g, x, y: x.masked_scatter(g.mask.expand_as(x), y),
    "tril": lambda g, x, y: fit(pair(x).tril()),
    "diff": lambda g, x, y: fit(x.diff(dim=1, prepend=y[:, :1])),
    "distance": lambda g, x, y: fit(torch.cdist(pair(x), pair(y) + 3)),
    "glu": lambda g, x, y: fit(functional.glu(torch.cat([x, y], 1), 1)),
    "relu in place": lambda g, x, y: functional.relu(x * 1.5, inplace=True),
    "in place": lambda g, x, y: (x * 2).add_(y).mul_(0.5),
    "assigned": lambda g, x, y: assigned(x, y),
    "viewed": lambda g, x, y: viewed(x),
    "built": lambda g, x, y: built(g, x),
    "through detached": lambda g, x, y: through_detached(x, y),
    "product in place": lambda g, x, y: product_in_place(x, y),
    "new shape": lambda g, x, y: new_shape(x),
    "loop": lambda g, x, y: loop(g, x),
    "detach": lambda g, x, y: x * y.detach(),
    "data": lambda g, x, y: x + y.data.sin(),
    "no gradient": lambda g, x, y: x * quiet(y),
    "straight-through": lambda g, x, y: x + (x.round() - x).detach(),
    "global": lambda g, x, y: x * OUTSIDE["scale"],
    "global shift": lambda g, x, y: x.roll(OUTSIDE["shift"], 1),
    "attribute": lambda g, x, y: x * g.factor,
    "kernel": lambda g, x, y: fit(functional.avg_pool1d(x[:, None], g.width, 1)),
    "branch": lambda g, x, y: x.sin() if g.flag else x.cumsum(1),
    "loose": lambda g, x, y: x * g.loose,
    "buffer": lambda g, x, y: x * g.gain,
    "optional": lambda g, x, y: x if g.optional is None else x * g.optional,
    "constants": lambda g, x, y: x + torch.linspace(0, 1, SIZE, dtype=x.dtype),
    "positions": lambda g, x, y: x[:, g.row.argsort()],
    "by batch": lambda g, x, y: x / x.shape[0],
    "of the sample": lambda g, x, y: x * torch.arange(x.shape[0], dtype=x.dtype)[:, None],
}
RANDOM: dict[str, Step] = {
    "dropout": lambda g, x, y: functional.dropout(x, 0.3, g.training),
    "feature dropout": lambda g, x, y: fit(functional.dropout1d(pair(x), 0.3, g.training)),
    "noise": lambda g, x, y: x * torch.rand(SIZE, dtype=x.dtype),
    "noise of samples": lambda g, x, y: x + torch.randn_like(x),
    "bernoulli": lambda g, x, y: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "rrelu": lambda g, x, y: functional.rrelu(x, training=g.training),
    "permutation": lambda g, x, y: x[:, torch.randperm(SIZE)],
    "random weights": lambda g, x, y: functional.linear(x, g.square * torch.rand_like(g.square)),
}
#: What has to be refused, or obeyed where no product of Jacobians is made.
FOREIGN: dict[str, Step] = {
    "function": lambda g, x, y: Straight.apply(x),
    "hook": lambda g, x, y: hooked(x),
    "hook of a node": lambda g, x, y: hooked_node(x),
    "rolled samples": lambda g, x, y: x.roll(2, 0) if x.shape[0] > 2 else x.flip(0),
    "mean of samples": lambda g, x, y: x - x.mean(0),
    "sorted samples": lambda g, x, y: x.sort(0)[0],
    "gram": lambda g, x, y: fit((x @ y.t()) @ x),
}
STEPS = {**PLAIN, **RANDOM, **FOREIGN}


class Graph(nn.Module):
    """Some steps, each on tensors that were made before."""

    def __init__(self, generator: random.Random) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(SIZE, SIZE), nn.Conv1d(2, 2, 3, padding=1)
        self.norm = nn.BatchNorm1d(SIZE)
        self.square, self.row = nn.Parameter(torch.randn(SIZE, SIZE) / 2), nn.Parameter(torch.randn(SIZE))
        self.register_buffer("gain", torch.rand(SIZE))
        self.register_buffer("index", torch.randperm(SIZE))
        self.register_buffer("mask", torch.rand(SIZE) > 0.4)
        self.register_buffer("optional", None)
        self.double().eval()
        self.loose = torch.rand(SIZE, dtype=torch.float64)
        self.factor, self.width, self.flag = 1.5, 2, True
        self.norm.running_var.uniform_(0.5, 2)
        weights = [8 if name in PLAIN else 3 if name in RANDOM else 0.4 for name in STEPS]
        names = generator.choices(list(STEPS), weights, k=generator.randint(1, 7))
        self.steps = [(name, *(generator.randrange(place + 1) for _ in range(2))) for place, name in enumerate(names)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tensors = [x]
        for name, first, second in self.steps:
            tensors.append(STEPS[name](self, tensors[first], tensors[second]))
        return tensors[-1] + 0.1 * tensors[len(tensors) // 2]

    def __repr__(self) -> str:
        return f"Graph({self.steps}, training={self.training})"


def changes(generator: random.Random, scans: list[nn.Module]) -> dict[str, Callable[[Graph], object]]:
    def stepped(g: Graph) -> None:
        with torch.no_grad():
            for parameter in g.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))

    def hook(g: Graph) -> object:
        return g.linear.register_forward_hook(lambda _m, _i, output: output * 2)

    def loaded(g: Graph, assign: bool) -> None:
        state = {
            k: v.clone() if v.dtype == torch.bool else v.flip(0) if v.ndim else v for k, v in g.state_dict().items()
        }
        g.load_state_dict(state, assign=assign)

    def tie(g: Graph) -> None:
        g.linear.weight = g.square

    def untie(g: Graph) -> None:
        g.linear.weight = nn.Parameter(g.linear.weight.detach().clone())

    return {
        "nothing": lambda g: None,
        "a step": stepped,
        "data": lambda g: g.square.data.mul_(-1),
        "zeros": lambda g: g.linear.weight.data.mul_(torch.rand(SIZE, SIZE) > 0.5),
        "load": lambda g: loaded(g, False),
        "assign": lambda g: loaded(g, True),
        "attribute": lambda g: setattr(g, "factor", g.factor + 1),
        "to one": lambda g: setattr(g, "factor", 1.0),
        "width": lambda g: setattr(g, "width", 5 - g.width),
        "flag": lambda g: setattr(g, "flag", not g.flag),
        "global": lambda g: OUTSIDE.update(scale=OUTSIDE["scale"] + 1, shift=OUTSIDE["shift"] + 1),
        "index": lambda g: g.index.data.copy_(torch.randint(SIZE, (SIZE,))),
        "mask": lambda g: g.mask.copy_(~g.mask),
        "buffer": lambda g: g.gain.mul_(2),
        "loose": lambda g: setattr(g, "loose", g.loose + 1),
        "optional": lambda g: setattr(
            g, "optional", torch.rand(SIZE, dtype=torch.float64) if g.optional is None else None
        ),
        "mode": lambda g: g.train(not g.training),
        "replaced": lambda g: setattr(g, "linear", nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()).double()),
        "hooked": hook,
        "parameter hooked": lambda g: g.square.register_hook(lambda gradient: gradient * 1.5),
        "tied": tie,
        "untied": untie,
        "frozen": lambda g: g.linear.requires_grad_(generator.random() < 0.5),
        "pruned": lambda g: (
            None if parametrize.is_parametrized(g.conv) else prune.random_unstructured(g.conv, "weight", 0.3)
        ),
        "parametrised": lambda g: (
            None
            if prune.is_pruned(g.conv) or parametrize.is_parametrized(g.conv)
            else parametrizations.weight_norm(g.conv)
        ),
        "statistics": lambda g: g.norm.running_var.mul_(2),
        "order": lambda g: generator.shuffle(g.steps) if not any(f or s for _, f, s in g.steps) else None,
        "reset": lambda g: [scan.reset() for scan in scans],
    }


@contextlib.contextmanager
def drawing(seed: int, graph: Graph) -> Iterator[None]:
    """What is drawn is the same each time, and running statistics stay what they are."""
    state = {name: value.clone() for name, value in graph.norm.named_buffers()}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
    with torch.no_grad():
        for name, value in graph.norm.named_buffers():
            value.copy_(state[name])


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    limit = 1e-9 * max(1.0, expected.nan_to_num().abs().max().item() if expected.numel() else 0.0)
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=1e-7, atol=limit, equal_nan=True)


def gradients(run: nn.Module, graph: Graph, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    leaf = x.clone().requires_grad_()
    y = run(leaf)
    wanted = [leaf, *(p for p in graph.parameters() if p.requires_grad)]
    weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)
    if not y.requires_grad:
        return y, [torch.zeros_like(tensor) for tensor in wanted]
    return y.detach(), list(torch.autograd.grad((y * weights).sum(), wanted, allow_unused=True, materialize_grads=True))


def jacobian(graph: Graph, x: torch.Tensor) -> torch.Tensor:
    """``(outputs, batch, inputs, batch)``: of all samples with respect to all."""
    leaf = x.clone().requires_grad_()
    y = graph(leaf * 1).flatten(1)
    if not y.requires_grad:
        return y.new_zeros(y.shape[1], len(x), SIZE, len(x))
    rows = [
        [torch.autograd.grad(y[b, n], leaf, retain_graph=True, materialize_grads=True)[0].t() for b in range(len(x))]
        for n in range(y.shape[1])
    ]
    return torch.stack([torch.stack(row) for row in rows])


#: What an error must say: an operator or a module, and what to do.
CLEAR = (
    "register one", "must be worked on", "call .eval()", "write it with operators", "remove it", "use schedule=",
    "axis; permute it", "take them by", "give the input", "use the same for all", "run the forward again",
    "modified by an inplace operation", "does not fit", "use torch.where", "give each place once",
)  # fmt: skip


def run_case(seed: int) -> Counter[str]:
    generator = random.Random(seed)
    torch.manual_seed(seed)
    OUTSIDE.update(scale=1.5, shift=1)
    graph = Graph(generator)
    scans = [
        jacsparse.nn.Scan(graph, schedule=schedule) for schedule in ("linear", "blelloch", "blelloch:1", "chunked:2")
    ]
    counts: Counter[str] = Counter()
    history: list[str] = []
    x = torch.randn(3, SIZE, dtype=torch.float64)
    for _ in range(generator.randint(2, 4)):
        with drawing(seed, graph):
            expected = jacobian(graph, x)
        batch = range(len(x))
        mixed = any(expected[:, b, :, c].any() for b in batch for c in batch if b != c)

        def told(what: str, error: Exception) -> None:
            counts["refused"] += 1
            assert any(words in str(error) for words in CLEAR), (seed, history, graph, what, str(error))

        try:
            with drawing(seed, graph):
                actual = jacsparse.jacobian(graph, x)
            assert not mixed, (seed, history, graph, "mixed samples were not noticed")
            for number in batch:
                assert close(actual.todense(number), expected[:, number, :, number]), (seed, history, graph)
            counts["right"] += 1
        except (UnsupportedOperatorError, ValueError, RuntimeError) as error:
            told("jacobian", error)
        for scan in generator.sample(scans, 2):
            with drawing(seed, graph):
                y, by_autograd = gradients(graph, graph, x)
            try:
                with drawing(seed, graph):
                    z, theirs = gradients(scan, graph, x)
            except (UnsupportedOperatorError, RuntimeError) as error:
                told(scan.schedule, error)
                continue
            assert torch.equal(y, z) or close(z, y), (seed, history, graph, scan.schedule)
            assert all(close(b, a) for a, b in zip(by_autograd, theirs, strict=True)), (
                seed,
                history,
                graph,
                scan.schedule,
            )
            counts["right"] += 1
        if generator.random() < 0.3:
            try:
                with drawing(seed, graph):
                    assert not jacsparse.verify(graph, x, raise_exception=False).failed, (seed, history, graph)
                counts["right"] += 1
            except (UnsupportedOperatorError, RuntimeError) as error:
                told("verify", error)
        if generator.random() < 0.2:
            try:
                with drawing(seed, graph):
                    report = jacsparse.count_flop(graph, (SIZE,), structure="observed", inputs=x, schedule="blelloch:1")
                assert report.total >= 0
                counts["right"] += 1
            except (UnsupportedOperatorError, RuntimeError) as error:
                told("count_flop", error)
        name, change = generator.choice(list(changes(generator, scans).items()))
        # What cannot be done twice, as pruning what is parametrised, is not done.
        with contextlib.suppress(RuntimeError, ValueError, KeyError, AttributeError, TypeError, AssertionError):
            change(graph)
            history.append(name)
        # PyTorch itself refuses statistics of one sample.
        x = torch.randn(generator.choice([2, 2, 3, 5] if graph.training else [1, 2, 3, 5]), SIZE, dtype=torch.float64)
    return counts


@pytest.mark.parametrize("part", range(TESTS))
def test_random_graphs(part: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(part, CASES, TESTS):
        counts += run_case(seed)
    print(f"\npart {part} of {TESTS}: {counts['right']} right, {counts['refused']} refused")
    assert counts["right"] > 5 * counts["refused"]
