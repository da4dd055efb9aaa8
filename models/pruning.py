"""Magnitude pruning: the smallest weights are held at zero by masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

from ..tracing import check_initialised, refresh_weights, set_weights
from .arguments import check_number, check_one_of

SCOPES = ("global", "layer")


def prunable(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The convolution and linear modules in `module`, whose weights can be pruned, with their paths.

    The input projections of ``torch.nn.MultiheadAttention`` are parameters without a module, and so are left out.

    Examples
    --------
    >>> [path for path, _ in prunable(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Linear(4, 2)))]
    ['0', '2']
    """
    kinds = (nn.modules.conv._ConvNd, nn.Linear)
    return [(path, part) for path, part in module.named_modules() if isinstance(part, kinds)]


def prune_weights(module: nn.Module, fraction: float, scope: str = "layer", *, rescale: bool = False) -> None:
    """Prune the smallest convolution and linear weights in magnitude, in place.

    Masks of ``torch.nn.utils.prune`` hold pruned weights at zero, in training too: the module's ``weight`` becomes
    ``weight_orig`` times ``weight_mask``. Biases do not change.

    Parameters
    ----------
    module : Module
        The module to prune.
    fraction : float
        Fraction of all weights that is then pruned, in [0, 1). It includes weights pruned before, which stay pruned.
    scope : {"layer", "global"}
        Whether to prune that fraction of each layer, or of all layers together.
    rescale : bool
        Whether to multiply the remaining weights of each layer so that the layer keeps its norm. Otherwise the signals
        of a deep network without normalisation may vanish for good: of normally distributed weights the largest 3 %
        have 0.44 of the norm, and eleven such layers in a row pass on 0.0001 of it.

    Raises
    ------
    ValueError
        Where the fraction is outside [0, 1), where more weights are pruned already, or where nothing can be pruned.

    Notes
    -----
    See, Luong and Manning (2016) call the scopes class-uniform (``layer``) and class-blind (``global``). The thesis
    prunes 97 % of VGG-11 (section 4.3). Neither rescales.

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
    names = [path or type(part).__name__ for path, part in layers]
    for name, (_, part) in zip(names, layers, strict=True):
        _check_weight(name, part)
    magnitudes = [_magnitudes(part) for _, part in layers]
    if scope == "global":
        masks = list(_mask(torch.cat(magnitudes), fraction, "the module").split([len(values) for values in magnitudes]))
    else:
        masks = [_mask(values, fraction, name) for name, values in zip(names, magnitudes, strict=True)]
    for (_, part), mask in zip(layers, masks, strict=True):
        _apply_mask(part, mask, rescale)
    mask_attention(module)


def mask_attention(module: nn.Module) -> None:
    """Let each attention set the masked weight of its output projection before it runs."""
    # Attention reads that weight, and never calls the projection, whose hook would set it.
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
    weight = layer._parameters.get("weight", layer._parameters.get("weight_orig"))
    if weight is None:
        raise ValueError(
            f"{path}.weight is computed from other parameters and cannot be masked; remove its parametrisation first"
        )
    if bool(weight.isnan().any()):
        raise ValueError(f"{path}.weight holds NaN, which has no magnitude; start from weights that are numbers")


def _magnitudes(layer: Any) -> torch.Tensor:
    """The magnitudes of a layer's weights, flat; -1 where a weight is pruned."""
    refresh_weights(layer)
    values = layer.weight.detach().abs().flatten()
    mask = getattr(layer, "weight_mask", None)
    return values if mask is None else values.masked_fill(mask.flatten() == 0, -1)


def _mask(magnitudes: torch.Tensor, fraction: float, name: str) -> torch.Tensor:
    """The mask that prunes the smallest weights, as many as ``prune.l1_unstructured`` prunes."""
    count = round(fraction * len(magnitudes))
    before = int((magnitudes < 0).sum())
    if before > count:
        raise ValueError(
            f"the fraction to prune is {fraction}, but of {name}, {before / len(magnitudes):.6g} is pruned already and "
            "stays so; ask for at least that, or start from the unpruned weights"
        )
    mask = torch.ones_like(magnitudes, dtype=torch.bool)
    mask[torch.topk(magnitudes, count, largest=False).indices] = False
    return mask


@torch.no_grad()
def _apply_mask(layer: Any, flat_mask: torch.Tensor, rescale: bool) -> None:
    norm = layer.weight.norm()
    mask = flat_mask.reshape(layer.weight.shape)
    if hasattr(layer, "weight_mask"):
        # An optimiser may have the parameter, so that it must stay the same object.
        layer.weight_mask.copy_(mask)
        refresh_weights(layer)
    else:
        prune.custom_from_mask(layer, "weight", mask)
    pruned_norm = layer.weight.norm()
    if rescale and pruned_norm > 0:
        layer.weight_orig.mul_(norm / pruned_norm)
        refresh_weights(layer)
