"""Check early that a file can be written; write it whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise OSError where a file could not be written, now rather than after hours of work.

    Raises
    ------
    FileNotFoundError, NotADirectoryError
        Where the folder is missing, or is none.
    IsADirectoryError
        Where there is a folder in the file's place.
    PermissionError
        Where the folder takes no new file.
    """
    path = Path(path)
    folder = path.parent
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder; add a file's name")
    blocked = next((above for above in path.parents if above.exists() and not above.is_dir()), None)
    if blocked is not None:
        raise NotADirectoryError(f"cannot write {path}: {blocked} is a file, not a folder; choose another place")
    if not folder.exists():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {folder}; make it: mkdir -p {folder}")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise PermissionError(f"cannot write {path}: {error.strerror or error}; choose another place") from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when all went well, and vanishes when not.

    Raises
    ------
    OSError
        As `check_writable`, before anything is written.
    """
    check_writable(path)
    # Where a link leads, so that the link stays one.
    path = Path(path).resolve()
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}{path.suffix}")
    # Readable as any new file of the user's is, which tempfile's are not; and nobody else's.
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    mode = temporary.stat().st_mode
    try:
        yield temporary
        # Whoever wrote it may have put a file of its own there, as safetensors does.
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
