"""Schedules: which products back-propagation computes, and in which order.

The gradients of a loss with respect to every stage's output are an exclusive scan (thesis, section 3.1) of

    a = [∇x_n, J_nᵀ, J_{n-1}ᵀ, ..., J_1ᵀ]        with  A ⋄ B = B A,

where ``J_i = ∂x_i/∂x_{i-1}``. A schedule is one way to evaluate that scan: a list of steps in static single assignment,
grouped in levels of independent steps. The scan runs the same steps that the FLOP report counts.

Values are numbered: 0 to n are the elements of `a`, and larger numbers are results of steps. A step's ``left`` and
``right`` are in the order of the matrix product, ``out = left · right``: `left` is closer to the network's input.
"""

from .blockwise import balanced, blocked, chunked
from .cost import Complexity
from .names import Names, Number
from .resolution import COUNTED, parse, resolve
from .rounds import EXCHANGES, Message, check_exchange, exchanges, taken_in
from .running import by_level, run
from .scans import blelloch, cyclic_reduction, linear
from .schedules import Schedule
from .steps import Step
from .workers import check_workers, fastest_on

__all__ = [
    "COUNTED",
    "EXCHANGES",
    "Complexity",
    "Message",
    "Names",
    "Number",
    "Schedule",
    "Step",
    "balanced",
    "blelloch",
    "blocked",
    "by_level",
    "check_exchange",
    "check_workers",
    "chunked",
    "cyclic_reduction",
    "exchanges",
    "fastest_on",
    "linear",
    "parse",
    "resolve",
    "run",
    "taken_in",
]
