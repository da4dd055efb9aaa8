"""Six programs from beginning to end, beside the same programs with SciPy or PyTorch alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse.linalg
import torch

import jacsparse
from examples import by_scipy, levenberg_marquardt, synthetic

from ._context import Context
from ._equations import power_flow as network
from ._experiment import Grid
from ._problems import TORCH, differences, flat, reacting_fields
from ._rows import Group, Row

_OURS, _AGAIN = "jacsparse", "jacsparse, prepared before"
#: A tolerance for concentrations that are tiny beside others.
_TIGHT = 1e-12


@dataclass(frozen=True)
class WholeProgram:
    """A program as we write it, and as others do; each returns its answer."""

    #: Makes the prepared Jacobians.
    prepare: Callable[[], Any]
    #: Takes them.
    ours: Callable[[Any], np.ndarray]
    peers: Mapping[str, Callable[[], np.ndarray]]
    #: How far answers may differ, as a share of the largest element.
    tolerance: float


def _by_splu(matrix: Any, b: np.ndarray) -> np.ndarray:
    return scipy.sparse.linalg.splu(matrix.tocsc()).solve(b)  # type: ignore[no-any-return]


def by_newton(
    f: Callable[..., torch.Tensor],
    start: torch.Tensor,
    jacobian: Callable[..., Any],
    *args: torch.Tensor,
    solve: Callable[[Any, np.ndarray], np.ndarray] = _by_splu,
) -> np.ndarray:
    """Newton's method as one writes it with SciPy, to the default tolerance of `jacsparse.newton`."""
    x = start.numpy().ravel()
    for _ in range(50):
        step = solve(jacobian(x, *args), flat(f, x, start, *args))
        x = x - step
        if np.abs(step).max() <= np.finfo(float).eps ** 0.5 * np.abs(x).max():
            return x
    raise ArithmeticError("Newton's method does not settle")


def reaction_diffusion(points: int) -> WholeProgram:
    """A step of three fields that diffuse and react, by Newton's method and GMRES with incomplete factors."""
    change, start = reacting_fields(points, 10.0)

    def residual(u: torch.Tensor) -> torch.Tensor:
        return u - start - 0.1 * change(u)

    def by_gmres(matrix: Any, b: np.ndarray, inverse: Any) -> np.ndarray:
        x, failed = scipy.sparse.linalg.gmres(matrix, b, M=inverse, rtol=1e-8)
        if failed:
            raise ArithmeticError("GMRES does not converge")
        return x  # type: ignore[no-any-return]

    def ours(prepared: Any) -> np.ndarray:
        def solve(matrix: Any, b: np.ndarray) -> np.ndarray:
            return by_gmres(matrix.to_scipy(), b, matrix.preconditioner("ilu"))

        return by_newton(residual, start, lambda x: prepared(torch.from_numpy(x).reshape(start.shape)), solve=solve)

    by_differences = differences(residual, start)

    def theirs() -> np.ndarray:
        def solve(matrix: Any, b: np.ndarray) -> np.ndarray:
            factors = scipy.sparse.linalg.spilu(matrix.tocsc())
            return by_gmres(matrix, b, scipy.sparse.linalg.LinearOperator(matrix.shape, factors.solve))

        return by_newton(residual, start, by_differences, solve=solve)

    peers = {"SciPy's differences, spilu and gmres": theirs}
    return WholeProgram(lambda: jacsparse.prepare_jacobian(residual, start), ours, peers, 1e-6)


def robertson(samples: int) -> WholeProgram:
    """Robertson's reaction with as many rates, by 40 steps of implicit Euler that grow."""
    rates = torch.linspace(2e7, 4e7, samples, dtype=torch.float64)
    start = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64).repeat(samples, 1)
    steps = [1e-4 * 1.5**k for k in range(40)]

    def residual(end: torch.Tensor, y: torch.Tensor, rate: torch.Tensor, h: float) -> torch.Tensor:
        a, b, c = end.unbind(-1)
        slow, fast, joint = 0.04 * a, rate * b**2, 1e4 * b * c
        return end - y - h * torch.stack([joint - slow, slow - joint - fast, fast], -1)

    def ours(prepared: Any) -> np.ndarray:
        y = start
        for h in steps:
            y = jacsparse.newton(prepared, y, y, rates, h, tolerance=_TIGHT)
        return y.numpy()

    def by_euler(solve: Callable[..., torch.Tensor]) -> np.ndarray:
        y = start
        for h in steps:
            end = y
            for _ in range(50):
                step = solve(end, y, h)
                end = end - step
                if (step.abs().amax(1) <= _TIGHT * end.abs().amax(1)).all():
                    break
            y = end
        return y.numpy()

    jacobian = torch.vmap(torch.func.jacfwd(residual), in_dims=(0, 0, 0, None))

    def by_torch(end: torch.Tensor, y: torch.Tensor, h: float) -> torch.Tensor:
        return torch.linalg.solve(jacobian(end, y, rates, h), residual(end, y, rates, h))

    def by_blocks(end: torch.Tensor, y: torch.Tensor, h: float) -> torch.Tensor:
        blocks = jacobian(end, y, rates, h).numpy()
        matrix = scipy.sparse.bsr_array((blocks, np.arange(samples), np.arange(samples + 1))).tocsc()
        solution = scipy.sparse.linalg.splu(matrix).solve(residual(end, y, rates, h).numpy().ravel())
        return torch.from_numpy(solution).reshape(end.shape)

    peers = {
        "torch.func.jacfwd and torch.linalg.solve": functools.partial(by_euler, by_torch),
        "torch.func.jacfwd and SciPy's splu": functools.partial(by_euler, by_blocks),
    }
    return WholeProgram(
        lambda: jacsparse.prepare_jacobian(residual, start, start, rates, 0.1, batched=True), ours, peers, 1e-6
    )


def bundle_adjustment(cameras: int, points: int) -> WholeProgram:
    """Cameras and points of a scene, each point seen by four cameras; the answer is the last cost."""
    scene = synthetic(cameras, points)
    start = scene.cameras, scene.points

    def ours(prepared: Any) -> np.ndarray:
        _, costs = levenberg_marquardt(scene.residuals, start, prepared, tolerance=1e-8)
        return np.array(costs[-1:])

    sparsity = scene.pattern().to_scipy()
    peers = {"SciPy's least_squares": lambda: np.array([by_scipy(scene, sparsity=sparsity, ftol=1e-8).cost])}
    return WholeProgram(lambda: jacsparse.prepare_jacobian(scene.residuals, *start, argnums=(0, 1)), ours, peers, 1e-6)


def power_flow(buses: int) -> WholeProgram:
    """Voltages of a network whose lines join near buses, by its balances of active and reactive power."""
    rng, near = np.random.default_rng(0), math.isqrt(buses)
    joined = [(i, int(rng.integers(max(0, i - near), i))) for i in range(1, buses) for _ in range(1 + i % 2)]
    one, other = np.array(sorted(set(joined))).T
    admittance = rng.uniform(20, 100, len(one)) - 1j * rng.uniform(100, 400, len(one))
    injected = rng.normal(0, 0.1, (2, buses))
    arrays = {"source": np.concatenate([one, other]), "target": np.concatenate([other, one]), "injected": injected,
              "g": np.tile(admittance.real, 2), "b": np.tile(admittance.imag, 2)}  # fmt: skip
    lines = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def mismatch(x: torch.Tensor) -> torch.Tensor:
        """Of all buses but the first, whose voltage is given, by their angles and magnitudes."""
        angle, magnitude = torch.nn.functional.pad(x[0], (1, 0)), torch.cat([torch.ones_like(x[1, :1]), x[1]])
        return network(TORCH, (angle, magnitude), **lines)[:, 1:]

    start = torch.stack([torch.zeros(buses - 1), torch.ones(buses - 1)]).double()

    def by_formulas() -> np.ndarray:
        """Newton's method as MATPOWER has it (Zimmerman, MATPOWER Technical Note 2, 2010, equations 35 and 38)."""
        joint = scipy.sparse.coo_array((admittance, (one, other)), (buses, buses))
        joint = (joint + joint.T).tocsr()
        Y = scipy.sparse.diags_array(joint.sum(1)) - joint

        def jacobian(x: np.ndarray) -> Any:
            angle, magnitude = x.reshape(2, -1)
            v = np.concatenate([[1.0], magnitude * np.exp(1j * angle)])
            of_v, of_current, of_unit = (scipy.sparse.diags_array(each) for each in (v, Y @ v, v / np.abs(v)))
            by_magnitude = (of_v @ (Y @ of_unit).conj() + of_current.conj() @ of_unit).tocsr()[1:, 1:]
            by_angle = (1j * of_v @ (of_current - Y @ of_v).conj()).tocsr()[1:, 1:]
            return scipy.sparse.block_array(
                [[by_angle.real, by_magnitude.real], [by_angle.imag, by_magnitude.imag]], format="csc"
            )

        return by_newton(mismatch, start, jacobian)

    def ours(prepared: Any) -> np.ndarray:
        return jacsparse.newton(prepared, start).numpy().ravel()

    by_differences = differences(mismatch, start)
    peers = {
        "SciPy's splu, derivatives by hand": by_formulas,
        "SciPy's differences and splu": lambda: by_newton(mismatch, start, by_differences),
    }
    return WholeProgram(lambda: jacsparse.prepare_jacobian(mismatch, start), ours, peers, 1e-6)


def membrane(points: int) -> WholeProgram:
    """The surface of least area on a square with a given rim, by its heights at points within."""
    axis = torch.linspace(0, 1, points + 2, dtype=torch.float64)
    rim = torch.sin(2 * torch.pi * axis)[:, None] * torch.cos(torch.pi * axis)
    start = torch.zeros(points, points, dtype=torch.float64)

    def area(u: torch.Tensor) -> torch.Tensor:
        within = torch.nn.functional.pad(torch.ones_like(u), (1, 1, 1, 1))
        z = torch.nn.functional.pad(u, (1, 1, 1, 1)) + (1 - within) * rim
        across, along = (z[1:] - z[:-1]) * (points + 1), (z[:, 1:] - z[:, :-1]) * (points + 1)
        lower = (1 + across[:, :-1] ** 2 + along[:-1] ** 2).sqrt().sum()
        upper = (1 + across[:, 1:] ** 2 + along[1:] ** 2).sqrt().sum()
        return (lower + upper) / 2 / (points + 1) ** 2

    gradient = torch.func.grad(area)

    def of_scipy(method: str, **options: Any) -> np.ndarray:
        def shaped(u: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(u).reshape(start.shape)

        def product(u: np.ndarray, v: np.ndarray) -> np.ndarray:
            return torch.func.jvp(gradient, (shaped(u),), (shaped(v),))[1].numpy().ravel()

        by_vectors = {} if method == "L-BFGS-B" else {"hessp": product}
        solution = scipy.optimize.minimize(
            lambda u: area(shaped(u)).item(), start.numpy().ravel(), jac=lambda u: gradient(shaped(u)).numpy().ravel(),
            method=method, options=options, **by_vectors,
        )  # fmt: skip
        return solution.x  # type: ignore[no-any-return]

    def ours(prepared: Any) -> np.ndarray:
        return jacsparse.newton(prepared, start).numpy().ravel()

    peers = {
        "SciPy's trust-krylov, products by torch.func": lambda: of_scipy("trust-krylov", gtol=1e-9, inexact=True),
        "SciPy's L-BFGS-B, gradients by torch.func": lambda: of_scipy("L-BFGS-B", gtol=1e-9, ftol=0, maxiter=20_000),
    }
    return WholeProgram(lambda: jacsparse.prepare_hessian(area, start), ours, peers, 1e-4)


def parameter_estimation(points: int) -> WholeProgram:
    """Eight coefficients of a conductivity, from temperatures on a square with cold sides, by SciPy's least squares."""
    axis = torch.linspace(0, 1, points, dtype=torch.float64)
    waves = torch.stack([torch.cos(torch.pi * k * axis)[:, None] * torch.cos(torch.pi * m * axis)
                         for k, m in ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (2, 1), (1, 2))])  # fmt: skip
    truth = torch.tensor([0.5, 0.3, -0.2, 0.1, 0.05, -0.1, 0.08, -0.04], dtype=torch.float64)
    start = torch.zeros(points, points, dtype=torch.float64)

    def heat(u: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        conductivity = (p[:, None, None] * waves).sum(0).exp() * (1 + u**2)
        k = torch.nn.functional.pad(conductivity, (1, 1, 1, 1), value=1.0)
        z = torch.nn.functional.pad(u, (1, 1, 1, 1))
        across = (k[1:, 1:-1] + k[:-1, 1:-1]) * (z[1:, 1:-1] - z[:-1, 1:-1])
        along = (k[1:-1, 1:] + k[1:-1, :-1]) * (z[1:-1, 1:] - z[1:-1, :-1])
        return (across[1:] - across[:-1] + along[:, 1:] - along[:, :-1]) * points**2 / 2 + 20

    measured = jacsparse.newton(heat, start, truth).flatten()

    def estimate(solve: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], sensitivities: Any) -> np.ndarray:
        """Each system begins at the solution of the one before."""
        last = start

        def solution(p: np.ndarray) -> torch.Tensor:
            nonlocal last
            last = solve(last, torch.from_numpy(p))
            return last

        def misfit(p: np.ndarray) -> np.ndarray:
            return (solution(p).flatten() - measured).numpy()

        jac = sensitivities if isinstance(sensitivities, str) else lambda p: sensitivities(solution(p), p)
        return scipy.optimize.least_squares(misfit, np.zeros(8), jac, method="lm").x  # type: ignore[no-any-return]

    def prepare() -> tuple[Any, ...]:
        return tuple(jacsparse.prepare_jacobian(heat, start, truth, argnums=number) for number in (0, 1))

    def ours(prepared: tuple[Any, ...]) -> np.ndarray:
        by_u, by_p = prepared

        def sensitivities(u: torch.Tensor, p: np.ndarray) -> np.ndarray:
            at = torch.from_numpy(p)
            return -by_u(u, at).solve(by_p(u, at).todense()).numpy()  # type: ignore[no-any-return]

        return estimate(lambda guess, p: jacsparse.newton(by_u, guess, p), sensitivities)

    by_differences = differences(heat, start, truth)

    def theirs() -> np.ndarray:
        def solve(guess: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(by_newton(heat, guess, by_differences, p)).reshape(start.shape)

        return estimate(solve, "2-point")

    return WholeProgram(prepare, ours, {"SciPy's splu, differences for both Jacobians": theirs}, 1e-4)


#: By what they do.
PROGRAMS: dict[str, Callable[..., WholeProgram]] = {
    "a step of reaction and diffusion": reaction_diffusion,
    "Robertson's reactions": robertson,
    "bundle adjustment": bundle_adjustment,
    "power flow": power_flow,
    "membrane": membrane,
    "parameter estimation": parameter_estimation,
}


@dataclass(frozen=True)
class WholePrograms(Grid):
    """Six programs in float64, on one thread of PyTorch's; all that our program does is timed, preparing included."""

    #: The sizes of each of `PROGRAMS`.
    sizes: tuple[tuple[int, ...], ...] = ((128,), (9_999,), (49, 7_776), (10_000,), (128,), (64,))

    name = "whole_programs"
    title = "Six programs from beginning to end"
    source = "SciPy, and PyTorch alone"
    single_thread = True

    def cases(self, context: Context) -> Iterable[tuple[str, tuple[int, ...]]]:
        return zip(PROGRAMS, self.sizes, strict=True)

    def measure(self, case: tuple[str, tuple[int, ...]], context: Context) -> list[Row]:
        title, sizes = case
        make = PROGRAMS[title]
        rows, program = Group(f"{title}: {' and '.join(f'{size:,}' for size in sizes)}"), make(*sizes)
        prepared, answers = program.prepare(), dict[str, np.ndarray]()

        def answer(label: str, function: Callable[[], np.ndarray]) -> None:
            answers[label] = function()

        ours = {_OURS: lambda: program.ours(program.prepare()), _AGAIN: lambda: program.ours(prepared)}
        ways = {label: functools.partial(answer, label, each) for label, each in {**ours, **program.peers}.items()}
        rows.in_turns(context, ways, role=dict.fromkeys(program.peers, "peer"))
        expected = answers[_OURS]
        for label in program.peers:
            rows.compare(f"{label} / ours", label, _OURS, at_least=1.0)
            rows.compare(f"{label} / ours, prepared before", label, _AGAIN, at_least=1.0)
            if label in answers:
                difference = np.abs(answers[label] - expected).max() / np.abs(expected).max()
                if difference > program.tolerance:
                    raise ArithmeticError(
                        f"{title}: {label} has another answer, by {difference:.1e} of the largest element"
                    )
                rows.value(f"difference of {label}", difference, "share of the largest element")
        return rows.rows()
