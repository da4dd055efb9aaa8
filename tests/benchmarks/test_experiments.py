"""Each experiment on something small: its rows, its picture, and peers that are missing or wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
import torch.distributed as dist
from jacsparse.models import BitstreamRNN, bitstreams
from jacsparse.spgemm import METHODS
from torch import nn
from torch.nn.utils import prune

import jacsparse
from benchmarks import _jacobians, _peers, _programs, host_path, spgemm, triangular_solvers
from benchmarks._context import Context, Limits
from benchmarks._experiment import Experiment
from benchmarks._jacobians import ASDEX, Case
from benchmarks._made_up_gpu import made_up_gpu
from benchmarks._peers import PEERS, Peer
from benchmarks._problems import PROBLEMS
from benchmarks._programs import JsonProgram
from benchmarks._ranks import on_ranks
from benchmarks._registry import EXPERIMENTS
from benchmarks._results import Result, read, write
from benchmarks._rows import Row
from benchmarks._workloads import Trained
from benchmarks.chunk_sweep import ChunkSweep
from benchmarks.ddg_convergence import DdgConvergence
from benchmarks.ddg_scaling import DdgScaling
from benchmarks.ddg_theory import DdgTheory
from benchmarks.dense_rivals import DenseRivals
from benchmarks.discretised_equations import DiscretisedEquations
from benchmarks.flop_analysis import FlopAnalysis
from benchmarks.gru_breakdown import GruBreakdown
from benchmarks.host_path import HostPath
from benchmarks.jacobian_generation import JacobianGeneration, printed_algorithms
from benchmarks.layer_calls import LayerCalls
from benchmarks.leapfrog import LeapfrogTimes
from benchmarks.lenet_convergence import LenetConvergence, loss_curves
from benchmarks.parallel_forward import ParallelForward
from benchmarks.rank_scan import ScansAcrossRanks
from benchmarks.recurrent_convergence import RecurrentConvergence, Task
from benchmarks.recurrent_shapes import RecurrentShapes
from benchmarks.rnn_sensitivity import RnnSensitivity
from benchmarks.simulation import SimulatedTraining
from benchmarks.solving import Solving
from benchmarks.sparse_jacobian import SparseJacobians
from benchmarks.sparse_kernels import SparseKernels
from benchmarks.sparse_networks import PrunedNetwork, SparseCrossover, SparseInference, SparseTraining
from benchmarks.spgemm import Spgemm
from benchmarks.stiff_equations import StiffEquations
from benchmarks.triangular_costs import TriangularCosts
from benchmarks.triangular_solvers import TriangularSolvers
from benchmarks.whole_jacobian import Network, WholeJacobian
from benchmarks.whole_programs import WholePrograms
from benchmarks.written_loops import WrittenLoops
from jacsparse import solvers


def small_network() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((2, 3), (3, 4), (4, 3), (3, 2)):
        convolution = nn.Conv2d(before, after, 3, padding=1)
        prune.l1_unstructured(convolution, "weight", 0.5)
        layers += [convolution, nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2))


SMALL_TASK = Task("bits", lambda: bitstreams(6, train=40, test=10), BitstreamRNN, 1e-2, 3, 0.9, 2.17)


def small_pruned(share: float = 0.9) -> nn.Module:
    return nn.Sequential(small_network(), nn.Flatten())


SMALL_PRUNED = PrunedNetwork("small", small_pruned, (3,), (2, 6, 6))


SMALL: list[Experiment] = [
    JacobianGeneration(size=6, columns=3),
    Spgemm(build=small_network, input_shape=(2, 6, 6), factors=(0, 2), batch=3),
    FlopAnalysis(build=lambda _: Trained(small_network(), torch.randn(2, 2, 6, 6), {"retrained": 0.9})),
    WholeJacobian(networks=(Network("small", small_network, (2, 6, 6), at_least=0.01),), chunks=(2, 64)),
    SparseJacobians(problems=(Case("burgers", 8, asdex=1.0, seconds=1.0),), compiled=False, processes=1),
    SparseTraining(networks=(SMALL_PRUNED,), compiled=False),
    SparseCrossover(shares=(0.5, 0.9), batches=(1, 3), build=small_pruned, input_shape=(2, 6, 6), seconds=0.1),
    SparseInference(networks=(SMALL_PRUNED,), compiled=False),
    DenseRivals(networks=(SMALL_PRUNED,)),
    SparseKernels(build=small_network, input_shape=(2, 6, 6), batches=(3,)),
    DiscretisedEquations(problems=(Case("power_flow", 5, at_most=1.5),), compiled=False),
    StiffEquations(sizes=(3, 4), most=3, end=0.05),
    Solving(batches=((3, 5),), lines=((6, 20),), grids=(3,), fields=(4,)),
    WholePrograms(sizes=((4,), (3,), (4, 9), (9,), (4,), (5,))),
    TriangularSolvers(depths=(2, 5), widths=(2, 3), batch=2, recurrent=((1, 3, 2), (2, 4, 3))),
    TriangularCosts(units=(2, 3), depths=(3, 5), samples=(1, 2, 3)),
    LeapfrogTimes(depths=(1, 5), widths=(2, 3), batch=2, most=2),
    DdgConvergence(
        side=8, batch=479, epochs=2, deep_epochs=1, splits=("pool",), modules=(3,), deep=("resnet8",), most=2
    ),
    DdgScaling(network="resnet8", modules=(2, 3), deeper=None, batch=2, side=8, iterations=1, most=2),
    DdgTheory(samples=10, units=4, runs=20, iterations=30, modules=(1, 2), lengths=(20, 40)),
    SimulatedTraining(layers=2, width=3, time=4, hidden=2, batch=2, workers=(1, 2, 64), depths=(4, 8), widths=(1, 3)),
    ScansAcrossRanks(
        ranks=(2,), sizes=(8, 1024), layers=2, width=3, batch=2, time=4, hidden=2, samples=2, cuts=((18, 19),)
    ),
    LenetConvergence(iterations=2, batch=4),
    RnnSensitivity(times=(3, 5), batches=(2, 16), time=5, others=(4,)),
    RecurrentShapes(sizes=(3, 40), times=(2, 70), batches=(1, 3)),
    GruBreakdown(sets=(("S", 5, 3), ("L", 7, 2)), batches=(2, 3)),
    ParallelForward(times=(6, 300), batch=2),
    LayerCalls(times=(4, 70), batch=2),
    ChunkSweep(times=(70,), chunks=(16, 32), batch=2),
    RecurrentConvergence(tasks=(SMALL_TASK, replace(SMALL_TASK, name="once more"))),
    WrittenLoops(time=12, batch=2, size=3),
    HostPath(kinds=(("RNN", 1),), times=(3, 2500), batches=(2,), equations=(("oregonator", 9),), scans=()),
]


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setattr(Context, "limits", Limits(1e10, 1e11))
    monkeypatch.setattr(spgemm, "_PAUSE", 0.0)
    return Context(seconds=0.002, rounds=1)


def test_each_experiment_has_a_small_form_here() -> None:
    assert [experiment.name for experiment in SMALL] == list(EXPERIMENTS)


#: Those whose small forms take long, too.
LONG = (
    "ddg_convergence",
    "ddg_scaling",
    "host_path",
    "rank_scan",
    "recurrent_shapes",
    "sparse_jacobian",
    "whole_programs",
)


@pytest.mark.parametrize(
    "experiment",
    [pytest.param(each, id=each.name, marks=[pytest.mark.full] if each.name in LONG else []) for each in SMALL],
)
def test_rows_can_be_kept_and_drawn(experiment: Experiment, context: Context, tmp_path: Path) -> None:
    rows = experiment.run(context)
    path = write(Result(experiment.name, "cpu", "today", 1.0, {}, context.limits, tuple(rows)), tmp_path)
    rows_read = read(path).rows
    # What a picture is drawn from may hold tuples, which come back as lists.
    assert [replace(row, data={}) for row in rows_read] == [replace(row, data={}) for row in rows]
    # A time by subtraction may come out below zero.
    assert all(row.median is not None for row in rows_read if not row.not_measured)
    assert all(row.median >= 0 for row in rows_read if "subtraction" not in row.label and not row.not_measured)
    experiment.figure(rows_read, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def _named(rows: list[Row], label: str) -> Row:
    return next(row for row in rows if row.label == label)


def test_jacobian_rows_give_size_and_ratios(context: Context) -> None:
    rows = JacobianGeneration(size=32, columns=1).run(context)
    sizes = [row for row in rows if row.label == "entries"]
    assert [row.median for row in sizes] == [1_696_512, 65_536, 65_536]
    sparsities = [row.median for row in rows if row.label == "sparsity" and row.median is not None]
    assert [round(sparsity, 5) for sparsity in sparsities] == [0.99157, 0.99998, 0.99994]
    memories = [row.median for row in rows if row.label.startswith("memory of")][:2]
    assert [round(memory or 0.0, 1) for memory in memories] == [768, 6.5]
    for label in ("values, kernel alone", "pattern and values, from nothing"):
        compared = [each for row in rows if row.label == label for each in row.comparisons]
        assert [each.published for each in compared if each.published] == [8.3e3, 1.2e6, 1.5e5]
        assert all(each.text.startswith("stacked /") for each in compared if each.published)


def test_a_wrong_jacobian_is_not_timed(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import jacobian_generation

    monkeypatch.setattr(jacobian_generation._Columns, "column", lambda self, _: torch.full_like(self.x, 7.0))
    rows = JacobianGeneration(size=4, columns=2).run(context)
    assert len(rows) == 3 and all("differs from autograd's" in row.not_measured for row in rows)


def test_a_wrong_whole_jacobian_is_not_timed(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    small = WholeJacobian(networks=(Network("small", small_network, (2, 6, 6)),), chunks=(2,))
    rows = small.run(context)
    assert [row.unit for row in rows] == ["s"] * 5 + ["MiB"] * 2 and not any(row.not_measured for row in rows)
    monkeypatch.setattr(torch.func, "jacrev", lambda *_, **__: lambda x: torch.ones(1, 2, 3, 3, 1, 2, 6, 6))
    with pytest.raises(ValueError, match="the Jacobian differs from autograd's by"):
        small.run(context)


def test_a_missing_peer_is_a_row_that_says_so(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> Peer:
        raise ImportError("peer is not installed: pip install peer")

    def wrong(a: Any, b: Any, context: Context) -> Peer:
        return Peer(lambda: a @ b, lambda product: 2 * product)

    monkeypatch.setitem(spgemm.PEERS, "cpu", {"missing": missing, "wrong": wrong})
    rows = Spgemm(build=small_network, input_shape=(2, 6, 6), factors=(0, 2), batch=2).run(context)
    assert _named(rows, "missing").not_measured == "peer is not installed: pip install peer"
    assert _named(rows, "wrong").not_measured.startswith("its product differs from ours by")
    assert _named(rows, "multiply, slots").comparisons == ()


def test_products_too_large_for_memory_are_left_out(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spgemm, "_available", lambda _: 1000)
    rows = Spgemm(build=small_network, input_shape=(2, 6, 6), factors=(0, 2), batch=2).run(context)
    assert "GiB" in _named(rows, "multiply, slots, batch 2").not_measured
    assert any(row.label.endswith(": multiply") and "GiB" in row.not_measured for row in rows)
    assert any(row.not_measured == "a factor was not made" for row in rows)


@pytest.fixture(scope="module")
def host_rows() -> list[Row]:
    """The counts of all calls, which no other work on the machine changes."""
    return HostPath(times=(10, 10_000)).run(Context(seconds=0.002, rounds=1))


def test_a_layer_s_call_is_a_few_nodes(host_rows: list[Row]) -> None:
    counted = [row for row in host_rows if row.data.get("layer") in ("", "two directions")]
    assert len(counted) == 72
    for row in counted:
        assert all(each.met for each in row.comparisons), (row.group, row.label, row.comparisons)
    jacobians = [row for row in host_rows if "equation" in row.data]
    assert len(jacobians) == 7 and all(each.met for row in jacobians for each in row.comparisons)
    timed = [row for row in host_rows if row.label.startswith("host time")]
    assert len(timed) == 12 and not any(row.not_measured for row in timed)


def test_a_product_s_call_is_one_node(host_rows: list[Row]) -> None:
    rows = [row for row in host_rows if "method" in row.data]
    assert {row.data["method"] for row in rows} == {*METHODS, "vectors"} and len(rows) == 22
    for row in rows:
        assert row.data["nodes"] == 1 and all(each.met for each in row.comparisons), (row.group, row.label, row.note)


def test_a_scan_of_a_pruned_network_does_not_wait(host_rows: list[Row]) -> None:
    forward, backward, _ = [row for row in host_rows if "network" in row.data]
    assert all(each.met for row in (forward, backward) for each in row.comparisons), (forward, backward)
    assert [row.data["waits"] for row in (forward, backward)] == [0, 0]
    assert [each.text for each in backward.comparisons] == ["waits", "nodes / products"]


def test_without_a_c_compiler_no_host_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="no C compiler, with which the made-up driver is built"), made_up_gpu():
        pass


def test_a_host_that_is_not_measured_says_why(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    program = partial(JsonProgram, [sys.executable, "-c", "raise RuntimeError('no C compiler')"])
    monkeypatch.setattr(host_path, "JsonProgram", lambda *_: program())
    (row,) = HostPath().run(context)
    assert row.not_measured == "RuntimeError: the program ended with 1: RuntimeError: no C compiler"


@pytest.mark.parametrize("label", PEERS["cpu"])
def test_peers_multiply_what_they_are_given(label: str) -> None:
    rng = np.random.default_rng(0)
    dense = [rng.random(shape) * (rng.random(shape) < 0.4) for shape in ((7, 9), (9, 5))]
    a, b = (scipy.sparse.csr_array(matrix.astype(np.float32)) for matrix in dense)
    try:
        peer = PEERS["cpu"][label](a, b, Context())
    except ImportError as error:
        pytest.skip(str(error))
    for _ in range(2):
        actual = peer.to_scipy(peer.multiply())
        assert np.allclose(actual.toarray(), (a @ b).toarray(), rtol=1e-5)


def test_structure_reuse_of_mkl_sees_new_values() -> None:
    from benchmarks import _mkl

    try:
        _mkl.library_path()
    except ImportError as error:
        pytest.skip(str(error))
    a = scipy.sparse.csr_array(np.array([[1.0, 2.0], [0.0, 3.0]], dtype=np.float32))
    product = _mkl.MklProduct(a, a.copy(), 1)
    a.data[:] = 10
    product.multiply()
    assert product.to_scipy().toarray().tolist() == [[10.0, 50.0], [0.0, 30.0]]
    with pytest.raises(TypeError, match="float32"):
        _mkl.MklProduct(a.astype(np.float64), a, 1)


def test_mkl_without_the_wheel_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ImportError, match="pip install mkl"):
        identity = scipy.sparse.eye_array(2, format="csr", dtype=np.float32)
        PEERS["cpu"][_peers.MKL_REUSE](identity, identity, Context())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-9)])
def test_scan_and_back_propagation_train_alike(dtype: torch.dtype, tolerance: float) -> None:
    curves = loss_curves(30, dtype, batch=32)
    assert list(curves) == ["back-propagation", "scan, blelloch", "back-propagation in another order"]
    baseline, scan, _ = curves.values()
    assert len(baseline.train) == len(scan.train) == 30 and len(scan.test) == 2
    assert max(abs(one - other) for one, other in zip(baseline.train, scan.train, strict=True)) <= tolerance
    assert len(set(scan.train)) == 30


def test_the_thesis_algorithms_give_the_jacobian() -> None:
    for shape in ((2, 4, 5), (1, 1, 1), (3, 2, 1)):
        module = nn.Conv2d(shape[0], 3, 3, padding=1)
        printed = printed_algorithms(module.weight.detach().numpy(), shape[1:])
        actual = jacsparse.jacobian(module, torch.randn(1, *shape)).todense()
        assert np.array_equal(printed.toarray().T, actual.numpy())


def test_say_hears_of_the_progress() -> None:
    heard: list[str] = []
    loss_curves(2, torch.float32, batch=2, say=heard.append)
    assert heard == ["iteration 1 of 2", "iteration 2 of 2"]


def test_trainings_as_published() -> None:
    published = DdgConvergence().on("cifar100:here")
    assert (published.data, published.side, published.batch, published.deep_epochs) == ("cifar100:here", 32, 128, 300)
    assert published.deep == ("resnet56", "resnet110") and published.augment


SMALL_EQUATION = Case("oregonator", 4, at_most=1.5)
#: A peer that takes a second, and whose values are in a file.
MADE_UP_PEER = """
import json, shutil, sys
shutil.copy(sys.argv[0] + ".npz", sys.argv[5])
print("a warning")
print(json.dumps({"first": 2.0, "colors": 9, "versions": "peer 1"}), flush=True)
for line in sys.stdin:
    print(json.dumps({"times": [1.0 if sys.argv[4] == "fwd" else 3.0], "runs": 1}), flush=True)
"""


@pytest.fixture
def made_up_asdex(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[float], None]:
    """A function that puts a program in asdex's place, whose values are ours times a factor."""

    def put(factor: float) -> None:
        path = tmp_path / "peer.py"
        path.write_text(MADE_UP_PEER)
        problem = PROBLEMS[SMALL_EQUATION.problem](SMALL_EQUATION.size, 1)
        matrix = jacsparse.jacobian(problem.f, *problem.args, batched=False).to_scipy().tocoo()
        np.savez(f"{path}.npz", rows=matrix.row, columns=matrix.col, values=factor * matrix.data)
        monkeypatch.setattr(_jacobians, "_PROGRAM", str(path))
        monkeypatch.setenv(ASDEX, sys.executable)

    return put


def test_the_faster_mode_of_asdex_is_the_peer(context: Context, made_up_asdex: Callable[[float], None]) -> None:
    made_up_asdex(1 + 1e-12)
    rows = DiscretisedEquations(problems=(SMALL_EQUATION,), compiled=False).run(context)
    assert [_named(rows, f"asdex, {mode} mode").median for mode in ("forward", "reverse")] == [1.0, 3.0]
    faster, eager, later = (
        _named(rows, label) for label in ("prepared, the faster of both", "prepared", "jacobian, later calls")
    )
    (of_both,), (eager_target, _), (of_later,) = faster.comparisons, eager.comparisons, later.comparisons
    assert of_both.ratio == eager.median and of_both.at_most == 1.5
    assert eager.median is not None and eager_target.ratio == pytest.approx(eager.median / (1.2 + 0.15e-3))
    gradient = _named(rows, "f with a gradient").median
    assert later.median is not None and gradient is not None
    assert of_later.ratio == pytest.approx(later.median / (3 * gradient + 0.15e-3))


def test_a_peer_with_other_values_is_not_timed(context: Context, made_up_asdex: Callable[[float], None]) -> None:
    made_up_asdex(1 + 1e-8)
    rows = DiscretisedEquations(problems=(SMALL_EQUATION,), compiled=False).run(context)
    row = _named(rows, "asdex, forward mode")
    assert (
        row.not_measured == "ValueError: its values differ from those of a prepared Jacobian by 1.0e-08 of the largest"
    )
    assert not _named(rows, "prepared, the faster of both").comparisons


def test_a_program_that_ends_says_why() -> None:
    program = JsonProgram([sys.executable, "-c", "print('{}', flush=True); input(); raise KeyError('no such thing')"])
    assert program.answer() == {}
    with pytest.raises(RuntimeError, match="the program ended with 1: KeyError: 'no such thing'"):
        program.answer(3.0)
    with pytest.raises(RuntimeError, match="the program ended with 1: it was not there to answer"):
        program.answer(3.0)
    program.close()


def test_a_program_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_programs, "ANSWER", 0.1)
    program = JsonProgram([sys.executable, "-c", "input()"])
    with pytest.raises(TimeoutError, match=r"the program did not answer in 0\.1 s"):
        program.answer()
    program.close()


@pytest.mark.full
def test_what_ranks_return_and_raise() -> None:
    assert on_ranks(_rank, 2, lambda _: None) == [10, 11]
    with pytest.raises(ZeroDivisionError):
        on_ranks(partial(_rank, divisor=0), 1, lambda _: None)


def _rank(say: Callable[[str], None], divisor: int = 1) -> int:
    return 10 + dist.get_rank() // divisor


def test_functions_take_turns() -> None:
    order: list[str] = []

    def record(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    results = Context(seconds=1e-6, rounds=3).times({"a": record("a"), "b": record("b")})
    turns = [name for name, before in zip(order, ["", *order[:-1]], strict=True) if name != before]
    assert turns == ["a", "b"] * 4
    assert all(timing.runs >= len(timing.seconds) >= 3 for timing in results.values())


def test_what_does_not_settle_has_no_figure(context: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(triangular_solvers._METHODS, "jacobi", solvers.Jacobi(limit=1))
    experiment = TriangularSolvers(depths=(5,), widths=(3,), batch=2, pruned=0.0, recurrent=())
    rows = experiment.run(context)
    (row, *_) = [row for row in rows if row.label == "jacobi"]
    assert row.median is None and row.data["multiply_adds_until_done"] is None and row.data["steps"] == 2
    experiment.figure(rows, tmp_path / "figure.png")


def test_counts_beside_the_paper_s_equations(context: Context) -> None:
    """For one sample they are near each other; for as many as units, products count for each."""
    rows = TriangularCosts(units=(16,), depths=(15,), samples=(1, 16)).run(context)
    ratios = {
        (row.data["what"].partition(",")[0], row.label.rpartition(" ")[2]): row.comparisons[0].ratio for row in rows
    }
    for equation, one, many in (("43", 1.06, 9.0), ("44", 0.73, 2.1), ("45", 0.64, 8.3), ("42", 1, 1), ("46", 1, 1)):
        assert ratios[f"equation {equation}", "1"] == pytest.approx(one, rel=0.02)
        assert ratios[f"equation {equation}", "16"] == pytest.approx(many, rel=0.02)
    memory = [row.median for row in TriangularCosts(units=(8,), depths=(15,), samples=(1, 16)).run(context)]
    assert 896 in memory and 14_336 in memory
