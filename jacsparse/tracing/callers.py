"""Whose code makes a call: the module and the line, for messages."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path

import torch
from torch import nn

_CALL = nn.Module._call_impl.__code__


_LIBRARY = sys.modules[__name__.partition(".")[0]]
#: The folders of PyTorch and of this library, some of whose packages lie beside the others in a checkout; and the file
#: of contexts that decorate its functions.
_FOREIGN = (
    Path(contextlib.__file__),
    Path(torch.__file__).parent,
    Path(__file__).parent.parent,
    *(Path(folder, name) for folder in _LIBRARY.__path__ for name in ("patterns", "spgemm", "models")),
)


@functools.cache
def is_users(filename: str) -> bool:
    """Whether a file's code is the user's, neither PyTorch's nor this library's."""
    return not any(Path(filename).is_relative_to(folder) for folder in _FOREIGN)


def caller() -> tuple[nn.Module | None, str, int]:
    """The module that runs, and the file and the line of the user's code in it."""
    frame = sys._getframe(1)
    file, line = "", 0
    while frame is not None:
        if frame.f_code is _CALL:
            return frame.f_locals["self"], file, line
        if not file and is_users(frame.f_code.co_filename):
            file, line = frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None, file, line
