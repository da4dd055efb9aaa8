"""``jacsparse bench``: a pruned model dense beside sparse, layer by layer."""

from __future__ import annotations

from typing import Annotated

import typer

from .inputs import load_model, parse_numbers
from .options import Checkpoint, Input, Model, Prune, Seed, Trust


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
        for training in (True, False):
            report = sparsify(module.train(training), x, training=training).report()
            what = f"{'training' if training else 'inference'}, batch {size}"
            typer.echo(f"{what}\n{report}\n")
            if report.dense is None or report.sparse is None:
                verdicts.append(f"{what}: dense; {report.reason}")
            elif report.sparse < report.dense:
                verdicts.append(f"{what}: sparse, {report.dense / report.sparse:.1f} times as fast as dense")
            else:
                verdicts.append(f"{what}: dense; with sparse layers {report.sparse / report.dense:.2f} of its time")
    typer.echo("\n".join(verdicts))
