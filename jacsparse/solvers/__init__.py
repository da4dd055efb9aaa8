"""Back-propagation as block triangular systems, and ways of solving those, a file each (Naumov).

Of the methods that the paper only names, Gauss-Seidel, GMRES, SPIKE and nested dissection are not here. Cyclic
reduction is the parallel one, because equations 30 and 31 reduce all block rows. Odd-even reduction reduces every other
row and then substitutes back, in O(l) products instead of O(l log l) and twice as many levels; it is not here, because
`PrefixScan` does that.
"""

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
from .methods import SOLVERS, solve, solver_of
from .prefix_scan import PrefixScan
from .propagation import Propagation, propagation
from .recorded_systems import Propagator
from .solver import Iteration, Solution, TriangularSolver
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
    "Iteration",
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
