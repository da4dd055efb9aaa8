"""A planner: which way of training in parallel pays for a model, from one worker to a million."""

from ..interconnect import Interconnect
from .across_processes import AcrossRanks
from .costs import counted_workload, measured_workload
from .pipelines import GPipe
from .scanned import Bppsa
from .simulation import TRAINING_METHODS, BreakEven, Simulation, WorkerFigures, break_even, plan, simulate
from .timetable import Job, Outcome, Timetable, run
from .training_method import Prediction, TrainingMethod
from .workload import ScanCost, StageCost, Workload

__all__ = [
    "TRAINING_METHODS",
    "AcrossRanks",
    "Bppsa",
    "BreakEven",
    "GPipe",
    "Interconnect",
    "Job",
    "Outcome",
    "Prediction",
    "ScanCost",
    "Simulation",
    "StageCost",
    "Timetable",
    "TrainingMethod",
    "WorkerFigures",
    "Workload",
    "break_even",
    "counted_workload",
    "measured_workload",
    "plan",
    "run",
    "simulate",
]
