"""Back-propagation as block triangular systems, and ways of solving those, a file each (Naumov).

Of the methods that the paper only names, Gauss-Seidel, SPIKE and nested dissection are not here. Cyclic
reduction is the parallel one, because equations 30 and 31 reduce all block rows. Odd-even reduction reduces every other
row and then substitutes back, in O(l) products instead of O(l log l) and twice as many levels; it is not here, because
`PrefixScan` does that.
"""

from .bicgstab import BiCGStab
from .blocks import Work
from .comparison import SolverComparison, compare
from .cyclic_reduction import CyclicReduction
from .gmres import GMRES
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
    "GMRES",
    "SOLVERS",
    "BiCGStab",
    "BlockBidiagonal",
    "BlockTriangular",
    "CyclicReduction",
    "Hybrid",
    "Iteration",
    "Jacobi",
    "PrefixScan",
    "Propagation",
    "Propagator",
    "Richardson",
    "Solution",
    "SolverComparison",
    "Substitution",
    "TriangularSolver",
    "Work",
    "compare",
    "propagation",
    "solve",
    "solver_of",
]
