"""A cache of programs, which each call of `jacobian` follows: a result is of what the function computes now.

The key is the code that runs. It only finds candidates: each of them is followed, which compares the calls of this very
run with those that it was prepared for, and takes all tensors and numbers from the run.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ..patterns import REGISTERED, UnsupportedOperatorError
from ..spgemm import SparseJacobian
from ..stages import ChainCache
from ..tracing import parts_of
from .arguments import Arguments
from .compressed import coloring
from .evaluators import evaluator_of
from .folding import NotFoldableError
from .gradients import Gradient
from .linearised import Linearised, linearised
from .products import ChainProducts
from .taped import TapedJacobian, has_zeros, taped


class RecentJacobians:
    """The programs of one code's Jacobians, for a few forms of arguments."""

    #: The most programs, and the most forms whose trials are counted.
    most = 8
    #: The most trials to make a program for one form: a function may make other calls each time.
    trials = 4

    def __init__(self, pruned: bool) -> None:
        self.pruned = pruned
        #: The chains of functions, which do not fold; a module's belong to the module.
        self.chains = ChainCache(pruned=pruned)
        self._programs: list[TapedJacobian] = []
        self._trials: OrderedDict[Hashable, int] = OrderedDict()

    def jacobian(self, f: Callable[..., Any], arguments: Arguments) -> SparseJacobian | None:
        """The Jacobian by a program of this run's calls; None where there is none."""
        for program in list(self._programs):
            reads = program.followed(f, arguments)
            if reads is not None:
                return SparseJacobian(program.evaluator.pattern, program.values(arguments.flat(), reads))
        return None

    def add(self, f: Callable[..., Any], arguments: Arguments, expected: SparseJacobian) -> None:
        """Make a program for later calls, where that pays and this call's Jacobian is the expected one."""
        form = repr(arguments.form)
        # The first call is no trial: many a function is called once.
        trial = self._trials.get(form, -1) + 1
        if trial > self.trials:
            return
        self._trials[form] = trial
        if len(self._trials) > self.most:
            self._trials.popitem(last=False)
        if not trial:
            return
        try:
            self._programs = [_program(f, arguments, expected, self.pruned), *self._programs[: self.most - 1]]
        except (UnsupportedOperatorError, NotFoldableError):
            self._trials[form] = self.trials


def _program(f: Callable[..., Any], arguments: Arguments, expected: SparseJacobian, pruned: bool) -> TapedJacobian:
    tape, reads = taped(f, arguments)
    if any("shows" not in effect for effect in tape.effects.values()):
        raise NotFoldableError(f"its calls have effects: {tape.effects}")
    function = linearised(tape, arguments.flat(), reads, pruned=pruned)
    if function.pattern != expected.pattern:
        raise NotFoldableError("its pattern has entries that this call's does not")
    weights = _weights(function) if pruned else ()
    if any(has_zeros(reads.externals[place]) for place in weights):
        raise NotFoldableError("its weights have zeros, which a chain leaves out")
    # The same pattern may have been coloured before.
    evaluator = evaluator_of(function, "auto", compile=False, coloring=lambda _: coloring(expected.pattern))
    if isinstance(evaluator, ChainProducts):
        raise NotFoldableError("a chain of this run's calls does the same")
    evaluator.take_results(tape)
    program = TapedJacobian(arguments.form, tape, evaluator, weights)
    reads_of_run = program.followed(f, arguments)
    if reads_of_run is None:
        raise NotFoldableError("another run makes other calls")
    actual = SparseJacobian(evaluator.pattern, program.values(arguments.flat(), reads_of_run))
    if not _agree(actual, expected):
        raise NotFoldableError("its values are not those of the operators' own derivatives")
    return program


def _weights(function: Linearised) -> tuple[int, ...]:
    """The places of the externals whose zeros a chain leaves out.

    Raises
    ------
    NotFoldableError
        Where a weight is computed from others: its zeros are not those of an external.
    """
    places = {node: place for place, node in enumerate(function.externals)}
    weights = set()
    for edge, _ in function.edges():
        for name in edge.rule.pruned_arguments(edge.call):
            if name in edge.call.dependent | edge.call.batched:
                continue
            node = function.argument(edge, name)
            if node is not None and not node.meta["val"].is_floating_point():
                # The elements of a mask are compared in each run.
                continue
            if node not in places:
                raise NotFoldableError(f"{edge.call.path}.{name} is computed from what the function reads")
            weights.add(places[node])
    return tuple(sorted(weights))


def _agree(actual: SparseJacobian, expected: SparseJacobian) -> bool:
    """Whether two Jacobians of one pattern have equal products with a random vector."""
    if actual.batch != expected.batch:
        return False
    generator = torch.Generator().manual_seed(0)
    v = torch.rand((actual.batch, actual.shape[1]), generator=generator, dtype=torch.float64).to(actual.values)
    products = actual.jvp(v), expected.jvp(v)
    scale = SparseJacobian(expected.pattern, expected.values.abs()).jvp(v)
    limit = torch.finfo(v.dtype).eps ** 0.5 * scale.amax() if scale.numel() else 0
    return bool(((products[0] - products[1]).abs() <= limit).all())


#: The caches by code, for the codes that were used last.
_RECENT: OrderedDict[Hashable, RecentJacobians] = OrderedDict()
_MOST = 32


def recent_jacobians(f: Callable[..., Any], pruned: bool) -> RecentJacobians:
    """The cache of the code that a function runs, for patterns with or without pruned weights."""
    key = _code_of(f), pruned, len(REGISTERED)
    entry = _RECENT.setdefault(key, RecentJacobians(pruned))
    _RECENT.move_to_end(key)
    while len(_RECENT) > _MOST:
        _RECENT.popitem(last=False)
    return entry


def _code_of(f: Any) -> Hashable:
    """What tells functions apart that probably make other calls."""
    if isinstance(f, Gradient):
        return Gradient, _code_of(f.f)
    if isinstance(f, functools.partial):
        return _code_of(f.func)
    if isinstance(f, MethodType):
        return _code_of(f.__func__)
    if isinstance(f, FunctionType):
        return f.__code__
    if isinstance(f, nn.Module):
        return type(f), tuple(map(type, parts_of(f)))
    return f"{type(f).__module__}.{type(f).__qualname__}"
