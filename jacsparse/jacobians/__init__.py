"""Sparse Jacobians and Hessians of functions, their patterns, prepared ones, and their comparison with autograd.

**Which files a call goes through.** For what a graph, a trace, a program and a chain are, see the heads of
`jacsparse.tracing` and `jacsparse.stages`.

``jacobian(f, x)``, of which `unprepared` is the way
    1. `Arguments.of_call` checks what was passed, and `module_and_batch` (`flat_function`) makes `f` a module of one
       flat tensor, unless it is a module of one batch.
    2. `traced` runs that under `capture`, and finds the run's `Graph` by its key, the number of registered rules, and
       the contents of indices and masks. The `Trace` that it returns has the tensors, numbers and nodes of this very
       run.
    3. `chain_of_trace` finds the chain of local Jacobians by that graph and by whose weights they are; the first run
       made it. Where its patterns leave out zeros, each run is asked whether they still are; one that leaves out none
       is also that of other modules with the same graph.
    4. `plan_of` finds the chain's `JacobianPlan`, and in it, by the numbers that are constants, the way to the values
       that the first run chose (`choice`): `Evaluator.values` computes them of the trace, as ``(nnz, batch)`` in the
       order of the pattern's entries, which is that of CSR. Of `ChainProducts` that is `Chain.products`, which runs the
       `Accumulation`: `LocalJacobian.transposed_values` of each operator, by its rule, and `ProductPlan.multiply`,
       whose plan is found by digests of patterns.

    What 2. to 4. find are functions of the key, made once; only what is in the trace goes into values. A weight's zero
    that is filled widens the chain's pattern, which stays so.
``prepare_jacobian(f, x)``
    `tracing_for_replays` runs `f` for a `TracedProgram`: the trace and its chain (`TracedFunction`), and where a replay
    finds what `f` reads. `evaluator_of` (`choice`) chooses the way to the values. A `PreparedProgram` is both, and a
    `PreparedJacobian` (`prepared`) has one, and others for other constants among the arguments and other numbers of
    samples. It is compared with `f` (`comparison`). Neither is a `Program` of `jacsparse.tracing`, of which a chain is
    made.
``prepared(x)``
    1. `Arguments.leaves_of`, by the form of the latest program's arguments, or else `PreparedJacobian._checked`
       compares the arguments' form, and `_program` finds the program for the number of samples and the constants among
       them, or makes one, by a run of `f`.
    2. `PreparedProgram.__call__` calls `FusedValues`, if the evaluator has these and they read arguments and captures
       alone; each pruned weight that has to be looked at is itself a capture (`_hold`); no value was registered; the
       call has no gradients; and nothing is returned beside the values. `FusedValues` writes addresses into a table
       that `interpret` or machine code reads.
    3. Else it makes a replay, of `Trace.replayed`, by `Evaluator.values`. `ChainProducts` asks the trace for tensors,
       which are computed then, as does `_check_weights`; the others have the forward pass among their own calls, which
       begin with `TracedFunction.inputs`. They call `FusedValues`, too, where there are such.

    Values that are not finite as products are those of backward passes, by `Evaluator.mended`, unless they were
    registered.
an evaluator (`evaluator_of` says which one)
    `FoldedProducts` (`products`): sums of `terms`, by `folding`. `GroupedProducts` and `ChainProducts` (`products`):
    products of operators' matrices, by groups of rows that have entries in the same columns, or in `Chain.order`.
    `Compressed` (`compressed`): `products_with_vectors` for the colours of `colorings`. What all but `ChainProducts`
    compute of a run's tensors are `Calls` of a `ValueFunction`, which in a replay has the function's own calls
    too. `fused_values` makes loops of that of `FoldedProducts`, and of that of `Compressed` where it is compiled and
    has one part. PyTorch computes what loops cannot, before them. `ForwardAccumulation` (`forward_accumulation`), of
    runs of many small calls: local derivatives of calls that do the same at once, and a kernel for the products.
``create_graph=True``
    Gradients of values do not depend on how the values were computed: `differentiable` takes PyTorch's second
    derivatives of the run, or in a replay of `TracedFunction.connected_output`. That is of a copy of the arguments, and
    an `OwnGraph` connects its results to these, so that the caller's backward pass alone goes on from them.
    `check_second_derivatives` refuses registered values that are others and, for Hessians, operators of `WRONG_THIRD`,
    as `_WeightedSum` does for gradients of gradients. Where they are wrong for one operator, so is PyTorch's second
    derivative, of which there is no table yet: `check_second_derivatives` would refuse it. Else look, where they are
    wrong of a replay alone, at `_ConnectedValues` (`traced_function`); of a run alone, at ``_of_run`` (`unprepared`);
    of single entries, at `_WeightedSum`.
``hessian(f, x)``, ``prepare_hessian(f, x)``
    `hessians`: the same of the function's `Gradient` (`gradients`), with a symmetric pattern; a prepared and compressed
    one has a star colouring. What backward passes call has rules, or parts of `jacsparse.decompositions`.
``prepared.save(path)``, ``PreparedJacobian.load(path, f, x)``
    `saved_programs` has what was decided, as arrays; loading traces `f` again, and compares the digests. Of products
    only the name is saved.
``newton(f, u)``
    `roots`: steps with a prepared Jacobian's factors, and the implicit function's derivative at the root.
``jacobian_pattern(f, x)``, ``verify(f, x)``
    `sparsity`; `verification`, on `edge_matrices`.

**What might make a result stale, and what looks at it.** Calls of `jacobian` run `f`, and take from earlier runs what
is made of their key alone (`jacsparse.tracing`). Calls of a prepared Jacobian do not run `f`, unless a constant
among the arguments makes a program of its own. They read its parameters and buffers by their names, and of other
tensors those that `f` read when it was prepared; tensors of floats with the elements of now. All else is constant; what
of that has changed since, only `PreparedJacobian.check` finds. Writes that no operator makes, as NumPy's to a tensor
that `f` has made, and ``.data =``, are the caller's: neither looks at them.

======================================  ==============================================  ================================
what may differ                         in a run                                        in a prepared call
======================================  ==============================================  ================================
elements that were overwritten          `Trace.elements` computes them anew, or raises  nothing: a replay does not write
weights and factors that were zero      `Chain.adapted`                                 `_hold`, or `_check_weights`
masks of ``torch.where``                `Chain.adapted`                                 `PreparedProgram._captures`
other indices, masks and integers       `Graph.contents`                                `PreparedProgram._captures`
numbers                                 `JacobianPlan._constants`                       they are tensors
shapes, dtypes, autocast                `CapturedRun.key`                               `Arguments.form`; `_captures`
constants among the arguments           `CapturedRun.key`                               `PreparedJacobian._program`
hooks                                   `refuse_hooks`                                  nothing
rules that were registered since        `graphs_of`                                     nothing
======================================  ==============================================  ================================

**Where memory is bounded.** At once, but at least one vector or stage: `PART_BYTES` of tangents in `compressed`; in
`verify` its `memory_limit`; in `stages` `GRADIENT_BYTES` (`record`), `KEY_BYTES` (`order`), `check_size` (`chains`),
which refuses what no memory holds, and `Accumulation.run`, which lets go of a matrix after its last use, and where
products are large goes by samples and strips; in `spgemm` `MOST_BYTES` (`row_groups`) of a group, and `MEMORY_LIMIT`
(`plan`) of indices. An evaluator is not taken beyond `TERMS_PER_ENTRY` and `TERMS_OF_FACTORS` (`terms`), `MOST_ENTRIES`
and `MOST_PLAN_TERMS` (`products`).
Kept for later calls: the graphs of `MOST_KEYS`, `MOST_GRAPHS` of each (`graphs` of `tracing`), with their chains; as
many plans of these; `MOST_PROGRAMS` (`prepared`), each with the arguments that it was made at; `MOST_SCRATCH`
(`fused_values`) of a call's own memory; `PLAN_CACHE`, of patterns and of CPUs' plans; `MEMORY_POOL`; and `LIMIT`, in
MiB, of `disk_cache`, of symbolic results. Bounded by nothing are what PyTorch's operators take in the run, what loops
take within a call, seeds, a backward pass's weights of all colours, patterns while they are made, what a pattern caches
of itself, compiled kernels on disk, and copies on devices.

**What differs on a GPU.** Nothing is grouped or interpreted: with ``compile`` `FoldedProducts` and `Compressed` are
kernels (`DeviceCode` of `codegen`); without, a prepared call is a replay, by `ChainProducts` or `Compressed`. Costs
have a record of their own (`COSTS` in `jacsparse.stages`). Patterns, colourings, orders and plans are made on the CPU.
Arrays of patterns and plans are copied at their first use (`uploaded`), which the capture of a CUDA graph refuses;
those of a `Compressed` or a `FusedValues` when it is made; those of writes and of rules without kernels of their own in
each call; those of `differentiable` in each backward pass. Products are launches that `Method.bind` makes once, all
samples at once and without strips; `merge`, where its lists fit, takes the place of slots there (`device_substitute`).
Values of rules mostly have kernels of their own (`value_kernels_cuda` in `patterns`). `on_device` is true of a device's
tensors and of those that a test's backend emulates, ``Tensor.is_cuda`` of the former alone. No call waits for the
device to look whether values are finite: a kernel sets a flag, of which a later call tells (`note_infinite`). Each
version of an index or a mask, pruning masks among them, is looked at once (`Comparisons` of `tracing`); weights that
are zero without a mask are at each call, which waits.
"""

from .hessians import PreparedHessian, hessian, prepare_hessian
from .prepared import PreparedJacobian, prepare_jacobian
from .roots import newton
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
    "newton",
    "prepare_hessian",
    "prepare_jacobian",
    "verify",
]
