"""Values by compression: tangents of all columns of a colour at once, cotangents of all rows of a colour at once.

The seeds of all colours, or of as many as fit in memory, run as more samples of one pass over the program, and one
gather decompresses the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from ..codegen import ElementGraph
from ..patterns import UnsupportedOperatorError, rows_at
from ..runtime import SIMD, run_rows
from ..tracing import Trace, Values
from . import kernels
from .colorings import Coloring
from .evaluator import Evaluator
from .fused_values import FusedValues, flop_of
from .products_with_vectors import pull_back, push_forward
from .traced_function import TracedFunction
from .value_functions import ValueFunction

#: Bytes that a pass with many seeds may compute at once: tangents of all operators, if none were freed.
PART_BYTES = 2**27
#: On a CPU, a pass computes at once at most half as many bytes as the values have, but each of its calls this many on
#: average: calls for less take longer than they compute.
CALL_BYTES = 3 * 2**17


class Compressed(Evaluator):
    """The values of a function's Jacobian from products with the seeds of the colours of its pattern.

    With `compile`, machine code computes what is not PyTorch's to compute, where all seeds of a pass run at once.
    """

    name = "compressed"
    uncompiled = "PyTorch computes most of the products with the seeds of its colours, and they are many"

    def __init__(self, function: TracedFunction, colors: Coloring, *, compile: bool = False) -> None:
        self.function, self.pattern, self.coloring = function, colors.pattern, colors
        self._shape = self.pattern.nnz, 1 if function.shared else function.batch
        x, ways = function.x, zip(colors.seeds(), (push_forward, pull_back), self.pattern.shape, strict=True)
        directions = [(torch.from_numpy(each).to(x), products, size) for each, products, size in ways if len(each)]
        most, together = seeds_at_once(function, colors, compile=compile)
        groups = [directions] if together else [[direction] for direction in directions]
        self._passes = [_SeedPass(function, each, most) for each in groups if each]
        columns, rows = colors.counts
        in_place = f"in place of {min(self.pattern.shape):,} products with vectors"
        self.details = f" ({columns} colours of columns and {rows} of rows, {in_place})"
        # Two for each multiply-add of a product, else one for each element.
        self.flop = sum(each.flop for each in self._passes)
        of_seeds = sum(seeds.nbytes for each in self._passes for part in each.parts for seeds in part)
        self.nbytes = colors.places.nbytes + of_seeds
        #: By part, its entries, and their places among its products; None where all products are the entries in order.
        self._of_parts = self._entries_of_parts(x.device)
        if not self.pattern.nnz:
            self.uncompiled = "it has no entries"
        elif compile and not together:
            self.uncompiled = "the seeds of its colours take too much memory for one run of machine code"
            self.remedy = "leave it out"
        elif compile and directions:
            (only,) = self._passes
            self.fused = FusedValues(only.computed, function, self._entries, self.pattern, only.parts[0])

    def _entries(self, graph: ElementGraph, parts: list[np.ndarray]) -> np.ndarray:
        """The numbers of the entries, from those of the products with all seeds."""
        products = np.concatenate(parts)
        return (products[:, :1] if self.function.shared else products)[self.coloring.places]

    def _entries_of_parts(self, device: torch.device) -> list[tuple[torch.Tensor, ...]] | None:
        places, counts = self.coloring.places, [count for each in self._passes for count in each.counts]
        if len(counts) == 1 and np.array_equal(places, np.arange(counts[0])):
            return None
        order = np.arange(len(places)) if len(counts) == 1 else np.argsort(places, kind="stable")
        begins = np.append(0, np.cumsum(counts))
        parts = np.split(order, np.searchsorted(places, begins[1:-1], sorter=order))
        pairs = ((part, places[part] - begin) for part, begin in zip(parts, begins, strict=False))
        return [tuple(torch.from_numpy(array).to(device) for array in pair) for pair in pairs]

    def computed(self, trace: Trace) -> torch.Tensor:
        if not self.pattern.nnz:
            return trace.input.detach().new_empty(self._shape)
        products = (part[:, : self._shape[1]] for each in self._passes for part in each.run(trace))
        if self._of_parts is None:
            # Products may be the seeds themselves, or lie in the memory of the run.
            return next(products).clone()
        if len(self._of_parts) == 1:
            return rows_at(next(products), self._of_parts[0][1])
        batch, values = self._shape[1], trace.input.detach().new_empty(self._shape)
        write = kernels.write_numbers if batch == 1 else kernels.write_numbers_batch
        for part, (entries, places) in zip(products, self._of_parts, strict=True):
            if part.is_cuda or part.dtype != values.dtype:
                values[entries] = rows_at(part, places).to(values.dtype)
                continue
            numbers = (each[:, 0] if batch == 1 else each for each in (part.resolve_neg().contiguous(), values))
            arrays = (each.numpy() for each in (entries, places, *numbers))
            run_rows(write, len(entries), *arrays, lanes=SIMD * batch)
        return values

    def mended(self, values: torch.Tensor, trace: Trace) -> torch.Tensor:
        # Entries that have one place, as both of a pair of a Hessian, have one value.
        _, first, of_places = np.unique(self.coloring.places, return_index=True, return_inverse=True)
        return rows_at(super().mended(values, trace), torch.from_numpy(first[of_places]).to(values.device))


def seeds_at_once(function: TracedFunction, colors: Coloring, *, compile: bool) -> tuple[int, bool]:
    """The number of seeds in a pass, and whether all run in one; machine code takes all at once, or none."""
    x, count = function.x, sum(colors.counts)
    # What does not depend on the input is computed once for all seeds.
    width = max(1, x.element_size() * sum(map(function.element_count, function.nodes)))
    part = PART_BYTES
    if not (compile or x.is_cuda):
        values = colors.pattern.nnz * (1 if function.shared else function.batch)
        part = min(PART_BYTES, max(CALL_BYTES * len(function.nodes), x.element_size() * values // 2))
    # Two small parts would not pay.
    together = count * width <= min(PART_BYTES, 2 * part)
    return (count if together else max(1, part // width)), together


SeedProducts = Callable[[TracedFunction, Values, torch.Tensor], torch.Tensor]


class _SeedPass:
    """The products of a function's Jacobian with seeds, some of them at a time where all would take much memory."""

    def __init__(
        self,
        function: TracedFunction,
        directions: Sequence[tuple[torch.Tensor, SeedProducts, int]],
        most: int,
    ) -> None:
        #: The seeds of each run, of one direction or of both.
        self.parts: list[list[torch.Tensor]] = [[seeds for seeds, *_ in directions]]
        #: The number of products of each run.
        self.counts, batch = [sum(len(seeds) * size for seeds, _, size in directions)], function.batch
        if sum(len(seeds) for seeds, *_ in directions) > most:
            ((seeds, _, size),) = directions
            # Parts of equal lengths, so that one graph takes all of them.
            length = -(-len(seeds) // -(-len(seeds) // most))
            self.counts = [len(part) * size for part in seeds.split(length)]
            padding = seeds.new_zeros((-len(seeds) % length, seeds.shape[1]))
            self.parts = [[part] for part in torch.cat([seeds, padding]).split(length)]

        def compute(values: Values, *seeds: torch.Tensor) -> list[torch.Tensor]:
            parts = [
                products(function, values, each[:, None, :].expand(-1, batch, -1))
                for each, (_, products, _) in zip(seeds, directions, strict=True)
            ]
            return [(part.permute(0, 2, 1) if batch > 1 else part).reshape(-1, batch) for part in parts]

        reads = [value for node in function.nodes for _, value in node.tensors]
        try:
            self.computed = ValueFunction(function, compute, reads, self.parts[0], self._identities())
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # PyTorch's transforms do not take an operator.
            reason = str(error).partition("\n")[0]
            remedy = "pass method='products'" if function.given is None else "leave the pattern out"
            raise UnsupportedOperatorError(
                f"no forward mode for all operators, by which method='compressed' works: {reason}; {remedy}"
            ) from error

    def _identities(self) -> list[int]:
        """The places of the seeds that are identity matrices, where all run at once."""
        if len(self.parts) > 1:
            return []
        square = [(place, seeds) for place, seeds in enumerate(self.parts[0]) if len(seeds) == seeds.shape[1]]
        return [
            place
            for place, seeds in square
            if torch.equal(seeds, torch.eye(len(seeds), dtype=seeds.dtype, device=seeds.device))
        ]

    @property
    def flop(self) -> int:
        """Operations of all runs."""
        if len(self.parts) == 1:
            return flop_of(self.computed.calls)
        alike, of_part = self.computed.apart
        return flop_of(alike) + len(self.parts) * flop_of(of_part)

    def run(self, trace: Trace) -> Iterator[torch.Tensor]:
        """The products of each run, ``(seeds · elements, batch)``."""
        for products in self.computed.of_parts(trace, self.parts):
            yield torch.cat(list(products)) if len(products) > 1 else products[0]
