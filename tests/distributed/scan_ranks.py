"""What ranks run in the tests of scans."""

import functools
import gc
import os
import signal
import weakref
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import jacsparse
from jacsparse import Pattern
from jacsparse.affine import DenseMaps, DiagonalMaps, SparseMaps, compose
from jacsparse.distributed import RankError, RankScan, exclusive_scan, ranks_of
from jacsparse.schedule import EXCHANGES, exchanges

from .launch import impatient_group


def groups():
    """For each number of ranks, their group where this rank is in it."""
    for size in range(1, dist.get_world_size() + 1):
        group = dist.new_group(list(range(size)))
        if dist.get_rank() < size:
            yield size, group
    dist.barrier()


def drawn(*shape):
    return (torch.rand(*shape, dtype=torch.float64) - 0.5).requires_grad_()


def matmul(earlier, later):
    return later @ earlier


def together(earlier, later):
    """Matrices and offsets, as tuples."""
    return later[0] @ earlier[0], later[0] @ earlier[1] + later[1]


class Counted(NamedTuple):
    """A sum, and of how many elements."""

    sum: torch.Tensor
    count: torch.Tensor


class Five(NamedTuple):
    """More tensors than affine maps have."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    d: torch.Tensor
    e: torch.Tensor


def added(earlier, later):
    return type(earlier)(*map(torch.add, earlier, later))


def rectangular(sizes):
    """An element of each rank from a space of one size to one of another."""
    return [drawn(sizes[rank + 1], sizes[rank]) for rank in range(len(sizes) - 1)]


def sparse_maps(sizes):
    rng, elements = np.random.default_rng(0), []
    for rows, columns in zip(sizes[1:], sizes[:-1], strict=True):
        where = rng.random((rows, columns)) < 0.4
        pattern = Pattern((rows, columns), np.append(0, where.sum(1).cumsum()), np.nonzero(where)[1])
        elements.append(SparseMaps(pattern, drawn(pattern.nnz, 1, 3), drawn(rows, 1, 3)))
    return elements


def kinds(size):
    """Elements of all ranks, how two are combined, and what comes before them."""
    sizes = [2, 3, 5, 4, 1, 6][: size + 1]
    yield [drawn(4) for _ in range(size)], torch.add, None
    yield [drawn(3, 3) for _ in range(size)], matmul, torch.eye(3, dtype=torch.float64)
    yield rectangular(sizes), matmul, drawn(2, 7)
    yield [(drawn(2, 3, 3), drawn(2, 3, 1)) for _ in range(size)], together, (drawn(2, 3, 3), drawn(2, 3, 1))
    yield [DenseMaps(drawn(1, 2, 3, 3), drawn(1, 2, 3)) for _ in range(size)], compose, None
    yield [DenseMaps(drawn(1, 2, 3, 3), drawn(1, 2, 3)) for _ in range(size)], compose, DenseMaps(None, drawn(1, 2, 3))
    yield [DiagonalMaps(drawn(1, 2, 3), drawn(1, 2, 3)) for _ in range(size)], compose, None
    first = sparse_maps([sizes[0], sizes[0]])[0]
    yield sparse_maps(sizes), compose, first
    yield sparse_maps(sizes), compose, first.like(None, drawn(sizes[0], 1, 3))
    yield [drawn(0, 3) for _ in range(size)], torch.add, None
    yield [Five(*map(drawn, range(5))) for _ in range(size)], added, None
    yield [Counted(torch.nn.Parameter(drawn(3)), torch.ones(2, dtype=torch.int64)) for _ in range(size)], added, None
    yield [drawn(3).requires_grad_(number == size - 1) for number in range(size)], torch.mul, None
    yield [drawn(3).detach() for _ in range(size)], torch.mul, drawn(3)


def tensors(element):
    if isinstance(element, torch.Tensor):
        return [element]
    return list(element) if isinstance(element, tuple) else list(element.tensors)


def equal():
    """Each exchange against a loop over all elements in this process, forward and back."""
    for size, group in groups():
        ranks, rank = ranks_of(group), dist.get_rank()
        for number, way in enumerate(EXCHANGES):
            torch.manual_seed(size)
            for kind, (elements, combine, initial) in enumerate(kinds(size)):
                reverse = (size + number + kind) % 2 > 0
                place = size - 1 - rank if reverse else rank
                compare(elements, combine, initial, place, functools.partial(
                    exclusive_scan, combine=combine, group=group, initial=initial, exchange=way, reverse=reverse
                ))  # fmt: skip
        torch.testing.assert_close(exclusive_scan(torch.ones(3), torch.add, group), torch.full((3,), float(rank)))
        assert not ranks._sent


def compare(elements, combine, initial, place, scan):
    """This rank's result, and the gradients of its element, against those of a loop."""
    results = [initial]
    for element in elements[:-1]:
        results.append(element if results[-1] is None else combine(results[-1], element))
    result = scan(elements[place])
    if results[place] is None:
        loss(result, 0).backward()
    else:
        for ours, theirs in zip(tensors(result), tensors(results[place]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
        loss(result, place).backward()
    leaves = [leaf for leaf in tensors(elements[place]) if leaf.requires_grad]
    if place == 0 and initial is not None:
        leaves += [leaf for leaf in tensors(initial) if leaf.requires_grad]
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    total = sum(loss(each, number) for number, each in enumerate(results) if each is not None)
    if torch.is_tensor(total) and total.requires_grad:
        total.backward()
    for leaf, gradient in zip(leaves, gradients, strict=True):
        ours, theirs = (torch.zeros_like(leaf) if each is None else each for each in (gradient, leaf.grad))
        torch.testing.assert_close(ours, theirs)


def loss(element, place):
    """A rank's loss."""
    return sum((place + number) * (tensor * tensor).sum() for number, tensor in enumerate(tensors(element)))


def counted():
    """Messages and bytes are those of the schedule."""
    for size, group in groups():
        ranks, rank = ranks_of(group), dist.get_rank()
        for way in EXCHANGES:
            ranks.check("start", {})
            messages, nbytes = ranks.sent_messages, ranks.sent_bytes
            RankScan(ranks, matmul, way, "scan")(torch.ones(10, 10))
            sent = sum(message.source == rank for round in exchanges(size, way) for message in round)
            assert ranks.sent_messages - messages == sent, (size, way)
            assert ranks.sent_bytes - nbytes == 400 * sent


def destroyed():
    """A group that is destroyed is named as such; nothing refers to it, and what its ranks know goes with it."""
    group = dist.new_group()
    exclusive_scan(sparse_maps([2, 3, 4])[0], compose, group)
    ranks = weakref.ref(ranks_of(group))
    layer = jacsparse.nn.GRU(3, 4, process_group=group)
    output = layer(torch.ones(2, 1, 3))[0].sum()
    dist.destroy_process_group(group)
    for use in (functools.partial(layer, torch.ones(2, 1, 3)), output.backward):
        try:
            use()
        except ValueError as error:
            assert "the process group is destroyed; make another one" in str(error), error
        else:
            raise AssertionError("a destroyed group was used")
    del group, layer, output, use
    gc.collect()
    assert ranks() is None


def differ():
    """What is no group or cannot be sent, and ways in which rank 1 does not call like the others; prints the errors."""
    other = dist.get_rank() == 1
    add = functools.partial(exclusive_scan, combine=torch.add)
    for call in (
        lambda: add(torch.ones(1), group="gloo"),
        lambda: add(torch.ones(1), group=dist.GroupMember.NON_GROUP_MEMBER),
        lambda: add(torch.ones(1, dtype=torch.complex64)),
        lambda: add((torch.ones(1),) * 9),
        lambda: add(torch.ones(2, dtype=torch.float32 if other else torch.float64)),
        lambda: add((torch.ones(2),) * (1 + other)),
        lambda: (torch.no_grad()(add) if other else add)(torch.ones(2)),
        lambda: add(torch.ones(2), exchange="gather" if other else "scan"),
        lambda: add(torch.ones(2), reverse=other),
    ):
        try:
            call()
        except (RankError, TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")


def fail(kind):
    """Let this rank fail."""
    if kind == "exception":
        raise ArithmeticError("made to fail")
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def fault(kind, rank):
    """Scans in which one rank fails at the fourth."""
    group = impatient_group(kind)

    def combine(earlier, later):
        if kind == "exception" and number == 3 and dist.get_rank() == rank:
            fail(kind)
        return earlier + later

    for number in range(1000):
        if dist.get_rank() == rank and number == 3 and kind != "exception":
            fail(kind)
        x = torch.ones(3, requires_grad=True)
        exclusive_scan(x, combine, group, exchange="scan").sum().backward()
