"""Tables as text: how they look in a terminal, a file or a notebook. Importing this module does not import Rich."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
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


def new_table(title: str) -> Any:
    """A table without columns."""
    from rich import box
    from rich.table import Table

    return Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


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
    for scale, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
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
