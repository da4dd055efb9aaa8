"""The planner: small cases by hand, the orders of the papers, and properties that hold for any costs."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from jacsparse.models import build
from jacsparse.patterns import Full, Pattern
from torch import nn

from jacsparse.simulation import (
    TRAINING_METHODS,
    AcrossRanks,
    GPipe,
    Interconnect,
    Job,
    Simulation,
    StageCost,
    Timetable,
    TrainingMethod,
    Workload,
    counted_workload,
    measured_workload,
    plan,
    run,
    simulate,
)
from jacsparse.simulation.pipelines import PipeDream
from jacsparse.simulation.training_method import OneWorker

SCALAR = Pattern.of(Full(1, 1))
#: Messages take no time.
FREE = Interconnect(0.0, math.inf)


def workload(
    n: int,
    forward: float = 1.0,
    errors: float = 1.0,
    gradients: float = 1.0,
    *,
    samples: int = 1,
    weights: int = 0,
    recurrent: bool = False,
) -> Workload:
    """Equal stages with one element, whose products take a second, at one byte for each number."""
    stages = [
        StageCost(forward, errors * (stage > 0), gradients, 0.0, samples, samples, weights, SCALAR)
        for stage in range(n)
    ]
    return Workload(tuple(stages), samples, samples, 2.0 * samples, 1, recurrent)


def uneven(n: int, seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    stages = [
        StageCost(*rng.uniform(0.1, 3, 3) * (1, stage > 0, rng.integers(2)), 0.0, 1, 1, 0, SCALAR) for stage in range(n)
    ]
    return Workload(tuple(stages), 1, 1, 2.0, 1)


def seconds(method: TrainingMethod, load: Workload, workers: int, interconnect: Interconnect = FREE) -> float:
    return method.plan(load, interconnect, workers)[0].seconds


def work(timetable: Timetable) -> float:
    return math.fsum(job.seconds for job in timetable.jobs)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    return float(np.polyfit(x, y, 1)[0])


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        # Four passes forward, three gradients of inputs and four of weights.
        ("bp", (11, 11, 11)),
        # Two blocks, two halves: 3 s forward, 3 + 3 + 2.5 s back, of which each begins with 1 s forward anew.
        ("gpipe", (15, 11.5, 6.75)),
        # The slowest block.
        ("1f1b", (11, 6, 3)),
        ("ddg", (11, 6, 3)),
        # One rank after the other.
        ("ranks", (11, 11, 11)),
    ],
    ids=str,
)
def test_four_equal_stages(method: str, expected: tuple[float, ...]) -> None:
    rows = plan(workload(4, samples=4), FREE, (1, 2, 4), [method]).methods[method]
    # Further workers are idle, so that there are no rows of them.
    times = [row.seconds for row in rows] + [rows[-1].seconds] * (3 - len(rows))
    assert times == pytest.approx(expected, rel=1e-12)


def test_messages_and_memory_by_hand() -> None:
    timetable = Timetable([100.0, 10.0])
    first = timetable.add(Job(0, 1.0, (), stored=8.0, sent=4.0))
    second = timetable.add(Job(1, 2.0, (first,), stored=2.0, scratch=5.0))
    third = timetable.add(Job(1, 1.0, (first,), stored=1.0))
    timetable.add(Job(0, 1.0, (second, third, first)))
    outcome = run(timetable, Interconnect(0.5, 8.0))
    # 1 s, a message of 0.5 + 4 / 8 s, 2 + 1 s, a message without bytes, 1 s; the second message comes earlier.
    assert outcome.seconds == 1 + 1 + 3 + 0.5 + 1
    # The message of 4 bytes is sent and stored once; the result of 2 bytes has no reader on worker 1.
    assert outcome.sent == 4 and outcome.memory == 108
    assert run(Timetable([10.0, 0.0], timetable.jobs), FREE).memory == 18
    assert run(Timetable([0.0, 10.0], timetable.jobs), FREE).memory == 10 + 4 + 2 + 5
    assert (
        run(Timetable([3.0]), FREE) == run(Timetable([3.0]), Interconnect()) and run(Timetable([]), FREE).seconds == 0
    )


def test_weights_are_stashed() -> None:
    load = workload(4, samples=10, weights=3)
    # Worker 0 of 4: gradients of weights; four batches' weights, results and inputs; a gradient that came, and its own.
    assert PipeDream().plan(load, FREE, 4)[0].memory == 3 + 4 * (3 + 10 + 10) + 10 + 10
    assert OneWorker().plan(load, FREE, 1)[0].memory == 4 * 2 * 3 + 5 * 10 + 10
    # A rank holds its stages' weights and their gradients.
    without = workload(4, samples=10)
    for workers, stages in ((1, 4), (2, 2), (4, 1)):
        memories = (AcrossRanks().plan(each, FREE, workers)[0].memory for each in (load, without))
        assert next(memories) - next(memories) == stages * 2 * 3


def test_the_slowest_stage_and_its_share() -> None:
    load = uneven(5, 0)
    times = [stage.forward + stage.errors + stage.gradients for stage in load.stages]
    assert load.slowest == ("", pytest.approx(max(times) / sum(times)))


@pytest.mark.parametrize("name", TRAINING_METHODS)
@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_more_workers_are_not_slower_where_messages_are_free(name: str, n: int) -> None:
    method, load = TRAINING_METHODS[name](), workload(n, samples=64)
    times = [seconds(method, load, min(2**power, method.most(load))) for power in range(6)]
    assert all(after <= before * (1 + 1e-12) for before, after in itertools.pairwise(times))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", TRAINING_METHODS)
def test_one_worker_takes_the_time_of_all_jobs(name: str, seed: int) -> None:
    load, method = uneven(9, seed), TRAINING_METHODS[name]()
    timetable = method.timetable(load, 1)
    iterations = max(1, len(timetable.ends))
    assert run(timetable, Interconnect()).seconds == pytest.approx(work(timetable) / iterations, rel=1e-12)
    if name != "gpipe":
        assert work(timetable) / iterations == pytest.approx(load.forward + load.backward, rel=1e-12)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("method", [AcrossRanks(("gather",)), AcrossRanks(("scan",)), GPipe()])
def test_no_run_beats_its_work_or_its_critical_path(method: TrainingMethod, workers: int) -> None:
    timetable = method.timetable(uneven(13, workers), workers)
    alone = Timetable(
        range(len(timetable.jobs)), [job._replace(worker=number) for number, job in enumerate(timetable.jobs)]
    )
    time, critical = run(timetable, FREE).seconds, run(alone, FREE).seconds
    assert time >= max(critical, work(timetable) / workers) * (1 - 1e-12)
    assert run(timetable, Interconnect(0.1, 10.0)).seconds >= time


def test_space_of_gpipe() -> None:
    """Θ(L/K + K), in results of a stage for one micro-batch of one sample."""
    depth, counts = 256, (2, 4, 8, 16, 32, 64, 128, 256)
    memory = [GPipe().plan(workload(depth, samples=k), FREE, k)[0].memory for k in counts]
    terms = np.array([(depth / k, k, 1) for k in counts])
    within, between, _ = np.linalg.lstsq(terms, np.array(memory), rcond=None)[0]
    assert within == pytest.approx(1, abs=1e-9) and between == pytest.approx(1, abs=1e-9)
    assert (
        slope(np.log2(counts[:3]), np.log2(memory[:3])) < -0.8
        and slope(np.log2(counts[-3:]), np.log2(memory[-3:])) > 0.8
    )


def simulated_times(forward: Sequence[float], backward: Sequence[float], iterations: int) -> list[float]:
    """When each iteration's last module ends, where a process for each module starts as soon as it can.

    A module's forward pass waits for the activations of the one before, and its backward pass for the gradient that
    the one behind made in the iteration before.
    """
    count = len(forward)
    free, sent, ends = [0.0] * count, [0.0] * count, []
    for _ in range(iterations):
        came, gradients = 0.0, list(sent)
        for k in range(count):
            came = max(free[k], came) + forward[k]
            free[k] = sent[k] = (came if k == count - 1 else max(came, gradients[k + 1])) + backward[k]
        ends.append(free[-1])
    return ends


@pytest.mark.parametrize("seed", range(4))
def test_pipelines_beside_their_own_simulations(seed: int) -> None:
    load = uneven(12, seed)
    for workers in (1, 2, 5, 12):
        blocks = [[load.stages[stage] for stage in block] for block in load.blocks(workers)]
        forward = [sum(stage.forward for stage in block) for block in blocks]
        backward = [sum(stage.errors + stage.gradients for stage in block) for block in blocks]
        times = simulated_times(forward, backward, iterations=100)
        expected = (times[-1] - times[49]) / 50
        for name in ("ddg", "1f1b"):
            assert seconds(TRAINING_METHODS[name](), load, workers) == pytest.approx(expected, rel=1e-9)
        assert expected == pytest.approx(max(map(sum, zip(forward, backward, strict=True))), rel=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_blocks_are_balanced(seed: int) -> None:
    load = uneven(8, seed)
    costs = [stage.forward + stage.errors + stage.gradients for stage in load.stages]

    def best(begin: int, workers: int) -> float:
        if workers == 1:
            return sum(costs[begin:])
        return min((max(sum(costs[begin:end]), best(end, workers - 1)) for end in range(begin + 1, 9)), default=0.0)

    for workers in range(1, 10):
        blocks = load.blocks(workers)
        assert [stage for block in blocks for stage in block] == list(range(8)) and 0 < len(blocks) <= workers
        assert max(sum(costs[s] for s in block) for block in blocks) == pytest.approx(best(0, workers), rel=1e-9)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))


def test_counted_costs() -> None:
    load = counted_workload(network(), torch.randn(7, 5), rate=2.0)
    assert [stage.forward for stage in load.stages] == [7 * 30, 7 * 6, 7 * 24, 7 * 4, 7 * 12]
    assert [stage.errors for stage in load.stages] == [0, 7 * 6, 7 * 24, 7 * 4, 7 * 12]
    assert [stage.gradients for stage in load.stages] == [7 * 30, 0, 7 * 24, 0, 7 * 12]
    assert [stage.weights for stage in load.stages] == [4 * 36, 0, 4 * 28, 0, 4 * 15]
    # What works in place stores nothing.
    assert [stage.stored for stage in load.stages] == [28 * 6, 28 * 6, 28 * 4, 0, 28 * 3]
    assert [stage.jacobian for stage in load.stages] == [15, 7 * 3, 12, 7 * 2, 6]
    assert load.input == 28 * 5 and load.before(2) == 28 * 6


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(
    "module",
    [network(), build("resnet8").eval(), nn.GRU(3, 4, batch_first=True), nn.LSTM(3, 4)],
    ids=lambda m: type(m).__name__,
)
def test_measured_costs(module: nn.Module, samples: int) -> None:
    shape = {nn.GRU: (samples, 6, 3), nn.LSTM: (6, samples, 3), nn.Sequential: (samples, 5)}
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x = torch.randn(shape.get(type(module), (samples, 3, 32, 32)))
    measured, counted = measured_workload(module, x, 0.0), counted_workload(module, x, 1e9)
    assert len(measured) == len(counted) and measured.samples == samples
    for one, other in zip(measured.stages, counted.stages, strict=True):
        assert (one.weights, one.stored, one.output) == (other.weights, other.stored, other.output)
        assert (
            one.forward > 0 and (one.errors > 0) == (other.errors > 0) and (one.gradients > 0) == (other.gradients > 0)
        )
    assert sum(stage.weights for stage in counted.stages) == sum(p.nbytes for p in module.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def simulated(**options: object) -> Simulation:
    return simulate(network(), torch.randn(4, 5), **{"rate": 1e9, "workers": (1, 2, 1024), **options})  # type: ignore[arg-type]


def test_files_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulated()
    monkeypatch.setenv("COLUMNS", "80")
    shown = str(simulation)
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80 and "Further" not in shown
    assert all(name in shown for name in TRAINING_METHODS) and "Fastest: " in shown
    simulation.save_json(tmp_path / "figures.json")
    simulation.plot(tmp_path / "figures.png")
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert figures["stages"] == 5 and {row["method"] for row in figures["rows"]} == {*TRAINING_METHODS}
    assert (tmp_path / "figures.png").stat().st_size > 1000 and "ranks" in repr(simulation)
    assert [row.workers for row in simulation.methods["bp"]] == [1]
    assert [row.workers for row in simulation.methods["gpipe"]] == [1, 2, 1024]


def test_conclusions() -> None:
    simulation = plan(workload(64, samples=64), Interconnect(0.0, 1e12), (1, 2, 64))
    assert simulation.fastest[-1][1] in ("1f1b", "ddg") and simulation.fastest_exact[-1][1] == "gpipe"
    method, workers, times = simulation.gain
    assert (method, workers) == ("gpipe", 64) and times > 1 and "Exact gradients are at most" in str(simulation)
    slow = plan(workload(64, samples=64), Interconnect(1e3, 1e12), (1, 64))
    assert slow.fastest == ((1, "bp"),) and slow.gain == ("bp", 1, 1.0)
    assert "No way to exact gradients is faster than back-propagation" in " ".join(str(slow).split())
    assert "1 stage, batch" in str(plan(workload(1), Interconnect(), (1,)))


def test_steps_that_share_weights() -> None:
    simulation = simulate(nn.RNN(2, 3), torch.randn(9, 4, 2), rate=1e9, workers=(1, 4))
    assert set(simulation.obstacles) == {"1f1b", "ddg"} and "share their weights" in str(simulation)
    # Two rounds in which four workers send each other the gradients of all weights.
    weights = 4 * (6 + 9 + 6)
    outcome = GPipe().plan(counted_workload(nn.RNN(2, 3), torch.randn(9, 4, 2), 1e9), FREE, 4)[0]
    activations = 2 * 3 * 4 * 3 * 4
    assert outcome.sent == 2 * 4 * weights + activations
    with pytest.raises(ValueError, match=r"No method can train it\. ddg is not possible"):
        simulate(nn.RNN(2, 3), torch.randn(9, 4, 2), rate=1e9, methods=["ddg"]).plot("none.png")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": (0,)}, r"workers is \(0,\); expected integers of at least 1"),
        ({"methods": "gpipe"}, "methods is 'gpipe'; expected a sequence"),
        ({"methods": ["pipe"]}, "method is 'pipe'; expected one of bp, ranks"),
        ({"methods": [["gpipe"]]}, r"method is \['gpipe'\]; expected one of bp, ranks"),
        ({"methods": ["gpipe", GPipe(2)]}, "methods are gpipe, gpipe; expected each name once"),
        ({"latency": -1.0}, r"latency is -1.0; expected seconds, at least 0"),
        ({"bandwidth": 0.0}, "bandwidth is 0.0; expected bytes per second above 0"),
        ({"rate": 0.0}, "rate is 0.0; expected FLOP per second above 0"),
    ],
)
def test_what_cannot_be_simulated(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulated(**options)


def test_options_of_methods() -> None:
    with pytest.raises(TypeError, match="workers is 3; expected integers"):
        simulated(workers=3)
    with pytest.raises(ValueError, match="microbatches is 0; expected an integer of at least 1"):
        GPipe(0)
    simulation = simulated(methods=[GPipe(8)])
    assert simulation.obstacles == {"gpipe": "8 micro-batches are more than the 4 samples of the mini-batch"}
    with pytest.raises(ValueError, match="the module has no stages"):
        simulate(nn.Flatten(), torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"x has shape \(9, 2\); expected a padded batch"):
        simulate(nn.RNN(2, 3), torch.randn(9, 2))
    for module, shape in ((nn.Linear(2, 3), (0, 2)), (nn.RNN(2, 3), (9, 0, 2))):
        with pytest.raises(ValueError, match="which is empty; pass at least one sample"):
            simulate(module, torch.randn(shape), rate=1e9)
    assert simulated(methods=["gpipe"]).gain is None


def test_large_products_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from jacsparse.simulation import workload as workload_module

    convolutions = nn.Sequential(*[nn.Conv2d(1, 1, 3, padding=1) for _ in range(8)])
    x = torch.randn(2, 1, 8, 8)
    exact = simulate(convolutions, x, rate=1e9, workers=(4,), methods=[AcrossRanks(("gather",))])
    monkeypatch.setattr(workload_module, "MOST", 1_000)
    bounded = simulate(convolutions, x, rate=1e9, workers=(4,), methods=[AcrossRanks(("gather",))])
    assert exact.rows[0].memory < bounded.rows[0].memory
    # Products of a chain's matrices are taken where they are asked for, those of a sequence's steps by default.
    (row,) = simulate(convolutions, x, rate=1e9, workers=(4,), methods=["ranks"]).rows
    assert row.choice == "linear"
    (row,) = simulate(nn.RNN(2, 3), torch.randn(64, 4, 2), rate=1e6, workers=(8,), latency=0.0, methods=["ranks"]).rows
    assert row.choice in ("gather", "scan")


@pytest.mark.parametrize("way", ["linear", "gather", "scan"])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_ranks_by_hand(way: str, count: int) -> None:
    """Blocks of two stages, two samples, products and messages of a second each: the critical path in words."""
    load = workload(2 * count, gradients=0.0)
    time = seconds(AcrossRanks((way,)), load, count, Interconnect(1.0, math.inf))
    # All ranks say how they were called; each rank goes forward; the last one goes back.
    before = math.ceil(math.log2(count)) + 2 * count + (count - 1)
    if way == "linear" or count < 3:
        assert time == before + 2 * count - 1 + (count - 1)
    elif way == "gather":
        # The first rank multiplies what all ranks between it and the last one have.
        assert time == before + 2 + 1 + (count - 2) + 1
    else:
        # In each round a message, and at most a product for the rank's block and one for what comes before it.
        rounds = math.ceil(math.log2(count))
        assert before + 2 + 2 * rounds - 1 <= time <= before + 2 + 3 * rounds


def test_ranks_wait_for_gradients_of_weights_in_chains_alone() -> None:
    """Six stages on three ranks: a chain's next rank waits for four gradients of weights, a sequence's for none."""
    chain, sequence = (
        seconds(AcrossRanks(("linear",)), workload(6, recurrent=recurrent), 3) for recurrent in (False, True)
    )
    assert (chain, sequence) == (6 + 5 + 6, 6 + 5 + 2)


def test_stages_that_couple_samples_have_no_matrix() -> None:
    net = nn.Sequential(
        *(layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6)))
    )
    simulation = simulate(net, torch.randn(8, 6), workers=(1, 2, 4), rate=1e9)
    evaluation = simulate(copy.deepcopy(net).eval(), torch.randn(8, 6), workers=(1,), rate=1e9)
    times = {row.method: row.seconds for row in simulation.rows if row.workers == 1}
    expected = {row.method: row.seconds for row in evaluation.rows}
    # In evaluation mode a normalisation is a diagonal, whose gradient takes as much.
    for method in ("bp", "1f1b", "ddg"):
        assert times[method] == pytest.approx(expected[method])
    assert "whose samples depend on each other" in simulation.obstacles["gpipe"]
    assert {row.choice for row in simulation.rows if row.method == "ranks"} == {"linear"}
