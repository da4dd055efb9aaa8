"""The figure of a chain: its stages from input to output, and the entries of their Jacobians."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from ..figures import BLUE, ORANGE, new_figure, save_figure

if TYPE_CHECKING:
    from .chains import Chain
    from .stage import Stage


def chain_figure(chain: Chain, path: str | os.PathLike[str]) -> None:
    """Draw a chain, as `Chain.plot` says."""
    stages = chain.stages
    figure, axes = new_figure(7.0, max(2.4, min(16.0, 1.5 + 0.28 * len(stages))))
    for row, stage in enumerate(stages):
        full = math.prod(stage.in_shape) * math.prod(stage.out_shape)
        axes.barh(row, full, height=0.7, facecolor="none", edgecolor="gray", label="all positions of the matrix")
        if not stage.couples:
            several = stage.operator is None
            label = "entries: several operators" if several else "entries: one operator"
            look = {"color": ORANGE, "hatch": "////", "edgecolor": "black"} if several else {"color": BLUE}
            axes.barh(row, max(stage.pattern.nnz, 1), height=0.7, label=label, **look)
    axes.set_yticks(range(len(stages)), [_name(stage, chain) for stage in stages], fontsize=8)
    axes.set_ylim(max(len(stages), 1) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set(xscale="log", xlim=(1, None), xlabel="entries of the stage's Jacobian, a sample")
    shown = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if shown:
        legend = {"loc": "outside lower center", "ncols": len(shown), "fontsize": 8, "frameon": False}
        figure.legend(handles=list(shown.values()), labels=list(shown), **legend)
    shape = " × ".join(map(str, chain.in_shape))
    figure.suptitle(f"{chain.name}: {len(stages)} stages, from an input of {shape}", fontsize=10)
    save_figure(figure, path)


def _name(stage: Stage, chain: Chain) -> str:
    """The place of a stage, its operator where the place does not end with that already, and its output's shape."""
    path, operator = stage.path or chain.name, stage.name.removeprefix("aten.")
    place = path if path.endswith(f":{operator}") else f"{path}, {operator}"
    return f"{place} → {' × '.join(map(str, stage.out_shape))}"
