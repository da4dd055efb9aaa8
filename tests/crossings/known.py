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


ANY = "jacobian, prepare_jacobian, hessian, prepare_hessian, Scan, Leapfrog, Solve, recurrent layers, linear_recurrence"

KNOWN = [
    # disable_saved_tensors_hooks around Scan, Leapfrog and Solve.
    known(ANY, "no hooks of saved tensors", "none, please"),
    # Recurrent layers of no sample, by chunks or a scan.
    known(ANY, "", "IndexError at jacsparse/recurrence/solvers"),
    # Gradients of values of a norm.
    known("jacobian, hessian", "layer norm, create_graph", "gradient of"),
    known("jacobian, hessian", "normed, create_graph", "gradient of"),
    # Hessians of functions that write to their arguments.
    known("hessian, prepare_hessian", "writes to its argument", "result"),
    known("hessian, prepare_hessian", "no_grad", "does not require grad"),
    # A Jacobian within a checkpoint, whose run is run again by the passes of autograd in it.
    known("jacobian, hessian, prepare_jacobian, prepare_hessian", "checkpoint", ""),
    # A convolution of no samples, without batches.
    known("jacobian, hessian, prepare_jacobian, prepare_hessian", "", "ZeroDivisionError at patterns/convolution.py"),
    # Modules of a chain within a checkpoint: Leapfrog runs layers again, and Scan may save other tensors the next time.
    known("Leapfrog", "checkpoint", ""),
    known("Scan, Solve", "checkpoint", "CheckpointError"),
]
