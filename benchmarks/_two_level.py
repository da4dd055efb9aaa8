"""Recurrent networks as two-level systems, both ways: solvers of back-propagation, and the approximate forward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from jacsparse import solvers

from ._context import Context
from ._experiment import Group, Row

__all__ = ["TwoLevel", "solution_note"]

_PEER = "autograd, as one call"


def solution_note(solution: solvers.Solution) -> str:
    """Iterations and products of an iterative solver, up to the residual of each block row."""
    if solution.residual is None:
        return ""
    return (
        f"{solution.iterations} iterations, {solution.work.steps} products in turn, residual of each block row "
        f"{solution.residual:.1e}"
    )


@dataclass(frozen=True)
class TwoLevel:
    """A stacked RNN over some steps: back-propagation is equation 24, the forward pass equation 23."""

    layers: int
    steps: int
    units: int
    batch: int

    def __str__(self) -> str:
        return f"RNN of {self.layers} layers of {self.units} units, {self.steps} steps, batch {self.batch}"

    def backward(self, context: Context, methods: Mapping[str, solvers.TriangularSolver], workers: int) -> list[Row]:
        """Times and counts of each solver, and of autograd."""
        module, x = self._network()
        gradient = torch.randn(self.steps, self.batch, self.units)
        system = solvers.propagation(module, x, gradient).system
        solutions = {name: method.solve(system) for name, method in methods.items()}
        functions: dict[str, Callable[[], Any]] = {
            name: partial(methods[name].solve, system) for name, each in solutions.items() if each.converged
        }
        functions[_PEER] = _autograd(module, x, gradient)
        timings = context.under(str(self)).times(functions, seconds=context.seconds / 4)
        rows = Group(f"Equation 24: {self}", data={"layers": self.layers, "steps": self.steps})
        for name, solution in solutions.items():
            work, note = solution.work, solution_note(solution) or f"{solution.work.steps} products in turn"
            known: dict[str, Any] = {"layers": self.layers, "steps": self.steps, "method": name, "products": work.steps}
            known |= {"converged": solution.converged}
            known["multiply_adds_until_done"] = work.time(workers) if solution.converged else None
            if name in timings:
                rows.timed(name, timings[name], note=note, data=known)
            else:
                rows.missing(name, "its residual did not settle", note=note, data=known)
        rows.timed(_PEER, timings[_PEER], role="peer")
        first, *others = solutions
        rows.compare("autograd / substitution", _PEER, first)
        for name in others:
            rows.compare(f"substitution / {name}", first, name)
        return rows.rows()

    def forward(self, methods: Mapping[str, solvers.TriangularSolver], iterations: int) -> list[Row]:
        """Errors after a step of SGD, over iterations by substitution, and after one iteration by the other solvers."""
        module, x = self._network()
        scales = solvers.forward_scales(module, x)
        after = copy.deepcopy(module)
        optimizer = torch.optim.SGD(after.parameters(), lr=0.1)
        after(x)[0].square().mean().backward()
        optimizer.step()
        rows = Group(f"Approximate forward pass (equations 23 and 25) after a step of SGD, {self}")
        errors = solvers.approximate_forward(after, x, scales, iterations=iterations).errors
        for number, error in enumerate(errors, 1):
            rows.value(f"{number} iteration{'s' if number > 1 else ''}, substitution", error, "largest error")
        for name, method in methods.items():
            if name != "substitution":
                error = solvers.approximate_forward(after, x, scales, method=method).errors[0]
                rows.value(f"1 iteration, {name}", error, "largest error")
        return rows.rows()

    def _network(self) -> tuple[nn.RNN, torch.Tensor]:
        torch.manual_seed(0)
        return nn.RNN(self.units, self.units, self.layers), torch.randn(self.steps, self.batch, self.units)


def _autograd(module: nn.RNN, x: torch.Tensor, gradient: torch.Tensor) -> Callable[[], Any]:
    """The gradients of the input and of the weights, by PyTorch."""
    leaf = x.clone().requires_grad_()
    output, _ = module(leaf)
    return lambda: torch.autograd.grad(output, [leaf, *module.parameters()], gradient, retain_graph=True)
