"""A call becomes a program: what a module's forward pass ran, and the graph of ATen operations that it is."""

from ._program import Operation, Program, contents_of, key_of, program_of
from ._recorder import Invocation, Recording, is_recording, is_users, operator_name, record

__all__ = [
    "Invocation",
    "Operation",
    "Program",
    "Recording",
    "contents_of",
    "is_recording",
    "is_users",
    "key_of",
    "operator_name",
    "program_of",
    "record",
]
