"""Checks of operands, and their views for kernels: NumPy arrays on the CPU, tensors on a device."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from ..runtime import MEMORY_POOL, a_type, allocated, check_tensor_itself, on_device

_CPU = torch.device("cpu")
_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
_OUTSIDE = "take gradients by torch.autograd, and pass samples as a batch"


def view(name: str, values: Any, rows: int, what: str = "entries", dtypes: tuple[np.dtype, ...] = _FLOATS) -> Any:
    """`values` as a C-contiguous array or tensor ``(rows, batch)``, without a copy where it is one already."""
    array = _memory(name, values)
    if (array.dtype if isinstance(array, np.ndarray) else _numpy_dtype(array.dtype)) not in dtypes:
        raise TypeError(f"{name} has dtype {values.dtype}; expected {' or '.join(map(str, dtypes))}")
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[0] != rows:
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}; expected ({rows}, batch) or ({rows},) for {rows} {what}"
        )
    return np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array.contiguous()


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype | None:
    """The NumPy dtype of the same name, or None."""
    scalar_type = getattr(np, str(dtype).removeprefix("torch."), None)
    return None if scalar_type is None else np.dtype(scalar_type)


def _memory(name: str, values: Any) -> Any:
    """A NumPy array, or one over a dense CPU tensor's memory; a device's tensor without its graph."""
    if isinstance(values, np.ndarray):
        if isinstance(values, np.ma.MaskedArray):
            raise TypeError(f"{name} is a masked array; fill it first: {name}.filled(0)")
        return values
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"{name} is {a_type(values)}; expected a NumPy array or a PyTorch tensor")
    if torch._C._functorch.is_functorch_wrapped_tensor(values):  # type: ignore[attr-defined]
        check_outside_transforms(name, values)
    if values.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {values.device}; this runs on CPUs and CUDA: move it with {name}.cpu()")
    if values.layout != torch.strided:
        raise TypeError(f"{name} has layout {values.layout}; expected a dense tensor of values")
    if _numpy_dtype(values.dtype) is None:
        raise TypeError(f"{name} has dtype {values.dtype}; convert it to float32 or float64")
    return values.detach().resolve_neg().resolve_conj() if on_device(values) else values.numpy(force=True)


def same_device(left_name: str, left: Any, right_name: str, right: Any) -> None:
    """Raise ValueError where two operands lie on different devices."""
    one = _CPU if isinstance(left, np.ndarray) else left.device
    other = _CPU if isinstance(right, np.ndarray) else right.device
    if one != other:
        raise ValueError(f"{left_name} is on {one} and {right_name} on {other}; move one: nothing is copied silently")


def same_batch(left_name: str, left: Any, right_name: str, right: Any) -> int:
    """The batch of two operands on one device; an operand with a batch of 1 is shared by all samples."""
    if type(left) is not type(right) or getattr(left, "device", None) != getattr(right, "device", None):
        same_device(left_name, left, right_name, right)
    if left.dtype != right.dtype:
        raise TypeError(f"{left_name} is {left.dtype} and {right_name} is {right.dtype}; convert one of them")
    a, b = left.shape[1], right.shape[1]
    if a != b and 1 not in (a, b):
        raise ValueError(f"{left_name} has a batch of {a} and {right_name} one of {b}; they must agree, or one be 1")
    return b if a == 1 else a


def factor_of(number: Any, values: torch.Tensor) -> float | torch.Tensor | None:
    """A number, or one for each sample, in a form that multiplies values; None where it is something else."""
    if not isinstance(number, torch.Tensor):
        return float(number) if isinstance(number, Real) else None
    if number.ndim > 1:
        raise ValueError(
            f"the factor has shape {tuple(number.shape)}; expected a number, or one for each sample: (batch,). "
            "Products of matrices are J @ K"
        )
    if number.ndim:
        same_batch("the factor", number[None], "the Jacobian", values)
    return number


def check_outside_transforms(name: str, values: torch.Tensor) -> torch.Tensor:
    """Return values where kernels can read them, and not within a transform of ``torch.func``."""
    return check_tensor_itself(name, values, _OUTSIDE)


def by_sample(
    name: str, x: Any, size: int, also: str = "", shape: tuple[int, ...] | None = None
) -> tuple[torch.Tensor, bool]:
    """A tensor as ``(batch, size)``, and whether it had no axis of samples: it is ``(batch, *shape)`` or one sample.

    `also` tells errors which other shapes the caller takes, and `shape` is a sample's, where it is known.
    """
    x = check_tensor_itself(name, x, "pass (batch, *shape) instead of vmap, and take gradients by torch.autograd")
    has_samples = x.ndim > 0 and math.prod(x.shape[1:]) == size
    if x.shape == shape or (x.numel() == size and (x.ndim < 2 or not has_samples)):
        return x.reshape(1, size), True
    if not has_samples:
        expected = f"{size} elements, or (batch, *shape) with {size} elements a sample{also}"
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {expected}")
    return x.reshape(len(x), size), False


def result(
    what: str, out: Any, operands: Sequence[Any], views: Sequence[Any], rows: int, batch: int, like: Any
) -> tuple[Any, Any]:
    """The result to return and its view ``(rows, batch)``: `out`, or new memory with the dtype and device of `like`.

    Errors name the result as `what`. It is of the operands' kind, and has one dimension where all operands have; `out`
    must not overlap the operands' `views`.
    """
    tensors, shape = 0, tuple[int, ...]((rows,))
    for operand in operands:
        tensors += isinstance(operand, torch.Tensor)
        shape = shape if operand.ndim == 1 else (rows, batch)
    if tensors not in (0, len(operands)):
        raise TypeError("the operands mix NumPy arrays and PyTorch tensors; convert one of them")
    if out is None:
        if isinstance(like, torch.Tensor):
            tensor = allocated(what, shape, like.dtype, like.device, batch)
            return tensor, tensor.reshape(rows, batch)
        array = MEMORY_POOL.empty(shape, like.dtype)
        return torch.from_numpy(array) if tensors else array, array.reshape(rows, batch)
    if isinstance(out, torch.Tensor) and out.requires_grad:
        raise ValueError("out requires grad, but it is only written to; pass out.detach()")
    if isinstance(out, torch.Tensor) and out.is_neg():
        raise ValueError("out is a view of other numbers' negatives; pass out.resolve_neg()")
    array = _memory("out", out)
    if getattr(array, "device", None) != getattr(like, "device", None):
        same_device("out", array, "the operands", like)
    if isinstance(out, torch.Tensor) != bool(tensors):
        raise TypeError(f"out is {a_type(out)}, but the operands are not; pass one of their kind")
    if array.dtype != like.dtype or tuple(array.shape) != shape or not _is_plain(array):
        raise ValueError(
            f"out has shape {tuple(array.shape)}, dtype {array.dtype}; expected a writable, contiguous one of {shape}, "
            f"{like.dtype}"
        )
    if _overlaps(array, views):
        raise ValueError("out overlaps an operand; pass memory of its own")
    return out, array.reshape(rows, batch)


def _is_plain(array: Any) -> bool:
    """Whether an array or tensor is contiguous and writable."""
    if isinstance(array, np.ndarray):
        return bool(array.flags.c_contiguous and array.flags.writeable)
    return bool(array.is_contiguous())


def _overlaps(array: Any, others: Sequence[Any]) -> bool:
    """Whether an array or tensor shares memory with others."""
    if isinstance(array, np.ndarray):
        return any(np.shares_memory(array, other) for other in others)
    begin = array.data_ptr()
    for other in others:
        other_begin = other.data_ptr()
        if begin < other_begin + other.nbytes and other_begin < begin + array.nbytes:
            return True
    return False


def flat(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[Any, ...]:
    """The values of two factors and their product as kernels take them: each flat, followed by its batch."""
    return (a.reshape(-1), a.shape[1], b.reshape(-1), b.shape[1], c.reshape(-1), c.shape[1])


def matrices(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A view of a full pattern's values as ``(batch, rows, columns)``."""
    return values.reshape(rows, columns, values.shape[1]).movedim(2, 0)
