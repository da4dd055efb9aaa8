"""The Jacobian of a function or a module at an input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch.utils import _pytree

from ..patterns import requiring_gradient
from ..spgemm import SparseJacobian, unchecked_jacobian
from ..stages import Chain, Record, refuse_hooks, refuse_other_derivatives
from ..tracing import Trace, check_module, saved_buffers, undisturbed, without_autocast, without_saving_hooks
from .arguments import Arguments, arguments_of, has_samples
from .differentiable import with_gradients, wrong_third_derivative
from .flat_function import FlatFunction, Returned, module_and_batch
from .gradients import Gradient
from .recent import Plan, plan_of, recent_graphs


class Keywords(TypedDict, total=False):
    """The options of `jacobian` and `hessian` that do not change what kind of thing they return."""

    argnums: int | Sequence[int]
    batched: bool | None
    pruned: bool
    create_graph: bool


@overload
def jacobian(
    f: Callable[..., Any],
    *args: Any,
    value: Literal[False] = ...,
    has_aux: Literal[False] = ...,
    **options: Unpack[Keywords],
) -> SparseJacobian: ...


@overload
def jacobian(
    f: Callable[..., Any], *args: Any, value: bool = ..., has_aux: bool = ..., **options: Unpack[Keywords]
) -> tuple[Any, ...]: ...


def jacobian(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool | None = None,
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
    batched : bool, optional
        Whether these tensors and the outputs have samples along their first axis. By default they have where `f` is a
        module, a method of one, as ``model.forward``, or a ``functools.partial`` of these, and have none where it is
        any other function, as in ``torch.func``. Without samples, the result has a batch of 1. All other arguments are
        passed as they are.
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
    prepare_jacobian : for many calls with arguments of the same shapes, by a `method` that you choose, or compiled.

    Notes
    -----
    Thesis, section 3.4.

    A call runs `f` once; without any sample, with samples of zeros too. There is no choice of a method: the first call
    multiplies the Jacobians of operators, and later ones go another way where that pays and gave the same values.

    At kinks and ties, and where a derivative is infinite, entries are those of PyTorch's backward passes, which compute
    each entry that is not finite as a product of local derivatives. An entry may be a number where autograd gives NaN:
    autograd multiplies the zero gradients of other outputs too, and each of its products may overflow elsewhere.

    Examples
    --------
    >>> import torch
    >>> jacobian(torch.nn.MaxPool2d(2), torch.randn(8, 3, 4, 4))
    <SparseJacobian 12 × 48, nnz 48, sparsity 0.91667, Pooling, batch 8, torch.float32>
    >>> jacobian(lambda x, t: t * x**2, torch.tensor([1.0, 3.0]), 2.0).values.tolist()
    [[4.0], [12.0]]
    >>> J, y = jacobian(torch.square, torch.tensor([1.0, 3.0]), value=True)
    >>> y.tolist()
    [1.0, 9.0]
    >>> x = torch.tensor([1.0, 3.0], requires_grad=True)
    >>> torch.autograd.grad(jacobian(torch.exp, x, create_graph=True).values.log().sum(), x)[0].tolist()
    [1.0, 1.0]
    """
    arguments = arguments_of(args, argnums, has_samples(f, batched))
    result, y, aux = jacobian_and_returned(f, arguments, pruned, create_graph, value, has_aux)
    return with_parts(result, (value, y), (has_aux, aux))


def with_parts(jacobian: SparseJacobian, *parts: tuple[bool, Any]) -> SparseJacobian | tuple[Any, ...]:
    """A Jacobian; with the parts that are asked for, a tuple of all."""
    asked = [part for is_asked, part in parts if is_asked]
    return (jacobian, *asked) if asked else jacobian


#: A Jacobian, the result of the function where it is asked for, and what the function returned beside that.
Evaluated = tuple[SparseJacobian, Any, Any]


def jacobian_and_returned(
    f: Callable[..., Any], arguments: Arguments, pruned: bool, create_graph: bool, value: bool, has_aux: bool
) -> Evaluated:
    """A Jacobian at checked arguments, and what else the same run gave."""
    if arguments.batch:
        return _evaluated(f, arguments, pruned, create_graph, value, has_aux)
    # Two samples show whether all share their values.
    try:
        jacobian, *_ = _evaluated(f, arguments.with_zeros(2), pruned, create_graph, False, has_aux)
    except ValueError:
        # Another argument may have samples too, of which there are none.
        jacobian, *_ = _evaluated(f, arguments.with_zeros(2, others=True), pruned, create_graph, False, has_aux)
    jacobian = jacobian if jacobian.batch == 1 else replace(jacobian, values=jacobian.values[:, :0])
    if not (value or has_aux):
        return jacobian, None, None
    function = FlatFunction(f, arguments, has_aux)
    with undisturbed(function, arguments.tensors[0].device), torch.enable_grad():
        x = arguments.flat()
        # A gradient's run takes one by its arguments.
        flat = function(x if create_graph and x.requires_grad else x.detach().requires_grad_())
        return jacobian, *_returned(flat, function.returned, value, create_graph)


def _returned(y: torch.Tensor, returned: Returned | None, value: bool, connected: bool) -> tuple[Any, Any]:
    """A run's value, if it is asked for, and what its function returned beside that, in memory of their own."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor if connected else tensor.detach()).clone()

    if returned is None:
        return (own(y) if value else None), None
    aux = None if returned.aux is None else _pytree.tree_map_only(torch.Tensor, own, returned.aux)
    return (returned.result(y if connected else y.detach()) if value else None), aux


@without_saving_hooks()
def _evaluated(
    f: Callable[..., Any], arguments: Arguments, pruned: bool, create_graph: bool, value: bool, has_aux: bool
) -> Evaluated:
    with contextlib.ExitStack() as contexts:
        if create_graph:
            contexts.enter_context(torch.enable_grad())
        function, x = module_and_batch(f, arguments, has_aux=has_aux, connected=create_graph)
        # All is computed before the module's changes to itself are undone: it depends on the module's state in the run.
        contexts.enter_context(undisturbed(check_module(function), x.device))
        if create_graph:
            contexts.enter_context(saved_buffers(function))
            x = requiring_gradient(x)
        chain, (trace, records) = recent_graphs(f, pruned).of_run(function, x, connected=create_graph)
        if isinstance(f, Gradient):
            f.check_derivatives(trace, arguments)
        if create_graph:
            if chain.trained_zeros(trace):
                pruned, (chain, records) = False, recent_graphs(f, False).of_trace(trace)
            _check_second_derivatives(f, trace, chain, records)
        jacobian = _jacobian_of_run(plan_of(trace.graph, chain, pruned), trace, records, x)
        if create_graph:
            # All entries, those of pruned weights too.
            every = recent_graphs(f, False).of_trace(trace)[0] if chain.pruned_weights else chain
            jacobian = with_gradients(jacobian, trace, x, every.pattern)
        # A module returned the output itself.
        returned = function.returned if isinstance(function, FlatFunction) else None
        out_shape = tuple(trace.output.shape[1:]) if returned is None else returned.out_shape
        result = unchecked_jacobian(jacobian.pattern, jacobian.values, arguments.in_shape, out_shape)
        return result, *_returned(trace.output, returned, value, create_graph)


def _jacobian_of_run(plan: Plan, trace: Trace, records: Sequence[Record], x: torch.Tensor) -> SparseJacobian:
    """The Jacobian in a run, in memory of its own."""
    with torch.no_grad(), without_autocast(x.device):
        planned = plan.jacobian(trace)
        if planned is not None:
            refuse_hooks(records)
            return planned
    with without_autocast(x.device):
        result = plan.chain.jacobian(records, x)
        with torch.no_grad():
            plan.choose(trace, result)
    return SparseJacobian(result.pattern, trace.in_own_memory(result.values))


def _check_second_derivatives(f: Callable[..., Any], trace: Trace, chain: Chain, records: Sequence[Record]) -> None:
    """Raise where gradients of values by PyTorch's second derivatives are not those of the function's Jacobian."""
    if chain.registered_values:
        refuse_other_derivatives(records, "the gradient of values")
    if isinstance(f, Gradient):
        problem = wrong_third_derivative(trace, "gradients of a Hessian's values")
        if problem is not None:
            raise problem
