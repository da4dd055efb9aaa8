"""References that share no code with what they check."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from jacsparse.patterns import Pattern
from jacsparse.spgemm import SparseJacobian
from torch import nn
from torch.utils import _pytree

from jacsparse.stages import forward_pass

REFERENCE = Path(__file__).parent / "reference"
FLOAT = torch.float64
#: For tests in which hooks of saved tensors are told apart.
names_hooks = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="PyTorch before 2.8 does not tell whose hooks are in force",
)
#: Roundings of a few dozen operators, of which none here cancels all but a thousandth of its operands.
BOUND = 1e-12


def reference_rows(name: str) -> list[dict[str, str]]:
    """The rows of a table under tests/reference, without its heading comments."""
    lines = (REFERENCE / name).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(io.StringIO("\n".join(line for line in lines if not line.startswith("#")))))


def random_pattern(rows: int, columns: int, density: float, seed: int | np.random.Generator) -> Pattern:
    """Positions drawn one by one."""
    return Pattern.from_scipy(scipy.sparse.csr_array(np.random.default_rng(seed).random((rows, columns)) < density))


def reflections(n: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """A product of Householder reflections, n × n, in float64, worked out exactly: the same on all processors."""
    product = np.eye(n, dtype=int).astype(object)
    for _ in range(count):
        v = rng.integers(1, 9, n).astype(object)
        product = product - Fraction(2, v @ v) * np.outer(product @ v, v)
    return product.astype(np.float64)


def uniform(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    """Multiples of 2^-20 between -1 and 1, in float32."""
    return torch.from_numpy(rng.integers(-(2**20), 2**20, shape) / 2**20).float()


def autograd_jacobian(module: nn.Module, sample: torch.Tensor) -> torch.Tensor:
    """The dense Jacobian at one sample: a row for each output, all by one backward over copies of the sample."""
    with torch.no_grad():
        outputs = module(sample[None].clone())[0].numel()
    copies = sample.detach().expand(outputs, *sample.shape).clone().requires_grad_()
    y = module(copies * 1).reshape(outputs, outputs)
    (rows,) = torch.autograd.grad(y, copies, torch.eye(outputs, dtype=sample.dtype))
    return rows.reshape(outputs, -1)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Assert that a tensor equals its reference to a share of the reference's largest element, zeros exactly."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    largest = expected.abs().max().item() if expected.numel() else 0.0
    difference = (actual - expected).abs().max().item() if expected.numel() else 0.0
    assert difference <= tolerance * largest, f"difference {difference}, largest {largest}"
    assert bool(((expected != 0) | (actual == 0)).all()), "an exact zero of the reference is not zero"


class Straight(torch.autograd.Function):
    """Rounds, and passes its gradient on."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Counts(nn.Module):
    """A function times the number of its calls."""

    def __init__(self, f: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.f, self.calls = f, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.f(x) * self.calls


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers between 0.5 and 1.5."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT) + 0.5


def dense(f: Callable[..., Any], *args: Any, argnums: int | tuple[int, ...] = 0, batched: bool = True) -> torch.Tensor:
    """The Jacobian of each sample by autograd, ``(batch, rows, columns)``."""
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    leaves = [leaf for number in numbers for leaf in _pytree.tree_leaves(args[number])]

    def flat(*tensors: torch.Tensor) -> torch.Tensor:
        rest, full = iter(tensors), list(args)
        for number in numbers:
            full[number] = _pytree.tree_map(lambda _: next(rest), args[number])
        outputs = _pytree.tree_leaves(f(*full))
        batch = len(outputs[0]) if batched else 1
        return torch.cat([y.reshape(batch, -1) for y in outputs], 1)

    blocks = torch.autograd.functional.jacobian(flat, tuple(leaves))
    batch, rows = flat(*leaves).shape
    blocks = [block.reshape(batch, rows, batch if batched else 1, -1) for block in blocks]
    together = torch.cat(blocks, 3)
    return torch.stack([together[sample, :, sample] for sample in range(batch)])


def by_products(module: nn.Module, x: torch.Tensor) -> SparseJacobian:
    """The Jacobian at each sample by products of operators' own, whatever way costs less."""
    chain, (_, records) = forward_pass(module, x)
    with torch.no_grad():
        return chain.products(records, x)


def assert_equal(jacobian: SparseJacobian, expected: torch.Tensor) -> None:
    """Assert that each sample's Jacobian is the expected one, ``(batch, rows, columns)``."""
    actual = torch.stack([jacobian.todense(sample) for sample in range(len(expected))])
    assert actual.shape == expected.shape
    assert (actual - expected).abs().amax() <= BOUND * expected.abs().amax()


def made_up_runs(monkeypatch: pytest.MonkeyPatch, *calls: list[float | tuple[float, float]]) -> Callable[[], int]:
    """Give runs that are timed made-up seconds, of each call in turns; the number of runs so far.

    A pair of seconds is what a run takes, and for how long of it threads wait for a processor.
    """
    count = 0

    def timed(call: Callable[[], object]) -> tuple[float, float]:
        nonlocal count
        turn, place = divmod(count, len(calls))
        count += 1
        run = calls[place][turn % len(calls[place])]
        return run if isinstance(run, tuple) else (run, 0.0)

    monkeypatch.setattr("jacsparse.runtime.timing._timed", timed)
    return lambda: count
