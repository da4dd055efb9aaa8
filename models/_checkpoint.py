"""Checkpoints: safetensors files, which cannot execute code, each checked before anything in it is used."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from jacsparse.patterns._files import check_writable, replacing
from torch import nn

from jacsparse._modules import check_initialised

from ._checks import check_count, check_one_of
from ._pruning import pruned_fraction
from ._registry import MODELS, build, describe, name_of
from ._weights import fit_weights, read_tensors, unfit, unwrapped

__all__ = [
    "Checkpoint",
    "built_from",
    "load_checkpoint",
    "load_weights",
    "model_of",
    "read_checkpoint",
    "save_checkpoint",
]

_FORMAT = 1
# What marks a file's metadata.
_OURS = "jacsparse"
# No module has a slash in its path.
_STATE = "training/"


@dataclass(frozen=True)
class Checkpoint:
    """The content of a file.

    Attributes
    ----------
    path : Path
        Of the file.
    metadata : dict
        What `save_checkpoint` was given, and ``format``, ``model``, ``options`` and ``pruned``.
    weights : dict of str to Tensor
        As the module's state dict names them; masks are bool.
    state : dict of str to Tensor
        What is needed to go on training.
    """

    path: Path
    metadata: dict[str, Any]
    weights: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]

    @property
    def model(self) -> str:
        """The model, as it was built."""
        return describe(self.metadata["model"], self.metadata["options"])


def save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    *,
    metadata: Mapping[str, Any] | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a built-in model, its masks and what was known about it; the file appears whole or not at all.

    Parameters
    ----------
    path : path-like
        Of the file.
    module : Module
        Made by `build`, or a class that it builds.
    metadata : mapping, optional
        Plain values for JSON, written beside ``format``, ``model``, ``options`` and ``pruned``.
    state : mapping of str to Tensor, optional
        Tensors that are not the module's, as an optimiser's.

    Raises
    ------
    TypeError
        Where the module is not a built-in model.
    OSError
        Where the file cannot be written.
    """
    name = name_of(module)
    if name is None:
        raise TypeError(
            f"the module is a {type(module).__name__}; checkpoints hold {', '.join(sorted(MODELS))}: "
            "save others with safetensors"
        )
    path = Path(path)
    check_writable(path)
    about = {**(metadata or {}), "format": _FORMAT, "model": name, "options": module.options}
    about["pruned"] = pruned_fraction(module)
    tensors = {key: value.bool() if key.endswith("_mask") else value for key, value in module.state_dict().items()}
    tensors |= {_STATE + key: value for key, value in (state or {}).items()}
    tensors = {key: value.detach().cpu().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
    with replacing(path) as temporary:
        safetensors.torch.save_file(tensors, temporary, metadata={_OURS: json.dumps(about)})


def load_checkpoint(path: str | os.PathLike[str]) -> tuple[nn.Module, dict[str, Any]]:
    """The model in a file, with its masks, in eval mode, and what is known about it.

    Returns
    -------
    module : Module
        A built-in model.
    metadata : dict
        ``model`` and ``options`` (as `build` takes them), ``pruned`` (the share of weights that are), and what
        `save_checkpoint` was given: for a file of `train`, ``source``, ``classes``, ``mean``, ``std``, ``epoch``,
        ``settings`` and ``accuracy``.

    Raises
    ------
    FileNotFoundError
        Where there is no such file.
    ValueError
        Where it is damaged, or no checkpoint.
    """
    checkpoint = read_checkpoint(path)
    return model_of(checkpoint).eval(), checkpoint.metadata


def load_weights(module: nn.Module, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load a file's weights and masks into a module of the same architecture, whose own masks are given up.

    Parameters
    ----------
    module : Module
        Any.
    path : path-like
        A checkpoint of `save_checkpoint`; safetensors of any origin; or a PyTorch file (.pt, .pth, .bin, .ckpt, .tar)
        of a state dict, of which nothing is executed. Pairs of ``weight_orig`` and ``weight_mask``, as
        ``torch.nn.utils.prune`` leaves them, become a pruned weight.

    Returns
    -------
    dict
        What is known about the model, as `load_checkpoint` has it; empty for a file of another origin.

    Raises
    ------
    FileNotFoundError
        Where there is no such file.
    ValueError
        Where it is damaged, holds no weights, or those of another architecture; the module is left as it was.
    """
    check_initialised(module)
    tensors, header = read_tensors(path)
    if _OURS in header:
        checkpoint = _checkpoint(Path(path), tensors, header)
        _load(module, checkpoint)
        return checkpoint.metadata
    _load_foreign(module, Path(path), tensors)
    return {}


def built_from(name: str, path: str | os.PathLike[str]) -> nn.Module:
    """The built-in model of a name, with a file's weights and masks, in eval mode.

    Raises
    ------
    FileNotFoundError
        Where there is no such file.
    ValueError
        Where it is damaged, or holds the weights of another model.
    """
    tensors, header = read_tensors(path)
    if _OURS not in header:
        module = build(name)
        _load_foreign(module, Path(path), tensors)
        return module.eval()
    checkpoint = _checkpoint(Path(path), tensors, header)
    if checkpoint.metadata["model"] != name:
        raise ValueError(f"{path} holds {checkpoint.metadata['model']}, not {name}; name the model that it holds")
    return model_of(checkpoint).eval()


def _load_foreign(module: nn.Module, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    # Names as they are first: a model may have a part that is called as a wrapper's is.
    if unfit(module, tensors):
        tensors = unwrapped(tensors)
    reason = unfit(module, tensors)
    if reason:
        raise ValueError(f"{path} does not fit {reason}; build the model that it holds, or take another file")
    fit_weights(module, tensors)


def model_of(checkpoint: Checkpoint) -> nn.Module:
    """The model in a checkpoint."""
    name, options = checkpoint.metadata["model"], checkpoint.metadata["options"]
    # Without memory first: the options may ask for any size, the file's tensors cannot.
    try:
        with torch.device("meta"):
            empty = build(name, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{checkpoint.path} has options that no model takes: {error}") from error
    _check_fits(empty, checkpoint)
    module = build(name, **options)
    _load(module, checkpoint)
    return module


def _check_fits(module: nn.Module, checkpoint: Checkpoint) -> None:
    reason = unfit(module, checkpoint.weights)
    if reason:
        raise ValueError(
            f"{checkpoint.path} holds {checkpoint.model}, which does not fit {reason}; build the model that it holds, "
            "or take another checkpoint"
        )


def _load(module: nn.Module, checkpoint: Checkpoint) -> None:
    _check_fits(module, checkpoint)
    fit_weights(module, checkpoint.weights)


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The content of a file, checked but for whether it fits a module.

    Raises
    ------
    FileNotFoundError
        Where there is no such file.
    ValueError
        Where it is damaged, or no checkpoint.
    """
    return _checkpoint(Path(path), *read_tensors(path))


def _checkpoint(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, str]) -> Checkpoint:
    state = {key.removeprefix(_STATE): value for key, value in tensors.items() if key.startswith(_STATE)}
    weights = {key: value for key, value in tensors.items() if not key.startswith(_STATE)}
    return Checkpoint(path, _metadata(path, header), weights, state)


def _metadata(path: Path, header: Mapping[str, str]) -> dict[str, Any]:
    if _OURS not in header:
        raise ValueError(
            f"{path} was not saved by jacsparse, so it does not say which model it holds; build the model and load the "
            "file with jacsparse.models.load_weights"
        )
    try:
        metadata = json.loads(header[_OURS])
        if metadata["format"] != _FORMAT:
            raise ValueError(f"its format is {metadata['format']!r}, this jacsparse reads {_FORMAT}")
        check_one_of("model", metadata["model"], MODELS)
        for option in ("num_classes", "in_channels"):
            check_count(option, metadata["options"][option])
        metadata["pruned"] = float(metadata["pruned"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path} has metadata that cannot be used ({error}); it is damaged or of another version of "
            "jacsparse: make it again with jacsparse train"
        ) from error
    return metadata
