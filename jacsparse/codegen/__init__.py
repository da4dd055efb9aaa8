"""Arithmetic on single elements of tensors as fused loops: of machine code, or interpreted by one kernel."""

from .elements import CallsOfElements, ElementGraph, TooManyElementsError, UnreadableWriteError, may_be_loops, sums
from .interpreter import Interpreted, MixedDtypesError
from .loops import OUT, Fusion
from .machine_code import MachineCode
from .operations import FLOATS
from .printer import Printer, constant
from .tiles import Scratch

__all__ = [
    "FLOATS",
    "OUT",
    "CallsOfElements",
    "ElementGraph",
    "Fusion",
    "Interpreted",
    "MachineCode",
    "MixedDtypesError",
    "Printer",
    "Scratch",
    "TooManyElementsError",
    "UnreadableWriteError",
    "constant",
    "may_be_loops",
    "sums",
]
