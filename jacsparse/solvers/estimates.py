"""The paper's estimates (equations 42 to 47) beside the multiply-adds that are counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..patterns import Full
from .blocks import Work
from .complexity import (
    iterative_time,
    iterative_work,
    recursive_time,
    reduction_time,
    reduction_work,
    sequential,
)
from .cyclic_reduction import CyclicReduction
from .solver import TriangularSolver
from .substitution import Substitution
from .systems import BlockTriangular


@dataclass(frozen=True)
class Estimate:
    """Multiply-adds of one solver by one of the paper's equations, and as counted.

    Attributes
    ----------
    equation : int
        The equation's number.
    method : str
        The solver.
    quantity : {"work", "time"}
        All multiply-adds, or those until l workers are done.
    paper, counted : float
        By the equation, with γ = 1 and, for 46 and 47, η the steps of the solver; and of the tasks that run.
    """

    equation: int
    method: str
    quantity: str
    paper: float
    counted: float

    @property
    def ratio(self) -> float:
        """`counted`, as a multiple of `paper`."""
        return self.counted / self.paper


def estimates(system: BlockTriangular, iterative: Mapping[str, Work]) -> tuple[Estimate, ...]:
    """Equations 42 to 47 for a network of l equally wide, fully connected layers; none for other systems.

    Parameters
    ----------
    system : BlockTriangular
        The system.
    iterative : mapping of str to Work
        The work of the iterative solvers that settled, by their names.

    Notes
    -----
    With γ = 1, an activation is the multiplication by f'. Then equation 42 is exact where each layer has one, and 46
    and 47 leave out the scaling ``D⁻¹ c`` of the first guess alone, ``l n r`` of work.

    Equations 43 to 45 are right in their leading term ``n³`` for one sample, r = 1. The paper multiplies weights once
    for all samples; but ``A_k D⁻¹ A_{k+1}`` has each sample's derivatives in its middle, so that r products run, and
    the estimate is about r times too small where ``n r`` is large. It also leaves out the scaling ``D⁻¹ A`` and counts
    the right-hand sides of one sample. In equation 44 each of two chains has one worker; ours share the elements of a
    product, so that all l work until the end, and the counted time is less where ``r`` is much greater than ``n``.
    Equation 45 has l products in each of ``log2 l`` levels; fewer are left from level to level, but there is a level
    more.
    """
    widths, samples, layers = _widths(system), system.batch, system.depth
    if not widths:
        return ()
    meta, full = system.on_meta(), CyclicReduction()
    rows = [
        Estimate(
            42, Substitution.name, "work", sequential(widths, samples), _counted(Substitution(), meta).multiply_adds
        )
    ]
    if layers >= 3 and layers % 2:
        work, method = _counted(CyclicReduction(depth=1), meta), f"{full.name} depth=1"
        rows += [
            Estimate(43, method, "work", reduction_work(widths, samples), work.multiply_adds),
            Estimate(44, method, "time", reduction_time(widths, samples), work.time(layers)),
        ]
    time = _counted(full, meta).time(layers)
    rows.append(Estimate(45, full.name, "time", recursive_time(layers, widths[0], samples), time))
    for method, work in iterative.items():
        rows += [
            Estimate(46, method, "work", iterative_work(widths, samples, work.steps), work.multiply_adds),
            Estimate(47, method, "time", iterative_time(widths, samples, work.steps), work.time(layers)),
        ]
    return tuple(rows)


def _counted(method: TriangularSolver, meta: BlockTriangular) -> Work:
    return method.solve(meta).work


def _widths(system: BlockTriangular) -> tuple[int, ...]:
    """The widths of a chain of equally wide, fully connected layers; empty for any other system."""
    blocks = system.off_diagonal.blocks.values()
    dense = all(isinstance(block.pattern.structure, Full) for block in blocks)
    chain = system.is_bidiagonal and system.depth == len(blocks) == len(system.sizes) - 1 >= 1
    return system.sizes if chain and dense and len(set(system.sizes)) == 1 else ()
