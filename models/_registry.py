"""Models by name."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from ._checks import check_one_of
from ._lenet import LeNet5
from ._recurrent import BitstreamRNN, InstrumentGRU
from ._resnet import ResNet8, ResNet56, ResNet110
from ._vgg import VGG11

__all__ = ["MODELS", "build", "describe", "name_of"]

#: The built-in models; each remembers what it was built with as `options`.
MODELS: dict[str, type[nn.Module]] = {
    "bitstream": BitstreamRNN,
    "irmas": InstrumentGRU,
    "lenet5": LeNet5,
    "resnet8": ResNet8,
    "resnet56": ResNet56,
    "resnet110": ResNet110,
    "vgg11": VGG11,
}


def build(name: str, **options: Any) -> nn.Module:
    """A built-in model with random weights.

    Parameters
    ----------
    name : {"bitstream", "irmas", "lenet5", "resnet8", "resnet56", "resnet110", "vgg11"}
        Which one.
    **options
        Of its class: `num_classes`, `in_channels`, for ``vgg11`` `dropout`, for the recurrent ones `hidden_size`.

    Raises
    ------
    ValueError
        Where there is no such model, or it has no such option.

    Examples
    --------
    >>> sum(parameter.numel() for parameter in build("lenet5").parameters())
    62006
    """
    check_one_of("model", name, MODELS)
    known = list(inspect.signature(MODELS[name]).parameters)
    for option in options:
        if option not in known:
            raise ValueError(f"{name} has no option {option!r}; it has {', '.join(known)}")
    return MODELS[name](**options)


def name_of(module: nn.Module) -> str | None:
    """The name under which a module is built, None where it is not a built-in model."""
    return next((name for name, kind in MODELS.items() if type(module) is kind), None)


def describe(name: str, options: dict[str, Any]) -> str:
    """A model as it is built, for messages.

    Examples
    --------
    >>> describe("lenet5", {"num_classes": 10})
    'lenet5(num_classes=10)'
    """
    return f"{name}({', '.join(f'{option}={value}' for option, value in options.items())})"
