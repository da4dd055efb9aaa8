"""Training ResNets by back-propagation, synthetic and delayed gradients: Figures 3, 4, 5 and 7, and Table 3."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from jacsparse.models import Progress, TrainSettings, default_settings, evaluate, load_data, train
from torch import nn

from jacsparse.distributed import RankError
from jacsparse.figures import BLUE, GREEN, ORANGE

from ._calls import one_thread
from ._context import Context, Timing
from ._curves import averaged
from ._environment import cores
from ._experiment import Experiment
from ._figures import Line, Panel, Picture
from ._ranks import Say, on_ranks
from ._rows import Group, Row, compare
from ._synthetic_gradients import SyntheticGradients

_NAMES = {"bp": "back-propagation", "dni": "synthetic gradients (DNI)", "ddg": "delayed gradients (DDG)"}
#: The layer after which ResNet-8 is cut, by the path of the part that follows.
_LAYERS = {"group1": 1, "group2": 3, "group3": 5, "pool": 7}
#: Best test accuracies in percent by back-propagation and by delayed gradients with K = 2, by source, data and network.
#: The second source prints errors of 6.19 % and 6.89 %.
_PUBLISHED = {
    "Huo et al., Table 3": {
        ("CIFAR-10", "resnet56"): (93.12, 93.11),
        ("CIFAR-10", "resnet110"): (93.53, 93.41),
        ("CIFAR-100", "resnet56"): (69.79, 70.17),
        ("CIFAR-100", "resnet110"): (71.39, 71.90),
    },
    "the authors of FDG": {("CIFAR-10", "resnet56"): (93.81, 93.11)},
}
#: What data are called in headings.
_IMAGES = {"digits": "scikit-learn's digits (not CIFAR)", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}

#: Seconds of training, losses and shares of right labels at the end of each epoch: ``seconds``, ``train_loss``,
#: ``train_accuracy``, ``test_loss`` and ``test_accuracy``.
_History: TypeAlias = dict[str, list[float]]


@dataclass(frozen=True)
class _Training:
    """A training on images averaged to `side` × `side`; the process that calls it may be one of several."""

    settings: TrainSettings
    side: int
    #: Modules of synthetic gradients, in the place of the settings' way back.
    predicted: Sequence[str] | int | None = None

    def __call__(self, say: Say) -> _History:
        data, on_training = averaged(load_data(self.settings.data), self.side), list[tuple[float, float]]()
        samples = slice(len(data.test_labels))

        def progress(now: Progress) -> None:
            say(f"epoch {now.epoch} of {now.epochs}")
            if now.accuracy is not None:
                # As many training images as there are test images.
                on_training.append(evaluate(now.model, data.train_inputs[samples], data.train_labels[samples]))

        def synthetic(model: nn.Module, optimizer: Any) -> SyntheticGradients:
            assert self.predicted is not None
            options: dict[str, Any] = {"classes": data.classes, "example": data.train_inputs[:1]}
            return SyntheticGradients(model, modules=self.predicted, optimizer=optimizer, **options)

        trainer = None if self.predicted is None else synthetic
        points = train(self.settings, data=data, progress=progress, trainer=trainer).points
        ends = [point for point in points if not math.isnan(point.test_loss)]
        history = {name: [getattr(end, name) for end in ends] for name in ("seconds", "test_loss", "test_accuracy")}
        losses, accuracies = ([each[number] for each in on_training] for number in range(2))
        return {**history, "train_loss": losses, "train_accuracy": accuracies}


@dataclass(frozen=True)
class DdgConvergence(Experiment):
    """ResNet-8 cut in several places, and deeper networks in a process of one thread for each module.

    The default is a short training on small digits. `on` returns the paper's.
    """

    #: Data as `load_data` takes them, and the height and width to which images are averaged.
    data: str = "digits"
    side: int = 16
    augment: bool = False
    batch: int = 64
    #: Epochs of ResNet-8, and of each deeper network.
    epochs: int = 12
    deep_epochs: int = 15
    #: Where ResNet-8 is cut in two (Figure 3), and into how many modules it is cut (Figure 4).
    splits: tuple[str, ...] = ("group1", "group2", "group3", "pool")
    modules: tuple[int, ...] = (3, 4, 5)
    #: Deeper networks, and into how many modules they are cut (Figures 5 and 7); by default as far as cores reach.
    deep: tuple[str, ...] = ("resnet56",)
    most: int | None = None

    name = "ddg_convergence"
    title = "Training ResNets by back-propagation, synthetic and delayed gradients"
    source = "Huo et al., 2018, Figures 3, 4, 5 and 7 and Table 3: on scikit-learn's digits, or with --data on CIFAR"

    def on(self, data: str) -> DdgConvergence:
        return replace(
            self,
            data=data,
            side=32,
            augment=True,
            batch=128,
            epochs=300,
            deep_epochs=300,
            deep=("resnet56", "resnet110"),
        )

    def run(self, context: Context) -> list[Row]:
        source = load_data(self.data).source
        where = f"{_IMAGES.get(source, source)}, {self.side} × {self.side}, batch {self.batch}"
        rows = self._shallow(context, f"{self.epochs} epochs of {where}")
        for network in self.deep:
            rows += self._deep(context, network, f"{self.deep_epochs} epochs of {where}")
        return rows

    def _shallow(self, context: Context, where: str) -> list[Row]:
        """ResNet-8, all modules in one process, as in the paper."""
        training = partial(self._training, "resnet8", self.epochs)
        peers = _rows(context, training("bp"), f"ResNet-8: {where}")
        cuts: dict[str, Sequence[str] | int] = {
            f"K = 2, cut after layer {_LAYERS[split]} (Figure 3)": [split] for split in self.splits
        }
        cuts |= {f"K = {modules} (Figure 4)": modules for modules in self.modules}
        others = [
            row
            for cut, modules in cuts.items()
            for method in ("dni", "ddg")
            for row in _rows(context, training(method, modules), f"ResNet-8, {cut}: {where}", peers)
        ]
        return [*peers, *others]

    def _deep(self, context: Context, network: str, where: str) -> list[Row]:
        """A deeper network, each module in a process of one thread; at least two modules, as in Figure 7."""
        training = partial(self._training, network, self.deep_epochs)
        peers = _rows(context, training("bp"), f"{network}: {where}")
        rows = [*peers, *_published(network, f"{network}: {where}")]
        for modules in range(2, max(2, self.most or min(4, cores())) + 1):
            group = f"{network}, K = {modules} (Figures 5 and 7): {where}"
            rows += _rows(context, training("ddg", modules), group, peers, processes=modules)
        return rows

    def _training(
        self, network: str, epochs: int, method: str, modules: Sequence[str] | int | None = None
    ) -> _Training:
        """The paper's training of a network by a method, as long and on such data as here."""
        settings = replace(
            default_settings(network),
            data=self.data,
            backward="bp" if method == "dni" else method,
            modules=modules if method == "ddg" else None,
            epochs=epochs,
            batch=self.batch,
            augment=self.augment,
        )
        return _Training(settings, self.side, modules if method == "dni" else None)

    def picture(self, rows: Sequence[Row]) -> Picture:
        drawn = [row for row in rows if "history" in row.data]
        peers = [row for row in drawn if row.data["method"] == "bp"]
        panels = []
        for group in dict.fromkeys(row.group for row in drawn if row.data["method"] != "bp"):
            of_group = [row for row in drawn if row.group == group]
            networks = {row.data["network"] for row in of_group}
            shown = [*(row for row in peers if row.data["network"] in networks), *of_group]
            name = group.partition(":")[0].replace(" (", "\n(")
            panels += [
                _panel(shown, x, name) for x in (("epochs",) if "resnet8" in networks else ("epochs", "seconds"))
            ]
        images = " and ".join(dict.fromkeys(row.data["images"] for row in drawn))
        title = f"{self.title}:\n{images}; solid: test images; dashed: training images"
        return Picture(title, panels, (8.0, 1.2 + 2.3 * -(-len(panels) // 3)), columns=3, legend=len(_NAMES))


def _rows(
    context: Context, training: _Training, group: str, peers: Sequence[Row] = (), *, processes: int = 1
) -> list[Row]:
    """The best test accuracy of a training, and the time of its epochs, beside back-propagation's."""
    settings, method = training.settings, "dni" if training.predicted is not None else training.settings.backward
    label = _NAMES[method]
    say = context.under(f"{group.partition(': ')[0]}, {label}").say
    try:
        with one_thread():
            history = training(say) if processes == 1 else on_ranks(training, processes, say)[-1]
    except (FloatingPointError, RankError) as error:
        return [Row.missing(label, str(error), group=group)]
    rows, images = Group(group, role="ours" if peers else "peer"), settings.data.partition(":")[0]
    data = {"network": settings.task, "method": method, "images": _IMAGES[images], "history": history}
    best, last = 100 * max(history["test_accuracy"]), {name: values[-1] for name, values in history.items()}
    note = (
        f"after the last epoch loss {last['train_loss']:.3g} and accuracy {last['train_accuracy']:.1%} on training "
        f"images, {last['test_loss']:.3g} and {last['test_accuracy']:.1%} on test images"
    )
    accuracy = rows.value(label, best, "best test accuracy", "%", note=note, data=data)
    epochs = [end - begin for begin, end in itertools.pairwise([0.0, *history["seconds"]])]
    note = f"{processes} process(es) of one thread, on {cores()} core(s)"
    seconds = rows.timed(f"epoch by {label}", Timing(epochs, len(epochs)), note=note)
    if peers:
        rows.add(accuracy.beside(*compare("accuracy / back-propagation's", accuracy, peers[0])))
        rows.add(seconds.beside(*compare(f"back-propagation / {method.upper()}", peers[-1], seconds)))
    return rows.rows()


def _published(network: str, group: str) -> list[Row]:
    """Rows of published accuracies of a network, on CIFAR."""
    rows, fields = list[Row](), {"group": group, "role": "reference"}
    for source, figures in _PUBLISHED.items():
        for data in (data for data, published in figures if published == network):
            for method, accuracy in zip(("bp", "ddg"), figures[data, network], strict=True):
                label = f"published by {source}: {_NAMES[method]}"
                note = f"{accuracy} % on {data}{', K = 2' if method == 'ddg' else ''}, 300 epochs"
                rows.append(Row.of_value(label, accuracy, "best test accuracy", "%", note=note, **fields))
    return rows


def _panel(rows: Sequence[Row], x: str, title: str) -> Panel:
    """Losses of trainings over epochs or seconds; accuracies are in the rows."""
    colours, lines = dict(zip(_NAMES, (ORANGE, GREEN, BLUE), strict=True)), []
    for row in rows:
        history, method = row.data["history"], row.data["method"]
        places = history["seconds"] if x == "seconds" else range(1, len(history["seconds"]) + 1)
        for images, style in (("train", "--"), ("test", "-")):
            label = _NAMES[method] if images == "test" else ""
            lines.append(Line(places, history[f"{images}_loss"], label, colours[method], style))
    label = "seconds of training" if x == "seconds" else "epochs"
    return Panel(lines, title, label, "loss", log="y", size=8)
