"""Forward passes around the points of an earlier one, as lower triangular systems (Naumov, equations 13, 23 and 25)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jacsparse.patterns import Diagonal, Pattern
from torch import nn

from jacsparse import SparseJacobian
from jacsparse.solvers import BlockTriangular, TriangularSolver


@dataclass(frozen=True, eq=False)
class TanhNetwork:
    """``z_{k,s} = tanh(W_k z_{k-1,s} + U_k z_{k,s-1} + b_k)``, where ``z_{0,s}`` is the input of step s.

    Linear layers with a tanh each are one step, without U. Each of `layers` has W, U and b; `x` is (steps, batch,
    units). States and scales are lists with a tensor, (steps, batch, units), for each layer.
    """

    layers: Sequence[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]
    x: torch.Tensor

    @classmethod
    def of(cls, module: nn.Module, x: torch.Tensor) -> TanhNetwork:
        """The network that an ``nn.RNN`` from zero states is, or an ``nn.Sequential`` of linear layers and tanh."""
        parameters = [parameter.detach() for parameter in module.parameters()]
        if isinstance(module, nn.RNN):
            gates = zip(parameters[::4], parameters[1::4], parameters[2::4], parameters[3::4], strict=True)
            return cls([(w, u, b + c) for w, u, b, c in gates], x)
        return cls([(w, None, b) for w, b in zip(parameters[::2], parameters[1::2], strict=True)], x[None])

    def states(self) -> list[torch.Tensor]:
        """The input, and the states of the pass itself."""
        states = [self.x]
        for w, u, b in self.layers:
            steps, before = list[torch.Tensor](), None
            for below in states[-1]:
                y = below @ w.T + b
                before = (y if u is None or before is None else y + before @ u.T).tanh()
                steps.append(before)
            states.append(torch.stack(steps))
        return states

    def scales(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``tanh(y) / y`` of each layer, for the y that states give."""
        scales = []
        for (w, u, b), below, own in zip(self.layers, states, states[1:], strict=False):
            y = below @ w.T + b
            if u is not None:
                y[1:] += own[:-1] @ u.T
            scales.append(torch.where(y == 0, torch.ones_like(y), y.tanh() / y))
        return scales

    def system(self, scales: Sequence[torch.Tensor]) -> BlockTriangular:
        """``D z_{k,s} - W_k z_{k-1,s} - U_k z_{k,s-1} = b_k`` with ``D = y / tanh(y)``, whose groups are the steps."""
        blocks, right, inverse = dict[tuple[int, int], torch.Tensor](), [], list[SparseJacobian | None]()
        count = len(self.layers) + 1
        for step, x in enumerate(self.x):
            right.append(x)
            inverse.append(None)
            for place, (w, u, b) in enumerate(self.layers, 1):
                node = step * count + place
                blocks[node, node - 1] = w
                if u is not None and step:
                    blocks[node, node - count] = u
                right.append(b.expand(len(x), -1))
                scale = scales[place - 1][step]
                inverse.append(SparseJacobian(Pattern.of(Diagonal(scale.shape[1])), scale.T.contiguous()))
        groups = [list(range(step * count, (step + 1) * count)) for step in range(len(self.x))]
        return BlockTriangular(blocks, right, inverse_diagonal=inverse, groups=groups)

    def errors(self, scales: Sequence[torch.Tensor], method: TriangularSolver, iterations: int = 1) -> list[float]:
        """The largest error of the output, as a share of its largest element, after each iteration.

        Each takes the scales at the points that the one before came to, and makes one more layer or step exact.
        """
        exact, errors = self.states()[-1], list[float]()
        for _ in range(iterations):
            values, count = method.solve(self.system(scales)).values, len(self.layers) + 1
            states = [torch.stack(values[place::count]) for place in range(count)]
            errors.append(float((states[-1] - exact).abs().max() / exact.abs().max()))
            scales = self.scales(states)
        return errors
