"""Back-propagation by scan as one call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..schedule import Schedule
from ..stages import Chain, Chains, check_input
from ..tracing import check_module
from .autograd_scan import Puller, scanned
from .scanner import Scanner


def vjp(
    module: nn.Module, x: torch.Tensor, *, schedule: Schedule | str = "auto"
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor]]]:
    """A module's output and the function that takes gradients back, as ``torch.func.vjp``; parameters are constants.

    Parameters
    ----------
    module : Module
        A module that works on each sample by itself.
    x : Tensor, (batch, *input_shape)
        The input, float32 or float64.
    schedule : Schedule or str
        The order of the products.

    Returns
    -------
    y : Tensor, (batch, *output_shape)
        ``module(x)``.
    pullback : callable
        ``pullback(gradient of y) -> (gradient of x,)``.

    Raises
    ------
    TypeError, ValueError, UnsupportedOperatorError
        Where the input does not fit, or an operator has no rule.

    Examples
    --------
    >>> import torch
    >>> y, pullback = vjp(torch.nn.ReLU(), torch.tensor([[1.0, -1.0]]))
    >>> pullback(torch.tensor([[5.0, 5.0]]))
    (tensor([[5., 0.]]),)
    """
    check_input("x", x)
    chain, run = Chains(check_module(module)).of(x)
    scanner, y = Scanner(chain, schedule), run.recording.output.detach()

    def pullback(gradient: torch.Tensor) -> tuple[torch.Tensor]:
        x_gradient, _ = scanner.pull_back(run.records, _check_gradient(gradient, y), (), for_input=True)
        assert x_gradient is not None
        return (x_gradient,)

    return y, pullback


def _check_gradient(gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return a gradient of `y`, detached, where its dtype, shape and device fit."""
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(f"the gradient is a {type(gradient).__name__}; expected a torch.Tensor")
    actual, expected = (f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}" for tensor in (gradient, y))
    if actual != expected:
        raise ValueError(f"the gradient is {actual}; expected that of the output: {expected}")
    return gradient.detach()


def backward(
    module: nn.Module, x: torch.Tensor, grad_output: torch.Tensor, *, schedule: Schedule | str = "auto"
) -> torch.Tensor:
    """Run a module forward and back: return the gradient of `x`, and add those of the parameters to ``.grad``.

    Parameters
    ----------
    module : Module
        A module that works on each sample by itself and draws no random numbers: this function runs it once more.
    x : Tensor, (batch, *input_shape)
        The input, float32 or float64.
    grad_output : Tensor, (batch, *output_shape)
        Gradient of the module's output.
    schedule : Schedule or str
        The order of the products.

    Returns
    -------
    Tensor, (batch, *input_shape)
        Gradient of `x`.

    Raises
    ------
    ValueError
        Where the module draws random numbers, or a shape does not fit.
    """
    return backward_by(lambda chain: Scanner(chain, schedule), module, x, grad_output)


def backward_by(
    puller_of: Callable[[Chain], Puller], module: nn.Module, x: torch.Tensor, grad_output: torch.Tensor
) -> torch.Tensor:
    """As `backward`, by what pulls gradients back through the module's chain."""
    leaf = check_input("x", x).detach().requires_grad_()
    with torch.enable_grad():
        y = _output(puller_of, check_module(module), leaf) if len(x) else module(leaf)
        y.backward(_check_gradient(grad_output, y))
    assert leaf.grad is not None
    return leaf.grad


def _output(puller_of: Callable[[Chain], Puller], module: nn.Module, leaf: torch.Tensor) -> torch.Tensor:
    """The module's output, which pulls gradients back; ValueError where the module draws random numbers."""
    chain, run = Chains(module).of(leaf)
    drawing = run.recording.drawing
    if drawing is not None:
        raise ValueError(f"{drawing}: backward runs the forward again, which would draw other numbers; call .eval()")
    return scanned(puller_of(chain), run, leaf)
