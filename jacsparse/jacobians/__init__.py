"""Sparse Jacobians and Hessians of functions, their patterns, prepared ones, and their comparison with autograd.

**Which files a call goes through.** For what a graph, a trace, a program and a chain are, see the heads of
`jacsparse.tracing` and `jacsparse.stages`.

``jacobian(f, x)``
    `options` and `arguments` check what was passed, `flat_function` makes `f` a module of one flat tensor, and
    `unprepared` runs it. `ChainCache.of_run` finds the run's graph, with its chain of local Jacobians, or makes both.
    The graph's `JacobianPlan` has the chain multiplied in the first runs; then it looks for a cheaper way (`choice`),
    whose `Evaluator.values` are those of later runs.
``prepare_jacobian(f, x)``
    `tracing_for_replays` runs `f` for a `TracedProgram`: the trace and its chain (`TracedFunction`), and where a replay
    finds what `f` reads. `evaluator_of` (`choice`) chooses the way to the values. A `PreparedProgram` is both, and a
    `PreparedJacobian` (`prepared`) has one, and others for other numbers among the arguments. It is compared with `f`.
``prepared(x)``
    `PreparedJacobian._evaluated` takes the first of these ways that applies:

    1. `PreparedProgram.values_of_memory`, a call of `FusedValues`, where one contiguous tensor is differentiated by and
       all arguments are tensors with axes, in no tuple; loops compute all of the values; no pruned weight has to be
       looked at; values have no gradients; and nothing is returned beside them.
    2. Once `_checked` has compared the arguments' form, and `_program` found the program for the numbers among them,
       the same loops in `PreparedProgram.__call__`.
    3. A replay there: `Trace.replayed`, in which values are computed when they are asked for, and `Evaluator.values`.

    Values that are not finite as products are those of backward passes: `Evaluator.mended`.
an evaluator (`evaluator_of` says which one)
    `FoldedProducts` (`products`): sums of `terms`, by `folding`. `GroupedProducts` and `ChainProducts` (`products`):
    products of operators' matrices, by groups of rows with the same entries, or one matrix after the other.
    `Compressed` (`compressed`): `products_with_vectors` for the colours of `colorings`. What is computed of a run's
    values is a graph, a `ValueFunction`: of `FoldedProducts`, and of `Compressed` where that is compiled and has one
    part, `fused_values` makes loops.
``create_graph=True``
    Gradients of values do not depend on how the values were computed: `differentiable` takes PyTorch's second
    derivatives of the run, to which `unprepared` and, for a replay, `TracedFunction.connected_output` connect them.
    `check_second_derivatives` refuses registered values that are others and, for Hessians, operators of `WRONG_THIRD`.
    To be mended are: one operator's, there; a replay's alone, `_Connected` (`traced_function`); a run's alone,
    ``_evaluated`` (`unprepared`); those of single entries, `_WeightedSum`.
``hessian(f, x)``, ``prepare_hessian(f, x)``
    `hessians`: the same of the function's `Gradient` (`gradients`), with a symmetric pattern; a prepared and compressed
    one has a star colouring. What backward passes call has rules, or parts of `jacsparse.decompositions`.
``prepared.save(path)``, ``PreparedJacobian.load(path, f, x)``
    `saved_programs` has what was decided, as arrays; loading traces `f` again, and compares the digests. Of products
    only the name is saved.
``jacobian_pattern(f, x)``, ``verify(f, x)``
    `sparsity`; `verification`, on `edge_matrices`.

**What might make a result stale, and what looks at it.** Calls of `jacobian` run `f`, and differ from the run that a
graph was made in at the first call that is another one (`Followed`). Calls of a prepared Jacobian do not run `f`: they
read its parameters and buffers by their names, and of other tensors those that `f` read when it was prepared, with the
elements of now. All else is constant; what of that has changed since, only `PreparedJacobian.check` finds.

======================================  ==============================================  ================================
what may differ                         in a run                                        in a prepared call
======================================  ==============================================  ================================
elements that were overwritten          `Trace.elements` computes them anew, or raises  nothing: a replay does not write
weights that were zero                  `Chain.adapted`                                 `PreparedProgram._check_weights`
elements of indices and masks           `Followed`, by `Node.contents`                  `PreparedProgram._captures`
numbers                                 `JacobianPlan._by_chosen`                       `PreparedJacobian._program`
shapes, dtypes, autocast                `Tracer` of the input, `Followed` of the rest   `Arguments.form`; `_captures`
other arguments                         `Followed`                                      `PreparedJacobian._program`
hooks                                   `refuse_hooks`                                  nothing
rules that were registered since        `ChainCache.of_run` drops its graphs            nothing
======================================  ==============================================  ================================

**Where memory is bounded.** At once: `PART_BYTES` of tangents in `compressed`; in `verify` its `memory_limit`, and
`PART_BYTES` (`edge_matrices`) of a part of what is larger; in `stages` `GRADIENT_BYTES` (`record`), `KEY_BYTES`
(`order`), `Chain._check_size`, which refuses to multiply a chain to what no memory holds, and `Accumulation.run`, which
lets go of a matrix after its last use, and where products are large goes by samples and strips; in `spgemm`
`MOST_BYTES` (`row_groups`) of a group, and `MEMORY_LIMIT` (`plan`) of indices. An evaluator is not taken beyond
`MOST_TERMS` (`choice`), `TERMS_PER_ENTRY` (`terms`), `MOST_ENTRIES` and `MOST_PLAN_TERMS` (`products`). Kept for later
calls: `ChainCache.most_graphs`, with their plans, for each of the options of `_MOST_OWNERS` modules or functions;
`MOST_PROGRAMS` (`prepared`); `MOST_SCRATCH` (`fused_values`) of a call's own memory; `PLAN_CACHE`, of patterns and of
CPUs' plans; `MEMORY_POOL`; and `LIMIT`, in MiB, of `disk_cache`. Bounded by nothing are what PyTorch's operators take
in the run, what loops take within a call, seeds, a backward pass's weights of all colours, and copies on devices.

**What differs on a GPU.** Nothing is folded, grouped or compiled: a prepared call is a replay, by `ChainProducts` or
`Compressed`, chosen by the costs of CPUs. Patterns, colourings, orders and plans are made on the CPU. Arrays of
patterns and plans are copied at their first use (`uploaded`), which the capture of a CUDA graph refuses; those of a
`Compressed` when it is made; those of `differentiable` and of symmetric parts in each call. Products are
`Method.multiply_on_device`, all samples at once and without strips; `merge` takes the place of slots and rowwise there
(`device_substitute`). Values of rules have kernels of their own (`value_kernels_cuda` in `patterns`). `on_device` is
true of a device's tensors and of those that a test's backend emulates, ``Tensor.is_cuda`` of the former alone. Each
call waits for the device where it compares elements, or looks whether all are finite.
"""

from .hessians import PreparedHessian, hessian, prepare_hessian
from .prepared import PreparedJacobian, prepare_jacobian
from .sparsity import hessian_pattern, jacobian_pattern
from .unprepared import jacobian
from .verification import Verification, VerificationError, verify

__all__ = [
    "PreparedHessian",
    "PreparedJacobian",
    "Verification",
    "VerificationError",
    "hessian",
    "hessian_pattern",
    "jacobian",
    "jacobian_pattern",
    "prepare_hessian",
    "prepare_jacobian",
    "verify",
]
