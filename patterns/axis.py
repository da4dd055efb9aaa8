"""Operators along one axis whose Jacobian is one matrix there: running sums and products, differences, gates.

With ``M`` the matrix along the axis, `before` places before it and `after` behind it, ``J = I_before ⊗ M ⊗ I_after``.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np
import scipy.sparse
import torch

from .layout import Labels
from .pattern import Pattern
from .rules import Call, Rule, Use, add_rule
from .value_kernels import constants


def axis_labels(use: Use, *axes: int) -> tuple[dict[str, Labels], Labels]:
    """Labels of an operator that mixes the elements of some axes, and works on each place of the others by itself."""
    rank = use.output.ndim
    mixed = {axis % max(1, rank) for axis in axes}
    out = tuple(("mixed", axis) if axis in mixed else axis for axis in range(rank))
    return {name: tuple(range(rank)) for name, shape in use.shapes.items() if len(shape) == rank}, out


def split_at_axis(call: Call) -> tuple[int, int, int, int]:
    """Places before the axis ``dim``, outputs and inputs along it, and places behind it."""
    axis = call["dim"] % max(1, len(call.in_shape))
    rows, columns = (shape[axis] if shape else 1 for shape in (call.out_shape, call.in_shape))
    return math.prod(call.in_shape[:axis]), rows, columns, math.prod(call.in_shape[axis + 1 :])


class _AxisMatrixRule(Rule):
    """One matrix along one axis; its values come by the operator's own derivative."""

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        return axis_labels(use, use.arguments["dim"])

    @abstractmethod
    def matrix(self, size: int) -> scipy.sparse.csr_array:
        """The matrix along an axis of that size."""

    def pattern(self, call: Call) -> Pattern:
        return Pattern.from_scipy(self.jacobian(call))

    def jacobian(self, call: Call) -> scipy.sparse.csr_array:
        """The matrix at each place of the other axes."""
        before, _, columns, after = split_at_axis(call)
        # Without a format, SciPy would store small blocks whole, zeros and all.
        matrix = scipy.sparse.kron(scipy.sparse.eye_array(before), self.matrix(columns), format="csr")
        jacobian = scipy.sparse.csr_array(scipy.sparse.kron(matrix, scipy.sparse.eye_array(after), format="csr"))
        jacobian.sort_indices()
        return jacobian


@add_rule("aten.cummax", "aten.cummin", "aten.cumprod", "aten.logcumsumexp")
class _RunningRule(_AxisMatrixRule):
    """Each output depends on its element and on those before it."""

    def matrix(self, size: int) -> scipy.sparse.csr_array:
        return scipy.sparse.csr_array(np.tri(size))


@add_rule("aten.cumsum")
class _RunningSumRule(_RunningRule):
    """``aten.cumsum``: the matrix is the derivative."""

    def shared(self, call: Call) -> bool:
        return True

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return constants(call, pattern, lambda: self.jacobian(call).data).clone().reshape(-1, 1)


@add_rule("aten.glu")
class _GateRule(_AxisMatrixRule):
    """``aten.glu``: each element of the axis' first half times the sigmoid of its partner in the second half."""

    def matrix(self, size: int) -> scipy.sparse.csr_array:
        half = scipy.sparse.eye_array(size // 2)
        return scipy.sparse.csr_array(scipy.sparse.hstack([half, half]))
