"""Checkpoints: safetensors files, which cannot execute code, each checked before anything in it is used."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..runtime import HEADER, a_type, check_writable, write_safetensors
from ..tracing import check_initialised
from .arguments import check_count, check_one_of
from .pruning import pruned_fraction
from .registry import MODELS, build, describe, name_of
from .trained_weights import States, fit_weights, read_tensors, unfit, weights_in

_FORMAT = 1
# Prefix of the training state's tensors; no module has a slash in its path.
_STATE = "training/"


@dataclass(frozen=True)
class Checkpoint:
    """The content of a file: metadata, the module's state dict, with bool masks, and the state of its training."""

    path: Path
    metadata: dict[str, Any]
    weights: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]

    @property
    def model(self) -> str:
        """The model with its options."""
        return describe(self.metadata["model"], self.metadata["options"])


def save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    *,
    metadata: Mapping[str, Any] | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a built-in model with its masks and metadata; the file appears whole or not at all.

    Without `state` the file has the names of the module's state dict and no others, so that
    ``module.load_state_dict(safetensors.torch.load_file(path))`` takes it. Those of a pruned module are
    ``torch.nn.utils.prune``'s, ``weight_orig`` and ``weight_mask``: `load_weights` loads them into any module.

    Parameters
    ----------
    path : path-like
        The file to write.
    module : Module
        A model of `build`, or an instance of a class that it builds.
    metadata : mapping, optional
        Plain values for JSON, written beside ``format``, ``model``, ``options`` and ``pruned``.
    state : mapping of str to Tensor, optional
        Tensors that are not the module's, such as an optimiser's; in the file their names begin with ``training/``.

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
            f"the module is {a_type(module)}; checkpoints hold {', '.join(sorted(MODELS))}: "
            "save others with safetensors"
        )
    check_writable(path)
    header = {
        **(metadata or {}),
        "format": _FORMAT,
        "model": name,
        "options": module.options,
        "pruned": pruned_fraction(module),
    }
    tensors = {key: value.bool() if key.endswith("_mask") else value for key, value in module.state_dict().items()}
    tensors |= {_STATE + key: value for key, value in (state or {}).items()}
    write_safetensors(path, tensors, header)


def load_checkpoint(path: str | os.PathLike[str]) -> tuple[nn.Module, dict[str, Any]]:
    """The model in a file, with its masks, in eval mode, and its metadata.

    Parameters
    ----------
    path : path-like
        A file of `save_checkpoint`.

    Returns
    -------
    module : Module
        A built-in model.
    metadata : dict
        ``model`` and ``options`` (as `build` takes them), ``pruned`` (the share of pruned weights), and the metadata
        that `save_checkpoint` got: in a file of `train`, ``source``, ``classes``, ``mean``, ``std``, ``epoch``,
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


def load_weights(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    prefix: str | None = None,
    masks: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Load a file's weights and masks into a module of the same architecture; they replace the module's masks.

    What wraps a model in training puts a prefix before all names of its weights, as Lightning's ``model.`` and the
    ``module.`` of ``DataParallel`` and averaged models, and scripts put the state dict under a key. Where one prefix
    leads to all weights of the module, and no others are beside them, it is found.

    Parameters
    ----------
    module : Module
        Any module.
    path : path-like
        A checkpoint of `save_checkpoint`; a safetensors file of any origin; or a PyTorch file (.pt, .pth, .bin, .ckpt,
        .tar) with a state dict, whose code is not executed. Pairs of ``weight_orig`` and ``weight_mask``, as
        ``torch.nn.utils.prune`` leaves them, become a pruned weight; so do those of ``torch.ao.pruning``.
    prefix : str, optional
        What stands before the names, with the keys of the dicts around them, as ``model_ema.`` or
        ``state_dict.student.``: where a file has the weights several times, or other modules' beside them.
    masks : path-like, optional
        A file of masks, of zeros and ones or bools, each named as its weight, alone or with ``_mask`` or ``.mask``
        behind it, under any prefix; of a sparsifier of ``torch.ao``, ``torch.save(dict(sparsifier.state), masks)``.

    Returns
    -------
    dict
        The metadata, as `load_checkpoint` returns it; empty for a file of another origin.

    Raises
    ------
    FileNotFoundError
        Where there is no such file.
    ValueError
        Where it is damaged, has no weights, or those of another architecture, or has them several times or beside
        others; the module is left as it was.

    Examples
    --------
    >>> import tempfile
    >>> model, averaged = nn.Linear(2, 2), torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"model": model.state_dict(), "ema": averaged.state_dict()}, f"{folder}/last.ckpt")
    ...     load_weights(model, f"{folder}/last.ckpt", prefix="ema.module.")
    {}
    """
    check_initialised(module)
    states, header = read_tensors(path)
    if HEADER not in header:
        fit_weights(module, weights_in(path, states, module, prefix=prefix, masks=masks))
        return {}
    if prefix is not None or masks is not None:
        raise ValueError(f"{path} was saved by jacsparse, with one model and its masks: leave out prefix and masks")
    checkpoint = _checkpoint(Path(path), states, header)
    _check_fits(module, checkpoint)
    fit_weights(module, checkpoint.weights)
    return checkpoint.metadata


def built_from(name: str, path: str | os.PathLike[str]) -> nn.Module:
    """The built-in model of a name, with a file's weights and masks, in eval mode.

    Parameters
    ----------
    name : str
        The model's name, as `build` takes it.
    path : path-like
        A file as `load_weights` takes it.

    Raises
    ------
    FileNotFoundError
        Where there is no such file.
    ValueError
        Where it is damaged, or has the weights of another model.
    """
    states, header = read_tensors(path)
    if HEADER not in header:
        module = build(name)
        fit_weights(module, weights_in(path, states, module))
        return module.eval()
    checkpoint = _checkpoint(Path(path), states, header)
    if checkpoint.metadata["model"] != name:
        raise ValueError(f"{path} holds {checkpoint.metadata['model']}, not {name}; name the model that it holds")
    return model_of(checkpoint).eval()


def model_of(checkpoint: Checkpoint) -> nn.Module:
    """The model in a checkpoint."""
    name, options = checkpoint.metadata["model"], checkpoint.metadata["options"]
    # The first model has no memory: the options may ask for any size, the file's tensors cannot.
    try:
        with torch.device("meta"):
            empty = build(name, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{checkpoint.path} has options that no model takes: {error}") from error
    _check_fits(empty, checkpoint)
    module = build(name, **options)
    fit_weights(module, checkpoint.weights)
    return module


def _check_fits(module: nn.Module, checkpoint: Checkpoint) -> None:
    reason = unfit(module, checkpoint.weights)
    if reason:
        raise ValueError(
            f"{checkpoint.path} holds {checkpoint.model}, which does not fit {reason}; build the model that it holds, "
            "or take another checkpoint"
        )


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The content of a file, checked except for whether it fits a module."""
    return _checkpoint(Path(path), *read_tensors(path))


def _checkpoint(path: Path, states: States, header: Mapping[str, str]) -> Checkpoint:
    if HEADER not in header:
        raise ValueError(
            f"{path} was not saved by jacsparse, so it does not say which model it holds; build the model and load the "
            "file with jacsparse.models.load_weights"
        )
    try:
        metadata = json.loads(header[HEADER])
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
    (tensors,) = states.values()
    state = {key.removeprefix(_STATE): value for key, value in tensors.items() if key.startswith(_STATE)}
    weights = {key: value for key, value in tensors.items() if not key.startswith(_STATE)}
    return Checkpoint(path, metadata, weights, state)
