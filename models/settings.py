"""Settings of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import recurrence
from ..schedule import parse
from ..training import check_threads, partition
from .arguments import check_count, check_number, check_one_of
from .classifiers import SequenceClassifier
from .data import split_spec
from .pruning import SCOPES
from .registry import MODELS, build


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of a training. `default_settings` returns those of a task, and ``dataclasses.replace`` changes them.

    Attributes
    ----------
    task : {"bitstream", "irmas", "lenet5", "resnet8", "resnet56", "resnet110", "vgg11"}
        Name of the model.
    data : str
        Data set, as `load_data` takes it: ``digits``, ``cifar10:DIR``, ``cifar100:DIR``, ``bitstream:STEPS``,
        ``irmas:DIR``, ``tones`` or ``file:PATH``.
    features : {"S", "M", "L"}
        Features of sounds, as `load_data` takes them.
    skip_damaged : bool
        Whether to leave out sounds that cannot be used.
    out : path-like or None
        Checkpoint to write after each epoch, a ``.safetensors`` file of the model's state dict. Beside it go the loss
        curves, as ``.csv`` and, at the end, as ``.png``, and `training_state`. Existing files are replaced. With None,
        nothing is written.
    backward : {"bp", "ddg", "leapfrog", "scan"}
        PyTorch's back-propagation; that of `jacsparse.nn`: `Leapfrog`, `Scan`, or the recurrent layer of the same name;
        or modules that go on by themselves, `jacsparse.training.DelayedGradients` (DDG).
    schedule : str
        Schedule of the scan, as these take it.
    threads : int or None
        Threads of `Leapfrog`; None without it.
    modules : int, sequence of str, or None
        Modules of DDG, as `jacsparse.training.partition` takes them; None without these.
    epochs : int
        Epochs before pruning.
    batch : int
        Samples per iteration.
    optimizer : {"sgd", "adam"}
        Optimiser of ``torch.optim``.
    lr, momentum, weight_decay : float
        Parameters of the optimiser; Adam takes no momentum. For recurrent networks the thesis has a learning rate of
        3e-5, which is the default here; its authors' scripts have 1e-5 for the RNN and 3e-4 for the GRU.
    decay : {"constant", "cosine", "steps", "diminishing"}
        Whether the learning rate is constant, goes to zero along a half cosine in each phase, is divided by 10 after
        half and again after three quarters of it, or is ``lr / (1 + t)`` at iteration t (Huo et al., Theorem 2).
    augment : bool
        Whether to shift training images at random by up to 4 pixels, and to mirror them where their classes allow it.
    prune : float
        Fraction of all convolution and linear weights to prune after training, in [0, 1); 0 for none.
    scope : {"layer", "global"}
        Scope of the fraction, as `prune_weights` takes it.
    rescale : bool
        Whether pruning rescales, as `prune_weights` takes it.
    retrain_epochs : int
        Epochs after pruning.
    engine : {"dense", "sparse"}
        What retrains, where `backward` is "bp": the model with its masks, or `jacsparse.sparsify`'s copy of it, which
        computes with the weights that are left alone. Both have the same gradients but for rounding.
    retrain_lr : float or None
        Learning rate after pruning; `lr` where it is None.
    seed : int
        Seed of weights, order, augmentation and dropout.
    options : mapping
        Options of the model other than its classes, as `build` takes them.
    plot : bool
        Whether to draw the loss curves.

    Raises
    ------
    ValueError
        Where a setting is out of its range.
    """

    task: str
    data: str = "digits"
    features: str = "S"
    skip_damaged: bool = False
    out: Path | str | None = None
    backward: str = "bp"
    schedule: str = "auto"
    threads: int | None = None
    modules: int | Sequence[str] | None = None
    epochs: int
    batch: int
    optimizer: str = "sgd"
    lr: float
    momentum: float = 0.9
    weight_decay: float = 0.0
    decay: str = "constant"
    augment: bool = False
    prune: float = 0.0
    scope: str = "layer"
    rescale: bool = False
    retrain_epochs: int = 0
    engine: str = "dense"
    retrain_lr: float | None = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    plot: bool = True

    def __post_init__(self) -> None:
        check_one_of("task", self.task, MODELS)
        split_spec(self.data)
        check_one_of("features", self.features, ("L", "M", "S"))
        check_one_of("backward", self.backward, ("bp", "ddg", "leapfrog", "scan"))
        if issubclass(MODELS[self.task], SequenceClassifier):
            recurrence.parse(self.schedule)
        else:
            parse(self.schedule)
        self._check_workers()
        check_one_of("optimizer", self.optimizer, ("adam", "sgd"))
        check_one_of("decay", self.decay, ("constant", "cosine", "diminishing", "steps"))
        check_one_of("scope", self.scope, SCOPES)
        check_one_of("engine", self.engine, ("dense", "sparse"))
        if self.engine == "sparse" and (self.backward != "bp" or not self.retrain_epochs):
            raise ValueError(
                f"engine is 'sparse', but backward is {self.backward!r} and retrain_epochs is {self.retrain_epochs}; "
                "it retrains pruned networks by 'bp'"
            )
        checked: dict[str, Any] = {
            name: check_count(name, getattr(self, name), least)
            for name, least in (("epochs", 1), ("batch", 1), ("retrain_epochs", 0), ("seed", 0))
        }
        checked["lr"] = check_number("lr", self.lr, 0, open_low=True)
        if self.retrain_lr is not None:
            checked["retrain_lr"] = check_number("retrain_lr", self.retrain_lr, 0, open_low=True)
        checked["momentum"] = check_number("momentum", self.momentum, 0, 1)
        checked["weight_decay"] = check_number("weight_decay", self.weight_decay, 0)
        checked["prune"] = check_number("the fraction to prune", self.prune, 0, 1)
        for name, value in checked.items():
            # Checkpoints store these as JSON, which takes plain numbers only.
            object.__setattr__(self, name, value)
        if not isinstance(self.options, Mapping):
            raise TypeError(f"options is {self.options!r}; expected a mapping of names to values")
        if self.retrain_epochs and not self.prune:
            raise ValueError(
                f"retrain_epochs is {self.retrain_epochs}, but nothing is pruned; set prune, as in 0.97, or no epochs"
            )
        if self.out is not None and Path(self.out).suffix != ".safetensors":
            raise ValueError(f"out is {str(self.out)!r}; expected a file that ends in .safetensors")

    def _check_workers(self) -> None:
        """Raise where threads or modules are missing, or are of another way of training."""
        for name, ways in (("threads", ("leapfrog",)), ("modules", ("ddg",))):
            value = getattr(self, name)
            if self.backward not in ways and value is not None:
                raise ValueError(
                    f"{name} is {value!r}, but backward is {self.backward!r}; set backward to "
                    f"{' or '.join(map(repr, ways))}, or no {name}"
                )
            if self.backward in ways and issubclass(MODELS[self.task], SequenceClassifier):
                raise ValueError(
                    f"backward is {self.backward!r}, but {self.task} has a single recurrent layer; choose bp or scan"
                )
        if self.backward == "leapfrog":
            if self.threads is None:
                raise ValueError("backward is 'leapfrog'; set threads, as in 2")
            check_threads(self.threads)
        if self.backward == "ddg":
            if self.modules is None:
                raise ValueError(f"backward is {self.backward!r}; set modules, as in 2, or where they begin")
            with torch.device("meta"):
                partition(build(self.task), self.modules)
            if not isinstance(self.modules, int):
                object.__setattr__(self, "modules", list(self.modules))

    @property
    def outputs(self) -> tuple[Path, ...]:
        """The files to write: the checkpoint, the curves as text and, with `plot`, as a picture; `training_state`."""
        state = self.training_state
        if self.out is None or state is None:
            return ()
        out = Path(self.out)
        return (out, out.with_suffix(".csv"), *([out.with_suffix(".png")] if self.plot else []), state)

    @property
    def training_state(self) -> Path | None:
        """The file that an interrupted training goes on from: ``.training`` beside the checkpoint.

        It is a safetensors file as well, of the weights and of the state of their training: of the optimiser, of random
        numbers, and the loss curves.
        """
        return None if self.out is None else Path(self.out).with_suffix(".training")

    def to_dict(self) -> dict[str, Any]:
        """The settings that decide the numbers, as plain values: no outputs, threads or folder of data."""
        name, _ = split_spec(self.data)
        data = self.data if name == "bitstream" else name
        values = {**asdict(self), "options": dict(self.options), "data": data}
        return {name: value for name, value in values.items() if name not in ("out", "plot", "threads")}


_RESNET: dict[str, Any] = {
    "epochs": 300,
    "batch": 128,
    "lr": 0.01,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "decay": "steps",
    "augment": True,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "irmas": {"data": "tones", "epochs": 400, "batch": 16, "optimizer": "adam", "lr": 3e-5},
    "bitstream": {"data": "bitstream:1000", "epochs": 50, "batch": 16, "optimizer": "adam", "lr": 3e-5},
    "lenet5": {"epochs": 50, "batch": 256, "lr": 0.001, "momentum": 0.9},
    "resnet8": {"epochs": 300, "batch": 128, "optimizer": "adam", "lr": 0.001, "augment": True},
    "resnet56": _RESNET,
    "resnet110": _RESNET,
    "vgg11": {
        "epochs": 100,
        "batch": 128,
        "lr": 0.01,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "decay": "cosine",
        "augment": True,
        "prune": 0.97,
        "rescale": True,
        "retrain_epochs": 100,
    },
}


def default_settings(task: str) -> TrainSettings:
    """The papers' settings for a task.

    LeNet-5: batches of 256, SGD with learning rate 0.001 and momentum 0.9 (section 3.5); Figure 3.4 shows about 9000
    iterations, which are 50 epochs of CIFAR-10.

    VGG-11: 100 epochs, 97 % of all convolution and linear weights pruned layer by layer, and 100 epochs of retraining,
    published as 90.1 % and 88.9 % on CIFAR-10 (section 4.3). The thesis does not say how VGG-11 was optimised. This
    library takes SGD with learning rate 0.01, momentum 0.9 and weight decay 0.0005, as Simonyan and Zisserman trained
    it, in batches of 128. The rate goes to zero along a cosine, images are shifted and mirrored, and pruning rescales,
    since eleven pruned layers may otherwise pass on too little for retraining.

    ResNets: 300 epochs in batches of 128 of shifted and mirrored images; ResNet-8 by Adam with learning rate 0.001,
    ResNet-56 and ResNet-110 by SGD with 0.01, divided by 10 after epochs 150 and 225, momentum 0.9 and weight decay
    0.0005 (Huo et al., 2018, sections 5.1 and 5.2).

    Bitstreams: 1000 bits, batches of 16, Adam with learning rate 0.00003, 50 epochs (section 4.1, Figure 5.1).

    IRMAS: the same for 400 epochs (section 4.2); the data are synthetic tones unless ``data`` names the real ones.

    Parameters
    ----------
    task : {"bitstream", "irmas", "lenet5", "resnet8", "resnet56", "resnet110", "vgg11"}
        Name of the model.

    Raises
    ------
    ValueError
        Where there is no such task.

    Examples
    --------
    >>> settings = default_settings("vgg11")
    >>> settings.epochs, settings.prune, settings.retrain_epochs
    (100, 0.97, 100)
    """
    check_one_of("task", task, _DEFAULTS)
    return TrainSettings(task=task, **_DEFAULTS[task])
