"""The demo, a few minutes on two cores: a VGG-11 is trained, pruned, retrained, analysed and checked; a GRU trained.

Run as ``python -m jacsparse.models.demo --out DIR``; it ends with 1 where a check fails, with 2 where it cannot run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from torch import nn

    from jacsparse._flop import FlopReport

    from ._data import Dataset
    from ._settings import TrainSettings

__all__ = ["main", "vgg11_settings"]

_SCHEDULE = "blelloch:2"
_PRUNED = 0.97
#: Test images that the FLOP are counted on.
_OBSERVED = 4
#: What the demo promises: accuracy, how much of it pruning may cost, and how near the scan's gradient is to autograd's.
_LEAST_ACCURACY, _MOST_LOST, _TOLERANCE = 0.90, 0.03, 1e-10
#: And of the GRU: accuracy, of which chance is 9 %, and how near the losses of both trainings are.
_LEAST_HEARD, _LOSSES = 0.35, 1e-3


@dataclass(frozen=True)
class _Check:
    """A line of the verdict; where nothing is asked, only a figure."""

    name: str
    measured: str
    asked: str = ""
    passed: bool = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the result is the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jacsparse.models.demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the checkpoint and the pictures")
    parser.add_argument("--seed", type=int, default=0, help="of the training")
    given = parser.parse_args(arguments)
    from rich.console import Console

    try:
        return _run(given.out, given.seed, Console(highlight=False))
    except (OSError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(out: Path, seed: int, console: Console) -> int:
    begin = time.perf_counter()
    _prepare(out)
    checks = [*_images(vgg11_settings(out, seed), console), *_sounds(_sound_settings(out, seed), console)]
    _show_verdict(checks, console)
    for path in sorted(out.iterdir()):
        console.print(f"  {path}", soft_wrap=True)
    console.print(f"{time.perf_counter() - begin:.0f} s")
    return 0 if all(check.passed for check in checks) else 1


def _images(settings: TrainSettings, console: Console) -> list[_Check]:
    """Train, prune and retrain; count; compare gradients."""
    from ._data import load_data
    from ._progress import progress_bar
    from ._train import train

    data = load_data(settings.data)
    console.print(
        f"VGG-11 on {data.source}: {settings.epochs} epochs; {_PRUNED:.0%} of each layer's weights pruned and the rest "
        f"rescaled to the layer's norm; {settings.retrain_epochs} epochs of retraining"
    )
    with progress_bar(console) as progress:
        result = train(settings, data=data, progress=progress)
    console.print(f"counting the FLOP of its convolutional part on {_OBSERVED} test images ...")
    report = _flop(result.model, data)
    report.plot(settings.outputs[0].with_name("flop.png"))
    console.print("comparing the scan's gradients with autograd's ...")
    difference = _difference(result.model, data.test_inputs[:2])
    _show_flop(report, console)
    before, after = result.accuracy["trained"], result.accuracy["retrained"]
    lost, tolerance = f"at most {_MOST_LOST * 100:.0f}", f"at most {_TOLERANCE:.0e}"
    return [
        _Check("test accuracy before pruning", f"{before:.1%}"),
        _Check(f"with {_PRUNED:.0%} pruned, not retrained", f"{result.accuracy['pruned']:.1%}"),
        _Check("retrained", f"{after:.1%}", f"at least {_LEAST_ACCURACY:.0%}", after >= _LEAST_ACCURACY),
        _Check("lost by pruning", f"{(before - after) * 100:.1f} points", lost, before - after <= _MOST_LOST),
        _Check("scan's gradient, to autograd's", f"{difference:.1e}", tolerance, difference <= _TOLERANCE),
    ]


def _sounds(settings: TrainSettings, console: Console) -> list[_Check]:
    """Train a GRU by PyTorch's layer and by ours."""
    from ._progress import progress_bar
    from ._train import train

    data = _sound_data()
    console.print(f"GRU on {data.source}: {settings.epochs} epochs by PyTorch's layer, and again by jacsparse's")
    results = {}
    for backward in ("bp", "scan"):
        assert settings.out is not None
        path = Path(settings.out)
        chosen = replace(settings, backward=backward, out=path.with_stem(f"{path.stem}-{backward}"))
        with progress_bar(console) as progress:
            results[backward] = train(chosen, data=data, progress=progress)
    both = zip(results["bp"].points, results["scan"].points, strict=True)
    difference = max(abs(one.train_loss - other.train_loss) for one, other in both)
    accuracy = results["scan"].accuracy["trained"]
    slow, fast = (results[backward].points[-1].seconds for backward in ("bp", "scan"))
    return [
        _Check("GRU's test accuracy", f"{accuracy:.1%}", f"at least {_LEAST_HEARD:.0%}", accuracy >= _LEAST_HEARD),
        _Check(
            "losses by jacsparse.nn.GRU, to torch.nn.GRU's",
            f"{difference:.1e}",
            f"at most {_LOSSES:.0e}",
            difference <= _LOSSES,
        ),
        _Check("training by torch.nn.GRU and by jacsparse.nn.GRU", f"{slow:.1f} s and {fast:.1f} s"),
    ]


def _sound_data() -> Dataset:
    from ._data import load_data

    return load_data("tones")


def vgg11_settings(out: Path | None = None, seed: int = 0) -> TrainSettings:
    """A recipe that is quick on a small data set, unlike the thesis', which `default_settings` has."""
    from ._settings import TrainSettings

    return TrainSettings(
        task="vgg11",
        out=None if out is None else out / "vgg11.safetensors",
        epochs=4,
        batch=32,
        optimizer="adam",
        lr=3e-4,
        decay="cosine",
        prune=_PRUNED,
        rescale=True,
        retrain_epochs=4,
        retrain_lr=2e-3,
        seed=seed,
        options={"dropout": 0.0},
    )


def _sound_settings(out: Path, seed: int) -> TrainSettings:
    """Fewer epochs of larger steps than the thesis', for made-up tones."""
    from ._settings import default_settings

    return replace(default_settings("irmas"), out=out / "gru.safetensors", epochs=40, lr=3e-3, seed=seed)


def _prepare(out: Path) -> None:
    from jacsparse.patterns._files import check_writable

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotADirectoryError(
            f"cannot make the folder {out}: {error.strerror}; choose another with --out"
        ) from error
    check_writable(out / "flop.png")


def _flop(model: nn.Module, data: Dataset) -> FlopReport:
    from jacsparse._flop import count_flop

    features = model.get_submodule("features")
    images = data.test_inputs[:_OBSERVED]
    return count_flop(features, images.shape[1:], schedule=_SCHEDULE, structure="observed", inputs=images)


def _difference(model: nn.Module, images: torch.Tensor) -> float:
    """The largest difference between gradients by scan and by autograd, of the input and each parameter.

    Each is relative to the largest entry of autograd's gradient; float64.
    """
    from jacsparse.nn import Scan

    # In place: a pruned module cannot be copied once it has run.
    model = model.double().eval()
    expected = _gradients(model, model, images.double())
    found = _gradients(Scan(model, schedule=_SCHEDULE), model, images.double())
    return max(
        float((a - b).abs().max() / b.abs().max()) if b.any() else float(a.abs().max())
        for a, b in zip(found, expected, strict=True)
    )


def _gradients(runner: nn.Module, model: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
    import torch

    images = images.clone().requires_grad_()
    loss = runner(images).square().sum()
    return torch.autograd.grad(loss, [images, *model.parameters()])


def _show_flop(report: FlopReport, console: Console) -> None:
    from jacsparse._tables import totals

    console.print(totals(report))


def _show_verdict(checks: Sequence[_Check], console: Console) -> None:
    """Print each check with its figures, and whether it passed."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("check", "measured", "asked", ""):
        table.add_column(column)
    for check in checks:
        verdict = ("passed" if check.passed else "FAILED") if check.asked else ""
        table.add_row(check.name, check.measured, check.asked, verdict)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
