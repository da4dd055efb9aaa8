"""What the paper says that the methods cost (Naumov, section 4), in multiply-adds.

Layers have ``n_1, ..., n_{l+1}`` units, weights ``W^(k)`` are ``n_{k+1} × n_k``, a batch has r samples, and an
activation costs γ for each unit. `Solution.work` counts what a solver really runs, which is more: the paper leaves out
that each sample has reduced blocks of its own, so that their products count r times, and that right-hand sides are
reduced at each level too. `jacsparse.solvers.estimates` puts both side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def sequential(widths: Sequence[int], samples: int, gamma: float = 1.0) -> float:
    """Equation 42: one pass, layer after layer.

    Examples
    --------
    >>> sequential([3, 4, 2], 10)
    260.0
    """
    return float(sum(_layer(widths, k, k + 1, samples, gamma) for k in range(1, len(widths))))


def reduction_work(widths: Sequence[int], samples: int, gamma: float = 1.0) -> float:
    """Equation 43: all work of one level of cyclic reduction, and of the two chains that it leaves, for odd l."""
    layers = _odd(widths)
    halves = [_half(widths, samples, gamma, start) for start in (0, 1)]
    return float(sum(_products(widths, k) for k in range(2, layers + 1))) + sum(halves)


def reduction_time(widths: Sequence[int], samples: int, gamma: float = 1.0) -> float:
    """Equation 44: its time on as many processors as layers."""
    layers = _odd(widths)
    products = max((_products(widths, k) for k in range(2, layers + 1)), default=0.0)
    return products + max(_half(widths, samples, gamma, start) for start in (0, 1))


def recursive_time(layers: int, units: int, samples: int) -> float:
    """Equation 45: time of full cyclic reduction of equally wide layers, ``n³ log2 l + n² r``.

    Examples
    --------
    >>> recursive_time(8, 10, 5)
    3500.0
    """
    return units**3 * math.log2(layers) + units**2 * samples


def iterative_work(widths: Sequence[int], samples: int, iterations: int, gamma: float = 1.0) -> float:
    """Equation 46: all work of an iterative method, whose iteration is one product with the matrix."""
    return sequential(widths, samples, gamma) * iterations


def iterative_time(widths: Sequence[int], samples: int, iterations: int, gamma: float = 1.0) -> float:
    """Equation 47: its time on as many processors as layers."""
    return max(_layer(widths, k, k + 1, samples, gamma) for k in range(1, len(widths))) * iterations


def reduction_pays(layers: int, units: int, samples: int) -> bool:
    """The paper's criterion for direct methods: ``r >= n`` or ``l / log2 l >= n`` (section 4.1).

    Examples
    --------
    >>> reduction_pays(layers=16, units=100, samples=32), reduction_pays(layers=16, units=20, samples=32)
    (False, True)
    """
    return samples >= units or (layers > 1 and layers / math.log2(layers) >= units)


def iteration_pays(layers: int, iterations: int) -> bool:
    """The paper's criterion for iterative methods: ``η < l`` (section 4.2)."""
    return iterations < layers


def _layer(widths: Sequence[int], source: int, target: int, samples: int, gamma: float) -> float:
    """A product with a matrix from one layer's units to another's, and the activation there."""
    return (widths[target - 1] * widths[source - 1] + gamma * widths[target - 1]) * samples


def _products(widths: Sequence[int], k: int) -> float:
    """The new weight and right-hand side of layer k."""
    return widths[k] * widths[k - 1] * widths[k - 2] + widths[k] * widths[k - 1]


def _half(widths: Sequence[int], samples: int, gamma: float, start: int) -> float:
    """A pass through every second layer."""
    layers = _odd(widths)
    indices = [2 * k + start for k in range(1, (layers - 1) // 2 + 1)]
    return float(sum(_layer(widths, i - 1, i + 1, samples, gamma) for i in indices))


def _odd(widths: Sequence[int]) -> int:
    layers = len(widths) - 1
    if layers < 3 or layers % 2 == 0:
        raise ValueError(f"there are {layers} layers; equations 43 and 44 are for odd numbers of at least 3")
    return layers
