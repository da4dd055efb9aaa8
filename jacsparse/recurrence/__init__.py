"""Recurrences: cells as fused kernels over runs of steps, linear recurrences, and the schedules that solve both."""

from ._linear import Dense, Diagonal, Scaled, Sparse, linear_recurrence
from ._modules import GRU, LSTM, RNN
from ._sweeps import Report

__all__ = ["GRU", "LSTM", "RNN", "Dense", "Diagonal", "Report", "Scaled", "Sparse", "linear_recurrence"]
