"""The command line; each command is in a file of its own, and imports other modules only when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from .bench import bench
from .clear_cache import clear_cache
from .compare import compare
from .doctor import doctor
from .flop import flop
from .jacobian import jacobian
from .simulate import simulate
from .spy import spy
from .train import train

app = typer.Typer(
    name="jacsparse",
    help="Sparse Jacobians of neural networks: their FLOP, their patterns, and training by parallel scan.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (flop, compare, simulate, jacobian, spy, train, bench, doctor, clear_cache):
    app.command()(_command)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        from .._version import __version__

        typer.echo(__version__)
        raise typer.Exit
