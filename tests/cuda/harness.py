"""The device that tests have: CUDA's kernels on CPU tensors, fiber by fiber; or, for `make test-gpu`, a real one."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from jacsparse.recurrence import Recurrent
from jacsparse.recurrence.small_layer import SmallLayer
from jacsparse.runtime import KERNEL_FILES, KernelFile, Launch, backend
from tests.cuda.fibers import KernelError, call, compiled

#: Whether the tests are to run on a GPU, and where they put what kernels work on.
ON_GPU = os.environ.get("JACSPARSE_TESTS") == "gpu"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
#: Fibers are those of one thread, and a call by ctypes lets other threads run.
_ONE_AT_A_TIME = threading.Lock()


class Fibers:
    """The backend that takes CPU tensors for a device's.

    Parameters
    ----------
    folder : Path, optional
        A folder that gets a file for each launch, and one for each file of kernels, for `tests.cuda.replay`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder, self.numbers = folder, itertools.count()

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def record(self, launch: Launch) -> Callable[..., None]:
        return lambda *values: self.launch(launch.of(values))

    def launch(self, launch: Launch) -> None:
        file, instance, grid, block, arguments, shared, _ = launch
        if self.folder is not None:
            content = {
                f"argument {number}": memory_of(argument) if isinstance(argument, torch.Tensor) else argument
                for number, argument in enumerate(arguments)
                if argument is not None
            }
            sizes = {"grid": np.array(grid), "block": np.array(block), "shared": np.array(shared)}
            names = {
                "kernels": np.str_(name_of(file)),
                "instance": np.str_(instance),
                "count": np.array(len(arguments)),
            }
            np.savez(self.folder / f"{next(self.numbers):05d}.npz", **content, **sizes, **names)
            kernels = self.folder / f"{name_of(file)}.json"
            if not kernels.exists():
                kernels.write_text(json.dumps({"source": file.source, "instances": file.instances}), encoding="utf-8")
        # Of a cell of one's own few kernels are launched, of fused loops all.
        every = file in KERNEL_FILES.values() or file.path.name == "loops.cu"
        instances = file.instances if every else (instance,)
        try:
            function = compiled(name_of(file), file.source, instances)[instance]
            with _ONE_AT_A_TIME:
                call(function, grid, block, arguments, shared)
        except KernelError as error:
            raise KernelError(f"{instance}: {error}") from None


def name_of(file: KernelFile) -> str:
    """What a file of kernels is called here: recurrent cells print theirs into one file."""
    listed = next((name for name, other in KERNEL_FILES.items() if other is file), file.path.name)
    return listed.removesuffix(".cu")


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    """The memory from a tensor's first element to its last one, whatever its strides."""
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((extent if tensor.numel() else 0,), (1,)).numpy()


@contextlib.contextmanager
def emulated(folder: Path | None = None) -> Iterator[None]:
    """CUDA's kernels work on `DEVICE`'s tensors."""
    if ON_GPU:
        yield
        return
    with backend(Fibers(folder)):
        yield


def took_small_kernels(layer: Recurrent) -> bool:
    """Whether the last pass of a recurrent layer was by the kernels for small states."""
    reads = getattr(layer._pass, "solutions", {}).values()
    return any(isinstance(getattr(read, "func", read).__self__, SmallLayer) for read in reads)
