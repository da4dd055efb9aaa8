"""Kernels run here only where there is a compiler for the CPU."""

from __future__ import annotations

import pytest

from tests.cuda.fibers import COMPILER


@pytest.fixture(autouse=True, scope="module")
def _compiler(request: pytest.FixtureRequest) -> None:
    if COMPILER is None and request.module.__name__.rpartition(".")[2] != "test_compile":
        pytest.skip("no g++ to compile the kernels with")
