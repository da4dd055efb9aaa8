"""Comparison of a prepared Jacobian with its function, by a product with a random vector."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..patterns import UnsupportedOperatorError, gradient_of
from ..spgemm import SparseJacobian
from ..stages import LocalJacobian, agree, chain_of_trace, trace_of_call
from ..tracing import check_module, name_of, undisturbed, without_autocast
from .arguments import Arguments
from .edge_matrices import times
from .flat_function import FlatFunction, module_and_batch, run_once
from .gradients import Gradient
from .options import Options
from .unprepared import jacobian_and_returned
from .verification import MOST_ROUNDINGS, VerificationError, error_of_product, largest_finite

if TYPE_CHECKING:
    from torch import nn


def compared(
    f: Callable[..., Any],
    arguments: Arguments,
    jacobian: SparseJacobian,
    options: Options,
    *,
    method: str,
    limit: float,
    registered: bool,
) -> float:
    """The largest difference of a prepared Jacobian's product, as a share of the largest sum of absolute terms.

    Where values of an operator are `registered`, it is compared with `jacsparse.jacobian`: autograd does not know of
    these, nor the prepared chain of those that were registered since.

    Raises
    ------
    VerificationError
        Where the difference is larger than the limit.
    """
    x, function = arguments.flat().requires_grad_(), FlatFunction(f, arguments, options.has_aux)
    y, g, expected = _random_gradient(function, x)
    if registered or expected is None:
        registered = True
        of_run, *_ = jacobian_and_returned(f, arguments, Options(has_aux=options.has_aux))
        expected = of_run.vjp(g).reshape(x.shape)
    rounding = partial(_rounding_of_product, f, arguments, g, options.has_aux)
    error = error_of_product(jacobian, g, expected, limit, rounding)
    if error <= limit:
        return error
    if not agree(run_once(function, x).detach(), y.detach()):
        raise VerificationError(
            f"{name_of(f)} returns other numbers where it is called again with the same arguments, as by random "
            "numbers that no PyTorch generator draws, or by a counter, so that no prepared program repeats it: pass "
            "such numbers as arguments, or call jacsparse.jacobian, which runs it each time"
        )
    remedy = "prepare it again" + (" with method='products'" if method == "compressed" else "")
    if options.pattern is not None:
        remedy = "prepare it again with a pattern that has all entries, or without one"
    if not math.isfinite(error):
        remedy = "values are not finite at these arguments: prepare it at others"
    if arguments.numbers:
        remedy += ", name arguments in static_argnums if the function asks for the types or values of their numbers"
    whose = "that of jacsparse.jacobian" if registered else "autograd's"
    raise VerificationError(
        f"{name_of(f)}: the prepared Jacobian differs from {whose} by {error:.1e} of the largest product, more than "
        f"{limit:.0e}; {remedy}, or call jacsparse.jacobian"
    )


def _random_gradient(function: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The output of a function at `x`, a random gradient of it, and autograd's gradient of `x` for that, if it has one.

    Operators that have no second derivative in PyTorch may have a rule for a Hessian.
    """
    # A checkpoint in the function runs parts of it again for a gradient.
    with torch.enable_grad(), undisturbed(function, x.device):
        y = function(x.clone())
        generator = torch.Generator().manual_seed(0)
        g = torch.randn(y.shape, generator=generator, dtype=torch.float64, device="cpu").to(y)
        try:
            return y, g.to(x.dtype), gradient_of(y, x, g)
        except RuntimeError as error:
            if "is not implemented" not in str(error):
                raise
            return y, g.to(x.dtype), None


def _rounding_of_product(f: Callable[..., Any], arguments: Arguments, g: torch.Tensor, has_aux: bool) -> float:
    """The rounding error of an element of ``gᵀ J`` that is zero: relative to its absolute terms along all paths."""
    module, x = module_and_batch(f, arguments, has_aux=has_aux)
    with undisturbed(check_module(module), x.device):
        try:
            trace = trace_of_call(module, x)
            records = chain_of_trace(trace, f.f if isinstance(f, Gradient) else f, pruned=False).records(trace)
        except UnsupportedOperatorError:
            # With a pattern of one's own, an operator needs no rule.
            return 0.0
        with torch.no_grad(), without_autocast(x.device):
            terms = g.abs().reshape(len(x), -1).T[:, None].contiguous()
            for record in reversed(records):
                stage = record.stage
                sums = defaultdict[Any, Any](float, {stage.stop: terms})
                for edge in reversed(stage.edges):
                    if edge.target in sums:
                        values = LocalJacobian(edge, trace).transposed_values.abs()
                        sums[edge.source] += times(edge.transposed_pattern, values, sums[edge.target])
                if stage.start not in sums:
                    return 0.0
                terms = sums[stage.start]
    return MOST_ROUNDINGS * torch.finfo(x.dtype).eps * largest_finite(terms)
