"""`ProductPlan`: everything about a product that patterns decide."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import torch

from ..patterns import Diagonal, Full, Pattern, _archive
from ..patterns._runtime import uncompiled
from . import _dense, _merge, _rowwise, _scale, _slots  # noqa: F401  (each registers its methods)
from ._cache import PLANS
from ._gradients import ProductForm, differentiable, graph_operands, wants_gradient
from ._methods import METHODS, Method, Product
from ._operands import result, same_batch, same_device, view
from ._symbolic import check_shapes, multiply_adds, product_digest, product_pattern, row_work

__all__ = ["DEFAULT_MEMORY_LIMIT", "ProductPlan", "plan_product"]

#: Bytes of index arrays beyond which a plan takes a method that needs fewer.
DEFAULT_MEMORY_LIMIT = 2 * 2**30


class ProductPlan:
    """Everything about ``C = A B`` that the patterns of `A` and `B` decide; only `multiply` is left to do.

    Made by `plan_product`. A plan is immutable, and any number of threads may use it at once.

    Attributes
    ----------
    a, b : Pattern
        Of the factors.
    pattern : Pattern
        Of the product.
    flop : int
        Floating-point operations of the product: 2 for each pair of stored entries that meets.
    method : str
        How it multiplies.
    """

    def __init__(self, product: Product, method: type[Method]) -> None:
        self.a, self.b, self.pattern = product.a, product.b, product.c
        self.flop = 2 * product.multiply_adds
        self.method = method.name
        self._method = method(product)
        self.nbytes = method.index_nbytes(product)
        """Bytes of the index arrays that the plan holds beside those of the three patterns."""

    @uncompiled
    def multiply(self, a_values: Any, b_values: Any, *, out: Any = None) -> Any:
        """Values of the product.

        Parameters
        ----------
        a_values, b_values : array or Tensor, (nnz, batch) or (nnz,)
            float32 or float64 both, NumPy arrays or tensors both, these on the CPU or on one CUDA device. A batch of 1
            is shared by all samples. For the method ``select``, the selecting factor's values are its winners: int32,
            ``(windows, batch)``, the row that each window selects, in every sample; what is no row of its window
            selects nothing.
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
        Part of autograd where a tensor requires grad: gradients of both factors' values, of any order.

        The same bits on any number of threads and for any batch: multiply-adds are added in the order of A's and B's
        entries; but for two full factors, whose sums are in the order that BLAS takes. A guaranteed zero of the product
        stays zero whatever the factors hold; at a stored entry, zero times infinity is NaN.

        Examples
        --------
        >>> a = Pattern((1, 2), [0, 2], [0, 1])
        >>> b = Pattern((2, 1), [0, 1, 2], [0, 0])
        >>> plan_product(a, b).multiply(np.array([1.0, 2.0]), np.array([10.0, 100.0]))
        array([210.])
        """
        if wants_gradient(a_values, b_values):
            return self._differentiated(a_values, b_values, out)
        left = self._view("a_values", a_values, self.a, self.selects_left)
        right = self._view("b_values", b_values, self.b, self.selects_right)
        if self.selects_left or self.selects_right:
            batch, like = self._selected_batch(left, right)
        else:
            batch, like = same_batch("a_values", left, "b_values", right), left
        (m, n), nnz = self.pattern.shape, self.pattern.nnz
        returned, c = result(f"values of a {m:,} × {n:,} product", out, (a_values, b_values), nnz, batch, like)
        if 0 in c.shape:
            return returned
        if isinstance(c, torch.Tensor):
            self._method.multiply_on_device(left, right, c)
        else:
            self._method.multiply(left, right, c)
        return returned

    def _differentiated(self, a_values: Any, b_values: Any, out: Any) -> Any:
        """`multiply` as a node of autograd's graph."""
        if self.selects_left or self.selects_right:
            raise ValueError("the method select moves values without a graph; plan with another method for gradients")
        operands = graph_operands(out, a_values=a_values, b_values=b_values)
        product = differentiable(self._form, "c", dict(zip("ab", operands, strict=True)))
        return product[:, 0] if a_values.ndim == b_values.ndim == 1 else product

    @functools.cached_property
    def _form(self) -> ProductForm:
        return ProductForm(self)

    @property
    def selects_left(self) -> bool:
        """Whether the left factor's values are winners, for the method ``select``."""
        return isinstance(self._method, _slots.Select) and self._method.left

    @property
    def selects_right(self) -> bool:
        """Whether the right factor's values are winners, for the method ``select``."""
        return isinstance(self._method, _slots.Select) and not self._method.left

    def _view(self, name: str, values: Any, pattern: Pattern, selects: bool) -> Any:
        if not selects:
            return view(name, values, pattern.nnz)
        try:
            return view(name, values, pattern.shape[1], "windows", (np.dtype(np.int32),))
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"{error}: the method select takes winners; for ordinary values, plan with another method"
            ) from None

    def _selected_batch(self, left: Any, right: Any) -> tuple[int, Any]:
        same_device("a_values", left, "b_values", right)
        winners, values = (left, right) if self.selects_left else (right, left)
        if values.shape[1] not in (1, winners.shape[1]):
            raise ValueError(f"the winners have a batch of {winners.shape[1]} and the values one of {values.shape[1]}")
        return winners.shape[1], values

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to an ``.npz`` file (no pickle): its factors' patterns and its method.

        Index arrays are made again at `load`: checking them would take as long.
        """
        content: dict[str, Any] = {"method": self.method}
        for name, pattern in (("a", self.a), ("b", self.b)):
            content[f"{name}.structure"] = type(pattern.structure).__name__
            content.update({f"{name}.{key}": value for key, value in pattern.structure.describe().items()})
        _archive.write(path, "product plan", content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ProductPlan:
        """Read a plan that `save` wrote, checking all of it.

        Raises
        ------
        FileNotFoundError, ValueError
            Where there is no such file, or it is damaged, or is no plan.
        """
        content = _archive.read(path, "product plan")
        factors = []
        for name in ("a.", "b."):
            part = {key.removeprefix(name): value for key, value in content.items() if key.startswith(name)}
            factors.append(Pattern._from_content(part, str(path)))
        method = content.get("method")
        try:
            if method not in METHODS:
                raise ValueError(f"method is {method!r}")
            return plan_product(*factors, method=method)
        except (TypeError, ValueError, OverflowError, MemoryError) as error:
            raise ValueError(f"{path}: no valid product plan: {error}") from error

    def __repr__(self) -> str:
        (m, k), n = self.a.shape, self.b.shape[1]
        size = f"flop {self.flop:,}, nnz {self.pattern.nnz:,}, {self.nbytes:,} bytes"
        return f"<ProductPlan {m} × {k} × {n}, {self.method}, {size}>"


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
        Of the factors, shapes ``(m, k)`` and ``(k, n)``.
    method : str
        ``select`` (a factor is max-pooling's transposed Jacobian), ``scale`` (a factor is diagonal), ``dense`` (one
        is full), ``slots`` (a place in C's row for each multiply-add: the fastest), ``merge`` (a list of pairs for each
        entry of C), ``rowwise`` (no memory for each multiply-add), or ``auto``: the first of scale, dense, slots and
        rowwise that applies and keeps within `memory_limit`.
    memory_limit : int, optional
        Bytes of index arrays that ``auto`` may hold beside the patterns; 2 GiB where left out.
    winners : bool
        Whether a factor that selects will be given by its winners: ``auto`` then tries select first.
    cache : bool
        Whether to return the plan of an earlier call where one is still held, and to hold this one: the plans used
        last are, up to 512 MiB. What took long is kept on disk too, in the user's cache directory.

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
    """As `plan_product`, where the product's pattern may be known already."""
    for name, factor in (("a", a), ("b", b)):
        if not isinstance(factor, Pattern):
            raise TypeError(f"{name} is a {type(factor).__name__}; expected a Pattern (Pattern.from_scipy makes one)")
    if method != "auto" and method not in METHODS:
        raise ValueError(f"method is {method!r}; expected auto or one of {', '.join(sorted(METHODS))}")
    limit = DEFAULT_MEMORY_LIMIT if memory_limit is None else memory_limit
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise ValueError(f"memory_limit is {memory_limit!r}; expected a number of bytes of at least 0, or None")
    check_shapes(a, b)
    closed = any(isinstance(factor.structure, (Diagonal, Full)) for factor in (a, b))

    def make() -> ProductPlan:
        work = None if closed else row_work(a, b)
        count = multiply_adds(a, b) if work is None else int(work[-1])
        pattern = product_pattern(a, b, work, cache=cache) if c is None else c
        return _made(Product(a, b, pattern, count, work), method, limit, winners)

    if closed or not cache:
        # Of a closed product there is nothing to be worked out, not even its key.
        return make()
    own = product_digest(a, b)
    return PLANS.get((own, own if c is None else c.digest, method, limit, winners), make)


def _made(product: Product, method: str, limit: int, winners: bool) -> ProductPlan:
    if method == "auto":
        return ProductPlan(product, _best(product, limit, winners))
    chosen = METHODS[method]
    obstacle = chosen.obstacle(product)
    if obstacle:
        raise ValueError(f"method {method!r} does not apply: {obstacle}")
    return ProductPlan(product, chosen)


def _best(product: Product, limit: int, winners: bool) -> type[Method]:
    """The first method in order of speed that applies and fits."""
    for name in (*(["select"] if winners else []), "scale", "dense", "slots"):
        method = METHODS[name]
        if method.obstacle(product) is None and method.index_nbytes(product) <= limit:
            return method
    return METHODS["rowwise"]
