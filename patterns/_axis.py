"""Operators along one axis whose Jacobian is one matrix there: running sums and products, differences, gates.

With ``M`` the matrix along the axis, `before` places before it and `after` behind it, ``J = I_before ⊗ M ⊗ I_after``.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np
import scipy.sparse
import torch

from ._layout import Labels
from ._pattern import Pattern
from ._rules import Call, Rule, Use, add_rule

__all__ = ["axis_labels"]


def axis_labels(use: Use, *axes: int) -> tuple[dict[str, Labels], Labels]:
    """Labels of an operator that mixes the elements of some axes, and works on each place of the others by itself."""
    rank = use.output.ndim
    mixed = {axis % max(1, rank) for axis in axes}
    out = tuple(("mixed", axis) if axis in mixed else axis for axis in range(rank))
    return {name: tuple(range(rank)) for name, shape in use.shapes.items() if len(shape) == rank}, out


class _AxisRule(Rule):
    """One matrix along one axis; its values by the operator's own derivative."""

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        return axis_labels(use, use.arguments["dim"])

    @abstractmethod
    def matrix(self, call: Call, size: int) -> scipy.sparse.csr_array:
        """Along an axis of so many elements."""

    def pattern(self, call: Call) -> Pattern:
        return Pattern.from_scipy(self.jacobian(call))

    def jacobian(self, call: Call) -> scipy.sparse.csr_array:
        """The matrix at each place of the other axes."""
        shape = call.in_shape or (1,)
        axis = call["dim"] % len(shape)
        before, after = (scipy.sparse.eye_array(math.prod(part)) for part in (shape[:axis], shape[axis + 1 :]))
        whole = scipy.sparse.csr_array(
            scipy.sparse.kron(scipy.sparse.kron(before, self.matrix(call, shape[axis])), after)
        )
        whole.sort_indices()
        return whole


class _LinearAxisRule(_AxisRule):
    """The matrix's own values."""

    def shared(self, call: Call) -> bool:
        return True

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert call.input is not None
        return torch.from_numpy(self.jacobian(call).data).to(call.input).reshape(-1, 1)


def _lower_triangle(size: int) -> scipy.sparse.csr_array:
    return scipy.sparse.csr_array(np.tri(size))


@add_rule("aten.cumsum")
class _RunningSumRule(_LinearAxisRule):
    """``aten.cumsum``: ones at each element and those before it."""

    def matrix(self, call: Call, size: int) -> scipy.sparse.csr_array:
        return _lower_triangle(size)


@add_rule("aten.cummax", "aten.cummin", "aten.cumprod", "aten.logcumsumexp")
class _RunningRule(_AxisRule):
    """Of each element and those before it."""

    def matrix(self, call: Call, size: int) -> scipy.sparse.csr_array:
        return _lower_triangle(size)


@add_rule("aten.glu")
class _GateRule(_AxisRule):
    """``aten.glu``: the first half of the axis, each element times the sigmoid of its own in the second half."""

    def matrix(self, call: Call, size: int) -> scipy.sparse.csr_array:
        half = scipy.sparse.eye_array(size // 2)
        return scipy.sparse.csr_array(scipy.sparse.hstack([half, half]))
