"""Hessians: symmetric Jacobians of gradients.

The pattern is that of a `Gradient`'s Jacobian, as any function's: its run makes the calls of the function and those of
autograd's backward pass, each of which has a rule or is decomposed. Of that, `symmetric_part` keeps the entries whose
mirror images are entries too: where one of a pair is certainly zero, so is the other. A star colouring is of that part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import torch

from ..patterns import Pattern, rows_at
from ..runtime import on_device, uploaded
from ..spgemm import SparseJacobian
from .arguments import Arguments
from .colorings import Coloring, SymmetricPart, star_coloring, symmetric_part
from .gradients import Gradient
from .options import Keywords, Options, PreparationKeywords, with_parts
from .prepared import PreparedJacobian, Result
from .prepared_program import Evaluated, PreparedProgram
from .unprepared import jacobian_and_returned


class PreparedHessian(PreparedJacobian[Result]):
    """The Hessian of a scalar function, prepared for arguments of the same shapes; `prepare_hessian` makes it.

    It is the `PreparedJacobian` of the function's gradient, and exactly symmetric.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._symmetric = symmetric_part(self.pattern)
        self.pattern = self._symmetric.pattern

    def _evaluated(self, args: Sequence[Any], returns: bool) -> tuple[Evaluated, PreparedProgram]:
        (values, gradient, beside), program = super()._evaluated(args, returns)
        # A star colouring takes both entries of a pair from one place.
        if self.method != "compressed":
            values = _gathered(values, self._symmetric)
        return (values, gradient, beside), program

    def _parts(self, y: Any, aux: Any) -> Sequence[tuple[bool, Any]]:
        return _parts(self._options, y, aux)

    @staticmethod
    def _differentiated(f: Callable[..., Any], arguments: Arguments, options: Options) -> Callable[..., Any]:
        return Gradient(f, arguments, options)

    _coloring: Callable[[Pattern], Coloring] = staticmethod(star_coloring)


@overload
def prepare_hessian(
    f: Callable[..., Any],
    *args: Any,
    gradient: Literal[False] = ...,
    value: Literal[False] = ...,
    has_aux: Literal[False] = ...,
    **options: Unpack[PreparationKeywords],
) -> PreparedHessian[SparseJacobian]: ...


@overload
def prepare_hessian(
    f: Callable[..., Any],
    *args: Any,
    gradient: bool = ...,
    value: bool = ...,
    has_aux: bool = ...,
    **options: Unpack[PreparationKeywords],
) -> PreparedHessian[tuple[Any, ...]]: ...


def prepare_hessian(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool | None = None,
    method: str = "auto",
    compile: bool = False,
    pruned: bool = True,
    create_graph: bool = False,
    gradient: bool = False,
    value: bool = False,
    has_aux: bool = False,
    pattern: Pattern | None = None,
    static_argnums: int | Sequence[int] = (),
) -> PreparedHessian[Any]:
    """A scalar function's Hessian, prepared for arguments of the same shapes.

    Parameters
    ----------
    f : callable
        As in `hessian`, and without random numbers and branches on what tensors hold.
    *args, argnums, batched
        As in `hessian`.
    method, compile, pruned, create_graph, pattern, static_argnums
        As in `prepare_jacobian`; ``compressed`` takes a seed for each colour of a star colouring, and a pattern has to
        be symmetric.
    gradient, value, has_aux
        As in `hessian`.

    Returns
    -------
    PreparedHessian
        ``prepared(*args)`` is a SparseJacobian, or a tuple as that of `hessian`.

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
    if isinstance(pattern, Pattern) and pattern != pattern.T:
        raise ValueError("pattern is not symmetric; that of a Hessian is")
    options = Options(method, compile, pruned, create_graph, value, has_aux, pattern, gradient)
    return PreparedHessian[Any].prepare(f, args, argnums, batched, static_argnums, options)


@overload
def hessian(
    f: Callable[..., Any],
    *args: Any,
    gradient: Literal[False] = ...,
    value: Literal[False] = ...,
    has_aux: Literal[False] = ...,
    **options: Unpack[Keywords],
) -> SparseJacobian: ...


@overload
def hessian(
    f: Callable[..., Any],
    *args: Any,
    gradient: bool = ...,
    value: bool = ...,
    has_aux: bool = ...,
    **options: Unpack[Keywords],
) -> tuple[Any, ...]: ...


def hessian(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool | None = None,
    pruned: bool = True,
    create_graph: bool = False,
    gradient: bool = False,
    value: bool = False,
    has_aux: bool = False,
) -> SparseJacobian | tuple[Any, ...]:
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
    gradient, value : bool
        Whether to return the gradient too, and what `f` returns: ``(hessian, gradient, value)``, or one of the two. The
        gradient has the shape of the argument; for several tensors it is a list of those of each.
    has_aux : bool
        Whether `f` returns ``(number, aux)``; `aux` is then returned last.

    Returns
    -------
    SparseJacobian
        The Hessian, exactly symmetric; its batch is 1 where all samples share the values, as for a quadratic function.
        A tuple with `gradient`, `value` or `has_aux`.

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
    >>> H, g, y = hessian(lambda x: (x**3).sum(), torch.tensor([1.0, 2.0]), gradient=True, value=True)
    >>> g.tolist(), y.item()
    ([3.0, 12.0], 9.0)
    """
    arguments = Arguments.of_call(f, args, argnums, batched)
    options = Options(pruned=pruned, create_graph=create_graph, gradient=gradient, value=value, has_aux=has_aux)
    full, g, beside = jacobian_and_returned(Gradient(f, arguments, options), arguments, options)
    symmetric = symmetric_part(full.pattern)
    result = replace(full, pattern=symmetric.pattern, values=_gathered(full.values, symmetric))
    return with_parts(result, *_parts(options, g, beside))


def _parts(options: Options, gradient: Any, beside: Any) -> Sequence[tuple[bool, Any]]:
    """What may be returned beside a Hessian, and whether it is: beside the gradient are the value and `aux`."""
    value, aux = beside or (None, None)
    return (options.gradient, gradient), (options.value, value), (options.has_aux, aux)


def _gathered(values: torch.Tensor, symmetric: SymmetricPart) -> torch.Tensor:
    return rows_at(values, uploaded(symmetric.places, values.device) if on_device(values) else symmetric.index)
