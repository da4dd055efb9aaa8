"""``jacsparse flop``: count the FLOP of a backward pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..schedule import COUNTED
from ..terminal import ratio
from .inputs import Analysed, check_outputs, echo, load_part, parse_numbers, progress_bar
from .options import Checkpoint, Inputs, Model, Prune, Seed, Training, Trust

if TYPE_CHECKING:
    from ..flop import CountEstimate, FlopReport


def flop(
    model: Model,
    input: Inputs = None,
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
        str | None,
        typer.Option(
            help="Scan to count, whatever that takes: linear (none), blelloch, blelloch:LEVELS, chunked:LENGTH, "
            f"balanced:WORKERS or auto. Default: {COUNTED} if it takes little time and memory."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Count also without the zeros that these data cause: digits, cifar10:DIR, random, or samples of yours "
            "(.npy, .pt or .safetensors, along the first axis)."
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Samples of --data to count. Default: 4.")] = None,
    workers: Annotated[str, typer.Option(help="Compare schedules for these numbers of workers, as in 1,2,4,8.")] = "",
    steps: Annotated[bool, typer.Option("--steps", help="Show the steps of the scan, and their sums.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Explain all words; name all layers in warnings.")] = False,
    sort: Annotated[str | None, typer.Option(help="Sort layers by layer, weights, zero, step or jacobian.")] = None,
    top: Annotated[int | None, typer.Option(min=1, help="Show so many layers. Default: all.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Show two checkpoints of the model side by side, as before and after pruning further."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report to this file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the steps to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the thesis' Figure 5.5 into this file.")] = None,
    training: Training = False,
    seed: Seed = 0,
) -> None:
    """Say what a training step takes with and without pruned weights, and whether a parallel scan pays."""
    from .. import count_flop
    from ..figures import check_figure
    from ..flop import SORTS, Page, SideBySide
    from ..terminal import console

    check_outputs(json, csv, plot)
    if plot is not None:
        check_figure(plot)
    counts = parse_numbers("--workers", workers, "numbers of workers, as in 1,2,4,8") if workers else ()
    if sort is not None and sort not in SORTS:
        raise ValueError(f"--sort is {sort!r}; expected one of {', '.join(SORTS)}")
    if samples is not None and data is None:
        raise ValueError("--samples says how many to observe, but not of what; add --data, as in --data digits")
    if compare is not None:
        unused = [("--checkpoint", checkpoint), ("--prune", prune), ("--schedule", schedule), ("--data", data),
                  ("--workers", workers), ("--json", json), ("--csv", csv), ("--plot", plot)]  # fmt: skip
        for option, value in unused:
            if value:
                raise ValueError(
                    f"{option} is of no use with --compare, which shows back-propagation of two checkpoints"
                )
        reports = [_linear(model, input, each, seed, part) for each in compare]
        console().print(SideBySide(reports[0], reports[1], (str(compare[0]), str(compare[1]))))
        return
    count = 1 if data is None else samples or 4
    analysed = load_part(model, input, prune, checkpoint, seed, trust, part, data, count, training)
    left_out: list[CountEstimate] = []

    def accept(estimate: CountEstimate) -> bool:
        """Whether to count the scan, which is asked for or takes little."""
        if not estimate.is_long:
            return True
        if schedule is not None:
            echo(f"counting {schedule} takes {estimate}; without --schedule it is left out")
            return True
        left_out.append(estimate)
        return False

    with progress_bar("counting products") as progress:
        report = count_flop(
            analysed.module,
            **_arguments(analysed, observed=data is not None),
            schedule=schedule or COUNTED,
            executed=True,
            workers=counts,
            progress=progress,
            accept=accept,
        )
    name = f"{analysed.name} on {data}" if data else analysed.name
    report = replace(report, name=name, note=_note(left_out[0], report) if left_out else "")
    console().print(Page(report, steps, explain, sort, top))
    if schedule is not None and report.schedule != schedule:
        typer.echo(f"--schedule {schedule} is {report.schedule} for {len(report.baseline)} stages")
    if json is not None:
        report.save_json(json)
    if csv is not None:
        report.save_csv(csv)
    if plot is not None:
        report.plot(plot)


def _arguments(analysed: Analysed, observed: bool) -> dict[str, Any]:
    """What `count_flop` is given of a model's input: its shape, its samples, or all arguments."""
    shape, samples = None, analysed.x
    if not isinstance(samples, (list, dict)) and samples.is_floating_point():
        shape, samples = tuple(samples.shape[1:]), samples if observed else None
    return {"input_shape": shape, "inputs": samples, "structure": "observed" if observed else "guaranteed"}


def _note(estimate: CountEstimate, report: FlopReport) -> str:
    """Why the scan is not counted, and what is known of it."""
    activations = next(each.activations for each in report.backpropagation if each.structure == "pruned")
    least = ""
    if estimate.flop > activations > 0:
        least = (
            f"It takes at least about {ratio(estimate.flop / activations)} times the FLOP of back-propagation, so that "
            "it cannot pay on fewer workers. "
        )
    return f"Scan: not counted, as that takes {estimate}. {least}Ask for it with --schedule {COUNTED}."


def _linear(model: str, sizes: list[str] | None, checkpoint: Path, seed: int, part: str | None) -> FlopReport:
    """Back-propagation of a model with the weights of a checkpoint."""
    from .. import count_flop

    analysed = load_part(model, sizes, 0.0, checkpoint, seed, False, part, None)
    return count_flop(analysed.module, **_arguments(analysed, observed=False), schedule="linear")
