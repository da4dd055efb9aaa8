"""What is measured on CUDA devices, on one that is made up: all that comes before and after the device's own work."""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import nn

import jacsparse
from benchmarks import _calls, _context, _peers, jacobian_generation
from benchmarks._calls import GRAPH, block_times, captured, full_precision, in_mode
from benchmarks._context import Context, Limits, Timing
from benchmarks._experiment import Experiment
from benchmarks._jacobians import PREPARED, Case
from benchmarks._peers import PEERS
from benchmarks._recurrent import OURS, PEER, Layer, RecurrentCase, RecurrentWorkload
from benchmarks._results import Result, read, write
from benchmarks._rows import Row
from benchmarks.chunk_sweep import ChunkSweep
from benchmarks.discretised_equations import DiscretisedEquations
from benchmarks.gru_breakdown import GruBreakdown
from benchmarks.jacobian_generation import JacobianGeneration
from benchmarks.layer_calls import LayerCalls
from benchmarks.parallel_forward import ParallelForward
from benchmarks.rnn_sensitivity import RnnSensitivity
from benchmarks.spgemm import Spgemm
from benchmarks.whole_jacobian import Network, WholeJacobian
from jacsparse.runtime import intercepted
from tests.benchmarks.made_up import Device, device
from tests.benchmarks.test_experiments import small_network
from tests.cuda.fibers import COMPILER
from tests.cuda.harness import emulated


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    return device(monkeypatch)


@pytest.fixture
def context(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> Context:
    """To measure on the made-up device, whose memory is the CPU's."""
    monkeypatch.setattr(Context, "limits", Limits(1e10, 1e11))
    monkeypatch.setattr(Context, "place", "cpu")
    monkeypatch.setattr(_calls, "_BLOCK", 1e-6)
    monkeypatch.setitem(sys.modules, "cupyx", types.ModuleType("cupyx"))
    monkeypatch.setitem(sys.modules, "cupyx.scipy", types.ModuleType("cupyx.scipy"))
    sparse: Any = types.ModuleType("cupyx.scipy.sparse")
    sparse.csr_matrix = CupyMatrix
    monkeypatch.setitem(sys.modules, "cupyx.scipy.sparse", sparse)
    monkeypatch.setitem(sys.modules, "nvmath.bindings.cusparse", None)
    return Context("cuda", seconds=1e-6, rounds=1)


class CupyMatrix:
    """CuPy's CSR matrix, made of SciPy's."""

    def __init__(self, matrix: Any) -> None:
        assert scipy.sparse.issparse(matrix)
        self.matrix = matrix

    def __matmul__(self, other: CupyMatrix) -> CupyMatrix:
        return CupyMatrix(self.matrix @ other.matrix)

    def get(self) -> Any:
        return self.matrix


def test_blocks_fill_the_time_between_two_events(gpu: Device) -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        # Of the device's time.
        gpu.now += 2e-3

    times, runs = block_times(call, 0.02)
    # One to see how long it takes, and then blocks of three.
    assert runs == 3 * len(times) == len(calls) - 1
    assert len(times) == 4 and all(time == pytest.approx(2e-3, rel=0.2) for time in times)


def test_a_call_that_takes_no_time_ends(gpu: Device) -> None:
    times, runs = block_times(lambda: None, 1e-6)
    assert times and runs >= len(times) and min(times) > 0


def test_a_capture_warms_up_on_its_stream_and_replays_run_nothing(gpu: Device) -> None:
    def make() -> Callable[[], None]:
        gpu.log.append("make")
        return lambda: gpu.log.append(f"run {gpu.mode}")

    replay = captured(make)
    warm = ["stream", "make", *3 * ["run default"], "run error", "end of stream"]
    assert gpu.log == [*warm, "capture", "run default"] and gpu.mode == "default"
    gpu.log.clear()
    replay()
    assert gpu.log == ["replay"]


def test_what_waits_for_the_device_is_not_captured(gpu: Device) -> None:
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        captured(lambda: gpu.synchronise)
    assert "capture" not in gpu.log and gpu.mode == "default"


def test_a_capture_that_fails_says_what_failed_first(gpu: Device) -> None:
    def call() -> None:
        if gpu.capturing:
            gpu.synchronise()

    with pytest.raises(RuntimeError, match="its capture failed: operation not permitted when stream is capturing"):
        captured(lambda: call)


def test_a_call_is_made_when_it_first_runs(gpu: Device) -> None:
    call = in_mode(lambda: lambda: gpu.log.append("run"), "eager")
    assert not gpu.log
    call()
    call()
    assert gpu.log == ["run", "run"]
    replayed = in_mode(lambda: lambda: None, GRAPH)
    gpu.log.clear()
    replayed()
    replayed()
    assert gpu.log.count("capture") == 1 and gpu.log[-2:] == ["replay", "replay"]


def test_everybodys_arithmetic_is_float32() -> None:
    before = torch.backends.cudnn.allow_tf32
    try:
        full_precision()
        assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_a_function_that_fails_leaves_the_others() -> None:
    said: list[str] = []
    tries: list[int] = []

    def later() -> None:
        tries.append(1)
        if len(tries) > 1:
            raise ValueError("not twice\nat all")

    actual = Context(seconds=1e-6, rounds=2, say=said.append).times(
        {"never": lambda: 1 / 0, "once": later, "well": lambda: None}
    )
    assert actual["never"].problem == "ZeroDivisionError: division by zero"
    assert actual["once"].problem == "ValueError: not twice" and not actual["once"].seconds
    assert actual["well"].runs and not actual["well"].problem
    assert any(line.startswith("well: first run, with compiling, took") for line in said)
    row = Row.timed("never", actual["never"], group="some", role="peer")
    assert (row.not_measured, row.group, row.role, row.median) == (actual["never"].problem, "some", "peer", None)
    assert actual["well"].less(actual["never"]).problem == actual["never"].less(actual["well"]).problem != ""


def test_when_time_is_over_the_rest_is_not_measured() -> None:
    actual = Context(seconds=1e-6, until=0.0).times({"late": lambda: pytest.fail("it ran")})
    assert actual["late"].problem == "TimeoutError: the experiment's time was over"


def test_limits_are_the_devices(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "place", "meta")
    monkeypatch.setattr(_context, "block_times", lambda function, seconds: (function(), ([0.5, 0.25], 2))[1])
    limits = Context("cuda").limits
    assert limits.copy_bandwidth == 2 * 4 * 2**28 / 0.25 and limits.peak_flop == 2 * 8192**3 / 0.25
    monkeypatch.setattr(Context, "times", lambda *_: {"copy": Timing([], 0, "CUDA error: out of memory")})
    with pytest.raises(RuntimeError, match="out of memory"):
        _ = Context("cuda").limits


SMALL: list[Experiment] = [
    JacobianGeneration(size=6, columns=3),
    WholeJacobian(networks=(Network("small", small_network, (2, 6, 6), at_least=0.01),), chunks=(2, 64)),
    Spgemm(build=small_network, input_shape=(2, 6, 6), factors=(0, 2), batch=3),
    RnnSensitivity(
        times=(3, 5), batches=(2, 16), time=5, others=(4,), scheduled=(5,), schedules=("sequential", "chunked:2")
    ),
    GruBreakdown(sets=(("S", 5, 3), ("L", 7, 2)), batches=(2, 16)),
    ParallelForward(times=(6, 300), batch=2),
    LayerCalls(times=(4, 70), batch=2),
    ChunkSweep(times=(70,), chunks=(16, 32), batch=2),
]


#: Those whose small forms take long, too, as the harness runs device code on the CPU.
LONG = ("rnn_sensitivity", "gru_breakdown", "parallel_forward")


@pytest.mark.parametrize(
    "experiment",
    [pytest.param(each, id=each.name, marks=[pytest.mark.full] if each.name in LONG else []) for each in SMALL],
)
def test_rows_can_be_kept_and_drawn(experiment: Experiment, context: Context, tmp_path: Path) -> None:
    assert "cuda" in experiment.devices
    rows = experiment.run(context)
    machine = {"gpu": {"name": "Made Up"}}
    path = write(Result(experiment.name, "cuda", "today", 1.0, machine, context.limits, tuple(rows)), tmp_path)
    assert path.name == f"{experiment.name}.made-up.json"
    rows_read = read(path).rows
    missing = [row for row in rows_read if row.not_measured]
    # All but one peer, which is not installed.
    assert all("nvmath-python is not installed" in row.not_measured for row in missing)
    assert len(missing) == (experiment.name == "spgemm")
    experiment.figure(rows_read, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


@pytest.mark.full
@pytest.mark.parametrize("experiment", SMALL[2:], ids=lambda experiment: experiment.name)
def test_a_picture_of_what_was_not_captured(experiment: Experiment, context: Context, tmp_path: Path) -> None:
    rows = [
        row if GRAPH not in row.label else Row.missing(row.label, "no", group=row.group, role=row.role, data=row.data)
        for row in experiment.run(context)
    ]
    experiment.figure(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_discretised_equations_on_a_device(context: Context) -> None:
    rows = DiscretisedEquations((Case("power_flow", 5),), compiled=False).run(context)
    medians = {row.label: row.median for row in rows}
    assert medians[PREPARED] is not None and medians["jacobian, later calls"] is not None


def _ratios(rows: list[Row], label: str) -> dict[str, float | None]:
    (row,) = (row for row in rows if row.label == label)
    return {comparison.text: comparison.at_least for comparison in row.comparisons}


def _all_alike(monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
    """Every function takes a second, but for some."""
    monkeypatch.setattr(
        Context,
        "times",
        lambda self, functions, **_: {label: Timing([times.get(label, 1.0)], 1) for label in functions},
    )


def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers' gradients are right."""

    def checked(self: RecurrentWorkload, context: Context, layers: Any) -> Any:
        return dict.fromkeys(layers, ""), {layer: {} for layer in layers}

    monkeypatch.setattr(RecurrentWorkload, "_checked", checked)


def test_targets_of_schedules_are_those_of_their_fastest_chunks(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = "backward pass, loss on the last state"
    _all_alike(monkeypatch, {f"{label}, jacsparse chunked:64, CUDA graph": 0.5})
    _unchecked(monkeypatch)
    rows = RnnSensitivity(times=(30_000,), batches=(), others=()).run(context)
    target = {"torch.nn / jacsparse chunked:64": 60.0}
    assert _ratios(rows, f"{label}, jacsparse chunked:64, CUDA graph") == target
    assert _ratios(rows, f"{label}, jacsparse chunked, CUDA graph") == {"torch.nn / jacsparse chunked": None}
    wanted = [
        (comparison.at_least, GRAPH in row.label)
        for row in rows
        for comparison in row.comparisons
        if comparison.at_least
    ]
    assert sorted(wanted) == [(60.0, False), (60.0, True), (200.0, False), (200.0, True)]
    assert _ratios(rows, "training step, jacsparse, eager") == {"torch.nn / jacsparse": None}


def test_targets_of_the_gru_and_of_the_parallel_forward_pass(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    _all_alike(monkeypatch, {})
    _unchecked(monkeypatch)
    rows = GruBreakdown(batches=(16, 32)).run(context)
    wanted = [
        (row.data["part"], comparison.at_least, row.data["mode"])
        for row in rows
        for comparison in row.comparisons
        if comparison.at_least and row.data["set"] == "L" and row.data["batch"] == 16
    ]
    assert wanted == [
        (part, target, mode)
        for part, reached in (("backward", 13.45), ("step", 2.11))
        for mode in ("eager", GRAPH)
        for target in (reached, 3 * reached)
    ]
    rows = ParallelForward().run(context)
    targets = {
        (row.data["kind"], row.data["time"], row.data["part"], comparison.at_least)
        for row in rows
        for comparison in row.comparisons
        if comparison.at_least
    }
    assert targets == {("RNN", 30_000, "step", 10.0)}
    (row,) = (
        row for row in rows if row.label == "forward pass, jacsparse newton, eager" and "RNN, T = 1,000" in row.group
    )
    assert [comparison.text for comparison in row.comparisons] == [
        "torch.nn / jacsparse newton",
        "jacsparse sequential / jacsparse newton",
    ]


def test_targets_of_products_are_those_of_the_fastest_method(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    cusparse(monkeypatch)
    # The time of planning is keyed by the method alone.
    _all_alike(monkeypatch, {"multiply, rowwise, eager": 0.1, "multiply, merge, CUDA graph": 0.1})
    rows = Spgemm(build=small_network, input_shape=(2, 6, 6), factors=(0, 2), batch=3).run(context)
    eager, graph = (_ratios(rows, f"multiply, {name}") for name in ("rowwise, eager", "merge, CUDA graph"))
    assert eager == {"cuSPARSE / rowwise": 5.0, "SpGEMMreuse / rowwise": 2.0}
    assert graph == {"cuSPARSE, eager / merge": 5.0, "SpGEMMreuse / merge": 2.0}
    assert set(_ratios(rows, "multiply, merge, eager").values()) == {None}
    assert any(row.label == f"{_peers.CUSPARSE_REUSE}, {GRAPH}" for row in rows)
    assert not any(row.label == f"{_peers.CUSPARSE}, {GRAPH}" for row in rows)


def _rows_of_parts(context: Context, workload: RecurrentWorkload, parts: list[str], layer: Layer) -> dict[str, Row]:
    """Rows of a layer and of PyTorch's, by label."""
    labels = {part: (part, part) for part in parts}
    rows = ParallelForward().measure(RecurrentCase(workload, [(parts, (layer, PEER))], labels, {}), context)
    return {row.label: row for row in rows}


def test_a_layer_whose_gradients_are_wrong_is_not_timed(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = RecurrentWorkload._classifier

    def wrong(self: RecurrentWorkload, layer: Layer, place: str) -> Any:
        model, x, labels = classifier(self, layer, place)
        if layer == OURS:
            with torch.no_grad():
                model.rnn.weight_hh_l0 *= 2
        return model, x, labels

    monkeypatch.setattr(RecurrentWorkload, "_classifier", wrong)
    rows = _rows_of_parts(context, RecurrentWorkload("RNN", 5, 2, 1), ["backward"], OURS)
    assert "gradients of rnn.weight_ih_l0 differ" in rows["backward, jacsparse, eager"].not_measured
    assert not rows["backward, torch.nn, CUDA graph"].not_measured


def test_without_pytorchs_layer_ours_is_not_compared(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = RecurrentWorkload._classifier

    def missing(self: RecurrentWorkload, layer: Layer, place: str) -> Any:
        if layer == PEER:
            raise RuntimeError("cuDNN error")
        return classifier(self, layer, place)

    monkeypatch.setattr(RecurrentWorkload, "_classifier", missing)
    rows = _rows_of_parts(context, RecurrentWorkload("RNN", 5, 2, 1), ["step"], OURS)
    assert rows["step, torch.nn, eager"].not_measured == "RuntimeError: cuDNN error"
    assert "nothing to compare with" in rows["step, jacsparse, eager"].not_measured


def test_what_a_layer_did_is_said_beside_its_times(context: Context) -> None:
    layer = Layer("jacsparse relaxed", "relaxed", "relaxed")
    rows = _rows_of_parts(context, RecurrentWorkload("RNN", 300, 2, 1), ["step", "backward"], layer)
    step, backward = (rows[f"{part}, jacsparse relaxed, eager"].note for part in ("step", "backward"))
    assert step.startswith("forward relaxed, ") and "; backward relaxed" in step
    assert backward.startswith("backward relaxed")
    assert rows["step, torch.nn, eager"].note == ""
    assert layer.family == "relaxed" and Layer("", "chunked:16").family == "chunked"


@pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels with")
def test_kernels_of_a_device_are_run_again_and_left_out() -> None:
    with emulated():
        (record,) = jacsparse.chain(nn.ReLU(), (2, 3, 3)).run(torch.randn(1, 2, 3, 3))
        (edge,) = record.stage.edges
        computed: list[torch.Tensor] = []
        runs = jacobian_generation._kernel_runs(lambda: computed.append(record.transposed_values(edge)))
        assert len(runs) == 1
        expected = computed[0].clone()
        computed[0].fill_(7)
        runs[0]()
        assert torch.equal(computed[0], expected)
        runs.clear()
        with intercepted(runs.append):
            jacobian_generation._without_kernels(record.transposed_jacobian)()
        assert not runs


def test_a_column_may_differ_by_rounding_on_a_device(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    column = jacobian_generation._Columns.column
    for factor, fits in ((1 + 1e-6, True), (1 + 1e-4, False)):
        monkeypatch.setattr(
            jacobian_generation._Columns, "column", lambda self, number, factor=factor: column(self, number) * factor
        )
        rows = JacobianGeneration(size=4, columns=2).run(context)
        assert all(("differs from autograd's" in row.not_measured) != fits for row in rows)


class Cusparse:
    """nvmath's bindings of cuSPARSE, made up on the CPU's memory: matrices are read from where the pointers point."""

    class Operation:
        NON_TRANSPOSE = 0

    class SpGEMMAlg:
        DEFAULT = 0

    class IndexType:
        INDEX_32I = 2

    class IndexBase:
        ZERO = 0

    def __init__(self) -> None:
        self.matrices: dict[int, list[Any]] = {}
        self.destroyed: list[int] = []
        self.streams: list[int] = []
        self.symbolic = 0

    def create(self) -> int:
        return 1

    def sp_gemm_create_descr(self) -> int:
        return 2

    def destroy(self, handle: int) -> None:
        self.destroyed.append(handle)

    sp_gemm_destroy_descr = destroy_sp_mat = destroy

    def set_stream(self, handle: int, stream: int) -> None:
        assert handle == 1
        self.streams.append(stream)

    def create_csr(self, rows: int, columns: int, nnz: int, *rest: int) -> int:
        *pointers, starts, indices, base, dtype = rest
        assert (starts, indices, base, dtype) == (2, 2, 0, 0)
        self.matrices[len(self.matrices) + 10] = [(rows, columns), nnz, pointers]
        return len(self.matrices) + 9

    def csr_set_pointers(self, matrix: int, *pointers: int) -> None:
        self.matrices[matrix][2] = pointers

    def sp_mat_get_size(self, matrix: int) -> tuple[int, int, int]:
        (rows, columns), nnz, _ = self.matrices[matrix]
        return rows, columns, nnz

    def arrays(self, matrix: int) -> list[np.ndarray]:
        (rows, _), nnz, pointers = self.matrices[matrix]
        return [
            np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(kind)), (size,))
            for pointer, kind, size in zip(
                pointers, (ctypes.c_int, ctypes.c_int, ctypes.c_float), (rows + 1, nnz, nnz), strict=True
            )
        ]

    def product(self, a: int, b: int) -> scipy.sparse.csr_array:
        def matrix(number: int) -> scipy.sparse.csr_array:
            starts, indices, values = self.arrays(number)
            return scipy.sparse.csr_array((values, indices, starts), shape=self.matrices[number][0])

        actual = matrix(a) @ matrix(b)
        actual.sort_indices()
        return actual

    def sp_gemm_reuse_work_estimation(self, handle: int, *rest: int) -> int:
        *_, descriptor, buffer = rest
        assert (handle, descriptor) == (1, 2) and len(rest) == 8
        return 0 if buffer else 16

    def sp_gemm_reuse_nnz(self, *rest: int) -> tuple[int, int, int]:
        _, _, _, a, b, c, _, _, *buffers = rest
        assert len(buffers) == 3 and len({bool(buffer) for buffer in buffers}) == 1
        if buffers[0]:
            self.symbolic += 1
            self.matrices[c][1] = self.product(a, b).nnz
        # One of them none: the address must be one nevertheless.
        return 16, 0, 8

    def sp_gemm_reuse_copy(self, *rest: int) -> int:
        _, _, _, a, b, c, _, _, buffer = rest
        if buffer:
            actual, (starts, indices, _) = self.product(a, b), self.arrays(c)
            starts[:], indices[:] = actual.indptr, actual.indices
        return 4

    def sp_gemm_reuse_compute(self, *rest: int) -> None:
        handle, _, _, alpha, a, b, beta, c, dtype, _, descriptor = rest
        assert (handle, dtype, descriptor) == (1, 0, 2)
        factors = [ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))[0] for pointer in (alpha, beta)]
        assert factors == [1, 0]
        self.arrays(c)[2][:] = self.product(a, b).data


def cusparse(monkeypatch: pytest.MonkeyPatch) -> Cusparse:
    library = Cusparse()
    monkeypatch.setitem(sys.modules, "nvmath.bindings.cusparse", library)  # type: ignore[arg-type]
    for name in ("nvmath", "nvmath.bindings"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return library


def random_factors() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    dense = [rng.random(shape) * (rng.random(shape) < 0.4) for shape in ((7, 9), (9, 5))]
    a, b = (scipy.sparse.csr_array(matrix.astype(np.float32)) for matrix in dense)
    return a, b


@pytest.mark.parametrize("label", PEERS["cuda"])
def test_peers_multiply_what_they_are_given(label: str, context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    library = cusparse(monkeypatch)
    a, b = random_factors()
    expected = (a @ b).toarray()
    peer = PEERS["cuda"][label](a, b, context)
    for _ in range(2):
        assert np.allclose(peer.to_scipy(peer.multiply()).toarray(), expected, rtol=1e-5)
    if peer.capturable:
        assert library.symbolic == 1 and set(library.streams) == {7}
        del peer
        assert sorted(library.destroyed) == [1, 2, 10, 11, 12]


def test_structure_reuse_refuses_other_types(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    cusparse(monkeypatch)
    a, b = random_factors()
    with pytest.raises(TypeError, match="float32 values and int32 indices"):
        PEERS["cuda"][_peers.CUSPARSE_REUSE](a.astype(np.float64), b, context)


def test_structure_reuse_without_nvmath_says_how_to_get_it(context: Context) -> None:
    with pytest.raises(ImportError, match=r"nvmath-python is not installed .*: pip install 'nvmath-python\[cu1\d\]'"):
        PEERS["cuda"][_peers.CUSPARSE_REUSE](*random_factors(), context)


def test_a_peer_that_fails_is_a_row_that_says_so(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> Any:
        raise RuntimeError("CUSPARSE_STATUS_INSUFFICIENT_RESOURCES\nand more")

    monkeypatch.setitem(PEERS, "cuda", {_peers.CUSPARSE: failing})
    rows = Spgemm(build=small_network, input_shape=(2, 6, 6), factors=(0, 2), batch=2).run(context)
    reasons = {row.not_measured for row in rows if row.role == "peer"}
    assert reasons == {"RuntimeError: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES"}
    assert replace(rows[0], comparisons=()).median
