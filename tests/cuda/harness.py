"""The device that tests have: CUDA's kernels on CPU tensors, fiber by fiber; or, for `make test-gpu`, a real one."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from jacsparse.runtime import Launch, backend
from tests.cuda.fibers import KernelError, call, compiled

#: Whether the tests are to run on a GPU, and where they put what kernels work on.
ON_GPU = os.environ.get("JACSPARSE_TESTS") == "gpu"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


class Fibers:
    """The backend that takes CPU tensors for a device's.

    Parameters
    ----------
    record : Path, optional
        A folder that gets a file for each launch, and one for each file of kernels, for `tests.cuda.replay`.
    """

    def __init__(self, record: Path | None = None) -> None:
        self.record, self.numbers = record, itertools.count()

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def launch(self, launch: Launch) -> None:
        file, instance, grid, block, arguments, shared, _ = launch
        if self.record is not None:
            content = {
                f"argument {number}": argument.numpy() if isinstance(argument, torch.Tensor) else argument
                for number, argument in enumerate(arguments)
                if argument is not None
            }
            sizes = {"grid": np.array(grid), "block": np.array(block), "shared": np.array(shared)}
            names = {
                "kernels": np.str_(file.path.stem),
                "instance": np.str_(instance),
                "count": np.array(len(arguments)),
            }
            np.savez(self.record / f"{next(self.numbers):05d}.npz", **content, **sizes, **names)
            kernels = self.record / f"{file.path.stem}.json"
            if not kernels.exists():
                kernels.write_text(json.dumps({"source": file.source, "instances": file.instances}), encoding="utf-8")
        try:
            call(compiled(file.path.stem, file.source, file.instances)[instance], grid, block, arguments, shared)
        except KernelError as error:
            raise KernelError(f"{instance}: {error}") from None


@contextlib.contextmanager
def emulated(record: Path | None = None) -> Iterator[None]:
    """CUDA's kernels work on `DEVICE`'s tensors."""
    if ON_GPU:
        yield
        return
    with backend(Fibers(record)):
        yield
