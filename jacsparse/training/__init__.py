"""Ways of training in which layers do not wait for each other."""

from .backpropagation import Backpropagation
from .delayed_gradients import DelayedGradients
from .leapfrog import Leapfrogger, check_threads, leapfrog_backward
from .modes import in_eval_mode
from .splitting import partition

__all__ = [
    "Backpropagation",
    "DelayedGradients",
    "Leapfrogger",
    "check_threads",
    "in_eval_mode",
    "leapfrog_backward",
    "partition",
]
