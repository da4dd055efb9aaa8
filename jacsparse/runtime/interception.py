"""Kernel runs handed to a caller: a benchmark times the kernels of a call alone, or the call without them."""

from __future__ import annotations

from collections.abc import Callable

Interceptor = Callable[[Callable[[], None]], None]

#: What takes each kernel run, if anything does.
active: Interceptor | None = None


def intercept(interceptor: Interceptor | None) -> Interceptor | None:
    """Pass each later kernel run, on the CPU or a device, to `interceptor`; with None, run it again.

    Parameters
    ----------
    interceptor : callable or None
        It is given a function that runs the kernel on its arguments, and may call it at once, later or not at all.

    Returns
    -------
    callable or None
        The former interceptor, to be put back.
    """
    global active
    before, active = active, interceptor
    return before
