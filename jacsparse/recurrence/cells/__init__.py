"""Recurrent cells, a file each: what a step computes, and the kernels that take runs of steps."""

from .cell import Cell, Saved, Weights, preceding
from .gru import GruCell
from .lstm import LstmCell
from .rnn import RnnCell

__all__ = ["CELLS", "Cell", "Saved", "Weights", "preceding"]

#: The cells by their modes, which are those of `torch.nn`.
CELLS: dict[str, Cell] = {cell.mode: cell for cell in (RnnCell(), RnnCell(relu=True), GruCell(), LstmCell())}
