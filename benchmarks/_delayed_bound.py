"""Bounds by which delayed gradients are proved to converge (Huo et al., 2018, section 4)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def gradient_bound(
    rates: Sequence[float], modules: int, *, lipschitz: float, second_moment: float, gap: float
) -> float:
    """What the average of ``‖∇f(w_t)‖²``, weighted by the step sizes, is at most.

    Parameters
    ----------
    rates : sequence of float
        The step sizes ``γ_t``, each at most ``1 / L``: constant, or not increasing.
    modules : int
        The number of modules K.
    lipschitz : float
        The Lipschitz constant L of the gradient (equation 10).
    second_moment : float
        M, which ``‖∇f_x(w)‖²`` of a sample is at most (equation 11).
    gap : float
        ``f(w_0) - f(w*)``.

    Raises
    ------
    ValueError
        Where a step size is above ``1 / L``, or they increase.

    Notes
    -----
    Theorems 1 and 2, equations 13 and 14, with ``M_K = K M + σ K⁴ M``: σ is 1 for constant steps, and for decreasing
    ones the largest ``γ_max(0, t - K + 1) / γ_t``, which is at most K for ``γ_0 / (1 + t)``.

    Examples
    --------
    >>> round(gradient_bound([0.1] * 100, 2, lipschitz=1.0, second_moment=1.0, gap=5.0), 6)
    4.6
    """
    if not rates or modules < 1:
        raise ValueError(f"there are {len(rates)} step sizes and {modules} modules; expected at least one of each")
    if max(rates) * lipschitz > 1 or any(late > early for early, late in itertools.pairwise(rates)):
        raise ValueError(
            f"step sizes go from {rates[0]:.3g} to {rates[-1]:.3g}; the theorems are for constant or decreasing ones "
            f"of at most 1 / L = {1 / lipschitz:.3g}"
        )
    sigma = max(rates[max(0, t - modules + 1)] / rate for t, rate in enumerate(rates))
    moment = (modules + sigma * modules**4) * second_moment
    total = math.fsum(rates)
    return 2 * gap / total + 2 * math.fsum(rate**2 for rate in rates) * lipschitz * moment / total
