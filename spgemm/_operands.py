"""Operands at the edge: tensors and arrays in, the NumPy views that kernels run on out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["result", "same_batch", "view"]

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def view(
    name: str, values: Any, rows: int, what: str = "entries", dtypes: tuple[np.dtype, ...] = _FLOATS
) -> np.ndarray:
    """`values` as a C-contiguous array of shape ``(rows, batch)``, without a copy where it is one already.

    Raises
    ------
    TypeError
        Where `values` is no array or dense tensor of one of the dtypes.
    ValueError
        Where its shape or device does not fit.
    """
    array = _memory(name, values)
    if array.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {values.dtype}; expected {' or '.join(map(str, dtypes))}")
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[0] != rows:
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}; expected ({rows}, batch) or ({rows},) for {rows} {what}"
        )
    return np.ascontiguousarray(array)


def _memory(name: str, values: Any) -> np.ndarray:
    """The memory of a NumPy array or of a dense CPU tensor without a graph."""
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array; fill it first: {name}.filled(0)")
    if isinstance(values, np.ndarray):
        return values
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"{name} is a {type(values).__name__}; expected a NumPy array or a PyTorch tensor")
    if values.device.type != "cpu":
        raise ValueError(f"{name} is on {values.device}; this runs on the CPU: move it with {name}.cpu()")
    if values.requires_grad:
        raise ValueError(f"{name} requires grad, but this product is not differentiable: pass {name}.detach()")
    if values.layout != torch.strided:
        raise TypeError(f"{name} has layout {values.layout}; expected a dense tensor of values")
    if values.dtype in (torch.bfloat16, torch.complex32):
        # NumPy has no such numbers.
        raise TypeError(f"{name} has dtype {values.dtype}; convert it to float32 or float64")
    return values.resolve_neg().resolve_conj().numpy()


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
    tensors = [isinstance(operand, torch.Tensor) for operand in operands]
    if any(tensors) and not all(tensors):
        raise TypeError("the operands mix NumPy arrays and PyTorch tensors; convert one of them")
    shape = (rows,) if all(operand.ndim == 1 for operand in operands) else (rows, batch)
    if out is None:
        array = np.empty(shape, dtype=dtype)
        return torch.from_numpy(array) if all(tensors) else array, array.reshape(rows, batch)
    array = _memory("out", out)
    if isinstance(out, torch.Tensor) != all(tensors):
        raise TypeError(f"out is a {type(out).__name__}, but the operands are not; pass one of their kind")
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError(
            f"out has shape {array.shape}, dtype {array.dtype}; expected a writable, contiguous one of {shape}, {dtype}"
        )
    if any(np.shares_memory(array, _memory("an operand", operand)) for operand in operands):
        raise ValueError("out overlaps an operand; pass memory of its own")
    return out, array.reshape(rows, batch)
