"""What comes before a kernel runs: arguments, uploads, and a CuPy that is missing, broken or made up."""

from __future__ import annotations

import gc
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from jacsparse.spgemm import matvec
from torch._subclasses import FakeTensorMode

import jacsparse
from jacsparse.runtime import KERNEL_FILES, cupy_backend, device_memory, frozen, on_device
from tests.cuda.harness import emulated
from tests.helpers import random_pattern

FILE = KERNEL_FILES["values.cu"]
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
    with pytest.raises(ImportError, match=r"tensors are on cuda:0, where kernels need CuPy: pip install cupy-cuda1\dx"):
        cupy_backend.cupy_for(CUDA)


def made_up(version: str = "14.2.0") -> types.ModuleType:
    """A CuPy that runs nothing, and notes what it is asked for."""
    cupy: Any = types.ModuleType("cupy")
    cupy.__version__, cupy.launches, cupy.compiled, cupy.allowed, cupy.entered = version, [], [], [], []

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
            self.name, self.most = name, 48 * 1024

        @property
        def max_dynamic_shared_size_bytes(self) -> int:
            return self.most

        @max_dynamic_shared_size_bytes.setter
        def max_dynamic_shared_size_bytes(self, most: int) -> None:
            assert cupy.entered, "of which device?"
            cupy.allowed.append(most)
            self.most = most

        def __call__(self, grid: Any, block: Any, arguments: Any, shared_mem: int) -> None:
            places = [(type(context).__name__, *context.values) for context in cupy.entered]
            assert shared_mem <= self.most
            cupy.launches.append((self.name, grid, block, arguments, shared_mem, places))

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


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    actual = made_up()
    monkeypatch.setitem(sys.modules, "cupy", actual)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: types.SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
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


def test_what_cupy_is_given(cupy: Any) -> None:
    source, place, *_ = launch()
    name, grid, block, arguments, shared, places = cupy.launches[0]
    assert (name, grid, block, shared) == ("take<float, int>", (2, 1, 1), (32, 4, 1), 0)
    assert [int(value) for value in arguments] == [source.data_ptr(), place.data_ptr(), 3, 0]
    assert [value.nbytes for value in arguments] == [8, 8, 8, 8]
    assert places == [("Device", 0), ("Stream", 7)]
    assert not on_device(source)


def test_what_is_launched_is_compiled_once_and_alone(cupy: Any) -> None:
    for device in (CUDA, CUDA, torch.device("cuda")):
        for instance in ("take<float, int>", "take<double, int>"):
            launch(instance, device)
    assert len(cupy.launches) == 6
    assert cupy.compiled == [(f"take<{real}, int>", (device,)) for device in (0, 3) for real in ("float", "double")]


def test_nothing_is_compiled_while_a_graph_is_captured(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launch("take<double, int>")
    monkeypatch.setattr(device_memory, "_capturing", lambda _: True)
    launch("take<double, int>")
    with pytest.raises(RuntimeError, match="take<float, int> is not compiled for cuda:0 yet, and a CUDA graph"):
        launch()
    assert len(cupy.launches) == 2


def test_shared_memory_is_allowed_once(cupy: Any) -> None:
    """More than 48 KiB a block gets only where it is asked for, and never less than before."""
    for kib in (0, 48, 64, 96, 64, 96):
        launch(shared=kib * 1024)
    assert cupy.allowed == [64 * 1024, 96 * 1024]
    # As another thread's, which has compiled it at the same time.
    cupy_backend._compiled(FILE, "take<float, int>", 0).shared = 48 * 1024
    launch(shared=64 * 1024)
    assert cupy.allowed == [64 * 1024, 96 * 1024]


@pytest.mark.parametrize(("version", "kind"), [("13.6.0", "ExternalStream"), ("14.0.0", "Stream")])
def test_streams_of_each_cupy(version: str, kind: str, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    older = made_up(version)
    monkeypatch.setitem(sys.modules, "cupy", older)
    launch()
    assert older.launches[0][-1] == [("Device", 0), (kind, 7)]
