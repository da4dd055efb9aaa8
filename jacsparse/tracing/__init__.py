"""Traces of forward passes as ATen calls, and the programs that they run.

**The words**, here and in what uses them:

`Graph`
    ATen calls, each a `Node`, on numbered tensors, each a `Value`, and on numbers, each a `Scalar`. All runs that make
    these calls have this graph. What a call reads that no call made is a capture. A write makes a new value.
`Trace`
    The tensors and numbers of one run of a graph, or of a replay. `Trace.tensor` is for a value's form alone: it may
    have been overwritten since, where `Trace.elements` are those of the run. A `GradientEdge` is a place in autograd's
    graph.
`Program`
    The calls of a graph through which a derivative passes, each an `Operation`, as one sample sees them.

**When a cached graph is another run's.** A graph is never marked as invalid. The `Tracer` takes those of the input's
form and of the default dtype, and sees each call of a run. `Followed` compares it with the next one of a graph:

- the operator, the grad mode and literal arguments; of numbers, a float may be another one, unless one of both is 0 or
  1, it is in a list, or the call depends on the input and has no rule, has parts, or has a rule that reads numbers
  (`Facts.exact`); an integer may be, as a factor or term (`OF_NUMBERS`);
- which values the tensors are, the form of captures and whether they have gradients, and the class of autograd's nodes;
- that neither NumPy nor ``.data`` changed a tensor that is the same in each run (`Node.fixed`);
- the elements of indices and masks on which patterns depend (`Node.contents`), but for the masks of ``torch.where``;
- the captures behind what a Function computed (`Node.behind`);
- sizes that depend on elements (`Tracer.repeat`), and at the end the output (`Followed.ends_at`).

At the first other call another cached graph goes on that begins with the same calls, or a copy of this beginning. Who
makes something of a graph looks at the rest, which differs between its runs; the head of `jacsparse.jacobians` lists
what looks at what. Graphs are let go of by `ChainCache` in `jacsparse.stages`: all where a rule is registered, the one
used longest ago where there are too many, of a module or function or of these themselves, and with their module, or the
function's code.
"""

from .autograd_nodes import apply_node, edge_of, ending_at, has_node_hooks, is_hooked, leads_to, with_all_gradients
from .calls import calls_of, with_constants, with_identities
from .graph import Form, Graph, Node, Operand, Scalar, Value, Values, form_of
from .graphs import GRAPHS
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
from .operators import Rewrite, facts_of, shows
from .program import Operation, Program, passed_by_all_paths, program_of
from .pruned_weights import PrunedWeight, mask_of
from .runs import SAMPLES, check_outside_transforms, random_tensor, samples_of, traced
from .saved_tensors import check_hooks_are_told, saved_handle, saves_objects, without_saving_hooks
from .storages import memory_of
from .traces import StaleError, Trace, is_recording

__all__ = [
    "GRAPHS",
    "SAMPLES",
    "Form",
    "Graph",
    "Node",
    "Operand",
    "Operation",
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
    "edge_of",
    "ending_at",
    "facts_of",
    "form_of",
    "has_node_hooks",
    "is_hooked",
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
    "shows",
    "snapshot",
    "tensors_of",
    "traced",
    "trains",
    "undisturbed",
    "with_all_gradients",
    "with_constants",
    "with_identities",
    "without_autocast",
    "without_saving_hooks",
]
