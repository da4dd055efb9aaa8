"""Recordings of forward passes as ATen calls, and the programs that they run."""

from .arithmetic import Arithmetic
from .autograd_nodes import apply_node, has_node_hooks, with_all_gradients
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
    set_weights,
    sets_weights,
    tensors_of,
    trains,
    undisturbed,
    without_autocast,
)
from .operators import facts_of, operator_name
from .program import Operation, Program, contents_of, key_of, program_of
from .pruned_weights import PrunedWeight, mask_of
from .recorder import is_recording, is_users, record
from .recording import Invocation, Recording
from .saved_tensors import saves_objects, without_saving_hooks
from .tape import (
    Number,
    Reads,
    Slot,
    Tape,
    check_replays,
    followed,
    form_of,
    mutates,
    numbers_followed,
    recorded_tape,
    same_number,
    same_numbers,
)

__all__ = [
    "Arithmetic",
    "Invocation",
    "Number",
    "Operation",
    "Program",
    "PrunedWeight",
    "Reads",
    "Recording",
    "Slot",
    "Tape",
    "apply_node",
    "check_initialised",
    "check_module",
    "check_replays",
    "contents_of",
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
    "key_of",
    "mask_of",
    "mutates",
    "name_of",
    "number_tensors",
    "numbers_followed",
    "operator_name",
    "parts_of",
    "program_of",
    "record",
    "recorded_tape",
    "refresh_weights",
    "returns_one_tensor",
    "same_number",
    "same_numbers",
    "saves_objects",
    "set_weights",
    "sets_weights",
    "tensors_of",
    "tensors_of_externals",
    "trains",
    "undisturbed",
    "with_all_gradients",
    "without_autocast",
    "without_saving_hooks",
]
