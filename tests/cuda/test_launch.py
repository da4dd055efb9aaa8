"""What comes before a kernel runs: arguments, uploads, and a CuPy that is missing, broken or made up."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from jacsparse.patterns import _cuda, _values_cuda
from jacsparse.patterns._structure import frozen

from tests.cuda.harness import emulated

FILE = _values_cuda._FILE
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    _cuda._cupy.cache_clear()
    yield
    _cuda._cupy.cache_clear()
    _cuda._compiled.cache_clear()


def test_parameters_are_read_from_the_file() -> None:
    assert [(p.type, p.pointer, p.name) for p in FILE.parameters["take<double, int>"]] == [
        ("double", True, "source"),
        ("int", True, "place"),
        ("long long", False, "count"),
        ("double", True, "out"),
    ]


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


def test_a_grid_without_blocks_runs_nothing() -> None:
    empty = torch.zeros(0)
    FILE.launch("take<float, int>", [0], [32], empty, empty.int(), 0, empty, device=CUDA)


def test_arrays_are_uploaded_once_and_go_with_their_owner() -> None:
    with emulated():
        array = frozen(np.arange(5))
        first = _cuda.uploaded(array, torch.device("cpu"))
        assert first is _cuda.uploaded(array, torch.device("cpu")) and first.dtype == torch.int64
        assert _cuda.uploaded(array, torch.device("cpu"), torch.int32).dtype == torch.int32
        assert len(_cuda._uploads) == 2
        del array, first
        gc.collect()
        assert not _cuda._uploads
        with pytest.raises(ValueError, match="the array may change; freeze it first"):
            _cuda.uploaded(np.arange(5), torch.device("cpu"))


def test_tensors_on_several_devices() -> None:
    with pytest.raises(ValueError, match="tensors are on cpu and meta; move them to one device"):
        _cuda.on_device(torch.zeros(1), torch.zeros(1, device="meta"))


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"tensors are on cuda:0, where kernels need CuPy: pip install cupy-cuda1\dx"):
        _cuda._cupy(CUDA)


def made_up(**runtime: Any) -> types.ModuleType:
    """A CuPy that runs nothing, and notes what it is asked for."""
    cupy: Any = types.ModuleType("cupy")
    cupy.__version__, cupy.launches = "0.0", []

    class Context:
        def __init__(self, *given: Any) -> None:
            self.given = given

        def __enter__(self) -> Context:
            return self

        def __exit__(self, *_: object) -> None:
            return None

    class Kernel:
        max_dynamic_shared_size_bytes = 0

        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, grid: Any, block: Any, arguments: Any, shared_mem: int) -> None:
            cupy.launches.append((self.name, grid, block, arguments, shared_mem, self.max_dynamic_shared_size_bytes))

    class Module:
        def __init__(self, code: str, options: Any, name_expressions: Any) -> None:
            assert "SHARED" in code and "-std=c++17" in options
            self.names = name_expressions

        def get_function(self, name: str) -> Kernel:
            assert name in self.names
            return Kernel(name)

    cupy.RawModule = Module
    cupy.cuda = types.SimpleNamespace(
        Device=Context,
        ExternalStream=Context,
        runtime=types.SimpleNamespace(getDeviceCount=lambda: 1, **runtime),
        nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)),
    )
    return cupy


def test_a_cupy_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy: Any = made_up()

    def broken() -> None:
        raise RuntimeError("libnvrtc.so.12: cannot open shared object file")

    cupy.cuda.nvrtc.getVersion = broken
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(RuntimeError, match=r"CuPy 0\.0 cannot run here \(libnvrtc.*: pip install cupy-cuda1\dx"):
        _cuda._cupy(CUDA)


def test_what_cupy_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy: Any = made_up()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: types.SimpleNamespace(cuda_stream=7))
    source, place, out = torch.zeros(3), torch.zeros(3, dtype=torch.int32), torch.zeros(3)
    for shared in (0, 64 * 1024):
        FILE.launch("take<float, int>", [2], [32, 4], source, place, 3, None, device=CUDA, shared=shared)
    (name, grid, block, arguments, asked, most), (*_, second_asked, second_most) = cupy.launches
    assert (name, grid, block) == ("take<float, int>", (2, 1, 1), (32, 4, 1))
    assert [int(value) for value in arguments] == [source.data_ptr(), place.data_ptr(), 3, 0]
    assert [value.nbytes for value in arguments] == [8, 8, 8, 8]
    # More than 48 KiB a block gets only where it is asked for.
    assert (asked, most, second_asked, second_most) == (0, 0, 64 * 1024, 64 * 1024)
    assert not _cuda.on_device(out)
