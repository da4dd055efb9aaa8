"""Elements on which patterns may depend: those of indices and masks, and the indices of sparse tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..decompositions import indices_of, is_sparse


@dataclass(frozen=True, eq=False)
class Contents:
    """The elements of an index or a mask, or the indices of a sparse tensor, at some time."""

    copy: torch.Tensor

    @classmethod
    def of(cls, value: torch.Tensor) -> Contents:
        """Those of a tensor now."""
        return cls((indices_of(value) if is_sparse(value) else value.detach()).clone())

    def equal(self, value: torch.Tensor) -> bool:
        """Whether a tensor of the same form has these elements."""
        # Writes through NumPy or ``.data`` do not change a tensor's version.
        return torch.equal(indices_of(value) if is_sparse(value) else value, self.copy)
