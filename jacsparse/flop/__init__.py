"""FLOP of back-propagation, by scan and step after step."""

from .counting import count_flop
from .layer_flop import LayerFlop, layers_of
from .recurrent_subject import sequence_subject
from .report import BaselineStep, FlopReport, FlopStep
from .tables import totals

__all__ = [
    "BaselineStep",
    "FlopReport",
    "FlopStep",
    "LayerFlop",
    "count_flop",
    "layers_of",
    "sequence_subject",
    "totals",
]
