"""``jacsparse compare``: solvers of the triangular system that a model's back-propagation is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .inputs import check_outputs, load_model, make_samples, parse_numbers, submodule_at
from .options import Checkpoint, Input, Model, Prune, Seed, Trust


def compare(
    model: Model,
    input: Input = None,
    prune: Prune = 0.0,
    checkpoint: Checkpoint = None,
    trust: Trust = False,
    part: Annotated[
        str | None,
        typer.Option(help="Submodule to compare on. Default: all; vgg11: features; bitstream, irmas: rnn."),
    ] = None,
    data: Annotated[str, typer.Option(help="Samples: digits, cifar10:DIR or random.")] = "random",
    batch: Annotated[int, typer.Option(min=1, help="Samples of the mini-batch.")] = 1,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of a recurrent layer's input to take. Default: all.")
    ] = None,
    workers: Annotated[str, typer.Option(help="Predict times for these numbers of workers.")] = "1,4,16,64",
    method: Annotated[list[str] | None, typer.Option(help="A solver, repeatable. Default: all.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw predicted times over workers into this file.")] = None,
    seed: Seed = 0,
) -> None:
    """Compare ways of back-propagation in parallel: steps, work, memory and time of each."""
    import json as json_module

    from rich.console import Console
    from torch import nn

    from ..figures import check_figure
    from ..flop import console
    from ..runtime import replacing
    from ..solvers import compare as compare_solvers
    from ..solvers import solver_of

    check_outputs(json, plot)
    if plot is not None:
        check_figure(plot)
    counts = parse_numbers("--workers", workers, "numbers of workers, as in 1,4,16")
    methods = None if not method else [solver_of(name) for name in method]
    module, shape, default_part = load_model(model, input, prune, checkpoint, seed, trust)
    path = part if part is not None else default_part
    x = make_samples(data, batch, shape, seed, module)
    analysed, x = submodule_at(module, path, "--part", x)
    if isinstance(analysed, nn.RNN):
        # `submodule_at` puts the batch first.
        x = x if analysed.batch_first else x.transpose(0, 1)
    if steps is not None:
        if not isinstance(analysed, nn.RNN):
            raise ValueError(f"--steps {steps} is of no use: {path or model} is no recurrent layer")
        x = x[:, :steps] if analysed.batch_first else x[:steps]
    with Console(stderr=True).status("preparing") as status:
        comparison = compare_solvers(
            analysed, x, workers=counts, methods=methods, progress=lambda name: status.update(f"solving by {name}")
        )
    console().print(comparison)
    if json is not None:
        with replacing(json) as temporary:
            temporary.write_text(json_module.dumps(comparison.to_dict(), indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        comparison.plot(plot)
