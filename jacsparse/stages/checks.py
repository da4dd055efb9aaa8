"""Checks of the arguments that most functions of the library share."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch
from torch import nn

from ..runtime import a_type, check_tensor_itself

#: The classes of plain tensors.
PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def check_shape(shape: Sequence[int], name: str = "input_shape") -> tuple[int, ...]:
    """Return `shape` as a tuple where it is the shape of a sample.

    Raises
    ------
    ValueError
        Where it is no sequence of integers of at least 1.
    """
    try:
        sizes = tuple(index(size) for size in shape)
    except TypeError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        if isinstance(shape, torch.Tensor):
            text = f"a tensor: give x.shape[1:] of {tuple(shape.shape)}"
        else:
            text = repr(tuple(shape) if isinstance(shape, torch.Size) else shape)
        raise ValueError(f"{name} is {text}; expected the sizes of one sample, without the batch, each at least 1")
    return sizes


def check_input(name: str, x: object, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return `x` where it is a batch that this library can work on.

    Raises
    ------
    TypeError
        Where it is no dense tensor of float32 or float64.
    ValueError
        Where its shape or device does not fit.
    RuntimeError
        Where it was made in inference mode, or that is enabled.
    """
    x = check_tensor(name, x)
    check_batch(name, x)
    if shape is not None and tuple(x.shape[1:]) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (batch, {', '.join(map(str, shape))})")
    return x


def check_batch(name: str, x: torch.Tensor) -> None:
    """Raise ValueError where a tensor has an axis of samples alone."""
    if x.ndim < 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (batch, *sample): {name}[None] for one sample")


def check_tensor(name: str, x: object) -> torch.Tensor:
    """Return `x` where it is a plain dense tensor of float32 or float64 that may have a gradient.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `check_input`.
    """
    remedy = (
        "call the function or module itself there, take gradients by torch.autograd, or all samples at once by vmap "
        "within: jacobian(torch.vmap(f), x, batched=True)"
    )
    x = check_tensor_itself(name, x, remedy)
    if x.is_nested:
        raise TypeError(f"{name} is a nested tensor; expected a dense one: {name}.to_padded_tensor(0.0)")
    if type(x) not in PLAIN:
        raise TypeError(f"{name} is {a_type(x)}; expected a plain tensor: {name}.as_subclass(torch.Tensor)")
    if x.dtype not in (torch.float32, torch.float64):
        by_parts = f"give torch.view_as_real({name}), and take torch.view_as_complex of it within"
        remedy = by_parts if x.is_complex() else "convert it with .float()"
        if not x.is_floating_point() and not x.is_complex():
            remedy += ", or give, in the place of indices, what their embedding makes of them"
        raise TypeError(f"{name} is {x.dtype}; expected float32 or float64: {remedy}")
    if not (x.is_cpu or x.is_cuda):
        raise ValueError(f"{name} is on {x.device}; this runs on CPUs and CUDA: move it, and the module, with .cpu()")
    if torch.is_inference_mode_enabled() or x.is_inference():
        raise RuntimeError(f"{name} has no gradient in torch.inference_mode; use torch.no_grad instead")
    if x.layout != torch.strided:
        raise TypeError(f"{name} has layout {x.layout}; expected a dense tensor: {name}.to_dense()")
    return x


def is_fit(x: torch.Tensor) -> bool:
    """Whether a tensor whose form another one has that `check_tensor` let pass does so too."""
    if type(x) not in PLAIN or torch._C._functorch.is_functorch_wrapped_tensor(x):  # type: ignore[attr-defined]
        return False
    return not (torch.is_inference_mode_enabled() or x.is_inference())


def agree(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors have the same elements but for rounding, relative to the largest finite one."""
    limit = torch.finfo(expected.dtype).eps ** 0.5
    scale = float(expected.abs().nan_to_num(0, 0, 0).amax()) if expected.numel() else 0.0
    return actual.shape == expected.shape and torch.allclose(
        actual, expected, rtol=limit, atol=limit * scale, equal_nan=True
    )
