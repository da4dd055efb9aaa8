"""Caches of chains, each of a graph: those of one module, and those of recent modules and functions."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ..patterns import REGISTERED
from ..tracing import Graph, Trace, saves_objects, traced, without_autocast, without_saving_hooks
from .chains import Chain, chain_of, refuse_other_derivatives
from .checks import check_shape
from .record import Record


class Run(NamedTuple):
    """A forward pass, and the record of each stage of a chain."""

    trace: Trace
    records: list[Record]


class ChainCache:
    """The graphs of recent runs, with their chains, of which one is used again where a run makes the same calls.

    `jacsparse.tracing` says when it does. A chain is replaced where pruned weights changed, and with it what was
    planned for it; all go where a rule is registered.
    """

    #: The most graphs in the cache.
    most_graphs = 8

    def __init__(self, *, pruned: bool = True, couples: bool = False) -> None:
        self.pruned, self.couples = pruned, couples
        #: The last one first.
        self._graphs: list[Graph] = []
        self._rules = len(REGISTERED)
        self._lock = threading.RLock()

    def of_run(self, module: nn.Module, x: torch.Tensor) -> tuple[Chain, Run]:
        """The chain of the calls that a module makes for a batch, and the forward pass."""
        if self._rules != len(REGISTERED):
            with self._lock:
                # What was recorded and decided before may follow another rule.
                self._graphs, self._rules = [], len(REGISTERED)
        # A checkpoint around the call lets go of the whole run, and needs no part of it. It counts what is saved, which
        # is to be as much where the chain is found as where it is made.
        with without_saving_hooks() if saves_objects() else contextlib.nullcontext():
            trace = traced(module, x, self._graphs)
        with without_saving_hooks():
            chain, records = self.of_trace(trace)
        return chain, Run(trace, records)

    def of_trace(self, trace: Trace) -> tuple[Chain, list[Record]]:
        """The chain of a trace's graph, from the cache where an earlier run has made it, and each stage's record."""
        graph = trace.graph
        with self._lock, without_autocast(trace.input.device):
            chain = graph.chains.get(self.pruned)
            if chain is None:
                chain = chain_of(trace, pruned=self.pruned, couples=self.couples)
            # Weights that were zero when the patterns were made may have changed since.
            chain = graph.chains[self.pruned] = chain.adapted(trace)
            if graph not in self._graphs[:1]:
                self._graphs = [graph, *(each for each in self._graphs if each is not graph)][: self.most_graphs]
            return chain, chain.records(trace)

    def of(self, module: nn.Module, x: torch.Tensor, *, by_autograd: bool = True) -> tuple[Chain, Run]:
        """As `of_run`, of a checked batch.

        UnsupportedOperatorError is raised where autograd would take other derivatives in it than registered ones,
        unless it takes none.
        """
        check_shape(x.shape[1:])
        chain, run = self.of_run(module, x)
        if by_autograd and chain.registered_values:
            with without_autocast(x.device):
                refuse_other_derivatives(run.records, "a product by autograd")
        return chain, run


#: The most modules and functions in `_RECENT`.
_MOST_OWNERS = 32

#: The caches that `recent_chains` was last asked for, by whose they are and by its options.
_RECENT: weakref.WeakKeyDictionary[Any, dict[tuple[bool, bool, str], ChainCache]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def recent_chains(
    f: Callable[..., Any], *, pruned: bool = True, couples: bool = False, of: str = "output"
) -> ChainCache:
    """The cache that earlier calls have filled with a module's chains, or those of functions with the same code.

    Chains may be `of` something else than the output. The code only finds candidates: a run has one of these graphs
    where it makes the same calls, and all tensors and numbers are the run's.
    """
    owner, key = _owner_of(f), (pruned, couples, of)
    with _LOCK:
        # The last one asked for comes last.
        caches = _RECENT[owner] = _RECENT.pop(owner, {})
        while len(_RECENT) > _MOST_OWNERS:
            del _RECENT[next(iter(_RECENT))]
        if key not in caches:
            caches[key] = ChainCache(pruned=pruned, couples=couples)
        return caches[key]


def _owner_of(f: Any) -> Any:
    """A module, the code of a function or method, or the class of another callable."""
    while isinstance(f, functools.partial):
        f = f.func
    f = getattr(f, "__func__", f)
    return f if isinstance(f, nn.Module) else getattr(f, "__code__", type(f))
