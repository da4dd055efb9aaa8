"""Schedules: right for every n and every number of levels, and of the complexity that the thesis derives."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import jacsparse
from jacsparse.schedule import (
    EXCHANGES,
    Schedule,
    balanced,
    blelloch,
    blocked,
    by_level,
    chunked,
    cyclic_reduction,
    exchanges,
    linear,
    resolve,
    run,
)
from jacsparse.stages import Region


def gradients(schedule: Schedule, matrices: list[np.ndarray], vector: np.ndarray) -> list[np.ndarray]:
    """The schedule's steps over small matrices; values[i] for the scan's array, as its docstring says."""
    values = {0: vector, **{place + 1: matrix for place, matrix in enumerate(matrices)}}
    for step in schedule.steps:
        if step.kind == "move":
            continue
        assert step.out not in values, "a value is made once"
        assert (values[step.right].ndim == 1) == (step.kind == "mv")
        values[step.out] = values[step.left] @ values[step.right]
    return [values[value] for value in schedule.gradients]


def problem(n: int) -> tuple[list[np.ndarray], np.ndarray, list[np.ndarray]]:
    rng = np.random.default_rng(n)
    sizes = rng.integers(1, 5, n + 1)
    # Place j holds the transposed Jacobian of stage n + 1 - j: it leads from x_{n+1-j} to x_{n-j}.
    matrices = [rng.integers(-3, 4, (sizes[place + 1], sizes[place])).astype(object) for place in range(n)]
    vector = rng.integers(-3, 4, sizes[0]).astype(object)
    expected = [vector]
    for matrix in matrices[:-1]:
        expected.append(matrix @ expected[-1])
    return matrices, vector, expected if n else []


@pytest.mark.parametrize("n", range(41))
def test_every_schedule_is_exact(n: int) -> None:
    matrices, vector, expected = problem(n)
    schedules = [linear(n), blelloch(n), cyclic_reduction(n), *(blelloch(n, levels) for levels in range(7))]
    schedules += [
        blocked(n, [0, *cuts], "blocked") for cuts in ([], [1], [n // 2], [n // 3, 2 * n // 3]) if n > 6 or not cuts
    ]
    for schedule in schedules:
        results = gradients(schedule, matrices, vector)
        assert len(results) == n and all(np.array_equal(a, b) for a, b in zip(results, expected, strict=True))
        live = {step.out for step in schedule.live_steps()}
        assert all(step.live == (step.out in live) for step in schedule.products)


@given(st.integers(0, 24), st.integers(0, 5), st.sets(st.integers(1, 24)))
def test_light_matrices_wait_for_a_vector(n: int, levels: int, light: set[int]) -> None:
    matrices, vector, expected = problem(n)
    light = {value for value in light if value <= n}
    for schedule in (blelloch(n, levels), cyclic_reduction(n), linear(n)):
        executed, products = schedule.deferred(light)
        results = gradients(executed, matrices, vector)
        assert len(results) == n and all(np.array_equal(a, b) for a, b in zip(results, expected, strict=True))
        assert [step for steps in products.values() for step in steps] == list(executed.steps) == [*executed.products]
        assert list(products) == [step.out for step in schedule.live_steps()]
        # No product is taken twice, and a product of two matrices has one that is not light.
        assert len({(step.left, step.right) for step in executed.steps}) == len(executed.steps)
        assert not any(step.kind == "mm" and step.left in light for step in executed.steps)
        if not light:
            assert executed.steps == schedule.live_steps()


@pytest.mark.parametrize("n", [1, 2, 7, 21])
def test_values_are_products_of_consecutive_places(n: int) -> None:
    for schedule in (linear(n), blelloch(n), blelloch(n, 2), cyclic_reduction(n)):
        places = {place: {place} for place in range(n + 1)}
        for step in schedule.live_steps():
            if step.kind != "move":
                places[step.out] = places[step.left] | places[step.right]
        spans = schedule.spans
        for value in spans.keys() & places.keys():
            first, last = spans[value]
            assert set(range(first, last + 1)) == places[value]


def test_algorithm_1_as_printed() -> None:
    """Its own loops, over the thesis' own operator, count the products and where each is."""
    for n in range(1, 41):
        a: list[object] = [("v",), *range(1, n + 1)]
        counted = []
        for d in range(math.ceil(math.log2(n + 1)) - 1):
            counted += [(d, "up")] * len(range(0, n - 2**d + 1, 2 ** (d + 1)))
        down = 0
        a = [1] * (n + 1)
        a[n] = 0  # the identity
        for d in range(math.ceil(math.log2(n + 1)) - 1, -1, -1):
            for i in range(0, n - 2**d + 1, 2 ** (d + 1)):
                left, right = i + 2**d - 1, min(i + 2 ** (d + 1) - 1, n)
                down += a[right] == 1
                a[left], a[right] = a[right], 1
        schedule = blelloch(n)
        up = [step for step in schedule.products if step.phase == "up"]
        assert len(up) == len(counted)
        # The linear middle of a full scan is the last step of the up-sweep and the first of the down-sweep.
        assert len(schedule.products) - len(up) == down


def test_pruned_vgg_11_has_34_steps() -> None:
    schedule = blelloch(21, levels=2)
    assert len(schedule.products) == 34
    dead = [step for step in schedule.products if not step.live]
    assert [(step.left, step.right, step.kind, step.phase) for step in dead] == [(21, 20, "mm", "up")]
    assert [step.kind for step in schedule.products].count("mm") == 14


@pytest.mark.parametrize("n", [7, 21, 63, 255, 1023])
def test_complexity_with_unlimited_workers(n: int) -> None:
    """Equation 3.3: logarithmic steps; equation 3.4: linear work."""
    scan, line = blelloch(n).complexity(n + 1), linear(n).complexity(n + 1)
    levels = math.ceil(math.log2(n + 1))
    assert levels <= scan.steps <= 2 * levels
    assert n - 1 <= scan.work <= 2 * n
    assert line.steps == line.work == n - 1
    # A product, and the factor that lies where it is made.
    assert scan.space == 2


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 64, 500])
def test_complexity_with_few_workers(workers: int) -> None:
    n = 1023
    scan = blelloch(n).complexity(workers)
    order = n / workers + math.log2(workers)
    assert 0.5 * order <= scan.steps <= 3 * order + 2 * math.log2(n)
    assert scan.work == blelloch(n).complexity(1).work == blelloch(n).complexity(1).steps
    # Section 3.6: the space of Θ(max(n/p, 1)) Jacobians, here a worker's share and at most as many products beside it.
    # Back-propagation leaves them where they are.
    share = max(1, math.ceil((n - 1) / workers))
    assert share <= scan.space <= 2 * share
    assert linear(n).complexity(workers).space == share


@pytest.mark.parametrize("n", [1, 2, 3, 8, 21, 64])
def test_cyclic_reduction_has_half_of_the_levels(n: int) -> None:
    counted = cyclic_reduction(n).complexity(max(1, n))
    assert counted.steps == math.ceil(math.log2(n))
    assert counted.work == sum(n - 2**level for level in range(counted.steps))


def test_space_is_measured_where_matrices_lie() -> None:
    # One matrix is as large as all others: no share is smaller, and its worker holds no other.
    n = 9
    sizes = {value: 8 if value == 4 else 1 for value in range(1, n)}
    assert [linear(n).complexity(workers, sizes).space for workers in (1, 2, 4, 8)] == [15, 11, 8, 8]
    # What a scan makes is held, too, beside its factors and what comes later: matrices 2, 3, 4 and the product of 100.
    schedule = blelloch(5)
    sizes = dict.fromkeys(range(1, 6), 1) | {step.out: 100 for step in schedule.products if step.kind == "mm"}
    assert schedule.complexity(1, sizes).space == 103 > linear(5).complexity(1, sizes).space == 4
    assert Schedule("none", 0, (), (0,)).complexity(3).space == linear(1).complexity(2).space == 0
    # The last matrix has no entries: the last worker has it.
    assert linear(4).complexity(2, {1: 1, 2: 1, 3: 0, 4: 1}).space == 1
    for size in (-1, 0.5, float("nan")):
        with pytest.raises(ValueError, match=r"sizes\[1\] is .*; expected an integer of at least 0"):
            linear(4).complexity(2, {1: size, 2: 1, 3: 1})
    with pytest.raises(ValueError, match="sizes has no entry for matrix 2; expected one for each"):
        linear(4).complexity(2, {1: 3})


def test_balanced_uses_workers_where_it_pays() -> None:
    chain = jacsparse.chain(nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(12))), (2, 6, 6))
    assert [step.kind for step in balanced(chain, 1).products] == ["mv"] * 11
    scales = jacsparse.chain(nn.Sequential(*(nn.ReLU() for _ in range(40))), (50,))
    schedule = balanced(scales, 4)
    assert any(step.kind == "mm" for step in schedule.products)
    assert schedule.complexity(4).steps < linear(40).complexity(4).steps
    assert schedule.name == "balanced:4" and balanced(scales, 1).name == "balanced:1"
    # More workers than stages.
    assert balanced(scales, 10**12).products == balanced(scales, 40).products


class Block(nn.Module):
    """A residual block, whose matrix takes more to make than to go through."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + x)


def test_balanced_weighs_what_it_takes_to_make_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = jacsparse.chain(nn.Sequential(*(Block(8) for _ in range(6))), (8, 12, 12))
    region = chain.factors[0]
    assert isinstance(region, Region)
    # The estimate is near what it takes, one operator after the other.
    assert 0.3 < region.estimate / region.multiply_adds < 3
    monkeypatch.setattr(Region, "pattern", property(lambda _: pytest.fail("the matrix was made")))
    assert all(step.kind == "mv" for step in balanced(chain, 4).products)


@given(st.integers(0, 40), st.integers(1, 6), st.integers(0, 3), st.integers(0, 2**31))
def test_makespan(n: int, workers: int, levels: int, seed: int) -> None:
    """No less than the work shared evenly and than the longest way through; no more than that and the work together."""
    schedule = blelloch(n, levels)
    steps = schedule.live_steps()
    durations = np.random.default_rng(seed).integers(0, 9, len(steps)).astype(float).tolist()
    actual = schedule.makespan(durations, workers)
    done: dict[int, float] = {}
    for step, duration in zip(steps, durations, strict=True):
        done[step.out] = duration + max(done.get(step.left, 0.0), done.get(step.right, 0.0))
    longest, even = max(done.values(), default=0.0), sum(durations) / workers
    assert max(longest, even) - 1e-9 <= actual <= longest + even + 1e-9
    assert schedule.makespan([1.0] * len(steps), workers) == schedule.complexity(workers).steps
    if steps:
        with pytest.raises(ValueError, match=rf"durations has 0 elements; the schedule has {len(steps)} live steps"):
            schedule.makespan([], workers)
        for wrong in (math.nan, -1.0):
            with pytest.raises(ValueError, match=f"durations has {wrong}; expected numbers that are not negative"):
                schedule.makespan([*durations[1:], wrong], workers)


def test_names() -> None:
    assert resolve("linear", 5) == linear(5) and resolve("blelloch", 5) == blelloch(5)
    assert resolve("blelloch:2", 5) == blelloch(5, 2)
    chain = jacsparse.chain(nn.Sequential(nn.ReLU(), nn.ReLU()), (3,))
    assert resolve("auto", 5) == resolve("auto", 5, chain) == linear(5)
    assert blelloch(21, 99) == blelloch(21, 4) and blelloch(21, 99).name == "blelloch:4"
    assert blelloch(21, 4).steps == blelloch(21).steps and blelloch(0, 3).name == "blelloch:0"
    assert resolve(linear(2), 2) == linear(2)
    for name in ("", "blelloch:", "blelloch:-1", "blelloch:x", "linear:2", "fast", "balanced", "chunked", "chunked:0"):
        with pytest.raises(ValueError, match="expected one of auto, linear, blelloch"):
            resolve(name, 5)
    with pytest.raises(ValueError, match="schedule is 'balanced:2', which balances a chain"):
        resolve("balanced:2", 5)
    with pytest.raises(ValueError, match="the schedule is for 4 stages, but the chain has 5"):
        resolve(linear(4), 5)
    with pytest.raises(TypeError, match="schedule is 3; expected one of auto"):
        resolve(3, 5)  # type: ignore[arg-type]


def test_bad_arguments() -> None:
    for n in (-1, 2.0, True, "3"):
        with pytest.raises(ValueError, match="n is"):
            linear(n)  # type: ignore[arg-type]
    for levels in (-1, 1.5, True):
        with pytest.raises(ValueError, match="levels is"):
            blelloch(3, levels)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="workers is 0"):
        linear(3).complexity(0)
    with pytest.raises(ValueError, match="workers is 0"):
        balanced(jacsparse.chain(nn.ReLU(), (3,)), 0)


ROUNDS = {
    "scan": lambda ranks: math.ceil(math.log2(ranks)),
    "gather": lambda ranks: int(ranks > 1),
    "linear": lambda ranks: ranks - 1,
}


@pytest.mark.parametrize("way", EXCHANGES)
@pytest.mark.parametrize("ranks", range(1, 34))
def test_exchanges_give_each_rank_what_comes_before(ranks: int, way: str) -> None:
    before: list[list[int]] = [[] for _ in range(ranks)]
    blocks = [[rank] for rank in range(ranks)]
    rounds = exchanges(ranks, way)
    assert len(rounds) == ROUNDS[way](ranks)
    for messages in rounds:
        sent = [list(block) for block in blocks]
        for target in range(ranks):
            received = [message for message in messages if message.target == target]
            if not received:
                continue
            others = [rank for source, *_ in received for rank in sent[source]]
            if received[0].source < target:
                before[target] = others + before[target]
            assert all(joined or source < target for source, _, joined in received), "a message is of use"
            if received[0].joined:
                first = received[0].source < target
                blocks[target] = others + sent[target] if first else sent[target] + others
    assert before == [list(range(rank)) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "way", "message"), [(0, "scan", "ranks is 0"), (2, "ring", "way is 'ring'")])
def test_exchanges_refuse(ranks: int, way: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exchanges(ranks, way)


@pytest.mark.parametrize("make", [linear, blelloch, cyclic_reduction, lambda n: chunked(n, 3)])
@pytest.mark.parametrize("n", [1, 2, 3, 8, 21, 64])
def test_values_are_made_when_first_read_and_dropped_after_their_last_use(
    make: Callable[[int], Schedule], n: int
) -> None:
    rng = np.random.default_rng(n)
    matrices, vector, read = [rng.normal(size=(3, 3)) / 2 for _ in range(n)], rng.normal(size=3), list[int]()
    schedule = make(n)

    def element(value: int) -> np.ndarray:
        read.append(value)
        return matrices[value - 1] if value else vector

    def multiply(_: object, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return left @ right

    values = run(schedule.live_steps(), multiply, element=element, kept=schedule.gradients)
    assert len(read) == len(set(read)) and values.keys() == set(schedule.gradients) - ({0} if n == 1 else set())
    for value, expected in zip(schedule.gradients, gradients(schedule, matrices, vector), strict=True):
        np.testing.assert_allclose(values.get(value, vector), expected, rtol=1e-12)


@pytest.mark.parametrize("n", [5, 21, 64])
def test_levels_are_as_many_as_the_steps_on_enough_workers(n: int) -> None:
    for schedule in (linear(n), blelloch(n), chunked(n, 1), chunked(n, 4), cyclic_reduction(n)):
        levels = list(by_level(schedule.live_steps()))
        assert all(not {step.out for step in level} & {f for s in level for f in (s.left, s.right)} for level in levels)
        assert sorted(str(step) for level in levels for step in level) == sorted(map(str, schedule.live_steps()))
    assert len(list(by_level(chunked(n, 4).live_steps()))) == chunked(n, 4).complexity(n).steps
