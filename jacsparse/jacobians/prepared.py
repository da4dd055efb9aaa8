"""Prepared Jacobians: all that shapes decide is decided once, so that a call computes local derivatives and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..patterns import Pattern, UnsupportedOperatorError
from ..spgemm import SparseJacobian
from ..stages import chain_of, recorded, refuse_hooks
from ..tracing import (
    Tape,
    check_module,
    check_replays,
    followed,
    form_of,
    has_contents,
    number_tensors,
    recorded_tape,
    undisturbed,
    without_autocast,
)
from .arguments import Arguments, FlatFunction, arguments_of, name_of
from .compressed import Compressed
from .linearised import Linearised, linearised
from .products import NotFoldableError, Products
from .surroundings import Surroundings
from .verification import VerificationError

METHODS = ("auto", "products", "compressed")


class PreparedJacobian:
    """The Jacobian of a function, prepared for arguments of the same shapes; `prepare_jacobian` makes it.

    It trusts its program: a call does not run the function, unless a number among the arguments, or what the function
    reads besides them, has changed. `check` compares with the function itself.

    Attributes
    ----------
    pattern : Pattern
        The pattern, which holds for all arguments of these shapes.
    method : str
        ``products`` or ``compressed``.
    """

    def __init__(
        self, f: Callable[..., Any], arguments: Arguments, tape: Tape, evaluator: Products | Compressed
    ) -> None:
        self.pattern, self.method = evaluator.pattern, evaluator.name
        self._f, self._form, self._arguments = f, arguments.form(), arguments
        self._tape, self._evaluator = tape, evaluator
        self._plain = _plain_leaves(arguments)
        self._externals, self._numbers = list(tape.externals.values()), tuple(tape.numbers)
        # Externals that are arguments, by the place of the leaf.
        tensors = {id(leaf): place for place, leaf in enumerate(arguments.leaves) if isinstance(leaf, torch.Tensor)}
        self._from_arguments = [tensors.get(id(external)) for external in self._externals]
        self._surroundings = Surroundings(f)
        self._number_tensors: tuple[tuple[float, ...], list[torch.Tensor]] | None = None

    def __call__(self, *args: Any) -> SparseJacobian:
        """The Jacobian at these arguments."""
        return SparseJacobian(self.pattern, self.values(*args))

    def values(self, *args: Any) -> torch.Tensor:
        """The values on the pattern, ``(nnz, batch)``, or ``(nnz, 1)`` where all samples share them.

        Raises
        ------
        ValueError
            Where the arguments have other shapes, dtypes or indices than those that it was prepared for.
        RuntimeError
            Where the function makes other calls than when it was prepared.
        """
        arguments = self._checked(args)
        plain = _plain_leaves(arguments)
        if plain != self._plain or self._surroundings.changed():
            now = self._followed(self._f, arguments)
            if now is None:
                raise RuntimeError(
                    f"{name_of(self._f)} makes other calls than when it was prepared; prepare it again, or call "
                    "jacsparse.jacobian, which follows each run"
                )
            self._plain, (self._externals, self._numbers) = plain, now
        return self._values(arguments, self._externals, self._numbers)

    def _checked(self, args: Sequence[Any]) -> Arguments:
        arguments = arguments_of(args, self._arguments.argnums, self._arguments.batched)
        if arguments.form() != self._form:
            before, now = _shapes(self._arguments), _shapes(arguments)
            raise ValueError(
                f"the arguments are {now}; this Jacobian is prepared for {before}: prepare one for these"
            )
        for place, leaf in enumerate(self._from_arguments):
            slot = list(self._tape.externals)[place]
            if leaf is not None and slot in self._tape.contents:
                if not has_contents(self._tape, slot, arguments.leaves[leaf]):
                    raise ValueError(
                        "an argument of indices or a mask holds other elements than when this Jacobian was prepared, "
                        "and patterns depend on them: prepare one for these"
                    )
        return arguments

    def _followed(
        self, f: Callable[..., Any], arguments: Arguments
    ) -> tuple[list[torch.Tensor], tuple[float, ...]] | None:
        """The tensors and numbers that a function reads now; None where it makes other calls."""
        x = arguments.flat().requires_grad_().clone()
        return followed(self._tape, FlatFunction(f, arguments), x)

    def _values(
        self, arguments: Arguments, externals: Sequence[torch.Tensor], numbers: tuple[float, ...]
    ) -> torch.Tensor:
        x = arguments.flat()
        current = [
            external if leaf is None else arguments.leaves[leaf]
            for external, leaf in zip(externals, self._from_arguments, strict=True)
        ]
        if self._number_tensors is None or self._number_tensors[0] != numbers:
            self._number_tensors = numbers, number_tensors(self._tape, numbers, x.device)
        inputs = [x, *(external.detach() for external in current), *self._number_tensors[1]]
        with torch.no_grad(), without_autocast(x.device):
            return self._evaluator.values(inputs, numbers)

    def followed_values(self, f: Callable[..., Any], arguments: Arguments) -> torch.Tensor | None:
        """The values of what a function computes now; it runs. None where this Jacobian is of other calls."""
        if arguments.form() != self._form:
            return None
        now = self._followed(f, arguments)
        return None if now is None else self._values(arguments, *now)

    def check(self, *args: Any, tolerance: float | None = None) -> float:
        """Compare with the function itself, by products with random vectors.

        Parameters
        ----------
        *args
            Arguments of the function.
        tolerance : float, optional
            The largest difference; by default 1e-9 for float64 and 1e-4 for float32.

        Returns
        -------
        float
            The largest difference, as a share of the largest element.

        Raises
        ------
        VerificationError
            Where the difference is larger than the tolerance.
        """
        arguments = self._checked(args)
        jacobian = self(*args)
        x = arguments.flat().requires_grad_()
        with torch.enable_grad():
            y = FlatFunction(self._f, arguments)(x.clone())
        generator = torch.Generator().manual_seed(0)
        g = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
        (expected,) = torch.autograd.grad(y, x, g, materialize_grads=True)
        actual = jacobian.vjp(g)
        scale = SparseJacobian(self.pattern, jacobian.values.abs()).vjp(g.abs()).amax().item() if actual.numel() else 0
        error = (actual - expected).abs().amax().item() / (scale or 1.0) if actual.numel() else 0.0
        limit = tolerance if tolerance is not None else (1e-9 if x.dtype == torch.float64 else 1e-4)
        if not error <= limit:
            raise VerificationError(
                f"{name_of(self._f)}: the prepared Jacobian differs from autograd's by {error:.1e} of the largest "
                f"element, more than {limit:.0e}; prepare it again, or call jacsparse.jacobian"
            )
        return error

    def __repr__(self) -> str:
        tape, evaluator = self._tape, self._evaluator
        how = self.method
        if isinstance(evaluator, Compressed):
            columns, rows = evaluator.coloring.counts
            how += f" ({columns} colours of columns, {rows} of rows)"
        moved = self.pattern.nnz * self._arguments.batch * self._arguments.tensors[0].element_size()
        inputs = [f"argument {number}" for number in range(len(self._arguments.specs))]
        others = sum(leaf is None for leaf in self._from_arguments)
        return "\n".join(
            [
                f"<PreparedJacobian of {name_of(self._f)}: {self.pattern.summary()}",
                f"  method {how}, about {evaluator.flop:,} flop a sample, {evaluator.nbytes + moved:,} bytes",
                f"  inputs: {', '.join(inputs)}, {others} other tensors, {len(tape.numbers)} numbers",
                f"  baked in: shapes, {len(tape.contents)} indices or masks, branches, other numbers>",
            ]
        )


def _plain_leaves(arguments: Arguments) -> list[Any]:
    """The leaves that are no tensors."""
    return [leaf for leaf in arguments.leaves if not isinstance(leaf, torch.Tensor)]


def _shapes(arguments: Arguments) -> str:
    shapes = [
        f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        for leaf in arguments.leaves
    ]
    return ", ".join(shapes)


def prepare_jacobian(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool = True,
    method: str = "auto",
    compile: bool = False,
) -> PreparedJacobian:
    """A function's Jacobian, prepared for arguments of the same shapes.

    Parameters
    ----------
    f : callable
        A function or a module. It must be a function of its arguments and of what it reads alone: without random
        numbers, and without branches on what tensors hold.
    *args
        Its arguments: tensors, tuples, lists and dicts of them, numbers and anything else.
    argnums : int or tuple of int
        The arguments to differentiate by. Their tensors' elements are the columns, one tensor after the other.
    batched : bool
        Whether these tensors, and the outputs, have samples along their first axis, each worked on by itself. All other
        arguments are passed as they are.
    method : str
        ``products`` multiplies local Jacobians along paths; ``compressed`` takes products of the whole function with a
        seed for each colour; ``auto`` takes the one of less predicted cost.
    compile : bool
        Whether the program runs under ``torch.compile``.

    Returns
    -------
    PreparedJacobian
        ``prepared(*args)`` is a SparseJacobian.

    Raises
    ------
    TypeError, ValueError
        Where arguments or outputs are not of this kind, or the method is unknown or does not apply.
    UnsupportedOperatorError
        Where an operator has no rule, or the calls depend on what tensors hold.

    Examples
    --------
    >>> import torch
    >>> differences = prepare_jacobian(lambda u, h: (u[1:] - u[:-1]) ** 2 / h, torch.zeros(4), 1.0, batched=False)
    >>> differences(torch.tensor([0.0, 1.0, 3.0, 3.0]), 0.5).todense().tolist()
    [[-4.0, 4.0, 0.0, 0.0], [0.0, -8.0, 8.0, 0.0], [0.0, 0.0, -0.0, 0.0]]
    """
    if not callable(f):
        raise TypeError(f"f is a {type(f).__name__}; expected a function or a module")
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; expected one of {', '.join(METHODS)}")
    arguments = arguments_of(args, argnums, batched)
    function = FlatFunction(f, arguments)
    check_module(function)
    x = arguments.flat()
    with undisturbed(function):
        recording = recorded(function, x, readable=False)
        with without_autocast(x.device):
            refuse_hooks(chain_of(recording, pruned=False).records(recording)[1])
        tape = tape_of(function, x)
    check_replays(tape, name_of(f))
    prepared = PreparedJacobian(f, arguments, tape, evaluator_of(linearised(tape, x), method, compile))
    prepared.check(*args)
    return prepared


def tape_of(function: nn.Module, x: torch.Tensor) -> Tape:
    """The tape of a flat function, which must return a tensor that the tape computes."""
    with without_autocast(x.device):
        return recorded_tape(function, x.detach().requires_grad_().clone())


def evaluator_of(function: Linearised, method: str, compile: bool) -> Products | Compressed:
    """The way to the values that was asked for, or the one of less predicted cost.

    Raises
    ------
    ValueError
        Where the method does not apply.
    """
    if method == "compressed":
        return Compressed(function, compile)
    try:
        return Products(function)
    except NotFoldableError as error:
        if method == "products":
            raise ValueError(f"method 'products' does not apply: {error}; take 'compressed' or 'auto'") from None
        return Compressed(function, compile)
