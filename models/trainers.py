"""What makes the steps of a training, as its settings say: the trainer, its optimizer and its processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from ..distributed import ranks_of
from ..sparse import sparsify
from ..training import Backpropagation, DelayedGradients
from .classifiers import SequenceClassifier
from .dataset import Dataset
from .pruning import pruned_fraction
from .settings import TrainSettings

OptimizerOf: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
#: How long one process waits for another.
_TIMEOUT = timedelta(minutes=10)


def as_float(inputs: torch.Tensor) -> torch.Tensor:
    """Bits as float32; floating-point inputs unchanged."""
    return inputs if inputs.is_floating_point() else inputs.float()


def trainer_of(
    model: nn.Module, optimizer: OptimizerOf, settings: TrainSettings, data: Dataset
) -> Backpropagation | DelayedGradients:
    if settings.backward == "ddg":
        assert settings.modules is not None
        return DelayedGradients(
            model, modules=settings.modules, optimizer=optimizer, process_group=_process_group(settings)
        )
    if settings.engine == "sparse" and pruned_fraction(model) > 0:
        return _SparseBackpropagation(model, as_float(data.train_inputs[: settings.batch]), optimizer)
    return Backpropagation(_runner(settings, model), optimizer=optimizer)


class _SparseBackpropagation(Backpropagation):
    """Trains a sparse copy of a pruned model, which gets its weights after each epoch."""

    def __init__(self, dense: nn.Module, x: torch.Tensor, optimizer: OptimizerOf) -> None:
        # All pruned layers, whatever they take: measurements would decide anew where a training is resumed.
        super().__init__(sparsify(dense, x, training=True, measure=False).train(), optimizer=optimizer)
        self._dense = dense

    def synchronize(self) -> None:
        self._dense.load_state_dict(self.model.state_dict())


def _runner(settings: TrainSettings, model: nn.Module) -> nn.Module:
    if settings.backward == "bp":
        return model
    from ..nn import Leapfrog, Scan

    if settings.threads is not None:
        return Leapfrog(model, threads=settings.threads)
    if isinstance(model, SequenceClassifier):
        group = _process_group(settings)
        model.scan(settings.schedule, group)
        # It averages over ranks, each of which has the gradients of its steps.
        return model if group is None else nn.parallel.DistributedDataParallel(model)
    return Scan(model, schedule=settings.schedule)


def optimizer_of(settings: TrainSettings) -> OptimizerOf:
    if settings.optimizer == "adam":
        return partial(torch.optim.Adam, lr=settings.lr, weight_decay=settings.weight_decay)
    # One call for all parameters: with few weights left, a call for each takes as long as a layer.
    return partial(
        torch.optim.SGD, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay, fused=True
    )


def _process_group(settings: TrainSettings) -> dist.ProcessGroup | None:
    """The processes that torchrun has started, all with these settings; None where there is one."""
    if not dist.is_available() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    ranks_of(group).check("start", settings.to_dict())
    return group
