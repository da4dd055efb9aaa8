"""The Jacobian of a function or a module at an input, and the pattern of a module's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.utils import _pytree

from ..patterns import Pattern, requiring_gradient
from ..spgemm import SparseJacobian
from ..stages import (
    Chain,
    ChainCache,
    Record,
    chain,
    check_input,
    in_own_memory,
    recent_chains,
    refuse_hooks,
    refuse_other_derivatives,
)
from ..tracing import Trace, check_module, saved_buffers, undisturbed, without_autocast, without_saving_hooks
from .arguments import Arguments, FlatFunction, arguments_of
from .differentiable import with_graph, wrong_third_derivative
from .gradients import Gradient
from .recent import plan_of, recent_graphs


def jacobian_pattern(module: nn.Module, input_shape: tuple[int, ...], *, pruned: bool = True) -> Pattern:
    """The positions of a module's Jacobian that are not guaranteed zeros, for all inputs.

    Parameters
    ----------
    module : Module
        A module that works on each sample by itself. It runs once, on random samples; its changes to itself are undone.
    input_shape : tuple of int
        Shape of one sample of the input.
    pruned : bool
        Whether the pattern omits pruned weights: those that a mask of ``torch.nn.utils.prune`` removes and, without a
        mask, those that are exactly zero. So it omits the zeros of any constant factor of a matrix product, and the
        places at which the constant condition of ``torch.where`` does not select a branch. Elements that a sparse
        tensor does not store are never in the pattern.

    Returns
    -------
    Pattern
        The pattern, ``(out_size, in_size)``.

    Raises
    ------
    UnsupportedOperatorError
        Where an operator has no rule; the message begins with the operator's path.
    ValueError
        Where the input shape does not fit.

    Notes
    -----
    Thesis, section 3.3 and Table 3.1.

    Examples
    --------
    >>> import torch
    >>> round(jacobian_pattern(torch.nn.Conv2d(3, 64, 3, padding=1), (3, 32, 32)).sparsity, 5)
    0.99157
    """
    return chain(module, input_shape, pruned=pruned).pattern.T


@overload
def jacobian(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool = True,
    pruned: bool = True,
    create_graph: bool = False,
    value: Literal[False] = False,
    has_aux: Literal[False] = False,
) -> SparseJacobian: ...


@overload
def jacobian(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool = True,
    pruned: bool = True,
    create_graph: bool = False,
    value: bool = False,
    has_aux: bool = False,
) -> tuple[Any, ...]: ...


def jacobian(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool = True,
    pruned: bool = True,
    create_graph: bool = False,
    value: bool = False,
    has_aux: bool = False,
) -> SparseJacobian | tuple[Any, ...]:
    """The Jacobian of a function or a module at each sample of a batch.

    Parameters
    ----------
    f : callable
        A function, or a module, that works on each sample by itself. It runs with the random numbers that it would draw
        next; a module's changes to itself are undone.
    *args
        Its arguments: tensors, tuples, lists and dicts of them, numbers and anything else. Those that `argnums` names
        hold tensors of float32 or float64, on the CPU or a CUDA device. Parameters must have the same dtype and device.
        Keyword arguments go into ``functools.partial(f, key=value)``.
    argnums : int or tuple of int
        The arguments to differentiate by. The elements of their tensors are the columns, one tensor after the other,
        and those of the outputs the rows.
    batched : bool
        Whether these tensors and the outputs have samples along their first axis. Without samples, the result has a
        batch of 1. All other arguments are passed as they are.
    pruned : bool
        As in `jacobian_pattern`. Each call looks for the zeros: where one is filled, the pattern has its entries again.
    create_graph : bool
        Whether the values have gradients, to the arguments and to all tensors that `f` reads, as parameters. Where a
        weight that has a gradient holds zeros without a mask, which training may fill, no weight is pruned. Gradients
        are PyTorch's second derivatives; that of `logcumsumexp` is NaN in PyTorch (2.6 to 2.15) where a gradient is
        zero.
    value : bool
        Whether to return what `f` returns too, of the same run: ``(jacobian, value)``.
    has_aux : bool
        Whether `f` returns ``(result, aux)``, of which `aux` has no derivative, as in ``torch.func.jacrev``; it is
        returned last: ``(jacobian, aux)`` or ``(jacobian, value, aux)``.

    Returns
    -------
    SparseJacobian
        The Jacobian; its batch is 1 where all samples share the values, as for a convolution. A tuple with `value` or
        `has_aux`, whose tensors have gradients with `create_graph` alone.

    Raises
    ------
    TypeError, ValueError, UnsupportedOperatorError
        Where the input does not fit, or an operator has no rule.
    RuntimeError
        With `create_graph`, in the backward pass, where PyTorch has no second derivative of an operator; it names that.

    See Also
    --------
    prepare_jacobian : for many calls with arguments of the same shapes.

    Notes
    -----
    Thesis, section 3.4.

    A call runs `f` once; the first calls with arguments of new shapes run it several times, to make a program for later
    ones, so that what it prints or counts is seen as often.

    At kinks and ties, and where a derivative is infinite, entries are those of PyTorch's backward passes, which compute
    each entry that is not finite as a product of local derivatives. An entry may be a number where autograd gives NaN:
    autograd multiplies the zero gradients of other outputs too, and each of its products may overflow elsewhere.

    Examples
    --------
    >>> import torch
    >>> jacobian(torch.nn.MaxPool2d(2), torch.randn(8, 3, 4, 4))
    <SparseJacobian 12 × 48, nnz 48, sparsity 0.91667, Pooling, batch 8, torch.float32>
    >>> jacobian(lambda x, t: t * x**2, torch.tensor([1.0, 3.0]), 2.0, batched=False).values.tolist()
    [[4.0], [12.0]]
    >>> J, y = jacobian(torch.square, torch.tensor([1.0, 3.0]), batched=False, value=True)
    >>> y.tolist()
    [1.0, 9.0]
    >>> x = torch.tensor([1.0, 3.0], requires_grad=True)
    >>> torch.autograd.grad(jacobian(torch.exp, x, batched=False, create_graph=True).values.log().sum(), x)[0].tolist()
    [1.0, 1.0]
    """
    if not callable(f):
        raise TypeError(f"f is a {type(f).__name__}; expected a function or a module")
    arguments = arguments_of(args, argnums, batched)
    result, y, aux = evaluated(f, arguments, pruned, create_graph, value, has_aux)
    return with_parts(result, (value, y), (has_aux, aux))


def with_parts(jacobian: SparseJacobian, *parts: tuple[bool, Any]) -> SparseJacobian | tuple[Any, ...]:
    """A Jacobian; with the parts that are asked for, a tuple of all."""
    asked = [part for is_asked, part in parts if is_asked]
    return (jacobian, *asked) if asked else jacobian


#: A Jacobian, the result of the function where it is asked for, and what the function returned beside that.
Evaluated = tuple[SparseJacobian, Any, Any]


def evaluated(
    f: Callable[..., Any], arguments: Arguments, pruned: bool, create_graph: bool, value: bool, has_aux: bool
) -> Evaluated:
    """A Jacobian at checked arguments, and what else the same run gave."""
    evaluate = _with_graph if create_graph else _without_graph
    if arguments.batch:
        return evaluate(f, arguments, pruned, value, has_aux)
    # Two samples show whether all share their values.
    try:
        jacobian, *_ = evaluate(f, arguments.with_zeros(2), pruned, False, has_aux)
    except ValueError:
        # Another argument may have samples too, of which there are none.
        jacobian, *_ = evaluate(f, arguments.with_zeros(2, others=True), pruned, False, has_aux)
    jacobian = jacobian if jacobian.batch == 1 else SparseJacobian(jacobian.pattern, jacobian.values[:, :0])
    if not (value or has_aux):
        return jacobian, None, None
    function = FlatFunction(f, arguments, has_aux)
    with undisturbed(function), torch.no_grad():
        flat, returned = function(arguments.flat()), function.returned
    assert returned is not None
    return jacobian, returned.result(flat), returned.aux


def jacobian_at(f: Callable[..., Any], arguments: Arguments, *, has_aux: bool = False) -> SparseJacobian:
    """The Jacobian of a function at checked arguments, without a graph."""
    return _without_graph(f, arguments, True, has_aux=has_aux)[0]


@without_saving_hooks()
def _without_graph(
    f: Callable[..., Any], arguments: Arguments, pruned: bool, value: bool = False, has_aux: bool = False
) -> Evaluated:
    with _run(f, arguments, pruned, has_aux) as run:
        return run.jacobian(), *run.returned(value, torch.Tensor.detach)


@torch.enable_grad()
@without_saving_hooks()
def _with_graph(f: Callable[..., Any], arguments: Arguments, pruned: bool, value: bool, has_aux: bool) -> Evaluated:
    with _run(f, arguments, pruned, has_aux, connected=True) as run:
        if any(record.trained_zeros for record in run.records):
            run = run.without_pruning()
        if run.chain.registered_values:
            refuse_other_derivatives(run.records, "the gradient of values")
        if isinstance(f, Gradient):
            problem = wrong_third_derivative(run.trace, "gradients of a Hessian's values")
            if problem is not None:
                raise problem
        result = with_graph(run.jacobian(), run.trace, run.x, run.entries())
        return result, *run.returned(value, lambda tensor: tensor)


@dataclass(eq=False)
class _ChainRun:
    """A run of a function, and the chain of its calls."""

    #: Whether patterns omit pruned weights; and the chains of the same function that do not.
    pruned: bool
    unpruned: ChainCache
    #: What the function is differentiated by, ``(batch, *shape)``.
    x: torch.Tensor
    function: nn.Module
    chain: Chain
    trace: Trace
    records: list[Record]

    def returned(self, value: bool, each: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Any]:
        """The value, if it is asked for, and what the function returned beside it, its tensors as `each` makes them."""
        y, returned = self.trace.output, getattr(self.function, "returned", None)
        if returned is None:
            return (each(y).clone() if value else None), None
        aux = _pytree.tree_map_only(torch.Tensor, lambda tensor: each(tensor).clone(), returned.aux)
        return (returned.result(each(y)) if value else None), aux

    def jacobian(self) -> SparseJacobian:
        """The Jacobian, in memory of its own."""
        plan = plan_of(self.trace.graph, self.pruned)
        # The values are computed before the module's changes are undone: they depend on its state in the run.
        with torch.no_grad(), without_autocast(self.x.device):
            planned = plan.values(self.trace, self.chain)
            if planned is not None:
                refuse_hooks(self.records)
                return planned
        with without_autocast(self.x.device):
            result = self.chain.jacobian(self.records, self.x)
            with torch.no_grad():
                plan.add(self.trace, self.chain, self.records, result)
        return SparseJacobian(result.pattern, in_own_memory(result.values, self.records))

    def without_pruning(self) -> _ChainRun:
        """The same run, with patterns that omit no weights."""
        chain, records = self.unpruned.of_trace(self.trace)
        return replace(self, pruned=False, chain=chain, records=records)

    def entries(self) -> Pattern:
        """All entries, those of pruned weights that have gradients too."""
        chain = self.chain if not self.chain.pruned_weights else self.unpruned.of_trace(self.trace)[0]
        return chain.pattern.T


@contextlib.contextmanager
def _run(
    f: Callable[..., Any], arguments: Arguments, pruned: bool, has_aux: bool, *, connected: bool = False
) -> Iterator[_ChainRun]:
    """A run of a function, whose changes to a module are undone on exit."""
    function: nn.Module
    if isinstance(f, nn.Module) and arguments.is_one_batch and not (has_aux or isinstance(f, Gradient)):
        # The module itself, so that messages name its parts.
        function, x = f, check_input("x", arguments.leaves[0])
        caches: list[ChainCache] = [recent_chains(f, pruned=which) for which in (pruned, False)]
    else:
        function, x = (
            FlatFunction(f, arguments, has_aux),
            arguments.flat_with_graph() if connected else arguments.flat(),
        )
        caches = [recent_graphs(f, which) for which in (pruned, False)]
    if connected:
        x = requiring_gradient(x)
    with undisturbed(check_module(function)), saved_buffers(function) if connected else contextlib.nullcontext():
        chain, (trace, records) = caches[0].of_run(function, x, connected=connected)
        if isinstance(f, Gradient):
            f.check_derivatives(trace, arguments)
        yield _ChainRun(pruned, caches[1], x, function, chain, trace, records)
    if isinstance(function, FlatFunction):
        function.forget()
