"""Bundle adjustment by Levenberg and Marquardt: cameras and points from where the cameras see the points.

Each residual depends on one camera and one point, and indexing tells so: the Jacobian by both is sparse without any
annotation, and so are its normal equations. ``python -m examples.bundle_adjustment`` compares with
``scipy.optimize.least_squares``.
"""

from __future__ import annotations

import time

from jacsparse.terminal import console, new_table, short_time

from .least_squares import levenberg_marquardt
from .scenes import by_scipy, synthetic


def main(cameras: int = 20, points: int = 500) -> None:
    """Print both costs and times; the first run prepares and compiles."""
    scene = synthetic(cameras, points)
    table = new_table(f"{cameras} cameras see {points} points, {len(scene.camera):,} times")
    for column in ("", "first cost", "last cost", "steps", "time"):
        table.add_column(column, justify="right")
    for label in ("jacsparse, first run", "jacsparse"):
        begin = time.perf_counter()
        _, costs = levenberg_marquardt(scene.residuals, (scene.cameras, scene.points))
        seconds = short_time(time.perf_counter() - begin)
        table.add_row(label, f"{costs[0]:.4g}", f"{costs[-1]:.10g}", str(len(costs) - 1), seconds)
    with console().status("SciPy's least_squares"):
        begin = time.perf_counter()
        solution = by_scipy(scene, ftol=1e-10)
        seconds = short_time(time.perf_counter() - begin)
    table.add_row("SciPy", f"{costs[0]:.4g}", f"{solution.cost:.10g}", str(solution.njev), seconds)
    console().print(table)


if __name__ == "__main__":
    main()
