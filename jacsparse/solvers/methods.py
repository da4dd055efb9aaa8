"""The solvers by their names, and solving by one of them."""

from __future__ import annotations

import inspect
from typing import Any

from ..runtime import a_type
from ..schedule import Names
from .bicgstab import BiCGStab
from .cyclic_reduction import CyclicReduction
from .hybrid import Hybrid
from .jacobi import Jacobi, Richardson
from .prefix_scan import PrefixScan
from .solver import Solution, TriangularSolver
from .substitution import Substitution
from .systems import BlockTriangular

#: The solvers by their names.
SOLVERS: dict[str, type[TriangularSolver]] = {
    solver.name: solver for solver in (Substitution, PrefixScan, CyclicReduction, Jacobi, Richardson, BiCGStab, Hybrid)
}


def solver_of(method: str | TriangularSolver, **options: Any) -> TriangularSolver:
    """A solver by its name and options, or the solver itself.

    Raises
    ------
    TypeError, ValueError
        Where there is no such solver, or it takes no such options.
    """
    if isinstance(method, TriangularSolver):
        if options:
            raise TypeError(f"method is {a_type(method)}, which has its options; pass {sorted(options)} to that")
        return method
    Names("method", SOLVERS.keys(), "a solver").parse(method)
    names = inspect.signature(SOLVERS[method]).parameters
    unknown = sorted(options.keys() - names.keys())
    if unknown:
        raise TypeError(f"the method {method} does not take {unknown}; its options are: {', '.join(names) or 'none'}")
    return SOLVERS[method](**options)


def solve(system: BlockTriangular, method: str | TriangularSolver = "substitution", **options: Any) -> Solution:
    """Solve a block triangular system.

    Parameters
    ----------
    system : BlockTriangular
        The system.
    method : str or TriangularSolver
        ``substitution``, ``scan``, ``cyclic_reduction``, ``jacobi``, ``richardson``, ``bicgstab`` or ``hybrid``.
    **options
        Arguments of that solver.

    Raises
    ------
    TypeError, ValueError
        Where there is no such method, or it does not apply to the system.

    Examples
    --------
    >>> import torch
    >>> from jacsparse.solvers import BlockBidiagonal
    >>> system = BlockBidiagonal([torch.eye(2)] * 7, [torch.ones(1, 2)] * 8)
    >>> [solve(system, method=name).values[0][0, 0].item() for name in ("substitution", "scan", "cyclic_reduction")]
    [8.0, 8.0, 8.0]
    >>> solution = solve(system, method="jacobi")
    >>> solution.iterations, solution.residual
    (7, 0.0)
    """
    if not isinstance(system, BlockTriangular):
        raise TypeError(f"system is {a_type(system)}; expected a BlockTriangular or BlockBidiagonal")
    return solver_of(method, **options).solve(system)
