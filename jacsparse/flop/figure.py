"""The figure of a FLOP report (thesis, Figure 5.5)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report import FlopReport

from ..figures import BLUE, GREEN, ORANGE, new_figure, save_figure
from .tables import structure_name

#: Where a point's name may be: how many points off it, and what of the name is there.
_PLACES = [
    ((6, 0), "left", "center"),
    ((-6, 0), "right", "center"),
    ((0, 6), "center", "bottom"),
    ((0, -6), "center", "top"),
]


def flop_figure(report: FlopReport, path: str | os.PathLike[str]) -> None:
    """Draw the thesis' Figure 5.5: the FLOP of all steps and gradient operators over their sizes without sparsity.

    Steps of the critical path and gradient operators have names, those of most FLOP first, as far as there is room.
    """
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
    critical = [(step.dense, step.flop, f"{step.left}·{step.right}") for step in report.steps if step.critical]
    operators = [(step.dense, step.flop, step.stage or step.operator) for step in report.baseline]
    others = [(step.dense, step.flop) for step in report.steps] + list(zip(sizes, unpruned, strict=True))
    _name_points(figure, axes, [*critical, *operators], others)
    save_figure(figure, path)


def _name_points(
    figure: Any, axes: Any, named: Sequence[tuple[float, float, str]], others: Sequence[tuple[float, float]]
) -> None:
    """Write names beside points, from the top, where they hide neither a point nor another name."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    points = axes.transData.transform([(x, y) for x, y in (*[each[:2] for each in named], *others) if y > 0])
    taken = [Bbox([(x - 4, y - 4), (x + 4, y + 4)]) for x, y in points]
    for x, y, name in sorted(named, key=lambda each: -each[1]):
        # A logarithmic axis has no place for what takes no FLOP.
        for shift, horizontal, vertical in _PLACES if y > 0 else ():
            text = axes.annotate(
                name, (x, y), shift, textcoords="offset points", ha=horizontal, va=vertical, fontsize=7, color="0.25"
            )
            box = text.get_window_extent()
            is_inside = axes.bbox.contains(box.x0, box.y0) and figure.bbox.contains(box.x1, box.y1)
            if is_inside and not any(box.overlaps(each) for each in taken):
                taken.append(box)
                break
            text.remove()
