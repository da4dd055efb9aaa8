"""Calls of operators as one Python function, and one emitter of instructions, which makes fused loops of them.

Arithmetic on single elements of tensors is machine code, interpreted by one kernel, or printed for a GPU.
"""

from .calls import CallResult, Calls, mapped
from .calls_of_elements import CallsOfElements, UnreadableWriteError, may_be_loops
from .device_code import DeviceCode
from .elements import ElementGraph, TooManyElementsError, sums
from .emitter import (
    BYTE,
    DOUBLE,
    INT32,
    INT64,
    SINGLE,
    Array,
    Emitter,
    MachineModule,
    Register,
    Variable,
    call,
    emitted,
    vector,
)
from .interpreter import Interpreted, MixedDtypesError
from .loops import OUT, Fusion
from .machine_code import MachineCode
from .printer import Printer, constant
from .rows import (
    WIDE,
    any_nonzero,
    copy_elements,
    copy_row,
    dot,
    lowest_bit,
    multiply_by,
    population,
    scale,
)
from .tiles import Scratch

__all__ = [
    "BYTE",
    "DOUBLE",
    "INT32",
    "INT64",
    "OUT",
    "SINGLE",
    "WIDE",
    "Array",
    "CallResult",
    "Calls",
    "CallsOfElements",
    "DeviceCode",
    "ElementGraph",
    "Emitter",
    "Fusion",
    "Interpreted",
    "MachineCode",
    "MachineModule",
    "MixedDtypesError",
    "Printer",
    "Register",
    "Scratch",
    "TooManyElementsError",
    "UnreadableWriteError",
    "Variable",
    "any_nonzero",
    "call",
    "constant",
    "copy_elements",
    "copy_row",
    "dot",
    "emitted",
    "lowest_bit",
    "mapped",
    "may_be_loops",
    "multiply_by",
    "population",
    "scale",
    "sums",
    "vector",
]
