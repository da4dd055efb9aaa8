"""Runs of functions captured as ATen calls, and the programs that they are.

**The words**, here and in what uses them:

`CapturedRun`
    What a function did at an input: its calls and their tensors, by `capture`, under the one dispatch mode. A record of
    a run has no writes: `storages` knows which value each element of a written storage holds.
`Graph`
    ATen calls, each a `Node`, on numbered tensors, each a `Value`, and on numbers, each a `Scalar`. All runs of one key
    have it, if they have the same elements in the indices and masks on which patterns depend (`Graph.contents`). What a
    call reads that no call made is a capture. `graphs` makes a graph of a run, and keeps the last ones.
`Trace`
    The tensors and numbers of one run of a graph, or of a replay. `Trace.tensor` is for a value's form alone: it may
    have been overwritten since, where `Trace.elements` are those of the run. A `GradientEdge` is a place in autograd's
    graph.
`Program`
    The calls of a graph through which a derivative passes, each an `Operation`, as one sample sees them.

**What decides a graph** is in `CapturedRun.key`: for each call the operator, whether autograd recorded it, literal
arguments, which values its tensors are, the classes of autograd's nodes of these, the sizes that depend on elements
but for those of what masks select and put back (`masks`), and the path of the module; of captures the form, and whether
they have gradients; where writes go; the form of the input and the default dtype. The calls of a Function's backward
pass (`functions`) are among the run's. A float is no part of it, unless it is 0 or 1, in a list, or the call depends on
the input and has no rule, has parts, or has a rule that reads numbers or contents (`Facts.bakes`); nor is an integer
that is a factor or term. Nothing of an earlier run is taken for this one's: tensors, numbers and autograd's nodes are
the run's own.
"""

from .autograd_nodes import (
    apply_node,
    check_hooks_are_told,
    ending_at,
    gradient_edge_of,
    has_node_hooks,
    is_hooked,
    saved_handle,
    saves_objects,
    with_all_gradients,
    without_saving_hooks,
)
from .callers import is_recording
from .calls import calls_of, key_of
from .comparisons import Comparisons
from .functions import function_error
from .graph import Form, Graph, Node, Operand, Scalar, Value, Values, form_of, referred
from .graphs import graphs_of, traced
from .modules import (
    SAMPLES,
    check_initialised,
    check_module,
    check_outside_transforms,
    module_of,
    name_of,
    parts_of,
    random_tensor,
    refresh_weights,
    samples_of,
    saved_buffers,
    set_weights,
    sets_weights,
    tensors_of,
    trains,
    undisturbed,
    without_autocast,
)
from .operators import BackwardPass, FunctionCall, Rewrite, facts_of, shows
from .program import Operation, Program, passed_by_all_paths, program_of
from .pruned_weights import PrunedWeight, excluded_by, mask_of
from .storages import memory_of, overlaps
from .traces import OutsideWrite, StaleError, Trace

__all__ = [
    "SAMPLES",
    "BackwardPass",
    "Comparisons",
    "Form",
    "FunctionCall",
    "Graph",
    "Node",
    "Operand",
    "Operation",
    "OutsideWrite",
    "Program",
    "PrunedWeight",
    "Rewrite",
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
    "check_outside_transforms",
    "ending_at",
    "excluded_by",
    "facts_of",
    "form_of",
    "function_error",
    "gradient_edge_of",
    "graphs_of",
    "has_node_hooks",
    "is_hooked",
    "is_recording",
    "key_of",
    "mask_of",
    "memory_of",
    "module_of",
    "name_of",
    "overlaps",
    "parts_of",
    "passed_by_all_paths",
    "program_of",
    "random_tensor",
    "referred",
    "refresh_weights",
    "samples_of",
    "saved_buffers",
    "saved_handle",
    "saves_objects",
    "set_weights",
    "sets_weights",
    "shows",
    "tensors_of",
    "traced",
    "trains",
    "undisturbed",
    "with_all_gradients",
    "without_autocast",
    "without_saving_hooks",
]
