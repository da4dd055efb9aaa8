"""What ``auto`` means for a recurrence on this machine.

On a host it compares how many workers each way keeps busy. On a device it predicts how long each takes, by one model
for both passes, called one by one or captured in a graph: nodes have a price, and so has a step that waits for the one
before it, and a chunk that is looked after.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import itemgetter
from typing import NamedTuple

import torch

from ...runtime import multiprocessors, on_device, thread_count
from ..boundaries_cuda import StepTimes, group_length
from ..prices import NODES, PRICES, Nodes, Prices
from ..sequences import Sequences
from .chunked import device_chunk
from .recurrence import Choice

#: Runs of up to 32 elements that one multiprocessor has under way at once: fewer leave it idle, more wait.
RUNS = 8
#: The steps of a chunk on a device: in fewer a state is not forgotten, more leave less to do side by side.
SHORTEST, LONGEST = 64, 512
#: Up to so many steps a pass over small states is one launch: of a chunk for each of a block's warps.
ONE_LAUNCH = 2048


class RecurrenceSize(NamedTuple):
    """A recurrence on a device: steps, samples and elements of a state, gates of a step, and multiprocessors."""

    time: int
    batch: int
    size: int
    gates: int
    processors: int

    @property
    def together(self) -> int:
        """Runs that are under way at once."""
        return max(1, self.processors * RUNS // -(-self.size // 32))

    def reason(self, predicted: Mapping[str, float]) -> str:
        """Why the fastest of some ways was chosen, by the microseconds that each is predicted to take."""
        ways = ", ".join(f"{name} {time:,.0f} µs" for name, time in sorted(predicted.items(), key=itemgetter(1)))
        sizes = f"{self.batch} samples of {self.time} steps and {self.size} elements"
        return f"{sizes} on {self.processors} multiprocessors, predicted: {ways}"

    def waves(self, runs: int) -> float:
        """How many times as long a step takes where each sample has so many runs side by side."""
        return max(1.0, self.batch * runs / self.together)

    def step_price(self, prices: Prices) -> float:
        """Microseconds of a step."""
        return prices.step + prices.gate * self.gates

    def chunk(self, method: str, prices: Prices) -> int:
        """The steps of a chunk that take the least time: longer ones take longer, more of them are more to look after.

        With steps of price `p`, places of price `q` and `s` sweeps over all steps, ``s p chunk + q time / chunk`` is
        least at ``chunk² = q time / (s p)``. All chunks are to be under way at once.
        """
        together = -(-self.time * self.batch // self.together)
        if method == "chunked":
            return max(together, device_chunk(self.time, self.size, prices))
        sweeps, place = _SWEEPS[method], _place_price(method, prices)
        least = math.sqrt(place * self.time / (sweeps * self.step_price(prices)))
        return max(SHORTEST, min(LONGEST, max(round(least), together)))

    def microseconds(self, method: str, chunk: int, nodes: Nodes, prices: Prices, *, captured: bool) -> float:
        """The predicted time of a pass by a method; one of ``chunked`` with diagonal matrices is ``diagonal``."""
        places, count = -(-self.time // chunk), getattr(nodes, "chunked" if method == "diagonal" else method)
        if method == "chunked":
            times = StepTimes.of(self.size, prices)
            length = places if nodes.walk_levels == 1 else group_length(places, self.size, prices)
            kernels = times.compose * chunk * self.waves(places) + times.walks(places, length)
        else:
            steps = _SWEEPS[method] * chunk * self.waves(places) * self.step_price(prices)
            kernels = steps + _place_price(method, prices) * places
        return _overlapped(count, kernels, prices, captured=captured)


#: How often methods take all steps.
_SWEEPS = {"sequential": 1, "relaxed": 2, "diagonal": 3}


def _place_price(method: str, prices: Prices) -> float:
    """Microseconds of a chunk beside its steps; diagonals of eight chunks are read at a time."""
    return {"sequential": 0.0, "relaxed": prices.place, "diagonal": prices.walk / 8}[method]


def _overlapped(nodes: int, kernels: float, prices: Prices, *, captured: bool) -> float:
    """The time of nodes and of what their kernels do; called one by one, the host launches while the device works."""
    on_device = nodes * prices.node + kernels
    return on_device if captured else max(nodes * prices.launch, on_device)


def way_in_chunks(time: int, chunk: int, warps: int) -> Choice:
    """Guesses in chunks of so many steps, where a block has so many warps; step after step where there is one chunk."""
    places = -(-time // chunk)
    return Choice("relaxed", chunk, swept=places > warps) if places > 1 else Choice("sequential", time)


def choose_small(work: RecurrenceSize, warps: int) -> Choice:
    """What ``auto`` is for small states, where a block has so many warps, called one by one or captured in a graph.

    Examples
    --------
    >>> choices = [choose_small(RecurrenceSize(time, 16, 20, 1, 132), 8) for time in (30_000, 1000, 50)]
    >>> [(choice.name, choice.chunk, choice.swept) for choice in choices]
    [('relaxed', 455, True), ('relaxed', 125, False), ('sequential', 50, False)]
    """
    blocks = -(-work.batch // work.processors)
    prices, step, ways = PRICES, work.step_price(PRICES), dict[Choice, float]()

    def add(way: Choice, nodes: int, kernels: float) -> None:
        ways[way] = _overlapped(nodes, kernels, prices, captured=False)

    add(Choice("sequential", work.time), 1, work.time * work.waves(1) * step)
    for count in range(2, warps + 1):
        chunk = -(-work.time // count)
        if chunk >= SHORTEST:
            # The block's warps share a multiprocessor, which the blocks of other samples may wait for.
            waves = max(1.0, blocks * count / RUNS)
            add(Choice("relaxed", chunk), 1, 2 * chunk * waves * step + prices.place_in_block * count)
    if work.time > ONE_LAUNCH:
        chunk = work.chunk("relaxed", prices._replace(place=prices.place_in_block))
        places = -(-work.time // chunk)
        kernels = 2 * chunk * work.waves(places) * step + prices.place_in_block * places * blocks
        add(Choice("relaxed", chunk, swept=True), 2, kernels)
    predicted: dict[str, float] = {}
    for way, time in ways.items():
        predicted[way.name] = min(time, predicted.get(way.name, math.inf))
    return min(ways, key=ways.__getitem__)._replace(reason=work.reason(predicted))


def choose(
    sequences: Sequences, size: int, like: torch.Tensor, chunk: int, *, gates: int = 0, guesses: bool = True,
    diagonal: bool = False,
) -> Choice:  # fmt: skip
    """The solver for sequences of states of `size` elements, where `like` is.

    Parameters
    ----------
    sequences : Sequences
        The steps.
    size : int
        Elements of a state.
    like : Tensor
        A tensor on the device on which the recurrence runs.
    chunk : int
        Steps of a chunk on the host.
    gates : int
        Of a step.
    guesses : bool
        Whether to choose between sequential and relaxed, because states are forgotten and can be guessed; if not,
        between sequential and chunked.
    diagonal : bool
        Whether matrices are diagonal.
    """
    time, batch = sequences.time, sequences.batch
    if on_device(like):
        work = RecurrenceSize(time, batch, size, max(1, gates), multiprocessors(like.device))
        return choose_on_device(work, guesses=guesses, diagonal=diagonal)
    workers = thread_count()
    if guesses:
        sizes = f"{batch} samples of {time} steps on {workers} workers"
        name, why = _guesses(time, sequences.whole(1).blocks, workers, chunk)
    else:
        sizes = f"{batch} samples of {time} steps and {size} elements on {workers} workers"
        name, why = _chunks(time, batch, 1 if diagonal else size, workers, chunk)
    return Choice(name, chunk, reason=f"{sizes}: {why}")


def _guesses(time: int, blocks: int, workers: int, chunk: int) -> tuple[str, str]:
    """The solver of so many blocks of samples on the host, where states may be guessed, and why it is that one."""
    # Two sweeps over chunks that fill all workers, against one over samples that may not.
    if 2.5 * blocks >= workers * math.ceil(blocks / workers):
        return "sequential", "too few are idle to pay for a second sweep"
    if time < 4 * chunk:
        return "sequential", f"fewer than 4 chunks of {chunk} steps"
    return "relaxed", "the samples alone leave some idle"


def _chunks(time: int, batch: int, rows: int, workers: int, chunk: int) -> tuple[str, str]:
    """As `_guesses`, where chunks are composed, whose matrices have so many rows."""
    # Of each chunk, n unit vectors, a zero vector and finally one state are propagated. Handing this to several workers
    # has a cost, which a clear gain has to cover.
    linearly, in_chunks = math.ceil(batch / workers), batch * (rows + 2) / workers
    if 2 * in_chunks >= linearly:
        return "sequential", f"too few for chunks, which take {rows + 2} vectors through each step"
    if time < 4 * workers * chunk:
        return "sequential", f"fewer than 4 chunks of {chunk} steps for each"
    return "chunked", f"enough for chunks, which take {rows + 2} vectors through each step"


def choose_on_device(work: RecurrenceSize, *, guesses: bool = True, diagonal: bool = False) -> Choice:
    """As `choose`, for a device.

    A graph that is captured runs what was run before it: both are chosen as eager calls.

    Examples
    --------
    >>> choose_on_device(RecurrenceSize(30_000, 16, 20, 1, 132))[:2]
    ('relaxed', 455)
    >>> choose_on_device(RecurrenceSize(200, 16, 20, 1, 132)).name
    'sequential'
    """
    method = "relaxed" if guesses else "diagonal" if diagonal else "chunked"
    chunk = work.chunk(method, PRICES)
    steps = {method: chunk, "sequential": work.time}
    predicted = {name: work.microseconds(name, each, NODES, PRICES, captured=False) for name, each in steps.items()}
    name = "relaxed" if guesses else "chunked"
    reason = work.reason({name: predicted[method], "sequential": predicted["sequential"]})
    return Choice("sequential" if predicted[method] >= predicted["sequential"] else name, chunk, reason=reason)
