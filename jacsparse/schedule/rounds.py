"""Rounds of messages by which ranks scan across them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .names import Names
from .steps import natural


class Message(NamedTuple):
    """What a rank sends to another in a round of `exchanges`: the product of its block.

    Attributes
    ----------
    source, target : int
        The ranks.
    joined : bool
        Whether the target multiplies its block by that of the source; else no later message needs its block.
    """

    source: int
    target: int
    joined: bool


#: The ways of `exchanges`.
EXCHANGES = ("linear", "gather", "scan")


def check_exchange(exchange: str) -> str:
    """The name of an exchange, ``auto`` or one of `EXCHANGES`; TypeError or ValueError where it is none."""
    return Names("exchange", ("auto", *EXCHANGES)).parse(exchange)[0]


def exchanges(ranks: int, way: str = "scan") -> tuple[tuple[Message, ...], ...]:
    """The rounds of messages of an exclusive scan across ranks that hold one element each.

    Each rank holds two values: the product of its block, at first of its element alone, and that of all elements before
    its own in the block, at first none. A message from a lower rank extends what comes before; with it, or with that of
    a higher rank, the target may join its block.

    Parameters
    ----------
    ranks : int
        Their number p.
    way : {"scan", "gather", "linear"}
        ``scan``: ⌈log2 p⌉ rounds, in which ranks whose numbers differ in one bit exchange the products of their blocks.
        Messages and products that nothing depends on are left out; Θ(p log p) products remain, more than the Θ(p) of a
        Blelloch scan (equation 3.4 of the thesis), which has twice as many rounds. ``gather``: one round, in which each
        rank sends its element to all higher ones. ``linear``: p - 1 rounds, from rank to rank.

    Returns
    -------
    tuple of tuple of Message
        The messages of each round, by source and target.

    Raises
    ------
    TypeError, ValueError
        If there is no rank, or no such way.

    Examples
    --------
    >>> [[(source, target) for source, target, _ in messages] for messages in exchanges(4)]
    [[(0, 1), (1, 0), (2, 3)], [(0, 2), (1, 3)]]
    """
    ranks = natural("ranks", ranks, 1)
    Names("way", EXCHANGES).parse(way)
    if way == "linear":
        return tuple((Message(rank, rank + 1, rank + 2 < ranks),) for rank in range(ranks - 1))
    if way == "gather":
        messages = [Message(source, target, False) for source, target in itertools.combinations(range(ranks), 2)]
        return (tuple(messages),) if messages else ()
    rounds, needed = [], set[int]()
    for k in reversed(range((ranks - 1).bit_length())):
        pairs = ((target ^ 1 << k, target) for target in range(ranks))
        # A rank that is needed lies in a block whose ranks all exist, and so does the source.
        messages = [
            Message(source, target, target in needed) for source, target in pairs if source < target or target in needed
        ]
        needed.update(message.source for message in messages)
        rounds.append(tuple(sorted(messages)))
    return tuple(reversed(rounds))


def taken_in(
    received: Sequence[Message], others: Sequence[Any], before: Any, block: Any, combine: Callable[[Any, Any], Any]
) -> tuple[Any, Any]:
    """What comes before a rank, None where nothing does, and its block, after the messages that it gets in a round.

    They are all from lower ranks, or all from higher ones, and hold `others`; ``combine(earlier, later)`` joins blocks.
    """
    if not received:
        return before, block
    other = functools.reduce(combine, others)
    if received[0].source > received[0].target:
        return before, combine(block, other)
    if received[0].joined:
        block = combine(other, block)
    return (other if before is None else combine(other, before)), block
