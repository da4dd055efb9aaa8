"""Weights of any origin: the tensors of a file, and whether they fit a module. No code in a file is executed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import nn
from torch.nn.utils import prune

from ..tracing import refresh_weights
from .pruning import mask_attention
from .registry import describe, name_of

#: Suffixes of files that torch.save writes; other files are safetensors.
_PYTORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar")
#: Keys under which training scripts store a state dict among other values.
_NESTED = ("state_dict", "model_state_dict", "model", "module", "net")
#: Prefixes that DistributedDataParallel and torch.compile put before each name.
_WRAPPERS = ("module.", "_orig_mod.")


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], Mapping[str, str]]:
    """The tensors of a safetensors or PyTorch file by their names, and the metadata of a safetensors file."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name the checkpoint in it")
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}; make one with jacsparse train --out {path}")
    return (_unpickled(path), {}) if path.suffix in _PYTORCH else _safetensors(path)


def _safetensors(path: Path) -> tuple[dict[str, torch.Tensor], Mapping[str, str]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            # The tensors are copied, since the file may change under a memory map.
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
        # The errors of torch.load for a damaged file share no base class.
        raise ValueError(
            f"{path} cannot be read as a state dict ({type(error).__name__}); it is damaged, or holds objects that "
            "would have to be executed: save the weights alone, torch.save(model.state_dict(), path)"
        ) from error
    for state in (content, *(content.get(name) for name in _NESTED if isinstance(content, dict))):
        tensors = _without_extra_state(state) if isinstance(state, dict) else {}
        if tensors and all(isinstance(value, torch.Tensor) for value in tensors.values()):
            _check_plain(path, tensors)
            return {name: value.detach() for name, value in tensors.items()}
    contents = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
    raise ValueError(
        f"{path} holds {contents or 'nothing'}; expected a state dict, or one named {', '.join(_NESTED)}: "
        "torch.save(model.state_dict(), path)"
    )


def _without_extra_state(state: Mapping[Any, Any]) -> dict[str, Any]:
    """A state dict without the values of ``get_extra_state`` that are no tensors."""
    return {
        str(name): value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) or not str(name).endswith("_extra_state")
    }


def _check_plain(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, value in tensors.items():
        if value.layout != torch.strided or value.is_nested or value.is_quantized or value.device.type != "cpu":
            raise ValueError(
                f"{path} holds {name}, which is sparse, nested, quantized or without values; save it as a plain tensor"
            )


def unwrapped(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict without the prefixes of wrappers: ``_orig_mod.module.weight`` becomes ``weight``."""
    tensors = dict(weights)
    while prefix := next((p for p in _WRAPPERS if tensors and all(name.startswith(p) for name in tensors)), ""):
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors


def masked(state: Mapping[str, Any]) -> set[str]:
    """The names of the weights in a state dict that have masks."""
    stems = (name.removesuffix("_mask") for name in state if name.endswith("_mask"))
    return {stem for stem in stems if f"{stem}_orig" in state}


def unfit(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> str:
    """The reason why weights do not fit a module, as ``Linear: weight is (3, 4), not (3, 2)``; empty where they do."""
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    shapes, expected = _shapes(weights), _shapes(state)
    # Old files lack these counters.
    for name in [name for name in expected if name.endswith("num_batches_tracked") and name not in shapes]:
        del expected[name]
    wrong = [
        f"{name} is {shapes.get(name, 'missing')}, not {expected.get(name, 'expected')}"
        for name in {**expected, **shapes}
        if shapes.get(name) != expected.get(name)
    ]
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name in sorted(masked(weights)):
        mask = weights[f"{name}_mask"]
        if name in weights:
            wrong.append(f"{name} is there twice, as {name}_orig too")
        elif not parameters & {name, f"{name}_orig"}:
            wrong.append(f"{name} has a mask, but is no parameter")
        # The shape is checked first, since an expanded mask is small in a file, but not in this comparison.
        elif tuple(mask.shape) != expected.get(name) or not _is_mask(mask):
            wrong.append(f"{name}_mask is {mask.dtype} {tuple(mask.shape)}, not a mask of {name}")
    counters = {name for name, value in state.items() if not value.is_floating_point()}
    wrong += [
        f"{name} is {value.dtype}, not floating"
        for name, value in weights.items()
        if not name.endswith("_mask") and name not in counters and not value.is_floating_point()
    ]
    if not wrong:
        return ""
    model = name_of(module)
    shown = type(module).__name__ if model is None else describe(model, vars(module)["options"])
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"{shown}: {wrong[0]}{more}"


def _is_mask(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """The shapes of a state dict's tensors, by their names without masks."""
    pruned = masked(tensors)
    return {
        name.removesuffix("_orig") if name.removesuffix("_orig") in pruned else name: tuple(value.shape)
        for name, value in tensors.items()
        if name.removesuffix("_mask") not in pruned
    }


def fit_weights(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load weights and masks into a module that they fit; they replace its masks."""
    before, after = masked(module.state_dict()), masked(weights)
    for path in sorted(before - after):
        prune.remove(*_place(module, path))
    for path in sorted(after - before):
        prune.custom_from_mask(*_place(module, path), mask=weights[f"{path}_mask"])
    mask_attention(module)
    # Other values in the module's state dict are no weights, and stay.
    module.load_state_dict(weights, strict=False)
    for part in module.modules():
        refresh_weights(part)


def _place(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that has a parameter, and its name there."""
    home, _, name = path.rpartition(".")
    return module.get_submodule(home), name
