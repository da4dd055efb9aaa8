"""The approximate forward pass, linearised around an earlier one (Naumov, equations 13 and 18)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..patterns import Diagonal, Pattern
from ..spgemm import SparseJacobian
from ..stages import Record, check_input, recent_chains
from ..tracing import check_module
from .methods import solver_of
from .recorded_systems import Group, groups_of
from .solver import TriangularSolver
from .systems import BlockBidiagonal


@dataclass(frozen=True, eq=False)
class ForwardApproximation:
    """What an approximate forward pass came to.

    Attributes
    ----------
    output : Tensor, (batch, *out_shape)
        The approximate output.
    errors : list of float
        The largest difference to the module's own output, as a share of its largest element, after each iteration.
    """

    output: torch.Tensor
    errors: list[float]


def forward_scales(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """``D⁻¹ = f(y) / y`` of each layer at the points of a forward pass, each ``(batch, elements)``.

    Parameters
    ----------
    module : Module
        Layers of a matrix, or another affine operator, followed by elementwise ones or by none.
    x : Tensor, (batch, *input_shape)
        The input.

    Raises
    ------
    TypeError, ValueError
        Where the input does not fit, the module draws random numbers, as dropout does, or a layer is not affine; or
        where an activation is not zero at zero, and a point is there: no factor makes f(y) of it.
    """
    check_input("x", x)
    return [_scale(group, place) for place, group in enumerate(_layers(module, x), 1)]


def approximate_forward(
    module: nn.Module,
    x: torch.Tensor,
    scales: Sequence[torch.Tensor],
    *,
    method: str | TriangularSolver = "substitution",
    iterations: int = 1,
) -> ForwardApproximation:
    """The output by a lower triangular system, with the scales of an earlier pass in place of the activations.

    Parameters
    ----------
    module : Module
        As of `forward_scales`.
    x : Tensor, (batch, *input_shape)
        The input.
    scales : sequence of Tensor, each (batch, elements)
        What `forward_scales` returned, for the same samples with other weights, or for as many similar samples.
    method : str or TriangularSolver
        Solves the system, as in `solve`.
    iterations : int
        After each iteration but the last, scales are taken at the points that it came to.

    Raises
    ------
    TypeError, ValueError
        Where the scales do not fit, or as in `forward_scales` and `solve`.

    Notes
    -----
    Each iteration after the first makes one more layer exact, so that after one more than there are layers the output
    is the module's own. It is worth it where far fewer are enough.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh())
    >>> x = torch.randn(5, 3)
    >>> scales = forward_scales(net, x)
    >>> approximate_forward(net, x, scales).errors[0] < 1e-5
    True
    >>> far = approximate_forward(net, 2 * x, scales, iterations=3).errors
    >>> far[0] > far[2] and far[2] < 1e-5
    True
    """
    check_input("x", x)
    if not isinstance(iterations, int) or isinstance(iterations, bool) or iterations < 1:
        raise ValueError(f"iterations is {iterations!r}; expected a number of at least 1")
    solver = solver_of(method)
    layers = _layers(module, x)
    _check_scales(scales, layers)
    matrices: list[SparseJacobian] = []
    right = [x.detach().reshape(len(x), -1)]
    for group in layers:
        assert group.linear is not None
        matrix = group.linear.transposed_jacobian().T
        before = group.linear.input.detach().reshape(len(x), -1)
        matrices.append(matrix)
        # An affine operator's constant, from any of its points.
        right.append(_flat(group.linear.output) - matrix.jvp(before))
    expected = _flat(layers[-1].records[-1].output)
    errors: list[float] = []
    for number in range(iterations):
        inverses = [None, *(SparseJacobian(Pattern.of(Diagonal(s.shape[1])), s.T.contiguous()) for s in scales)]
        system = BlockBidiagonal(matrices, right, inverse_diagonal=inverses, upper=False)
        states = solver.solve(system).values
        largest = expected.abs().max().clamp(min=torch.finfo(x.dtype).tiny)
        errors.append(float((states[-1] - expected).abs().max() / largest))
        if number + 1 < iterations:
            points = [matrix.jvp(before) + c for matrix, before, c in zip(matrices, states, right[1:], strict=False)]
            scales = [
                _ratio(y, _activated(group, y), place)
                for place, (group, y) in enumerate(zip(layers, points, strict=True), 1)
            ]
    return ForwardApproximation(states[-1].reshape(layers[-1].records[-1].output.shape), errors)


def _layers(module: nn.Module, x: torch.Tensor) -> list[Group]:
    """The layers of a module in a forward pass."""
    _, run = recent_chains(check_module(module), pruned=True).of(x)
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


def _check_scales(scales: Sequence[torch.Tensor], layers: Sequence[Group]) -> None:
    """Raise where scales are not those of as many samples at these layers."""
    if len(scales) != len(layers):
        raise ValueError(f"there are {len(scales)} scales for {len(layers)} layers; take them of the same module")
    for place, (scale, group) in enumerate(zip(scales, layers, strict=True)):
        check_input(f"scales[{place}]", scale)
        expected = _flat(group.records[-1].output)
        if scale.shape != expected.shape or scale.dtype != expected.dtype:
            raise ValueError(
                f"scales[{place}] is {scale.dtype} {tuple(scale.shape)}; expected {expected.dtype} "
                f"{tuple(expected.shape)}: forward_scales makes them, of as many samples as x has"
            )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(len(tensor), -1)


def _scale(group: Group, place: int) -> torch.Tensor:
    assert group.linear is not None
    y = _flat(group.linear.output)
    return _ratio(y, _flat(group.records[-1].output), place)


def _ratio(y: torch.Tensor, f: torch.Tensor, place: int) -> torch.Tensor:
    """``f / y``; 1 where both are zero."""
    broken = (y == 0) & (f != 0)
    if bool(broken.any()):
        sample, element = torch.nonzero(broken)[0].tolist()
        raise ValueError(
            f"layer {place}, sample {sample}, element {element}: y is 0 and f(y) is {f[sample, element]:.3g}; no "
            "factor takes one to the other, so the forward form breaks down here: take another point or activation"
        )
    return torch.where(y == 0, torch.ones_like(f), f / torch.where(y == 0, torch.ones_like(y), y))


def _activated(group: Group, y: torch.Tensor) -> torch.Tensor:
    """A layer's output for other points than those of its run."""
    assert group.linear is not None
    x = y.reshape(group.linear.output.shape)
    for record in group.elementwise:
        x = _evaluated(record, x)
    return _flat(x)


def _evaluated(record: Record, x: torch.Tensor) -> torch.Tensor:
    """An elementwise stage's output for another input."""
    with torch.no_grad():
        return record.output_for(x)
