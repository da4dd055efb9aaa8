"""What is certainly zero: patterns, and for each family of operators its pattern and its values."""

from . import (  # noqa: F401  (each registers its rules)
    _axis,
    _blocks,
    _elementwise,
    _matmul,
    _movement,
    _ordering,
    _reduction,
)
from ._convolution import Convolution, Sliding
from ._pattern import Pattern
from ._pooling import Adaptive, Pooling, Weighted
from ._recurrent import state_jacobian_pattern, state_jacobian_values
from ._registered import register_rule
from ._rules import Call, Rule, UnsupportedOperatorError, add_rule, rule_for
from ._strided import Strided
from ._structure import Blocks, Csr, Diagonal, Full, Identity, Structure

__all__ = [
    "Adaptive",
    "Blocks",
    "Call",
    "Convolution",
    "Csr",
    "Diagonal",
    "Full",
    "Identity",
    "Pattern",
    "Pooling",
    "Rule",
    "Sliding",
    "Strided",
    "Structure",
    "UnsupportedOperatorError",
    "Weighted",
    "add_rule",
    "register_rule",
    "rule_for",
    "state_jacobian_pattern",
    "state_jacobian_values",
]
