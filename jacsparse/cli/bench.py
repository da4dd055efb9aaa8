"""``jacsparse bench``: a pruned model dense beside sparse, layer by layer."""

from __future__ import annotations

from typing import Annotated, Any

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
            sparse = sparsify(module.train(training), x, training=training)
            report = sparse.report()
            what = f"{'training' if training else 'inference'}, batch {size}"
            typer.echo(f"{what}\n{report}\n")
            if report.dense is None or report.sparse is None:
                verdict = f"dense; {report.reason}"
            elif report.sparse < report.dense:
                verdict = f"sparse, {report.dense / report.sparse:.1f} times as fast as dense"
            else:
                verdict = f"dense; with sparse layers {report.sparse / report.dense:.2f} of its time"
            verdicts.append(f"{what}: {verdict}" + ("" if training else _frozen(sparse, x, report.dense)))
    typer.echo("\n".join(verdicts))


def _frozen(model: Any, x: Any, dense: float | None) -> str:
    """What a frozen model takes, or why it cannot be frozen."""
    from torch.utils.benchmark import Timer

    from .. import freeze
    from ..runtime import thread_count

    try:
        frozen = freeze(model, x)
    except ValueError as error:
        return f"; jacsparse.freeze refuses it: {error}"
    timer = Timer("frozen(x)", globals={"frozen": frozen, "x": x}, num_threads=thread_count())
    milliseconds = 1000 * min(timer.blocked_autorange(min_run_time=0.1).times)
    factor = "" if dense is None else f", {dense / milliseconds:.1f} times as fast as dense"
    return f"; by jacsparse.freeze {milliseconds:.3f} ms{factor}"
