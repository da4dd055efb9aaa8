"""Dynamic sparse training by the rule of RigL (Evci et al., 2020): the smallest weights go, and as many grow elsewhere.

They grow where the loss's gradient by the pruned weight is largest, which one batch through the dense model tells.
``python -m examples.dynamic_sparse_training`` compares with masks that do not change.
"""

from __future__ import annotations

import math
import time

import torch
from jacsparse.models import Dataset, evaluate, load_data
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

import jacsparse
from jacsparse.nn import SparseConv2d, SparseLinear
from jacsparse.terminal import console, new_table, short_time


def classifier(left: float) -> nn.Module:
    """A small network for the digits, with drawn masks that leave a share of the weights of all but its first layer."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    for layer in (model[2], model[5], model[9]):
        prune.random_unstructured(layer, "weight", 1 - left)
    return model


def change_masks(
    model: jacsparse.SparseModel,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    share: float,
) -> None:
    """In each sparse layer, let a share of the weights go, and as many grow."""
    dense = jacsparse.densify(model, masks=False)
    functional.cross_entropy(dense(batch[0]), batch[1]).backward()
    for name, layer in model.model.named_modules():
        if not isinstance(layer, (SparseConv2d, SparseLinear)):
            continue
        weight = dense.get_parameter(f"{name}.weight")
        assert weight.grad is not None
        mask = layer.mask
        count = min(int(share * len(layer.values)), int((~mask).sum()))
        smallest = weight.detach().abs().where(mask, math.inf).flatten().topk(count, largest=False).indices
        steepest = weight.grad.abs().where(~mask, -1.0).flatten().topk(count).indices
        mask.view(-1)[smallest] = False
        mask.view(-1)[steepest] = True
        layer.set_mask(mask, optimizer)


def train(data: Dataset, *, left: float = 0.05, epochs: int = 6, every: int = 10, share: float = 0.3) -> nn.Module:
    """Train with masks that change in every so many iterations, less and less; never where `share` is 0."""
    torch.manual_seed(0)
    dense, batches = classifier(left), list(torch.arange(len(data.train_labels)).split(64))
    model = jacsparse.sparsify(dense, data.train_inputs[:64], measure=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    last = epochs * len(batches)
    for iteration in range(last):
        numbers = batches[iteration % len(batches)]
        batch = data.train_inputs[numbers], data.train_labels[numbers]
        optimizer.zero_grad()
        functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        if share and iteration % every == every - 1 and iteration < 0.75 * last:
            change_masks(model, optimizer, batch, share / 2 * (1 + math.cos(math.pi * iteration / last)))
    return model


def main(epochs: int = 6) -> None:
    """Print both accuracies."""
    data = load_data("digits")
    table = new_table("5 % of the weights, on scikit-learn's digits")
    for column in ("masks", "test accuracy", "time"):
        table.add_column(column, justify="right")
    for label, share in (("do not change", 0.0), ("change by RigL's rule", 0.3)):
        begin = time.perf_counter()
        model = train(data, epochs=epochs, share=share)
        seconds = short_time(time.perf_counter() - begin)
        table.add_row(label, f"{evaluate(model, data.test_inputs, data.test_labels)[1]:.1%}", seconds)
    console().print(table)


if __name__ == "__main__":
    main()
