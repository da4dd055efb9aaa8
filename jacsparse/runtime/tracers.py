"""Who watches a call: tools that make programs of PyTorch's operators, and transforms that replace its tensors.

None of them sees what a kernel of ours does.
"""

from __future__ import annotations

import torch
from torch._ops import _get_dispatch_mode_pre_dispatch, _len_torch_dispatch_stack_pre_dispatch
from torch.autograd import forward_ad

_MODES = torch._C._TorchDispatchModeKey


def is_traced() -> bool:
    """Whether ``make_fx`` makes a program of the call, or its tensors have shapes and no values."""
    if not (torch._C._len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch()):
        return False
    modes = (torch._C._get_dispatch_mode(mode) for mode in (_MODES.PROXY, _MODES.FAKE))
    return any(mode is not None for mode in (*modes, _get_dispatch_mode_pre_dispatch(_MODES.PROXY)))


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` or differentiation in forward mode is under way."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
