"""The programs of drawn cases: a core of a few operators, and layers before and after it.

All of them work along the last axis, so that they do with samples and without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import jacsparse
from jacsparse import Pattern, SparseJacobian
from jacsparse.recurrence import Dense, Diagonal, Scaled, Sparse

SIZE = 6


def pair(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 3))


class Program(nn.Module):
    """Layers, a core, and layers again; a second argument enters before the core, and a number after it."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.before, self.core, self.after = nn.ModuleList(), core, nn.ModuleList()
        self.factor = 1.25
        #: How many tensors it returns.
        self.outputs = 1

    def forward(self, x: Tensor, *rest: Any) -> Any:
        others = [each for each in rest if isinstance(each, Tensor)]
        for layer in self.before:
            x = layer(x, *others)
        if others and not isinstance(self.core, Algebra):
            x, others = x * others[0].cos(), []
        y = self.core(x, *others) * self.factor
        for number in (each for each in rest if not isinstance(each, Tensor)):
            y = y * number + number**2
        for layer in self.after:
            y = layer(y)
        return y if self.outputs == 1 else (y, y.cos())


class Of(nn.Module):
    """A function of a table, by name, so that it can be pickled."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return FUNCTIONS[self.name](x, *others)


class Recurrent(nn.Module):
    """A recurrent layer over three steps of each sample: outputs and last states."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(2, 3, batch_first=True, **options)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        output, last = self.layer(x.unflatten(-1, (3, 2)))
        last = torch.cat(last, -1) if isinstance(last, tuple) else last
        return torch.cat([output.flatten(-2), last.transpose(0, -2).flatten(-2)], -1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh())

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return x + self.part(x)


class Encoder(nn.Module):
    """Attention among two tokens of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.layer(pair(x)).flatten(-2)


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / 2)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, self.weight).tanh(), self.weight.t(), self.weight[0])


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 2, padding=1)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return functional.silu(self.conv(pair(x))).flatten(-2)


# What needs two derivatives has them all.
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "products": lambda x: x[..., 1:] * x[..., :-1],
    "softmax": lambda x: x.softmax(-1),
    "cumsum": lambda x: (x * 0.5).cumsum(-1).sin(),
    "sort": lambda x: x.sort(-1)[0] * x,
    "max pool": lambda x: functional.max_pool1d(pair(x), 2, 1).flatten(-2).sin(),
    "attention": lambda x: functional.scaled_dot_product_attention(pair(x), pair(x), pair(x)).flatten(-2),
    "layer norm": lambda x: functional.layer_norm(x, (SIZE,)),
    "normalize": lambda x: functional.normalize(x + 2, dim=-1),
    "index": lambda x: x[..., [3, 1, 1, 0]].square() * x.flip(-1)[..., :4],
    "matmul": lambda x: (pair(x) @ pair(x).mT).flatten(-2),
    "linear parts": lambda x: torch.cat([x[..., :2] * 3, x.roll(1, -1)[..., 2:] - x[..., 2:]], -1),
    "logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "group norm": lambda x: functional.group_norm(x.unflatten(-1, (2, 3)).reshape(-1, 2, 3), 2).reshape(x.shape),
    "variance": lambda x: x * x.var(-1, keepdim=True),
    "product": lambda x: torch.cat([x.prod(-1, keepdim=True), x.tanh().cumprod(-1)], -1),
    "distance": lambda x: torch.cdist(pair(x), pair(x) + 3).flatten(-2),
    "upsampled": lambda x: functional.interpolate(
        pair(x).reshape(-1, 2, 3), scale_factor=2, mode="linear", align_corners=True
    ).reshape(*x.shape[:-1], 2 * SIZE),
    "scattered": lambda x: torch.zeros_like(x).index_add(-1, torch.tensor([0, 0, 2, 5, 5, 1]), x.sin()) * x,
    "einsum": lambda x: torch.einsum("...i,...j->...ij", x[..., :2], x[..., 2:].exp()).flatten(-2),
    "top": lambda x: x.topk(3, -1)[0].pow(2),
    "clamped": lambda x: torch.maximum(x.clamp(-0.7, 0.6), x * 0.1) * x,
    "norm": lambda x: torch.cat([x.norm(dim=-1, keepdim=True), functional.softplus(x)], -1),
    # Layers, which have as many outputs as inputs.
    "complex": lambda x, *_: torch.complex(x, 0.5 * x + 1).abs(),
    "polar": lambda x, *_: torch.view_as_real(torch.polar(x, x.sin())).sum(-1),
    "fft": lambda x, *_: torch.fft.irfft(torch.fft.rfft(x, dim=-1) * (1 + 0.5j), n=x.shape[-1], dim=-1),
    "spectrum": lambda x, *_: torch.fft.fft(x, dim=-1).abs(),
    "in place": lambda x, *_: (x * 1.5).mul_(x.sin()).add_(1),
    "assigned": lambda x, *_: assigned(x),
    "rectified in place": lambda x, *_: functional.relu_(x * 1.5) + x,
    "through a view": lambda x, *_: through_a_view(x),
    "scales its argument": lambda x, *_: x.mul_(1.5),
    "sets its argument": lambda x, *_: sets_its_argument(x),
    "squares its argument": lambda x, *_: x.add_(x * x),
    "scales the other": lambda x, other, *_: x + other.mul_(1.5),
    "sets the other": lambda x, other, *_: sets_the_other(x, other),
    "where": lambda x, *_: torch.where(x > 0.1, x, x * 0.3),
    "checkpoint": lambda x, *_: checkpoint(torch.sin, x, use_reentrant=False),
    "custom": lambda x, *_: Cube.apply(x),
    "replaced derivative": lambda x, *_: Straight.apply(x * 1.1),
    "own linear": lambda x, *_: Masking.apply(x, x.detach() > 0.2),
    "written by a mask": lambda x, *_: written_by_a_mask(x),
    "selected and put back": lambda x, *_: selected_and_put_back(x),
    "dropout": lambda x, *_: functional.dropout(x, 0.3),
    "mean of samples": lambda x, *_: x - x.mean(0),
}  # fmt: skip


def assigned(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[..., ::2] = x[..., 1::2].sin()
    y[..., 1] += x[..., 0]
    return y


def written_by_a_mask(x: Tensor) -> Tensor:
    y = x * 1.5
    y[x < -0.1] = 0
    return y


def selected_and_put_back(x: Tensor) -> Tensor:
    y, mask = x * 1.5, x > 0.1
    y[mask] = -x[mask].sin()
    y[~mask] *= 2
    return y


def through_a_view(x: Tensor) -> Tensor:
    y = x * 2
    y[..., 1:3].mul_(x[..., :2])
    return y


def sets_its_argument(x: Tensor) -> Tensor:
    x[..., 0] = x[..., 1] * x[..., 2]
    return x


def sets_the_other(x: Tensor, other: Tensor) -> Tensor:
    other[..., 0] = 0.5
    return x * other


class Cube(torch.autograd.Function):
    """A custom Function with its own derivatives, to any order."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class Masking(torch.autograd.Function):
    """A custom Function whose backward pass goes on where a mask is true, by a write."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(x, mask)
        return x.round() * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, mask = ctx.saved_tensors
        gradient = gradient * x.cos()
        gradient[~mask] = 0
        return gradient, None


class Straight(torch.autograd.Function):
    """A custom Function with another derivative than its operators'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Counter(nn.Module):
    """Counts its calls in a buffer, before it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        self.count += 1
        return x * (1 + 0.1 * self.count)


class RunningMean(nn.Module):
    """Adds to a buffer of means after it has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((), 0.5))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        y = (x - self.mean).sin()
        self.mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        return y


class Attribute(nn.Module):
    """Counts its calls in a number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Masked(nn.Module):
    """Uses a mask in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("mask", torch.tensor([True, False, True, True, False, True]))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        if self.way == "where":
            return torch.where(self.mask, x, 2 * x.sin())
        if self.way == "index":
            return functional.pad(x[..., self.mask], (1, 1))
        if self.way == "assignment":
            y = x * 1
            y[..., self.mask] = 0.25
            return y
        if self.way == "fill":
            return x.masked_fill(self.mask, 0.5)
        return x * self.mask / 0.7


def parametrised() -> nn.Module:
    return First(parametrizations.weight_norm(nn.Linear(SIZE, SIZE)))


def pruned() -> nn.Module:
    layer = nn.Linear(SIZE, SIZE)
    prune.custom_from_mask(layer, "weight", (torch.arange(SIZE * SIZE) % 3 > 0).reshape(SIZE, SIZE))
    return First(layer)


class First(nn.Module):
    """A module of the first argument alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.module(x)


class Captured(nn.Module):
    """Reads a tensor that is also an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return x * self.tensors[0].sin() if self.tensors else x


CORES: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda name=name: Of(name) for name in list(FUNCTIONS)[: list(FUNCTIONS).index("complex")]},
    "linear": lambda: nn.Linear(SIZE, 4),
    "perceptron": lambda: nn.Sequential(nn.Linear(SIZE, 5), nn.Tanh(), nn.Linear(5, 4), nn.Sigmoid()),
    "normed": lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), nn.GELU(), nn.Linear(SIZE, 3)),
    "convolved": Convolved,
    "residual": Residual,
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(SIZE), nn.Softplus()).eval(),
    "batch statistics": lambda: nn.Sequential(nn.BatchNorm1d(SIZE), nn.Softplus()),
    "encoder": lambda: Encoder(),
    "tied": lambda: Tied(),
    "gru": lambda: Recurrent(nn.GRU),
    "lstm": lambda: Recurrent(nn.LSTM),
}
RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "rnn": lambda: Recurrent(nn.RNN),
    "relu rnn": lambda: Recurrent(nn.RNN, nonlinearity="relu"),
    "gru": lambda: Recurrent(nn.GRU),
    "lstm": lambda: Recurrent(nn.LSTM),
    "two layers": lambda: Recurrent(nn.GRU, num_layers=2),
    "both directions": lambda: Recurrent(nn.LSTM, bidirectional=True),
    "without bias": lambda: Recurrent(nn.RNN, bias=False),
}


class LinearRecurrence(nn.Module):
    """A linear recurrence of each sample, whose matrices depend on it; by a loop or by ours."""

    PATTERN = Pattern((2, 2), [0, 1, 3], [0, 0, 1])

    def __init__(self, kind: str, schedule: str, reverse: bool, ours: bool) -> None:
        super().__init__()
        self.kind, self.schedule, self.reverse, self.ours = kind, schedule, reverse, ours
        self.weight = nn.Parameter(torch.randn(2, 2) / 2)

    def matrices(self, steps: Tensor) -> Any:
        if self.kind == "dense":
            return Dense(steps.tanh()[..., None] * self.weight)
        if self.kind == "diagonal":
            return Diagonal(steps.tanh())
        if self.kind == "scaled":
            return Scaled(self.weight, steps.tanh())
        if self.kind == "shared":
            return Dense(self.weight.expand(len(steps), 1, 2, 2))
        values = torch.stack([steps[..., 0].sin(), steps[..., 1] * 0.3, steps[..., 0] * 0.5], 1)
        return Sparse(self.PATTERN, values)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        steps = torch.cat([x, x.cos()], -1).unflatten(-1, (6, 2)).transpose(0, 1)
        A, start = self.matrices(steps), x[..., :2]
        if self.ours:
            states = jacsparse.linear_recurrence(A, steps, start, reverse=self.reverse, schedule=self.schedule)
        else:
            blocks, order = A.dense(), range(5, -1, -1) if self.reverse else range(6)
            found = {}
            for step in order:
                start = (blocks[step] @ start[..., None])[..., 0] + steps[step]
                found[step] = start
            states = torch.stack([found[step] for step in range(6)])
        return states.transpose(0, 1).flatten(-2)


RECURRENCES = ("dense", "diagonal", "scaled", "shared", "sparse")

PATTERN = Pattern((3, 3), [0, 2, 4, 6], [0, 2, 0, 1, 1, 2])
ROWS, COLUMNS = torch.from_numpy(np.array([[0, 0, 1, 1, 2, 2], [0, 2, 0, 1, 1, 2]]))


def csr(d: Tensor) -> Tensor:
    return torch.sparse_csr_tensor(torch.tensor([0, 2, 4, 6]), COLUMNS, d[ROWS, COLUMNS], size=(3, 3))


def one(J: SparseJacobian) -> SparseJacobian:
    return SparseJacobian.identity(3, dtype=J.dtype) * 4


def eye(D: Tensor) -> Tensor:
    return 4 * torch.eye(3, dtype=D.dtype)


# Of a Jacobian and a vector for each sample, and the same of dense matrices.
ALGEBRA: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "J.T": (lambda J, v: J.T, lambda D, v: D.mT),
    "J @ K": (lambda J, v: J @ (2 * J).T, lambda D, v: 2 * D @ D.mT),
    "J @ v": (lambda J, v: (J @ v.T).T, lambda D, v: (D @ v[..., None])[..., 0]),
    "J + K": (lambda J, v: J + J.T / 3, lambda D, v: D + D.mT / 3),
    "J - K": (lambda J, v: one(J) - J, lambda D, v: eye(D) - D),
    "-J": (lambda J, v: -J, lambda D, v: -D),
    "a J": (lambda J, v: J * v[:, 0], lambda D, v: D * v[:, :1, None]),
    "gram": (lambda J, v: J.gram(), lambda D, v: D.mT @ D),
    "weighted gram": (lambda J, v: J.gram(v.T), lambda D, v: D.mT @ (v[..., None] * D)),
    "outer": (lambda J, v: J.outer(), lambda D, v: D @ D.mT),
    "weighted outer": (lambda J, v: J.outer(v.T), lambda D, v: D @ (v[..., None] * D.mT)),
    "gram diagonal": (lambda J, v: J.gram_diagonal().T, lambda D, v: (D * D).sum(-2)),
    "outer diagonal": (lambda J, v: J.outer_diagonal(v.T).T, lambda D, v: (D * D * v[:, None]).sum(-1)),
    "diagonal": (lambda J, v: J.diagonal().T, lambda D, v: D.diagonal(dim1=-2, dim2=-1)),
    "from diagonal": (
        lambda J, v: J + SparseJacobian.from_diagonal(v.T),
        lambda D, v: D + torch.diag_embed(v),
    ),
    "solve": (lambda J, v: (J + one(J)).solve(v), lambda D, v: torch.linalg.solve(D + eye(D), v)),
    "solve columns": (
        lambda J, v: (J + one(J)).T.solve(torch.stack([v, v.sin()], -1)).flatten(-2),
        lambda D, v: torch.linalg.solve((D + eye(D)).mT, torch.stack([v, v.sin()], -1)).flatten(-2),
    ),
    "jvp": (lambda J, v: J.jvp(v), lambda D, v: (D @ v[..., None])[..., 0]),
    "vjp": (lambda J, v: J.vjp(v), lambda D, v: (D.mT @ v[..., None])[..., 0]),
    "to_torch": (
        lambda J, v: stacked([J.to_torch(n).to_dense() for n in range(len(v))], J),
        lambda D, v: stacked([csr(d).to_dense() for d in D], D),
    ),
    "to_scipy": (
        lambda J, v: (
            stacked(
                [torch.from_numpy(J.to_scipy(n).toarray()) for n in range(len(v))],
                SparseJacobian(J.pattern, J.values.detach()),
            )
            * v[..., None]
        ),
        lambda D, v: D.detach() * v[..., None],
    ),
    "chained": (
        lambda J, v: ((J.gram() + one(J)) @ (J - J.T)).vjp(v),
        lambda D, v: (((D.mT @ D + eye(D)) @ (D - D.mT)).mT @ v[..., None])[..., 0],
    ),
    "shared": (
        lambda J, v: J @ SparseJacobian(PATTERN, J.values[:, :1]),
        lambda D, v: D @ D[:1],
    ),
}


class Algebra(nn.Module):
    """One of the operations above on the Jacobian whose values are the first argument, ``(batch, nnz)``."""

    def __init__(self, name: str, ours: bool) -> None:
        super().__init__()
        self.name, self.ours = name, ours

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        of_ours, of_dense = ALGEBRA[self.name]
        v = y[..., :3]
        if self.ours:
            return dense(of_ours(SparseJacobian(PATTERN, x.T), v), len(x))
        return of_dense(x.new_zeros(len(x), 3, 3).index_put((torch.arange(len(x))[:, None], ROWS, COLUMNS), x), v)


def dense(result: SparseJacobian | Tensor, batch: int) -> Tensor:
    """A Jacobian as ``(batch, rows, columns)``, part of autograd; anything else as it is."""
    if isinstance(result, Tensor):
        return result
    return stacked([result.todense(sample) for sample in range(batch)], result)


def stacked(matrices: list[Tensor], J: SparseJacobian | Tensor) -> Tensor:
    """Matrices of samples; where there are none, still part of autograd."""
    values = J if isinstance(J, Tensor) else J.values
    return torch.stack(matrices) if matrices else values.new_zeros(0, *J.shape[-2:]) + values.sum()
