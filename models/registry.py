"""Models by name."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from .arguments import check_one_of
from .classifiers import BitstreamRNN, InstrumentGRU
from .lenet import LeNet5
from .resnet import ResNet8, ResNet56, ResNet110
from .vgg import VGG11

#: The built-in models by name; each has its arguments as `options`.
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
        The model's name.
    **options
        Arguments of its class: `num_classes`, `in_channels`, for ``vgg11`` `dropout`, for recurrent models
        `hidden_size`.

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
    parameters = list(inspect.signature(MODELS[name]).parameters)
    for option in options:
        if option not in parameters:
            raise ValueError(f"{name} has no option {option!r}; it has {', '.join(parameters)}")
    return MODELS[name](**options)


def name_of(module: nn.Module) -> str | None:
    """The name of a built-in model; None for any other module."""
    return next((name for name, model in MODELS.items() if type(module) is model), None)


def describe(name: str, options: dict[str, Any]) -> str:
    """A model with its options, for messages: ``lenet5(num_classes=10)``."""
    return f"{name}({', '.join(f'{option}={value}' for option, value in options.items())})"
