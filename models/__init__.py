"""Networks to work on, their pruning, their data and their training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._bitstream import bitstreams
    from ._checkpoint import load_checkpoint, load_weights, save_checkpoint
    from ._data import Dataset, load_data
    from ._exported import ExportedModel, load_exported
    from ._irmas import load_irmas
    from ._lenet import LeNet5
    from ._progress import Progress, progress_bar
    from ._pruning import prunable, prune_weights, pruned_fraction
    from ._recurrent import BitstreamRNN, InstrumentGRU, SequenceClassifier
    from ._registry import MODELS, build
    from ._resnet import ResidualUnit, ResNet8, ResNet56, ResNet110
    from ._settings import TrainSettings, default_settings
    from ._tones import write_tones
    from ._train import TrainResult, evaluate, train
    from ._vgg import VGG11

__all__ = [
    "MODELS",
    "VGG11",
    "BitstreamRNN",
    "Dataset",
    "ExportedModel",
    "InstrumentGRU",
    "LeNet5",
    "Progress",
    "ResNet8",
    "ResNet56",
    "ResNet110",
    "ResidualUnit",
    "SequenceClassifier",
    "TrainResult",
    "TrainSettings",
    "bitstreams",
    "build",
    "default_settings",
    "evaluate",
    "load_checkpoint",
    "load_data",
    "load_exported",
    "load_irmas",
    "load_weights",
    "progress_bar",
    "prunable",
    "prune_weights",
    "pruned_fraction",
    "save_checkpoint",
    "train",
    "write_tones",
]

# Imported when first used: who asks for a model loads neither matplotlib nor scikit-learn.
_HOMES = {
    "bitstreams": "_bitstream",
    "BitstreamRNN": "_recurrent",
    "InstrumentGRU": "_recurrent",
    "SequenceClassifier": "_recurrent",
    "load_checkpoint": "_checkpoint",
    "load_weights": "_checkpoint",
    "save_checkpoint": "_checkpoint",
    "Dataset": "_data",
    "load_data": "_data",
    "ExportedModel": "_exported",
    "load_exported": "_exported",
    "LeNet5": "_lenet",
    "load_irmas": "_irmas",
    "write_tones": "_tones",
    "Progress": "_progress",
    "progress_bar": "_progress",
    "prunable": "_pruning",
    "prune_weights": "_pruning",
    "pruned_fraction": "_pruning",
    "MODELS": "_registry",
    "build": "_registry",
    "ResNet8": "_resnet",
    "ResNet56": "_resnet",
    "ResNet110": "_resnet",
    "ResidualUnit": "_resnet",
    "TrainSettings": "_settings",
    "default_settings": "_settings",
    "TrainResult": "_train",
    "evaluate": "_train",
    "train": "_train",
    "VGG11": "_vgg",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
