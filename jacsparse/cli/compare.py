"""``jacsparse compare``: solvers of the triangular system that a model's back-propagation is."""

from __future__ import annotations

import ast
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .inputs import announcements, check_outputs, echo, layer_input, load_part, parse_numbers
from .options import Checkpoint, Data, Input, Model, Prune, Seed, Training, Trust

if TYPE_CHECKING:
    from ..flop import Effort
    from ..solvers import TriangularSolver


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
    data: Data = "random",
    batch: Annotated[int, typer.Option(min=1, help="Samples of the mini-batch.")] = 1,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of a recurrent layer's input to take. Default: all.")
    ] = None,
    workers: Annotated[str, typer.Option(help="Count for these numbers of workers, as in 1,4,16.")] = "1,4,16,64",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="A solver, with its options after a colon, as in jacobi, richardson:omega=0.9,limit=200 or "
            "scan:schedule=blelloch:2; repeatable. Default: all but richardson, which is jacobi with omega 1."
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw multiply-adds over workers into this file.")] = None,
    training: Training = False,
    seed: Seed = 0,
) -> None:
    """Compare ways of back-propagation in parallel: steps, work, memory and time of each."""
    from torch import nn

    from ..figures import check_figure
    from ..flop import CountEstimate
    from ..solvers import compare as compare_solvers
    from ..terminal import console

    check_outputs(json, plot)
    if plot is not None:
        check_figure(plot)
    counts = parse_numbers("--workers", workers, "numbers of workers, as in 1,4,16")
    methods = [_solver(name) for name in method] if method else None
    analysed, x, path, name = load_part(model, input, prune, checkpoint, seed, trust, part, data, batch, training)
    if steps is not None and not isinstance(analysed, nn.RNN):
        raise ValueError(f"--steps {steps} is of no use: {path or model} is no recurrent layer")
    x = layer_input(analysed, x, steps)
    long: set[str] = set()

    def accept(solver: str, estimate: Effort) -> bool:
        """Whether to run a solver, which is asked for or takes little."""
        if estimate.is_long and methods is not None:
            if isinstance(estimate, CountEstimate):
                echo(f"the products of {solver} take {estimate}; without --method they are left out")
            else:
                echo(f"{solver} takes {estimate}; without --method it is not timed")
        elif estimate.is_long:
            long.add(solver)
        return solver not in long

    with announcements("solving by") as announce:
        comparison = compare_solvers(analysed, x, workers=counts, methods=methods, progress=announce, accept=accept)
    rows = [
        replace(row, remark=f"{row.remark}; ask for it with --method {row.method}") if row.method in long else row
        for row in comparison.rows
    ]
    settings = {
        "model": model, "part": path, "data": data, "prune": prune, "seed": seed,
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }  # fmt: skip
    name = name if data == "random" else f"{name} on {data}"
    comparison = replace(comparison, rows=tuple(rows), name=name, settings=settings)
    console().print(comparison)
    if json is not None:
        comparison.save_json(json)
    if plot is not None:
        comparison.plot(plot)


def _solver(text: str) -> TriangularSolver:
    """The solver that ``name:option=value,option=value`` names."""
    from ..solvers import SOLVERS, solver_of

    name, _, rest = text.partition(":")
    if not rest or name not in SOLVERS:
        return solver_of(name)
    # A guess is a list of tensors, which a command line does not have.
    kinds = {option.name: str(option.type) for option in fields(SOLVERS[name]) if option.name != "guess"}  # type: ignore[arg-type]
    options = {}
    for assignment in rest.split(","):
        option, equals, value = assignment.partition("=")
        if not equals or option not in kinds:
            takes = f"takes {', '.join(kinds)}, as in {name}:{next(iter(kinds))}=..." if kinds else "has no options"
            raise ValueError(f"--method {text}: there is no option {assignment!r}; {name} {takes}")
        options[option] = _value(text, option, value, kinds[option])
    return solver_of(name, **options)


def _value(text: str, option: str, value: str, kind: str) -> object:
    """A value of one of the types that an annotation names."""
    try:
        parsed = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        parsed = value
    names = set(re.findall(r"\w+", kind))
    if type(parsed).__name__ not in names | ({"int"} if "float" in names else set()) and parsed is not None:
        raise ValueError(f"--method {text}: {option} is {value}; expected {kind}")
    return parsed
