"""What differs between the versions of PyTorch from 2.6 on: the library asks here, and nowhere else.

Where PyTorch itself can tell, its version is not asked: builds between two releases may have either.

- PyTorch 2.6 does not tell exporting from compiling, so that ``torch.export`` takes recurrent layers with
  ``strict=False`` alone. 2.7 has ``torch.compiler.is_exporting``.
- PyTorch 2.6 does not know the parts of a model in a program of ``torch.export`` that was traced strictly; 2.13 does.
- PyTorch 2.7 and before have no derivative of the backward passes of ``grid_sampler_2d`` and ``_3d``; 2.13 has.
- PyTorch 2.7 and before read the fractions of ``quantile``, to check that they lie between 0 and 1; 2.13 reads none. A
  prepared Jacobian takes a check of constants, as numbers are; fractions in a tensor from elsewhere are refused there.
- PyTorch 2.7 and before do not tell whose hooks of saved tensors are in force. `nn.Scan` across ranks is refused within
  such hooks there, for those of a checkpoint would run it anew on some ranks alone.
- In PyTorch 2.6 the derivative of ``atan2`` at the origin is no number; in 2.13 it is 0.
- PyTorch 2.7 and before return what compiles the frames of a thread, which is mostly None, without a reference to it.
  Before Python 3.12, where None does not live for ever, the process ended after some hundred thousand products.
- PyTorch 2.6 compiles nothing while any thread is in a dispatch mode; later ones ask for the calling thread's.
- PyTorch 2.6 may wait for ever where a process group of gloo ends: it holds the interpreter's lock while it waits for a
  thread that frees the last call's tensors, for which that needs the lock. 2.13 does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

#: Whether `torch.export` traces the caller.
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)

# A later version may not need it, and is not harmed.
_BORROWS = torch.__version__ < "2.13"
_add_reference = ctypes.pythonapi.Py_IncRef
_add_reference.argtypes, _add_reference.restype = (ctypes.py_object,), None


def _with_reference(borrowed: Callable[[], object]) -> Callable[[], object]:
    def call() -> object:
        result = borrowed()
        _add_reference(result)
        return result

    return call


def _nothing() -> None:
    return None


# Private: where a PyTorch lacks one, what is public does, and costs more.
#: As ``torch.compiler.disable``, which imports the compiler.
without_dynamo: Callable[..., Any] = torch.compiler.disable
#: What compiles the frames of this thread; None or False where nothing does.
compiler_of_frames: Callable[[], object] = _nothing
with contextlib.suppress(ImportError):
    from torch._compile import _disable_dynamo

    without_dynamo = _disable_dynamo
with contextlib.suppress(ImportError):
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    compiler_of_frames = _with_reference(get_eval_frame_callback) if _BORROWS else get_eval_frame_callback


def _one() -> int:
    return 1


#: The number of this thread's dispatch modes.
_dispatch_modes: Callable[[], int] = _one
with contextlib.suppress(ImportError):
    from torch._C import _len_torch_dispatch_stack as _dispatch_modes


@functools.cache
def _flags_of(names: tuple[str, ...]) -> list[str]:
    """Which of a mode's fields hold whether there was a mode before it."""
    return [name for name in names if name.startswith("old_") and name.endswith("_flags")]


class DispatchMode(TorchDispatchMode):
    """A dispatch mode in which ``call(overload, types, args, kwargs)`` takes the place of each call of an operator.

    Threads may be in one at the same time. PyTorch keeps whether there is a mode in variables of the process, which
    each mode sets back to what it found. Where that is another thread's mode, ``torch.compile`` would compile nothing
    for the rest of the process.
    """

    def __init__(self, call: Callable[[Any, Any, Any, dict[str, Any]], Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_dispatch__(self, overload: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._call(overload, types, args, kwargs or {})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled in these modes, and PyTorch's wrapper against compilation is slow.
        return False

    def __enter__(self) -> Self:
        is_outermost = not _dispatch_modes()
        super().__enter__()
        if is_outermost:
            fields = vars(self)
            for name in _flags_of(tuple(fields)):
                fields[name][-1] = False
        return self


class _WithoutCompiling:
    """A context in which functions given to ``torch.compile`` run as they are written, until the last thread leaves.

    PyTorch has one answer for all threads. Where the compiler is not loaded, nothing was compiled, nor is it loaded.
    """

    def __init__(self) -> None:
        self._lock, self._callers, self._stance = threading.Lock(), 0, None

    def __enter__(self) -> None:
        with self._lock:
            if not self._callers:
                loaded = "torch._dynamo" in sys.modules
                self._stance = torch.compiler.set_stance("force_eager") if loaded else None
                if self._stance is not None:
                    self._stance.__enter__()
            self._callers += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._callers -= 1
            if not self._callers and self._stance is not None:
                self._stance.__exit__(None, None, None)
                # It asks when it is made, at the beginning, and at the end.
                for _ in range(3 if _BORROWS else 0):
                    _add_reference(compiler_of_frames())


without_compiling = _WithoutCompiling()


@functools.cache
def grid_sampler_is_differentiable_twice(axes: int) -> bool:
    """Whether the backward pass of ``aten.grid_sampler_2d``, or of ``_3d``, has a derivative."""
    with torch.enable_grad():
        x, gradient = (torch.zeros((1, 1, *[1] * axes), requires_grad=True, device="cpu") for _ in range(2))
        sampler = torch.ops.aten.grid_sampler_2d if axes == 2 else torch.ops.aten.grid_sampler_3d
        y = sampler(x, torch.zeros((1, *[1] * axes, axes), device="cpu"), 0, 0, False)
        (pulled,) = torch.autograd.grad(y, x, gradient, create_graph=True)
    assert pulled.grad_fn is not None
    return "NotImplemented" not in pulled.grad_fn.name()


def parts_of_program(program: torch.export.ExportedProgram) -> nn.Module | None:
    """A program as modules with the names of its model's; None where PyTorch does not know them."""
    try:
        return torch.export.unflatten(program)
    except RuntimeError:
        return None


def destroy_process_groups() -> None:
    """End all process groups, as ``torch.distributed.destroy_process_group``."""
    groups = dist.distributed_c10d._world.pg_map
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    # Its own references to the backends are not the last ones, and those here are given up without the lock.
    dist.destroy_process_group()
    backends.clear()
