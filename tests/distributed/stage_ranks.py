"""What each rank of the tests of chains across ranks runs: ``python -m tests.distributed.stage_ranks CASE``."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

import jacsparse

from .scan_ranks import groups


def perceptron():
    layers = [nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 6), nn.Sigmoid(), nn.Linear(6, 4)]
    return nn.Sequential(*layers, nn.Tanh()), (7,), [2, 3, 4, 6]


def convolutions():
    """Pruned convolutions, pooling, a frozen one and stages without weights."""
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3, padding=1), nn.ReLU(),
              nn.Conv2d(5, 3, 3), nn.Flatten(), nn.Linear(12, 3)]  # fmt: skip
    for number in (0, 3, 5):
        prune.random_unstructured(layers[number], "weight", 0.5)
    layers[5].bias.requires_grad_(False)
    return nn.Sequential(*layers), (2, 8, 8), [1, 3, 5, 6]


def frozen():
    """Gradients of the last weights alone."""
    model, shape, cuts = perceptron()
    model[:6].requires_grad_(False)
    return model, shape, cuts


def equal():
    """A model's stages on ranks against the whole model in this process: output, and all gradients."""
    for size, group in groups():
        for build in (perceptron, convolutions, frozen):
            for exchange in ("linear", "gather", "scan", "auto"):
                for batch, for_x in ((1, True), (3, False), (0, True)):
                    torch.manual_seed(1)
                    model, shape, cuts = build()
                    compare(model.double(), shape, cuts[: size - 1], batch, group, exchange, for_x=for_x)


def compare(model, shape, cuts, batch, group, exchange, *, for_x):
    rank = dist.get_rank(group)
    x = torch.randn(batch, *shape, dtype=torch.float64, requires_grad=for_x)
    copy = x.detach().clone().requires_grad_(for_x)
    part = model[([0, *cuts][rank]) : [*cuts, len(model)][rank]]
    scan = jacsparse.nn.Scan(part, process_group=group, exchange=exchange)
    for training in (False, True):
        with torch.set_grad_enabled(training):
            y, ours = model(x), scan(copy)
        close(ours, y)
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    expected = [p.grad for p in part.parameters()]
    model.zero_grad()
    if not dist.get_rank(group) and not y.numel():
        assert ours.requires_grad
    (ours * weights).sum().backward()
    for parameter, gradient in zip(part.parameters(), expected, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            close(parameter.grad, gradient)
    if for_x:
        close(copy.grad, x.grad)
    model.zero_grad()
    close(jacsparse.backward(part, x.detach(), weights, process_group=group, exchange=exchange),
          torch.autograd.grad(model(leaf := x.detach().requires_grad_()), leaf, weights)[0])  # fmt: skip


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    case, *arguments = sys.argv[1:]
    {"equal": equal}[case](*arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
