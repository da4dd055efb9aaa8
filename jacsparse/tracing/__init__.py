"""Recordings of forward passes as ATen calls, and the programs that they run."""

from .arithmetic import Arithmetic
from .autograd_nodes import apply_node, ending_at, has_node_hooks, leads_to, with_all_gradients
from .callers import is_users
from .graph import Form, Graph, Node, Scalar, Value, form_of
from .graphs import (
    graph_of_tape,
    graph_of_values,
    in_graphs,
    inputs_of,
    number_tensors,
    returns_one_tensor,
    tensors_of_externals,
)
from .modules import (
    check_initialised,
    check_module,
    name_of,
    parts_of,
    refresh_weights,
    saved_buffers,
    set_weights,
    sets_weights,
    tensors_of,
    trains,
    undisturbed,
    without_autocast,
)
from .operators import facts_of, operator_name
from .program import Operation, Program, program_of
from .pruned_weights import PrunedWeight, mask_of
from .saved_tensors import check_hooks_are_told, saved_handle, saves_objects, without_saving_hooks
from .tape import (
    Number,
    Reads,
    Slot,
    Tape,
    check_replays,
    followed,
    mutates,
    numbers_followed,
    recorded_tape,
    same_number,
    same_numbers,
)
from .tracer import trace
from .traces import StaleError, Trace, is_recording

__all__ = [
    "Arithmetic",
    "Form",
    "Graph",
    "Node",
    "Number",
    "Operation",
    "Program",
    "PrunedWeight",
    "Reads",
    "Scalar",
    "Slot",
    "StaleError",
    "Tape",
    "Trace",
    "Value",
    "apply_node",
    "check_hooks_are_told",
    "check_initialised",
    "check_module",
    "check_replays",
    "ending_at",
    "facts_of",
    "followed",
    "form_of",
    "graph_of_tape",
    "graph_of_values",
    "has_node_hooks",
    "in_graphs",
    "inputs_of",
    "is_recording",
    "is_users",
    "leads_to",
    "mask_of",
    "mutates",
    "name_of",
    "number_tensors",
    "numbers_followed",
    "operator_name",
    "parts_of",
    "program_of",
    "recorded_tape",
    "refresh_weights",
    "returns_one_tensor",
    "same_number",
    "same_numbers",
    "saved_buffers",
    "saved_handle",
    "saves_objects",
    "set_weights",
    "sets_weights",
    "tensors_of",
    "tensors_of_externals",
    "trace",
    "trains",
    "undisturbed",
    "with_all_gradients",
    "without_autocast",
    "without_saving_hooks",
]
