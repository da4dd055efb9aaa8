"""The sums and products of folded entries as PyTorch calls, which a compiler joins with those of the derivatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .folding import Folded
from .terms import Step

#: The most calls that read variables: of more, a compiler computes again what several of them read.
MOST = 8

#: Consecutive places, or others.
Places = slice | torch.Tensor


@dataclass(frozen=True)
class _Term:
    """A term of each row of a group: its variables, and the places of its weights in the step."""

    factors: tuple[Places, ...]
    weights: np.ndarray


@dataclass(frozen=True)
class _Group:
    """The rows of a step that have a number of terms."""

    rows: Places
    terms: tuple[_Term, ...]


class CallsOfTerms:
    """The entries of a Jacobian by PyTorch calls, from the local derivatives and the weights of all terms.

    Parameters
    ----------
    folded : Folded
        The entries.
    """

    def __init__(self, folded: Folded) -> None:
        self.folded = folded
        self._steps = [_groups_of(step) for step in folded.steps]

    @property
    def count(self) -> int:
        """The number of calls that read variables."""
        return sum(len(term.factors) for groups in self._steps for group in groups for term in group.terms)

    def weights(self, constant: np.ndarray, weights: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """The constants of the entries, and the weights of each group's terms, as `values` takes them."""
        arrays = [constant]
        for groups, of_step in zip(self._steps, weights, strict=True):
            arrays += [of_step[term.weights] for group in groups for term in group.terms]
        return [torch.from_numpy(array)[:, None] for array in arrays]

    def values(self, derivatives: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """The values, ``(nnz, batch)``, from local derivatives, each ``(batch, elements)``."""
        constant, *rest = weights
        variables, of_terms = torch.cat([part.T for part in derivatives]), iter(rest)
        *steps, last = self._steps
        for groups, step in zip(steps, self.folded.steps, strict=False):
            zeros = variables.new_zeros((step.stop - step.first, variables.shape[1]))
            variables = torch.cat([variables, _with_sums(zeros, groups, variables, of_terms)])
        return _with_sums(constant.expand(-1, variables.shape[1]), last, variables, of_terms)


def _with_sums(
    out: torch.Tensor, groups: Sequence[_Group], variables: torch.Tensor, weights: Iterator[torch.Tensor]
) -> torch.Tensor:
    """Rows with the sums of their terms added."""
    for group in groups:
        sums = out[group.rows]
        for term in group.terms:
            product = next(weights)
            for factor in term.factors:
                product = product * variables[factor]
            sums = sums + product
        if isinstance(group.rows, slice):
            out = torch.cat([out[: group.rows.start], sums, out[group.rows.stop :]])
        else:
            out = out.index_put((group.rows,), sums)
    return out


def _groups_of(step: Step) -> list[_Group]:
    counts = np.diff(step.indptr)
    groups = []
    for count in np.unique(counts[counts > 0]):
        rows = np.flatnonzero(counts == count)
        terms = []
        for number in range(count):
            term = step.indptr[rows] + number
            alike = all((array[term] == array[term[0]]).all() for array in (step.monomial, step.coefficient))
            factors = tuple(_places(array[term]) for array in step.factors)
            terms.append(_Term(factors, term[:1] if alike else term))
        groups.append(_Group(_places(rows), tuple(terms)))
    return groups


def _places(indices: np.ndarray) -> Places:
    if (np.diff(indices) == 1).all():
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return torch.from_numpy(indices.astype(np.int64))
