"""Rules that users register."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..runtime import a_type
from .layout import WHOLE, Layout, MixedSamplesError
from .pattern import Pattern
from .rules import RULES, Call, Placement, Rule, Use, overloads_of, rule_of

Values = Callable[[Call, Pattern], torch.Tensor]

#: The operators whose rules were registered, in order: what was made before the last one may follow another rule.
REGISTERED: list[str] = []


def are_values_registered() -> bool:
    """Whether values of any operator are registered, which may be others than those of PyTorch's derivative."""
    return any(name in RULES and RULES[name].has_registered_values for name in REGISTERED)


class _RegisteredRule(Rule):
    all_results = several = reads_contents = reads_numbers = places_by_elements = True

    def __init__(
        self, pattern: Callable[[Call], Pattern], values: Values | None, shared: bool, weights: Sequence[str]
    ) -> None:
        self._pattern, self._values, self._shared, self.weights = pattern, values, shared, tuple(weights)
        self.has_registered_values = values is not None

    def placement(self, use: Use) -> Placement:
        if use.batch == 1:
            return Placement(dict(use.layouts), WHOLE)
        # The operator may do anything along an axis: each sample is run by itself.
        for layout in _candidates(use):
            if all(_is_same_alone(use, layout, number) for number in range(use.batch)):
                return Placement(dict(use.layouts), layout)
        raise MixedSamplesError

    def shared(self, call: Call) -> bool:
        return self._shared

    def pattern(self, call: Call) -> Pattern:
        pattern = self._pattern(call)
        if not isinstance(pattern, Pattern):
            raise TypeError(f"{call.path}: the rule of {call.operator} gave {a_type(pattern)}, not a Pattern")
        return pattern

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        if self._values is None:
            return super().values(call, pattern)
        values, x = self._values(call, pattern), call.input
        message = f"{call.path}: the rule of {call.operator} gave values"
        if not isinstance(values, torch.Tensor):
            raise TypeError(f"{message} that are {a_type(values)}; expected a tensor")
        if values.dtype != x.dtype or values.device != x.device:
            raise TypeError(
                f"{message} of {values.dtype} on {values.device}; expected {x.dtype} on {x.device}, as the input"
            )
        batches = [1] if self._shared else [1, len(x)]
        if values.ndim != 2 or len(values) != pattern.nnz or values.shape[1] not in batches:
            expected = " or ".join(str((pattern.nnz, batch)) for batch in dict.fromkeys(reversed(batches)))
            raise ValueError(
                f"{message} of shape {tuple(values.shape)}; expected {expected}: an entry of the pattern in each row"
            )
        # The function may write to its tensor again.
        return values.clone()


def _candidates(use: Use) -> list[Layout]:
    """The layouts that the output may have, beginning with those of the operands."""
    layouts = [
        Layout(axis, size // use.batch, minor)
        for axis, size in enumerate(use.output.shape)
        if size and size % use.batch == 0
        for minor in (False, True)
        if size > use.batch or not minor
    ]
    of_operands = set(use.layouts.values())
    return sorted(layouts, key=lambda layout: (layout not in of_operands, layout.copies))


def _is_same_alone(use: Use, layout: Layout, number: int) -> bool:
    """Whether an operator's result for a sample by itself is that for the sample in the whole batch."""
    arguments = dict(use.arguments)
    for name, operand in use.layouts.items():
        arguments[name] = operand.join(operand.split(arguments[name].detach())[number : number + 1])
    try:
        result = use.evaluate(arguments)
    except (RuntimeError, ValueError, IndexError):
        return False
    expected = layout.join(layout.split(use.output.detach())[number : number + 1])
    if result.shape != expected.shape:
        return False
    size = expected.nan_to_num(0, 0, 0).abs().max().item() if expected.numel() else 0.0
    tolerance = 1e-9 if expected.dtype == torch.float64 else 1e-4
    return torch.allclose(result, expected, rtol=tolerance, atol=tolerance * size, equal_nan=True)


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
        The operator that PyTorch calls below autograd, as in ``"aten.logcumsumexp"`` or ``torch.ops.mylib.scale``.
    pattern : callable
        ``pattern(call) -> Pattern``, of shape ``(call.out_size, call.in_size)``: the positions of the Jacobian that
        may be other than zero for some input, from ``call.in_shape``, ``call.out_shape`` and ``call["argument"]``.
        Shapes are those that the operator sees for one sample, and include the batch axis, of size 1.
    values : callable, optional
        ``values(call, pattern) -> Tensor``, ``(nnz, batch)`` in the order of the pattern's entries, or ``(nnz, 1)``
        where `shared`, from ``call.input`` and ``call.output``, ``(batch, *shape)``. By default values come from the
        operator's own derivative, in one pass for each colour of the pattern's rows or columns.
    shared : bool
        Whether all samples share their values.
    weights : sequence of str
        The operator's arguments that may be pruned: ``call.masks`` has their masks, and the pattern may leave out
        pruned elements.
    replace : bool
        Whether an existing rule may be replaced.

    Raises
    ------
    TypeError
        Where an argument is of the wrong kind.
    ValueError
        Where no operator has that name, it has a rule already, or PyTorch composes it of others, as ``aten.linear``.

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
            raise TypeError(f"{what} is {a_type(function)}; expected a function")
    if not overloads_of(name):
        raise ValueError(f"there is no operator {name}; import the library that defines it first")
    if overloads_of(name)[0]._can_decompose():
        raise ValueError(f"{name} is made of other operators, and never seen; register a rule for one of those")
    if rule_of(name) is not None and not replace:
        raise ValueError(f"{name} has a rule already; pass replace=True to put yours in its place")
    RULES[name] = _RegisteredRule(pattern, values, shared, weights)
    REGISTERED.append(name)


def _name(operator: Any) -> str:
    """An operator as in ``aten.cumsum``."""
    if isinstance(operator, torch._ops.OpOverload):
        operator = operator.overloadpacket
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return str(operator)
    if not isinstance(operator, str):
        raise TypeError(f"operator is {a_type(operator)}; expected its name, as in 'aten.cumsum', or itself")
    namespace, dot, name = operator.replace("::", ".").partition(".")
    if not namespace or not dot or not name or "." in name:
        raise ValueError(f"operator is {operator!r}; expected a namespace and a name, as in 'aten.cumsum'")
    return f"{namespace}.{name}"
