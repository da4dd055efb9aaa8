"""Functions whose sparse Jacobians people need: discretised equations, least squares, and networks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.optimize
import torch
from jacsparse.models import build
from torch import nn
from torch.utils._pytree import tree_map_only

import jacsparse

from ._equations import EQUATIONS, Equation, Library, field


@dataclass(frozen=True)
class SparseFunction:
    """A function with arguments, by which it is differentiated where `argnums` says so."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    argnums: int | tuple[int, ...] = 0
    batched: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The options of `jacobian`."""
        return {"argnums": self.argnums, "batched": self.batched}

    def to(self, device: str) -> SparseFunction:
        """The same with its tensors on a device."""

        def moved(tree: Any) -> Any:
            return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tree)

        if isinstance(self.f, nn.Module):
            return replace(self, f=self.f.to(device), args=moved(self.args))
        assert isinstance(self.f, functools.partial)
        f = functools.partial(self.f.func, *self.f.args, **moved(self.f.keywords))
        return replace(self, f=f, args=moved(self.args))


def autoencoder(size: int, batch: int) -> SparseFunction:
    """A convolutional autoencoder of images of size × size, from one input channel to one output channel."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1), nn.Tanh(), nn.Conv2d(8, 16, 3, 2, 1), nn.Tanh(),
        nn.ConvTranspose2d(16, 8, 2, 2), nn.Tanh(), nn.ConvTranspose2d(8, 1, 2, 2),
    )  # fmt: skip
    return SparseFunction(module.double(), (_images(1, size, size, batch=batch),), batched=True)


def resnet8(size: int, batch: int) -> SparseFunction:
    """ResNet-8 in inference."""
    torch.manual_seed(0)
    return SparseFunction(build("resnet8").eval(), (_images(3, size, size, batch=batch).float(),), batched=True)


TORCH = Library(
    torch,
    lambda x, places, values: x.index_add(0, places, values),
    lambda u: nn.functional.pad(u, (1, 1, 1, 1)),
)


def _of_equation(equation: Equation, size: int, batch: int) -> SparseFunction:
    """An equation at samples side by side, or at the first one."""
    samples = zip(*(equation.arrays(size, sample) for sample in range(batch)), strict=True)
    args = [torch.from_numpy(np.stack(arrays) if equation.batched else arrays[0]) for arrays in samples]
    argnums = 0 if len(args) == 1 else tuple(range(len(args)))
    return SparseFunction(equation.on(TORCH, size), (*args, *equation.numbers), argnums, equation.batched)


def reacting_fields(points: int, rate: float) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """The change of three fields that diffuse on a periodic square and react, and drawn fields, (points, points, 3)."""

    def change(u: torch.Tensor) -> torch.Tensor:
        padded = nn.functional.pad(u.movedim(2, 0)[None], (1, 1, 1, 1), mode="circular")[0].movedim(0, 2)
        around = padded[2:, 1:-1] + padded[:-2, 1:-1] + padded[1:-1, 2:] + padded[1:-1, :-2]
        return 20 * (around - 4 * u) + rate * u**2 * (u.roll(1, 2) - u)

    return change, torch.rand(points, points, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def flat(f: Callable[..., torch.Tensor], x: np.ndarray, like: torch.Tensor, *args: Any) -> np.ndarray:
    """A function of tensors at a vector of NumPy's."""
    return f(torch.from_numpy(x).reshape(like.shape), *args).numpy().ravel()


def differences(f: Callable[..., torch.Tensor], start: torch.Tensor, *args: Any) -> Callable[..., Any]:
    """A function's Jacobian by SciPy's differences of groups of columns; the pattern is known beforehand."""
    sparsity = jacsparse.jacobian_pattern(f, start, *args).to_scipy()
    groups = scipy.optimize._numdiff.group_columns(sparsity)

    def jacobian(x: np.ndarray, *args: Any) -> Any:
        return scipy.optimize._numdiff.approx_derivative(
            lambda x: flat(f, x, start, *args), x, method="2-point", sparsity=(sparsity, groups)
        )

    return jacobian


def _images(*shape: int, batch: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([field(*shape, sample=sample) for sample in range(batch)]))


#: Those by name; a size is that of an equation, or the number of pixels of a side.
PROBLEMS: dict[str, Callable[[int, int], SparseFunction]] = {
    **{name: functools.partial(_of_equation, equation) for name, equation in EQUATIONS.items()},
    "autoencoder": autoencoder,
    "resnet8": resnet8,
}


def elements(problem: SparseFunction) -> int:
    """The number of elements of one sample's dense Jacobian."""
    argnums = problem.argnums if isinstance(problem.argnums, tuple) else (problem.argnums,)
    columns = sum(problem.args[number].numel() for number in argnums)
    batch = len(problem.args[0]) if problem.batched else 1
    rows = math.prod(problem.f(*problem.args).shape)
    return columns // batch * rows // batch
