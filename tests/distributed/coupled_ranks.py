"""What ranks run in the test of drawn networks whose samples depend on each other."""

import copy
import random

import torch
import torch.distributed as dist
from torch import nn

import jacsparse
from tests.helpers import BOUND, FLOAT
from tests.scan.test_coupled_samples import LAYERS, Centred, Residual, Weighed

from .scan_ranks import groups

COUPLING = ("batch norm", "without statistics", "cumulative", "centred", "weighed", "first axis")
EXCHANGES = ("linear", "auto", "gather", "scan")
SCHEDULES = ("linear", "blelloch", "blelloch:1", "chunked:2", "balanced:2")
#: Where a stage that couples samples is for certain: others are drawn before, between and after.
PLACES = ("first", "last", "two in a row", "within a residual branch")


def layers_of(place, rng):
    """The layers of a drawn network."""

    def drawn(names, fewest, most):
        return [LAYERS[rng.choice(names)]() for _ in range(rng.randint(fewest, most))]

    everything, coupling = sorted(LAYERS), drawn(COUPLING, 1, 1)
    if place == "first":
        return [*coupling, *drawn(everything, 2, 6)]
    if place == "last":
        return [*drawn(everything, 2, 6), *coupling]
    if place == "two in a row":
        inner = [*coupling, *drawn(COUPLING, 1, 1)]
    else:
        inner = [Residual(*drawn(everything, 0, 2), *coupling, *drawn(everything, 0, 2))]
    return [*drawn(everything, 1, 3), *inner, *drawn(everything, 1, 3)]


def drawn_networks(count):
    """As many networks with each number of ranks, cut anywhere, against autograd in this process."""
    for size, group in groups():
        for number in range(count):
            rng = random.Random(1000 * size + number)
            torch.manual_seed(number)
            place, schedule, batch = PLACES[number % 4], rng.choice(SCHEDULES), rng.choice((2, 3, 16))
            model = nn.Sequential(*layers_of(place, rng)).double()
            cuts = [0, *sorted(rng.choices(range(1, len(model)), k=size - 1)), len(model)]
            # Ranks between the first and the last one send matrices by the others, which such stages do not have.
            between = model[cuts[1] : cuts[-2]].modules()
            couples = any(isinstance(module, (nn.BatchNorm1d, Centred, Weighed)) for module in between)
            exchange = rng.choice(EXCHANGES[:2] if size > 2 and couples else EXCHANGES)
            what = f"{place}, cut at {cuts}, {schedule}, {exchange}, batch {batch}: {model}"
            compare(model, cuts, torch.randn(batch, 6, dtype=FLOAT), schedule, exchange, group, what)


def compare(model, cuts, x, schedule, exchange, group, what):
    rank = dist.get_rank(group)
    scanned, reference = (each[cuts[rank] : cuts[rank + 1]] for each in (copy.deepcopy(model), model))
    scan = jacsparse.nn.Scan(scanned, schedule=schedule, process_group=group, exchange=exchange)
    leaves = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    for _ in range(2):
        for f, leaf in zip((model, scan), leaves, strict=True):
            y = f(leaf)
            (y.sin() * torch.linspace(-1, 2, y.numel(), dtype=FLOAT).reshape(y.shape)).sum().backward()
    expected, actual = ([leaf, *m.parameters()] for leaf, m in zip(leaves, (reference, scanned), strict=True))
    every = [leaves[0], *model.parameters()]
    scale = max(1.0, *(each.grad.abs().max().item() for each in every if each.grad is not None))
    for one, other in zip(actual, expected, strict=True):
        assert (one.grad is None) == (other.grad is None), what
        if one.grad is not None:
            assert (one.grad - other.grad).abs().max() <= BOUND * scale, what
    for one, other in zip(scanned.buffers(), reference.buffers(), strict=True):
        # Not the same bits where messages between ranks lay an input out otherwise than its operator did.
        assert torch.allclose(one, other, rtol=BOUND, atol=BOUND), what
