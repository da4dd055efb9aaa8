"""Recurrences: cells as fused kernels over runs of steps, linear recurrences, and the schedules that solve both."""

from .cells import CELLS, Saved, Weights
from .layers import GRU, LSTM, RNN, convert
from .linear import linear_recurrence
from .matrices import Dense, Diagonal, Scaled, Sparse
from .reports import Report
from .sequences import Sequences
from .solvers import parse

__all__ = [
    "CELLS",
    "GRU",
    "LSTM",
    "RNN",
    "Dense",
    "Diagonal",
    "Report",
    "Saved",
    "Scaled",
    "Sequences",
    "Sparse",
    "Weights",
    "convert",
    "linear_recurrence",
    "parse",
]
