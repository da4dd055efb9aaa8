"""The experiments by name."""

from __future__ import annotations

from ._experiment import Experiment
from .flop_analysis import FlopAnalysis
from .jacobian_generation import JacobianGeneration
from .lenet_convergence import LenetConvergence
from .spgemm import Spgemm

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment for experiment in (JacobianGeneration(), Spgemm(), FlopAnalysis(), LenetConvergence())
}
