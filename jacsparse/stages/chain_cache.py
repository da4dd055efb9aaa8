"""Caches of chains, by the calls that forward passes make."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import nn

from ..tracing import Recording, contents_of, key_of, saves_objects, without_autocast, without_saving_hooks
from .chains import Chain, chain_of, refuse_other_derivatives
from .checks import check_shape
from .forward_pass import recorded
from .record import Record


class Run(NamedTuple):
    """A forward pass, and the record of each stage of a chain."""

    recording: Recording
    records: list[Record]


class ChainCache:
    """A cache of chains, of which one is used again where a run makes the same calls.

    Parameters
    ----------
    pruned : bool
        As in `chain`.
    """

    #: The most keys in the cache, and the most chains of each key, which differ in their indices and masks.
    most = 8

    def __init__(self, *, pruned: bool = True) -> None:
        self.pruned = pruned
        self._chains: OrderedDict[Hashable, list[tuple[list[torch.Tensor], Chain]]] = OrderedDict()
        self._lock = threading.RLock()

    def of_run(self, module: nn.Module, x: torch.Tensor, *, connected: bool = False) -> tuple[Chain, Run]:
        """The chain of the calls that a module makes for a batch, and the forward pass, as `record` makes it."""
        # A checkpoint around the call lets go of the whole run, and needs no part of it. It counts what is saved, which
        # is to be as much where the chain is found as where it is made.
        with without_saving_hooks() if saves_objects() else contextlib.nullcontext():
            recording = recorded(module, x, connected=connected)
        with without_saving_hooks():
            chain, records = self.matching(recording)
        return chain, Run(recording, records)

    def matching(self, recording: Recording) -> tuple[Chain, list[Record]]:
        """The chain of a recording, from the cache where the same calls have been made, and each stage's record."""
        key, contents = key_of(recording), contents_of(recording)
        with self._lock, without_autocast(recording.input.device):
            chains = self._chains.setdefault(key, [])
            self._chains.move_to_end(key)
            while len(self._chains) > self.most:
                self._chains.popitem(last=False)
            for place, (cached_contents, chain) in enumerate(chains):
                if all(torch.equal(*pair) for pair in zip(cached_contents, contents, strict=True)):
                    # Weights that were zero when the patterns were made may have changed since.
                    adapted, records = chain.records(recording)
                    chains[place] = cached_contents, adapted
                    return adapted, records
            chain = chain_of(recording, pruned=self.pruned)
            chains.append(([tensor.detach().clone() for tensor in contents], chain))
            del chains[: -self.most]
            return chain.records(recording)


class Chains(ChainCache):
    """A cache of one module's chains.

    Parameters
    ----------
    module : Module
        The module, which runs at each call.
    pruned : bool
        As in `chain`.
    """

    def __init__(self, module: nn.Module, *, pruned: bool = True) -> None:
        super().__init__(pruned=pruned)
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module | None:
        """The module; None after its end."""
        return self._module()

    def of(self, x: torch.Tensor, *, by_autograd: bool = True) -> tuple[Chain, Run]:
        """The chain of the module's calls for a batch, and the forward pass.

        UnsupportedOperatorError is raised where autograd would take other derivatives in it than registered ones,
        unless it takes none.
        """
        module = self._module()
        assert module is not None
        check_shape(x.shape[1:])
        chain, run = self.of_run(module, x)
        if by_autograd and chain.registered_values:
            with without_autocast(x.device):
                refuse_other_derivatives(run.records, "a product by autograd")
        return chain, run


#: The most modules in `_RECENT`.
_MOST = 8

#: The caches of the modules that `recent_chains` was last called with, by the module's ``id`` and by `pruned`.
_RECENT: OrderedDict[int, tuple[weakref.ref[nn.Module], dict[bool, Chains]]] = OrderedDict()


def recent_chains(module: nn.Module, *, pruned: bool) -> Chains:
    """The cache of a module's chains that earlier calls have filled."""
    number = id(module)
    entry = _RECENT.get(number)
    if entry is None or entry[0]() is not module:
        # When the module dies, the weak reference calls `pop` with the number and itself.
        entry = _RECENT[number] = (weakref.ref(module, functools.partial(_RECENT.pop, number)), {})
        while len(_RECENT) > _MOST:
            _RECENT.popitem(last=False)
    return entry[1].setdefault(pruned, Chains(module, pruned=pruned))
