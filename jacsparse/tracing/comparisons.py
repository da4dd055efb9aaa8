"""Comparisons of a device's tensors, of which each version takes one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable

import torch

from ..runtime import before_captures, on_device

#: Tensors of one key from which on those that are gone are forgotten.
_MANY = 64


class Comparisons:
    """Remembers what comparisons of a device's tensors said, since looking at elements waits for the device.

    Tensors of a CPU are compared at each call, as are those of inference mode, which do not count their versions.
    """

    def __init__(self) -> None:
        self._outcomes: dict[Hashable, dict[int, tuple[weakref.ref[torch.Tensor], tuple[int, int], bool]]] = {}

    def outcome(self, key: Hashable, tensor: torch.Tensor, compare: Callable[[], bool]) -> bool:
        """What a comparison of a tensor says, which each version of it in the same memory takes once.

        RuntimeError is raised where it is not known and a CUDA graph is being captured.
        """
        if not on_device(tensor) or tensor.is_inference():
            return compare()
        outcomes, version = self._outcomes.setdefault(key, {}), (tensor._version, tensor.data_ptr())
        known = outcomes.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        before_captures("an index or a mask of this version was not compared with that of the patterns", tensor.device)
        outcome = compare()
        if len(outcomes) >= _MANY:
            for number in [number for number, (reference, *_) in outcomes.items() if reference() is None]:
                del outcomes[number]
        outcomes[id(tensor)] = weakref.ref(tensor), version, outcome
        return outcome
