"""Calls that show Python the elements of a tensor, on which its branches may depend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from .operators import operator_name

if TYPE_CHECKING:
    from .tracer import Tracer


class Unreadable(TorchFunctionMode):
    """Raises where Python reads the elements of a tensor that depends on the input, without a call of an operator.

    ``.data`` calls none either: its result is taken for one that depends on the input.
    """

    READS = frozenset((torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__))
    DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]

    def __init__(self, tracer: Tracer, hidden: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.tracer, self.hidden = tracer, hidden

    def _may_not_be_read(self, tensor: torch.Tensor) -> bool:
        if self.tracer.depends_on_input(tensor) or any(tensor is each for each in self.hidden):
            return True
        hidden = self.tracer.trace.values_of(self.hidden)
        number = self.tracer.numbers.get(id(tensor))
        return bool(hidden) and number is not None and self.tracer.trace.graph.made_of(number, hidden)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self.READS and self._may_not_be_read(args[0]):
            raise self.tracer.derivatives.read_error(None)
        result = function(*args, **(kwargs or {}))
        if function is self.DATA and self.tracer.depends_on_input(args[0]):
            self.tracer.alias(result, args[0])
        return result


def shows(overload: Any, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether a call that may read elements shows those of dependent operands, of these dtypes.

    It does not where a constant mask selects them.
    """
    name, kinds = operator_name(overload), list(dtypes)
    if name == "aten.index":
        # Elements are selected by a mask or by numbers, and as many as there are numbers.
        return torch.bool in kinds or torch.uint8 in kinds
    by_mask = name in ("aten.masked_select", "aten.repeat_interleave")
    return not by_mask or not all(kind.is_floating_point for kind in kinds)
