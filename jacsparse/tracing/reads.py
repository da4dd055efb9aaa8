"""Reads of elements by Python code that no call of an operator tells of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

if TYPE_CHECKING:
    from .capture import Recorder


class Unreadable(TorchFunctionMode):
    """Raises where Python reads elements, without a call of an operator, that may be others in another call.

    These are all but those that the run computes of constants alone. ``.data`` calls no operator either: its result is
    taken for one that depends on the input.
    """

    READS = frozenset(
        (
            torch.Tensor.tolist,
            torch.Tensor.numpy,
            torch.Tensor.__array__,
            torch.Tensor.__dlpack__,
            torch.Tensor.data_ptr,
        )
    )
    #: What tells how many elements a mask has selected.
    SIZES = frozenset(
        (
            torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
            *(torch.Tensor.size, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.__len__, torch.numel),
        )
    )
    TEXTS = frozenset((torch.Tensor.__repr__, torch.Tensor.__format__))
    #: What makes a tensor of the elements of others, in lists or tuples.
    MAKES = frozenset((torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor, torch.sparse_coo_tensor))
    DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]

    def __init__(self, recorder: Recorder, hidden: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.recorder, self.hidden = recorder, hidden

    def _may_not_be_read(self, tensor: torch.Tensor) -> bool:
        if self.recorder.depends_on_input(tensor) or any(tensor is each for each in self.hidden):
            return True
        return self.recorder.run.is_of_captures(self.recorder.numbers.get(id(tensor)))

    def _is_sized(self, tensor: torch.Tensor) -> bool:
        """Whether the shape of a tensor tells how many elements a mask selects."""
        recorder = self.recorder
        return not recorder.in_parts and recorder.numbers.get(id(tensor)) in recorder.masks.selected

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read: Sequence[Any] = ()
        is_text = function in self.TEXTS
        if is_text or function in self.READS:
            read = args[:1]
        elif function in self.SIZES and self._is_sized(args[0]):
            raise self.recorder.callers.read_error(torch.ops.aten.nonzero.default)
        elif function in self.MAKES:
            lists = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, (list, tuple))]
            read = [each for each in _pytree.tree_leaves(lists) if isinstance(each, torch.Tensor)]
        if any(map(self._may_not_be_read, read)):
            raise self.recorder.callers.read_error(as_text=is_text)
        if function in self.MAKES and args and "dtype" not in (kwargs or {}):
            number = next((each for each in self.hidden if each is args[0]), None)
            if number is not None and number.dtype != torch.get_default_dtype():
                what = f"torch.tensor makes a number {torch.get_default_dtype()}, coarser than {number.dtype}"
                raise self.recorder.callers.unsupported(what, "pass a dtype, as that of the other tensors")
        result = function(*args, **(kwargs or {}))
        if function is self.DATA and self.recorder.depends_on_input(args[0]):
            self.recorder.alias(result, args[0])
        return result
