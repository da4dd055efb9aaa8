"""Values by compression: tangents of all columns of a colour at once, cotangents of all rows of a colour at once.

Columns that share no row are summed into one seed of forward mode; each of their entries is then alone in its row of
the result. Rows that share no column are summed in the same way for backward mode (Curtis, Powell and Reid, 1974).
Where a few rows, or columns, are much fuller than the others, they are taken the one way and the rest the other way
(Coleman and Verma, 1998: *The efficient computation of sparse Jacobian matrices using automatic differentiation*,
section 3). The seeds of all colours, or of as many as fit in memory, run as more samples of one pass over the program,
and one gather decompresses the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..codegen import ElementGraph
from ..patterns import Pattern, UnsupportedOperatorError, row_colors, rows_at
from ..runtime import SIMD, array_in, run_rows
from ..spgemm import PLAN_CACHE
from ..tracing import Trace, Values
from . import kernels
from .evaluator import Evaluator
from .fused_values import FusedValues, flop_of
from .products_with_vectors import pull_back, push_forward
from .traced_function import TracedFunction
from .value_functions import ValueFunction

#: Cost of a backward pass relative to a forward pass.
BACKWARD = 1.5
#: Bytes that a pass with many seeds may compute at once: tangents of all operators, if none were freed.
PART = 2**27
#: On a CPU, a pass computes at once at most half as many bytes as the values have, but each of its calls this many on
#: average: calls for less take longer than they compute.
CALL_BYTES = 3 * 2**17


class _OfPattern:
    """What `PLAN_CACHE` holds of one pattern, with arrays."""

    pattern: Pattern

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        return (self.pattern,)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in vars(self).values() if isinstance(array, np.ndarray))


@dataclass(frozen=True)
class Coloring(_OfPattern):
    """Groups of columns and of rows whose compressed products contain each entry by itself.

    Attributes
    ----------
    pattern : Pattern
        The pattern of the entries.
    columns, rows : ndarray of int
        The colour of each column and of each row; -1 for those that no entry is taken from.
    places : ndarray of int64, (nnz,)
        The place of each entry in the products with all seeds of columns and then of rows, one after the other.
    """

    pattern: Pattern
    columns: np.ndarray
    rows: np.ndarray
    places: np.ndarray

    @property
    def counts(self) -> tuple[int, int]:
        """The number of colours of columns and of rows."""
        return int(self.columns.max(initial=-1)) + 1, int(self.rows.max(initial=-1)) + 1

    def describe(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        return {"columns": self.columns, "rows": self.rows, "places": self.places}

    @classmethod
    def restore(cls, content: Mapping[str, Any], pattern: Pattern) -> Coloring:
        """The colouring of arrays from outside; ValueError where they do not fit the pattern."""
        sizes = {"columns": pattern.shape[1], "rows": pattern.shape[0], "places": pattern.nnz}
        colors = cls(pattern, *(array_in(content, name, size=size) for name, size in sizes.items()))
        array_in(content, "places", stop=int(np.dot(colors.counts, pattern.shape)))
        return colors

    @property
    def cost(self) -> float:
        """The cost of all passes, in forward passes."""
        forward, backward = self.counts
        return forward + BACKWARD * backward


def coloring(pattern: Pattern) -> Coloring:
    """The cheapest colouring among those of columns, of rows, and of both, the fullest ones apart.

    Examples
    --------
    >>> arrow = Pattern((4, 4), [0, 4, 6, 8, 10], [0, 1, 2, 3, 0, 1, 0, 2, 0, 3])
    >>> coloring(arrow).counts
    (2, 1)
    """

    def cheapest() -> Coloring:
        candidates = [_apart(pattern, count) for count in _counts(pattern)]
        candidates += [_transposed(pattern, _apart(pattern.T, count)) for count in _counts(pattern.T)]
        return min(candidates, key=lambda candidate: candidate.cost)

    return PLAN_CACHE.get(("coloring", pattern.digest), cheapest)


def row_coloring(pattern: Pattern) -> Coloring:
    """The colouring of rows alone."""
    return _transposed(pattern, _apart(pattern.T, 0))


def _counts(pattern: Pattern) -> list[int]:
    """Numbers of fullest rows to take apart: powers of two while they shorten the longest of the other rows."""
    lengths = np.sort(pattern.structure.row_counts())[::-1]
    powers = [0, *(2**power for power in range(10) if 2**power < len(lengths))]
    return [count for count in powers if not count or lengths[count] + BACKWARD * count < lengths[0]]


def _apart(pattern: Pattern, count: int) -> Coloring:
    """A number of fullest rows coloured as rows; the entries of the other rows by their columns."""
    order = np.argsort(-pattern.structure.row_counts(), kind="stable")
    apart = np.zeros(pattern.shape[0], dtype=np.bool_)
    apart[order[:count]] = True
    forward = ~apart[pattern.rows]
    rows = np.where(apart, row_colors(part(pattern, ~forward)) if count else 0, -1)
    columns = row_colors(part(pattern, forward).T)
    return _colored(pattern, columns if forward.any() else np.full(pattern.shape[1], -1), rows, forward)


def _colored(pattern: Pattern, columns: np.ndarray, rows: np.ndarray, forward: np.ndarray) -> Coloring:
    """The colouring whose entries are taken from the products with their columns' seeds where `forward`."""
    height, width = np.int64(pattern.shape[0]), np.int64(pattern.shape[1])
    of_columns = columns[pattern.indices] * height + pattern.rows
    of_rows = (columns.max(initial=-1) + 1) * height + rows[pattern.rows] * width + pattern.indices
    return Coloring(pattern, columns, rows, np.where(forward, of_columns, of_rows))


def part(pattern: Pattern, entries: np.ndarray) -> Pattern:
    """The pattern of some of the entries."""
    if entries.all():
        return pattern
    indptr = np.append(0, np.cumsum(entries))[pattern.indptr]
    return Pattern(pattern.shape, indptr, pattern.indices[entries])


def _transposed(pattern: Pattern, of_transpose: Coloring) -> Coloring:
    """The colouring of a pattern from one of its transpose."""
    forward = np.empty(pattern.nnz, dtype=np.bool_)
    forward[pattern.transposition] = of_transpose.places >= of_transpose.counts[0] * np.int64(pattern.shape[1])
    return _colored(pattern, of_transpose.rows, of_transpose.columns, forward)


@dataclass(frozen=True)
class SymmetricPart(_OfPattern):
    """The entries of a pattern whose mirror images are entries too; see `symmetric_part`."""

    pattern: Pattern
    #: The place of the lower entry of each pair among those of the whole pattern.
    places: np.ndarray


def symmetric_part(pattern: Pattern) -> SymmetricPart:
    """The part of a pattern that is symmetric.

    Examples
    --------
    >>> lower = symmetric_part(Pattern((2, 2), [0, 1, 3], [0, 0, 1]))
    >>> lower.pattern.indices.tolist(), lower.places.tolist()
    ([0, 1], [0, 2])
    """

    def symmetric() -> SymmetricPart:
        rows, columns = pattern.rows.astype(np.int64), pattern.indices.astype(np.int64)
        symmetric_pattern = part(
            pattern, np.isin(columns * pattern.shape[1] + rows, pattern.places, assume_unique=True)
        )
        rows, columns = (each.astype(np.int64) for each in (symmetric_pattern.rows, symmetric_pattern.indices))
        lower = np.maximum(rows, columns) * pattern.shape[1] + np.minimum(rows, columns)
        return SymmetricPart(symmetric_pattern, np.searchsorted(pattern.places, lower))

    return PLAN_CACHE.get(("symmetric part", pattern.digest), symmetric)


def star_coloring(pattern: Pattern) -> Coloring:
    """A star colouring of columns for a symmetric matrix, whose entries are in the symmetric part of a pattern.

    Neighbours in the graph of the matrix have different colours, and no path of four vertices only two (Coleman and
    Moré, 1984; Gebremedhin, Tarafdar, Manne and Pothen, 2007: *New acyclic and star coloring algorithms with
    application to computing Hessians*). These are fewer colours than those of `coloring`: of a pair of entries, one is
    alone in a product with its column's colour. The result is exactly symmetric, as both are taken from one place.

    Examples
    --------
    >>> arrow = Pattern((4, 4), [0, 4, 6, 8, 10], [0, 1, 2, 3, 0, 1, 0, 2, 0, 3])
    >>> star_coloring(arrow).columns
    array([0, 1, 1, 1])
    """
    symmetric = symmetric_part(pattern).pattern
    size = symmetric.shape[0]
    colors = np.full(size, -1, dtype=np.int64)
    # Each vertex waits for those before it: one range, on one thread.
    kernels.star_colors(0, size, symmetric.indptr, symmetric.indices, colors)
    places = colors[symmetric.indices] * np.int64(size) + symmetric.rows
    # Alone in its row among the columns of its colour.
    _, inverse, counts = np.unique(places, return_inverse=True, return_counts=True)
    alone = counts[inverse] == 1
    mirror = symmetric.transposition
    direct = alone & ((symmetric.rows >= symmetric.indices) | ~alone[mirror])
    return Coloring(symmetric, colors, np.full(size, -1), np.where(direct, places, places[mirror]))


class Compressed(Evaluator):
    """The values of a function's Jacobian from products with the seeds of the colours of its pattern.

    With `compile`, machine code computes what is not PyTorch's to compute, where all seeds of a pass run at once.
    """

    name = "compressed"

    def __init__(self, function: TracedFunction, colors: Coloring, *, compile: bool = False) -> None:
        self.function, self.pattern, self.coloring = function, colors.pattern, colors
        self._shape = self.pattern.nnz, 1 if function.shared else function.batch
        x, ways = function.x, zip(seeds(colors), (push_forward, pull_back), self.pattern.shape, strict=True)
        directions = [(torch.from_numpy(each).to(x), products, size) for each, products, size in ways if len(each)]
        count = sum(len(of_colors) for of_colors, *_ in directions)
        # What does not depend on the input is computed once for all seeds.
        width = max(1, x.element_size() * sum(map(function.elements, function.nodes)))
        part = PART
        if not (compile or x.is_cuda):
            part = min(PART, max(CALL_BYTES * len(function.nodes), x.element_size() * math.prod(self._shape) // 2))
        # Two small parts would not pay.
        together = count * width <= min(PART, 2 * part)
        most = count if together else max(1, part // width)
        groups = [directions] if together else [[direction] for direction in directions]
        self._passes = [_Pass(function, each, most) for each in groups if each]
        #: By part, its entries, and their places among its products; None where all products are the entries in order.
        self._of_parts = self._entries_of_parts(x.device)
        if function.x.is_cuda:
            self.uncompiled = f"machine code is for CPUs, and the arguments are on {function.x.device}; leave it out"
        elif not together:
            self.uncompiled = "the seeds of its colours take too much memory for one run of machine code; leave it out"
        elif compile and directions:
            (only,) = self._passes
            self.fused = FusedValues(only.computed, function, self._entries, self.pattern, only.parts[0])

    def _entries(self, graph: ElementGraph, parts: list[np.ndarray]) -> np.ndarray:
        """The numbers of the entries, from those of the products with all seeds."""
        products = np.concatenate(parts)
        return (products[:, :1] if self.function.shared else products)[self.coloring.places]

    def _entries_of_parts(self, device: torch.device) -> list[tuple[torch.Tensor, ...]] | None:
        places, counts = self.coloring.places, [count for each in self._passes for count in each.counts]
        if len(counts) == 1 and np.array_equal(places, np.arange(counts[0])):
            return None
        order = np.arange(len(places)) if len(counts) == 1 else np.argsort(places, kind="stable")
        begins = np.append(0, np.cumsum(counts))
        parts = np.split(order, np.searchsorted(places, begins[1:-1], sorter=order))
        pairs = ((part, places[part] - begin) for part, begin in zip(parts, begins, strict=False))
        return [tuple(torch.from_numpy(array).to(device) for array in pair) for pair in pairs]

    @property
    def details(self) -> str:
        columns, rows = self.coloring.counts
        products = min(self.pattern.shape)
        return f" ({columns} colours of columns and {rows} of rows, in place of {products:,} products with vectors)"

    @property
    def flop(self) -> int:
        """Operations of the calls of one run: two for each multiply-add of a product, else one for each element."""
        return sum(each.flop for each in self._passes)

    @property
    def nbytes(self) -> int:
        """Bytes of the seeds and of the places that decompress."""
        of_seeds = sum(seeds.nbytes for each in self._passes for part in each.parts for seeds in part)
        return self.coloring.places.nbytes + of_seeds

    def computed(self, trace: Trace) -> torch.Tensor:
        if not self.pattern.nnz:
            return trace.input.detach().new_empty((0, 1))
        products = (part[:, : self._shape[1]] for each in self._passes for part in each.run(trace))
        if self._of_parts is None:
            # Products may be the seeds themselves, or lie in the memory of the run.
            return next(products).clone()
        if len(self._of_parts) == 1:
            return rows_at(next(products), self._of_parts[0][1])
        batch, values = self._shape[1], trace.input.detach().new_empty(self._shape)
        write = kernels.write_numbers if batch == 1 else kernels.write_numbers_batch
        for part, (entries, places) in zip(products, self._of_parts, strict=True):
            if part.is_cuda or part.dtype != values.dtype:
                values[entries] = rows_at(part, places).to(values.dtype)
                continue
            numbers = (each[:, 0] if batch == 1 else each for each in (part.resolve_neg().contiguous(), values))
            arrays = (each.numpy() for each in (entries, places, *numbers))
            run_rows(write, len(entries), *arrays, lanes=SIMD * batch)
        return values


class _Pass:
    """The products of a function's Jacobian with seeds, some of them at a time where all would take much memory."""

    def __init__(
        self,
        function: TracedFunction,
        directions: Sequence[tuple[torch.Tensor, SeedProducts, int]],
        most: int,
    ) -> None:
        #: The seeds of each run, of one direction or of both.
        self.parts: list[list[torch.Tensor]] = [[seeds for seeds, *_ in directions]]
        #: The number of products of each run.
        self.counts, batch = [sum(len(seeds) * size for seeds, _, size in directions)], function.batch
        if sum(len(seeds) for seeds, *_ in directions) > most:
            ((seeds, _, size),) = directions
            # Parts of equal lengths, so that one graph takes all of them.
            length = -(-len(seeds) // -(-len(seeds) // most))
            self.counts = [len(part) * size for part in seeds.split(length)]
            padding = seeds.new_zeros((-len(seeds) % length, seeds.shape[1]))
            self.parts = [[part] for part in torch.cat([seeds, padding]).split(length)]

        def compute(values: Values, *seeds: torch.Tensor) -> list[torch.Tensor]:
            parts = [
                products(function, values, each[:, None, :].expand(-1, batch, -1))
                for each, (_, products, _) in zip(seeds, directions, strict=True)
            ]
            return [(part.permute(0, 2, 1) if batch > 1 else part).reshape(-1, batch) for part in parts]

        reads = [value for node in function.nodes for _, value in node.tensors]
        try:
            self.computed = ValueFunction(function, compute, reads, self.parts[0])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # PyTorch's transforms do not take an operator.
            reason = str(error).partition("\n")[0]
            raise UnsupportedOperatorError(
                f"no forward mode for all operators, by which method='compressed' works: {reason}; pass "
                "method='products'"
            ) from error

    @property
    def flop(self) -> int:
        """Operations of all runs."""
        if len(self.parts) == 1:
            return flop_of(self.computed.graph)
        alike, of_part = self.computed.apart
        return flop_of(alike) + len(self.parts) * flop_of(of_part)

    def run(self, trace: Trace) -> Iterator[torch.Tensor]:
        """The products of each run, ``(seeds · elements, batch)``."""
        for products in self.computed.of_parts(trace, self.parts):
            yield torch.cat(list(products)) if len(products) > 1 else products[0]


SeedProducts = Callable[[TracedFunction, Values, torch.Tensor], torch.Tensor]


def seeds(coloring: Coloring) -> list[np.ndarray]:
    """For columns and for rows: a seed for each colour, one where a column or a row has it."""
    pairs = zip((coloring.columns, coloring.rows), coloring.counts, strict=True)
    return [(colors == np.arange(count)[:, None]).astype(np.float64) for colors, count in pairs]
