"""Operands at the edge: tensors and arrays in, the NumPy views that kernels run on out."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

__all__ = ["like", "result", "same_batch", "view"]

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


def _is_tensor(values: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(values, torch.Tensor)


def view(name: str, values: Any, rows: int, what: str = "entries") -> np.ndarray:
    """`values` as a C-contiguous array of shape ``(rows, batch)``, without a copy where it is one already.

    Raises
    ------
    TypeError
        Where `values` is no array or tensor of float32 or float64.
    ValueError
        Where its shape or device does not fit.
    """
    if _is_tensor(values):
        if values.device.type != "cpu":
            raise ValueError(f"{name} is on {values.device}; this runs on the CPU: move it with {name}.cpu()")
        if values.requires_grad:
            raise ValueError(f"{name} requires grad, but this product is not differentiable: pass {name}.detach()")
        if values.is_sparse or values.layout != _strided():
            raise TypeError(f"{name} has layout {values.layout}; expected a dense tensor of values")
        array = values.numpy() if str(values.dtype) in ("torch.float32", "torch.float64") else None
    elif isinstance(values, np.ndarray):
        array = values if values.dtype in _DTYPES else None
    else:
        raise TypeError(f"{name} is a {type(values).__name__}; expected a NumPy array or a PyTorch tensor")
    if array is None:
        raise TypeError(f"{name} has dtype {values.dtype}; expected float32 or float64")
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[0] != rows:
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}; expected ({rows}, batch) or ({rows},) for {rows} {what}"
        )
    return np.ascontiguousarray(array)


def _strided() -> Any:
    return sys.modules["torch"].strided


def same_batch(left_name: str, left: np.ndarray, right_name: str, right: np.ndarray) -> int:
    """The batch of two operands, each of which may hold one column that all samples share."""
    if left.dtype != right.dtype:
        raise TypeError(f"{left_name} is {left.dtype} and {right_name} is {right.dtype}; convert one of them")
    a, b = left.shape[1], right.shape[1]
    if a != b and 1 not in (a, b):
        raise ValueError(f"{left_name} has a batch of {a} and {right_name} one of {b}; they must agree, or one be 1")
    return b if a == 1 else a


def result(out: Any, operands: tuple[Any, ...], rows: int, batch: int, dtype: np.dtype) -> tuple[Any, np.ndarray]:
    """What to return, and its view: `out` where given and fit, else a new array or tensor as the operands are.

    The result has one dimension where all operands have.
    """
    tensors = [_is_tensor(operand) for operand in operands]
    if any(tensors) and not all(tensors):
        raise TypeError("the operands mix NumPy arrays and PyTorch tensors; convert one of them")
    shape = (rows,) if all(operand.ndim == 1 for operand in operands) else (rows, batch)
    if out is None:
        array = np.empty(shape, dtype=dtype)
        out = sys.modules["torch"].from_numpy(array) if all(tensors) else array
        return out, array.reshape(rows, batch)
    if _is_tensor(out) != all(tensors):
        raise TypeError(f"out is a {type(out).__name__}, but the operands are not; pass one of their kind")
    array = out.numpy() if all(tensors) else out
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError(
            f"out has shape {array.shape}, dtype {array.dtype}; expected a writable, contiguous one of {shape}, {dtype}"
        )
    if any(np.shares_memory(array, like(operand)) for operand in operands):
        raise ValueError("out overlaps an operand; pass memory of its own")
    return out, array.reshape(rows, batch)


def like(values: Any) -> np.ndarray:
    """A tensor's or array's memory as an array."""
    return values.detach().numpy() if _is_tensor(values) else values
