"""Modules whose backward pass is a scan: of any chain of operators, and recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ._chain import chain, check_input
from ._modules import check_module, fingerprint
from ._scan import Scanner, check_limit, scanned
from .recurrence import GRU, LSTM, RNN
from .schedule import Schedule, parse

__all__ = ["GRU", "LSTM", "RNN", "Scan"]

# For how many input shapes plans are kept.
_SHAPES = 8


#: Whether torch.export is tracing; what asks is younger than PyTorch 2.6.
_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


class Scan(nn.Module):
    """A module that computes what `module` computes, and back-propagates by a scan.

    It is part of autograd as any module is: gradients reach the input and the parameters, through pruning masks,
    parametrisations and hooks, and not those that are frozen.

    Parameters
    ----------
    module : Module
        A chain of operators: one, or ``nn.Sequential``, nested at will.
    schedule : Schedule or str
        In which order products are taken: ``linear`` is back-propagation itself, ``blelloch`` or ``blelloch:LEVELS``
        the thesis' Algorithm 1, ``auto`` the one of least predicted time.
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
        At the first forward pass with gradients, where an operator has no rule.

    Notes
    -----
    Thesis, equations 3.1 and 3.2 and Algorithm 1. Forward hooks run, and may look but not change what a module gives.
    Gradients of gradients are not supported, and say so.

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
        self._scanners: dict[Any, Scanner] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``module(x)``; `x` has shape ``(batch, *input_shape)``, float32 or float64."""
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if not torch.is_grad_enabled() or not (parameters or getattr(x, "requires_grad", False)) or _exporting():
            return self.module(x)
        check_input("x", x)
        key = (tuple(x.shape[1:]), fingerprint(self.module, x))
        scanner = self._scanner(key, x)
        if not len(scanner.chain):
            return self.module(x)
        adapted, records = scanner.chain.adapted(scanner.chain.run(x))
        if adapted is not scanner.chain:
            # Weights that were zero when the patterns were made have moved since.
            scanner = self._keep(key, Scanner(adapted, self.schedule, self.memory_limit))
        return scanned(scanner, records, x, parameters)

    def scanner(self, input_shape: tuple[int, ...]) -> Scanner:
        """Chain, schedule and plans for inputs of that shape, without the batch; kept until the structure changes."""
        return self._scanner((input_shape, fingerprint(self.module)))

    def _scanner(self, key: tuple[tuple[int, ...], Any], like: torch.Tensor | None = None) -> Scanner:
        found = self._scanners.get(key)
        if found is None:
            stages = chain(self.module, key[0], pruned=self.pruned, like=like)
            found = Scanner(stages, self.schedule, self.memory_limit)
        return self._keep(key, found)

    def _keep(self, key: tuple[tuple[int, ...], Any], scanner: Scanner) -> Scanner:
        """Keep a scanner, the last ones only: plans may be large, and those of another structure are of no use."""
        kept = {old: other for old, other in self._scanners.items() if old[1] == key[1] and old != key}
        self._scanners = {**dict(list(kept.items())[1 - _SHAPES :]), key: scanner}
        return scanner

    def __getstate__(self) -> dict[str, Any]:
        # Copies and files make patterns and plans of their own.
        return {**self.__dict__, "_scanners": {}}

    def reset(self) -> None:
        """Forget patterns and plans; the next forward makes them again, from the weights as they then are."""
        self._scanners = {}

    def extra_repr(self) -> str:
        """The schedule."""
        return f"schedule={getattr(self.schedule, 'name', self.schedule)!r}"
