"""The prices by which ``auto`` predicts how long a recurrence takes on a GPU, fitted to measured rows."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jacsparse.recurrence import NODES, PRICES, Nodes, Prices, RecurrenceSize

from ._calls import GRAPH
from ._recurrent import GATES
from ._rows import Row

#: A workload, as headings name it.
_GROUP = re.compile(r"(?P<kind>RNN|GRU|LSTM), T = (?P<time>[\d,]+), B = (?P<batch>\d+), H = (?P<size>\d+)")
#: The prices that are fitted to times.
_FITTED = ("node", "step", "gate", "place", "walk", "compose")
#: Multiprocessors of an H100 and an H200.
_PROCESSORS = 132
#: Steps of a chunk where the name of a schedule has no number.
_CHUNK = 128
#: Prices of a place that are tried, in microseconds.
_PLACES = tuple(np.geomspace(0.1, 3.0, 60).round(3).tolist())


class Observation(NamedTuple):
    """A measured pass of a recurrent layer, captured in a graph."""

    #: What it may be compared with: the workload and the pass.
    case: tuple[str, str]
    work: RecurrenceSize
    method: str
    chunk: int
    microseconds: float
    #: Whether all steps were taken: gradients of a last state alone vanish before they are.
    whole: bool

    def predicted(self, nodes: Nodes, prices: Prices) -> float:
        """As `RecurrenceSize.microseconds`."""
        return self.work.microseconds(self.method, self.chunk, nodes, prices, captured=True)


def observations(rows: Iterable[Row], auto: Callable[[int, int], int] | None = None) -> list[Observation]:
    """The passes among rows of experiments whose way is known from their labels.

    Those of ``auto`` are known where its relaxed backward passes had a chunk for the steps and samples. Two chunks are
    hardly side by side, and left out.
    """
    passes = []
    for row in rows:
        data, part = row.data, row.data.get("part", "")
        forward, backward = part == "forward", part.startswith("backward")
        if row.median is None or row.role != "ours" or data.get("mode") != GRAPH or not (forward or backward):
            continue
        name, _, number = data["layer"].removeprefix("jacsparse").strip().partition(":")
        method = {"parallel": "relaxed"}.get(name, name)
        of_auto = backward and not method and auto is not None and "sequential" not in row.note
        if not of_auto and method not in ("sequential", "relaxed") and (forward or method != "chunked"):
            continue
        sizes = _GROUP.search(row.group)
        if sizes is None:
            continue
        time, batch, size = (int(sizes[name].replace(",", "")) for name in ("time", "batch", "size"))
        work = RecurrenceSize(time, batch, size, GATES[sizes["kind"]], _PROCESSORS)
        if of_auto and auto is not None:
            method, number = "relaxed", str(auto(time, batch))
        chunk = time if method == "sequential" else min(time, int(number or _CHUNK))
        if method == "relaxed" and time < 3 * chunk:
            continue
        whole = forward or part == "backward of all"
        passes.append(Observation((row.group, part), work, method, chunk, 1e6 * row.median, whole))
    return passes


def fitted(passes: Sequence[Observation], nodes: Nodes = NODES) -> Prices:
    """The prices with the least squares of relative errors, none of which is negative; ValueError for too few passes.

    A place's price also says that a state is forgotten in a long chunk rather than in a short one. It is the one by
    which the fastest ways are found; of several, the middle one.
    """
    from scipy.optimize import nnls

    whole = [each for each in passes if each.whole]
    if len(whole) <= len(_FITTED):
        raise ValueError(
            f"{len(whole)} passes that take all steps were measured, too few for {len(_FITTED)} prices; give results "
            "of recurrent layers on a GPU, such as rnn_sensitivity and parallel_forward"
        )
    times = np.array([each.microseconds for each in whole])
    terms = np.array([[*_terms(each, nodes).values(), *_rows(each)] for each in whole])
    # What grows with the elements of a state has no price that is fitted.
    free = PRICES._replace(**dict.fromkeys(_FITTED, 0.0))
    fixed = np.array([each.predicted(nodes, free) for each in whole])
    amounts, _ = nnls(terms / times[:, None], 1 - fixed / times)
    prices = PRICES._replace(**dict(zip(_FITTED, map(float, amounts), strict=False)))
    slowest = {price: worst_choice(passes, nodes, prices._replace(place=price)) for price in _PLACES}
    best = [price for price, ratio in slowest.items() if ratio <= min(slowest.values()) * 1.0001]
    return prices._replace(place=best[len(best) // 2])


def _terms(each: Observation, nodes: Nodes) -> dict[str, float]:
    """How often a pass pays each price that is fitted: predicted times are linear in these."""
    free = PRICES._replace(**dict.fromkeys(_FITTED, 0.0))
    nothing = each.predicted(nodes, free)
    # Groups of a walk are those of the prices that are known.
    return {name: each.predicted(nodes, free._replace(**{name: 1.0})) - nothing for name in _FITTED}


def _rows(each: Observation) -> tuple[float, float]:
    """What all ways have in common, products of all rows, and what matrices of chunks take for each."""
    rows = each.work.time * each.work.batch / 1000
    return rows * each.work.gates, rows * (each.method == "chunked")


def worst_choice(passes: Sequence[Observation], nodes: Nodes, prices: Prices) -> float:
    """How many times as long as the fastest way the predicted one takes, at most, where three or more are known."""
    cases = defaultdict(list)
    for each in passes:
        cases[each.case].append(each)
    worst = 1.0
    for ways in cases.values():
        if len({(each.method, each.chunk) for each in ways}) >= 3:
            chosen = min(ways, key=lambda each: each.predicted(nodes, prices))
            worst = max(worst, chosen.microseconds / min(each.microseconds for each in ways))
    return worst


def errors(passes: Sequence[Observation], nodes: Nodes, prices: Prices) -> float:
    """The median of the predicted times' relative errors, where all steps were taken."""
    ratios = [abs(math.log(each.predicted(nodes, prices) / each.microseconds)) for each in passes if each.whole]
    return math.expm1(float(np.median(ratios)))
