"""Scalar functions of one to three operators, drawn from all that the tests of Jacobians have."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tests.helpers import FLOAT
from tests.patterns.operators import BACKWARD_PASSES, OPERATORS, Case, has_other_derivative
from tests.patterns.test_operators import fits

from .test_fuzz import PLAIN, SIZE, Graph

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fit(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A batch of tensors of a shape, with as many elements of each sample as it has, and others."""
    x, size = x.reshape(len(x), -1), math.prod(shape)
    filler = torch.linspace(-1, 1.5, max(1, size), dtype=x.dtype).expand(len(x), -1)
    return torch.cat([x, filler], 1)[:, :size].reshape(-1, *shape).contiguous()


def weights(y: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, y.shape[1], dtype=y.dtype)


#: Scalars of each sample: of a result and of the input, both flat.
ENDINGS: dict[str, Function] = {
    "squares": lambda y, x: (weights(y) * y.square()).sum(1),
    "product with the input": lambda y, x: (weights(y) * y * fit(x, y.shape[1:])).sum(1),
    "sines": lambda y, x: (weights(y) * y.sin()).sum(1),
    "products of neighbours": lambda y, x: (y * y.roll(1, 1)).sum(1) / 2 + y.sum(1) ** 2,
    "mean of cubes": lambda y, x: (weights(y) * y**3).mean(1),
}


@dataclass(frozen=True)
class Step:
    """An operator on a sample of a shape, or on two of them."""

    name: str
    shape: tuple[int, ...]
    function: Function


@dataclass(frozen=True)
class Drawn:
    """A scalar function for each sample of a batch."""

    steps: tuple[Step, ...]
    ending: str
    size: int
    batch: int
    seed: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for step in self.steps:
            y = step.function(fit(y, step.shape), fit(x, step.shape))
        return ENDINGS[self.ending](y.reshape(len(x), -1), x)

    def input(self, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + seed)
        return torch.randn((self.batch, self.size), dtype=FLOAT, generator=generator)

    def __repr__(self) -> str:
        steps = ", ".join(f"{step.name} of {step.shape}" for step in self.steps)
        return f"{self.ending} of {steps}; ({self.batch}, {self.size}), seed {self.seed}"


def operator_step(name: str, case: Case) -> Step:
    module, shape = case
    return Step(name, shape, lambda x, _: module(x))


def plain_step(name: str, seed: int) -> Step:
    torch.manual_seed(seed)
    graph = Graph(random.Random(seed))
    return Step(name, (SIZE,), lambda x, y: PLAIN[name](graph, x, y))


def further_step(name: str, size: int) -> Step:
    shape, function = FURTHER[name] if name in FURTHER else ((size, size), MATRICES[name])
    return Step(name, shape, lambda x, y: function(x[0], y[0])[None])


def spread(x: torch.Tensor) -> torch.Tensor:
    """A matrix whose eigenvalues are apart from each other and from zero."""
    size = x.shape[-1]
    return x * 0.3 + torch.diag(torch.linspace(3, 3 + 2 * size, size, dtype=x.dtype))


def symmetric(x: torch.Tensor) -> torch.Tensor:
    return spread(x + x.mT)


LABELS = torch.tensor([1, 0, 2])
EDGES = torch.linspace(-1, 1, 4, dtype=FLOAT)
with torch.random.fork_rng():
    torch.manual_seed(0)
    LSTM, GRU = nn.LSTM(2, 2, dtype=FLOAT), nn.GRU(2, 2, dtype=FLOAT)

#: Further operators, on two samples of a shape, without an axis of samples.
FURTHER: dict[str, tuple[tuple[int, ...], Function]] = {
    "prod": ((3, 2), lambda x, y: x.prod(0)),
    "product of all": ((3,), lambda x, y: x.prod()),
    "vector norm": ((2, 3), lambda x, y: torch.linalg.vector_norm(x, 3, 1)),
    "norm": ((2, 3), lambda x, y: x.norm()),
    "frobenius": ((2, 3), lambda x, y: torch.linalg.norm(x)),
    "largest norm": ((2, 3), lambda x, y: torch.linalg.vector_norm(x, torch.inf, 1)),
    "cross": ((2, 3), lambda x, y: torch.linalg.cross(x, y, dim=1)),
    "kron": ((2, 3), lambda x, y: torch.kron(x, y)),
    "trace": ((3, 3), lambda x, y: x.trace()),
    "outer": ((4,), lambda x, y: torch.outer(x, y)),
    "cross entropy": ((3, 4), lambda x, y: functional.cross_entropy(x, LABELS)),
    "smoothed": ((3, 4), lambda x, y: functional.cross_entropy(x, LABELS, reduction="none", label_smoothing=0.1)),
    "soft labels": ((3, 4), lambda x, y: functional.cross_entropy(x, y.softmax(1), reduction="none")),
    "nll": ((3, 4), lambda x, y: functional.nll_loss(x, LABELS, reduction="none")),
    "nll of images": ((1, 4, 3), lambda x, y: functional.nll_loss(x, LABELS[None], reduction="sum")),
    "kl": ((3, 4), lambda x, y: functional.kl_div(x, y.sigmoid(), reduction="none")),
    "poisson": ((3, 4), lambda x, y: functional.poisson_nll_loss(x, y)),
    "gaussian": ((4,), lambda x, y: functional.gaussian_nll_loss(x, y, y**2 + 0.1, reduction="none")),
    "l1": ((4,), lambda x, y: functional.l1_loss(x, y * 0.7)),
    "hinge": ((4,), lambda x, y: functional.hinge_embedding_loss(x, torch.ones_like(x), reduction="none")),
    "cosine": ((2, 4), lambda x, y: functional.cosine_similarity(x + 0.1, y.cos(), 1)),
    "margin": ((4,), lambda x, y: functional.margin_ranking_loss(x, y * 2, torch.ones_like(x))),
    "triplet": ((2, 3), lambda x, y: functional.triplet_margin_loss(x, y + 1, x.flip(1) - 2, reduction="none")),
    "soft margins": ((2, 4), lambda x, y: functional.multilabel_soft_margin_loss(x, torch.ones_like(x))),
    "rows of a table": ((4, 3), lambda x, y: functional.embedding(LABELS, x)),
    "lgamma": ((4,), lambda x, y: torch.lgamma(x.square() + 1)),
    "digamma": ((4,), lambda x, y: torch.digamma(x.square() + 1)),
    "erfinv": ((4,), lambda x, y: torch.erfinv(x.tanh() * 0.9)),
    "i0": ((4,), lambda x, y: torch.special.i0(x)),
    "xlogy": ((4,), lambda x, y: torch.xlogy(y, x.square() + 1)),
    "entr": ((4,), lambda x, y: torch.special.entr(x.square() + 1)),
    "log_ndtr": ((4,), lambda x, y: torch.special.log_ndtr(x)),
    "ndtri": ((4,), lambda x, y: torch.special.ndtri(x.sigmoid())),
    "acosh": ((4,), lambda x, y: torch.acosh(x.square() + 2)),
    "atanh": ((4,), lambda x, y: torch.atanh(x.tanh())),
    "asin": ((4,), lambda x, y: torch.asin(x.tanh() * 0.9)),
    "exp2": ((4,), lambda x, y: torch.exp2(x)),
    "logarithms": ((4,), lambda x, y: torch.log2(x.square() + 1) + torch.log10(y.square() + 1)),
    "power": ((4,), lambda x, y: torch.pow(x.square() + 0.5, y)),
    "power of a number": ((4,), lambda x, y: torch.pow(1.5, x)),
    "lerp by a tensor": ((4,), lambda x, y: torch.lerp(x, y, x * y)),
    "remainder": ((4,), lambda x, y: torch.remainder(x, y.square() + 0.5)),
    "distance of vectors": ((4,), lambda x, y: torch.dist(x, y + 3)),
    "median of all": ((3,), lambda x, y: x.median()),
    "largest of all": ((3,), lambda x, y: x.max()),
    "quantile": ((5,), lambda x, y: torch.quantile(x, 0.3)),
    "aminmax": ((2, 3), lambda x, y: torch.aminmax(x, dim=1)[0] * torch.aminmax(x, dim=1)[1]),
    "running maximum": ((2, 3), lambda x, y: x.cummax(1)[0]),
    "lstm": ((3, 2), lambda x, y: LSTM(x)[0]),
    "gru": ((3, 2), lambda x, y: GRU(x)[0]),
    "lp pool": ((1, 6), lambda x, y: functional.lp_pool1d(x + 4, 2, 3)),
    "local response": ((3, 4), lambda x, y: functional.local_response_norm(x[None], 2)),
    "windows": ((1, 3, 4), lambda x, y: functional.unfold(x, 2)),
    "affine grid": ((2, 3), lambda x, y: functional.affine_grid(x[None], [1, 1, 2, 2], align_corners=False)),
    "conv by the input": ((2, 6), lambda x, y: functional.conv1d(x[:1], y[None, 1:, :3], padding=1)),
    "transposed conv by the input": (
        (2, 6),
        lambda x, y: functional.conv_transpose1d(x[:1], y[None, 1:, :3], stride=2, output_padding=1),
    ),
    "grouped conv by the input": (
        (4, 5),
        lambda x, y: functional.conv1d(x, y[:, :4].reshape(4, 2, 2), stride=2, dilation=2, groups=2),
    ),
    "searched": ((5,), lambda x, y: x * torch.bucketize(y.detach(), EDGES)),
    "branches": ((4,), lambda x, y: torch.where(x.detach() > 0, x, y)),
    "chain of products": ((3, 3), lambda x, y: torch.linalg.multi_dot([x, y, x])),
    "tensordot": ((2, 3), lambda x, y: torch.tensordot(x, y, ([0], [0]))),
    "einsum": ((3,), lambda x, y: torch.einsum("i,j,i->j", x, y, y)),
    "trapezoid": ((5,), lambda x, y: torch.trapezoid(x, y)),
    "covariance": ((2, 4), lambda x, y: torch.cov(x)),
    "softmin": ((2, 4), lambda x, y: functional.softmin(x, 1)),
    "addr": ((3,), lambda x, y: torch.addr(torch.outer(y, x), x, y)),
    "vander": ((3,), lambda x, y: torch.linalg.vander(x)),
    "batch norm of this batch": ((4, 2), lambda x, y: functional.batch_norm(x, None, None, training=True)),
    "take": ((4,), lambda x, y: torch.take(x, LABELS)),
    "take along": ((2, 3), lambda x, y: torch.take_along_dim(x, x.argsort(1), 1)),
    "one hot": ((3,), lambda x, y: functional.one_hot(x.argmax(), 3) * y),
    "factors": ((3, 3), lambda x, y: sum(torch.linalg.lu(spread(x))[1:], y)),
    "triangle": ((3, 3), lambda x, y: torch.linalg.qr(spread(x))[1]),
}
#: Functions of two square matrices of any size.
MATRICES: dict[str, Function] = {
    "det": lambda x, y: torch.linalg.det(x),
    "slogdet": lambda x, y: torch.linalg.slogdet(spread(x))[1],
    "logdet": lambda x, y: torch.logdet(spread(x)),
    "inv": lambda x, y: torch.linalg.inv(spread(x)),
    "solve": lambda x, y: torch.linalg.solve(spread(x), y),
    "solve for a vector": lambda x, y: torch.linalg.solve(spread(x), y[0]),
    "solve triangular": lambda x, y: torch.linalg.solve_triangular(spread(x), y, upper=True),
    "cholesky": lambda x, y: torch.linalg.cholesky(symmetric(x)),
    "upper cholesky": lambda x, y: torch.linalg.cholesky(symmetric(x), upper=True),
    "cholesky solve": lambda x, y: torch.cholesky_solve(y, spread(x).tril()),
    "cholesky inverse": lambda x, y: torch.cholesky_inverse(spread(x).tril()),
    "eigvalsh": lambda x, y: torch.linalg.eigvalsh(symmetric(x)),
    "svdvals": lambda x, y: torch.linalg.svdvals(spread(x)),
    "matrix_exp": lambda x, y: torch.linalg.matrix_exp(x * 0.3),
    "matrix_power": lambda x, y: torch.linalg.matrix_power(x, 3),
    "inverse power": lambda x, y: torch.linalg.matrix_power(spread(x), -2),
    "pinv": lambda x, y: torch.linalg.pinv(spread(x)),
    "nuclear norm": lambda x, y: torch.linalg.norm(spread(x), "nuc"),
    "spectral norm": lambda x, y: torch.linalg.norm(spread(x), 2),
    "lu solve": lambda x, y: torch.linalg.lu_solve(*torch.linalg.lu_factor(spread(x)), y),
    "lstsq": lambda x, y: torch.linalg.lstsq(spread(x), y)[0],
}


#: Operators whose backward passes have no rule.
ONCE = {
    *("aten.grid_sampler_2d", "aten.grid_sampler_3d"),
    *("aten.multi_margin_loss", "aten.multilabel_margin_loss_forward", "aten.multilabel_margin_loss"),
}
#: Backward passes are drawn with their operators.
DRAWN = [name for name in OPERATORS if name not in BACKWARD_PASSES.keys() | ONCE]


@st.composite
def drawn_steps(draw: st.DrawFn) -> Step:
    choose = random.Random(draw(st.integers(0, 2**32)))
    if (kind := choose.random()) < 0.2:
        return plain_step(choose.choice(list(PLAIN)), choose.randrange(999))
    if kind < 0.4:
        further = choose.choice([*FURTHER, *MATRICES])
        return further_step(further, draw(st.integers(1, 3)))
    name = choose.choice(DRAWN)
    case = draw(OPERATORS[name].filter(lambda case: fits(*case, 2) and not has_other_derivative(name, *case)))
    return operator_step(name, case)


@st.composite
def drawn_functions(draw: st.DrawFn) -> Drawn:
    seed = draw(st.integers(0, 10**6))
    # Constants of operators are drawn by PyTorch.
    torch.manual_seed(seed)
    chosen = tuple(draw(drawn_steps()) for _ in range(draw(st.integers(1, 3))))
    # Some functions are of one sample alone, and some are others in a batch.
    alone = any(step.name in (*FURTHER, *MATRICES, "masked scatter", "by batch", "of the sample") for step in chosen)
    batch = 1 if alone else draw(st.integers(1, 2))
    return Drawn(chosen, draw(st.sampled_from(list(ENDINGS))), draw(st.integers(1, 12)), batch, seed)


def reference(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Each sample's Hessian by PyTorch, ``(batch, size, size)``."""
    return torch.stack(
        [torch.autograd.functional.hessian(lambda flat: f(flat.reshape(1, -1))[0], sample) for sample in x.flatten(1)]
    )


def differences(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Each sample's Hessian by central differences of the gradient, ``(batch, size, size)``."""

    def gradient(sample: torch.Tensor) -> torch.Tensor:
        leaf = sample[None].clone().requires_grad_()
        return torch.autograd.grad(f(leaf).sum(), leaf)[0][0]

    steps = 1e-6 * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.stack(
        [torch.stack([(gradient(sample + s) - gradient(sample - s)) / 2e-6 for s in steps]) for sample in x]
    )
