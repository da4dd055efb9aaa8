"""Ways of training in which layers do not wait for each other."""

from .backpropagation import Backpropagation
from .convergence import diminishing, gradient_bound
from .delayed_gradients import DelayedGradients
from .leapfrog import Leapfrogger, check_threads, leapfrog_backward
from .leapfrog_times import Event, Timelines, leapfrog_critical_path, leapfrog_saving, simulate_leapfrog
from .modes import in_eval_mode
from .splitting import partition
from .synthetic_gradients import GradientPredictor, SyntheticGradients
from .timing import published_time, simulated_times

__all__ = [
    "Backpropagation",
    "DelayedGradients",
    "Event",
    "GradientPredictor",
    "Leapfrogger",
    "SyntheticGradients",
    "Timelines",
    "check_threads",
    "diminishing",
    "gradient_bound",
    "in_eval_mode",
    "leapfrog_backward",
    "leapfrog_critical_path",
    "leapfrog_saving",
    "partition",
    "published_time",
    "simulate_leapfrog",
    "simulated_times",
]
