"""Prepared Jacobians: all that shapes decide is decided once, so that a call computes local derivatives and values."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, Self

import torch
from typing_extensions import TypeVar

from ..patterns import Pattern, gradient_of
from ..runtime import a_type, announced_where_long
from ..spgemm import SparseJacobian, unchecked_jacobian
from ..stages import agree
from ..tracing import name_of, undisturbed, without_saving_hooks
from .arguments import Arguments, arguments_of, has_samples
from .compressed import Coloring, coloring
from .evaluation import jacobian_and_returned, with_parts
from .evaluator import Evaluator
from .evaluators import METHODS, evaluator_of
from .flat_function import FlatFunction, run_once
from .prepared_program import CallResult, FilledWeightError, PreparedProgram
from .saved_programs import SavedProgram, write_program
from .tracing_for_replays import Options, TracedProgram, traced_program
from .verification import (
    ROUNDINGS,
    VerificationError,
    difference_of,
    largest_finite,
    magnitude,
    rounding_of,
    tolerance_for,
)

#: The most programs of one prepared Jacobian, for other numbers among the arguments.
MOST = 8


#: What a call returns: a SparseJacobian, or a tuple that begins with one.
Result = TypeVar("Result", default=SparseJacobian)


class PreparedJacobian(Generic[Result]):
    """The Jacobian of a function, prepared for arguments of the same shapes; `prepare_jacobian` makes it.

    It trusts its program: a call does not run the function. Parameters and buffers of a module are read by their names,
    other tensors that the function reads are those that it read when it was prepared. Where a number among the
    arguments is no factor or term but decides what the function does, as by ``math.sin`` or a comparison, another one
    makes a program of its own. `check` compares with the function itself. Any number of threads may call it.

    Attributes
    ----------
    pattern : Pattern
        The pattern, which holds for all arguments of these shapes.
    method : str
        ``products`` or ``compressed``.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        arguments: Arguments,
        options: Options,
        choose: Callable[[TracedProgram], Evaluator],
    ) -> None:
        self._f, self._arguments, self._options, self._choose = f, arguments, options, choose
        self._lock = threading.RLock()
        #: The programs, each after the kinds of arguments and the numbers that it was made for; the last one made last.
        self._programs: list[tuple[tuple[Any, ...], tuple[str, ...], PreparedProgram]] = []
        self._first = self._program(arguments)
        evaluator = self._first.evaluator
        self.pattern, self.method = evaluator.pattern, evaluator.name

    @classmethod
    @without_saving_hooks()
    def prepare(
        cls,
        f: Callable[..., Any],
        args: Sequence[Any],
        argnums: int | Sequence[int],
        batched: bool | None,
        options: Options,
    ) -> Self:
        """What `prepare_jacobian` returns."""
        method, compile = options.method, options.compile
        arguments = arguments_of(args, argnums, has_samples(f, batched)).apart()
        if method not in METHODS:
            raise ValueError(f"method is {method!r}; expected one of {', '.join(METHODS)}")
        if not arguments.batch:
            raise ValueError(f"the arguments are {arguments}, without any sample; give one or more to prepare for")
        if options.pattern is not None:
            _check_given(options.pattern, method)
        if options.create_graph:
            arguments = arguments.requiring_gradients()
        differentiated = cls._differentiated(f, arguments, options)

        prepared = cls(differentiated, arguments, options, lambda traced: cls._chosen(traced, method, compile))
        try:
            return prepared._checked_at(args)
        except VerificationError:
            if method != "auto" or prepared.method != "compressed" or options.pattern is not None:
                raise
            # PyTorch's own tangents may be wrong, as those of scatter_reduce's products.
            return cls.prepare(f, args, argnums, batched, replace(options, method="products"))

    @classmethod
    def _chosen(cls, traced: TracedProgram, method: str, compile: bool) -> Evaluator:
        """The way to the values that a method means."""
        return evaluator_of(traced.function, method, compile=compile, coloring=cls._coloring)

    @staticmethod
    def _differentiated(f: Callable[..., Any], arguments: Arguments, options: Options) -> Callable[..., Any]:
        """The function whose Jacobian this is."""
        return f

    #: How its pattern is coloured.
    _coloring: Callable[[Pattern], Coloring] = staticmethod(coloring)

    def __call__(self, *args: Any) -> Result:
        """The Jacobian at these arguments; a tuple where it was prepared with `value` or `has_aux`."""
        result = self._evaluated(args, returns=self._options.returns)
        shapes = self._arguments.in_shape, self._out_shape
        jacobian = unchecked_jacobian(self.pattern, result.values, *shapes)
        return with_parts(jacobian, *self._parts(result))  # type: ignore[return-value]

    def _parts(self, result: CallResult) -> Sequence[tuple[bool, Any]]:
        """What may be returned beside the Jacobian, and whether it is."""
        return (self._options.value, result.result), (self._options.has_aux, result.aux)

    def values(self, *args: Any) -> torch.Tensor:
        """The values on the pattern, ``(nnz, batch)``, or ``(nnz, 1)`` where all samples share them.

        Raises
        ------
        ValueError
            Where the arguments have other shapes, dtypes or indices than those that it was prepared for.
        RuntimeError
            Where a weight that the pattern leaves out is not zero.
        """
        return self._evaluated(args, returns=False).values

    def _evaluated(self, args: Sequence[Any], returns: bool) -> CallResult:
        if self._first.evaluator.fused is not None and not returns:
            memory = self._arguments.memory_of(args)
            values = None if memory is None else self._first.values_of_memory(memory, args)
            if values is not None:
                return CallResult(values)
        arguments = self._checked(args)
        try:
            return self._program(arguments)(arguments, returns)
        except FilledWeightError as error:
            raise RuntimeError(
                f"{name_of(self._f)}: {error.weight} was zero where the pattern leaves it out, and is not any more: "
                "prepare it again, keep the weight zero by a mask (torch.nn.utils.prune), or pass pruned=False"
            ) from None

    def _program(self, arguments: Arguments) -> PreparedProgram:
        """The program for the numbers and objects among arguments of the prepared form."""
        kinds = arguments.kinds_of_plain
        for others, numbers, program in self._programs:
            if others == kinds and numbers == arguments.numbers_but(program.traced.tensors):
                return program
        with self._lock, announced_where_long(f"preparing the Jacobian of {name_of(self._f)}, which it keeps"):
            return self._made(arguments)

    @without_saving_hooks()
    def _made(self, arguments: Arguments) -> PreparedProgram:
        kinds, options = arguments.kinds_of_plain, self._options
        tensors = next((program.traced.tensors for others, _, program in self._programs if others == kinds), None)
        traced_at = arguments if tensors is None else arguments.with_tensors(tensors)
        # What was no tensor once never is.
        traced = traced_program(self._f, traced_at, options, asks=tensors is None)
        if not self._programs:
            trace = traced.function.trace
            self._arguments, self._tolerance = traced.arguments, tolerance_for(trace.input.dtype, trace.tensors)
            self._out_shape = traced.returned.out_shape
        evaluator = self._chosen(traced, self.method, options.compile) if self._programs else self._choose(traced)
        if options.compile and evaluator.uncompiled is not None:
            raise ValueError(f"{name_of(self._f)}: compile is True, and {evaluator.uncompiled}")
        program = PreparedProgram.of(traced, evaluator, options.create_graph)
        if self._programs and program.evaluator.pattern != self._first.evaluator.pattern:
            raise ValueError(
                f"{name_of(self._f)}: the pattern at {arguments} is another than that at {self._arguments}, for which "
                "it was prepared: prepare one for these"
            )
        numbers = arguments.numbers_but(traced.tensors)
        self._programs = [*self._programs[1 - MOST :], (kinds, numbers, program)]
        return program

    def _checked(self, args: Sequence[Any]) -> Arguments:
        """A call's arguments; ValueError where they are not of the prepared form."""
        alike = self._arguments.with_args(args)
        if alike is not None:
            return alike
        arguments = arguments_of(args, self._arguments.argnums, self._arguments.batched)
        arguments = arguments.laid_out_as(self._arguments)
        *_, (default_dtype, autocast), _ = self._arguments.form
        now, autocast_now = arguments.surroundings()
        if now != default_dtype:
            raise ValueError(
                f"the default dtype is {now}; this Jacobian is prepared for {default_dtype}: call "
                "torch.set_default_dtype, or prepare one for this"
            )
        if autocast_now != autocast:
            raise ValueError(
                f"torch.autocast is {_autocast(autocast_now)}; this Jacobian is prepared for {_autocast(autocast)}: "
                "call it as it was prepared, or prepare one for this"
            )
        if arguments.form != self._arguments.form:
            raise ValueError(
                f"the arguments are {arguments}; this Jacobian is prepared for {self._arguments}: prepare one for these"
            )
        return arguments

    @without_saving_hooks()
    def check(self, *args: Any, tolerance: float | None = None) -> float:
        """Compare with the function itself, by products with random vectors.

        The reference is autograd or, where values of an operator were registered, `jacsparse.jacobian`.

        Parameters
        ----------
        *args
            Arguments of the function.
        tolerance : float, optional
            As in `verify`.

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
        with torch.no_grad():
            jacobian = SparseJacobian(self.pattern, self.values(*args))
        x, function = arguments.flat().requires_grad_(), FlatFunction(self._f, arguments, self._options.has_aux)
        # A checkpoint in the function runs parts of it again for a gradient.
        with torch.enable_grad(), undisturbed(function, x.device):
            y = function(x.clone())
            g = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(y)
            expected, g = gradient_of(y, x, g), g.to(x.dtype)
        registered = self._first.traced.function.chain.registered_values
        if registered:
            # Autograd does not know of registered values.
            of_run, *_ = jacobian_and_returned(self._f, arguments, True, False, False, self._options.has_aux)
            expected = of_run.vjp(g).reshape(x.shape)
        limit = tolerance if tolerance is not None else self._tolerance
        scale = largest_finite(SparseJacobian(self.pattern, jacobian.values.abs()).vjp(g.abs()))
        # All elements may be zero but for rounding, as those of a sum of a softmax.
        scale = max(scale, rounding_of(x, y, ROUNDINGS) * largest_finite(g.abs().flatten(1).sum(1)) / (limit or 1.0))
        error = magnitude(difference_of(jacobian.vjp(g).reshape(x.shape), expected)) / (scale or 1.0)
        if not error <= limit:
            if not agree(run_once(function, x).detach(), y.detach()):
                raise VerificationError(
                    f"{name_of(self._f)} returns other numbers where it is called again with the same arguments, as by "
                    "random numbers that no PyTorch generator draws, or by a counter, so that no prepared program "
                    "repeats it: pass such numbers as arguments, or call jacsparse.jacobian, which runs it each time"
                )
            way = " with method='products'" if self.method == "compressed" else ""
            if self._options.pattern is not None:
                way = " with a pattern that has all entries, or without one"
            whose = "that of jacsparse.jacobian" if registered else "autograd's"
            raise VerificationError(
                f"{name_of(self._f)}: the prepared Jacobian differs from {whose} by {error:.1e} of the largest "
                f"element, more than {limit:.0e}; prepare it again{way}, or call jacsparse.jacobian"
            )
        return error

    def _checked_at(self, args: Sequence[Any]) -> Self:
        self.check(*args)
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all that was decided to an ``.npz`` file, without pickle; the function is no part of it.

        Examples
        --------
        >>> import tempfile, torch
        >>> from jacsparse import prepare_jacobian
        >>> f, x = lambda x: x[1:] * x[:-1], torch.tensor([1.0, 2.0, 3.0])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     prepare_jacobian(f, x).save(f"{folder}/products.npz")
        ...     prepared = PreparedJacobian.load(f"{folder}/products.npz", f, x)
        >>> prepared(x).todense().tolist()
        [[2.0, 1.0, 0.0], [0.0, 3.0, 2.0]]
        """
        write_program(path, self._arguments, self._options, self._first)

    @classmethod
    def load(cls, path: str | os.PathLike[str], f: Callable[..., Any], *args: Any, compile: bool = False) -> Self:
        """Read what `save` wrote, for the same function, and check it against the function.

        Parameters
        ----------
        path : path
            The file.
        f : callable
            The function that it was prepared for.
        *args
            Arguments of the same shapes.
        compile : bool
            As in `prepare_jacobian`.

        Raises
        ------
        FileNotFoundError
            Where there is no such file.
        ValueError
            Where the file is damaged, of another version, or of another function.
        """
        saved = SavedProgram.read(path)
        arguments, options = saved.arguments(args), saved.options(compile)
        f = cls._differentiated(f, arguments, options)
        return cls(f, arguments, options, lambda traced: saved.evaluator(f, traced, compile))._checked_at(args)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"{a_type(self)} is neither pickled nor copied, for its function is no data: save(path) writes "
            f"it, and {type(self).__name__}.load(path, f, *args) reads it in another process"
        )

    def __repr__(self) -> str:
        evaluator, arguments, program = self._first.evaluator, self._arguments, self._first
        others = sum(not isinstance(source, int) for source in program.traced.captures.values())
        baked = f"shapes, {len(program.traced.contents)} indices or masks, branches, numbers that the function reads"
        moved = self.pattern.nnz * arguments.batch * arguments.tensors[0].element_size()
        return "\n".join(
            [
                f"<{type(self).__name__} of {name_of(self._f)}: {self.pattern.summary()}",
                f"  method {self.method}{evaluator.details}: about {evaluator.flop:,} flop, "
                f"{evaluator.nbytes + moved:,} bytes",
                f"  inputs: {len(arguments.specs)} arguments, {others} other tensors",
                f"  baked in: {baked}>",
            ]
        )


def _autocast(dtype: torch.dtype | None) -> str:
    return "off" if dtype is None else f"on, with {dtype}"


def _check_given(pattern: Any, method: str) -> None:
    """Raise where a pattern of the user's own cannot be taken."""
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern is {a_type(pattern)}; expected a Pattern: Pattern.from_scipy(matrix) makes one")
    if method == "products":
        raise ValueError(
            "method is 'products', which multiplies the operators' own patterns, and a pattern is given; leave one out"
        )
