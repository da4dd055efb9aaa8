"""Output files: whether they can be written is found out before the work, not after it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["check_writable"]


def check_writable(path: str | os.PathLike[str]) -> Path:
    """`path`, where a file can be written there.

    Raises
    ------
    ValueError
        Where it is a folder, or its folder does not exist or cannot be written to.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    folder = path.parent
    if not folder.is_dir():
        raise ValueError(f"{path} cannot be written: {folder} is no folder; make it first")
    try:
        tempfile.TemporaryFile(dir=folder).close()
        if path.exists():
            path.open("r+b").close()
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}; choose another place") from error
    return path
