"""Frozen models: equal to the model for every input, call after call, and errors where they could not be."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils._pytree import tree_leaves

import jacsparse
from jacsparse import freeze, sparsify
from jacsparse.sparse import freezing


def run_of(frozen: jacsparse.FrozenModel) -> freezing.FrozenRun:
    """The only recorded run."""
    (run,) = frozen._runs.values()
    return run


def pruned(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model in evaluation mode, whose convolutions have a tenth of their weights."""
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            prune.random_unstructured(part, "weight", 0.9)
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.running_mean)
            nn.init.uniform_(part.running_var, 0.5, 2)
            nn.init.uniform_(part.weight)
    return model.eval().to(dtype)


class Residual(nn.Module):
    """Sums, normalisation, pooling of all kinds, and what blocks leave to PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        x = functional.relu(self.norm(self.first(x)))
        x = functional.relu(x + self.second(x), inplace=True)
        x = functional.max_pool2d(x, 3, stride=2, padding=1)
        x = functional.softmax(self.last(x), dim=1).mean((2, 3))
        return {"scores": self.head(x), "features": x}


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Flatten(), nn.Dropout(), nn.Linear(96, 7),
    )  # fmt: skip


@pytest.mark.parametrize("build", [layers, Residual])
@pytest.mark.parametrize(("batch", "threads"), [(1, 3), (2, 1), (5, 3), (16, 1), (33, 3)])
def test_equals_the_model(build: Any, batch: int, threads: int) -> None:
    torch.manual_seed(batch)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = pruned(build())
        xs = [torch.randn(batch, 3, 12, 12, dtype=torch.float64) for _ in range(3)]
        sparse = sparsify(model, xs[0], measure=False)
        frozen = freeze(sparse, xs[0])
        results = [frozen(x) for x in (*xs, xs[0])]
        torch.set_num_threads(4 - threads)
        results.append(frozen(xs[1]))
        for x, result in zip((*xs, xs[0], xs[1]), results, strict=True):
            with torch.no_grad():
                torch.testing.assert_close(result, sparse(x), rtol=0, atol=1e-13)
                torch.testing.assert_close(result, model(x), rtol=0, atol=1e-12)
        # An earlier result is not overwritten, and neither is the input.
        assert not any(each.requires_grad for each in (results[0] if build is layers else results[0]["scores"],))
    finally:
        torch.set_num_threads(before)


class Branches(nn.Module):
    """Kernels one after the other, what PyTorch does between them, and an output in their middle."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if not number else 8, 8, 3, padding=1) for number in range(5))

    def forward(self, x: torch.Tensor) -> Any:
        first = functional.relu(self.convs[0](x))
        middle = self.convs[1](first)
        y = functional.max_pool2d(functional.relu(middle + first), 2)
        y = self.convs[2](torch.sigmoid(self.convs[3](y)))
        return functional.max_pool2d(self.convs[4](y) + y, 3, 2, 1), middle, y.flatten(1)


@pytest.mark.parametrize("build", [layers, Residual, Branches])
@pytest.mark.parametrize(("batch", "threads"), [(33, 1), (16, 2), (50, 5)])
def test_kernels_that_go_over_a_few_blocks_at_a_time(
    build: Any, batch: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(batch)
    model, xs = pruned(build()), [torch.randn(batch, 3, 12, 12, dtype=torch.float64) for _ in range(2)]
    sparse = sparsify(model, xs[0], measure=False)
    whole = freeze(sparse, xs[0])
    monkeypatch.setattr(freezing, "_AT_ONCE", 0)
    monkeypatch.setattr(freezing, "thread_count", lambda: threads)
    parts = freeze(sparse, xs[0])
    assert len(run_of(parts)._kernels) > len(run_of(whole)._kernels) and repr(parts) == repr(whole)
    for x in (*xs, xs[0]):
        assert all(map(torch.equal, tree_leaves(parts(x)), tree_leaves(whole(x))))
        with torch.no_grad():
            torch.testing.assert_close(parts(x), model(x), rtol=0, atol=1e-12)


def test_weights_are_constants() -> None:
    model = pruned(layers())
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    frozen = freeze(sparsify(model, x, measure=False), x)
    expected = frozen(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert torch.equal(frozen(x), expected)
    # Normalisation, masks and their like are computed once.
    operators = run_of(frozen)._operators
    assert (len(run_of(frozen)._kernels), operators) == (2, 3)
    assert repr(frozen) == "FrozenModel(Sequential of (2, 3, 12, 12): 2 sparse kernels, 3 operators of PyTorch)"


def test_dense_models() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.attention = nn.Embedding(11, 8), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> Any:
            y = self.embedding(x) + shift
            values, weights = self.attention(y, y, y)
            top = values.topk(2, dim=-1)
            return values, weights, top.values, top.indices, x, self.embedding.weight, 3

    model = Attention().double().eval()
    draw = [(torch.randint(0, 11, (3, 5)), torch.randn(8, dtype=torch.float64)) for _ in range(3)]
    frozen = freeze(model, *draw[0])
    for inputs in draw:
        with torch.no_grad():
            torch.testing.assert_close(frozen(*inputs), model(*inputs))


class Counting(nn.Module):
    """Has a state from call to call, and overwrites what begins as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        total = torch.ones(4).repeat(2)
        total[2:6] += x
        table = torch.empty(2, 8)
        table[0], table[1] = total, 7.0
        return table * self.calls


def test_states_and_constants_that_are_overwritten() -> None:
    model, x = Counting().eval(), torch.randn(4)
    reference = copy.deepcopy(model)
    frozen = freeze(model, x)
    assert model.calls == 0
    reference.calls.fill_(4)  # the first run, its recording, and two calls that are compared
    for _ in range(3):
        y = torch.randn(4)
        torch.testing.assert_close(frozen(y), reference(y))


class Locking(Counting):
    """Makes in its first run what has no copy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.lock = threading.Lock()
        return super().forward(x)


@pytest.mark.parametrize(("kind", "runs"), [(Counting, 4), (Locking, 6)])
def test_runs_of_the_model(kind: type[Counting], runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run, its recording, and two that are compared; more only where it cannot be copied as they leave it."""
    calls = list[object]()
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: (calls.append(self), forward(self, x))[1])
    frozen = freeze(kind().eval(), torch.randn(4))
    assert len(calls) == runs
    x, reference = torch.randn(4), Counting().eval()
    reference.calls.fill_(4)
    torch.testing.assert_close(frozen(x), reference(x))


class Overwriting(nn.Module):
    """Overwrites its input, turns a result in place, and returns a size among lists."""

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.cat([x.mul_(2), x.relu()]).transpose_(0, 1)
        return {"a": [y, (x + 1, y.unsqueeze_(0) * 2)], "b": x.shape}


def test_inputs_that_are_overwritten_and_results_that_are_turned(recwarn: pytest.WarningsRecorder) -> None:
    x = torch.randn(3, 4)
    before = x.clone()
    frozen = freeze(Overwriting().eval(), x)
    for y in (x, torch.randn(3, 4)):
        torch.testing.assert_close(frozen(y), Overwriting()(y.clone()))
    assert torch.equal(x, before)
    assert not recwarn.list


@pytest.mark.parametrize(
    "layer",
    [
        nn.GRU(4, 5, num_layers=2, bidirectional=True, batch_first=True),
        nn.LSTM(4, 5),
        nn.TransformerEncoderLayer(4, 2, batch_first=True),
        jacsparse.nn.GRU(4, 5),
        jacsparse.nn.Scan(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), schedule="linear"),
    ],
    ids=lambda layer: type(layer).__module__.partition(".")[0] + type(layer).__name__,
)
def test_other_layers(layer: nn.Module, capfd: pytest.CaptureFixture[str]) -> None:
    frozen = freeze(layer.eval(), torch.zeros(3, 7, 4))
    for _ in range(2):
        x = torch.randn(3, 7, 4)
        with torch.no_grad():
            torch.testing.assert_close(frozen(x), layer(x))
    assert "resized" not in capfd.readouterr().err


def test_random_numbers_are_drawn_anew() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand_like(x)

    x = torch.zeros(5)
    frozen = freeze(Noisy().eval(), x)
    torch.manual_seed(3)
    first, second = frozen(x), frozen(x)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(5))
    assert not torch.equal(first, second)


def test_several_threads_call_it() -> None:
    model = pruned(layers())
    x = torch.randn(4, 3, 12, 12, dtype=torch.float64)
    frozen = freeze(sparsify(model, x, measure=False), x)
    xs = [torch.randn_like(x) for _ in range(20)]
    with ThreadPoolExecutor(4) as pool:
        for each, result in zip(xs, pool.map(frozen, xs), strict=True):
            torch.testing.assert_close(result, frozen(each), rtol=0, atol=0)


def test_within_inference_mode_and_out_of_it() -> None:
    model = pruned(layers(), torch.float32)
    x = torch.randn(4, 3, 12, 12)
    with torch.inference_mode():
        frozen = freeze(sparsify(model, x, measure=False), x.clone())
        inside = frozen(x)
    assert torch.equal(frozen(x.requires_grad_()), inside)


def test_less_memory_than_all_activations() -> None:
    model = pruned(nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1) for _ in range(9)]), torch.float32)
    x = torch.randn(16, 8, 16, 16)
    frozen = freeze(sparsify(model, x, measure=False), x)
    kernels = run_of(frozen)._kernels
    places = {each.untyped_storage().data_ptr() for run in kernels for each in run.outputs if each is not None}
    assert len(kernels) == 9
    assert len(places) <= 3


class OnValues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class OnSizes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum()


class OutsidePyTorch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() + 1)


class Growing(nn.Module):
    """Returns all that it was ever called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.ones(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x])
        return self.seen


class Forward(nn.Module):
    """Differentiates where PyTorch has zeros without memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(lambda y: 2 * y.sin(), (x,), (x,))[1]


def test_a_constant_example_is_compared_too() -> None:
    with pytest.raises(ValueError, match="outside of PyTorch"):
        freeze(OutsidePyTorch().eval(), torch.zeros(4))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (OnValues().eval(), r"OnValues reads values in Python that depend on its inputs, by aten\._local_scalar_dense"),
        (OnSizes().eval(), r"OnSizes reads values in Python .* call the model itself"),
        (Growing().eval(), r"Growing gives something else .* keep something from call to call"),
        (OutsidePyTorch().eval(), r"OutsidePyTorch gives something else for other inputs .* as in NumPy"),
        (Forward().eval(), r"differentiates in forward mode, as by torch\.func\.jvp, .* call the model itself"),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout()), r"Sequential is in training mode; .* call its eval\(\) first"),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval().append(nn.Dropout()), "2 is in training mode"),
        (nn.Linear(4, 4, device="meta").eval(), "meta"),
    ],
)
def test_refusals(model: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        freeze(model, torch.tensor([1.0, -2.0, 3.0, 4.0]))


def test_wrong_inputs() -> None:
    with pytest.raises(TypeError, match="module"):
        freeze(lambda x: x, torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="what Linear is called with: at least one tensor"):
        freeze(nn.Linear(2, 2).eval())
    with pytest.raises(TypeError, match="an input of the frozen Linear is a list; expected a tensor"):
        freeze(nn.Linear(2, 2).eval(), [1.0, 2.0])  # type: ignore[arg-type]
    frozen = freeze(nn.Linear(2, 2).eval(), torch.ones(3, 2))
    with pytest.raises(TypeError, match="the frozen Linear takes 1 input, not 2"):
        frozen(torch.ones(3, 2), torch.ones(1))
    with pytest.raises(
        ValueError, match=r"got \(4, 2\) of torch.float32 on cpu; it was frozen for \(3, 2\) of .*: add"
    ):
        frozen(torch.ones(4, 2))
    with pytest.raises(ValueError, match="float64"):
        frozen(torch.ones(3, 2, dtype=torch.float64))
    with pytest.raises(TypeError, match="expected a tensor"):
        frozen([[1.0, 2.0]] * 3)
    with pytest.raises(TypeError, match=r"neither pickled nor copied, .*: save\(path\) writes it"):
        pickle.dumps(frozen)
    assert frozen(torch.ones(3, 2)).shape == (3, 2)


def test_modes() -> None:
    frozen = freeze(nn.Linear(3, 2).eval(), torch.randn(1, 3))
    assert frozen.eval() is frozen and frozen.train(False) is frozen and not frozen.training
    with pytest.raises(ValueError, match="the frozen Linear is for inference alone"):
        frozen.train()


def test_empty_batch() -> None:
    model = pruned(layers(), torch.float32)
    frozen = freeze(sparsify(model, torch.ones(2, 3, 12, 12), measure=False), torch.ones(0, 3, 12, 12))
    assert frozen(torch.ones(0, 3, 12, 12)).shape == (0, 7)


def test_a_model_without_inputs_reaching_it() -> None:
    class Constant(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.arange(3.0)

    frozen = freeze(Constant().eval(), torch.ones(2))
    frozen(torch.ones(2)).zero_()
    assert frozen(torch.ones(2)).tolist() == [0, 1, 2]
