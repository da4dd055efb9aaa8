"""``jacsparse spy``: draw the pattern of an operator's Jacobian."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .inputs import check_outputs, load_model, make_samples, submodule_at
from .options import Checkpoint, Input, Layer, Model, Prune, Seed, Trust

if TYPE_CHECKING:
    from ..patterns import Pattern

#: Cells of a pattern's picture in each direction, at most.
_CELLS = (800, 800)


def spy(
    model: Model,
    layer: Layer,
    input: Input = None,
    prune: Prune = 0.0,
    checkpoint: Checkpoint = None,
    trust: Trust = False,
    transposed: Annotated[bool, typer.Option("--transposed", help="Show the transposed Jacobian.")] = False,
    out: Annotated[Path | None, typer.Option(help="Draw the pattern into this file, as in pattern.png.")] = None,
    seed: Seed = 0,
) -> None:
    """Show where one operator's Jacobian may be other than zero."""
    from ..figures import check_figure
    from ..jacobians import jacobian_pattern

    check_outputs(out)
    if out is not None:
        check_figure(out)
    module, shape, _ = load_model(model, input, prune, checkpoint, seed, trust)
    operator, x = submodule_at(module, layer, "--layer", make_samples("random", 1, shape, seed, module))
    pattern = jacobian_pattern(operator, tuple(x.shape[1:]))
    shown = pattern.T if transposed else pattern
    if out is None:
        typer.echo(f"{layer}: {shown}")
        return
    _save_picture(shown, f"{model}, {layer}{', transposed' if transposed else ''}", out)
    typer.echo(f"{layer}: {shown.summary()}\n{out}")


def _save_picture(pattern: Pattern, title: str, path: Path) -> None:
    """Draw a pattern, with a dark cell where any of its positions has an entry."""
    from ..figures import new_figure, save_figure
    from ..patterns import picture

    rows, columns = pattern.shape
    cells = picture(pattern, _CELLS)
    # The figure has the matrix' proportions within bounds.
    height = min(9.0, max(2.5, 6.0 * rows / max(1, columns)))
    figure, axes = new_figure(7.0, height)
    extent = (0, max(1, columns), max(1, rows), 0)
    axes.imshow(~cells, cmap="gray", vmin=0, vmax=1, extent=extent, aspect="auto", interpolation="nearest")
    axes.spines[["top", "right"]].set_visible(True)
    axes.set(xlabel="input", ylabel="output")
    if "transposed" in title:
        axes.set(xlabel="output", ylabel="input")
    axes.set_title(f"{title}: {rows:,} × {columns:,}, {pattern.nnz:,} entries", fontsize=10)
    save_figure(figure, path)
