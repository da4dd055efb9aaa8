"""``jacsparse spy``: draw the pattern of an operator's Jacobian."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .inputs import check_outputs, load_model, make_samples, submodule_at
from .options import Checkpoint, Input, Layer, Model, Prune, Seed, Trust


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
    names = ("output", "input") if transposed else ("input", "output")
    shown.plot(out, title=f"{model}, {layer}{', transposed' if transposed else ''}", axes=names)
    typer.echo(f"{layer}: {shown.summary()}\n{out}")
