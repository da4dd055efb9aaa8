"""Settings and helpers that all tests share."""

from __future__ import annotations

import gc
import importlib
import os
import warnings

import pytest
import torch

if os.environ.get("JACSPARSE_TESTS") != "gpu":
    from hypothesis import HealthCheck, settings

    _COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much]}
    settings.register_profile("ci", max_examples=100, derandomize=True, **_COMMON)
    settings.register_profile("full", max_examples=1000, **_COMMON)
    settings.register_profile("portable", max_examples=25, derandomize=True, **_COMMON)
    settings.load_profile(os.environ.get("JACSPARSE_TESTS", "ci"))

    import numba

    # With it librosa compiles, at import and for twenty seconds where nothing is kept, what no feature of sounds uses.
    numba.guvectorize = lambda *_, **__: lambda function: function


# Thousands of tests, and the packages that they import, stay until the end: the garbage collector is to leave them be.
gc.disable()


def pytest_collection_finish() -> None:
    """Begin to collect garbage, of what tests leave."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


# What an earlier run kept on disk would hide what this one does.
os.environ["JACSPARSE_CACHE_MIB"] = "0"


def pytest_report_header() -> str:
    """Which processor the numbers come from, or which one is emulated."""
    numba = os.environ.get("NUMBA_CPU_NAME", "the host's")
    aten = torch.backends.cpu.get_cpu_capability()
    return f"kernels: PyTorch's for {aten}, Numba's for {numba}; {_THREADS} thread(s)"


@pytest.fixture(autouse=True)
def _long(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("full") and os.environ.get("JACSPARSE_TESTS") != "full":
        pytest.skip("run by make test-full")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    # PyTorch's remark on padding="same" with even kernels.
    warnings.filterwarnings("ignore", message="Using padding='same'")


@pytest.fixture(autouse=True)
def _without_recent_programs() -> None:
    # Tests whose functions have one code would share programs.
    importlib.import_module("jacsparse.tracing").graphs_of.cache_clear()


# Test workers share the cores, and OpenMP's threads wait by spinning. Tests of threads ask for more themselves.
_THREADS = int(os.environ.get("JACSPARSE_TEST_THREADS", "1"))


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    torch.set_num_threads(_THREADS)
