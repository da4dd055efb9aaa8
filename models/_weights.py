"""Weights of any origin: the tensors of a file, and whether they fit a module. Nothing in a file is executed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import nn
from torch.nn.utils import prune

from jacsparse._modules import refresh_weights

from ._pruning import mask_attention
from ._registry import describe, name_of

__all__ = ["fit_weights", "masked", "read_tensors", "unfit", "unwrapped"]

#: Of files that torch.save writes; others are safetensors.
_PYTORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar")
#: Where training scripts keep a state dict among other things.
_NESTED = ("state_dict", "model_state_dict", "model", "module", "net")
#: What DistributedDataParallel and torch.compile put before each name.
_WRAPPERS = ("module.", "_orig_mod.")
_COUNTER = "num_batches_tracked"
#: What a module with ``get_extra_state`` has in its state dict.
_EXTRA = "_extra_state"


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], Mapping[str, str]]:
    """The tensors of a file by their names, and the metadata of a safetensors file.

    A PyTorch file holds a state dict, or one among other plain values.

    Raises
    ------
    FileNotFoundError
        Where there is no such file.
    ValueError
        Where it is damaged, or holds anything that would have to be executed, or no state dict.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}; make one with jacsparse train --out {path}")
    return (_unpickled(path), {}) if path.suffix in _PYTORCH else _safetensors(path)


def _safetensors(path: Path) -> tuple[dict[str, torch.Tensor], Mapping[str, str]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            # Copies: the file may change under a memory map.
            return {key: file.get_tensor(key).clone() for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(
            f"{path} cannot be read as a checkpoint ({error}); it is damaged or no safetensors file: "
            "make it again with jacsparse train, or give a PyTorch file one of the suffixes " + ", ".join(_PYTORCH)
        ) from error


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # What torch.load raises of a damaged file shares no base class.
        raise ValueError(
            f"{path} cannot be read as a state dict ({type(error).__name__}); it is damaged, or holds objects that "
            "would have to be executed: save the weights alone, torch.save(model.state_dict(), path)"
        ) from error
    for state in (content, *(content.get(name) for name in _NESTED if isinstance(content, dict))):
        tensors = _tensors(state) if isinstance(state, dict) else {}
        if tensors and all(isinstance(value, torch.Tensor) for value in tensors.values()):
            _check_plain(path, tensors)
            return {name: value.detach() for name, value in tensors.items()}
    held = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
    raise ValueError(
        f"{path} holds {held or 'nothing'}; expected a state dict, or one named {', '.join(_NESTED)}: "
        "torch.save(model.state_dict(), path)"
    )


def _tensors(state: Mapping[Any, Any]) -> dict[str, Any]:
    """A state dict without what modules of their own add that is no tensor."""
    return {
        str(name): value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) or not str(name).endswith(_EXTRA)
    }


def _check_plain(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, value in tensors.items():
        if value.layout != torch.strided or value.is_nested or value.is_quantized or value.device.type != "cpu":
            raise ValueError(
                f"{path} holds {name}, which is sparse, nested, quantized or without values; save it as a plain tensor"
            )


def unwrapped(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict without what wrappers put before all names.

    Examples
    --------
    >>> unwrapped({"_orig_mod.module.weight": torch.zeros(1), "_orig_mod.module.bias": torch.zeros(1)}).keys()
    dict_keys(['weight', 'bias'])
    """
    found = dict(weights)
    while prefix := next((p for p in _WRAPPERS if found and all(name.startswith(p) for name in found)), ""):
        found = {name.removeprefix(prefix): value for name, value in found.items()}
    return found


def masked(names: Mapping[str, Any]) -> set[str]:
    """The weights, of those of a state dict, that have masks."""
    stems = (name.removesuffix("_mask") for name in names if name.endswith("_mask"))
    return {stem for stem in stems if f"{stem}_orig" in names}


def unfit(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> str:
    """Why a file's weights are not those of a module; empty where they are.

    Examples
    --------
    >>> unfit(nn.Linear(2, 3, bias=False), {"weight": torch.zeros(3, 4)})
    'Linear: weight is (3, 4), not (3, 2)'
    """
    own = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    found, expected = _plain(weights), _plain(own)
    # Files older than these counters lack them.
    expected = {name: shape for name, shape in expected.items() if name in found or not name.endswith(_COUNTER)}
    wrong = [
        f"{name} is {found.get(name, 'missing')}, not {expected.get(name, 'expected')}"
        for name in (*expected, *(name for name in found if name not in expected))
        if found.get(name) != expected.get(name)
    ]
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name in sorted(masked(weights)):
        mask = weights[f"{name}_mask"]
        if name in weights:
            wrong.append(f"{name} is there twice, as {name}_orig too")
        elif not parameters & {name, f"{name}_orig"}:
            wrong.append(f"{name} has a mask, but is no parameter")
        # Shapes first: an expanded mask takes no room in a file, but here it would.
        elif tuple(mask.shape) != expected.get(name) or not _is_mask(mask):
            wrong.append(f"{name}_mask is {mask.dtype} {tuple(mask.shape)}, not a mask of {name}")
    counters = {name for name, value in own.items() if not value.is_floating_point()}
    wrong += [
        f"{name} is {value.dtype}, not floating"
        for name, value in weights.items()
        if not name.endswith("_mask") and name not in counters and not value.is_floating_point()
    ]
    if not wrong:
        return ""
    known = name_of(module)
    given = type(module).__name__ if known is None else describe(known, vars(module)["options"])
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"{given}: {wrong[0]}{more}"


def _is_mask(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes of a state dict's tensors by the names that they have without masks."""
    pruned = masked(tensors)
    return {
        name.removesuffix("_orig") if name.removesuffix("_orig") in pruned else name: tuple(value.shape)
        for name, value in tensors.items()
        if name.removesuffix("_mask") not in pruned
    }


def fit_weights(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load weights and masks into a module that they fit, whose own masks are given up."""
    before, after = masked(module.state_dict()), masked(weights)
    for path in sorted(before - after):
        prune.remove(*_place(module, path))
    for path in sorted(after - before):
        prune.custom_from_mask(*_place(module, path), mask=weights[f"{path}_mask"])
    mask_attention(module)
    # What else the module has in its state dict is no weight, and stays.
    module.load_state_dict(weights, strict=False)
    for part in module.modules():
        refresh_weights(part)


def _place(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that has a parameter, and its name there."""
    home, _, name = path.rpartition(".")
    return module.get_submodule(home), name
