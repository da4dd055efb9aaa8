"""Backward passes through loops that are written by hand: autograd's beside the scan's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jacsparse.nn import Scan

from ._context import Context
from ._experiment import Grid
from ._rows import Group, Row

#: What the cells take in a step.
_FEATURES = 5
_PEER = "autograd"
_CELLS: dict[str, Callable[[int, int], nn.Module]] = {"RNN": nn.RNNCell, "GRU": nn.GRUCell, "LSTM": nn.LSTMCell}


class WrittenLoop(nn.Module):
    """``state = cell(x[:, t], state)``, and a head that reads the states of all steps."""

    def __init__(self, kind: str, size: int) -> None:
        super().__init__()
        self.kind, self.size = kind, size
        self.cell, self.head = _CELLS[kind](_FEATURES, size), nn.Linear(size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The head's outputs, ``(batch, time, 1)``."""
        state: Any = x.new_zeros(len(x), self.size)
        state = (state, state) if self.kind == "LSTM" else state
        outputs = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0] if self.kind == "LSTM" else state)
        return self.head(torch.stack(outputs, 1))


@dataclass(frozen=True)
class WrittenLoops(Grid):
    """Backward passes, in float32, that give the gradients of the input and of all weights."""

    kinds: tuple[str, ...] = ("RNN", "GRU", "LSTM")
    schedules: tuple[str, ...] = ("auto", "linear", "chunked:16", "blelloch")
    time: int = 200
    batch: int = 8
    size: int = 20

    name = "written_loops"
    title = "Backward passes through loops that are written by hand"
    source = "no paper: loops as they are written for torch.nn's cells"
    devices = ("cpu", "cuda")

    def cases(self, context: Context) -> Iterable[str]:
        return self.kinds

    def measure(self, case: str, context: Context) -> list[Row]:
        rows = Group(f"{case}, T = {self.time}, B = {self.batch}, H = {self.size}")
        loop = WrittenLoop(case, self.size).to(context.place)
        x = torch.randn(self.batch, self.time, _FEATURES, device=context.place, requires_grad=True)
        wanted = [x, *loop.parameters()]
        modules: dict[str, nn.Module] = {_PEER: loop}
        modules |= {f"Scan, {schedule}": Scan(loop, schedule=schedule) for schedule in self.schedules}

        def pull_back(output: torch.Tensor) -> object:
            return torch.autograd.grad(output.sum(), wanted, retain_graph=True)

        calls = {label: functools.partial(pull_back, module(x)) for label, module in modules.items()}
        rows.in_turns(context, calls, role={_PEER: "peer"})
        for label in calls:
            if label != _PEER:
                most = 2.0 if label == "Scan, auto" else None
                rows.compare(f"{label} / {_PEER}", label, _PEER, at=label, at_most=most)
        return rows.rows()
