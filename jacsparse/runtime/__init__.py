"""What runs the numbers: compiled kernels, threads, devices, and files. Knows nothing of the packages above it."""

from .archive import array_in, read_archive, write_archive
from .arrays import frozen, index_dtype, row_starts, unsigned, within_rows
from .cuda import (
    INDEX,
    KERNEL_FILES,
    REAL,
    THREADS,
    Backend,
    KernelFile,
    Launch,
    active_backend,
    backend,
    blocks,
    c_type,
    index_type,
    instances,
    on_device,
)
from .cupy_backend import cupy_for, cupy_stream, gpu_extra
from .device_memory import allocated, extend_lives, host_flag, memory_for, multiprocessors, uploaded
from .disk_cache import SYMBOLIC, Shelf, cache_directory, cached_arrays, shelves, symbolic_limit
from .dynamo import uncompiled
from .files import check_writable, replacing
from .interception import intercept
from .kernels import compiled_module, flushing, inlined, inlined_with_arrays, kernel, kernel_cache
from .memory_pool import MEMORY_POOL, SMALLEST
from .messages import a_type, announce, announced_where_long
from .threads import SIMD, KernelRun, KernelSequence, RowWork, on_this_thread, run_rows, split, thread_count
from .timing import RunTime, run_times
from .torch_versions import (
    DispatchMode,
    destroy_process_groups,
    grid_sampler_is_differentiable_twice,
    is_exporting,
    parts_of_program,
    without_compiling,
)
from .tracers import check_tensor_itself, has_tangent, is_batched, is_traced, is_transformed, transform_under_way

__all__ = [
    "INDEX",
    "KERNEL_FILES",
    "MEMORY_POOL",
    "REAL",
    "SIMD",
    "SMALLEST",
    "SYMBOLIC",
    "THREADS",
    "Backend",
    "DispatchMode",
    "KernelFile",
    "KernelRun",
    "KernelSequence",
    "Launch",
    "RowWork",
    "RunTime",
    "Shelf",
    "a_type",
    "active_backend",
    "allocated",
    "announce",
    "announced_where_long",
    "array_in",
    "backend",
    "blocks",
    "c_type",
    "cache_directory",
    "cached_arrays",
    "check_tensor_itself",
    "check_writable",
    "compiled_module",
    "cupy_for",
    "cupy_stream",
    "destroy_process_groups",
    "extend_lives",
    "flushing",
    "frozen",
    "gpu_extra",
    "grid_sampler_is_differentiable_twice",
    "has_tangent",
    "host_flag",
    "index_dtype",
    "index_type",
    "inlined",
    "inlined_with_arrays",
    "instances",
    "intercept",
    "is_batched",
    "is_exporting",
    "is_traced",
    "is_transformed",
    "kernel",
    "kernel_cache",
    "memory_for",
    "multiprocessors",
    "on_device",
    "on_this_thread",
    "parts_of_program",
    "read_archive",
    "replacing",
    "row_starts",
    "run_rows",
    "run_times",
    "shelves",
    "split",
    "symbolic_limit",
    "thread_count",
    "transform_under_way",
    "uncompiled",
    "unsigned",
    "uploaded",
    "within_rows",
    "without_compiling",
    "write_archive",
]
