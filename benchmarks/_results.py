"""Results as JSON files, one for each experiment and device; they are written whole or not at all, and checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from jacsparse.runtime import replacing

from ._context import Limits
from ._environment import hardware
from ._experiment import Comparison, Row

__all__ = ["Result", "read", "result_path", "write"]

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
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError(f"it is no benchmark result of format {FORMAT}")
        content["limits"] = None if content.get("limits") is None else _instance(Limits, content["limits"])
        content["rows"] = tuple(_row(row) for row in _sequence(content, "rows"))
        return _instance(Result, content)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read as a benchmark result ({error}); delete it, or run the experiment again"
        ) from error


def _row(content: Any) -> Row:
    if not isinstance(content, dict):
        raise TypeError(f"a row is a {type(content).__name__}")
    comparisons = tuple(_instance(Comparison, item) for item in _sequence(content, "comparisons"))
    row = _instance(Row, {**content, "comparisons": comparisons})
    if (row.median is None) != bool(row.not_measured):
        raise ValueError(f"row {row.label!r} needs either a figure or a reason why it was not measured")
    return row


def _sequence(content: Mapping[str, Any], name: str) -> list[Any]:
    values = content.get(name)
    if not isinstance(values, list):
        raise TypeError(f"{name} is no list")
    return values


Dataclass = TypeVar("Dataclass")

#: The types of the fields of each class in a file: to look them up takes longer than to read a row.
_TYPES: dict[type[Any], dict[str, Any]] = {
    kind: {name: hint for name, hint in get_type_hints(kind).items() if name in {field.name for field in fields(kind)}}
    for kind in (Result, Row, Comparison, Limits)
}


def _instance(kind: type[Dataclass], content: Any) -> Dataclass:
    """An instance of a dataclass from plain values; ValueError if one is missing or has another type."""
    types = _TYPES[kind]
    if not isinstance(content, dict) or set(content) != set(types):
        raise ValueError(f"expected {', '.join(sorted(types))}")
    for name, hint in types.items():
        if not _fits(content[name], hint):
            raise ValueError(f"{name} is {content[name]!r}")
    return kind(**content)


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return False
    options = get_args(hint) if not isinstance(hint, type) else (hint,)
    if getattr(hint, "__origin__", None) in (tuple, dict):
        options = (hint.__origin__,)
    if float in options:
        options = (*options, int)
    return any(isinstance(value, option) if isinstance(option, type) else value == option for option in options)
