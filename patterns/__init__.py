"""Sparsity patterns, and a rule for each family of operators: the pattern and the values of its Jacobian."""

from . import (  # noqa: F401  (importing a family registers its rules)
    adjoints,
    axis,
    blocks,
    elementwise,
    losses,
    matmul,
    matrices,
    movement,
    ordering,
    reduction,
)
from .alike import entries_of_rows, pattern_of_rows, rows_alike
from .coloring import compressed_values, row_colors
from .convolution import Convolution, input_gradients
from .drawing import as_html, pattern_figure, picture, plot_pattern
from .engine import gradient_of, gradients_of, holds_numbers, requiring_gradient
from .layout import WHOLE, Layout, MixedSamplesError
from .movement import MOVEMENTS
from .pattern import Pattern
from .pooling import Adaptive, Pooling
from .registered import REGISTERED, are_values_registered, register_rule
from .rules import (
    CONSTANT,
    RULES,
    Call,
    Rule,
    Sources,
    UnsupportedOperatorError,
    Use,
    is_pointwise,
    remedy_for,
    rule_for,
    rule_of,
)
from .sliding import Sliding
from .structure import Blocks, Csr, Diagonal, Full, Identity, Structure, row_sums
from .value_kernels import any_nonzero_at, batch_last, gathered, rows_at
from .value_kernels_cuda import note_infinite

__all__ = [
    "CONSTANT",
    "MOVEMENTS",
    "REGISTERED",
    "RULES",
    "WHOLE",
    "Adaptive",
    "Blocks",
    "Call",
    "Convolution",
    "Csr",
    "Diagonal",
    "Full",
    "Identity",
    "Layout",
    "MixedSamplesError",
    "Pattern",
    "Pooling",
    "Rule",
    "Sliding",
    "Sources",
    "Structure",
    "UnsupportedOperatorError",
    "Use",
    "any_nonzero_at",
    "are_values_registered",
    "as_html",
    "batch_last",
    "compressed_values",
    "entries_of_rows",
    "gathered",
    "gradient_of",
    "gradients_of",
    "holds_numbers",
    "input_gradients",
    "is_pointwise",
    "note_infinite",
    "pattern_figure",
    "pattern_of_rows",
    "picture",
    "plot_pattern",
    "register_rule",
    "remedy_for",
    "requiring_gradient",
    "row_colors",
    "row_sums",
    "rows_alike",
    "rows_at",
    "rule_for",
    "rule_of",
]
