"""Whole gradients of weights that all ranks have, from the shares that their backward passes leave."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from ..runtime import a_type
from .ranks import checked_group, ranks_of

#: The losses of `sum_gradients`.
LOSSES = ("each", "same")


def sum_gradients(module: nn.Module | Iterable[torch.Tensor], process_group: dist.ProcessGroup, *, loss: str) -> None:
    """Replace the ranks' shares of gradients by whole ones, the same on all ranks.

    After a backward pass through recurrent layers with ``process_group=``, each rank has its share of the gradient of
    the sum of all ranks' losses. All ranks call this before the optimiser's step, in a loop without
    ``DistributedDataParallel``; under that, which averages the shares, gradients are those of the mean of the losses.

    Parameters
    ----------
    module : Module or iterable of Tensor
        The model whose parameters' ``.grad`` are made whole, or its parameters: those that all ranks have. The stages
        of ``nn.Scan(..., process_group=...)`` are other ones on each rank, whose gradients are whole already.
    process_group : ProcessGroup
        The ranks.
    loss : {"each", "same"}
        Which loss each rank went back from. ``each``: one of its own, as of its own steps; gradients are those of the
        sum of all ranks' losses. ``same``: one that all ranks computed alike from what all have, as a sequence's last
        state; it counts once.

    Raises
    ------
    TypeError, ValueError
        Where an argument is none of these.
    RankError
        Where the ranks differ in `loss` or in the parameters.

    Examples
    --------
    >>> import tempfile
    >>> import jacsparse
    >>> store = "file://" + tempfile.mkdtemp() + "/store"
    >>> dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)      # torchrun starts several
    >>> gru = jacsparse.nn.GRU(3, 4, process_group=dist.group.WORLD)
    >>> _, last = gru(torch.randn(5, 2, 3))                     # the steps of this rank
    >>> last.square().sum().backward()                          # all ranks have the last state: the same loss
    >>> sum_gradients(gru, dist.group.WORLD, loss="same")
    >>> dist.destroy_process_group()
    """
    if loss not in LOSSES:
        raise ValueError(f"loss is {loss!r}; expected 'each' for losses of their own, or 'same' for one that all have")
    parameters = list(module.parameters() if isinstance(module, nn.Module) else module)
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"module has {a_type(parameter)}; expected an nn.Module, or its parameters")
    ranks = ranks_of(checked_group(process_group))
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    phase = "sum of gradients"
    shapes = [f"{tuple(parameter.shape)} {parameter.dtype}" for parameter in trained]
    reached = ranks.check(phase, {"loss": loss, "parameters": shapes}, *(each.grad is not None for each in trained))
    # A parameter without a gradient on any rank goes on without one.
    wanted = [each for each, flags in zip(trained, zip(*reached, strict=True), strict=True) if any(flags)]
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in wanted:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    with torch.no_grad():
        for alike in by_dtype.values():
            shares = [torch.zeros_like(each) if each.grad is None else each.grad for each in alike]
            # One message for all, whatever their number.
            share = torch.cat([each.flatten().to(shares[0].device) for each in shares])
            (total,) = ranks.shared(ranks.summed([share], 0, phase), 0, phase)
            total = total / ranks.size if loss == "same" else total
            for parameter, part in zip(alike, total.split([each.numel() for each in alike]), strict=True):
                parameter.grad = part.reshape(parameter.shape).to(parameter.device)
