"""Weights of any origin: the tensors of a file, and whether they fit a module. No code in a file is executed."""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import prune

from ..runtime import read_safetensors
from ..tracing import refresh_weights
from .pruning import mask_attention
from .registry import describe, name_of

#: Suffixes of files that torch.save writes; other files are safetensors.
_PYTORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar")
#: How many keys lead to a state dict at most.
_MOST_KEYS = 8
#: Names of torch.compile, FSDP and activation checkpoints before those of the parts that they wrap.
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
#: Last parts of names that averaging and profiling leave among weights.
_LEFTOVERS = {"n_averaged", "total_ops", "total_params"}
#: What batch normalisation counts; old files lack it.
_COUNTER = "num_batches_tracked"
#: A name, or the name of its dict, that says that a tensor is a mask; and the end of one that is not the weight's.
_SAYS_MASK, _MASK_END = re.compile(r"(^|[._])masks?(\.|$)"), re.compile(r"[._]mask$")
#: Names of a weight that a parametrization computes, and of the mask in it.
_PARAMETRIZED = re.compile(r"\bparametrizations\.([^.]+)\.(original|0\.mask)$")
#: The state dicts of a file by the keys that lead to each, as ``callbacks.ema.``; those of the file itself have none.
States = Mapping[str, Mapping[str, torch.Tensor]]


def read_tensors(path: str | os.PathLike[str]) -> tuple[States, Mapping[str, str]]:
    """The state dicts of a safetensors or PyTorch file, and the metadata of a safetensors file."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name the checkpoint in it")
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}; make one with jacsparse train --out {path}")
    if path.suffix in _PYTORCH:
        return _unpickled(path), {}
    remedy = "make it again with jacsparse train, or give a PyTorch file one of the suffixes " + ", ".join(_PYTORCH)
    tensors, metadata = read_safetensors(path, "checkpoint", remedy)
    return {"": tensors}, metadata


def _unpickled(path: Path) -> States:
    try:
        # What scripts save beside weights: their arguments.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # The errors of torch.load for a damaged file share no base class.
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"{type(error).__name__}: {named[1]}" if named else type(error).__name__
        raise ValueError(
            f"{path} cannot be read as a state dict ({what}); it is damaged, or holds objects that would have to be "
            "executed: save the weights alone, torch.save(model.state_dict(), path)"
        ) from error
    # A file may nest dicts without end, or in circles.
    states, pending, seen = dict[str, Mapping[str, torch.Tensor]](), [(0, "", content)], set[int]()
    for depth, keys, state in pending:
        if isinstance(state, dict) and id(state) not in seen and depth < _MOST_KEYS:
            seen.add(id(state))
            pending += [(depth + 1, f"{keys}{name}.", value) for name, value in state.items()]
            if tensors := _tensors(state):
                states[keys] = {name: value.detach() for name, value in tensors.items()}
    if states:
        return states
    contents = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
    raise ValueError(
        f"{path} holds {contents or 'nothing'}; expected a state dict, by itself or under any name: "
        "torch.save(model.state_dict(), path)"
    )


def _tensors(state: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state dict; what `get_extra_state` returns may be none."""
    return {str(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _check_plain(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, value in tensors.items():
        if value.layout != torch.strided or value.is_nested or value.is_quantized or value.device.type != "cpu":
            raise ValueError(
                f"{path} holds {name}, which is sparse, nested, quantized or without values; save it as a plain tensor"
            )


class _Place(NamedTuple):
    """Where a module's weights stand in a file: the keys of their state dict, and what precedes all names in it."""

    keys: str
    start: str
    state: Mapping[str, torch.Tensor]
    #: How many of the module's weights are there.
    matches: int

    @property
    def prefix(self) -> str:
        return self.keys + self.start


def weights_in(
    path: str | os.PathLike[str],
    states: States,
    module: nn.Module,
    *,
    prefix: str | None = None,
    masks: str | os.PathLike[str] | None = None,
) -> dict[str, torch.Tensor]:
    """A module's weights and masks in a file's state dicts, by the module's names.

    Raises
    ------
    ValueError
        Where there are none that fit, or several, or others beside them.
    """
    expected = _shapes(_tensors(module.state_dict()))
    outside = {} if masks is None else _masks_in(read_tensors(masks)[0], expected, explicit=True)
    if masks is not None and not outside:
        name = next(iter(expected), "weight")
        raise ValueError(f"{masks} has no mask of {_described(module)}; name masks as their weights, as {name}_mask")
    plain = {keys: _without_wrappers(state, expected, tuple(outside)) for keys, state in states.items()}
    place = _chosen(path, plain, module, prefix)
    weights = {
        name.removeprefix(place.start): value
        for name, value in place.state.items()
        if name.startswith(place.start) and not _is_leftover(name, expected)
    }
    for name, mask in outside.items():
        if name in weights:
            weights[f"{name}_orig"] = weights.pop(name)
        weights[f"{name}_mask"] = mask
    _check_plain(Path(path), weights)
    if reason := unfit(module, weights):
        remedy = "build the model that it holds, or take another file"
        if any("parametrizations." in name for name in weights):
            remedy = (
                "its weights are parametrised: fold that in before saving, by a sparsifier's squash_mask or "
                "torch.nn.utils.parametrize.remove_parametrizations, or load masks beside them by masks=FILE"
            )
        where = f", under the prefix {place.prefix!r}," if place.prefix else ""
        raise ValueError(f"{path}{where} does not fit {reason}; {remedy}")
    if not outside and (beside := _masks_in({k: state for k, state in plain.items() if k != place.keys}, expected)):
        raise ValueError(
            f"{path} has masks beside the weights, as that of {next(iter(beside))}; load them too, by "
            f"{_call(path, masks=str(path))}"
        )
    return weights


def _chosen(path: str | os.PathLike[str], states: States, module: nn.Module, prefix: str | None) -> _Place:
    """Where a module's weights are: under the prefix, or at the one place that has them all and no others."""
    expected, what = _shapes(_tensors(module.state_dict())), _described(module)
    needed = [name for name in expected if not name.endswith(_COUNTER)]
    places = [
        _Place(keys, start, state, count)
        for keys, state in states.items()
        for start, count in _prefixes(_shapes(state), needed).items()
    ]
    fullest = max((each.matches for each in places), default=0)
    best = [each for each in places if each.matches == fullest]
    shown = ", ".join(repr(each.prefix) for each in best)
    if prefix is not None:
        dotted = prefix if not prefix or prefix.endswith(".") else f"{prefix}."
        for place in places:
            if place.prefix == dotted:
                return place
        raise ValueError(f"{path} has no weights of {what} under the prefix {prefix!r}, but under {shown or 'none'}")
    if not best or fullest < len(needed):
        # What is missing there is said by who compares the shapes.
        return best[0] if best else _Place(*next((keys, "", state, 0) for keys, state in states.items()))
    if len(best) > 1:
        raise ValueError(
            f"{path} has the weights of {what} under several prefixes, {shown}; say under which, as in "
            f"{_call(path, prefix=best[-1].prefix)}"
        )
    (place,) = best
    others = [name for name in place.state if not name.startswith(place.start) and not _is_leftover(name, expected)]
    if others:
        raise ValueError(
            f"{path} has the weights of {what} under the prefix {place.prefix!r}, and others beside them, as "
            f"{others[0]}; leave these out by {_call(path, prefix=place.prefix)}"
        )
    return place


def _call(path: str | os.PathLike[str], **option: str) -> str:
    ((name, value),) = option.items()
    return f"jacsparse.models.load_weights(model, {str(path)!r}, {name}={value!r})"


def _prefixes(names: Iterable[str], expected: Iterable[str]) -> Counter[str]:
    """How many of the expected names are there behind each prefix that ends at a dot.

    Examples
    --------
    >>> _prefixes(["net.0.weight", "net.0.bias", "loss.weight"], ["0.weight", "0.bias"])
    Counter({'net.': 2})
    """
    expected = set(expected)
    ends = ((name, [0, *(dot.end() for dot in re.finditer(r"\.", name))]) for name in names)
    return Counter(name[:end] for name, starts in ends for end in starts if name[end:] in expected)


def _is_leftover(name: str, expected: Iterable[str]) -> bool:
    return name not in expected and name.rpartition(".")[2] in _LEFTOVERS


def _without_wrappers(
    state: Mapping[str, torch.Tensor], expected: Iterable[str], masked_elsewhere: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """A state dict whose names leave out wrappers, and those of masking parametrizations are as pruning's.

    The weight behind a parametrization whose mask is in a file of its own is a weight like any other.
    """
    is_wrapped = any(map(_WRAPPERS.search, expected))
    tensors = {name if is_wrapped else _WRAPPERS.sub("", name): value for name, value in state.items()}
    if any("parametrizations." in name for name in expected):
        return tensors
    for name in list(tensors):
        if match := _PARAMETRIZED.search(name):
            weight, part = match.groups()
            if part != "original" or f"{name.removesuffix('original')}0.mask" in state:
                end = f"{weight}_orig" if part == "original" else f"{weight}_mask"
            elif (name[: match.start()] + weight).endswith(masked_elsewhere):
                end = weight
            else:
                continue
            tensors[name[: match.start()] + end] = tensors.pop(name)
    return tensors


def _masks_in(states: States, expected: Iterable[str], *, explicit: bool = False) -> dict[str, torch.Tensor]:
    """The masks of a module's weights, by the names of these.

    In a file of masks, which is `explicit`, names need not say that they are masks; elsewhere pairs of
    ``weight_orig`` and ``weight_mask`` belong to other weights.
    """
    tensors = {
        keys + name: value
        for keys, state in states.items()
        for name, value in state.items()
        if explicit or f"{name.removesuffix('_mask')}_orig" not in state
    }
    named = [name for name in tensors if _SAYS_MASK.search(name)] or (list(tensors) if explicit else [])
    masks = {_MASK_END.sub("", name): tensors[name] for name in named}
    for prefix, _ in _prefixes(masks, expected).most_common(1):
        return {name.removeprefix(prefix): masks[name] for name in masks if name.removeprefix(prefix) in expected}
    return {}


def masked(state: Mapping[str, Any]) -> set[str]:
    """The names of the weights in a state dict that have masks."""
    stems = (name.removesuffix("_mask") for name in state if name.endswith("_mask"))
    return {stem for stem in stems if f"{stem}_orig" in state}


def unfit(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> str:
    """The reason why weights do not fit a module, as ``Linear: weight is (3, 4), not (3, 2)``; empty where they do."""
    state = _tensors(module.state_dict())
    shapes, expected = _shapes(weights), _shapes(state)
    for name in [name for name in expected if name.endswith(_COUNTER) and name not in shapes]:
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
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"{_described(module)}: {wrong[0]}{more}"


def _described(module: nn.Module) -> str:
    model = name_of(module)
    return type(module).__name__ if model is None else describe(model, vars(module)["options"])


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
