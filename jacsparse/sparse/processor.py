"""Vectors of the processor that kernels are compiled for."""

from __future__ import annotations

import functools
import platform

from numba.core.registry import cpu_target

#: Bytes of one of the largest vectors, by the feature that brings them; other x86 and ARM processors have 16.
_WIDTHS = {"avx512f": 64, "avx": 32}
_SMALLEST = 16
#: What `vector_time` returns, by bytes.
_TIMES = {64: 1.0, 32: 0.58, 16: 0.45}


@functools.cache
def _features() -> frozenset[str]:
    """What Numba compiles for: the processor's features, or those that NUMBA_CPU_FEATURES names."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(name[1:] for name in features.split(",") if name.startswith("+"))


@functools.cache
def vector_widths() -> tuple[int, ...]:
    """Bytes of the vectors that the processor has, the largest first."""
    largest = next((width for name, width in _WIDTHS.items() if name in _features()), _SMALLEST)
    return tuple(width for width in _TIMES if width <= largest)


def vector_time(nbytes: int) -> float:
    """The time of a kernel with vectors of as many bytes, as a share of that with the largest ones of AVX-512."""
    return _TIMES.get(nbytes, _TIMES[_SMALLEST])


@functools.cache
def tile_positions() -> int:
    """The most output positions whose sums stay in registers, beside what else a kernel holds there."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return 16 if "avx512vl" in _features() or not x86 else 8


def lanes_for(batch: int, itemsize: int) -> int:
    """The number of samples of a block that a batch takes the least time with, for elements of as many bytes.

    Examples
    --------
    >>> lanes_for(1, 4), lanes_for(2, 8)
    (1, 2)
    """
    if batch == 1:
        # Vectors hold columns then.
        return 1

    def time(width: int) -> float:
        return -(-max(batch, 1) * itemsize // width) * _TIMES[width]

    return min(vector_widths(), key=time) // itemsize


def columns_for(width: int, itemsize: int) -> int:
    """The number of columns of a vector, a power of two; 1 where a row has too few.

    Examples
    --------
    >>> columns_for(7, 4), columns_for(1, 4)
    (4, 1)
    """
    most = min(vector_widths()[0] // itemsize, width)
    return 1 << (most.bit_length() - 1)
