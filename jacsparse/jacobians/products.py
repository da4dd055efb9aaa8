"""Values by products of local Jacobians along paths.

Where the entries fold into sums of local derivatives, and of their products with elements of weights, a prepared call
computes all by fused loops; a run has PyTorch compute the local derivatives, and a kernel the sums. Else a call
multiplies the matrices of the operators in the order of least cost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from ..codegen import ElementGraph, MixedDtypesError, sums
from ..runtime import unsigned
from ..stages import in_own_memory
from ..tracing import Trace
from .evaluator import Evaluator
from .folding import Derivatives, Folded
from .fused_values import FusedValues
from .passes import Pass, in_turn
from .terms import Step
from .traced_function import TracedFunction, same_numbers

#: The most local derivatives and terms of a prepared Jacobian whose loops are interpreted: those of more take longer to
#: find than they save.
INTERPRETED = 2**23
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
    derivatives : Derivatives
        Its local derivatives, with these elements.
    replays : bool
        As in `ValueFunction`.
    compile : bool
        Whether machine code computes them. Else a kernel interprets the same loops in replays.
    """

    name = "products"

    def __init__(
        self,
        function: TracedFunction,
        folded: Folded,
        derivatives: Derivatives,
        *,
        replays: bool,
        compile: bool = False,
    ) -> None:
        self.pattern, self.folded, self._derivatives = folded.pattern, folded, derivatives
        self.batch, self.dtype = 1 if function.shared else function.batch, function.x.dtype
        self._shape, self._dtype = (self.pattern.nnz, self.batch), torch.empty(0, dtype=self.dtype).numpy().dtype
        self._local = derivatives.function
        self._use(folded.steps)
        wanted = compile or (replays and self._elements <= INTERPRETED)
        if wanted and self._local is not None and self.pattern.nnz > 0:
            self._fuse(function, compile)
        if self.fused is None:
            steps = in_turn(folded.steps)
            self._use(steps)
            self._passes = [Pass(step, self.batch) for step in steps]

    def in_one_call(self, function: TracedFunction) -> Products | None:
        """The same products as one call of a kernel that begins with a run's inputs; None where that is not all.

        Numbers, and elements of captures that are no floats, are constants of it.
        """
        if self._local is None or self._elements > INTERPRETED:
            return None
        derivatives = derivatives_of(function)
        if derivatives.count != self.folded.derivatives:
            return None
        products = Products(function, self.folded, derivatives, replays=True)
        return products if products.fused is not None and products.fused.computes_all else None

    @property
    def _elements(self) -> int:
        """The number of local derivatives and terms."""
        return self.batch * (self.folded.derivatives + sum(len(step.left) for step in self.folded.steps))

    def _use(self, steps: Sequence[Step]) -> None:
        """Take the weights of these steps."""
        folded = self.folded
        self._from_monomials = [
            _OfMonomials(partial(_constants_of, folded), folded.constants[1], self._dtype),
            *(_OfMonomials(partial(_weights_of, step), step.monomial, self._dtype) for step in steps),
        ]
        self._weights: tuple[tuple[float, ...], Weights] | None = None

    def _fuse(self, function: TracedFunction, compile: bool) -> None:
        """Make what computes the values in one call, where loops compute in one dtype."""
        assert self._local is not None
        self._scalars = tuple(function.trace.scalars)
        self._at_first = self.weights(self._derivatives.numbers_of(function.trace))
        with contextlib.suppress(MixedDtypesError):
            self.fused = FusedValues(
                self._local, function, self._entries, self.pattern, arrays=self._weights_of, compile=compile
            )
            self.fused.reads.update(self._derivatives.numbers)

    def _entries(self, graph: ElementGraph, parts: list[np.ndarray]) -> np.ndarray:
        """The numbers of the entries, from those of the local derivatives."""
        folded, derivatives = self.folded, self._derivatives
        varying = {place for place, number, _ in folded.monomials.table().tolist() if number >= derivatives.scalars}
        dtype = torch.from_numpy(self._at_first[0]).dtype

        def weights(place: int, monomials: np.ndarray) -> np.ndarray:
            """Weights, or where a call may change them, the numbers of elements that are these."""
            array = self._at_first[place]
            changes = not varying.isdisjoint(np.unique(monomials).tolist())
            return graph.tensor(("weights", place), len(array), dtype) if changes else array

        variables = np.concatenate([np.broadcast_to(part.T, (part.shape[1], self.batch)) for part in parts])
        constant = weights(0, folded.constants[1])
        if constant.dtype.kind != "i":
            constant = graph.array(torch.from_numpy(constant))
        for place, step in enumerate(folded.steps, 1):
            start = constant[:, None] if step is folded.steps[-1] else None
            factors, indptr = [variables[factor] for factor in step.factors], step.indptr.astype(np.int64)
            computed = sums(graph, indptr, factors, weights(place, step.monomial), start, dtype)
            variables = np.concatenate([variables, computed])
        return computed

    def _weights_of(self, known: Mapping[int, torch.Tensor]) -> Weights:
        """The weights in a replay that begins with known values."""
        return self.weights((*self._scalars, *(known[value].item() for value in self._derivatives.numbers)))

    @property
    def details(self) -> str:
        """The numbers of local derivatives, and of sums and products of them."""
        derivatives = self.folded.derivatives
        return (
            f" ({derivatives} local derivatives, {self.folded.steps[-1].first - derivatives} products and sums of them)"
        )

    @property
    def flop(self) -> int:
        """Operations of the sums and products for one sample, without those of the local derivatives."""
        return sum(len(step.left) * (2 if step.right is None else 3) for step in self.folded.steps)

    @property
    def nbytes(self) -> int:
        return sum(step.nbytes for step in self.folded.steps)

    def weights(self, numbers: tuple[float, ...]) -> Weights:
        """The constants of the entries, and the weights of each step's terms, for the function's numbers."""
        # Other threads may replace it meanwhile.
        current = self._weights
        if current is None or not same_numbers(current[0], numbers):
            monomials = self.folded.monomials.values(numbers)
            current = self._weights = numbers, [each.values(monomials) for each in self._from_monomials]
        return current[1]

    def computed(self, trace: Trace) -> torch.Tensor:
        weights = self.weights(self._derivatives.numbers_of(trace))
        if self._local is None:
            return torch.from_numpy(weights[0].copy())[:, None]
        *passes, last = self._passes
        count, parts, out = self.folded.derivatives, self._local(trace), torch.empty(*self._shape, dtype=self.dtype)
        # The last variable is 1; see `in_turn`.
        computed, entries, constant = np.empty((last.step.first + 1, self.batch), self._dtype), out.numpy(), weights[0]
        computed[-1] = 1
        if self.batch == 1:
            torch.cat(list(parts), 1, out=torch.from_numpy(computed[:count].T))
            computed, entries = computed[:, 0], entries[:, 0]
        else:
            torch.cat([part.T for part in parts], out=torch.from_numpy(computed[:count]))
            constant = constant[:, None]
        for each, weight in zip(passes, weights[1:], strict=False):
            each.run(weight, computed, computed[each.step.first : each.step.stop], 0)
        last.run(weights[-1], computed, entries, constant)
        return out


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
    return np.asarray(step.coefficient * monomials[unsigned(step.monomial)])


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
