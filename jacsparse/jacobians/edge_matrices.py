"""Operators' Jacobians in a run, beyond a memory limit in parts, for `verify`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from ..patterns import Diagonal, Full, Pattern
from ..runtime import row_starts
from ..spgemm import matvec
from ..stages import Edge, Record

#: A matrix is multiplied by at most this many vectors one at a time; and the number that its kernel takes at once.
FEW, LANES = 4, 8
#: The most bytes of a part of a matrix: larger ones spend their time on fresh pages.
MATRIX_BYTES = 2**25


class EdgeMatrix:
    """An operator's transposed Jacobian in a run; beyond the memory limit, parts of it, computed anew for each use.

    ValueError is raised where one sample's matrix is beyond the limit, and the rule cannot compute parts.
    """

    def __init__(self, record: Record, edge: Edge, memory: int) -> None:
        self.record, self.edge = record, edge
        # A copy of the pattern: the indices of the edge's own pattern would live as long as that does.
        self.pattern = Pattern.of(replace(edge.transposed_pattern.structure))  # type: ignore[type-var]
        # Each part has the rows between two bounds, for a slice of the samples.
        self.samples = [slice(0, record.batch)]
        self.bounds: Sequence[int] = (0, self.pattern.shape[0])
        closed = isinstance(self.pattern.structure, (Diagonal, Full))
        indices = 0 if closed else self.pattern.index_nbytes
        sample = self.pattern.nnz * record.trace.input.element_size()
        if indices + sample * (1 if edge.shared else record.batch) <= memory:
            return
        if not edge.shared:
            at_once = max(1, (memory - indices) // max(1, sample))
            starts = range(0, record.batch, at_once)
            self.samples = [slice(start, min(start + at_once, record.batch)) for start in starts]
        if indices + sample > memory:
            self.bounds = self._split(memory, indices + sample)

    def _split(self, memory: int, needed: int) -> Sequence[int]:
        """The bounds of parts that each take about half of the memory, MATRIX_BYTES where that is less, or one row."""
        parts = max(2, -(-2 * needed // max(1, min(memory, 2 * MATRIX_BYTES))))
        running = row_starts(self.pattern.structure.row_counts(), np.int64)
        targets = int(running[-1]) * np.arange(1, parts, dtype=object) // parts
        inner = np.searchsorted(running, targets.astype(np.int64), side="left")
        bounds = sorted({0, self.pattern.shape[0], *inner.tolist()})
        if self._parts(bounds, self.samples[0]) is None:
            call, (columns, rows) = self.edge.call, self.pattern.shape
            raise ValueError(
                f"{call.path}: the Jacobian of {call.operator}, {rows:,} × {columns:,}, takes {needed / 2**20:,.0f} "
                f"MiB of values and indices, more than the memory limit of {memory / 2**20:,.0f} MiB, and its rule "
                "makes no part of it by itself; pass a smaller input or a larger memory_limit"
            )
        return bounds

    @property
    def parts(self) -> int:
        """The number of parts."""
        return len(self.samples) * (len(self.bounds) - 1)

    def _parts(self, bounds: Sequence[int], samples: slice) -> Iterator[torch.Tensor] | None:
        """The values of the rows between bounds; None where the rule cannot compute parts."""
        return self.edge.rule.transposed_parts(self.record.call(self.edge, samples), self.pattern, bounds)

    def _values(self, samples: slice) -> torch.Tensor:
        """The values of all rows."""
        return self.edge.rule.transposed_values(self.record.call(self.edge, samples), self.pattern)

    def _pieces(self, samples: slice) -> Iterator[tuple[int, int, Pattern, torch.Tensor]]:
        """Parts of the rows for a slice of the samples: the first and the last row, the pattern and the values."""
        if len(self.bounds) == 2:
            yield 0, self.pattern.shape[0], self.pattern, self._values(samples)
            return
        values, structures = self._parts(self.bounds, samples), self.pattern.structure.parts(self.bounds)
        assert values is not None
        for bounds, structure, part in zip(pairwise(self.bounds), structures, values, strict=True):
            yield *bounds, Pattern.of(structure), part

    def times(self, vectors: torch.Tensor) -> torch.Tensor:
        """The products with many vectors for each sample, ``(outputs, many, batch)`` to ``(inputs, many, batch)``."""
        products = vectors.new_empty((self.pattern.shape[0], *vectors.shape[1:]))
        for samples in self.samples:
            for first, last, pattern, values in self._pieces(samples):
                products[first:last, :, samples] = times(pattern, values, vectors[:, :, samples])
        return products

    def row(self, number: int, sample: int) -> tuple[np.ndarray, torch.Tensor]:
        """Columns and values of one row of one sample's matrix."""
        (structure,) = self.pattern.structure.parts((number, number + 1))
        samples = next(part for part in self.samples if part.start <= sample < part.stop)
        if len(self.bounds) > 2:
            parts = self._parts((number, number + 1), samples)
            assert parts is not None
            (values,) = parts
        else:
            start = int(self.pattern.structure.row_counts()[:number].sum())
            values = self._values(samples)[start : start + structure.nnz]
        return structure.csr()[1], values[:, min(sample - samples.start, values.shape[1] - 1)]


def times(pattern: Pattern, values: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """The products of a matrix and vectors, ``(columns, many, batch)`` to ``(rows, many, batch)``."""
    rows, (count, batch) = pattern.shape[0], vectors.shape[1:]
    if not count * batch:
        return vectors.new_zeros((rows, count, batch))
    if values.shape[1] > 1:
        return torch.stack([matvec(pattern, values, vector.contiguous()) for vector in vectors.unbind(1)], 1)
    columns = vectors.flatten(1)
    if count * batch <= FEW:
        products = torch.cat([matvec(pattern, values, column.contiguous()) for column in columns.split(1, 1)], 1)
    else:
        # A multiple of the number of columns that the kernel takes at once.
        products = matvec(pattern, values, torch.nn.functional.pad(columns, (0, -count * batch % LANES)))
    return products[:, : count * batch].reshape(rows, count, batch)
