"""FLOP of back-propagation, by scan and step after step."""

from .counting import count_flop
from .coupled_edges import counted_record
from .estimate import CountEstimate, estimate_count
from .layer_flop import LayerFlop, layers_of
from .recurrent_subject import sequence_subject
from .report import BaselineStep, FlopReport, FlopStep
from .summary import FlopSummary
from .tables import SORTS, Page, SideBySide, totals

__all__ = [
    "SORTS",
    "BaselineStep",
    "CountEstimate",
    "FlopReport",
    "FlopStep",
    "FlopSummary",
    "LayerFlop",
    "Page",
    "SideBySide",
    "count_flop",
    "counted_record",
    "estimate_count",
    "layers_of",
    "sequence_subject",
    "totals",
]
