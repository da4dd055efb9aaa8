"""A GPU that is made up: the library launches as on a real one, by a driver that does nothing, on tensors of the CPU.

A stub of the CUDA driver is built with the C compiler, and found where the real one would be. CuPy is made up too, for
it compiles kernels and does no more. The library asks the same questions as on a GPU, each of a function that takes
about as long as PyTorch's own.

Three things differ from a GPU: PyTorch's kernels and memory are the CPU's; a launch by a real driver takes some
microseconds; and autograd runs a backward pass on a thread of its own there, here on the caller's, where it is counted.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jacsparse.runtime import active_backend, backend

_DRIVER = """
static long launches;
int cuLaunchKernelEx(const void *configuration, void *kernel, void **arguments, void **extra) { ++launches; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "made up"; return 0; }
long made_up_launches(void) { return launches; }
"""
#: Operators that launch nothing: views, and memory that nobody writes.
_NO_KERNELS = frozenset((
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty", "permute", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_reshape_alias",
    "_unsafe_view",
))  # fmt: skip
#: Operators and methods of tensors that wait for a device: they tell Python what it holds.
_WAITING_OPERATORS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "_unique2", "unique_dim")
_WAITING_METHODS = ("cpu", "item", "numpy", "tolist", "__bool__", "__float__", "__int__")


@dataclass(frozen=True)
class HostWork:
    """What one call costs the host: nodes of the graph that it would be, and functions called."""

    #: Launches of ours, and of PyTorch's kernels.
    launches: int
    kernels: int
    #: Functions of Python's, and of C's called by these.
    python: int
    c: int
    #: Operators that PyTorch dispatches.
    operators: int
    #: How often it waits for the device.
    waits: int

    @property
    def nodes(self) -> int:
        """Nodes of the call's graph."""
        return self.launches + self.kernels


@contextlib.contextmanager
def made_up_gpu() -> Iterator[Callable[[], int]]:
    """A context in which tensors of the CPU are on the made-up GPU; yields what counts our launches so far.

    For a process of its own: what it compiles stays, though nothing runs it.

    Raises
    ------
    RuntimeError
        Where there is no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("no C compiler, with which the made-up driver is built")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "libcuda.so.1")
        command = [compiler, "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(path)]
        subprocess.run(command, input=_DRIVER, text=True, check=True, capture_output=True)
        # Loaded once, it is what the library's name stands for.
        driver = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        answers: dict[tuple[Any, str], Any] = {
            # Functions of C's, as PyTorch's are: the stream 7 and the device 0.
            (torch._C, "_cuda_getCurrentRawStream"): [7].__getitem__,
            (torch._C, "_cuda_getDevice"): (0).conjugate,
            (torch.cuda, "current_device"): lambda: 0,
            (torch._C, "_cuda_isCurrentStreamCapturing"): (0).__bool__,
            (torch.cuda, "is_current_stream_capturing"): _is_current_stream_capturing,
        }
        before = {key: getattr(*key, None) for key in answers}
        sys.modules["cupy"], cupy = _cupy(), sys.modules.get("cupy")
        for (module, name), answer in answers.items():
            setattr(module, name, answer)
        try:
            with backend(_on_the_cpu()):
                yield driver.made_up_launches
        finally:
            for (module, name), value in before.items():
                if value is None:
                    delattr(module, name)
                else:
                    setattr(module, name, value)
            del sys.modules["cupy"]
            if cupy is not None:
                sys.modules["cupy"] = cupy


def _is_current_stream_capturing() -> bool:
    """False, by a function of C's."""
    return callable(None)


def _on_the_cpu() -> Any:
    """The library's own backend, which takes tensors of the CPU for the GPU's."""

    class OnTheCpu(type(active_backend())):  # type: ignore[misc]
        on_device = staticmethod(attrgetter("is_cpu"))

    return OnTheCpu()


def _cupy() -> types.ModuleType:
    """A CuPy that compiles nothing."""

    class Device(contextlib.nullcontext):  # type: ignore[type-arg]
        pass

    class Module:
        def __init__(self, **_: Any) -> None:
            pass

        def get_function(self, name: str) -> Any:
            return types.SimpleNamespace(max_dynamic_shared_size_bytes=48 * 1024, kernel=types.SimpleNamespace(ptr=5))

    cupy: Any = types.ModuleType("cupy")
    cupy.__version__, cupy.RawModule = "0", Module
    runtime = types.SimpleNamespace(getDeviceCount=lambda: 1)
    nvrtc = types.SimpleNamespace(getVersion=lambda: (13, 0))
    cupy.cuda = types.SimpleNamespace(Device=Device, runtime=runtime, nvrtc=nvrtc)
    return cupy


class _Operators(TorchDispatchMode):
    """Counts operators by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*arguments, **(options or {}))


@contextlib.contextmanager
def _counted_waits() -> Iterator[Counter[str]]:
    """A context that counts the calls of methods that wait for a device."""
    waits: Counter[str] = Counter()

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            waits[method.__name__] += 1
            return method(*arguments, **options)

        return call

    with contextlib.ExitStack() as stack:
        for name in _WAITING_METHODS:
            stack.enter_context(mock.patch.object(torch.Tensor, name, counted(getattr(torch.Tensor, name))))
        yield waits


def host_work(call: Callable[[], object], launched: Callable[[], int]) -> HostWork:
    """Count what a call costs the host, which was made before."""
    for _ in range(3):
        call()
    before = launched()
    call()
    launches = launched() - before
    with _Operators() as operators, _counted_waits() as methods:
        call()
    waits = max(methods.total(), sum(operators.counts[name] for name in _WAITING_OPERATORS))
    kernels = sum(count for name, count in operators.counts.items() if name not in _NO_KERNELS)
    functions: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: functions.update([event]))
    try:
        call()
    finally:
        sys.setprofile(None)
    # The end of profiling is a call of C's.
    operator_count = sum(operators.counts.values())
    return HostWork(launches, kernels, functions["call"], functions["c_call"] - 1, operator_count, waits)
