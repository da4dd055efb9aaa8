"""The names that arguments take, as in ``schedule="chunked:64"``: one parser for all, with one list in its errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Number(NamedTuple):
    """The number that may follow a name, as in ``chunked:64``.

    Attributes
    ----------
    word : str
        What it counts, as errors have it.
    least : int
        The smallest one.
    needed : bool
        Whether the name means nothing without it.
    """

    word: str
    least: int = 1
    needed: bool = False


class Names:
    """The names that an argument takes.

    Parameters
    ----------
    argument : str
        The name of the argument.
    names : mapping of str to (Number or None), or iterable of str
        The names, and the number that may follow each.
    others : str
        What the argument takes beside names, as errors have it.

    Examples
    --------
    >>> Names("schedule", {"linear": None, "blelloch": Number("LEVELS", 0)}).parse("blelloch:2")
    ('blelloch', 2)
    """

    def __init__(self, argument: str, names: Mapping[str, Number | None] | Iterable[str], others: str = "") -> None:
        self._argument, self._others = argument, others
        self._numbers = names if isinstance(names, Mapping) else dict.fromkeys(names)

    def __str__(self) -> str:
        listed = []
        for name, number in self._numbers.items():
            suffix = "" if number is None else f":{number.word}" if number.needed else f"[:{number.word}]"
            listed.append(name + suffix)
        return ", ".join([*listed, *([f"or {self._others}"] if self._others else [])])

    def parse(self, value: object) -> tuple[str, int | None]:
        """The name and the number that a value consists of.

        Raises
        ------
        TypeError
            Where it is no string.
        ValueError
            Where it is none of the names, or another number follows it.
        """
        if not isinstance(value, str):
            raise TypeError(f"{self._argument} is {value!r}; expected one of {self}")
        name, colon, digits = value.partition(":")
        number = self._numbers.get(name)
        count = int(digits) if digits.isascii() and digits.isdecimal() else None
        fits = number is not None and count is not None and count >= number.least
        if name not in self._numbers or (not fits if colon else number is not None and number.needed):
            raise ValueError(f"{self._argument} is {value!r}; expected one of {self}")
        return name, count
