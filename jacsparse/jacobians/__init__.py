"""Sparse Jacobians and Hessians of functions, their patterns, prepared ones, and their comparison with autograd.

Which files a call goes through, in order:

``jacobian(f, x)``
    `options` and `arguments` check what was passed, `flat_function` makes `f` a module of one flat tensor, and
    `evaluation` runs it. The run's graph has a `Plan`: first the chain of local Jacobians is multiplied, later an
    evaluator's values are taken. `differentiable` gives values gradients.
``prepare_jacobian(f, x)``
    `prepared` asks `tracing_for_replays` for a run that can be replayed, a `TracedFunction`, and `evaluators` for the
    way to its values; a `PreparedProgram` is both. The result is compared with `f`.
``prepared(x)``
    `prepared` compares the arguments' form, and `prepared_program` finds what the function reads. Then `fused_values`
    computes all in one call, or `evaluator` in a replay.
an evaluator (`evaluators` chooses)
    `FoldedProducts` (`products`): sums of `terms`, by `folding`. `GroupedProducts` and `ChainProducts` (`products`):
    products of operators' matrices, by groups of rows with the same entries, or one matrix after the other.
    `Compressed` (`compressed`): `products_with_vectors` for the colours of `colorings`. What each computes of a run's
    values is one graph, of `value_functions`, which `fused_values` makes loops of.
``hessian(f, x)``, ``prepare_hessian(f, x)``
    `hessians`: the same of the function's `Gradient` (`gradients`), with a symmetric pattern and a star colouring.
``prepared.save(path)``, ``PreparedJacobian.load(path, f, x)``
    `saved_programs` has what was decided, as arrays; loading traces `f` again, and compares the digests.
``jacobian_pattern(f, x)``, ``verify(f, x)``
    `sparsity`; `verification`, on `edge_matrices`.
"""

from .evaluation import jacobian
from .hessians import PreparedHessian, hessian, prepare_hessian
from .prepared import PreparedJacobian, prepare_jacobian
from .sparsity import hessian_pattern, jacobian_pattern
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
