"""The Jacobian of a function or a module at an input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..patterns import Pattern, requiring_gradient
from ..spgemm import SparseJacobian
from ..stages import (
    Chain,
    ChainCache,
    Record,
    in_own_memory,
    recent_chains,
    refuse_hooks,
    refuse_other_derivatives,
)
from ..tracing import Trace, check_module, saved_buffers, undisturbed, without_autocast, without_saving_hooks
from .arguments import Arguments, FlatFunction, arguments_of, has_samples, module_and_batch, out_shape_of
from .differentiable import with_graph, wrong_third_derivative
from .gradients import Gradient
from .recent import plan_of, recent_graphs


def jacobian(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool | None = None,
    pruned: bool = True,
    create_graph: bool = False,
) -> SparseJacobian:
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

    Returns
    -------
    SparseJacobian
        The Jacobian; its batch is 1 where all samples share the values, as for a convolution.

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

    A call runs `f` once; the first calls with arguments of new shapes run it several times, to make a program for later
    ones, so that what it prints or counts is seen as often. There is no choice of a method: the first call multiplies
    the Jacobians of operators, and later ones go another way where that pays and gave the same values.

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
    >>> x = torch.tensor([1.0, 3.0], requires_grad=True)
    >>> torch.autograd.grad(jacobian(torch.exp, x, create_graph=True).values.log().sum(), x)[0].tolist()
    [1.0, 1.0]
    """
    arguments = arguments_of(args, argnums, has_samples(f, batched))
    evaluated = _with_graph if create_graph else jacobian_at
    if arguments.batch:
        return evaluated(f, arguments, pruned)
    # Two samples show whether all share their values.
    try:
        result = evaluated(f, arguments.with_zeros(2), pruned)
    except ValueError:
        # Another argument may have samples too, of which there are none.
        result = evaluated(f, arguments.with_zeros(2, others=True), pruned)
    return result if result.batch == 1 else replace(result, values=result.values[:, :0])


@without_saving_hooks()
def jacobian_at(f: Callable[..., Any], arguments: Arguments, pruned: bool = True) -> SparseJacobian:
    """The Jacobian of a function at checked arguments, without a graph."""
    with _run(f, arguments, pruned) as run:
        return replace(run.jacobian(), in_shape=arguments.in_shape, out_shape=out_shape_of(run.trace))


@torch.enable_grad()
@without_saving_hooks()
def _with_graph(f: Callable[..., Any], arguments: Arguments, pruned: bool) -> SparseJacobian:
    with _run(f, arguments, pruned, connected=True) as run:
        if any(record.trained_zeros for record in run.records):
            run = run.without_pruning()
        if run.chain.registered_values:
            refuse_other_derivatives(run.records, "the gradient of values")
        if isinstance(f, Gradient):
            problem = wrong_third_derivative(run.trace, "gradients of a Hessian's values")
            if problem is not None:
                raise problem
        result = with_graph(run.jacobian(), run.trace, run.x, run.entries())
        return replace(result, in_shape=arguments.in_shape, out_shape=out_shape_of(run.trace))


@dataclass(eq=False)
class _ChainRun:
    """A run of a function, and the chain of its calls."""

    #: Whether patterns omit pruned weights; and the chains of the same function that do not.
    pruned: bool
    unpruned: ChainCache
    #: What the function is differentiated by, ``(batch, *shape)``.
    x: torch.Tensor
    chain: Chain
    trace: Trace
    records: list[Record]

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
        return chain.pattern


@contextlib.contextmanager
def _run(f: Callable[..., Any], arguments: Arguments, pruned: bool, *, connected: bool = False) -> Iterator[_ChainRun]:
    """A run of a function, whose changes to a module are undone on exit."""
    function, x = module_and_batch(f, arguments, connected=connected)
    caches: list[ChainCache] = [
        recent_chains(f, pruned=which) if function is f else recent_graphs(f, which) for which in (pruned, False)
    ]
    if connected:
        x = requiring_gradient(x)
    with undisturbed(check_module(function)), saved_buffers(function) if connected else contextlib.nullcontext():
        chain, (trace, records) = caches[0].of_run(function, x, connected=connected)
        if isinstance(f, Gradient):
            f.check_derivatives(trace, arguments)
        yield _ChainRun(pruned, caches[1], x, chain, trace, records)
    if isinstance(function, FlatFunction):
        function.forget()
