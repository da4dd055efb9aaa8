"""The harness itself: each seeded fault is caught, by the tool that is there for it."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tests.cuda.fibers import ORDERS, KernelError, call, compiled, sanitized

#: Sums each row of 4 · 64 numbers, by a block of two warps: vector loads, both kinds of shared memory, a barrier of the
#: block, one of a warp, shuffles, and a counter of the rows that are done.
KERNEL = """
template <typename T>
__global__ void row_sums(const T* __restrict__ x, int rows, T* __restrict__ sums, int* __restrict__ done) {
  SHARED(T, halves, 2);
  DYNAMIC_SHARED(T, line);
  int row = blockIdx.x, i = threadIdx.x, lane = i % 32, warp = i / 32;
  if (row < rows) {
    const float4* four = reinterpret_cast<const float4*>(x + row * 256);
    float4 own = four[i];
    line[i] = own.x + own.y + own.z + own.w;
  }
  __syncthreads();
  T pair = line[63 - i];
  __syncthreads();
  line[i] = pair;
  __syncwarp();
  T value = line[warp * 32 + 31 - lane];
  for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(0xffffffffu, value, step);
  if (lane == 0) halves[warp] = value;
  __syncthreads();
  if (i == 0) {
    sums[row] = halves[0] + halves[1];
    atomicAdd(done, 1);
  }
}
"""

#: What is replaced by what, and what must see it: the numbers, or that they differ from order to order, a check in
#: every build, or a sanitizer by its words.
FAULTS = {
    "swapped index": ("x + row * 256", "x + i * 256 % 512", "numbers"),
    "missing reduction step": ("step = 16", "step = 8", "numbers"),
    "uninitialised shared memory": (
        "if (lane == 0) halves[warp] = value;",
        "if (i == 0) halves[0] = value;",
        "numbers",
    ),
    "all lanes' sums for the first's": ("if (lane == 0) halves", "halves", "orders"),
    "the last block's sum": ("sums[row] =", "sums[0] =", "orders"),
    "a lane that leaves early": ("  T pair = line", "  if (i == 5) return;\n  T pair = line", "check: waits at"),
    "a barrier for some": ("__syncthreads();\n  T pair", "if (i < 40) __syncthreads();\n  T pair", "check: waits at"),
    "a mask without the lane": ("0xffffffffu, value", "0x0000ffffu, value", "check: its mask does not name the lane"),
    "beyond global memory": ("four[i]", "four[i + row]", "address: heap-buffer-overflow"),
    "beyond static shared memory": (
        "halves[warp] = value",
        "halves[warp + 1] = value",
        "address: heap-buffer-overflow",
    ),
    "beyond dynamic shared memory": ("line[63 - i]", "line[64 - i]", "address: heap-buffer-overflow"),
    "a misaligned vector load": ("x + row * 256)", "x + row * 256 - row)", "address: misaligned"),
    "an overflow of integers": (
        "int row = blockIdx.x",
        "volatile int far = rows * 1000000000;\n  int row = blockIdx.x",
        "address: signed integer overflow",
    ),
    "a dropped barrier": ("  __syncthreads();\n  T pair", "  T pair", "thread: data race"),
    "a dropped barrier of a warp": ("  __syncwarp();\n  T value", "  T value", "thread: data race"),
    "a shuffle for a barrier": (
        "  __syncwarp();\n  T value",
        "  __shfl_sync(0xffffffffu, pair, 0);\n  T value",
        "thread: data race",
    ),
    "a counter without atomics": ("atomicAdd(done, 1)", "*done += 1", "thread: data race"),
    "two blocks on one address": ("sums[row] =", "sums[row / 2] =", "thread: data race"),
}


def run(source: str) -> tuple[np.ndarray, int]:
    """The sums of three rows, and the counter; what is beside them in memory is not theirs."""
    function = compiled("row_sums", source, ("row_sums<float>",))["row_sums<float>"]
    x, sums, done = np.arange(768, dtype=np.float32), np.full(3, np.nan, np.float32), np.zeros(1, np.int32)
    call(function, (3, 1, 1), (64, 1, 1), (x, np.int32(3), sums, done), 64 * 4)
    return sums, int(done[0])


EXPECTED = np.arange(768, dtype=np.float64).reshape(3, 256).sum(axis=1)


def faulty(name: str) -> str:
    right, wrong, _ = FAULTS[name]
    assert KERNEL.count(right) == 1, name
    return KERNEL.replace(right, wrong)


@pytest.mark.parametrize("order", ORDERS)
def test_a_right_kernel_in_any_order(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIBER_ORDER", order)
    sums, done = run(KERNEL)
    assert np.array_equal(sums, EXPECTED) and done == 3


@pytest.mark.parametrize("kind", ["address", "thread"])
def test_a_right_kernel_under_sanitizers(kind: str) -> None:
    result = sanitized(kind, ["-m", "tests.cuda.test_harness", "right"])
    assert result.returncode == 0 and "right: True" in result.stdout, result.stdout


@pytest.mark.parametrize("name", [name for name, (*_, tool) in FAULTS.items() if tool == "numbers"])
def test_faults_that_numbers_show(name: str) -> None:
    sums, _ = run(faulty(name))
    assert not np.array_equal(sums, EXPECTED)


@pytest.mark.parametrize("name", [name for name, (*_, tool) in FAULTS.items() if tool == "orders"])
def test_faults_that_orders_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = set()
    for order in ORDERS:
        monkeypatch.setenv("FIBER_ORDER", order)
        results.add(run(faulty(name))[0].tobytes())
    assert len(results) > 1


@pytest.mark.parametrize("name", [name for name, (*_, tool) in FAULTS.items() if tool.startswith("check")])
def test_faults_that_every_build_checks(name: str) -> None:
    with pytest.raises(KernelError, match=FAULTS[name][2].removeprefix("check: ")):
        run(faulty(name))


@pytest.mark.parametrize(
    "name", [name for name, (*_, tool) in FAULTS.items() if tool.startswith(("address", "thread"))]
)
def test_faults_that_sanitizers_find(name: str) -> None:
    kind, _, words = FAULTS[name][2].partition(": ")
    result = sanitized(kind, ["-m", "tests.cuda.test_harness", name])
    assert result.returncode != 0 and words in result.stdout, result.stdout[-3000:]


def test_wrong_launches() -> None:
    function = compiled("row_sums", KERNEL, ("row_sums<float>",))["row_sums<float>"]
    x, sums, done = np.zeros(768, np.float32), np.zeros(3, np.float32), np.zeros(1, np.int32)
    arguments = (x, np.int32(3), sums, done)
    with pytest.raises(KernelError, match="a block has 2048 threads"):
        call(function, (1, 1, 1), (2048, 1, 1), arguments, 256)
    with pytest.raises(KernelError, match="the grid is 65536 by 1 in y and z"):
        call(function, (1, 65536, 1), (64, 1, 1), arguments, 256)
    bound = KERNEL.replace("__global__ void", "__global__ void __launch_bounds__(T{} < 1 ? 32 : 64, 1)")
    with pytest.raises(KernelError, match="a block has 64 threads; it may have 1 to 32"):
        call(compiled("bound", bound, ("row_sums<float>",))["row_sums<float>"], (3, 1, 1), (64, 1, 1), arguments, 256)
    with pytest.raises(KernelError, match="the launch asks for none"):
        call(function, (1, 1, 1), (64, 1, 1), arguments, 0)
    with pytest.raises(KernelError, match="bytes of shared memory"):
        call(function, (1, 1, 1), (64, 1, 1), arguments, 2**20)
    with pytest.raises(KernelError, match="does not compile"):
        compiled("broken", "__global__ void broken() { nonsense }", ("broken",))
    with pytest.raises(KernelError, match="write SHARED"):
        compiled("keyword", "__global__ void keyword() { __shared__ int x; }", ("keyword",))


if __name__ == "__main__":
    chosen = sys.argv[1]
    actual, _ = run(KERNEL if chosen == "right" else faulty(chosen))
    print(f"{chosen}: {np.array_equal(actual, EXPECTED)}")
