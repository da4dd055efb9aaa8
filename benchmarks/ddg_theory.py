"""The theory of delayed gradients on least squares, whose constants are known: Lemma 1, both theorems, corollaries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jacsparse.figures import BLUE, GREEN

from ._calls import one_thread
from ._context import Context
from ._experiment import Experiment
from ._figures import COLOURS, Line, Panel, Picture
from ._rows import Comparison, Group, Row

_STEPS = {"constant": "γ", "decreasing": "γ / (1 + t)"}


@dataclass(frozen=True)
class LeastSquares:
    """The mean of ``(x·w - y)² / 2`` over samples, in float64."""

    x: torch.Tensor
    y: torch.Tensor

    @classmethod
    def drawn(cls, samples: int, units: int, seed: int = 5) -> LeastSquares:
        """A problem of normally distributed numbers."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(samples, units, generator=generator, dtype=torch.float64)
        return cls(x, torch.randn(samples, generator=generator, dtype=torch.float64))

    @property
    def lipschitz(self) -> float:
        """L of equation 10: the largest eigenvalue of the Hessian."""
        return float(torch.linalg.eigvalsh(self.x.T @ self.x / len(self.x))[-1])

    def loss(self, w: torch.Tensor) -> torch.Tensor:
        """The loss at each row of weights."""
        return 0.5 * (w @ self.x.T - self.y).square().mean(1)

    def gradient(self, w: torch.Tensor) -> torch.Tensor:
        """The gradient at each row of weights."""
        return (w @ self.x.T - self.y) @ self.x / len(self.x)

    def gradient_of(self, samples: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The gradient of one sample's loss at each row of weights."""
        x = self.x[samples]
        return ((w * x).sum(1) - self.y[samples])[:, None] * x

    def second_moments(self, w: torch.Tensor) -> torch.Tensor:
        """``‖∇f_x(w)‖²`` of each sample at each row of weights."""
        return (w @ self.x.T - self.y).square() * self.x.square().sum(1)

    def least(self) -> float:
        """The loss at the optimum."""
        return float(self.loss(torch.linalg.lstsq(self.x, self.y).solution[None]))


def trajectories(problem: LeastSquares, modules: int, rates: Sequence[float], samples: torch.Tensor) -> torch.Tensor:
    """The weights of Algorithm 1 (SGD-DDG), ``(iterations + 1, runs, units)``, from zero on, for many runs at once.

    `samples` has the sample of each run at each iteration, ``(iterations, runs)``; modules are equal shares of the
    units.
    """
    units = problem.x.shape[1]
    w = torch.zeros(len(rates) + 1, samples.shape[1], units, dtype=torch.float64)
    groups = torch.arange(units).tensor_split(modules)
    for t, rate in enumerate(rates):
        w[t + 1] = w[t]
        for k, group in enumerate(groups, 1):
            then = t - modules + k
            if then >= 0:
                w[t + 1][:, group] -= rate * problem.gradient_of(samples[then], w[then])[:, group]
    return w


def _delayed_moment(rates: Sequence[float], modules: int, second_moment: float) -> float:
    """``M_K = K M + σ K⁴ M`` of equations 12 to 14, with M the second moment.

    σ is 1 for constant steps, and for decreasing ones the largest ``γ_max(0, t - K + 1) / γ_t``, which is at most K for
    ``γ_0 / (1 + t)``.
    """
    sigma = max(rates[max(0, t - modules + 1)] / rate for t, rate in enumerate(rates))
    return (modules + sigma * modules**4) * second_moment


def gradient_bound(
    rates: Sequence[float], modules: int, *, lipschitz: float, second_moment: float, gap: float
) -> float:
    """What the average of ``‖∇f(w_t)‖²``, weighted by the step sizes, is at most.

    Parameters
    ----------
    rates : sequence of float
        The step sizes ``γ_t``, each at most ``1 / L``: constant, or not increasing.
    modules : int
        The number of modules K.
    lipschitz : float
        The Lipschitz constant L of the gradient (equation 10).
    second_moment : float
        M, which ``‖∇f_x(w)‖²`` of a sample is at most (equation 11).
    gap : float
        ``f(w_0) - f(w*)``.

    Raises
    ------
    ValueError
        Where a step size is above ``1 / L``, or they increase.

    Notes
    -----
    Theorems 1 and 2, equations 13 and 14.

    Examples
    --------
    >>> round(gradient_bound([0.1] * 100, 2, lipschitz=1.0, second_moment=1.0, gap=5.0), 6)
    4.6
    """
    if not rates or modules < 1:
        raise ValueError(f"there are {len(rates)} step sizes and {modules} modules; expected at least one of each")
    if max(rates) * lipschitz > 1 or any(late > early for early, late in itertools.pairwise(rates)):
        raise ValueError(
            f"step sizes go from {rates[0]:.3g} to {rates[-1]:.3g}; the theorems are for constant or decreasing ones "
            f"of at most 1 / L = {1 / lipschitz:.3g}"
        )
    moment = _delayed_moment(rates, modules, second_moment)
    total = math.fsum(rates)
    return 2 * gap / total + 2 * math.fsum(rate**2 for rate in rates) * lipschitz * moment / total


@dataclass(frozen=True)
class DdgTheory(Experiment):
    """Means over many runs stand for the expectations, in which the lemma and the theorems are stated."""

    samples: int = 40
    units: int = 8
    runs: int = 400
    iterations: int = 400
    modules: tuple[int, ...] = (1, 2, 3, 4)
    #: Iterations after which corollaries 1 and 2 are looked at.
    lengths: tuple[int, ...] = (100, 1000, 10_000)

    name = "ddg_theory"
    title = "Delayed gradients on least squares, beside Lemma 1, Theorems 1 and 2 and their corollaries"
    source = "Huo et al., 2018, section 4 (equations 12 to 16)"

    def run(self, context: Context) -> list[Row]:
        problem = LeastSquares.drawn(self.samples, self.units)
        rows = []
        # Operators on tensors as small as these gain nothing by threads.
        with one_thread():
            for steps in _STEPS:
                rates = self._rates(problem, steps, self.iterations)
                for modules in self.modules:
                    context.say(f"K = {modules}, {steps} steps")
                    rows += self._inequalities(problem, modules, steps, rates)
            return [*rows, *self._corollaries(context, problem)]

    def _rates(self, problem: LeastSquares, steps: str, iterations: int) -> list[float]:
        """Step sizes of at most 1 / L."""
        first = (0.02 if steps == "constant" else 0.5) / problem.lipschitz
        return [first / (1 + t if steps == "decreasing" else 1) for t in range(iterations)]

    def _drawn(self, iterations: int) -> torch.Tensor:
        return torch.randint(self.samples, (iterations, self.runs), generator=torch.Generator().manual_seed(1))

    def _inequalities(self, problem: LeastSquares, modules: int, steps: str, rates: list[float]) -> list[Row]:
        """Lemma 1 at each iteration, and the theorem's bound over what it bounds."""
        w = trajectories(problem, modules, rates, self._drawn(len(rates)))
        flat = w.flatten(0, 1)
        losses = problem.loss(flat).view(w.shape[:2]).mean(1)
        squares = problem.gradient(flat).square().sum(1).view(w.shape[:2]).mean(1)[:-1]
        rate, lipschitz = torch.tensor(rates, dtype=torch.float64), problem.lipschitz
        moment = float(problem.second_moments(flat).max())
        left = losses[1:] - losses[:-1]
        right = -rate / 2 * squares + rate.square() * lipschitz * _delayed_moment(rates, modules, moment)
        holds = int((left <= right).sum())
        average = float((rate * squares).sum() / rate.sum())
        gap = float(losses[0]) - problem.least()
        bound = gradient_bound(rates, modules, lipschitz=lipschitz, second_moment=moment, gap=gap)
        data: dict[str, Any] = {"modules": modules, "steps": steps}
        rows = Group(f"K = {modules}, step sizes {_STEPS[steps]}")
        sides = {**data, "left": left.tolist(), "right": right.tolist(), "average": average}
        compared = (Comparison("holds / iterations", holds / len(rates), at_least=1),)
        note = f"right side less left side at least {float((right - left).min()):.3g}"
        rows.value("Lemma 1: iterations at which it holds", holds, "count", data=sides, comparisons=compared, note=note)
        label = f"Theorem {1 if steps == 'constant' else 2}: bound"
        compared = (Comparison("bound / measured", bound / average, at_least=1),)
        more = {**data, "bound": bound}
        rows.value(label, bound, "mean of squared gradients", data=more, comparisons=compared)
        return rows.rows()

    def _corollaries(self, context: Context, problem: LeastSquares) -> list[Row]:
        """Sums of the step sizes, and the squared gradient at an iteration drawn by them, over ever more iterations."""
        modules = max(self.modules)
        rows, rates = Group(f"Corollaries, K = {modules}"), self._rates(problem, "decreasing", max(self.lengths))
        context.say("corollaries")
        w = trajectories(problem, modules, rates, self._drawn(max(self.lengths)))
        squares = torch.stack([problem.gradient(each).square().sum(1).mean() for each in w[:-1]])
        rate = torch.tensor(rates, dtype=torch.float64)
        for length in self.lengths:
            first, second = float(rate[:length].sum()) / rates[0], float(rate[:length].square().sum()) / rates[0] ** 2
            drawn, data = float((rate * squares)[:length].sum() / rate[:length].sum()), {"length": length}
            compared = (Comparison("sum / ln T", first / math.log(length)),)
            rows.value(f"Σ γ_t / γ_0, T = {length:,}", first, "sum", data=data, comparisons=compared)
            compared = (Comparison("sum / (π² / 6)", 6 * second / math.pi**2, at_most=1),)
            rows.value(f"Σ γ_t² / γ_0², T = {length:,}", second, "sum", data=data, comparisons=compared)
            label = f"mean of squared gradients at an iteration drawn by γ_t, T = {length:,}"
            rows.value(label, drawn, "square", data={**data, "drawn": drawn})
        return rows.rows()

    def picture(self, rows: Sequence[Row]) -> Picture:
        panels = []
        for steps in _STEPS:
            lemma = [row.data for row in rows if row.data.get("steps") == steps and "left" in row.data]
            lines = [
                Line(range(len(data[side])), data[side], f"K = {data['modules']}, {side} side", colour, style)
                for data, colour in zip(lemma, COLOURS, strict=False)
                for side, style in (("right", "-"), ("left", ":"))
            ]
            title, label = f"Lemma 1, step sizes {_STEPS[steps]}", "change of the mean loss"
            panels.append(Panel(lines, title, "iteration", label, "±", grid=""))
        theorems = []
        for steps, style in zip(_STEPS, ("o-", "s--"), strict=True):
            of_steps = [row for row in rows if row.data.get("steps") == steps]
            bounds = [(row.data["modules"], row.data["bound"]) for row in of_steps if row.label.endswith(": bound")]
            averages = [(row.data["modules"], row.data["average"]) for row in of_steps if "average" in row.data]
            for points, what, colour in ((bounds, "bound", BLUE), (averages, "measured", GREEN)):
                theorems.append(Line.through(points, f"{what}, step sizes {_STEPS[steps]}", colour, style))
        label = "mean of squared gradients"
        panels.append(Panel(theorems, "Theorems 1 and 2", "modules K", label, "y", settings={"xticks": self.modules}))
        return Picture(self.title, panels, (13.0, 4.8), legend=6)
