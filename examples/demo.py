"""Train, prune, retrain, analyse and check a VGG-11, and train a GRU by two libraries: minutes on two cores.

``python -m examples.demo --out DIR`` runs it; its exit status is 1 where a check fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jacsparse.models import Dataset, TrainSettings, default_settings, load_data, progress_bar, train
from torch import nn

from jacsparse import count_flop
from jacsparse.nn import Scan
from jacsparse.terminal import console, new_table

SCHEDULE = "blelloch:2"


@dataclass(frozen=True)
class Check:
    """A figure, and what is asked of it, if anything."""

    name: str
    measured: str
    asked: str = ""
    passed: bool = True


def vgg11_settings(out: Path | None = None, seed: int = 0) -> TrainSettings:
    """Settings for VGG-11 that are quick on a small data set, unlike the thesis' of `default_settings`.

    Parameters
    ----------
    out : Path, optional
        The folder of the checkpoint; without one, nothing is written.
    seed : int
        Seed of the training.
    """
    return TrainSettings(
        task="vgg11",
        out=None if out is None else out / "vgg11.safetensors",
        epochs=4,
        batch=32,
        optimizer="adam",
        lr=3e-4,
        decay="cosine",
        prune=0.97,
        rescale=True,
        retrain_epochs=4,
        retrain_lr=2e-3,
        seed=seed,
        options={"dropout": 0.0},
    )


def gru_settings(out: Path, seed: int = 0) -> TrainSettings:
    """Settings for synthetic tones, with fewer epochs and larger steps than the thesis'."""
    settings = default_settings("irmas")
    return replace(settings, data="tones", out=out / "gru.safetensors", epochs=40, lr=3e-3, seed=seed)


def images(settings: TrainSettings, picture: Path) -> list[Check]:
    """Train, prune and retrain a network, count its FLOP, and compare the scan's gradients with autograd's."""
    data = load_data(settings.data)
    with progress_bar(console()) as progress:
        result = train(replace(settings, engine="sparse"), data=data, progress=progress)
    features, samples = result.model.get_submodule("features"), data.test_inputs[:4]
    report = count_flop(features, samples.shape[1:], schedule=SCHEDULE, structure="observed", inputs=samples)
    report.plot(picture)
    console().print(report.summary())
    # The model changes in place, since a pruned module cannot be copied once it has run.
    model, x = result.model.double().eval(), samples[:2].double()
    difference = largest_difference(gradients(Scan(model, schedule=SCHEDULE), model, x), gradients(model, model, x))
    before, pruned, after = (result.accuracy[name] for name in ("trained", "pruned", "retrained"))
    return [
        Check("test accuracy before pruning", f"{before:.1%}"),
        Check(f"with {settings.prune:.0%} pruned, not retrained", f"{pruned:.1%}"),
        Check("retrained", f"{after:.1%}", "at least 90%", after >= 0.9),
        Check("lost by pruning", f"{(before - after) * 100:.1f} points", "at most 3", before - after <= 0.03),
        Check("scan's gradient, to autograd's", f"{difference:.1e}", "at most 1e-10", difference <= 1e-10),
    ]


def gradients(runner: nn.Module, model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of the squared outputs of `runner` with respect to the input and the model's parameters."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(runner(x).square().sum(), [x, *model.parameters()])


def largest_difference(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference of a tensor, relative to its largest element."""
    pairs = zip(actual, expected, strict=True)
    return max(float((a - b).abs().max() / (b.abs().max() if b.any() else 1)) for a, b in pairs)


def sounds(settings: TrainSettings, data: Dataset | None = None) -> list[Check]:
    """Train a GRU by PyTorch's layer, and by jacsparse's."""
    assert settings.out is not None
    out, results = Path(settings.out), []
    for backward in ("bp", "scan"):
        run = replace(settings, backward=backward, out=out.with_stem(f"{out.stem}-{backward}"))
        with progress_bar(console()) as progress:
            results.append(train(run, data=data, progress=progress))
    torchs, ours = results
    pairs = zip(torchs.points, ours.points, strict=True)
    difference, accuracy = max(abs(a.train_loss - b.train_loss) for a, b in pairs), ours.accuracy["trained"]
    seconds = " and ".join(f"{each.points[-1].seconds:.1f} s" for each in results)
    return [
        # Chance has 9 %.
        Check("GRU's test accuracy", f"{accuracy:.1%}", "at least 35%", accuracy >= 0.35),
        Check("losses by jacsparse.nn.GRU, to torch.nn.GRU's", f"{difference:.1e}", "at most 1e-3", difference <= 1e-3),
        Check("training by torch.nn.GRU and by jacsparse.nn.GRU", seconds),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for checkpoints and pictures")
    parser.add_argument("--seed", type=int, default=0, help="of the training")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    checks = [
        *images(vgg11_settings(options.out, options.seed), options.out / "flop.png"),
        *sounds(gru_settings(options.out, options.seed)),
    ]
    table = new_table("")
    for column in ("check", "measured", "asked", ""):
        table.add_column(column)
    for check in checks:
        verdict = ("passed" if check.passed else "FAILED") if check.asked else ""
        table.add_row(check.name, check.measured, check.asked, verdict)
    console().print(table)
    for path in sorted(options.out.iterdir()):
        console().print(f"  {path}", soft_wrap=True)
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
