"""What comes before a kernel runs: arguments, uploads, and a CuPy and a driver that are missing, broken or made up."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
import math
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from jacsparse.spgemm import matvec
from torch._subclasses import FakeTensorMode

import jacsparse
from jacsparse.runtime import KERNEL_FILES, KernelFile, cupy_backend, device_memory, frozen, intercepted, on_device
from jacsparse.runtime import driver as runtime_driver
from tests.cuda.harness import emulated
from tests.helpers import random_pattern

FILE = KERNEL_FILES["values.cu"]
#: A kernel with a parameter of each type; nobody runs it.
EVERY_TYPE = KernelFile(Path(__file__).parent / "every_type.cu", ("every_type<float>", "every_type<double>"), "")
FILES = (FILE, EVERY_TYPE)
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    caches = (cupy_backend.cupy_for, cupy_backend._compiled, cupy_backend.cupy_stream)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_parameters_are_read_from_the_file() -> None:
    assert FILE.parameters["take<double, int>"] == (
        ("source", True, torch.float64),
        ("place", True, torch.int32),
        ("count", False, np.int64),
        ("out", True, torch.float64),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3),), "takes 4 arguments, not 1"),
        (
            (torch.zeros(3), torch.zeros(3, dtype=torch.int64), 3, torch.zeros(3)),
            "place points to int, and the tensor is of torch.int64",
        ),
        (
            (torch.zeros(6)[::2], torch.zeros(3, dtype=torch.int32), 3, torch.zeros(3)),
            r"source points to float, and the tensor is of torch.float32, strides \(2,\)",
        ),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with emulated(), pytest.raises(TypeError, match=message):
        FILE.launch("take<float, int>", [1], [32], *arguments, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("grid", "block"), [([1, 65_536], [32]), ([2**31], [32]), ([1, 1, 65_536], [32]), ([1], [32, 33])]
)
def test_grids_that_cuda_does_not_have(grid: list[int], block: list[int]) -> None:
    with pytest.raises(ValueError, match="CUDA has no grid of"):
        FILE.launch("take<float, int>", grid, block, device=CUDA)


def test_a_grid_without_blocks_runs_nothing() -> None:
    empty = torch.zeros(0)
    FILE.launch("take<float, int>", [0], [32], empty, empty.int(), 0, empty, device=CUDA)


def test_arrays_are_uploaded_once_and_go_with_their_owner() -> None:
    with emulated():
        array = frozen(np.arange(5))
        first = device_memory.uploaded(array, torch.device("cpu"))
        assert first is device_memory.uploaded(array, torch.device("cpu")) and first.dtype == torch.int64
        assert device_memory.uploaded(array, torch.device("cpu"), torch.int32).dtype == torch.int32
        assert len(device_memory._uploads) == 2
        del array, first
        gc.collect()
        assert not device_memory._uploads
        with pytest.raises(ValueError, match="the array may change; freeze it first"):
            device_memory.uploaded(np.arange(5), torch.device("cpu"))


def test_captured_graphs_keep_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = random_pattern(4, 4, 1.0, 1)
    monkeypatch.setattr(device_memory, "_captured", {})
    values, x = torch.zeros(16, 1), torch.zeros(4, 1)
    with emulated():
        with monkeypatch.context() as patch:
            patch.setattr(device_memory, "_capturing", lambda _: True)
            message = "an array of a plan or pattern is not on cpu yet, and a CUDA graph is being captured: run"
            with pytest.raises(RuntimeError, match=message):
                matvec(pattern, values, x)
            assert not device_memory._uploads
        matvec(pattern, values, x)
        assert not device_memory._captured
        # The driver notes the arrays of a launch that the pattern keeps.
        pattern._launches.clear()
        with monkeypatch.context() as patch:
            patch.setattr(device_memory, "_capturing", lambda _: True)
            matvec(pattern, values, x)
        assert set(device_memory._captured) == {id(tensor) for tensor in device_memory._uploads.values()}
        del pattern
        gc.collect()
        assert not device_memory._uploads and len(device_memory._captured) == 2


@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode])
def test_uploads_are_of_no_mode(mode: Any) -> None:
    array = frozen(np.arange(5))
    with emulated():
        with mode():
            device_memory.uploaded(array, torch.device("cpu"))
        actual = device_memory.uploaded(array, torch.device("cpu"))
        assert type(actual) is torch.Tensor and not actual.is_inference() and actual.tolist() == [0, 1, 2, 3, 4]


def test_uploads_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    array, recorded = frozen(np.arange(5)), []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor, stream)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "another")
    with emulated():
        for handle in (7, 7, 8):
            monkeypatch.setattr(device_memory, "_stream_on", lambda _, handle=handle: handle)
            actual = device_memory.uploaded(array, torch.device("cpu"))
    assert recorded == [(actual, "another")]


def test_tensors_on_several_devices() -> None:
    with pytest.raises(ValueError, match="tensors are on cpu and meta; move them to one device"):
        on_device(torch.zeros(1), torch.zeros(1, device="meta"))


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"on cuda:0, where kernels need CuPy: pip install 'jacsparse\[gpu"):
        cupy_backend.cupy_for(CUDA)


def made_up(version: str = "14.2.0") -> types.ModuleType:
    """A CuPy that compiles nothing, and notes what it is asked for; a kernel's handle is its place in `kernels`."""
    cupy: Any = types.ModuleType("cupy")
    cupy.__version__, cupy.kernels, cupy.compiled, cupy.allowed, cupy.entered = version, [None], [], [], []

    class Context:
        def __init__(self, *values: Any) -> None:
            self.values = values

        def __enter__(self) -> Context:
            cupy.entered.append(self)
            return self

        def __exit__(self, *_: object) -> None:
            assert cupy.entered.pop() is self

    class Device(Context):
        pass

    class ExternalStream(Context):
        def __init__(self, pointer: int, device: int) -> None:
            assert version < "14", "deprecated"
            super().__init__(pointer)

    class Stream(Context):
        @classmethod
        def from_external(cls, stream: Any) -> Stream:
            assert stream.__cuda_stream__()[0] == 0
            return cls(stream.__cuda_stream__()[1])

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name, self.most, self.kernel = name, 48 * 1024, types.SimpleNamespace(ptr=len(cupy.kernels))
            cupy.kernels.append(self)

        @property
        def max_dynamic_shared_size_bytes(self) -> int:
            return self.most

        @max_dynamic_shared_size_bytes.setter
        def max_dynamic_shared_size_bytes(self, most: int) -> None:
            assert cupy.entered, "of which device?"
            cupy.allowed.append(most)
            self.most = most

    class Module:
        def __init__(self, code: str, options: Any, name_expressions: Any) -> None:
            assert "SHARED" in code and "-std=c++17" in options
            self.names = name_expressions

        def get_function(self, name: str) -> Kernel:
            assert name in self.names and cupy.entered
            cupy.compiled.append((*self.names, cupy.entered[-1].values))
            return Kernel(name)

    if version < "14":
        del Stream.from_external
    cupy.RawModule = Module
    cupy.cuda = types.SimpleNamespace(
        Device=Device,
        Stream=Stream,
        ExternalStream=ExternalStream,
        runtime=types.SimpleNamespace(getDeviceCount=lambda: 1),
        nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)),
    )
    return cupy


class MadeUpLaunch(NamedTuple):
    """What the made-up driver reads where a launch's addresses point."""

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    arguments: tuple[Any, ...]
    #: The device that was current.
    device: int


class MadeUpDriver:
    """CUDA's driver, which runs nothing.

    Attributes
    ----------
    launches : list of MadeUpLaunch
        In order.
    seconds : float
        How long a launch takes.
    status : int
        The error that launches return.
    current : int
        The current device of all threads.
    contexts : set of int
        The threads that have a context; None where all have one.
    """

    _CELLS: ClassVar[dict[Any, Any]] = {
        np.int32: ctypes.c_int32,
        np.int64: ctypes.c_int64,
        np.float32: ctypes.c_float,
        np.float64: ctypes.c_double,
        np.bool_: ctypes.c_bool,
    }

    def __init__(self, cupy: Any) -> None:
        self.cupy, self.launches, self.seconds, self.status, self.current = cupy, list[MadeUpLaunch](), 0.0, 0, 0
        self.contexts: set[int] | None = None

    def cuLaunchKernelEx(self, configuration: int, handle: int, arguments: int, extra: None) -> int:
        if self.contexts is not None and threading.get_ident() not in self.contexts:
            return 201
        if self.status:
            return self.status
        time.sleep(self.seconds)
        kernel = self.cupy.kernels[handle]
        *sizes, shared = (ctypes.c_uint * 7).from_address(configuration)
        stream, attributes = (ctypes.c_uint64 * 2).from_address(configuration + 32)
        assert attributes == 0 and ctypes.c_uint.from_address(configuration + 48).value == 0 and extra is None
        assert shared <= kernel.most
        file = next(file for file in FILES if kernel.name in file.parameters)
        parameters = file.parameters[kernel.name]
        addresses = (ctypes.c_void_p * len(parameters)).from_address(arguments)
        values = [
            (ctypes.c_uint64 if parameter.pointer else self._CELLS[parameter.type]).from_address(address).value
            for parameter, address in zip(parameters, addresses, strict=True)
        ]
        launch = (kernel.name, tuple(sizes[:3]), tuple(sizes[3:]), shared, stream, tuple(values), self.current)
        self.launches.append(MadeUpLaunch(*launch))
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"out of resources" if status == 701 else None
        return 0

    def cuDeviceGet(self, handle: Any, device: int) -> int:
        handle._obj.value = 100 + device
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: Any) -> int:
        context._obj.value = 1000 + handle.value
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        if context.value == 1100 + self.current:
            assert self.contexts is not None
            self.contexts.add(threading.get_ident())
            return 0
        return 701


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    actual = made_up()
    monkeypatch.setitem(sys.modules, "cupy", actual)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: types.SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return actual


@pytest.fixture
def driver(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> MadeUpDriver:
    """A driver whose current device is 0; device d has the current stream 70 + d."""
    actual = MadeUpDriver(cupy)

    @contextlib.contextmanager
    def on(device: int) -> Iterator[None]:
        before, actual.current = actual.current, device
        yield
        actual.current = before

    monkeypatch.setattr(runtime_driver, "driver", lambda: actual)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: actual.current, raising=False)
    monkeypatch.setattr(torch.cuda, "device", on)
    return actual


def test_a_cupy_that_does_not_fit(cupy: Any) -> None:
    def broken() -> None:
        raise RuntimeError("cudaErrorInsufficientDriver")

    cupy.cuda.runtime.getDeviceCount = broken
    with pytest.raises(RuntimeError, match=r"CuPy 14\.2\.0 cannot run here \(cudaError.*: pip install cupy-cuda1\dx"):
        cupy_backend.cupy_for(CUDA)


def test_a_cupy_without_a_compiler(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("libnvrtc.so.13: cannot open shared object file")

    cupy.cuda.nvrtc.getVersion = missing
    for version, package in (("12.8", "nvidia-cuda-nvrtc-cu12"), ("13.0", "nvidia-cuda-nvrtc")):
        monkeypatch.setattr(torch.version, "cuda", version)
        remedy = f"pip install 'cupy-cuda{version[:2]}x[ctk]' or pip install {package}"
        with pytest.raises(RuntimeError, match=rf"finds no NVRTC.*libnvrtc.*: {re.escape(remedy)}$"):
            cupy_backend.cupy_for(CUDA)


def test_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(RuntimeError, match=r"cuda:0 is ROCm's, for which there are no kernels; .* \.cpu\(\)"):
        cupy_backend.cupy_for(CUDA)


@pytest.mark.parametrize(("version", "extra"), [(None, "gpu"), ("12.6", "gpu"), ("13.0", "gpu-cuda13")])
def test_the_extra_is_that_of_the_cuda_version(
    version: str | None, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setitem(sys.modules, "cupy", None)
    J = jacsparse.jacobian(torch.nn.ReLU(), torch.ones(1, 2))
    with pytest.raises(ImportError, match=rf"pip install 'jacsparse\[{extra}\]'"):
        J.to_cupy()


def launch(instance: str = "take<float, int>", device: torch.device = CUDA, **options: Any) -> list[Any]:
    """Two blocks of 128 threads."""
    source, place = torch.zeros(3, dtype=torch.float64 if "double" in instance else torch.float32), torch.zeros(3)
    arguments = [source, place.int(), 3, None]
    FILE.launch(instance, [2], [32, 4], *arguments, device=device, **options)
    return arguments


def test_what_is_launched(driver: MadeUpDriver) -> None:
    source, place, *_ = launch(shared=512)
    arguments = source.data_ptr(), place.data_ptr(), 3, 0
    assert driver.launches == [MadeUpLaunch("take<float, int>", (2, 1, 1), (32, 4, 1), 512, 70, arguments, 0)]
    assert not on_device(source)


NUMBERS = [
    {"whole": -3, "far": -(2**40), "single": 0.1, "precise": 0.1, "answer": True},
    {"whole": 2**31 - 1, "far": 2**62, "single": 0.0, "precise": -0.0, "answer": False},
    {"whole": 0, "far": 0, "single": math.inf, "precise": -math.inf, "answer": True},
    {"whole": 1, "far": 1, "single": 2.0**-149, "precise": 5e-324, "answer": False},
]


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("real", ["float", "double"])
def test_arguments_of_each_type(real: str, numbers: dict[str, Any], driver: MadeUpDriver) -> None:
    values, places = (
        torch.zeros(2, dtype=getattr(torch, {"float": "float32"}.get(real, "float64"))),
        torch.zeros(2).int(),
    )
    instance, device = f"every_type<{real}>", torch.device("cuda", 1)
    expected = {**numbers, "single": float(np.float32(numbers["single"]))}
    record = EVERY_TYPE.record(instance, [3, 2], [64], device=device, shared=64, **numbers)
    for number, (first, second) in enumerate(((values, places), (None, places), (values[1:], None))):
        record(7 + number, first, second)
        EVERY_TYPE.launch(
            instance, [3, 2], [64], *numbers.values(), 7 + number, first, second, device=device, shared=64
        )
        pointers = tuple(0 if each is None else each.data_ptr() for each in (first, second))
        arguments = (*expected.values(), 7 + number, *pointers)
        for actual in driver.launches[-2:]:
            assert actual == MadeUpLaunch(instance, (3, 2, 1), (64, 1, 1), 64, 71, arguments, 1)
            assert [*map(type, actual.arguments)] == [*map(type, arguments)]
    assert driver.current == 0 and len(driver.launches) == 6


def test_another_device_than_the_current_one(driver: MadeUpDriver) -> None:
    for current, wanted in ((0, 0), (2, 0), (0, 2), (2, 2)):
        driver.current = current
        launch(device=torch.device("cuda", wanted))
        assert (driver.launches[-1].device, driver.launches[-1].stream, driver.current) == (
            wanted,
            70 + wanted,
            current,
        )
    # One without a number is the current device when the kernel is asked for.
    launch(device=torch.device("cuda"))
    assert driver.launches[-1].device == 3


@pytest.mark.parametrize(("status", "words"), [(701, "out of resources"), (999, "an unknown error")])
def test_what_the_driver_refuses(status: int, words: str, driver: MadeUpDriver) -> None:
    driver.status = status
    message = rf"take<float, int> was not launched on cuda:0: {words} \({status}\)"
    with pytest.raises(RuntimeError, match=message):
        launch()
    with pytest.raises(RuntimeError, match=message):
        FILE.record("take<float, int>", [1], [32], device=CUDA)(None, None, 3, None)


def test_a_thread_without_a_context_gets_that_of_the_device(driver: MadeUpDriver) -> None:
    driver.contexts = set()
    device = torch.device("cuda", 2)
    record = FILE.record("take<float, int>", [1], [32], device=device)
    for number in range(1, 3):
        thread = threading.Thread(target=lambda: [record(None, None, 3, None), launch(device=device)])
        thread.start()
        thread.join()
        assert [each.device for each in driver.launches] == 2 * number * [2]
    driver.contexts.clear()
    driver.cuCtxSetCurrent = lambda context: 701  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"cuda:2 has no context for a thread: out of resources \(701\)"):
        record(None, None, 3, None)


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        """A driver of CUDA 11."""

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    for library in (missing, lambda name: Older()):
        monkeypatch.setattr(ctypes, "CDLL", library)
        message = r"no CUDA driver that launches kernels \(.*\); install one for CUDA 12 or later"
        with pytest.raises(RuntimeError, match=message):
            inspect.unwrap(runtime_driver.driver)()


def test_what_is_launched_is_compiled_once_and_alone(cupy: Any, driver: MadeUpDriver) -> None:
    for device in (CUDA, CUDA, torch.device("cuda")):
        for instance in ("take<float, int>", "take<double, int>"):
            launch(instance, device)
            FILE.record(instance, [1], [32], device=device)(None, None, 3, None)
    assert len(driver.launches) == 12
    assert cupy.compiled == [(f"take<{real}, int>", (device,)) for device in (0, 3) for real in ("float", "double")]


def test_nothing_is_compiled_while_a_graph_is_captured(driver: MadeUpDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    launch("take<double, int>")
    record = FILE.record("take<double, int>", [1], [32], device=CUDA)
    monkeypatch.setattr(device_memory, "_capturing", lambda _: True)
    launch("take<double, int>")
    record(None, None, 3, None)
    FILE.record("take<double, int>", [1], [32], device=CUDA)(None, None, 3, None)
    message = "take<float, int> is not compiled for cuda:0 yet, and a CUDA graph"
    with pytest.raises(RuntimeError, match=message):
        launch()
    with pytest.raises(RuntimeError, match=message):
        FILE.record("take<float, int>", [1], [32], device=CUDA)
    assert len(driver.launches) == 4


def test_shared_memory_is_allowed_once(cupy: Any, driver: MadeUpDriver) -> None:
    """More than 48 KiB a block gets only where it is asked for, and never less than before."""
    for kib in (0, 48, 64, 96, 64, 96):
        launch(shared=kib * 1024)
    assert cupy.allowed == [64 * 1024, 96 * 1024]
    # As another thread's, which has compiled it at the same time.
    cupy_backend._compiled(FILE, "take<float, int>", 0).shared = 48 * 1024
    launch(shared=64 * 1024)
    assert cupy.allowed == [64 * 1024, 96 * 1024]
    FILE.record("take<float, int>", [1], [32], device=CUDA, shared=128 * 1024)(None, None, 3, None)
    assert cupy.allowed[2:] == [128 * 1024] and driver.launches[-1].shared == 128 * 1024


def test_threads_have_their_own_arguments(driver: MadeUpDriver) -> None:
    driver.seconds = 1e-3
    record = FILE.record("take<float, int>", [2], [32], device=CUDA)
    tensors = torch.zeros(4, 8)

    def work(number: int) -> None:
        source, place, out = tensors[number], tensors[number].int(), tensors[number, 4:]
        begin.wait()
        for _ in range(10):
            record(source, place, number, out)
            FILE.launch("take<float, int>", [number + 3], [32], source, place, number, None, device=CUDA)

    begin, threads = threading.Barrier(4), [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 80
    by_place: dict[int, set[int]] = {}
    for each in driver.launches:
        source, place, number, out = each.arguments
        recorded = each.grid == (2, 1, 1)
        assert source == tensors[number].data_ptr() and each.grid[0] in (2, number + 3)
        assert out == (tensors[number, 4:].data_ptr() if recorded else 0)
        by_place.setdefault(number, set()).add(place)
    assert [*map(len, by_place.values())] == [1] * 4 and len(set().union(*by_place.values())) == 4
    # They took turns.
    assert [each.arguments[2] for each in driver.launches] != sorted(each.arguments[2] for each in driver.launches)


ALL_NUMBERS = NUMBERS[0]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({**ALL_NUMBERS, "whole": None}, "takes a number whole, and a record leaves out those of 64 bits alone"),
        (
            {name: ALL_NUMBERS[name] for name in ("whole", "far", "single", "precise")},
            "takes a number answer, and a rec",
        ),
        ({**ALL_NUMBERS, "wholes": 3, "value": 4}, "takes no constant wholes, value"),
        ({**ALL_NUMBERS, "values": 4}, "values points to float, and 4 is no tensor"),
        ({**ALL_NUMBERS, "values": torch.zeros(2).int()}, "values points to float, and the tensor is of torch.int32"),
        ({**ALL_NUMBERS, "far": None}, "what a record leaves out must be the last parameters, and one at least"),
    ],
)
def test_numbers_that_a_record_does_not_take(numbers: dict[str, Any], message: str, driver: MadeUpDriver) -> None:
    with pytest.raises(TypeError, match=rf"every_type<float>:? {message}"):
        EVERY_TYPE.record("every_type<float>", [1], [32], device=CUDA, **numbers)


def test_numbers_too_large_for_a_record(driver: MadeUpDriver) -> None:
    with pytest.raises(OverflowError):
        EVERY_TYPE.record("every_type<float>", [1], [32], device=CUDA, **{**ALL_NUMBERS, "whole": 2**31})


def test_as_many_values_as_a_record_leaves_out(driver: MadeUpDriver) -> None:
    record = EVERY_TYPE.record("every_type<float>", [1], [32], device=CUDA, **ALL_NUMBERS)
    for count in (0, 2, 4):
        with pytest.raises(ValueError, match=r"zip\(\) argument 2 is"):
            record(*[None] * count)
    assert not driver.launches


def test_a_record_without_blocks_runs_nothing(cupy: Any, driver: MadeUpDriver) -> None:
    EVERY_TYPE.record("every_type<float>", [4, 0], [32], device=CUDA, **ALL_NUMBERS)(1, None, None)
    assert not driver.launches and not cupy.compiled
    with pytest.raises(ValueError, match="CUDA has no grid of"):
        EVERY_TYPE.record("every_type<float>", [1, 65_536], [32], device=CUDA, **ALL_NUMBERS)


def test_launches_and_records_are_intercepted(driver: MadeUpDriver) -> None:
    runs: list[Callable[[], None]] = []
    record = EVERY_TYPE.record("every_type<float>", [1], [32], device=CUDA, **ALL_NUMBERS)
    values = torch.zeros(3)
    with intercepted(runs.append):
        launch()
        record(8, values, None)
    assert not driver.launches and len(runs) == 2
    record(9, None, None)
    for run in (*runs, runs[1]):
        run()
    numbers = [each.arguments[5:] for each in driver.launches if each.name == "every_type<float>"]
    assert numbers == [(9, 0, 0), (8, values.data_ptr(), 0), (8, values.data_ptr(), 0)]
    assert len(driver.launches) == 4


@pytest.mark.parametrize(("version", "kind"), [("13.6.0", "ExternalStream"), ("14.0.0", "Stream")])
def test_streams_of_each_cupy(version: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", made_up(version))
    stream = cupy_backend.cupy_stream(7, 0)
    assert type(stream).__name__ == kind and stream.values == (7,)
    assert cupy_backend.cupy_stream(7, 0) is stream


def test_tensors_of_a_record_outlive_it(driver: MadeUpDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each other stream they are noted once; what is captured keeps them."""
    source, place = torch.zeros(2), torch.zeros(2).int()
    source.made_on = place.made_on = 70  # type: ignore[attr-defined]
    noted: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: noted.append(id(tensor)))
    monkeypatch.setattr(device_memory, "_captured", {})
    record = FILE.record("take<float, int>", [1], [32], device=CUDA, source=source, place=place, count=2)
    out = torch.zeros(2)
    for stream in (70, 71, 71, 70):
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _, stream=stream: stream)
        monkeypatch.setattr(device_memory, "_stream_on", lambda _, stream=stream: stream)
        record(out)
    assert noted == [id(source), id(place)] and not device_memory._captured
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True)
    monkeypatch.setattr(device_memory, "_capturing", lambda _: True)
    record(out)
    assert set(device_memory._captured) == {id(source), id(place)}
    assert driver.launches[-1].arguments == (source.data_ptr(), place.data_ptr(), 2, out.data_ptr())
