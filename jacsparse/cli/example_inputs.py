"""Arguments of models that ``--input`` names, where they are not one tensor of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

#: What stands before the sizes of integers.
_INTEGERS = "ids:"


class Argument(NamedTuple):
    """One argument of a model: its name, empty for a positional one, and a sample's sizes and kind."""

    name: str
    sizes: tuple[int, ...]
    integers: bool


def arguments_of(texts: Sequence[str]) -> list[Argument] | None:
    """The arguments that ``--input`` names; None for the sizes of one tensor of numbers.

    Raises
    ------
    ValueError
        Where a text is none of sizes, or only some of several have names.

    Examples
    --------
    >>> arguments_of(["input_ids=ids:12", "pixels=3,8,8"])
    [Argument(name='input_ids', sizes=(12,), integers=True), Argument(name='pixels', sizes=(3, 8, 8), integers=False)]
    >>> arguments_of(["3,32,32"]) is None
    True
    """
    from .inputs import parse_numbers

    arguments = []
    for text in texts:
        name, _, sizes = text.rpartition("=")
        integers = sizes.startswith(_INTEGERS)
        expected = "sizes of one sample, as in 3,32,32, ids:12 for tokens, or NAME=ids:12 for a keyword argument"
        numbers = parse_numbers("--input", sizes.removeprefix(_INTEGERS), expected)
        arguments.append(Argument(name, numbers, integers))
    names = [argument.name for argument in arguments]
    if any(names) and (not all(names) or len({*names}) < len(names)):
        raise ValueError(f"--input is {', '.join(texts)}; name each of them once, or none, as the model takes them")
    return None if len(arguments) == 1 and not (names[0] or arguments[0].integers) else arguments


def example_inputs(arguments: Sequence[Argument], data: str | None, count: int, seed: int, dtype: torch.dtype) -> Any:
    """What `jacsparse.count_flop` takes as inputs: integers are ones, and numbers random.

    A file of ``--data`` has the samples of one argument.
    """
    import torch

    from .inputs import read_samples

    generator = torch.Generator().manual_seed(seed)
    if data is not None:
        tokens = any(argument.integers for argument in arguments)
        if (data == "random" and tokens) or (data != "random" and len(arguments) > 1):
            raise ValueError(
                f"--data is {data}: which tokens there are is not known; give a file of the samples of one input, or "
                "leave --data out"
            )
    samples = None if data in (None, "random") else read_samples(Path(str(data)), integers=arguments[0].integers)
    tensors = {}
    for place, argument in enumerate(arguments):
        shape = (count, *argument.sizes)
        if samples is not None:
            if tuple(samples.shape[1:]) != argument.sizes or len(samples) < count:
                raise ValueError(
                    f"--data {data} has {len(samples)} samples of shape {tuple(samples.shape[1:])}; expected {count} "
                    f"of {argument.sizes}, as --input and --samples say"
                )
            value = samples[:count] if argument.integers else samples[:count].to(dtype)
        elif argument.integers:
            value = torch.ones(shape, dtype=torch.long)
        else:
            value = torch.randn(shape, generator=generator).to(dtype)
        tensors[argument.name or place] = value
    if arguments[0].name:
        return tensors
    return tensors[0] if len(tensors) == 1 else list(tensors.values())
