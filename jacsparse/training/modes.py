"""Training and evaluation mode of a module's parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn


def modes_of(module: nn.Module) -> list[bool]:
    """Whether each of a module's parts is in training mode."""
    return [part.training for part in module.modules()]


@contextlib.contextmanager
def in_modes(module: nn.Module, modes: Sequence[bool]) -> Iterator[None]:
    """A context in which a module's parts are in the modes that `modes_of` returned; theirs are restored."""
    before = modes_of(module)
    try:
        _set_modes(module, modes)
        yield
    finally:
        _set_modes(module, before)


def in_eval_mode(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context in which a module is in eval mode; the modes of its parts are restored."""
    return in_modes(module, [False] * len(modes_of(module)))


def _set_modes(module: nn.Module, modes: Sequence[bool]) -> None:
    for part, mode in zip(module.modules(), modes, strict=True):
        part.training = mode
