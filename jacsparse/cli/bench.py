"""``jacsparse bench``: a pruned model dense beside sparse, layer by layer."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .inputs import load_model, parse_numbers
from .options import Checkpoint, Input, Model, Prune, Seed, Trust

#: Seconds after which a frozen model is measured no longer.
_SECONDS = 2.0


def bench(
    model: Model,
    input: Input = None,
    prune: Prune = 0.0,
    checkpoint: Checkpoint = None,
    trust: Trust = False,
    batch: Annotated[str, typer.Option(help="Sizes of batches, as in 1,16,64.")] = "1,16,64",
    seed: Seed = 0,
) -> None:
    """Measure a pruned model with dense and with sparse layers: training steps' two passes, and inference."""
    import torch

    from .. import sparsify

    batches = parse_numbers("--batch", batch, "sizes of batches, as in 1,16,64")
    if model.endswith(".pt2"):
        raise ValueError(f"{model} has operators, not layers; give the module that it was exported from")
    module, shape, _ = load_model(model, input, prune, checkpoint, seed, trust)
    verdicts = []
    for size in batches:
        x = torch.randn(size, *shape)
        if problem := _problem(module.eval(), x):
            raise ValueError(
                f"{model} does not take samples of the sizes {','.join(map(str, shape))} ({problem}); name those of a "
                "sample by --input, and measure a model of token ids by jacsparse.sparsify(model, ids)"
            )
        for training in (True, False):
            what = f"{'training' if training else 'inference'}, batch {size}"
            if problem := _problem(module.train(training), x):
                verdicts.append(f"{what}: not measured, as the model does not run so ({problem}); try a larger --batch")
                continue
            sparse = sparsify(module, x, training=training)
            report = sparse.report()
            typer.echo(f"{what}\n{report}\n")
            verdicts.append(f"{what}: {_verdict(report)}" + ("" if training else _frozen(module, sparse, x)))
    typer.echo("\n".join(verdicts))


def _problem(module: Any, x: Any) -> str:
    """Why a model does not run on a batch, in one line; nothing where it does."""
    import torch

    try:
        with torch.no_grad():
            module(x)
    except Exception as error:
        # The user's code may raise any exception.
        return f"{type(error).__name__}: {error}".split("\n", 1)[0]
    return ""


def _verdict(report: Any) -> str:
    if report.dense is None:
        return f"dense; {report.reason}"
    if (speed := report.dense.over(report.sparse)) is None:
        return str(report.reason)
    if any(layer.is_sparse for layer in report.layers):
        return f"sparse, {report.sparse}, {speed:.1f} times as fast as dense"
    return f"dense, {report.dense}; with sparse layers {1 / speed:.2f} of the time"


def _frozen(module: Any, sparse: Any, x: Any) -> str:
    """What a frozen model takes beside the dense one, or why it cannot be frozen."""
    import torch

    from .. import densify, freeze
    from ..runtime import run_times
    from ..sparse import BUSY

    try:
        frozen = freeze(sparse, x)
    except ValueError as error:
        return f"; jacsparse.freeze refuses it: {error}"
    # Serving computes no masks.
    unmasked = densify(module, masks=False)
    with torch.no_grad():
        of_dense, of_frozen = run_times(lambda: unmasked(x), lambda: frozen(x), most=_SECONDS)
    speed = of_dense.over(of_frozen)
    compared = BUSY if speed is None else f"{speed:.1f} times as fast as dense"
    if speed is not None and speed < 1:
        compared = f"slower than dense, {of_dense}: serve it dense"
    return f"; by jacsparse.freeze {of_frozen}, {compared}"
