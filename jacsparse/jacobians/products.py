"""Values by products of local Jacobians along paths.

Where the entries fold into sums of local derivatives, and of their products with elements of weights, fused loops
compute all of them. Else a call multiplies the matrices of the operators in the order of least cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch

from ..codegen import ElementGraph, sums
from ..stages import in_own_memory
from ..tracing import Trace
from .evaluator import Evaluator
from .folding import Folded
from .fused_values import FusedValues
from .terms import Step
from .traced_function import TracedFunction, same_numbers

#: What the numbers that a function reads decide: the constants of the entries, and the weights of each step's terms.
Weights = list[np.ndarray]


class Products(Evaluator):
    """The values of a function's Jacobian from local derivatives of elementwise operators and elements of weights.

    Parameters
    ----------
    function : TracedFunction
        The function.
    folded : Folded
        The entries of its Jacobian.
    compile : bool
        Whether machine code computes them. Else a kernel interprets the same loops.
    """

    name = "products"

    def __init__(self, function: TracedFunction, folded: Folded, *, compile: bool = False) -> None:
        self.pattern, self.folded = folded.pattern, folded
        self._batch, self._dtype = 1 if function.shared else function.batch, function.x.dtype
        dtype = torch.empty(0, dtype=self._dtype).numpy().dtype
        self._from_monomials = [
            _OfMonomials(partial(_constants_of, folded), folded.constants[1], dtype),
            *(_OfMonomials(partial(_weights_of, step), step.monomial, dtype) for step in folded.steps),
        ]
        self._weights: tuple[tuple[float, ...], Weights] | None = None
        #: The numbers of the run that this is made from, and where a call finds others, as `FusedValues.reads` says.
        self._numbers = folded.numbers_of(function.trace)
        self._sources = dict(enumerate(folded.numbers, len(function.trace.scalars)))
        if function.numbers_vary:
            used = {number for _, number, _ in folded.monomials.table().tolist()}
            self._sources |= {place: ~place for place in function.scalar_dtypes if place in used}
        if folded.derivatives is not None and self.pattern.nnz:
            self.fused = FusedValues(
                folded.derivatives, function, self._entries, self.pattern, arrays=self._weights_in, compile=compile
            )
            self.fused.reads.update(self._sources.values())

    def _entries(self, graph: ElementGraph, parts: list[np.ndarray]) -> np.ndarray:
        """The numbers of the entries, from those of the local derivatives."""
        folded, at_first = self.folded, self._weights_for(self._numbers)
        varying = {place for place, number, _ in folded.monomials.table().tolist() if number in self._sources}

        def weights(place: int, monomials: np.ndarray) -> np.ndarray:
            """Weights, or where a call may change them, the numbers of elements that are these."""
            array = at_first[place]
            changes = not varying.isdisjoint(np.unique(monomials).tolist())
            return graph.tensor(("weights", place), len(array), self._dtype) if changes else array

        variables = np.concatenate([np.broadcast_to(part.T, (part.shape[1], self._batch)) for part in parts])
        constant = weights(0, folded.constants[1])
        if constant.dtype.kind != "i":
            constant = graph.array(torch.from_numpy(constant))
        for place, step in enumerate(folded.steps, 1):
            start = constant[:, None] if step is folded.steps[-1] else None
            factors, indptr = [variables[factor] for factor in step.factors], step.indptr.astype(np.int64)
            computed = sums(graph, indptr, factors, weights(place, step.monomial), start, self._dtype)
            variables = np.concatenate([variables, computed])
        return computed

    def _weights_in(self, known: Mapping[int, torch.Tensor]) -> Weights:
        """The weights in a call that begins with known values and numbers."""
        numbers = list(self._numbers)
        for number, source in self._sources.items():
            numbers[number] = known[source].item()
        return self._weights_for(tuple(numbers))

    def _weights_for(self, numbers: tuple[float, ...]) -> Weights:
        """The constants of the entries, and the weights of each step's terms, for the function's numbers."""
        # Other threads may replace it meanwhile.
        current = self._weights
        if current is None or not same_numbers(current[0], numbers):
            monomials = self.folded.monomials.values(numbers)
            current = self._weights = numbers, [each.values(monomials) for each in self._from_monomials]
        return current[1]

    @property
    def details(self) -> str:
        """The numbers of local derivatives, and of sums and products of them."""
        first, last = self.folded.steps[0].first, self.folded.steps[-1].first
        return f" ({first} local derivatives, {last - first} products and sums of them)"

    @property
    def flop(self) -> int:
        """Operations of the sums and products for one sample, without those of the local derivatives."""
        return sum(len(step.left) * (2 if step.right is None else 3) for step in self.folded.steps)

    @property
    def nbytes(self) -> int:
        return sum(step.nbytes for step in self.folded.steps)

    def computed(self, trace: Trace) -> torch.Tensor:
        """The constants of the entries, of which no local derivative is a part."""
        return torch.from_numpy(self._weights_for(self.folded.numbers_of(trace))[0].copy())[:, None]


class _OfMonomials:
    """An array that depends on some monomials of a function's numbers, those in `places`."""

    def __init__(self, compute: Callable[[np.ndarray], np.ndarray], places: np.ndarray, dtype: np.dtype) -> None:
        self._compute, self._places, self._dtype = compute, np.unique(places), dtype
        # Replaced as a whole, so that threads take both of one call.
        self._before: tuple[np.ndarray, np.ndarray] | None = None

    def values(self, monomials: np.ndarray) -> np.ndarray:
        """The array, computed again only where a monomial has changed; do not write to it."""
        used, before = monomials[self._places], self._before
        if before is None or not np.array_equal(before[0], used):
            before = self._before = used, self._compute(monomials).astype(self._dtype, copy=False)
        return before[1]


def _constants_of(folded: Folded, monomials: np.ndarray) -> np.ndarray:
    """The constants of the entries."""
    entry, monomial, coefficient = folded.constants
    return np.bincount(entry, coefficient * monomials[monomial], folded.pattern.nnz)


def _weights_of(step: Step, monomials: np.ndarray) -> np.ndarray:
    """The weights of a step's terms."""
    return np.asarray(step.coefficient * monomials[step.monomial])


class ChainProducts(Evaluator):
    """The values of a function's Jacobian from those of each operator, multiplied in the order of least cost.

    It is for functions whose local Jacobians are full of weights, as those of networks.
    """

    name = "products"
    uncompiled = (
        "products of operators' matrices cannot be compiled; leave it out, or on a CPU pass method='compressed'"
    )

    def __init__(self, function: TracedFunction, *, replays: bool) -> None:
        self.pattern, self.chain, self._replays = function.pattern, function.chain, replays

    @property
    def details(self) -> str:
        return f" ({len(self.chain)} stages)"

    @property
    def flop(self) -> int:
        """Operations of the products for one sample, without those of the operators' own backward."""
        return 2 * self.chain.accumulation.multiply_adds if len(self.chain) else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pattern's indices."""
        return self.pattern.index_nbytes

    def computed(self, trace: Trace) -> torch.Tensor:
        # Who replays a graph has looked at the pruned weights.
        records = (self.chain if self._replays else self.chain.adapted(trace)).records(trace)
        return in_own_memory(self.chain.products(records, trace.input.detach()).values, records)
