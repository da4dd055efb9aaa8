"""A demo of a few minutes on two cores: train, prune, retrain, analyse and check a VGG-11, and train a GRU.

``python -m jacsparse.models.demo --out DIR`` runs it; its exit status is 1 where a check fails, 2 where it cannot run.
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

    from .dataset import Dataset
    from .settings import TrainSettings

_SCHEDULE = "blelloch:2"
_PRUNED = 0.97
#: Test images on which FLOP are counted.
_OBSERVED = 4
#: VGG-11's checks: the least accuracy, the most that pruning may cost, and the tolerance of the scan's gradient.
_LEAST_ACCURACY, _MOST_LOST, _TOLERANCE = 0.90, 0.03, 1e-10
#: The GRU's checks: the least accuracy, where chance has 9 %, and the tolerance of the losses of both trainings.
_LEAST_HEARD, _LOSSES = 0.35, 1e-3


@dataclass(frozen=True)
class _Check:
    """A line of the verdict; without a requirement in `asked` it is only a figure."""

    name: str
    measured: str
    asked: str = ""
    passed: bool = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jacsparse.models.demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the checkpoint and the pictures")
    parser.add_argument("--seed", type=int, default=0, help="of the training")
    options = parser.parse_args(arguments)
    from rich.console import Console

    try:
        return _run(options.out, options.seed, Console(highlight=False))
    except (OSError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(out: Path, seed: int, console: Console) -> int:
    begin = time.perf_counter()
    _prepare(out)
    images = replace(vgg11_settings(out, seed), engine="sparse")
    checks = [*_images(images, console), *_sounds(_sound_settings(out, seed), console)]
    _show_verdict(checks, console)
    for path in sorted(out.iterdir()):
        console.print(f"  {path}", soft_wrap=True)
    console.print(f"{time.perf_counter() - begin:.0f} s")
    return 0 if all(check.passed for check in checks) else 1


def _images(settings: TrainSettings, console: Console) -> list[_Check]:
    """Train, prune and retrain a VGG-11, count its FLOP, and compare gradients."""
    from ..flop import count_flop, totals
    from .data import load_data
    from .progress import progress_bar
    from .training import train

    data = load_data(settings.data)
    console.print(
        f"1 of 4: VGG-11 on {data.source}: {settings.epochs} epochs; {_PRUNED:.0%} of each layer's weights pruned and "
        f"the rest rescaled to the layer's norm; {settings.retrain_epochs} epochs of retraining by sparse layers"
    )
    with progress_bar(console) as progress:
        result = train(settings, data=data, progress=progress)
    console.print(f"2 of 4: counting the FLOP of its convolutional part on {_OBSERVED} test images ...")
    features, images = result.model.get_submodule("features"), data.test_inputs[:_OBSERVED]
    report = count_flop(features, images.shape[1:], schedule=_SCHEDULE, structure="observed", inputs=images)
    report.plot(settings.outputs[0].with_name("flop.png"))
    console.print("3 of 4: comparing the scan's gradients with autograd's ...")
    difference = _difference(result.model, data.test_inputs[:2])
    console.print(totals(report))
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
    """Train a GRU by PyTorch's layer and by jacsparse's."""
    from .progress import progress_bar
    from .training import train

    data = _sound_data()
    console.print(
        f"4 of 4: GRU on {data.source}: {settings.epochs} epochs by PyTorch's layer, and again by jacsparse's"
    )
    results = {}
    for backward in ("bp", "scan"):
        out = settings.outputs[0]
        run = replace(settings, backward=backward, out=out.with_stem(f"{out.stem}-{backward}"))
        with progress_bar(console) as progress:
            results[backward] = train(run, data=data, progress=progress)
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
    from .data import load_data

    return load_data("tones")


def vgg11_settings(out: Path | None = None, seed: int = 0) -> TrainSettings:
    """Settings for VGG-11 that are quick on a small data set, unlike the thesis' of `default_settings`.

    Parameters
    ----------
    out : Path, optional
        The folder of the checkpoint; without one, nothing is written.
    seed : int
        Seed of the training.
    """
    from .settings import TrainSettings

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
    """Settings for synthetic tones, with fewer epochs and larger steps than the thesis'."""
    from .settings import default_settings

    return replace(default_settings("irmas"), out=out / "gru.safetensors", epochs=40, lr=3e-3, seed=seed)


def _prepare(out: Path) -> None:
    from ..runtime import check_writable

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotADirectoryError(
            f"cannot make the folder {out}: {error.strerror}; choose another with --out"
        ) from error
    check_writable(out / "flop.png")


def _difference(model: nn.Module, images: torch.Tensor) -> float:
    """The largest difference in float64 between a gradient by scan and by autograd, relative to autograd's."""
    from ..nn import Scan

    # The model changes in place, since a pruned module cannot be copied once it has run.
    model = model.double().eval()
    by_autograd = _gradients(model, model, images.double())
    by_scan = _gradients(Scan(model, schedule=_SCHEDULE), model, images.double())
    return max(
        float((a - b).abs().max() / b.abs().max()) if b.any() else float(a.abs().max())
        for a, b in zip(by_scan, by_autograd, strict=True)
    )


def _gradients(runner: nn.Module, model: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of the squared outputs of `runner` with respect to the images and the model's parameters."""
    import torch

    images = images.clone().requires_grad_()
    loss = runner(images).square().sum()
    return torch.autograd.grad(loss, [images, *model.parameters()])


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
