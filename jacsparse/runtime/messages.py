"""Words of messages."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

#: Letters whose names begin with a vowel: "an LSTM".
_SPOKEN_WITH_VOWEL = "AEFHILMNORSX"


def a_type(value: object) -> str:
    """The name of a value's type with its article.

    Examples
    --------
    >>> a_type(1), a_type("1"), a_type({})
    ('an int', 'a str', 'a dict')
    """
    name = type(value).__name__
    spelled = name[:2].isupper() or name.startswith("nd")
    vowel = name[0].upper() in _SPOKEN_WITH_VOWEL if spelled else name[0] in "aeioAEIO"
    return f"{'an' if vowel else 'a'} {name}"


def announce(line: str) -> None:
    """Tell what takes long: a line on a terminal, else a warning of the log ``jacsparse``: it is shown by default."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"jacsparse: {line}", file=sys.stderr, flush=True)
    else:
        logging.getLogger("jacsparse").warning(line)


class _Announced(threading.local):
    """Whether this thread is in a context that tells what it does."""

    active = False


_ANNOUNCED = _Announced()


@contextlib.contextmanager
def announced_where_long(line: str, seconds: float = 1.0) -> Iterator[None]:
    """A context that tells what it does, once, where that takes more than a second; one within it tells nothing."""
    if _ANNOUNCED.active:
        yield
        return
    timer = threading.Timer(seconds, announce, [line])
    # A process may end meanwhile.
    timer.daemon = True
    timer.start()
    _ANNOUNCED.active = True
    try:
        yield
    finally:
        timer.cancel()
        _ANNOUNCED.active = False
