"""Recurrences: cells as fused kernels over runs of steps, linear recurrences, and the solvers of both."""

from .cells import CELLS, Cell, Saved, StepJacobian, Terms, Weights, cell_on
from .conversion import convert
from .layers import GRU, LSTM, RNN
from .linear import linear_recurrence
from .matrices import Dense, Diagonal, Scaled, Sparse
from .prices import NODES, PRICES, Nodes, Prices
from .recurrent import Recurrent
from .reports import Report
from .sequences import Sequences
from .solvers import ASKED, SOLVERS, Choice, Problem, Recurrence, RecurrenceSize, Solver, parse

__all__ = [
    "ASKED",
    "CELLS",
    "GRU",
    "LSTM",
    "NODES",
    "PRICES",
    "RNN",
    "SOLVERS",
    "Cell",
    "Choice",
    "Dense",
    "Diagonal",
    "Nodes",
    "Prices",
    "Problem",
    "Recurrence",
    "RecurrenceSize",
    "Recurrent",
    "Report",
    "Saved",
    "Scaled",
    "Sequences",
    "Solver",
    "Sparse",
    "StepJacobian",
    "Terms",
    "Weights",
    "cell_on",
    "convert",
    "linear_recurrence",
    "parse",
]
