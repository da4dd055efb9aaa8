"""The products by which a chain's Jacobian ends, where they are of sparse matrices with a full one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..patterns import Full
from ..runtime import MEMORY_POOL
from ..spgemm import StripProduct


class LastProducts:
    """Two or more last products of an accumulation's matrices, each of a sparse matrix and of the product before it.

    Attributes
    ----------
    numbers : list of int
        The products, in order; none where the result ends otherwise, or is not full.
    """

    def __init__(self, matrices: Sequence[Any], result: int) -> None:
        used = Counter(operand for matrix in matrices for operand in matrix.operands)
        self.numbers, number = list[int](), result
        while matrices[number].multiplies_full and used[number] < 2:
            self.numbers.insert(0, number)
            number = matrices[number].operands[1]
        if len(self.numbers) < 2 or not isinstance(matrices[result].pattern.structure, Full):
            self.numbers = []
            return
        products = [matrices[each] for each in self.numbers]
        self._operands = [number, *(product.operands[0] for product in products)]
        self._shape = products[-1].stored.shape
        self._product = StripProduct([product.factors[0] for product in products], self._shape[1])

    def values(
        self,
        known: Mapping[int, torch.Tensor],
        batch: int,
        compute: Callable[[dict[int, torch.Tensor]], Mapping[int, torch.Tensor]],
        transposed: bool,
    ) -> torch.Tensor | None:
        """The result's values, in the order of the transposed pattern's entries where `transposed`.

        None where strips do not pay, or where numbers are not finite. `compute` adds the values of the matrices that
        are multiplied to those of the known ones, for one sample.
        """
        like = next(iter(known.values())).numpy()
        if not self.numbers or not self._product.width(like.itemsize):
            return None
        rows, columns = self._shape
        steps = (batch, rows * batch) if transposed else (columns * batch, batch)
        out = MEMORY_POOL.empty((rows * columns, batch), like.dtype)
        for sample in range(batch):
            values = compute({number: sample_of(each, sample) for number, each in known.items()})
            right, *factors = (values[number].numpy().reshape(-1) for number in self._operands)
            if not self._product.multiply(factors, right, out.reshape(-1)[sample:], steps):
                return None
        return torch.from_numpy(out)


def sample_of(values: torch.Tensor, sample: int) -> torch.Tensor:
    """One sample's values, ``(nnz, 1)``, in memory of their own; those that all samples share as they are."""
    return values if values.shape[1] == 1 else values[:, sample : sample + 1].contiguous()


def batch_of(samples: Iterable[torch.Tensor], batch: int) -> torch.Tensor:
    """Values ``(nnz, batch)`` of samples ``(nnz, 1)``, each of which is gone before the next one is made."""
    values = torch.empty(0, device="cpu")
    for number, sample in enumerate(samples):
        if number == 0:
            values = sample.new_empty((len(sample), batch))
        values[:, number] = sample[:, 0]
    return values
