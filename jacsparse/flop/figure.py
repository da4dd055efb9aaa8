"""The figure of a FLOP report (thesis, Figure 5.5)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import FlopReport

from ..figures import BLUE, GREEN, ORANGE, new_figure, save_figure
from .tables import structure_name


def flop_figure(report: FlopReport, path: str | os.PathLike[str]) -> None:
    """Draw the thesis' Figure 5.5: the FLOP of all steps and gradient operators over their sizes without sparsity."""
    figure, axes = new_figure(height=5.5)
    for kind, colour, label in (("mm", BLUE, "matrix × matrix"), ("mv", ORANGE, "matrix × vector")):
        steps = [step for step in report.steps if step.kind == kind]
        for selected, look, suffix in (
            ([step for step in steps if step.critical], {"facecolors": colour}, ", critical path"),
            ([step for step in steps if step.live and not step.critical], {"facecolors": "none"}, ""),
            ([step for step in steps if not step.live], {"marker": "x"}, ", dead: counted, not run"),
        ):
            if selected:
                colours = {"color": colour} if "marker" in look else {"edgecolors": colour}
                points = [step.dense for step in selected], [step.flop for step in selected]
                axes.scatter(*points, s=42, label=f"scan, {label}{suffix}", **look, **colours)
    # The thesis compares the scan of a pruned network with the unpruned network's operators; here are those of both.
    sizes = [step.dense for step in report.baseline]
    pruned = [step.flop for step in report.baseline]
    unpruned = [step.unpruned for step in report.baseline]
    differ = any(unpruned) and unpruned != pruned
    name = "back-propagation's gradient operators"
    if differ:
        axes.scatter(sizes, unpruned, s=42, color=GREEN, marker="+", label=f"{name}, unpruned")
        name += ", pruned"
    axes.scatter(sizes, pruned, s=42, facecolors="none", edgecolors=GREEN, marker="s", label=name)
    # A logarithmic axis needs a positive value; a single operator has no step.
    if max([step.flop for step in report.steps] + pruned, default=0) > 0:
        axes.set(xscale="log", yscale="log")
    axes.set_xlabel("size of the step if nothing were sparse (m·k·n; m·n for back-propagation)")
    axes.set_ylabel("FLOP per sample")
    live = sum(step.live for step in report.steps)
    counts = f"{live} live steps of {len(report.steps)}, {len(report.baseline)} operators"
    axes.set_title(f"{report.schedule}: {counts}; {structure_name(report)}", fontsize=10)
    axes.grid(alpha=0.25, which="major")
    # The legend is outside, as points may be anywhere.
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    save_figure(figure, path)
