"""The command line, as a person types it."""

from __future__ import annotations

import contextlib
import csv
import json
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import scipy.sparse
import torch
from jacsparse.models import build, prune_weights, save_checkpoint
from torch import nn
from torch.nn.utils import prune

import jacsparse
from jacsparse.__main__ import main
from jacsparse.cli import inputs
from jacsparse.flop import Page
from jacsparse.runtime import cupy_for
from jacsparse.terminal import text

from ..helpers import made_up_runs


@pytest.fixture
def jac(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command; its exit status, output and errors."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["jacsparse", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "200")
        status = 0
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
        captured = capsys.readouterr()
        # A title is wrapped to its table's width: words are compared, not lines.
        return status, " ".join(captured.out.split()), captured.err

    return run


def custom_model() -> nn.Module:
    """What the tests name as package.module:factory."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


def unknown_at_the_end() -> nn.Module:
    """A model of which only the first operator has a pattern."""
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Softsign())


def double_model() -> nn.Module:
    """A model in float64."""
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU()).double()


class Words(nn.Module):
    """Of words and, where they are given, a number for each."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor, weights: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.words(ids)
        return {"logits": self.head(x if weights is None else x * weights[..., None])}


def test_version_and_help(jac) -> None:
    assert jac("--version")[1].strip() == jacsparse.__version__
    status, out, _ = jac("flop", "--help")
    assert status == 0 and "--schedule" in out and "--plot" in out


def test_flop_of_pruned_vgg_11(jac, tmp_path: Path) -> None:
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "csv", "png")}
    status, out, err = jac(
        "flop", "vgg11", "--prune", 0.97, "--data", "digits", "--samples", 1, "--steps",
        "--json", files["json"], "--csv", files["csv"], "--plot", files["png"],
    )  # fmt: skip
    assert status == 0, err
    assert "vgg11.features on digits: blelloch:2, structure observed on 1 sample" in out
    assert "blelloch:2, 33 live steps" in out and "critical path" in out and "back-propagation" in out
    report = json.loads(files["json"].read_text(encoding="utf-8"))
    assert len(report["steps"]) == 34 and report["structure"] == "observed"
    assert all(step["executed"] is not None for step in report["steps"])
    assert len(list(csv.DictReader(files["csv"].open(encoding="utf-8")))) == 35
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_flop_of_a_factory(jac) -> None:
    status, out, err = jac(
        "flop", "tests.cli.test_cli:custom_model", "--input", "3,8,8", "--schedule", "blelloch", "--steps"
    )
    assert status == 0, err
    assert "guaranteed structure" in out and "J1ᵀ·" in out
    # The dead step of Algorithm 1 is shown, and marked.
    assert "dead" in out


def test_flop_in_training_mode(jac, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    code, output, _ = jac("flop", "resnet8", "--training", "--schedule", "linear", "--steps", "--json", report)
    assert code == 0
    assert output.startswith("resnet8 in training mode: none of 74,800 weights is zero.")
    assert "couples samples" in output
    assert any(step["couples"] for step in json.loads(report.read_text())["steps"])
    code, _, _ = jac("flop", "resnet8", "--schedule", "linear", "--json", report)
    assert code == 0
    assert not any(step["couples"] for step in json.loads(report.read_text())["steps"])


def test_flop_of_a_part(jac) -> None:
    _, out, _ = jac("flop", "lenet5", "--part", "features", "--schedule", "linear")
    assert out.startswith("lenet5.features: none of 2,850 weights is zero.") and "scan" not in out
    status, _, err = jac("flop", "lenet5", "--part", "head")
    assert status == 2 and "--part is 'head'" in err


def test_flop_with_weights_of_another_origin(jac, tmp_path: Path) -> None:
    module = custom_model()
    prune.l1_unstructured(module[0], "weight", 0.5)
    torch.save({"state_dict": module.state_dict()}, tmp_path / "pruned.pt")
    factory = "tests.cli.test_cli:custom_model"
    status, out, err = jac("flop", factory, "--input", "3,8,8", "--checkpoint", tmp_path / "pruned.pt")
    assert status == 0, err
    # The share of zeros: half of 108 weights, no bias.
    assert "0 108 50.0%" in out and "Warning: At most half is pruned of layer 0 (50.0%), layer 3 (0%)" in out
    vgg = build("vgg11")
    safetensors.torch.save_file(vgg.state_dict(), tmp_path / "vgg.safetensors")
    status, out, err = jac("flop", "vgg11", "--schedule", "linear", "--checkpoint", tmp_path / "vgg.safetensors")
    assert status == 0, err
    status, _, err = jac("flop", "lenet5", "--checkpoint", tmp_path / "vgg.safetensors")
    assert status == 2 and "does not fit lenet5" in err


def test_flop_for_workers(jac) -> None:
    status, out, err = jac("flop", "lenet5", "--schedule", "blelloch:1", "--workers", "1,16")
    assert status == 0, err
    assert "which schedule is done first" in out and "workers linear blelloch:1 balanced first holds why" in out
    assert "times as long" in out
    _, out, _ = jac("flop", "lenet5", "--part", "classifier", "--schedule", "balanced:2", "--workers", "1,16,1")
    assert "workers linear balanced:2 balanced first holds why" in out
    for wrong in ("0", "1,", "two", "1;2"):
        status, _, err = jac("flop", "lenet5", "--workers", wrong)
        assert status == 2 and f"--workers is '{wrong}'; expected numbers of workers, as in 1,2,4,8" in err


def test_flop_of_an_exported_file(jac, tmp_path: Path) -> None:
    file = tmp_path / "net.pt2"
    shapes = ({0: torch.export.Dim("batch", max=1024)},)
    x = torch.randn(2, 3, 8, 8)
    torch.export.save(torch.export.export(custom_model().eval(), (x,), dynamic_shapes=shapes, strict=False), file)
    status, _, err = jac("flop", file)
    assert status == 2 and "may run code of whoever made it; add --trust where" in err
    status, _, err = jac("flop", file, "--trust", "--checkpoint", file)
    assert status == 2 and "has its own weights" in err
    status, _, err = jac("flop", file, "--trust", "--prune", 0.5)
    assert status == 2 and "--prune 0.5 is of no use" in err and "prune before exporting" in err
    status, out, err = jac("flop", file, "--trust")
    assert status == 0, err
    # Parts have the names that they had, and no other before them.
    assert " 3 720 0% " in out and "model." not in out
    status, out, err = jac("flop", file, "--trust", "--part", "3", "--schedule", "linear")
    assert status == 0 and "net.pt2.3: none of 720 weights is zero" in out, err
    status, out, err = jac("spy", file, "--trust", "--layer", "0")
    assert status == 0 and out.startswith("0: 144 × 192"), err


def test_jacobian_is_written_for_scipy(jac, tmp_path: Path) -> None:
    status, out, err = jac("jacobian", "lenet5", "--layer", "features.0", "--out", tmp_path / "J.npz", "--seed", 3)
    assert status == 0, err
    matrix = scipy.sparse.load_npz(tmp_path / "J.npz")
    torch.manual_seed(3)
    layer = build("lenet5").get_submodule("features.0")
    expected = jacsparse.jacobian(layer, torch.zeros(1, 3, 32, 32)).to_scipy()
    assert np.array_equal(matrix.toarray(), expected.toarray()) and "nnz" in out


@pytest.mark.parametrize("kind", ["npy", "pt"])
def test_the_jacobian_at_a_sample_from_a_file(jac, kind: str, tmp_path: Path) -> None:
    sample, file = torch.randn(2, 9, 9), tmp_path / f"x.{kind}"
    if kind == "npy":
        np.save(file, sample.numpy())
    else:
        torch.save(sample, file)
    model = "tests.cli.test_cli:double_model"
    words = ("jacobian", model, "--layer", "1", "--out", tmp_path / "J.npz", "--input-file", file, "--seed", 4)
    status, _, err = jac(*words)
    assert status == 0, err
    torch.manual_seed(4)
    y = double_model()[0](sample.double()[None])
    actual = scipy.sparse.load_npz(tmp_path / "J.npz").diagonal()
    assert np.array_equal(actual, (y > 0).flatten().numpy())


def test_damaged_samples(jac, tmp_path: Path) -> None:
    objects, text, dictionary = tmp_path / "objects.npy", tmp_path / "text.pt", tmp_path / "dictionary.pt"
    np.save(objects, np.array([{}], dtype=object), allow_pickle=True)
    text.write_text("no tensor", encoding="utf-8")
    torch.save({"x": torch.zeros(3)}, dictionary)
    for file, message in (
        (objects, "cannot be read: it is damaged, or holds more than numbers"),
        (text, "cannot be read: it is damaged, or holds more than numbers"),
        (dictionary, "holds a dict; expected a tensor of one sample, without a batch"),
    ):
        status, _, err = jac("jacobian", *LAYER, "--input-file", file)
        assert status == 2 and f"{file} {message}" in err


def test_a_picture_of_a_pattern(jac, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for module in ("figures", "flop.figure", "patterns.drawing"):
        monkeypatch.setattr(f"jacsparse.{module}.save_figure", lambda figure, path: drawn.append((figure, path)))
    for layer, transposed in (("features.0", False), ("classifier.4", True)):
        words = ["spy", "lenet5", "--layer", layer, "--out", tmp_path / "p.png", *["--transposed"] * transposed]
        status, out, err = jac(*words)
        assert status == 0 and "p.png" in out and "⢷" not in out, err
    (first, path), (second, _) = drawn
    assert path == tmp_path / "p.png"
    (axes,) = first.axes
    cells = axes.images[0].get_array()
    assert max(cells.shape) == 800 and cells[0, 0] == 0 and cells[0, -1] == 1
    assert axes.images[0].get_extent() == [0, 3072, 4704, 0] and axes.get_xlabel() == "input"
    # Full, and so small that a cell is a position.
    (axes,) = second.axes
    assert axes.images[0].get_array().shape == (84, 10) and not axes.images[0].get_array().any()
    assert (axes.get_xlabel(), axes.get_title()) == ("output", "lenet5, classifier.4, transposed: 84 × 10, 840 entries")


def test_what_a_schedule_becomes(jac) -> None:
    for asked, becomes in (("blelloch:99", "blelloch:3"), ("auto", "linear")):
        status, out, _ = jac("flop", "lenet5", "--schedule", asked, "--steps")
        assert status == 0 and f"lenet5: {becomes}, guaranteed" in out
        assert out.endswith(f"--schedule {asked} is {becomes} for 11 stages")
    assert "is blelloch:1" not in jac("flop", "lenet5", "--schedule", "blelloch:1")[1]


def test_solvers_are_compared(jac, tmp_path: Path) -> None:
    report, model = tmp_path / "report.json", ["tests.cli.test_cli:small_chain", "--input", "5"]
    status, out, err = jac("compare", *model, "--batch", "2", "--workers", "1,8", "--json", report)
    assert status == 0, err
    assert "cyclic_reduction" in out and "8 workers" in out and "3 layers of up to 6 units, batch 2" in out
    figures = json.loads(report.read_text(encoding="utf-8"))
    assert (figures["name"], figures["settings"]["seed"], figures["samples"]) == (model[0], 0, 2)
    rows = {row["method"]: row for row in figures["rows"]}
    assert rows["substitution"]["steps"] == 3 and rows["cyclic_reduction"]["steps"] == 2
    status, out, err = jac("compare", "bitstream", "--steps", "4", "--method", "hybrid", "--method", "jacobi")
    assert status == 0 and "hybrid" in out and "solving by bicgstab" not in err, err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "gauss"], "method is 'gauss'; expected one of substitution"),
        (["--steps", "3"], "--steps 3 is of no use: tests.cli.test_cli:small_chain is no recurrent layer"),
        (["--input", "6"], "0: an input of shape (6,) does not fit Linear"),
    ],
    ids=lambda words: words[-1] if isinstance(words, list) else "",
)
def test_what_cannot_be_compared(
    words: list[str], message: str, jac, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    status, _, err = jac("compare", "tests.cli.test_cli:small_chain", "--input", "5", *words)
    assert status == 2 and message in err
    assert not list(tmp_path.iterdir())


def test_more_steps_than_there_are(jac) -> None:
    status, _, err = jac("compare", "bitstream", "--input", "1,9", "--steps", "10")
    assert status == 2 and "--steps 10 is more than the 9 steps that the input has" in err


def test_training_is_simulated(jac, tmp_path: Path) -> None:
    files = {kind: tmp_path / f"figures.{kind}" for kind in ("json", "png")}
    status, out, err = jac(
        "simulate", "tests.cli.test_cli:small_chain", "--input", "5", "--workers", "1..8", "--rate", "1e9",
        "--latency", 0, "--json", files["json"], "--plot", files["png"],
    )  # fmt: skip
    assert status == 0, err
    assert "5 stages, batch 16; counted dense, 1e+09 FLOP/s" in out
    figures = json.loads(files["json"].read_text(encoding="utf-8"))
    assert {row["method"] for row in figures["rows"]} == {"bp", "ranks", "gpipe", "1f1b", "ddg"}
    assert {row["workers"] for row in figures["rows"]} == {1, 2, 4, 8} and figures["settings"]["seed"] == 0
    assert files["png"].stat().st_size
    status, out, err = jac("simulate", "bitstream", "--steps", 5, "--workers", 4, "--rate", "1e9", "--method", "ranks")
    assert status == 0 and "bitstream.rnn: 5 stages" in out, err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "8..1"], "--workers is '8..1'; expected numbers of workers, as in 1,4,16 or 1..1024"),
        (["--workers", "0..4"], "--workers is '0..4'; expected"),
        (["--method", "pipe"], "method is 'pipe'; expected one of bp, ranks"),
        (["--steps", "3"], "--steps 3 is of no use: tests.cli.test_cli:small_chain is no recurrent layer"),
        (["--rate", "-1"], "rate is -1.0; expected FLOP per second above 0"),
    ],
    ids=lambda words: words[-1] if isinstance(words, list) else "",
)
def test_what_cannot_be_simulated(words: list[str], message: str, jac) -> None:
    status, _, err = jac("simulate", "tests.cli.test_cli:small_chain", "--input", "5", *words)
    assert status == 2 and message in err


def small_chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def test_help_is_in_plain_words(jac) -> None:
    for command in ("flop", "compare", "simulate", "jacobian", "spy", "train"):
        status, out, _ = jac(command, "--help")
        assert status == 0 and not any(words in out for words in ("of which", "where left out", " Of ", "<str> Of"))


def test_spy(jac) -> None:
    status, out, _ = jac("spy", "lenet5", "--layer", "features.0")
    assert status == 0 and out.startswith("features.0: 4704 × 3072, nnz 352,800") and "⢷" in out
    _, out, _ = jac("spy", "lenet5", "--layer", "features.0", "--transposed")
    assert out.startswith("features.0: 3072 × 4704")
    status, out, err = jac("spy", "tests.example_models:lenet", "--layer", "0")
    assert status == 0 and out and err.startswith("Note: a sample is taken to have the sizes 3,32,32; --input names")


def test_doctor(jac) -> None:
    status, out, _ = jac("doctor")
    assert status == 0
    for word in ("Python", "torch", "threads", "cache", "GPU", "matplotlib"):
        assert word in out
    assert "jacsparse[gpu]" in out or "installed" in out


@pytest.mark.full
def test_doctor_compiles(jac) -> None:
    status, out, _ = jac("doctor", "--compile")
    words = " ".join(out.split())
    assert status == 0
    for kind in ("Jacobians of layers", "of functions", "systems", "recurrent layers"):
        for dtype in ("torch.float32", "torch.float64"):
            assert f"compiled {kind} in {dtype}: " in words


def test_clear_cache(jac, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACSPARSE_CACHE_DIR", str(tmp_path))
    (tmp_path / "symbolic").mkdir()
    (tmp_path / "symbolic" / "one.npz").write_bytes(bytes(3 * 2**20))
    (tmp_path / "mine").write_text("kept", encoding="utf-8")
    status, out, _ = jac("doctor")
    assert status == 0 and "3.0 MiB in 1 files" in out and "no more are kept" in out
    status, out, _ = jac("clear-cache")
    assert status == 0 and out.endswith("3.0 MiB removed")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    monkeypatch.setenv("JACSPARSE_CACHE_MIB", "5")
    assert "of at most 5 MiB" in jac("doctor")[1]


def test_too_little_memory(jac, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jacsparse, "count_flop", lambda *_, **__: np.empty(2**50), raising=False)
    status, _, err = jac("flop", "lenet5")
    assert status == 2 and "there is not enough memory (Unable to allocate" in err and "--input" in err


def test_doctor_tries_cupy_where_there_is_a_device(jac, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a made-up one")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "cupy", None)
    cupy_for.cache_clear()
    status, out, _ = jac("doctor")
    assert status == 0 and "a made-up one" in out and "pip install 'jacsparse[gpu-cuda13]'" in out


def test_checkpoints_are_taken(jac, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    status, _, err = jac(
        "train", "lenet5", "--epochs", 1, "--out", path, "--seed", 1, "--backward", "scan", "--schedule", "linear"
    )
    assert status == 0, err
    status, _out, err = jac("flop", "lenet5", "--checkpoint", path, "--schedule", "linear")
    assert status == 0, err
    status, _, err = jac("flop", "vgg11", "--checkpoint", path)
    assert status == 2 and "lenet5" in err and "vgg11" in err


def test_threads_are_of_leapfrog_alone(jac, tmp_path: Path) -> None:
    arguments = ("train", "lenet5", "--epochs", 1, "--out", tmp_path / "model.safetensors")
    status, _, err = jac(*arguments, "--threads", 2)
    assert status == 2 and "threads is 2, but backward is 'bp'" in err
    status, _, err = jac(*arguments, "--backward", "leapfrog", "--threads", 0)
    assert status == 2 and "threads is 0; expected an integer of at least 1" in err


def test_samples_of_ones_own(jac, tmp_path: Path) -> None:
    samples = torch.rand(3, 2, 6, 6)
    files = {kind: tmp_path / f"samples.{kind}" for kind in ("npy", "pt", "safetensors")}
    np.save(files["npy"], samples.numpy())
    torch.save(samples, files["pt"])
    safetensors.torch.save_file({"x": samples}, files["safetensors"])
    words = ("flop", "tests.cli.test_cli:double_model", "--input", "2,6,6", "--samples", 2, "--data")
    pages = {jac(*words, file)[1].replace(str(file), "") for file in files.values()}
    assert len(pages) == 1 and "and without the data's zeros" in pages.pop()
    status, out, err = jac("simulate", *words[1:4], "--data", files["npy"], "--batch", 3, "--method", "bp", "--rate", 1)
    assert status == 0 and "batch 3" in out, err
    status, out, err = jac("compare", *words[1:4], "--data", files["pt"], "--batch", 2, "--method", "substitution")
    assert status == 0, err
    for bad, message in (
        (samples[:, :1], "has samples of shape (1, 6, 6), --input is (2, 6, 6); convert the samples, or"),
        (samples[0], "has samples of shape (6, 6), --input is (2, 6, 6)"),
        (samples.long(), "holds torch.int64; expected floating-point samples"),
        (samples * torch.nan, "holds NaN or infinity in sample 0; leave out such samples"),
        (samples[:0], "holds no sample"),
        (samples[:1], "2 samples are asked for, but "),
        (samples.flatten(), f"has shape ({samples.numel()},); expected samples along the first of several axes"),
        (samples.to_sparse(), "holds a tensor that is sparse or has no values"),
        ({"x": samples}, "holds a dict; expected one tensor of samples"),
    ):
        torch.save(bad, files["pt"])
        status, out, err = jac(*words, files["pt"])
        assert status == 2 and message in err and not out and len(err.splitlines()) == 1
    (tmp_path / "samples.npz").write_bytes(b"")
    status, _, err = jac(*words, tmp_path / "samples.npz")
    assert status == 2 and "samples.npz; expected samples in a file that ends in .npy, .pt, .safetensors" in err
    for name in ("nowhere.npy", "damaged.safetensors"):
        (tmp_path / "damaged.safetensors").write_text("no tensors", encoding="utf-8")
        status, out, err = jac(*words, tmp_path / name)
        assert status == 2 and name in err and not out


@pytest.mark.parametrize(
    ("words", "counted"),
    [
        (["--input", "ids:5"], "inputs (5)"),
        (["--input", "ids:5", "--input", "5"], "inputs[1] (5), inputs[0] (5)"),
        (["--input", "weights=5", "--input", "ids=ids:5"], "weights (5), ids (5)"),
    ],
)
def test_tokens_and_several_inputs(jac, tmp_path: Path, words: list[str], counted: str) -> None:
    status, out, err = jac("flop", f"{__name__}:Words", *words, "--json", tmp_path / "report.json")
    assert status == 0 and not err, err
    assert f"Counted: logits for {counted}. The gradient ends at the embeddings of " in " ".join(out.split())
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    (head,) = (layer for layer in report["layers"] if layer["layer"] == "head")
    assert head["dense_step"] == 3 * 2 * 5 * 4 * 2


def test_tokens_of_ones_own(jac, tmp_path: Path) -> None:
    file, words = tmp_path / "tokens.npy", ("flop", f"{__name__}:Words", "--input", "ids:5", "--samples", 2, "--data")
    np.save(file, np.arange(15).reshape(3, 5) % 9)
    status, out, err = jac(*words, file)
    assert status == 0 and "structure observed on 2 samples" not in err and "and without the data's zeros" in out, err
    for samples, message in (
        (np.zeros((3, 4), np.int64), "has 3 samples of shape (4,); expected 2 of (5,)"),
        (np.zeros((1, 5), np.int64), "has 1 samples of shape (5,); expected 2 of (5,)"),
        (np.zeros((3, 5)), "holds torch.float64; expected integer samples"),
    ):
        np.save(file, samples)
        status, out, err = jac(*words, file)
        assert status == 2 and message in err and not out


LAYER = ("lenet5", "--layer", "features.0", "--out", "J.npz")
BAD = {
    "model": (["flop", "vgg99"], "vgg99"),
    "model elsewhere": (["flop", "resnet18"], "package.module:factory for a network of your own"),
    "factory": (["flop", "nowhere.at_all:f"], "model 'nowhere.at_all:f' cannot be made (ModuleNotFoundError"),
    "factory's arguments": (["flop", "math:sqrt"], "model 'math:sqrt' cannot be made (TypeError: math.sqrt() takes"),
    "factory's value": (["flop", "time:time"], "model 'time:time' gave a float; expected a torch.nn.Module"),
    "factory without a module": (["flop", ":f"], "model ':f' cannot be made"),
    "seed": (["flop", "lenet5", "--seed", "99999999999999999999"], "--seed"),
    "no data": (["flop", "lenet5", "--data", ""], "data is ''"),
    "samples of nothing": (["flop", "lenet5", "--samples", "3"], "add --data"),
    "more samples than there are": (["flop", "lenet5", "--data", "digits", "--samples", "99999"], "99999 samples are"),
    "folder": (["flop", "lenet5", "--checkpoint", "."], ". is a folder; name the checkpoint in it"),
    "figure's ending": (["flop", "lenet5", "--plot", "fig.xyz"], "fig.xyz names no format of a figure"),
    "two outputs, one file": (["flop", "lenet5", "--json", "r.txt", "--csv", "./r.txt"], "would be written twice"),
    "part": (["flop", "lenet5", "--part", "head"], "--part is 'head'; the model's parts are features"),
    "a file": (["flop", "nets.py:make"], "model 'nets.py:make' names a file; name its module, as in nets:make"),
    "a file in a folder": (["flop", "a/nets.py:make"], "name its module, as in nets:make, in the folder a"),
    "sample twice": (
        ["jacobian", *LAYER, "--input-file", "x.npy", "--input", "3,32,32"],
        "leave out --input and --data",
    ),
    "sample's kind": (["jacobian", *LAYER, "--input-file", "x.png"], "--input-file is x.png; expected an array (.npy)"),
    "sample missing": (["jacobian", *LAYER, "--input-file", "nowhere.npy"], "there is no file nowhere.npy; make one"),
    "picture's ending": (["spy", "lenet5", "--layer", "features.0", "--out", "p.xyz"], "p.xyz names no format"),
    "sort": (["flop", "lenet5", "--sort", "age"], "--sort is 'age'; expected one of layer, weights, zero, step"),
    "no workers": (["flop", "lenet5", "--workers", "0"], "--workers is '0'; expected numbers of workers"),
    "no workers to simulate": (
        ["simulate", "lenet5", "--workers", "0"],
        "--workers is '0'; expected numbers of workers",
    ),
    "no workers to compare": (["compare", "lenet5", "--workers", "0"], "--workers is '0'; expected numbers of workers"),
    "input": (["flop", "lenet5", "--input", "3,x"], "--input is '3,x'"),
    "input zero": (["flop", "lenet5", "--input", "0,32,32"], "--input is '0,32,32'; expected sizes of one sample"),
    "input shape": (["flop", "lenet5", "--input", "1,32,32"], "0: an input of shape (1, 32, 32) does not fit"),
    "input of integers": (["flop", "lenet5", "--input", "ids:x"], "--input is 'x'; expected sizes of one sample"),
    "inputs partly named": (["flop", "lenet5", "--input", "3", "--input", "y=3"], "name each of them once, or none"),
    "inputs named twice": (["flop", "lenet5", "--input", "x=3", "--input", "x=4"], "name each of them once, or none"),
    "inputs of a part": (
        ["flop", "lenet5", "--input", "x=3,32,32", "--part", "features"],
        "--part is 'features', whose input is found by one tensor",
    ),
    "tokens without data": (["flop", "lenet5", "--input", "ids:3", "--data", "random"], "--data is random: which tok"),
    "inputs beside data": (
        ["flop", "lenet5", "--input", "3", "--input", "4", "--data", "x.npy"],
        "give a file of the samples of one input",
    ),
    "inputs of another model": (["flop", "lenet5", "--input", "3,32,32", "--input", "2"], "too many positional arg"),
    "prune": (["flop", "lenet5", "--prune", "1.0"], "1.0"),
    "prune negative": (["flop", "lenet5", "--prune", "-0.1"], "-0.1"),
    "trust of nothing": (["flop", "lenet5", "--trust"], "--trust is of no use: lenet5 is no .pt2 file"),
    "schedule": (["flop", "lenet5", "--schedule", "fast"], "schedule is 'fast'"),
    "data": (["flop", "lenet5", "--data", "cake"], "cake"),
    "data missing": (["flop", "lenet5", "--data", "cifar10:/nowhere"], "/nowhere"),
    "checkpoint missing": (["flop", "lenet5", "--checkpoint", "/nowhere/w.safetensors"], "/nowhere/w.safetensors"),
    "output": (["flop", "lenet5", "--json", "/nowhere/r.json"], "/nowhere"),
    "layer": (["spy", "lenet5", "--layer", "conv9"], "--layer is 'conv9'; the model's parts are features, features.0"),
    "ending": (["jacobian", "lenet5", "--layer", "features.0", "--out", "J.txt"], "name a file that ends in .npz"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_words(jac, case: str) -> None:
    words, message = BAD[case]
    status, out, err = jac(*words)
    assert status == 2 and message in err
    assert "Traceback" not in err and not out


def test_an_unwritable_output_is_noticed_first(jac, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr(jacsparse, "count_flop", never, raising=False)
    status, _, err = jac("flop", "lenet5", "--plot", "/nowhere/figure.png")
    assert status == 2 and "cannot write /nowhere/figure.png: there is no folder /nowhere" in err


def test_a_part_is_given_what_the_model_gives_it(jac) -> None:
    status, out, err = jac(
        "flop", "lenet5", "--part", "classifier", "--schedule", "linear", "--data", "digits", "--steps"
    )
    assert status == 0 and "lenet5.classifier on digits: linear, structure observed on 4 samples" in out, err


class Callers(nn.Module):
    """Parts that are called in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.named, self.pair = nn.ReLU(), nn.Bilinear(4, 4, 4)
        self.with_options = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.listed, self.empty, self.failing, self.last = (nn.Identity() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.with_options(self.named(input=x), src_mask=None, is_causal=False)
        y = self.pair(y, y)
        self.listed((y, y))
        with contextlib.suppress(TypeError):
            self.empty()
        y = self.failing(y)
        raise KeyError("a mistake of the user's")
        return self.last(y)


def test_parts_that_are_called_in_other_ways(jac) -> None:
    model = ("tests.cli.test_cli:Callers", "--input", "3,4")
    status, out, err = jac("flop", *model, "--part", "named")
    assert status == 0 and "Callers.named: nothing in it multiplies by weights" in out, err
    status, _, err = jac("flop", *model, "--part", "with_options", "--schedule", "linear")
    assert status == 0, err
    for part, what in (("pair", "Tensor, Tensor"), ("listed", "tuple"), ("empty", "nothing")):
        status, _, err = jac("spy", *model, "--layer", part)
        assert status == 2 and f"--layer is '{part}', which is given {what}; name a part" in err
    status, _, err = jac("spy", *model, "--layer", "last")
    assert status == 2 and 'does not get to last (KeyError: "a mistake of the user\'s")' in err


def test_no_sample_is_made_that_is_not_needed(jac, monkeypatch: pytest.MonkeyPatch) -> None:
    model = "tests.cli.test_cli:unknown_at_the_end"
    status, _, err = jac("spy", model, "--layer", "0", "--input", "2,99999999,99999999")
    assert status == 2 and "1 samples of shape (2, 99999999, 99999999) are more than there is memory for" in err
    monkeypatch.setattr(inputs, "make_samples", lambda *_: pytest.fail("a sample was made"))
    assert jac("flop", "lenet5", "--schedule", "linear")[0] == 0


def named_by_its_user() -> nn.Module:
    """A model whose parts' names look like Rich's markup."""
    return nn.Sequential(OrderedDict([("a[/x]", nn.Linear(4, 3)), (":fire:", nn.Linear(3, 2))]))


def test_names_are_printed_as_they_are(jac) -> None:
    status, out, err = jac("flop", "tests.cli.test_cli:named_by_its_user", "--input", 4)
    assert status == 0 and "a[/x]" in out and ":fire:" in out, err


def test_narrow_tables_keep_units(monkeypatch: pytest.MonkeyPatch) -> None:
    report = jacsparse.count_flop(build("vgg11").features, (3, 32, 32), schedule="linear")
    for width in ("60", "80", "140"):
        monkeypatch.setenv("COLUMNS", width)
        shown = text(Page(report, steps=True))
        assert "…" not in shown and "J20ᵀ·∇x20" in shown and max(map(len, shown.splitlines())) <= int(width)


def test_what_a_report_prints_is_the_table(jac) -> None:
    status, out, _ = jac("flop", "lenet5", "--schedule", "linear", "--workers", 2)
    report = jacsparse.count_flop(build("lenet5").eval(), (3, 32, 32), schedule="linear", workers=[2])
    assert status == 0 and out == " ".join(str(replace(report, name="lenet5")).split())


def test_a_layer_needs_no_other_one_to_be_known(jac) -> None:
    status, out, err = jac("spy", "tests.cli.test_cli:unknown_at_the_end", "--layer", "0", "--input", "2,6,6")
    assert status == 0 and out.startswith("0: 48 × 72, nnz"), err


def test_a_double_model(jac) -> None:
    words = ("tests.cli.test_cli:double_model", "--input", "2,6,6", "--schedule", "linear", "--data", "random")
    status, _, err = jac("flop", *words)
    assert status == 0, err


def test_a_checkpoint_of_another_size(jac, tmp_path: Path) -> None:
    path = tmp_path / "hundred.safetensors"
    save_checkpoint(path, build("lenet5", num_classes=100))
    status, out, err = jac("flop", "lenet5", "--checkpoint", path, "--schedule", "linear", "--part", "classifier")
    assert status == 0 and "100" in out, err


def test_a_figure_of_a_single_stage(tmp_path: Path) -> None:
    jacsparse.count_flop(torch.nn.Linear(4, 3), (4,)).plot(tmp_path / "f.png")
    assert (tmp_path / "f.png").exists()


@pytest.mark.parametrize(("model", "size"), [("bitstream", "1,40"), ("irmas", "38,40")])
def test_flop_of_the_recurrent_models(jac, model: str, size: str) -> None:
    status, out, err = jac("flop", model, "--input", size, "--prune", 0.9, "--steps")
    assert status == 0, err
    # A step of the sequence is a stage: Algorithm 1 over 40 of them.
    assert f"{model}.rnn: blelloch:2" in out and "J40" in out and "20×20×1" in out


@pytest.mark.parametrize("task", ["bitstream", "irmas"])
def test_training_the_recurrent_models(jac, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jacsparse.models import bitstreams

    monkeypatch.setattr("jacsparse.models.training.load_data", lambda *_, **__: bitstreams(30, train=40, test=20))
    losses = {}
    for backward in ("bp", "scan"):
        out = tmp_path / f"{backward}.safetensors"
        status, _, err = jac("train", task, "--backward", backward, "--epochs", 2, "--lr", 0.01, "--out", out)
        assert status == 0, err
        assert out.with_suffix(".png").stat().st_size > 1000
        losses[backward] = [
            float(row["train_loss"]) for row in csv.DictReader(out.with_suffix(".csv").open(encoding="utf-8"))
        ]
    assert len(losses["bp"]) == 6
    assert max(abs(a - b) for a, b in zip(*losses.values(), strict=True)) < 1e-4


def test_errors_of_training_the_recurrent_models(jac, tmp_path: Path) -> None:
    for words, message in (
        (("bitstream", "--data", "digits"), "bitstream is trained on sequences, and digits are images"),
        (("irmas", "--data", f"irmas:{tmp_path / 'none'}"), "there is no folder"),
        (("irmas", "--features", "X"), "features is 'X'"),
        (("bitstream", "--schedule", "balanced:2"), "schedule is 'balanced:2'; expected one of auto"),
    ):
        status, _, err = jac("train", *words, "--out", tmp_path / "x.safetensors")
        assert status == 2 and message in " ".join(err.split()), err
        assert not list(tmp_path.glob("x.*"))


def test_what_takes_long_is_left_out_unless_asked_for(jac, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("flop", "resnet8", "--input", "3,8,8")
    assert "A scan (blelloch:2) never pays: for inputs' gradients it takes" in jac(*words)[1]
    monkeypatch.setattr("jacsparse.flop.estimate.PAIRS", 1e3)
    _, out, err = jac(*words)
    assert "Scan: not counted, as that takes about" in out and "hours" in out
    assert "Ask for it with --schedule blelloch:2." in out
    status, out, err = jac(*words, "--schedule", "blelloch:1")
    assert status == 0 and "A scan (blelloch:1) never pays: for inputs' gradients it takes" in out
    assert "counting blelloch:1 takes about" in err and "hours" in err
    assert "hours" not in "".join(jac(*words, "--schedule", "linear")[1:])


def test_layers_are_sorted_and_chosen(jac) -> None:
    _, out, _ = jac("flop", "lenet5", "--schedule", "linear", "--sort", "weights", "--top", 1)
    assert "Layers, 1 of 6" in out and "classifier.0 48.0 k" in out and "features.3 " not in out.split("Layers, ")[1]
    assert "critical path" not in out
    assert "critical path" in jac("flop", "lenet5", "--schedule", "linear", "--explain")[1]


def test_two_checkpoints_side_by_side(jac, tmp_path: Path) -> None:
    files = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for file, fraction in zip(files, (0.5, 0.9), strict=True):
        torch.manual_seed(0)
        module = custom_model()
        prune_weights(module, fraction)
        torch.save(module.state_dict(), file)
    words = ("flop", "tests.cli.test_cli:custom_model", "--input", "3,8,8", "--compare", *files)
    status, out, err = jac(*words)
    assert status == 0, err
    assert "with 90.0% of the weights zero in place of 50.0%" in out and " 3 50.0% 90.0% 2.16 k 432 20.0%" in out
    status, _, err = jac(*words, "--prune", 0.5)
    assert status == 2 and "--prune is of no use with --compare" in err


def test_what_takes_long_in_compare(jac, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jacsparse.flop.estimate.PAIRS", 1.0)
    words = ("compare", "tests.cli.test_cli:wide_chain", "--input", 40)
    status, out, err = jac(*words)
    assert status == 0, err
    assert "scan: to count its products takes about" in out and "cyclic_reduction: to count" in out
    status, out, err = jac(*words, "--method", "scan")
    assert status == 0 and "to count its products" not in out, err


def test_solutions_that_take_long_are_counted_but_not_timed(jac, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jacsparse.solvers.comparison.MOST", 10**4)
    with monkeypatch.context() as patch:
        patch.setattr("jacsparse.solvers.blocks.plan_product", lambda *_: pytest.fail("a product was planned"))
        status, out, err = jac("compare", "tests.cli.test_cli:wide_chain", "--input", 40)
    assert status == 0 and "scan: not timed: more than" in out, err


def test_weights_that_are_nan_are_told_of(jac, tmp_path: Path) -> None:
    module = custom_model()
    prune_weights(module, 0.5)
    path, layer = next((path, part) for path, part in module.named_modules() if hasattr(part, "weight_orig"))
    left, pruned = (layer.weight_mask == value for value in (1, 0))  # type: ignore[operator]
    with torch.no_grad():
        # What a mask leaves out is not counted.
        for where, count in ((left, 3), (pruned, 1)):
            layer.weight_orig[tuple(where.nonzero()[:count].T)] = torch.nan  # type: ignore[index, operator]
    file, figures = tmp_path / "nan.pt", tmp_path / "figures.json"
    torch.save(module.state_dict(), file)
    warning = f"layer {path}: 3 weights are NaN, counted as not zero."
    words = ("tests.cli.test_cli:custom_model", "--input", "3,8,8", "--checkpoint", file, "--json", figures)
    status, out, err = jac("flop", *words)
    assert status == 0, err
    assert f"Warning: {warning}" in out
    written = json.loads(figures.read_text())
    assert warning in written["warnings"] and written["nan_weights"] == {path: 3}


def wide_chain() -> nn.Module:
    """Pruned layers, the products of which look at many pairs."""
    torch.manual_seed(0)
    net = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(40, 40), nn.Tanh())])
    prune_weights(net, 0.7)
    return net


def nothing_left() -> nn.Module:
    """A network of which masks leave no weight."""
    module = custom_model()
    for layer in (module[0], module[3]):
        prune.custom_from_mask(layer, "weight", torch.zeros_like(layer.weight))
    return module


def without_weights() -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())


def test_networks_without_weights(jac, tmp_path: Path) -> None:
    torch.save(nothing_left().state_dict(), tmp_path / "nothing.pt")
    model = ("tests.cli.test_cli:custom_model", "--input", "3,8,8", "--checkpoint", tmp_path / "nothing.pt")
    status, out, err = jac("flop", *model)
    assert status == 0 and "100% of 828 weights are zero" in out, err
    assert "No weight is left: the output is the same for every input, and no weight has a gradient." in out
    assert "Warning: No weight is left in layer 0, layer 3;" in out and "fewer FLOP" not in out
    status, out, err = jac("simulate", *model, "--workers", "1,2", "--rate", "1e9")
    assert status == 0 and "3 stages" in out, err
    status, out, err = jac("compare", *model)
    assert status == 0 and "2 layers" in out and "Warning" not in err, err
    model = ("tests.cli.test_cli:without_weights", "--input", "3,8,8")
    status, out, err = jac("flop", *model)
    assert status == 0 and "nothing in it multiplies by weights, so there is nothing to prune." in out, err
    for command in ("simulate", "compare"):
        status, out, err = jac(command, *model, *(["--rate", "1e9"] if command == "simulate" else []))
        assert status == 0 and ("2 stages" in out or "1 layer of" in out), err
        assert ("has no weight to train; its figures are without" in err) == (command == "simulate")
    status, _, err = jac("flop", *model, "--prune", 0.5)
    assert status == 2 and "no convolution and no linear layer, so there is nothing to prune" in err


@pytest.mark.parametrize(
    "words", [("flop", "lenet5", "--schedule", "linear"), ("spy", "lenet5", "--layer", "features.0")]
)
def test_a_pipe_that_is_closed_early(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "jacsparse", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_what_prune_leaves_as_it_was_is_told(jac) -> None:
    status, out, err = jac("flop", "bitstream", "--input", "1,6", "--prune", 0.9, "--schedule", "linear")
    assert status == 0 and "none of 420 weights is zero" in out
    assert "--prune 0.9 prunes convolution and linear layers, and bitstream.rnn has none: no weight of it" in err
    assert "prunes" not in jac("flop", "lenet5", "--prune", 0.9, "--schedule", "linear")[2]


def test_pooling_that_costs_more_pruned_than_dense_is_explained(jac) -> None:
    words = ("flop", "tests.cli.test_cli:without_weights", "--input", "3,8,8", "--schedule", "linear", "--steps")
    assert "take more FLOP pruned than dense: the pruned count has 2 for each entry of a Jacobian" in jac(*words)[1]
    assert "pruned than dense" not in jac("flop", "lenet5", "--schedule", "linear", "--prune", 0.5, "--steps")[1]


def test_training_on_samples_of_ones_own(jac, tmp_path: Path) -> None:
    file, out = tmp_path / "own.safetensors", tmp_path / "model.safetensors"
    tensors = {"inputs": torch.randn(40, 3, 32, 32), "labels": torch.randint(0, 4, (40,))}
    safetensors.torch.save_file(tensors, file)
    status, shown, err = jac("train", "lenet5", "--data", file, "--epochs", 1, "--out", out)
    assert status == 0 and "of the test samples right" in shown, err
    assert safetensors.torch.load_file(out)["classifier.4.weight"].shape == (4, 84)
    inputs, labels, own = tensors["inputs"], tensors["labels"], tmp_path / "own.pt"
    for bad, message in (
        ({"inputs": inputs}, "holds no tensors inputs and labels"),
        (inputs, "holds no tensors inputs and labels"),
        ({"inputs": inputs.long(), "labels": labels}, "inputs are torch.int64 of shape (40, 3, 32, 32)"),
        ({"inputs": inputs, "labels": labels[:9]}, "labels are torch.int64 of shape (9,); expected integers, one for"),
        ({"inputs": inputs * torch.nan, "labels": labels}, "inputs hold NaN or infinity"),
        ({"inputs": inputs, "labels": labels - 9}, "the least label is -"),
        ({"inputs": inputs[:4], "labels": labels[:4]}, "holds 4 inputs; expected 5 at least"),
        ({"inputs": inputs[:, :, 0], "labels": labels}, "lenet5 is trained on images, and own.pt are sequences"),
    ):
        torch.save(bad, own)
        status, shown, err = jac("train", "lenet5", "--data", own, "--out", tmp_path / "x.safetensors")
        assert status == 2 and message in err and not shown and len(err.strip().splitlines()) == 1
    own.write_text("damaged", encoding="utf-8")
    for name in (own, tmp_path / "nowhere.pt"):
        status, _, err = jac("train", "lenet5", "--data", name, "--out", tmp_path / "x.safetensors")
        assert status == 2 and str(name) in err


def test_bench_measures_training_inference_and_what_is_frozen(jac, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up_runs(monkeypatch, [0.008, 0.0081], [0.002])
    words = "bench", f"{__name__}:custom_model", "--input", "3,8,8", "--prune", "0.9", "--batch"
    status, out, _ = jac(*words, "1,3")
    assert status == 0 and "11 of 108" in out
    for batch in (1, 3):
        assert f"training, batch {batch} layer weights left" in out
        verdict = out[out.rindex(f"training, batch {batch}: ") :].split(": ", 1)[1]
        assert verdict.startswith("sparse, 2.000 ms ± 0 %, 4.0 times as fast as dense inference, batch")
        verdict = out[out.rindex(f"inference, batch {batch}: ") :].split(": ", 1)[1]
        speed = "2.000 ms ± 0 %, 4.0 times as fast as dense"
        assert verdict.startswith(f"sparse, {speed}; by jacsparse.freeze {speed}")
    made_up_runs(monkeypatch, [0.002], [0.0021])
    status, out, _ = jac(*words, "2")
    assert (
        status == 0 and "by jacsparse.freeze 2.100 ms ± 0 %, slower than dense, 2.000 ms ± 0 %: serve it dense" in out
    )
    made_up_runs(monkeypatch, [(0.008, 0.007)], [0.002])
    status, out, _ = jac(*words, "2")
    busy = "this machine is busy: rerun, or measure=False"
    assert status == 0 and f"training, batch 2: dense; no layer is sparse by its sizes; {busy}" in out
    assert f"by jacsparse.freeze 2.000 ms ± 0 %, {busy}" in out
    made_up_runs(monkeypatch, [0.04] * 6 + [0.001], [0.03] * 6 + [0.002])
    status, out, _ = jac(*words, "2")
    assert status == 0 and "training, batch 2: dense, 1.000 ms ± 0 %; with sparse layers 2.00 of the time" in out


def pooled_model() -> nn.Module:
    """Its batch normalisation takes no batch of one in training."""
    head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), *head)


def token_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))


def test_bench_names_what_it_cannot_run(jac, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up_runs(monkeypatch, [0.008], [0.002])
    status, out, _ = jac("bench", f"{__name__}:pooled_model", "--input", "3,8,8", "--prune", "0.5", "--batch", "1,4")
    assert status == 0 and "inference, batch 1: sparse, " in out and "training, batch 4: sparse, " in out
    assert "training, batch 1: not measured, as the model does not run so (ValueError: Expected more than 1" in out
    for name, sizes in (("custom_model", "3,9,9"), ("token_model", "5")):
        status, out, err = jac("bench", f"{__name__}:{name}", "--input", sizes)
        assert status == 2 and not out and len(err.strip().splitlines()) == 1
        assert f"{name} does not take samples of the sizes {sizes} (RuntimeError: " in err
        assert "name those of a sample by --input, and measure a model of token ids by jacsparse.sparsify" in err


def asks_for_values() -> nn.Module:
    class Asking(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    return Asking(nn.Conv2d(3, 4, 3))


def test_bench_says_why_a_model_is_not_frozen(jac) -> None:
    status, out, _ = jac("bench", f"{__name__}:asks_for_values", "--input", "3,8,8", "--prune", "0.5", "--batch", "2")
    assert status == 0
    assert "jacsparse.freeze refuses it: Asking reads values in Python that depend on its inputs" in out
