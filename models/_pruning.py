"""Magnitude pruning: the smallest weights are held at zero by masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

from jacsparse._modules import check_initialised, refresh_weights, set_weights

from ._checks import check_number, check_one_of

__all__ = ["SCOPES", "mask_attention", "prunable", "prune_weights", "pruned_fraction"]

SCOPES = ("global", "layer")


def prunable(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The convolution and linear modules in `module`, with their paths: those whose weights are pruned.

    The input projections of ``torch.nn.MultiheadAttention`` are parameters without a module, and are not among them.

    Examples
    --------
    >>> [path for path, _ in prunable(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Linear(4, 2)))]
    ['0', '2']
    """
    kinds = (nn.modules.conv._ConvNd, nn.Linear)
    return [(path, part) for path, part in module.named_modules() if isinstance(part, kinds)]


def prune_weights(module: nn.Module, fraction: float, scope: str = "layer", *, rescale: bool = False) -> None:
    """Prune that fraction of all convolution and linear weights, the smallest in magnitude, in place.

    Pruned weights are held at zero by masks of ``torch.nn.utils.prune``, through training too: the module's ``weight``
    becomes ``weight_orig`` times ``weight_mask``. Biases are left alone.

    Parameters
    ----------
    module : Module
        What to prune.
    fraction : float
        Of all weights, those that were pruned before included, in [0, 1). What is pruned stays pruned.
    scope : {"layer", "global"}
        Whether each layer loses that fraction of its weights, or all of them together.
    rescale : bool
        Whether the weights that are left are multiplied, layer by layer, so that each layer keeps its norm. A deep
        network without normalisation may pass on next to nothing otherwise, and then not learn it again: of normally
        distributed weights the largest 3 % hold 0.44 of the norm, and eleven such layers in a row 0.0001.

    Raises
    ------
    ValueError
        Where the fraction is outside [0, 1), or more weights are pruned already; where there is nothing to prune.

    Notes
    -----
    See, Luong and Manning (2016): class-uniform for ``layer``, class-blind for ``global``. The thesis prunes 97 % of
    VGG-11 (section 4.3). Neither rescales.

    Examples
    --------
    >>> module = nn.Linear(2, 2)
    >>> with torch.no_grad():
    ...     _ = module.weight.copy_(torch.tensor([[1.0, -4.0], [3.0, 2.0]]))
    >>> prune_weights(module, 0.5)
    >>> module.weight.tolist()
    [[0.0, -4.0], [3.0, 0.0]]
    """
    check_number("the fraction to prune", fraction, 0, 1)
    check_one_of("scope", scope, SCOPES)
    check_initialised(module)
    layers = prunable(module)
    if not layers:
        raise ValueError(
            f"{type(module).__name__} has no convolution and no linear layer, so there is nothing to prune"
        )
    for path, part in layers:
        _check_weight(path or type(part).__name__, part)
    magnitudes = [_magnitudes(part) for _, part in layers]
    if scope == "global":
        kept = _kept(torch.cat(magnitudes), fraction, "the module").split([len(values) for values in magnitudes])
    else:
        kept = tuple(
            _kept(values, fraction, path or type(part).__name__)
            for (path, part), values in zip(layers, magnitudes, strict=True)
        )
    for (_, part), mask in zip(layers, kept, strict=True):
        _mask(part, mask, rescale)
    mask_attention(module)


def mask_attention(module: nn.Module) -> None:
    """Let each attention set the masked weight of its output projection before it runs.

    It reads that weight and never calls the projection, whose own hook would set it.
    """
    for part in module.modules():
        if isinstance(part, nn.MultiheadAttention) and _set_projection not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(_set_projection)


def _set_projection(attention: nn.MultiheadAttention, _: Any) -> None:
    set_weights(attention.out_proj)


def pruned_fraction(module: nn.Module) -> float:
    """The share of all convolution and linear weights that masks hold at zero.

    Examples
    --------
    >>> module = nn.Linear(10, 10)
    >>> prune_weights(module, 0.25)
    >>> pruned_fraction(module)
    0.25
    """
    masks = [_magnitudes(part) < 0 for _, part in prunable(module)]
    return sum(int(mask.sum()) for mask in masks) / max(1, sum(len(mask) for mask in masks))


def _check_weight(path: str, layer: nn.Module) -> None:
    own = layer._parameters.get("weight", layer._parameters.get("weight_orig"))
    if own is None:
        raise ValueError(
            f"{path}.weight is computed from other parameters and cannot be masked; remove its parametrisation first"
        )
    if bool(own.isnan().any()):
        raise ValueError(f"{path}.weight holds NaN, which has no magnitude; start from weights that are numbers")


def _magnitudes(layer: Any) -> torch.Tensor:
    """Of a layer's weights, flat; -1 where a weight is pruned."""
    refresh_weights(layer)
    values = layer.weight.detach().abs().flatten()
    mask = getattr(layer, "weight_mask", None)
    return values if mask is None else values.masked_fill(mask.flatten() == 0, -1)


def _kept(magnitudes: torch.Tensor, fraction: float, name: str) -> torch.Tensor:
    """Which weights stay, where the smallest go; as many go as ``prune.l1_unstructured`` takes."""
    count = round(fraction * len(magnitudes))
    before = int((magnitudes < 0).sum())
    if before > count:
        raise ValueError(
            f"the fraction to prune is {fraction}, but of {name}, {before / len(magnitudes):.6g} is pruned already and "
            "stays so; ask for at least that, or start from the unpruned weights"
        )
    kept = torch.ones_like(magnitudes, dtype=torch.bool)
    kept[torch.topk(magnitudes, count, largest=False).indices] = False
    return kept


@torch.no_grad()
def _mask(layer: Any, kept: torch.Tensor, rescale: bool) -> None:
    norm = layer.weight.norm()
    mask = kept.reshape(layer.weight.shape)
    if hasattr(layer, "weight_mask"):
        # The parameter stays the one that an optimiser knows.
        layer.weight_mask.copy_(mask)
        refresh_weights(layer)
    else:
        prune.custom_from_mask(layer, "weight", mask)
    left = layer.weight.norm()
    if rescale and left > 0:
        layer.weight_orig.mul_(norm / left)
        refresh_weights(layer)
