"""Ways of training in which layers do not wait for each other."""

from .leapfrog import Leapfrogger, check_threads, layers_of_worker, leapfrog_backward

__all__ = ["Leapfrogger", "check_threads", "layers_of_worker", "leapfrog_backward"]
