"""Cutting a model into consecutive parts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from operator import index
from typing import SupportsIndex, TypeGuard

import torch
from torch import nn

from ..runtime import a_type, run_times
from .modes import in_eval_mode
from .stretches import refuse_hooks, stretches_of


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers between which a model can be cut, by path.

    Those of an ``nn.Sequential`` are its children, and theirs where they are ``nn.Sequential`` too. Those of another
    model are what lies between the places where one tensor carries everything, as `stretches_of` finds them.

    Raises
    ------
    TypeError
        Where the model is no module, or cannot be traced, or a container has hooks, which its parts would not call.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is {a_type(model)}; expected an nn.Module")
    return dict(_layers(model, "")) if _is_container(model) else stretches_of(model)


def partition(
    model: nn.Module, modules: SupportsIndex | Sequence[int | str], *, example: torch.Tensor | None = None
) -> list[nn.Sequential]:
    """Cut a model into parts, each an ``nn.Sequential`` of the model's own layers, or of stretches that call them.

    Parameters
    ----------
    model : Module
        An ``nn.Sequential``, whose children may be ``nn.Sequential`` in turn; or any module whose forward pass
        ``torch.fx`` can trace, as a residual network's.
    modules : int or sequence of int or str
        The number of parts, which are then of equal cost as far as can be; or the first layer of each part but the
        first, by its path or by its place among all layers.
    example : Tensor, (batch, ...), optional
        An input on which the layers' costs are measured, forward and backward. Without one a layer costs as many units
        as it has weight matrices.

    Raises
    ------
    TypeError, ValueError
        Where the model cannot be cut there, has fewer layers than parts, or two parts share a parameter or buffer.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))
    >>> [len(part) for part in partition(model, 3)]
    [2, 2, 1]
    >>> [len(part) for part in partition(model, ["2"])]
    [2, 3]
    """
    layers = layers_of(model)
    if isinstance(modules, SupportsIndex):
        count = index(modules)
        if not 1 <= count <= len(layers) or isinstance(modules, bool):
            raise ValueError(
                f"modules is {modules}; expected 1 to {len(layers)}, as many as the model has layers: {_listed(layers)}"
            )
        units = [float(sum(weight.ndim > 1 for weight in layer.parameters())) for layer in layers.values()]
        if example is not None:
            units = measured_costs(layers, example)
        starts = _balanced(units, count)
    else:
        starts = _starts(layers, modules)
    parts = [
        nn.Sequential(*list(layers.values())[begin:end]) for begin, end in itertools.pairwise([0, *starts, len(layers)])
    ]
    _check_shared(parts)
    return parts


def measured_costs(layers: dict[str, nn.Module], example: torch.Tensor) -> list[float]:
    """Seconds of each layer's forward and backward pass on an input, in eval mode: no layer changes."""
    costs, x = [], example.detach()
    for layer in layers.values():
        with in_eval_mode(layer):
            (time,) = run_times(functools.partial(_there_and_back, layer, x))
            costs.append(time.fastest)
            x = _there_and_back(layer, x)
    return costs


def _there_and_back(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_(x.is_floating_point())
    with torch.enable_grad():
        y: torch.Tensor = layer(leaf.clone())
    leaves = [value for value in (leaf, *layer.parameters()) if value.requires_grad]
    if y.requires_grad:
        torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)
    return y.detach()


def _is_container(module: nn.Module) -> TypeGuard[nn.Sequential]:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _layers(container: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    refuse_hooks(container, prefix[:-1])
    layers = []
    # A child that occurs twice is two layers, which named_children would not tell.
    for name, child in container._modules.items():
        assert child is not None
        path = prefix + name
        layers += _layers(child, f"{path}.") if _is_container(child) and len(child) else [(path, child)]
    return layers


def _balanced(costs: Sequence[float], parts: int) -> list[int]:
    """The first layer of each part but the first, so that the most expensive part is as cheap as can be."""
    sums = list(itertools.accumulate(costs, initial=0.0))

    @functools.cache
    def best(begin: int, parts: int) -> tuple[float, tuple[int, ...]]:
        if parts == 1:
            return sums[-1] - sums[begin], ()
        options = []
        for end in range(begin + 1, len(costs) - parts + 2):
            rest, starts = best(end, parts - 1)
            first = sums[end] - sums[begin]
            # Of equal ones that with the cheapest first part, which ends with the layers that cost nothing.
            options.append((max(first, rest), first, -end, starts))
        cost, _, end, starts = min(options)
        return cost, (-end, *starts)

    return list(best(0, parts)[1])


def _starts(layers: dict[str, nn.Module], splits: Sequence[int | str]) -> list[int]:
    """The places of layers by their paths or numbers, in order."""
    if isinstance(splits, str) or not isinstance(splits, Sequence) or not splits:
        raise TypeError(f"modules is {splits!r}; expected a number of parts, or the first layer of each but the first")
    starts = [_place(layers, split) for split in splits]
    if starts != sorted(set(starts)) or 0 in starts:
        raise ValueError(
            f"modules is {list(splits)!r}; expected different layers in the order of the model, and not its first one"
        )
    return starts


def _place(layers: dict[str, nn.Module], split: int | str) -> int:
    paths = list(layers)
    if isinstance(split, str):
        for place, path in enumerate(paths):
            if path == split or path.startswith(f"{split}."):
                return place
            if split.startswith(f"{path}."):
                raise ValueError(
                    f"{split!r} is inside {path!r}, where several tensors may pass; split between the layers "
                    f"{_listed(layers)}"
                )
        raise ValueError(f"there is no layer {split!r}; the layers are {_listed(layers)}")
    try:
        place = index(split)
    except TypeError:
        raise TypeError(f"a split is {split!r}; expected the path of a layer, or its place") from None
    if not 0 < place < len(paths):
        raise ValueError(f"a split is {place}; expected 1 to {len(paths) - 1}, a layer's place: {_listed(layers)}")
    return place


def _check_shared(parts: Sequence[nn.Module]) -> None:
    """Raise ValueError where two parts share a parameter or buffer: each would change it at another time."""
    homes: dict[int, tuple[int, str]] = {}
    for number, part in enumerate(parts):
        for name, tensor in (*part.named_parameters(), *part.named_buffers()):
            home, first = homes.setdefault(id(tensor), (number, name))
            if home != number:
                raise ValueError(
                    f"parts {home} and {number} share a tensor ({first} and {name} there), and would update it at "
                    "different times; split where they are in one part"
                )


def _listed(layers: dict[str, nn.Module]) -> str:
    paths = list(layers)
    return ", ".join(paths if len(paths) <= 12 else [*paths[:8], "...", *paths[-3:]])
