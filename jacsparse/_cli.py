"""The command line. Each command imports what it needs when it runs, so that ``--help`` is quick."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .models import ExportedModel

__all__ = ["app"]


class _Commands(TyperGroup):
    """The commands. Any of them may load a compiled kernel that was damaged on disk."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; a damaged kernel's error names the remedy."""
        try:
            return super().invoke(ctx)
        except (EOFError, UnpicklingError) as error:
            # Here, as Click takes the first for the end of what a person types.
            raise OSError(
                f"a compiled kernel in the cache cannot be read ({error}); empty it with jacsparse clear-cache"
            ) from error


app = typer.Typer(
    name="jacsparse",
    cls=_Commands,
    help="Sparse Jacobians of neural networks: their FLOP, their patterns, and training by parallel scan.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

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
Layer = Annotated[str, typer.Option("--layer", help="Path of an operator in the model, as in features.0.")]
Prune = Annotated[float, typer.Option(help="Prune this share of the weights of each convolution and linear layer.")]
Checkpoint = Annotated[
    Path | None,
    typer.Option(help="Load weights and masks from a safetensors file, or a PyTorch file of a state dict."),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Load the .pt2 file although such files can run code of whoever made them.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of random weights and inputs.")]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        from ._version import __version__

        typer.echo(__version__)
        raise typer.Exit


#: Pairs of entries that a thread looks at in a second, about; and seconds of which a person is told before.
_PAIRS, _LONG = 3e8, 15.0


def _duration(seconds: float) -> str:
    """A time in words.

    Examples
    --------
    >>> _duration(40), _duration(2400), _duration(10800)
    ('40 seconds', '40 minutes', '3 hours')
    """
    for size, unit in ((3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


@app.command()
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
    ] = "blelloch:2",
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

    from . import count_flop
    from ._figures import check_figure
    from ._tables import console

    _check_outputs(json, csv, plot)
    if plot is not None:
        check_figure(plot)
    counts = _numbers("--workers", workers, "numbers of workers, as in 1,2,4,8") if workers else ()
    if samples is not None and data is None:
        raise ValueError("--samples says how many to observe, but not of what; add --data, as in --data digits")
    module, shape, default_part = _model(model, input, prune, checkpoint, seed, trust)
    chosen = part if part is not None else default_part
    analysed = module
    x: torch.Tensor | None = None
    if data is not None or chosen:
        x = _samples("random" if data is None else data, 1 if data is None else samples or 4, shape, seed, module)
        analysed, x = _part(module, chosen, "--part", x)
    with _progress() as bar:
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
    name = f"{model}{f'.{chosen}' if chosen else ''}{f' on {data}' if data else ''}"
    console().print(replace(report, name=name))
    if report.schedule != schedule:
        typer.echo(f"--schedule {schedule} is {report.schedule} for {len(report.baseline)} stages")
    if json is not None:
        report.save_json(json)
    if csv is not None:
        report.save_csv(csv)
    if plot is not None:
        report.plot(plot)


@app.command()
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

    from ._jacobian import jacobian as jacobian_of
    from .patterns._files import replacing

    _check_outputs(out)
    if out.suffix != ".npz":
        raise ValueError(f"--out is {out}; name a file that ends in .npz")
    if input_file is not None and (input is not None or data != "random"):
        raise ValueError(f"--input-file {input_file} has the sample and its sizes; leave out --input and --data")
    module, shape, _ = _model(model, input, prune, checkpoint, seed, trust)
    samples = _samples(data, 1, shape, seed, module) if input_file is None else _sample_of(input_file, module)
    operator, x = _part(module, layer, "--layer", samples)
    matrix = jacobian_of(operator, x)
    with replacing(out) as temporary:
        scipy.sparse.save_npz(temporary, matrix.to_scipy())
    typer.echo(f"{layer}: {matrix.pattern.summary()}\n{out}")


@app.command()
def spy(
    model: Model,
    layer: Layer,
    input: Input = None,
    prune: Prune = 0.0,
    checkpoint: Checkpoint = None,
    trust: Trust = False,
    transposed: Annotated[bool, typer.Option("--transposed", help="Show the transposed Jacobian.")] = False,
    out: Annotated[Path | None, typer.Option(help="Draw the pattern into this file, as in pattern.png.")] = None,
    seed: Seed = 0,
) -> None:
    """Show where one operator's Jacobian may be other than zero."""
    from ._figures import check_figure, pattern_figure
    from ._jacobian import jacobian_pattern

    _check_outputs(out)
    if out is not None:
        check_figure(out)
    module, shape, _ = _model(model, input, prune, checkpoint, seed, trust)
    operator, x = _part(module, layer, "--layer", _samples("random", 1, shape, seed, module))
    pattern = jacobian_pattern(operator, tuple(x.shape[1:]))
    shown = pattern.T if transposed else pattern
    if out is None:
        typer.echo(f"{layer}: {shown}")
        return
    pattern_figure(shown, f"{model}, {layer}{', transposed' if transposed else ''}", out)
    typer.echo(f"{layer}: {shown.summary()}\n{out}")


@app.command()
def train(
    task: Annotated[
        str, typer.Argument(help="bitstream, irmas, lenet5 or vgg11. Options left out are as in the thesis.")
    ],
    out: Annotated[
        Path, typer.Option(help="Checkpoint (.safetensors); curves are written beside it as .csv and .png.")
    ],
    data: Annotated[
        str | None, typer.Option(help="digits, cifar10:DIR, cifar100:DIR, bitstream:STEPS, irmas:DIR or tones.")
    ] = None,
    features: Annotated[str | None, typer.Option(help="Features of sounds: S, M or L (Table 4.2).")] = None,
    skip_damaged: Annotated[bool, typer.Option("--skip-damaged", help="Leave out damaged sound files.")] = False,
    backward: Annotated[str, typer.Option(help="Back-propagation (bp) or scan.")] = "bp",
    schedule: Annotated[str | None, typer.Option(help="Schedule of the scan, as for jacsparse flop.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of training.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples per iteration.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="Optimizer: sgd or adam.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of SGD.")] = None,
    prune: Annotated[
        float | None, typer.Option(help="Share of all weights to prune after training, as in 0.97.")
    ] = None,
    scope: Annotated[str | None, typer.Option(help="Where --prune counts its share: layer or global.")] = None,
    retrain_epochs: Annotated[int | None, typer.Option(help="Epochs of training after pruning.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of weights, order, augmentation and dropout.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint.")] = False,
) -> None:
    """Train a model, by back-propagation or by scan; prune and retrain it."""
    from dataclasses import replace

    from . import models

    given = {
        "data": data, "features": features, "skip_damaged": skip_damaged or None, "backward": backward,
        "schedule": schedule, "epochs": epochs, "batch": batch, "optimizer": optimizer, "lr": lr,
        "momentum": momentum, "prune": prune, "scope": scope, "retrain_epochs": retrain_epochs, "seed": seed,
        "out": out,
    }  # fmt: skip
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if prune == 0:
        chosen.setdefault("retrain_epochs", 0)
    settings = replace(models.default_settings(task), **chosen)
    with models.progress_bar() as progress:
        result = models.train(settings, resume=resume, progress=progress)
    for phase, accuracy in result.accuracy.items():
        typer.echo(f"{phase}: {accuracy:.1%} of the test samples right")
    for path in settings.outputs:
        typer.echo(path)


@app.command()
def doctor() -> None:
    """Say what is installed, what is missing and how to get it."""
    from ._doctor import report

    report()


@app.command()
def clear_cache() -> None:
    """Empty the cache: compiled kernels, plans and features of sounds, which are made again when needed."""
    from .patterns._runtime import cache_directory
    from .patterns._store import SHELVES, clear, used

    before = sum(used(shelf)[1] for shelf in SHELVES)
    clear()
    after = sum(used(shelf)[1] for shelf in SHELVES)
    typer.echo(f"{cache_directory()}: {(before - after) / 2**20:.1f} MiB removed")
    if after:
        raise OSError(f"{after / 2**20:.1f} MiB in {cache_directory()} cannot be removed; remove the folder by hand")


def _sizes(text: str) -> tuple[int, ...]:
    from ._chain import check_shape

    return check_shape(_numbers("--input", text, "sizes of one sample, as in 3,32,32"))


def _numbers(option: str, text: str, expected: str) -> tuple[int, ...]:
    """Natural numbers with commas between them."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{option} is {text!r}; expected {expected}")
    return tuple(map(int, parts))


def _model(
    name: str, input: str | None, prune: float, checkpoint: Path | None, seed: int, trust: bool
) -> tuple[nn.Module, tuple[int, ...], str | None]:
    """A model in eval mode, the shape of its samples, and the part of it that is analysed where none is named."""
    import torch

    from . import models

    given = None if input is None else _sizes(input)
    shape = _SAMPLES.get(name, (3, 32, 32))
    torch.manual_seed(seed)
    module: nn.Module
    if trust and not name.endswith(".pt2"):
        raise ValueError(f"--trust is of no use: {name} is no .pt2 file")
    if name.endswith(".pt2"):
        if prune:
            raise ValueError(f"--prune {prune} is of no use: {name} has operators, not layers; prune before exporting")
        module = exported = _from_exported(name, checkpoint, trust)
        shape = exported.input_shape
    elif ":" in name:
        module = _from_factory(name)
        if checkpoint is not None:
            models.load_weights(module, checkpoint)
    elif checkpoint is not None:
        from .models._checkpoint import built_from

        module = built_from(name, checkpoint)
    else:
        module = models.build(name)
    if prune:
        models.prune_weights(module, prune)
    return module.eval(), given or shape, _FEATURES.get(name)


#: The parts that are analysed where none is named: those that are chains of many steps.
_FEATURES = {"vgg11": "features", "bitstream": "rnn", "irmas": "rnn"}
#: Sizes of a sample of the models that do not take images of 3 × 32 × 32.
_SAMPLES = {"bitstream": (1, 1000), "irmas": (38, 259)}


def _from_exported(name: str, checkpoint: Path | None, trust: bool) -> ExportedModel:
    from . import models

    if not Path(name).is_file():
        raise ValueError(f"there is no file {name}")
    if not trust:
        raise ValueError(
            f"{name} is a file of torch.export, which may run code of whoever made it; add --trust where you trust them"
        )
    if checkpoint is not None:
        raise ValueError(f"--checkpoint {checkpoint} is of no use: {name} has its own weights")
    return models.load_exported(name)


def _from_factory(name: str) -> nn.Module:
    """What ``package.module:factory`` makes; modules in the current folder are found too."""
    import importlib
    import sys

    from torch import nn

    home, _, attribute = name.partition(":")
    if home.endswith(".py"):
        path = Path(home)
        where = "" if path.parent == Path() else f", in the folder {path.parent}"
        raise ValueError(f"model {name!r} names a file; name its module, as in {path.stem}:{attribute}{where}")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        factory = getattr(importlib.import_module(home), attribute)
        module = factory if isinstance(factory, nn.Module) else factory()
    except Exception as error:
        # The user's own code: whatever it raises.
        raise ValueError(
            f"model {name!r} cannot be made ({type(error).__name__}: {error}); expected package.module:factory, where "
            "factory() gives a torch.nn.Module"
        ) from error
    finally:
        sys.path.remove(here)
    if not isinstance(module, nn.Module):
        raise TypeError(f"model {name!r} gave a {type(module).__name__}; expected a torch.nn.Module")
    return module


class _ReachedError(Exception):
    """No error: stops the model once a submodule is reached."""


def _part(module: nn.Module, path: str | None, option: str, x: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    """A submodule, and what it is given when the model is given `x`."""
    import torch
    from torch import nn

    if not path:
        return module, x
    try:
        part = module.get_submodule(path)
    except AttributeError:
        known = ", ".join(name for name, _ in module.named_modules() if name)
        raise ValueError(f"{option} is {path!r}; the model's parts are {known}") from None
    # Kept here: whoever runs the model may change an exception on its way.
    seen: list[list[Any]] = []

    def reached(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        # None and False are options that are not used.
        seen.append([value for value in (*args, *named.values()) if value is not None and value is not False])
        raise _ReachedError

    handle = part.register_forward_pre_hook(reached, with_kwargs=True)
    try:
        with torch.no_grad():
            module(x)
    except Exception as error:
        # The user's own code: whatever it raises.
        if not seen:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"an input of shape {tuple(x.shape[1:])} does not get to {path} ({reason})") from error
    finally:
        handle.remove()
    if not seen:
        raise ValueError(f"{option} is {path!r}, which the model does not run; name a part that it does")
    if len(seen[0]) != 1 or not isinstance(seen[0][0], torch.Tensor):
        kinds = ", ".join(type(value).__name__ for value in seen[0]) or "nothing"
        raise ValueError(f"{option} is {path!r}, which is given {kinds}; name a part that is given one tensor")
    given: torch.Tensor = seen[0][0]
    return part, given.transpose(0, 1) if isinstance(part, nn.RNNBase) and not part.batch_first else given


def _check_outputs(*paths: Path | None) -> None:
    """Raise where a file cannot be written, or would be written twice: before the work."""
    from .patterns._files import check_writable

    given = [path for path in paths if path is not None]
    for number, path in enumerate(given):
        if path.resolve() in (other.resolve() for other in given[:number]):
            raise ValueError(f"{path} would be written twice; name another file")
        check_writable(path)


def _samples(data: str, count: int, shape: tuple[int, ...], seed: int, module: nn.Module) -> torch.Tensor:
    """Inputs of the model's dtype."""
    import torch

    from . import models

    dtype = _dtype_of(module)
    if data == "random":
        try:
            return torch.randn((count, *shape), generator=torch.Generator().manual_seed(seed)).to(dtype)
        except RuntimeError as error:
            raise ValueError(
                f"{count} samples of shape {shape} are more than there is memory for; name smaller sizes with --input"
            ) from error
    images = models.load_data(data).test_inputs
    if tuple(images.shape[1:]) != shape:
        raise ValueError(f"--data {data} has samples of shape {tuple(images.shape[1:])}, --input is {shape}")
    if count > len(images):
        raise ValueError(f"--samples is {count}, but {data} has {len(images)} test images")
    return images[:count].to(dtype)


def _dtype_of(module: nn.Module) -> torch.dtype:
    import torch

    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def _sample_of(path: Path, module: nn.Module) -> torch.Tensor:
    """A sample from a file, as a batch of one, of the model's dtype. No code in the file is run."""
    import numpy as np
    import torch

    if path.suffix not in (".npy", ".pt"):
        raise ValueError(f"--input-file is {path}; expected an array (.npy) or a tensor (.pt)")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; make one with numpy.save or torch.save")
    try:
        if path.suffix == ".pt":
            sample = torch.load(path, weights_only=True, map_location="cpu")
        else:
            sample = torch.from_numpy(np.load(path, allow_pickle=False))
    except Exception as error:
        # What NumPy and PyTorch raise of a damaged file shares no base class.
        raise ValueError(
            f"{path} cannot be read: it is damaged, or holds more than numbers; save one array or tensor"
        ) from error
    if not isinstance(sample, torch.Tensor) or not sample.ndim:
        raise ValueError(f"{path} holds a {type(sample).__name__}; expected a tensor of one sample, without a batch")
    return sample.to(_dtype_of(module))[None]


def _progress() -> Any:
    from rich.console import Console
    from rich.progress import Progress

    return Progress(console=Console(stderr=True), transient=True)
