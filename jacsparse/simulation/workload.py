"""What the stages of a model cost: their passes, and the matrices of scans across processes."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..patterns import Full, Pattern
from ..spgemm import multiply_adds, product_pattern
from ..stages import Region, matrix_of

#: A product of more multiply-adds than this for each sample counts as a full matrix, which bounds it from above.
MOST = 3 * 10**8


@dataclass(frozen=True, eq=False)
class StageCost:
    """What one stage costs for a mini-batch.

    Attributes
    ----------
    forward : float
        Seconds of its forward pass.
    errors, gradients : float
        Seconds of its backward pass: of the gradient of its input, and of those of its weights. The first stage has no
        errors, because the network's input needs no gradient.
    jacobian : float
        Seconds to compute the values of its transposed Jacobian.
    stored : int
        Bytes of its results, which the backward pass reads.
    output : int
        Bytes of its output, and of that output's gradient.
    weights : int
        Bytes of the weights that train; zero in a stage that shares those of one before.
    factor : Pattern or Region
        The pattern of its transposed Jacobian.
    shared : bool
        Whether all samples share the values of its Jacobian.
    path : str
        Its path in the model; empty for a step of a sequence.
    """

    forward: float
    errors: float
    gradients: float
    jacobian: float
    stored: int
    output: int
    weights: int
    factor: Pattern | Region
    shared: bool = False
    path: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of all its passes."""
        return self.forward + self.errors + self.gradients

    @cached_property
    def matrix(self) -> Pattern:
        """The pattern of its matrix; a full one, which bounds it, where a region takes too long."""
        if isinstance(self.factor, Region) and self.factor.estimate > MOST:
            return Pattern.of(Full(*self.factor.shape))
        return matrix_of(self.factor)


@dataclass(frozen=True, eq=False)
class Workload:
    """A model whose training is planned.

    Attributes
    ----------
    stages : tuple of StageCost
        The stages, from the input on.
    samples : int
        Samples of the mini-batch.
    input : int
        Bytes of the mini-batch.
    rate : float
        FLOP per second of products with matrices of stages.
    itemsize : int
        Bytes of a number.
    recurrent : bool
        Whether the stages are steps that share their weights.
    """

    stages: tuple[StageCost, ...]
    samples: int
    input: int
    rate: float
    itemsize: int = 4
    recurrent: bool = False
    #: Products by the identities of their factors, which they hold: steps of a sequence share one pattern.
    _products: dict[tuple[int, int], tuple[Pattern, Pattern, Pattern, int]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __len__(self) -> int:
        return len(self.stages)

    @property
    def forward(self) -> float:
        """Seconds of the forward pass."""
        return math.fsum(stage.forward for stage in self.stages)

    @property
    def backward(self) -> float:
        """Seconds of the backward pass."""
        return math.fsum(stage.errors + stage.gradients for stage in self.stages)

    @property
    def slowest(self) -> tuple[str, float]:
        """The path of the stage that takes longest, and its share of all passes."""
        stage = max(self.stages, key=lambda stage: stage.seconds)
        return stage.path, stage.seconds / max(self.forward + self.backward, sys.float_info.min)

    @property
    def couples(self) -> bool:
        """Whether a stage couples the samples of a batch, as batch normalisation does, so that it has no matrix."""
        return any(isinstance(stage.factor, Region) and stage.factor.coupling for stage in self.stages)

    def weights(self, block: Sequence[int]) -> int:
        """Bytes of the weights of some stages."""
        if self.recurrent and block:
            return self.stages[0].weights
        return sum(self.stages[stage].weights for stage in block)

    def before(self, stage: int) -> int:
        """Bytes of a stage's input."""
        return self.stages[stage - 1].output if stage else self.input

    def vector_seconds(self, nbytes: float) -> float:
        """Seconds of the product of a matrix, whose values take these bytes, and a vector, for all samples."""
        return 2.0 * nbytes / self.itemsize / self.rate

    def product_seconds(self, pairs: int, shared: bool) -> float:
        """Seconds of a product of two matrices, whose multiply-adds run once or for each sample."""
        return 2.0 * pairs * (1 if shared else self.samples) / self.rate

    def nbytes(self, entries: int, shared: bool) -> int:
        """Bytes of the values of a matrix, which all samples may share."""
        return entries * (1 if shared else self.samples) * self.itemsize

    def product(self, left: Pattern, right: Pattern) -> tuple[Pattern, int]:
        """The pattern and the multiply-adds of a product, for one sample; a full one where these exceed `MOST`."""
        key = id(left), id(right)
        if key not in self._products:
            pairs = multiply_adds(left, right)
            full = Pattern.of(Full(left.shape[0], right.shape[1]))
            self._products[key] = left, right, product_pattern(left, right) if pairs <= MOST else full, pairs
        *_, product, pairs = self._products[key]
        return product, pairs

    def blocks(self, workers: int) -> list[range]:
        """The stages as consecutive blocks, of which the slowest takes as short as can be, for `workers` or fewer."""
        ends = np.cumsum([stage.seconds for stage in self.stages])
        longest = max(stage.seconds for stage in self.stages)
        low, high = max(longest, ends[-1] / workers), float(ends[-1])
        for _ in range(64):
            middle = (low + high) / 2
            low, high = (low, middle) if len(_cuts(ends, middle)) <= workers else (middle, high)
        return [range(begin, end) for begin, end in itertools.pairwise([0, *_cuts(ends, high)])]


def _cuts(ends: np.ndarray, limit: float) -> list[int]:
    """The ends of consecutive blocks whose costs are at most `limit`, which is not below any cost."""
    cuts, before = [0], 0.0
    while cuts[-1] < len(ends):
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(ends, before + limit * (1 + 1e-12), side="right"))))
        before = float(ends[cuts[-1] - 1])
    return cuts[1:]
