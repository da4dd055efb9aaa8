"""Checkpoints: safetensors files, which cannot execute code, each checked before anything in it is used."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from jacsparse.patterns._files import check_writable, replacing
from torch import nn
from torch.nn.utils import prune

from jacsparse._modules import refresh_weights

from ._checks import check_count, check_one_of
from ._pruning import pruned_fraction
from ._registry import MODELS, build, describe, name_of

__all__ = ["Checkpoint", "load_checkpoint", "load_weights", "model_of", "read_checkpoint", "save_checkpoint"]

_FORMAT = 1
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
        safetensors.torch.save_file(tensors, temporary, metadata={"jacsparse": json.dumps(about)})


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

    Returns
    -------
    dict
        What is known about the model, as `load_checkpoint` has it.

    Raises
    ------
    FileNotFoundError
        Where there is no such file.
    ValueError
        Where it is damaged, no checkpoint, or of another architecture; the module is left as it was.
    """
    checkpoint = read_checkpoint(path)
    _load(module, checkpoint)
    return checkpoint.metadata


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


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The content of a file, checked but for whether it fits a module.

    Raises
    ------
    FileNotFoundError
        Where there is no such file.
    ValueError
        Where it is damaged, or no checkpoint.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}; make one with jacsparse train --out {path}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            # Copies: the file may change under a memory map.
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(
            f"{path} cannot be read as a checkpoint ({error}); it is damaged or no safetensors file: "
            "make it again with jacsparse train"
        ) from error
    state = {key.removeprefix(_STATE): value for key, value in tensors.items() if key.startswith(_STATE)}
    weights = {key: value for key, value in tensors.items() if not key.startswith(_STATE)}
    return Checkpoint(path, _metadata(path, header), weights, state)


def _metadata(path: Path, header: Mapping[str, str]) -> dict[str, Any]:
    if "jacsparse" not in header:
        raise ValueError(
            f"{path} was not saved by jacsparse, so it does not say which model it holds; build the model and load the "
            "file with safetensors.torch.load_model"
        )
    try:
        metadata = json.loads(header["jacsparse"])
        if metadata["format"] != _FORMAT:
            raise ValueError(f"its format is {metadata['format']!r}, this jacsparse reads {_FORMAT}")
        check_one_of("model", metadata["model"], MODELS)
        for option in ("num_classes", "in_channels"):
            check_count(option, metadata["options"][option])
        metadata["pruned"] = float(metadata["pruned"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} has metadata that cannot be used ({error}); it is damaged or of another version of "
            "jacsparse: make it again with jacsparse train"
        ) from error
    return metadata


def _masked(names: Mapping[str, Any]) -> set[str]:
    """The weights, of those of a state dict, that have masks."""
    return {name.removesuffix("_mask") for name in names if name.endswith("_mask")}


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes of a state dict's tensors by the names that they have without masks."""
    masked = _masked(tensors)
    return {
        name.removesuffix("_orig") if name.removesuffix("_orig") in masked else name: tuple(value.shape)
        for name, value in tensors.items()
        if name.removesuffix("_mask") not in masked
    }


def _check_fits(module: nn.Module, checkpoint: Checkpoint) -> None:
    found, expected = _plain(checkpoint.weights), _plain(module.state_dict())
    wrong = [
        f"{name} is {found.get(name, 'missing')}, not {expected.get(name, 'expected')}"
        for name in (*expected, *(name for name in found if name not in expected))
        if found.get(name) != expected.get(name)
    ]
    for name in sorted(_masked(checkpoint.weights)):
        mask = checkpoint.weights[f"{name}_mask"]
        if tuple(mask.shape) != found.get(name) or mask.dtype != torch.bool:
            wrong.append(f"{name}_mask is {mask.dtype} {tuple(mask.shape)}, not a mask of {name}")
    counters = {name for name, value in module.state_dict().items() if not value.is_floating_point()}
    wrong += [
        f"{name} is {value.dtype}, not floating"
        for name, value in checkpoint.weights.items()
        if not name.endswith("_mask") and name not in counters and not value.is_floating_point()
    ]
    if not wrong:
        return
    known = name_of(module)
    given = type(module).__name__ if known is None else describe(known, vars(module)["options"])
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    raise ValueError(
        f"{checkpoint.path} holds {checkpoint.model}, which does not fit {given}: {wrong[0]}{more}; "
        "build the model that it holds, or take another checkpoint"
    )


def _load(module: nn.Module, checkpoint: Checkpoint) -> None:
    _check_fits(module, checkpoint)
    before, after = _masked(module.state_dict()), _masked(checkpoint.weights)
    for path in sorted(before - after):
        prune.remove(*_place(module, path))
    for path in sorted(after - before):
        prune.custom_from_mask(*_place(module, path), mask=checkpoint.weights[f"{path}_mask"])
    module.load_state_dict(checkpoint.weights)
    for part in module.modules():
        refresh_weights(part)


def _place(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that has a parameter, and its name there."""
    home, _, name = path.rpartition(".")
    return module.get_submodule(home), name
