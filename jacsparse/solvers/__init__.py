"""Back-propagation as block triangular systems, and ways of solving those, a file each (Naumov).

Of the methods that the paper only names, Gauss-Seidel, GMRES, SPIKE and nested dissection are not here.
"""

from typing import Any

from .appendix import Reduction, explicit_reduction
from .bicgstab import BiCGStab
from .blocks import Work
from .comparison import SolverComparison, compare
from .complexity import (
    iteration_pays,
    iterative_time,
    iterative_work,
    recursive_time,
    reduction_pays,
    reduction_time,
    reduction_work,
    sequential,
)
from .cyclic_reduction import CyclicReduction
from .forward import ForwardApproximation, approximate_forward, forward_scales
from .hybrid import Hybrid
from .jacobi import Jacobi, Richardson
from .prefix_scan import PrefixScan
from .propagation import Propagation, Propagator, propagation
from .solver import Solution, TriangularSolver
from .substitution import Substitution
from .systems import BlockBidiagonal, BlockTriangular

__all__ = [
    "SOLVERS",
    "BiCGStab",
    "BlockBidiagonal",
    "BlockTriangular",
    "CyclicReduction",
    "ForwardApproximation",
    "Hybrid",
    "Jacobi",
    "PrefixScan",
    "Propagation",
    "Propagator",
    "Reduction",
    "Richardson",
    "Solution",
    "SolverComparison",
    "Substitution",
    "TriangularSolver",
    "Work",
    "approximate_forward",
    "compare",
    "explicit_reduction",
    "forward_scales",
    "iteration_pays",
    "iterative_time",
    "iterative_work",
    "propagation",
    "recursive_time",
    "reduction_pays",
    "reduction_time",
    "reduction_work",
    "sequential",
    "solve",
    "solver_of",
]

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
            raise TypeError(
                f"method is a {type(method).__name__}, which has its options; pass {sorted(options)} to that"
            )
        return method
    if method not in SOLVERS:
        raise ValueError(f"method is {method!r}; expected one of {', '.join(SOLVERS)}, or a solver")
    try:
        return SOLVERS[method](**options)
    except TypeError as error:
        raise TypeError(f"the method {method} does not take {sorted(options)}: {error}") from None


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
    >>> system = BlockBidiagonal([torch.eye(2)] * 7, [torch.ones(1, 2)] * 8)
    >>> [solve(system, method=name).values[0][0, 0].item() for name in ("substitution", "scan", "cyclic_reduction")]
    [8.0, 8.0, 8.0]
    >>> solution = solve(system, method="jacobi")
    >>> solution.iterations, solution.residual
    (7, 0.0)
    """
    if not isinstance(system, BlockTriangular):
        raise TypeError(f"system is a {type(system).__name__}; expected a BlockTriangular or BlockBidiagonal")
    return solver_of(method, **options).solve(system)
