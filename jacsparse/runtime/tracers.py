"""Who watches a call: tools that make programs of PyTorch's operators, and transforms that replace its tensors.

None of them sees what a kernel of ours does.
"""

from __future__ import annotations

import torch
from torch._ops import _get_dispatch_mode_pre_dispatch, _len_torch_dispatch_stack_pre_dispatch
from torch.autograd import forward_ad

from .messages import a_type

_MODES = torch._C._TorchDispatchModeKey
#: The transforms of ``torch.func`` by the kinds of their interpreters.
_TRANSFORMS = {"Functionalize": "functionalize", "Grad": "grad, vjp or jacrev", "Jvp": "jvp or jacfwd", "Vmap": "vmap"}


def is_traced() -> bool:
    """Whether ``make_fx`` or ``functionalize`` makes other operators of the call, or its tensors have no values."""
    if torch._C._are_functorch_transforms_active():
        # Anywhere among nested transforms: a custom Function would get there in the end.
        kinds = [interpreter.key().name for interpreter in torch._C._functorch.get_interpreter_stack() or ()]
        if "Functionalize" in kinds:
            return True
    if not (torch._C._len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch()):
        return False
    modes = (torch._C._get_dispatch_mode(mode) for mode in (_MODES.PROXY, _MODES.FAKE))
    return any(mode is not None for mode in (*modes, _get_dispatch_mode_pre_dispatch(_MODES.PROXY)))


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` or differentiation in forward mode is under way."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def transform_under_way() -> str:
    """What `is_transformed` finds, in words; empty where it finds nothing."""
    if torch._C._are_functorch_transforms_active():
        kind = torch._C._functorch.peek_interpreter_stack().key().name
        return f"a transform of torch.func, {_TRANSFORMS.get(kind, kind)}"
    return "differentiation in forward mode, as jvp's" if is_transformed() else ""


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for several, within ``torch.vmap`` or with ``is_grads_batched=True``."""
    return torch._C._functorch.is_batchedtensor(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor)


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a tangent of forward mode, as within ``torch.autograd.forward_ad``."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def check_tensor_itself(name: str, x: object, remedy: str) -> torch.Tensor:
    """Return `x` where it is a tensor, and none that stands for others within a transform of ``torch.func``."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is {a_type(x)}; expected a torch.Tensor")
    if torch._C._functorch.is_functorch_wrapped_tensor(x):  # type: ignore[attr-defined]
        raise TypeError(f"{name} is within {transform_under_way() or 'a transform of torch.func'}; {remedy}")
    return x
