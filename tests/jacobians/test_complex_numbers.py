"""Complex numbers between real arguments and real results: each is two real ones, and derivatives are autograd's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import jacsparse
from jacsparse import UnsupportedOperatorError
from tests.helpers import BOUND, drawn

Function = Callable[[torch.Tensor], torch.Tensor]
shapes = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
seeds = st.integers(0, 2**31)
INDEX = torch.tensor([2, 0, 0])


def real(y: torch.Tensor) -> torch.Tensor:
    """The parts of complex numbers, in one line."""
    return (torch.view_as_real(y.resolve_conj()) if y.is_complex() else y.resolve_neg()).reshape(-1)


def number(x: torch.Tensor) -> torch.Tensor:
    """Complex numbers of elements, off the axes."""
    return torch.complex(x, 0.7 * x * x + 0.3)


def constant(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.complex(drawn(*shape, seed=seed), drawn(*shape, seed=seed + 1) - 1)


VECTOR, MATRIX, PAIR = constant(3), constant(3, 3), constant(2, 3, 3)


def expected_of(f: Function, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.functional.jacobian(f, x).reshape(-1, x.numel())


def check(f: Function, x: torch.Tensor, *, nonzero: bool = False, **options: Any) -> None:
    """Values of each entry are autograd's, at two points."""
    other = x + 0.1
    prepared = jacsparse.prepare_jacobian(f, other, **options)
    for point in (x, other):
        expected = expected_of(f, point)
        for J in (jacsparse.jacobian(f, point), prepared(point)):
            torch.testing.assert_close(
                J.todense(), expected, rtol=BOUND, atol=BOUND * (1 + float(expected.abs().max()))
            )
            assert not nonzero or J.pattern.nnz == expected.count_nonzero()


def check_hessian(f: Function, x: torch.Tensor) -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        y = f(x)
        return (y * y * torch.arange(1, 1 + y.numel())).sum()

    expected = torch.autograd.functional.hessian(total, x).reshape(x.numel(), -1)
    bound = 10 * BOUND * (1 + float(expected.abs().max()))
    for H in (jacsparse.hessian(total, x), jacsparse.prepare_hessian(total, x + 0.1)(x)):
        torch.testing.assert_close(H.todense(), expected, rtol=10 * BOUND, atol=bound)


ELEMENTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ("abs", "angle", "sgn", "exp", "expm1", "exp2", "log", "log2", "log10")},
    **{name: getattr(torch, name) for name in ("sqrt", "rsqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh")},
    **{name: getattr(torch, name) for name in ("sigmoid", "reciprocal", "square", "neg", "real", "imag", "conj")},
    **{f"power {n}": lambda z, n=n: z**n for n in (2, 3, 5, -1, -2, 0.5, 1.7, 1 + 2j)},
    "power of numbers": lambda z: (2 - 1j) ** z,
    "power": lambda z: z ** (z.conj() * 0.3),
    "product": lambda z: z * z.conj() * z * 1.5,
    "quotient": lambda z: (2 + 1j) / z + z / z.real,
    "sum": lambda z: 1j * z.real + 2.5 - z - torch.rsub(z, 1 - 1j, alpha=2) + torch.add(z, z.imag, alpha=-0.5),
    "of numbers": lambda z: (z.real + 1j) * (2 + z.imag * 1j) - z * 0j * (z + 0),
    "polar": lambda z: torch.polar(z.abs(), z.real),
    "conjugate's imaginary part": lambda z: (z * z).conj().imag * z.real,
    "constant": lambda z: z * z.detach().conj() + z.real * z.detach().abs(),
    "where": lambda z: torch.where(z.real > 0, z, 1.5j).masked_fill(z.imag > 2, 2 - 1j),
    "not equal": lambda z: torch.where(z != 0, 2 * z, 0),
    "in place": lambda z: (z * 1).mul_(1j).add_(z.real).div_(2),
    "converted": lambda z: z.real.to(torch.complex128) * (1 + 2j),
    "fused": lambda z: torch.addcmul(z, z, z.conj(), value=0.5),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str) -> None:
    @given(shape=shapes, seed=seeds, method=st.sampled_from(["auto", "products", "compressed"]))
    @settings(max_examples=2, deadline=None)
    def run(shape: tuple[int, ...], seed: int, method: str) -> None:
        f, x = lambda x: real(ELEMENTWISE[name](number(x))), drawn(*shape, seed=seed)
        check(f, x, method=method)
        J = jacsparse.jacobian(f, x)
        # Each row has the element that its number was made of.
        assert J.pattern.nnz <= J.shape[0]

    run()
    check_hessian(lambda x: real(ELEMENTWISE[name](number(x))), drawn(3, seed=1))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_constants(layout: torch.layout) -> None:
    """An admittance matrix in any layout has the entries of a dense one."""
    admittances = torch.complex(drawn(5, 5), drawn(5, 5, seed=1)) * (drawn(5, 5, seed=2) > 0)

    def injected(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        z = number(x)
        return real(z * (matrix @ z).conj())

    x, matrix = drawn(5), admittances.to_sparse(layout=layout)
    J = jacsparse.jacobian(lambda x: injected(x, matrix), x)
    assert J.pattern == jacsparse.jacobian(lambda x: injected(x, admittances), x).pattern
    expected = torch.autograd.functional.jacobian(lambda x: injected(x, admittances), x)
    torch.testing.assert_close(J.todense(), expected, rtol=BOUND, atol=BOUND * (1 + float(expected.abs().max())))
    prepared = jacsparse.prepare_jacobian(lambda x: injected(x, matrix), x)
    torch.testing.assert_close(prepared(x).todense(), J.todense())


def assigned(z: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(2, 3, dtype=z.dtype)
    out[0] = z
    out[1, :2] = z[:2] ** 2
    out[:, 1] *= 2j
    return out


def of_a_written_constant(z: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        factors = torch.ones(3, dtype=z.dtype)
        factors[1] = z[0] * 2
        factors.mul_(1j)
    return z * factors


OTHERS: dict[str, Function] = {
    "of a written constant": of_a_written_constant,
    "moved": lambda z: torch.cat([z[INDEX] * VECTOR[INDEX], z.flip(0), z.real, VECTOR[:2]]).roll(1),
    "broadcast": lambda z: torch.complex(z.real[:, None], z.imag) + z.real[:, None] - z.imag.sum() * 1j / VECTOR.real,
    "broadcast sums": lambda z: torch.add(z.real.reshape(3, 1), z) + torch.ones(2, 1, 1) + torch.ones(4, 1, 1, 1) * 1j,
    "stacked": lambda z: torch.stack([z, z.imag]).T.reshape(2, 3).movedim(0, 1).unsqueeze(0).squeeze(),
    "parts": lambda z: torch.stack([p * q for p, q in zip(z.unbind(), VECTOR, strict=True)]).split(2)[0],
    "padded": lambda z: nn.functional.pad(z, (1, 2), value=1.5),
    "added": lambda z: torch.zeros(4, dtype=z.dtype).index_add(0, INDEX, z * VECTOR, alpha=-2),
    "sums": lambda z: z.sum() * z.mean() + z.cumsum(0),
    "norm": lambda z: torch.linalg.vector_norm(z * 2)[None],
    "assigned": assigned,
    "of pairs": lambda z: torch.view_as_complex(torch.stack([z.imag, z.real * 2], -1)) ** 2,
    "products": lambda z: (MATRIX @ z, MATRIX.H @ z.conj(), torch.outer(z, z.conj()))[0],
    "adjoint": lambda z: MATRIX.H @ torch.outer(z, z.conj()),
    "sum of products": lambda z: torch.addmm(MATRIX, MATRIX.mT, torch.outer(z, z), beta=0.5, alpha=2j),
    "batched product": lambda z: torch.einsum("bij,bj->bi", PAIR, torch.stack([z, z**2])),
    "dot": lambda z: torch.dot(z, VECTOR) + torch.vdot(VECTOR, z),
    "solved": lambda z: torch.linalg.solve(MATRIX + 3 * torch.diag(z), z),
    "solved from the right": lambda z: torch.linalg.solve(MATRIX, torch.outer(z, z), left=False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_operators(name: str) -> None:
    f = lambda x: real(OTHERS[name](number(x)))  # noqa: E731
    check(f, drawn(3))
    check(f, drawn(3), method="compressed")
    if "solved" not in name:
        check_hessian(f, drawn(3, seed=2))


def test_compiled() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        z = torch.exp(number(x))
        return real(torch.fft.fft(z / (1j + MATRIX @ z.conj()).abs() * assigned(z)[1]))

    check(f, drawn(3), compile=True)


@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=3).map(tuple),
    norm=st.sampled_from(["forward", "backward", "ortho"]),
    size=st.none() | st.integers(1, 7),
    axis=st.integers(-2, 1),
    seed=seeds,
)
@settings(max_examples=5, deadline=None)
def test_fourier_transforms(shape: tuple[int, ...], norm: str, size: int | None, axis: int, seed: int) -> None:
    x, options = drawn(*shape, seed=seed), {"n": size, "dim": axis, "norm": norm}
    for transform in (torch.fft.fft, torch.fft.ifft, torch.fft.hfft, torch.fft.irfft):
        if not (transform in (torch.fft.hfft, torch.fft.irfft) and size is None and shape[axis] == 1):
            check(lambda x, transform=transform: real(transform(number(x), **options)), x)
    for transform in (torch.fft.fft, torch.fft.rfft, torch.fft.ihfft):
        check(lambda x, transform=transform: real(transform(x, **options)), x)


@pytest.mark.parametrize("shape", [(2, 3), (4, 1), (3, 2, 4)])
def test_fourier_transforms_of_several_axes(shape: tuple[int, ...]) -> None:
    x = drawn(*shape)
    for transform in (torch.fft.fft2, torch.fft.ifftn, torch.fft.rfftn):
        check(lambda x, transform=transform: real(transform(x * x, norm="ortho")), x)
    check(lambda x: real(torch.fft.irfftn(number(x), s=[5] * x.ndim)), x)
    check_hessian(lambda x: real(torch.fft.irfft2(torch.fft.fft2(x * x), s=(3, 3))), x)
    step = lambda x: real(torch.fft.ifft(torch.fft.fft(x) * torch.arange(x.shape[-1]) * 1j).real * x)  # noqa: E731
    J = jacsparse.jacobian(step, x)
    assert J.pattern.nnz <= x.numel() * x.shape[-1]
    check(step, x, compile=True)


def test_zeros_of_constants_are_left_out() -> None:
    Y = constant(5, 5) * (drawn(5, 5, seed=3) > 1)
    f, x = lambda x: real(number(x) * (Y @ number(x)).conj()), drawn(5)
    check(f, x, nonzero=True)
    prepared = jacsparse.prepare_jacobian(f, x)
    Y *= 2 - 1j
    torch.testing.assert_close(prepared(x).todense(), expected_of(f, x), rtol=BOUND, atol=BOUND)
    Y += 1
    with pytest.raises(RuntimeError, match="was zero where the pattern leaves it out"):
        prepared(x)
    check(f, x, nonzero=True)


def test_constants_of_later_calls() -> None:
    x = drawn(4)
    for c in (2.5, 3.5, 0.0, 1j, 2 - 1j):
        f = lambda x, c=c: real(torch.add(number(x) * c + c, x, alpha=c))  # noqa: E731
        torch.testing.assert_close(jacsparse.jacobian(f, x).todense(), expected_of(f, x))
    f = lambda x, c, Y: real((Y @ number(x)).conj() * c)  # noqa: E731
    prepared = jacsparse.prepare_jacobian(f, x, 2.0, constant(3, 4))
    Y = constant(3, 4, seed=5)
    for each in (Y, Y.conj()):
        torch.testing.assert_close(
            prepared(x, 3.0, each.resolve_conj()).todense(), expected_of(lambda x, Y=each: f(x, 3.0, Y), x)
        )


class Layer(nn.Module):
    """A layer of a Fourier neural operator, with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(constant(2, 3, 3))
        self.inner = nn.Linear(5, 5).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x.reshape(-1, 2, 5))
        mixed = torch.einsum("bim,iom->bom", spectrum, self.weight)
        return torch.tanh(torch.fft.irfft(mixed, n=5).flatten(1) + self.inner(x[:, :5]).repeat(1, 3))


def test_modules() -> None:
    module, x = nn.Sequential(Layer(), nn.Linear(15, 2).double()), drawn(3, 10)
    expected = torch.stack([torch.autograd.functional.jacobian(lambda v: module(v[None])[0], v) for v in x])
    for J in (jacsparse.jacobian(module, x), jacsparse.prepare_jacobian(module, x + 1)(x)):
        actual = torch.stack([J.todense(sample) for sample in range(3)])
        torch.testing.assert_close(actual, expected, rtol=BOUND, atol=BOUND)
    # Its gradient writes to a part of a complex tensor's memory.
    H = jacsparse.hessian(lambda x: module(x).square().sum(1), x, batched=True)
    for sample, v in enumerate(x):
        expected = torch.autograd.functional.hessian(lambda v: module(v[None]).square().sum(), v)
        torch.testing.assert_close(H.todense(sample), expected, rtol=1e-11, atol=1e-11)
    assert not jacsparse.verify(module, x).failed
    assert jacsparse.jacobian_pattern(module, (10,)).shape == (2, 10)
    wanted = [x.requires_grad_(), *module.parameters()]
    actual = torch.autograd.grad(jacsparse.nn.Scan(module)(x).square().sum(), wanted)
    for each, other in zip(actual, torch.autograd.grad(module(x).square().sum(), wanted), strict=True):
        torch.testing.assert_close(each, other, rtol=BOUND, atol=BOUND)


def test_gradients_of_values_and_single_precision() -> None:
    w = drawn(4, seed=7).requires_grad_()
    f = lambda x: real(torch.exp(torch.complex(x * w, x)))  # noqa: E731
    x = drawn(4)
    (expected,) = torch.autograd.grad(torch.autograd.functional.jacobian(f, x, create_graph=True).square().sum(), w)
    prepared = jacsparse.prepare_jacobian(f, x, create_graph=True)
    for J in (jacsparse.jacobian(f, x, create_graph=True), prepared(x)):
        (actual,) = torch.autograd.grad(J.values.square().sum(), w)
        torch.testing.assert_close(actual, expected, rtol=BOUND, atol=BOUND)
    g = lambda x: real(torch.fft.fft(torch.polar(x.abs() + 1, x)) * 1j)  # noqa: E731
    single = jacsparse.jacobian(g, x.float())
    assert single.values.dtype == torch.float32
    torch.testing.assert_close(single.todense().double(), expected_of(g, x), rtol=1e-5, atol=1e-5)


def test_zeros_and_sizes_at_the_ends_of_the_range() -> None:
    functions: list[Function] = [
        torch.abs,
        torch.sgn,
        torch.square,
        lambda z: z**3,
        lambda z: torch.polar(z.real, z.imag),
    ]
    for f in functions:
        for point in ([0.0, 0.0], [-1.0, 0.0], [-2.0, 0.5]):
            x = torch.tensor(point, dtype=torch.float64)
            g = lambda x, f=f: real(f(torch.view_as_complex(x)))  # noqa: E731
            torch.testing.assert_close(jacsparse.jacobian(g, x).todense(), expected_of(g, x))
    # A transform has the elements of PyTorch's, so that what is zero there is zero here.
    f = lambda x: torch.fft.fft(x).abs()  # noqa: E731
    x = torch.ones(6, dtype=torch.float64)
    for J in (jacsparse.jacobian(f, x), jacsparse.prepare_jacobian(f, x)(x)):
        torch.testing.assert_close(J.todense(), expected_of(f, x), rtol=BOUND, atol=BOUND)
    energy = lambda x: (f(x) + 0.5).pow(3).sum()  # noqa: E731
    expected = torch.autograd.functional.hessian(energy, x)
    for H in (jacsparse.hessian(energy, x), jacsparse.prepare_hessian(energy, drawn(6))(x)):
        torch.testing.assert_close(H.todense(), expected, rtol=BOUND, atol=BOUND)
    # Each derivative of a function of degree d is of degree d - 1; squares would overflow here.
    x = torch.tensor([0.6, 0.8], dtype=torch.float64)
    for f, degree in (
        (torch.abs, 1),
        (torch.log, 0),
        (torch.angle, 0),
        (torch.sqrt, 0.5),
        (lambda z: z * 2 / z.conj(), 0),
    ):
        g = lambda x, f=f: real(f(torch.view_as_complex(x)))  # noqa: E731
        expected = expected_of(g, x)
        for scale in (1e-170, 1e170):
            actual = jacsparse.jacobian(g, x * scale).todense() * scale ** (1 - degree)
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(z)
        return z * z

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (z,) = ctx.saved_tensors
        return gradient * 2 * z.conj()


REFUSED: dict[str, tuple[Function, str]] = {
    "output": (number, r"returns complex numbers, torch.complex128; return torch.view_as_real of them"),
    "acos": (lambda x: number(x).acos().abs(), r"aten.acos has no rule for these complex numbers at .*; work on real"),
    "prod": (lambda x: number(x).prod().abs(), r"aten.prod has no rule for these complex numbers"),
    "eigenvalues": (lambda x: torch.linalg.eigvals(torch.outer(x, x)).abs(), "aten.linalg_eig has no rule for these"),
    "function": (lambda x: Square.apply(number(x)).abs(), "Square has no rule for these complex numbers"),
    "powers of zero": (lambda x: (0 ** number(x)).abs(), "the number 0 has no powers by complex exponents"),
    "part": (lambda x: number(x).real.mul_(2), r"writes to a part, or a conjugate, .*; compute new parts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    f, message = REFUSED[name]
    for entry in (jacsparse.jacobian, jacsparse.prepare_jacobian):
        with pytest.raises(UnsupportedOperatorError, match=message):
            entry(f, drawn(3))


def test_complex_arguments_are_refused() -> None:
    for entry in (jacsparse.jacobian, jacsparse.prepare_jacobian):
        with pytest.raises(TypeError, match=r"x is torch.complex128; .* give torch.view_as_real\(x\), and take"):
            entry(torch.abs, constant(3))


def test_exponents_that_are_tensors() -> None:
    def f(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.complex(x, 0.5 * x) ** exponent)

    x = torch.tensor([0.5, 1.3], dtype=torch.float64)
    exponents = [torch.tensor(each, dtype=torch.float64) for each in ([0.5], [2.0], 3.0, 0.5, [2.0, 0.5])]
    for exponent in exponents:
        expected = torch.func.jacrev(f)(x, exponent).reshape(4, 2)
        torch.testing.assert_close(jacsparse.jacobian(f, x, exponent).todense().reshape(4, 2), expected)
    prepared = jacsparse.prepare_jacobian(f, x, exponents[0])
    expected = torch.func.jacrev(f)(x, exponents[1]).reshape(4, 2)
    torch.testing.assert_close(prepared(x, exponents[1]).todense().reshape(4, 2), expected)
    by_itself = lambda x: f(x, x[:1])  # noqa: E731
    expected = torch.func.jacrev(by_itself)(x).reshape(4, 2)
    torch.testing.assert_close(jacsparse.jacobian(by_itself, x).todense().reshape(4, 2), expected)


@pytest.mark.parametrize("divisor", [2 + 1j, 1j, -0.5j])
def test_quotients_by_numbers(divisor: complex) -> None:
    x = torch.tensor([0.5, 1.3], dtype=torch.float64)
    for f in (
        lambda x: torch.view_as_real(torch.complex(x, 0.5 * x) / divisor),
        lambda x: torch.view_as_real(x / divisor),
    ):
        expected = torch.func.jacrev(f)(x).reshape(4, 2)
        torch.testing.assert_close(jacsparse.jacobian(f, x).todense().reshape(4, 2), expected)


def test_complex_numbers_that_scale_what_is_added() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(2, dtype=torch.complex128)
        return torch.view_as_real(zeros.index_add(0, torch.tensor([0, 1]), torch.complex(x, x), alpha=2j))

    with pytest.raises(UnsupportedOperatorError, match="index_add: a complex number scales what is added"):
        jacsparse.jacobian(f, torch.ones(2, dtype=torch.float64))
