"""Notes which kernels are launched, by a backend around another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from jacsparse.runtime import KERNEL_FILES, Backend, Launch

#: The variable of the environment that names the file in which tests note what they launch.
TEST_LOG = "JACSPARSE_TEST_LOG"


class Instance(NamedTuple):
    """An instance of a kernel."""

    #: The name of its file among all files, empty where it is not listed there; and its own.
    file: str
    name: str
    #: The bytes of dynamic shared memory that a block asks for.
    shared: int = 0

    @property
    def text(self) -> str:
        """Its file and its name."""
        return f"{self.file} {self.name}".strip()

    @classmethod
    def of(cls, launch: Launch) -> Instance:
        """The instance that a launch runs."""
        file = next((name for name, file in KERNEL_FILES.items() if file is launch.file), "")
        return cls(file, launch.instance, launch.shared)


class NotingBackend:
    """A backend that notes instances, and runs them by another backend.

    Parameters
    ----------
    other : Backend, optional
        Where it is left out, nothing runs, and tensors of the CPU are the device's.
    """

    def __init__(self, other: Backend | None = None) -> None:
        self.other, self.noted = other, set[Instance]()

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu if self.other is None else self.other.on_device(tensor)

    def launch(self, launch: Launch) -> None:
        self.noted.add(Instance.of(launch))
        if self.other is not None:
            self.other.launch(launch)

    def record(self, launch: Launch) -> Callable[..., None]:
        instance, run = Instance.of(launch), None if self.other is None else self.other.record(launch)

        def noting(*values: Any) -> None:
            self.noted.add(instance)
            if run is not None:
                run(*values)

        return noting
