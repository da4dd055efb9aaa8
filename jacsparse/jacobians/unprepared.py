"""The Jacobian of a function or a module at an input."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import torch
from torch import nn
from torch.utils import _pytree

from ..patterns import Pattern, requiring_gradient
from ..spgemm import SparseJacobian, unchecked_jacobian
from ..stages import Chain, chain_of_trace, owner_of, refuse_hooks
from ..tracing import Trace, check_module, saved_buffers, traced, undisturbed, without_autocast, without_saving_hooks
from .arguments import Arguments
from .choice import evaluator_of
from .compressed import Compressed
from .differentiable import check_second_derivatives, connected_to, with_gradients
from .evaluator import Evaluator
from .flat_function import FlatFunction, Returned, module_and_batch
from .gradients import Gradient
from .options import Keywords, Options, with_parts
from .products import ChainProducts
from .traced_function import TracedFunction
from .verification import error_of_product, tolerance_for


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

    A call runs `f` once; without any sample, with samples of zeros, and for what it returns without any. The first call
    of a function at arguments of these shapes chooses the way to the values that costs least, as `prepare_jacobian`
    does.

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
    options = Options(pruned=pruned, create_graph=create_graph, value=value, has_aux=has_aux)
    result, y, aux = jacobian_and_returned(f, Arguments.of_call(f, args, argnums, batched), options)
    return with_parts(result, (value, y), (has_aux, aux))


def jacobian_and_returned(
    f: Callable[..., Any], arguments: Arguments, options: Options
) -> tuple[SparseJacobian, Any, Any]:
    """A Jacobian at checked arguments, the function's result if it is asked for, and what that returned beside it."""
    if arguments.batch:
        return _evaluated(f, arguments, options)
    # Two samples show whether all share their values.
    alone = replace(options, value=False, gradient=False)
    try:
        jacobian, *_ = _evaluated(f, arguments.with_zeros(2), alone)
    except ValueError:
        # Another argument may have samples too, of which there are none.
        jacobian, *_ = _evaluated(f, arguments.with_zeros(2, others=True), alone)
    jacobian = jacobian if jacobian.batch == 1 else replace(jacobian, values=jacobian.values[:, :0])
    if not options.returns:
        return jacobian, None, None
    function = FlatFunction(f, arguments, options.has_aux)
    with undisturbed(function, arguments.tensors[0].device), torch.enable_grad():
        x = arguments.flat(connected=options.create_graph)
        # A gradient's run takes one by its arguments.
        flat = function(requiring_gradient(x))
        return jacobian, *_returned(flat, function.returned, options)


def _returned(y: torch.Tensor, returned: Returned | None, options: Options) -> tuple[Any, Any]:
    """A run's result, if it is asked for, and what its function returned beside that, in memory of their own."""
    connected = options.create_graph

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor if connected else tensor.detach()).clone()

    if returned is None:
        return (own(y) if options.result else None), None
    aux = None if returned.aux is None else _pytree.tree_map_only(torch.Tensor, own, returned.aux)
    return (returned.result(y if connected else y.detach()) if options.result else None), aux


def _evaluated(f: Callable[..., Any], arguments: Arguments, options: Options) -> tuple[SparseJacobian, Any, Any]:
    """The Jacobian at arguments with samples, by one run of the function, and what it returned."""
    create_graph = options.create_graph
    # All is computed before the module's changes to itself are undone: it depends on the module's state in the run.
    with without_saving_hooks():
        if not create_graph:
            function, x = module_and_batch(f, arguments, has_aux=options.has_aux)
            with undisturbed(check_module(function), x.device):
                return _of_run(f, function, x, arguments, options)
        with torch.enable_grad():
            function, x = module_and_batch(f, arguments, has_aux=options.has_aux, connected=True)
            with undisturbed(check_module(function), x.device), saved_buffers(function):
                return _of_run(f, function, requiring_gradient(x), arguments, options)


def _of_run(
    f: Callable[..., Any], function: nn.Module, x: torch.Tensor, arguments: Arguments, options: Options
) -> tuple[SparseJacobian, Any, Any]:
    """The Jacobian of a run of the function's module at a batch, and what it returned."""
    # A gradient is made anew by each call, and reads the weights of its function.
    create_graph, owner = options.create_graph, owner_of(f.f if isinstance(f, Gradient) else f)
    trace = traced(function, x, cached=True, owner=owner)
    chained = functools.partial(chain_of_trace, trace, owner, arguments=arguments.others)
    chain = chained(pruned=options.pruned)
    if isinstance(f, Gradient):
        f.check_derivatives(trace, arguments)
    if create_graph:
        if chain.trained_zeros(trace):
            chain = chained(pruned=False)
        check_second_derivatives(trace, chain, chain.records(trace), of_gradient=isinstance(f, Gradient))
    pattern, values = plan_of(chain).evaluated(trace)
    if create_graph:
        # All entries, those of pruned weights too.
        every = chained(pruned=False) if chain.pruned_weights else chain
        values = with_gradients(SparseJacobian(pattern, values), trace, x, every.pattern).values
    # A module returned the output itself.
    returned = function.returned if isinstance(function, FlatFunction) else None
    out_shape = trace.output.shape[1:] if returned is None else returned.out_shape
    result = unchecked_jacobian(pattern, values, arguments.in_shape, out_shape)
    if not options.returns:
        return result, None, None
    output = trace.output
    if create_graph:
        aux, structure = _pytree.tree_flatten(None if returned is None else returned.aux)
        output, *aux = connected_to(x, trace, [output, *aux])
        if returned is not None:
            returned = replace(returned, aux=_pytree.tree_unflatten(aux, structure))
    return result, *_returned(output, returned, options)


class JacobianPlan:
    """How the Jacobian of a graph is computed in its runs: in the way of least cost, which the first one chooses.

    The patterns of the chain hold in all of them: other zeros of weights make another chain. Factors and terms may be
    other numbers in each run. Numbers of other kinds, as slopes, are constants of a way, so that others take another
    way; beyond `MOST_WAYS` of these the chain is multiplied.
    """

    MOST_WAYS = 4

    def __init__(self, chain: Chain) -> None:
        self.chain, self._hooked = chain, any(stage.hooked for stage in chain)
        #: By the numbers that are its constants, as a text: zeros have signs.
        self._ways: dict[str, Evaluator] = {}
        self._constants: list[int] | None = None

    def evaluated(self, trace: Trace) -> tuple[Pattern, torch.Tensor]:
        """The pattern of the Jacobian in a run, and its values, in memory of their own."""
        if trace.may_have_hooks or self._hooked:
            refuse_hooks(self.chain.records(trace))
        with torch.set_grad_enabled(False), without_autocast(trace.input.device):
            if self._constants is None:
                varying = TracedFunction(trace, self.chain).scalar_dtypes
                self._constants = [place for place in range(len(trace.scalars)) if place not in varying]
            numbers = repr([trace.scalars[place] for place in self._constants]) if self._constants else ""
            way = self._ways.get(numbers)
            if way is None:
                return self._by_new_way(trace, numbers)
            return way.pattern, way.values(trace)

    def _by_new_way(self, trace: Trace, numbers: str) -> tuple[Pattern, torch.Tensor]:
        """The pattern and the values by a new way, which other runs with these numbers take, if there are few."""
        function = TracedFunction(trace, self.chain)
        is_last = len(self._ways) >= self.MOST_WAYS
        way = ChainProducts(function) if is_last else evaluator_of(function)
        values = way.values(trace)
        if isinstance(way, Compressed) and not _is_autograds(SparseJacobian(way.pattern, values), function):
            way = ChainProducts(function)
            values = way.values(trace)
        if not is_last:
            function.forget(module=True)
            # Another thread may have chosen one meanwhile, which is as good.
            self._ways[numbers] = way
        return way.pattern, values


def _is_autograds(jacobian: SparseJacobian, function: TracedFunction) -> bool:
    """Whether a Jacobian's product with a random vector is that of a backward pass: PyTorch's tangents may be wrong."""
    x, generator = function.x.detach(), torch.Generator().manual_seed(0)
    g = torch.randn((len(x), jacobian.pattern.shape[0]), generator=generator, device="cpu").to(x)
    try:
        expected = function.backward_pass(function.trace)(g)
    except RuntimeError:
        # The function has written to what its backward pass needs.
        return False
    limit = tolerance_for(x.dtype, function.trace.tensors)
    return error_of_product(jacobian, g, expected, limit) <= limit


#: The plans of the chains that were used last.
plan_of = functools.lru_cache(64)(JacobianPlan)
