"""Forward passes as lower triangular systems around a point: what layered and recurrent networks share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from ..spgemm import SparseJacobian
from ..stages import check_input, forward_pass
from ..tracing import check_module
from .recorded_systems import Group, diagonal_block, groups_of
from .systems import BlockBidiagonal, BlockTriangular


class LinearisedForward(ABC):
    """A forward pass whose activations are multiplications by ``f(y) / y``, and the system that it is.

    Attributes
    ----------
    expected : Tensor
        The module's own output.
    points : list of Tensor
        ``y`` of each layer in the module's own pass.
    """

    #: The axes of a layer's points, for messages.
    axes: tuple[str, ...]
    expected: torch.Tensor
    points: list[torch.Tensor]

    @abstractmethod
    def activated(self, place: int, y: torch.Tensor) -> torch.Tensor:
        """``f(y)`` of a layer, from 0."""

    @abstractmethod
    def system(self, scales: Sequence[torch.Tensor]) -> BlockTriangular:
        """The system with such ``f(y) / y``."""

    @abstractmethod
    def points_of(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``y`` of each layer where the states are these values of the system's nodes."""

    @abstractmethod
    def output_of(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """The output in these values."""

    def scales(self, points: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``f(y) / y`` of each layer, and 1 where both are zero; ValueError where y alone is."""
        return [self._ratio(place, y, self.activated(place, y)) for place, y in enumerate(points)]

    def check(self, scales: Sequence[torch.Tensor]) -> None:
        """Raise where scales are not those of as many samples at these layers."""
        if len(scales) != len(self.points):
            raise ValueError(
                f"there are {len(scales)} scales for {len(self.points)} layers; take them of the same module"
            )
        for place, (scale, expected) in enumerate(zip(scales, self.points, strict=True)):
            check_input(f"scales[{place}]", scale)
            if scale.shape != expected.shape or scale.dtype != expected.dtype:
                raise ValueError(
                    f"scales[{place}] is {scale.dtype} {tuple(scale.shape)}; expected {expected.dtype} "
                    f"{tuple(expected.shape)}: forward_scales makes them, of as many samples as x has"
                )

    def _ratio(self, place: int, y: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
        broken = (y == 0) & (f != 0)
        if bool(broken.any()):
            index = torch.nonzero(broken)[0].tolist()
            where = ", ".join(f"{axis} {number}" for axis, number in zip(self.axes, index, strict=True))
            raise ValueError(
                f"layer {place + 1}, {where}: y is 0 and f(y) is {f[tuple(index)]:.3g}; no "
                "factor takes one to the other, so the forward form breaks down here: take another point or activation"
            )
        return torch.where(y == 0, torch.ones_like(f), f / torch.where(y == 0, torch.ones_like(y), y))


class LayeredForward(LinearisedForward):
    """The pass of affine layers and activations, a block bi-diagonal system (Naumov, equations 13 and 18)."""

    axes = ("sample", "element")

    def __init__(self, module: nn.Module, x: torch.Tensor) -> None:
        self._layers = _layers(module, x)
        self._matrices: list[SparseJacobian] = []
        self.points = []
        self._right = [_flat(x)]
        for group in self._layers:
            assert group.linear is not None
            matrix, y = group.linear.transposed_jacobian().T, _flat(group.linear.output)
            self._matrices.append(matrix)
            self.points.append(y)
            # An affine operator's constant, from any of its points.
            self._right.append(y - matrix.jvp(_flat(group.linear.input)))
        self.expected = self._layers[-1].records[-1].output.detach()

    def activated(self, place: int, y: torch.Tensor) -> torch.Tensor:
        linear = self._layers[place].linear
        assert linear is not None
        x = y.reshape(linear.output.shape)
        with torch.no_grad():
            for record in self._layers[place].elementwise:
                x = record.output_for(x)
        return _flat(x)

    def system(self, scales: Sequence[torch.Tensor]) -> BlockTriangular:
        inverses = [None, *(diagonal_block(scale) for scale in scales)]
        return BlockBidiagonal(self._matrices, self._right, inverse_diagonal=inverses, upper=False)

    def points_of(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [matrix.jvp(x) + c for matrix, x, c in zip(self._matrices, values, self._right[1:], strict=False)]

    def output_of(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return values[-1].reshape(self.expected.shape)


def _layers(module: nn.Module, x: torch.Tensor) -> list[Group]:
    """The layers of a module in a forward pass."""
    _, run = forward_pass(check_module(module), x)
    drawing = run.trace.graph.drawing
    if drawing is not None:
        raise ValueError(f"{drawing}: it draws random numbers, other ones in each pass; call .eval()")
    first, *layers = groups_of(run.records)
    if first.records or not layers:
        raise ValueError("the module does not begin with a matrix; equation 13 is for affine layers and activations")
    for group in layers:
        assert group.linear is not None
        if not group.linear.stage.shared:
            raise ValueError(
                f"{group.linear.stage.path}: {group.linear.stage.name} is not affine; equation 13 is for layers of a "
                "matrix and an elementwise function"
            )
    return layers


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(len(tensor), -1)
