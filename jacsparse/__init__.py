"""Sparse Jacobians of neural-network operators, planned products of them, and back-propagation by parallel scan."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

_ROOT = Path(__file__).parent.parent
if (_ROOT / "setup.cfg").exists():
    # A checkout: jacsparse.patterns and its like are folders beside this one.
    __path__.append(str(_ROOT))

if TYPE_CHECKING:
    from . import distributed as distributed
    from . import nn as nn
    from . import recurrence as recurrence
    from . import schedule as schedule
    from . import simulation as simulation
    from . import solvers as solvers
    from . import training as training
    from .flop import FlopReport, LayerFlop, count_flop
    from .jacobians import (
        PreparedHessian,
        PreparedJacobian,
        Verification,
        VerificationError,
        hessian,
        hessian_pattern,
        jacobian,
        jacobian_pattern,
        newton,
        prepare_hessian,
        prepare_jacobian,
        verify,
    )
    from .patterns import Call, Pattern, UnsupportedOperatorError, register_rule
    from .recurrence import linear_recurrence
    from .scan import backward, vjp
    from .sparse import FrozenModel, SparseModel, densify, freeze, sparsify
    from .spgemm import Factorization, ProductPlan, SparseJacobian, SumPlan, plan_product, plan_sum
    from .stages import Chain, Stage, chain
    from .training import leapfrog_backward

# Without packages and modules: ``from jacsparse import *`` leaves ``torch.nn`` and others of these names alone.
__all__ = [
    "Call",
    "Chain",
    "Factorization",
    "FlopReport",
    "FrozenModel",
    "LayerFlop",
    "Pattern",
    "PreparedHessian",
    "PreparedJacobian",
    "ProductPlan",
    "SparseJacobian",
    "SparseModel",
    "Stage",
    "SumPlan",
    "UnsupportedOperatorError",
    "Verification",
    "VerificationError",
    "backward",
    "chain",
    "count_flop",
    "densify",
    "freeze",
    "hessian",
    "hessian_pattern",
    "jacobian",
    "jacobian_pattern",
    "leapfrog_backward",
    "linear_recurrence",
    "newton",
    "plan_product",
    "plan_sum",
    "prepare_hessian",
    "prepare_jacobian",
    "register_rule",
    "sparsify",
    "verify",
    "vjp",
]

# Imported when first used, so that `import jacsparse` is light and `jacsparse --help` loads no PyTorch.
_HOMES = {
    "FlopReport": "flop",
    "LayerFlop": "flop",
    "count_flop": "flop",
    "PreparedHessian": "jacobians",
    "PreparedJacobian": "jacobians",
    "Verification": "jacobians",
    "VerificationError": "jacobians",
    "hessian": "jacobians",
    "hessian_pattern": "jacobians",
    "jacobian": "jacobians",
    "jacobian_pattern": "jacobians",
    "newton": "jacobians",
    "prepare_hessian": "jacobians",
    "prepare_jacobian": "jacobians",
    "verify": "jacobians",
    "Call": "patterns",
    "Pattern": "patterns",
    "UnsupportedOperatorError": "patterns",
    "register_rule": "patterns",
    "linear_recurrence": "recurrence",
    "backward": "scan",
    "vjp": "scan",
    "FrozenModel": "sparse",
    "SparseModel": "sparse",
    "densify": "sparse",
    "freeze": "sparse",
    "sparsify": "sparse",
    "Factorization": "spgemm",
    "ProductPlan": "spgemm",
    "SparseJacobian": "spgemm",
    "SumPlan": "spgemm",
    "plan_product": "spgemm",
    "plan_sum": "spgemm",
    "Chain": "stages",
    "Stage": "stages",
    "chain": "stages",
    "leapfrog_backward": "training",
}

_ROOMS = (
    "distributed",
    "models",
    "nn",
    "patterns",
    "recurrence",
    "schedule",
    "simulation",
    "solvers",
    "spgemm",
    "training",
)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f".{name}", __name__)
    if name in _HOMES:
        # Found once: a call by its full name takes 10 µs otherwise.
        value = globals()[name] = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS, "__version__"])
