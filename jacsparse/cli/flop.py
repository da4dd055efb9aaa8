"""``jacsparse flop``: count the FLOP of a backward pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..schedule import COUNTED
from .inputs import check_outputs, load_model, make_samples, parse_numbers, submodule_at
from .options import Checkpoint, Input, Model, Prune, Seed, Trust

if TYPE_CHECKING:
    import torch

#: Pairs of entries that a thread looks at per second, about; and the seconds from which on a count is announced.
_PAIRS, _LONG = 3e8, 15.0


def _duration(seconds: float) -> str:
    """A time in words: 40 seconds, 40 minutes or 3 hours."""
    for size, unit in ((3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def flop(
    model: Model,
    input: Input = None,
    prune: Prune = 0.0,
    checkpoint: Checkpoint = None,
    trust: Trust = False,
    part: Annotated[
        str | None,
        typer.Option(
            help="Submodule to analyse. Default: all; vgg11: features, as in the thesis; bitstream, irmas: rnn."
        ),
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="linear, blelloch, blelloch:LEVELS, chunked:LENGTH, balanced:WORKERS or auto.")
    ] = COUNTED,
    data: Annotated[
        str | None, typer.Option(help="Count without the zeros that these data cause: digits, cifar10:DIR or random.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Samples of --data to count. Default: 4.")] = None,
    workers: Annotated[str, typer.Option(help="Compare schedules for these numbers of workers, as in 1,2,4,8.")] = "",
    json: Annotated[Path | None, typer.Option(help="Write the report to this file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the steps to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the thesis' Figure 5.5 into this file.")] = None,
    seed: Seed = 0,
) -> None:
    """Count the FLOP of one sample's backward pass, by scan and by back-propagation."""
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from .. import count_flop
    from ..figures import check_figure
    from ..terminal import console

    check_outputs(json, csv, plot)
    if plot is not None:
        check_figure(plot)
    counts = parse_numbers("--workers", workers, "numbers of workers, as in 1,2,4,8") if workers else ()
    if samples is not None and data is None:
        raise ValueError("--samples says how many to observe, but not of what; add --data, as in --data digits")
    module, shape, default_part = load_model(model, input, prune, checkpoint, seed, trust)
    path = part if part is not None else default_part
    analysed = module
    x: torch.Tensor | None = None
    if data is not None or path:
        x = make_samples("random" if data is None else data, 1 if data is None else samples or 4, shape, seed, module)
        analysed, x = submodule_at(module, path, "--part", x)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("counting products", total=None)

        def announce(pairs: float) -> None:
            seconds = pairs / (_PAIRS * torch.get_num_threads())
            if seconds > _LONG:
                cheap = "--schedule linear takes seconds: it multiplies no matrices"
                times = f", for each of {samples or 4} samples and once more" if data else ""
                bar.console.print(
                    f"{schedule}: products of matrices with {pairs:.2g} pairs of entries or more to look at{times}, "
                    f"about {_duration(seconds)} at least. {cheap}.",
                    soft_wrap=True,
                    highlight=False,
                )

        report = count_flop(
            analysed,
            shape if x is None else tuple(x.shape[1:]),
            schedule=schedule,
            structure="observed" if data else "guaranteed",
            inputs=x if data else None,
            executed=True,
            workers=counts,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            announce=announce,
        )
    name = f"{model}{f'.{path}' if path else ''}{f' on {data}' if data else ''}"
    console().print(replace(report, name=name))
    if report.schedule != schedule:
        typer.echo(f"--schedule {schedule} is {report.schedule} for {len(report.baseline)} stages")
    if json is not None:
        report.save_json(json)
    if csv is not None:
        report.save_csv(csv)
    if plot is not None:
        report.plot(plot)
