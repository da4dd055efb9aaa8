"""Hessians: symmetric Jacobians of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..patterns import Pattern
from ..spgemm import SparseJacobian
from .arguments import Arguments, arguments_of, has_samples
from .compressed import Coloring
from .evaluation import jacobian
from .gradients import Gradient
from .prepared import PreparedJacobian
from .star_coloring import star_coloring, symmetric_part


class PreparedHessian(PreparedJacobian):
    """The Hessian of a scalar function, prepared for arguments of the same shapes; `prepare_hessian` makes it.

    It is the `PreparedJacobian` of the function's gradient, and exactly symmetric.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pattern, self._lower = symmetric_part(self.pattern)

    def values(self, *args: Any) -> torch.Tensor:
        """The values on the pattern; see `PreparedJacobian.values`."""
        values = super().values(*args)
        # A star colouring takes both entries of a pair from one place.
        return values if self.method == "compressed" else _gathered(values, self._lower)

    @staticmethod
    def _differentiated(f: Callable[..., Any], arguments: Arguments) -> Callable[..., Any]:
        return Gradient(f, arguments)

    @staticmethod
    def _coloring(pattern: Pattern) -> Coloring:
        return star_coloring(pattern)


def prepare_hessian(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool | None = None,
    method: str = "auto",
    compile: bool = False,
    pruned: bool = True,
) -> PreparedHessian:
    """A scalar function's Hessian, prepared for arguments of the same shapes.

    Parameters
    ----------
    f : callable
        As in `hessian`, and without random numbers and branches on what tensors hold.
    *args, argnums, batched
        As in `hessian`.
    method, compile, pruned
        As in `prepare_jacobian`; ``compressed`` takes a seed for each colour of a star colouring.

    Returns
    -------
    PreparedHessian
        ``prepared(*args)`` is a SparseJacobian.

    Raises
    ------
    TypeError, ValueError, UnsupportedOperatorError
        As `hessian` and `prepare_jacobian`.

    Examples
    --------
    >>> import torch
    >>> energy = prepare_hessian(lambda u, k: k * (u[1:] - u[:-1]).pow(2).sum() / 2, torch.zeros(3), 1.0)
    >>> energy(torch.zeros(3), 3.0).todense().tolist()
    [[3.0, -3.0, 0.0], [-3.0, 6.0, -3.0], [0.0, -3.0, 3.0]]
    """
    return PreparedHessian.prepare(f, args, argnums, batched, method, compile, pruned)


def hessian(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool | None = None,
    pruned: bool = True,
    create_graph: bool = False,
) -> SparseJacobian:
    """The Hessian of a scalar function.

    Parameters
    ----------
    f : callable
        A function or a module that returns one number, or one for each sample.
    *args
        Its arguments, as in `jacobian`.
    argnums : int or tuple of int
        The arguments to differentiate by. The elements of their tensors are the rows and the columns, one tensor after
        the other.
    batched : bool, optional
        Whether these tensors, and the result, have samples along their first axis, each worked on by itself; left out,
        as in `jacobian`. Without samples, the Hessian has a batch of 1.
    pruned, create_graph : bool
        As in `jacobian`.

    Returns
    -------
    SparseJacobian
        The Hessian, exactly symmetric; its batch is 1 where all samples share the values, as for a quadratic function.

    Raises
    ------
    TypeError, ValueError, UnsupportedOperatorError
        Where the input does not fit, `f` is not scalar, or an operator has no rule.

    See Also
    --------
    prepare_hessian : for many calls with arguments of the same shapes, by a `method` that you choose, or compiled.

    Notes
    -----
    Which elements win, as in max-pooling and sorting, and which ones a computed index names is decided by each run. The
    pattern has entries for all of them.

    Attention runs as products and a softmax in `f`: PyTorch has no second derivatives of its fused kernels.

    ``scipy.optimize.minimize`` takes ``to_scipy()`` as `hess` with the methods Newton-CG and trust-constr; trust-ncg
    and trust-krylov take products alone, by `hessp`.

    Examples
    --------
    >>> import torch
    >>> hessian(lambda x: (x[1:] * x[:-1]).sum() + x[0] ** 3, torch.tensor([1.0, 2.0, 3.0])).todense().tolist()
    [[6.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    """
    arguments = arguments_of(args, argnums, has_samples(f, batched))
    gradient = Gradient(f, arguments)
    full = jacobian(
        gradient, *args, argnums=argnums, batched=arguments.batched, pruned=pruned, create_graph=create_graph
    )
    pattern, lower = symmetric_part(full.pattern)
    return replace(full, pattern=pattern, values=_gathered(full.values, lower))


def _gathered(values: torch.Tensor, places: np.ndarray) -> torch.Tensor:
    return values.index_select(0, torch.from_numpy(places).to(values.device))
