"""A program as a chain of stages, and the matrices of stages by vertex elimination.

**The words.** An `Edge` is one operand of an operation, which has a local Jacobian: a `Rule` of `jacsparse.patterns`
gives its pattern, and its values for a `Call`. A `Stage` is what lies between two `Program.cuts` (`stages_of`): one
operation or a few. A `Chain` is all stages of a program; `forward_passes` finds that of an earlier run. In a trace, an
edge is a `LocalJacobian`, and a stage a `Record`: these have values. Matrices are transposed, so that their rows are
inputs.

**Loops.** A `Loop` is a part of a run whose calls repeat themselves, which no cut tells apart, because each step reads
the input again. `loop_regions` (`loops`) cuts it at the values that a step takes over from the one before it; these,
what it reads besides and what later calls read of it are the edges of a step. `jacsparse.scan` goes back through it.

**In which order they are multiplied.** `best_order` (`order`) compares the parenthesisations of the stages by the
device's costs (`COSTS` in `costs`) and by estimated numbers of entries, `Estimates`; ``print(chain.order)`` shows the
cheapest one. `accumulated` makes it an `Accumulation` of products and sums. Where a stage of several operators becomes
one matrix, `eliminate` takes the vertex of the fewest operations next; beside an interval they go in turn. Folded
entries of `jacsparse.jacobians` take `eliminate` for all edges, and no order. Chains of more than `MOST_STAGES` are
multiplied stage by stage. The chain's pattern is that of the accumulation.

**How they are computed.** `Accumulation.run` asks for the values of edges, which are those of `LocalJacobian`: the
rule's, or PyTorch's derivative where the rule has none. `last_products` goes by strips where products are large,
`infinite_entries` mends what is not finite, by backward passes (`graph_gradients`).

**Another kind of step** is a name of `Order.how`: a case in ``Order.__str__``, a candidate in `_candidates`, with its
cost, and a case in `accumulated`. If what it computes is neither a product nor a sum, it is also a class of `matrices`,
which a method of `Accumulation` adds, with its pattern, and which gets by `Chain.products` what else its values take;
`Accumulation.passes` and ``_cost_of_products`` in `jacsparse.jacobians.choice` price it, if multiply-adds do not.
``backward`` and `Pulled` are the example: one pass of the operators' own backward for an interval, whose cost has a
table of its own in `best_order`, ``passing``, since further stages join a pass. A chain of one stage takes no step.
Steps within folded entries are `WeightedSums` of `jacsparse.jacobians.terms`.
"""

from .accumulation import Accumulation, Region, empty_pattern, is_light, matrix_of
from .balance import boundaries
from .chains import (
    Chain,
    chain,
    chain_for_all,
    chain_of,
    check_size,
    refuse_hooks,
    refuse_other_derivatives,
)
from .checks import agree, check_batch, check_input, check_shape, check_tensor, is_fit
from .costs import COSTS, Costs
from .elimination import eliminate
from .forward_passes import Owner, Run, chain_of_trace, forward_pass, owner_of, trace_of_call
from .graph_gradients import add_gradients, has_hooks, pull_back, pulled_by_autograd, walk
from .infinite_entries import all_finite, tell_of_infinite_values, with_backward_passes
from .local_jacobian import LocalJacobian
from .loops import Loop, LoopRegion
from .record import GRADIENT_BYTES, Record, pull_back_all
from .stage import Edge, Stage, edge_of

__all__ = [
    "COSTS",
    "GRADIENT_BYTES",
    "Accumulation",
    "Chain",
    "Costs",
    "Edge",
    "LocalJacobian",
    "Loop",
    "LoopRegion",
    "Owner",
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
    "chain_of_trace",
    "check_batch",
    "check_input",
    "check_shape",
    "check_size",
    "check_tensor",
    "edge_of",
    "eliminate",
    "empty_pattern",
    "forward_pass",
    "has_hooks",
    "is_fit",
    "is_light",
    "matrix_of",
    "owner_of",
    "pull_back",
    "pull_back_all",
    "pulled_by_autograd",
    "refuse_hooks",
    "refuse_other_derivatives",
    "tell_of_infinite_values",
    "trace_of_call",
    "walk",
    "with_backward_passes",
]
