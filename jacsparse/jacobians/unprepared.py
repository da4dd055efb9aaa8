"""The Jacobian of a function or a module at an input."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import torch
from torch.utils import _pytree

from ..patterns import UnsupportedOperatorError, requiring_gradient
from ..spgemm import SparseJacobian, unchecked_jacobian
from ..stages import Chain, Record, agree, chain_of_trace, refuse_hooks
from ..tracing import Trace, check_module, saved_buffers, traced, undisturbed, without_autocast, without_saving_hooks
from .arguments import Arguments
from .choice import evaluator_of
from .differentiable import check_second_derivatives, connected_to, with_gradients
from .evaluator import Evaluator
from .flat_function import FlatFunction, Returned, module_and_batch
from .gradients import Gradient, owner_of
from .options import Keywords, Options, with_parts
from .products import ChainProducts
from .traced_function import TracedFunction, same_numbers

_LOGGER = logging.getLogger("jacsparse")
#: The calls of a graph before a way other than by its chain is looked for; and those where the chain's products and
#: sums move more than `LARGE_MOVED` values. Looking takes about as long as these calls do, the first one above all, so
#: that few calls of a function cost about twice what they need, however many there will be.
BEFORE, BEFORE_LARGE = 2, 8
LARGE_MOVED = 2**21


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

    A call runs `f` once; without any sample, with samples of zeros, and for what it returns without any. There is no
    choice of a method: the first calls multiply the Jacobians of operators, and later ones go another way where that
    pays and gave the same values.

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


@without_saving_hooks()
def _evaluated(f: Callable[..., Any], arguments: Arguments, options: Options) -> tuple[SparseJacobian, Any, Any]:
    pruned, create_graph = options.pruned, options.create_graph
    with contextlib.ExitStack() as contexts:
        if create_graph:
            contexts.enter_context(torch.enable_grad())
        function, x = module_and_batch(f, arguments, has_aux=options.has_aux, connected=create_graph)
        # All is computed before the module's changes to itself are undone: it depends on the module's state in the run.
        contexts.enter_context(undisturbed(check_module(function), x.device))
        if create_graph:
            contexts.enter_context(saved_buffers(function))
            x = requiring_gradient(x)
        trace = traced(function, x, cached=True)
        chain, records = chain_of_trace(trace, owner_of(f), pruned=pruned)
        if isinstance(f, Gradient):
            f.check_derivatives(trace, arguments)
        if create_graph:
            if chain.trained_zeros(trace):
                chain, records = chain_of_trace(trace, owner_of(f), pruned=False)
            check_second_derivatives(trace, chain, records, of_gradient=isinstance(f, Gradient))
        jacobian = PLANS.of(chain).jacobian(trace, records, x)
        if create_graph:
            # All entries, those of pruned weights too.
            every = chain_of_trace(trace, owner_of(f), pruned=False)[0] if chain.pruned_weights else chain
            jacobian = with_gradients(jacobian, trace, x, every.pattern)
        # A module returned the output itself.
        returned = function.returned if isinstance(function, FlatFunction) else None
        out_shape = tuple(trace.output.shape[1:]) if returned is None else returned.out_shape
        result = unchecked_jacobian(jacobian.pattern, jacobian.values, arguments.in_shape, out_shape)
        output = trace.output
        if create_graph and options.returns:
            aux, structure = _pytree.tree_flatten(None if returned is None else returned.aux)
            output, *aux = connected_to(x, trace, [output, *aux])
            if returned is not None:
                returned = replace(returned, aux=_pytree.tree_unflatten(aux, structure))
        return result, *_returned(output, returned, options)


class JacobianPlan:
    """How the Jacobian of a graph is computed: in its first runs by its chain, later in the way of least cost.

    A `ProductPlan` is of one product. The patterns of the chain hold while the same weights are zero; where some are
    left out, all runs multiply the chain.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain, self._runs = chain, 0
        #: The numbers of the first run, and whether those of another one were others.
        self._numbers: Sequence[Any] | None = None
        self._numbers_vary = False
        self._chosen: Evaluator | None = None

    def jacobian(self, trace: Trace, records: Sequence[Record], x: torch.Tensor) -> SparseJacobian:
        """The Jacobian in a run, in memory of its own."""
        with torch.no_grad(), without_autocast(x.device):
            planned = self._by_chosen(trace)
            if planned is not None:
                refuse_hooks(records)
                return planned
        with without_autocast(x.device):
            # Gradients of these values are not used: `with_gradients` gives them others.
            result = self.chain.jacobian(records, x)
            with torch.no_grad():
                self._choose(trace, result)
        return SparseJacobian(result.pattern, trace.in_own_memory(result.values))

    def _by_chosen(self, trace: Trace) -> SparseJacobian | None:
        """The Jacobian of a run by the way that was chosen, if that holds for the run's numbers."""
        # Other threads may replace it meanwhile.
        evaluator = self._chosen
        if evaluator is None:
            return None
        function = evaluator.function
        if not same_numbers(*(function.fixed_scalars(each) for each in (trace, function.trace))):
            if not function.numbers_vary:
                self._chosen, self._runs = None, self._before
            return None
        return SparseJacobian(evaluator.pattern, evaluator.values(trace))

    def _choose(self, trace: Trace, expected: SparseJacobian) -> None:
        """Count a run; after enough of them choose a way for later ones, if it pays and gives this run's Jacobian."""
        self._runs += 1
        self._numbers = trace.scalars if self._numbers is None else self._numbers
        self._numbers_vary |= not same_numbers(self._numbers, trace.scalars)
        # The chain of pruned weights changes with these.
        if self.chain.pruned_weights or self._runs != 1 + self._before:
            return
        function = TracedFunction(trace, self.chain, numbers_vary=self._numbers_vary)
        try:
            evaluator = evaluator_of(function)
            if isinstance(evaluator, ChainProducts) or evaluator.pattern != expected.pattern:
                return
            actual = evaluator.values(trace)
        except UnsupportedOperatorError:
            return
        # PyTorch's derivatives of many vectors at once may be wrong.
        if agree(actual, expected.values):
            _LOGGER.debug("later runs: %s%s", evaluator.name, evaluator.details)
            function.forget(module=True)
            self._chosen = evaluator

    @functools.cached_property
    def _before(self) -> int:
        """The runs before one in which a way is looked for."""
        return BEFORE_LARGE if len(self.chain) > 1 and self.chain.accumulation.moved > LARGE_MOVED else BEFORE


class _Plans:
    """The plans of the chains that were used last."""

    #: The most of them.
    MOST = 64

    def __init__(self) -> None:
        # By the chain's id: a plan holds its chain, so that no other chain gets the id.
        self._plans: OrderedDict[int, JacobianPlan] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, chain: Chain) -> JacobianPlan:
        """The plan of a chain."""
        with self._lock:
            plan = self._plans.setdefault(id(chain), JacobianPlan(chain))
            self._plans.move_to_end(id(chain))
            while len(self._plans) > self.MOST:
                self._plans.popitem(last=False)
            return plan

    def clear(self) -> None:
        """Forget all plans."""
        with self._lock:
            self._plans.clear()


PLANS = _Plans()
