"""What ranks run in the tests of recurrences."""

import functools
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import jacsparse
from jacsparse.distributed import RankError
from jacsparse.recurrence import Dense, Diagonal, Scaled, Sparse, linear_recurrence

from .launch import impatient_group
from .scan_ranks import drawn, fail, groups

LAYERS = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}
EXCHANGES = ("linear", "gather", "scan", "auto")
#: Steps of each of five ranks, of which as many are taken as there are ranks.
LENGTHS = ((4, 7, 1, 6, 3), (3, 0, 5, 0, 2), (0, 2, 0, 3, 1))


def equal():
    """Layers across ranks against torch.nn's in this process: outputs, last states and all gradients."""
    layers = list(itertools.product(LAYERS, (1, 3), (False, True), (False, True)))
    for size, group in groups():
        for number, (name, num_layers, both, batch_first) in enumerate(layers[size % 3 :: 3], 9 * size):
            # Nine more at each size, so that each value of an option meets each of any other one.
            exchange, lengths, batch = EXCHANGES[number % 4], LENGTHS[number % 3], (1, 16, 3, 0, 2)[number % 5]
            compare(name, group, lengths[:size], batch, exchange, num_layers=num_layers, bidirectional=both,
                    batch_first=batch_first)  # fmt: skip
        relu = {"nonlinearity": "relu", "schedule": "chunked:2", "forward": "parallel", "chunk": 2}
        for batch in (3, 0):
            compare("RNN", group, LENGTHS[0][:size], batch, "scan", **relu)
        inputs_of_one_rank(group, size)


def inputs_of_one_rank(group, size):
    """Gradients of the last rank's input and of the first rank's states alone, through a layer of frozen weights."""
    torch.manual_seed(0)
    rank, first, last = dist.get_rank(group), dist.get_rank(group) == 0, dist.get_rank(group) == size - 1
    layer = nn.GRU(3, 4, num_layers=2, dtype=torch.float64)
    for name, weight in layer.named_parameters():
        weight.requires_grad_("l1" in name)
    ours = jacsparse.nn.GRU.of(layer, process_group=group)
    x, h = drawn(2 * size, 2, 3), drawn(2, 2, 4)
    d, b = torch.rand(2 * size, 2, 4, dtype=torch.float64), torch.rand(2 * size, 2, 4, dtype=torch.float64)
    (layer(x, h)[0].square().sum() + linear_recurrence(Diagonal(d), b, h[0]).square().sum()).backward()
    part, state = (leaf.detach().clone() for leaf in (x.split(2)[rank], h))
    output, _ = ours(part.requires_grad_(last), state.requires_grad_(first))
    states = linear_recurrence(Diagonal(d.split(2)[rank]), b.split(2)[rank], state[0], process_group=group)
    (output.square().sum() + states.square().sum()).backward()
    if first:
        close(state.grad, h.grad)
    if last:
        close(part.grad, x.grad.split(2)[rank])


def linear():
    """Linear recurrences across ranks against those in this process: states and all gradients."""
    pattern = jacsparse.Pattern((3, 3), [0, 2, 3, 4], [0, 2, 1, 0])
    forms = {
        "dense": lambda time, batch: (Dense, (drawn(time, batch, 3, 3),)),
        "diagonal": lambda time, batch: (Diagonal, (drawn(time, batch, 3),)),
        "scaled": lambda time, batch: (Scaled, (drawn(3, 3), drawn(time, batch, 3))),
        "sparse": lambda time, batch: (functools.partial(Sparse, pattern), (drawn(time, 4, batch),)),
    }
    calls = list(itertools.product(EXCHANGES[:3], LENGTHS))
    for size, group in groups():
        for number, (name, reverse) in enumerate(itertools.product(forms, (False, True)), 7 * size):
            torch.manual_seed(size)
            # Seven more at each size, so that each form meets each exchange, and each of the lengths.
            exchange, lengths = calls[number % 9]
            rank, lengths = dist.get_rank(group), lengths[:size]
            form, tensors = forms[name](sum(lengths), 2)
            b, h0, weights = drawn(sum(lengths), 2, 3), drawn(2, 3), drawn(sum(lengths), 2, 3).detach()
            leaves = [*tensors, b, h0]
            # All but the first state and the matrix that all steps share have steps.
            shared = [h0, *tensors[:-1]]
            split = [not any(leaf is other for other in shared) for leaf in leaves]
            parts = [
                (leaf.split(lengths)[rank] if steps else leaf).detach().clone().requires_grad_()
                for leaf, steps in zip(leaves, split, strict=True)
            ]
            if not sum(lengths):
                continue
            h = linear_recurrence(form(*tensors), b, h0, reverse=reverse)
            options = {"reverse": reverse, "process_group": group, "exchange": exchange}
            ours = linear_recurrence(form(*parts[:-2]), *parts[-2:], **options)
            close(ours, h.split(lengths)[rank])
            (h * weights).sum().backward()
            (ours * weights.split(lengths)[rank]).sum().backward()
            for leaf, part, steps in zip(leaves, parts, split, strict=True):
                if not steps:
                    dist.all_reduce(part.grad, group=group)
                    close(part.grad, leaf.grad)
                else:
                    close(part.grad, leaf.grad.split(lengths)[rank])


def empty():
    """Linear recurrences across ranks without samples, or with states of no elements."""
    _, group = list(groups())[-1]
    steps = LENGTHS[1][dist.get_rank(group)]
    for exchange, (batch, n) in itertools.product(EXCHANGES, ((0, 3), (2, 0))):
        for form, tensors in (
            (Dense, [drawn(steps, 1, n, n)]),
            (Diagonal, [drawn(steps, batch, n)]),
            (Scaled, [drawn(n, n), drawn(steps, 1, n)]),
        ):
            b, h0 = drawn(steps, batch, n), drawn(batch, n)
            h = linear_recurrence(form(*tensors), b, h0, process_group=group, exchange=exchange)
            assert h.shape == b.shape
            h.sum().backward()
            assert all(leaf.grad.shape == leaf.shape and not leaf.grad.any() for leaf in (b, h0, *tensors))


def beyond_range():
    """Products of steps' matrices overflow, and no state does."""
    _, group = list(groups())[-1]
    for exchange in EXCHANGES[:3]:
        A = torch.tensor([1e200, 0.5], dtype=torch.float64).diag().expand(2, 1, 2, 2)
        b, h0 = torch.zeros(2, 1, 2, dtype=torch.float64), torch.tensor([[0.0, 1.0]], dtype=torch.float64)
        h = linear_recurrence(Dense(A), b, h0, process_group=group, exchange=exchange)
        steps = 2 * dist.get_rank(group) + torch.arange(1, 3, dtype=torch.float64)
        assert torch.equal(h[:, 0], torch.stack([torch.zeros(2, dtype=torch.float64), 0.5**steps], dim=1)), h


class Classifier(nn.Module):
    """A recurrent layer, and classes from its last state."""

    def __init__(self, group=None):
        super().__init__()
        self.rnn = jacsparse.nn.GRU(3, 5, num_layers=2, dtype=torch.float64, process_group=group)
        self.head = nn.Linear(5, 4, dtype=torch.float64)

    def forward(self, x):
        return self.head(self.rnn(x)[1][-1])


def data_parallel():
    """Two axes of ranks: of steps and of samples. DistributedDataParallel over all ranks gives the whole gradient."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(0)
    whole = Classifier()
    x, y = torch.randn(9, 6, 3, dtype=torch.float64), torch.randint(4, (6,))
    functional.cross_entropy(whole(x), y).backward()
    model = Classifier(groups[rank // 2])
    model.load_state_dict(whole.state_dict())
    parallel = nn.parallel.DistributedDataParallel(model)
    samples, steps = slice(3 * (rank // 2), 3 * (rank // 2) + 3), [slice(0, 5), slice(5, 9)][rank % 2]
    functional.cross_entropy(parallel(x[steps, samples]), y[samples]).backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        close(ours.grad, theirs.grad)


class LastState(nn.Module):
    """A network of a sequence's last state, and one of all its outputs."""

    def __init__(self, group=None):
        super().__init__()
        self.gru = nn.GRU(3, 5) if group is None else jacsparse.nn.GRU(3, 5, process_group=group)
        # More parameters than a message between ranks has tensors.
        layers = (nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
        self.head, self.unused = nn.Sequential(*layers), nn.Linear(2, 2)
        self.double()

    def forward(self, x):
        output, last = self.gru(x)
        return self.head(output), self.head(last[-1])


def losses():
    """The usual loops, with a loss of the last state or of each rank's steps, against one process."""
    for size, group in groups():
        torch.manual_seed(0)
        whole, rank = LastState(), dist.get_rank(group)
        x, y = torch.randn(3 * size, 6, 3, dtype=torch.float64), torch.randint(4, (6,))

        def same(outputs, last, y=y):
            return functional.cross_entropy(last, y)

        def each(outputs, last, y=y):
            return sum(functional.cross_entropy(output, y) for output in outputs)

        for loss, name in ((same, "same"), (each, "each")):
            whole.zero_grad()
            loss(*whole(x)).backward()
            ours = LastState(group)
            ours.load_state_dict(whole.state_dict())
            loss(*ours(x.split(3)[rank])).backward()
            jacsparse.distributed.sum_gradients(ours, group, loss=name)
            for a, b in zip(ours.parameters(), whole.parameters(), strict=True):
                assert (a.grad is None) == (b.grad is None)
                if a.grad is not None:
                    close(a.grad, b.grad)
            averaged = LastState(group)
            averaged.load_state_dict(whole.state_dict())
            parallel = nn.parallel.DistributedDataParallel(averaged, process_group=group, find_unused_parameters=True)
            loss(*parallel(x.split(3)[rank])).backward()
            for a, b in zip(averaged.parameters(), whole.parameters(), strict=True):
                if b.grad is not None:
                    # Of each rank's own losses it is the mean.
                    close(a.grad, b.grad / (size if name == "each" else 1))


def fault(kind, rank):
    """Passes of a layer in which one rank fails at the fourth."""
    # The first pass, which may compile kernels, has the time of all processes' group.
    groups_of_passes = (dist.group.WORLD, impatient_group(kind))
    layers = [jacsparse.nn.GRU(3, 5, process_group=group, exchange="scan") for group in groups_of_passes]
    for number in range(1000):
        x = torch.ones(4, 2, 3, requires_grad=True)
        output, _ = layers[number > 0](x)
        if dist.get_rank() == rank and number == 3:
            fail(kind)
        output.sum().backward()


def differ():
    """Ways in which rank 1 does not call like the others; all ranks print the errors."""
    other, layer = dist.get_rank() == 1, functools.partial(jacsparse.nn.GRU, 3, process_group=dist.group.WORLD)
    x = torch.ones(4, 2, 3)
    for build, part in (
        (lambda: layer(5 + other), x),
        (lambda: layer(5, schedule="chunked" if other else "linear"), x),
        (lambda: layer(5, dtype=torch.float64 if other else torch.float32), x.double() if other else x),
        (lambda: layer(5), x[:, other:]),
        (lambda: layer(5).requires_grad_(not other), x),
        (lambda: layer(5), x[:0]),
    ):
        try:
            build()(part)
        except (RankError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")


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
