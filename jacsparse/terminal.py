"""Tables as text: how they look in a terminal, a file or a notebook. Importing this module does not import Rich."""

from __future__ import annotations

import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

#: Columns of a line in a file or a pipe, which have no width.
_WIDTH = 160


def console() -> Any:
    """A Rich console that prints names as they are, and long lines if the output is no terminal."""
    from rich.console import Console

    result = Console(markup=False, emoji=False, highlight=False)
    if not result.is_terminal and "COLUMNS" not in os.environ:
        result.width = _WIDTH
    return result


def text(report: Any) -> str:
    """What Rich prints of a report as text without colours, as wide as the terminal."""
    from rich.console import Console

    plain = Console(file=io.StringIO(), width=console().width, markup=False, emoji=False, highlight=False)
    plain.print(report)
    return "\n".join(line.rstrip() for line in plain.file.getvalue().splitlines())  # type: ignore[attr-defined]


class PrintedReport(ABC):
    """What ``print`` shows as tables, and a file has as plain values."""

    def __str__(self) -> str:
        return text(self)

    @abstractmethod
    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """The tables, for Rich."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values, for JSON."""

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict` to a file."""
        # It loads Numba, which the help of commands does without.
        from .runtime import replacing

        with replacing(path) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


#: How many names a sentence has as examples, and how many characters these have together at most.
EXAMPLES, _CHARACTERS = 3, 40


def first_names(names: Sequence[str], characters: int = _CHARACTERS) -> Sequence[str]:
    """The first `EXAMPLES` names, or as many as have so many characters together, but at least one."""
    lengths = accumulate(len(name) for name in names[:EXAMPLES])
    return names[: max(1, sum(length <= characters for length in lengths))]


def listed(names: Sequence[str], shown: Sequence[str]) -> str:
    """The names that are shown, and how many more there are."""
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(shown) < len(names) else "")


def not_numbers(counts: Mapping[str, int], brief: bool = True) -> str:
    """A sentence on how many weights of which modules are NaN; with `brief`, of the first modules.

    Examples
    --------
    >>> not_numbers({"conv1": 3})
    'conv1: 3 weights are NaN, counted as not zero.'
    >>> not_numbers({"conv1": 3, "6": 1})
    'conv1 (3), layer 6 (1): 4 weights are NaN, counted as not zero.'
    """
    words = [layer_in_words(path or "(the module)") for path in counts]
    names = words if len(words) == 1 else [f"{word} ({n:,})" for word, n in zip(words, counts.values(), strict=True)]
    total = sum(counts.values())
    weights = "weight is" if total == 1 else "weights are"
    return f"{listed(names, first_names(names) if brief else names)}: {total:,} {weights} NaN, counted as not zero."


def layer_in_words(path: str) -> str:
    """A layer's path within a sentence, where ``6``, as in an ``nn.Sequential``, would be read as a figure.

    Examples
    --------
    >>> layer_in_words("layer1.0.conv2"), layer_in_words("6")
    ('layer1.0.conv2', 'layer 6')
    """
    return path if any(map(str.isalpha, path)) else f"layer {path}"


def new_table(title: str) -> Any:
    """A table without columns."""
    from rich import box
    from rich.table import Table

    return Table(title=title or None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


@dataclass(frozen=True)
class Fitted:
    """A table that cuts nothing: columns that do not fit a terminal's width follow in further tables.

    Attributes
    ----------
    title : str
        The title of the first table.
    columns : sequence of str
        Headers, which may have several lines.
    rows : sequence of sequences of str
        A cell for each column.
    keys : int
        How many first columns each table repeats.
    left : frozenset of int
        Columns that are aligned to the left.
    sections : frozenset of int
        Rows after which there is a line.
    faint : frozenset of int
        Rows that are dim.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    keys: int = 1
    left: frozenset[int] = frozenset([0])
    sections: frozenset[int] = frozenset()
    faint: frozenset[int] = frozenset()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        for number, columns in enumerate(self._parts(options.max_width)):
            yield self._table(columns, self.title if not number else "")

    def _parts(self, width: int) -> Iterator[list[int]]:
        """The columns of each table."""
        keys, lines = [*range(self.keys)], [self.columns, *self.rows]
        # A space follows each column, a space divides two, and one is at each edge.
        sizes = [2 + max(max(map(len, row[place].split("\n"))) for row in lines) for place in range(len(self.columns))]
        start, part = 1 + sum(sizes[key] for key in keys), list[int]()
        used = start
        for place in range(self.keys, len(self.columns)):
            if part and used + sizes[place] > width:
                yield keys + part
                used, part = start, []
            used += sizes[place]
            part.append(place)
        yield keys + part

    def _table(self, columns: Sequence[int], title: str) -> Any:
        table = new_table(title)
        for place in columns:
            aligned = "left" if place in self.left else "right"
            table.add_column(self.columns[place], justify=aligned, overflow="fold", no_wrap=place >= self.keys)
        for number, row in enumerate(self.rows):
            cells = [row[place] for place in columns]
            table.add_row(*cells, style="dim" if number in self.faint else "", end_section=number in self.sections)
        return table


def glossary(words: Mapping[str, str]) -> Any:
    """A grid with a line for each word."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for word, meaning in words.items():
        table.add_row(word, meaning, style="dim")
    return table


def short(count: float) -> str:
    """A count in three digits, for a table.

    Examples
    --------
    >>> short(326_301_528), short(999_600), short(4096.0), short(12.5)
    ('326 M', '1.00 M', '4.10 k', '12.5')
    """
    for scale, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= 0.9995 * scale:
            return f"{count / scale:#.3g}".removesuffix(".") + unit
    return f"{count:g}"


def short_time(seconds: float) -> str:
    """A time in three digits, for a table.

    Examples
    --------
    >>> short_time(12.5), short_time(0.000125), short_time(0.0)
    ('12.5 s', '125 µs', '0 ns')
    """
    for scale, unit in ((1.0, " s"), (1e-3, " ms"), (1e-6, " µs")):
        if seconds >= scale:
            return f"{seconds / scale:.3g}{unit}"
    return f"{seconds / 1e-9:.3g} ns"


def duration(seconds: float) -> str:
    """A time in words.

    Examples
    --------
    >>> duration(1.2), duration(150.0), duration(9000.0)
    ('1 second', '150 seconds', '150 minutes')
    """
    for size, unit in ((3600.0, "hour"), (60.0, "minute"), (1.0, "second")):
        if seconds >= 3 * size or unit == "second":
            return f"{seconds / size:,.0f} {unit}{'' if round(seconds / size) == 1 else 's'}"
    raise AssertionError


def percent(share: float) -> str:
    """A share in percent, in three digits at most.

    Examples
    --------
    >>> percent(0.97), percent(0.0366), percent(0.000123), percent(1.0)
    ('97.0%', '3.66%', '0.0123%', '100%')
    """
    value = 100 * share
    return f"{value:.3g}%" if value < 1 or value >= 99.95 else f"{value:#.3g}%"


def ratio(value: float) -> str:
    """A ratio in three digits.

    Examples
    --------
    >>> ratio(53.71), ratio(0.01234), ratio(2287.4), ratio(1.0)
    ('53.7', '0.0123', '2,287', '1.00')
    """
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def nbytes(count: float) -> str:
    """Bytes with a unit, in three digits.

    Examples
    --------
    >>> nbytes(100), nbytes(1536), nbytes(9.2e9)
    ('100 B', '1.5 KiB', '8.57 GiB')
    """
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count < 999.5 * scale else f"{count / scale:.0f} {unit}"
    return f"{count:.0f} B"
