"""Results as JSON files, one for each experiment and device; they are written whole or not at all, and checked."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from jacsparse.runtime import replacing

from ._context import Limits
from ._environment import hardware
from ._rows import Row

#: The version of the files' format.
FORMAT = 1


@dataclass(frozen=True)
class Result:
    """The result of one run of an experiment."""

    experiment: str
    device: str
    #: The time at which the run began: ISO 8601, UTC.
    date: str
    #: Seconds of the whole run.
    seconds: float
    #: Hardware and versions.
    environment: dict[str, Any]
    #: Copy bandwidth and peak, measured in the same run; None if nothing was measured.
    limits: Limits | None
    rows: tuple[Row, ...]

    @property
    def hardware(self) -> str:
        """The name of the hardware in the file's name."""
        return hardware(self.device, self.environment)


def result_path(folder: Path, experiment: str, hardware: str) -> Path:
    """The path of an experiment's result on a machine's hardware."""
    return folder / f"{experiment}.{hardware}.json"


def write(result: Result, folder: Path) -> Path:
    """Write a result into a folder, and return the file's path; the file appears whole or not at all."""
    path = result_path(folder, result.experiment, result.hardware)
    text = json.dumps({"format": FORMAT, **asdict(result)}, indent=1, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    return path


def read(path: Path) -> Result:
    """Read a result that `write` wrote; ValueError if the file is damaged, or is no such result."""
    try:
        content = msgspec.json.decode(path.read_bytes())
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError(f"it is no benchmark result of format {FORMAT}")
        result = msgspec.convert(content, Result)
        if msgspec.json.decode(msgspec.json.encode(result)) != content:
            raise ValueError("it lacks entries, or has others")
        for row in result.rows:
            if (row.median is None) != bool(row.not_measured):
                raise ValueError(f"row {row.label!r} needs either a figure or a reason why it was not measured")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read as a benchmark result ({error}); delete it, or run the experiment again"
        ) from error
    return result
