"""Kernels run only where there is a GPU, or a compiler for the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.cuda.fibers import COMPILER
from tests.cuda.harness import ON_GPU


@pytest.fixture(autouse=True, scope="module")
def _compiler(request: pytest.FixtureRequest) -> None:
    if ON_GPU and not torch.cuda.is_available():
        pytest.skip("no CUDA device that PyTorch sees")
    if COMPILER is None and not ON_GPU and request.module.__name__.rpartition(".")[2] != "test_compile":
        pytest.skip("no g++ to compile the kernels with")


@pytest.fixture(autouse=True, scope="session")
def _every_bit() -> None:
    """What is compared with a GPU's own products is made of whole float32 numbers."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not ON_GPU:
        pytest.skip("needs a GPU: make test-gpu")
