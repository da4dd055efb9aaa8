"""What may be asked for of a Jacobian or a Hessian, besides a function and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any, TypedDict

from ..patterns import Pattern
from ..runtime import a_type
from ..spgemm import SparseJacobian
from ..tracing import module_of

#: The methods of a prepared Jacobian.
METHODS = ("auto", "products", "compressed")


class Keywords(TypedDict, total=False):
    """The options of `jacobian` and `hessian` that do not change what kind of thing they return."""

    argnums: int | Sequence[int]
    batched: bool | None
    pruned: bool
    create_graph: bool


class PreparationKeywords(Keywords, total=False):
    """The same of `prepare_jacobian` and `prepare_hessian`."""

    method: str
    compile: bool
    pattern: Pattern | None
    static_argnums: int | Sequence[int]


@dataclass(frozen=True)
class Options:
    """The options of a Jacobian or a Hessian, as `prepare_jacobian` and `prepare_hessian` explain them.

    `argnums` and `batched` say how arguments are read, and belong to `Arguments`.
    """

    method: str = "auto"
    compile: bool = False
    pruned: bool = True
    create_graph: bool = False
    value: bool = False
    has_aux: bool = False
    pattern: Pattern | None = None
    #: Of a Hessian, whether the gradient is returned too.
    gradient: bool = False

    def __post_init__(self) -> None:
        """Raise where an option is none, or two do not go together."""
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}; expected one of {', '.join(METHODS)}")
        if not isinstance(self.compile, bool):
            raise TypeError(f"compile is {self.compile!r}; expected True or False")
        if self.pattern is None:
            return
        if not isinstance(self.pattern, Pattern):
            raise TypeError(
                f"pattern is {a_type(self.pattern)}; expected a Pattern: Pattern.from_scipy(matrix) makes one"
            )
        if self.method == "products":
            raise ValueError(
                "method is 'products', which multiplies the operators' own patterns, and a pattern is given; leave "
                "one out"
            )

    @property
    def result(self) -> bool:
        """Whether what the differentiated function returns is asked for; that of a Hessian is the gradient."""
        return self.value or self.gradient

    @cached_property
    def returns(self) -> bool:
        """Whether anything is returned beside the Jacobian."""
        return self.value or self.has_aux or self.gradient


def with_parts(jacobian: SparseJacobian, *parts: tuple[bool, Any]) -> SparseJacobian | tuple[Any, ...]:
    """A Jacobian; with the parts that are asked for, a tuple of all."""
    asked = [part for is_asked, part in parts if is_asked]
    return (jacobian, *asked) if asked else jacobian


def has_samples(f: Callable[..., Any], batched: bool | None) -> bool:
    """Whether what `f` is differentiated by has samples along its first axis: `batched`, or what is usual for `f`.

    By default a module has samples, as have its methods and a ``functools.partial`` of these. Any other function has
    none, as in ``torch.func``.

    Raises
    ------
    TypeError
        Where `f` is no function, or `batched` neither a bool nor None.
    """
    if not callable(f):
        raise TypeError(f"f is {a_type(f)}; expected a function or a module")
    if batched is None:
        return module_of(f) is not None
    if not isinstance(batched, bool):
        raise TypeError(
            f"batched is {batched!r}; expected True where arguments have samples along their first axis, False where "
            "they have none, or None for what is usual: samples for a module, none for a function"
        )
    return batched


def checked_argnums(argnums: int | Sequence[int], count: int, what: str = "argnums") -> tuple[int, ...]:
    """The numbers of the arguments that `argnums` names, from 0 on."""
    if type(argnums) is int and 0 <= argnums < count:
        return (argnums,)
    listed = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    try:
        # A bool is no number of an argument.
        numbers = tuple(index(None if isinstance(n, bool) else n) for n in listed)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{what} is {argnums!r}; expected an integer or a tuple of integers") from None
    if not count:
        raise ValueError("there is no argument to differentiate by; give at least one tensor")
    outside = [number for number in numbers if not -count <= number < count]
    if outside or not numbers:
        raise ValueError(f"{what} is {argnums!r}; the call has {count} arguments, numbered 0 to {count - 1}")
    numbers = tuple(number % count for number in numbers)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{what} is {argnums!r}; it names an argument twice")
    return numbers
