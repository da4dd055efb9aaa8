"""Recurrences of sparse matrices of one pattern, by a scan over planned products."""

from __future__ import annotations

import functools

import torch

from ..patterns import Pattern
from ..spgemm import ProductPlan, matvec, plan_product

__all__ = ["scan", "times"]


def scan(pattern: Pattern, values: torch.Tensor, offsets: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The states before, between and after the steps ``s ← A_i s + offset_i``, by a Blelloch scan.

    All products of a level have the same patterns: one plan, whose batch are the pairs and the samples.

    Parameters
    ----------
    pattern : Pattern
        Of all ``A_i``, n × n.
    values : Tensor, (nnz, steps, batch)
        Of each.
    offsets : Tensor, (n, steps, batch)
        Of each.
    state : Tensor, (n, batch)
        Before the first step.

    Returns
    -------
    Tensor, (n, steps + 1, batch)
    """
    steps = values.shape[1]
    states = state.new_empty((len(state), steps + 1, state.shape[1]))
    if steps < 2:
        states[:, 0] = state
    else:
        early, late = slice(0, steps - 1, 2), slice(1, None, 2)
        plan, pairs = _squared(pattern), steps // 2
        joint = plan.multiply(_flat(values[:, late]), _flat(values[:, early]))
        shifts = times(pattern, values[:, late], offsets[:, early]) + offsets[:, late]
        joint = joint.reshape(plan.pattern.nnz, pairs, values.shape[2])
        states[:, 0 : 2 * pairs + 1 : 2] = scan(plan.pattern, joint, shifts, state)
    if steps:
        states[:, 1::2] = times(pattern, values[:, 0::2], states[:, 0:steps:2]) + offsets[:, 0::2]
    return states


@functools.lru_cache(maxsize=16)
def _squared(pattern: Pattern) -> ProductPlan:
    """Made once for all that are solved with the same pattern; one for each level."""
    return plan_product(pattern, pattern)


def times(pattern: Pattern, values: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """The products of ``(nnz, steps, batch)`` matrices with ``(n, steps, batch)`` vectors."""
    found: torch.Tensor = matvec(pattern, _flat(values), _flat(vectors))
    return found.reshape(pattern.shape[0], *vectors.shape[1:])


def _flat(values: torch.Tensor) -> torch.Tensor:
    """``(rows, steps, batch)`` as ``(rows, steps · batch)``."""
    return values.reshape(values.shape[0], values.shape[1] * values.shape[2])
