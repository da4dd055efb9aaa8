"""Traces of forward passes as ATen calls, and the programs that they run."""

from .autograd_nodes import apply_node, ending_at, has_node_hooks, leads_to, with_all_gradients
from .calls import calls_of, with_constants
from .graph import Form, Graph, Node, Operand, Scalar, Value, Values, form_of
from .modules import (
    check_initialised,
    check_module,
    module_of,
    name_of,
    parts_of,
    refresh_weights,
    saved_buffers,
    set_weights,
    sets_weights,
    snapshot,
    tensors_of,
    trains,
    undisturbed,
    without_autocast,
)
from .operators import facts_of
from .program import Operation, Program, passed_by_all_paths, program_of
from .pruned_weights import PrunedWeight, mask_of
from .runs import SAMPLES, random_tensor, samples_of, traced
from .saved_tensors import check_hooks_are_told, saved_handle, saves_objects, without_saving_hooks
from .traces import StaleError, Trace, is_recording, memory_of

__all__ = [
    "SAMPLES",
    "Form",
    "Graph",
    "Node",
    "Operand",
    "Operation",
    "Program",
    "PrunedWeight",
    "Scalar",
    "StaleError",
    "Trace",
    "Value",
    "Values",
    "apply_node",
    "calls_of",
    "check_hooks_are_told",
    "check_initialised",
    "check_module",
    "ending_at",
    "facts_of",
    "form_of",
    "has_node_hooks",
    "is_recording",
    "leads_to",
    "mask_of",
    "memory_of",
    "module_of",
    "name_of",
    "parts_of",
    "passed_by_all_paths",
    "program_of",
    "random_tensor",
    "refresh_weights",
    "samples_of",
    "saved_buffers",
    "saved_handle",
    "saves_objects",
    "set_weights",
    "sets_weights",
    "snapshot",
    "tensors_of",
    "traced",
    "trains",
    "undisturbed",
    "with_all_gradients",
    "with_constants",
    "without_autocast",
    "without_saving_hooks",
]
