"""Chains whose consecutive stages are on several ranks: forward from rank to rank, back by a scan across them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ..affine import SparseMaps, compose
from ..distributed import JACOBIANS, VECTORS, RankGroup, Ranks, RankScan, interconnect_of
from ..patterns import Identity, Pattern, requiring_gradient
from ..spgemm import SparseJacobian
from ..stages import Record, Run
from ..tracing import check_hooks_are_told
from .autograd_scan import scanned
from .scanner import Scanner

#: The most multiply-adds, for a sample, of a product of stages whose pattern is worked out to see what it costs.
_WORTH_A_LOOK = 1e8
#: Multiply-adds that no other way costs.
_NEVER = 1e18


class StageRanks(RankGroup):
    """The ranks of a process group that have consecutive stages of a chain."""

    def output(
        self, module: nn.Module, x: torch.Tensor, run_part: Callable[[torch.Tensor], tuple[Scanner, Run]]
    ) -> torch.Tensor:
        """The whole chain's output, on all ranks, whose backward pass goes across them.

        Parameters
        ----------
        module : Module
            This rank's stages.
        x : Tensor, (batch, *input_shape)
            The chain's input; the first rank's values are those that count.
        run_part : callable
            Runs the module on its input with a record.
        """
        check_hooks_are_told("jacsparse.nn.Scan across ranks")
        ranks, enabled = self.ranks, torch.is_grad_enabled()
        facts = {"x": f"{tuple(x.shape)} {x.dtype}", "gradient of x": x.requires_grad, "gradients": enabled}
        trains = any(parameter.requires_grad for parameter in module.parameters())
        numbers = ranks.check("start of the forward pass", {**facts, "exchange": self.exchange}, trains)
        wanted = enabled and (x.requires_grad or any(trains for (trains,) in numbers))
        phase = "forward pass"
        here, number = ranks.take_over(x, 1, phase)
        with ranks.during(phase):
            if not wanted or not len(x):
                part, local = None, module(here.detach())
            else:
                part = run_part(here if ranks.rank == 0 else here.requires_grad_())
                local = part[1].trace.output
        ranks.hand_over(local, 1, phase, number)
        (y,) = ranks.shared([local.detach()], ranks.size - 1, "exchange of the output")
        if part is None:
            return y if not wanted else y + 0 * sum(each.sum() for each in (x, *module.parameters()))
        # Every rank takes part in the backward pass, also where nothing of its own has a gradient.
        scanner = RankedScanner(self.exchange, ranks, *part, for_x=x.requires_grad)
        return scanned(scanner, part[1], requiring_gradient(x), y)


class RankedScanner:
    """Pulls gradients back through this rank's stages of a chain that goes across ranks."""

    module: ClassVar[str] = "jacsparse.nn.Scan"

    def __init__(self, exchange: str, ranks: Ranks, scanner: Scanner, run: Run, *, for_x: bool) -> None:
        self._exchange, self._ranks, self._scanner, self._for_x = exchange, ranks, scanner, for_x
        # Not the run itself: a checkpoint lets it go, and makes another.
        output = run.trace.output
        self._shape, self._nbytes, self._itemsize = output.shape, output.nbytes, output.element_size()

    def pull_back(
        self, records: Sequence[Record], gradient: torch.Tensor, externals: Iterable[int], *, for_input: bool
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """The gradient of the whole chain's input, where one is wanted, and those of this rank's externals.

        On the last rank, `gradient` is that of the chain's output; those of the others are not read.
        """
        ranks, externals = self._ranks, list(externals)
        way = self._way()

        def pull_back_here(gradient: torch.Tensor) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
            with ranks.during("backward pass"):
                return self._scanner.pull_back(records, gradient, externals, for_input=ranks.rank > 0 or self._for_x)

        of_input: Any
        if way == "linear":
            of_output, number = ranks.take_over(gradient, -1, "backward pass")
            of_input, of_externals = pull_back_here(of_output)
            ranks.hand_over(of_input, -1, "backward pass", number)
        else:
            of_input, of_externals = self._scanned(records, gradient, pull_back_here, way)
        if not self._for_x:
            return None, of_externals
        of_x = gradient if of_input is None else of_input
        return ranks.shared([of_x], 0, "exchange of the input's gradient")[0], of_externals

    def _scanned(
        self, records: Sequence[Record], gradient: torch.Tensor, pull_back_here: Callable[[torch.Tensor], Any], way: str
    ) -> Any:
        ranks = self._ranks
        scan = RankScan(ranks, compose, way, "backward pass", reverse=True)
        if scan.is_first:
            of_input, of_externals = pull_back_here(gradient)
            scan(_constant(of_input if ranks.rank else gradient))
            return of_input, of_externals
        # Nobody asks for the product of the first rank's stages.
        element = _constant(gradient) if scan.is_last else self._transposed_jacobian(records, gradient)
        offsets = scan(element).offsets
        assert offsets is not None
        return pull_back_here(offsets[:, 0].T.reshape(self._shape))

    def _transposed_jacobian(self, records: Sequence[Record], gradient: torch.Tensor) -> SparseMaps:
        """The product of this rank's stages."""
        # Without records, it is the identity.
        x = records[0].trace.input.detach() if records else gradient
        with self._ranks.during("backward pass"):
            jacobian: SparseJacobian = self._scanner.chain.products(records, x).T
        return SparseMaps(jacobian.pattern, jacobian.values[:, None], None)

    def _way(self) -> str:
        """The exchange that was asked for, or the one of the least predicted time."""
        if self._exchange != "auto":
            return self._exchange
        ranks, chain, batch = self._ranks, self._scanner.chain, self._shape[0]
        if ranks.size < 3 or not len(chain):
            # The first and the last rank multiply vectors alone.
            return "linear" if ranks.size < 3 else self._predicted(0, 0, 0)
        vectors = sum(stage.factor().nnz for stage in chain if not stage.couples)
        # What couples samples has no matrix.
        matrices = _NEVER if chain.coupling else batch * chain.order.cost
        block = chain.pattern.nnz if matrices < batch * _WORTH_A_LOOK else 0
        return self._predicted(batch * vectors, int(matrices), batch * block * self._itemsize)

    def _predicted(self, vectors: int, matrices: int, nbytes: int) -> str:
        count, interconnect = self._ranks.size, interconnect_of(self._ranks)
        costs = self._ranks.check("start of the backward pass", {}, vectors, matrices, nbytes)
        linear = sum(each[0] for each in costs) / VECTORS + interconnect.scan_seconds(count, "linear", self._nbytes)
        largest = [max(column) for column in zip(*costs, strict=True)]
        reduction = max(largest[0] / VECTORS, max(each[1] for each in costs[1:-1]) / JACOBIANS)
        # Unlike a scan, it multiplies no matrices of two ranks, which fill in.
        others = largest[0] / VECTORS + reduction + interconnect.scan_seconds(count, "gather", largest[2])
        return "gather" if others < linear else "linear"


def _constant(gradient: torch.Tensor) -> SparseMaps:
    """A map to a gradient, ``(batch, ...)``, from any other one."""
    columns = gradient.reshape(len(gradient), -1).T[:, None].contiguous()
    return SparseMaps(Pattern.of(Identity(math.prod(gradient.shape[1:]))), None, columns)
