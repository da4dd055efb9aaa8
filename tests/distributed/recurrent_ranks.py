"""What each rank of the tests of recurrences runs: ``python -m tests.distributed.recurrent_ranks CASE``."""

import itertools
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import jacsparse

from .scan_ranks import groups

LAYERS = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}
#: Steps of each of five ranks, of which as many are taken as there are ranks.
LENGTHS = ((4, 7, 1, 6, 3), (3, 0, 5, 0, 2), (0, 2, 0, 3, 1))


def equal():
    """Layers across ranks against torch.nn's in this process: outputs, last states and all gradients."""
    cases = itertools.cycle(itertools.product(("linear", "gather", "scan", "auto"), LENGTHS, (1, 16)))
    for size, group in groups():
        for name, layers, both, batch_first in itertools.product(LAYERS, (1, 3), (False, True), (False, True)):
            exchange, lengths, batch = next(cases)
            compare(name, group, lengths[:size], batch, exchange, num_layers=layers, bidirectional=both,
                    batch_first=batch_first)  # fmt: skip
        relu = {"nonlinearity": "relu", "schedule": "chunked:2", "forward": "parallel", "chunk": 2}
        compare("RNN", group, LENGTHS[0][:size], 3, "scan", **relu)


def compare(name, group, lengths, batch, exchange, **options):
    torch.manual_seed(len(lengths))
    rank, size = dist.get_rank(group), len(lengths)
    own = {key: options.pop(key) for key in ("schedule", "forward", "chunk") if key in options}
    theirs = LAYERS[name](3, 5, dtype=torch.float64, **options)
    ours = getattr(jacsparse.nn, name)(
        3, 5, dtype=torch.float64, process_group=group, exchange=exchange, **own, **options
    )
    ours.load_state_dict(theirs.state_dict())
    if not sum(lengths):
        return
    time = 1 if theirs.batch_first else 0
    x = torch.randn(sum(lengths), batch, 3, dtype=torch.float64).transpose(0, time).contiguous().requires_grad_()
    places = theirs.num_layers * (2 if theirs.bidirectional else 1)
    states = [
        torch.randn(places, batch, 5, dtype=torch.float64, requires_grad=True) for _ in range(1 + (name == "LSTM"))
    ]
    part = x.detach().split(lengths, time)[rank].clone().requires_grad_()
    copies = [state.detach().clone().requires_grad_() for state in states]
    results = flat(theirs(x, states[0] if len(states) == 1 else tuple(states)))
    own_results = flat(ours(part, copies[0] if len(states) == 1 else tuple(copies)))
    weights = [torch.randn_like(result) for result in results]
    loss(results, weights, size).backward()
    loss(own_results, [weights[0].split(lengths, time)[rank], *weights[1:]], 1).backward()
    close(own_results[0], results[0].split(lengths, time)[rank])
    for own_last, last in zip(own_results[1:], results[1:], strict=True):
        close(own_last, last)
    close(part.grad, x.grad.split(lengths, time)[rank])
    for ours_tensor, tensor in zip((*ours.parameters(), *copies), (*theirs.parameters(), *states), strict=True):
        gradient = ours_tensor.grad.clone()
        dist.all_reduce(gradient, group=group)
        close(gradient, tensor.grad)


def flat(results):
    output, last = results
    return [output, *(last if isinstance(last, tuple) else [last])]


def loss(results, weights, times):
    """Of outputs and, as often as there are ranks, of last states."""
    output, *last = ((result * weight).sum() for result, weight in zip(results, weights, strict=True))
    return output + times * sum(last)


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
