"""Training by back-propagation, leapfrogging, scan or decoupled modules, with pruning and retraining.

An interrupted training can be resumed.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ..distributed import ranks_of
from ..runtime import check_writable, destroy_process_groups
from ..training import DelayedGradients, in_eval_mode
from .arguments import check_count, check_number
from .checkpoint import Checkpoint, model_of, read_checkpoint, save_checkpoint
from .classifiers import SequenceClassifier
from .curves import PHASES, Point, from_tensor, plot_curves, save_csv, to_tensor
from .data import load_data
from .dataset import Dataset
from .nested_state import from_tensors, to_tensors
from .progress import Progress
from .pruning import prune_weights
from .registry import MODELS, build
from .settings import TrainSettings
from .trainers import OptimizerOf, as_float, optimizer_of, trainer_of

#: Pixels by which augmentation shifts at most.
_SHIFT = 4
#: Samples per batch of a test.
_TEST_BATCH = 256
#: Prefix of the trainer's tensors in the state of a training.
_TRAINER = "trainer/"


@dataclass(frozen=True)
class TrainResult:
    """The result of a training.

    Attributes
    ----------
    model : Module
        The trained model, in eval mode.
    points : list of Point
        The loss curves, with a point for each iteration.
    accuracy : dict of str to float
        Accuracy on the test images: ``trained``, and with pruning ``pruned``, right after it, and ``retrained``.
    """

    model: nn.Module
    points: list[Point]
    accuracy: dict[str, float]


def train(
    settings: TrainSettings,
    *,
    data: Dataset | None = None,
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
    trainer: Callable[[nn.Module, OptimizerOf], Any] | None = None,
) -> TrainResult:
    """Train a model, prune it and retrain it.

    All random numbers come from the settings' seed: the same settings give the same curves on one machine, and a
    resumed training gives those of an uninterrupted one. The caller's random state does not change.

    Parameters
    ----------
    settings : TrainSettings
        The settings, as `default_settings` returns them, or changed.
    data : Dataset, optional
        Data to train on instead of ``settings.data``.
    resume : bool
        Whether to go on from ``settings.training_state``, after its last epoch. Earlier versions kept that state in the
        checkpoint ``settings.out``, from which a training goes on too where there is no such file.
    progress : callable, optional
        Function that takes a `Progress` after each iteration and each epoch, as `progress_bar` yields one.
    trainer : callable, optional
        ``trainer(model, optimizer)`` returns what trains the model instead of ``settings.backward``, with the
        attributes and methods of `jacsparse.training.Backpropagation`; `optimizer` makes one of parameters.

    Raises
    ------
    ValueError
        Where the checkpoint to resume is damaged or of other settings, or the data do not fit.
    OSError
        Where outputs cannot be written, or the checkpoint or the data are missing: before the training begins.
    ImportError
        Where the curves are to be drawn and matplotlib is not installed: before the training begins.
    FloatingPointError
        Where the loss is not finite.

    Examples
    --------
    >>> import dataclasses
    >>> from jacsparse.models import default_settings
    >>> settings = dataclasses.replace(default_settings("lenet5"), epochs=1, optimizer="adam")
    >>> len(train(settings).points)
    6
    """
    _check_outputs(settings)
    count = int(os.environ.get("WORLD_SIZE", "1"))
    recurrent = issubclass(MODELS[settings.task], SequenceClassifier)
    if count > 1 and settings.backward != "ddg" and not (recurrent and settings.backward == "scan"):
        raise ValueError(
            f"backward of {settings.task} is {settings.backward!r}, and there are {count} processes; train in one, by "
            "'ddg' or, a recurrent network, by 'scan'"
        )
    checkpoint = _checkpoint_of(settings) if resume else None
    if data is None:
        data = load_data(settings.data, features=settings.features, skip_damaged=settings.skip_damaged)
    _check_data(settings, data)
    grouped = dist.is_available() and dist.is_initialized()
    with torch.random.fork_rng(devices=[]):
        run = (
            _Run.begin(settings, data, trainer)
            if checkpoint is None
            else _Run.resume(settings, data, checkpoint, trainer)
        )
        with contextlib.nullcontext() if count == 1 else ranks_of(None).during("training"):
            run.execute(progress or (lambda _: None))
    if settings.plot and settings.out is not None and _writes():
        plot_curves(run.points, settings.outputs[2], _title(settings, data, run.accuracy))
    if count > 1 and not grouped:
        destroy_process_groups()
    return TrainResult(run.model.eval(), run.points, run.accuracy)


@torch.no_grad()
def evaluate(module: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """The mean cross-entropy loss, and the share of images with the right label, in eval mode.

    Parameters
    ----------
    module : Module
        The classifier; its modes are restored afterwards.
    images : Tensor, (n, ...)
        Its inputs.
    labels : Tensor, (n,)
        The right labels, int64.

    Raises
    ------
    ValueError
        Where there are no images, or another number of labels.

    Examples
    --------
    >>> evaluate(nn.Identity(), torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([1, 0]))[1]
    0.5
    """
    if not len(labels) or len(images) != len(labels):
        raise ValueError(f"there are {len(images)} images and {len(labels)} labels; expected as many of both, and some")
    loss, right = 0.0, 0
    with in_eval_mode(module):
        for begin in range(0, len(labels), _TEST_BATCH):
            batch = slice(begin, begin + _TEST_BATCH)
            scores = module(as_float(images[batch]))
            loss += functional.cross_entropy(scores, labels[batch], reduction="sum").item()
            right += int((scores.argmax(1) == labels[batch]).sum())
    return loss / len(labels), right / len(labels)


def _check_outputs(settings: TrainSettings) -> None:
    for path in settings.outputs:
        check_writable(path)
    if settings.plot and settings.out is not None:
        from ..figures import new_figure

        new_figure()


def _check_data(settings: TrainSettings, data: Dataset) -> None:
    """Raise ValueError where the model takes images and the data are sequences, or the other way round."""
    sequences = issubclass(MODELS[settings.task], SequenceClassifier)
    if sequences != (data.train_inputs.ndim == 3):
        expected, actual = ("sequences", "images") if sequences else ("images", "sequences")
        remedy = "bitstream:STEPS, irmas:DIR or tones" if sequences else "digits, cifar10:DIR or cifar100:DIR"
        raise ValueError(f"{settings.task} is trained on {expected}, and {data.source} are {actual}; choose {remedy}")


def _checkpoint_of(settings: TrainSettings) -> Checkpoint:
    """The checkpoint to resume; ValueError where it is of a training with other settings."""
    if settings.out is None:
        raise ValueError("out is None, so there is no checkpoint to resume; name the file as out")
    beside = settings.training_state
    assert beside is not None
    path = beside if beside.is_file() else Path(settings.out)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path} to resume; train without resume first")
    checkpoint = read_checkpoint(path)
    before, now = checkpoint.metadata.get("settings"), settings.to_dict()
    if isinstance(before, dict):
        # Checkpoints of earlier versions have no engine.
        before = {"engine": "dense", **before}
    if not isinstance(before, dict) or not checkpoint.state:
        missing = "" if path == beside else f", and there is no {beside}, which would have it"
        raise ValueError(
            f"{path} holds {checkpoint.model}, but no training to resume{missing}; train without resume, to another "
            "file"
        )
    changes = [f"{key} {before.get(key)!r}, not {value!r}" for key, value in now.items() if before.get(key) != value]
    if changes:
        raise ValueError(
            f"{path} is of {checkpoint.model} trained with {', '.join(changes)}; resume with the same settings, or "
            "train without resume, to another file"
        )
    return checkpoint


def _title(settings: TrainSettings, data: Dataset, accuracy: dict[str, float]) -> str:
    figures = ", ".join(f"{name} {value:.1%}" for name, value in accuracy.items())
    by_ours = {
        "scan": f"jacsparse, schedule {settings.schedule}",
        "leapfrog": f"leapfrogging, {settings.threads} threads",
        "ddg": f"delayed gradients, modules {settings.modules}",
    }
    backward = by_ours.get(settings.backward, "back-propagation")
    return f"{settings.task} on {data.source}, {backward}\ntest accuracy: {figures}"


@dataclass
class _Run:
    """A training under way."""

    settings: TrainSettings
    data: Dataset
    model: nn.Module
    # Finished epochs, of both phases.
    done: int = 0
    points: list[Point] = field(default_factory=list)
    accuracy: dict[str, float] = field(default_factory=dict)
    own_trainer: Callable[[nn.Module, OptimizerOf], Any] | None = None
    trainer: Any = field(init=False)

    def __post_init__(self) -> None:
        self._set_trainer()

    def _set_trainer(self) -> None:
        make = self.own_trainer or partial(trainer_of, settings=self.settings, data=self.data)
        self.trainer = make(self.model, optimizer_of(self.settings))

    @classmethod
    def begin(cls, settings: TrainSettings, data: Dataset, trainer: Callable[..., Any] | None) -> _Run:
        torch.manual_seed(settings.seed)
        options = {"in_channels": data.train_inputs.shape[1], **settings.options, "num_classes": data.classes}
        return cls(settings, data, build(settings.task, **options), own_trainer=trainer)

    @classmethod
    def resume(
        cls, settings: TrainSettings, data: Dataset, checkpoint: Checkpoint, trainer: Callable[..., Any] | None
    ) -> _Run:
        model, options = model_of(checkpoint), checkpoint.metadata["options"]
        if (options["num_classes"], options["in_channels"]) != (data.classes, data.train_inputs.shape[1]):
            raise ValueError(
                f"{checkpoint.path} holds {checkpoint.model}, but the data have {data.classes} classes and "
                f"{data.train_inputs.shape[1]} channels; resume with the data that it was trained on"
            )
        run = cls(settings, data, model, own_trainer=trainer)
        try:
            run._restore(checkpoint)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{checkpoint.path} cannot be resumed ({error!r}); it is damaged: train again without resume"
            ) from error
        return run

    def _restore(self, checkpoint: Checkpoint) -> None:
        settings, state, metadata = self.settings, checkpoint.state, checkpoint.metadata
        self.points, self.done = from_tensor(state["points"]), check_count("epoch", metadata["epoch"], 1)
        self.accuracy = {str(name): check_number(name, value, 0, 2) for name, value in metadata["accuracy"].items()}
        if self.done > settings.epochs + settings.retrain_epochs or (
            self.done > settings.epochs and not metadata["pruned"]
        ):
            raise ValueError(f"after {self.done} epochs, {metadata['pruned']:.3g} of its weights are pruned")
        self.trainer.load_state_dict(_trainer_state_of(state))
        for optimizer in self.trainer.optimizers:
            _check_shapes(optimizer)
        torch.set_rng_state(state["random"])

    def execute(self, progress: Callable[[Progress], None]) -> None:
        """Run the remaining epochs."""
        settings = self.settings
        if self.done:
            # Where a training was broken off between its files, all but the first are of the epoch before.
            self._save()
        while self.done < settings.epochs + settings.retrain_epochs:
            if self.done == settings.epochs:
                self._prune()
            phase = PHASES[self.done >= settings.epochs]
            self._epoch(phase, progress)
            self._save()
        if settings.prune and not settings.retrain_epochs and "pruned" not in self.accuracy:
            self._prune()
            self._save()

    def _prune(self) -> None:
        prune_weights(self.model, self.settings.prune, self.settings.scope, rescale=self.settings.rescale)
        self.accuracy["pruned"] = self._test()[1]
        self._set_trainer()

    def _test(self) -> tuple[float, float]:
        return evaluate(self.model, self.data.test_inputs, self.data.test_labels)

    def _epoch(self, phase: str, progress: Callable[[Progress], None]) -> None:
        settings, training = self.settings, phase == "train"
        epochs = settings.epochs if training else settings.retrain_epochs
        epoch = self.done + 1 - (0 if training else settings.epochs)
        batches = torch.randperm(len(self.data.train_labels)).split(settings.batch)
        self._check_iterations(epochs * len(batches))
        self.model.train()
        for number, batch in enumerate(batches, 1):
            self._set_rate(phase, (epoch - 1) * len(batches) + number - 1, epochs * len(batches))
            begin = time.perf_counter()
            loss = self._step(batch)
            seconds = time.perf_counter() - begin + (self.points[-1].seconds if self.points else 0.0)
            if _writes() and not math.isfinite(loss):
                raise FloatingPointError(
                    f"the loss is {loss} in {phase} epoch {epoch}, iteration {number}; lower the learning rate, "
                    f"{self.trainer.optimizers[0].param_groups[0]['lr']:.3g} there"
                )
            self.points.append(Point(phase, epoch, len(self.points) + 1, seconds, loss))
            progress(Progress(phase, epoch, epochs, number, len(batches), loss, self.model))
        self.done += 1
        self.trainer.synchronize()
        test_loss, accuracy = self._test()
        self.points[-1] = replace(self.points[-1], test_loss=test_loss, test_accuracy=accuracy)
        self.accuracy["trained" if training else "retrained"] = accuracy
        loss = self.points[-1].train_loss
        progress(Progress(phase, epoch, epochs, len(batches), len(batches), loss, self.model, accuracy))

    def _set_rate(self, phase: str, iteration: int, iterations: int) -> None:
        """Set the learning rate of an iteration of a phase."""
        settings, share = self.settings, iteration / iterations
        rate = settings.lr if phase == "train" or settings.retrain_lr is None else settings.retrain_lr
        if settings.decay == "cosine":
            rate *= 0.5 * (1 + math.cos(math.pi * share))
        elif settings.decay == "steps":
            rate *= 0.1 ** ((share >= 0.5) + (share >= 0.75))
        elif settings.decay == "diminishing":
            rate /= 1 + iteration
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def _check_iterations(self, iterations: int) -> None:
        modules = len(self.trainer.partition) if isinstance(self.trainer, DelayedGradients) else 1
        if iterations < modules:
            raise ValueError(
                f"there are {iterations} iterations and {modules} modules, of which the first has its first gradient "
                f"after {modules}; take smaller batches, more epochs or fewer modules"
            )

    def _step(self, batch: torch.Tensor) -> float:
        """Train on the samples of these numbers; return their loss, NaN where another process has it."""
        images, labels = as_float(self.data.train_inputs[batch]), self.data.train_labels[batch]
        if self.settings.augment:
            images = _augmented(images, self.data.mirrors)
        loss = self.trainer.step(images, labels)
        return math.nan if loss is None else loss.item()

    def _save(self) -> None:
        if self.settings.out is None:
            return
        trained = self._trainer_state()
        if not _writes():
            return
        metadata = {
            "source": self.data.source,
            "classes": self.data.classes,
            "mean": self.data.mean,
            "std": self.data.std,
            "epoch": self.done,
            "accuracy": self.accuracy,
            "settings": self.settings.to_dict(),
        }
        state = {
            "points": to_tensor(self.points),
            "random": torch.get_rng_state(),
            **{f"{_TRAINER}{name}": tensor for name, tensor in to_tensors(trained).items()},
        }
        # The training goes on from this file alone, so that none of the others has to be of the same epoch.
        assert self.settings.training_state is not None
        save_checkpoint(self.settings.training_state, self.model, metadata=metadata, state=state)
        save_checkpoint(self.settings.out, self.model, metadata=metadata)
        save_csv(self.points, self.settings.outputs[1])

    def _trainer_state(self) -> dict[str, Any]:
        """The trainer's state, on the process that writes it."""
        if isinstance(self.trainer, DelayedGradients) and dist.is_available() and dist.is_initialized():
            return self.trainer.state_dict(to=dist.get_world_size() - 1)
        return self.trainer.state_dict()


def _trainer_state_of(state: Mapping[str, torch.Tensor]) -> Any:
    """The trainer's state in that of a training."""
    if "trainer" in state:
        # As earlier versions wrote it; no code in it is executed.
        return torch.load(io.BytesIO(state["trainer"].numpy().tobytes()), weights_only=True)
    return from_tensors(
        {name.removeprefix(_TRAINER): tensor for name, tensor in state.items() if name.startswith(_TRAINER)}
    )


def _check_shapes(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError where a state is not of its parameter's shape, which optimisers do not check."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape not in (parameter.shape, ()):
                raise ValueError(f"{name} is {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")


def _writes() -> bool:
    """Whether this process has the losses, and writes the files: of several, the last."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == dist.get_world_size() - 1


def _augmented(images: torch.Tensor, mirrors: bool) -> torch.Tensor:
    """Images shifted at random, with their borders repeated, and half of them mirrored if `mirrors`."""
    batch, channels, height, width = images.shape
    padded = functional.pad(images, (_SHIFT,) * 4, mode="replicate")
    rows = torch.randint(2 * _SHIFT + 1, (batch, 1)) + torch.arange(height)
    columns = torch.randint(2 * _SHIFT + 1, (batch, 1)) + torch.arange(width)
    if mirrors:
        columns = torch.where(torch.rand(batch, 1) < 0.5, columns.flip(1), columns)
    samples, planes = torch.arange(batch)[:, None, None, None], torch.arange(channels)[None, :, None, None]
    return padded[samples, planes, rows[:, None, :, None], columns[:, None, None, :]]
