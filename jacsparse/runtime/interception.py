"""Kernel runs handed to a caller: a benchmark times the kernels of a call alone, or the call without them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Interceptor = Callable[[Callable[[], None]], None]

#: What takes each kernel run, if anything does.
active: Interceptor | None = None


@contextlib.contextmanager
def intercepted(interceptor: Interceptor) -> Iterator[None]:
    """A context in which each kernel run, on the CPU or a device, is passed to `interceptor`.

    That is given a function which runs the kernel on its arguments, and may call it at once, later or not at all.
    """
    global active
    before, active = active, interceptor
    try:
        yield
    finally:
        active = before
