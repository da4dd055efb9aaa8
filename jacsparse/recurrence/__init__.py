"""Recurrences: cells as fused kernels over runs of steps, linear recurrences, and the schedules that solve both."""

from ._flop import flop_subject
from ._linear import Dense, Diagonal, Scaled, Sparse, linear_recurrence
from ._modules import GRU, LSTM, RNN, convert
from ._sweeps import Report, parse

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Dense",
    "Diagonal",
    "Report",
    "Scaled",
    "Sparse",
    "convert",
    "flop_subject",
    "linear_recurrence",
    "parse",
]
