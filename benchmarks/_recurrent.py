"""Recurrent classifiers as several experiments time them: ours and PyTorch's, from the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jacsparse.models import BitstreamRNN, InstrumentGRU, SequenceClassifier
from torch import nn
from torch.nn import functional

from ._context import Context, Limits, Timing
from ._experiment import Row

__all__ = ["OURS", "PEER", "RecurrentWorkload", "layer_row"]

OURS, PEER = "jacsparse", "torch.nn"


class _InstrumentLSTM(SequenceClassifier):
    layer = nn.LSTM


_CLASSIFIERS = {"RNN": BitstreamRNN, "GRU": InstrumentGRU, "LSTM": _InstrumentLSTM}


@dataclass(frozen=True)
class RecurrentWorkload:
    """A classifier of the thesis, or an LSTM in its place, on random sequences: float32, a loss on the last state.

    Attributes
    ----------
    kind : {"RNN", "GRU", "LSTM"}
        The layer.
    time, batch, features, hidden : int
        Steps, samples, elements of a step's input and of the state.
    """

    kind: str
    time: int
    batch: int
    features: int
    hidden: int = 20

    @property
    def name(self) -> str:
        """For headings."""
        return f"{self.kind}, T = {self.time:,}, B = {self.batch}, H = {self.hidden}, {self.features} inputs a step"

    def functions(self, device: str = "cpu") -> dict[str, dict[str, Callable[[], object]]]:
        """By layer, `OURS` or `PEER`, and part: ``forward``, ``backward``, ``step`` and ``rest``.

        ``step`` is a training step: forward, backward and Adam; ``rest`` is one without its backward pass. ``backward``
        is that pass alone, over a graph that is kept.

        Raises
        ------
        RuntimeError
            Where the layers' gradients differ.
        """
        torch.manual_seed(0)
        peer = _CLASSIFIERS[self.kind](10, self.features, self.hidden).to(device)
        ours = _CLASSIFIERS[self.kind](10, self.features, self.hidden).to(device)
        ours.load_state_dict(peer.state_dict())
        ours.scan()
        x = torch.randn(self.batch, self.features, self.time, device=device)
        labels = torch.randint(10, (self.batch,), device=device)
        _check(ours, peer, x, labels)
        return {OURS: _parts(ours, x, labels), PEER: _parts(peer, x, labels)}

    def times(self, context: Context, parts: Sequence[str]) -> dict[tuple[str, str], Timing]:
        """How long some parts take, by layer and part; the layers take turns."""
        functions = self.functions(context.device)
        chosen = {f"{layer}, {part}": functions[layer][part] for part in parts for layer in (OURS, PEER)}
        found = context.under(self.name).times(chosen)
        return {(layer, part): found[f"{layer}, {part}"] for layer in (OURS, PEER) for part in parts}

    def floor(self, part: str, limits: Limits) -> float:
        """Seconds that a part takes at least: each input and whatever is kept for each step read or written once.

        Products: with the weights forward; with the recurrent weights, and for the gradients of both, backward. That
        steps have to wait for one another is not in it.
        """
        gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[self.kind]
        # The state, and what a cell keeps beside it: r, z, n and W_n h; or i, f, g, o and c.
        kept = {"RNN": 1, "GRU": 5, "LSTM": 6}[self.kind]
        steps = self.time * self.batch
        nbytes = 4 * steps * (self.features + kept * self.hidden)
        forward = 2 * steps * gates * self.hidden * (self.features + self.hidden)
        backward = forward + 2 * steps * gates * self.hidden**2
        passes = {"forward": (nbytes, forward), "backward": (nbytes, backward)}
        chosen = passes.values() if part == "step" else (passes[part],)
        return sum(limits.floor(*one) for one in chosen)


def layer_row(workload: RecurrentWorkload, label: str, timing: Timing, layer: str) -> Row:
    """A row of a layer's times."""
    return Row.timed(label, timing, group=workload.name, role="ours" if layer == OURS else "peer")


def _loss(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), labels)


def _check(ours: nn.Module, peer: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> None:
    _loss(ours, x, labels).backward()
    _loss(peer, x, labels).backward()
    for (name, one), other in zip(ours.named_parameters(), peer.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        difference, largest = (one.grad - other.grad).abs().max().item(), other.grad.abs().max().item()
        if not difference <= 1e-3 * largest:
            raise RuntimeError(f"the gradients of {name} differ by {difference:.2g}; the largest is {largest:.2g}")


def _parts(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Callable[[], object]]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    # Of weights of its own, for steps write into the model's.
    kept = _loss(copy.deepcopy(model), x, labels)

    def step() -> None:
        optimizer.zero_grad()
        _loss(model, x, labels).backward()
        optimizer.step()

    def rest() -> None:
        _loss(model, x, labels)
        optimizer.step()

    return {
        "forward": lambda: _loss(model, x, labels),
        "backward": lambda: kept.backward(retain_graph=True),
        "step": step,
        "rest": rest,
    }
