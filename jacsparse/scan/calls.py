"""Back-propagation by scan as one call."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..runtime import a_type
from ..schedule import Schedule
from ..stages import Chain, Run, check_input, forward_pass
from ..tracing import check_module
from .autograd_scan import Puller, scanned
from .scanner import Scanner, Scanners, scanner_of
from .stage_ranks import StageRanks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: The scanners of each module that later calls find, with their plans and what these have on a device; and how many a
#: module has.
_SCANNERS: weakref.WeakKeyDictionary[nn.Module, Scanners] = weakref.WeakKeyDictionary()
_MOST_SCANNERS = 2


def _scanner_of(module: nn.Module, chain: Chain, schedule: Schedule | str) -> Scanner:
    """The scanner of one of a module's chains, which an earlier call may have made."""
    return scanner_of(_SCANNERS.setdefault(module, OrderedDict()), chain, schedule, most=_MOST_SCANNERS)


def vjp(
    module: nn.Module, x: torch.Tensor, *, schedule: Schedule | str = "auto"
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor]]]:
    """A module's output and the function that takes gradients back, as ``torch.func.vjp``; parameters are constants.

    Parameters
    ----------
    module : Module
        A module, as of `jacsparse.nn.Scan`.
    x : Tensor, (batch, *input_shape)
        The input, float32 or float64.
    schedule : Schedule or str
        The order of the products, as `jacsparse.nn.Scan` takes it.

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
    if not len(x):
        return torch.func.vjp(check_module(module), x)  # type: ignore[return-value]
    chain, run = forward_pass(check_module(module), x, pruned=None, couples=True)
    scanner, y = _scanner_of(module, chain, schedule), run.trace.output.detach()

    def pullback(gradient: torch.Tensor) -> tuple[torch.Tensor]:
        x_gradient, _ = scanner.pull_back(run.records, _check_gradient(gradient, y), (), for_input=True)
        assert x_gradient is not None
        return (x_gradient,)

    return y, pullback


def _check_gradient(gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return a gradient of `y`, detached, where its dtype, shape and device fit."""
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(f"the gradient is {a_type(gradient)}; expected a torch.Tensor")
    actual, expected = (f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}" for tensor in (gradient, y))
    if actual != expected:
        raise ValueError(f"the gradient is {actual}; expected that of the output: {expected}")
    return gradient.detach()


def backward(
    module: nn.Module,
    x: torch.Tensor,
    grad_output: torch.Tensor,
    *,
    schedule: Schedule | str = "auto",
    process_group: ProcessGroup | None = None,
    exchange: str = "auto",
) -> torch.Tensor:
    """Run a module forward and back: return the gradient of `x`, and add those of the parameters to ``.grad``.

    Parameters
    ----------
    module : Module
        A module, as of `jacsparse.nn.Scan`, that draws no random numbers: this function runs it once more.
    x : Tensor, (batch, *input_shape)
        The input, float32 or float64.
    grad_output : Tensor, (batch, *output_shape)
        Gradient of the module's output.
    schedule : Schedule or str
        The order of the products, as `jacsparse.nn.Scan` takes it.
    process_group, exchange
        As `jacsparse.nn.Scan` takes them: all ranks pass the same input and gradient, each with its own stages.

    Returns
    -------
    Tensor, (batch, *input_shape)
        Gradient of `x`.

    Raises
    ------
    ValueError
        Where the module draws random numbers, or a shape does not fit.
    """
    across = StageRanks.of(process_group, exchange)
    if across is None:
        return backward_by(lambda chain: _scanner_of(module, chain, schedule), module, x, grad_output)
    check_module(module)

    def run_part(x: torch.Tensor) -> tuple[Scanner, Run]:
        chain, run = _deterministic_run(module, x)
        return _scanner_of(module, chain, schedule), run

    return _backward(lambda leaf: across.output(module, leaf, run_part), x, grad_output)


def backward_by(
    puller_of: Callable[[Chain], Puller], module: nn.Module, x: torch.Tensor, grad_output: torch.Tensor
) -> torch.Tensor:
    """As `backward`, by what pulls gradients back through the module's chain."""
    check_module(module)

    def output(leaf: torch.Tensor) -> torch.Tensor:
        if not len(leaf):
            return module(leaf)  # type: ignore[no-any-return]
        chain, run = _deterministic_run(module, leaf)
        return scanned(puller_of(chain), run, leaf)

    return _backward(output, x, grad_output)


def _backward(
    output_of: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, grad_output: torch.Tensor
) -> torch.Tensor:
    leaf = check_input("x", x).detach().requires_grad_()
    with torch.enable_grad():
        y = output_of(leaf)
        y.backward(_check_gradient(grad_output, y))
    assert leaf.grad is not None
    return leaf.grad


def _deterministic_run(module: nn.Module, x: torch.Tensor) -> tuple[Chain, Run]:
    chain, run = forward_pass(module, x, pruned=None, couples=True)
    drawing = run.trace.graph.drawing
    if drawing is not None:
        raise ValueError(f"{drawing}: backward runs the forward again, which would draw other numbers; call .eval()")
    return chain, run
