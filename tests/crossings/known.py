"""Faults that are known: the draws that meet them are not judged. An entry goes when its fault is mended."""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """A fault: the subjects, a core and features of draws that meet it, and what their verdicts say."""

    subjects: tuple[str, ...]
    #: Names of which a draw has all.
    names: frozenset[str]
    detail: str


def known(subjects: str, names: str = "", detail: str = "") -> Known:
    return Known(tuple(subjects.split(", ")), frozenset(names.split(", ")) - {""}, detail)


KNOWN: list[Known] = [
    # PyTorch's own: it finds the copies of what was saved by ids and addresses, and all tensors without elements have
    # one address, so that one may be taken for another, of another shape, that is gone.
    *(
        known("Scan, Leapfrog, Solve, recurrent layers", f"mutations of saved tensors, {empty}", "must match the size")
        for empty in ("empty later", "no sample at all")
    ),
]
