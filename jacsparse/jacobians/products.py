"""Values by products of local Jacobians along paths.

Where the entries fold into sums of local derivatives, a call runs the graph of these and one pass of a kernel over the
entries; else it multiplies the matrices of the operators in the order of least cost.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx

from ..runtime import run_rows
from ..tracing import record
from . import kernels
from .folding import Folded
from .linearised import GraphRun, Linearised
from .terms import Step


class Products:
    """The values of a function's Jacobian from the local derivatives of its elementwise operators.

    Parameters
    ----------
    function : Linearised
        The function.
    folded : Folded
        The entries of its Jacobian.
    graph : GraphModule or None
        The graph of its local derivatives.
    compile : bool
        Whether that runs under ``torch.compile``.
    """

    name = "products"

    def __init__(
        self, function: Linearised, folded: Folded, graph: fx.GraphModule | None, compile: bool = False
    ) -> None:
        self.pattern, self.folded = folded.pattern, folded
        self.batch, self.dtype = 1 if function.shared else function.batch, function.inputs[0].dtype
        self._graph = (
            None if graph is None else torch.compile(graph.forward, dynamic=False) if compile else graph.forward
        )
        self._weights: tuple[tuple[float, ...], list[np.ndarray]] | None = None

    def describe(self) -> dict[str, Any]:
        """All of the plan as plain numbers and arrays."""
        return self.folded.describe()

    @property
    def details(self) -> str:
        """The numbers of local derivatives, and of sums and products of them."""
        derivatives = self.folded.derivatives
        return (
            f" ({derivatives} local derivatives, {self.folded.steps[-1].first - derivatives} products and sums of them)"
        )

    @property
    def flop(self) -> int:
        """Operations of the sums and products for one sample, without those of the local derivatives."""
        return sum(len(step.left) * (2 if step.right is None else 3) for step in self.folded.steps)

    @property
    def nbytes(self) -> int:
        """Bytes of the plan's arrays."""
        return sum(array.nbytes for step in self.folded.steps for array in step.describe().values())

    def weights(self, numbers: tuple[float, ...]) -> list[np.ndarray]:
        """The constants of the entries, and the weights of each step's terms, for the function's numbers."""
        weights = self._weights
        if weights is None or weights[0] != numbers:
            monomials = self.folded.monomials.values(numbers)
            entry, monomial, coefficient = self.folded.constants
            constant = np.bincount(entry, coefficient * monomials[monomial], minlength=self.pattern.nnz)
            steps = [step.coefficient * monomials[step.monomial] for step in self.folded.steps]
            dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
            weights = self._weights = numbers, [array.astype(dtype, copy=False) for array in (constant, *steps)]
        return weights[1]

    def values(self, inputs: list[torch.Tensor], numbers: tuple[float, ...]) -> torch.Tensor:
        """The values on the pattern, ``(nnz, batch)``, or ``(nnz, 1)`` where none depends on a tensor."""
        constant, *weights = self.weights(numbers)
        if self._graph is None:
            return torch.from_numpy(constant.copy())[:, None]
        variables = self._graph(*inputs)
        *steps, last = self.folded.steps
        if steps:
            computed = variables.new_empty((last.first, self.batch))
            computed[: len(variables)] = variables
            variables = computed
        for step, weight in zip(steps, weights, strict=False):
            self._run(step, weight, variables, variables[step.first : step.stop])
        out = variables.new_empty((self.pattern.nnz, self.batch))
        self._run(last, weights[-1], variables, out, constant)
        return out

    def _run(
        self,
        step: Step,
        weight: np.ndarray,
        variables: torch.Tensor,
        out: torch.Tensor,
        constant: np.ndarray | None = None,
    ) -> None:
        arrays = [variables.numpy(), out.numpy()]
        suffix = "_batch"
        if self.batch == 1:
            arrays, suffix = [array.reshape(-1) for array in arrays], ""
        if step.right is None:
            if constant is None:
                constant = np.zeros(len(out), dtype=weight.dtype)
            kernel = getattr(kernels, f"weighted_sums{suffix}")
            args: tuple[Any, ...] = (step.indptr, step.left, weight, constant)
        else:
            kernel = getattr(kernels, f"weighted_products{suffix}")
            args = (step.indptr, step.left, step.right, weight)
        run_rows(kernel, step.indptr, *args, *arrays, lanes=self.batch)


class ChainProducts:
    """The values of a function's Jacobian from those of each operator, multiplied in the order of least cost.

    It is for functions whose local Jacobians are full of weights, as those of networks.
    """

    name = "products"

    def __init__(self, function: Linearised) -> None:
        self.pattern, self.chain, self._graph = function.pattern, function.chain, function.graph

    def describe(self) -> dict[str, Any]:
        """Nothing: its plans are made at the first call."""
        return {}

    @property
    def details(self) -> str:
        """The number of stages."""
        return f" ({len(self.chain)} stages)"

    @property
    def flop(self) -> int:
        """Operations of the products for one sample, without those of the operators' own backward."""
        return 2 * self.chain.accumulation.multiply_adds if len(self.chain) else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pattern's indices."""
        return self.pattern.index_nbytes

    def values(self, inputs: list[torch.Tensor], numbers: tuple[float, ...]) -> torch.Tensor:
        """The values on the pattern, ``(nnz, batch)``, or ``(nnz, 1)`` where all samples share them."""
        recording = record(GraphRun(self._graph, inputs), inputs[0])
        values = self.chain.jacobian(self.chain.records(recording)[1], inputs[0]).values
        # They may lie in the memory of an input.
        memories = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        return values.clone() if values.untyped_storage().data_ptr() in memories else values
