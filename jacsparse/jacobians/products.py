"""Values by products of local Jacobians along paths.

Where the entries fold into sums of local derivatives, and of their products with elements of weights, fused loops
compute all of them. Else a call multiplies the matrices of the operators in the order of least cost.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from ..codegen import ElementGraph, sums
from ..tracing import Trace
from .evaluator import Evaluator
from .folding import Folded
from .fused_values import FusedValues
from .traced_function import TracedFunction


class FoldedProducts(Evaluator):
    """The values of a function's Jacobian from local derivatives of elementwise operators and elements of weights.

    Parameters
    ----------
    function : TracedFunction
        The function.
    folded : Folded
        The entries of its Jacobian.
    compile : bool
        Whether machine code computes them. Else a kernel interprets the same loops.
    """

    name = "products"

    def __init__(self, function: TracedFunction, folded: Folded, *, compile: bool = False) -> None:
        self.function, self.pattern, dtype = function, folded.pattern, function.x.dtype
        self._constants = torch.from_numpy(folded.constants).to(dtype)
        #: The numbers of local derivatives, and of products and sums of them; and of operations of these.
        first, last = folded.steps[0].first, folded.steps[-1].first
        self._counts = first, last - first, sum(len(s.left) * (2 if s.right is None else 3) for s in folded.steps)
        if folded.derivatives is not None and self.pattern.nnz:
            entries = partial(_entries, folded, 1 if function.shared else function.batch, dtype)
            self.fused = FusedValues(folded.derivatives, function, entries, self.pattern, compile=compile)

    @property
    def details(self) -> str:
        """The numbers of local derivatives, and of sums and products of them."""
        return f" ({self._counts[0]} local derivatives, {self._counts[1]} products and sums of them)"

    @property
    def flop(self) -> int:
        """Operations of the sums and products for one sample, without those of the local derivatives."""
        return self._counts[2]

    @property
    def nbytes(self) -> int:
        return self._constants.nbytes if self.fused is None else self.fused.nbytes

    def computed(self, trace: Trace) -> torch.Tensor:
        """The constants of the entries, of which no local derivative is a part."""
        return self._constants.clone()[:, None]


def _entries(
    folded: Folded, batch: int, dtype: torch.dtype, graph: ElementGraph, parts: list[np.ndarray]
) -> np.ndarray:
    """The numbers of the entries, from those of the local derivatives."""
    variables = np.empty((folded.steps[-1].first, batch), graph.dtype)
    of_derivatives = [np.broadcast_to(part.T, (part.shape[1], batch)) for part in parts]
    np.concatenate(of_derivatives, out=variables[: folded.steps[0].first])
    constants = graph.array(torch.from_numpy(folded.constants).to(dtype))[:, None]
    for step in folded.steps:
        start = constants if step is folded.steps[-1] else None
        weights = torch.from_numpy(step.coefficient).to(dtype).numpy()
        computed = sums(graph, step.indptr, [variables[factor] for factor in step.factors], weights, start, dtype)
        # Those of the last step are the entries.
        variables[step.first : step.first + len(computed)] = computed[: len(variables) - step.first]
    return computed


class ChainProducts(Evaluator):
    """The values of a function's Jacobian from those of each operator, multiplied in the order of least cost.

    It is for functions whose local Jacobians are full of weights, as those of networks.
    """

    name = "products"
    uncompiled = (
        "products of operators' matrices cannot be compiled; leave it out, or on a CPU pass method='compressed'"
    )

    def __init__(self, function: TracedFunction) -> None:
        self.function, self.pattern, self.chain = function, function.pattern, function.chain

    @property
    def details(self) -> str:
        return f" ({len(self.chain)} stages)"

    @property
    def flop(self) -> int:
        """Operations of the products for one sample, without those of the operators' own backward."""
        return 2 * self.chain.accumulation.multiply_adds if len(self.chain) else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pattern's indices."""
        return self.pattern.index_nbytes

    def computed(self, trace: Trace) -> torch.Tensor:
        # Who replays a graph has looked at the pruned weights.
        records = (self.chain if self.function.replays else self.chain.adapted(trace)).records(trace)
        return trace.in_own_memory(self.chain.products(records, trace.input.detach()).values)
