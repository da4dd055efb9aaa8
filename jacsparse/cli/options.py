"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(help="A built-in name (vgg11, lenet5, ...), package.module:factory, or an exported .pt2 file.")
]

Input = Annotated[
    str | None,
    typer.Option(
        "--input",
        help="Sizes of one sample. Default: 3,32,32; bitstream: 1,1000; irmas: 38,259; a .pt2 file: its own.",
    ),
]

Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        help="Sizes of one sample, as 3,32,32, or ids:12 for tokens; once for each input, or NAME=SIZES for keyword "
        "arguments. Default: 3,32,32; bitstream: 1,1000; irmas: 38,259; a .pt2 file: its own.",
    ),
]

Data = Annotated[
    str,
    typer.Option(
        "--data",
        help="Samples: digits, cifar10:DIR, random, or a file of yours (.npy, .pt, .safetensors).",
    ),
]

Layer = Annotated[str, typer.Option("--layer", help="Path of an operator in the model, as in features.0.")]

Prune = Annotated[float, typer.Option(help="Prune this share of the weights of each convolution and linear layer.")]

Checkpoint = Annotated[
    Path | None,
    typer.Option(help="Load weights and masks from a safetensors file, or a PyTorch file of a state dict."),
]

Trust = Annotated[
    bool, typer.Option("--trust", help="Load the .pt2 file although such files can run code of whoever made them.")
]

Training = Annotated[
    bool,
    typer.Option(
        "--training",
        help="Take the model in training mode, in which batch normalisation couples the samples of a batch.",
    ),
]

Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of random weights and inputs.")]
