"""Networks, their pruning, their data and their training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bitstream import bitstreams
    from .checkpoint import built_from, load_checkpoint, load_weights, save_checkpoint
    from .classifiers import BitstreamRNN, InstrumentGRU, SequenceClassifier
    from .data import load_data
    from .dataset import Dataset
    from .exported import ExportedModel, load_exported
    from .irmas import SOUNDS, load_irmas
    from .lenet import LeNet5
    from .progress import Progress, progress_bar
    from .pruning import prunable, prune_weights, pruned_fraction
    from .registry import MODELS, build
    from .resnet import ResidualUnit, ResNet8, ResNet56, ResNet110
    from .settings import TrainSettings, default_settings
    from .tones import write_tones
    from .training import TrainResult, evaluate, train
    from .vgg import VGG11

__all__ = [
    "MODELS",
    "SOUNDS",
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
    "built_from",
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

# A name's module is imported when the name is first used, so that building a model loads no data or figures.
_MODULES = {
    "bitstream": ("bitstreams",),
    "checkpoint": ("built_from", "load_checkpoint", "load_weights", "save_checkpoint"),
    "classifiers": ("BitstreamRNN", "InstrumentGRU", "SequenceClassifier"),
    "data": ("load_data",),
    "dataset": ("Dataset",),
    "exported": ("ExportedModel", "load_exported"),
    "irmas": ("SOUNDS", "load_irmas"),
    "lenet": ("LeNet5",),
    "progress": ("Progress", "progress_bar"),
    "pruning": ("prunable", "prune_weights", "pruned_fraction"),
    "registry": ("MODELS", "build"),
    "resnet": ("ResNet8", "ResNet56", "ResNet110", "ResidualUnit"),
    "settings": ("TrainSettings", "default_settings"),
    "tones": ("write_tones",),
    "training": ("TrainResult", "evaluate", "train"),
    "vgg": ("VGG11",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
