"""Rules that users add."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._layout import WHOLE, Layout, MixedSamplesError
from ._pattern import Pattern
from ._rules import _RULES, Call, Placement, Rule, Use, has_rule, overloads_of

__all__ = ["register_rule"]

Values = Callable[[Call, Pattern], torch.Tensor]


class _Registered(Rule):
    """What `register_rule` was given."""

    all_results = True

    several = True
    reads_contents = reads_numbers = True

    def __init__(
        self, pattern: Callable[[Call], Pattern], values: Values | None, shared: bool, weights: Sequence[str]
    ) -> None:
        self._pattern, self._values, self._shared, self.weights = pattern, values, shared, tuple(weights)

    def placement(self, use: Use) -> Placement:
        if use.batch == 1:
            return Placement(dict(use.layouts), WHOLE)
        # Nothing is known of what it does with an axis: each sample is tried by itself.
        for layout in _candidates(use):
            if all(_alone(use, layout, number) for number in range(use.batch)):
                return Placement(dict(use.layouts), layout)
        raise MixedSamplesError

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


def _candidates(use: Use) -> list[Layout]:
    """Where the samples may be in the output: where they are in an operand first."""
    shape, batch = use.output.shape, use.batch
    fitting = [
        Layout(axis, size // batch, minor)
        for axis, size in enumerate(shape)
        if size and size % batch == 0
        for minor in (False, True)
        if size > batch or not minor
    ]
    likely = set(use.layouts.values())
    return sorted(fitting, key=lambda layout: (layout not in likely, layout.copies))


def _alone(use: Use, layout: Layout, number: int) -> bool:
    """Whether an operator makes the same of a sample by itself as of the whole batch."""
    arguments = dict(use.arguments)
    for name, own in use.layouts.items():
        arguments[name] = own.join(own.split(arguments[name].detach())[number : number + 1])
    try:
        made = use.evaluate(arguments)
    except (RuntimeError, ValueError, IndexError):
        return False
    expected = layout.join(layout.split(use.output.detach())[number : number + 1])
    if made.shape != expected.shape:
        return False
    size = expected.nan_to_num(0, 0, 0).abs().max().item() if expected.numel() else 0.0
    share = 1e-9 if expected.dtype == torch.float64 else 1e-4
    return torch.allclose(made, expected, rtol=share, atol=share * size, equal_nan=True)


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
        As in ``"aten.logcumsumexp"`` or ``torch.ops.mylib.scale``: as PyTorch calls it below autograd.
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
        Where the operator's name is none, it has a rule already, or PyTorch makes it of others, as ``aten.linear``.

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
    if not overloads_of(name):
        raise ValueError(f"there is no operator {name}; import the library that defines it first")
    if _is_composed(name):
        raise ValueError(f"{name} is made of other operators, and never seen; register a rule for one of those")
    if has_rule(name) and not replace:
        raise ValueError(f"{name} has a rule already; pass replace=True to put yours in its place")
    _RULES[name] = _Registered(pattern, values, shared, weights)


def _is_composed(name: str) -> bool:
    """Whether PyTorch takes an operator apart before autograd."""
    return overloads_of(name)[0]._can_decompose()  # type: ignore[no-any-return]


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
