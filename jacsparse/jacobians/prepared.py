"""Prepared Jacobians: all that shapes decide is decided once, so that a call computes local derivatives and values."""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import nn

from .._version import __version__
from ..patterns import Pattern, UnsupportedOperatorError, gradient_of
from ..runtime import read_archive, write_archive
from ..spgemm import SparseJacobian
from ..stages import chain_of, refuse_hooks, traced
from ..tracing import (
    Arithmetic,
    Reads,
    check_module,
    check_replays,
    name_of,
    same_number,
    undisturbed,
    without_autocast,
    without_saving_hooks,
)
from .arguments import Arguments, FlatFunction, arguments_of
from .compressed import Coloring, Compressed, coloring
from .evaluation import jacobian_at
from .evaluators import evaluator_of
from .folding import Folded, derivatives_of
from .gradients import Gradient, registered_in
from .linearised import Linearised, linearised
from .products import ChainProducts, Products
from .surroundings import Surroundings
from .taped import Evaluator, TapedJacobian, taped
from .verification import ROUNDINGS, VerificationError, difference_of, largest_finite, magnitude
from .watched_weights import FilledWeightError, WatchedWeights, can_be_watched

METHODS = ("auto", "products", "compressed")
#: Arguments that nobody can change; a call with any other that is no tensor runs the function.
_CONSTANT = (bool, int, float, np.number, str, type(None), torch.dtype, torch.device)


class _Run(NamedTuple):
    """What a run of the function read, and all that it depends on besides tensors among the arguments."""

    #: The arguments that are no tensors.
    plain: list[Any]
    surroundings: Surroundings
    reads: Reads
    #: How its numbers come from those among the arguments; None where that is not known.
    arithmetic: Arithmetic | None = None

    def with_numbers(self, plain: list[Any]) -> _Run | None:
        """A run with other numbers among the arguments; None where that is not known."""
        if self.arithmetic is None or not _differ_in_numbers(self.plain, plain):
            return None
        try:
            results = self.arithmetic.evaluate([value for value in plain if isinstance(value, float)])
        except (ArithmeticError, TypeError):
            # The function says what is wrong.
            return None
        if any(isinstance(result, complex) for result in results):
            # The root of a negative number.
            return None
        numbers = list(self.reads.numbers)
        for place, source in self.arithmetic.sources.items():
            numbers[place] = results[source]
        return self._replace(plain=plain, reads=self.reads._replace(numbers=tuple(numbers)))

    def tells(self, other: _Run) -> bool:
        """Whether the arithmetic gives what another run read."""
        told = self.with_numbers(other.plain)
        return told is not None and told.reads.numbers == other.reads.numbers


class PreparedJacobian:
    """The Jacobian of a function, prepared for arguments of the same shapes; `prepare_jacobian` makes it.

    It trusts its program: a call does not run the function, unless a number among the arguments, or what the function
    reads besides them, has changed, or an argument is an object that may have. The first change of a number also shows
    what arithmetic the function does with it; where that is all, later changes do not run the function. `check`
    compares with the function itself. Any number of threads may call it.

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
        function: Linearised,
        evaluator: Evaluator,
        reads: Reads,
        pruned: bool,
    ) -> None:
        self.pattern, self.method, self._pruned = evaluator.pattern, evaluator.name, pruned
        watched = WatchedWeights(function) if function.chain.pruned_weights else None
        taped = TapedJacobian(arguments.form, function.tape, evaluator, watched=watched)
        self._program = _digest(arguments, function)
        self._f, self._arguments, self._taped, self._tolerance = f, arguments, taped, _tolerance(function)
        self._registered_values = function.chain.registered_values
        # Replaced as a whole, so that threads take all of one run.
        self._run, self._lock = _Run(arguments.plain, Surroundings(f), reads), threading.RLock()
        #: Whether the arithmetic of numbers among the arguments may be followed; False once that has failed.
        self._follows_numbers = True
        leaves = {id(leaf): place for place, leaf in enumerate(arguments.leaves) if isinstance(leaf, torch.Tensor)}
        #: The places of externals that are arguments, and of the leaves that they are.
        self._from_arguments = [
            (place, leaves[id(external)]) for place, external in enumerate(reads.externals) if id(external) in leaves
        ]
        contents = [taped.tape.contents.get(slot) for slot in taped.tape.forms]
        self._contents = [(place, each) for place, each in enumerate(contents) if each is not None]

    @classmethod
    @without_saving_hooks()
    def prepare(
        cls,
        f: Callable[..., Any],
        args: Sequence[Any],
        argnums: int | Sequence[int],
        batched: bool,
        method: str,
        compile: bool,
        pruned: bool,
    ) -> Self:
        """What `prepare_jacobian` returns."""
        if not callable(f):
            raise TypeError(f"f is a {type(f).__name__}; expected a function or a module")
        if method not in METHODS:
            raise ValueError(f"method is {method!r}; expected one of {', '.join(METHODS)}")
        arguments = arguments_of(args, argnums, batched).apart()
        if not arguments.batch:
            raise ValueError(f"the arguments are {arguments}, without any sample; give one or more to prepare for")
        differentiated = cls._differentiated(f, arguments)
        arguments, function, reads = _traced(differentiated, arguments, pruned)
        evaluator = evaluator_of(function, method, compile, cls._coloring)
        _check_compiles(f, evaluator, compile)
        prepared = cls(differentiated, arguments, function, evaluator, reads, pruned)
        try:
            return prepared._checked_at(args)
        except VerificationError:
            if method != "auto" or prepared.method != "compressed":
                raise
            # PyTorch's own tangents may be wrong, as those of scatter_reduce's products.
            return cls.prepare(f, args, argnums, batched, "products", compile, pruned)

    @staticmethod
    def _differentiated(f: Callable[..., Any], arguments: Arguments) -> Callable[..., Any]:
        """The function whose Jacobian this is."""
        return f

    @staticmethod
    def _coloring(pattern: Pattern) -> Coloring:
        return coloring(pattern)

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
            Where the function makes other calls than when it was prepared, or a weight that the pattern leaves out is
            not zero.
        """
        arguments = self._checked(args)
        reads = self._current(arguments)
        for place, contents in self._contents:
            external = reads.externals[place]
            if not contents.equal(external):
                raise ValueError(
                    f"an index or a mask of {tuple(external.shape)} holds other elements than when this Jacobian was "
                    "prepared, and patterns depend on them: prepare one for these"
                )
        try:
            return self._taped.values(arguments.flat(), reads)
        except FilledWeightError as error:
            weight = self._name_of_weight(error.places, reads)
            raise RuntimeError(
                f"{name_of(self._f)}: {weight} was zero where the pattern leaves it out, and is not any more: "
                "prepare it again, keep the weight zero by a mask (torch.nn.utils.prune), or pass pruned=False"
            ) from None

    def _name_of_weight(self, places: Sequence[int], reads: Reads) -> str:
        """The parameters or buffers that a weight is computed from, at these places of the graph's inputs."""
        slots = list(self._taped.tape.forms)
        tensors = [
            reads.externals[slots.index(self._taped.tape.inputs[place - 1])]
            for place in places
            if 0 < place <= len(self._taped.tape.inputs)
        ]
        module = self._f if isinstance(self._f, nn.Module) else nn.Module()
        of_module = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
        names = [of_module.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)}") for tensor in tensors]
        return " and ".join(names) or "a weight"

    def _checked(self, args: Sequence[Any]) -> Arguments:
        alike = self._arguments.with_args(args)
        if alike is not None:
            return alike
        arguments = arguments_of(args, self._arguments.argnums, self._arguments.batched)
        arguments = arguments.laid_out_as(self._arguments)
        if torch.get_default_dtype() != self._taped.default_dtype:
            raise ValueError(
                f"the default dtype is {torch.get_default_dtype()}; this Jacobian is prepared for "
                f"{self._taped.default_dtype}: call torch.set_default_dtype, or prepare one for this"
            )
        if arguments.form != self._taped.form:
            raise ValueError(
                f"the arguments are {arguments}; this Jacobian is prepared for {self._arguments}: prepare one for these"
            )
        return arguments

    def _current(self, arguments: Arguments) -> Reads:
        """The tensors and the numbers that the function reads now; it runs where they may have changed."""
        run, plain = self._run, arguments.plain
        if run.surroundings.changed():
            run = self._run = self._followed(arguments.apart())
        elif plain and not _same(run.plain, plain):
            run = self._run = run.with_numbers(plain) or self._with_arithmetic(run, arguments.apart())
        if not self._from_arguments:
            return run.reads
        externals = list(run.reads.externals)
        for place, leaf in self._from_arguments:
            externals[place] = arguments.leaves[leaf]
        return Reads(externals, run.reads.numbers)

    @without_saving_hooks()
    def _followed(self, arguments: Arguments) -> _Run:
        # One run at a time: what it changes in a module is undone when it ends.
        with self._lock:
            surroundings = Surroundings(self._f)
            reads = self._taped.followed(self._f, arguments)
        if reads is None:
            raise RuntimeError(
                f"{name_of(self._f)} makes other calls than when it was prepared; prepare it again, or call "
                "jacsparse.jacobian, which follows each run"
            )
        return _Run(arguments.plain, surroundings, reads)

    def _with_arithmetic(self, before: _Run, arguments: Arguments) -> _Run:
        """The function's run, with how its numbers come from those among the arguments, where that can be told."""
        run = self._followed(arguments)
        if (
            not self._follows_numbers
            or not _differ_in_numbers(before.plain, run.plain)
            # The function runs at each call, and it may store what it is called with.
            or run.surroundings.changed()
            # A call of `type` would not take a followed number for a number.
            or "type" in run.surroundings.names
        ):
            return run
        arithmetic = Arithmetic([value for value in run.plain if isinstance(value, float)])
        numbers = iter(arithmetic.numbers)
        traced = arguments.with_plain([next(numbers) if isinstance(value, float) else value for value in run.plain])
        with self._lock:
            reads = self._taped.followed_numbers(self._f, traced, arithmetic)
        # Once more, so that the last number that the function may have stored is the one of this call.
        run = self._followed(arguments)
        if (
            reads is None
            # Its other numbers would differ from those of the runs if they depended on the arguments.
            or not all(map(run._replace(reads=reads, arithmetic=arithmetic).tells, (before, run)))
            or any(one is not other for one, other in zip(run.reads.externals, reads.externals, strict=True))
        ):
            self._follows_numbers = False
            return run
        return run._replace(arithmetic=arithmetic)

    @without_saving_hooks()
    def check(self, *args: Any, tolerance: float | None = None) -> float:
        """Compare with the function itself, by products with random vectors.

        The reference is autograd or, where values of an operator were registered, `jacsparse.jacobian`.

        Parameters
        ----------
        *args
            Arguments of the function.
        tolerance : float, optional
            The largest difference; by default 1e-9 for float64 and 1e-4 for float32, or 16 units in the last place of
            the coarsest dtype that the function works in, where that is more.

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
        x, function = arguments.flat().requires_grad_(), FlatFunction(self._f, arguments)
        with torch.enable_grad(), undisturbed(function):
            y = function(x.clone())
            generator = torch.Generator().manual_seed(0)
            g = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
            expected = gradient_of(y, x, g) if y.requires_grad else torch.zeros_like(x)
        g = g.to(x.dtype)
        if self._registered_values:
            # Autograd does not know of registered values.
            expected = jacobian_at(self._f, arguments).vjp(g)
        scale = largest_finite(SparseJacobian(self.pattern, jacobian.values.abs()).vjp(g.abs()))
        error = magnitude(difference_of(jacobian.vjp(g), expected)) / (scale or 1.0)
        limit = tolerance if tolerance is not None else self._tolerance
        if not error <= limit:
            way = " with method='products'" if self.method == "compressed" else ""
            whose = "that of jacsparse.jacobian" if self._registered_values else "autograd's"
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
        ...     prepare_jacobian(f, x, batched=False).save(f"{folder}/products.npz")
        ...     prepared = PreparedJacobian.load(f"{folder}/products.npz", f, x)
        >>> prepared(x).todense().tolist()
        [[2.0, 1.0, 0.0], [0.0, 3.0, 2.0]]
        """
        taped, pattern = self._taped, self._taped.evaluator.pattern
        content = {
            "version": __version__,
            "program": self._program,
            "argnums": list(self._arguments.argnums),
            "batched": self._arguments.batched,
            "pruned": self._pruned,
            "evaluator": type(taped.evaluator).__name__,
            "shape": list(pattern.shape),
            "indptr": pattern.indptr,
            "indices": pattern.indices,
        }
        write_archive(path, "prepared Jacobian", {**content, **taped.evaluator.describe()})

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
        argnums, batched, pruned = (content.get(name) for name in ("argnums", "batched", "pruned"))
        if type(argnums) is not list or type(batched) is not bool or type(pruned) is not bool:
            raise ValueError(
                f"{path}: argnums is {argnums!r}, batched {batched!r} and pruned {pruned!r}; the file is damaged"
            )
        arguments = arguments_of(args, argnums, batched).apart()
        f = cls._differentiated(f, arguments)
        arguments, function, reads = _traced(f, arguments, pruned)
        if content.get("program") != _digest(arguments, function):
            raise ValueError(
                f"{path} is not of this function at arguments of these shapes: {name_of(f)}, {arguments}; prepare its "
                "Jacobian and save it again"
            )
        try:
            evaluator = _restored(content, function, len(reads.numbers), compile)
        except (ValueError, TypeError, KeyError, MemoryError) as error:
            raise ValueError(f"{path}: no valid prepared Jacobian: {error}") from error
        _check_compiles(f, evaluator, compile)
        return cls(f, arguments, function, evaluator, reads, pruned)._checked_at(args)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"a {type(self).__name__} is neither pickled nor copied, for its function is no data: save(path) writes "
            f"it, and {type(self).__name__}.load(path, f, *args) reads it in another process"
        )

    def __repr__(self) -> str:
        evaluator, arguments = self._taped.evaluator, self._arguments
        moved = self.pattern.nnz * arguments.batch * arguments.tensors[0].element_size()
        others = len(self._run.reads.externals) - len(self._from_arguments)
        return "\n".join(
            [
                f"<{type(self).__name__} of {name_of(self._f)}: {self.pattern.summary()}",
                f"  method {self.method}{evaluator.details}: about {evaluator.flop:,} flop, "
                f"{evaluator.nbytes + moved:,} bytes",
                f"  inputs: {len(arguments.specs)} arguments, {others} other tensors, "
                f"{len(self._run.reads.numbers)} numbers",
                f"  baked in: shapes, {len(self._taped.tape.contents)} indices or masks, branches, other numbers>",
            ]
        )


def prepare_jacobian(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batched: bool = True,
    method: str = "auto",
    compile: bool = False,
    pruned: bool = True,
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
        Whether TorchInductor, the compiler of ``torch.compile``, compiles the program; that takes seconds.
    pruned : bool
        Whether the pattern omits the elements of weights that are zero when it is prepared, of parameters and all other
        tensors that `f` reads, but not of its arguments. A call in which one of them is filled raises RuntimeError.

    Returns
    -------
    PreparedJacobian
        ``prepared(*args)`` is a SparseJacobian.

    Raises
    ------
    TypeError, ValueError
        Where arguments or outputs are not of this kind, the method is unknown or does not apply, or with `compile`,
        where the program multiplies matrices of operators, as for large networks.
    UnsupportedOperatorError
        Where an operator has no rule, or the calls depend on what tensors hold.

    Notes
    -----
    Parameters, and all tensors that the function reads, are inputs of the program. With ``pruned=False`` the pattern
    has entries for the zeros of a constant matrix that the function reads, since they may be filled later. A sparse
    tensor's indices are parts of the program, whose pattern has its elements alone. Masks are parts of the program too:
    a branch of ``torch.where`` has entries only where a mask selects it.

    Weights that the pattern leaves out are read at each call, to see whether they are zero still.

    Numbers among the arguments may change. Where they are floats, and a function only adds, multiplies and divides
    them, takes powers or calls NumPy's functions of them, a change costs no more than their new values. Where it
    compares or rounds them, or calls ``math.sin`` or ``type``, it runs at each change; pass a tensor without axes
    instead.

    Values have no gradients; ``jacobian(..., create_graph=True)`` gives values that have.

    Numbers that Python takes out of arrays and sets, as ``float(array[0])`` and ``tensor.tolist()``, are not followed:
    pass them as arguments.

    Examples
    --------
    >>> import torch
    >>> differences = prepare_jacobian(lambda u, h: (u[1:] - u[:-1]) ** 2 / h, torch.zeros(4), 1.0, batched=False)
    >>> differences(torch.tensor([0.0, 1.0, 3.0, 6.0]), 0.5).todense().tolist()
    [[-4.0, 4.0, 0.0, 0.0], [0.0, -8.0, 8.0, 0.0], [0.0, 0.0, -12.0, 12.0]]

    A stiff equation by SciPy, whose `jac` gets a time and a state:

    >>> import scipy.integrate
    >>> decay = lambda t, y: torch.cat([-1000 * (y[:1] - torch.cos(y[1:])), -y[1:] / (1 + t)])
    >>> state = torch.ones(2, dtype=torch.float64)
    >>> prepared = prepare_jacobian(decay, 0.0, state, argnums=1, batched=False)
    >>> f = lambda t, y: decay(t, torch.from_numpy(y)).numpy()
    >>> jac = lambda t, y: prepared(t, torch.from_numpy(y)).to_scipy()
    >>> solution = scipy.integrate.solve_ivp(f, (0.0, 1.0), state.numpy(), method="Radau", jac=jac)
    >>> solution.success, round(float(solution.y[1, -1]), 2)
    (True, 0.5)
    """
    return PreparedJacobian.prepare(f, args, argnums, batched, method, compile, pruned)


def _differ_in_numbers(before: list[Any], now: list[Any]) -> bool:
    """Whether arguments are what they were but for floating-point numbers."""
    pairs = list(zip(before, now, strict=True))
    return any(isinstance(b, float) for b, _ in pairs) and all(
        isinstance(a, float) if isinstance(b, float) else isinstance(b, _CONSTANT) and same_number(a, b)
        for b, a in pairs
    )


def _same(before: list[Any], now: list[Any]) -> bool:
    """Whether arguments are what they were; of an object that may have changed inside, this is unknown."""
    return all(isinstance(b, _CONSTANT) and same_number(a, b) for a, b in zip(before, now, strict=True))


def _traced(f: Callable[..., Any], arguments: Arguments, pruned: bool) -> tuple[Arguments, Linearised, Reads]:
    """A function's program, and what it reads, with errors in the user's words.

    The program is for arguments whose elements are apart in memory, unless the function may read elements beside them.
    """
    dense = arguments.dense()
    function, reads = _traced_at(f, dense, pruned)
    reads_memory = any(call.overload is torch.ops.aten.as_strided.default for call in function.tape.instructions)
    if reads_memory and dense is not arguments:
        return arguments, *_traced_at(f, arguments, pruned)
    return dense, function, reads


def _traced_at(f: Callable[..., Any], arguments: Arguments, pruned: bool) -> tuple[Linearised, Reads]:
    function, x = FlatFunction(f, arguments), arguments.flat()
    check_module(function)
    with undisturbed(function):
        trace = traced(function, x, readable=False)
        with without_autocast(x.device):
            refuse_hooks(chain_of(trace, pruned=False).records(trace)[1])
        registered = registered_in(trace) if isinstance(f, Gradient) else None
        if registered is not None:
            raise UnsupportedOperatorError(
                f"{name_of(f)}: a prepared Hessian takes PyTorch's derivative of {registered.name}, whose values were "
                f"registered and may be others{registered.source}; call jacsparse.hessian, which compares them"
            )
    # Apart, since the second run is to find what the first one found.
    tape, reads = taped(f, arguments)
    check_replays(tape, name_of(f))
    if pruned:
        leaves = set(map(id, arguments.leaves))
        watched = [place for place, external in enumerate(reads.externals) if id(external) not in leaves]
        linear = linearised(tape, x, reads, watched=watched)
        if can_be_watched(linear):
            return linear, reads
    return linearised(tape, x, reads), reads


def _tolerance(function: Linearised) -> float:
    """The largest difference that `PreparedJacobian.check` takes for rounding."""
    values = (node.meta.get("val") for node in function.graph.graph.nodes)
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()}
    least = 1e-9 if function.inputs[0].dtype == torch.float64 else 1e-4
    return max(least, *(ROUNDINGS * torch.finfo(dtype).eps for dtype in dtypes))


def _check_compiles(f: Callable[..., Any], evaluator: Evaluator, compile: bool) -> None:
    """Raise where a program is to be compiled and cannot be."""
    if compile and isinstance(evaluator, ChainProducts):
        raise ValueError(
            f"{name_of(f)}: compile is True, and products of operators' matrices cannot be compiled; leave it out, or "
            "pass method='compressed'"
        )


def _digest(arguments: Arguments, function: Linearised) -> str:
    """A digest of all that a prepared Jacobian depends on besides elements and numbers."""
    digest = hashlib.blake2b(digest_size=16)
    tape = function.tape
    for part in (arguments.form, tape.forms, tape.dtypes, function.graph.code):
        digest.update(repr(part).encode())
    for contents in tape.contents.values():
        digest.update(contents.copy.cpu().contiguous().numpy().tobytes())
    for weight in function.chain.pruned_weights:
        digest.update(weight.mask.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _restored(content: Mapping[str, Any], function: Linearised, numbers: int, compile: bool) -> Evaluator:
    """The evaluator that a file describes; ValueError where it describes none of this function."""
    kind = content.get("evaluator")
    if kind == ChainProducts.__name__:
        return ChainProducts(function)
    pattern = Pattern(content["shape"], content["indptr"], content["indices"])
    if pattern.shape != (math.prod(function.chain.out_shape), math.prod(function.chain.in_shape)):
        raise ValueError(f"its pattern is {pattern.shape}")
    if kind == Compressed.__name__:
        return Compressed(function, Coloring.restore(content, pattern), compile)
    if kind != Products.__name__:
        raise ValueError(f"evaluator is {kind!r}")
    entries = Folded.restore(content, pattern, numbers)
    count, graph = derivatives_of(function)
    if count != entries.derivatives:
        raise ValueError(f"it has {entries.derivatives} local derivatives, and the function {count}")
    return Products(function, entries, graph, compile)
