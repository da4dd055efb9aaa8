"""A planner: which way of training in parallel pays for a model, from one worker to a million."""

from ..interconnect import FREE, Interconnect
from .across_processes import AcrossRanks
from .costs import counted_workload, measured_workload
from .leapfrogging import LeapfroggingWorkers
from .one_worker import OneWorker
from .pipelines import DelayedPipeline, GPipe, PipeDream
from .scanned import Bppsa, ReducedBackward
from .simulation import TRAINING_METHODS, WORKERS, BreakEven, Simulation, WorkerFigures, break_even, plan, simulate
from .timetable import Job, Outcome, Timetable, run
from .training_method import Prediction, TrainingMethod
from .workload import ScanCost, StageCost, Workload

__all__ = [
    "FREE",
    "TRAINING_METHODS",
    "WORKERS",
    "AcrossRanks",
    "Bppsa",
    "BreakEven",
    "DelayedPipeline",
    "GPipe",
    "Interconnect",
    "Job",
    "LeapfroggingWorkers",
    "OneWorker",
    "Outcome",
    "PipeDream",
    "Prediction",
    "ReducedBackward",
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
