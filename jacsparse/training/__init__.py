"""Ways of training in which layers do not wait for each other."""

from .delayed_gradients import DelayedGradients
from .leapfrog import Leapfrogger, check_threads, leapfrog_backward
from .leapfrog_times import Event, Timelines, leapfrog_critical_path, leapfrog_saving, simulate_leapfrog
from .partition import partition

__all__ = [
    "DelayedGradients",
    "Event",
    "Leapfrogger",
    "Timelines",
    "check_threads",
    "leapfrog_backward",
    "leapfrog_critical_path",
    "leapfrog_saving",
    "partition",
    "simulate_leapfrog",
]
