"""``.npz`` archives and safetensors files, which cannot execute code, checked before anything in them is used."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from .files import replacing

#: Key of what is ours in the metadata of a safetensors file.
HEADER = "jacsparse"


def write_archive(path: str | os.PathLike[str], kind: str, content: Mapping[str, Any]) -> None:
    """Write arrays and plain values as an archive of that kind; the file appears whole or not at all."""
    arrays = {name: value for name, value in content.items() if isinstance(value, np.ndarray)}
    plain = {name: value for name, value in content.items() if not isinstance(value, np.ndarray)}
    header = np.frombuffer(json.dumps({"jacsparse": kind, **plain}).encode(), dtype=np.uint8)
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **{"header": header, **arrays})  # type: ignore[arg-type]


def read_archive(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """The content of an archive of that kind.

    Raises
    ------
    FileNotFoundError
        Where there is no such file.
    ValueError
        Where the file is no archive of that kind, truncated or damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; expected a {kind} saved by jacsparse")
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no archive")
        with np.load(path, allow_pickle=False) as archive:
            members = archive.zip.infolist()
            stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
            if not stored or sum(member.file_size for member in members) > path.stat().st_size:
                raise ValueError("its members are compressed or overlap")
            header = json.loads(archive["header"].tobytes().decode())
            stored_kind = header.pop("jacsparse")
            names = [name for name in archive.files if name != "header"] if stored_kind == kind else []
            content = {name: archive[name] for name in names}
    except Exception as error:
        # What a damaged zip, header or JSON raises shares no base class.
        raise ValueError(
            f"{path} cannot be read as a {kind} ({error}); it is damaged or was not saved by jacsparse"
        ) from error
    if stored_kind != kind:
        raise ValueError(f"{path} holds a {stored_kind}, not a {kind}")
    return {**header, **content}


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]
) -> None:
    """Write tensors, and plain values as JSON in the file's metadata; the file appears whole or not at all."""
    separate = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()
    }
    with replacing(path) as temporary:
        safetensors.torch.save_file(separate, temporary, metadata={HEADER: json.dumps(header)})


def read_safetensors(
    path: str | os.PathLike[str], kind: str, remedy: str
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata; ValueError with the remedy where it cannot be read."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            # The tensors are copied, since the file may change under a memory map.
            return {key: file.get_tensor(key).clone() for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(
            f"{path} cannot be read as a {kind} ({error}); it is damaged or no safetensors file: {remedy}"
        ) from error


def array_in(content: Mapping[str, Any], name: str, *, size: int | None = None, stop: int | None = None) -> np.ndarray:
    """An array of integers along one axis among an archive's content.

    Raises
    ------
    ValueError
        Where there is none, it has another size, or an element is not from 0 to before `stop`.

    Examples
    --------
    >>> array_in({"columns": np.array([0, 2])}, "columns", stop=2)
    Traceback (most recent call last):
    ValueError: columns does not run from 0 to 1
    """
    array = content.get(name)
    if not isinstance(array, np.ndarray) or array.ndim != 1 or not np.issubdtype(array.dtype, np.signedinteger):
        raise ValueError(f"{name} is no array of one axis of signedinteger")
    if size is not None and len(array) != size:
        raise ValueError(f"{name} has {len(array)} elements; expected {size}")
    if stop is not None and len(array) and not 0 <= array.min() <= array.max() < stop:
        raise ValueError(f"{name} does not run from 0 to {stop - 1}")
    return array
