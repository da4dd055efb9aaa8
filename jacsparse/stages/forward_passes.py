"""Forward passes as chains: a run's chain is that which an earlier run of its graph has made."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..runtime import on_device
from ..tracing import Graph, Trace, saves_objects, traced, without_autocast, without_saving_hooks
from .chains import Chain, chain_of, refuse_other_derivatives
from .checks import check_shape
from .costs import Costs
from .record import Record


class Run(NamedTuple):
    """A forward pass, and the record of each stage of a chain."""

    trace: Trace
    records: list[Record]


#: Whether pruned weights are left out, whether stages may couple samples, and which values are arguments of the call.
_Key = tuple[bool | None, bool, frozenset[int]]
#: The chains of graphs, by whose weights they are: a module's, or those that a function reads, by its code.
_CHAINS: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Graph, dict[_Key, Chain]]]
_CHAINS = weakref.WeakKeyDictionary()
#: Those that omit nothing, by their names and costs: all that is planned for them is the same for all weights.
_FULL_CHAINS: weakref.WeakKeyDictionary[Graph, weakref.WeakValueDictionary[tuple[str, Costs, _Key], Chain]]
_FULL_CHAINS = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()


def chain_of_trace(
    trace: Trace,
    owner: Callable[..., Any] | Owner | None = None,
    *,
    pruned: bool | None = True,
    couples: bool = False,
    arguments: Collection[torch.Tensor] = (),
) -> Chain:
    """The chain of a trace's graph, which an earlier run of the graph may have made.

    Its patterns omit elements that are zero in the weights of this run. Some more may be zero than in the run that it
    was made of, which was one of the same module or function, or of the same other owner; where none is omitted, all
    owners have the same chain. Of factors among the other `arguments` of the call no zeros are omitted. Where `pruned`
    is None, a device's weights are not looked at: that waits for it. Masks alone decide there, which are looked at once
    for each version.
    """
    if pruned is None and not on_device(trace.input):
        pruned = True
    owner, key = owner_of(trace.module if owner is None else owner), (pruned, couples, trace.values_of(arguments))
    with _LOCK:
        of_owner = _CHAINS.get(owner)
        chains = None if of_owner is None else of_owner.get(trace.graph)
        if chains is None:
            chains = _CHAINS.setdefault(owner, weakref.WeakKeyDictionary()).setdefault(trace.graph, {})
        chain = chains.get(key)
        if chain is None or chain._pruned:
            with without_autocast(trace.input.device):
                chain = chain or chain_of(trace, pruned=pruned, couples=couples, arguments=arguments)
                # Weights that were zero when the patterns were made may have changed since.
                chain = chain.adapted(trace, by_masks=pruned is None)
                if not chain._pruned:
                    of_graph = _FULL_CHAINS.setdefault(trace.graph, weakref.WeakValueDictionary())
                    chain = of_graph.setdefault((chain.name, chain.costs, key), chain)
                chains[key] = chain
        return chain


def owner_of(f: Any) -> Any:
    """A module, the code of a function or method, or the class of another callable; an owner itself."""
    while isinstance(f, functools.partial):
        f = f.func
    f = getattr(f, "__func__", f)
    return f if isinstance(f, (nn.Module, Owner, CodeType, type)) else getattr(f, "__code__", type(f))


class Owner:
    """Whose chains some are, where a module has several, as those of before and after a reset."""


def trace_of_call(module: nn.Module, x: torch.Tensor, arguments: Sequence[Any] = (), owner: Any = None) -> Trace:
    """The trace of a module's run at a batch and other arguments, whose graph an earlier run may have made."""
    # A checkpoint around the call lets go of the whole run, and needs no part of it. It counts what is saved, which is
    # to be as much where the chain is found as where it is made.
    with without_saving_hooks() if saves_objects() else contextlib.nullcontext():
        return traced(module, x, arguments=arguments, cached=True, owner=owner_of(module if owner is None else owner))


def forward_pass(
    module: nn.Module,
    x: torch.Tensor,
    owner: Callable[..., Any] | Owner | None = None,
    *,
    pruned: bool | None = True,
    couples: bool = False,
    by_autograd: bool = True,
    arguments: Sequence[Any] = (),
) -> tuple[Chain, Run]:
    """The chain of the calls that a module makes for a checked batch, and that forward pass.

    Tensors among other `arguments` have gradients as parameters do.

    UnsupportedOperatorError is raised where autograd would take other derivatives in it than registered ones, unless it
    takes none.
    """
    check_shape(x.shape[1:])
    trace = trace_of_call(module, x, arguments, owner)
    with without_saving_hooks():
        chain = chain_of_trace(trace, owner, pruned=pruned, couples=couples)
        records = chain.records(trace)
    if by_autograd and chain.registered_values:
        with without_autocast(x.device):
            refuse_other_derivatives(records, "a product by autograd")
    return chain, Run(trace, records)
