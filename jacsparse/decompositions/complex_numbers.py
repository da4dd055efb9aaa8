"""Operators on complex numbers as others on their real and imaginary parts, which are real tensors.

What is linear with real coefficients works on either part by itself; of other operators there is a formula. Derivatives
then are those of real numbers, and need no conjugates. A Fourier transform of a line is a product with the constant
matrices of cosines and sines::

    X[k] = Σ_j  x[j] · exp(∓2πi · jk / n)
"""

from __future__ import annotations

import cmath
import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..patterns import MOVEMENTS, UnsupportedOperatorError, holds_numbers

aten: Any = torch.ops.aten


@dataclass(frozen=True, eq=False)
class ComplexParts:
    """The parts of a complex tensor, or of a number: a real tensor, a number, or None for zeros."""

    re: Any
    im: Any

    @classmethod
    def of(cls, value: Any) -> ComplexParts:
        """The parts of a tensor or a number, which may be real."""
        if isinstance(value, ComplexParts):
            return value
        if isinstance(value, torch.Tensor) and value.is_complex():
            # Of compressed rows or columns PyTorch gives no parts.
            value = value.to_sparse_coo() if value.layout in (torch.sparse_csr, torch.sparse_csc) else value
            return cls(value.real, value.imag)
        if isinstance(value, complex) and value.imag:
            return cls(value.real or None, value.imag)
        return cls(value.real if isinstance(value, complex) else value, None)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both parts as tensors of one shape and dtype."""
        if not isinstance(self.im, torch.Tensor):
            return self.re, torch.full_like(self.re, self.im or 0)
        if not isinstance(self.re, torch.Tensor):
            return torch.full_like(self.im, self.re or 0), self.im
        if (self.re.shape, self.re.dtype) == (self.im.shape, self.im.dtype):
            return self.re, self.im
        dtype = torch.promote_types(self.re.dtype, self.im.dtype)
        re, im = torch.broadcast_tensors(self.re.to(dtype), self.im.to(dtype))
        return re, im

    @property
    def constant(self) -> torch.Tensor:
        """The complex tensor, without a derivative."""
        return torch.complex(*self.tensors).detach()

    @property
    def conj(self) -> ComplexParts:
        return ComplexParts(self.re, _negative(self.im))

    @property
    def times_i(self) -> ComplexParts:
        """The product with the imaginary unit."""
        return ComplexParts(_negative(self.im), self.re)

    def each(self, function: Callable[..., Any], *args: Any) -> ComplexParts:
        """A function of either part by itself, which is zero for zeros."""
        return ComplexParts(*(None if part is None else function(part, *args) for part in (self.re, self.im)))

    def __neg__(self) -> ComplexParts:
        return self.each(_negative)

    def __add__(self, other: Any) -> ComplexParts:
        other = ComplexParts.of(other)
        return ComplexParts(_sum(self.re, other.re), _sum(self.im, other.im))

    def __sub__(self, other: Any) -> ComplexParts:
        return self + -ComplexParts.of(other)

    def __mul__(self, other: Any) -> ComplexParts:
        return _product(torch.mul, self, other)

    def __truediv__(self, other: Any) -> ComplexParts:
        other = ComplexParts.of(other)
        if other.im is None:
            return self.each(operator.truediv, other.re)
        if not isinstance(other.im, torch.Tensor) and not isinstance(other.re, torch.Tensor):
            return self * (1 / complex(other.re or 0, other.im))
        # A square of the absolute value would overflow sooner.
        size = torch.hypot(*other.tensors)
        return self.each(operator.truediv, size) * other.each(operator.truediv, size).conj


def _negative(part: Any) -> Any:
    return None if part is None else -part


def _sum(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


def _product(multiply: Callable[..., Any], a: Any, b: Any) -> ComplexParts:
    """A bilinear operator of two tensors or numbers."""
    a, b = ComplexParts.of(a), ComplexParts.of(b)

    def product(one: Any, other: Any) -> Any:
        return None if one is None or other is None else multiply(one, other)

    re = _sum(product(a.re, b.re), _negative(product(a.im, b.im)))
    return ComplexParts(re, _sum(product(a.re, b.im), product(a.im, b.re)))


# Functions, as of the parts a and b of one number.


def _size(z: ComplexParts) -> tuple[torch.Tensor, torch.Tensor]:
    """The absolute value, 1 where that is zero and has no derivative; and where that is."""
    re, im = z.tensors
    zero = (re == 0) & (im == 0)
    return torch.hypot(torch.where(zero, 1.0, re), im), zero


def _abs(z: ComplexParts) -> torch.Tensor:
    """The absolute value, whose derivative at zero is zero."""
    size, zero = _size(z)
    return torch.where(zero, 0.0, size)


def _angle(z: ComplexParts) -> torch.Tensor:
    # Of the direction: autograd's derivative has squares, which overflow.
    size = torch.hypot(*z.tensors).detach()
    size = torch.where(size > 0, size, 1.0)
    re, im = z.tensors
    return torch.atan2(im / size, re / size)


def _sgn(z: ComplexParts) -> ComplexParts:
    size, zero = _size(z)
    return z.each(lambda part: torch.where(zero, 0.0, part / size))


def _reciprocal(z: ComplexParts) -> ComplexParts:
    return ComplexParts(1, None) / z


def _polar_of_absolute(size: torch.Tensor, angle: torch.Tensor) -> ComplexParts:
    """``torch.polar``, for which autograd differentiates by the absolute value of the size."""
    absolute = size.abs()
    return _polar(absolute + (size - absolute).detach(), angle)


def _polar(size: Any, angle: Any) -> ComplexParts:
    return ComplexParts(size, None) if angle is None else ComplexParts(size * torch.cos(angle), size * torch.sin(angle))


def _exp(z: ComplexParts) -> ComplexParts:
    return _polar(1 if z.re is None else torch.exp(z.re), z.im)


def _expm1(z: ComplexParts) -> ComplexParts:
    a, b = z.tensors
    return ComplexParts(torch.expm1(a) * torch.cos(b) - 2 * torch.sin(b / 2) ** 2, torch.exp(a) * torch.sin(b))


def _log(z: ComplexParts) -> ComplexParts:
    return ComplexParts(torch.log(torch.hypot(*z.tensors)), _angle(z))


def _sqrt(z: ComplexParts) -> ComplexParts:
    return _polar(torch.sqrt(torch.hypot(*z.tensors)), _angle(z) / 2)


def _sinh(z: ComplexParts) -> ComplexParts:
    a, b = z.tensors
    return ComplexParts(torch.sinh(a) * torch.cos(b), torch.cosh(a) * torch.sin(b))


def _cosh(z: ComplexParts) -> ComplexParts:
    a, b = z.tensors
    return ComplexParts(torch.cosh(a) * torch.cos(b), torch.sinh(a) * torch.sin(b))


def _tanh(z: ComplexParts) -> ComplexParts:
    a, b = z.tensors
    # Hyperbolic sines and cosines overflow, where their ratio does not.
    t, cos, sin = torch.tanh(a), torch.cos(b), torch.sin(b)
    return ComplexParts(t * cos, sin) / ComplexParts(cos, t * sin)


def _by_rotation(function: Callable[[ComplexParts], ComplexParts]) -> Callable[[ComplexParts], ComplexParts]:
    """``f(iz) / i``: of a hyperbolic function, the circular one."""
    return lambda z: -function(z.times_i).times_i


def _power(base: Any, exponent: Any) -> ComplexParts:
    if isinstance(base, (int, float, complex)):
        if base == 0:
            raise UnsupportedOperatorError(
                "aten.pow: the number 0 has no powers by complex exponents that depend on the input; leave them out"
            )
        return _exp(ComplexParts.of(exponent) * cmath.log(base))
    base = ComplexParts.of(base)
    # The elements of a tensor may be others in another call.
    is_number = isinstance(exponent, (int, float)) and math.isfinite(exponent)
    if is_number and exponent == 0.5:
        return _sqrt(base)
    if is_number and exponent == int(exponent) and exponent:
        # Its derivative at zero is a number.
        bits = bin(abs(int(exponent)))[3:]
        power = functools.reduce(lambda known, bit: known * known * base if bit == "1" else known * known, bits, base)
        return _reciprocal(power) if exponent < 0 else power
    return _exp(_log(base) * exponent)


# Products of matrices, and linear systems.


def _sum_of_product(c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> ComplexParts:
    multiply = {1: aten.mv, 2: aten.mm, 3: aten.bmm}[ComplexParts.of(b).tensors[0].ndim]
    product = _product(multiply, a, b) * alpha
    return product if beta == 0 else ComplexParts.of(c) * beta + product


def _solve(a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> list[ComplexParts]:
    """``torch.linalg.solve_ex``, by a real system of twice the size."""
    (re, im), (b_re, b_im) = ComplexParts.of(a).tensors, ComplexParts.of(b).tensors
    is_vector = b_re.ndim == 1 or (b_re.ndim == re.ndim - 1 and b_re.shape == re.shape[:-1])
    # Of ``X A = B``, the parts of X and B lie side by side.
    axis = -1 if is_vector or not left else -2
    sides = torch.cat([re, -im] if left else [re, im], -1), torch.cat([im, re] if left else [-im, re], -1)
    x = torch.linalg.solve(torch.cat(sides, -2), torch.cat([b_re, b_im], axis), left=left)
    return [ComplexParts(*x.chunk(2, axis))]


def _rewritten(elements: Any, derivative: Any) -> ComplexParts:
    """The elements of one tensor with the derivative of another one."""
    derivative = ComplexParts.of(derivative)
    return derivative + (ComplexParts.of(elements) - derivative).each(torch.Tensor.detach)


# Fourier transforms.


def _transformed(
    z: ComplexParts, axis: int, size: int, count: int, normalization: int, sign: int, weights: Any = 1
) -> ComplexParts:
    """The first elements of a transform of lines of a size along an axis, whose last elements may be left out."""
    like = z.tensors[0]
    # By NumPy, no call of the graph computes them; angles within one turn are exact.
    turns = np.arange(like.shape[axis])[:, None] * np.arange(count) % size
    angles, scale = turns * (2 * np.pi / size), weights * size ** (0, -0.5, -1)[normalization]
    # Of quarters of a turn, sine and cosine are 0, 1 or -1.
    cos, sin = (np.where(4 * turns % size == 0, wave.round(), wave) for wave in (np.cos(angles), np.sin(angles)))
    kind = np.float64 if like.dtype == torch.float64 else np.float32
    waves = ComplexParts(
        *(torch.from_numpy(each.astype(kind)).to(like) for each in (cos * scale, sin * (sign * scale)))
    )
    return _product(torch.matmul, z.each(torch.movedim, axis, -1), waves).each(torch.movedim, -1, axis)


def _fft(z: Any, axes: Sequence[int], normalization: int, forward: bool) -> ComplexParts:
    transformed = z = ComplexParts.of(z)
    for axis in axes:
        size = z.tensors[0].shape[axis]
        transformed = _transformed(transformed, axis, size, size, normalization, -1 if forward else 1)
    return _rewritten(aten._fft_c2c(z.constant, axes, normalization, forward), transformed)


def _fft_of_real(x: Any, axes: Sequence[int], normalization: int, onesided: bool) -> ComplexParts:
    size = x.shape[axes[-1]]
    count = size // 2 + 1 if onesided else size
    z = _transformed(ComplexParts.of(x), axes[-1], size, count, normalization, -1)
    elements = aten._fft_r2c(x.detach(), axes, normalization, onesided)
    return _rewritten(elements, _fft(z, axes[:-1], normalization, True))


def _fft_to_real(z: Any, axes: Sequence[int], normalization: int, size: int) -> Any:
    """The transform of lines whose second half, as conjugates of the first one, is left out."""
    z, known = ComplexParts.of(z), np.arange(size // 2 + 1)[:, None]
    weights = np.where((known == 0) | (2 * known == size), 1.0, 2.0)
    others = _fft(z, axes[:-1], normalization, False)
    transformed = ComplexParts(_transformed(others, axes[-1], size, size, normalization, 1, weights).re, None)
    return _rewritten(aten._fft_c2r(z.constant, axes, normalization, size), transformed).re


def _added(a: Any, b: Any, alpha: Any = 1) -> ComplexParts:
    b = ComplexParts.of(b)
    return ComplexParts.of(a) + (b if alpha == 1 else -b if alpha == -1 else b * alpha)


def _viewed(part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    # It may lie in memory otherwise than the complex tensor does.
    return part.clone(memory_format=torch.contiguous_format).view(shape)


#: By the name of an operator; an only operand is given as parts, since a derivative passes through it.
_FORMULAS: dict[str, Callable[..., Any]] = {
    "complex": ComplexParts,
    "polar": _polar_of_absolute,
    "view_as_complex": lambda x: ComplexParts(*x.unbind(-1)),
    "view_as_real": lambda z: torch.stack(z.tensors, -1),
    "view": lambda z, shape: z.each(_viewed, shape),
    "_unsafe_view": lambda z, shape: z.each(_viewed, shape),
    "_conj": lambda z: z.conj,
    "_conj_physical": lambda z: z.conj,
    "conj_physical": lambda z: z.conj,
    "abs": _abs,
    "angle": _angle,
    "sgn": _sgn,
    "add": _added,
    "sub": lambda a, b, alpha=1: _added(a, b, -alpha),
    "rsub": lambda a, b, alpha=1: _added(b, a, -alpha),
    "mul": functools.partial(_product, torch.mul),
    "div": lambda a, b: ComplexParts.of(a) / b,
    "addcmul": lambda a, b, c, *, value=1: ComplexParts.of(b) * c * value + a,
    "reciprocal": _reciprocal,
    "square": lambda z: z * z,
    "pow": _power,
    "sqrt": _sqrt,
    "rsqrt": lambda z: _reciprocal(_sqrt(z)),
    "exp": _exp,
    "exp2": lambda z: _exp(z * math.log(2)),
    "expm1": _expm1,
    "log": _log,
    "log2": lambda z: _log(z) / math.log(2),
    "log10": lambda z: _log(z) / math.log(10),
    "sinh": _sinh,
    "cosh": _cosh,
    "tanh": _tanh,
    "sin": _by_rotation(_sinh),
    "cos": lambda z: _cosh(z.times_i),
    "tan": _by_rotation(_tanh),
    "sigmoid": lambda z: (_tanh(z / 2) + 1) / 2,
    "tanh_backward": lambda gradient, y: (-(ComplexParts.of(y) * y) + 1).conj * gradient,
    "sigmoid_backward": lambda gradient, y: ((-ComplexParts.of(y) + 1) * y).conj * gradient,
    "mm": functools.partial(_product, aten.mm),
    "mv": functools.partial(_product, aten.mv),
    "bmm": functools.partial(_product, aten.bmm),
    "dot": functools.partial(_product, aten.dot),
    "vdot": lambda a, b: _product(aten.dot, ComplexParts.of(a).conj, b),
    "addmm": _sum_of_product,
    "addmv": _sum_of_product,
    "baddbmm": _sum_of_product,
    "_linalg_solve_ex": _solve,
    "linalg_vector_norm": lambda z, *args, **options: torch.linalg.vector_norm(_abs(z), *args, **options),
    "_fft_c2c": _fft,
    "_fft_r2c": _fft_of_real,
    "_fft_c2r": _fft_to_real,
}
#: Operators that are linear with real coefficients, beside those that move elements.
_LINEAR = MOVEMENTS | {
    f"aten.{name}"
    for name in (
        *("_to_copy", "neg", "sum", "mean", "cumsum", "where", "masked_fill", "index_add", "index_put", "scatter_add"),
        *("_unsafe_index_put", "put", "take", "select_backward", "slice_backward", "index_select_backward"),
        *("diagonal_backward", "unfold_backward", "trace"),
    )
}
#: What depends on how the complex numbers lie in memory.
_OF_MEMORY = (aten.as_strided.default, aten.view.dtype)


def operator_on_parts(overload: Any, name: str) -> Callable[..., Any] | None:
    """An operator that takes or returns complex numbers, by their parts; None where there is none."""
    if name in ("jacsparse.gather", "jacsparse.rewrite"):
        # The graph has a call of either for each part.
        return lambda *tensors: [ComplexParts.of(tensor).tensors for tensor in tensors]
    formula = _FORMULAS.get(name.removeprefix("aten."))
    if (formula is None and name not in _LINEAR) or overload in _OF_MEMORY:
        return None

    def by_parts(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        results = _on_either(overload, name, args, kwargs) if formula is None else formula(*args, **kwargs)
        return [part for each in (results if isinstance(results, list) else [results]) for part in _tensors(each)]

    return by_parts


def _tensors(result: Any) -> Sequence[torch.Tensor]:
    return result.tensors if isinstance(result, ComplexParts) else [result]


def _on_either(overload: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a linear operator returns, by what it does to either part; it writes to none of them."""
    parameters, function = overload._schema.arguments, getattr(aten, name.removeprefix("aten."))
    numeric = {p.name for p in parameters if str(p.type) in ("Tensor", "number")} - {"alpha", "beta"}
    names = [parameter.name for parameter in parameters]
    if any(isinstance(value, complex) for value in kwargs.values()):
        raise UnsupportedOperatorError(f"{name}: a complex number scales what is added; multiply that by it before")

    def part(value: Any, place: int, name: str = "") -> Any:
        if isinstance(value, (list, tuple)):
            return [part(each, place) for each in value]
        if isinstance(value, ComplexParts) or (isinstance(value, torch.Tensor) and holds_numbers(value)):
            return ComplexParts.of(value).tensors[place]
        if isinstance(value, torch.dtype):
            return value.to_real()
        if name in numeric and isinstance(value, (int, float, complex)):
            return (complex(value).real, complex(value).imag)[place]
        return value

    re, im = (
        function(
            *(part(value, place, of) for of, value in zip(names, args, strict=False)),
            **{of: part(value, place, of) for of, value in kwargs.items()},
        )
        for place in (0, 1)
    )
    return ComplexParts(re, im) if isinstance(re, torch.Tensor) else list(map(ComplexParts, re, im))
