"""What the stages of a model cost: their passes, and the matrices of scans."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..flop import CountEstimate, estimate_products
from ..patterns import Full, Pattern
from ..schedule import Schedule, Step, between, run
from ..spgemm import multiply_adds, product_pattern
from ..stages import Region, boundaries, matrix_of

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
        Seconds of its backward pass: of the gradient of its input, and of those of its weights (equations 5 and 7 of
        leapfrogging). The first stage has no errors, because the network's input needs no gradient.
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

    @property
    def couples(self) -> bool:
        """Whether it couples the samples of a batch, so that it has no matrix."""
        return isinstance(self.factor, Region) and bool(self.factor.coupling)

    @property
    def steps(self) -> int:
        """Steps of its backward pass."""
        return (self.errors > 0) + (self.gradients > 0)

    @cached_property
    def matrix(self) -> Pattern:
        """The pattern of its matrix; a full one, which bounds it, where a region takes too long."""
        if isinstance(self.factor, Region) and self.factor.estimate > MOST:
            return Pattern.of(Full(*self.factor.shape))
        return matrix_of(self.factor)


@dataclass(frozen=True, eq=False)
class ScanCost:
    """What the live steps of a schedule cost for a mini-batch.

    Attributes
    ----------
    seconds : list of float
        The time of each live step.
    entries : dict of int to int
        Entries of each matrix of one sample, by its value in the schedule.
    nbytes : dict of int to int
        Bytes of the values of each matrix, for all samples.
    largest : int
        Entries of the largest product of matrices; 0 where there is none.
    bounded : int
        The products of matrices that count as full ones, because they have more multiply-adds than `MOST`.
    """

    seconds: list[float]
    entries: dict[int, int]
    nbytes: dict[int, int]
    largest: int
    bounded: int


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
    product_rate, vector_rate : float
        FLOP per second of products of two matrices, and of a matrix and a vector.
    itemsize : int
        Bytes of a number.
    recurrent : bool
        Whether the stages are steps that share their weights.
    multiplies : bool
        Whether methods may take products of matrices.
    """

    stages: tuple[StageCost, ...]
    samples: int
    input: int
    product_rate: float
    vector_rate: float
    itemsize: int = 4
    recurrent: bool = False
    multiplies: bool = True
    _scans: dict[Schedule, ScanCost] = field(default_factory=dict, init=False, repr=False)
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

    def weights(self, block: Sequence[int]) -> int:
        """Bytes of the weights of some stages."""
        if self.recurrent and block:
            return self.stages[0].weights
        return sum(self.stages[stage].weights for stage in block)

    def before(self, stage: int) -> int:
        """Bytes of a stage's input."""
        return self.stages[stage - 1].output if stage else self.input

    def vector_seconds(self, nbytes: float) -> float:
        """Seconds of the product of a matrix of so many bytes, of all samples, and a vector."""
        return 2.0 * nbytes / self.itemsize / self.vector_rate

    def product_seconds(self, pairs: int, shared: bool) -> float:
        """Seconds of a product of two matrices of so many multiply-adds, once or for each sample."""
        return 2.0 * pairs * (1 if shared else self.samples) / self.product_rate

    @cached_property
    def coupling(self) -> tuple[int, ...]:
        """The stages, from 0, that couple samples."""
        return tuple(number for number, stage in enumerate(self.stages) if stage.couples)

    def boundaries(self, workers: int, first: int = 0, stop: int | None = None) -> list[int]:
        """The places at which `jacsparse.schedule.balanced` cuts the stages from `first` to `stop`."""
        return boundaries([stage.factor for stage in self.stages[first:stop]], workers)

    def scheduled(self, part: Callable[[int], Schedule]) -> Schedule:
        """The schedule of all stages that follows ``part(n)`` on each stretch of `n` stages with matrices."""
        return between(len(self), self.coupling, lambda first, stop: part(stop - first))

    @cached_property
    def largest_factor(self) -> int:
        """Entries of the largest Jacobian of a stage that a schedule may multiply by: all but the first."""
        return max((stage.factor.nnz for stage in self.stages[1:] if not stage.couples), default=0)

    def estimate(self, schedules: Sequence[Schedule]) -> CountEstimate:
        """What it takes to find the patterns of the products of some schedules."""
        factors = [stage.factor for stage in self.stages]
        return estimate_products(schedules, factors, most=MOST)

    def scan(self, schedule: Schedule) -> ScanCost:
        """What a schedule's live steps cost."""
        if schedule not in self._scans:
            self._scans[schedule] = self._scan(schedule)
        return self._scans[schedule]

    def _scan(self, schedule: Schedule) -> ScanCost:
        multiplied: dict[int, StageCost | _Product] = {}
        seconds, pairs_of_products = list[float](), list[int]()

        def multiply(step: Step, left: StageCost | _Product, right: StageCost | _Product) -> _Product:
            (matrix, pairs), shared = self.product(left.matrix, right.matrix), left.shared and right.shared
            product = _Product(matrix, shared, self.vector_seconds(self.nbytes(matrix.nnz, shared)))
            multiplied.update({step.left: left, step.right: right, step.out: product})
            seconds.append(self.product_seconds(pairs, shared))
            pairs_of_products.append(pairs)
            return product

        def apply(step: Step, left: StageCost | _Product, right: None) -> None:
            seconds.append(left.errors)

        run(schedule.live_steps(), multiply, apply, lambda value: self.stages[-value], kept=())
        n = len(self)
        matrices = {n - number: (stage.factor.nnz, stage.shared) for number, stage in enumerate(self.stages)}
        matrices |= {value: (each.matrix.nnz, each.shared) for value, each in multiplied.items()}
        entries = {value: nnz for value, (nnz, _) in matrices.items()}
        nbytes = {value: self.nbytes(*each) for value, each in matrices.items()}
        largest = max((nnz for value, nnz in entries.items() if value > n), default=0)
        return ScanCost(seconds, entries, nbytes, largest, sum(pairs > MOST for pairs in pairs_of_products))

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


class _Product(NamedTuple):
    """A matrix that a scan computes: whether all samples share it, and seconds of its product with a gradient."""

    matrix: Pattern
    shared: bool
    errors: float


def _cuts(ends: np.ndarray, limit: float) -> list[int]:
    """The ends of consecutive blocks whose costs are at most `limit`, which is not below any cost."""
    cuts, before = [0], 0.0
    while cuts[-1] < len(ends):
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(ends, before + limit * (1 + 1e-12), side="right"))))
        before = float(ends[cuts[-1] - 1])
    return cuts[1:]
