"""Values by compression: tangents of all columns of a colour at once, cotangents of all rows of a colour at once.

Columns that share no row are summed into one seed of forward mode; each of their entries is then alone in its row of
the result. Rows that share no column are summed in the same way for backward mode (Curtis, Powell and Reid, 1974).
Where a few rows, or columns, are much fuller than the others, they are taken the one way and the rest the other way
(Coleman and Verma, 1998: *The efficient computation of sparse Jacobian matrices using automatic differentiation*,
section 3). The seeds of all colours, or of as many as fit in memory, run as more samples of one pass over the program,
and one gather decompresses the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..codegen import ElementGraph
from ..patterns import Pattern, UnsupportedOperatorError, row_colors, rows_at
from ..runtime import array_in
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


@dataclass(frozen=True)
class Coloring:
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


@functools.lru_cache(maxsize=4)
def coloring(pattern: Pattern) -> Coloring:
    """The cheapest colouring among those of columns, of rows, and of both, the fullest ones apart.

    Examples
    --------
    >>> arrow = Pattern((4, 4), [0, 4, 6, 8, 10], [0, 1, 2, 3, 0, 1, 0, 2, 0, 3])
    >>> coloring(arrow).counts
    (2, 1)
    """
    candidates = [_apart(pattern, count) for count in _counts(pattern)]
    candidates += [_transposed(pattern, _apart(pattern.T, count)) for count in _counts(pattern.T)]
    return min(candidates, key=lambda candidate: candidate.cost)


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


@functools.lru_cache(maxsize=8)
def symmetric_part(pattern: Pattern) -> tuple[Pattern, np.ndarray]:
    """The entries whose mirror images are entries too, and the place of the lower one of each pair in `pattern`.

    Examples
    --------
    >>> lower = Pattern((2, 2), [0, 1, 3], [0, 0, 1])
    >>> symmetric, places = symmetric_part(lower)
    >>> symmetric.indices.tolist(), places.tolist()
    ([0, 1], [0, 2])
    """
    rows, columns = pattern.rows.astype(np.int64), pattern.indices.astype(np.int64)
    symmetric = part(pattern, np.isin(columns * pattern.shape[1] + rows, pattern.places, assume_unique=True))
    rows, columns = symmetric.rows.astype(np.int64), symmetric.indices.astype(np.int64)
    lower = np.maximum(rows, columns) * pattern.shape[1] + np.minimum(rows, columns)
    return symmetric, np.searchsorted(pattern.places, lower)


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
    symmetric, _ = symmetric_part(pattern)
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

    def __init__(self, function: TracedFunction, colors: Coloring, *, replays: bool, compile: bool = False) -> None:
        self.pattern, self.coloring, self.shared = colors.pattern, colors, function.shared
        #: The places of the entries in all products; None where these are the entries, in their order.
        self._places: torch.Tensor | None = None
        sizes = zip(colors.counts, colors.pattern.shape, strict=True)
        if not np.array_equal(colors.places, np.arange(sum(count * size for count, size in sizes))):
            self._places = torch.from_numpy(colors.places).to(function.x.device)
        directions = [
            (torch.from_numpy(of_colors).to(function.x), products)
            for of_colors, products in zip(seeds(colors), (push_forward, pull_back), strict=True)
            if len(of_colors)
        ]
        # What does not depend on the input is computed once for all seeds.
        width = function.x.element_size() * sum(map(function.elements, function.calls))
        most = max(1, PART // max(1, width))
        together = sum(len(of_colors) for of_colors, _ in directions) <= most
        groups = [directions] if together else [[direction] for direction in directions]
        self._passes = [_Pass(function, each, most, replays) for each in groups if each]
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
        return (products[:, :1] if self.shared else products)[self.coloring.places]

    @property
    def details(self) -> str:
        columns, rows = self.coloring.counts
        products = min(self.pattern.shape)
        return f" ({columns} colours of columns and {rows} of rows, in place of {products:,} products with vectors)"

    @property
    def flop(self) -> int:
        """Operations of the calls of one run: two for each multiply-add of a product, else one for each element."""
        return sum(len(each.parts) * flop_of(each.computed.graph) for each in self._passes)

    @property
    def nbytes(self) -> int:
        """Bytes of the seeds and of the places that decompress."""
        of_seeds = sum(seeds.nbytes for each in self._passes for part in each.parts for seeds in part)
        return self.coloring.places.nbytes + of_seeds

    def computed(self, trace: Trace) -> torch.Tensor:
        if not self.pattern.nnz:
            return trace.input.detach().new_empty((0, 1))
        products = _joined([each.run(trace) for each in self._passes])
        products = products[:, :1] if self.shared else products
        # Products may be the seeds themselves, or lie in the memory of the run.
        return products.clone() if self._places is None else rows_at(products, self._places)


class _Pass:
    """The products of a function's Jacobian with seeds, some of them at a time where all would take much memory."""

    def __init__(
        self,
        function: TracedFunction,
        directions: Sequence[tuple[torch.Tensor, SeedProducts]],
        most: int,
        replays: bool,
    ) -> None:
        #: The seeds of each run, of one direction or of both.
        self.parts: list[list[torch.Tensor]] = [[seeds for seeds, _ in directions]]
        self._count, batch = sum(len(seeds) for seeds, _ in directions), function.batch
        if self._count > most:
            ((seeds, _),) = directions
            # Parts of equal lengths, so that one graph takes all of them.
            length = -(-len(seeds) // -(-len(seeds) // most))
            padding = seeds.new_zeros((-len(seeds) % length, seeds.shape[1]))
            self.parts = [[part] for part in torch.cat([seeds, padding]).split(length)]

        def compute(values: Values, *seeds: torch.Tensor) -> list[torch.Tensor]:
            parts = [
                products(function, values, each[:, None, :].expand(-1, batch, -1))
                for each, (_, products) in zip(seeds, directions, strict=True)
            ]
            return [(part.permute(0, 2, 1) if batch > 1 else part).reshape(-1, batch) for part in parts]

        reads = [value for call in function.calls for _, value in call.tensors]
        try:
            self.computed = ValueFunction(function, compute, reads, self.parts[0], replays=replays)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # PyTorch's transforms do not take an operator.
            reason = str(error).partition("\n")[0]
            raise UnsupportedOperatorError(
                f"no forward mode for all operators, by which method='compressed' works: {reason}; pass "
                "method='products'"
            ) from error

    def run(self, trace: Trace) -> torch.Tensor:
        """The products with all seeds, ``(seeds · elements, batch)``."""
        products = _joined([product for part in self.parts for product in self.computed(trace, *part)])
        padded = sum(len(seeds) for part in self.parts for seeds in part)
        return products if padded == self._count else products[: self._count * (len(products) // padded)]


def _joined(products: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(products) if len(products) > 1 else products[0]


SeedProducts = Callable[[TracedFunction, Values, torch.Tensor], torch.Tensor]


def seeds(coloring: Coloring) -> list[np.ndarray]:
    """For columns and for rows: a seed for each colour, one where a column or a row has it."""
    pairs = zip((coloring.columns, coloring.rows), coloring.counts, strict=True)
    return [(colors == np.arange(count)[:, None]).astype(np.float64) for colors, count in pairs]
