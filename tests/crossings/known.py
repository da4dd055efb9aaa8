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


CHAINS = "Scan, Leapfrog, Solve"
KNOWN = [
    # Recurrent layers of no sample, by chunks or a scan.
    known(f"{CHAINS}, recurrent layers, linear_recurrence", "", "IndexError at jacsparse/recurrence/solvers"),
    # Hessians of functions that write to their arguments.
    known("hessian, prepare_hessian", "writes to its argument", "result"),
    # Gradients of values where a pruned weight has changed since: of the new weights, without an error.
    known("jacobian, hessian", "pruned, steps before backward", "gradient of"),
    # Hessians, without gradients enabled, of operators that pick elements.
    known("hessian, prepare_hessian", "no_grad", "does not require grad"),
]
