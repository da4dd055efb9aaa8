"""The approximate forward pass, linearised around an earlier one (Naumov, equations 13, 18, 23 and 25)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..runtime import a_type
from ..stages import check_input
from .linearised_forward import LayeredForward, LinearisedForward
from .methods import solver_of
from .recurrent_forward import RecurrentForward
from .solver import TriangularSolver


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


def forward_scales(module: nn.Module, x: torch.Tensor, *, hx: torch.Tensor | None = None) -> list[torch.Tensor]:
    """``D⁻¹ = f(y) / y`` of each layer at the points of a forward pass, each ``(batch, elements)``.

    Parameters
    ----------
    module : Module
        Layers of a matrix, or another affine operator, followed by elementwise ones or by none; or an ``nn.RNN`` in one
        direction, whose scales are ``(time, batch, hidden)``.
    x : Tensor, (batch, *input_shape)
        The input.
    hx : Tensor, (layers, batch, hidden), optional
        An RNN's first states.

    Raises
    ------
    TypeError, ValueError
        Where the input does not fit, the module draws random numbers, as dropout does, or a layer is not affine, as a
        GRU's is not; or where an activation is not zero at zero, and a point is there: no factor makes f(y) of it.
    """
    forward = _linearised(module, x, hx)
    return forward.scales(forward.points)


def approximate_forward(
    module: nn.Module,
    x: torch.Tensor,
    scales: Sequence[torch.Tensor],
    *,
    method: str | TriangularSolver = "substitution",
    iterations: int = 1,
    hx: torch.Tensor | None = None,
) -> ForwardApproximation:
    """The output by a lower triangular system, with the scales of an earlier pass in place of the activations.

    Parameters
    ----------
    module : Module
        As of `forward_scales`.
    x : Tensor, (batch, *input_shape)
        The input.
    scales : sequence of Tensor, each (batch, elements), or (time, batch, hidden)
        What `forward_scales` returned, for the same samples with other weights, or for as many similar samples.
    method : str or TriangularSolver
        Solves the system, as in `solve`.
    iterations : int
        After each iteration but the last, scales are taken at the points that it came to.
    hx : Tensor, (layers, batch, hidden), optional
        An RNN's first states.

    Raises
    ------
    TypeError, ValueError
        Where the scales do not fit, or as in `forward_scales` and `solve`.

    Notes
    -----
    Each iteration after the first makes one more layer exact, so that after one more than there are layers the output
    is the module's own. It is worth it where far fewer are enough. The system of an RNN of k layers over τ steps has
    two levels (equations 23 and 25), and counts as k + τ - 1 layers.

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
    >>> rnn, x = nn.RNN(3, 4, num_layers=2), torch.randn(6, 5, 3)
    >>> approximate_forward(rnn, x, forward_scales(rnn, x), method="hybrid").output.shape
    torch.Size([6, 5, 4])
    """
    if not isinstance(iterations, int) or isinstance(iterations, bool) or iterations < 1:
        raise ValueError(f"iterations is {iterations!r}; expected a number of at least 1")
    solver, forward = solver_of(method), _linearised(module, x, hx)
    forward.check(scales)
    largest = forward.expected.abs().max().clamp(min=torch.finfo(x.dtype).tiny)
    errors: list[float] = []
    for number in range(iterations):
        values = solver.solve(forward.system(scales)).values
        output = forward.output_of(values)
        errors.append(float((output - forward.expected).abs().max() / largest))
        if number + 1 < iterations:
            scales = forward.scales(forward.points_of(values))
    return ForwardApproximation(output, errors)


def _linearised(module: nn.Module, x: torch.Tensor, hx: torch.Tensor | None) -> LinearisedForward:
    """A module's forward pass as a system."""
    check_input("x", x)
    if isinstance(module, nn.RNNBase):
        return RecurrentForward(module, x, hx)
    if hx is not None:
        raise TypeError(f"hx is of an RNN, and the module is {a_type(module)}")
    return LayeredForward(module, x)
