"""The experiments by name."""

from __future__ import annotations

from ._experiment import Experiment
from .ddg_convergence import DdgConvergence
from .ddg_scaling import DdgScaling
from .ddg_theory import DdgTheory
from .discretised_equations import DiscretisedEquations
from .flop_analysis import FlopAnalysis
from .gru_breakdown import GruBreakdown
from .jacobian_generation import JacobianGeneration
from .kernel_resources import KernelResources
from .leapfrog import Leapfrog
from .lenet_convergence import LenetConvergence
from .normalised_convergence import NormalisedConvergence
from .parallel_forward import ParallelForward
from .rank_scan import ScansAcrossRanks
from .recurrent_convergence import RecurrentConvergence
from .recurrent_shapes import RecurrentShapes
from .rnn_sensitivity import RnnSensitivity
from .simulation import SimulatedTraining
from .sparse_convergence import SparseConvergence
from .sparse_jacobian import SparseJacobian
from .sparse_networks import SparseCrossover, SparseInference, SparseTraining
from .spgemm import Spgemm
from .stiff_equations import StiffEquations
from .triangular_costs import TriangularCosts
from .triangular_solvers import TriangularSolvers
from .whole_jacobian import WholeJacobian

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        JacobianGeneration(),
        Spgemm(),
        FlopAnalysis(),
        WholeJacobian(),
        SparseJacobian(),
        SparseTraining(),
        SparseCrossover(),
        SparseInference(),
        SparseConvergence(),
        DiscretisedEquations(),
        StiffEquations(),
        TriangularSolvers(),
        TriangularCosts(),
        Leapfrog(),
        DdgConvergence(),
        DdgScaling(),
        DdgTheory(),
        SimulatedTraining(),
        ScansAcrossRanks(),
        LenetConvergence(),
        NormalisedConvergence(),
        RnnSensitivity(),
        RecurrentShapes(),
        GruBreakdown(),
        ParallelForward(),
        RecurrentConvergence(),
        KernelResources(),
    )
}
