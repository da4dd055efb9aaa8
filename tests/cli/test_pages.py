"""The pages of the command line, as they are printed; ``python -m tests.cli.test_pages`` writes them anew."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from jacsparse.models import build, prune_weights
from rich.console import Console
from torch import nn
from torch.nn.utils import prune

from jacsparse import FlopReport, count_flop
from jacsparse.__main__ import main
from jacsparse.flop import Page
from jacsparse.simulation import simulate
from jacsparse.solvers import SolverComparison, compare
from jacsparse.terminal import percent, ratio, short
from tests import example_models

PAGES = Path(__file__).parent / "pages"
_RESNET = ("tests.example_models:thin_resnet18", "--input", "3,224,224", "--checkpoint", "pruned.pt")
_COUNTED = ("--rate", "1e12", "--workers", "1..64")
#: The commands, by the names of their pages.
COMMANDS = {
    "flop-vgg11": ("flop", "vgg11", "--prune", "0.97", "--data", "random", "--samples", "1"),
    "flop-resnet18": ("flop", *_RESNET),
    "flop-lenet5": ("flop", "lenet5", "--steps"),
    "flop-bitstream": ("flop", "bitstream", "--input", "1,40"),
    "simulate-lenet5": ("simulate", "lenet5", *_COUNTED),
    "simulate-bitstream": ("simulate", "bitstream", "--steps", "40", *_COUNTED),
    "compare-vgg11": ("compare", "vgg11", "--prune", "0.97", "--method", "substitution"),
    "compare-resnet18": ("compare", *_RESNET, "--method", "substitution"),
    "compare-lenet5": ("compare", "lenet5", "--method", "substitution", "--method", "scan"),
    "compare-bitstream": ("compare", "bitstream", "--steps", "8"),
}


def checkpoint(folder: Path) -> None:
    """A ResNet-18's weights, 95 % of which are pruned, wherever they are."""
    torch.manual_seed(0)
    net = example_models.thin_resnet18()
    layers = [(part, "weight") for part in net.modules() if isinstance(part, (nn.Conv2d, nn.Linear))]
    prune.global_unstructured(layers, prune.L1Unstructured, amount=0.95)
    torch.save(net.state_dict(), folder / "pruned.pt")


def printed(name: str) -> dict[int, str]:
    """What a command prints, by the columns of the terminal, without times that are measured."""
    shown: list[object] = []
    recorder = SimpleNamespace(print=shown.append)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            mock.patch.object(sys, "argv", ["jacsparse", *COMMANDS[name]]),
            mock.patch("jacsparse.terminal.console", lambda: recorder),
            contextlib.suppress(SystemExit),
        ):
            main()
    finally:
        torch.set_num_threads(threads)
    return {width: _text(shown, width) for width in (80, 140)}


def _text(shown: list[object], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, emoji=False, highlight=False)
    for each in shown:
        console.print(_unmeasured(each) if isinstance(each, SolverComparison) else each)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"  # type: ignore[attr-defined]


def _unmeasured(comparison: SolverComparison) -> SolverComparison:
    """The comparison with a made-up time of each solver: they differ between machines."""
    return replace(comparison, rows=tuple(replace(row, seconds=row.seconds and 1.0) for row in comparison.rows))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path)
    yield tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_pages(name: str, folder: Path) -> None:
    for width, page in printed(name).items():
        assert page == (PAGES / f"{name}-{width}.txt").read_text(encoding="utf-8")
        assert "…" not in page and max(map(len, page.splitlines())) <= width


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.ReLU(), nn.Conv2d(6, 4, 3, groups=2))


class Shared(nn.Module):
    """A layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x).tanh())


CASES = {
    "residual": (lambda: build("resnet8"), (3, 16, 16)),
    "grouped": (grouped, (3, 9, 9)),
    "shared": (Shared, (6,)),
    "cut in two": (example_models.cut_in_two, (5,)),
    "lenet5": (lambda: build("lenet5"), (3, 32, 32)),
    "recurrent": (lambda: nn.GRU(3, 5, batch_first=True), (7, 3)),
    "one layer": (lambda: nn.Linear(4, 3), (4,)),
    "pooled": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.ReLU()), (2, 8, 8)),
    "normalised": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()), (2, 8, 8)),
    "frozen": (lambda: nn.Sequential(nn.Linear(4, 3).requires_grad_(False), nn.Tanh(), nn.Linear(3, 2)), (4,)),
}


#: Columns of the table of layers after the name, by the names in JSON.
_OF_WEIGHTS = ("weights", "sparsity")
_OF_STEP = ("step", "of dense", "forward", "input_gradient", "weight_gradient")


def numbers_in(line: str) -> list[float]:
    """The figures of a table's line; shares of one where they are in percent."""
    scales = {"": 1.0, "%": 0.01, " k": 1e3, " M": 1e6, " G": 1e9, " T": 1e12}
    return [
        float(number.replace(",", "")) * scales[unit] for number, unit in re.findall(r"(\d[\d,.]*)(%| [kMGT]\b|)", line)
    ]


def check_cells(report: FlopReport, figures: dict[str, Any]) -> None:
    """Compare each figure of the tables of layers and of steps with JSON's."""
    console = Console(file=io.StringIO(), width=500, markup=False, emoji=False, highlight=False)
    console.print(Page(report, steps=True))
    page = console.file.getvalue()  # type: ignore[attr-defined]
    titles = ("Layers: FLOP of", f"{report.name}: {report.schedule}, ", "FLOP of one sample's backward pass")
    places = [page.index(title) for title in titles]
    tables = [page[begin:end] for begin, end in itertools.pairwise([*places, len(page)])]
    lines = {line.split("  ")[0].strip(): line for line in tables[0].splitlines()}
    structure = "observed" if "observed_step" in figures["layers"][0] else "pruned"
    names = [name for name in figures["layers"][0] if name not in ("layer", "sparsity")]
    total = {name: sum(layer[name] for layer in figures["layers"]) for name in names} | {"layer": "all"}
    total["sparsity"] = total["zeros"] / max(1, total["weights"])
    for layer in [*figures["layers"], total]:
        of_step = [layer[f"{structure}_{name}"] for name in _OF_STEP if name != "of dense"]
        of_step.insert(1, of_step[0] / layer["dense_step"] if layer["dense_step"] else None)
        expected = [
            *(layer[name] for name in _OF_WEIGHTS if layer["weights"]),
            *(each for each in of_step if each is not None),
            *((layer["jacobian_nnz"], layer["jacobian_nbytes"] / 2**20) if layer["weights"] else ()),
            layer["dense_step"],
        ]
        assert numbers_in(lines[layer["layer"]].replace(layer["layer"], "", 1)) == pytest.approx(
            expected, rel=6e-3, abs=0.51
        )
    steps = [*figures["steps"], *([figures["input_gradient"]] if figures["input_gradient"] else [])]
    for step in steps:
        product = f"{step['left']}·{step['right']}"
        (line,) = (line for line in tables[1].splitlines() if f" {product} " in line)
        shown = numbers_in(line.split(product)[1])
        expected = [step["flop"], *([] if step["executed"] is None or not step["live"] else [step["executed"]])]
        assert shown[: len(expected)] == pytest.approx(expected, rel=6e-3, abs=0.51)
        assert shown[len(expected)] == pytest.approx(1 - step["nnz"] / max(1, step["m"] * step["n"]), abs=1e-4)
    for row in figures["backpropagation"]:
        (line,) = (line for line in tables[2].splitlines() if f"back-propagation, {row['structure']}" in line)
        assert numbers_in(line)[0] == pytest.approx(row["activations"], rel=6e-3, abs=0.51)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("observed", [False, True])
def test_every_printed_figure_is_one_of_the_report(case: str, observed: bool) -> None:
    torch.manual_seed(0)
    make, shape = CASES[case]
    model = make().eval()
    if case not in ("cut in two", "recurrent"):
        prune_weights(model, 0.6)
    options = {"structure": "observed", "inputs": torch.randn(2, *shape), "executed": True} if observed else {}
    report = count_flop(model, shape, **options)  # type: ignore[arg-type]
    figures = json.loads(json.dumps(report.to_dict()))
    for step in figures["summary"]["steps"]:
        for quantity in ("forward", "input_gradient", "weight_gradient", "step"):
            assert step[quantity] == pytest.approx(
                sum(layer[f"{step['structure']}_{quantity}"] for layer in figures["layers"])
            )
    page = str(report)
    for step in report.summary().steps:
        assert " ".join([short(round(step.step)), percent(step.of_dense)]) in " ".join(page.split())
    for layer in report.layers:
        assert f"{layer['layer']} " in page
    scan = report.summary().scan
    if scan is not None:
        assert f"takes {ratio(scan.work_ratio)} times" in " ".join(page.split())
    check_cells(report, figures)
    check_figures(page.split("Layers: FLOP of")[0], figures)
    dense = report.summary().steps[0]
    assert dense.weight_gradient == sum(layer.weight_gradient for layer in report.operators)


#: What units of printed figures stand for.
_UNITS = {
    "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "%": 0.01,
    "ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "GB/s": 1e9,
}  # fmt: skip
_FIGURE = re.compile(
    r"(?<![\w.])(\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)(?: ?(%|[kMGT]\b|[nµm]?s\b|GB/s|[KMG]iB|B\b))?(?!\w)"
)


def figures_in(page: str) -> list[tuple[str, float, float]]:
    """The figures of a page: as printed, their values, and how far these may be off by rounding."""
    figures = []
    for number, unit in _FIGURE.findall(page):
        mantissa, _, exponent = number.rstrip(",").replace(",", "").partition("e")
        scale = _UNITS[unit] * 10.0 ** int(exponent or 0)
        # Where there is a unit, there are three digits, without zeros at their end.
        digits = max(len(mantissa.partition(".")[2]), 3 - len(mantissa.replace(".", "")) if unit else 0)
        figures.append((f"{number} {unit}", float(mantissa) * scale, 0.501 * scale * 10.0**-digits))
    return figures


def numbers_of(value: object) -> Iterator[float]:
    """All numbers in JSON, those that are keys included."""
    if isinstance(value, dict):
        yield from numbers_of([*value, *value.values()])
    elif isinstance(value, list):
        for each in value:
            yield from numbers_of(each)
    elif isinstance(value, (int, float)) or (isinstance(value, str) and value.isdecimal()):
        yield float(value)


def strings_of(value: object) -> Iterator[str]:
    """All words in JSON that stand on pages as they are, such as names, remarks and equations."""
    if isinstance(value, dict):
        yield from (each for key, item in value.items() if key not in ("verdict", "criterion", "conclusion")
                    for each in strings_of(item))  # fmt: skip
    elif isinstance(value, list):
        for each in value:
            yield from strings_of(each)
    elif isinstance(value, str) and len(value) > 1:
        yield value


def page_of(result: object) -> str:
    console = Console(file=io.StringIO(), width=500, markup=False, emoji=False, highlight=False)
    console.print(result)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def check_figures(page: str, figures: dict[str, Any], *texts: str) -> None:
    """Compare each figure of a page with all of JSON's; `texts` are other words with numbers."""
    page = " ".join(page.split())
    for words in sorted({*strings_of(figures), *texts}, key=len, reverse=True):
        page = page.replace(words, "")
    numbers = [*numbers_of(figures)]
    for printed, value, rounding in figures_in(page):
        assert any(abs(value - number) <= rounding + 1e-12 * abs(number) for number in numbers), printed


def check_row(line: str, expected: list[float]) -> None:
    """Compare the figures of a table's line with numbers, in order."""
    shown = figures_in(line)
    assert len(shown) == len(expected), line
    for (printed, value, rounding), number in zip(shown, expected, strict=True):
        assert abs(value - number) <= rounding + 1e-12 * abs(number), (printed, number)


@pytest.mark.parametrize("case", CASES)
def test_every_figure_of_simulate_is_one_in_json(case: str) -> None:
    torch.manual_seed(0)
    make, shape = CASES[case]
    model = make().eval()
    if case not in ("cut in two", "recurrent"):
        prune_weights(model, 0.6)
    simulation = simulate(model, torch.randn(2, *shape), workers=(1, 2, 8), rate=1e9)
    figures, page = json.loads(json.dumps(simulation.to_dict())), page_of(simulation)
    check_figures(page, figures, "1f1b")
    lines = page.split("sent")[1].splitlines()[2:]
    for row, line in zip(figures["rows"], (line for line in lines if line.strip()), strict=False):
        names = ("workers", "seconds", "memory", "sent")
        check_row(line.replace(row["method"], "", 1), [row[name] for name in names])
    # One dense training step is what flop counts, and the weights of batch normalisation beside it.
    step = count_flop(model, shape, schedule="linear").summary().steps[0].step
    elements = {"residual": 4096, "normalised": 108}.get(case, 0)
    assert simulation.methods["bp"][0].seconds * 1e9 / 2 == pytest.approx(step + elements)


@pytest.mark.parametrize("case", [case for case in CASES if case != "recurrent"])
def test_every_figure_of_compare_is_one_in_json(case: str) -> None:
    torch.manual_seed(0)
    make, shape = CASES[case]
    model = make().eval()
    if case != "cut in two":
        prune_weights(model, 0.6)
    methods = ("substitution",) if case == "residual" else None
    comparison = _unmeasured(compare(model, torch.randn(2, *shape), seconds=0.0, methods=methods))
    figures, page = json.loads(json.dumps(comparison.to_dict())), page_of(comparison)
    check_figures(page, figures)
    lines = page.splitlines()
    for row in figures["rows"]:
        if row["steps"] is None:
            # It stands in no table.
            assert f"{row['method']}: {row['remark']}." in lines
            continue
        line = next(line for line in lines if line.split()[:1] == [row["method"]])
        names = ("steps", "multiply_adds", "entries", "iterations", "seconds")
        until_done = (row["multiply_adds_until_done"] or {}).values()
        expected = [*(row[name] for name in names if row[name] is not None), *until_done]
        check_row(line.replace(row["method"], "", 1), expected)


def test_weights_that_several_operators_read_are_counted_once() -> None:
    for pruned in (False, True):
        shared = Shared()
        if pruned:
            prune_weights(shared, 0.5)
        summary = count_flop(shared, (6,), schedule="linear").summary()
        assert (summary.weights, summary.zeros, summary.weight_nbytes) == (36, 18 * pruned, 4 * 42)
    sequence = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (5, 3)), Last())
    assert count_flop(sequence, (15,), schedule="linear").summary().weights == 4 * 4 * (3 + 4)
    attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    assert count_flop(attention, (3, 4), schedule="linear").summary().weights == 4 * 4 * 4 + 2 * 4 * 8


class Last(nn.Module):
    """The last state of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0][:, -1]


def test_what_the_network_lacks_is_named() -> None:
    report = count_flop(example_models.cut_in_two(), (5,))
    (empty, dense) = report.warnings
    assert empty.startswith(
        "No weight is left in layer 2; no gradient reaches layer 0; the output does not change with the input. Prune "
    )
    advice = "dense kernels may be faster there; jacsparse bench measures."
    assert dense == f"At most half is pruned of layer 0 (0%), layer 4 (0%): {advice}"
    assert report.summary().without_weights == ("2",)
    assert "part of the network is cut off" in " ".join(str(report.summary()).split())
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        net[0].weight[:3] = 0
    (warning,) = count_flop(net, (4,)).warnings[-1:]
    assert warning.startswith("Zero weights without a mask are in layer 0 (12): a training step fills them")


class Around(nn.Module):
    """A layer without a weight, and a way around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x)


def test_an_output_that_no_input_reaches_is_told() -> None:
    told = "the output does not change with the input"
    ways = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        # Weights are left in each layer, but what the first one gives, the second one does not read.
        ways[0].weight[2:] = 0
        ways[2].weight[:, :2] = 0
    report = count_flop(ways, (4,))
    assert report.constant and told in report.warnings[0]
    around = Around()
    report = count_flop(around, (4,))
    assert not report.constant and told not in " ".join(report.warnings)
    recurrent = nn.RNN(3, 4, batch_first=True)
    with torch.no_grad():
        recurrent.weight_hh_l0.zero_()
    assert not count_flop(recurrent, (5, 3)).constant


def many_layers() -> nn.Module:
    """Layers with long names, of which some have no weights, some few zeros, and none a mask."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(24)]
    with torch.no_grad():
        for number, layer in enumerate(layers):
            layer.weight[: number % 8 + 1] = 0
    blocks = [OrderedDict({f"conv{number}": layer}) for number, layer in enumerate(layers)]
    named = {f"denselayer{number}": nn.Sequential(block) for number, block in enumerate(blocks)}
    return nn.Sequential(OrderedDict({"features": nn.Sequential(OrderedDict(named)), "classifier": nn.Linear(8, 8)}))


def test_the_first_page_has_24_lines_at_most_and_warnings_name_the_first_layers() -> None:
    report = count_flop(many_layers(), (8,), structure="observed", inputs=torch.randn(2, 8))
    pages = {}
    for explain in (False, True):
        console = Console(file=io.StringIO(), width=80, markup=False, emoji=False, highlight=False)
        console.print(Page(report, explain=explain))
        pages[explain] = console.file.getvalue()  # type: ignore[attr-defined]
    first = pages[False].split("Layers: FLOP of")[0].rstrip().splitlines()
    assert len(first) <= 24
    page = " ".join(" ".join(first).split())
    assert "No weight is left in features.denselayer7.conv7 and 2 more; no gradient reaches features" in page
    assert "Zero weights without a mask are in features.denselayer0.conv0 (8) and 23 more:" in page
    assert len(report.warnings) == 3 and "and ... more" in pages[False] and "and ... more" not in pages[True]
    for warning in report.warnings:
        assert warning in " ".join(pages[True].split()) and warning in report.to_dict()["warnings"]


if __name__ == "__main__":
    import os
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        sys.path.insert(0, str(Path.cwd()))
        checkpoint(Path(temporary))
        PAGES.mkdir(exist_ok=True)
        os.chdir(temporary)
        for page in COMMANDS:
            for columns, lines in printed(page).items():
                (PAGES / f"{page}-{columns}.txt").write_text(lines, encoding="utf-8")
