"""Stencils: products ``A diag(d) B`` of the Jacobians of two convolutions, as grids over positions.

A convolution's Jacobian is a sum of shifted diagonals, one for each weight, and so is such a product: for each channel
`i` of A's rows, channel `o` of B's columns and shift `s` it has

    C[(i, p), (o, p + s)]  =  Σ a · b · d[c, p + t]     over the weights a = A[i, c, t] and b = B[c, o, s - t].

A grid has these values for all positions `p`, side by side: an index is read once for all positions and samples, and
vectors run along both. `ProductPlan` has each row's entries side by side, and putting them there takes longer than
computing them; so they stay grids, and `matvec` reads them as they are. A grid has the lines of its first axis side by
side, without the room between them, each filled up to whole vectors.

Positions are numbered through lines of the last axis and so on, with room at their ends for what shifts reach beyond
them. There `d` and vectors are zero. What a grid has for such a position, or for an entry that no pair of weights
reaches, is multiplied by such a zero, or is one; so numbers have to be finite.

Lower bound: the grids are written once; each pair of weights reads `d` once, from the second-level cache. With 97 % of
the weights pruned there are one or two pairs for an entry, so that writing takes most of the time: what no cache holds
is written past the caches, which would read it first.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch

from ..codegen import add_products
from ..patterns import Convolution, Pattern, ShiftedDiagonals
from ..runtime import frozen, kernel, row_starts, run_rows
from .lanes import finish_writes, write_sums_of_lines
from .symbolic import multiply_adds, product_pattern
from .vectors import matvec

#: Elements of a vector; those of a line are a multiple, or half of them.
LANES = 8
#: Bytes of grids from which they are written past the caches.
PAST_CACHES = 2**24
#: Multiply-adds over grids for each pair of entries that meets, up to which a stencil is faster than `Slots`.
PADDING = 1.6


@kernel
def _pair_weights(first, last, left, right, a, b, weights):
    for pair in range(first, last):
        weights[pair] = a[left[pair]] * b[right[pair]]


@kernel
def _multiply(first, last, bounds, lines, sizes, pairs, weights, starts, step, past_caches, d, grids):
    for grid in range(first, last):
        terms = pairs[grid], pairs[grid + 1]
        write_sums_of_lines(
            grids, bounds[grid], lines[grid], sizes[grid], weights, starts, terms[0], terms[1], d, 0, step, past_caches
        )
    if past_caches:
        finish_writes()


@kernel
def _matvec(first, last, grids_of_channels, bounds, lines, sizes, reads, rows, columns, batch, step, grids, x, y):
    for channel in range(first, last):
        for grid in range(grids_of_channels[channel], grids_of_channels[channel + 1]):
            at_y, at_x = rows[grid] * batch, columns[grid] * batch
            for line in range(lines[grid]):
                at = bounds[grid] + line * sizes[grid]
                add_products(y, at_y + line * step, grids, at, x, at_x + line * step, reads[grid])


@kernel
def _gather(
    first, last, grids_of_channels, by_column, positions, places, begins, shifts, channels, sizes, bounds, elements,
    step, batch, grids, indptr, indices, values,
):  # fmt: skip
    # A row's columns are some of those that its grids lead to, in the same order.
    for row in range(first, last):
        channel, place = row // len(positions), row % len(positions)
        entry = indptr[row]
        for grid in by_column[grids_of_channels[channel] : grids_of_channels[channel + 1]]:
            column, inside = np.int64(channels[grid]), True
            for axis in range(len(sizes)):
                reached = positions[place, axis] + shifts[grid, axis]
                inside &= 0 <= reached < sizes[axis]
                column = column * sizes[axis] + reached
            if inside and entry < indptr[row + 1] and indices[entry] == column:
                line = (places[place] - begins[grid]) // step
                rest = places[place] - begins[grid] - line * step
                at = bounds[grid] + line * elements[grid] + rest * batch
                for sample in range(batch):
                    values[entry, sample] = grids[at + sample]
                entry += 1


class _Layout(NamedTuple):
    """Where grids lie, for a number of samples.

    Attributes
    ----------
    batch : int
        The number of samples.
    step : int
        Elements of vectors between lines of the first axis.
    bounds : ndarray
        Where grids begin, and where the last ends.
    work : ndarray
        The work of all grids before each: vectors of eight elements take about as long as one.
    sizes, reads : ndarray
        For each grid, the elements of a line, and those that do not reach into the next one.
    starts : ndarray
        Where each pair of weights begins to read the diagonal.
    in_whole_vectors : bool
        Whether each line begins and ends with a vector.
    """

    batch: int
    step: int
    bounds: np.ndarray
    work: np.ndarray
    sizes: np.ndarray
    reads: np.ndarray
    starts: np.ndarray
    in_whole_vectors: bool


class Stencil:
    """A plan of ``C = A diag(d) B``, where `A` and `B` are Jacobians of convolutions without strides, or transposed.

    Parameters
    ----------
    a, b : Pattern
        The patterns of the factors; ValueError where they have an `obstacle`.

    Attributes
    ----------
    a, b : Pattern
        The patterns of the factors.
    flop : int
        2 for each pair of entries of `A` and `B` that meets.

    Notes
    -----
    Values are float32 or float64, on the CPU, and finite: `fits` tells. Any number of threads gives the same bits.

    Source: the thesis, section 3.3, which expects that a format of one's own beats CSR.

    Examples
    --------
    >>> import jacsparse
    >>> from torch import nn
    >>> first, second = nn.Conv1d(1, 2, 3, padding=1).double(), nn.Conv1d(2, 1, 3, padding=1).double()
    >>> x = torch.randn(1, 1, 9, dtype=torch.float64)
    >>> a, b = jacsparse.jacobian(second, first(x)), jacsparse.jacobian(first, x)
    >>> stencil = Stencil(a.pattern, b.pattern)
    >>> stencil
    <Stencil 9 × 18 × 9, flop 284, 5 grids>
    >>> mask = (first(x) > 0).double().reshape(18, 1)
    >>> grids = stencil.multiply(a.values, mask, b.values)
    >>> product = a @ jacsparse.jacobian(nn.ReLU(), first(x)) @ b
    >>> torch.allclose(stencil.values(grids, batch=1), product.values)
    True
    """

    def __init__(self, a: Pattern, b: Pattern) -> None:
        obstacle = self.obstacle(a, b)
        if obstacle:
            raise ValueError(f"there is no stencil of this product: {obstacle}")
        self.a, self.b = a, b
        self.flop = 2 * multiply_adds(a, b)
        left, right = _diagonals(a), _diagonals(b)
        self._entries = left.entries, right.entries
        self._sizes = left.row_sizes, left.column_sizes, right.column_sizes
        first, second, through, shifts = self._reaching_pairs(left, right)
        channels = left.row_channels[first], right.column_channels[second]
        # The pairs of a grid follow each other, in the order of A's entries.
        least = shifts.min(axis=0, initial=0)
        keys = np.stack([*channels, *(shifts - least).T])
        ranges = keys.max(axis=1, initial=0) + 1
        numbers = np.ravel_multi_index(tuple(keys), tuple(ranges.tolist()))
        grids, of_pairs, counts = np.unique(numbers, return_inverse=True, return_counts=True)
        row_channels, column_channels, *distinct = np.unravel_index(grids, tuple(ranges.tolist()))
        shifts_of_grids = np.stack(distinct, axis=1) + least
        # A grid has the positions from which its shift leads to a column.
        low = np.maximum(0, -shifts_of_grids)
        extents = np.minimum(np.array(self._sizes[0]), np.array(self._sizes[2]) - shifts_of_grids) - low
        # A channel's grids of equal extents and as many pairs follow each other: processors foresee their loops' ends.
        sequence = np.lexsort((counts, *extents.T, row_channels))
        self._by_column = frozen(np.argsort(sequence))
        order = np.argsort(self._by_column[of_pairs], kind="stable")
        self._pairs = row_starts(counts[sequence], np.int64)
        self._channels, self._shifts = column_channels[sequence], shifts_of_grids[sequence]
        low, extents = low[sequence], extents[sequence]
        self._left, self._right = (frozen(each[order].astype(np.uint32)) for each in (first, second))
        count = self._shape(a.shape[0], self._sizes[0])[0]
        self._grids_of_channels = row_starts(np.bincount(row_channels, minlength=count), np.int64)
        self._set_strides(through, shifts)
        self._begins = low @ self._strides
        # Along a single axis there is one line.
        lined = np.insert(extents, 0, 1, axis=1) if extents.shape[1] == 1 else extents
        self._lines = lined[:, 0]
        self._widths = 1 + (lined[:, 1:] - 1) @ self._strides[-lined.shape[1] + 1 :]
        self._step = int(self._strides[0]) if len(self._strides) > 1 else self._span
        self._rows = row_channels * self._span + self._begins
        self._columns = self._channels * self._span + self._before + self._begins + self._shifts @ self._strides
        offsets = np.repeat(self._begins, np.diff(self._pairs)) + through[order] @ self._strides
        self._starts = left.column_channels[first[order]] * self._span + self._before + offsets
        self._laid_out: _Layout | None = None

    @classmethod
    def obstacle(cls, a: Pattern, b: Pattern) -> str | None:
        """Why there is no stencil of a product; None where there is one."""
        for name, factor in (("a", a), ("b", b)):
            if not isinstance(factor.structure, Convolution) or factor.structure.diagonals is None:
                return f"{name} is no convolution without strides"
        left, right = _diagonals(a), _diagonals(b)
        if a.shape[1] != b.shape[0] or left.column_sizes != right.row_sizes:
            return f"a's columns have positions {left.column_sizes}, and b's rows {right.row_sizes}"
        return None

    @classmethod
    def of(cls, a: Pattern, b: Pattern) -> Stencil | None:
        """The stencil of a product; None where there is none, or borders make other methods faster."""
        if cls.obstacle(a, b):
            return None
        left, right = _diagonals(a), _diagonals(b)
        met = np.bincount(right.row_channels, minlength=int(left.column_channels.max(initial=-1)) + 1)
        over_grids = int(met[left.column_channels].sum()) * math.prod(left.row_sizes)
        return cls(a, b) if over_grids <= PADDING * multiply_adds(a, b) else None

    @functools.cached_property
    def pattern(self) -> Pattern:
        """The pattern of the product."""
        return product_pattern(self.a, self.b)

    @property
    def nbytes(self) -> int:
        """Bytes of index arrays."""
        return sum(each.nbytes for each in vars(self).values() if isinstance(each, np.ndarray))

    def size(self, batch: int = 1) -> int:
        """Elements of all grids."""
        return int(self._layout(batch).bounds[-1])

    def fits(self, a: torch.Tensor, d: torch.Tensor | None, b: torch.Tensor) -> bool:
        """Whether `multiply` takes factors: on the CPU, convolutions' shared by all samples, no product infinite."""
        factors = [a, b] if d is None else [a, b, d]
        if any(factor.device.type != "cpu" for factor in factors) or a.shape[1] != 1 or b.shape[1] != 1:
            return False
        most = int(np.diff(self._pairs).max(initial=0))
        largest = math.prod(float(factor.abs().max()) if factor.numel() else 0.0 for factor in factors) * most
        return largest < torch.finfo(a.dtype).max

    def multiply(
        self, a: torch.Tensor, d: torch.Tensor | None, b: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The grids of the product.

        Parameters
        ----------
        a, b : Tensor, (nnz, 1)
            Values of the factors, which are those of convolutions: of each weight one entry is read.
        d : Tensor, (k, batch), optional
            The diagonal; ones where it is left out.
        out : Tensor, (size(batch),), optional
            Memory for the grids.

        Returns
        -------
        Tensor, (size(batch),)
        """
        if d is None:
            d = a.new_ones((self.a.shape[1], 1))
        batch = d.shape[1]
        layout = self._layout(batch)
        grids = a.new_empty(int(layout.bounds[-1])) if out is None else out
        left, right = (factor.numpy().ravel()[place] for factor, place in zip((a, b), self._entries, strict=True))
        weights = np.empty(len(self._left), dtype=left.dtype)
        # Elements that are read by index come one by one, not in vectors.
        run_rows(_pair_weights, len(weights), self._left, self._right, left, right, weights, lanes=LANES)
        spread = self._spread(d, self._sizes[1])
        lines = layout.bounds, self._lines, layout.sizes
        pairs = self._pairs, weights, layout.starts, layout.step
        past_caches = grids.nbytes >= PAST_CACHES and grids.data_ptr() % 64 == 0 and layout.in_whole_vectors
        run_rows(_multiply, layout.work, *lines, *pairs, past_caches, spread, grids.numpy())
        return grids

    def matvec(self, grids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``C x`` for each sample.

        Parameters
        ----------
        grids : Tensor, (size(batch),)
            Those of `multiply`.
        x : Tensor, (n, batch)
            A vector for each sample.

        Returns
        -------
        Tensor, (m, batch)
        """
        batch, rows = x.shape[1], self.a.shape[0]
        if not bool(torch.isfinite(x).all()):
            return matvec(self.pattern, self.values(grids, batch), x)  # type: ignore[no-any-return]
        spread, layout = self._spread(x, self._sizes[2]), self._layout(batch)
        channels, _ = self._shape(rows, self._sizes[0])
        y = np.zeros(channels * self._span * batch, dtype=spread.dtype)
        lines = layout.bounds, self._lines, layout.sizes, layout.reads
        places = self._rows, self._columns, batch, layout.step
        work = layout.bounds[self._grids_of_channels] // LANES
        run_rows(_matvec, work, self._grids_of_channels, *lines, *places, grids.numpy(), spread, y)
        taken = y.reshape(channels, self._span, batch)[:, self._places(self._sizes[0])]
        return torch.from_numpy(taken.reshape(rows, batch))

    def values(self, grids: torch.Tensor, batch: int) -> torch.Tensor:
        """Values of the product on `pattern`, ``(nnz, batch)``, of the `grids` that `multiply` gave for a `batch`."""
        indptr, indices, rows = self.pattern.indptr, self.pattern.indices, self._sizes[0]
        values = np.empty((self.pattern.nnz, batch), dtype=grids.numpy().dtype)
        positions = np.stack(np.unravel_index(np.arange(math.prod(rows)), rows), axis=1)
        of_rows = self._grids_of_channels, self._by_column, positions, self._places(rows)
        of_grids = self._begins, self._shifts, self._channels, np.array(self._sizes[2])
        layout = self._layout(batch)
        lines = layout.bounds, layout.sizes, layout.step // batch, batch
        pattern = indptr, indices, values
        run_rows(_gather, indptr, *of_rows, *of_grids, *lines, grids.numpy(), *pattern, lanes=batch)
        return torch.from_numpy(values)

    def __repr__(self) -> str:
        (m, k), n = self.a.shape, self.b.shape[1]
        return f"<Stencil {m} × {k} × {n}, flop {self.flop:,}, {len(self._lines):,} grids>"

    def _reaching_pairs(
        self, left: ShiftedDiagonals, right: ShiftedDiagonals
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The diagonals of pairs that meet, in the order of A's, their shift to A's columns, and that to B's."""
        met = row_starts(np.bincount(right.row_channels, minlength=left.column_channels.max(initial=-1) + 1), np.int64)
        counts = np.diff(met)[left.column_channels]
        first = np.repeat(np.arange(len(counts)), counts)
        before = met[left.column_channels] - row_starts(counts, np.int64)[:-1]
        second = np.arange(len(first)) + np.repeat(before, counts)
        through = left.shifts[first]
        shifts = through + right.shifts[second]
        rows, between, columns = map(np.array, self._sizes)
        low = np.maximum(0, -np.minimum(through, shifts))
        reaches = (low < np.minimum(rows, np.minimum(between - through, columns - shifts))).all(axis=1)
        return first[reaches], second[reaches], through[reaches], shifts[reaches]

    def _set_strides(self, through: np.ndarray, shifts: np.ndarray) -> None:
        """Steps between positions along each axis, and elements of a channel, with what shifts reach on either side."""
        rows, between, columns = map(np.array, self._sizes)
        room = rows
        for size, reached in ((between, through), (columns, shifts)):
            under = np.maximum(0, -reached.min(axis=0, initial=0))
            over = np.maximum(0, rows + reached.max(axis=0, initial=0) - size)
            room = np.maximum(room, size + np.maximum(under, over))
        self._strides = np.append(np.cumprod(room[:0:-1])[::-1], 1).astype(np.int64)
        reached = np.concatenate([through, shifts]) @ self._strides
        self._before = int(max(0, -reached.min(initial=0)))
        lines = max(int(rows[0]), int(between[0]), int(columns[0]))
        self._span = self._before + lines * int(self._strides[0]) + int(max(0, reached.max(initial=0))) + LANES

    def _shape(self, rows: int, sizes: tuple[int, ...]) -> tuple[int, int]:
        """Channels and positions of a matrix' rows or columns."""
        return rows // max(1, math.prod(sizes)), math.prod(sizes)

    def _places(self, sizes: tuple[int, ...]) -> np.ndarray:
        """The numbers of positions."""
        return np.indices(sizes).reshape(len(sizes), -1).T @ self._strides

    def _spread(self, vectors: torch.Tensor, sizes: tuple[int, ...]) -> np.ndarray:
        """Vectors ``(channels * positions, batch)``, flat, with zeros in the room around positions."""
        channels, positions = self._shape(len(vectors), sizes)
        spread = np.zeros((channels, self._span, vectors.shape[1]), dtype=vectors.numpy().dtype)
        spread[:, self._before + self._places(sizes)] = vectors.numpy().reshape(channels, positions, -1)
        return spread.reshape(-1)

    def _layout(self, batch: int) -> _Layout:
        """Where grids lie for a number of samples."""
        layout = self._laid_out
        if layout is None or layout.batch != batch:
            elements, step = self._widths * batch, self._step * batch
            sizes = np.where(elements <= LANES // 2, LANES // 2, _filled(elements))
            bounds = row_starts(_filled(self._lines * sizes), np.int64)
            self._laid_out = layout = _Layout(
                batch,
                step,
                bounds=frozen(bounds),
                work=frozen(bounds // LANES),
                sizes=frozen(sizes),
                reads=frozen(np.minimum(sizes, step)),
                starts=frozen(self._starts * batch),
                in_whole_vectors=not (sizes % LANES).any(),
            )
        return layout


def _filled(elements: np.ndarray) -> np.ndarray:
    """The elements of whole vectors for some elements."""
    return -(-elements // LANES) * LANES


def _diagonals(pattern: Pattern) -> ShiftedDiagonals:
    assert isinstance(pattern.structure, Convolution)
    diagonals = pattern.structure.diagonals
    assert diagonals is not None
    return diagonals
