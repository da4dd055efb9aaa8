"""The bounds of Theorems 1 and 2 on a least-squares problem whose constants are known."""

import functools

import pytest
import torch
from torch import nn

from benchmarks.ddg_theory import LeastSquares, gradient_bound, trajectories
from jacsparse.training import DelayedGradients


def diminishing(optimizer):
    """Theorem 2's step sizes ``γ_t = γ_0 / (1 + t)``, where t counts the scheduler's steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))


def test_diminishing_step_sizes():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.6)
    scheduler, rates = diminishing(optimizer), []
    for _ in range(3):
        rates.append(round(optimizer.param_groups[0]["lr"], 6))
        optimizer.step()
        scheduler.step()
    assert rates == [0.6, 0.3, 0.2]


class Share(nn.Module):
    """Adds its weights' share of ``x w`` to the last column of ``(x, sum)``."""

    def __init__(self, begin, end):
        super().__init__()
        self.begin, self.end = begin, end
        self.weight = nn.Parameter(torch.zeros(end - begin, dtype=torch.float64))

    def forward(self, h):
        return torch.cat([h[:, :-1], h[:, -1:] + h[:, self.begin : self.end] @ self.weight[:, None]], dim=1)


@pytest.mark.parametrize("schedule", ["fixed", "diminishing"])
@pytest.mark.parametrize("modules", [1, 2, 4])
def test_average_gradients_stay_below_the_bounds(modules, schedule):
    samples, units, iterations = 40, 8, 400
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, units, generator=generator, dtype=torch.float64)
    y = torch.randn(samples, generator=generator, dtype=torch.float64)
    lipschitz = float(torch.linalg.eigvalsh(x.T @ x / samples)[-1])
    rate = (0.02 if schedule == "fixed" else 0.5) / lipschitz
    model = nn.Sequential(*[Share(2 * number, 2 * number + 2) for number in range(4)])
    ddg = DelayedGradients(
        model,
        modules=modules,
        optimizer=functools.partial(torch.optim.SGD, lr=rate),
        loss=lambda h, target: 0.5 * (h[:, -1] - target).square().mean(),
    )
    schedulers = [diminishing(optimizer) for optimizer in ddg.optimizers] if schedule == "diminishing" else []
    rates, squares, radius = [], [], 0.0
    for number in torch.randint(samples, (iterations,), generator=generator).tolist():
        w = torch.cat([parameter.detach() for parameter in model.parameters()])
        rates.append(ddg.optimizers[0].param_groups[0]["lr"])
        squares.append(float((x.T @ (x @ w - y) / samples).square().sum()))
        radius = max(radius, float(w.norm()))
        ddg.step(torch.cat([x[number], x.new_zeros(1)])[None], y[number : number + 1])
        for scheduler in schedulers:
            scheduler.step()
    norms = x.norm(dim=1)
    second_moment = float((norms * (norms * radius + y.abs())).square().max())
    best = torch.linalg.lstsq(x, y).solution
    gap = float(0.5 * (y.square().mean() - (x @ best - y).square().mean()))
    bound = gradient_bound(rates, modules, lipschitz=lipschitz, second_moment=second_moment, gap=gap)
    average = sum(rate * square for rate, square in zip(rates, squares, strict=True)) / sum(rates)
    assert average <= bound
    # It learns at all.
    assert sum(squares[-50:]) / 50 < squares[0] / 2


@pytest.mark.parametrize("modules", [1, 2, 3, 4])
def test_trajectories_of_the_benchmark_are_those_of_the_library(modules):
    problem, rates = LeastSquares.drawn(10, 4), [0.1 / (1 + t) for t in range(12)]
    samples = torch.randint(10, (12, 3), generator=torch.Generator().manual_seed(0))
    ours = trajectories(problem, modules, rates, samples)
    places = [part.tolist() for part in torch.arange(4).tensor_split(modules)]
    for run in range(3):
        model = nn.Sequential(*[Share(part[0], part[-1] + 1) for part in places])
        ddg = DelayedGradients(
            model,
            modules=modules,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            loss=lambda h, target: 0.5 * (h[:, -1] - target).square().mean(),
        )
        schedulers = [diminishing(optimizer) for optimizer in ddg.optimizers]
        for t, sample in enumerate(samples[:, run].tolist()):
            ddg.step(torch.cat([problem.x[sample], torch.zeros(1)])[None], problem.y[sample : sample + 1])
            for scheduler in schedulers:
                scheduler.step()
            w = torch.cat([parameter.detach() for parameter in model.parameters()])
            torch.testing.assert_close(w, ours[t + 1, run], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("rates", "modules", "message"),
    [
        ([], 2, "0 step sizes and 2 modules"),
        ([0.1], 0, "1 step sizes and 0 modules"),
        ([0.6], 2, "at most 1 / L = 0.5"),
        ([0.1, 0.2], 2, "step sizes go from 0.1 to 0.2"),
    ],
)
def test_step_sizes_without_a_theorem(rates, modules, message):
    with pytest.raises(ValueError, match=message):
        gradient_bound(rates, modules, lipschitz=2.0, second_moment=1.0, gap=1.0)


def test_sigma_of_diminishing_steps_is_at_most_the_number_of_modules():
    rates = [0.5 / (1 + t) for t in range(100)]
    total, squares = sum(rates), sum(rate**2 for rate in rates)
    for modules in range(1, 6):
        bound = gradient_bound(rates, modules, lipschitz=1.0, second_moment=1.0, gap=1.0)
        assert bound == pytest.approx(2 / total + 2 * squares * (modules + modules**5) / total)
