"""Operators' Jacobians in a run, beyond a memory limit of some samples at a time, for `verify`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ..patterns import Diagonal, Full, Pattern
from ..spgemm import matvec
from ..stages import Edge, Record


class EdgeMatrix:
    """An operator's transposed Jacobian in a run; beyond the memory limit, of some samples, computed for each use.

    ValueError is raised where one sample's matrix is beyond the limit.
    """

    def __init__(self, record: Record, edge: Edge, memory: int) -> None:
        self.record, self.edge = record, edge
        # A copy of the pattern: the indices of the edge's own pattern would live as long as that does.
        self.pattern = Pattern.of(replace(edge.transposed_pattern.structure))  # type: ignore[type-var]
        closed = isinstance(self.pattern.structure, (Diagonal, Full))
        left = memory - (0 if closed else self.pattern.index_nbytes)
        sample = max(1, self.pattern.nnz * record.trace.input.element_size())
        if sample > max(1, left):
            call, (columns, rows) = edge.call, self.pattern.shape
            raise ValueError(
                f"{call.path}: the Jacobian of {call.operator}, {rows:,} × {columns:,}, takes "
                f"{(memory - left + sample) / 2**20:,.0f} MiB of values and indices, more than the memory limit of "
                f"{memory / 2**20:,.0f} MiB; pass a smaller input or a larger memory_limit"
            )
        at_once = record.batch if edge.shared else left // sample
        starts = range(0, record.batch, max(1, at_once))
        #: The samples of which there is a matrix at once.
        self.samples = [slice(start, min(start + at_once, record.batch)) for start in starts]

    def _values(self, samples: slice) -> torch.Tensor:
        return self.edge.rule.transposed_values(self.record.call(self.edge, samples), self.pattern)

    def times(self, vectors: torch.Tensor) -> torch.Tensor:
        """The products with many vectors for each sample, ``(outputs, many, batch)`` to ``(inputs, many, batch)``."""
        parts = [times(self.pattern, self._values(part), vectors[:, :, part]) for part in self.samples]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def row(self, number: int, sample: int) -> tuple[np.ndarray, torch.Tensor]:
        """Columns and values of one row of one sample's matrix."""
        entries = slice(*self.pattern.indptr[number : number + 2].tolist())
        part = next(part for part in self.samples if part.start <= sample < part.stop)
        values = self._values(part)[entries]
        return self.pattern.indices[entries], values[:, min(sample - part.start, values.shape[1] - 1)]


def times(pattern: Pattern, values: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """The products of a matrix and vectors, ``(columns, many, batch)`` to ``(rows, many, batch)``."""
    if values.shape[1] > 1 and vectors.shape[1]:
        return torch.stack([matvec(pattern, values, vector.contiguous()) for vector in vectors.unbind(1)], 1)
    return matvec(pattern, values[:, :1], vectors.flatten(1)).reshape(pattern.shape[0], *vectors.shape[1:])
