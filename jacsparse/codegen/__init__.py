"""Calls of operators as one Python function, and their arithmetic on single elements as fused loops.

Loops are machine code, or interpreted by one kernel.
"""

from .calls import CallResult, Calls, mapped
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
    "CallResult",
    "Calls",
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
    "mapped",
    "may_be_loops",
    "sums",
]
