"""What the work of Jacobians costs: the one table, with a record for each kind of device.

Costs are in multiply-adds of sparse products, as `jacsparse.spgemm` takes them: half a nanosecond each on a CPU, and 8
picoseconds on an H200, whose merge takes 239 µs for 29 million (`benchmarks/results/nvidia-h200`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..runtime import on_device


@dataclass(frozen=True)
class Costs:
    """Costs on a kind of device, in multiply-adds of sparse products there.

    Attributes
    ----------
    dense : float
        A multiply-add of an operator's own dense backward.
    full : float
        How many multiply-adds with a full matrix take the time of one of two sparse matrices: less than was measured.
    start : int
        What each operator's values, product, sum or backward costs whatever its size.
    backward_pass : int
        The same of a backward pass.
    value : float
        A value of 8 bytes that a product or sum reads or writes, or that a call computes.
    term : float
        A term of a folded entry.
    call : int
        A call of PyTorch's on tangents, whatever its size.
    compiled, apart : float
        By how much less a call and its values cost in compiled loops; and by how much more where PyTorch's calls
        between such loops take all seeds at once.
    replay : int
        What a call of compiled loops saves beside.
    """

    dense: float
    full: float
    start: int
    backward_pass: int
    value: float
    term: float
    call: int
    compiled: float
    apart: float
    replay: int


#: By the kind of device. Of a CPU, all are measured: convolutions of PyTorch reach 10 to 90 billion multiply-adds a
#: second and sparse products 2 to 15; a start takes 100 µs, a backward pass 500, a call 15, and a replay saves 100.
#: Those of a GPU are an H200's, where what does not depend on sizes is the host's time: some 30 µs, 100, 10 and 100. It
#: moves 4.2 TB/s and computes 67 TFLOP/s of float32, of which a third is taken for reached; a launch of loops does the
#: work of ten calls, and no seeds are too many for its memory.
COSTS = {
    "cpu": Costs(
        dense=1 / 8, full=12, start=200_000, backward_pass=1_000_000, value=6, term=4, call=30_000,
        compiled=4, apart=1.25, replay=200_000,
    ),
    "cuda": Costs(
        dense=1 / 80, full=40, start=4_000_000, backward_pass=12_000_000, value=0.25, term=0.5, call=1_200_000,
        compiled=10, apart=1.0, replay=12_000_000,
    ),
}  # fmt: skip


def costs_for(x: torch.Tensor) -> Costs:
    """The costs on a tensor's device."""
    return COSTS["cuda" if on_device(x) else "cpu"]
