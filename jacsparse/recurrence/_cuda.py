"""The cells on CUDA tensors: a block for each run of steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..patterns._cuda import KernelFile, c_type, instances, uploaded

if TYPE_CHECKING:
    from ._runs import Runs

__all__ = ["LARGEST", "launch"]

#: Elements of a state, at most: a thread each, and room in shared memory.
LARGEST = 128
_FILE = KernelFile(
    Path(__file__).parent / "kernels" / "recurrent.cu",
    tuple(
        instance
        for cell in ("rnn", "gru", "lstm")
        for way in ("forward", "backward")
        # Up to 32 columns of each gate fit a thread's registers, in float64 those of one gate.
        for choices in ((("float",), ("32", "0")), (("double",), ("32", "0") if cell == "rnn" else ("0",)))
        for instance in instances(f"{cell}_{way}", *choices)
    ),
)


def launch(name: str, runs: Runs, like: torch.Tensor, size: int, *arguments: Any) -> None:
    """Run one of the kernels, as in ``gru_forward``, on the device of `like`.

    Arguments are those that the CPU's kernel of the same name takes after the runs; arrays are uploaded, and tensors
    without rows are left out.

    Raises
    ------
    ValueError
        Where the state is too large.
    """
    if size > LARGEST:
        raise ValueError(f"hidden_size is {size}; on CUDA devices states have at most {LARGEST} elements")
    device, dtype = like.device, c_type(like.dtype)
    registers = 32 if size <= 32 and f"{name}<{dtype}, 32>" in _FILE.instances else 0
    _FILE.launch(
        f"{name}<{dtype}, {registers}>",
        [len(runs)],
        [max(1, -(-size // 32)) * 32],
        *(uploaded(array, device) for array in (runs.sample, runs.begin, runs.count)),
        runs.direction,
        uploaded(runs.sequences.offset, device),
        size,
        *(_given(argument, device) for argument in arguments),
        device=device,
    )


def _given(argument: Any, device: torch.device) -> Any:
    if isinstance(argument, np.ndarray):
        return uploaded(argument, device)
    return None if isinstance(argument, torch.Tensor) and not len(argument) else argument
