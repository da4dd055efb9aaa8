"""Modules whose backward pass is a scan: of any chain of operators, and recurrent layers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from ._chain import Chain, Chains, chain, check_input
from ._modules import check_module
from ._scan import Scanner, check_limit, scanned
from .recurrence import GRU, LSTM, RNN, convert
from .schedule import Schedule, parse
from .tracing import is_recording

__all__ = ["GRU", "LSTM", "RNN", "Scan", "convert"]


class Scan(nn.Module):
    """A module that computes what `module` computes, and back-propagates by a scan.

    It is part of autograd as any module is: gradients reach the input and the parameters, through pruning masks,
    parametrisations and hooks, and not those that are frozen.

    Parameters
    ----------
    module : Module
        Any that works on each sample by itself. Its own forward pass runs at each call: its output is what is returned.
    schedule : Schedule or str
        In which order products are taken: ``linear`` is back-propagation itself, ``blelloch`` or ``blelloch:LEVELS``
        the thesis' Algorithm 1. ``auto`` is ``linear``: on one device nothing is done sooner.
    pruned : bool
        Whether pruned weights leave no entry in the Jacobians.
    memory_limit : int, optional
        Bytes of Jacobians' values to hold at once; the batch is run in slices that keep within it. 1 GiB where left
        out.

    Raises
    ------
    TypeError, ValueError
        Where the schedule is none.
    UnsupportedOperatorError
        At a forward pass with gradients, where an operator has no rule, or mixes samples.

    Notes
    -----
    Thesis, equations 3.1 and 3.2 and Algorithm 1. Hooks run; one that changes a gradient where Jacobians are multiplied
    raises RuntimeError in the backward pass. Gradients of gradients are not supported, and say so.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> scan = Scan(model, schedule="blelloch")
    >>> scan(torch.randn(5, 4)).sum().backward()
    >>> model[0].weight.grad.shape
    torch.Size([3, 4])
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        schedule: Schedule | str = "auto",
        pruned: bool = True,
        memory_limit: int | None = None,
    ) -> None:
        super().__init__()
        parse(schedule)
        check_limit(memory_limit)
        self.module = check_module(module)
        self.schedule = schedule
        self.pruned = pruned
        self.memory_limit = memory_limit
        self.reset()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``module(x)``; `x` has shape ``(batch, *input_shape)``, float32 or float64."""
        if not torch.is_grad_enabled() or is_recording() or torch.compiler.is_compiling():
            return self.module(x)
        if not getattr(x, "requires_grad", False) and not any(p.requires_grad for p in self.module.parameters()):
            return self.module(x)
        check_input("x", x)
        if not len(x):
            # No sample, no product.
            return self.module(x)
        if self._chains.module is not self.module:
            self.reset()
        made, run = self._chains.of(x)
        return scanned(self._scanner(made), run, x)

    def scanner(self, input_shape: tuple[int, ...]) -> Scanner:
        """Chain, schedule and plans for inputs of that shape, without the batch."""
        return self._scanner(chain(self.module, input_shape, pruned=self.pruned))

    def _scanner(self, made: Chain) -> Scanner:
        scanner = self._scanners.pop(id(made), None)
        if scanner is None:
            scanner = Scanner(made, self.schedule, self.memory_limit)
        # The last ones only: plans may be large.
        self._scanners[id(made)] = scanner
        while len(self._scanners) > Chains.most:
            self._scanners.popitem(last=False)
        return scanner

    def __getstate__(self) -> dict[str, Any]:
        # Copies and files make patterns and plans of their own.
        return {**self.__dict__, "_chains": None, "_scanners": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.reset()

    def reset(self) -> None:
        """Forget patterns and plans; the next forward makes them again, from the weights as they then are."""
        self._chains = Chains(self.module, pruned=self.pruned)
        # By the chain's id, which a scanner keeps from being another's.
        self._scanners: OrderedDict[int, Scanner] = OrderedDict()

    def extra_repr(self) -> str:
        """The schedule."""
        return f"schedule={getattr(self.schedule, 'name', self.schedule)!r}"
