"""Memory that goes from result to result."""

import gc
import subprocess
import sys
import threading

import numpy as np
import pytest
import scipy.sparse
import torch
from jacsparse.patterns import Full, Pattern

import jacsparse
from jacsparse.runtime import MEMORY_POOL
from jacsparse.runtime.memory_pool import ALIGNMENT, SMALLEST, MemoryPool


def test_memory_returns_after_the_last_view() -> None:
    """An array's views, and tensors over them, keep its memory from others."""
    pool = MemoryPool(4 * SMALLEST)
    tensor = torch.from_numpy(pool.empty((4, SMALLEST // 4), np.uint8))
    row, address = tensor[2], tensor.data_ptr()
    del tensor
    gc.collect()
    assert pool.nbytes == 0
    assert pool.empty((SMALLEST,), np.uint8).ctypes.data != address
    row.fill_(7)
    other = pool.empty((SMALLEST,), np.uint8)
    other[:] = 1
    assert bool((row == 7).all())
    del row, other
    assert pool.nbytes == 2 * SMALLEST
    again = [pool.empty((SMALLEST,), np.uint8) for _ in range(2)]
    assert address in {array.ctypes.data for array in again}


def test_arrays_are_as_asked_for() -> None:
    """Any shape and dtype, writable, apart from others, at multiples of the alignment."""
    pool = MemoryPool(64 * SMALLEST)
    for _ in range(2):
        arrays = [
            pool.empty(shape, dtype) for shape in [(512, 1024), (2**19,), (0, 3), (1, 2**19, 1)] for dtype in "fd"
        ]
        for number, array in enumerate(arrays):
            array[...] = number
        assert [set(array.ravel().tolist()) for array in arrays] == [
            {number} if array.size else set() for number, array in enumerate(arrays)
        ]
        assert all(array.flags.c_contiguous and array.flags.writeable for array in arrays)
        assert all(array.ctypes.data % ALIGNMENT == 0 for array in arrays if array.nbytes >= SMALLEST)


def test_what_was_returned_longest_ago_goes_first() -> None:
    """The pool holds at most its limit; larger arrays leave it as it is."""
    pool = MemoryPool(3 * SMALLEST)
    for size in (1, 2, 4):
        pool.empty((size, SMALLEST), np.uint8)
    assert pool.nbytes == 3 * SMALLEST
    one, other = pool.empty((SMALLEST,), np.uint8), pool.empty((SMALLEST,), np.uint8)
    del one, other
    assert [memory.nbytes for memory in pool._free] == [SMALLEST, SMALLEST]
    pool.clear()
    assert pool.nbytes == 0


def test_while_the_lock_is_held() -> None:
    """Nothing waits for a lock that this thread, or none that still runs, holds: memory is new, and freed."""
    pool = MemoryPool(4 * SMALLEST)
    before = pool.empty((SMALLEST,), np.uint8)
    with pool._lock:
        new = pool.empty((SMALLEST,), np.uint8)
        del before
        pool.clear()
    assert pool.nbytes == 0
    del new
    assert pool.nbytes == SMALLEST


def test_threads_never_share_memory() -> None:
    """Each thread's arrays hold what it wrote, while all take and give back."""
    pool, wrong = MemoryPool(8 * SMALLEST), []

    def work(mark: int) -> None:
        for _ in range(200):
            array = pool.empty((SMALLEST // 8,), np.int64)
            array[::512] = mark
            if (array[::512] != mark).any():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.nbytes <= 4 * SMALLEST


def test_while_the_interpreter_shuts_down() -> None:
    """Finalizers may compute large results when no module can be imported any more."""
    program = """
import sys
import numpy as np
from jacsparse.runtime.memory_pool import SMALLEST, MemoryPool

class Last:
    pool, shape, dtype = MemoryPool(SMALLEST), (SMALLEST,), np.uint8
    def __del__(self):
        print(self.pool.empty(self.shape, self.dtype).shape)

sys.modules["last"] = Last()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"({SMALLEST},)\n", "")


@pytest.mark.parametrize("kind", ["tensors", "arrays"])
def test_results_of_products_stay(kind: str) -> None:
    """A product's values stay what they are while later products are computed and dropped."""
    full = Pattern.of(Full(600, 600))
    plan = jacsparse.plan_product(Pattern.from_scipy(scipy.sparse.eye_array(600)), full)
    one, values = torch.ones(600, 1), torch.arange(360_000.0)[:, None]
    if kind == "arrays":
        one, values = one.numpy(), values.numpy()
    MEMORY_POOL.clear()
    product = plan.multiply(one, values)
    for factor in (2, 3, 4):
        plan.multiply(one * factor, values)
    assert (product == values).all()
    del product
    assert MEMORY_POOL.nbytes >= 2 * 4 * 360_000
