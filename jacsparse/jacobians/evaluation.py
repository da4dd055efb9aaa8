"""The Jacobian of a function or a module at an input, and the pattern of a module's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..patterns import Pattern
from ..spgemm import SparseJacobian
from ..stages import ChainCache, chain, check_input, recent_chains
from ..tracing import check_module, undisturbed, without_autocast
from .arguments import Arguments, FlatFunction, arguments_of
from .differentiable import with_graph
from .recent import recent_jacobians


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


def jacobian(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool = True,
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
    batched : bool
        Whether these tensors and the outputs have samples along their first axis. Without samples, the result has a
        batch of 1. All other arguments are passed as they are.
    pruned : bool
        As in `jacobian_pattern`. Each call looks for the zeros: where one is filled, the pattern has its entries again.
    create_graph : bool
        Whether the values have gradients, to the arguments and to all tensors that `f` reads, as parameters. Entries
        that a pattern leaves out have none: pass ``pruned=False`` to train weights that are zero.

    Returns
    -------
    SparseJacobian
        The Jacobian; its batch is 1 where all samples share the values, as for a convolution.

    Raises
    ------
    TypeError, ValueError, UnsupportedOperatorError
        Where the input does not fit, or an operator has no rule.
    RuntimeError
        With `create_graph`, where PyTorch has no second derivative of an operator; it names that.

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
    >>> x = torch.tensor([1.0, 3.0], requires_grad=True)
    >>> torch.autograd.grad(jacobian(torch.exp, x, batched=False, create_graph=True).values.log().sum(), x)[0].tolist()
    [1.0, 1.0]
    """
    if not callable(f):
        raise TypeError(f"f is a {type(f).__name__}; expected a function or a module")
    arguments = arguments_of(args, argnums, batched)
    if not arguments.batch:
        # Two samples show whether all share their values.
        result = _jacobian(f, arguments.with_zeros(2), pruned)
        return result if result.batch == 1 else SparseJacobian(result.pattern, result.values[:, :0])
    result = _jacobian(f, arguments, pruned)
    if not create_graph:
        return result
    # A pruned entry adds zero to a sum, but its gradient to the sum's: colours have to separate it from the others.
    entries = _jacobian(f, arguments, pruned=False).pattern if pruned else result.pattern
    return with_graph(f, arguments, result, entries)


def _jacobian(f: Callable[..., Any], arguments: Arguments, pruned: bool) -> SparseJacobian:
    recent = recent_jacobians(f, pruned)
    result = recent.jacobian(f, arguments)
    if result is not None:
        return result
    if isinstance(f, nn.Module) and arguments.is_one_batch:
        # The module itself, so that messages name its parts.
        x = check_input("x", arguments.leaves[0])
        with undisturbed(check_module(f)):
            result = _by_chain(recent_chains(f, pruned=pruned), f, x)
    else:
        function = FlatFunction(f, arguments)
        with undisturbed(check_module(function)):
            result = _by_chain(recent.chains, function, arguments.flat())
        function.forget()
    recent.add(f, arguments, result)
    return result


def _by_chain(cache: ChainCache, module: nn.Module, x: torch.Tensor) -> SparseJacobian:
    """The Jacobian from a recording of this run, by the chain of its calls."""
    # The values are computed before the module's changes are undone: they depend on its state in the run.
    chain, (_, records) = cache.of_run(module, x)
    with without_autocast(x.device):
        result = chain.jacobian(records, x)
        # The values may lie in the memory of a weight or of the forward pass, which may change later.
        tensors = (tensor for record in records for tensor in record.tensors)
        memory = result.values.untyped_storage().data_ptr()
        if any(tensor.untyped_storage().data_ptr() == memory for tensor in tensors):
            result = SparseJacobian(result.pattern, result.values.clone())
    return result
