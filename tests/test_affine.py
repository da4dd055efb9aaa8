"""Affine maps, one by one and composed, against dense matrices."""

from __future__ import annotations

import itertools

import pytest
import torch

from jacsparse import Pattern
from jacsparse.affine import AffineMaps, DenseMaps, DiagonalMaps, SparseMaps
from tests.helpers import FLOAT, drawn

PATTERN = Pattern((3, 3), [0, 2, 3, 4], [0, 2, 1, 0])


def maps_of(form: str, count: int, batch: int, parts: str) -> tuple[AffineMaps, torch.Tensor, torch.Tensor]:
    """Maps with matrices, offsets or both, and their dense matrices and offsets: ``(maps, batch, …)``."""
    offsets = drawn(count, batch, 3, seed=1) if parts != "matrices" else torch.zeros(count, batch, 3, dtype=FLOAT)
    if form == "sparse":
        values, dense = drawn(PATTERN.nnz, count, batch), torch.zeros(count, batch, 3, 3, dtype=FLOAT)
        dense[..., PATTERN.rows.tolist(), PATTERN.indices.tolist()] = values.permute(1, 2, 0)
        tensors = values, offsets.permute(2, 0, 1)
    else:
        matrices = drawn(count, batch, *((3, 3) if form == "dense" else (3,)))
        dense = matrices.mT if form == "dense" else matrices.diag_embed()
        tensors = matrices, offsets
    dense = dense if parts != "offsets" else torch.zeros_like(dense)
    present = [
        tensor if parts in ("both", part) else None
        for tensor, part in zip(tensors, ("matrices", "offsets"), strict=True)
    ]
    kind = {"dense": DenseMaps, "diagonal": DiagonalMaps}.get(form)
    return kind(*present) if kind else SparseMaps(PATTERN, *present), dense, offsets


def applied(maps: AffineMaps, states: torch.Tensor) -> torch.Tensor:
    """The states, ``(batch, n)``, after one map."""
    if isinstance(maps, SparseMaps):
        return maps.apply(states.T[:, None])[:, 0].T
    return maps.apply(states[None])[0]


@pytest.mark.parametrize("parts", ["both", "matrices", "offsets"])
@pytest.mark.parametrize("form", ["dense", "diagonal", "sparse"])
def test_composed_maps_do_what_all_do_in_turn(form: str, parts: str) -> None:
    for count, batch in itertools.product(range(1, 8), (1, 2)):
        maps, dense, offsets = maps_of(form, count, batch, parts)
        states = expected = drawn(batch, 3, seed=2)
        for matrix, offset in zip(dense, offsets, strict=True):
            expected = (matrix @ expected[..., None])[..., 0] + offset
        torch.testing.assert_close(applied(maps.composed(), states), expected, rtol=1e-12, atol=1e-12)
        one = maps.take(slice(1))
        torch.testing.assert_close(applied(one.after(one.identity()), states), applied(one, states))
