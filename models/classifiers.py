"""Recurrent classifiers of whole sequences: the thesis' RNN for bitstreams and GRU for instruments."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
import torch.distributed as dist
from torch import nn

from .arguments import check_counts


class SequenceClassifier(nn.Module):
    """A recurrent layer, `rnn`, and a linear one, `head`, on its last hidden state.

    Parameters
    ----------
    num_classes : int
        Number of outputs.
    in_channels : int
        Features per step; inputs have shape ``(batch, in_channels, time)``.
    hidden_size : int
        Size of the hidden state.

    Raises
    ------
    ValueError
        Where an argument is no integer of at least 1.
    """

    layer: ClassVar[type[nn.RNN] | type[nn.GRU] | type[nn.LSTM]]
    rnn: nn.RNNBase
    head: nn.Linear
    _group: dist.ProcessGroup | None = None

    def __init__(self, num_classes: int, in_channels: int, hidden_size: int = 20) -> None:
        super().__init__()
        self.options = check_counts(num_classes=num_classes, in_channels=in_channels, hidden_size=hidden_size)
        self.rnn = self.layer(in_channels, hidden_size)
        self.head = nn.Linear(hidden_size, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores, ``(batch, num_classes)``."""
        steps = x.permute(2, 0, 1)
        if self._group is not None:
            steps = steps.tensor_split(dist.get_world_size(self._group))[dist.get_rank(self._group)]
        _, last = self.rnn(steps)
        hidden = last[0] if isinstance(last, tuple) else last
        scores: torch.Tensor = self.head(hidden[-1])
        return scores

    def scan(self, schedule: str = "auto", process_group: dist.ProcessGroup | None = None) -> Self:
        """Replace `rnn` by jacsparse's layer with the same parameters, so that checkpoints stay the same.

        With a process group, each rank takes its share of the steps of its input, which all ranks have.
        """
        from .. import nn as scanned

        layer = {nn.RNN: scanned.RNN, nn.GRU: scanned.GRU, nn.LSTM: scanned.LSTM}[self.layer]
        self.rnn = layer.of(self.rnn, schedule=schedule, process_group=process_group)
        self._group = process_group
        return self


class BitstreamRNN(SequenceClassifier):
    """The vanilla RNN of section 4.1: 20 units, tanh.

    Examples
    --------
    >>> BitstreamRNN()(torch.zeros(2, 1, 30)).shape
    torch.Size([2, 10])
    """

    layer = nn.RNN

    def __init__(self, num_classes: int = 10, in_channels: int = 1, hidden_size: int = 20) -> None:
        super().__init__(num_classes, in_channels, hidden_size)


class InstrumentGRU(SequenceClassifier):
    """The GRU of section 4.2: 20 units.

    Examples
    --------
    >>> InstrumentGRU()(torch.zeros(2, 38, 259)).shape
    torch.Size([2, 11])
    """

    layer = nn.GRU

    def __init__(self, num_classes: int = 11, in_channels: int = 38, hidden_size: int = 20) -> None:
        super().__init__(num_classes, in_channels, hidden_size)
