"""`prepare_jacobian`: the Jacobian of a function, prepared for many calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack, overload

from ..patterns import Pattern
from ..spgemm import SparseJacobian
from .evaluation import Keywords
from .prepared import PreparedJacobian
from .tracing_for_replays import Options


class PreparationKeywords(Keywords, total=False):
    """The same of `prepare_jacobian` and `prepare_hessian`."""

    method: str
    compile: bool
    pattern: Pattern | None


@overload
def prepare_jacobian(
    f: Callable[..., Any],
    *args: Any,
    value: Literal[False] = ...,
    has_aux: Literal[False] = ...,
    **options: Unpack[PreparationKeywords],
) -> PreparedJacobian[SparseJacobian]: ...


@overload
def prepare_jacobian(
    f: Callable[..., Any], *args: Any, value: bool = ..., has_aux: bool = ..., **options: Unpack[PreparationKeywords]
) -> PreparedJacobian[tuple[Any, ...]]: ...


def prepare_jacobian(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool | None = None,
    method: str = "auto",
    compile: bool = False,
    pruned: bool = True,
    create_graph: bool = False,
    value: bool = False,
    has_aux: bool = False,
    pattern: Pattern | None = None,
) -> PreparedJacobian[Any]:
    """A function's Jacobian, prepared for arguments of the same shapes.

    Parameters
    ----------
    f : callable
        A function or a module. It must be a function of its arguments and of what it reads alone: without random
        numbers, and without branches on what tensors hold.
    *args
        Its arguments: tensors, tuples, lists and dicts of them, numbers and anything else.
    argnums : int or tuple of int
        The arguments to differentiate by. Their tensors' elements are the columns, one tensor after the other.
    batched : bool, optional
        Whether these tensors and the outputs have samples along their first axis, each worked on by itself; left out,
        as in `jacobian`. All other arguments are passed as they are.
    method : str
        ``products`` multiplies local Jacobians along paths; ``compressed`` takes products of the whole function with a
        seed for each colour; ``auto`` takes the one of less predicted cost.
    compile : bool
        Whether one piece of machine code computes the values, which takes a tenth of a second to a few seconds to
        make. It fuses elementwise operators, selections and sums of products; what else a call computes, as products of
        matrices, is PyTorch's. The logger ``jacsparse`` tells of it, at level INFO.
    pruned : bool
        Whether the pattern omits the elements of weights that are zero when it is prepared, of parameters and all other
        tensors that `f` reads, but not of its arguments. A call in which one of them is filled raises RuntimeError.
    create_graph : bool
        Whether values have gradients, to the arguments and to what `f` reads that had one when it was prepared, as in
        `jacobian`; a call under ``torch.no_grad`` makes no graph.
    value, has_aux : bool
        As in `jacobian`: whether a call returns what `f` returns too, computed together with the values; and whether
        `f` returns ``(result, aux)``. Numbers in `aux` are constants.
    pattern : Pattern, optional
        A pattern of your own, ``(out_size, in_size)``, in the place of the one that the operators' rules give: for
        entries that are known to be zero, for more entries than there are, or where an operator has no rule. Values
        are then those of ``compressed``. An entry outside of it that is not zero is an error when the Jacobian is
        prepared, and in `check`.

    Returns
    -------
    PreparedJacobian
        ``prepared(*args)`` is a SparseJacobian, or with `value` or `has_aux` a tuple of it, the value and `aux`.

    Raises
    ------
    TypeError, ValueError
        Where arguments or outputs are not of this kind, the method is unknown or does not apply, or with `compile`,
        where operators' Jacobians are multiplied as matrices, as for large networks.
    UnsupportedOperatorError
        Where an operator has no rule, or the calls depend on what tensors hold.

    Notes
    -----
    A call replays what the function did when it was prepared, and does not run it. What it may change, as ``jax.jit``
    has it, are arguments and tensors: the parameters and buffers of a module, read by their names, and other tensors
    that the function reads, those that it read then. All else that it reads is a constant: numbers, attributes,
    globals, NumPy arrays, which mode a module is in, and other tensors put in the place of such. `check` finds a
    change; call `jacobian` for what a function computes now.

    With ``pruned=False`` the pattern has entries for the zeros of a constant matrix that the function reads, since they
    may be filled later. A sparse tensor's indices are parts of the program, whose pattern has its elements alone. Masks
    are parts of the program too: a branch of ``torch.where`` has entries only where a mask selects it. Weights that the
    pattern leaves out are read at each call, to see whether they are zero still.

    Numbers among the arguments may change. A change costs no more than their new values where a function does with a
    tensor without axes what it does with a float, as adding, multiplying, powers and comparisons between tensors. Where
    it needs the value, as in ``math.sin``, a branch or a shape, each other value makes a program of its own.

    Examples
    --------
    >>> import torch
    >>> differences = prepare_jacobian(lambda u, h: (u[1:] - u[:-1]) ** 2 / h, torch.zeros(4), 1.0)
    >>> differences(torch.tensor([0.0, 1.0, 3.0, 6.0]), 0.5).todense().tolist()
    [[-4.0, 4.0, 0.0, 0.0], [0.0, -8.0, 8.0, 0.0], [0.0, 0.0, -12.0, 12.0]]

    Newton's method, which takes the value of the same run:

    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> roots = prepare_jacobian(lambda x: x**3 - torch.tensor([8.0, 1.0]), x, value=True)
    >>> for _ in range(8):
    ...     J, y = roots(x)
    ...     x = x - J.solve(y)
    >>> [round(root, 6) for root in x.tolist()]
    [2.0, 1.0]

    A stiff equation by SciPy, whose `jac` gets a time and a state:

    >>> import scipy.integrate
    >>> decay = lambda t, y: torch.cat([-1000 * (y[:1] - torch.cos(y[1:])), -y[1:] / (1 + t)])
    >>> state = torch.ones(2, dtype=torch.float64)
    >>> prepared = prepare_jacobian(decay, 0.0, state, argnums=1)
    >>> f = lambda t, y: decay(t, torch.from_numpy(y)).numpy()
    >>> jac = lambda t, y: prepared(t, torch.from_numpy(y)).to_scipy()
    >>> solution = scipy.integrate.solve_ivp(f, (0.0, 1.0), state.numpy(), method="Radau", jac=jac)
    >>> solution.success, round(float(solution.y[1, -1]), 2)
    (True, 0.5)
    """
    options = Options(method, compile, pruned, create_graph, value, has_aux, pattern)
    return PreparedJacobian[Any].prepare(f, args, argnums, batched, options)
