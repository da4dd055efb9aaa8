"""The ways of training by their names."""

from __future__ import annotations

from .across_processes import AcrossRanks
from .leapfrogging import LeapfroggingWorkers
from .one_worker import OneWorker
from .pipelines import DelayedPipeline, GPipe, PipeDream
from .scanned import Bppsa, ReducedBackward
from .training_method import TrainingMethod

#: The ways of training by their names.
TRAINING_METHODS: dict[str, type[TrainingMethod]] = {
    method.name: method
    for method in (
        OneWorker,
        Bppsa,
        ReducedBackward,
        AcrossRanks,
        GPipe,
        PipeDream,
        DelayedPipeline,
        LeapfroggingWorkers,
    )
}
