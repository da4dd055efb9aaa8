"""Recordings of forward passes as ATen calls, and the programs that they run."""

from .autograd_nodes import apply_node, has_node_hooks, with_all_gradients
from .modules import (
    check_initialised,
    check_module,
    refresh_weights,
    set_weights,
    sets_weights,
    tensors_of,
    trains,
    undisturbed,
    without_autocast,
)
from .program import Operation, Program, contents_of, key_of, program_of
from .pruned_weights import PrunedWeight, mask_of
from .recorder import is_recording, is_users, record
from .recording import Invocation, Recording

__all__ = [
    "Invocation",
    "Operation",
    "Program",
    "PrunedWeight",
    "Recording",
    "apply_node",
    "check_initialised",
    "check_module",
    "contents_of",
    "has_node_hooks",
    "is_recording",
    "is_users",
    "key_of",
    "mask_of",
    "program_of",
    "record",
    "refresh_weights",
    "set_weights",
    "sets_weights",
    "tensors_of",
    "trains",
    "undisturbed",
    "with_all_gradients",
    "without_autocast",
]
