"""Which layers are sparse, by their sizes and by times that are made up."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from jacsparse.sparse import SparseConv2d, SparseLinear, SparseModel, conversion, costs, freeze, sparsify
from jacsparse.sparse.costs import Use, expected_seconds

from ..helpers import close, made_up_runs


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is expected depends on the number of threads."""
    monkeypatch.setattr(costs, "thread_count", lambda: 2)


#: Runs in which threads wait for a processor most of the time.
STALLED = (0.016, 0.015)


def pruned_network(share: float) -> nn.Module:
    """Two convolutions that are faster sparse with 95 % of their weights pruned, and slower with 20 %."""
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3))
    for layer in (model[0], model[3]):
        prune.l1_unstructured(layer, "weight", share)
    return model.eval()


X = torch.linspace(-1, 1, 64 * 32 * 32).view(1, 64, 32, 32)


def choices(model: SparseModel) -> list[bool]:
    return [layer.is_sparse for layer in model.report().layers]


def is_sparse(model: SparseModel) -> list[bool]:
    return [isinstance(model.model[place], SparseConv2d) for place in (0, 3)]


@pytest.mark.parametrize(("share", "expected"), [(0.95, True), (0.2, False)])
@pytest.mark.parametrize("training", [False, True])
def test_a_busy_machine_decides_by_sizes(
    monkeypatch: pytest.MonkeyPatch, share: float, expected: bool, training: bool
) -> None:
    # Whatever stalled runs say.
    for dense, sparse in ((STALLED, 0.4), (0.001, STALLED), (STALLED, STALLED)):
        made_up_runs(monkeypatch, [dense], [sparse])
        model = sparsify(pruned_network(share), X, training=training)
        assert choices(model) == is_sparse(model) == [expected, expected]
        report = model.report()
        assert all(layer.reason.endswith("by its sizes; this machine is busy") for layer in report.layers)
        assert all(layer.reason.startswith("sparse is ") is not expected for layer in report.layers)
        whole = "sparse by its sizes" if expected else "no layer is sparse by its sizes"
        assert report.reason == f"{whole}; this machine is busy: rerun, or measure=False"
        assert (" busy" in str(report) and "±" in str(report)) or dense == sparse


@pytest.mark.parametrize(("share", "dense", "sparse", "expected"), [
    (0.95, 0.010, 0.005, True), (0.95, 0.010, 0.0095, True), (0.95, 0.010, 0.012, False),
    (0.2, 0.010, 0.005, True), (0.2, 0.010, 0.0095, False), (0.2, 0.010, 0.012, False),
])  # fmt: skip
def test_only_a_clear_difference_overrules_the_sizes(
    monkeypatch: pytest.MonkeyPatch, share: float, dense: float, sparse: float, expected: bool
) -> None:
    made_up_runs(monkeypatch, [dense, 3 * dense], [2 * sparse, sparse])
    model = sparsify(pruned_network(share), X)
    assert choices(model) == is_sparse(model) == [expected, expected]
    for layer in model.report().layers:
        assert layer.dense.fastest == dense and layer.sparse.fastest == sparse
        assert f"{dense / sparse:.1f} times as fast as dense, by its sizes " in layer.reason
    if expected:
        assert model.report().reason == f"{dense / sparse:.1f} times as fast with sparse layers"


@pytest.mark.parametrize("sparse", [0.015, 0.0101])
def test_a_model_that_is_slower_stays_dense(sparse: float, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up_runs(monkeypatch, [0.1] * 6 + [0.010], [0.05] * 6 + [sparse])
    model = sparsify(pruned_network(0.95), X)
    assert choices(model) == is_sparse(model) == [False, False]
    assert model.report().reason == "slower with sparse layers, and so all are dense"
    assert {layer.reason for layer in model.report().layers} == {"faster by itself, and the whole model is not"}


def small_layers() -> nn.Module:
    """Layers that are faster sparse by themselves, with dense ones and small operators between them."""
    model = nn.Sequential()
    for _ in range(4):
        depthwise = nn.Conv2d(128, 128, 3, padding=1, groups=128)
        model.extend([nn.Conv2d(128, 128, 1), nn.BatchNorm2d(128), nn.ReLU6(), depthwise])
        prune.l1_unstructured(model[-4], "weight", 0.98)
    return model.eval()


@pytest.mark.parametrize("batch", [1, 8])
def test_a_busy_machine_counts_what_happens_between_layers(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up_runs(monkeypatch, [STALLED], [0.002])
    x = torch.randn(batch, 128, 56 // batch, 14)
    report = sparsify(small_layers(), x).report()
    pruned = [layer for layer in report.layers if layer.left < layer.total]
    assert all(layer.expected[0] >= 1.25 * layer.expected[1] for layer in pruned)
    assert (
        report.reason == "too little is gained to be sparse by its sizes; this machine is busy: rerun, or measure=False"
    )
    assert not any(layer.is_sparse for layer in report.layers)
    # Clear measurements are believed.
    made_up_runs(monkeypatch, [0.010], [0.005])
    assert sparsify(small_layers(), x).report().reason == "2.0 times as fast with sparse layers"


def test_layers_of_equal_sizes_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = made_up_runs(monkeypatch, [0.010], [0.005])
    layers = sparsify(small_layers(), X.view(1, 128, 16, 32)).report().layers
    # Three turns or more of one layer both ways, and of the model.
    alone = runs()
    pruned = [layer for layer in layers if layer.left < layer.total]
    assert len(pruned) == 4 and len({(layer.reason, layer.dense, layer.sparse) for layer in pruned}) == 1
    runs = made_up_runs(monkeypatch, [0.010], [0.005])
    sparsify(small_layers()[:4], X.view(1, 128, 16, 32))
    assert runs() == alone


def test_layers_are_measured_for_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up_runs(monkeypatch, [0.010], [0.005])
    monkeypatch.setattr(conversion, "_OF_LAYERS", -1.0)
    for share, is_sparse in ((0.95, True), (0.2, False)):
        for layer in sparsify(pruned_network(share), X).report().layers:
            assert layer.is_sparse is is_sparse and layer.dense is layer.sparse is None
            assert layer.reason.endswith("times as fast as dense by its sizes; other layers took all time to measure")


def test_frozen_layers_are_chosen_for_frozen_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pruned_network(0.95)
    made_up_runs(monkeypatch, [0.001], [0.004])
    dense = sparsify(model, X)
    assert is_sparse(dense) == [False, False]
    for times, kernels in (
        # What was chosen for calls from Python is clearly faster; it is not; nobody knows.
        ([[0.001], [0.002]], 0),
        ([[0.002], [0.001]], 2),
        ([[0.001], [STALLED]], 2),
    ):
        made_up_runs(monkeypatch, *times)
        frozen = freeze(dense, X)
        assert f": {kernels} sparse kernels" in repr(frozen) and type(frozen(X)) is torch.Tensor
        close(frozen(X), model(X), 1e-5)
    taken = made_up_runs(monkeypatch, [0.001])
    assert ": 2 sparse kernels" in repr(freeze(sparsify(model, X, measure=False), X))
    assert ": 0 sparse kernels" in repr(freeze(sparsify(pruned_network(0.0), X), X)) and taken() == 0


def test_what_was_not_chosen_is_frozen_as_it_is() -> None:
    sparse = sparsify(pruned_network(0.2), X, measure=False)
    assert is_sparse(sparse) == [True, True] and ": 2 sparse kernels" in repr(freeze(sparse, X))


def random_mask(*shape: int, left: float) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) < left


@pytest.mark.parametrize("use", ["training", "inference", "frozen"])
def test_expected_seconds(use: Use) -> None:
    shape = (16, 64, 32, 32)
    one, few, many = (
        SparseConv2d(64, 64, 3, padding=1, mask=random_mask(64, 64, 3, 3, left=left)) for left in (0.0002, 0.05, 0.8)
    )
    costs = [expected_seconds(layer, shape, use) for layer in (one, few, many)]
    assert costs[0][0] == costs[1][0] == costs[2][0]
    assert costs[0][1] < costs[1][1] < costs[1][0] / 3 and costs[2][1] > costs[2][0] / 1.3
    dense, sparse = expected_seconds(few, (64, *shape[1:]), use)
    assert dense > 3.5 * costs[1][0] and sparse > 3.5 * costs[1][1]
    double = expected_seconds(few.double(), shape, use)
    assert double[0] > 1.8 * costs[1][0] and double[1] > 1.8 * costs[1][1]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_expected_seconds_of_other_layers() -> None:
    # Almost all of a narrow plane's products meet the border, which sparse kernels leave out.
    layer = SparseConv2d(8, 8, 3, padding=1, mask=torch.ones(8, 8, 3, 3))
    (dense, sparse), (dense_inside, sparse_inside) = (
        expected_seconds(layer, (1024, 8, size, size), "frozen") for size in (1, 16)
    )
    assert sparse_inside / dense_inside > 1.5 * sparse / dense
    depthwise = SparseConv2d(64, 64, 3, padding=1, groups=64, mask=random_mask(64, 1, 3, 3, left=0.8))
    dense, sparse = expected_seconds(depthwise, (16, 64, 32, 32), "frozen")
    assert dense > 1.25 * sparse
    linear = SparseLinear(512, 512, mask=random_mask(512, 512, left=0.05))
    tokens, rows = (expected_seconds(linear, shape, "frozen") for shape in ((4, 8, 512), (32, 512)))
    # Tokens go into blocks and out of them in each layer.
    assert tokens[0] == rows[0] and tokens[1] > rows[1]
    narrow = SparseLinear(128, 128, mask=random_mask(128, 128, left=0.1))
    dense, sparse = expected_seconds(narrow, (16, 64, 128), "inference")
    assert dense < sparse
    reflecting = SparseConv2d(4, 4, 3, padding=1, padding_mode="reflect", mask=torch.ones(4, 4, 3, 3))
    assert expected_seconds(reflecting, (2, 4, 2, 2), "frozen")[1] > 0
    for layer, shape in ((linear, (0, 512)), (depthwise, (0, 64, 8, 8)), (depthwise, (64, 8, 8))):
        assert all(0 < seconds < 1e-3 for seconds in expected_seconds(layer, shape, "inference"))
    none = SparseLinear(0, 3, mask=torch.ones(3, 0))
    assert all(seconds > 0 for seconds in expected_seconds(none, (2, 0), "inference"))
