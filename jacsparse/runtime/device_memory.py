"""Device memory, with errors that name what does not fit; and copies of index arrays, made once."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def memory_for(
    what: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, batch: int = 1
) -> Iterator[None]:
    """Context in which running out of device memory is reported as a tensor that does not fit.

    Parameters
    ----------
    what : str
        What the tensor is; the message begins with it.
    shape : sequence of int
        The tensor's shape.
    dtype : torch.dtype
        The tensor's dtype.
    device : torch.device
        The device.
    batch : int
        The number of samples in the tensor.

    Raises
    ------
    torch.OutOfMemoryError
        Instead of PyTorch's own: it names the tensor, its bytes and what takes fewer.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(what, shape, dtype, device, batch) from error


def _out_of_memory(
    what: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, batch: int
) -> torch.OutOfMemoryError:
    sizes = " × ".join(f"{size:,}" for size in shape)
    smaller = ["a smaller batch"] if batch > 1 else []
    smaller += ["float32"] if dtype == torch.float64 else []
    return torch.OutOfMemoryError(
        f"{what}: {math.prod(shape) * dtype.itemsize:,} bytes ({sizes} of {dtype}) do not fit on {device}; try "
        f"{' or '.join((*smaller, 'the CPU'))}"
    )


def allocated(
    what: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, batch: int = 1
) -> torch.Tensor:
    """An uninitialised tensor on a device; parameters and errors as of `memory_for`."""
    # As `memory_for`, which takes longer to enter than small results take to compute.
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(what, shape, dtype, device, batch) from error


_uploads: dict[tuple[int, torch.device, torch.dtype | None], torch.Tensor] = {}
# Tensors that captured graphs read at each replay, by id.
_captured: dict[int, torch.Tensor] = {}


def uploaded(array: np.ndarray, device: torch.device, dtype: torch.dtype | None = torch.int64) -> torch.Tensor:
    """A copy of a read-only array on a device.

    It is copied at the first call, and lives as long as the array does; where a captured graph reads it, for good.

    Parameters
    ----------
    array : ndarray
        The array.
    device : torch.device
        The device.
    dtype : torch.dtype, optional
        The copy's dtype; None for the array's.

    Raises
    ------
    RuntimeError
        Where it would be copied while a graph is captured.
    """
    if array.flags.writeable:
        raise ValueError("the array may change; freeze it first")
    key = (id(array), device, dtype)
    upload = _uploads.get(key)
    if upload is None:
        before_captures(f"an array of a plan or pattern is not on {device}", device)
        # Later callers may be in other modes, or in none: the tensor must belong to no mode.
        with torch.inference_mode(False), _disable_current_modes():
            host = torch.from_numpy(np.array(array))
            with memory_for("an array of a plan or pattern", array.shape, dtype or host.dtype, device):
                upload = host.to(device, dtype)
        upload.made_on = _stream_on(device)  # type: ignore[attr-defined]
        _uploads[key] = upload
        weakref.finalize(array, _uploads.pop, key, None)
    extend_lives([upload])
    return upload


@functools.cache
def host_flag(device: torch.device) -> torch.Tensor:
    """A number in the host's memory, which kernels of a device may set and the host reads without waiting."""
    return torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")


@contextlib.contextmanager
def fresh_uploads() -> Iterator[None]:
    """Context in which nothing has been copied to any device yet."""
    global _uploads
    before, _uploads = _uploads, {}
    try:
        yield
    finally:
        _uploads = before


def extend_lives(tensors: Sequence[torch.Tensor]) -> None:
    """Let uploads to one device outlive their arrays where queued work reads them: another stream's or a graph's."""
    device = tensors[0].device
    capturing, stream = _capturing(device), _stream_on(device)
    for tensor in tensors:
        made_on = getattr(tensor, "made_on", None)
        if made_on is None:
            continue
        if capturing:
            _captured[id(tensor)] = tensor
        elif stream != made_on:
            tensor.record_stream(torch.cuda.current_stream(device))


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def before_captures(missing: str, device: torch.device) -> None:
    """RuntimeError where a CUDA graph is being captured, since what is missing cannot be made meanwhile."""
    if _capturing(device):
        raise RuntimeError(f"{missing} yet, and a CUDA graph is being captured: run the same once before the capture")


def _stream_on(device: torch.device) -> int:
    """The handle of a device's current stream."""
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a device; of a large GPU where the device is emulated."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 132


def machine_memory(device: torch.device) -> int:
    """Bytes of memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
