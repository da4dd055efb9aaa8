"""The models, parts of models, samples and files that arguments of commands name."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..models import ExportedModel
    from .example_inputs import Argument

#: The parts that are analysed by default: those that are chains of many steps.
_PARTS = {"vgg11": "features", "bitstream": "rnn", "irmas": "rnn"}

#: Sizes of a sample of the models that do not take images of 3 × 32 × 32.
_SAMPLES = {"bitstream": (1, 1000), "irmas": (38, 259)}


def parse_numbers(option: str, text: str, expected: str) -> tuple[int, ...]:
    """Positive integers, separated by commas."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{option} is {text!r}; expected {expected}")
    return tuple(map(int, parts))


def load_model(
    name: str, input: str | list[Argument] | None, prune: float, checkpoint: Path | None, seed: int, trust: bool
) -> tuple[nn.Module, tuple[int, ...], str | None]:
    """A model in eval mode, the shape of its samples, and the part that is analysed by default."""
    import torch

    from .. import models
    from ..stages import check_shape

    sizes = None
    if isinstance(input, str):
        sizes = check_shape(parse_numbers("--input", input, "sizes of one sample, as in 3,32,32"))
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
        if input is None:
            # In a log, too: an error that follows may come from these sizes.
            sizes_taken = ",".join(map(str, shape))
            typer.echo(f"Note: a sample is taken to have the sizes {sizes_taken}; --input names others.", err=True)
        if checkpoint is not None:
            models.load_weights(module, checkpoint)
    elif name not in models.MODELS:
        raise ValueError(
            f"model is {name!r}; expected one of {', '.join(sorted(models.MODELS))}, "
            "package.module:factory for a network of your own, as torchvision.models:resnet18, "
            "or a .pt2 file of torch.export with --trust"
        )
    else:
        module = models.build(name) if checkpoint is None else models.built_from(name, checkpoint)
    if prune:
        models.prune_weights(module, prune)
    return module.eval(), sizes or shape, _PARTS.get(name)


def _from_exported(name: str, checkpoint: Path | None, trust: bool) -> ExportedModel:
    from .. import models

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
    """The module that ``package.module:factory`` makes; ``package`` may be in the current folder."""
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
        # The user's code may raise any exception.
        raise ValueError(
            f"model {name!r} cannot be made ({type(error).__name__}: {error}); expected package.module:factory, where "
            "factory() gives a torch.nn.Module"
        ) from error
    finally:
        sys.path.remove(here)
    if not isinstance(module, nn.Module):
        from ..runtime import a_type

        raise TypeError(f"model {name!r} gave {a_type(module)}; expected a torch.nn.Module")
    return module


class _ReachedError(Exception):
    """Stops the model once it reaches a submodule; it is no error."""


def submodule_at(module: nn.Module, path: str | None, option: str, x: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    """A submodule, and its input when the model's input is `x`."""
    import torch
    from torch import nn

    if not path:
        return module, x
    try:
        part = module.get_submodule(path)
    except AttributeError:
        paths = ", ".join(name for name, _ in module.named_modules() if name)
        raise ValueError(f"{option} is {path!r}; the model's parts are {paths}") from None
    # The exception does not carry the inputs, since the model may catch it and raise another one.
    calls: list[list[Any]] = []

    def record(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        # None and False are values of unused options.
        calls.append([value for value in (*args, *named.values()) if value is not None and value is not False])
        raise _ReachedError

    handle = part.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with torch.no_grad():
            module(x)
    except Exception as error:
        # The user's code may raise any exception.
        if not calls:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"an input of shape {tuple(x.shape[1:])} does not get to {path} ({reason})") from error
    finally:
        handle.remove()
    if not calls:
        raise ValueError(f"{option} is {path!r}, which the model does not run; name a part that it does")
    inputs = calls[0]
    if len(inputs) != 1 or not isinstance(inputs[0], torch.Tensor):
        kinds = ", ".join(type(value).__name__ for value in inputs) or "nothing"
        raise ValueError(f"{option} is {path!r}, which is given {kinds}; name a part that is given one tensor")
    return part, inputs[0].transpose(0, 1) if isinstance(part, nn.RNNBase) and not part.batch_first else inputs[0]


class Analysed(NamedTuple):
    """What a command analyses: a model or a part of it, the part's input, its path in the model, and its name."""

    module: nn.Module
    #: A tensor; of several arguments, a list or a dict.
    x: Any
    path: str | None
    name: str


def load_part(
    model: str,
    input: str | list[str] | None,
    prune: float,
    checkpoint: Path | None,
    seed: int,
    trust: bool,
    part: str | None,
    data: str | None,
    count: int = 1,
    training: bool = False,
) -> Analysed:
    """The part of a model that a command analyses, with samples as its input.

    Without data, a part has random ones, and a whole model a batch without samples. Of a list in `input`, samples are
    all arguments of the model.
    """
    import torch

    from .example_inputs import arguments_of, example_inputs

    arguments = arguments_of(input) if isinstance(input, list) else None
    sizes = input[0] if isinstance(input, list) else input
    module, shape, default_part = load_model(model, arguments or sizes, prune, checkpoint, seed, trust)
    path = part if part is not None or arguments else default_part
    x: Any
    if arguments is not None:
        if path:
            raise ValueError(f"--part is {path!r}, whose input is found by one tensor of numbers; name it by --input")
        x = example_inputs(arguments, data, count, seed, _dtype_of(module))
    elif data is None and not path:
        x = torch.empty(0, *shape)
    else:
        x = make_samples("random" if data is None else data, count, shape, seed, module)
    analysed, x = (module, x) if arguments else submodule_at(module, path, "--part", x)
    name = f"{model}.{path}" if path else model
    _note_unpruned(prune, analysed, name)
    if training:
        if model.endswith(".pt2"):
            raise ValueError(f"--training is of no use: {model} stays in the mode in which it was exported")
        analysed.train()
        name += " in training mode"
    return Analysed(analysed, x, path, name)


def _note_unpruned(prune: float, part: nn.Module, name: str) -> None:
    """Tell where --prune leaves the part that is analysed as it was."""
    from .. import models

    if prune and not models.pruned_fraction(part):
        echo(f"--prune {prune} prunes convolution and linear layers, and {name} has none: no weight of it is pruned")


def layer_input(part: nn.Module, x: torch.Tensor, steps: int | None) -> torch.Tensor:
    """The input of a part as that takes it, from what `submodule_at` returns; of a recurrent layer so many steps."""
    from torch import nn

    if not isinstance(part, nn.RNNBase):
        return x
    if steps is not None and steps > x.shape[1]:
        raise ValueError(f"--steps {steps} is more than the {x.shape[1]} steps that the input has")
    x = x[:, :steps]
    return x if part.batch_first else x.transpose(0, 1)


#: Seconds before progress is shown, seconds between the lines of a log, and how many lines there are at most.
_SILENT, _PAUSE, _MOST_LINES = 2.0, 5.0, 10


def echo(line: str) -> None:
    """A line for the person at the terminal, beside what is printed."""
    from rich.console import Console

    Console(stderr=True, markup=False, emoji=False, highlight=False).print(line, soft_wrap=True)


class _Lines:
    """Lines of a log, ever rarer: at most `_MOST_LINES` of what may take any time."""

    def __init__(self) -> None:
        self.next, self.pause, self.left = time.perf_counter() + _SILENT, _PAUSE, _MOST_LINES

    def show(self, line: str) -> None:
        now = time.perf_counter()
        if now >= self.next and self.left:
            echo(line)
            self.next, self.pause, self.left = now + self.pause, 2 * self.pause, self.left - 1


@contextlib.contextmanager
def progress_bar(doing: str) -> Iterator[Callable[[int, int], None]]:
    """A context with a function that takes how many parts of how many are done.

    After two seconds a terminal shows a bar, and a log a line from time to time.
    """
    from rich.console import Console
    from rich.progress import Progress

    errors, lines = Console(stderr=True), _Lines()
    bar = Progress(console=errors, transient=True)
    task = bar.add_task(doing, total=None)

    def update(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if not errors.is_terminal:
            lines.show(f"{doing}: {done:,} of {total:,}")
        elif not bar.live.is_started and time.perf_counter() >= lines.next:
            bar.start()

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()


@contextlib.contextmanager
def announcements(doing: str) -> Iterator[Callable[[str], None]]:
    """A context with a function that shows what is done next: in one line of a terminal, or now and then in a log."""
    from rich.console import Console

    errors, lines = Console(stderr=True, highlight=False), _Lines()
    with errors.status("preparing") as status:

        def announce(subject: str) -> None:
            if errors.is_terminal:
                status.update(f"{doing} {subject}")
            else:
                lines.show(f"{doing} {subject}")

        yield announce


def check_outputs(*paths: Path | None) -> None:
    """Raise where a file cannot be written or would be written twice, before any work is done."""
    from ..runtime import check_writable

    resolved: set[Path] = set()
    for path in paths:
        if path is None:
            continue
        if path.resolve() in resolved:
            raise ValueError(f"{path} would be written twice; name another file")
        check_writable(path)
        resolved.add(path.resolve())


def make_samples(data: str, count: int, shape: tuple[int, ...], seed: int, module: nn.Module) -> torch.Tensor:
    """Samples of a data set, or random ones, of the model's dtype."""
    import torch

    from .. import models

    dtype = _dtype_of(module)
    if data == "random":
        try:
            return torch.randn((count, *shape), generator=torch.Generator().manual_seed(seed)).to(dtype)
        except RuntimeError as error:
            raise ValueError(
                f"{count} samples of shape {shape} are more than there is memory for; name smaller sizes with --input"
            ) from error
    own = Path(data).suffix in _READERS
    if not own and Path(data).is_file():
        raise ValueError(f"--data is the file {data}; expected samples in a file that ends in {', '.join(_READERS)}")
    samples = read_samples(Path(data)) if own else models.load_data(data).test_inputs
    if tuple(samples.shape[1:]) != shape:
        has = f"--data {data} has samples of shape {tuple(samples.shape[1:])}, --input is {shape}"
        raise ValueError(f"{has}; convert the samples, or name their shape by --input")
    if count > len(samples):
        kind = "samples" if own else "test images"
        raise ValueError(f"{count} samples are asked for, but {data} has {len(samples)} {kind}")
    return samples[:count].to(dtype)


def read_samples(path: Path, integers: bool = False) -> torch.Tensor:
    """The samples in a file, along the first axis; no code in the file runs."""
    samples = _read_tensor(path, "expected one tensor of samples, along its first axis")
    if samples.is_floating_point() == integers or samples.is_complex():
        kind = "integer" if integers else "floating-point"
        raise ValueError(f"{path} holds {samples.dtype}; expected {kind} samples, as the model takes them")
    if samples.ndim < 2:
        raise ValueError(f"{path} has shape {tuple(samples.shape)}; expected samples along the first of several axes")
    if not len(samples):
        raise ValueError(f"{path} holds no sample")
    finite = samples.flatten(1).isfinite().all(1)
    if not finite.all():
        raise ValueError(
            f"{path} holds NaN or infinity in sample {int((~finite).nonzero()[0])}; leave out such samples"
        )
    return samples


def _dtype_of(module: nn.Module) -> torch.dtype:
    import torch

    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def read_sample(path: Path, module: nn.Module) -> torch.Tensor:
    """A sample from a file, as a batch of one, of the model's dtype; no code in the file runs."""
    if path.suffix not in (".npy", ".pt"):
        raise ValueError(f"--input-file is {path}; expected an array (.npy) or a tensor (.pt)")
    return _read_tensor(path, "expected a tensor of one sample, without a batch").to(_dtype_of(module))[None]


def _read_tensor(path: Path, expected: str) -> torch.Tensor:
    """The one tensor in a file; no code in the file runs."""
    import torch

    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; make one with numpy.save or torch.save")
    try:
        value = _READERS[path.suffix](path)
    except Exception as error:
        # The errors of NumPy and PyTorch for a damaged file share no base class.
        raise ValueError(
            f"{path} cannot be read: it is damaged, or holds more than numbers; save one array or tensor"
        ) from error
    if not isinstance(value, torch.Tensor) or not value.ndim:
        from ..runtime import a_type

        raise ValueError(f"{path} holds {a_type(value)}; {expected}")
    if value.layout is not torch.strided or value.is_meta:
        raise ValueError(f"{path} holds a tensor that is sparse or has no values; {expected}, as value.to_dense()")
    return value.detach()


def _load_numpy(path: Path) -> object:
    import numpy as np
    import torch

    array = np.load(path, allow_pickle=False)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def _load_torch(path: Path) -> object:
    import torch

    return torch.load(path, weights_only=True, map_location="cpu")


def _load_safetensors(path: Path) -> object:
    import safetensors.torch

    tensors = safetensors.torch.load_file(path)
    return next(iter(tensors.values())) if len(tensors) == 1 else tensors


#: How files of samples are read, by their suffix.
_READERS: dict[str, Callable[[Path], object]] = {
    ".npy": _load_numpy,
    ".pt": _load_torch,
    ".safetensors": _load_safetensors,
}
