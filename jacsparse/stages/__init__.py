"""A program as a chain of stages, and the matrices of stages by vertex elimination."""

from .accumulation import Accumulation, Pulled, Region, eliminate, empty_pattern, is_light, matrix_of
from .balance import boundaries
from .chain_cache import ChainCache, Run, recent_chains
from .chains import Chain, chain, chain_for_all, chain_of, refuse_hooks, refuse_other_derivatives
from .checks import agree, check_input, check_shape, check_tensor, is_fit
from .cutting import edge_of
from .graph_gradients import add_gradients, has_hooks, pull_back, pulled_by_autograd, walk
from .infinite_entries import all_finite, with_backward_passes
from .local_jacobian import LocalJacobian
from .order import DENSE, START
from .record import Record, pull_back_all
from .stage import Edge, Stage

__all__ = [
    "DENSE",
    "START",
    "Accumulation",
    "Chain",
    "ChainCache",
    "Edge",
    "LocalJacobian",
    "Pulled",
    "Record",
    "Region",
    "Run",
    "Stage",
    "add_gradients",
    "agree",
    "all_finite",
    "boundaries",
    "chain",
    "chain_for_all",
    "chain_of",
    "check_input",
    "check_shape",
    "check_tensor",
    "edge_of",
    "eliminate",
    "empty_pattern",
    "has_hooks",
    "is_fit",
    "is_light",
    "matrix_of",
    "pull_back",
    "pull_back_all",
    "pulled_by_autograd",
    "recent_chains",
    "refuse_hooks",
    "refuse_other_derivatives",
    "walk",
    "with_backward_passes",
]
