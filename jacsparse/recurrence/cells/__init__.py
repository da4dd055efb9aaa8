"""Recurrent cells, a file each: what a step computes, and the kernels that take runs of steps."""

from .cell import Cell, FrozenCell, Saved, Terms, Weights, preceding
from .elementwise import ElementwiseStep
from .gru import GruCell
from .lstm import LstmCell
from .on_device import RUN_KERNELS, CellKernels, DeviceCell, cell_on, obstacle_on
from .rnn import RnnCell
from .step_check import check_cell, check_step
from .step_jacobian import StepJacobian

__all__ = [
    "CELLS",
    "Cell",
    "CellKernels",
    "DeviceCell",
    "ElementwiseStep",
    "FrozenCell",
    "Saved",
    "StepJacobian",
    "Terms",
    "Weights",
    "cell_on",
    "check_cell",
    "check_step",
    "obstacle_on",
    "preceding",
]

#: Cells by mode: RNN, GRU, LSTM, `count_flop` and tests look here. A layer that has a `cell` needs no entry.
CELLS: dict[str, Cell] = {cell.mode: cell for cell in (RnnCell(), RnnCell(relu=True), GruCell(), LstmCell())}
for _cell in CELLS.values():
    RUN_KERNELS.list(_cell)
