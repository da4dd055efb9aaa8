"""Ways of training in which layers do not wait for each other."""

from .backpropagation import Backpropagation
from .delayed_gradients import DelayedGradients
from .leapfrog import Leapfrogger, check_threads, leapfrog_backward
from .leapfrog_times import Event, Timelines, simulate_leapfrog
from .modes import in_eval_mode
from .splitting import partition
from .synthetic_gradients import GradientPredictor, SyntheticGradients

__all__ = [
    "Backpropagation",
    "DelayedGradients",
    "Event",
    "GradientPredictor",
    "Leapfrogger",
    "SyntheticGradients",
    "Timelines",
    "check_threads",
    "in_eval_mode",
    "leapfrog_backward",
    "partition",
    "simulate_leapfrog",
]
