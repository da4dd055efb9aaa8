"""What ranks run in the tests of chains."""

import itertools

import torch
import torch.distributed as dist
from jacsparse.models import build, prune_weights
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import jacsparse
from jacsparse.distributed import RankError

from .launch import impatient_group
from .scan_ranks import fail, groups


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


def normalised():
    """Stages that couple samples on every rank."""
    layers = [part for n in range(5) for part in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())]
    return nn.Sequential(*layers), (6,), [2, 5, 8, 11]


def equal():
    """A model's stages on ranks against the whole model in this process: output, and all gradients."""
    cases = list(itertools.product((perceptron, convolutions, frozen), ("linear", "gather", "scan", "auto")))
    calls = ((1, True), (3, False), (0, True), (2, False), (3, True))
    for size, group in groups():
        for number, (draw, exchange) in enumerate(cases, 12 * size):
            torch.manual_seed(1)
            model, shape, cuts = draw()
            # Five and twelve have no common divisor, so that each case meets each call.
            batch, for_x = calls[number % 5]
            compare(model.double(), shape, cuts[: size - 1], batch, group, exchange, for_x=for_x)
        for exchange in ("linear", "auto"):
            torch.manual_seed(1)
            model, shape, cuts = normalised()
            compare(model.double(), shape, cuts[: size - 1], 3, group, exchange, for_x=True)


def checkpointed():
    """A checkpoint around a chain across ranks: all of them run their stages anew, and then go back."""
    for size, group in groups():
        for exchange in ("linear", "gather", "scan"):
            torch.manual_seed(1)
            model, shape, cuts = perceptron()
            model, x = model.double(), torch.randn(3, *shape, dtype=torch.float64, requires_grad=True)
            copy, rank = x.detach().clone().requires_grad_(), dist.get_rank(group)
            cuts = [0, *cuts[: size - 1], len(model)]
            part = model[cuts[rank] : cuts[rank + 1]]
            scan = jacsparse.nn.Scan(part, process_group=group, exchange=exchange)
            y, ours = model(x), checkpoint(scan, copy, use_reentrant=False)
            close(ours, y)
            y.square().sum().backward()
            expected = [x.grad, *(p.grad for p in part.parameters())]
            model.zero_grad()
            ours.square().sum().backward()
            for gradient, reference in zip([copy.grad, *(p.grad for p in part.parameters())], expected, strict=True):
                close(gradient, reference)


def vgg(*sizes):
    """Pruned VGG-11's convolutional part, whose late stages are on the ranks in the middle."""
    for size, group in groups():
        if size not in sizes:
            continue
        torch.manual_seed(0)
        model = build("vgg11").features.double()
        prune_weights(model, 0.97, rescale=True)
        exchange = ("auto", "linear", "gather", "scan", "scan")[size - 1]
        compare(model, (3, 32, 32), [11, 13, 14, 16][: size - 1], 1, group, exchange, for_x=True)


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


def data_parallel():
    """Two axes of ranks: of stages and of samples. DistributedDataParallel goes over the samples'."""
    rank = dist.get_rank()
    stage_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    sample_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(0)
    model, shape, _ = perceptron()
    model = model.double()
    x, weights = torch.randn(6, *shape, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    (model(x) * weights).mean().backward()
    part = model[:4] if rank % 2 == 0 else model[4:]
    expected = [parameter.grad for parameter in part.parameters()]
    model.zero_grad()
    scan = jacsparse.nn.Scan(part, process_group=stage_groups[rank // 2])
    parallel = nn.parallel.DistributedDataParallel(scan, process_group=sample_groups[rank % 2])
    samples = slice(3 * (rank // 2), 3 * (rank // 2) + 3)
    (parallel(x[samples]) * weights[samples]).mean().backward()
    for parameter, gradient in zip(part.parameters(), expected, strict=True):
        close(parameter.grad, gradient)


def fault(kind, rank):
    """Passes of a chain in which one rank fails at the fourth."""
    group = impatient_group(kind)
    model, shape, cuts = perceptron()
    ends = [0, *cuts[: dist.get_world_size() - 1], len(model)]
    scan = jacsparse.nn.Scan(model[ends[dist.get_rank()] : ends[dist.get_rank() + 1]], process_group=group)
    for number in range(1000):
        y = scan(torch.ones(2, *shape))
        if dist.get_rank() == rank and number == 3:
            fail(kind)
        y.sum().backward()


def differ():
    """Ways in which rank 1 does not call like the others; all ranks print the errors."""
    other = dist.get_rank() == 1
    part = nn.Linear(4, 4)
    for x, options in (
        (torch.ones(2 + other, 4), {}),
        (torch.ones(2, 4, requires_grad=other), {}),
        (torch.ones(2, 4), {"exchange": "scan" if other else "linear"}),
        (torch.ones(2, 3 if other else 4), {}),
    ):
        try:
            jacsparse.nn.Scan(part, process_group=dist.group.WORLD, **options)(x)
        except RankError as error:
            print(f"RankError: {error}")


def close(ours, theirs):
    """Equal but for rounding, as a share of the largest element."""
    largest = max(1e-300, theirs.detach().abs().max().item() if theirs.numel() else 1.0)
    torch.testing.assert_close(ours / largest, theirs / largest, rtol=0, atol=1e-10)
