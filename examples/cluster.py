"""What crosses the network in a training step across ranks: bytes by formula, and those that this rank has sent.

``torchrun --nproc-per-node 2 -m examples.cluster`` runs it in two processes of one machine; the page on clusters has
the lines for several.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

import jacsparse
from jacsparse.distributed import ranks_of
from jacsparse.schedule import exchanges
from jacsparse.terminal import console, new_table


class Traffic(NamedTuple):
    """Bytes that a rank sends in one training step, by formula and counted, without the headers of messages."""

    layer: str
    exchange: str
    formula: int
    sent: int


def backend() -> str:
    """NCCL where each process has a GPU of its own, else gloo."""
    return "nccl" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo"


def sent_maps(exchange: str, batch: int, width: int) -> int:
    """Bytes of affine maps of gradients, in float64, that this rank sends; a backward pass begins at the last one."""
    ranks = dist.get_world_size()
    place, vector = ranks - 1 - dist.get_rank(), 8 * batch * width
    result = 0
    for number, messages in enumerate(exchanges(ranks, exchange)):
        # The first rank's map, and each product with it, is a vector; others are a matrix for each sample too.
        is_constant = place < (2**number if exchange == "scan" else 1)
        result += sum(place == source for source, *_ in messages) * vector * (1 if is_constant else 1 + width)
    return result


def expected(exchange: str, batch: int, width: int) -> int:
    """Bytes that this rank sends in a training step of a recurrent layer, without headers of messages."""
    rank, ranks, state = dist.get_rank(), dist.get_world_size(), 4 * batch * width
    # A state goes to the next rank and, from the last one, to all; their gradients of that one come back to it.
    total = (ranks - 1) * state if rank == ranks - 1 else 2 * state
    # All compare a digest, their steps and whether gradients are wanted; after a scan, a digest and what is finite.
    total += 24 * (ranks - 1)
    if exchange == "linear":
        return total + (state if rank > 0 else 0)
    return total + sent_maps(exchange, batch, width) + 16 * (ranks - 1)


def traffic(steps: int = 32, batch: int = 4, width: int = 16) -> list[Traffic]:
    """What a layer sends, forward a state and backward a gradient or an affine map of gradients."""
    group = dist.new_group(timeout=timedelta(minutes=5))
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if dist.get_backend() == "nccl" else "cpu")
    result = []
    for layer in (jacsparse.nn.RNN, jacsparse.nn.GRU):
        for exchange in ("linear", "scan", "gather"):
            recurrent = layer(8, width, process_group=group, exchange=exchange).to(device)
            before = ranks_of(group).sent_bytes
            output, _ = recurrent(torch.randn(steps, batch, 8, device=device))
            output.square().sum().backward()
            sent = ranks_of(group).sent_bytes - before
            result.append(Traffic(layer.__name__, exchange, expected(exchange, batch, width), sent))
    return result


def main() -> None:
    """Print the table of this rank."""
    dist.init_process_group(backend())
    table = new_table(f"bytes from rank {dist.get_rank()} of {dist.get_world_size()}, {dist.get_backend()}")
    for column in Traffic._fields:
        table.add_column(column, justify="right")
    for row in traffic():
        table.add_row(row.layer, row.exchange, f"{row.formula:,}", f"{row.sent:,}")
    console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
