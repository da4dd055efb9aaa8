"""The paper's estimates of work and time (Naumov, section 4) beside the multiply-adds that are counted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..patterns import Full
from .blocks import Work
from .cyclic_reduction import CyclicReduction
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
    Layers have n units, a batch has r samples, an iterative solver takes η steps, and γ = 1: an activation is the
    multiplication by f'. A pass through a layer, its product and its activation, is then ``(n² + n) r``. Work is for
    one worker, and time for as many as layers:

    - 42, all layers in turn: a pass through each.
    - 43 and 44, one level of cyclic reduction of an odd number of layers: new weights and right-hand sides, ``n³ + n²``
      for each layer but the first, and then two chains of every second layer, side by side.
    - 45, full cyclic reduction: ``n³ log2 l + n² r``.
    - 46 and 47, an iterative method, whose steps are products with the matrix: η passes through each layer.

    Equation 42 is exact where each layer has an activation, and 46 and 47 leave out the scaling ``D⁻¹ c`` of the first
    guess alone, ``l n r`` of work.

    Equations 43 to 45 are right in their leading term ``n³`` for one sample, r = 1. The paper multiplies weights once
    for all samples; but ``A_k D⁻¹ A_{k+1}`` has each sample's derivatives in its middle, so that r products run, and
    the estimate is about r times too small where ``n r`` is large. It also leaves out the scaling ``D⁻¹ A`` and counts
    the right-hand sides of one sample. In equation 44 each of two chains has one worker; ours share the elements of a
    product, so that all l work until the end, and the counted time is less where ``r`` is much greater than ``n``.
    Equation 45 has l products in each of ``log2 l`` levels; fewer are left from level to level, but there is a level
    more.
    """
    if not _is_of_equal_layers(system):
        return ()
    units, samples, layers, meta = system.sizes[0], system.batch, system.depth, system.on_meta()
    a_pass, products = float((units**2 + units) * samples), float(units**3 + units**2)
    counted = Substitution().solve(meta).work.multiply_adds
    rows = [Estimate(42, Substitution.name, "work", layers * a_pass, counted)]
    if layers >= 3 and layers % 2:
        work, method = CyclicReduction(depth=1).solve(meta).work, f"{CyclicReduction.name} depth=1"
        rows += [
            Estimate(43, method, "work", (layers - 1) * (products + a_pass), work.multiply_adds),
            Estimate(44, method, "time", products + (layers - 1) / 2 * a_pass, work.time(layers)),
        ]
    full, time = units**3 * math.log2(layers) + units**2 * samples, CyclicReduction().solve(meta).work.time(layers)
    rows.append(Estimate(45, CyclicReduction.name, "time", full, time))
    for method, work in iterative.items():
        rows += [
            Estimate(46, method, "work", layers * a_pass * work.steps, work.multiply_adds),
            Estimate(47, method, "time", a_pass * work.steps, work.time(layers)),
        ]
    return tuple(rows)


def reduction_pays(layers: int, units: int, samples: int) -> bool:
    """The paper's criterion for direct methods: ``r >= n`` or ``l / log2 l >= n`` (section 4.1).

    Examples
    --------
    >>> reduction_pays(layers=16, units=100, samples=32), reduction_pays(layers=16, units=20, samples=32)
    (False, True)
    """
    return samples >= units or (layers > 1 and layers / math.log2(layers) >= units)


def _is_of_equal_layers(system: BlockTriangular) -> bool:
    """Whether a system is a chain of equally wide, fully connected layers."""
    blocks = system.off_diagonal.blocks.values()
    dense = all(isinstance(block.pattern.structure, Full) for block in blocks)
    chain = system.is_bidiagonal and system.depth == len(blocks) == len(system.sizes) - 1 >= 1
    return chain and dense and len(set(system.sizes)) == 1
