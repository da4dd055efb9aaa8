"""A planner: which way of training in parallel pays for a model, from one worker to a million."""

from ..interconnect import Interconnect
from .across_processes import AcrossRanks
from .costs import counted_workload, measured_workload
from .pipelines import GPipe
from .simulation import TRAINING_METHODS, Simulation, WorkerFigures, plan, simulate
from .timetable import Job, Outcome, Timetable, run
from .training_method import TrainingMethod
from .workload import StageCost, Workload

__all__ = [
    "TRAINING_METHODS",
    "AcrossRanks",
    "GPipe",
    "Interconnect",
    "Job",
    "Outcome",
    "Simulation",
    "StageCost",
    "Timetable",
    "TrainingMethod",
    "WorkerFigures",
    "Workload",
    "counted_workload",
    "measured_workload",
    "plan",
    "run",
    "simulate",
]
