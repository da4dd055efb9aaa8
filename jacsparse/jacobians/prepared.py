"""Prepared Jacobians: all that shapes decide is decided once, so that a call computes local derivatives and values."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Literal, Self, overload

import torch
from typing_extensions import TypeVar

from .._version import __version__
from ..patterns import Pattern, gradient_of
from ..runtime import a_type, read_archive, write_archive
from ..spgemm import SparseJacobian
from ..stages import agree
from ..tracing import name_of, undisturbed, without_saving_hooks
from .arguments import Arguments, FlatFunction, arguments_of, has_samples, out_shape_of
from .compressed import Coloring, Compressed, coloring
from .evaluation import jacobian_at, with_parts
from .evaluators import Evaluator, evaluator_of
from .folding import Folded, derivatives_of
from .prepared_program import Evaluation, PreparedProgram
from .products import ChainProducts, Products
from .traced_function import TracedFunction
from .tracing_for_replays import Options, digest_of, traced_program
from .verification import ROUNDINGS, VerificationError, difference_of, largest_finite, magnitude, tolerance_for
from .watched_weights import FilledWeightError

METHODS = ("auto", "products", "compressed")
#: The options that a file holds.
_SAVED = ("pruned", "create_graph", "value", "has_aux", "gradient")
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
        choose: Callable[[TracedFunction], Evaluator],
    ) -> None:
        self._f, self._arguments, self._options, self._choose = f, arguments, options, choose
        self._lock = threading.RLock()
        #: By what they were made for, the programs.
        self._programs: dict[Any, PreparedProgram] = {}
        #: The leaves that are numbers, which programs take as tensors.
        self._tensors: dict[Any, frozenset[int]] = {}
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
            arguments = arguments.connected()
        differentiated = cls._differentiated(f, arguments, options)

        def choose(function: TracedFunction) -> Evaluator:
            evaluator = evaluator_of(function, method, replays=True, compile=compile, coloring=cls._coloring)
            _check_compiles(f, evaluator, compile)
            return evaluator

        prepared = cls(differentiated, arguments, options, choose)
        try:
            return prepared._checked_at(args)
        except VerificationError:
            if method != "auto" or prepared.method != "compressed" or options.pattern is not None:
                raise
            # PyTorch's own tangents may be wrong, as those of scatter_reduce's products.
            return cls.prepare(f, args, argnums, batched, replace(options, method="products"))

    @staticmethod
    def _differentiated(f: Callable[..., Any], arguments: Arguments, options: Options) -> Callable[..., Any]:
        """The function whose Jacobian this is."""
        return f

    #: How its pattern is coloured.
    _coloring: Callable[[Pattern], Coloring] = staticmethod(coloring)

    def __call__(self, *args: Any) -> Result:
        """The Jacobian at these arguments; a tuple where it was prepared with `value` or `has_aux`."""
        evaluation = self._evaluated(args, returns=self._options.returns)
        jacobian = SparseJacobian(self.pattern, evaluation.values, self._arguments.in_shape, self._out_shape)
        return with_parts(jacobian, *self._parts(evaluation))  # type: ignore[return-value]

    def _parts(self, evaluation: Evaluation) -> Sequence[tuple[bool, Any]]:
        """What may be returned beside the Jacobian, and whether it is."""
        return (self._options.value, evaluation.result), (self._options.has_aux, evaluation.aux)

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

    def _evaluated(self, args: Sequence[Any], returns: bool) -> Evaluation:
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
        tensors = self._tensors.get(kinds)
        if tensors is not None:
            program = self._programs.get((kinds, arguments.numbers_but(tensors)))
            if program is not None:
                return program
        with self._lock:
            return self._made(arguments)

    @without_saving_hooks()
    def _made(self, arguments: Arguments) -> PreparedProgram:
        kinds = arguments.kinds_of_plain
        tensors, options = self._tensors.get(kinds), self._options
        traced_at = arguments if tensors is None else arguments.with_tensors(tensors)
        # What was no tensor once never is.
        traced = traced_program(self._f, traced_at, options, asks=tensors is None)
        if not self._programs:
            trace = traced.function.trace
            self._arguments, self._tolerance = traced.arguments, tolerance_for(trace.input.dtype, trace.tensors)
            self._out_shape = out_shape_of(trace, traced.returned)
        program = PreparedProgram.of(traced, self._choose, options.create_graph)
        if self._programs and program.evaluator.pattern != self._first.evaluator.pattern:
            raise ValueError(
                f"{name_of(self._f)}: the pattern at {arguments} is another than that at {self._arguments}, for which "
                "it was prepared: prepare one for these"
            )
        self._tensors[kinds] = traced.tensors
        while len(self._programs) >= MOST:
            del self._programs[next(iter(self._programs))]
        self._programs[kinds, arguments.numbers_but(traced.tensors)] = program
        return program

    def _checked(self, args: Sequence[Any]) -> Arguments:
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
        with torch.enable_grad(), undisturbed(function):
            y = function(x.clone())
            generator = torch.Generator().manual_seed(0)
            g = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
            expected = gradient_of(y, x, g) if y.requires_grad else torch.zeros_like(x)
        g = g.to(x.dtype)
        registered = self._first.traced.function.chain.registered_values
        if registered:
            # Autograd does not know of registered values.
            expected = jacobian_at(self._f, arguments, has_aux=self._options.has_aux).vjp(g).reshape(x.shape)
        limit = tolerance if tolerance is not None else self._tolerance
        scale = largest_finite(SparseJacobian(self.pattern, jacobian.values.abs()).vjp(g.abs()))
        # All elements may be zero but for rounding, as those of a sum of a softmax.
        rounding = (
            ROUNDINGS * torch.finfo(x.dtype).eps * largest_finite(y.detach()) / (largest_finite(x.detach()) or 1.0)
        )
        scale = max(scale, rounding * largest_finite(g.abs().flatten(1).sum(1)) / (limit or 1.0))
        error = magnitude(difference_of(jacobian.vjp(g).reshape(x.shape), expected)) / (scale or 1.0)
        if not error <= limit:
            with torch.no_grad(), undisturbed(function):
                again = function(x.detach().clone())
            if not agree(again, y.detach()):
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
        >>> f, x = lambda x: x[1:] * x[:-1], torch.tensor([1.0, 2.0, 3.0])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     prepare_jacobian(f, x).save(f"{folder}/products.npz")
        ...     prepared = PreparedJacobian.load(f"{folder}/products.npz", f, x)
        >>> prepared(x).todense().tolist()
        [[2.0, 1.0, 0.0], [0.0, 3.0, 2.0]]
        """
        evaluator = self._first.evaluator
        content = {
            "version": __version__,
            "program": digest_of(self._arguments, self._first.traced.function),
            "argnums": list(self._arguments.argnums),
            "batched": self._arguments.batched,
            **{name: getattr(self._options, name) for name in _SAVED},
            "given": self._options.pattern is not None,
            "evaluator": type(evaluator).__name__,
            "shape": list(evaluator.pattern.shape),
            "indptr": evaluator.pattern.indptr,
            "indices": evaluator.pattern.indices,
        }
        write_archive(path, "prepared Jacobian", {**content, **evaluator.describe()})

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
        content = read_archive(path, "prepared Jacobian")
        if content.get("version") != __version__:
            raise ValueError(
                f"{path} is of version {content.get('version')!r} of jacsparse, and this is {__version__}; prepare the "
                "Jacobian and save it again"
            )
        argnums = content.get("argnums")
        truths: dict[str, Any] = {name: content.get(name) for name in ("batched", "given", *_SAVED)}
        if type(argnums) is not list or any(type(truth) is not bool for truth in truths.values()):
            raise ValueError(f"{path}: argnums is {argnums!r}, and {truths}; the file is damaged")
        arguments = arguments_of(args, argnums, truths.pop("batched")).apart()
        pattern = _pattern_in(content, path) if truths.pop("given") else None
        options = Options(compile=compile, pattern=pattern, **truths)
        if options.create_graph:
            arguments = arguments.connected()
        f = cls._differentiated(f, arguments, options)

        def choose(function: TracedFunction) -> Evaluator:
            if content.get("program") != digest_of(arguments, function):
                raise ValueError(
                    f"{path} is not of this function at arguments of these shapes: {name_of(f)}, {arguments}; prepare "
                    "its Jacobian and save it again"
                )
            try:
                evaluator = _restored(content, function, compile)
            except (ValueError, TypeError, KeyError, MemoryError) as error:
                raise ValueError(f"{path}: no valid prepared Jacobian: {error}") from error
            _check_compiles(f, evaluator, compile)
            return evaluator

        return cls(f, arguments, options, choose)._checked_at(args)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"{a_type(self)} is neither pickled nor copied, for its function is no data: save(path) writes "
            f"it, and {type(self).__name__}.load(path, f, *args) reads it in another process"
        )

    def __repr__(self) -> str:
        evaluator, arguments, program = self._first.evaluator, self._arguments, self._first
        baked = f"shapes, {len(program.traced.contents)} indices or masks, branches, numbers that the function reads"
        moved = self.pattern.nnz * arguments.batch * arguments.tensors[0].element_size()
        return "\n".join(
            [
                f"<{type(self).__name__} of {name_of(self._f)}: {self.pattern.summary()}",
                f"  method {self.method}{evaluator.details}: about {evaluator.flop:,} flop, "
                f"{evaluator.nbytes + moved:,} bytes",
                f"  inputs: {len(arguments.specs)} arguments, {program.other_tensors} other tensors",
                f"  baked in: {baked}>",
            ]
        )


@overload
def prepare_jacobian(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool | None = None,
    method: str = "auto",
    compile: bool = False,
    pruned: bool = True,
    create_graph: bool = False,
    value: Literal[False] = False,
    has_aux: Literal[False] = False,
    pattern: Pattern | None = None,
) -> PreparedJacobian[SparseJacobian]: ...


@overload
def prepare_jacobian(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool | None = None,
    method: str = "auto",
    compile: bool = False,
    pruned: bool = True,
    create_graph: bool = False,
    value: bool = False,
    has_aux: bool = False,
    pattern: Pattern | None = None,
) -> PreparedJacobian[tuple[Any, ...]]: ...


def prepare_jacobian(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool | None = None,
    method: str = "auto",
    compile: bool = False,
    pruned: bool = True,
    create_graph: bool = False,
    value: bool = False,
    has_aux: bool = False,
    pattern: Pattern | None = None,
) -> PreparedJacobian[Any]:
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
    batched : bool, optional
        Whether these tensors and the outputs have samples along their first axis, each worked on by itself; left out,
        as in `jacobian`. All other arguments are passed as they are.
    method : str
        ``products`` multiplies local Jacobians along paths; ``compressed`` takes products of the whole function with a
        seed for each colour; ``auto`` takes the one of less predicted cost.
    compile : bool
        Whether one piece of machine code computes the values, which takes a tenth of a second to a few seconds to
        make. It fuses elementwise operators, selections and sums of products; what else a call computes, as products of
        matrices, is PyTorch's. The logger ``jacsparse`` tells of it, at level INFO.
    pruned : bool
        Whether the pattern omits the elements of weights that are zero when it is prepared, of parameters and all other
        tensors that `f` reads, but not of its arguments. A call in which one of them is filled raises RuntimeError.
    create_graph : bool
        Whether values have gradients, to the arguments and to what `f` reads that had one when it was prepared, as in
        `jacobian`; a call under ``torch.no_grad`` makes no graph.
    value, has_aux : bool
        As in `jacobian`: whether a call returns what `f` returns too, computed together with the values; and whether
        `f` returns ``(result, aux)``. Numbers in `aux` are constants.
    pattern : Pattern, optional
        A pattern of your own, ``(out_size, in_size)``, in the place of the one that the operators' rules give: for
        entries that are known to be zero, for more entries than there are, or where an operator has no rule. Values
        are then those of ``compressed``. An entry outside of it that is not zero is an error when the Jacobian is
        prepared, and in `check`.

    Returns
    -------
    PreparedJacobian
        ``prepared(*args)`` is a SparseJacobian, or with `value` or `has_aux` a tuple of it, the value and `aux`.

    Raises
    ------
    TypeError, ValueError
        Where arguments or outputs are not of this kind, the method is unknown or does not apply, or with `compile`,
        where operators' Jacobians are multiplied as matrices, as for large networks.
    UnsupportedOperatorError
        Where an operator has no rule, or the calls depend on what tensors hold.

    Notes
    -----
    A call replays what the function did when it was prepared, and does not run it. What it may change, as ``jax.jit``
    has it, are arguments and tensors: the parameters and buffers of a module, read by their names, and other tensors
    that the function reads, those that it read then. All else that it reads is a constant: numbers, attributes,
    globals, NumPy arrays, which mode a module is in, and other tensors put in the place of such. `check` finds a
    change; call `jacobian` for what a function computes now.

    With ``pruned=False`` the pattern has entries for the zeros of a constant matrix that the function reads, since they
    may be filled later. A sparse tensor's indices are parts of the program, whose pattern has its elements alone. Masks
    are parts of the program too: a branch of ``torch.where`` has entries only where a mask selects it. Weights that the
    pattern leaves out are read at each call, to see whether they are zero still.

    Numbers among the arguments may change. A change costs no more than their new values where a function does with a
    tensor without axes what it does with a float, as adding, multiplying, powers and comparisons between tensors. Where
    it needs the value, as in ``math.sin``, a branch or a shape, each other value makes a program of its own.

    Examples
    --------
    >>> import torch
    >>> differences = prepare_jacobian(lambda u, h: (u[1:] - u[:-1]) ** 2 / h, torch.zeros(4), 1.0)
    >>> differences(torch.tensor([0.0, 1.0, 3.0, 6.0]), 0.5).todense().tolist()
    [[-4.0, 4.0, 0.0, 0.0], [0.0, -8.0, 8.0, 0.0], [0.0, 0.0, -12.0, 12.0]]

    Newton's method, which takes the value of the same run:

    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> roots = prepare_jacobian(lambda x: x**3 - torch.tensor([8.0, 1.0]), x, value=True)
    >>> for _ in range(8):
    ...     J, y = roots(x)
    ...     x = x - J.solve(y)
    >>> [round(root, 6) for root in x.tolist()]
    [2.0, 1.0]

    A stiff equation by SciPy, whose `jac` gets a time and a state:

    >>> import scipy.integrate
    >>> decay = lambda t, y: torch.cat([-1000 * (y[:1] - torch.cos(y[1:])), -y[1:] / (1 + t)])
    >>> state = torch.ones(2, dtype=torch.float64)
    >>> prepared = prepare_jacobian(decay, 0.0, state, argnums=1)
    >>> f = lambda t, y: decay(t, torch.from_numpy(y)).numpy()
    >>> jac = lambda t, y: prepared(t, torch.from_numpy(y)).to_scipy()
    >>> solution = scipy.integrate.solve_ivp(f, (0.0, 1.0), state.numpy(), method="Radau", jac=jac)
    >>> solution.success, round(float(solution.y[1, -1]), 2)
    (True, 0.5)
    """
    options = Options(method, compile, pruned, create_graph, value, has_aux, pattern)
    return PreparedJacobian[Any].prepare(f, args, argnums, batched, options)


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


def _pattern_in(content: Mapping[str, Any], path: Any) -> Pattern:
    """The pattern in a file; ValueError where there is none."""
    try:
        return Pattern(content["shape"], content["indptr"], content["indices"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: no valid prepared Jacobian: {error}") from error


def _check_compiles(f: Callable[..., Any], evaluator: Evaluator, compile: bool) -> None:
    """Raise where a program is to be compiled and cannot be."""
    if compile and isinstance(evaluator, ChainProducts):
        raise ValueError(
            f"{name_of(f)}: compile is True, and products of operators' matrices cannot be compiled; leave it out, or "
            "pass method='compressed'"
        )


def _restored(content: Mapping[str, Any], function: TracedFunction, compile: bool) -> Evaluator:
    """The evaluator that a file describes; ValueError where it describes none of this function."""
    kind = content.get("evaluator")
    if kind == ChainProducts.__name__:
        return ChainProducts(function, replays=True)
    pattern = Pattern(content["shape"], content["indptr"], content["indices"])
    if pattern.shape != (math.prod(function.chain.out_shape), math.prod(function.chain.in_shape)):
        raise ValueError(f"its pattern is {pattern.shape}")
    if kind == Compressed.__name__:
        return Compressed(function, Coloring.restore(content, pattern), replays=True, compile=compile)
    if kind != Products.__name__:
        raise ValueError(f"evaluator is {kind!r}")
    derivatives = derivatives_of(function)
    entries = Folded.restore(content, pattern, derivatives.scalars + len(derivatives.numbers))
    if derivatives.count != entries.derivatives:
        raise ValueError(f"it has {entries.derivatives} local derivatives, and the function {derivatives.count}")
    return Products(function, entries, derivatives, replays=True, compile=compile)
