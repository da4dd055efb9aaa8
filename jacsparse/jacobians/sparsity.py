"""Patterns of Jacobians and Hessians that hold for all inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from ..patterns import Pattern, holds_numbers
from ..stages import chain_for_all, check_shape
from ..tracing import SAMPLES, random_tensor, tensors_of
from .arguments import Arguments
from .colorings import symmetric_part
from .flat_function import module_and_batch
from .gradients import Gradient
from .options import Options, checked_argnums, has_samples
from .tracing_for_replays import modules_of


def jacobian_pattern(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool | None = None,
    pruned: bool = True,
) -> Pattern:
    """The positions of a Jacobian that are not guaranteed zeros, for all inputs.

    Parameters
    ----------
    f : callable
        A function or a module, as in `jacobian`. It runs once; a module's changes to itself are undone.
    *args
        Its arguments, as in `jacobian`. In the place of those that `argnums` names there may be the shapes of tensors,
        as ``(3, 32, 32)``; of one sample, where there are samples and no other argument has them. Then `f` gets random
        numbers, with the dtype and on the device of a tensor among the other arguments or of a module's parameters.
    argnums : int or tuple of int
        The arguments to differentiate by. The others are constants, but for zeros of floating-point tensors among
        them, which are not pruned.
    batched : bool, optional
        As in `jacobian`.
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
        Where an operator has no rule, or the calls depend on what tensors hold; the message begins with the operator's
        path.
    TypeError, ValueError
        Where an argument does not fit.

    Notes
    -----
    Thesis, section 3.3 and Table 3.1.

    Examples
    --------
    >>> import torch
    >>> round(jacobian_pattern(torch.nn.Conv2d(3, 64, 3, padding=1), (3, 32, 32)).sparsity, 5)
    0.99157
    >>> jacobian_pattern(lambda x, scale: scale * (x[1:] - x[:-1]), (4,), 2.0).indices.tolist()
    [0, 1, 1, 2, 2, 3]
    """
    return _pattern(f, _arguments(f, args, argnums, batched), pruned)


def hessian_pattern(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool | None = None,
    pruned: bool = True,
) -> Pattern:
    """The positions of a scalar function's Hessian that are not guaranteed zeros, for all inputs.

    Parameters
    ----------
    f : callable
        A function or a module, as in `hessian`. It runs once; a module's changes to itself are undone.
    *args, argnums, batched, pruned
        As in `jacobian_pattern`.

    Returns
    -------
    Pattern
        The pattern, symmetric. There is an entry where an operator that is not linear joins two elements: fewer than in
        the product of a Jacobian with itself.

    Raises
    ------
    TypeError, ValueError, UnsupportedOperatorError
        As in `hessian`, and where the calls depend on what tensors hold.

    Examples
    --------
    >>> hessian_pattern(lambda x: (x[1:] * x[:-1]).sum(), (4,)).indices.tolist()
    [1, 0, 2, 1, 3, 2]
    """
    arguments = _arguments(f, args, argnums, batched)
    return symmetric_part(_pattern(Gradient(f, arguments, Options()), arguments, pruned)).pattern


def _arguments(
    f: Callable[..., Any], args: Sequence[Any], argnums: int | Sequence[int], batched: bool | None
) -> Arguments:
    """The arguments of a call, with random tensors in the place of shapes."""
    batched, numbers = has_samples(f, batched), checked_argnums(argnums, len(args))
    of_modules = (tensor for module in modules_of(f, set()) for tensor in tensors_of(module))
    like = next((t.real for t in (*_tensors(args), *of_modules) if holds_numbers(t)), torch.empty(0, device="cpu"))
    samples = next((len(leaf) for n in numbers for leaf in _tensors(args[n]) if leaf.ndim), SAMPLES)
    generator, full = torch.Generator().manual_seed(0), list(args)
    for number in numbers:
        if not _tensors(args[number]):
            shape = check_shape(args[number], "x" if len(args) == 1 else f"argument {number}")
            full[number] = random_tensor((samples, *shape) if batched else shape, like, generator)
    arguments = Arguments.of_call(f, full, numbers, batched)
    return arguments if arguments.batch else arguments.with_zeros(SAMPLES)


def _tensors(arg: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(arg) if isinstance(leaf, torch.Tensor)]


def _pattern(f: Callable[..., Any], arguments: Arguments, pruned: bool) -> Pattern:
    module, x = module_and_batch(f, arguments)
    floats = [tensor for tensor in arguments.others if holds_numbers(tensor)]
    return chain_for_all(module, x, pruned=pruned, varying=floats).pattern
