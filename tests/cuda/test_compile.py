"""Every instance of every kernel compiles for the GPUs that are supported, without a GPU."""

from __future__ import annotations

import pytest

from jacsparse import patterns, recurrence, spgemm  # noqa: F401  (importing them lists their kernels)
from jacsparse.runtime import KERNEL_FILES
from tests.cuda import nvrtc

try:
    nvrtc.library()
except ImportError as error:
    pytestmark = pytest.mark.skip(reason=str(error))

#: Turing, Ampere and Hopper, which have the same registers and static shared memory.
ARCHITECTURES = ("sm_90", *(pytest.param(name, marks=pytest.mark.full) for name in ("sm_75", "sm_80")))
#: Up to a minute for each architecture. The harness compiles these kernels for the CPU.
CELLS = ("rnn_tanh", "rnn_relu", "gru", "lstm")
LONG = ("linear.cu", *(f"{cell}{kind}.cu" for cell in CELLS for kind in ("", "_layer")))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in LONG)) for name in sorted(KERNEL_FILES)]
)
def test_compiles_without_spills(name: str, architecture: str) -> None:
    results = nvrtc.compile_file(KERNEL_FILES[name], architecture)
    assert set(results) == set(KERNEL_FILES[name].instances)
    most = 64 if name == "products.cu" else 255
    for instance, resources in results.items():
        assert resources.spilled == 0, instance
        assert 0 < resources.registers <= most and resources.shared <= 48 * 1024, instance


def test_all_kernels_of_a_file_have_instances() -> None:
    # Of recurrent cells each has its own instances of one file.
    for path in {file.path for file in KERNEL_FILES.values()}:
        files = [file for file in KERNEL_FILES.values() if file.path == path]
        instances = {instance.partition("<")[0] for file in files for instance in file.instances}
        assert instances == set(files[0]._templates), path.name


def test_what_does_not_compile_says_why() -> None:
    file = nvrtc.KernelFile.__new__(nvrtc.KernelFile)
    object.__setattr__(file, "path", KERNEL_FILES["values.cu"].path)
    object.__setattr__(file, "instances", ("nothing<float>",))
    with pytest.raises(RuntimeError, match="nothing"):
        nvrtc.compile_file(file, "sm_90")
