"""Sums of matrices with known patterns, over the union of their positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..patterns import Csr, Diagonal, Full, Pattern
from ..runtime import SIMD, a_type, frozen, index_dtype, kernel, run_rows, uncompiled, unsigned, uploaded
from .gradients import graph_operands, wants_gradient
from .operands import result, same_batch, view
from .plan_cache import PLAN_CACHE
from .symbolic import product_pattern


@kernel
def _find(first, last, indptr, indices, c_indptr, c_indices, place):
    for row in range(first, last):
        at = c_indptr[row]
        for entry in range(indptr[row], indptr[row + 1]):
            while c_indices[at] != indices[entry]:
                at += 1
            place[entry] = at


@kernel
def _add(first, last, place, values, out):
    for entry in range(first, last):
        at = place[entry]
        for sample in range(out.shape[1]):
            out[at, sample] += values[entry, sample if values.shape[1] > 1 else 0]


@kernel
def _add_one(first, last, place, values, out):
    for entry in range(first, last):
        out[place[entry]] += values[entry]


def sum_pattern(terms: Sequence[Pattern]) -> Pattern:
    """The union of patterns of one shape.

    Examples
    --------
    >>> left, right = Pattern((1, 3), [0, 1], [0]), Pattern((1, 3), [0, 2], [0, 2])
    >>> sum_pattern([left, right]).indices
    array([0, 2], dtype=int32)
    """
    shape = terms[0].shape
    for term in terms:
        if term.shape != shape:
            raise ValueError(f"the terms have shapes {shape} and {term.shape}; they must agree")
    structures = [term.structure for term in terms]
    if any(isinstance(structure, Full) for structure in structures):
        return Pattern.of(Full(*shape))
    if all(isinstance(structure, Diagonal) for structure in structures):
        return Pattern.of(Diagonal(shape[0]))
    if len({term.digest for term in terms}) == 1:
        return terms[0].scaled()
    # The union is the pattern of the product of [I I ...] and the terms, stacked one above the other.
    rows, columns = shape
    count = len(terms)
    dtype = index_dtype(sum(term.nnz for term in terms), rows * count, columns)
    starts = np.cumsum([0, *(term.nnz for term in terms[:-1])])
    indptr = np.concatenate([[0], *(term.indptr[1:] + start for term, start in zip(terms, starts, strict=True))])
    indices = np.concatenate([term.indices for term in terms])
    stacked = Csr(rows * count, columns, frozen(indptr.astype(dtype)), frozen(indices.astype(dtype)))
    picks = np.arange(rows * count, dtype=dtype).reshape(count, rows).T.ravel()
    picked = Csr(rows, rows * count, frozen(np.arange(rows + 1, dtype=dtype) * dtype(count)), frozen(picks.copy()))
    union = product_pattern(Pattern.of(picked), Pattern.of(stacked))
    # A term with all positions is the union, and its structure says more than the union's indices.
    whole = next((term for term in terms if term.nnz == union.nnz), None)
    return union if whole is None else whole.scaled()


class SumPlan:
    """Everything about ``C = A + B + ...`` that the patterns of the terms decide; `add` only adds values.

    `plan_sum` makes it. It is immutable, and any number of threads may use it at once.

    Attributes
    ----------
    terms : tuple of Pattern
        The patterns of the terms, all of one shape.
    pattern : Pattern
        The pattern of the sum.
    """

    def __init__(self, terms: Sequence[Pattern], pattern: Pattern | None = None) -> None:
        self.terms = tuple(terms)
        self.pattern = sum_pattern(self.terms) if pattern is None else pattern
        self._places = [self._place(term) for term in self.terms]

    def _place(self, term: Pattern) -> np.ndarray | None:
        """The place of each entry of a term in the sum; None where the two patterns are equal."""
        if term.nnz == self.pattern.nnz:
            return None
        if isinstance(self.pattern.structure, Full):
            return term.places
        place, indptr = np.empty(term.nnz, dtype=index_dtype(self.pattern.nnz, 0, 0)), self.pattern.indptr
        run_rows(_find, indptr, term.indptr, term.indices, indptr, self.pattern.indices, place)
        return frozen(place)

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The patterns of the terms and of the sum."""
        return (*self.terms, self.pattern)

    @property
    def nbytes(self) -> int:
        """Bytes of the plan's index arrays, without those of the patterns."""
        return sum(place.nbytes for place in self._places if place is not None)

    @uncompiled
    def add(self, values: Sequence[Any], *, out: Any = None) -> Any:
        """Values of the sum, added in the order of the terms.

        Parameters
        ----------
        values : sequence of array or Tensor, each (nnz, batch) or (nnz,)
            The values of each term: float32 or float64, NumPy arrays or tensors, all on one device. A batch of 1 is
            shared by all samples.
        out : array or Tensor, optional
            Contiguous memory for the result.

        Returns
        -------
        array or Tensor, (pattern.nnz, batch), or (pattern.nnz,) where all terms have one dimension

        Raises
        ------
        TypeError, ValueError
            Where the number of arrays, or a kind, dtype, shape or device does not fit; the message names the operand.

        Examples
        --------
        >>> plan = plan_sum([Pattern((1, 2), [0, 1], [0]), Pattern((1, 2), [0, 2], [0, 1])])
        >>> plan.add([np.array([1.0]), np.array([10.0, 20.0])])
        array([11., 20.])
        """
        if len(values) != len(self.terms):
            raise ValueError(f"values holds {len(values)} arrays for {len(self.terms)} terms")
        pairs = enumerate(zip(values, self.terms, strict=True))
        parts = [view(f"values[{number}]", part, term.nnz) for number, (part, term) in pairs]
        batch = _batch(parts)
        if wants_gradient(*values):
            return self._differentiated(values, batch, out)
        what = "values of a sum of {:,} × {:,} matrices".format(*self.pattern.shape)
        returned, c = result(what, out, values, parts, self.pattern.nnz, batch, parts[0])
        c[...] = 0
        for term, part, place in zip(self.terms, parts, self._places, strict=True):
            if place is None:
                c += part
            elif isinstance(c, torch.Tensor):
                c[uploaded(place, c.device)] += part
            elif batch == 1:
                run_rows(_add_one, term.nnz, unsigned(place), part.reshape(-1), c.reshape(-1), lanes=SIMD)
            else:
                # Elements of the sum are looked up one by one.
                run_rows(_add, term.nnz, unsigned(place), part, c, lanes=SIMD * batch)
        return returned

    def _differentiated(self, values: Sequence[Any], batch: int, out: Any) -> Any:
        """`add` as part of autograd's graph."""
        parts = graph_operands(out, **{f"values[{number}]": part for number, part in enumerate(values)})
        total = parts[0].new_zeros((self.pattern.nnz, batch))
        for part, place in zip(parts, self._places, strict=True):
            term = part.expand(-1, batch)
            total = total + term if place is None else total.index_add(0, uploaded(place, total.device), term)
        return total[:, 0] if all(part.ndim == 1 for part in values) else total

    def __repr__(self) -> str:
        m, n = self.pattern.shape
        return f"<SumPlan {m} × {n}, {len(self.terms)} terms, nnz {self.pattern.nnz:,}, {self.nbytes:,} bytes>"


def _batch(parts: Sequence[Any]) -> int:
    """The batch of terms on one device; a term with a batch of 1 is shared by all samples."""
    first = 0
    for number, part in enumerate(parts):
        batch = same_batch(f"values[{first}]", parts[first], f"values[{number}]", part)
        first = first if batch == parts[first].shape[1] else number
    return int(parts[first].shape[1])


def plan_sum(terms: Sequence[Pattern]) -> SumPlan:
    """Plan the sum of matrices with these patterns: the symbolic phase, done once.

    The plans used last are cached, as those of `plan_product`.

    Parameters
    ----------
    terms : sequence of Pattern
        The patterns of the terms.

    Raises
    ------
    TypeError
        Where a term is no Pattern.
    ValueError
        Where there are no terms, or their shapes differ.
    """
    if not terms:
        raise ValueError("terms is empty; a sum needs at least one")
    for number, term in enumerate(terms):
        if not isinstance(term, Pattern):
            raise TypeError(f"terms[{number}] is {a_type(term)}; expected a Pattern")
    return PLAN_CACHE.get(("sum", *(term.digest for term in terms)), lambda: SumPlan(terms))
