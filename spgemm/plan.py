"""`ProductPlan`: everything about a product that patterns decide."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import torch

from ..patterns import Diagonal, Full, Pattern, pattern_figure
from ..runtime import a_type, announced_where_long, read_archive, uncompiled, write_archive
from .gradients import ProductForm, differentiable_product, wants_gradient
from .methods import METHODS, BoundProduct, Method, Product
from .operands import result, same_batch, same_device, view
from .plan_cache import PLAN_CACHE
from .products_cuda import kept_launch
from .symbolic import check_shapes, multiply_adds, product_digest, product_pattern, row_work

#: The bytes that a function may use at once where its `memory_limit` is left out.
MEMORY_LIMIT = 2**30


class ProductPlan:
    """Everything about ``C = A B`` that the patterns of `A` and `B` decide; `multiply` only computes values.

    `plan_product` makes it. It is immutable, and any number of threads may use it at once.

    Attributes
    ----------
    a, b : Pattern
        The patterns of the factors.
    pattern : Pattern
        The pattern of the product.
    flop : int
        Floating-point operations of the product: 2 for each pair of stored entries that meets.
    method : str
        The name of the method that multiplies on the CPU.
    nbytes : int
        Bytes of the index arrays for the CPU, without those of the three patterns; ``slots`` makes them at its first
        product.
    selects_left, selects_right : bool
        Whether the values of the left or right factor are winners, for the method ``select``.
    """

    def __init__(self, product: Product, method: type[Method], limit: int) -> None:
        self.a, self.b, self.pattern = product.a, product.b, product.c
        self.flop = 2 * product.multiply_adds
        self.method = method.name
        self._product, self._method, self._limit = product, method(product), limit
        self._launches: dict[Any, BoundProduct] = {}
        self.nbytes = method.index_nbytes(product)
        self.selects_left = self._method.winners == "a"
        self.selects_right = self._method.winners == "b"

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The patterns of the factors and of the product."""
        return (self.a, self.b, self.pattern)

    @uncompiled
    def multiply(self, a_values: Any, b_values: Any, *, out: Any = None) -> Any:
        """Values of the product.

        Parameters
        ----------
        a_values, b_values : array or Tensor, (nnz, batch) or (nnz,)
            The values of the factors: both float32 or both float64, and both NumPy arrays or both tensors, on the CPU
            or on one CUDA device. A batch of 1 is shared by all samples. For the method ``select``, the selecting
            factor's values are its winners: int32, ``(windows, batch)``, the row that each window selects in each
            sample. A number that is no row of its window selects nothing.
        out : array or Tensor, optional
            Contiguous memory for the result; nothing else is then allocated.

        Returns
        -------
        array or Tensor, (pattern.nnz, batch), or (pattern.nnz,) where both factors have one dimension

        Raises
        ------
        TypeError, ValueError
            Where an operand's kind, dtype, shape or device does not fit; the message names it.

        Notes
        -----
        Where a tensor requires grad, the product is part of autograd, with gradients of any order of both factors.

        Values have the same bits on any number of threads and for any batch, since multiply-adds are added in the order
        of A's and B's entries; on a CUDA device at each run, while long sums of small batches are added by halves
        there. For two full factors, the order is BLAS's. A guaranteed zero of the product stays zero whatever the
        values are; at a stored entry, zero times infinity is NaN.

        Examples
        --------
        >>> a = Pattern((1, 2), [0, 2], [0, 1])
        >>> b = Pattern((2, 1), [0, 1, 2], [0, 0])
        >>> plan_product(a, b).multiply(np.array([1.0, 2.0]), np.array([10.0, 100.0]))
        array([210.])
        """
        if wants_gradient(a_values, b_values):
            if self.selects_left or self.selects_right:
                raise ValueError(
                    "the method select moves values without a graph; plan with another method for gradients"
                )
            return differentiable_product(ProductForm(self, self._product), out, a_values=a_values, b_values=b_values)
        if self.selects_left or self.selects_right:
            left, right, batch, like = self._selected(a_values, b_values)
        else:
            left, right = view("a_values", a_values, self.a.nnz), view("b_values", b_values, self.b.nnz)
            batch, like = same_batch("a_values", left, "b_values", right), left
        (m, n), nnz = self.pattern.shape, self.pattern.nnz
        what, operands = f"values of a {m:,} × {n:,} product", (a_values, b_values)
        returned, c = result(what, out, operands, (left, right), nnz, batch, like)
        if 0 in c.shape:
            return returned
        if isinstance(c, torch.Tensor):
            kept_launch(self, ProductPlan._launch, c.device, c.dtype, (left.shape[1], right.shape[1]))(left, right, c)
        else:
            self._method.multiply(left, right, c)
        return returned

    def bind(
        self, device: torch.device | str, dtype: torch.dtype = torch.float32, batches: tuple[int, int] = (1, 1)
    ) -> BoundProduct:
        """The product on a CUDA device as a launch: all that does not change from call to call is done here.

        `multiply` makes it where it is missing, which a captured graph cannot.

        Parameters
        ----------
        device : torch.device or str
            The device.
        dtype : torch.dtype
            The values' dtype, float32 or float64.
        batches : tuple of int
            The batches of the factors' values.

        Returns
        -------
        callable
            Takes contiguous tensors ``(entries, batch)`` of the values of both factors and of the product, and writes
            the last; it checks nothing. The method ``select`` takes winners as `multiply` does.

        Raises
        ------
        TypeError, ValueError
            Where the dtype, the batches or the device fit no product, or the method has no kernels for CUDA devices.
        """
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return kept_launch(self, ProductPlan._launch, device, dtype, batches)

    def _launch(self, device: torch.device, dtype: torch.dtype, batches: tuple[int, int]) -> BoundProduct:
        """A new launch; an error is raised where values of a dtype and with these batches have no product."""
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"dtype is {dtype}; expected torch.float32 or torch.float64")
        a, b = batches
        if min(a, b) < 0 or (a != b and 1 not in batches):
            raise ValueError(f"the batches are {a} and {b}; they must agree, or one be 1")
        if (self.selects_left and a == 1 < b) or (self.selects_right and b == 1 < a):
            raise ValueError(f"the batches are {a} and {b}; that of the winners must be the larger one")
        return _nothing if 0 in batches else self._device_method.bind(device, dtype, batches)

    @functools.cached_property
    def device_method(self) -> str:
        """The name of the method that multiplies on CUDA devices."""
        substitute = METHODS[self.method].device_substitute
        if substitute is None:
            return self.method
        # Where its index arrays do not fit, what needs none.
        return substitute if METHODS[substitute].index_nbytes(self._product) <= self._limit else "rowwise"

    @functools.cached_property
    def _device_method(self) -> Method:
        return self._method if self.device_method == self.method else METHODS[self.device_method](self._product)

    def _selected(self, a_values: Any, b_values: Any) -> tuple[Any, Any, int, Any]:
        """The views of both operands, one of which are winners; the batch, and the one with the result's dtype."""
        operands = [("a_values", a_values, self.a), ("b_values", b_values, self.b)]
        selecting, other = operands if self.selects_left else operands[::-1]
        try:
            winners = view(*selecting[:2], selecting[2].shape[1], "windows", (np.dtype(np.int32),))
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"{error}: the method select takes winners; for ordinary values, plan with another method"
            ) from None
        values = view(*other[:2], other[2].nnz)
        left, right = (winners, values) if self.selects_left else (values, winners)
        same_device("a_values", left, "b_values", right)
        if values.shape[1] not in (1, winners.shape[1]):
            raise ValueError(f"the winners have a batch of {winners.shape[1]} and the values one of {values.shape[1]}")
        return left, right, winners.shape[1], values

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to an ``.npz`` file (no pickle): its factors' patterns and its method.

        `load` makes the index arrays again, for checking them would take as long.
        """
        content: dict[str, Any] = {"method": self.method}
        for name, pattern in (("a", self.a), ("b", self.b)):
            content[f"{name}.structure"] = type(pattern.structure).__name__
            content.update({f"{name}.{key}": value for key, value in pattern.structure.describe().items()})
        write_archive(path, "product plan", content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ProductPlan:
        """Read a plan that `save` wrote, checking all of it.

        Raises
        ------
        FileNotFoundError, ValueError
            Where there is no such file, or it is damaged or no plan.
        """
        content = read_archive(path, "product plan")
        factors = []
        for prefix in ("a.", "b."):
            part = {key.removeprefix(prefix): value for key, value in content.items() if key.startswith(prefix)}
            factors.append(Pattern._from_content(part, str(path)))
        method = content.get("method")
        try:
            if method not in METHODS:
                raise ValueError(f"method is {method!r}")
            return plan_product(*factors, method=method)
        except (TypeError, ValueError, OverflowError, MemoryError) as error:
            raise ValueError(f"{path}: no valid product plan: {error}") from error

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the patterns of both factors and of the product side by side.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        title = f"A B = C by {self.method}: {self.flop:,} flop"
        pattern_figure([("A", self.a), ("B", self.b), ("C", self.pattern)], path, ("column", "row"), title)

    def __repr__(self) -> str:
        (m, k), n = self.a.shape, self.b.shape[1]
        size = f"flop {self.flop:,}, nnz {self.pattern.nnz:,}, {self.nbytes:,} bytes"
        return f"<ProductPlan {m} × {k} × {n}, {self.method}, {size}>"


def _nothing(*_: torch.Tensor) -> None:
    """A product of no samples."""


def plan_product(
    a: Pattern,
    b: Pattern,
    *,
    method: str = "auto",
    memory_limit: int | None = None,
    winners: bool = False,
    cache: bool = True,
) -> ProductPlan:
    """Plan the product ``C = A B`` of two patterns: the symbolic phase, done once.

    Parameters
    ----------
    a, b : Pattern
        The patterns of the factors, shapes ``(m, k)`` and ``(k, n)``.
    method : str
        ``select`` (a factor is max-pooling's transposed Jacobian), ``scale`` (a factor is diagonal), ``dense`` (a
        factor is full), ``slots`` (stores a place in C's row for each multiply-add: the fastest), ``merge`` (stores a
        list of pairs for each entry of C), ``rowwise`` (stores nothing for each multiply-add), or ``auto``: the first
        of scale, dense, slots and rowwise that applies and fits into `memory_limit`. On CUDA devices, merge takes the
        place of slots where it fits, and rowwise elsewhere: threads share entries there, not rows.
    memory_limit : int, optional
        Bytes of index arrays that ``auto`` and CUDA devices may use beside those of the patterns; 1 GiB by default.
    winners : bool
        Whether the values of a selecting factor will be its winners: ``auto`` then tries select first.
    cache : bool
        Whether to take the plan of an earlier call from the cache, and to store this one. The cache has the most
        recently used plans, up to 512 MiB. Patterns of large products are on disk too, in the user's cache directory.

    Raises
    ------
    TypeError
        Where a factor is no Pattern.
    ValueError
        Where the shapes do not fit, or the method is unknown or does not apply.

    Examples
    --------
    >>> import jacsparse
    >>> a = jacsparse.Pattern((2, 2), [0, 1, 2], [0, 1])
    >>> plan_product(a, a, method="rowwise").flop
    4
    """
    return planned(a, b, None, method, memory_limit, winners, cache)


def planned(
    a: Pattern,
    b: Pattern,
    c: Pattern | None = None,
    method: str = "auto",
    memory_limit: int | None = None,
    winners: bool = False,
    cache: bool = True,
) -> ProductPlan:
    """`plan_product`, for a product whose pattern `c` may be known already."""
    for name, factor in (("a", a), ("b", b)):
        if not isinstance(factor, Pattern):
            raise TypeError(f"{name} is {a_type(factor)}; expected a Pattern (Pattern.from_scipy makes one)")
    if method != "auto" and method not in METHODS:
        raise ValueError(f"method is {method!r}; expected auto or one of {', '.join(sorted(METHODS))}")
    limit = check_limit(memory_limit)
    check_shapes(a, b)
    closed = any(isinstance(factor.structure, (Diagonal, Full)) for factor in (a, b))

    def make() -> ProductPlan:
        work = None if closed else row_work(a, b)
        count = multiply_adds(a, b) if work is None else int(work[-1])
        product = Product(a, b, product_pattern(a, b, work, cache=cache) if c is None else c, count, work)
        chosen = _best(product, limit, winners) if method == "auto" else METHODS[method]
        obstacle = chosen.obstacle(product)
        if obstacle:
            raise ValueError(f"method {method!r} does not apply: {obstacle}")
        return ProductPlan(product, chosen, limit)

    if closed or not cache:
        # A diagonal or full factor gives the product's pattern at once, so that even a key would cost more.
        return make()

    def announced() -> ProductPlan:
        (m, k), n = a.shape, b.shape[1]
        with announced_where_long(f"planning a product of {m:,} × {k:,} × {n:,}, which is kept"):
            return make()

    key = product_digest(a, b)
    return PLAN_CACHE.get((key, key if c is None else c.digest, method, limit, winners), announced)


def check_limit(memory_limit: int | None) -> int:
    """Return `memory_limit` or the default; raise ValueError where it is no number of bytes."""
    if memory_limit is None:
        return MEMORY_LIMIT
    if not isinstance(memory_limit, int) or isinstance(memory_limit, bool) or memory_limit < 0:
        raise ValueError(f"memory_limit is {memory_limit!r}; expected a number of bytes of at least 0, or None")
    return memory_limit


def _best(product: Product, limit: int, winners: bool) -> type[Method]:
    """The first method that applies and fits into the limit."""
    for method in METHODS.values():
        wanted = method.automatic and (winners or not method.selects)
        if wanted and method.obstacle(product) is None and method.index_nbytes(product) <= limit:
            return method
    # It needs the least memory, and always applies.
    return METHODS["rowwise"]
