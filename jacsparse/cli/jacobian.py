"""``jacsparse jacobian``: write the Jacobian of an operator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .inputs import check_outputs, load_model, make_samples, read_sample, submodule_at
from .options import Checkpoint, Input, Layer, Model, Prune, Seed, Trust


def jacobian(
    model: Model,
    layer: Layer,
    out: Annotated[Path, typer.Option(help="SciPy matrix to write (.npz, for scipy.sparse.load_npz).")],
    input: Input = None,
    prune: Prune = 0.0,
    checkpoint: Checkpoint = None,
    trust: Trust = False,
    data: Annotated[str, typer.Option(help="Where the sample is from: digits, cifar10:DIR or random.")] = "random",
    input_file: Annotated[
        Path | None,
        typer.Option(help="Take the sample from this file: an array (.npy) or a tensor (.pt), without a batch."),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Write the Jacobian of one operator of a model, for one sample."""
    import scipy.sparse

    from ..jacobians import jacobian as jacobian_of
    from ..runtime import replacing

    check_outputs(out)
    if out.suffix != ".npz":
        raise ValueError(f"--out is {out}; name a file that ends in .npz")
    if input_file is not None and (input is not None or data != "random"):
        raise ValueError(f"--input-file {input_file} has the sample and its sizes; leave out --input and --data")
    module, shape, _ = load_model(model, input, prune, checkpoint, seed, trust)
    samples = make_samples(data, 1, shape, seed, module) if input_file is None else read_sample(input_file, module)
    operator, x = submodule_at(module, layer, "--layer", samples)
    matrix = jacobian_of(operator, x)
    with replacing(out) as temporary:
        scipy.sparse.save_npz(temporary, matrix.to_scipy())
    typer.echo(f"{layer}: {matrix.pattern.summary()}\n{out}")
