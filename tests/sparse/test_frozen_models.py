"""Frozen models of several shapes, and their files: the same results, no code, and errors that name what is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.utils import prune

from jacsparse import FrozenModel, densify, freeze, sparsify


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 5),
    )  # fmt: skip


def pruned() -> nn.Sequential:
    """Trained, as it were: statistics too; the second convolution is not pruned."""
    model = network()
    prune.random_unstructured(model[0], "weight", 0.8)
    prune.random_unstructured(model[6], "weight", 0.9)
    nn.init.uniform_(model[1].running_mean)
    nn.init.uniform_(model[1].running_var, 0.5, 2)
    model[1].num_batches_tracked += 7
    return model.eval()


def images(batch: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(batch, 3, 6, 6, dtype=dtype)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "served.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_several_shapes_share_the_weights(dtype: torch.dtype) -> None:
    model = pruned().to(dtype)
    frozen = freeze(sparsify(model, images(1, dtype), measure=False), images(1, dtype))
    with pytest.raises(ValueError, match=r"got \(5, 3, 6, 6\) of .* it was frozen for \(1, 3, 6, 6\) of .*: add each"):
        frozen(images(5, dtype))
    for batch in (5, 0, 5):
        frozen.add(images(batch, dtype))
    for batch in (1, 5, 0, 1):
        x = images(batch, dtype)
        with torch.no_grad():
            torch.testing.assert_close(frozen(x), model(x), rtol=0, atol=1e-5 if dtype is torch.float32 else 1e-12)
    assert repr(frozen).count("3, 6, 6") == 3
    addresses = [
        {each.data_ptr() for kernel in run._kernels for each in kernel.inputs if each is not None and each.ndim == 1}
        for run in frozen._runs.values()
    ]
    values = frozen._model.model[6].values.data_ptr()
    assert all(values in of_run for of_run in addresses[:2])


def test_within_inference_mode(file: Path) -> None:
    model, x = pruned(), images(2)
    with torch.inference_mode():
        frozen = freeze(sparsify(model, x, measure=False), x)
        frozen.save(file)
        loaded = FrozenModel.load(file, network())
        loaded.add(images(3))
    loaded.add(images(4))
    for batch in (2, 3, 4):
        x = images(batch)
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=1e-5)


def test_a_second_shape_with_a_state() -> None:
    """What one shape's recording writes is not the other's."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.mul_(0).add_(x.sum())
            return x + self.count

    frozen = freeze(Counting().eval(), torch.ones(2))
    frozen.add(torch.ones(3))
    assert frozen(torch.ones(2)).tolist() == [3, 3] and frozen(torch.ones(3)).tolist() == [4, 4, 4]
    assert frozen._model.count == 0


@pytest.mark.parametrize("masked", [False, True])
def test_a_file_gives_the_same_results(file: Path, masked: bool) -> None:
    model = pruned()
    sparse = sparsify(model, images(2), measure=False)
    frozen = freeze(sparse, images(1))
    frozen.add(images(4))
    frozen.save(file)
    other = pruned() if masked else network()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    loaded = FrozenModel.load(file, other)
    assert repr(loaded) == repr(frozen) and "2 sparse kernels" in repr(loaded)
    for batch in (1, 4, 1):
        x = images(batch)
        assert torch.equal(loaded(x), frozen(x))
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    # Again from what was loaded.
    loaded.save(file)
    x = images(4)
    assert torch.equal(FrozenModel.load(file, network())(x), frozen(x))


def test_layers_that_stayed_dense_stay_so(file: Path) -> None:
    sparse = sparsify(pruned(), images(2), measure=False)
    dense = densify(sparse)
    sparse.model[6] = dense[6].eval()
    frozen = freeze(sparse, images(2))
    frozen.save(file)
    loaded, x = FrozenModel.load(file, network()), images(2)
    assert repr(loaded) == repr(frozen)
    torch.testing.assert_close(loaded(x), frozen(x), rtol=0, atol=1e-6)


def test_the_file_is_small_and_has_no_code(file: Path) -> None:
    model = nn.Sequential(nn.Linear(300, 200), nn.ReLU()).eval()
    prune.random_unstructured(model[0], "weight", 0.95)
    freeze(sparsify(model, torch.ones(1, 300), measure=False), torch.ones(1, 300)).save(file)
    assert file.stat().st_size < 0.15 * 4 * 300 * 200
    with safetensors.safe_open(file, framework="pt") as content:
        assert sorted(content.keys()) == ["0.bias", "0.weight:places", "0.weight:values"]
        assert json.loads(content.metadata()["jacsparse"]) == {
            "frozen": "Sequential", "format": 1, "sparse": ["0"], "inputs": [[{"shape": [1, 300], "dtype": "float32"}]],
        }  # fmt: skip


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        return {"scores": self.head(self.embedding(ids)) * mask[..., None]}


def test_integers_and_several_inputs(file: Path) -> None:
    model = Tokens().eval()
    ids, mask = torch.randint(0, 11, (2, 4)), torch.rand(2, 4) > 0.5
    frozen = freeze(model, ids, mask)
    frozen.save(file)
    loaded = FrozenModel.load(file, Tokens())
    assert torch.equal(loaded(ids, mask)["scores"], frozen(ids, mask)["scores"])
    with pytest.raises(TypeError, match="the frozen Tokens takes 2 inputs, not 1"):
        loaded(ids)


def test_a_layer_alone_and_half_precision(file: Path) -> None:
    layer = nn.Linear(6, 4).eval()
    prune.random_unstructured(layer, "weight", 0.7)
    frozen = freeze(sparsify(layer, torch.ones(2, 6), measure=False), torch.ones(2, 6))
    frozen.save(file)
    x = torch.randn(2, 6)
    assert torch.equal(FrozenModel.load(file, nn.Linear(6, 4))(x), frozen(x))
    half = freeze(nn.Linear(6, 4).eval().bfloat16(), x.bfloat16())
    half.save(file)
    assert torch.equal(FrozenModel.load(file, nn.Linear(6, 4).bfloat16())(x.bfloat16()), half(x.bfloat16()))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Linear(6, 4)), r"weight is not expected|0.weight is missing, not torch.float32 of \(4, 6\)"),
        (nn.Linear(5, 4), r"the places of weight are none|weight is torch.float32 of"),
        (nn.Linear(6, 4, bias=False), "bias is not expected"),
        (nn.Linear(6, 4).double(), r"weight is torch.float32 of \(4, 6\), not torch.float64 of \(4, 6\)"),
        (nn.Bilinear(2, 3, 4), "the model: a Bilinear has no sparse layer"),
    ],
)
def test_other_models(file: Path, model: nn.Module, words: str) -> None:
    layer = nn.Linear(6, 4).eval()
    layer.weight.data[:3] = 0
    freeze(sparsify(layer, torch.ones(2, 6), measure=False), torch.ones(2, 6)).save(file)
    with pytest.raises(
        ValueError, match=rf"{file} holds a frozen SparseLinear, which does not fit .*({words}).*its class"
    ):
        FrozenModel.load(file, model)


def rewritten(file: Path, tensors: dict[str, Any] | None = None, **changes: Any) -> None:
    with safetensors.safe_open(file, framework="pt") as content:
        description = json.loads(content.metadata()["jacsparse"])
    changed = {name: value for name, value in {**description, **changes}.items() if value is not ...}
    weights = {**safetensors.torch.load_file(file), **(tensors or {})}
    weights = {name: value for name, value in weights.items() if value is not None}
    safetensors.torch.save_file(weights, file, {"jacsparse": json.dumps(changed)})


@pytest.fixture
def saved(file: Path) -> Path:
    layer = nn.Linear(6, 4).eval()
    layer.weight.data[:3] = 0
    freeze(sparsify(layer, torch.ones(2, 6), measure=False), torch.ones(2, 6)).save(file)
    return file


INPUT = {"shape": [2, 6], "dtype": "float32"}


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2}, {"format": ...}, {"frozen": ...}, {"sparse": ...}, {"sparse": 3}, {"inputs": ...},
        {"inputs": [[3]]}, {"inputs": [[{**INPUT, "dtype": "load"}]]}, {"inputs": [[{**INPUT, "dtype": "float31"}]]},
        {"inputs": [[{**INPUT, "shape": [-1]}]]}, {"inputs": [[{**INPUT, "shape": [10**9, 10**9]}]]},
        {"inputs": [[{**INPUT, "low": 3, "high": "x"}]]}, {"inputs": [[{**INPUT, "dtype": 3}]]},
    ],
)  # fmt: skip
def test_descriptions_that_are_none(saved: Path, changes: dict[str, Any]) -> None:
    rewritten(saved, **changes)
    with pytest.raises(ValueError, match=rf"{saved} is no frozen model that this jacsparse reads .*; write it anew"):
        FrozenModel.load(saved, nn.Linear(6, 4))


@pytest.mark.parametrize("runs", [1, 16])
@pytest.mark.parametrize("more", [{}, {"dtype": "int64", "low": 0, "high": 1}])
def test_inputs_that_fill_the_memory(
    saved: Path, runs: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused before memory is taken, be it one large input or many."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    example = {**INPUT, "shape": [memory // (16 * runs), 1], **more}
    rewritten(saved, inputs=[[example]] * runs)
    for name in ("randn", "randint"):
        monkeypatch.setattr(torch, name, pytest.fail)
    with pytest.raises(ValueError, match=r"is no frozen model .*GiB or more, and this machine has .* smaller batches"):
        FrozenModel.load(saved, nn.Linear(6, 4))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"weight:places": None}, "weight is missing"),
        ({"weight:places": torch.full((6,), 24, dtype=torch.int32)}, "the places of weight are none"),
        ({"weight:places": torch.full((6,), -1, dtype=torch.int32)}, "the places of weight are none"),
        ({"weight:places": torch.zeros(6)}, "the places of weight are none"),
        ({"weight:places": torch.zeros(5, dtype=torch.int32)}, "the places of weight are none"),
        ({"weight:values": torch.zeros(())}, "the places of weight are none"),
        ({"weight:values": torch.zeros(6, dtype=torch.int64)}, "weight is torch.int64"),
        ({"bias": torch.zeros(5)}, r"bias is torch.float32 of \(5,\), not torch.float32 of \(4,\)"),
        ({"more": torch.zeros(5)}, "more is not expected"),
    ],
)
def test_tensors_that_do_not_fit(saved: Path, tensors: dict[str, Any], words: str) -> None:
    rewritten(saved, tensors)
    with pytest.raises(ValueError, match=rf"which does not fit Linear: {words}"):
        FrozenModel.load(saved, nn.Linear(6, 4))


def test_layers_that_cannot_be_sparse(saved: Path) -> None:
    rewritten(saved, sparse=["head.0"])
    with pytest.raises(ValueError, match=r"which does not fit Linear: 'head.0' is no layer that can be sparse"):
        FrozenModel.load(saved, nn.Linear(6, 4))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_damaged_files(saved: Path, share: float) -> None:
    content = saved.read_bytes()
    saved.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=rf"{saved} cannot be read as a frozen model .* damaged .*FrozenModel.save"):
        FrozenModel.load(saved, nn.Linear(6, 4))


def test_other_files(file: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=rf"no file {file}; expected a frozen model that FrozenModel.save wrote"
    ):
        FrozenModel.load(file, nn.Linear(6, 4))
    safetensors.torch.save_file(nn.Linear(6, 4).state_dict(), file)
    with pytest.raises(ValueError, match=r"is no frozen model that this jacsparse reads \(KeyError: 'jacsparse'\)"):
        FrozenModel.load(file, nn.Linear(6, 4))
    with pytest.raises(TypeError, match="module"):
        FrozenModel.load(file, "Linear")  # type: ignore[arg-type]


def test_a_failed_write_leaves_what_was_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Any, name: Path, metadata: Any) -> None:
        name.write_text("half", encoding="utf-8")
        raise OSError("no space left on device")

    frozen, before = FrozenModel.load(saved, nn.Linear(6, 4)), saved.read_bytes()
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        frozen.save(saved)
    assert saved.read_bytes() == before and list(saved.parent.iterdir()) == [saved]


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        """Take none."""


def test_a_state_dict_with_more_than_tensors(file: Path) -> None:
    frozen = freeze(Extra(2, 2).eval(), torch.ones(1, 2))
    with pytest.raises(TypeError, match="_extra_state of Extra is a dict; a file takes a state dict of tensors alone"):
        frozen.save(file)
    assert not file.exists()
