"""What a frozen model gives, compared with what the model itself gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .outputs import CONSTANTS, leaves_of, plain

_REMEDY = "return tensors in a list, a dict or a dataclass"


def copies_of(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs' values in memory that a model may overwrite."""
    return [each.detach().clone() for each in inputs]


def check_frozen(
    frozen: Callable[..., Any], name: str, model: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> None:
    """Compare a frozen model with the model for other values, and for the first ones again.

    Raises
    ------
    TypeError
        Where something in the output cannot be copied for each call.
    ValueError
        Where the outputs are not alike.
    """
    draw, earlier = torch.Generator().manual_seed(0), list[Any]()
    for values in ([_other(each, draw) for each in inputs], inputs):
        with torch.random.fork_rng(devices=[]):
            expected = leaves_of(plain(model(*copies_of(values))))
        try:
            with torch.random.fork_rng(devices=[]):
                actual = leaves_of(frozen(*values))
        except TypeError as error:
            raise TypeError(f"{name} returns what cannot be copied for each call ({error}): {_REMEDY}") from None
        if any(each is other for each in actual for other in earlier if isinstance(each, torch.Tensor)):
            raise TypeError(f"{name} returns a function of tensors, or another object that copies share: {_REMEDY}")
        if len(expected) != len(actual) or not all(map(_is_same, expected, actual)):
            raise ValueError(
                f"{name} gives something else for other inputs than its recorded steps: it may compute outside of "
                "PyTorch, as in NumPy, or keep something from call to call; call the model itself"
            )
        earlier += actual


def _other(x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Other values of an input: its own elsewhere, and numbers of any size a little off."""
    moved = x.detach().flatten().roll(1).view(x.shape)
    return moved + 0.1 * torch.randn(x.shape, generator=draw, dtype=x.dtype) if x.is_floating_point() else moved


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
    return type(one) is type(other) and (not isinstance(one, CONSTANTS) or repr(one) == repr(other))
