"""References that share no code with what they check."""

from __future__ import annotations

import csv
import io
from fractions import Fraction
from pathlib import Path

import numpy as np
import scipy.sparse
import torch
from jacsparse.patterns import Pattern
from torch import nn

REFERENCE = Path(__file__).parent / "reference"


def reference_rows(name: str) -> list[dict[str, str]]:
    """The rows of a table under tests/reference, without its heading comments."""
    lines = (REFERENCE / name).read_text().splitlines()
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
