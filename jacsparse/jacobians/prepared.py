"""Prepared Jacobians: all that shapes decide is decided once, so that a call computes local derivatives and values."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, Literal, Self, Unpack, overload

import torch
from typing_extensions import TypeVar

from ..patterns import REGISTERED, Pattern
from ..runtime import a_type, announced_where_long
from ..spgemm import SparseJacobian, unchecked_jacobian
from ..tracing import name_of, without_autocast, without_saving_hooks
from .arguments import Arguments
from .choice import evaluator_of
from .colorings import Coloring, coloring
from .comparison import compared
from .options import Options, PreparationKeywords, with_parts
from .prepared_program import Evaluated, PreparedProgram, tell_of_programs
from .saved_programs import SavedProgram, write_program
from .tracing_for_replays import traced_program
from .verification import VerificationError, tolerance_for

#: The most programs of one prepared Jacobian, for other constants among the arguments and other numbers of samples.
MOST_PROGRAMS = 8


#: What a call returns: a SparseJacobian, or a tuple that begins with one.
Result = TypeVar("Result", default=SparseJacobian)


class PreparedJacobian(Generic[Result]):
    """The Jacobian of a function, prepared for arguments of the same shapes; `prepare_jacobian` makes it.

    It trusts its program: a call does not run the function. Parameters and buffers of a module are read by their names,
    other tensors that the function reads are those that it read when it was prepared. Other constants among the
    arguments, as those that `static_argnums` names, and another number of samples make a program of their own, by a run
    of the function. `check` compares with the function itself: a call does not see that attributes, globals, the mode
    of a module or registered rules are others than when it was prepared. Any number of threads may call it.

    Attributes
    ----------
    pattern : Pattern
        The pattern, which holds for all arguments of these shapes.
    method : str
        ``products`` or ``compressed``.
    """

    def __init__(
        self, f: Callable[..., Any], arguments: Arguments, options: Options, saved: SavedProgram | None = None
    ) -> None:
        self._f, self._arguments, self._options, self.method = f, arguments, options, options.method
        self._lock, self._rules = threading.RLock(), len(REGISTERED)
        #: By the number of samples and the constants among the arguments, in the order in which they were made.
        self._programs: dict[tuple[int, tuple[Any, ...]], PreparedProgram] = {}
        self._made_so_far = 0
        self._first = self._latest = self._program(arguments, saved)
        evaluator = self._first.evaluator
        self.pattern, self.method, self._in_shape = evaluator.pattern, evaluator.name, self._arguments.in_shape

    @classmethod
    def prepare(
        cls,
        f: Callable[..., Any],
        args: Sequence[Any],
        argnums: int | Sequence[int],
        batched: bool | None,
        static_argnums: int | Sequence[int],
        options: Options,
    ) -> Self:
        """What `prepare_jacobian` returns."""
        arguments = Arguments.of_call(f, args, argnums, batched, static_argnums).with_tensors()
        arguments = arguments.apart(with_gradients=options.create_graph)
        if not arguments.batch:
            raise ValueError(f"the arguments are {arguments}, without any sample; give one or more to prepare for")
        prepared = cls(cls._differentiated(f, arguments, options), arguments, options)
        try:
            prepared.check(*args)
        except VerificationError:
            if options.method != "auto" or prepared.method != "compressed" or options.pattern is not None:
                raise
            # PyTorch's own tangents may be wrong, as those of scatter_reduce's products.
            options = replace(options, method="products", compile=False)
            return cls.prepare(f, args, argnums, batched, static_argnums, options)
        return prepared

    @staticmethod
    def _differentiated(f: Callable[..., Any], arguments: Arguments, options: Options) -> Callable[..., Any]:
        """The function whose Jacobian this is."""
        return f

    #: How its pattern is coloured.
    _coloring: Callable[[Pattern], Coloring] = staticmethod(coloring)

    def __call__(self, *args: Any) -> Result:
        """The Jacobian at these arguments; a tuple where it was prepared with `value` or `has_aux`."""
        returns = self._options.returns
        (values, y, aux), program = self._evaluated(args, returns)
        out_shape = program.traced.returned.out_shape
        jacobian = unchecked_jacobian(self.pattern, values, self._in_shape, out_shape)
        return with_parts(jacobian, *self._parts(y, aux)) if returns else jacobian  # type: ignore[return-value]

    def _parts(self, y: Any, aux: Any) -> Sequence[tuple[bool, Any]]:
        """What may be returned beside the Jacobian, and whether it is."""
        return (self._options.value, y), (self._options.has_aux, aux)

    def values(self, *args: Any) -> torch.Tensor:
        """The values on the pattern, ``(nnz, batch)``, or ``(nnz, 1)`` where all samples share them.

        Raises
        ------
        ValueError
            Where the arguments have other shapes, dtypes or indices than those that it was prepared for.
        RuntimeError
            Where a weight that the pattern leaves out is not zero.
        """
        return self._evaluated(args, returns=False)[0][0]

    def _evaluated(self, args: Sequence[Any], returns: bool) -> tuple[Evaluated, PreparedProgram]:
        """What a program computes for a call, and which one it is."""
        latest = self._latest
        leaves = latest.traced.arguments.leaves_of(args)
        if leaves is None:
            arguments = self._checked(args)
        elif latest.traced.arguments.constant_places:
            arguments = latest.traced.arguments.with_leaves(leaves)
        else:
            return latest(leaves, returns), latest
        self._latest = program = self._program(arguments)
        return program(arguments.leaves, returns), program

    def _program(self, arguments: Arguments, saved: SavedProgram | None = None) -> PreparedProgram:
        """The program for the number of samples of arguments of the prepared form, and for the constants among them."""
        key = arguments.batch, self._arguments.constants_of(arguments.leaves)
        program = self._programs.get(key)
        if program is not None:
            return program
        what = f"the Jacobian of {name_of(self._f)} at {arguments}"
        with self._lock, announced_where_long(f"preparing {what}, once: later calls replay it"):
            # Another thread may have made it meanwhile.
            if key not in self._programs:
                with without_saving_hooks():
                    self._keep(key, self._made(arguments, saved))
            return self._programs[key]

    def _keep(self, key: tuple[int, tuple[Any, ...]], program: PreparedProgram) -> None:
        self._made_so_far += 1
        if self._made_so_far == MOST_PROGRAMS + 1:
            tell_of_programs(name_of(self._f), MOST_PROGRAMS)
        # The first one stays.
        first, *others = [*self._programs.items(), (key, program)]
        self._programs = dict([first, *others[1 - MOST_PROGRAMS :]])

    def _made(self, arguments: Arguments, saved: SavedProgram | None) -> PreparedProgram:
        options = self._options
        if self._programs:
            # As `prepare` does with the first call's.
            arguments = arguments.apart(with_gradients=options.create_graph)
        traced = traced_program(self._f, arguments, options)
        if not self._programs:
            trace = traced.function.trace
            self._arguments = traced.arguments
            self._tolerance = tolerance_for(trace.input.dtype, trace.tensors)
        # What is chosen records calls of its own.
        with without_autocast(traced.function.x.device):
            if saved is None:
                evaluator = evaluator_of(traced.function, self.method, compile=options.compile, coloring=self._coloring)
            else:
                evaluator = saved.evaluator(self._f, traced, options.compile)
            if options.compile and options.method != "auto" and evaluator.remedy is not None:
                reason = f"{evaluator.uncompiled}; {evaluator.remedy}"
                raise ValueError(f"{name_of(self._f)}: compile is True, and {reason}")
            program = PreparedProgram.of(traced, evaluator, options.create_graph)
        if self._programs and program.evaluator.pattern != self._first.evaluator.pattern:
            raise ValueError(
                f"{name_of(self._f)}: the pattern at {arguments}, with these constants, is another than that for which "
                "it was prepared: prepare one for these"
            )
        return program

    def _checked(self, args: Sequence[Any]) -> Arguments:
        """A call's arguments; ValueError where they are not of the prepared form but for the number of samples."""
        like = self._arguments
        arguments = Arguments.of_call(self._f, args, like.argnums, like.batched, like.static).with_tensors(like)
        if arguments.differs_in_samples(like):
            programs = list(self._programs.items())
            same = [program for (batch, _), program in programs if batch == arguments.batch]
            if not same:
                return arguments
            like = same[0].traced.arguments
        arguments = arguments.laid_out_as(like)
        arguments.check_form(like)
        return arguments

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
            The largest difference, as a share of the largest sum of a product's absolute terms.

        Raises
        ------
        VerificationError
            Where the difference is larger than the tolerance.
        """
        with torch.no_grad():
            jacobian = SparseJacobian(self.pattern, self.values(*args))
        like = self._arguments
        arguments = Arguments.of_call(self._f, args, like.argnums, like.batched, like.static)
        limit, options, method = self._tolerance if tolerance is None else tolerance, self._options, self.method
        registered = bool(self._first.traced.function.chain.registered_values) or len(REGISTERED) != self._rules
        with without_saving_hooks():
            return compared(self._f, arguments, jacobian, options, method=method, limit=limit, registered=registered)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what takes long to decide to an ``.npz`` file, without pickle; the function is no part of it.

        Of products, the name of the method alone.

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
        write_program(path, self._options, self._first)

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
        VerificationError
            Where values are not those of the function.
        """
        saved = SavedProgram.read(path)
        arguments, options = saved.arguments(f, args), saved.options(compile)
        prepared = cls(cls._differentiated(f, arguments, options), arguments, options, saved)
        prepared.check(*args)
        return prepared

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"{a_type(self)} is neither pickled nor copied, for its function is no data: save(path) writes "
            f"it, and {type(self).__name__}.load(path, f, *args) reads it in another process"
        )

    def __repr__(self) -> str:
        name = f"{type(self).__name__} of {name_of(self._f)}"
        return f"<{name}: {self.pattern.summary()}\n{self._first.described(self._arguments, self._options)}>"


@overload
def prepare_jacobian(
    f: Callable[..., Any],
    *args: Any,
    value: Literal[False] = ...,
    has_aux: Literal[False] = ...,
    **options: Unpack[PreparationKeywords],
) -> PreparedJacobian[SparseJacobian]: ...


@overload
def prepare_jacobian(
    f: Callable[..., Any], *args: Any, value: bool = ..., has_aux: bool = ..., **options: Unpack[PreparationKeywords]
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
    static_argnums: int | Sequence[int] = (),
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
        seed for each colour; ``auto`` takes the one of less predicted cost, and the first one where no weights are
        multiplied, as of elementwise operators and selections.
    compile : bool
        Whether machine code computes the values, or on a GPU kernels that CuPy compiles, which takes a tenth of a
        second to a few seconds to make. It fuses elementwise operators, selections and sums of products; what else a
        call computes, as products of matrices, is PyTorch's. With the method ``auto`` it is made where it pays by
        predicted cost, and the repr says what was compiled, as ``compiled: the whole call``; a method that is asked for
        by name is compiled, or raises ValueError. The logger ``jacsparse`` tells of it, at level INFO.
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
    static_argnums : int or tuple of int
        The arguments whose numbers are constants; see the notes.

    Returns
    -------
    PreparedJacobian
        ``prepared(*args)`` is a SparseJacobian, or with `value` or `has_aux` a tuple of it, the value and `aux`.

    Raises
    ------
    TypeError, ValueError
        Where arguments or outputs are not of this kind, the method is unknown or does not apply, or with `compile`,
        where the method that was asked for does not compile, as where operators' matrices are multiplied.
    UnsupportedOperatorError
        Where an operator has no rule, or the calls depend on what tensors hold.
    VerificationError
        Where values are not those of the function, as where it returns other numbers in each call.

    Notes
    -----
    A call replays what the function did when it was prepared, and does not run it. What it may change, as ``jax.jit``
    has it, are arguments and tensors of floats: the parameters and buffers of a module, read by their names, and other
    tensors that the function reads, those that it read then. A call in which a tensor of integers or truth values holds
    others than then raises ValueError. All else that it reads is a constant: numbers, attributes,
    globals, NumPy arrays, which mode a module is in, and other tensors put in the place of such. `check` finds a
    change; call `jacobian` for what a function computes now.

    With ``pruned=False`` the pattern has entries for the zeros of a constant matrix that the function reads, since they
    may be filled later. A sparse tensor's indices are parts of the program, whose pattern has its elements alone. Masks
    are parts of the program too: a branch of ``torch.where`` has entries only where a mask selects it. Weights that the
    pattern leaves out are read at each call, to see whether they are zero still.

    Numbers among the arguments may change: a function gets each as a tensor without axes, of the dtype of what it is
    differentiated by. Where it needs a number's value, as for ``math.sin``, a branch, a shape or an index, name the
    argument in `static_argnums`: it is a constant then, and another value makes a program of its own, by another run.
    So do arguments of all other kinds: strings, truth values and NumPy arrays are compared by their values, other
    objects by their hash and ``==``. One without a hash makes a program of its own in each call: bind it by
    ``functools.partial``.

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
    return PreparedJacobian[Any].prepare(f, args, argnums, batched, static_argnums, options)
