"""Rules that users add."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._pattern import Pattern
from ._rules import _RULES, Call, Rule

__all__ = ["register_rule"]

Values = Callable[[Call, Pattern], torch.Tensor]


class _Registered(Rule):
    """What `register_rule` was given."""

    several = True

    def __init__(
        self, pattern: Callable[[Call], Pattern], values: Values | None, shared: bool, weights: Sequence[str]
    ) -> None:
        self._pattern, self._values, self._shared, self.weights = pattern, values, shared, tuple(weights)

    def shared(self, call: Call) -> bool:
        return self._shared

    def pattern(self, call: Call) -> Pattern:
        pattern = self._pattern(call)
        if not isinstance(pattern, Pattern):
            raise TypeError(f"{call.path}: the rule of {call.operator} gave a {type(pattern).__name__}, not a Pattern")
        return pattern

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        if self._values is None:
            return super().values(call, pattern)
        values = self._values(call, pattern)
        self._check_values(call, pattern, values)
        return values

    def _check_values(self, call: Call, pattern: Pattern, values: Any) -> None:
        """Raise where what a user's function gave are no values of that pattern."""
        assert call.input is not None
        given, like = f"{call.path}: the rule of {call.operator} gave values", call.input
        if not isinstance(values, torch.Tensor):
            raise TypeError(f"{given} that are a {type(values).__name__}; expected a tensor")
        if values.dtype != like.dtype or values.device != like.device:
            raise TypeError(
                f"{given} of {values.dtype} on {values.device}; expected {like.dtype} on {like.device}, as the input"
            )
        batches = [1] if self._shared else [1, len(like)]
        if values.ndim != 2 or len(values) != pattern.nnz or values.shape[1] not in batches:
            expected = " or ".join(str((pattern.nnz, batch)) for batch in dict.fromkeys(reversed(batches)))
            raise ValueError(
                f"{given} of shape {tuple(values.shape)}; expected {expected}: an entry of the pattern in each row"
            )


def register_rule(
    operator: Any,
    *,
    pattern: Callable[[Call], Pattern],
    values: Values | None = None,
    shared: bool = False,
    weights: Sequence[str] = (),
    replace: bool = False,
) -> None:
    """Teach jacsparse the Jacobian of an operator.

    Parameters
    ----------
    operator : str or OpOverload or OpOverloadPacket
        As in ``"aten.logcumsumexp"`` or ``torch.ops.mylib.scale``: as torch.export names it.
    pattern : callable
        ``pattern(call) -> Pattern``, of shape ``(call.out_size, call.in_size)``: the positions of the Jacobian that
        may be other than zero for some input, from ``call.in_shape``, ``call.out_shape`` and ``call["argument"]``.
        Shapes are those that the operator sees for one sample, its batch axis, of size 1, included.
    values : callable, optional
        ``values(call, pattern) -> Tensor``, ``(nnz, batch)`` in the order of the pattern's entries, or ``(nnz, 1)``
        where `shared`, from ``call.input`` and ``call.output``, ``(batch, *shape)``. Where left out they come by the
        operator's own derivative, by as many passes as rows or columns of the pattern need colours.
    shared : bool
        Whether all samples share their values.
    weights : sequence of str
        The operator's arguments whose pruned elements ``call.kept`` tells, for a pattern that leaves them out.
    replace : bool
        Whether a rule that there is already may be replaced.

    Raises
    ------
    TypeError
        Where an argument is of the wrong kind.
    ValueError
        Where the operator's name is none, or it has a rule already.

    Examples
    --------
    >>> import numpy as np, scipy.sparse, torch, jacsparse
    >>> def lower_triangle(call):
    ...     return jacsparse.Pattern.from_scipy(scipy.sparse.csr_array(np.tril(np.ones((call.out_size, call.in_size)))))
    >>> jacsparse.register_rule("aten.logcumsumexp", pattern=lower_triangle, replace=True)
    >>> class Growth(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x.logcumsumexp(1)
    >>> jacsparse.jacobian(Growth(), torch.zeros(1, 3)).todense()
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    name = _name(operator)
    for what, function in (("pattern", pattern), ("values", values)):
        if not callable(function) and not (what == "values" and function is None):
            raise TypeError(f"{what} is a {type(function).__name__}; expected a function")
    if name in _RULES and not replace:
        raise ValueError(f"{name} has a rule already; pass replace=True to put yours in its place")
    _RULES[name] = _Registered(pattern, values, shared, weights)


def _name(operator: Any) -> str:
    """An operator as in ``aten.cumsum``."""
    if isinstance(operator, torch._ops.OpOverload):
        operator = operator.overloadpacket
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return str(operator)
    if not isinstance(operator, str):
        raise TypeError(f"operator is a {type(operator).__name__}; expected its name, as in 'aten.cumsum', or itself")
    namespace, dot, name = operator.replace("::", ".").partition(".")
    if not namespace or not dot or not name or "." in name:
        raise ValueError(f"operator is {operator!r}; expected a namespace and a name, as in 'aten.cumsum'")
    return f"{namespace}.{name}"
